"""Loads any pretrained encoder of Transformers, ours or a stock one, with a head or without, and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from d2l_bert.errors import UserError, reading_model, refuse_first
from d2l_bert.folders import content_hash, short_hash
from d2l_bert.modeling import conversion
from d2l_bert.training.existing_tokenizers import read_tokenizer


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
    cases = {
        f"it is a {config.model_type} model with a decoder; give an encoder, such as a BERT": (
            config.is_encoder_decoder or getattr(config, "is_decoder", False)
        ),
        f"{auto_class.__name__} has no {config.model_type} model; give one of d2l-bert, or a stock BERT": (
            type(config) not in auto_class._model_mapping.keys()
        ),
    }
    refuse_first(cases)
    tokenizer = read_tokenizer(name, config)
    if tokenizer is None or not tokenizer.is_fast or tokenizer.pad_token_id is None:
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
            more tokens than the model.
    """
    logging.disable_progress_bar()
    with reading_model(name):
        config, tokenizer = read_parts(auto_class, name)
        model, missing, _ = conversion.load_and_compare(
            auto_class, name, dtype=torch.float32, trust_remote_code=False, **options
        )
        if lacking := sorted(weight for weight in missing if not may_lack(weight)):
            raise UserError(
                f"it was saved as {(config.architectures or ['a model without a head'])[0]}, without weights for "
                f"{lacking[0]}; give a model that was trained with this head, or save it there again with "
                f"save_pretrained"
            )
    return model.eval(), tokenizer, missing


def load_encoder(name: str, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder of a model, without heads, and its tokenizer, as in `load_pretrained`; the pooler is not used."""
    model, tokenizer, _ = load_pretrained(AutoModel, name, lambda weight: "pooler" in weight, **options)
    return model, tokenizer


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model's or a tokenizer's folder that decide what it computes, or of one such file."""
    patterns = ("model*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json", "vocab.txt")
    of_folder = (file for pattern in patterns for file in Path(folder).glob(pattern))
    files = [Path(folder)] if Path(folder).is_file() else sorted(of_folder)
    return short_hash([(file.name, content_hash(file)) for file in files])
