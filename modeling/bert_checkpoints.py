"""Converts stock BERT to a d2l-bert model and back: the same weights under other names.

Stock BERT normalises its embeddings. A model that the other side cannot express is refused, never approximated.
"""

import re
import shutil
from pathlib import Path

import transformers
from transformers import AutoConfig, BertConfig, BertForPreTraining, PreTrainedModel
from transformers.utils import cached_file

from . import modeling_d2l_bert
from .configuration_d2l_bert import ACTIVATIONS, D2lBertConfig
from .conversion import SAVE_AGAIN, filled, is_tied, lacks, load_and_compare, module_names, renamed
from .modeling_d2l_bert import D2lBertForMultipleChoice, D2lBertPreTrainedModel


# Names of modules in d2l-bert and in stock BERT; {n} is the number of a block. The prefix `bert.` is the same in both.
BERT_NAMES = (
    ("embeddings.word_embeddings", "embeddings.word_embeddings"),
    ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings"),
    ("embeddings.position_embeddings", "embeddings.position_embeddings"),
    ("embeddings.LayerNorm", "embeddings.LayerNorm"),
    ("encoder.layer.{n}.attention.query", "encoder.layer.{n}.attention.self.query"),
    ("encoder.layer.{n}.attention.key", "encoder.layer.{n}.attention.self.key"),
    ("encoder.layer.{n}.attention.value", "encoder.layer.{n}.attention.self.value"),
    ("encoder.layer.{n}.attention.output", "encoder.layer.{n}.attention.output.dense"),
    ("encoder.layer.{n}.addnorm1.LayerNorm", "encoder.layer.{n}.attention.output.LayerNorm"),
    ("encoder.layer.{n}.ffn.dense1", "encoder.layer.{n}.intermediate.dense"),
    ("encoder.layer.{n}.ffn.dense2", "encoder.layer.{n}.output.dense"),
    ("encoder.layer.{n}.addnorm2.LayerNorm", "encoder.layer.{n}.output.LayerNorm"),
    ("pooler.dense", "pooler.dense"),
    ("mlm.dense", "cls.predictions.transform.dense"),
    ("mlm.LayerNorm", "cls.predictions.transform.LayerNorm"),
    ("mlm.decoder", "cls.predictions.decoder"),
    ("nsp.output", "cls.seq_relationship"),
    ("classifier", "classifier"),
    ("qa_outputs", "qa_outputs"),
)
PRETRAINING_MODULES = ("cls.predictions", "cls.seq_relationship", "bert.pooler")
BIASES = {"cls.predictions.bias", "cls.predictions.decoder.bias"}  # two names of one tensor
SENTENCE_TRANSFORMER_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
# A checkpoint whose config.json names one of these classes may have the weights of all of them.
PRETRAINED = ("BertModel", "BertForMaskedLM", "BertForNextSentencePrediction", "BertForPreTraining")

OTHER_BERT = "give another BERT, or use this one with Transformers as it is"


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


