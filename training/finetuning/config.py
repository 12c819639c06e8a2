"""`FinetuneConfig`: the options of `d2l-bert finetune`, and their checks."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from d2l_bert.messages import explained
from d2l_bert.model_cards.config import check_license
from d2l_bert.options import LENGTH, MACHINE, OPTIMIZER, OUTPUT, Options, PathOption, option, option_of
from d2l_bert.tokenization.config import Separator, SourceConfig
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.finetuning.data_sets import NAMED


# Further headings in `--help`.
DATA = "task and data"
MODEL = "model"
LABELLED = "labelled rows, for a model of finetune"

# The tasks, as Transformers names them: its pipelines, its examples, and the `problem_type` of several labels and of
# numbers. `all_tasks.py` has a class for each.
TEXT_TASKS = ("text-classification", "multi_label_classification", "regression")  # of a text, or of a pair of texts
CONTEXT_TASKS = ("question-answering", "multiple-choice")
TASKS = (*TEXT_TASKS, "token-classification", *CONTEXT_TASKS)

# Other names that `task` takes.
SHORT_NAMES = {
    "classification": "text-classification",
    "multilabel": "multi_label_classification",
    "tags": "token-classification",
    "answers": "question-answering",
    "multiple_choice": "multiple-choice",
}

# For each option that is not for all tasks, the tasks that have it.
TASKS_WITH_OPTION = {
    "text_column": (*TEXT_TASKS, "token-classification"),
    "text_pair_column": TEXT_TASKS,
    "context_column": CONTEXT_TASKS,
    "question_column": CONTEXT_TASKS,
    "choices_column": ("multiple-choice",),
    "label_separator": ("multi_label_classification",),
    "doc_stride": ("question-answering",),
    "max_answer_length": ("question-answering",),
    "null_score_diff_threshold": ("question-answering",),
}


@dataclasses.dataclass(kw_only=True)
class FinetuneConfig(Options):
    """
    A fine-tuning run. Every field but `model` is an option of `d2l-bert finetune`.

    Where `transformers.TrainingArguments` has a field of the same name, the field means the same.

    Args:
        model: the model to start from, a folder or an id on the Hub.

    Raises:
        UserError: from `check`, for an option of the wrong type, out of range, or contradicting another.
    """

    # No flag: the command line's argument MODEL, which fills the field of its name.
    model: PathOption = dataclasses.field(default="", metadata={"group": None, "identity": False})
    task: str | None = option(
        None,
        f"the task: {', '.join(TASKS)}; or a data set that is known by its name: {', '.join(NAMED)}",
        DATA,
        metavar="TASK",
        common=True,
    )
    train_file: PathOption | None = option(
        None,
        "rows to train on: .csv, .tsv, .jsonl, .parquet, .json or .conll",
        DATA,
        identity=False,
        metavar="FILE",
        common=True,
    )
    validation_file: PathOption | None = option(
        None, "rows that choose the best checkpoint, rate and seed", DATA, identity=False, metavar="FILE", common=True
    )
    test_file: PathOption | None = option(
        None,
        "rows to predict, and to measure on if they have labels",
        DATA,
        identity=False,
        metavar="FILE",
        common=True,
    )
    separator: Separator = option_of(SourceConfig, "separator", group=DATA)
    dataset: PathOption | None = option(
        None,
        "a dataset on the Hub or in a folder, instead of train_file",
        DATA,
        identity=False,
        metavar="ID[:CONFIG]",
        common=True,
    )
    train_split: str = option("train", "split of the dataset to train on", DATA)
    validation_split: str | None = option(
        None, "split of the dataset that chooses; default: validation, if the dataset has it", DATA, metavar="NAME"
    )
    test_split: str | None = option(
        None, "split of the dataset to predict; default: test, if the dataset has it", DATA, metavar="NAME"
    )
    text_column: str | None = option(
        None,
        "column of texts; default: the named data set's, or text; for token-classification of words: tokens or words",
        DATA,
        metavar="NAME",
        common=True,
    )
    text_pair_column: str | None = option(
        None,
        "column of second texts; default: the named data set's, or text_pair if it is there",
        DATA,
        metavar="NAME",
    )
    label_column: list[str] = option(
        [],
        "column of labels; several columns of 0 and 1 for multi_label_classification; default: label, for "
        "token-classification ner_tags or tags, for question-answering answers",
        DATA,
        metavar="NAME",
        common=True,
    )
    context_column: str | None = option(
        None,
        "for question-answering and multiple-choice: column of contexts; default: context, SWAG's sent1 or premise",
        DATA,
        metavar="NAME",
    )
    question_column: str | None = option(
        None,
        "for question-answering and multiple-choice: column of questions; default: question, or SWAG's sent2",
        DATA,
        metavar="NAME",
    )
    choices_column: list[str] = option(
        [],
        "for multiple-choice: a column of lists, or a column for each choice; default: choices, or numbered columns "
        "such as ending0, ending1, ...",
        DATA,
        metavar="NAME",
    )
    label_separator: str = option(
        ",",
        "for multi_label_classification: between the labels in a cell of CSV or TSV; JSONL and Parquet have lists",
        DATA,
        metavar="TEXT",
    )
    validation_share: float | None = option(
        None,
        "without validation rows: share of the training rows to hold out for validation, by the seed; "
        "0 holds out none; default: 0.1",
        DATA,
        within="[0, 1)",
    )
    max_seq_length: int | None = option(
        None,
        "tokens of a row at most; longer texts are truncated, or for token-classification and question-answering cut "
        "into windows; default: 128 (question-answering: 384), or the model's positions",
        DATA,
        within="[8, 2147483647]",
        common=True,
    )
    doc_stride: int | None = option(
        None,
        "for question-answering: tokens that two windows of a context share; default: 128, a third of max_seq_length",
        DATA,
        within="[0, 2147483647]",
    )
    max_answer_length: int = option(
        30, "for question-answering: most tokens of a predicted answer", DATA, within="[1, 2147483647]"
    )
    null_score_diff_threshold: float = option(
        0.0,
        "for question-answering: predict no answer if its score exceeds that of the best span by more than this",
        DATA,
    )

    from_scratch: bool = option(False, "start from fresh weights of the same architecture, as a baseline", MODEL)
    hidden_dropout_prob: float | None = option(
        None,
        "dropout of the encoder; default: the model's, or 0.1 if the model was pretrained without",
        MODEL,
        within="[0, 1)",
    )
    attention_probs_dropout_prob: float | None = option(
        None, "dropout of the attention; default: as for hidden_dropout_prob", MODEL, within="[0, 1)"
    )
    num_train_epochs: float | None = option(
        None, "times to see each training row (4)", LENGTH, within="(0, 1e6]", common=True
    )
    max_steps: int | None = option(
        None, "optimizer steps, instead of num_train_epochs", LENGTH, within="[1, 2147483647]"
    )
    early_stopping_patience: int | None = option(
        None,
        "stop after so many evaluations without a better value of metric_for_best_model",
        LENGTH,
        within="[1, 2147483647]",
    )
    learning_rate: list[str] = option(
        [],
        "peak rate; of several, each is tried with the first seed, and validation rows choose; default by the "
        "model's hidden size: 3e-4 below 256, 1e-4 below 512, 5e-5 below 768, else 2e-5",
        OPTIMIZER,
        metavar="X",
        common=True,
    )
    per_device_train_batch_size: int | None = option(
        None,
        "rows of a process at once; default: 32, divided by the number of processes",
        OPTIMIZER,
        within="[1, 16777216]",
    )
    per_device_eval_batch_size: int = option(
        64, "rows of a process at once, without training", MACHINE, identity=False, within="[1, 16777216]"
    )
    gradient_accumulation_steps: int = option(1, "batches in a step", OPTIMIZER, within="[1, 1000000]")
    weight_decay: float = option(
        0.01, "AdamW's weight decay, without biases and LayerNorm", OPTIMIZER, within="[0, 1000]"
    )
    warmup_ratio: float | None = option(
        None, "share of the steps in which the rate rises (0.1)", OPTIMIZER, within="[0, 1)"
    )
    warmup_steps: int | None = option(
        None, "steps in which the rate rises, instead of warmup_ratio", OPTIMIZER, within="[0, 2147483647]"
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", "course of the rate after the warm-up", OPTIMIZER
    )
    adam_beta1: float = option(0.9, "AdamW's first beta", OPTIMIZER, within="[0, 1)")
    adam_beta2: float = option(0.999, "AdamW's second beta", OPTIMIZER, within="[0, 1)")
    adam_epsilon: float = option(1e-8, "AdamW's epsilon", OPTIMIZER, within="(0, 1]")
    max_grad_norm: float = option(1.0, "a longer gradient is scaled down to this length", OPTIMIZER, within="(0, 1e9]")
    seed: int = option(
        42,
        "seed of the new head, of the order of rows, of dropout and of what is held out",
        OPTIMIZER,
        within="[0, 4e9]",
    )
    num_seeds: int = option(
        1,
        "train so many models, with seed, seed + 1, ...; the best by validation is kept",
        OPTIMIZER,
        identity=False,
        within="[1, 1000]",
        common=True,
    )

    bf16: bool = option(False, "matrix products in bf16", MACHINE)
    fp16: bool = option(False, "matrix products in fp16 (GPU)", MACHINE)

    output_dir: PathOption | None = option(
        None, "the output folder; default: MODEL-TASK here", OUTPUT, identity=False, metavar="DIR", common=True
    )
    overwrite_output_dir: bool = option_of(PretrainConfig, "overwrite_output_dir")
    resume_from_checkpoint: Literal["latest"] | None = option(
        None, "go on from the latest checkpoint in output_dir", OUTPUT, identity=False, common=True
    )
    metric_for_best_model: str | None = option(
        None, "metric on validation rows that chooses; default: the task's own", OUTPUT, metavar="NAME"
    )
    eval_steps: int | None = option(
        None,
        "steps from one evaluation and checkpoint to the next; default: an epoch",
        OUTPUT,
        within="[1, 2147483647]",
    )
    report_to: list[str] = option(
        ["none"], "trackers, such as tensorboard or wandb; none for none", OUTPUT, identity=False, metavar="NAME"
    )
    license: str | None = option_of(
        PretrainConfig, "license", help="licence of the model, for its card (a Hub identifier)", common=True
    )
    push_to_hub: bool = option_of(PretrainConfig, "push_to_hub")
    hub_model_id: str | None = option_of(PretrainConfig, "hub_model_id")
    hub_private_repo: bool = option_of(PretrainConfig, "hub_private_repo")

    def __post_init__(self):
        """
        Write the full name of the task; and data in memory that stand in place of a dataset's name to the cache.

        Raises:
            UserError: as in `hub_datasets.splits_folder`.
        """
        self.task = SHORT_NAMES.get(self.task, self.task)
        if self.dataset is not None and not isinstance(self.dataset, str):
            from d2l_bert.tokenization.hub_datasets import splits_folder  # loads PyArrow, which help does without

            self.dataset = splits_folder(self.dataset)

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`. Raises `UserError` itself for a wrong rate or licence."""
        rates = self.learning_rates()
        if self.license is not None:
            check_license(self.license)
        yield from super().contradictions(given)
        if self.task not in (*TASKS, *NAMED):
            wrong = "--task is missing" if self.task is None else f"task {self.task!r}"
            yield f"{wrong}: give one of {', '.join(TASKS)}; or {', '.join(NAMED)}"
        if not all(0 < rate <= 100 for rate in rates) or len(set(rates)) < len(rates):
            yield (
                f"learning_rate takes numbers above 0 and at most 100, each once, got {' '.join(self.learning_rate)}"
            )
        yield from self._contradictions_in_rows(given)
        yield from self._contradictions_in_steps(given)
        for split in ("validation", "test"):
            if getattr(self, f"{split}_file") and getattr(self, f"{split}_split"):
                yield f"{split}_file and {split}_split both give the {split} rows; give one"

    def _contradictions_in_rows(self, given):
        """As `contradictions`, for the options that say which rows to read, and how."""
        if self.train_file and self.dataset:
            yield "train_file and dataset both give the training rows; give one"
        if self.train_file is None and self.dataset_name() is None:
            yield "train_file is missing; give --train_file FILE, or --dataset ID"
        for name, tasks in TASKS_WITH_OPTION.items():
            if name in given and self.task_type not in tasks:
                yield f"{name} is for --task {' or '.join(tasks)}; leave it out"
        if self.train_file:
            for name in ("train_split", "validation_split", "test_split"):
                if name in given:
                    yield f"{name} is for dataset; leave {name} out beside train_file"
        splits = [name for name in (self.train_split, self.validation_split, self.test_split) if name is not None]
        if len(set(splits)) < len(splits):
            yield "train_split, validation_split and test_split name a split twice; give each rows of its own"
        if self.validation_share is not None:
            for name in ("validation_file", "validation_split"):
                if name in given:
                    yield f"validation_share holds out training rows, and {name} gives validation rows; give one"
        if len(self.label_column) > 1:
            if self.task_type != "multi_label_classification":
                yield "label_column: several columns are for --task multi_label_classification; name one"
            if "label_separator" in given:
                yield "label_separator is for one column of labels, and label_column names several; give one"

    def _contradictions_in_steps(self, given):
        """As `contradictions`, for the options that say how to train and to choose a model."""
        if self.lr_scheduler_type == "constant":
            for name in ("warmup_ratio", "warmup_steps"):
                if getattr(self, name):
                    yield (
                        f"{name}: lr_scheduler_type constant has no warm-up; give constant_with_warmup, or leave "
                        f"{name} out"
                    )
        for one, other in (("num_train_epochs", "max_steps"), ("warmup_ratio", "warmup_steps"), ("bf16", "fp16")):
            if getattr(self, one) and getattr(self, other):
                yield f"{one} and {other} contradict each other; give one"
        if (self.eval_steps or 0) > (self.max_steps or math.inf):
            yield f"eval_steps {self.eval_steps} is beyond max_steps {self.max_steps}: nothing is evaluated; lower it"
        if not self.validates():
            for name in ("early_stopping_patience", "metric_for_best_model", "eval_steps"):
                if name in given:
                    yield f"{name} needs validation rows; give --validation_file, or leave {name} out"
            if len(self.learning_rate) > 1:
                yield "several values of learning_rate need validation rows to choose; give --validation_file"

    def validates(self) -> bool:
        """Whether the run has validation rows: given, or held out of the training rows."""
        return self.validation_share != 0  # None: given rows, or the usual share of the training rows

    @property
    def named_data_set(self) -> dict:
        """The entry in `NAMED` of the data set that `task` names; {} if `task` is one of `TASKS`."""
        return NAMED.get(self.task, {})

    @property
    def task_type(self) -> str:
        """The task, one of `TASKS`; of a named data set its task."""
        return self.named_data_set.get("task", self.task)

    def dataset_name(self) -> str | None:
        """`dataset`, or the named data set's id on the Hub if no `train_file` is given; None without either."""
        return self.dataset or (None if self.train_file else self.named_data_set.get("dataset"))

    def learning_rates(self) -> list[float]:
        """
        The rates to try, in the order given; [] if the model's size decides.

        Raises:
            UserError: a rate is not a number.
        """
        with explained(f"learning_rate {' '.join(self.learning_rate)}", "give numbers", ValueError):
            return [float(text) for text in self.learning_rate]


