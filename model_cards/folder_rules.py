"""Checks a model folder before it is published: configuration, code, tokenizer, weights and card must agree."""

import re
from importlib.metadata import version
from pathlib import Path

import transformers
from safetensors import SafetensorError
from transformers import BertConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert import folders
from d2l_bert.folders import content_hash
from d2l_bert.messages import UserError, explained, refuse_first
from d2l_bert.model_cards.card import (
    CARD_FILE,
    METRICS_FILE,
    RELEASE_FILE,
    RUN_FILE,
    read_card,
)
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.figures import formatted, reported_metrics
from d2l_bert.modeling import configuration_d2l_bert, conversion, modeling_d2l_bert
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import AUTO_MAP
from d2l_bert.modeling.export import FLOAT, OnnxModel, largest_difference, read_for_task
from d2l_bert.tokenization.wordpiece import pieces, stock_tokenizer


CODE = {Path(module.__file__).name: Path(module.__file__) for module in (configuration_d2l_bert, modeling_d2l_bert)}

OURS = [AUTO_MAP[name].partition(".")[2] for name in AUTO_MAP if name != "AutoConfig"]

# The tokenizer classes of Transformers that read tokenizer.json. `TokenizersBackend` is version 5's name for
# `PreTrainedTokenizerFast`.
STOCK_TOKENIZERS = ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")


# What a card, written from or compared with the files of a run, raises if their entries have other types.
DAMAGED = (AttributeError, LookupError, TypeError)


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
    config = check_config(folder)
    model_class = check_code(folder, config, changed_code)
    check_tokenizer(folder, config)
    check_weights(folder, model_class)
    check_onnx(folder)
    check_release(folder)
    with explained(
        f"{folder}: cannot be published", f"put back what the run wrote into {RUN_FILE} and {METRICS_FILE}", *DAMAGED
    ):
        check_card(folder, license)


def check_config(folder: Path) -> D2lBertConfig | BertConfig:
    """Read config.json, and refuse a configuration that is neither of a d2l-bert class nor of a stock BERT."""
    kind = folders.read_json(folder / "config.json").get("model_type")
    config_class = {each.model_type: each for each in (D2lBertConfig, BertConfig)}.get(kind)
    if config_class is None:
        raise UserError(
            f"{folder}/config.json: names a {kind} model, not a d2l-bert or a bert one; give a folder of pretrain, or "
            f"publish another model with hf upload"
        )
    # Transformers raises AttributeError, IndexError, TypeError or ValueError if an entry has the wrong type.
    with explained(
        f"{folder}: cannot be published", "put back the config.json of the run, or save the model again", Exception
    ):
        config = config_class.from_pretrained(folder)
        (model_class,) = config.architectures
        if config_class is D2lBertConfig and model_class not in OURS:
            raise ValueError(f"config.json: architectures is {config.architectures}, not the class that was saved")
    return config


def check_code(folder: Path, config: D2lBertConfig, changed_code: bool):
    """
    Compare the folder's two Python files with those of the installed package.

    Returns:
        The class of the model, from the folder's code if that differs and `changed_code` is true; for a stock BERT,
        which needs no code, Transformers' own.
    """
    if not isinstance(config, D2lBertConfig):
        with explained(
            f"{folder}: cannot be published", "put back the config.json of the run", AttributeError, TypeError
        ):
            return getattr(transformers, config.architectures[0])
    changed = []
    for name, installed in CODE.items():
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: {name} is missing, which loads the model without d2l-bert; copy it from {installed.parent}"
            )
        if (folder / name).read_bytes() != installed.read_bytes():
            changed.append(name)
    class_name = config.architectures[0]
    if not changed:
        return getattr(modeling_d2l_bert, class_name)
    if not changed_code:
        made_with = folders.read_json(folder / RUN_FILE).get("versions", {}).get("d2l-bert")
        raise UserError(
            f"{folder}/{changed[0]}: differs from the file of the installed d2l-bert {version('d2l-bert')}"
            f"{f' (the run was made with {made_with})' if made_with else ''}; put back that file, or give "
            f"--changed_code if the change is intended"
        )
    with explained(f"{folder}: {' and '.join(changed)} cannot be run", "fix the code", Exception, SystemExit):
        for reference in AUTO_MAP.values():
            get_class_from_dynamic_module(reference, str(folder))
        return get_class_from_dynamic_module(f"modeling_d2l_bert.{class_name}", str(folder))


