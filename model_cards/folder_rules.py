"""What a model folder must be to be published: configuration, code, tokenizer, weights and card, and all agree."""

import contextlib
import re
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert import folders
from d2l_bert.errors import UserError
from d2l_bert.model_cards.card import CARD_FILE, METRICS_FILE, PIPELINE_TAGS, RUN_FILE, figures, read_card, shown
from d2l_bert.model_cards.metadata import check_metadata
from d2l_bert.modeling import configuration_d2l_bert, conversion, modeling_d2l_bert
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.saving import AUTO_MAP, FREE_FIELDS
from d2l_bert.tokenization.wordpiece import pieces


CODE = {Path(module.__file__).name: Path(module.__file__) for module in (configuration_d2l_bert, modeling_d2l_bert)}

OURS = [AUTO_MAP[name].partition(".")[2] for name in AUTO_MAP if name != "AutoConfig"]

# What Transformers reads a tokenizer.json with; the last is version 5's name for the one before.
STOCK_TOKENIZERS = ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")

# What may be another in a model than in the run that it is from; the vocabulary is compared with the tokenizer.
CHANGEABLE = (*FREE_FIELDS, "vocab_size", "pad_token_id")

INDEX_FILE = "model.safetensors.index.json"

# Of the figures that only a run measures.
NAMES = {"MLM loss", "MLM perplexity", "MLM accuracy"}


def check_folder(folder: Path, changed_code: bool = False, license: str | None = None) -> None:
    """
    Refuse a folder whose configuration, code, tokenizer, weights and card are not there or do not agree.

    Args:
        changed_code: whether the folder's two files of code may differ from the installed ones.
        license: takes the place of the card's.

    Raises:
        UserError: the first thing that is wrong, in one line.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one that d2l-bert pretrain has left")
    check_record(folder)
    config = check_config(folder)
    model_class = check_code(folder, config, changed_code)
    check_tokenizer(folder, config)
    check_weights(folder, model_class)
    check_card(folder, config, license)


def check_record(folder: Path) -> None:
    """Refuse a run_config.json or a metrics.json whose parts are not of the kind that a run writes."""
    record = folders.read_json(folder / RUN_FILE)
    for part in ("run", "architecture", "data", "local_paths", "machine", "versions"):
        if not isinstance(record.get(part, {}), dict):
            raise UserError(f"{folder / RUN_FILE}: {part} is {record[part]!r:.50}; put back what the run wrote")
    for path, told in record.get("local_paths", {}).items():
        if not isinstance(told, dict) or not isinstance(told.get("name"), str) or "fingerprint" not in told:
            raise UserError(
                f"{folder / RUN_FILE}: local_paths has {told!r:.50} for {path}; put back what the run wrote"
            )
    known = record.get("data", {}).get("hub_datasets", [])
    if not isinstance(known, list):
        raise UserError(f"{folder / RUN_FILE}: hub_datasets is {known!r:.50}; put back what the run wrote")
    measured = folders.read_json(folder / METRICS_FILE)
    for name, key, *_ in figures(measured):
        if isinstance(measured[key], bool) or not isinstance(measured[key], (int, float)):
            raise UserError(
                f"{folder / METRICS_FILE}: {key} ({name}) is {measured[key]!r:.50}, no number; put back what was "
                f"measured"
            )


def check_config(folder: Path) -> D2lBertConfig:
    """The configuration, which must be of one of our classes."""
    config = folders.read_json(folder / "config.json")
    if not config:
        raise UserError(f"{folder}: config.json is missing, so it is no model; give a folder of save_pretrained")
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if kind != D2lBertConfig.model_type:
        raise UserError(f"{folder}/config.json: a {kind} model, not a d2l-bert one; hf upload publishes any model")
    if len(classes) != 1 or classes[0] not in OURS:
        raise UserError(
            f"{folder}/config.json: architectures is {classes}, and should name the class that was saved; save the "
            f"model again with save_pretrained"
        )
    mend = "mend config.json, or save the model again with save_pretrained"
    # Transformers meets entries of another kind with AttributeError, IndexError, TypeError or ValueError.
    with refused(folder, mend, Exception):
        config = D2lBertConfig.from_pretrained(folder)
    for name, trained in folders.read_json(folder / RUN_FILE).get("architecture", {}).items():
        if name not in CHANGEABLE and getattr(config, name) != trained:
            raise UserError(
                f"{folder}/config.json: says {name} {getattr(config, name)}, and {RUN_FILE} {trained}; put back what "
                f"was trained"
            )
    return config


def check_code(folder: Path, config: D2lBertConfig, changed_code: bool):
    """The class that loads the folder: the installed one, or that of the folder's code where it may differ."""
    changed = []
    for name, installed in CODE.items():
        if not (folder / name).is_file():
            raise UserError(
                f"{folder}: {name} is missing, which readers without the package need; copy it from {installed.parent}"
            )
        if (folder / name).read_bytes() != installed.read_bytes():
            changed.append(name)
    class_name = config.architectures[0]
    if not changed:
        return getattr(modeling_d2l_bert, class_name)
    if not changed_code:
        made_with = folders.read_json(folder / RUN_FILE).get("versions", {}).get("d2l-bert")
        raise UserError(
            f"{folder}/{changed[0]}: differs from that of the installed d2l-bert {version('d2l-bert')}"
            f"{f' (the run was made with {made_with})' if made_with else ''}; put that one back, or say with "
            f"--changed_code that the difference is meant"
        )
    with refused(folder, f"{' and '.join(changed)} cannot be run; mend the code", Exception, SystemExit):
        for reference in AUTO_MAP.values():
            get_class_from_dynamic_module(reference, str(folder))
        return get_class_from_dynamic_module(f"modeling_d2l_bert.{class_name}", str(folder))


