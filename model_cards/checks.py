"""Checks a model folder before it is published: configuration, code, tokenizer, weights and card must agree."""

import contextlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote

import transformers

from d2l_bert.folders import content_hash
from d2l_bert.messages import UserError, explained, reading_model
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.markdown import without_code
from d2l_bert.modeling import configuration_d2l_bert, conversion, export, modeling_d2l_bert
from d2l_bert.modeling.records import Metrics, Release
from d2l_bert.records import read_record, values_in
from d2l_bert.tokenization.existing_tokenizers import check_inputs
from d2l_bert.tokenization.model_files import ConfigFile, check_within, read_config_file
from d2l_bert.tokenization.tokenizer_files import check_tokenizer_settings
from d2l_bert.tokenization.wordpiece import pieces, stock_tokenizer


# The Python files beside the weights of a d2l-bert model, by their names.
CODE = {Path(module.__file__).name: Path(module.__file__) for module in (configuration_d2l_bert, modeling_d2l_bert)}

# By the model type in config.json, the module of the model's class.
MODULES = {"d2l-bert": modeling_d2l_bert, "bert": transformers}

# The tokenizer classes that read tokenizer.json, by names that Transformers 4 and 5 both know.
STOCK_TOKENIZERS = ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast")

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
    cards.CARD_FILE,
    cards.CURVES_FILE,
    cards.RUN_FILE,
    cards.METRICS_FILE,
    cards.RELEASE_FILE,
    # files of a sentence-transformers model; its modules have folders such as 1_Pooling and 2_Dense
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    # files of `d2l-bert export`
    export.FLOAT,
    export.INT8,
)
PUBLISHED = (*WRITTEN, "LICENSE*", "*.png", "*.jpg", "*.svg")

# Paths that name folders of a machine. A word is what may stand between two slashes.
WORD = r"[\w.+@~%-]+"
OF_PEOPLE = r"home|[Uu]sers|scratch|cluster|lustre|gpfs|Volumes|mnt|media|root"
MACHINE_PATHS = (
    # below a home, a disk that was attached, a cluster's disk: /home/ada, /data/home/ada, /mnt/books
    rf"(?<![\w.~/-])(?:/{WORD}){{0,20}}/(?:{OF_PEOPLE})/+{WORD}",
    # such a folder itself: /scratch
    r"(?<![\w.~/<)\]-])/(?:root|scratch|mnt|cluster|lustre|gpfs)(?![\w/-]|\.\w)",
    # as an address: file:///books
    rf"\bfile:/+{WORD}",
    # below a home by a tilde: ~/books, ~ada/books; but not ~/.cache
    rf"(?<![\w~/])~\w*/(?!\.){WORD}",
    # on Windows: C:\books, C:/books
    rf"(?<![\w\\/])[A-Za-z]:[\\/]+{WORD}",
    # on a server of Windows: \\server\books, or in quotes, where each backslash is doubled: "\\\\server\\books"
    rf"(?<![\w\\])(?:\\{{2}}{WORD}\\|\\{{4}}{WORD}\\{{2}})[\w$]",
)

# Any other path from the root, of two words or more, such as /data/books; but not those that all machines have
# (/usr/lib), and addresses of web pages and services (/api/models), and examples (/path/to).
ELSEWHERE = r"usr|bin|sbin|lib\w*|etc|dev|proc|sys|boot|run|opt|var|api|v\d\w*|path|datasets|models|spaces"
# Not behind what an address begins with: https:/, [a link](, href=".
NOT_IN_AN_ADDRESS = r"""(?<![\w.~/<)\]*&%+-])(?<!\]\()(?<!href=["'])(?<!src=["'])"""
ANY_PATH = rf"{NOT_IN_AN_ADDRESS}/(?!(?:{ELSEWHERE})/)(?:[^\W\d]|\.){WORD}/{WORD}"

