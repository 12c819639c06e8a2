"""The kinds of tasks that a model is fine-tuned for, and the data sets on the Hub that are known by name."""

from dataclasses import dataclass


# The kinds of tasks. `run.py` has a class for each.
KINDS = ("classification", "multilabel", "regression", "tags", "answers", "multiple_choice")

# Transformers' names of the kinds: those of its pipelines and examples, and the `problem_type` of several labels.
KIND_OF = {
    "text-classification": "classification",
    "multi_label_classification": "multilabel",
    "regression": "regression",
    "token-classification": "tags",
    "question-answering": "answers",
    "multiple-choice": "multiple_choice",
}


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """
    A data set on the Hub that the option `task` knows by its name.

    Args:
        kind: one of `KINDS`.
        dataset: the id on the Hub, with `:` and the configuration.
        text, text_pair, label: the names of the columns. The kinds `tags`, `answers` and `multiple_choice` find the
            usual names of their columns by themselves.
        labels: the names of the classes, in the order of their numbers; () if there are none.
        metric: the metric that the publishers of the data set report; it chooses the best checkpoint.
        validation, test: the names of the splits.
    """

    kind: str
    dataset: str
    text: str = ""
    text_pair: str | None = None
    label: str = "label"
    labels: tuple[str, ...] = ()
    metric: str = "accuracy"
    validation: str = "validation"
    test: str = "test"


def _glue(name, kind="classification", **fields):
    return NamedTask(kind=kind, dataset=f"nyu-mll/glue:{name}", **fields)


# GLUE (Wang et al., 2018), with its metrics; where GLUE reports two, their mean chooses. SNLI (Bowman et al., 2015) is
# the data set of d2l's sections 16.4 and 16.7.
INFERENCE = ("entailment", "neutral", "contradiction")
NAMED_TASKS = {
    "cola": _glue("cola", text="sentence", labels=("unacceptable", "acceptable"), metric="matthews_correlation"),
    "sst2": _glue("sst2", text="sentence", labels=("negative", "positive")),
    "mrpc": _glue(
        "mrpc",
        text="sentence1",
        text_pair="sentence2",
        labels=("not_equivalent", "equivalent"),
        metric="accuracy_f1_mean",
    ),
    "qqp": _glue(
        "qqp",
        text="question1",
        text_pair="question2",
        labels=("not_duplicate", "duplicate"),
        metric="accuracy_f1_mean",
    ),
    "stsb": _glue("stsb", "regression", text="sentence1", text_pair="sentence2", metric="pearson_spearman_mean"),
    "mnli": _glue(
        "mnli",
        text="premise",
        text_pair="hypothesis",
        labels=INFERENCE,
        validation="validation_matched",
        test="test_matched",
    ),
    "qnli": _glue("qnli", text="question", text_pair="sentence", labels=("entailment", "not_entailment")),
    "rte": _glue("rte", text="sentence1", text_pair="sentence2", labels=("entailment", "not_entailment")),
    "wnli": _glue("wnli", text="sentence1", text_pair="sentence2", labels=("not_entailment", "entailment")),
    "snli": NamedTask(
        kind="classification", dataset="stanfordnlp/snli", text="premise", text_pair="hypothesis", labels=INFERENCE
    ),
    # SQuAD 1.1 and 2 (Rajpurkar et al., 2016 and 2018), SWAG (Zellers et al., 2018), CoNLL-2003 (Tjong Kim Sang and De
    # Meulder, 2003) without the loading script of `eriktks/conll2003`, which `datasets` no longer runs.
    "squad": NamedTask(kind="answers", dataset="rajpurkar/squad", label="answers", metric="f1"),
    "squad_v2": NamedTask(kind="answers", dataset="rajpurkar/squad_v2", label="answers", metric="f1"),
    "swag": NamedTask(kind="multiple_choice", dataset="allenai/swag:regular"),
    "conll2003": NamedTask(kind="tags", dataset="lhoestq/conll2003", label="ner_tags", metric="f1"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Options


# Further headings in `--help`.