def check_tokenizer(folder: Path, config: D2lBertConfig) -> None:
    """Refuse a tokenizer that is missing, is not a stock class, or does not fit the model or vocab.txt."""
    way_out = "save the tokenizer that the model was trained with into the folder"
    settings, vocabulary = folders.read_json(folder / "tokenizer_config.json"), folder / "vocab.txt"
    kind = settings.get("tokenizer_class")
    if kind not in STOCK_TOKENIZERS or settings.get("auto_map") or not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}/tokenizer_config.json: names no stock class of a WordPiece tokenizer ({kind}), or code by "
            f"auto_map, or tokenizer.json is missing; {way_out}"
        )
    # `tokenizers` raises plain Exceptions.
    with explained(f"{folder}: its tokenizer cannot be loaded", way_out, Exception):
        tokenizer = stock_tokenizer(str(folder))
        beside = vocabulary.read_text(encoding="utf-8").split("\n")[:-1] if vocabulary.is_file() else pieces(tokenizer)
    pairs = {
        "tokens and vocab_size": (len(tokenizer), config.vocab_size),
        "pad_token_id": (tokenizer.pad_token_id, config.pad_token_id),
        "tokens of vocab.txt": (pieces(tokenizer), beside),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            values = "" if isinstance(one, list) else f" ({one} and {other})"
            raise UserError(f"{folder}: the tokenizer's {name} are not those of the model{values}; {way_out}")


def check_weights(folder: Path, model_class) -> None:
    """Refuse weights that are missing, damaged, not finite, or not those of the model in config.json."""
    files = sorted(folder.glob("model*.safetensors"))
    way_out = "save the model there again with save_pretrained, or copy the file anew"
    if not files:
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


def check_onnx(folder: Path) -> None:
    """Refuse ONNX files that cannot be run, or are of other weights than the model's."""
    if not (folder / FLOAT).exists():
        return
    way_out = "export the model again, or delete the folder onnx"
    with explained(f"{folder / FLOAT}: cannot be checked", f"{way_out}; pip install 'd2l-bert[onnx]'", Exception):
        model, *_ = read_for_task(str(folder), folders.read_json(folder / METRICS_FILE)["export"]["task"])
        difference = largest_difference(model, OnnxModel(folder / FLOAT, model.config))
    if not difference < 1e-3:
        raise UserError(f"{folder / FLOAT}: its outputs differ from the model's by {difference:.1e}; {way_out}")


def check_release(folder: Path) -> None:
    """Refuse a release.json that was written for other weights, or is damaged."""
    release = folders.read_json(folder / RELEASE_FILE)
    if not release:
        return
    stated, found = release.get("weights_sha256"), content_hash(folder / "model.safetensors")
    if stated != found:
        raise UserError(
            f"{folder / RELEASE_FILE}: was written for weights with the SHA-256 {stated!r:.20}..., and those here "
            f"have {found:.16}...; make the release again, or delete {RELEASE_FILE} and {CARD_FILE}"
        )


def check_card(folder: Path, license: str | None = None) -> None:
    """
    Refuse a card without a licence that the Hub knows, without its pictures, or with other figures than metrics.json.

    The Hub checks the rest of the metadata, before the client sends any file.
    """
    path, card, metrics = folder / CARD_FILE, read_card(folder, license), folders.read_json(folder / METRICS_FILE)
    licenses = card.data.license or []
    if not licenses:
        raise UserError(f"{path}: has no licence; give --license, such as apache-2.0")
    for each in licenses if isinstance(licenses, list) else [licenses]:
        with explained(path, "", UserError):
            check_license(str(each))
    in_metadata = {result.metric_name: result.metric_value for result in card.data.eval_results or []}
    in_text = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card.text, re.MULTILINE))
    way_out = f"put back what belongs there, or delete {CARD_FILE}, and it is written again"
    cases = {
        f"shows {picture}, which is not in the folder; {way_out}": (
            "://" not in picture and not (folder / picture).is_file()
        )
        for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text)
    }
    cases |= {
        f"says {metric.name} {in_card.get(metric.name)}, and {METRICS_FILE} says {expected}; {way_out}": (
            in_card.get(metric.name, expected) != expected
        )
        for metric in reported_metrics(metrics)
        for in_card, expected in (
            (in_metadata, round(metrics[metric.key], 4)),
            (in_text, formatted(metrics[metric.key], metric.unit)),
        )
    }
    refuse_first(cases, f"{path}: ")