def check_tokenizer(folder: Path, config: D2lBertConfig) -> None:
    """Refuse a tokenizer that is missing, not stock, or has another vocabulary than the model or its own vocab.txt."""
    mend = "save the tokenizer that the model was trained with there"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; {mend}")
    settings = folders.read_json(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class")
    if kind not in STOCK_TOKENIZERS:
        raise UserError(f"{folder}/tokenizer_config.json: {kind} is no stock class for a WordPiece tokenizer; {mend}")
    if settings.get("auto_map"):
        raise UserError(
            f"{folder}/tokenizer_config.json: auto_map asks for code of its own, which is never sent; take auto_map "
            f"out"
        )
    with refused(folder, f"its tokenizer cannot be loaded; {mend}", Exception):  # tokenizers raises just that
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        vocabulary = folder / "vocab.txt"
        beside = vocabulary.read_text(encoding="utf-8").split("\n")[:-1] if vocabulary.is_file() else pieces(tokenizer)
    if len(tokenizer) != config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {len(tokenizer):,} tokens and config.json says vocab_size "
            f"{config.vocab_size:,}; {mend}"
        )
    if max(tokenizer.get_vocab().values()) >= config.vocab_size:
        raise UserError(f"{folder}: the tokenizer's numbers have holes, and end beyond the model's; {mend}")
    if beside != pieces(tokenizer):
        raise UserError(f"{folder}: vocab.txt holds other tokens than tokenizer.json; {mend}")
    for name in ("pad", "unk", "cls", "sep", "mask"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise UserError(f"{folder}: the tokenizer has no {name} token; {mend}")
    if tokenizer.pad_token_id != config.pad_token_id:
        raise UserError(
            f"{folder}: the tokenizer pads with {tokenizer.pad_token_id} and config.json says pad_token_id "
            f"{config.pad_token_id}; {mend}"
        )


def check_weights(folder: Path, model_class) -> None:
    """Refuse weights that are missing, cut short, not finite, or of another model than config.json says."""
    files = sorted(folder.glob("model*.safetensors"))
    mend = "save the model there again with save_pretrained, or copy the file anew"
    if not files:
        raise UserError(f"{folder}: model.safetensors is missing, and nothing but safetensors is published; {mend}")
    if (index := folder / INDEX_FILE).is_file():
        places = folders.read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise UserError(f"{index}: has no weight_map that names a file for each weight; {mend}")
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                bad = next((name for name in opened.keys() if not opened.get_tensor(name).isfinite().all()), None)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged or cut short ({error}); {mend}") from None
        if bad:
            raise UserError(f"{file}: {bad} holds numbers that are not finite; publish an earlier checkpoint")
    # The folder's own code may raise anything, and the installed code what `load_and_compare` raises.
    kinds = (
        (ValueError, OSError, SafetensorError)
        if model_class.__module__ == modeling_d2l_bert.__name__
        else (Exception,)
    )
    with refused(folder, mend, *kinds):
        _, missing, unexpected = conversion.load_and_compare(model_class, str(folder))
    if missing:
        raise UserError(f"{folder}: its weights lack {sorted(missing)[0]}, which config.json asks for; {mend}")
    if unexpected:
        raise UserError(
            f"{folder}: its weights hold {sorted(unexpected)[0]}, which config.json has no use for; {mend}"
        )


def check_card(folder: Path, config: D2lBertConfig, license: str | None = None) -> None:
    """
    Refuse a card whose metadata the Hub would refuse, or that says another task than config.json or other figures than
    metrics.json.
    """
    path = folder / CARD_FILE
    card, metadata = read_card(folder, license)
    try:
        check_metadata(metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    head, task = config.architectures[0].removeprefix("D2lBert"), metadata.get("pipeline_tag")
    served = {PIPELINE_TAGS[head], "feature-extraction", "sentence-similarity"}
    if task is not None and task not in served | ({"text-classification"} if head == "ForPreTraining" else set()):
        raise UserError(
            f"{path}: says pipeline_tag {task}, and config.json {config.architectures[0]}, which is for "
            f"{PIPELINE_TAGS[head]}; write that"
        )
    measured = folders.read_json(folder / METRICS_FILE)
    told = {  # figures of whatever kind
        metric.get("name"): metric["value"]
        for model in metadata.get("model-index") or []
        for result in model["results"]
        for metric in result["metrics"]
    }
    if not measured and (folder / RUN_FILE).is_file() and (unfounded := told.keys() & NAMES):
        raise UserError(
            f"{path}: says {min(unfounded)} {told[min(unfounded)]}, and there is no {METRICS_FILE} to say so; put "
            f"that back, or delete {CARD_FILE} to have it written anew"
        )
    in_text = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
    for name, key, unit, *_ in figures(measured):
        for says, is_right in ((told, round(measured[key], 4)), (in_text, shown(measured[key], unit))):
            if name in says and says[name] != is_right:
                raise UserError(
                    f"{path}: says {name} {says[name]}, and {METRICS_FILE} {is_right}; put the measured one back, or "
                    f"delete {CARD_FILE} to have it written anew"
                )


@contextlib.contextmanager
def refused(folder: Path, mend: str, *kinds: type[BaseException]):
    """
    Raise what is said of a folder as one line.

    Args:
        kinds: of exceptions; others are bugs of this package, and pass.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{folder}: {' '.join(str(error).split()):.300}; {mend}") from None
