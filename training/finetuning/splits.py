"""The rows of a run: read, checked by the task, and split into training, validation and test."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained
from d2l_bert.tokenization import tables
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.rows import SPLITS, Row, Split, read_dataset, read_file
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)

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
        splits[name] = _as_the_task_reads(name, split, task)
    if "validation" not in splits and config.validates():
        splits["train"], splits["validation"] = hold_out(splits["train"], task)
        splits = {name: splits[name] for name in SPLITS if name in splits}
    trained = {row.texts for row in splits["train"].rows}
    for name in list(splits)[1:]:
        split = splits[name]
        shared = sum(row.texts in trained for row in split.rows)
        if shared:
            logger.info(f"{name}: {shared:,} of {len(split.rows):,} rows have the texts of a training row")
        splits[name] = replace(split, shared=shared)
    return splits


def _read_splits(config, task) -> dict[str, Split]:
    """The rows of files and of a dataset, none of them looked at; in the order of `SPLITS`."""
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


def _as_the_task_reads(name: str, split: Split, task: Task) -> Split:
    """
    The split with texts and labels in its rows; of the training rows, the task learns what the labels are.

    Raises:
        UserError: a column is missing, or rows cannot be used, or other rows than those to test lack labels.
    """
    task.check_columns(split.title, split.columns, has_labels=name != "test")
    _empty_missing_labels(split, task)
    read = replace(split, rows=usable(split, task.read))
    read = replace(read, is_labelled=_has_labels(read, task))
    if name != "test" and not read.is_labelled:
        raise UserError(f"{split.title}: column {task.label_column!r:.100} is empty; the {name} rows need labels")
    if name == "train":
        task.learn(read)
    return replace(read, rows=usable(read, task.checked))


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
    """Whether a row has a label. Where each label has a column of 0 and 1, a row of zeros has been labelled, too."""
    has_columns = len(task.columns["label_column"]) > 1
    return any(row.label is not None and (row.label != [] or has_columns) for row in split.rows)


def usable(split: Split, read: Callable[[Row, Split], Row]) -> list[Row]:
    """
    What `read` makes of each row; it gets the split, too.

    Rows that the publishers of a dataset left incomplete are left out, and counted.

    Raises:
        UserError: a row of a file cannot be used, or no row of a dataset can.
    """
    kept = []
    wrong = []
    for row in split.rows:
        try:
            kept.append(read(row, split))
        except ValueError as error:
            wrong.append(f"{row.place}: {error}")
    if wrong and not (split.is_dataset and kept):
        raise UserError(f"{split.title}, {wrong[0]}")
    if wrong:
        logger.info(f"{split.title}: {counted(len(wrong), 'row is', 'rows are')} left out: {wrong[0]}")
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Rows held out


def hold_out(rows: Split, task: Task) -> tuple[Split, Split]:
    """
    Split rows into training and validation rows, at random by the seed. Rows with the same texts stay together.

    Returns:
        The training rows, and the validation rows.

    Raises:
        UserError: there are too few rows.
    """
    seed = task.config.seed
    share = task.config.validation_share or HELD_OUT
    classes = {}  # by the texts of a row
    for row in rows.rows:
        classes.setdefault(row.texts, set()).update(task.names_of(row))
    drawn = draw_texts(classes, share, seed)
    if not drawn:
        raise UserError(
            f"{rows.title}: has too few different texts to hold out some for validation; give --validation_file, or "
            f"--validation_share 0"
        )
    train = replace(rows, rows=[row for row in rows.rows if row.texts not in drawn])
    validation = replace(
        rows,
        rows=[row for row in rows.rows if row.texts in drawn],
        held_out=share,
        title=f"{rows.title}, rows held out",
        name=f"{rows.name} (held out)",
    )
    logger.info(
        f"no validation rows were given: {len(validation.rows):,} of the training rows (of each class "
        f"{share:.3g}, drawn by seed {seed}) are held out to choose the checkpoint, and not trained on; "
        f"--validation_share 0 holds out none"
    )
    return train, validation


def draw_texts(classes: dict[tuple, set[str]], share: float, seed: int) -> set[tuple]:
    """
    Draw a share of the texts of each class, at random by a seed.

    Of each class at least one is drawn if the share is as many as there are classes, and at least one stays. A text
    of several classes, or of words of several, counts for the rarest.

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
    wanted = max(1.0, share * len(different))
    least = int(wanted >= len(by_class))
    drawn = set()
    owed = 0.0  # what rounding has left over, for the next class
    for texts in sorted(by_class.values(), key=len, reverse=True):
        owed += wanted * len(texts) / len(different)
        number = min(max(least, round(owed)), len(texts) - 1)
        owed -= number
        drawn.update(texts[:number])
    return drawn
