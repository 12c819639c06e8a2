"""The data sets on the Hub that `--task` knows by name, such as `sst2`: their columns, classes, metrics and splits."""

# GLUE (Wang et al., 2018), with its metrics; where GLUE reports two, their mean chooses. SNLI (Bowman et al., 2015) is
# the data set of d2l's sections 16.4 and 16.7. SQuAD 1.1 and 2 (Rajpurkar et al., 2016 and 2018), SWAG (Zellers et
# al., 2018), CoNLL-2003 (Tjong Kim Sang and De Meulder, 2003) without the loading script of `eriktks/conll2003`, which
# `datasets` no longer runs.
#
# `task` is one of `config.TASKS`; `dataset` the id on the Hub, with `:` and the configuration; `labels` are the names
# of the classes, in the order of their numbers. Columns, by the options that name them, the `metric` that chooses, and
# the splits stand here where they are not the usual ones of the task.
SENTENCE = {"task": "text-classification", "text_column": "sentence"}
SENTENCES = {"task": "text-classification", "text_column": "sentence1", "text_pair_column": "sentence2"}
INFERENCE = {
    "task": "text-classification",
    "text_column": "premise",
    "text_pair_column": "hypothesis",
    "labels": ("entailment", "neutral", "contradiction"),
}
EITHER = ("entailment", "not_entailment")
NAMED = {
    "cola": {
        **SENTENCE,
        "dataset": "nyu-mll/glue:cola",
        "labels": ("unacceptable", "acceptable"),
        "metric": "matthews_correlation",
    },
    "sst2": {**SENTENCE, "dataset": "nyu-mll/glue:sst2", "labels": ("negative", "positive")},
    "mrpc": {
        **SENTENCES,
        "dataset": "nyu-mll/glue:mrpc",
        "labels": ("not_equivalent", "equivalent"),
        "metric": "accuracy_f1_mean",
    },
    "qqp": {
        "task": "text-classification",
        "dataset": "nyu-mll/glue:qqp",
        "text_column": "question1",
        "text_pair_column": "question2",
        "labels": ("not_duplicate", "duplicate"),
        "metric": "accuracy_f1_mean",
    },
    "stsb": {**SENTENCES, "task": "regression", "dataset": "nyu-mll/glue:stsb"},
    "mnli": {
        **INFERENCE,
        "dataset": "nyu-mll/glue:mnli",
        "validation": "validation_matched",
        "test": "test_matched",
    },
    "qnli": {
        "task": "text-classification",
        "dataset": "nyu-mll/glue:qnli",
        "text_column": "question",
        "text_pair_column": "sentence",
        "labels": EITHER,
    },
    "rte": {**SENTENCES, "dataset": "nyu-mll/glue:rte", "labels": EITHER},
    "wnli": {**SENTENCES, "dataset": "nyu-mll/glue:wnli", "labels": EITHER[::-1]},
    "snli": {**INFERENCE, "dataset": "stanfordnlp/snli"},
    "squad": {"task": "question-answering", "dataset": "rajpurkar/squad"},
    "squad_v2": {"task": "question-answering", "dataset": "rajpurkar/squad_v2"},
    "swag": {"task": "multiple-choice", "dataset": "allenai/swag:regular"},
    "conll2003": {"task": "token-classification", "dataset": "lhoestq/conll2003"},
}
