"""The rows of a run: read, checked by the task, and split into training, validation and test."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, explained, one_line
from d2l_bert.tokenization import tables
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.rows import SPLITS, Row, Split, read_dataset, read_file
from d2l_bert.training.finetuning.tasks import Task


# The share of the training rows that is held out where there are no validation rows and no `validation_share`.
HELD_OUT = 0.1


def load_splits(config: FinetuneConfig, task: Task) -> dict[str, Split]:
    """
    Read and check all rows of a run; `task` learns its labels.

    Returns:
        `train`; `validation` and `test` if there are such rows, in this order.

    Raises:
        UserError: a file or dataset cannot be read, or has rows that the task cannot use. Nothing was written.
    """
    splits = _read_splits(config, task)
    task.find_columns(splits["train"].columns)
    for name, split in splits.items():
        splits[name] = as_the_task_reads(name, split, task)
    if "validation" not in splits and config.validates():
        splits["train"], splits["validation"] = hold_out(splits["train"], task)
        splits = {name: splits[name] for name in SPLITS if name in splits}
    trained = {row.texts for row in splits["train"].rows}
    for name in list(splits)[1:]:
        split = splits[name]
        splits[name] = replace(split, shared=sum(row.texts in trained for row in split.rows))
    return splits


def _read_splits(config, task) -> dict[str, Split]:
    """The rows of files and of a dataset, not yet read by the task; in the order of `SPLITS`."""
    found = {}
    memory = tables.Memory()
    for split in SPLITS:
        if file := getattr(config, f"{split}_file"):
            columns = _needed_columns(file, split, task, config)
            found[split] = read_file(file, f"{split}_file", config.separator, columns=columns, memory=memory)
    tables.check_separator(config.separator, [Path(getattr(config, f"{split}_file")) for split in found])
    if config.dataset_name() is not None:
        found |= read_dataset(config.dataset_name(), config, found, memory)
    return {split: found[split] for split in SPLITS if split in found}


def _needed_columns(file: str, split: str, task: Task, config: FinetuneConfig) -> list[str] | None:
    """
    The columns of a Parquet file that a run needs, found and checked before its rows are read.

    None for all: of other files; of the test rows, which are written down with their predictions; and where training
    rows of a dataset, which are read later, show which columns there are.

    Raises:
        UserError: the file is damaged, or lacks a column.
    """
    path = Path(file)
    if split == "test" or config.train_file is None or not path.is_file() or tables.file_kind(path) != "parquet":
        return None
    title = f"{split}_file {folders.base_name(file)}"
    with explained(title, "", *READ_ERRORS):
        names = tables.parquet_columns(path)
    if not names:
        return None
    if split == "train":
        task.find_columns(names)
    task.check_columns(title, names)
    needed = {*itertools.chain(*task.columns.values()), *task.more_columns}
    return [column for column in names if column in needed]


# ---------------------------------------------------------------------------------------------------------------------
# Rows as the task reads them


def as_the_task_reads(name: str, split: Split, task: Task) -> Split:
    """
    The split with texts and labels in its rows; of the training rows, the task learns what the labels are.

    Raises:
        UserError: a column is missing, or rows cannot be used, or other rows than those to test lack labels.
    """
    task.check_columns(split.title, split.columns, has_labels=name != "test")
    _empty_missing_labels(split, task)
    left_out = []
    split = replace(split, rows=usable(split, task.read, left_out))
    split = replace(split, is_labelled=_has_labels(split, task))
    if name != "test" and not split.is_labelled:
        raise UserError(f"{split.title}: column {task.label_column!r:.100} is empty; the {name} rows need labels")
    if name == "train":
        task.learn(split)
    return replace(split, rows=usable(split, task.check_label, left_out), left_out=left_out)


def _empty_missing_labels(split: Split, task: Task) -> None:
    """
    Empty the cells of a dataset where -1 stands for no label.

    It does in the data sets known by name, in a column of `ClassLabel` and where all rows have it.
    """
    if not split.is_dataset:
        return
    for column in task.columns["label_column"]:
        missing = [row for row in split.rows if row.cells.get(column) == -1]
        if task.config.named_data_set or column in split.class_names or len(missing) == len(split.rows):
            for row in missing:
                row.cells[column] = None


def _has_labels(split: Split, task: Task) -> bool:
    """
    Whether a row has a label.

    With several labels at once, [] is a label where each label has a column: a row of zeros there has been labelled.
    In one column of lists, [] is an empty cell, and no label.
    """
    has_columns = len(task.columns["label_column"]) > 1
    return any(row.label is not None and (row.label != [] or has_columns) for row in split.rows)


def usable(split: Split, function: Callable[[Row, Split], Row], left_out: list[str]) -> list[Row]:
    """
    The rows that a function of a row and its split makes of the rows of a split.

    Rows that the publishers of a dataset left incomplete, for which it raises `ValueError`, are left out.

    Args:
        left_out: gets the place of each row that is left out, and what is wrong with it.

    Raises:
        UserError: a row of a file cannot be used, or no row of a dataset can.
    """
    kept = []
    wrong = []
    for row in split.rows:
        try:
            kept.append(function(row, split))
        except ValueError as error:
            wrong.append(f"{row.place}: {one_line(error)}")
    if wrong and not (split.is_dataset and kept):
        raise UserError(f"{split.title}, {wrong[0]}")
    left_out.extend(wrong)
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Rows held out


def hold_out(split: Split, task: Task) -> tuple[Split, Split]:
    """
    Split training rows into training and validation rows, at random by the seed. Rows with the same texts stay
    together.

    Returns:
        The training rows, and the validation rows.

    Raises:
        UserError: there are too few rows.
    """
    seed = task.config.seed
    share = task.config.validation_share or HELD_OUT
    classes = {}  # by the texts of a row
    for row in split.rows:
        classes.setdefault(row.texts, set()).update(task.names_of(row))
    drawn = draw_texts(classes, share, seed)
    if not drawn:
        raise UserError(
            f"{split.title}: has too few different texts to hold out some for validation; give --validation_file, or "
            f"--validation_share 0"
        )
    train = replace(split, rows=[row for row in split.rows if row.texts not in drawn])
    validation = replace(
        split,
        rows=[row for row in split.rows if row.texts in drawn],
        held_out=share,
        title=f"{split.title}, rows held out",
        name=f"{split.name} (held out)",
        left_out=[],
    )
    return train, validation


def draw_texts(classes: dict[tuple, set[str]], share: float, seed: int) -> set[tuple]:
    """
    Draw a share of the texts of each class, at random by a seed.

    Of each class at least one is drawn if the share is as many as there are classes, and at least one stays. A text
    of several classes, or of words of several, counts for the rarest.

    For example, a share of 0.1 of 36 texts, 24 of class a, 8 of b and 4 of c, is 3.6 texts. Class by class, the
    largest first, what rounding has left over is added to the share of the next class:

    | class | its share | with what is left over | drawn | left over |
    |---|---|---|---|---|
    | a | 2.4 | 2.4 | 2 | 0.4 |
    | b | 0.8 | 1.2 | 1 | 0.2 |
    | c | 0.4 | 0.6 | 1 | -0.4 |

    3.6 texts are enough for one of each of the 3 classes: c would have one also if its share were 0.1. Of a class of
    one text none is drawn, as that one stays.

    Args:
        classes: by the texts of a row, the names of its classes; of a task without classes none.
    """
    different = list(classes)
    counts = Counter(itertools.chain(*classes.values()))
    by_class = {}
    for number in np.random.default_rng(seed).permutation(len(different)):
        texts = different[number]
        rarest = min(classes[texts], key=lambda name: (counts[name], name), default=None)
        by_class.setdefault(rarest, []).append(texts)
    total = max(1.0, share * len(different))  # how many texts to draw
    least = 1 if total >= len(by_class) else 0  # of each class
    drawn = set()
    left_over = 0.0
    for texts in sorted(by_class.values(), key=len, reverse=True):
        wanted = left_over + total * len(texts) / len(different)
        count = max(least, round(wanted))
        count = min(count, len(texts) - 1)
        left_over = wanted - count
        drawn.update(texts[:count])
    return drawn
