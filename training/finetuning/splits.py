"""`Split`: the rows for training, validation or test, read from a file or a dataset, and as features."""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from d2l_bert.folders import base_name, content_hash, short_hash
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.sources import dataset_errors, is_saved_dataset
from d2l_bert.training.finetuning import tasks
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tasks import Row, Task


logger = logging.getLogger(__name__)

SUFFIXES = (*tables.TABLE_SUFFIXES, ".json", ".conll")

SPLITS = ("train", "validation", "test")

# The share of the training rows that is held out where there are no validation rows and no `validation_share`.
HELD_OUT = 0.1


@dataclass(kw_only=True)
class Split:
    """
    The rows of a split.

    Args:
        label: what the rows are, for messages: an option and a name, such as `train_file rows.csv`.
        name: the file's base name, or the dataset's id with its configuration and split.
        rows: the rows.
        fingerprint: a hash of the content of the file or dataset; of rows held out, too, that of the whole.
        class_names: for columns of the kind `ClassLabel` of a dataset, or of lists of it, the names of the classes.
        is_dataset: whether the rows come from a dataset, not from a file.
        is_labelled: whether the rows have labels.
        held_out: the share of the training rows that was held out as these validation rows; 0 if none was.
        shared: how many rows have the texts of a training row.
        features: the model's arguments for each feature, not padded, with labels if the rows have labels. A row has
            one feature, or several where `windows` says so.
        windows: for each feature what the task needs to read the model's outputs, such as its row; [] if nothing.
        note: what happened to rows longer than `max_seq_length`, for the user; "" if every row fits.
    """

    label: str
    name: str
    rows: list[Row]
    fingerprint: str
    class_names: dict[str, list[str]] = field(default_factory=dict)
    is_dataset: bool = False
    is_labelled: bool = False
    held_out: float = 0.0
    shared: int = 0
    features: list[dict] = field(default_factory=list, init=False)
    windows: list = field(default_factory=list, init=False)
    note: str = field(default="", init=False)

    def __post_init__(self):
        self.columns = list(dict.fromkeys(itertools.chain(*(row.cells for row in self.rows))))


# ---------------------------------------------------------------------------------------------------------------------
# Files and datasets


def read_file(path: str, option: str, separator: str = "auto") -> Split:
    """
    Read a whole table, packed or not.

    - `.csv`, `.tsv`: all values are strings.
    - `.jsonl`, `.parquet`: values as they are.
    - `.json`: SQuAD's form, with the columns `id`, `title`, `context`, `question`, `answers` and `is_impossible`; or a
      list of objects, also below `data`.
    - `.conll`: a word a line, its tag last, and an empty line after each text: the columns `tokens` and `tags`.

    Args:
        option: the option that names the file, for messages.
        separator: between the cells of a CSV file, as in `tokenization.tables.table_rows`.

    Raises:
        UserError: the file does not exist, cannot be read, is damaged, has another form, or has no rows.
    """
    file, label = Path(path), f"{option} {base_name(path)}"
    kind = tables.file_kind(file) if file.is_file() else None
    if kind not in tables.TABLE_KINDS and (kind is None or tables.suffix_unpacked(file) not in SUFFIXES):
        raise UserError(f"{option} {path}: no such table; give a file that ends in {', '.join(SUFFIXES)}")
    if kind in tables.TABLE_KINDS:
        with explained(label, "", *READ_ERRORS):
            rows = list(tables.table_rows(file, separator=separator))
    else:
        with explained(f"{label}: cannot be read", "repair the file", *READ_ERRORS, TypeError, RecursionError):
            lines = list(tables.lines_of(file))
            rows = _json_rows("".join(lines)) if kind == "json" else list(_conll_rows(lines, label))
    if not rows:
        raise UserError(f"{label}: has no rows; give a file with rows")
    rows = list(itertools.starmap(Row, rows))
    return Split(label=label, name=base_name(path), rows=rows, fingerprint=content_hash(file)[:16])


