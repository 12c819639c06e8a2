"""The second loss of a run (NSP, SOP), which classifies pairs of segments: names of its metrics and of its labels.

Training names metrics after the task (`nsp_loss`); the log, the curves and the model card find the task by the names.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """
    A classification of pairs of segments A and B into two classes.

    Args:
        key: the task's part in the names of metrics: `nsp` in `nsp_loss` and `eval_nsp_accuracy`.
        short: the task's abbreviation.
        name: the task's full name.
        claim: the statement about A and B that is true for label 0.
        labels: the names of label 0 and label 1.
        meaning: for the model card: what the two labels of `AutoModelForNextSentencePrediction` mean in this task.
        question: what the task asks of a pair.
    """

    key: str
    short: str
    name: str
    claim: str
    labels: tuple[str, str]
    meaning: str
    question: str


# Keys are values of the option `objective`. Its value `none` has no task, as in RoBERTa (Liu et al., 2019).
PAIR_TASKS = {
    "nsp": PairTask(  # BERT (Devlin et al., 2018)
        key="nsp",
        short="NSP",
        name="next sentence prediction",
        claim="B follows A",
        labels=("IsNext", "NotNext"),
        meaning="label 0: B follows A",
        question="is B what followed A in the text, or the B of another pair?",
    ),
    "sop": PairTask(  # ALBERT (Lan et al., 2020)
        key="sop",
        short="SOP",
        name="sentence order prediction",
        claim="A comes before B",
        labels=("InOrder", "Swapped"),
        meaning="label 0, there `IsNext`: A comes before B, as in the text; label 1, `NotNext`: the two are swapped",
        question="does A come before B in the text, or are the two swapped?",
    ),
}


def pair_task(metrics: Iterable[str]) -> PairTask | None:
    """The task whose loss or accuracy is among the names of metrics, such as `eval_nsp_loss`; None without one."""
    names = {name.removeprefix("eval_") for name in metrics}
    return next((task for task in PAIR_TASKS.values() if names & {f"{task.key}_loss", f"{task.key}_accuracy"}), None)


def unit(task: PairTask | None) -> str:
    """
    What a training example is called, in names of metrics (`eval_pairs`) and in messages.

    Returns:
        "pairs" (of segments) with a second loss, "sequences" (of one segment) without.
    """
    return "pairs" if task else "sequences"
