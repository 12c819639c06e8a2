"""Reads and compares models, ours and stock ones; checks and renames weights; how long a model's inputs may be."""

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from . import modeling_d2l_bert
from .configuration_d2l_bert import D2lBertConfig
from .modeling_d2l_bert import D2lBertModel, D2lBertPreTrainedModel


SAVE_AGAIN = "save the model again with save_pretrained, or copy its files again"


def read_ours(name: str) -> D2lBertPreTrainedModel:
    """
    A d2l-bert model, as an object of the class that was saved.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        ValueError: the model is of another kind, or weights are missing.
        OSError: there is no such model.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    model_class = getattr(modeling_d2l_bert, (config.architectures or ["D2lBertForPreTraining"])[0], None)
    if not isinstance(config, D2lBertConfig) or model_class is None:
        raise ValueError(
            f"it is a {config.model_type} model of class {config.architectures}, not a d2l-bert one; give one, "
            f"or convert a stock BERT with --from bert"
        )
    model, missing, _ = load_and_compare(model_class, name)
    if model_class is D2lBertModel and lacks(model, missing, "pooler"):
        model, missing, _ = load_and_compare(model_class, name, add_pooling_layer=False)
    if missing:
        raise ValueError(f"the model has no weights for {sorted(missing)[0]}; {SAVE_AGAIN}")
    return model


@contextlib.contextmanager
def without_log_messages() -> Iterator[None]:
    """Within the block, Transformers logs nothing, such as its report of the weights that a checkpoint lacks."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_and_compare(model_class, name: str, **options) -> tuple[PreTrainedModel, set[str], set[str]]:
    """
    Load a model with `from_pretrained`, without log messages.

    Args:
        name: a folder or an id on the Hub.
        options: arguments of `from_pretrained`.

    Returns:
        The model, the names of its weights that the checkpoint lacks, and the names of weights in the checkpoint that
        the model lacks.

    Raises:
        ValueError: a weight does not have the shape that the configuration gives, or is not finite.
    """
    try:
        with without_log_messages():
            model, report = model_class.from_pretrained(name, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            "a weight does not have the shape that config.json gives; put back the config.json that was saved with "
            "the weights"
        ) from None
    check_finite(model)
    return model, set(report["missing_keys"]), set(report["unexpected_keys"])


def check_finite(model: PreTrainedModel) -> None:
    """
    Refuse a model with a weight that is NaN or infinite: nothing that it computes means anything.

    Raises:
        ValueError: such a weight is there.
    """
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"its weights are not finite ({name} holds NaN or infinity); give an earlier checkpoint")


def lacks(model: PreTrainedModel, missing: set[str], module: str) -> bool:
    """
    Whether a checkpoint lacks a whole module of a model, such as `mlm`; not of one that the model lacks, too.

    Args:
        missing: the names of the weights that the checkpoint lacks.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(f"{module}.")}
    # A tied decoder is never missing, as the checkpoint has the token embedding.
    tied = {name for name in names if name.endswith("decoder.weight")} if is_tied(model) else set()
    return bool(names) and names - tied <= missing


def is_tied(model):
    """Whether the decoder and the token embedding share their matrix; for a model without decoder, as configured."""
    decoder = model.get_output_embeddings()
    if decoder is None:
        return model.config.tie_word_embeddings
    return decoder.weight is model.get_input_embeddings().weight


# ---------------------------------------------------------------------------------------------------------------------
# Names


def module_names(table, layers):
    """
    The names of the other model's modules by the names of our modules.

    Args:
        table: pairs of names, ours first; `{n}` stands for the number of a block.
        layers: the number of blocks.
    """
    return {
        ours.format(n=n): theirs.format(n=n)
        for ours, theirs in table
        for n in (range(layers) if "{n}" in ours else [""])
    }


def renamed(model, names):
    """
    The state dict of `model` with its modules renamed; a prefix `bert.` stays.

    Args:
        names: new names by old names, without the prefix `bert.`.

    Raises:
        ValueError: the model has a weight in a module that is not in `names`.
    """
    state = {}
    for name, value in model.state_dict().items():
        prefix = "bert." if name.startswith("bert.") else ""
        module, parameter = name.removeprefix(prefix).rsplit(".", 1)
        if module in names:
            state[f"{prefix}{names[module]}.{parameter}"] = value
        elif name != "cls.predictions.bias":  # a second name of the decoder's bias
            raise ValueError(
                f"{name}: d2l-bert has no weight of this name; remove the weight, and save the model again"
            )
    return state


def filled(model, state):
    """
    Load `state` into `model`, and return the model in the precision of `state` and in evaluation mode.

    Raises:
        ValueError: `state` lacks a weight of the model, or has one that the model lacks; or a weight in `state` does
            not have the model's shape, or is not finite.
    """
    model.to(functools.reduce(torch.promote_types, {value.dtype for value in state.values()}))
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the weights do not fit together ({reason:.300}); save all weights of one model") from None
    check_finite(model)
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------

# Transformers gives a tokenizer without a limit one of 1e30 tokens.
NO_LIMIT = 2**31


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """
    The most tokens of an input, special tokens included; None if there is no limit.

    Args:
        model: the encoder, with or without heads; its weights are not read, and may be on the device `meta`.
    """
    limits = [int(tokenizer.model_max_length)] if tokenizer.model_max_length < NO_LIMIT else []
    if (positions := getattr(model.config, "max_position_embeddings", None) or -1) > 0:
        tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
        # RoBERTa and its kin count positions from the id of the padding token on, plus 1; their tables know this id.
        unused = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
        limits.append(positions - max(unused, default=0))
    return min(limits, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Saving


# Fields of `D2lBertConfig` that a run with --init_from may change.
FREE_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


# The entry `auto_map` of config.json: the class that each Auto class loads with `trust_remote_code=True`.
AUTO_MAP = {
    "AutoConfig": "configuration_d2l_bert.D2lBertConfig",
    "AutoModel": "modeling_d2l_bert.D2lBertModel",
    "AutoModelForPreTraining": "modeling_d2l_bert.D2lBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_d2l_bert.D2lBertForMaskedLM",
    "AutoModelForNextSentencePrediction": "modeling_d2l_bert.D2lBertForNextSentencePrediction",
    "AutoModelForSequenceClassification": "modeling_d2l_bert.D2lBertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_d2l_bert.D2lBertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_d2l_bert.D2lBertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_d2l_bert.D2lBertForMultipleChoice",
}


def save_with_code(model, folder: Path) -> None:
    """Write a d2l-bert model: the weights, config.json with `auto_map`, and the two Python files of the model."""
    model.config.auto_map = dict(AUTO_MAP)
    save_model(model, folder)


def save_model(model, folder: Path) -> None:
    """Write the weights and config.json of any Transformers model."""
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors writes files that only the owner can read
