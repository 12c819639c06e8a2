"""`Table`: named columns in memory; reads one from a file (CSV, JSONL, Parquet, ...), or from a dataset."""

import codecs
import csv
import dataclasses
import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from d2l_bert.errors import UserError
from d2l_bert.folders import base_name
from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.tokenization.file_hashes import content_hash
from d2l_bert.tokenization.sources import dataset_mend, load_failure, quiet_datasets
from d2l_bert.tokenization.tables import TABLE_SUFFIXES, open_unpacked, suffix_unpacked, wrong_separator
from d2l_bert.training.finetuning.formats import read_conll, read_json


SUFFIXES = (*TABLE_SUFFIXES, ".json", ".conll")


@dataclass(kw_only=True)
class Table:
    """
    Rows of a split, as columns.

    Args:
        label: what the rows are, for messages: an option and a name, such as `train_file rows.csv`.
        name: the file's base name, or the dataset's id with its configuration and split.
        columns: the values of each column; all columns are equally long.
        lines: the line of the file that each row ends in, from 1, or words such as `question 'id'`; None for a table
            without lines.
        fingerprint: a hash of the content of the file or dataset.
        class_names: for columns of the kind `ClassLabel` of a dataset, or of lists of it, the names of the classes.
        is_dataset: whether the rows come from a dataset, not from a file.
        is_on_hub: whether this dataset is on the Hub.
    """

    label: str
    name: str
    columns: dict[str, list]
    lines: list[int | str] | None = None
    fingerprint: str = ""
    class_names: dict[str, list[str]] = field(default_factory=dict)
    is_dataset: bool = False
    is_on_hub: bool = False

    def __len__(self):
        return len(next(iter(self.columns.values()), []))

    def place(self, row: int) -> str:
        """Where a row stands, for messages. `row` counts from 0."""
        if not self.lines:
            return f"{self.label}, row {row + 1:,}"
        place = self.lines[row]
        return f"{self.label}, {place if isinstance(place, str) else f'line {place}'}"

    def select(self, rows) -> "Table":
        """A table of some of the rows, given by their numbers from 0."""
        return dataclasses.replace(
            self,
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            lines=self.lines and [self.lines[row] for row in rows],
        )

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
            mend = wrong_separator(list(self.columns)) or f"name one with --{option}"
            raise UserError(f"{self.label}: no column {column!r}; it has {listed}: {mend}")
        return self.columns[column]


def read_file(path: str, option: str) -> Table:
    """
    Read a whole table, packed by gzip or zstd or not.

    Args:
        option: the option that names the file, for messages.

    Raises:
        UserError: the file does not exist, cannot be read, is damaged, is not UTF-8, has another suffix, has rows of
            different lengths, or has no rows.
    """
    file, label = Path(path), f"{option} {base_name(path)}"
    if not file.exists():
        raise UserError(f"{option} {path}: no such file; give a table: {', '.join(SUFFIXES)}")
    if not file.is_file():
        raise UserError(f"{option} {path}: not a file; give a table: {', '.join(SUFFIXES)}")
    suffix = suffix_unpacked(file)
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    readers |= {".json": read_json, ".conll": read_conll}
    if suffix not in readers:
        raise UserError(f"{label}: a table is one of {', '.join(SUFFIXES)}; convert the file")
    columns, lines = readers[suffix](file, label)
    table = Table(label=label, name=base_name(path), columns=columns, lines=lines, fingerprint=content_hash(file)[:16])
    if len(table) == 0:
        mend = "" if option == "train_file" else f", or leave {option} out"
        raise UserError(f"{label}: has no rows; give a file with rows{mend}")
    return table


def _read_csv(file, label):
    """The columns of a CSV or TSV file as strings, and the line in which each row ends."""
    csv.field_size_limit(2**31 - 1)
    rows, lines = [], []
    with open_unpacked(file) as stream:
        text = io.StringIO(_decoded(stream.read(), label), newline="")
    reader = csv.reader(text, dialect="excel-tab" if suffix_unpacked(file) == ".tsv" else "excel", strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{label}: two columns are called {double!r}; give each a name of its own")
        for row in reader:
            if not row:  # an empty line
                continue
            if len(row) != len(names):
                raise UserError(
                    f"{label}, line {reader.line_num}: {len(row)} fields, and the first line names {len(names)} "
                    f"columns; put texts with commas, tabs or quotes between quotes"
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise UserError(f"{label}, line {reader.line_num}: not CSV ({error}); repair the file") from None
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}, lines


def _decoded(data, label):
    """The text of a file in UTF-8, without a byte order mark."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{label}: UTF-16, not UTF-8; convert the file with `iconv -f UTF-16 -t UTF-8`")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(0)) + 1
        raise UserError(f"{label}, line {line}: a NUL byte, which no text has; repair the file or take the line out")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{label}, line {line}: not UTF-8 text ({error.reason}); convert the file, for example with "
            f"`iconv -f LATIN1 -t UTF-8`"
        ) from None


def _read_json_lines(file, label):
    """The columns of a file of JSON objects, and the line of each row."""
    rows, lines = [], []
    with open_unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except UnicodeDecodeError as error:
                raise UserError(f"{label}, line {number}: not UTF-8 text ({error.reason}); convert the file") from None
            except (ValueError, RecursionError):
                raise UserError(f"{label}, line {number}: not JSON; repair the line or take it out") from None
            if not isinstance(row, dict):
                raise UserError(f"{label}, line {number}: not a JSON object; write {{...}} with a name for each value")
            if rows and row.keys() != rows[0].keys():
                name = min(row.keys() ^ rows[0].keys())
                lacking = number if name in rows[0] else lines[0]
                raise UserError(f"{label}, line {lacking}: no value {name!r}, which other lines have; add it there")
            rows.append(row)
            lines.append(number)
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}, lines


def _read_parquet(file, label):
    """The columns of a Parquet file, without lines."""
    try:
        with file.open("rb") as stream:
            table = pq.read_table(stream)
        double = {name for name in table.column_names if table.column_names.count(name) > 1}
        if double:
            raise UserError(f"{label}: two columns are called {min(double)!r}; give each a name of its own")
        return {name: table.column(name).to_pylist() for name in table.column_names}, None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{label}: cannot be read ({' '.join(str(error).split())}); repair the file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8 text ({error.reason}); convert the file") from None


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
    if Path(path).is_file():
        raise UserError(f"dataset {path}: a file; give it with --train_file")
    try:
        with quiet_datasets():
            if any((Path(path) / file).is_file() for file in ("state.json", "dataset_dict.json")):
                splits = datasets.load_from_disk(path)
            else:
                splits = datasets.load_dataset(path, config or None)
            if not isinstance(splits, dict):
                splits = {"train": splits}
            columns = {split: rows.with_format(None).to_dict() for split, rows in splits.items() if split in wanted}
    except Exception as error:  # the library raises many classes of exceptions
        mend = dataset_mend(path, error, "--train_file", "--train_split")
        raise UserError(f"dataset {path}: cannot be loaded ({load_failure(error)}); {mend}") from None
    shown = path if is_on_hub else base_name(path)
    return {
        split: Table(
            label=f"dataset {name}, split {split}",
            name=f"{shown}{':' if config else ''}{config}, split {split}",
            columns=columns[split],
            fingerprint=fingerprint(repr(columns[split])),
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
