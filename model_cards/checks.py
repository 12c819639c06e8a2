"""Checks a model folder before it is published: configuration, code, tokenizer, weights and card must agree."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import transformers

from d2l_bert.folders import content_hash
from d2l_bert.messages import UserError, explained, reading_model, refuse_first
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.config import check_license
from d2l_bert.modeling import configuration_d2l_bert, conversion, export, modeling_d2l_bert
from d2l_bert.modeling.records import Metrics, Release
from d2l_bert.records import read_record
from d2l_bert.tokenization.model_files import check_tokenizer_settings, check_within, read_config_file
from d2l_bert.tokenization.wordpiece import pieces, stock_tokenizer


CODE = {Path(module.__file__).name: Path(module.__file__) for module in (configuration_d2l_bert, modeling_d2l_bert)}

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

# Home folders of Linux, macOS and Windows.
HOMES = r"(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[\w.-]*\w"

# Files without text, and vocabularies, which may have any word of the corpus.
WITHOUT_PATHS = (".safetensors", ".onnx", ".png", ".jpg", "tokenizer.json", "vocab.txt")


def published_files(folder: Path) -> dict[str, Path]:
    """
    The files of a folder whose names are in PUBLISHED, by their paths in it, in the order of these.

    Raises:
        UserError: one of them is a link that leads out of the folder, or no regular file.
    """
    files = {}
    for path in sorted({path for pattern in PUBLISHED for path in folder.glob(pattern)}):
        if path.is_symlink() or not path.is_dir():
            check_within(path, folder)
            files[path.relative_to(folder).as_posix()] = path
    return files


def check_code(folder: Path):
    """
    Refuse a model that is neither of a d2l-bert class nor of stock BERT, and code that is not the installed package's.

    Returns:
        The configuration and the class of the model: Transformers' own for a stock BERT, which needs no code.
    """
    content, save_again = read_config_file(folder), "d2l_bert.modeling.conversion.save_model"
    kind, modules = content.get("model_type"), {"d2l-bert": modeling_d2l_bert, "bert": transformers}
    if kind not in modules:
        raise UserError(
            f"{folder}/config.json: {f'names a {kind} model' if kind else 'is missing, or names no model'}, not a "
            f"d2l-bert or a bert one; give a folder of pretrain, or publish another model with hf upload"
        )
    with reading_model(f"{folder}/config.json"):  # an entry of the wrong type raises one of several exceptions
        config = conversion.read_config(str(folder))
        model_class = getattr(modules[kind], config.architectures[0])
        if not issubclass(model_class, transformers.PreTrainedModel):
            raise UserError(f"{config.architectures[0]} is no class of a model; save the model again")
    for entry in conversion.ENTRIES_OF_CODE:
        if content.get(entry) and (kind, entry) != ("d2l-bert", "auto_map"):
            raise UserError(
                f"{folder}/config.json: {entry} names code, which those who load the model with trust_remote_code "
                f"would run; take {entry} out"
            )
    if kind == "d2l-bert":
        if content.get("auto_map") != conversion.AUTO_MAP:
            raise UserError(
                f"{folder}: config.json lacks classes in auto_map, which the Hub could not load, or names others; "
                f"save the model with {save_again}"
            )
        for name, ours in CODE.items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != ours.read_bytes():
                raise UserError(
                    f"{folder}: {name} is missing, or is not that of the installed d2l-bert {version('d2l-bert')}; "
                    f"save the model with {save_again}, or publish code that you have changed with hf upload"
                )
    return config, model_class


def check_tokenizer(folder: Path, config: transformers.PreTrainedConfig) -> None:
    """
    Refuse a tokenizer that is missing, is not a stock class, or does not fit the model or vocab.txt.

    A model may have more entries than its tokenizer: many BERTs have a vocabulary padded to a multiple of 8 or 64.
    """
    way_out = "save the tokenizer that the model was trained with into the folder"
    settings, vocabulary = check_tokenizer_settings(folder), folder / "vocab.txt"
    kind = settings.get("tokenizer_class")
    if kind not in STOCK_TOKENIZERS or settings.get("auto_map") or not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}/tokenizer_config.json: names no class of a WordPiece tokenizer that Transformers 4 and 5 know "
            f"({kind}; {' or '.join(STOCK_TOKENIZERS)}), or code by auto_map, or tokenizer.json is missing; {way_out}"
        )
    # `tokenizers` raises plain Exceptions.
    with explained(f"{folder}: its tokenizer cannot be loaded", way_out, Exception):
        tokenizer = stock_tokenizer(str(folder))
        entries = pieces(tokenizer)
        beside = vocabulary.read_text(encoding="utf-8").split("\n")[:-1] if vocabulary.is_file() else entries
    wrong = ""
    if len(entries) > config.vocab_size:
        wrong = f"{len(entries)} tokens are more than the model's vocab_size, {config.vocab_size}"
    elif tokenizer.pad_token_id != config.pad_token_id:
        wrong = f"pad_token_id {tokenizer.pad_token_id} is not that of the model, {config.pad_token_id}"
    elif entries != beside:
        wrong = "tokens are not those of vocab.txt"
    if wrong:
        raise UserError(f"{folder}: the tokenizer's {wrong}; {way_out}")


def check_weights(folder: Path, config: transformers.PreTrainedConfig, model_class) -> None:
    """
    Refuse weights that are missing, damaged, not finite, or not those of the model in config.json; and what belongs to
    other weights: ONNX files, the record of a release, a part of a sentence-transformers model as a pickle.
    """
    with reading_model(str(folder)):
        _, missing, unexpected = conversion.load_and_compare(
            model_class, str(folder), config=config, use_safetensors=True
        )
    if differing := sorted(missing | unexpected):
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
    onnx, again = folder / export.FLOAT, "export the model again, or delete the folder onnx"
    if onnx.exists():
        with explained(f"{onnx}: cannot be checked", f"{again}; pip install 'd2l-bert[onnx]'", Exception):
            task = read_record(folder / cards.METRICS_FILE, Metrics)["export"]["task"]
            model, *_ = export.read_for_task(str(folder), task)
            difference = conversion.largest_difference(model, export.OnnxModel(onnx, model.config))
        if not difference < 1e-3:
            raise UserError(f"{onnx}: its outputs differ from the model's by {difference:.1e}; {again}")


def check_card(folder: Path, license: str | None = None) -> None:
    """
    Refuse a card without a licence that the Hub knows, without its pictures, or with other figures than the folder's;
    and a text file that names the folder, or any home folder: it says something about this machine.

    The Hub checks the rest of the metadata, before the client sends any file.

    Args:
        license: replaces the licence in the card.
    """
    card, expected = cards.read_card(folder, license), cards.rendered_card(folder)
    found, measured = (
        {result.metric_name: result.metric_value for result in each.data.eval_results or []}
        for each in (card, expected)
    )
    pictures = [name for name in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text) if "://" not in name]
    way_out = f"put back what belongs there, or delete {cards.CARD_FILE}, and it is written again"
    cases = {"has no licence; give --license, such as apache-2.0": not card.data.license}
    cases |= {
        f"shows {name}, which is not in the folder; {way_out}": not (folder / name).is_file() for name in pictures
    }
    cases |= {
        f"says {name} {found.get(name)}, and {cards.METRICS_FILE} says {value}; {way_out}": (
            found.get(name, value) != value
        )
        for name, value in measured.items()
    }
    refuse_first(cases, f"{folder / cards.CARD_FILE}: ")
    with explained(folder / cards.CARD_FILE, "", UserError):
        for each in card.data.license if isinstance(card.data.license, list) else [card.data.license]:
            check_license(str(each))
    here = [str(path) for path in (folder.resolve(), folder.absolute(), Path.home()) if len(path.parts) > 1]
    here += [json.dumps(path)[1:-1] for path in here]  # escaped as in JSON
    paths = re.compile(rf"(?<![\w.~-])(?:{'|'.join(map(re.escape, here))}|{HOMES})(?![\w-])")
    for name, file in published_files(folder).items():
        text = "" if name.endswith(WITHOUT_PATHS) else file.read_text(encoding="utf-8", errors="replace")
        if found := paths.search(text):
            raise UserError(
                f"{folder / name}: names a folder of this machine ({found[0]}); remove the path before you publish"
            )
