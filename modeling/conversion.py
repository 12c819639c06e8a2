"""Loads models; converts stock BERT to a d2l-bert model and back, and compares them; saves; the longest input.

Stock BERT normalises its embeddings. A model that the other side cannot express is refused, never approximated.
"""

import copy
import json
import math
import re
import shutil
from pathlib import Path
from typing import TypedDict

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import BertConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.records import check_type
from d2l_bert.tokenization import model_files, weight_files
from d2l_bert.tokenization.model_files import without_log_messages

from . import modeling_d2l_bert
from .configuration_d2l_bert import ACTIVATIONS, D2lBertConfig


# Entries of config.json by which Transformers would run code of the model's repository.
ENTRIES_OF_CODE = ("auto_map", "custom_pipelines")


def read_config(name: str) -> PreTrainedConfig:
    """
    The configuration of a model of Transformers' own kinds or ours, for use in a block of `reading_model`.

    What of config.json would change how this package reads a model is not taken over: code of its own, a kernel for
    the attention, and the form of the outputs (`return_dict`, `output_attentions`, `output_hidden_states`).

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: a file of the folder is refused (`check_folder`), an entry of config.json is out of its range, or
            the model is a decoder, or has one.
        Exception: one of Transformers or the Hub's client, if there is no such model.
    """
    model_files.check_folder(name)
    try:
        with without_log_messages():
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except AttributeError as error:  # an entry has the name of a property or a method, such as `sub_configs`
        raise UserError(f"config.json: has an entry that no model has ({error!s:.100}); take it out") from None
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise UserError(f"it is a {config.model_type} model with a decoder; give an encoder, such as a BERT")
    for entry in ENTRIES_OF_CODE:
        if hasattr(config, entry):
            delattr(config, entry)
    config.return_dict = True
    config.chunk_size_feed_forward = 0  # it would save memory, and fails for lengths that it does not divide
    config.output_hidden_states = False
    config._attn_implementation = None  # before `output_attentions`, which another implementation may refuse
    config.output_attentions = False
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        value = getattr(config, field, 1)
        numbers = value if isinstance(value, (list, tuple)) else [value]  # of a Funnel Transformer or a ConvBERT
        if not all(type(number) is int and number >= 1 for number in numbers):
            raise UserError(f"config.json: {field} must be a whole number of at least 1, got {value!r:.100}")
    for field, value in config.to_dict().items():
        if field.endswith("eps") and not (_is_within(value, 0, 10) and value > 0):
            raise UserError(f"config.json: {field} must be a small number above 0, got {value!r:.100}")
        if "dropout" in field and value is not None and not _is_within(value, 0, 1):
            raise UserError(f"config.json: {field} must be a probability, got {value!r:.100}")
    if sorted(config.id2label) != list(range(config.num_labels)):
        raise UserError("config.json: id2label must name the labels 0, 1, 2 and so on; put back what was saved")
    return config


def _is_within(value, least, most):
    """Whether a value is a number in this range; true and false, as some configurations have them, are 1 and 0."""
    return isinstance(value, (int, float)) and least <= value <= most


# Weights that a model has and its file may lack are those of heads, and a pooler: less than the encoder's in all but
# tiny models, which have no more than these.
FEW_WEIGHTS = 2**24


def check_sizes(model_class, name: str, config: PreTrainedConfig, pickles: bool = True) -> None:
    """
    Hold the model that config.json describes against the file of its weights, before anything of its size is made.

    Args:
        model_class: a class of models, or an Auto class.
        name: a folder or an id on the Hub.
        config: from `read_config`.
        pickles: whether weights are read from pytorch_model.bin.

    Raises:
        UserError: the weights cannot be in the file, or one is there in whole numbers, or in others that are no
            weights.
    """
    stored = weight_files.stored_weights(name, pickles)
    if not stored:
        return  # Transformers says which files it looks for
    way_out = "put back the config.json that was saved with the weights"
    if place := model_files.place_of_wrong_count(config.to_dict(), len(stored)):
        raise UserError(f"config.json: {place} is more than the {len(stored)} weights of the file; {way_out}")
    make = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        with torch.device("meta"), without_log_messages():  # shapes alone
            model = make(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"config.json describes no model that can be made ({error!s:.100}); {way_out}") from None
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = sum(math.prod(weight.shape) for weight in stored.values())
    if described > 3 * held + FEW_WEIGHTS:
        raise UserError(
            f"config.json describes a model of {described:,} weights, and the file has {held:,}; {way_out}"
        )
    # A file may have the names with the prefix of its model with a head, or without; and those of old LayerNorms.
    prefix = f"{model.base_model_prefix}."
    names = {weight.removeprefix(prefix) for weight, _ in model.named_parameters(remove_duplicate=False)}
    for weight, (_, kind) in stored.items():
        of_today = weight.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if kind not in weight_files.KINDS_OF_WEIGHTS and of_today.removeprefix(prefix) in names:
            raise UserError(f"its weight {weight} holds numbers of the kind {kind}; save the model in float32")


