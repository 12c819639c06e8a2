"""`Kind`: what a kind of tasks brings to a run: columns, typed rows, features, model class, metrics, predictions."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import DataCollatorWithPadding

from d2l_bert.messages import UserError
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tables import Table


# Metrics that are best when they are small.
LOWER_IS_BETTER = ("loss", "mse", "mae")

ROWS_AT_ONCE = 1000


@dataclass
class Features:
    """
    The model's inputs for the rows of a table.

    Args:
        rows: a dict of the model's arguments for each feature, not padded. A labelled table also has labels, by the
            model's argument names.
        note: what happened to rows that are longer than `max_seq_length`, for the user; "" if every row fits.
        sources: the row of the table that each feature is made from; None if feature n is made from row n.
        details: for each feature, what the kind needs to read the model's outputs, such as the places of tokens in the
            text; None if it needs nothing.
    """

    rows: list[dict]
    note: str = ""
    sources: list[int] | None = None
    details: list | None = None


class Kind:
    """
    A kind of tasks. `run.py` names a subclass for each value of `config.KINDS`.

    The run calls `find_columns` with the training rows, `read` with every table, `learn` with the training rows, and
    then `check` with every table, before anything is written. `predictions` below are the model's outputs in the order
    of `Features.rows`, as NumPy arrays: the logits, or a tuple of them for a model with several; `rescaled` has been
    applied to them.

    A subclass defines these methods, which raise `UserError` for rows that cannot be used:

    - `find_columns(train)` chooses the columns: the options', or the named data set's if the table has them, or the
      usual ones;
    - `parse(cells, table)` is the typed `Row` of a row's cells, by the names of the columns; it raises `ValueError`
      with what is wrong in which column, and the way out;
    - `learn(train)` learns from the training rows what the labels are (classes, scale);
    - `targets(table)` are the labels of a labelled table as the model's, such as numbers of classes (N,);
    - `features(table, tokenizer, max_seq_length)` are the model's inputs, with labels if the table has labels;
    - `metrics(table, features, predictions)` are the metrics of a labelled table by name, without the loss;
    - `predicted_columns(table, features, predictions)` are columns with the predictions for each row of a table.

    Attributes:
        auto_class: the Auto class that loads the model, such as `AutoModelForSequenceClassification`.
        pipeline_task: the task of `transformers.pipeline` that the finished folder serves; None if Transformers 5 has
            no pipeline for it.
        main_metric: the metric that chooses, unless `metric_for_best_model` or a named data set gives another.
        metrics_shown: the metrics in the order of the tables. Metrics in `LOWER_IS_BETTER` are best when small.
        label_names: the names of labels in a batch, as in `TrainingArguments.label_names`.
        default_length: the default of `max_seq_length`.
        label: the names of the columns of labels.
        classes: the names of the classes in the order of their numbers, which `learn` finds; [] for kinds without.
        settings: the fields of the model's configuration that the task decides: `num_labels`, `id2label`, ...
        recorded: what the run's record says about the task, beside the names of the classes.
    """

    auto_class: ClassVar[str]
    pipeline_task: ClassVar[str | None]
    main_metric: ClassVar[str]
    metrics_shown: ClassVar[tuple[str, ...]]
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    default_length: ClassVar[int] = 128

    def __init__(self, config: FinetuneConfig):
        self.config = config
        self.label: list[str] = []
        self.classes: list[str] = []
        self.settings: dict = {}
        self.recorded: dict = {"has_pairs": True}

    # -----------------------------------------------------------------------------------------------------------------
    # Rows

    def read(self, table: Table) -> tuple[Table, Counter]:
        """
        The table with its typed rows, and counts of the rows left out, by the reason.

        Rows that the publishers of a dataset left incomplete are left out, and in a table with labels those without.

        Raises:
            UserError: a row of a file cannot be used, a column is missing, or no row of a dataset can be used.
        """
        labels = table.columns.get(self.label[0], [])
        if table.is_dataset and all(label in (-1, None) for label in labels):  # GLUE's mark of rows without labels
            columns = {name: values for name, values in table.columns.items() if name not in self.label}
            table = dataclasses.replace(table, columns=columns)
        rows, left_out = [], Counter()
        for number in range(len(table)):
            try:
                rows.append(self.parse({name: values[number] for name, values in table.columns.items()}, table))
            except ValueError as error:
                if not table.is_dataset:
                    raise UserError(f"{table.place(number)}: {error}") from None
                left_out[str(error)] += 1
                rows.append(None)
        table.rows = rows
        is_labelled = self.is_labelled(table)
        kept = [number for number, row in enumerate(rows) if row and not (is_labelled and row.label is None)]
        if table.is_dataset:
            left_out["no label"] += len(rows) - len(kept) - left_out.total()
            if not kept:
                reason = left_out.most_common(1)[0][0]
                raise UserError(f"{table.label}: no row can be used ({reason}); give another split")
        elif len(kept) < len(rows):
            number = next(number for number, row in enumerate(rows) if row.label is None)
            raise UserError(
                f"{table.place(number)}: column {self.label[0]!r} is empty; write a label, or take the row out"
            )
        return table.select(kept) if len(kept) < len(rows) else table, +left_out

    def is_labelled(self, table: Table) -> bool:
        """Whether the table has labels. The test rows may be without; all others must have labels."""
        return any(row is not None and row.label is not None for row in table.rows)

    def class_number(self, table: Table, row: int, name: str) -> int:
        """The number of a class by its name; raises `UserError` if the training rows do not have it."""
        if name not in self.number_of:
            raise UserError(
                f"{table.place(row)}: label {name!r} does not stand in the training rows, which have "
                f"{listed_names(self.classes)}; correct the label, or add training rows with it"
            )
        return self.number_of[name]

    def learn_classes(
        self, train: Table, found: set[str], named: list[str] | tuple[str, ...] | None, least: int = 2
    ) -> None:
        """
        Set the classes.

        Args:
            found: the names in the training rows; of one alone there is nothing to learn.
            named: all names in their order, if the dataset or its publishers give it.
            least: the fewest classes.
        """
        are_numbers = all(re.fullmatch(r"[+-]?\d+", name) for name in found)
        by_number = sorted(found, key=lambda name: (int(name) if are_numbers else 0, name))
        self.classes = [name for name in named if name in found] if named else by_number
        if len(self.classes) < least:
            raise UserError(
                f"{train.label}: every row has the label {self.classes[0]!r} in column {self.label[0]!r}; there is "
                f"nothing to tell apart: give rows of two classes at least, or name another column with --label_column"
            )
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        names = dict(enumerate(self.classes))
        self.settings |= {"num_labels": len(names), "id2label": names, "label2id": dict(self.number_of)}

    def texts(self, table: Table) -> list[tuple[str, ...]]:
        """The texts of each row, by which equal rows of two tables are found."""
        return [row.texts for row in table.rows]

    # -----------------------------------------------------------------------------------------------------------------
    # Features and the model

    def check_tokenizer(self, tokenizer, max_seq_length: int) -> None:
        """
        Refuse a tokenizer or a length that the features cannot be made with, before anything is written. May change
        settings of the tokenizer; the finished folder gets the changed one.
        """

    def rescaled(self, outputs):
        """The outputs of a model in training, in the units of the labels."""
        return outputs

    def finish(self, model) -> None:
        """Change a trained model in place, so that its outputs are those of `rescaled`."""

    # -----------------------------------------------------------------------------------------------------------------
    # Predictions

    def collator(self, tokenizer):
        """The function that makes a padded batch of features."""
        return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)

    def most_frequent_share(self, table: Table) -> float | None:
        """The accuracy of always predicting a labelled table's most frequent class; None for kinds without classes."""
        return None

    def pictures(self, table: Table, features: Features, predictions, folder) -> dict[str, str]:
        """Draw the predictions for a labelled table; returns what each picture shows, by its file name."""
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# Columns and cells


