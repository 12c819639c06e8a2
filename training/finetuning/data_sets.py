"""The data sets on the Hub that `--task` knows by name, such as `sst2`: their columns, classes, metrics and splits."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NamedDataSet:
    """
    A data set on the Hub that the option `task` knows by its name.

    Args:
        task: one of `config.TASKS`.
        dataset: the id on the Hub, with `:` and the configuration.
        columns: the names of columns that are not the task's usual ones, by the option that gives them.
        labels: the names of the classes, in the order of their numbers; () if there are none.
        metric: the metric that the publishers of the data set report; it chooses the best checkpoint.
        validation, test: the names of the splits.
    """

    task: str = "text-classification"
    dataset: str
    columns: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    metric: str = "accuracy"
    validation: str = "validation"
    test: str = "test"


def _pairs(dataset, text, text_pair=None, **fields):
    """A data set of texts, or of pairs of texts, by the names of their columns."""
    columns = {"text_column": text} | ({"text_pair_column": text_pair} if text_pair else {})
    return NamedDataSet(dataset=dataset, columns=columns, **fields)


# GLUE (Wang et al., 2018), with its metrics; where GLUE reports two, their mean chooses. SNLI (Bowman et al., 2015) is
# the data set of d2l's sections 16.4 and 16.7.
GLUE = "nyu-mll/glue"
INFERENCE = ("entailment", "neutral", "contradiction")
EITHER = ("entailment", "not_entailment")
NAMED = {
    "cola": _pairs(f"{GLUE}:cola", "sentence", labels=("unacceptable", "acceptable"), metric="matthews_correlation"),
    "sst2": _pairs(f"{GLUE}:sst2", "sentence", labels=("negative", "positive")),
    "mrpc": _pairs(
        f"{GLUE}:mrpc", "sentence1", "sentence2", labels=("not_equivalent", "equivalent"), metric="accuracy_f1_mean"
    ),
    "qqp": _pairs(
        f"{GLUE}:qqp", "question1", "question2", labels=("not_duplicate", "duplicate"), metric="accuracy_f1_mean"
    ),
    "stsb": _pairs(f"{GLUE}:stsb", "sentence1", "sentence2", task="regression", metric="pearson_spearman_mean"),
    "mnli": _pairs(
        f"{GLUE}:mnli",
        "premise",
        "hypothesis",
        labels=INFERENCE,
        validation="validation_matched",
        test="test_matched",
    ),
    "qnli": _pairs(f"{GLUE}:qnli", "question", "sentence", labels=EITHER),
    "rte": _pairs(f"{GLUE}:rte", "sentence1", "sentence2", labels=EITHER),
    "wnli": _pairs(f"{GLUE}:wnli", "sentence1", "sentence2", labels=EITHER[::-1]),
    "snli": _pairs("stanfordnlp/snli", "premise", "hypothesis", labels=INFERENCE),
    # SQuAD 1.1 and 2 (Rajpurkar et al., 2016 and 2018), SWAG (Zellers et al., 2018), CoNLL-2003 (Tjong Kim Sang and De
    # Meulder, 2003) without the loading script of `eriktks/conll2003`, which `datasets` no longer runs.
    "squad": NamedDataSet(task="question-answering", dataset="rajpurkar/squad", metric="f1"),
    "squad_v2": NamedDataSet(task="question-answering", dataset="rajpurkar/squad_v2", metric="f1"),
    "swag": NamedDataSet(task="multiple-choice", dataset="allenai/swag:regular"),
    "conll2003": NamedDataSet(task="token-classification", dataset="lhoestq/conll2003", metric="f1"),
}
