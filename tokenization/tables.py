"""Read the texts in a column of JSONL, CSV, TSV and Parquet files, row by row; open files packed with gzip or zstd."""

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from d2l_bert.errors import UserError


TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
PACKED_SUFFIXES = (".gz", ".zst")


def suffix_unpacked(file: Path) -> str:
    """The suffix of a file in lower case, after `.gz` or `.zst` is removed: `.jsonl` for `rows.jsonl.gz`."""
    name = file.name.lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


@contextlib.contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """
    Open a file for reading bytes, unpacked if its name ends in `.gz` or `.zst`.

    Raises:
        UserError: the file cannot be read, is cut short or is damaged; also for such an error in the block.
    """
    try:
        if file.suffix.lower() == ".gz":
            stream = gzip.open(file, "rb")
        elif file.suffix.lower() == ".zst":
            stream = io.BufferedReader(pa.input_stream(str(file), compression="zstd"))
        else:
            stream = file.open("rb")
        with stream:
            yield stream
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid) as error:
        raise UserError(f"{file}: cannot be read ({error}); repair the file or leave it out") from None


def text_rows(file: Path, column: str) -> Iterator[str | None]:
    """
    The texts in a column of a table, one for each row, in order; None or an empty string for a row without text.

    Args:
        file: a table, read as its suffix says: `.jsonl` (a line is an object, or only a string), `.csv` and `.tsv`
            (the first line holds the names of the columns), or `.parquet`.
        column: name of the column.

    Raises:
        UserError: the file cannot be read, is damaged or is not UTF-8, or has no such column or a column without text;
            the message names the file and, if the error is in a line, the line.
    """
    read = {".jsonl": _json_rows, ".parquet": _parquet_rows}.get(suffix_unpacked(file), _csv_rows)
    for line, text in read(file, column):
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{file}, line {line}: column {column!r} holds {type(text).__name__}, not text; name another column"
            )
        if half := half_character(text or ""):
            raise UserError(f"{file}, line {line}: {half}; repair the line or take it out")
        yield text


def half_character(text: str) -> str | None:
    """
    The words for the first character of a text that is only half of one, for a message; None if all are whole.

    A JSON string may hold one half of a surrogate pair, which no encoding can write.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character (U+{ord(text[error.start]):04X}, a lone surrogate)"
    return None


# Each reader below yields the number of a line or row, from 1, and the value in the column.


def _json_rows(file, column):
    for number, row in json_lines(file):
        if isinstance(row, dict):
            check_column(f"{file}, line {number}", column, row)
            row = row[column]
        yield number, row


def json_lines(file: Path) -> Iterator[tuple[int, object]]:
    """
    The number and the JSON value of each line of a JSONL file, from 1; empty lines are left out.

    Raises:
        UserError: the file cannot be read, or a line is not JSON or not UTF-8.
    """
    with open_unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            if b"\0" in line:  # no JSON has one; `json.loads` would take some UTF-16 for JSON
                raise UserError(f"{file}, line {number}: not UTF-8 text (NUL, as in UTF-16); convert the file")
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise UserError(f"{file}, line {number}: not UTF-8 text ({error.reason}); convert the file") from None
            except (ValueError, RecursionError):
                raise UserError(f"{file}, line {number}: not JSON; repair the line or take it out") from None
            yield number, row


def _csv_rows(file, column):
    csv.field_size_limit(2**31 - 1)  # one field may hold a whole document
    with open_unpacked(file) as stream:
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(lines, dialect="excel-tab" if suffix_unpacked(file) == ".tsv" else "excel", strict=True)
        try:
            check_column(file, column, rows.fieldnames or [])
            if rows.fieldnames.count(column) > 1:
                raise UserError(f"{file}: two columns are called {column!r}; give each a name of its own")
            for row in rows:
                if None in row:  # DictReader's key for fields beyond the last named column
                    raise UserError(
                        f"{file}, line {rows.line_num}: more fields than the first line has names; "
                        f"put texts with commas or tabs between quotes"
                    )
                yield rows.line_num, row[column]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}: not UTF-8 text after line {rows.line_num} ({error.reason}); convert it"
            ) from None
        except csv.Error as error:
            raise UserError(
                f"{file}, line {rows.reader.line_num}: not CSV ({error}); repair the file or leave it out"
            ) from None


def _parquet_rows(file, column):
    try:
        with pq.ParquetFile(file) as table:
            check_column(file, column, table.schema_arrow.names)
            if table.schema_arrow.names.count(column) > 1:
                raise UserError(f"{file}: has several columns {column!r}; name another column")
            kind = table.schema_arrow.field(column).type
            texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
            values = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not any(is_text(values) for is_text in texts):
                raise UserError(f"{file}: column {column!r} holds {kind}, not text; name another column")
            row = 0
            for batch in table.iter_batches(batch_size=1000, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield row, text
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{file}: cannot be read ({' '.join(str(error).split())}); repair it or leave it out"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text after row {row} ({error.reason}); convert it") from None


def check_column(where: object, column: str, names: Iterable[str]) -> None:
    """
    Refuse a table or a dataset that lacks a column.

    Args:
        where: the file or dataset, for the message.
        names: the columns that exist.
    """
    if column not in (names := list(names)):
        listed = ", ".join(map(str, names)) or "none"
        mend = wrong_separator(names) or "name one with --text_column"
        raise UserError(f"{where}: no column {column!r}; it has {listed}: {mend}")


def wrong_separator(names: list[str]) -> str | None:
    """
    What is wrong with a table whose only column has a name with ; | or a tab in it: that character separates columns.

    Returns:
        None for any other table.
    """
    found = next((character for character in ";\t|" if len(names) == 1 and character in str(names[0])), None)
    return found and f"its columns are separated by {found!r}; write them as CSV with commas, or as .tsv with tabs"
