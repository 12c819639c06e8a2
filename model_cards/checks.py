"""Checks a model folder before it is published: configuration, code, tokenizer, weights and card must agree."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import transformers
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert.folders import content_hash, read_json
from d2l_bert.messages import UserError, explained, refuse_first
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.config import check_license
from d2l_bert.modeling import configuration_d2l_bert, conversion, export, modeling_d2l_bert
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
HOMES = re.compile(r"(?<![\w.])(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[\w.-]+")

# Files without text, and vocabularies, which may have any word of the corpus.
WITHOUT_PATHS = (".safetensors", ".onnx", ".png", ".jpg", "tokenizer.json", "vocab.txt")


def published_files(folder: Path) -> dict[str, Path]:
    """The files of a folder whose names are in PUBLISHED, by their paths in it."""
    paths = {path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in paths}


def check_folder(folder: Path, changed_code: bool = False, license: str | None = None) -> None:
    """
    Refuse a folder in which configuration, code, tokenizer, weights or card is missing, or two of them disagree.

    Args:
        changed_code: whether the folder's two Python files may differ from those of the installed package.
        license: replaces the licence in the card.

    Raises:
        UserError: the first problem, in one line.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a folder that d2l-bert pretrain has written")
    config, model_class = check_code(folder, changed_code)
    check_tokenizer(folder, config)
    check_weights(folder, model_class)
    # A card, written from the files of a run or compared with them, raises these if their entries have other types.
    way_out = f"put back what the run wrote into {cards.RUN_FILE} and {cards.METRICS_FILE}"
    with explained(f"{folder}: cannot be published", way_out, AttributeError, LookupError, TypeError):
        check_card(folder, license)
    check_paths(folder)


def check_code(folder: Path, changed_code: bool):
    """
    Refuse a model that is neither of a d2l-bert class nor of stock BERT, and code that is not the installed package's.

    Returns:
        The configuration and the class of the model: Transformers' own for a stock BERT, which needs no code; from the
        folder's code if that differs and `changed_code` is true.
    """
    content = read_json(folder / "config.json")
    kinds = {
        "d2l-bert": (modeling_d2l_bert.D2lBertConfig, modeling_d2l_bert),
        "bert": (transformers.BertConfig, transformers),
    }
    if content.get("model_type") not in kinds:
        raise UserError(
            f"{folder}/config.json: names a {content.get('model_type')} model, not a d2l-bert or a bert one; give a "
            f"folder of pretrain, or publish another model with hf upload"
        )
    config_class, module = kinds[content["model_type"]]
    # Transformers raises AttributeError, IndexError, TypeError or ValueError if an entry has the wrong type.
    way_out = "put back the config.json of the run, or save the model again"
    with explained(f"{folder}/config.json: cannot be published", way_out, Exception):
        config = config_class.from_pretrained(folder)
        model_class = getattr(module, config.architectures[0])
    if module is transformers:
        return config, model_class
    missing = [name for name in CODE if not (folder / name).is_file()]
    save_again = "save the model with d2l_bert.modeling.conversion.save_with_code"
    cases = {f"{name} is missing, which loads the model without d2l-bert; {save_again}": True for name in missing}
    cases[f"config.json lacks classes in auto_map, which the Hub could not load; {save_again}"] = (
        content.get("auto_map") != conversion.AUTO_MAP
    )
    refuse_first(cases, f"{folder}: ")
    changed = [name for name, ours in CODE.items() if (folder / name).read_bytes() != ours.read_bytes()]
    if changed and not changed_code:
        raise UserError(
            f"{folder}/{changed[0]}: differs from the file of the installed d2l-bert {version('d2l-bert')}; put back "
            f"that file, or give --changed_code if the change is intended"
        )
    if changed:
        with explained(f"{folder}: {' and '.join(changed)} cannot be run", "fix the code", Exception, SystemExit):
            classes = {
                reference: get_class_from_dynamic_module(reference, folder)
                for reference in conversion.AUTO_MAP.values()
            }
            model_class = classes[f"modeling_d2l_bert.{config.architectures[0]}"]
    return config, model_class


def check_tokenizer(folder: Path, config: transformers.PreTrainedConfig) -> None:
    """
    Refuse a tokenizer that is missing, is not a stock class, or does not fit the model or vocab.txt.

    A model may have more entries than its tokenizer: many BERTs have a vocabulary padded to a multiple of 8 or 64.
    """
    way_out = "save the tokenizer that the model was trained with into the folder"
    settings, vocabulary = read_json(folder / "tokenizer_config.json"), folder / "vocab.txt"
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
    cases = {
        f"{len(entries)} tokens are more than the model's vocab_size, {config.vocab_size}": (
            len(entries) > config.vocab_size
        ),
        f"pad_token_id {tokenizer.pad_token_id} is not that of the model, {config.pad_token_id}": (
            tokenizer.pad_token_id != config.pad_token_id
        ),
        "tokens are not those of vocab.txt": entries != beside,
    }
    refuse_first({f"{case}; {way_out}": holds for case, holds in cases.items()}, f"{folder}: the tokenizer's ")


