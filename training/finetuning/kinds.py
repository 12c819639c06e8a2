"""The classes of the kinds of tasks, by their names; the metric that chooses."""

from d2l_bert.errors import UserError
from d2l_bert.training.finetuning.answers_kind import Answers
from d2l_bert.training.finetuning.choice_kind import MultipleChoice
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.kind import Kind
from d2l_bert.training.finetuning.tags_kind import Tags
from d2l_bert.training.finetuning.text_kinds import Classification, Multilabel, Regression


# A line for each name in `tasks.KINDS`.
CLASSES = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "tags": Tags,
    "answers": Answers,
    "multiple_choice": MultipleChoice,
}


def make_kind(config: FinetuneConfig) -> Kind:
    """The `Kind` of a run."""
    return CLASSES[config.kind_name()](config)


def best_metric(config: FinetuneConfig, kind: Kind) -> str:
    """
    The name of the metric that chooses checkpoint, rate and seed.

    Raises:
        UserError: `metric_for_best_model` is not a metric of the task.
    """
    known = (*kind.metrics_shown, "loss")
    if config.metric_for_best_model is None:
        return config.named_task().metric if config.named_task() else kind.main_metric
    chosen = config.metric_for_best_model.removeprefix("eval_")
    if chosen not in known:
        raise UserError(f"metric_for_best_model {chosen!r}: --task {config.task} has {', '.join(known)}; give one")
    return chosen