@dataclasses.dataclass(kw_only=True)
class PredictConfig(Options):
    """
    What a fine-tuned model predicts. Every field is an option of `d2l-bert predict`.

    Raises:
        UserError: from `check`, for an option of the wrong type, out of range, or contradicting another.
    """

    output: PathOption | None = option(
        None,
        "new file: .csv, .jsonl or .parquet, with the columns of FILE and the predictions",
        OUTPUT,
        metavar="FILE",
        common=True,
    )
    excel: bool = option(
        False, "write CSV for Excel: with ;, decimal commas and a byte order mark", OUTPUT, common=True
    )
    text_column: str | None = option_of(
        FinetuneConfig, "text_column", help="column of texts; default: that of the training"
    )
    text_pair_column: str | None = option_of(
        FinetuneConfig, "text_pair_column", help="column of second texts; default: that of the training"
    )
    context_column: str | None = option_of(
        FinetuneConfig, "context_column", help="column of contexts; default: that of the training"
    )
    question_column: str | None = option_of(
        FinetuneConfig, "question_column", help="column of questions; default: that of the training"
    )
    choices_column: list[str] = option_of(
        FinetuneConfig, "choices_column", help="columns of choices; default: those of the training"
    )
    separator: Separator = option_of(SourceConfig, "separator", group=DATA)
    per_device_eval_batch_size: int = option_of(FinetuneConfig, "per_device_eval_batch_size")

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        suffix = Path(self.output or "").suffix
        if self.output is not None and suffix not in (".csv", ".jsonl", ".parquet"):
            yield f"output {self.output}: give --output a name that ends in .csv, .jsonl or .parquet"
        if self.excel and suffix != ".csv":
            yield "excel is for an output of CSV; leave it out"