# Files without text, and vocabularies, which may have any word of the corpus.
WITHOUT_PATHS = (".safetensors", ".onnx", ".png", ".jpg", "tokenizer.json", "vocab.txt")


def published_files(folder: Path) -> dict[str, Path]:
    """
    The files of a folder whose names are in PUBLISHED, by their paths in it, in the order of these.

    Raises:
        UserError: one of them is a link that leads out of the folder, or no regular file.
    """
    paths = set()
    for pattern in PUBLISHED:
        paths.update(folder.glob(pattern))
    files = {}
    for path in sorted(paths):
        if path.is_symlink() or not path.is_dir():
            check_within(path, folder)
            files[path.relative_to(folder).as_posix()] = path
    return files


def refuse_links(folder: Path) -> None:
    """Raise `UserError` if a file to publish is a link that leads out of the folder, or no regular file."""
    published_files(folder)


def check_code(folder: Path):
    """
    Refuse a model that is neither of a d2l-bert class nor of stock BERT, and code that is not the installed package's.

    Returns:
        The configuration and the class of the model: Transformers' own for a stock BERT, which needs no code.
    """
    file = f"{folder}/config.json"
    content = read_config_file(folder)
    kind = content.get("model_type")
    if kind not in MODULES:
        found = f"names a {kind} model" if kind else "is missing, or names no model"
        raise UserError(
            f"{file}: {found}, not a d2l-bert or a bert one; give a folder of pretrain, or publish another model with "
            f"hf upload"
        )
    with reading_model(file):  # an entry of the wrong type raises one of several exceptions
        config = conversion.read_config(str(folder))
        name = config.architectures[0]
        model_class = getattr(MODULES[kind], name)
        if not issubclass(model_class, transformers.PreTrainedModel):
            raise UserError(f"{name} is no class of a model; save the model again")
    for entry in conversion.ENTRIES_OF_CODE:
        is_ours = kind == "d2l-bert" and entry == "auto_map"
        if content.get(entry) and not is_ours:
            raise UserError(
                f"{file}: {entry} names code, which those who load the model with trust_remote_code would run; take "
                f"{entry} out"
            )
    if kind == "d2l-bert":
        check_files_of_code(folder, content)
    return config, model_class


def check_files_of_code(folder: Path, content: dict) -> None:
    """
    Refuse a d2l-bert model without the two Python files of the installed package, or whose config.json names others.

    Args:
        content: of config.json.
    """
    save_again = "save the model with d2l_bert.modeling.conversion.save_model"
    if content.get("auto_map") != modeling_d2l_bert.AUTO_MAP:
        raise UserError(
            f"{folder}: config.json lacks classes in auto_map, which the Hub could not load, or names others; "
            f"{save_again}"
        )
    for name, ours in CODE.items():
        file = folder / name
        if not file.is_file() or file.read_bytes() != ours.read_bytes():
            raise UserError(
                f"{folder}: {name} is missing, or is not that of the installed d2l-bert {version('d2l-bert')}; "
                f"{save_again}, or publish code that you have changed with hf upload"
            )


