"""Sends a finished model folder to the Hub: checks it, sends its files in one commit, tags the commit."""

import contextlib
import copy
import hashlib
import json
import logging
import re
import shlex
import threading
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, constants
from huggingface_hub.errors import (
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer

from d2l_bert import folders
from d2l_bert.errors import UserError
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RUN_FILE, auto_class, quoted, read_card
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.folder_rules import CODE, check_folder
from d2l_bert.model_cards.metadata import read_metadata
from d2l_bert.model_cards.release_record import RELEASE_FILE
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.saving import AUTO_MAP
from d2l_bert.tokenization.wordpiece import pieces


logger = logging.getLogger(__name__)


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
)
PUBLISHED = (*WRITTEN, "LICENSE*", "*.png", "*.jpg", "*.svg")

AGAIN = "files that have arrived are kept: run the same command again to complete the upload"

HOMES = re.compile(
    r"(?<![\w.])(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[\w.-]+"
)  # home folders of Linux, macOS and Windows

BINARY_SUFFIXES = (".safetensors", ".png", ".jpg")


def publish(folder: Path, repo_id: str, config: PublishConfig) -> str:
    """
    Send a model folder to the Hub.

    Args:
        folder: the output of `pretrain`, or any folder with a d2l-bert model and its tokenizer. If the folder has no
            card, a card is written.
        repo_id: `owner/name`, or `name` for a repository of the token's account.

    Returns:
        A message for the user: the page's address and how to load the model; on a dry run, the files to send.

    Raises:
        UserError: the folder fails a check, or the options contradict each other: then nothing was sent. Or the Hub
            cannot be reached, or refuses a request: then the same call can be repeated, and completes the upload.
    """
    config.check()
    check_repo_id(repo_id)
    if config.public and config.create_pr:
        raise UserError(
            "a pull request (create_pr) makes no repository public; leave public out, or publish without create_pr"
        )
    check_folder(folder, config.changed_code, config.license)
    files, tag = outgoing(folder, config)
    name = folder.resolve().name
    if config.dry_run:
        if config.public:
            warn_on_dry_run(repo_id)
        return listing(folder, with_repository_in_card(files, name, repo_id, tag or config.revision))
    return send(files, tag, name, repo_id, config)


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` if the Hub does not allow the name of the repository."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise UserError(f"{repo_id!r} cannot be a repository: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The files to send


def outgoing(folder: Path, config: PublishConfig) -> tuple[dict[str, Path | bytes], str | None]:
    """
    The files to send.

    Some files differ from those in the folder: config.json gets `auto_map`, run_config.json loses its paths, and a
    vocab.txt is added, which Transformers 5 does not write.

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
    files["config.json"] = _json(settings)
    classes = read(files["tokenizer_config.json"]).replace(b'"TokenizersBackend"', b'"PreTrainedTokenizerFast"')
    files["tokenizer_config.json"] = classes  # Transformers 4 does not know TokenizersBackend
    if "vocab.txt" not in files:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        files["vocab.txt"] = "".join(f"{piece}\n" for piece in pieces(tokenizer)).encode()
    if record:
        files[RUN_FILE] = _json(without_paths(record))
    files[CARD_FILE] = read_card(folder, config.license)[0].encode()
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


def read(content: Path | bytes) -> bytes:
    """The bytes of a file, given as a path or as content."""
    return content if isinstance(content, bytes) else content.read_bytes()


def read_object(files: dict[str, Path | bytes], name: str) -> dict:
    """The content of a JSON file in `files`; an empty dict if `files` does not have the file."""
    return json.loads(read(files[name])) if name in files else {}


def _json(content):
    return (json.dumps(content, indent=2) + "\n").encode()


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

    The model's name is replaced after `from_pretrained(`, `model=` and `d2l-bert convert `, and nowhere else. Names of
    the model are: the name of the folder, the names in the card's metadata (`model-index`), its headings of the first
    level, and repositories that the card pins to an automatic tag (`model-...`), where the model was published before.

    `from_pretrained("<repo_id>", trust_remote_code=True` gets the revision, so that it runs the code of this commit; a
    revision that is already there is replaced, or removed if `revision` is None.

    Args:
        name: the name of the folder.
        revision: the tag or branch to name in the examples; None for none.
    """
    card = files[CARD_FILE].decode()
    names = {name, *(model["name"] for model in read_metadata(card).get("model-index") or [])}
    names |= set(re.findall("^# (.+)$", card, re.MULTILINE))
    names |= set(re.findall(rf'from_pretrained\("([^"]+)", revision="{TAG}[0-9a-f]{{12}}"', card))
    for called in names:
        in_code = re.escape(quoted(called))
        card = re.sub(rf"(from_pretrained\(|model=){in_code}", rf'\1"{repo_id}"', card)
        card = re.sub(rf"(d2l-bert convert ){re.escape(shlex.quote(called))} ", rf"\1{repo_id} ", card)
    there = rf'(from_pretrained\("{re.escape(repo_id)}", )(?:revision="[^"]*", )?trust_remote_code=True'
    pinned = f'revision="{revision}", ' if revision else ""
    card = re.sub(there, rf"\1{pinned}trust_remote_code=True", card)
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


# ---------------------------------------------------------------------------------------------------------------------
# Sending


def send(files: dict[str, Path | bytes], tag: str | None, name: str, repo_id: str, config: PublishConfig) -> str:
    """
    Create the repository if it does not exist, send the files in one commit, and tag the commit.

    Each request can be repeated: files that are already in the repository are not sent again. The repository becomes
    public in the last request.

    Args:
        files, tag: what `outgoing` returned.
        name: the name of the folder.

    Returns:
        The page's address and how to load the model.

    Raises:
        UserError: the Hub cannot be reached, or refuses a request.
    """
    api = HfApi(library_name="d2l-bert", library_version=version("d2l-bert"))
    with hub_errors(repo_id):
        repo_id = full_repo_id(api, repo_id)
        check_datasets(api, files)
        if config.public:
            warn_of_earlier_commits(api, repo_id)
        api.create_repo(repo_id, private=True, exist_ok=True)
        info = api.model_info(repo_id)
        collection = config.collection and find_collection(api, repo_id, config)
        if config.revision and not config.create_pr:
            api.create_branch(repo_id, branch=config.revision, exist_ok=True)
        if config.revision:
            info = api.model_info(repo_id, revision=config.revision)
        commit = api.create_commit(
            repo_id,
            [
                *(
                    CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
                    for path, content in with_repository_in_card(files, name, repo_id, tag or config.revision).items()
                ),
                *(CommitOperationDelete(path) for path in left_over(info, files)),
            ],
            commit_message=config.commit_message or f"Model and card, by d2l-bert {version('d2l-bert')}",
            revision=config.revision,
            create_pr=config.create_pr,
        )
        if tag:
            api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
        if collection:
            api.add_collection_item(collection, repo_id, "model", exists_ok=True)
        is_private = info.private
        if is_private and config.public:  # last: if a request above fails, the repository stays private
            api.update_repo_settings(repo_id, private=False)
            is_private = False
    if config.create_pr:
        return f"proposed to {repo_id}: {commit.pr_url}"
    page = f"{api.endpoint}/{repo_id} ({'private' if is_private else 'public'})"
    return f"published: {page}\n{loading_lines(repo_id, tag or config.revision, read_object(files, 'config.json'))}"


def full_repo_id(api: HfApi, repo_id: str) -> str:
    """`owner/name` for a name, with the token's account as owner. Asks the Hub in any case, which checks the token."""
    account = api.whoami()["name"]
    return repo_id if "/" in repo_id else f"{account}/{repo_id}"


def warn_of_earlier_commits(api: HfApi, repo_id: str) -> None:
    """
    Log a warning if the repository exists and is private: publishing will show all its commits to everybody.

    Args:
        repo_id: `owner/name`.
    """
    with contextlib.suppress(RepositoryNotFoundError):
        if api.model_info(repo_id).private:
            logger.warning(
                f"{repo_id} is private: it is made public when the model is there, and then everybody can see the "
                f"earlier commits"
            )


def warn_on_dry_run(repo_id: str) -> None:
    """As `warn_of_earlier_commits`; if the Hub cannot be asked, warn that the repository may be private."""
    api = HfApi()
    try:
        with hub_errors(repo_id):
            warn_of_earlier_commits(api, full_repo_id(api, repo_id))
    except UserError:
        logger.warning(
            f"the Hub could not be asked: if {repo_id} exists and is private, everybody will see the earlier commits"
        )


def loading_lines(repo_id: str, revision: str | None, config: dict) -> str:
    """Three lines of Python that load this revision of the model without the package d2l_bert."""
    loader = auto_class(config)
    there = f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    return f"""\
  from transformers import {loader}, AutoTokenizer
  model = {loader}.from_pretrained({there}{code})
  tokenizer = AutoTokenizer.from_pretrained({there}{code})"""


def check_datasets(api: HfApi, files: dict[str, Path | bytes]) -> None:
    """Raise `UserError` if the card names a data set that the Hub lacks. Those that the run loaded are not checked."""
    named = read_metadata(files[CARD_FILE].decode()).get("datasets") or []
    loaded = read_object(files, RUN_FILE).get("data", {}).get("hub_datasets", [])
    for name in [named] if isinstance(named, str) else named:
        try:
            if name not in loaded:
                api.dataset_info(name)
        except RepositoryNotFoundError:
            raise UserError(
                f"{CARD_FILE}: datasets names {name}, which the Hub does not know; give its id there, or take it out"
            ) from None


def find_collection(api: HfApi, repo_id: str, config: PublishConfig) -> str:
    """The slug of the collection in the options; a title without a collection creates one."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+-[0-9a-f]{24}", config.collection):
        return api.get_collection(config.collection).slug
    owner = repo_id.partition("/")[0]
    return api.create_collection(config.collection, namespace=owner, private=not config.public, exists_ok=True).slug


def left_over(info: ModelInfo, files: dict[str, Path | bytes]) -> list[str]:
    """Files in the repository whose names this package writes (`is_written`) and which `files` does not have."""
    there = [file.rfilename for file in info.siblings or []]
    return [path for path in there if path not in files and is_written(path)]


def is_written(path: str) -> bool:
    """Whether the name of a file is in WRITTEN."""
    return any(fnmatchcase(path, pattern) for pattern in WRITTEN)


@contextlib.contextmanager
def hub_errors(repo_id: str, again: str = AGAIN) -> Iterator[None]:
    """
    Raise errors of the Hub, the network or the Hub's client as `UserError`, in one line with the mend.

    Args:
        again: the mend for errors after which the same request may succeed.
    """
    try:
        with retries_said_once():
            yield
    except (OSError, HTTPError, RuntimeError, KeyError, UnicodeEncodeError, json.JSONDecodeError) as error:
        # A failed upload is a RuntimeError whose cause may be any exception, as upload threads share a connection.
        is_upload = isinstance(error, RuntimeError) and "Error while uploading" in str(error)
        reason = (error.__cause__ if is_upload else None) or error
        line = explanation(reason, again)
        if line is None and is_upload:
            line = f"the connection broke during an upload ({reason}); {again}"
        if line is None:
            raise
        raise UserError(f"{repo_id}: {line}") from None


@contextlib.contextmanager
def retries_said_once() -> Iterator[None]:
    """Replace the client's log messages about repeated requests, which show internal addresses, by one line."""
    was_said = threading.Event()

    def pass_on(record):
        if "thrown while requesting" not in record.getMessage() and "Retrying in" not in record.getMessage():
            return True
        if not was_said.is_set():
            was_said.set()
            logger.warning(f"{constants.ENDPOINT} does not answer as it should; trying again for up to half a minute")
        return False

    client = logging.getLogger("huggingface_hub.utils._http")
    client.addFilter(pass_on)
    try:
        yield
    finally:
        client.removeFilter(pass_on)


def explanation(error: BaseException, again: str) -> str | None:
    """The reason and the mend for an error of the Hub's client; None if the error is none of the client's."""
    said = " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    log_in = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    if isinstance(error, LocalTokenNotFoundError):
        return f"no token for the Hub here; {log_in}"
    if isinstance(error, UnicodeEncodeError):
        return f"the token has characters that no token has; {log_in}"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so no request is sent; unset HF_HUB_OFFLINE to publish"
    if isinstance(error, RevisionNotFoundError):
        return f"the Hub has no such revision ({said}); a pull request needs an existing branch"
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"the Hub does not accept the token ({said}); {log_in}"
    if status == 403:
        return f"the token may not write there ({said}); give a repository of your own, or {log_in}"
    if status in (408, 412, 429):
        return f"the Hub asks to try again ({status}: {said}); {again}"
    if status is not None and status >= 500:
        return f"the Hub failed ({status}: {said}); {again}"
    if status is not None:
        return f"the Hub refuses ({status}: {said})"
    if isinstance(error, (KeyError, json.JSONDecodeError)):
        return f"{constants.ENDPOINT} does not answer like the Hub ({said}); check HF_ENDPOINT"
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return f"{constants.ENDPOINT} cannot be reached ({said}); {again}"
    return None
