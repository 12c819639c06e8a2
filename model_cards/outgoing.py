"""The files of a model folder as they are sent to the Hub: which, without this machine's paths, and their tag."""

import copy
import hashlib
import json
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from d2l_bert import folders
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RELEASE_FILE, RUN_FILE, quoted, read_card
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.folder_rules import CODE
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import AUTO_MAP
from d2l_bert.modeling.export import FLOAT, INT8
from d2l_bert.tokenization.wordpiece import pieces, settings_of_both_versions


TAG = "model-"  # the tag of a commit is this and 12 digits of a hash of the files

# Only files with a name in PUBLISHED are sent: those that this package writes, and those that an edited card may
# show or mention. A file with a name in WRITTEN that an earlier commit has and this one lacks is deleted.
WRITTEN = (
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    *CODE,
    CARD_FILE,
    CURVES_FILE,
    RUN_FILE,
    METRICS_FILE,
    RELEASE_FILE,
    # files of a sentence-transformers model
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    # files of `d2l-bert export`
    FLOAT,
    INT8,
)
PUBLISHED = (*WRITTEN, "LICENSE*", "*.png", "*.jpg", "*.svg")

HOMES = re.compile(
    r"(?<![\w.])(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[\w.-]+"
)  # home folders of Linux, macOS and Windows

BINARY_SUFFIXES = (".safetensors", ".onnx", ".png", ".jpg")


