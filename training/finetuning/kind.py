"""`Kind`: what a kind of tasks brings to a run: columns, checks, features, model class, metrics, predictions."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from d2l_bert.errors import UserError
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tables import Table


@dataclass
class Features:
    """
    The model's inputs for the rows of a table.

    Args:
        rows: a dict of the model's arguments for each feature, not padded. A labelled table also has labels, by the
            model's argument names.
        truncated: how many rows of the table lost text to `max_seq_length`.
        sources: the row of the table that each feature is made from; None if feature n is made from row n.
        details: for each feature, what the kind needs to read the model's outputs, such as the places of tokens in the
            text; None if it needs nothing.
        note: what the user should know about the lengths, if a table has rows with several features.
    """

    rows: list[dict]
    truncated: int
    sources: list[int] | None = None
    details: list | None = None
    note: str = ""

    def lost(self, max_seq_length: int) -> str:
        """What `max_seq_length` does to the rows, in words; "" if every row fits."""
        cut = f"{self.truncated:,} are truncated to {max_seq_length} tokens" if self.truncated else ""
        return self.note or cut


class Kind:
    """
    A kind of tasks. `kinds.py` has a subclass for each value of `tasks.KINDS`.

    The run calls `find_columns` and `learn` with the training rows, then `check` with every table, before anything is
    written. `predictions` below are the model's outputs in the order of `Features.rows`, as NumPy arrays: the logits,
    or a tuple of them for a model with several; `rescaled` has been applied to them.

    Attributes:
        auto_class: the Auto class that loads the model, such as `AutoModelForSequenceClassification`.
        pipeline_task: the task of `transformers.pipeline` that the finished folder serves; None if Transformers 5 has
            no pipeline for it.
        main_metric: the metric that chooses, unless `metric_for_best_model` or a named data set gives another.
        metrics_shown: the metrics in the order of the tables. Metrics in `LOWER_IS_BETTER` are best when small.
        label_names: the names of labels in a batch, as in `TrainingArguments.label_names`.
        default_length: the default of `max_seq_length`.
    """

    auto_class: ClassVar[str]
    pipeline_task: ClassVar[str | None]
    main_metric: ClassVar[str]
    metrics_shown: ClassVar[tuple[str, ...]]
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    default_length: ClassVar[int] = 128

    def __init__(self, config: FinetuneConfig):
        self.config = config
        self.notes: list[str] = []  # what the user should know about how `learn` reads the rows, a sentence each

    def find_columns(self, train: Table) -> None:
        """Choose the columns: the options', or the named data set's if the table has them, or the defaults."""
        raise NotImplementedError

    def learn(self, train: Table) -> None:
        """Check the training rows and their labels, and learn from them what the labels are (classes, scale)."""
        raise NotImplementedError

    def is_labelled(self, table: Table) -> bool:
        """Whether the table has labels. The test rows may be without; all others must have labels."""
        raise NotImplementedError

    def check(self, table: Table) -> None:
        """Refuse rows that the model cannot be trained or measured on; called after `learn`, with every table."""
        raise NotImplementedError

    def usable(self, table: Table) -> tuple[Table, dict[str, int]]:
        """
        The rows of a dataset without those that its publishers left incomplete, and counts of the rows left
        out, by the reason. A file's rows are all kept: `check` refuses the incomplete ones.
        """
        return table, {}

    def texts(self, table: Table) -> list[tuple[str, ...]]:
        """The texts of each row, by which equal rows of two tables are found."""
        raise NotImplementedError

    def holdable(self, train: Table, drawn: list[tuple[str, ...]]) -> set[tuple[str, ...]]:
        """The texts drawn from the training rows, without those that training needs to see every class."""
        return set(drawn)

    def model_settings(self) -> dict:
        """The fields of the model's configuration that the task decides: `num_labels`, `id2label`, ..."""
        return {}

    def check_tokenizer(self, tokenizer, max_seq_length: int) -> None:
        """
        Refuse a tokenizer or a length that the features cannot be made with, before anything is written. May change
        settings of the tokenizer; the finished folder gets the changed one.
        """

    def features(self, table: Table, tokenizer, max_seq_length: int) -> Features:
        """The model's inputs, with labels if the table has labels."""
        raise NotImplementedError

    def collator(self, tokenizer):
        """The function that makes a padded batch of features."""
        raise NotImplementedError

    def rescaled(self, outputs):
        """The outputs of a model in training, in the units of the labels."""
        return outputs

    def finish(self, model) -> None:
        """Change a trained model in place, so that its outputs are those of `rescaled`."""

    def metrics(self, table: Table, features: Features, predictions) -> dict[str, float]:
        """The metrics of a labelled table, by name; without the loss."""
        raise NotImplementedError

    def most_frequent_share(self, table: Table) -> float | None:
        """The accuracy of always predicting a labelled table's most frequent class; None for kinds without classes."""
        return None

    def constant_metrics(self, table: Table) -> tuple[str, ...]:
        """The metrics that are 0 on a labelled table whatever is predicted, by its labels alone."""
        return ()

    def predicted_columns(self, table: Table, features: Features, predictions) -> dict[str, list]:
        """Columns with the predictions for each row of a table, to stand beside the columns of the table."""
        raise NotImplementedError

    def pictures(self, table: Table, features: Features, predictions, folder: Path) -> dict[str, str]:
        """
        Draw pictures of the predictions for a labelled table into a folder.

        Returns:
            By the picture's file name, what the picture shows, for the card.
        """
        return {}

    def data_record(self) -> dict:
        """What the run's record says about the task: `labels`, the names of the classes; `has_pairs`."""
        return {}


def check_text_column(table: Table, column: str, option: str) -> None:
    """
    Refuse a column with a cell that is no text; `option` is the one that names the column.

    Raises:
        UserError: there is no such column, or as in `check_text`.
    """
    for row, text in enumerate(table.require(column, option)):
        check_text(table, row, f"column {column!r}", text, f"name another column with --{option}")


def check_text(table: Table, row: int, name: str, text: object, mend: str) -> None:
    """
    Refuse a text of a row that is empty, of another type, or damaged.

    Args:
        name: where in the row the text stands, such as "column 'text'".
        mend: what mends a value that is no string.

    Raises:
        UserError: names the row and the place in the row.
    """
    if text is not None and not isinstance(text, str):
        raise UserError(f"{table.place(row)}: {name} holds {type(text).__name__}, not text; {mend}")
    if not has_text(text):
        raise UserError(f"{table.place(row)}: {name} is empty; write a text there, or take the row out")


def has_text(value: object) -> bool:
    """Whether a value is a string with more than white space."""
    return isinstance(value, str) and value.strip() != ""


def json_list(text: str) -> list | None:
    """
    The list in a cell of CSV that holds one as JSON.

    Returns:
        None if the text does not begin with [ and end with ].

    Raises:
        ValueError: it does, and is not JSON, such as a list that pandas has written.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def no_json_list(table: Table, row: int, column: str, text: str) -> UserError:
    """The error for a cell on which `json_list` has raised `ValueError`."""
    return UserError(
        f"{table.place(row)}: column {column!r} holds {text:.40}, a list that is not JSON; write it as "
        f'["a", "b"], for example with json.dumps, or give JSONL or Parquet with lists'
    )


def whole_number(value: object) -> object:
    """A value as it is; a whole number that is written as a float (1.0, as pandas writes it) without the point."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)\.0+\s*", value)):
        return match[1]
    return value


# Metrics that are best when they are small.
LOWER_IS_BETTER = ("loss", "mse", "mae")
