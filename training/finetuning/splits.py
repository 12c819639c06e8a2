"""`Split`: the rows for training, validation or test, read from a file or a dataset, as examples and as features."""

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
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tasks import Example, Task


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
        cells: the values of each row, by the names of the columns.
        places: the place of each row in its file.
        fingerprint: a hash of the content of the file or dataset.
        class_names: for columns of the kind `ClassLabel` of a dataset, or of lists of it, the names of the classes.
        is_dataset: whether the rows come from a dataset, not from a file.
        hub_id: the id of this dataset on the Hub; "" for others.
        examples: what the task has read in each row.
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
    cells: list[dict]
    places: list[str]
    fingerprint: str
    class_names: dict[str, list[str]] = field(default_factory=dict)
    is_dataset: bool = False
    hub_id: str = ""
    examples: list[Example] = field(default_factory=list)
    is_labelled: bool = False
    held_out: float = 0.0
    shared: int = 0
    features: list[dict] = field(default_factory=list, init=False)
    windows: list = field(default_factory=list, init=False)
    note: str = field(default="", init=False)

    def __post_init__(self):
        self.columns = list(dict.fromkeys(itertools.chain(*self.cells)))

    def select(self, rows: list[int], **changes) -> "Split":
        """A split of some of the rows, given by their numbers from 0."""
        kept = {
            name: [values[row] for row in rows]
            for name in ("cells", "places", "examples")
            if (values := getattr(self, name))
        }
        return replace(self, **kept, **changes)

    def require(self, column: str, option: str) -> None:
        """Refuse a split without a column; `option` names the column."""
        if column not in self.columns:
            listed = ", ".join(map(repr, self.columns)) or "none"
            raise UserError(f"{self.label}: no column {column!r}; it has {listed}: name one with --{option}")


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
    places, cells = zip(*rows, strict=True)
    return Split(
        label=label, name=base_name(path), cells=list(cells), places=list(places), fingerprint=content_hash(file)[:16]
    )


def _json_rows(text) -> list[tuple[str, dict]]:
    """The rows of a list of objects, or of SQuAD's nested form, with their places."""
    content = json.loads(text)
    rows = []
    for entry in content["data"] if isinstance(content, dict) else content:
        if not isinstance(entry, dict):
            raise ValueError(f"{entry!r:.40} is no object; write a list of objects")
        rows += (
            [
                {"title": entry.get("title", ""), "context": paragraph["context"], "id": "", **question}
                for paragraph in entry["paragraphs"]
                for question in paragraph["qas"]
            ]
            if "paragraphs" in entry
            else [entry]
        )
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
        text = list(group) if is_text else []
        for number, fields in text:
            if len(fields) != count:
                raise ValueError(f"line {number:,}: {len(fields)} fields, and {count} in the first; repair the line")
        if text:
            tagged = {"tags": [fields[-1] for _, fields in text]} if count > 1 else {}
            yield f"line {text[0][0]:,}", {"tokens": [fields[0] for _, fields in text], **tagged}


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
    chosen = {split: None if split in read else getattr(config, f"{split}_split") for split in SPLITS}
    # Validation rows are held out where a share is given.
    for split in ("test",) if config.validation_share is not None else ("validation", "test"):
        usual = getattr(config.named(), split) if config.named() else split
        is_wanted = chosen[split] is None and split not in read and usual in found
        if is_wanted and usual in chosen.values():
            logger.info(f"dataset {name}: split {usual!r} has another use already, so there are no {split} rows")
        elif is_wanted:
            chosen[split] = usual
    splits = {}
    for split, of_dataset in chosen.items():
        rows = found.get(of_dataset, [])
        if of_dataset is not None and not len(rows):
            raise UserError(
                f"dataset {name}: no rows in split {of_dataset!r}; it has {', '.join(found)}: name one with "
                f"--{split}_split"
            )
        if of_dataset is not None:
            cells = rows.with_format(None).to_list()
            kinds = {column: getattr(kind, "feature", kind) for column, kind in rows.features.items()}
            splits[split] = Split(
                label=f"dataset {name}, split {of_dataset}",
                name=f"{base_name(name) if Path(name).exists() else name}, split {of_dataset}",
                cells=cells,
                places=[f"row {number:,}" for number in range(1, len(cells) + 1)],
                fingerprint=short_hash(repr(cells)),
                class_names={column: list(kind.names) for column, kind in kinds.items() if hasattr(kind, "names")},
                is_dataset=True,
                hub_id="" if Path(name).exists() else path,
            )
    return splits


