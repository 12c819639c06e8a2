"""`Split`: the rows for training, validation or test, read from a file or a dataset, and as features."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, refuse_first
from d2l_bert.model_cards.card import local_name
from d2l_bert.tokenization import hub_datasets, tables
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tasks import Row, Task, name_of


logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")

LONGEST_DOCUMENT = 1 << 30  # characters in a line of a document of JSON, which may be the whole

# So many rows of a dataset are made Python's at once, and then counted.
DATASET_ROWS = 100

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


def read_file(
    path: str,
    option: str,
    separator: str = "auto",
    text_column: str = "text",
    columns: Sequence[str] | None = None,
    memory: tables.Memory | None = None,
    label: str = "",
) -> Split:
    """
    Read a whole table, packed or not.

    - `.csv`, `.tsv`: all values are strings.
    - `.jsonl`, `.parquet`: values as they are.
    - `.json`: SQuAD's form, with the columns `id`, `title`, `context`, `question`, `answers` and `is_impossible`; or a
      list of objects, also below `data`.
    - `.conll`: a word a line, its tag last, and an empty line after each text: the columns `tokens` and `tags`; or
      CoNLL-U, also as `.conllu`, with the universal parts of speech as tags.
    - any other text: each line that is not empty is a text.

    Args:
        option: the option that names the file, for messages; "" if it is an argument.
        separator: between the cells of a CSV file, as in `tokenization.tables.table_rows`.
        text_column: the column of the texts in lines.
        columns: those that are needed of a Parquet file; None for all.
        memory: counts what this and other splits take.
        label: what the file is called in messages, in place of its option and name.

    Raises:
        UserError: the file does not exist, cannot be read, is damaged, has another form, or has no rows; or its rows
            take too much memory.
    """
    file = Path(path)
    given = f"{option} {path}".strip()
    label = label or (f"{option} {folders.base_name(path)}" if option else path)
    tables.refuse_pipe(path, given, "write its rows to a file, and give that")
    if file.is_dir():
        way_out = "give one of its files, or the folder with --dataset" if option else "give one of its files"
        raise UserError(f"{given}: is a folder; {way_out}")
    if not file.is_file():
        raise UserError(f"{given}: no such file; give a table, or a text in each line")
    memory = memory or tables.Memory()
    kind = tables.file_kind(file)
    is_conll = tables.suffix_unpacked(file) in (".conll", ".conllu")
    way_out = "repair the file; .json is a list of objects, or SQuAD's form"
    with explained(f"{label}: cannot be read", way_out, OSError), explained(label, "", LookupError, ValueError):
        if kind in tables.TABLE_KINDS:
            found = tables.table_rows(file, columns, separator)
        elif kind == "json" or is_conll:
            lines = [line for _, line in tables.Memory().hold(_numbered_lines(file, kind))]
            with explained("cannot be read", way_out, *READ_ERRORS, TypeError, RecursionError):
                found = list(_conll_rows(lines, label) if is_conll else _json_rows("\n".join(lines)))
        else:
            found = ((place, {text_column: line}) for place, line in _numbered_lines(file, kind) if line.strip())
        rows = memory.hold(found)
    if not rows:
        raise UserError(f"{label}: has no rows; give a file with rows")
    return Split(
        label=label,
        name=folders.base_name(path),
        rows=list(itertools.starmap(Row, rows)),
        fingerprint=folders.content_hash(file)[:16],
    )


def _numbered_lines(file, kind) -> Iterator[tuple[str, str]]:
    """The lines of a text file, each with its place."""
    longest = LONGEST_DOCUMENT if kind == "json" else tables.LONGEST_LINE
    for number, line in enumerate(tables.lines_of(file, longest=longest), 1):
        yield f"line {number:,}", line.rstrip("\r\n")


def _json_rows(text) -> Iterator[tuple[str, dict]]:
    """The rows of a list of objects, or of SQuAD's nested form, each with its place."""
    tables.check_values(text)
    return tables.few_columns((f"row {number:,}", row) for number, row in enumerate(_objects_in(text), 1))


def _objects_in(text) -> Iterator[dict]:
    """The rows in a document of JSON."""
    content = json.loads(tables.whole_characters(text))
    for entry in content["data"] if isinstance(content, dict) else content:
        if not isinstance(entry, dict):
            raise TypeError(f"{entry!r:.50} is no object")
        if "paragraphs" not in entry:
            yield dict(entry)
        for paragraph in entry.get("paragraphs", []):
            shared = {"title": entry.get("title", ""), "context": paragraph["context"], "id": ""}
            yield from ({**shared, **question} for question in paragraph["qas"])


