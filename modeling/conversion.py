"""What conversions share: checkpoints of ours read and compared, weights renamed."""

import functools

import torch
from transformers import AutoConfig, BertConfig, PreTrainedModel
from transformers.utils import logging

from . import modeling_d2l_bert
from .configuration_d2l_bert import D2lBertConfig
from .modeling_d2l_bert import D2lBertModel, D2lBertPreTrainedModel


ANEW = "save the model there again with save_pretrained, or copy its files anew"


def read_ours(name: str) -> D2lBertPreTrainedModel:
    """
    A model of ours with the heads that it was saved with.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        ValueError: it is another model.
        OSError: nothing there.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    model_class = getattr(modeling_d2l_bert, (config.architectures or ["D2lBertForPreTraining"])[0], None)
    if not isinstance(config, D2lBertConfig) or model_class is None:
        mend = "give a model of d2l-bert"
        if isinstance(config, BertConfig):
            mend = "it is stock BERT already, and --from bert makes it ours"
        if isinstance(config, D2lBertConfig):
            raise ValueError(
                f"its config.json names a class that d2l-bert has not, {config.architectures[0]}; put back the one "
                f"that was saved with the weights"
            )
        raise ValueError(f"it is a {config.model_type} model, not a d2l-bert one; {mend}")
    model, missing, _ = load_and_compare(model_class, name)
    if model_class is D2lBertModel and lacks(model, missing, "pooler"):
        model, missing, _ = load_and_compare(model_class, name, add_pooling_layer=False)
    if missing:
        raise ValueError(f"it has no weights for {sorted(missing)[0]}; {ANEW}")
    return model


def load_and_compare(model_class, name: str, **options) -> tuple[PreTrainedModel, set[str], set[str]]:
    """
    `from_pretrained` without its report: the model, the names that the checkpoint lacks, and those it has too many.

    Raises:
        ValueError: a weight of another shape than the configuration says.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        model, report = model_class.from_pretrained(name, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            "a weight has another shape than its config.json says; put back the config.json that was saved with it"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return model, set(report["missing_keys"]), set(report["unexpected_keys"])


def lacks(model: PreTrainedModel, missing: set[str], part: str) -> bool:
    """Whether all weights of a part are missing."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(f"{part}.")}
    tied = {name for name in names if name.endswith("decoder.weight")} if is_tied(model) else set()
    return names - tied <= missing


def is_tied(model):
    """Whether the decoder is the embedding; where there is no decoder, whether the configuration says so."""
    decoder = model.get_output_embeddings()
    if decoder is None:
        return model.config.tie_word_embeddings
    return decoder.weight is model.get_input_embeddings().weight


# ---------------------------------------------------------------------------------------------------------------------
# Names


def module_names(table, layers):
    """Our module -> theirs, written out for every block."""
    return {
        ours.format(n=n): theirs.format(n=n)
        for ours, theirs in table
        for n in (range(layers) if "{n}" in ours else [""])
    }


def renamed(model, names):
    """The state dict of `model` under other names; the encoder's prefix `bert.` stays where it is."""
    state = {}
    for name, value in model.state_dict().items():
        prefix = "bert." if name.startswith("bert.") else ""
        module, leaf = name.removeprefix(prefix).rsplit(".", 1)
        if module in names:
            state[f"{prefix}{names[module]}.{leaf}"] = value
        elif name != "cls.predictions.bias":  # the decoder's bias, once more
            raise ValueError(f"{name}: d2l-bert knows no weight of this name; take it out, and save the model again")
    return state


def filled(model, state):
    """`model` with the weights of `state`, in its precision; every weight, and no other."""
    for name, value in model.state_dict().items():
        if name in state and state[name].shape != value.shape:
            raise ValueError(
                f"{name}: has shape {tuple(state[name].shape)}, where {tuple(value.shape)} is wanted by the other "
                f"weights; save all of one model again"
            )
    model.to(functools.reduce(torch.promote_types, {value.dtype for value in state.values()}))
    model.load_state_dict(state, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    return model.eval()