def check_tokenizer(folder: Path, config: transformers.PreTrainedConfig) -> None:
    """
    Refuse a tokenizer that is missing, is not a stock class, or does not fit the model or vocab.txt.

    A model may have more entries than its tokenizer: many BERTs have a vocabulary padded to a multiple of 8 or 64.
    """
    way_out = "save the tokenizer that the model was trained with into the folder"
    settings = check_tokenizer_settings(folder)
    kind = settings.get("tokenizer_class")
    if kind not in STOCK_TOKENIZERS or settings.get("auto_map") or not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}/tokenizer_config.json: names no class of a WordPiece tokenizer that Transformers 4 and 5 know "
            f"({kind}; {' or '.join(STOCK_TOKENIZERS)}), or code by auto_map, or tokenizer.json is missing; {way_out}"
        )
    vocabulary = folder / "vocab.txt"
    # `tokenizers` raises plain Exceptions.
    with explained(f"{folder}: its tokenizer cannot be loaded", way_out, Exception):
        tokenizer = stock_tokenizer(str(folder))
        check_inputs(tokenizer, config.type_vocab_size)
        entries = pieces(tokenizer)
        beside = vocabulary.read_text(encoding="utf-8").split("\n")[:-1] if vocabulary.is_file() else entries
    of_tokenizer = f"{folder}: the tokenizer's"
    if len(entries) > config.vocab_size:
        raise UserError(
            f"{of_tokenizer} {len(entries)} tokens are more than the model's vocab_size, {config.vocab_size}; "
            f"{way_out}"
        )
    if tokenizer.pad_token_id != config.pad_token_id:
        raise UserError(
            f"{of_tokenizer} pad_token_id {tokenizer.pad_token_id} is not that of the model, {config.pad_token_id}; "
            f"{way_out}"
        )
    if entries != beside:
        raise UserError(f"{of_tokenizer} tokens are not those of vocab.txt; {way_out}")


def check_weights(folder: Path, config: transformers.PreTrainedConfig, model_class) -> None:
    """
    Refuse weights that are missing, damaged, not finite, or not those of the model in config.json; and what belongs to
    other weights: ONNX files, the record of a release; and a part of a sentence-transformers model as a pickle.
    """
    with reading_model(str(folder)):
        _, missing, unexpected = conversion.load_and_compare(
            model_class, str(folder), config=config, use_safetensors=True
        )
    differing = sorted(missing | unexpected)
    if differing:
        raise UserError(
            f"{folder}: the weights and the model of config.json differ ({differing[0]} is in one of both); save the "
            f"model there again"
        )
    for path in folder.glob("[0-9]_*/*.bin"):
        raise UserError(
            f"{folder}: {path.relative_to(folder)} is a pickle, which is not published; save the model again with "
            f"sentence-transformers, as safetensors"
        )
    release = read_record(folder / cards.RELEASE_FILE, Release)
    if release and release.get("weights_sha256") != content_hash(folder / "model.safetensors"):
        raise UserError(
            f"{folder}: {cards.RELEASE_FILE} was written for other weights; make the release again, or delete "
            f"{cards.RELEASE_FILE} and {cards.CARD_FILE}"
        )
    check_onnx(folder)


def check_onnx(folder: Path) -> None:
    """Refuse ONNX files that are damaged, or that are not those of the folder's weights."""
    metrics = read_record(folder / cards.METRICS_FILE, Metrics, allow_nan=True)
    again = "export the model again, or delete the folder onnx"
    for name in (export.FLOAT, export.INT8):
        file = folder / name
        if not file.exists():
            continue
        # ONNX Runtime raises exceptions of its own; and a record of others may lack an entry.
        with explained(f"{file}: cannot be checked", f"{again}; pip install 'd2l-bert[onnx]'", Exception):
            model, *_ = export.read_for_task(str(folder), metrics["export"]["task"])
            difference = conversion.largest_difference(model, export.OnnxModel(file, model.config))
            # The error of int8 was measured at the export. Twice that is allowed, as another processor may round
            # differently.
            bound = 1e-3 if name == export.FLOAT else 2 * metrics["export"]["files"][name]["difference"]
        if not difference <= bound:  # true for NaN, too
            raise UserError(f"{file}: its outputs differ from the model's by {difference:.1e}; {again}")


