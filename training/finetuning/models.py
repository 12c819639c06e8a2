"""The encoder that a run starts from, with a fresh head for its task."""

import copy
from pathlib import Path

import torch
import transformers
from transformers.utils import hub

from d2l_bert.messages import reading_model, refuse_first
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


def read_start(
    config: FinetuneConfig, task: Task
) -> tuple[transformers.PreTrainedConfig, str | None, transformers.PreTrainedTokenizerBase, dict[str, float], int]:
    """
    Read the configuration and the tokenizer of the model, set the dropout, and try to load the weights.

    Returns:
        The configuration, with the dropout of the run; the commit of a model on the Hub, None for a folder; the
        tokenizer; the dropout rates, by the names of `DROPOUT_FIELDS`; and the most tokens of a row.

    Raises:
        UserError: there is no such model, the model has no tokenizer, its class has no head for the task, its weights
            cannot be used, or an option does not fit the model.
    """
    with reading_model(config.model):
        model_config, tokenizer = loading.read_parts(getattr(transformers, task.auto_class), config.model)
    on_hub = None if Path(config.model).exists() else hub.cached_file(config.model, "config.json")
    revision = on_hub and hub.extract_commit_hash(on_hub, None)
    dropout = {}
    for option, names in DROPOUT_FIELDS.items():
        field, given = next((name for name in names if hasattr(model_config, name)), None), getattr(config, option)
        refuse_first(
            {
                f"{option}: a {model_config.model_type} model has no such dropout; leave {option} out": (
                    field is None and given is not None
                )
            }
        )
        if field is not None:
            dropout[option] = (getattr(model_config, field) or DROPOUT) if given is None else given
            setattr(model_config, field, dropout[option])
    wanted, most = config.max_seq_length, conversion.longest_input(make_model(model_config, revision, task), tokenizer)
    refuse_first(
        {f"max_seq_length ({wanted}) is beyond the model's positions ({most}); lower it": wanted and wanted > most}
    )
    return model_config, revision, tokenizer, dropout, min(wanted or task.default_length, most)


@torch.no_grad()
def make_model(start: transformers.PreTrainedConfig, revision: str | None, task: Task) -> transformers.PreTrainedModel:
    """
    The model with a fresh head for the labels that `task` has learnt, in float32, in training mode.

    PyTorch's global generator draws the fresh weights; with the option `from_scratch` all weights.

    Args:
        start, revision: the configuration and the commit of the model to start from, of `read_start`.

    Raises:
        UserError: the weights cannot be loaded, or the encoder's weights are not complete or not finite.
    """
    auto_class, name = getattr(transformers, task.auto_class), task.config.model
    config = copy.deepcopy(start)
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
        encoder = f"{model.base_model_prefix}."
        refuse_first(
            {
                f"it has no weights for {name}, or not in the shape that config.json gives; give a pretrained encoder "
                f"with its config.json": name.startswith(encoder) and "pooler." not in name
                for name in sorted(missing)
            }
        )
        head = {name for name, _ in model.named_parameters() if not name.startswith(encoder)}
        if not head <= missing:  # the saved model has a head of another task: it is drawn anew
            for path, module in model.named_modules():
                if path and path.partition(".")[0] != model.base_model_prefix:
                    for parameter in module.parameters(recurse=False):
                        parameter._is_hf_initialized = False  # Transformers leaves weights with this mark as they are
                    model._init_weights(module)
    return model.train()
