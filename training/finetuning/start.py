"""The model that a fine-tuning starts from: its configuration, tokenizer and weights, with a fresh head."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from d2l_bert.messages import UserError, reading_model
from d2l_bert.modeling import conversion
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.modeling.loading import hash_of_model, read_parts
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.kind import Kind


logger = logging.getLogger(__name__)


# Dropout for fine-tuning if the model was pretrained without: BERT's (Devlin et al., 2018, appendix A.2).
DROPOUT = 0.1

# The names of the three dropout rates in the configurations of Transformers' encoders, the usual name first.
DROPOUT_FIELDS = {
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "seq_classif_dropout", "classifier_dropout_prob"),
}


@dataclass
class Start:
    """
    The model that a run starts from.

    Args:
        name: the folder or the id on the Hub.
        config: the configuration, with the dropout of the run.
        revision: the commit of a model on the Hub; None for a folder.
        fingerprint: a hash of the files of a folder; None for a model on the Hub.
        max_seq_length: most tokens of a row.
        dropout: the dropout rates of the run, by the names of `DROPOUT_FIELDS`.
    """

    name: str
    config: object
    tokenizer: PreTrainedTokenizerBase
    revision: str | None
    fingerprint: str | None
    max_seq_length: int
    dropout: dict[str, float]


def read_start(config: FinetuneConfig, kind: Kind) -> Start:
    """
    Read the configuration and the tokenizer of the model, and set the dropout.

    Raises:
        UserError: there is no such model, the model has no tokenizer, its class has no head for the task, or an option
            does not fit the model.
    """
    name = config.model
    with reading_model(name):
        model_config, tokenizer = read_parts(getattr(transformers, kind.auto_class), name)
    is_folder = Path(name).exists()
    model_config = copy.deepcopy(model_config)
    return Start(
        name=name,
        tokenizer=tokenizer,
        revision=None if is_folder else extract_commit_hash(cached_file(name, "config.json"), None),
        fingerprint=hash_of_model(name) if is_folder else None,
        dropout=_set_dropout(config, model_config),
        max_seq_length=_length(config, kind, model_config, tokenizer),
        config=model_config,
    )


def _set_dropout(config, model_config):
    """Set the run's dropout in the model's configuration; returns the rates by the names of `DROPOUT_FIELDS`."""
    rates = {}
    for option, names in DROPOUT_FIELDS.items():
        field = next((name for name in names if hasattr(model_config, name)), None)
        given = getattr(config, option)
        if field is None:
            if given is not None:
                raise UserError(f"{option}: a {model_config.model_type} model has no such dropout; leave {option} out")
            continue
        rate = getattr(model_config, field) if given is None else given
        if given is None and rate == 0 and option != "classifier_dropout":
            rate = DROPOUT
        setattr(model_config, field, rate)
        rates[option] = rate
    return rates


def _length(config, kind, model_config, tokenizer):
    """The most tokens of a row: `max_seq_length`, or the kind's default, but at most what the model reads."""
    with reading_model(config.model), torch.device("meta"):  # no memory is taken for the weights
        model = getattr(transformers, kind.auto_class).from_config(copy.deepcopy(model_config))
    most = longest_input(model, tokenizer)
    wanted = config.max_seq_length or kind.default_length
    if most is None or wanted <= most:
        return wanted
    if config.max_seq_length is not None:
        raise UserError(f"max_seq_length ({config.max_seq_length}) is beyond the model's positions ({most}); lower it")
    return most


def make_model(start: Start, kind: Kind, from_scratch: bool = False) -> tuple[PreTrainedModel, list[str]]:
    """
    The model with a fresh head for the labels that `kind` has learnt, in float32, in training mode.

    PyTorch's global generator draws the fresh weights.

    Args:
        from_scratch: draw all weights.

    Returns:
        The model, and the names of the modules with fresh weights; [] with `from_scratch`.

    Raises:
        UserError: the weights cannot be loaded, or the encoder's weights are not complete or not finite.
    """
    auto_class = getattr(transformers, kind.auto_class)
    config = copy.deepcopy(start.config)
    config.update(kind.settings)
    if from_scratch:
        return auto_class.from_config(config, dtype=torch.float32).train(), []
    with reading_model(start.name), conversion.without_log_messages():
        model, report = auto_class.from_pretrained(
            start.name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # of a saved head; those of the encoder are refused below
            output_loading_info=True,
            **({"revision": start.revision} if start.revision else {}),  # the commit that the card names
        )
        missing, mismatched = set(report["missing_keys"]), {name for name, *_ in report["mismatched_keys"]}
        encoder = f"{model.base_model_prefix}."
        needed = mismatched | {name for name in missing if "pooler." not in name}
        if unfit := {name for name in needed if name.startswith(encoder)}:
            raise UserError(
                f"it has no weights for {min(unfit)}, or not in the shape that config.json gives; give a pretrained "
                f"encoder with its config.json"
            )
        head = {name for name, _ in model.named_parameters() if not name.startswith(encoder)}
        if not head <= missing | mismatched:
            _draw_head(model)
        conversion.check_finite(model)
    return model.train(), sorted({name.rpartition(".")[0] for name in missing | head})


@torch.no_grad()
def _draw_head(model):
    """Draw all weights outside the encoder anew: the saved model has a head of another task."""
    for name, module in model.named_modules():
        if name and name.partition(".")[0] != model.base_model_prefix:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False  # Transformers leaves weights with this mark as they are
            model._init_weights(module)


def is_ours(model_config) -> bool:
    """Whether a configuration is that of a d2l-bert model."""
    return isinstance(model_config, D2lBertConfig)