# ---------------------------------------------------------------------------------------------------------------------
# Examples


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
        _hide_missing_labels(split, task)
        split = _examples(split, split.cells, task.example)
        split.is_labelled = any(example.label not in (None, []) for example in split.examples)
        splits[name] = split = _examples(split, split.examples, task.labelled)
        if name != "test" and not split.is_labelled:
            raise UserError(f"{split.label}: column {task.label!r} is empty; the {name} rows need labels")
        if name == "train":
            task.learn(split)
    for name, split in splits.items():
        splits[name] = _examples(split, split.examples, task.checked)
    if "validation" not in splits and config.validates():
        share = HELD_OUT if config.validation_share is None else config.validation_share
        train, validation = hold_out(splits.pop("train"), task, share, config.seed)
        splits = {"train": train, "validation": validation, **splits}
        logger.info(
            f"no validation rows were given: {len(validation.cells):,} of the training rows (of each class "
            f"{share:.3g}, drawn by seed {config.seed}) are held out to choose the checkpoint, and not trained on; "
            f"--validation_share 0 holds out none"
        )
    elif "validation" not in splits:
        logger.info("no validation rows: the model after the last step is kept")
    trained = {example.texts for example in splits["train"].examples}
    for name, split in list(splits.items())[1:]:
        split.shared = sum(example.texts in trained for example in split.examples)
        if split.shared:
            rows = len(split.cells)
            logger.info(f"{split.shared:,} of the {rows:,} {name} rows have the same texts as a training row")
    return splits


def _hide_missing_labels(split, task):
    """
    Make the label -1 None where it says that a row of a dataset has none.

    It does so in the data sets known by name, in a column of `ClassLabel`, and where all rows have it.
    """
    for column in task.columns["label_column"] if split.is_dataset else []:
        are_missing = [cells.get(column) == -1 for cells in split.cells]
        if task.config.named() or column in split.class_names or all(are_missing):
            for cells, is_missing in zip(split.cells, are_missing, strict=True):
                cells[column] = None if is_missing else cells.get(column)


def _examples(split: Split, rows: list, read: Callable[[object, Split], Example]) -> Split:
    """
    The split with the examples that `read` makes of its rows; `read` gets the split, too.

    Rows that the publishers of a dataset left incomplete are left out, and counted.

    Raises:
        UserError: a row of a file cannot be used, or no row of a dataset can.
    """
    kept, examples, left_out = [], [], []
    for number, row in enumerate(rows):
        try:
            examples.append(read(row, split))
            kept.append(number)
        except ValueError as error:
            if not split.is_dataset:
                raise UserError(f"{split.label}, {split.places[number]}: {error}") from None
            left_out.append(str(error).partition(";")[0])
    if not examples:
        raise UserError(f"{split.label}: no row can be used ({left_out[0]}); give another split")
    if left_out:
        count = counted(len(left_out), "row is", "rows are")
        logger.info(f"{split.label}: {count} left out, the first because {left_out[0]}")
    return replace(split.select(kept) if left_out else split, examples=examples)


def hold_out(train: Split, task: Task, share: float, seed: int) -> tuple[Split, Split]:
    """
    Split rows into training and validation rows, at random by the seed. Rows with the same texts stay together.

    Of the texts of each class the share is held out, at least one if the share is as many as there are classes, and at
    least one stays. A text of several classes, or of words of several, counts for the rarest.

    Raises:
        UserError: there are too few rows.
    """
    classes = {}
    for example in train.examples:
        classes.setdefault(example.texts, set()).update(task.names_of(example))
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
    if alone := [name for name, texts in by_class.items() if len(texts) == 1]:
        logger.info(f"{counted(len(alone), 'class', 'classes')} with one text have none among the validation rows")
    is_chosen = [example.texts in chosen for example in train.examples]
    validation = train.select(
        np.flatnonzero(is_chosen).tolist(),
        held_out=share,
        label=f"{train.label}, rows held out",
        name=f"{train.name} (held out)",
    )
    return train.select(np.flatnonzero(np.logical_not(is_chosen)).tolist()), validation
