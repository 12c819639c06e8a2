"""Loads any encoder of Transformers, ours or a stock one, with a head or without, and its tokenizer."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from d2l_bert.folders import base_name, content_hash, short_hash
from d2l_bert.messages import UserError, reading_model
from d2l_bert.records import read_record
from d2l_bert.tokenization.existing_tokenizers import read_tokenizer
from d2l_bert.tokenization.model_files import find_file
from d2l_bert.tokenization.wordpiece import save_tokenizer

from .conversion import load_and_compare, read_config, save_model
from .records import RunRecord


# The record of a run, beside its model.
RUN_FILE = "run_config.json"

# The commands that only a model with this head can do, by the end of its class; other commands take any encoder.
COMMANDS_OF_HEADS = {
    "ForMaskedLM": "evaluate, fill-mask, ",
    "ForNextSentencePrediction": "next-sentence, ",
    "ForSequenceClassification": "evaluate --test_file, predict, ",
    "ForTokenClassification": "evaluate --test_file, predict, ",
    "ForQuestionAnswering": "evaluate --test_file, predict, ",
    "ForMultipleChoice": "evaluate --test_file, predict, ",
}


def read_parts(auto_class, name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """
    The configuration and the tokenizer of a model, for use in a block of `reading_model`. No code beside it is run.

    Args:
        auto_class: an Auto class of Transformers, such as `AutoModelForMaskedLM`.
        name: a folder or an id on the Hub.

    Raises:
        UserError: the model is a decoder, its type has no such head, or it has no tokenizer that pads.
        Exception: one of Transformers or the Hub's client, if there is no such model.
    """
    config = read_config(name)
    if type(config) not in auto_class._model_mapping.keys():
        raise UserError(
            f"{auto_class.__name__} has no {config.model_type} model; give one of d2l-bert, or a stock BERT"
        )
    tokenizer = read_tokenizer(name, config)
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise UserError("it has no tokenizer.json, or its tokenizer has no padding token; give another model")
    return config, tokenizer


def load_pretrained(
    auto_class, name: str, may_lack: Callable[[str], bool] = lambda weight: False, **options
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]:
    """
    A model with all of its weights, in float32 and in evaluation mode, and its tokenizer.

    Args:
        auto_class, name: as in `read_parts`.
        may_lack: whether the checkpoint may lack a weight of this name.
        options: further arguments of `from_pretrained`.

    Returns:
        The model, the tokenizer, and the names of the weights that the checkpoint lacks.

    Raises:
        UserError: the model or its tokenizer cannot be loaded, weights are missing or not finite, or the tokenizer has
            more tokens than the model; or the model was saved without this head.
    """
    with reading_model(name):
        config, tokenizer = read_parts(auto_class, name)
        model, missing, _ = load_and_compare(
            auto_class, name, config=config, dtype=torch.float32, trust_remote_code=False, **options
        )
        # The names of the encoder's weights begin with this: with `bert.`, say, in a model with a head. In an encoder
        # alone, all names are the encoder's.
        prefix_of_encoder = "" if model.base_model is model else f"{model.base_model_prefix}."
        lacking = sorted(weight for weight in missing if not may_lack(weight))
        for weight in lacking:
            # The pooler belongs to the head for pairs, wherever it stands.
            is_of_head = "pooler." in weight or not weight.startswith(prefix_of_encoder)
            if not is_of_head:
                raise UserError(f"it has no {weight}; save it again with save_pretrained")
    if lacking:
        saved = (config.architectures or ["model without a head"])[0]
        commands = "".join(COMMANDS_OF_HEADS[head] for head in COMMANDS_OF_HEADS if saved.endswith(head))
        raise UserError(
            f"{name}: is a {saved}, and has no {lacking[0]}, which belongs to the head that is needed here; use it "
            f"with d2l-bert {commands}embed, attention or finetune"
        )
    return model.eval(), tokenizer, missing


def load_encoder(name: str, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder of a model, without heads, and its tokenizer, as in `load_pretrained`; the pooler is not used."""
    model, tokenizer, _ = load_pretrained(AutoModel, name, lambda weight: "pooler" in weight, **options)
    return model, tokenizer


@contextlib.contextmanager
def as_folder(model: object, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[str]:
    """
    The name of a model for the block: of a model in memory a temporary folder, into which it is saved.

    A model in memory is not changed by what the block does with its copy.

    Args:
        model: a folder, an id on the Hub, or a model of Transformers.
        tokenizer: of a model in memory; without it the tokenizer that lies where the model was loaded from.

    Raises:
        UserError: it is something else; or a model in memory has no tokenizer, or one that cannot be read.
    """
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise UserError(f"tokenizer is for a model in memory, and {model} has its own; leave it out")
        yield str(model)
        return
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}; give a folder, an id on the Hub or a model of Transformers"
        )
    name = model.name_or_path  # "" of a model that was not loaded
    if tokenizer is None and not name:
        raise UserError("the model was not loaded from a folder, which would hold its tokenizer; give tokenizer, too")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, base_name(name) if name else "model")
        folder.mkdir()
        save_model(model, folder)
        with reading_model(name):
            record = find_file(name, RUN_FILE) if name else None
            save_tokenizer(tokenizer or read_tokenizer(name, model.config), folder)
        if record:
            shutil.copyfile(record, folder / RUN_FILE)
        try:
            yield str(folder)
        except UserError as error:  # the program knows nothing of the folder
            raise UserError(error.message.replace(str(folder), title_of(model))) from None


def title_of(model: object) -> str:
    """What a model is called: the name that was given, or for a model in memory where it was loaded from."""
    if isinstance(model, PreTrainedModel):
        return model.name_or_path or "model in memory"
    return str(model)


def read_run_record(name: str) -> RunRecord:
    """The `run_config.json` beside a model, a folder or an id on the Hub; empty if there is none."""
    path = find_file(name, RUN_FILE)
    return read_record(path, RunRecord) if path else {}


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model's or a tokenizer's folder that decide what it computes, or of one such file."""
    patterns = ("model*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json", "vocab.txt")
    files = []
    for pattern in patterns:
        files += Path(folder).glob(pattern)
    if not files:
        files = [Path(folder)]
    return short_hash([(file.name, content_hash(file)) for file in sorted(files)])