def choose_column(table: Table, option: str, given: str | None, *usual: str) -> str:
    """The column that an option names, or the first of the usual ones that the table has; refused if there is none."""
    name = given or next((name for name in usual if name in table.columns), usual[0])
    table.require(name, option)
    return name


def check_different(columns: list[str]) -> None:
    """Refuse a column that has two uses."""
    if len(set(columns)) < len(columns):
        raise UserError(f"column {max(columns, key=columns.count)!r} cannot have two uses; name another column")


def text_in(cells: dict, column: str, option: str | None = None) -> str:
    """
    The text in a cell.

    Args:
        option: the option that names the column.

    Raises:
        ValueError: the cell is empty, or is no text.
    """
    return check_text(cells.get(column), f"column {column!r}", option)


def check_text(text: object, place: str, option: str | None = None) -> str:
    """A text at a place of a row; raises `ValueError` if it is empty, or no text."""
    if not isinstance(text, str) or not text.strip():
        what = "is empty" if not is_filled(text) else f"holds {type(text).__name__}, not text"
        way_out = f", or name another column with --{option}" if option else ""
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


def names_in(entries: list, column: str, table: Table) -> list[str]:
    """
    The names of classes in a row: strings, or the numbers of a dataset's classes.

    Raises:
        ValueError: an entry is no name, or no number of a class.
    """
    classes, names = table.class_names.get(column), []
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


def in_chunks(values: list) -> Iterator[tuple[int, list]]:
    """Some values at a time, with the number of the first, so that no tokenizer gets a whole table at once."""
    for start in range(0, len(values), ROWS_AT_ONCE):
        yield start, values[start : start + ROWS_AT_ONCE]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (N, C) of logits (N, C), in float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def rounded(probabilities) -> list[float]:
    """Probabilities (N,) for the table of predictions."""
    return [round(float(probability), 6) for probability in probabilities]
