"""The second loss of a run, about the two segments of a pair: what its figures and labels are called.

The loop names its figures by the task; whoever shows them finds the task by these names.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """
    A classification of pairs into two.

    Args:
        short: abbreviation.
        name: in full.
        claim: what label 0 says of the segments A and B.
        labels: a word for label 0 and one for label 1.
        meaning: what the labels of `AutoModelForNextSentencePrediction` mean then.
        note: what a person should know beside the figures, if the task is less known than BERT's own.
    """

    short: str
    name: str
    claim: str
    labels: tuple[str, str]
    meaning: str
    note: str = ""

    @property
    def key(self) -> str:
        """Its part in the names of figures: `nsp_loss`, `eval_nsp_accuracy`."""
        return self.short.lower()


# By `objective`; `none` has no task, as RoBERTa (Liu et al., 2019).
PAIR_TASKS = {
    "nsp": PairTask(  # BERT (Devlin et al., 2018)
        short="NSP",
        name="next sentence prediction",
        claim="B follows A",
        labels=("IsNext", "NotNext"),
        meaning="label 0: B follows A",
    ),
    "sop": PairTask(  # ALBERT (Lan et al., 2020)
        short="SOP",
        name="sentence order prediction",
        claim="A comes before B",
        labels=("InOrder", "Swapped"),
        meaning="label 0, there `IsNext`: A comes before B, as in the text; label 1, `NotNext`: the two are swapped",
        note=" (sentence order prediction: does A come before B, or are they swapped? A coin gets 0.693)",
    ),
}


def pair_task(figures: Iterable[str]) -> PairTask | None:
    """The task that is among the names of figures, in training (`nsp_loss`) or held out (`eval_nsp_loss`), if any."""
    names = {name.removeprefix("eval_") for name in figures}
    return next((task for task in PAIR_TASKS.values() if f"{task.key}_loss" in names), None)


def unit(task: PairTask | None) -> str:
    """What a run's examples are called, in figures and in words: a pair is two segments, a sequence one."""
    return "pairs" if task else "sequences"