def load_and_compare(model_class, name: str | None, **options) -> tuple[PreTrainedModel, set[str], set[str]]:
    """
    Load a model with `from_pretrained`, without log messages, in evaluation mode.

    Args:
        name: a folder or an id on the Hub, whose sizes are checked (`check_sizes`); None if `options` hold a
            `state_dict`.
        options: arguments of `from_pretrained`, among them `config`, with a name that of `read_config`.

    Returns:
        The model, the names of its weights that the checkpoint lacks, and the names of weights in the checkpoint that
        the model lacks. With `ignore_mismatched_sizes`, a weight of another shape is one that the checkpoint lacks.

    Raises:
        UserError: a weight does not have the shape that the configuration gives, or is not finite; or the model that
            the configuration describes cannot be in the file of weights, or does not compute.
    """
    if name is not None:
        check_sizes(model_class, name, options["config"], not options.get("use_safetensors"))
    try:
        with without_log_messages():
            model, report = model_class.from_pretrained(name, output_loading_info=True, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise UserError(
            "a weight does not have the shape that config.json gives; put back the config.json that was saved with "
            "the weights"
        ) from None
    check_finite(model)
    if name is not None:
        check_computes(model)
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return model, missing, set(report["unexpected_keys"])


@torch.no_grad()
def check_computes(model: PreTrainedModel) -> None:
    """
    Compute a short text: an entry of config.json that no check knows may have a value that fails only then.

    Raises:
        UserError: the model fails.
    """
    length = min(7, getattr(model.config, "max_position_embeddings", None) or 7)
    ids = torch.full((1, max(1, length)), min(5, model.config.vocab_size - 1))
    if type(model).__name__.endswith("ForMultipleChoice"):
        ids = ids[None]
    try:
        with without_log_messages():
            outputs = model.eval()(input_ids=ids)
    except Exception as error:
        raise UserError(
            f"it cannot compute a text ({' '.join(str(error).split()):.150}); put back the config.json that was saved "
            f"with the weights"
        ) from None
    for output in outputs.values():
        if isinstance(output, torch.Tensor):
            check_outputs(output)


def check_outputs(output: torch.Tensor, prefix: str = "") -> None:
    """Refuse what a model has computed if a number of it is NaN or infinite; raises `UserError`, after `prefix`."""
    if not output.isfinite().all():
        raise UserError(f"{prefix}what it computes of a text is not finite, its weights being too large; give others")


# The largest absolute value of a weight. Those of trained models are below 100; products of much larger ones overflow.
LARGEST_WEIGHT = 10_000


@torch.no_grad()
def check_finite(model: PreTrainedModel) -> None:
    """
    Refuse a model with a weight that is NaN, infinite or beyond any trained model's: nothing that it computes means
    anything, be it only for the texts that have one token.

    Raises:
        UserError: such a weight is there.
    """
    for name, weight in model.named_parameters():
        if weight.numel() == 0:
            continue
        least, most = map(float, weight.aminmax())
        if not math.isfinite(least + most):
            raise UserError(f"its weights are not finite ({name} holds NaN or infinity); give an earlier checkpoint")
        if max(-least, most) > LARGEST_WEIGHT:
            raise UserError(
                f"its weights are too large, so that what it computes is not finite for some texts ({name} holds "
                f"{max(-least, most):.1e}); give an earlier checkpoint"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Names of weights and outputs of models


def renamed(state: dict[str, object], table: tuple[tuple[str, str], ...], back: bool = False) -> dict[str, object]:
    """
    A state dict with the names of another kind of model.

    Args:
        state: values by the names of weights.
        table: parts of names, ours and theirs. Each is replaced in all names, one after the other in the order of the
            table: what one has replaced, a later one may replace again.
        back: whether theirs become ours.
    """
    for ours, theirs in table:
        old, new = (theirs, ours) if back else (ours, theirs)
        state = {name.replace(old, new): value for name, value in state.items()}
    return state


def example_inputs(model: torch.nn.Module, rows: int = 8) -> dict[str, torch.Tensor]:
    """
    Random token ids in two segments (rows, at most 48), always the same; each row ends in some padding. For multiple
    choice they are the choices of one row (1, rows, at most 48).
    """
    config = model.config
    generator = torch.Generator().manual_seed(0)
    length = min(48, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    places = torch.arange(length)
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
    segments = (places >= ends // 2).long() * (config.type_vocab_size > 1)
    inputs = {"input_ids": ids, "attention_mask": (places < ends).long(), "token_type_ids": segments}
    if type(model).__name__.endswith("ForMultipleChoice"):
        return {name: tensor[None] for name, tensor in inputs.items()}
    return inputs


@torch.no_grad()
def largest_difference(model: torch.nn.Module, other) -> float:
    """The largest difference of the outputs of `other` from the model's, for `example_inputs`, padding left out."""
    inputs = example_inputs(model)
    is_real = inputs["attention_mask"].bool()
    outputs = model(**inputs)
    differences = []
    for name, output in other(**inputs).items():
        difference = (outputs[name] - output).abs()
        if difference.shape[:2] == is_real.shape:  # a row of each token
            difference = difference[is_real]
        differences.append(float(difference.max()))
    return max(differences)


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


# Parts of the names of weights in d2l-bert and in stock BERT, for `renamed`; all other parts are the same in both.
BERT_NAMES = (
    (".attention.query.", ".attention.self.query."),
    (".attention.key.", ".attention.self.key."),
    (".attention.value.", ".attention.self.value."),
    (".attention.output.", ".attention.output.dense."),
    (".addnorm1.LayerNorm.", ".attention.output.LayerNorm."),
    (".ffn.dense1.", ".intermediate.dense."),
    (".ffn.dense2.", ".output.dense."),
    (".addnorm2.LayerNorm.", ".output.LayerNorm."),
    ("mlm.decoder.", "cls.predictions.decoder."),
    ("mlm.decoder.bias", "cls.predictions.bias"),  # its second name, which a stock BERT without ties does not read
    ("mlm.", "cls.predictions.transform."),
    ("nsp.output.", "cls.seq_relationship."),
)
# Fields of a configuration that both sides have, with the same meaning.
SHARED_FIELDS = [name for name in D2lBertConfig.__annotations__ if name != "embedding_layer_norm"]
SHARED_FIELDS += ["id2label", "label2id", "problem_type"]
# Classes, with the most heads first, and arguments of `from_pretrained`. A checkpoint whose config.json names one of
# these classes may have the weights of any other: it is loaded as the first of which it lacks no weight.
PRETRAINED = (
    ("BertForPreTraining", {}),
    ("BertForMaskedLM", {}),
    ("BertForNextSentencePrediction", {}),
    ("BertModel", {}),
    ("BertModel", {"add_pooling_layer": False}),
)
# The names of weights of the heads of pretraining, ours and stock BERT's.
HEAD_WEIGHT = re.compile(r"(mlm|nsp|cls)\.")

# What turns an encoder into a sentence-transformers model: its modules, the settings of lengths and prompts, and a
# folder such as 1_Pooling for each module behind the encoder.
SENTENCE_TRANSFORMER_FILES = [
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "[0-9]_*/pytorch_model.bin",
]


def read_model(
    name: str, config_classes: tuple[type, ...] = (D2lBertConfig, BertConfig)
) -> tuple[modeling_d2l_bert.D2lBertPreTrainedModel, list[str]]:
    """
    A d2l-bert model, or a stock BERT as one, with all heads that its checkpoint has.

    Args:
        name: a folder or an id on the Hub, with `model.safetensors` or `pytorch_model.bin`. Only tensors are read from
            `pytorch_model.bin`; no pickled code is run.
        config_classes: those of the configuration that the model may have.

    Returns:
        The model, and the names of weights in the checkpoint that it does not use.

    Raises:
        ValueError: the model is of another kind, weights are missing, or d2l-bert cannot express it.
        OSError: there is no such model, or it has no weights in PyTorch's formats.
    """
    config = read_config(name)
    wanted = " or ".join(config_class.model_type for config_class in config_classes)
    if not isinstance(config, config_classes):
        raise UserError(f"it is a {config.model_type} model; give a {wanted} one")
    module_of_classes = modeling_d2l_bert
    prefix = "D2l"
    if isinstance(config, BertConfig):
        our_config(config)  # refuses an architecture that d2l-bert lacks, before gigabytes of weights are read
        module_of_classes = transformers
        prefix = ""
    saved_class = (config.architectures or [""])[0].removeprefix("D2l")
    candidates = PRETRAINED
    if saved_class not in dict(PRETRAINED) and hasattr(modeling_d2l_bert, f"D2l{saved_class}"):
        candidates = [(saved_class, {})]  # a fine-tuned head: config.json names the class for certain
    # Two names of one weight of a stock BERT.
    names_of_bias = {"cls.predictions.decoder.bias", "cls.predictions.bias"}
    for class_name, options in candidates:
        model_class = getattr(module_of_classes, prefix + class_name)
        model, missing, unused = load_and_compare(model_class, name, config=config, **options)
        if missing == {"cls.predictions.decoder.bias"}:  # as Transformers 4 saves a BERT that is not tied
            model.cls.predictions.decoder.bias = model.cls.predictions.bias
        if missing < names_of_bias:  # nothing is missing, or the weight has only one of its names
            break
    else:
        raise UserError(f"the model has no weights for {min(missing)}; save the model again with save_pretrained")
    for weight in sorted(unused):
        if re.match(r"(bert\.)?(encoder\.layer|embeddings)\.", weight):
            raise UserError(
                f"the checkpoint has a weight {weight}, which does not exist in the model of config.json; put back "
                f"the config.json that was saved with the weights"
            )
    # Weights of a head that is not whole, as of an MLM head without its decoder: the model has no such head, and its
    # class passes over them in silence.
    unused |= {weight for weight in weight_files.stored_weights(name) if HEAD_WEIGHT.match(weight)} - _names_in(model)
    return from_bert(model) if module_of_classes is transformers else model, sorted(unused)


def _names_in(model):
    """The names of a model's weights, also as old checkpoints have them."""
    names = set(model.state_dict())
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in names}
    return names | old | {name.replace("LayerNorm.bias", "LayerNorm.beta") for name in names}


def our_config(config: BertConfig) -> D2lBertConfig:
    """
    The configuration of a stock BERT as that of a d2l-bert model.

    Raises:
        ValueError: d2l-bert cannot express the architecture, or a value is out of range.
    """
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    way_out = "which d2l-bert cannot express; give another BERT"
    if config.is_decoder or config.add_cross_attention:
        raise UserError(f"this BERT is a decoder (is_decoder, add_cross_attention), {way_out}")
    if positions != "absolute":
        raise UserError(f"this BERT has {positions} position embeddings, not absolute ones, {way_out}")
    if config.hidden_act not in ACTIVATIONS:
        raise UserError(f"this BERT has hidden_act {config.hidden_act}, not {' or '.join(ACTIVATIONS)}, {way_out}")
    return D2lBertConfig(**{name: getattr(config, name) for name in SHARED_FIELDS}, embedding_layer_norm=True)


def from_bert(bert: PreTrainedModel) -> modeling_d2l_bert.D2lBertPreTrainedModel:
    """
    The d2l-bert model with the head and the weights of a stock BERT, bit for bit.

    Raises:
        ValueError: d2l-bert cannot express this BERT, or computes something else.
    """
    our_class = getattr(modeling_d2l_bert, f"D2l{type(bert).__name__}")
    return _converted(bert, our_class, our_config(bert.config), back=True)


def to_bert(model: modeling_d2l_bert.D2lBertPreTrainedModel) -> PreTrainedModel:
    """
    The stock BERT with the head and the weights of a d2l-bert model, bit for bit. It loads without d2l-bert.

    Raises:
        ValueError: stock BERT cannot express this model, or computes something else.
    """
    if not model.config.embedding_layer_norm:
        raise UserError(
            "stock BERT cannot express this model: stock BERT normalises the sum of the embeddings, and this model "
            "does not (embedding_layer_norm is false); write its ONNX files alone: d2l-bert export --onnx_only"
        )
    values = {name: getattr(model.config, name) for name in SHARED_FIELDS}
    for name in ("initializer_range", "layer_norm_eps"):  # stock BERT takes no whole number for them
        values[name] = float(values[name])
    config = BertConfig(**values)
    return _converted(model, getattr(transformers, type(model).__name__.removeprefix("D2l")), config, back=False)


def _converted(model, other_class, config, back):
    """The model of the other class with the weights of a model in evaluation mode; `back`: from stock BERT to ours."""
    # Here the layer is named `scorer`, or other heads would load it, whose shape differs, as their `classifier`.
    is_choice = other_class.__name__.endswith("ForMultipleChoice")
    table = (*BERT_NAMES, ("scorer.", "classifier.")) if is_choice else BERT_NAMES
    state = renamed(model.state_dict(), table, back)
    if "cls.predictions.decoder.bias" in state:
        # A copy: `save_pretrained` leaves out one of two weights that share their memory.
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"].clone()
    options = {}
    if hasattr(model, "pooler") and model.pooler is None:  # an encoder that was saved without the layer for [CLS]
        options["add_pooling_layer"] = False
    converted, *_ = load_and_compare(other_class, None, config=config, state_dict=state, dtype=model.dtype, **options)
    # In float64, where no difference is one of rounding.
    difference = largest_difference(copy.deepcopy(model).double(), copy.deepcopy(converted).double())
    if not difference < 1e-6:  # NaN is not
        raise UserError(f"the outputs of the converted model differ by {difference:.1e}; use the model as it is")
    return converted


def copy_sentence_transformer(name: str, folder: Path) -> None:
    """
    Copy the `SENTENCE_TRANSFORMER_FILES` that there are; raises `UserError` for links out of the folder, and as below.

    Args:
        name: the model to copy from, a folder or an id on the Hub.
        folder: the folder to copy to.
    """
    place = Path(name if Path(name).is_dir() else snapshot_download(name, allow_patterns=SENTENCE_TRANSFORMER_FILES))
    check_modules(place)
    for pattern in SENTENCE_TRANSFORMER_FILES:
        for file in sorted(place.glob(pattern)):
            model_files.check_within(file, place)
            copied = folder / file.relative_to(place)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copied)


def check_modules(folder: Path) -> None:
    """
    Refuse a modules.json of sentence-transformers that names other code than that of sentence-transformers, or modules
    outside of the folder.

    Raises:
        UserError: it does, or it cannot be read.
    """
    file = folder / "modules.json"
    model_files.check_within(file, folder)
    if not file.is_file():
        return
    with explained(f"{file}: cannot be read", "put the right one back, or take it out", *READ_ERRORS, RecursionError):
        modules = json.loads(file.read_text(encoding="utf-8"))
        check_type(modules, list[Module])
        for module in modules:
            if "." in module["type"] and not module["type"].startswith("sentence_transformers."):
                raise ValueError(f"the type {module['type']!r:.100} is none of sentence-transformers")
            if not re.fullmatch(r"(\w[\w-]*)?", module["path"]):
                raise ValueError(f"the path {module['path']!r:.100} is no folder in it")


class Module(TypedDict):
    """A module in modules.json."""

    type: str
    path: str


# ---------------------------------------------------------------------------------------------------------------------

# More tokens than an input has. Transformers gives a tokenizer without a limit one of 1e30 tokens.
NO_LIMIT = 2**31


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """
    The most tokens of an input, special tokens included; `NO_LIMIT` if there is no limit.

    Args:
        model: the encoder, with or without heads; its weights are not read, and may be on the device `meta`.
    """
    limits = [min(int(tokenizer.model_max_length), NO_LIMIT)]
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    if positions > 0:
        # RoBERTa and its kin count positions from the id of the padding token on, plus 1; their tables know this id.
        unused = 0
        for name, module in model.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                unused = max(unused, module.padding_idx + 1)
        limits.append(positions - unused)
    return min(limits)


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save_model(model: PreTrainedModel, folder: str | Path) -> None:
    """
    Write the weights and config.json of a Transformers model; of a d2l-bert model also its two Python files, and
    `auto_map` in config.json.
    """
    if isinstance(model, modeling_d2l_bert.D2lBertPreTrainedModel):
        model.config.auto_map = dict(modeling_d2l_bert.AUTO_MAP)
    model.save_pretrained(folder)
    for weights in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder, "config.json"), weights)  # safetensors writes files that only the owner can read