def _json_rows(text) -> list[tuple[str, dict]]:
    """The rows of a list of objects, or of SQuAD's nested form, with their places."""
    content = json.loads(text)
    rows = []
    for entry in content["data"] if isinstance(content, dict) else content:
        if not isinstance(entry, dict):
            raise ValueError(f"{entry!r:.40} is no object; write a list of objects")
        nested = (
            {"title": entry.get("title", ""), "context": paragraph["context"], "id": "", **question}
            for paragraph in entry.get("paragraphs", [])
            for question in paragraph["qas"]
        )
        rows += nested if "paragraphs" in entry else [entry]
    return [(f"row {number:,}", row) for number, row in enumerate(rows, 1)]


def _conll_rows(lines, label) -> Iterator[tuple[str, dict]]:
    """
    The words and the tags of each text, with the line at which it begins; no tags if a line has one field.

    A line that begins with # is a comment, as in CoNLL-U, unless it is like the other lines: with as many fields, of
    which the last one is a tag.
    """
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    words = [fields for _, fields in numbered if fields and not fields[0].startswith(("#", "-DOCSTART-"))]
    count, tags = len(words[0]) if words else 0, {fields[-1] for fields in words}
    if count == 10 and all(fields[0][0].isdigit() for fields in words):
        raise ValueError("ten columns with a number first, as in CoNLL-U; keep word and tag, as cut -f 2,4 does")
    kept = [
        (number, fields)
        for number, fields in numbered
        if not fields or fields[0][0] != "#" or (len(fields) == count and (count == 1 or fields[-1] in tags))
    ]
    if comments := len(numbered) - len(kept):
        logger.info(
            f"{label}: {counted(comments, 'line that begins', 'lines that begin')} with # left out as comments"
        )
    for is_text, group in itertools.groupby(kept, lambda line: line[1][:1] not in ([], ["-DOCSTART-"])):
        places, text = zip(*group, strict=True)
        for place, fields in zip(places, text, strict=True) if is_text else []:
            if len(fields) != count:
                raise ValueError(f"line {place:,}: {len(fields)} fields, and {count} in the first; repair the line")
        if is_text:
            tagged = {"tags": [fields[-1] for fields in text]} if count > 1 else {}
            yield f"line {places[0]:,}", {"tokens": [fields[0] for fields in text], **tagged}


def _read_dataset(name: str, config: FinetuneConfig, read: dict[str, Split]) -> dict[str, Split]:
    """
    The splits of a dataset that the options name, and of the others those of the usual names.

    Args:
        name: an id on the Hub, or a folder of `save_to_disk` or of data files; `:` and a configuration may follow.
        read: the splits that files give in place of the dataset.

    Raises:
        UserError: the dataset cannot be loaded, or has no rows in a split.
    """
    import datasets

    path, _, part = (name, "", "") if Path(name).exists() else name.partition(":")
    hint = "give an id on the Hub, or a folder of save_to_disk or of data files; --train_file takes a file"
    with dataset_errors(path, hint):
        if is_saved_dataset(path):
            found = datasets.load_from_disk(path)
        else:
            # Of CSV files pandas would read the words None, NA and null as empty.
            is_csv = hasattr(datasets.load_dataset_builder(path, part or None).config, "keep_default_na")
            found = datasets.load_dataset(path, part or None, **({"keep_default_na": False} if is_csv else {}))
    found = found if isinstance(found, dict) else {"train": found}
    asked = {split: getattr(config, f"{split}_split") for split in SPLITS if split not in read}
    splits = {}
    for split, of_dataset in asked.items():
        usual = getattr(config.named(), split) if of_dataset is None and config.named() else split
        # Validation rows are held out where a share is given.
        is_held_out = split == "validation" and config.validation_share is not None
        if of_dataset is None and (is_held_out or usual not in found):
            continue
        if of_dataset is None and usual in asked.values():
            logger.info(f"dataset {name}: split {usual!r} has another use already, so there are no {split} rows")
            continue
        rows = found.get(of_dataset or usual, [])
        if not len(rows):
            raise UserError(
                f"dataset {name}: no rows in split {of_dataset or usual!r}; it has {', '.join(found)}: name one with "
                f"--{split}_split"
            )
        cells = rows.with_format(None).to_list()
        kinds = {column: getattr(kind, "feature", kind) for column, kind in rows.features.items()}
        splits[split] = Split(
            label=f"dataset {name}, split {of_dataset or usual}",
            name=f"{base_name(name) if Path(name).exists() else name}, split {of_dataset or usual}",
            rows=[Row(f"row {number:,}", row) for number, row in enumerate(cells, 1)],
            fingerprint=short_hash(repr(cells)),
            class_names={c: tasks.names_in(kind.names, c) for c, kind in kinds.items() if hasattr(kind, "names")},
            is_dataset=True,
        )
    return splits