def check_card(folder: Path, license: str | None = None) -> None:
    """
    Refuse a card without a licence that the Hub knows, without its pictures, or with other figures than the folder's;
    and a text file that names a folder of a machine: it says something about this machine, or about who works there.

    The Hub checks the rest of the metadata, before the client sends any file.

    Args:
        license: replaces the licence in the card.
    """
    path = folder / cards.CARD_FILE
    card = cards.read_card(folder, license)
    expected = cards.card_of_records(folder)
    if not card.data.license:
        raise UserError(f"{path}: has no licence; give --license, such as apache-2.0")
    way_out = f"put back what belongs there, or delete {cards.CARD_FILE}, and it is written again"
    for name in local_pictures(card.text):
        picture = folder / name
        if not picture.is_file() or not picture.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path}: shows {name}, which is not in the folder; {way_out}")
    shown = {result.metric_name: result.metric_value for result in card.data.eval_results or []}
    for result in expected.data.eval_results or []:
        name = result.metric_name
        if name in shown and shown[name] != result.metric_value:
            raise UserError(
                f"{path}: says {name} {shown[name]}, and {cards.METRICS_FILE} says {result.metric_value}; {way_out}"
            )
    licenses = card.data.license if isinstance(card.data.license, list) else [card.data.license]
    with explained(path, "", UserError):
        for each in licenses:
            check_license(str(each))
    classes = (read_record(folder / "config.json", ConfigFile).get("id2label") or {}).values()
    for name, file in published_files(folder).items():
        if not name.endswith(WITHOUT_PATHS):
            refuse_paths(folder, file, classes)


def refuse_paths(folder: Path, file: Path, classes: Iterable[str] = ()) -> None:
    """
    Refuse a text file that names a folder of this machine, or one that looks like a folder of another.

    Args:
        classes: the model's classes. One may look like a path, as Freebase's relations do: /people/person/religion.

    Raises:
        UserError: the file names such a folder.
    """
    places = (folder.resolve(), folder.absolute(), Path.home())
    here = sorted({str(place) for place in places if place.parts[1:]})
    of_here = rf"(?<![\w.~-])(?:{'|'.join(map(re.escape, here))})(?![\w-])"
    of_machines = re.compile("|".join([of_here, *MACHINE_PATHS]))
    paths_as_classes = [name for name in classes if name.startswith("/")]
    for text in texts_in(file):
        without_classes = text
        for name in paths_as_classes:
            without_classes = without_classes.replace(name, " ")
        found = of_machines.search(text) or re.search(ANY_PATH, without_classes)
        if found:
            raise UserError(
                f"{file}: names a folder of this machine ({found[0]:.200}); remove the path before you publish"
            )


def texts_in(file: Path) -> Iterator[str]:
    """What a reader of a text file sees: the strings of JSON; Markdown with its escapes and without; the whole."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):
            yield from strings_in(json.loads(text))
            return
    yield text
    if file.suffix == ".md":
        yield unescaped(text)


def strings_in(content: object) -> Iterator[str]:
    """All strings of JSON, the names of entries among them."""
    for value in values_in(content):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value


# ---------------------------------------------------------------------------------------------------------------------
# Pictures in Markdown

# A picture in Markdown, such as ![A map [of 2020]](map.png) or ![](<a map.png>).
PICTURE_IN_MARKDOWN = re.compile(
    r"""
    (?<!\\)(?:\\\\)*     # no backslash before the !, or an even number: it is not escaped
    !\[
    (?:                   # the caption
        [^\[\]\\]
        | \\.             # an escaped character
        | \[ (?: [^\[\]\\] | \\. )* \]       # brackets, in pairs
    )*
    \]
    \(\s*
    (?:                   # the address
        <([^<>\n]*)>                                     # between < and >
        | ( (?: [^\s()\\] | \\. | \([^\s()]*\) )+ )     # or without: then parentheses come in pairs
    )
    """,
    re.DOTALL | re.VERBOSE,
)


def unescaped(text: str) -> str:
    """Markdown without its backslashes before signs, and with characters for entities."""
    return html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text))


def local_pictures(text: str) -> list[str]:
    """The names of the pictures that a Markdown text shows from its own folder."""
    found = PICTURE_IN_MARKDOWN.findall(without_code(text))
    addresses = [unescaped(between or plain) for between, plain in found]
    return [unquote(address) for address in addresses if not re.match(r"[A-Za-z][\w+.-]*:|//|#", address)]
