"""`Table`: named columns in memory; reads one from a file (CSV, JSONL, Parquet, JSON, CoNLL), or from a dataset."""

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

from d2l_bert.folders import base_name, content_hash, short_hash
from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.tokenization.sources import dataset_errors, is_saved_dataset
from d2l_bert.tokenization.tables import TABLE_KINDS, TABLE_SUFFIXES, file_kind, open_text, suffix_unpacked, table_rows


SUFFIXES = (*TABLE_SUFFIXES, ".json", ".conll")


@dataclass
class Row:
    """
    A row of a table as its kind of tasks has read and checked it.

    Args:
        texts: the texts of the row, by which equal rows are found; for tags the words.
        label: the label as the kind reads it; None for a row without.
    """

    texts: tuple[str, ...]
    label: object = None


@dataclass(kw_only=True)
class Table:
    """
    Rows of a split, as columns.

    Args:
        label: what the rows are, for messages: an option and a name, such as `train_file rows.csv`.
        name: the file's base name, or the dataset's id with its configuration and split.
        columns: the values of each column; all columns are equally long.
        fingerprint: a hash of the content of the file or dataset.
        class_names: for columns of the kind `ClassLabel` of a dataset, or of lists of it, the names of the classes.
        is_dataset: whether the rows come from a dataset, not from a file.
        is_on_hub: whether this dataset is on the Hub.
        rows: the typed rows, which `Kind.read` makes of the columns.
        places: the place of each row in its file, as `table_rows` has them; else rows are counted.
    """

    label: str
    name: str
    columns: dict[str, list]
    fingerprint: str = ""
    class_names: dict[str, list[str]] = field(default_factory=dict)
    is_dataset: bool = False
    is_on_hub: bool = False
    rows: list[Row] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def __len__(self):
        return len(next(iter(self.columns.values()), []))

    def place(self, row: int) -> str:
        """Where a row stands, for messages. `row` counts from 0."""
        return f"{self.label}, {self.places[row] if self.places else f'row {row + 1:,}'}"

    def select(self, rows) -> "Table":
        """A table of some of the rows, given by their numbers from 0."""
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        kept = {name: [values[row] for row in rows] for name in ("rows", "places") if (values := getattr(self, name))}
        return dataclasses.replace(self, columns=columns, **kept)

    def require(self, column: str, option: str) -> list:
        """
        The values of a column.

        Args:
            option: the option that names the column.

        Raises:
            UserError: there is no such column.
        """
        if column not in self.columns:
            listed = ", ".join(map(repr, self.columns)) or "none"
            raise UserError(f"{self.label}: no column {column!r}; it has {listed}: name one with --{option}")
        return self.columns[column]


def read_file(path: str, option: str, separator: str = "auto") -> Table:
    """
    Read a whole table, packed or not.

    - `.csv`, `.tsv`: all values are strings.
    - `.jsonl`, `.parquet`: values as they are.
    - `.json`: SQuAD's form, with the columns `id`, `title`, `context`, `question`, `answers` and `is_impossible`; or a
      list of objects, also below `data`. An object without a value that others have gets None.
    - `.conll`: a word a line, its tag last, and an empty line after each text: the columns `tokens` and `tags`.

    Args:
        option: the option that names the file, for messages.
        separator: between the cells of a CSV file, as in `tokenization.tables.table_rows`.

    Raises:
        UserError: the file does not exist, cannot be read, is damaged, has another form, or has no rows.
    """
    file, label = Path(path), f"{option} {base_name(path)}"
    kind = file_kind(file) if file.is_file() else None
    if kind not in TABLE_KINDS and (kind is None or suffix_unpacked(file) not in SUFFIXES):
        raise UserError(f"{option} {path}: no such table; give a file that ends in {', '.join(SUFFIXES)}")
    table = Table(label=label, name=base_name(path), columns={}, fingerprint=content_hash(file)[:16])
    if kind in TABLE_KINDS:
        with explained(label, "", *READ_ERRORS):
            found = list(table_rows(file, separator=separator))
        table.places, table.columns = [place for place, _ in found], _columns([row for _, row in found])
        _refuse_mixed(table)
    else:
        kinds = (*READ_ERRORS, TypeError, RecursionError)
        with explained(f"{label}: cannot be read as {suffix_unpacked(file)}", "repair the file", *kinds):
            text = open_text(file).read()
            table.columns = _columns(_nested_rows(json.loads(text))) if kind == "json" else _conll_columns(text)
    if len(table) == 0:
        raise UserError(f"{label}: has no rows; give a file with rows")
    return table