def _conll_rows(lines, label) -> Iterator[tuple[str, dict]]:
    """
    The words and the tags of each text, with the line at which it begins; no tags if a line has one field.

    A line that begins with # is a comment, as in CoNLL-U, unless it is like the other lines: with as many fields, of
    which the last one is a tag.
    """
    fields_of_lines = ([] if line.startswith("-DOCSTART-") else line.split() for line in lines)
    if any(re.fullmatch(r"1(\t[^\t]*){9}", line) for line in lines):  # CoNLL-U; 1-2 are two words, and 8.1 is none
        rows = (line.split("\t") for line in lines)
        fields_of_lines = (row[1:4:2] if row[0].isdigit() else ["#"] if row[0] else [] for row in rows)
    numbered = list(enumerate(fields_of_lines, 1))
    for number, fields in numbered:
        if fields and not fields[0]:
            raise ValueError(f"line {number:,}: its word is empty; repair the line")
    words = [fields for _, fields in numbered if fields and fields[0][0] != "#"]
    count, tags = len(words[0]) if words else 0, {fields[-1] for fields in words}
    kept = [
        (number, fields)
        for number, fields in numbered
        if not fields or fields[0][0] != "#" or (len(fields) == count and (count == 1 or fields[-1] in tags))
    ]
    if comments := len(numbered) - len(kept):
        logger.info(
            f"{label}: {counted(comments, 'line is', 'lines are')} left out: comments, or no words of their own"
        )
    for number, fields in kept:
        if len(fields) not in (0, count):
            raise ValueError(f"line {number:,}: {len(fields)} fields, and {count} in the first; repair the line")
    for is_text, group in itertools.groupby(kept, lambda line: bool(line[1])):
        if is_text:
            places, text = zip(*group, strict=True)
            tagged = {"tags": [fields[-1] for fields in text]} if count > 1 else {}
            yield f"line {places[0]:,}", {"tokens": [fields[0] for fields in text], **tagged}


def _dataset_rows(rows, source: str) -> Iterator[tuple[str, dict]]:
    """The rows of a split of a dataset, each with its place; `source` names it in messages."""
    rows = rows.with_format("arrow")
    told = set()
    for start in range(0, len(rows), DATASET_ROWS):
        block = rows[start : start + DATASET_ROWS]
        for number, row in enumerate(tables.values_of(block, start + 1, source, told), start + 1):
            yield f"row {number:,}", row


def _read_dataset(
    name: str, config: FinetuneConfig, read: Container[str], memory: tables.Memory | None = None
) -> dict[str, Split]:
    """
    The splits of a dataset that the options name, and of the others those of the usual names.

    Args:
        name: an id on the Hub, or a folder of `save_to_disk` or of data files; `:` and a configuration may follow.
        read: the splits that files give in place of the dataset.
        memory: counts what these and other splits take.

    Raises:
        UserError: the dataset cannot be loaded, has no rows in a split, or its rows take too much memory.
    """
    import datasets

    memory = memory or tables.Memory()

    path, part = dataset_and_config(name)
    hint = "give an id on the Hub, or a folder of save_to_disk or of data files; --train_file takes a file"
    with hub_datasets.dataset_errors(path, hint):
        if hub_datasets.is_saved_dataset(path):
            found = {split or "train": rows for split, rows in hub_datasets.saved_splits(path).items()}
        else:
            # Of CSV files pandas would read the words None, NA and null as empty.
            is_csv = hasattr(hub_datasets.dataset_builder(path, part).config, "keep_default_na")
            found = datasets.load_dataset(path, part, **({"keep_default_na": False} if is_csv else {}))
    asked = {split: getattr(config, f"{split}_split") for split in SPLITS if split not in read}
    splits = {}
    for split, of_dataset in asked.items():
        used = of_dataset or config.named.get(split, split)
        if of_dataset is None and (
            used not in found
            or used in asked.values()
            or (split == "validation" and config.validation_share is not None)  # they are held out then
        ):
            continue
        rows = found.get(used, [])
        refuse_first(
            {
                f"dataset {name}: no rows in split {used!r:.100}; it has {', '.join(found)}: name one with "
                f"--{split}_split": not len(rows)
            }
        )
        label = f"dataset {name}, split {used}"
        kinds = {column: getattr(kind, "feature", kind) for column, kind in rows.features.items()}
        with explained(label, "", ValueError):
            held = memory.hold(_dataset_rows(rows, label))
            class_names = {
                column: [name_of(of_class, column) for of_class in kind.names]
                for column, kind in kinds.items()
                if hasattr(kind, "names")
            }
        cells = [row for _, row in held]
        splits[split] = Split(
            label=label,
            name=f"{local_name(name)}, split {used}",
            rows=list(itertools.starmap(Row, held)),
            fingerprint=folders.short_hash(repr(cells)),
            class_names=class_names,
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
