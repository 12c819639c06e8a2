"""The rows of a fine-tuning run: reads and checks all rows, holds out some for validation, finds shared texts."""

import logging
from dataclasses import dataclass, field

import numpy as np

from d2l_bert.messages import UserError, counted, refuse_first
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.kind import Kind
from d2l_bert.training.finetuning.tables import Table, read_dataset, read_file


logger = logging.getLogger(__name__)

# The share of the training rows that is held out where there are no validation rows and no `validation_share`.
HELD_OUT = 0.1


@dataclass
class Data:
    """
    The rows of a run.

    Args:
        validation: None if the run has no validation rows.
        test: None if the run has no test rows.
        test_is_labelled: whether the test rows have labels.
        held_out: the share of the training rows that was held out as validation rows; 0 if none was.
        shared: how many rows of validation and test have the texts of a training row, by split.
    """

    train: Table
    validation: Table | None
    test: Table | None
    test_is_labelled: bool = False
    held_out: float = 0.0
    shared: dict[str, int] = field(default_factory=dict)

    def splits(self) -> dict[str, Table]:
        """The tables that exist, by the name of their split: `train`, `validation`, `test`."""
        tables = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: table for split, table in tables.items() if table is not None}

    def measured(self) -> list[str]:
        """The splits to measure on, the one to report last: `validation`, `test`, as far as they have labels."""
        return ["validation"] * (self.validation is not None) + ["test"] * self.test_is_labelled


def load_data(config: FinetuneConfig, kind: Kind) -> Data:
    """
    Read and check all rows of a run; `kind` learns its labels.

    Raises:
        UserError: a file or dataset cannot be read, or has rows that the task cannot use. Nothing was written.
    """
    tables = dict(zip(("train", "validation", "test"), _read(config), strict=True))
    kind.find_columns(tables["train"])
    for split, table in tables.items():
        if table is not None:
            tables[split], left_out = kind.read(table)
            for reason, count in left_out.items():
                logger.info(f"{table.label}: {counted(count, 'row is', 'rows are')} left out: {reason}")
            if split != "test" and not kind.is_labelled(tables[split]):
                for column in kind.label:
                    table.require(column, "label_column")
                raise UserError(f"{table.label}: column {kind.label[0]!r} is empty; the {split} rows need labels")
    train, validation, test = tables.values()
    kind.learn(train)
    for table in filter(None, tables.values()):
        if kind.is_labelled(table):
            kind.targets(table)  # refuses labels that the model cannot be trained or measured on
    held_out = 0.0
    if validation is None and config.validates():
        held_out = HELD_OUT if config.validation_share is None else config.validation_share
        train, validation = hold_out(train, kind, held_out, config.seed)
        logger.info(
            f"no validation rows were given: {len(validation):,} of the training rows ({held_out:.3g}, drawn by seed "
            f"{config.seed}) are held out to choose the checkpoint, and not trained on; --validation_share 0 holds "
            f"out none"
        )
    elif validation is None:
        logger.info("no validation rows: the model after the last step is kept")
    if config.max_train_samples is not None and config.max_train_samples < len(train):
        drawn = np.random.default_rng(config.seed).permutation(len(train))[: config.max_train_samples]
        train = train.select(sorted(drawn.tolist()))
        logger.info(f"trains on {len(train):,} of the training rows, drawn by seed {config.seed}")
    data = Data(train, validation, test, test is not None and kind.is_labelled(test), held_out)
    trained = set(kind.texts(train))
    data.shared = {
        split: sum(texts in trained for texts in kind.texts(table))
        for split, table in data.splits().items()
        if split != "train"
    }
    for split, count in data.shared.items():
        if count:
            rows = len(data.splits()[split])
            logger.info(f"{count:,} of the {rows:,} {split} rows have the same texts as a training row")
    return data


def _read(config):
    """The tables for training, validation and test; None for those that the options do not give."""
    splits, task = {}, config.named_task()
    chosen = [
        given or (getattr(task, default) if task else default)
        for given, default in ((config.validation_split, "validation"), (config.test_split, "test"))
    ]
    if config.dataset_name() is not None:
        splits = read_dataset(config.dataset_name(), {config.train_split, *chosen})
        names = {
            "train_split": config.train_split,
            "validation_split": config.validation_split,
            "test_split": config.test_split,
        }
        cases = {
            f"no rows in split {name!r}; it has {', '.join(splits)}: name one with --{option}": (
                name is not None and not splits.get(name)
            )
            for option, name in names.items()
        }
        refuse_first(cases, f"dataset {config.dataset_name()}: ")
    train = splits[config.train_split] if splits else read_file(config.train_file, "train_file", config.separator)
    validation, test = map(splits.get, chosen)
    if config.validation_share is not None:
        validation = None
    if config.validation_file:
        validation = read_file(config.validation_file, "validation_file", config.separator)
    if config.test_file:
        test = read_file(config.test_file, "test_file", config.separator)
    return train, validation, test


def hold_out(train: Table, kind: Kind, share: float, seed: int) -> tuple[Table, Table]:
    """
    Split rows into training and validation rows, at random by the seed. Rows with the same texts stay together.

    Raises:
        UserError: there are too few rows.
    """
    texts = kind.texts(train)
    different = list(dict.fromkeys(texts))
    number = min(max(1, round(share * len(different))), len(different) - 1)
    if len(different) < 2:
        raise UserError(
            f"{train.label}: has too few different texts to hold out some for validation; give --validation_file, "
            f"or --validation_share 0"
        )
    drawn = np.random.default_rng(seed).permutation(len(different))[:number]
    chosen = {different[row] for row in drawn}
    kept = [row for row, text in enumerate(texts) if text not in chosen]
    validation = train.select([row for row, text in enumerate(texts) if text in chosen])
    validation.label, validation.name = f"{train.label}, rows held out", f"{train.name} (held out)"
    return train.select(kept), validation
