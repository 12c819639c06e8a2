"""The encoder that a run starts from, with a fresh head for its task."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.utils import hub

from d2l_bert.messages import UserError, reading_model
from d2l_bert.modeling import conversion, loading
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tasks import Task


# Dropout for fine-tuning if the model was pretrained without: BERT's (Devlin et al., 2018, appendix A.2).
DROPOUT = 0.1

# The names of the dropout rates in the configurations of Transformers' encoders, the usual name first.
DROPOUT_FIELDS = {
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
}


@dataclass(frozen=True)
class Start:
    """
    The model that a run starts from.

    Args:
        config: its configuration, with the dropout of the run.
        revision: the commit of a model on the Hub; None for a folder.
        tokenizer: its tokenizer.
        dropout: the dropout rates, by the names of `DROPOUT_FIELDS`.
        max_seq_length: the most tokens of a row.
    """

    config: transformers.PreTrainedConfig
    revision: str | None
    tokenizer: transformers.PreTrainedTokenizerBase
    dropout: dict[str, float]
    max_seq_length: int


def read_start(config: FinetuneConfig, task: Task) -> Start:
    """
    Read the configuration and the tokenizer of the model, set the dropout, and try to load the weights.

    Raises:
        UserError: there is no such model, the model has no tokenizer, its class has no head for the task, its weights
            cannot be used, or an option does not fit the model.
    """
    with reading_model(config.model):
        model_config, tokenizer = loading.read_parts(getattr(transformers, task.auto_class), config.model)
    revision = commit_of(config.model)
    dropout = set_dropout(model_config, config)
    # Only a model with its weights shows that these can be used, and how many positions it has.
    most = conversion.longest_input(make_model(model_config, revision, task), tokenizer)
    wanted = config.max_seq_length
    if wanted and wanted > most:
        raise UserError(f"max_seq_length ({wanted}) is beyond the model's positions ({most}); lower it")
    return Start(model_config, revision, tokenizer, dropout, min(wanted or task.default_length, most))


def commit_of(name: str) -> str | None:
    """The commit of a model on the Hub that has been read; None for a folder."""
    if Path(name).exists():
        return None
    config_file = hub.cached_file(name, "config.json")
    return config_file and hub.extract_commit_hash(config_file, None)


def set_dropout(model_config: transformers.PreTrainedConfig, config: FinetuneConfig) -> dict[str, float]:
    """
    Set the dropout rates of a model's configuration: the options', or the model's own, or `DROPOUT`.

    Returns:
        The rates that the model has, by the options' names.

    Raises:
        UserError: the model has no dropout for an option that is given.
    """
    dropout = {}
    for option, names in DROPOUT_FIELDS.items():
        given = getattr(config, option)
        field = next((name for name in names if hasattr(model_config, name)), None)
        if field is None and given is not None:
            raise UserError(f"{option}: a {model_config.model_type} model has no such dropout; leave {option} out")
        if field is not None:
            dropout[option] = (getattr(model_config, field) or DROPOUT) if given is None else given
            setattr(model_config, field, dropout[option])
    return dropout


@torch.no_grad()
def make_model(
    base_config: transformers.PreTrainedConfig, revision: str | None, task: Task
) -> transformers.PreTrainedModel:
    """
    The model with a fresh head for the labels that `task` has learnt, in float32, in training mode.

    PyTorch's global generator draws the fresh weights; with the option `from_scratch` all weights.

    Args:
        base_config, revision: the configuration and the commit of the model to start from, of `Start`.

    Raises:
        UserError: the weights cannot be loaded, or the encoder's weights are not complete or not finite.
    """
    auto_class = getattr(transformers, task.auto_class)
    name = task.config.model
    config = copy.deepcopy(base_config)
    config.update(task.settings)
    if task.config.from_scratch:
        return auto_class.from_config(config, dtype=torch.float32).train()
    with reading_model(name):
        model, missing, _ = conversion.load_and_compare(
            auto_class,
            name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # of a saved head; those of the encoder are refused below
            **({"revision": revision} if revision else {}),  # the commit that the card names
        )
        check_encoder(model, missing)
        if has_saved_head(model, missing):
            draw_head(model)
    return model.train()


def check_encoder(model: transformers.PreTrainedModel, missing: set[str]) -> None:
    """
    Refuse a model whose checkpoint lacks weights of the encoder, but for the pooler's, which then are fresh.

    Args:
        missing: the names of the weights that the checkpoint lacks, or has in another shape.
    """
    encoder = f"{model.base_model_prefix}."
    for weight in sorted(missing):
        if weight.startswith(encoder) and "pooler." not in weight:
            raise UserError(
                f"it has no weights for {weight}, or not in the shape that config.json gives; give a pretrained "
                f"encoder with its config.json"
            )


def has_saved_head(model: transformers.PreTrainedModel, missing: set[str]) -> bool:
    """
    Whether the checkpoint has a weight of the head: then the head is that of another task.

    Args:
        missing: as in `check_encoder`.
    """
    encoder = f"{model.base_model_prefix}."
    for name, _ in model.named_parameters():
        if not name.startswith(encoder) and name not in missing:
            return True
    return False


def draw_head(model: transformers.PreTrainedModel) -> None:
    """Draw all weights outside of the encoder anew."""
    for path, module in model.named_modules():
        if path and path.partition(".")[0] != model.base_model_prefix:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False  # if true, `_init_weights` would skip it
            model._init_weights(module)