# ---------------------------------------------------------------------------------------------------------------------
# Rows as the task reads them


def load_splits(config: FinetuneConfig, task: Task) -> dict[str, Split]:
    """
    Read and check all rows of a run; `task` learns its labels.

    Returns:
        `train`; `validation` and `test` if there are such rows, in this order.

    Raises:
        UserError: a file or dataset cannot be read, or has rows that the task cannot use. Nothing was written.
    """
    files = {split: getattr(config, f"{split}_file") for split in SPLITS}
    splits = {split: read_file(file, f"{split}_file", config.separator) for split, file in files.items() if file}
    if config.dataset_name() is not None:
        splits |= _read_dataset(config.dataset_name(), config, splits)
    splits = {split: splits[split] for split in SPLITS if split in splits}
    task.find_columns(splits["train"])
    for name, split in splits.items():
        task.check_columns(split, has_labels=name != "test")
        # In the data sets known by name, in a column of `ClassLabel` and where all rows have it, -1 is no label.
        for column in task.columns["label_column"] if split.is_dataset else []:
            missing = [row.cells for row in split.rows if row.cells.get(column) == -1]
            if config.named() or column in split.class_names or len(missing) == len(split.rows):
                for cells in missing:
                    cells[column] = None
        split.rows = usable(split, task.read)
        split.is_labelled = any(row.label not in (None, []) for row in split.rows)
        if name != "test" and not split.is_labelled:
            raise UserError(f"{split.label}: column {task.label!r} is empty; the {name} rows need labels")
        if name == "train":
            task.learn(split)
        split.rows = usable(split, task.checked)
    if "validation" not in splits and config.validates():
        splits = {**hold_out(splits.pop("train"), task), **splits}
    elif "validation" not in splits:
        logger.info("no validation rows: the model after the last step is kept")
    trained = {row.texts for row in splits["train"].rows}
    for name, split in list(splits.items())[1:]:
        split.shared = sum(row.texts in trained for row in split.rows)
        if split.shared:
            logger.info(
                f"{split.shared:,} of the {len(split.rows):,} {name} rows have the same texts as a training row"
            )
    return splits


def usable(split: Split, read: Callable[[Row, Split], Row]) -> list[Row]:
    """
    What `read` makes of each row; it gets the split, too.

    Rows that the publishers of a dataset left incomplete are left out, and counted.

    Raises:
        UserError: a row of a file cannot be used, or no row of a dataset can.
    """
    kept, left_out = [], []
    for row in split.rows:
        try:
            kept.append(read(row, split))
        except ValueError as error:
            if not split.is_dataset:
                raise UserError(f"{split.label}, {row.place}: {error}") from None
            left_out.append(str(error).partition(";")[0])
    if not kept:
        raise UserError(f"{split.label}: no row can be used ({left_out[0]}); give another split")
    if left_out:
        count = counted(len(left_out), "row is", "rows are")
        logger.info(f"{split.label}: {count} left out, the first because {left_out[0]}")
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
    if not chosen:
        raise UserError(
            f"{train.label}: has too few different texts to hold out some for validation; give --validation_file, "
            f"or --validation_share 0"
        )

    validation = replace(
        train,
        rows=[row for row in train.rows if row.texts in chosen],
        held_out=share,
        label=f"{train.label}, rows held out",
        name=f"{train.name} (held out)",
    )
    train = replace(train, rows=[row for row in train.rows if row.texts not in chosen])
    logger.info(
        f"no validation rows were given: {len(validation.rows):,} of the training rows (of each class "
        f"{share:.3g}, drawn by seed {seed}) are held out to choose the checkpoint, and not trained on; "
        f"--validation_share 0 holds out none"
    )
    return {"train": train, "validation": validation}
