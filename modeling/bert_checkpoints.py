"""Checkpoints of stock BERT <-> ours: the same numbers under other names.

Stock BERT normalises its embeddings. What one of the two cannot express is refused, never approximated.
"""

import json
import re
import shutil
from pathlib import Path

import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, BertConfig, BertForPreTraining, PreTrainedModel
from transformers.utils import cached_file

from . import modeling_d2l_bert
from .configuration_d2l_bert import ACTIVATIONS, D2lBertConfig
from .conversion import ANEW, filled, is_tied, lacks, load_and_compare, module_names, renamed
from .modeling_d2l_bert import D2lBertForMultipleChoice, D2lBertPreTrainedModel


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
PRETRAINING_PARTS = ("cls.predictions", "cls.seq_relationship", "bert.pooler")
BIASES = {"cls.predictions.bias", "cls.predictions.decoder.bias"}
SENTENCE_TRANSFORMER_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
# Heads that one checkpoint may hold together, whichever of them it is named after.
PRETRAINED = ("BertModel", "BertForMaskedLM", "BertForNextSentencePrediction", "BertForPreTraining")

OTHER_BERT = "give another BERT, or use this one with Transformers as it is"


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


def read_bert(name: str) -> tuple[PreTrainedModel, list[str]]:
    """
    A stock BERT with all the heads that its checkpoint holds.

    Args:
        name: a folder or an id on the Hub; `model.safetensors` or `pytorch_model.bin`, of which only tensors are read.

    Returns:
        The model, and the names in the checkpoint that it has no place for.

    Raises:
        ValueError: it is not a BERT, or holds no weights that PyTorch reads.
        OSError: nothing there.
    """
    folder = Path(name)
    if folder.is_file():
        raise ValueError("it is a file; give the folder that holds it and its config.json")
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(
            "it holds no model.safetensors and no pytorch_model.bin, and TensorFlow weights are not read; save the "
            "model there from PyTorch with save_pretrained"
        )
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not isinstance(config, BertConfig):
        mend = "it is ours already, so take it as it is" if isinstance(config, D2lBertConfig) else "give a stock BERT"
        raise ValueError(f"it is a {config.model_type} model, not a bert one; {mend}")
    _bert_numbers(config)  # what we cannot be is refused before gigabytes are read
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if _our_class(model_class) is None or model_class.__name__ in PRETRAINED:
        model_class = BertForPreTraining  # it shows which heads there are
    model, missing, unexpected = load_and_compare(model_class, name)
    if model_class is BertForPreTraining:
        without_mlm, without_nsp, without_pooler = (lacks(model, missing, part) for part in PRETRAINING_PARTS)
        if without_mlm or without_nsp:
            heads = {(True, False): "ForNextSentencePrediction", (False, True): "ForMaskedLM", (True, True): "Model"}
            model_class = getattr(transformers, "Bert" + heads[without_mlm, without_nsp])
            options = {"add_pooling_layer": False} if without_mlm and without_nsp and without_pooler else {}
            model, missing, unexpected = load_and_compare(model_class, name, **options)
    if BIASES <= set(dict(model.named_parameters(remove_duplicate=False))) and len(missing & BIASES) == 1:
        # One bias under two names, of which only one was saved.
        predictions = model.cls.predictions
        kept = predictions.bias if "cls.predictions.decoder.bias" in missing else predictions.decoder.bias
        predictions.bias = predictions.decoder.bias = kept
        missing -= BIASES
    if missing:
        raise ValueError(f"it has no weights for {sorted(missing)[0]}; {ANEW}")
    for key in sorted(unexpected):
        if re.match(r"(bert\.)?(encoder\.layer|embeddings)\.", key):
            raise ValueError(
                f"its config.json has no place for {key}: it is another model's; put back the one that was saved with "
                f"the weights"
            )
    return model, sorted(unexpected)


def copy_sentence_transformer(name: str, folder: Path) -> None:
    """
    Copy what makes a sentence-transformers model of an encoder (pooling, lengths, prompts), if `name` brings it.

    Raises:
        ValueError: its list of modules is damaged, or names a place that is not below it.
    """
    listed = cached_file(name, "modules.json", _raise_exceptions_for_missing_entries=False)
    if listed is None:
        return
    try:
        parts = [module["path"] for module in json.loads(Path(listed).read_text(encoding="utf-8")) if module["path"]]
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            "its modules.json is no list of sentence-transformers modules; put back the one that was saved, or take "
            "it out"
        ) from None
    for part in parts:
        if not isinstance(part, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", part):
            raise ValueError(
                f"its modules.json names {part!r}, which is no folder below it; put back the one that was saved, or "
                f"take it out"
            )
    patterns = [*SENTENCE_TRANSFORMER_FILES, *(f"{part}/*" for part in parts)]
    source = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=patterns))
    for file in SENTENCE_TRANSFORMER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    for part in parts:
        if (source / part).is_dir():  # a module without numbers of its own, such as Normalize, need not have one
            shutil.copytree(source / part, folder / part, dirs_exist_ok=True)


def from_bert(model: PreTrainedModel) -> D2lBertPreTrainedModel:
    """
    A stock BERT as ours, with the same head; the weights are the same numbers, bit for bit.

    Raises:
        ValueError: a BERT that our switches cannot express; it says why.
    """
    our_class = _our_class(type(model))
    if our_class is None:
        raise ValueError(f"{type(model).__name__} is none of the BERTs that d2l-bert has; {OTHER_BERT}")
    config = D2lBertConfig(
        **{**_bert_numbers(model.config), "tie_word_embeddings": is_tied(model)},
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
    Ours as a stock BERT, usable where no code of ours is; the weights are the same numbers, bit for bit.

    Raises:
        ValueError: stock BERT cannot express this model.
    """
    if not model.config.embedding_layer_norm:
        raise ValueError(
            "stock BERT cannot express this model: it normalises the sum of the embeddings, which this one does not "
            "(embedding_layer_norm is false); load it with d2l_bert or trust_remote_code=True"
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
    if "cls.predictions.decoder.bias" in state:  # stock BERT has it under two names
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    return filled(bert, state)


def _our_class(bert_class):
    if bert_class is None or not bert_class.__name__.startswith("Bert"):
        return None
    return getattr(modeling_d2l_bert, "D2l" + bert_class.__name__, None)


def _bert_numbers(config):
    """The fields of ours that a BertConfig has too, if ours mean the same."""
    if config.is_decoder or config.add_cross_attention:
        raise ValueError(
            f"this BERT is a decoder (is_decoder, add_cross_attention), and d2l-bert has encoders only; {OTHER_BERT}"
        )
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise ValueError(
            f"this BERT has {positions} position embeddings, and d2l-bert has absolute ones only; {OTHER_BERT}"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"this BERT has hidden_act {config.hidden_act}, and d2l-bert has {', '.join(ACTIVATIONS)} only; "
            f"{OTHER_BERT}"
        )
    numbers = {name: getattr(config, name) for name in D2lBertConfig.__annotations__ if hasattr(config, name)}
    D2lBertConfig(**numbers)  # refuses numbers that no BERT has
    return numbers


def _pooling(model):
    has_none = getattr(model, "pooler", ...) is None
    return {"add_pooling_layer": False} if has_none else {}


def _bert_names(our_class, layers):
    names = module_names(BERT_NAMES, layers)
    if our_class is D2lBertForMultipleChoice:
        names["scorer"] = names.pop("classifier")
    return names