@dataclasses.dataclass(kw_only=True)
class ScoreConfig(Options):
    """
    The labelled rows on which a fine-tuned model is measured. Every field is an option of `d2l-bert evaluate`.

    Raises:
        UserError: from `check`, for an option of the wrong type, out of range, or contradicting another.
    """

    test_file: PathOption | None = option_of(
        FinetuneConfig, "test_file", help="rows with labels, to measure a model of finetune on", group=LABELLED
    )
    label_column: list[str] = option_of(
        FinetuneConfig, "label_column", help="column of labels; default: that of the training", group=LABELLED
    )
    label_separator: str | None = option(
        None,
        "between the labels in a cell, for a model of several; default: that of the training",
        LABELLED,
        metavar="TEXT",
    )
    text_column: str | None = option_of(PredictConfig, "text_column", group=LABELLED)
    text_pair_column: str | None = option_of(PredictConfig, "text_pair_column", group=LABELLED)
    context_column: str | None = option_of(PredictConfig, "context_column", group=LABELLED)
    question_column: str | None = option_of(PredictConfig, "question_column", group=LABELLED)
    choices_column: list[str] = option_of(PredictConfig, "choices_column", group=LABELLED)
    separator: Separator = option_of(PredictConfig, "separator", group=LABELLED)
    per_device_eval_batch_size: int = option_of(PredictConfig, "per_device_eval_batch_size", group=LABELLED)
    output_dir: PathOption | None = option(
        None,
        "new folder: the figures, the confusion of classes, and the rows that are wrong, worst first",
        LABELLED,
        metavar="DIR",
        common=True,
    )
    excel: bool = option_of(
        PredictConfig, "excel", help="CSV in output_dir is for Excel, as that of predict", group=LABELLED
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if self.excel and self.output_dir is None:
            yield "excel is for the files in output_dir; give that too, or leave it out"