def read_bert(name: str) -> tuple[PreTrainedModel, list[str]]:
    """
    A stock BERT with all heads that its checkpoint has.

    Args:
        name: a folder or an id on the Hub, with `model.safetensors` or `pytorch_model.bin`. Only tensors are read from
            `pytorch_model.bin`; no pickled code is run.

    Returns:
        The model, and the names of weights in the checkpoint that the model does not use.

    Raises:
        ValueError: the model is not a BERT that d2l-bert can express, or has no weights in PyTorch's formats.
        OSError: there is no such model.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not isinstance(config, BertConfig):
        way_out = "it needs no conversion" if isinstance(config, D2lBertConfig) else "give a stock BERT"
        raise ValueError(f"it is a {config.model_type} model, not a bert one; {way_out}")
    shared_fields(config)  # refuses an architecture that d2l-bert lacks, before gigabytes of weights are read
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if _our_class(model_class) is None or model_class.__name__ in PRETRAINED:
        model_class = BertForPreTraining  # the weights that are missing after loading tell which heads there are
    model, missing, unexpected = load_and_compare(model_class, name)
    if model_class is BertForPreTraining:
        without_mlm, without_nsp, without_pooler = (lacks(model, missing, module) for module in PRETRAINING_MODULES)
        if without_mlm or without_nsp:
            heads = {(True, False): "ForNextSentencePrediction", (False, True): "ForMaskedLM", (True, True): "Model"}
            model_class = getattr(transformers, "Bert" + heads[without_mlm, without_nsp])
            options = {"add_pooling_layer": False} if without_mlm and without_nsp and without_pooler else {}
            model, missing, unexpected = load_and_compare(model_class, name, **options)
    if BIASES <= set(dict(model.named_parameters(remove_duplicate=False))) and len(missing & BIASES) == 1:
        # The checkpoint has this bias under one of its two names: give the model the bias under both.
        predictions = model.cls.predictions
        kept = predictions.bias if "cls.predictions.decoder.bias" in missing else predictions.decoder.bias
        predictions.bias = predictions.decoder.bias = kept
        missing -= BIASES
    if missing:
        raise ValueError(f"the model has no weights for {sorted(missing)[0]}; {SAVE_AGAIN}")
    for key in sorted(unexpected):
        if re.match(r"(bert\.)?(encoder\.layer|embeddings)\.", key):
            raise ValueError(
                f"the checkpoint has a weight {key}, which does not exist in the model of config.json; put back the "
                f"config.json that was saved with the weights"
            )
    return model, sorted(unexpected)


def copy_sentence_transformer(name: str, folder: Path) -> None:
    """
    Copy the files that turn an encoder into a sentence-transformers model (pooling, lengths, prompts), if it has them.

    Args:
        name: the model to copy from, a folder or an id on the Hub.
        folder: the folder to copy to.
    """
    for file in SENTENCE_TRANSFORMER_FILES:
        if found := cached_file(name, file, _raise_exceptions_for_missing_entries=False):
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(found, folder / file)


def from_bert(model: PreTrainedModel) -> D2lBertPreTrainedModel:
    """
    Convert a stock BERT to the d2l-bert class with the same head. The weights stay the same, bit for bit.

    Raises:
        ValueError: d2l-bert cannot express this BERT, for the reason in the message.
    """
    our_class = _our_class(type(model))
    if our_class is None:
        raise ValueError(f"d2l-bert has no class for {type(model).__name__}; {OTHER_BERT}")
    config = D2lBertConfig(
        **{**shared_fields(model.config), "tie_word_embeddings": is_tied(model)},
        embedding_layer_norm=True,
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        problem_type=model.config.problem_type,
    )
    ours = our_class(config, **_pooling(model))
    return filled(
        ours,
        renamed(model, {theirs: our for our, theirs in _bert_names(our_class, config.num_hidden_layers).items()}),
    )


def to_bert(model: D2lBertPreTrainedModel) -> PreTrainedModel:
    """
    Convert a d2l-bert model to stock BERT, which loads without d2l-bert. The weights stay the same, bit for bit.

    Raises:
        ValueError: stock BERT cannot express this model.
    """
    if not model.config.embedding_layer_norm:
        raise ValueError(
            "stock BERT cannot express this model: stock BERT normalises the sum of the embeddings, and this model "
            "does not (embedding_layer_norm is false); load the model with d2l_bert or trust_remote_code=True, or "
            "write its ONNX files alone (d2l-bert export --onnx_only)"
        )
    shared = [name for name in D2lBertConfig.__annotations__ if name != "embedding_layer_norm"]
    config = BertConfig(
        **{**{name: getattr(model.config, name) for name in shared}, "tie_word_embeddings": is_tied(model)},
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        problem_type=model.config.problem_type,
    )
    bert = getattr(transformers, type(model).__name__.removeprefix("D2l"))(config, **_pooling(model))
    state = renamed(model, _bert_names(type(model), config.num_hidden_layers))
    if "cls.predictions.decoder.bias" in state:  # stock BERT has two names for this bias
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    return filled(bert, state)


def _our_class(bert_class):
    """The d2l-bert class that corresponds to a class of stock BERT; None if there is none."""
    if bert_class is None or not bert_class.__name__.startswith("Bert"):
        return None
    return getattr(modeling_d2l_bert, "D2l" + bert_class.__name__, None)


def shared_fields(config):
    """
    The fields of a BertConfig that `D2lBertConfig` has too.

    Raises:
        ValueError: d2l-bert cannot express the architecture, or a value is out of range.
    """
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    reasons = {
        "is a decoder (is_decoder, add_cross_attention)": config.is_decoder or config.add_cross_attention,
        f"has {positions} position embeddings, not absolute ones": positions != "absolute",
        f"has hidden_act {config.hidden_act}, not {' or '.join(ACTIVATIONS)}": config.hidden_act not in ACTIVATIONS,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"this BERT {reason}, which d2l-bert cannot express; {OTHER_BERT}")
    fields = {name: getattr(config, name) for name in D2lBertConfig.__annotations__ if hasattr(config, name)}
    D2lBertConfig(**fields)  # raises ValueError if a value is out of range
    return fields


def _pooling(model):
    """The argument of a model class that leaves out the pooler, if `model` has none."""
    return {"add_pooling_layer": False} if getattr(model, "pooler", ...) is None else {}


def _bert_names(our_class, layers):
    """Names of modules in stock BERT by their names in d2l-bert, for a class of d2l-bert."""
    names = module_names(BERT_NAMES, layers)
    if our_class is D2lBertForMultipleChoice:
        names["scorer"] = names.pop("classifier")
    return names