def _columns(rows):
    """The values of each name that a row has; None for a row without one."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}


def _refuse_mixed(table):
    """Refuse a column of texts and other values."""
    for column, values in table.columns.items():
        are_texts = [(isinstance(value, str), row) for row, value in enumerate(values) if value is not None]
        for is_text, row in are_texts:
            if is_text != are_texts[0][0]:
                first = table.places[are_texts[0][1]]
                raise UserError(
                    f"{table.place(row)}: column {column!r} holds {type(values[row]).__name__}, unlike {first}; write "
                    f"all its values alike"
                )


def _nested_rows(content):
    """The rows of a list of objects, or of SQuAD's nested form."""
    entries = content["data"] if isinstance(content, dict) else content
    rows = []
    for entry in entries:
        if "paragraphs" not in entry:
            rows.append(entry)
            continue
        for paragraph in entry["paragraphs"]:
            shared = {"title": entry.get("title", ""), "context": paragraph["context"]}
            rows += [{**shared, "id": "", **question} for question in paragraph["qas"]]
    return rows


def _conll_columns(text):
    """The words and the tags of each text; no tags if a line has one field."""
    texts = [[]]
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0] == "-DOCSTART-":
            texts.append([])
            continue
        texts[-1].append(fields)
        first = next(words[0] for words in texts if words)
        if len(fields) != len(first):
            raise ValueError(f"line {number} has {len(fields)} fields, and the first one {len(first)}")
    texts = [words for words in texts if words]
    columns = {"tokens": [[word[0] for word in words] for words in texts]}
    if texts and len(texts[0][0]) > 1:
        columns["tags"] = [[word[-1] for word in words] for words in texts]
    return columns


def read_dataset(name: str, wanted: set[str]) -> dict[str, Table | None]:
    """
    The splits of a dataset, by their names: the tables of those that are wanted, None for the others.

    Args:
        name: an id on the Hub, or a folder of `save_to_disk` or of data files; `:` and a configuration may follow.
        wanted: names of splits; the dataset need not have them.

    Raises:
        UserError: the dataset cannot be loaded.
    """
    import datasets

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    is_on_hub = not Path(path).exists()
    hint = "give an id on the Hub, or a folder of save_to_disk or of data files; --train_file takes a file"
    with dataset_errors(path, hint):
        splits = (
            datasets.load_from_disk(path) if is_saved_dataset(path) else datasets.load_dataset(path, config or None)
        )
        if not isinstance(splits, dict):
            splits = {"train": splits}
        columns = {split: rows.with_format(None).to_dict() for split, rows in splits.items() if split in wanted}
    shown = path if is_on_hub else base_name(path)
    return {
        split: Table(
            label=f"dataset {name}, split {split}",
            name=f"{shown}{':' if config else ''}{config}, split {split}",
            columns=columns[split],
            fingerprint=short_hash(repr(columns[split])),
            class_names={
                column: list(kind.names)
                for column, kind in ((name, getattr(kind, "feature", kind)) for name, kind in rows.features.items())
                if isinstance(kind, datasets.ClassLabel)
            },
            is_dataset=True,
            is_on_hub=is_on_hub,
        )
        if split in wanted
        else None
        for split, rows in splits.items()
    }
