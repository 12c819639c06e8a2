"""Loads any encoder of Transformers, ours or a stock one, with a head or without, and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from d2l_bert.folders import content_hash, short_hash
from d2l_bert.messages import reading_model, refuse_first
from d2l_bert.records import read_record
from d2l_bert.tokenization.existing_tokenizers import read_tokenizer

from .conversion import load_and_compare


# The commands that only a model with this head can do, by the end of its class; other commands take any encoder.
COMMANDS_OF_HEADS = {
    "ForMaskedLM": "evaluate, fill-mask, ",
    "ForNextSentencePrediction": "next-sentence, ",
    "ForSequenceClassification": "predict, ",
    "ForTokenClassification": "predict, ",
    "ForQuestionAnswering": "predict, ",
    "ForMultipleChoice": "predict, ",
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
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    refuse_first(
        {
            f"it is a {config.model_type} model with a decoder; give an encoder, such as a BERT": (
                config.is_encoder_decoder or getattr(config, "is_decoder", False)
            ),
            f"{auto_class.__name__} has no {config.model_type} model; give one of d2l-bert, or a stock BERT": (
                type(config) not in auto_class._model_mapping.keys()
            ),
        }
    )
    tokenizer = read_tokenizer(name, config)
    is_lacking = not tokenizer.is_fast or tokenizer.pad_token_id is None
    refuse_first({"it has no tokenizer.json, or its tokenizer has no padding token; give another model": is_lacking})
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
        model, missing, _ = load_and_compare(auto_class, name, dtype=torch.float32, trust_remote_code=False, **options)
        encoder = "" if model.base_model is model else f"{model.base_model_prefix}."
        lacking = sorted(weight for weight in missing if not may_lack(weight))
        refuse_first(
            {
                f"it has no {weight}; save it again with save_pretrained": (
                    weight.startswith(encoder) and "pooler." not in weight  # which belongs to the head for pairs
                )
                for weight in lacking
            }
        )
    saved = (config.architectures or ["model without a head"])[0]
    commands = "".join(COMMANDS_OF_HEADS[head] for head in COMMANDS_OF_HEADS if saved.endswith(head))
    refuse_first(
        {
            f"{name}: is a {saved}, and has no {weight}, which belongs to the head that is needed here; use it with "
            f"d2l-bert {commands}embed, attention or finetune": True
            for weight in lacking
        }
    )
    return model.eval(), tokenizer, missing


def load_encoder(name: str, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder of a model, without heads, and its tokenizer, as in `load_pretrained`; the pooler is not used."""
    model, tokenizer, _ = load_pretrained(AutoModel, name, lambda weight: "pooler" in weight, **options)
    return model, tokenizer


def read_run_record(name: str) -> dict:
    """The `run_config.json` beside a model, a folder or an id on the Hub; empty if there is none."""
    path = cached_file(name, "run_config.json", _raise_exceptions_for_missing_entries=False)
    return read_record(Path(path)) if path else {}


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model's or a tokenizer's folder that decide what it computes, or of one such file."""
    patterns = ("model*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json", "vocab.txt")
    files = [file for pattern in patterns for file in Path(folder).glob(pattern)] or [Path(folder)]
    return short_hash([(file.name, content_hash(file)) for file in sorted(files)])
