"""`Task`: what a task brings to a run: its columns, examples, features, metrics and predictions; readers of cells."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from transformers import DataCollatorWithPadding

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import metrics
from d2l_bert.training.finetuning.config import FinetuneConfig


# No tokenizer gets more rows at once: its encodings take far more memory than the ids.
ROWS_AT_ONCE = 1000

# Columns that need not be there.
OPTIONAL = ("text_pair_column", "context_column", "question_column")


class Example(NamedTuple):
    """
    A row as its task has read and checked it.

    Args:
        texts: the texts of the row, by which equal rows are found; of token classification the words.
        label: the label as the task reads it; None for a row without.
    """

    texts: tuple[str, ...]
    label: object = None


class Task:
    """
    A task. `run.py` names a subclass for each of `config.TASKS`.

    The run calls `find_columns` with the training rows, `example` and `labelled` with every row, `learn` with the
    training rows, `checked` with every example, and `features` with every split. `outputs` below are the model's, in
    the order of `Split.features`, as NumPy arrays: the logits, or a tuple of them for a model with several; `rescaled`
    has been applied to them. A `ValueError` about a row says what is wrong in which column, and the way out.

    A subclass defines these methods:

    - `example(cells, split)`: the `Example` of a row's cells, by the names of the columns; raises `ValueError`;
    - `learn(train)` learns from the training rows what the labels are; raises `UserError` if they cannot be learnt;
    - `features(split, tokenizer, max_seq_length)` sets the split's `features`, with labels if it has labels, and what
      else the task needs to read the model's outputs (`windows`, `note`);
    - `metrics(split, outputs)`: the metrics of a labelled split by name, without the loss;
    - `predictions(split, outputs)`: columns with the predictions for each row of a split.

    Attributes:
        auto_class: the Auto class that loads the model, such as `AutoModelForSequenceClassification`.
        pipeline_task: the task of `transformers.pipeline` that the finished folder serves; None if Transformers 5 has
            no pipeline for it.
        main_metric: the metric that chooses, unless `metric_for_best_model` or a named data set gives another.
        metrics_shown: the metrics in the order of the tables; those in `metrics.LOWER_IS_BETTER` are best when small.
        label_names: the names of labels in a batch, as in `TrainingArguments.label_names`.
        default_length: the default of `max_seq_length`.
        usual_columns: by the option that names a column, its usual names.
        columns: by the option, the columns of this run, which `find_columns` finds; `label` is that of labels, the
            first one if there are several.
        classes: the names of the classes in the order of their numbers, which `learn` finds; [] for tasks without.
        settings: the fields of the model's configuration that the task decides: `num_labels`, `id2label`, ...
        recorded: what the run's record says about the task, beside the names of the classes.
    """

    auto_class: ClassVar[str]
    pipeline_task: ClassVar[str | None] = None
    main_metric: ClassVar[str] = "accuracy"
    metrics_shown: ClassVar[tuple[str, ...]]
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    default_length: ClassVar[int] = 128
    usual_columns: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, config: FinetuneConfig):
        self.config = config
        self.columns: dict[str, list[str]] = {}
        self.classes: list[str] = []
        self.settings: dict = {}
        self.recorded: dict = {"has_pairs": True}

    def metric(self) -> str:
        """
        The name of the metric that chooses checkpoint, rate and seed.

        Raises:
            UserError: `metric_for_best_model` is not a metric of the task.
        """
        usual = self.config.named().metric if self.config.named() else self.main_metric
        chosen = (self.config.metric_for_best_model or usual).removeprefix("eval_")
        known = (*self.metrics_shown, "loss")
        if chosen not in known:
            raise UserError(
                f"metric_for_best_model {chosen!r}: --task {self.config.task} has {', '.join(known)}; give one"
            )
        return chosen

    # -----------------------------------------------------------------------------------------------------------------
    # Rows

    def find_columns(self, train) -> None:
        """
        Find the columns: the option's, or a usual one, or the named data set's.

        Raises:
            UserError: there is none of these names, or a column has two uses.
        """
        of_named = self.config.named().columns if self.config.named() else {}
        for option, usual in self.usual_columns.items():
            names = [*usual, *([of_named[option]] if option in of_named else [])]
            known = self.columns.get(option) or next((name for name in names if name in train.columns), None)
            found = getattr(self.config, option) or known
            if found or option not in OPTIONAL or option in of_named:
                self.columns[option] = found if isinstance(found, list) else [found or names[0]]
        self.check_columns(train)
        self.label = self.columns["label_column"][0]

    def check_columns(self, split, has_labels: bool = True) -> None:
        """Refuse a split without one of the columns, and a column that has two uses."""
        for option, columns in self.columns.items():
            for column in columns if has_labels or option != "label_column" else []:
                split.require(column, option)
        used = list(itertools.chain(*self.columns.values()))
        if len(set(used)) < len(used):
            raise UserError(f"column {max(used, key=used.count)!r} cannot have two uses; name another column")

    def labelled(self, example: Example, split) -> Example:
        """The example; raises `ValueError` if it has no label and others of its split have."""
        if split.is_labelled and example.label is None:
            raise ValueError(f"column {self.label!r} is empty; write a label, or take the row out")
        return example

    def checked(self, example: Example, split) -> Example:
        """The example; raises `ValueError` if the training rows have not shown how to learn it."""
        for name in self.names_of(example):
            if name not in self.number_of:
                raise ValueError(
                    f"label {name!r} does not stand in the training rows, which have {listed_names(self.classes)}; "
                    f"correct the label, or add training rows with it"
                )
        return example

    def names_of(self, example: Example) -> list[str]:
        """The names of the classes in an example; [] for a task without classes."""
        if not self.classes or example.label is None:
            return []
        return [example.label] if isinstance(example.label, str) else example.label

    def learn_classes(self, train, found: set[str], named: list[str] | tuple[str, ...] | None, least: int = 2) -> None:
        """
        Set the classes.

        Args:
            found: the names in the training rows.
            named: all names in their order, if the dataset or its publishers give it.
            least: the fewest classes; of one alone there is nothing to learn.
        """
        are_numbers = all(re.fullmatch(r"[+-]?\d+", name) for name in found)
        by_number = sorted(found, key=lambda name: (int(name) if are_numbers else 0, name))
        self.classes = [name for name in named if name in found] if named else by_number
        if len(self.classes) < least:
            raise UserError(
                f"{train.label}: every row has the label {self.classes[0]!r} in column {self.label!r}; there is "
                f"nothing to tell apart: give rows of two classes at least, or name another column with --label_column"
            )
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        names = dict(enumerate(self.classes))
        self.settings |= {"num_labels": len(names), "id2label": names, "label2id": dict(self.number_of)}

    def text(self, cells: dict, option: str) -> str:
        """The text in the column that an option names; raises `ValueError` as `check_text`."""
        (column,) = self.columns[option]
        return check_text(cells.get(column), f"column {column!r}", f", or name another column with --{option}")

    # -----------------------------------------------------------------------------------------------------------------
    # The model and its outputs

    def check_tokenizer(self, tokenizer, max_seq_length: int) -> None:
        """Refuse a tokenizer or a length that the features cannot be made with, before the rows are read."""

    def collator(self, tokenizer):
        """The function that makes a padded batch of features."""
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)

    def rescaled(self, outputs):
        """The outputs of a model in training, in the units of the labels."""
        return outputs

    def finish(self, model) -> None:
        """Change a trained model in place, so that its outputs are those of `rescaled`."""

    def numbers(self, split, outputs) -> tuple | None:
        """The true and the predicted numbers of classes of a labelled split, of which each row or word has one."""
        return None

    def report(self, split, outputs) -> dict:
        """Precision, recall and F1 of each class in a labelled split; {} for a task without classes."""
        numbers = self.numbers(split, outputs)
        return metrics.report_by_class(*numbers, range(len(self.classes)), self.classes) if numbers else {}


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def check_text(text: object, place: str, way_out: str = "") -> str:
    """A text at a place of a row; raises `ValueError` if it is empty, or no text."""
    if not isinstance(text, str) or not text.strip():
        what = "is empty" if not is_filled(text) else f"holds {type(text).__name__}, not text"
        raise ValueError(f"{place} {what}; write a text there, or take the row out{way_out}")
    return text


def json_in(cell: object, column: str) -> object:
    """
    The value of a cell; of a text that is a list or an object in JSON, as CSV has them, that list or object.

    Raises:
        ValueError: the text looks like JSON, and is none, such as a list that pandas has written.
    """
    if not isinstance(cell, str) or cell.strip()[:1] + cell.strip()[-1:] not in ("[]", "{}"):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        raise ValueError(
            f'column {column!r} holds {cell:.40}, which is not JSON; write ["a", "b"], as json.dumps does, or '
            f"give JSONL or Parquet with lists"
        ) from None


def list_in(cells: dict, column: str, option: str, separator: str | None = None) -> list:
    """
    The entries of a cell: a list, also as JSON, or a text with the separator (white space) between the entries.

    Raises:
        ValueError: the cell is neither.
    """
    value = json_in(cells.get(column), column)
    if isinstance(value, str):
        return [entry for entry in value.split(separator) if entry.strip()]
    if value is not None and not isinstance(value, list):
        raise ValueError(
            f"column {column!r} holds {type(value).__name__}, not a list; name another column with --{option}"
        )
    return value or []


def names_in(entries: list, column: str, split) -> list[str]:
    """
    The names of classes in a row: strings, or the numbers of a dataset's classes.

    Raises:
        ValueError: an entry is no name, or no number of a class.
    """
    classes, names = split.class_names.get(column), []
    for entry in entries:
        is_number = classes and isinstance(entry, int) and not isinstance(entry, bool)
        is_name = is_filled(entry) and not isinstance(entry, float | list | dict)
        if not is_name or (is_number and not 0 <= entry < len(classes)):
            raise ValueError(f"column {column!r} holds {entry!r}, which is no label; write a name or a whole number")
        names.append(classes[entry] if is_number else str(entry).strip())
    return names


def is_filled(value: object) -> bool:
    """Whether a cell holds more than white space."""
    return value is not None and str(value).strip() != ""


def listed_names(names: list[str], most: int = 10) -> str:
    """The first names in a sentence, and how many more there are."""
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------------------------------------------------------------
# Texts to inputs


def truncated(tokenizer, columns: list, max_seq_length: int) -> tuple[list[dict], str]:
    """
    The inputs of texts or of pairs of texts, truncated from the longer text of a pair.

    Args:
        columns: the texts, and the second texts of pairs.

    Returns:
        The inputs, and how many are truncated, for the user; "" if none is.
    """
    rows, cut = [], 0
    for begin in range(0, len(columns[0]), ROWS_AT_ONCE):
        chunk = [list(column[begin : begin + ROWS_AT_ONCE]) for column in columns]
        encoded = tokenizer(*chunk, verbose=False)
        for number, texts in enumerate(zip(*chunk, strict=True)):
            row = {name: values[number] for name, values in encoded.items()}
            if len(row["input_ids"]) > max_seq_length:
                row = dict(tokenizer(*texts, truncation=True, max_length=max_seq_length))
                cut += 1
            rows.append(row)
    return rows, f"{cut:,} are truncated to {max_seq_length} tokens" if cut else ""


def windows(tokenizer, columns: list, max_seq_length: int, **options) -> Iterator[tuple]:
    """
    The windows of rows that a tokenizer cuts where they are longer than `max_seq_length`.

    Args:
        columns: the texts of each row, and the second texts, if the rows are pairs.
        options: further arguments of the tokenizer.

    Yields:
        The inputs of a window, the `BatchEncoding` that it is of, its number there, and the number of its row.
    """
    options = {"truncation": True, "max_length": max_seq_length, "return_overflowing_tokens": True, **options}
    for begin in range(0, len(columns[0]), ROWS_AT_ONCE):
        encoded = tokenizer(*(list(column[begin : begin + ROWS_AT_ONCE]) for column in columns), **options)
        names = [name for name in encoded if name not in ("offset_mapping", "overflow_to_sample_mapping")]
        for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
            yield {name: encoded[name][window] for name in names}, encoded, window, begin + row
