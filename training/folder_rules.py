"""What a model folder must be to be published: configuration, code, tokenizer, weights and card, and all agree."""

import contextlib
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert.modeling import configuration_d2l_bert, conversion, modeling_d2l_bert
from d2l_bert.tokenization.wordpiece import pieces
from d2l_bert.training import folders
from d2l_bert.training.card import CARD_FILE, METRICS_FILE, RUN_FILE, figures, read_card, read_json
from d2l_bert.training.card_rules import check_metadata


CODE = {Path(module.__file__).name: Path(module.__file__) for module in (configuration_d2l_bert, modeling_d2l_bert)}


def check_folder(folder: Path, changed_code: bool = False, license: str | None = None) -> None:
    """
    Refuse a folder whose configuration, code, tokenizer, weights and card are not there or do not agree.

    Args:
        changed_code: whether the folder's two files of code may differ from the installed ones.
        license: takes the place of the card's.

    Raises:
        ValueError: the first thing that is wrong, in one line.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that d2l-bert pretrain has left")
    config = check_config(folder)
    model_class = check_code(folder, config, changed_code)
    check_tokenizer(folder, config)
    check_weights(folder, model_class)
    check_card(folder, license)


def check_config(folder: Path) -> dict:
    """config.json, which must be of one of our classes."""
    config = read_json(folder / "config.json")
    if not config:
        raise ValueError(f"{folder}: config.json is missing, so it is no model; give a folder of save_pretrained")
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if kind != configuration_d2l_bert.D2lBertConfig.model_type:
        raise ValueError(f"{folder}/config.json: a {kind} model, not a d2l-bert one; hf upload publishes any model")
    if len(classes) != 1 or not classes[0].startswith("D2lBert") or not hasattr(modeling_d2l_bert, classes[0]):
        raise ValueError(
            f"{folder}/config.json: architectures is {classes}, and should name the class that was saved; save the "
            f"model again with save_pretrained"
        )
    return config


def check_code(folder: Path, config: dict, changed_code: bool):
    """The class that loads the folder: the installed one, or that of the folder's code where it may differ."""
    changed = []
    for name, installed in CODE.items():
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: {name} is missing, which readers without the package need; copy it from {installed.parent}"
            )
        if (folder / name).read_bytes() != installed.read_bytes():
            changed.append(name)
    class_name = config["architectures"][0]
    if not changed:
        return getattr(modeling_d2l_bert, class_name)
    if not changed_code:
        made_with = read_json(folder / RUN_FILE).get("versions", {}).get("d2l-bert")
        raise ValueError(
            f"{folder}/{changed[0]}: differs from that of the installed d2l-bert {version('d2l-bert')}"
            f"{f' (the run was made with {made_with})' if made_with else ''}; put that one back, or say with "
            f"--changed_code that the difference is meant"
        )
    with refused(folder, f"{' and '.join(changed)} cannot be run; mend the code"):
        for reference in folders.AUTO_MAP.values():
            get_class_from_dynamic_module(reference, str(folder))
        return get_class_from_dynamic_module(f"modeling_d2l_bert.{class_name}", str(folder))


def check_tokenizer(folder: Path, config: dict) -> None:
    """Refuse a tokenizer that is missing, or has another vocabulary than the model or than its own vocab.txt."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: {name} is missing; save the tokenizer that the model was trained with there")
    with refused(folder, "its tokenizer cannot be loaded; save the one that the model was trained with there"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        vocabulary = folder / "vocab.txt"
        beside = vocabulary.read_text(encoding="utf-8").split("\n")[:-1] if vocabulary.exists() else pieces(tokenizer)
    if len(tokenizer) != config["vocab_size"]:
        raise ValueError(
            f"{folder}: the tokenizer has {len(tokenizer):,} tokens and config.json says vocab_size "
            f"{config['vocab_size']:,}; save the tokenizer that the model was trained with there"
        )
    if beside != pieces(tokenizer):
        raise ValueError(
            f"{folder}: vocab.txt holds other tokens than tokenizer.json; save the tokenizer that the model was "
            f"trained with there"
        )
    if tokenizer.pad_token_id != config["pad_token_id"]:
        raise ValueError(
            f"{folder}: the tokenizer pads with {tokenizer.pad_token_id} and config.json says pad_token_id "
            f"{config['pad_token_id']}; save the tokenizer that the model was trained with there"
        )


def check_weights(folder: Path, model_class) -> None:
    """Refuse weights that are missing, cut short, not finite, or of another model than config.json says."""
    files = sorted(folder.glob("model*.safetensors"))
    mend = "save the model there again with save_pretrained, or copy the file anew"
    if not files:
        raise ValueError(f"{folder}: model.safetensors is missing, and nothing but safetensors is published; {mend}")
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                bad = next((name for name in opened.keys() if not opened.get_tensor(name).isfinite().all()), None)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: damaged or cut short ({error}); {mend}") from None
        if bad:
            raise ValueError(f"{file}: {bad} holds numbers that are not finite; publish an earlier checkpoint")
    with refused(folder, mend):
        _, missing, unexpected = conversion.load_and_compare(model_class, str(folder))
    if missing:
        raise ValueError(f"{folder}: its weights lack {sorted(missing)[0]}, which config.json asks for; {mend}")
    if unexpected:
        raise ValueError(
            f"{folder}: its weights hold {sorted(unexpected)[0]}, which config.json has no use for; {mend}"
        )


def check_card(folder: Path, license: str | None = None) -> None:
    """Refuse a card whose metadata the Hub would refuse, or that says other figures than metrics.json."""
    path = folder / CARD_FILE
    card, metadata = read_card(folder, license)
    try:
        check_metadata(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    measured = read_json(folder / METRICS_FILE)
    told = {
        metric.get("name"): metric["value"]
        for model in metadata.get("model-index") or []
        for result in model["results"]
        for metric in result["metrics"]
    }
    for name, key, *_ in figures(measured):
        if name in told and told[name] != round(measured[key], 4):
            raise ValueError(
                f"{path}: says {name} {told[name]}, and {METRICS_FILE} {round(measured[key], 4)}; put the measured "
                f"one back, or delete {CARD_FILE} to have it written anew"
            )


@contextlib.contextmanager
def refused(folder: Path, mend: str):
    """Raise whatever the libraries say of a folder as one line; they have another exception for every way to fail."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split()):.300}; {mend}") from None
