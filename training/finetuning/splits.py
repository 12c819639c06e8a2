"""The rows of a run: read, checked by the task, and split into training, validation and test."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, refuse_first
from d2l_bert.tokenization import tables
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.rows import SPLITS, Row, Split, _read_dataset, read_file
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
    splits, memory = {}, tables.Memory()
    for split in SPLITS:
        if file := getattr(config, f"{split}_file"):
            columns = _needed_columns(file, split, task, config)
            splits[split] = read_file(file, f"{split}_file", config.separator, columns=columns, memory=memory)
    tables.check_separator(config.separator, [Path(getattr(config, f"{split}_file")) for split in splits])
    if config.dataset_name() is not None:
        splits |= _read_dataset(config.dataset_name(), config, splits, memory)
    splits = {split: splits[split] for split in SPLITS if split in splits}
    task.find_columns(splits["train"].columns)
    for name, split in splits.items():
        task.check_columns(split.label, split.columns, has_labels=name != "test")
        # In the data sets known by name, in a column of `ClassLabel` and where all rows have it, -1 is no label.
        for column in task.columns["label_column"] if split.is_dataset else []:
            missing = [row.cells for row in split.rows if row.cells.get(column) == -1]
            if config.named or column in split.class_names or len(missing) == len(split.rows):
                for cells in missing:
                    cells[column] = None
        split.rows = usable(split, task.read)
        # A row without a label is labelled where each label has a column of 0 and 1.
        split.is_labelled = any(
            row.label is not None and (row.label != [] or task.columns["label_column"][1:]) for row in split.rows
        )
        refuse_first(
            {
                f"{split.label}: column {task.label!r:.100} is empty; the {name} rows need labels": (
                    name != "test" and not split.is_labelled
                )
            }
        )
        if name == "train":
            task.learn(split)
        split.rows = usable(split, task.checked)
    if "validation" not in splits and config.validates():
        splits = {**hold_out(splits.pop("train"), task), **splits}
    trained = {row.texts for row in splits["train"].rows}
    for name, split in list(splits.items())[1:]:
        split.shared = sum(row.texts in trained for row in split.rows)
        if split.shared:
            logger.info(f"{name}: {split.shared:,} of {len(split.rows):,} rows have the texts of a training row")
    return splits


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
    label = f"{split}_file {folders.base_name(file)}"
    with explained(label, "", *READ_ERRORS):
        names = tables.parquet_columns(path)
    if not names:
        return None
    if split == "train":
        task.find_columns(names)
    task.check_columns(label, names)
    needed = {*itertools.chain(*task.columns.values()), *task.more_columns}
    return [column for column in names if column in needed]


def usable(split: Split, read: Callable[[Row, Split], Row]) -> list[Row]:
    """
    What `read` makes of each row; it gets the split, too.

    Rows that the publishers of a dataset left incomplete are left out, and counted.

    Raises:
        UserError: a row of a file cannot be used, or no row of a dataset can.
    """
    kept, wrong = [], []
    for row in split.rows:
        try:
            kept.append(read(row, split))
        except ValueError as error:
            wrong.append(f"{row.place}: {error}")
    if wrong and not (split.is_dataset and kept):
        raise UserError(f"{split.label}, {wrong[0]}")
    if wrong:
        logger.info(f"{split.label}: {counted(len(wrong), 'row is', 'rows are')} left out: {wrong[0]}")
    return kept


def hold_out(train: Split, task: Task) -> dict[str, Split]:
    """
    Split rows into training and validation rows, at random by the seed. Rows with the same texts stay together.

    Of the texts of each class the share is held out, at least one if the share is as many as there are classes, and at
    least one stays. A text of several classes, or of words of several, counts for the rarest.

    Raises:
        UserError: there are too few rows.
    """
    seed, share = task.config.seed, task.config.validation_share or HELD_OUT
    classes = {}
    for row in train.rows:
        classes.setdefault(row.texts, set()).update(task.names_of(row))
    different, counts = list(classes), Counter(itertools.chain(*classes.values()))
    by_class, chosen = {}, set()
    for number in np.random.default_rng(seed).permutation(len(different)):
        rarest = min(classes[different[number]], key=lambda name: (counts[name], name), default=None)
        by_class.setdefault(rarest, []).append(different[number])
    drawn = max(1.0, share * len(different))
    least, owed = int(drawn >= len(by_class)), 0.0
    for texts in sorted(by_class.values(), key=len, reverse=True):
        owed += drawn * len(texts) / len(different)
        number = min(max(least, round(owed)), len(texts) - 1)
        owed -= number
        chosen |= set(texts[:number])
    refuse_first(
        {
            f"{train.label}: has too few different texts to hold out some for validation; give --validation_file, or "
            f"--validation_share 0": not chosen
        }
    )
    validation = replace(
        train,
        rows=[row for row in train.rows if row.texts in chosen],
        held_out=share,
        label=f"{train.label}, rows held out",
        name=f"{train.name} (held out)",
    )
    logger.info(
        f"no validation rows were given: {len(validation.rows):,} of the training rows (of each class "
        f"{share:.3g}, drawn by seed {seed}) are held out to choose the checkpoint, and not trained on; "
        f"--validation_share 0 holds out none"
    )
    return {
        "train": replace(train, rows=[row for row in train.rows if row.texts not in chosen]),
        "validation": validation,
    }