def check_weights(folder: Path, model_class) -> None:
    """
    Refuse weights that are missing, damaged, not finite, or not those of the model in config.json; and what belongs to
    other weights: ONNX files, the record of a release, a part of a sentence-transformers model as a pickle.
    """
    way_out = "save the model there again with save_pretrained, or copy the file anew"
    if not list(folder.glob("model*.safetensors")):
        raise UserError(
            f"{folder}: model.safetensors is missing, and weights are published as safetensors only; {way_out}"
        )
    # The folder's own code may raise any exception. Of the installed code, other exceptions are bugs.
    is_installed = model_class.__module__ == modeling_d2l_bert.__name__
    kinds = (ValueError, OSError, SafetensorError) if is_installed else (Exception,)
    with explained(f"{folder}: cannot be published", way_out, *kinds):
        _, missing, unexpected = conversion.load_and_compare(model_class, str(folder))
    if different := sorted(missing | unexpected):
        raise UserError(
            f"{folder}: the weights and the model of config.json differ ({different[0]} is in one of both); {way_out}"
        )
    onnx, again = folder / export.FLOAT, "export the model again, or delete the folder onnx"
    if onnx.exists():
        with explained(f"{onnx}: cannot be checked", f"{again}; pip install 'd2l-bert[onnx]'", Exception):
            model, *_ = export.read_for_task(str(folder), read_json(folder / cards.METRICS_FILE)["export"]["task"])
            difference = export.largest_difference(model, export.OnnxModel(onnx, model.config))
        if not difference < 1e-3:
            raise UserError(f"{onnx}: its outputs differ from the model's by {difference:.1e}; {again}")
    release = read_json(folder / cards.RELEASE_FILE)
    cases = {
        f"{cards.RELEASE_FILE}: was written for other weights; make the release again, or delete "
        f"{cards.RELEASE_FILE} and {cards.CARD_FILE}": (
            release and release.get("weights_sha256") != content_hash(folder / "model.safetensors")
        )
    }
    cases |= {
        f"{path.relative_to(folder)}: is a pickle, which is not published; save the model again with "
        f"sentence-transformers, as safetensors": True
        for path in folder.glob("[0-9]_*/*.bin")
    }
    refuse_first(cases, f"{folder}/")


def check_card(folder: Path, license: str | None = None) -> None:
    """
    Refuse a card without a licence that the Hub knows, without its pictures, or with other figures than the folder's.

    The Hub checks the rest of the metadata, before the client sends any file.
    """
    path, card = folder / cards.CARD_FILE, cards.read_card(folder, license)
    licenses = card.data.license or []
    if not licenses:
        raise UserError(f"{path}: has no licence; give --license, such as apache-2.0")
    for each in licenses if isinstance(licenses, list) else [licenses]:
        with explained(path, "", UserError):
            check_license(str(each))
    found, expected = (
        {result.metric_name: result.metric_value for result in each.data.eval_results or []}
        for each in (card, ModelCard(cards.render_card(folder)))
    )
    pictures = [name for name in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text) if "://" not in name]
    cases = {f"shows {name}, which is not in the folder": not (folder / name).is_file() for name in pictures}
    cases |= {
        f"says {name} {found.get(name)}, and {cards.METRICS_FILE} says {value}": found.get(name, value) != value
        for name, value in expected.items()
    }
    way_out = f"put back what belongs there, or delete {cards.CARD_FILE}, and it is written again"
    refuse_first({f"{case}; {way_out}": holds for case, holds in cases.items()}, f"{path}: ")


def check_paths(folder: Path) -> None:
    """Refuse a text file that names the folder, or any home folder: it says something about this machine."""
    here = [str(path) for path in (folder.resolve(), folder.absolute(), Path.home()) if len(path.parts) > 1]
    here += [json.dumps(path)[1:-1] for path in here]  # escaped as in JSON
    for name, file in published_files(folder).items():
        if not name.endswith(WITHOUT_PATHS):
            text = file.read_text(encoding="utf-8", errors="replace")
            for path in (*here, *HOMES.findall(text)):
                if re.search(rf"(?<![\w.~-]){re.escape(path)}(?![\w-])", text):
                    raise UserError(
                        f"{folder / name}: names a folder of this machine ({path}); remove the path before you publish"
                    )