def outgoing(folder: Path, config: PublishConfig) -> tuple[dict[str, Path | bytes], str | None]:
    """
    The files to send.

    Some files differ from those in the folder: config.json gets `auto_map`, run_config.json loses its paths,
    tokenizer_config.json gets names that Transformers 4 knows, and a vocab.txt is added, which version 5 does not
    write.

    Returns:
        Paths or contents by the name in the repository; and the tag of the commit, which depends on the contents only,
        or None for a pull request.

    Raises:
        UserError: a file names a folder of this machine.
    """
    files = {path.relative_to(folder).as_posix(): path for path in published_files(folder)}
    settings = folders.read_json(folder / "config.json")
    if settings["model_type"] == D2lBertConfig.model_type:
        settings["auto_map"] = AUTO_MAP
    record = folders.read_json(folder / RUN_FILE)
    files["config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    of_tokenizer = folders.read_json(folder / "tokenizer_config.json")
    if (of_both := settings_of_both_versions(of_tokenizer)) != of_tokenizer:
        files["tokenizer_config.json"] = (json.dumps(of_both, indent=2, ensure_ascii=False) + "\n").encode()
    if "vocab.txt" not in files:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        files["vocab.txt"] = "".join(f"{piece}\n" for piece in pieces(tokenizer)).encode()
    if record:
        files[RUN_FILE] = (json.dumps(without_paths(record), indent=2) + "\n").encode()
    files[CARD_FILE] = read_card(folder, config.license).content.encode()
    check_private(folder, files, record)
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {hashlib.sha256(read(files[name])).hexdigest()}\n".encode())
    tag = None if config.create_pr else f"{TAG}{digest.hexdigest()[:12]}"
    return dict(sorted(files.items())), tag


def published_files(folder: Path) -> list[Path]:
    """The files of a folder whose names are in PUBLISHED, sorted by path."""
    paths = {path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in paths if is_written(path.relative_to(folder).as_posix()) or not path.is_symlink())


def is_written(path: str) -> bool:
    """Whether the name of a file is in WRITTEN."""
    return any(fnmatchcase(path, pattern) for pattern in WRITTEN)


def read(content: Path | bytes) -> bytes:
    """The bytes of a file, given as a path or as content."""
    return content if isinstance(content, bytes) else content.read_bytes()


def without_paths(record: dict) -> dict:
    """run_config.json as published: paths become base names, `fingerprints` has the fingerprints of the files read."""
    record = copy.deepcopy(record)
    paths = record.pop("local_paths", {})

    def without(value):
        if isinstance(value, dict):
            return {name: without(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [without(entry) for entry in value]
        if isinstance(value, str) and value in paths:
            return paths[value]["name"]
        if isinstance(value, str) and re.match(r"~?[/\\]\S|[A-Za-z]:[\\/]", value):
            return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
        return value

    fingerprints = [path for path in paths.values() if path["fingerprint"]]
    return {**without(record), **({"fingerprints": fingerprints} if fingerprints else {})}


def check_private(folder: Path, files: dict[str, Path | bytes], record: dict) -> None:
    """Raise `UserError` if a text file names a folder of this machine, or any home folder."""
    folders_here = {folder.resolve(), folder.absolute(), Path.home()}
    folders_here |= {Path(path).absolute() for path in record.get("local_paths", {})}
    known = [
        str(path) for path in sorted(folders_here, reverse=True) if len(path.parts) > 1
    ]  # subfolders before their parents
    known += [escaped for path in known if (escaped := json.dumps(path)[1:-1]) != path]  # escaped as in JSON
    for name, content in files.items():
        if name in ("tokenizer.json", "vocab.txt") or name.endswith(BINARY_SUFFIXES):
            continue  # a vocabulary may have any word of the corpus
        text = read(content).decode(errors="replace")
        for path in (*known, *(home[0] for home in HOMES.finditer(text))):
            if re.search(rf"(?<![\w.~-]){re.escape(path)}(?![\w-])", text):
                raise UserError(
                    f"{folder / name}: names a folder of this machine ({path}); remove the path before you publish"
                )


def with_repository_in_card(
    files: dict[str, Path | bytes], name: str, repo_id: str, revision: str | None
) -> dict[str, Path | bytes]:
    """
    The files to send, with a card whose examples load the model from `repo_id`.

    The model's name is replaced after `from_pretrained(`, `model=`, `pipeline("task", ` and `d2l-bert convert `, and
    nowhere else. Names of the model are: the name of the folder, the names in the card's metadata (`model-index`), its
    headings of the first level, and repositories that the card pins to an automatic tag (`model-...`), where the model
    was published before.

    `from_pretrained("<repo_id>", trust_remote_code=True` gets the revision, so that it runs the code of this commit; a
    revision that is already there is replaced, or removed if `revision` is None.

    Args:
        name: the name of the folder.
        revision: the tag or branch to name in the examples; None for none.
    """
    card = files[CARD_FILE].decode()
    names = {name, ModelCard(card).data.model_name or name}
    names |= set(re.findall("^# (.+)$", card, re.MULTILINE))
    names |= set(re.findall(rf'from_pretrained\("([^"]+)", revision="{TAG}[0-9a-f]{{12}}"', card))
    for called in names:
        in_code = re.escape(quoted(called))
        card = re.sub(rf"(from_pretrained\(|model=|pipeline\(\"[\w-]+\", ){in_code}", rf'\g<1>"{repo_id}"', card)
        card = re.sub(rf"(d2l-bert convert ){re.escape(shlex.quote(called))} ", rf"\g<1>{repo_id} ", card)
    there = rf'(from_pretrained\("{re.escape(repo_id)}", )(?:revision="[^"]*", )?trust_remote_code=True'
    pinned = f'revision="{revision}", ' if revision else ""
    card = re.sub(there, rf"\g<1>{pinned}trust_remote_code=True", card)
    return {**files, CARD_FILE: card.encode()}


def listing(folder: Path, files: dict[str, Path | bytes]) -> str:
    """The output of a dry run: the files to send, with sizes, and the names of the files that stay."""
    sizes = {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size for name, content in files.items()
    }
    lines = [f"  {size:>13,} bytes  {name}" for name, size in sizes.items()]
    lines.append(f"  {sum(sizes.values()):>13,} bytes in {len(sizes)} files would be sent; nothing was")
    tops = {name.partition("/")[0] for name in files}
    if stays := sorted(path.name for path in folder.iterdir() if path.name not in tops):
        lines.append(f"stays here: {', '.join(stays)}")
    return "\n".join(lines)
