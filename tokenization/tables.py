"""The rows of CSV, TSV, JSONL and Parquet files, with their lines; what kind a file is; opens packed files."""

import codecs
import contextlib
import csv
import functools
import io
import itertools
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, short_name, shortened
from d2l_bert.records import values_in


logger = logging.getLogger(__name__)

# Suffixes that say what a file holds, and what it is.
TABLE_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
TABLE_KINDS = set(TABLE_SUFFIXES.values())

# Files that are read packed, by their suffixes: the codec of PyArrow, and the first bytes.
PACKED_SUFFIXES = {".gz": ("gzip", b"\x1f\x8b"), ".zst": ("zstd", b"\x28\xb5\x2f\xfd"), ".bz2": ("bz2", b"BZh")}

# Files that hold text which is not read, by their first bytes.
UNREAD = {
    b"\xfd7zXZ": "a file packed by xz",
    b"PK\x03\x04": "a zip archive, as .docx, .xlsx, .odt and .epub are",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"%PDF": "a PDF",
    b"{\\rtf": "a document in RTF",
    b"\xd0\xcf\x11\xe0": "a document of an old Office program",
    b"PAR1": "a Parquet file with another suffix than .parquet",
    b"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets its file)",
}

# Where editors end a line, and the end that a program has made of \r\n that wrote \n as \r\n once more. Other
# separators, as U+2028, are white space.
LINE_END = re.compile(r"\r\r?\n|\r|\n")

# The longer marks first: that of UTF-32 begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

BEGINNING = 1 << 22  # bytes that show what the lines of a file are
LONGEST_CELL = 1 << 26  # characters; a quote that is not closed makes the rest of a CSV file one cell

# Parquet stores equal cells once, and packs them: 2 kB may hold a row of 64 MB a million times. A part of a column is
# unpacked row by row if it has more than LARGE_CHUNK bytes and the file stores it in less than a twentieth of them
# (texts take a third to a sixth). Other files are read 16 rows at a time, which takes a twentieth of the time for rows
# of a sentence.
LARGE_CHUNK = 1 << 24
USUAL_PACKING = 20
PARQUET_ROWS = 16

# The most bytes of rows that are held in memory all at once, as those of a fine-tuning are, counted as Python holds
# them; the features that are made of the rows take several times as much.
MOST_MEMORY = 1 << 31

# What PyArrow raises for a value that Python cannot hold: a date out of range, an unknown time zone, no UTF-8.
NO_VALUE = (OverflowError, ValueError, LookupError)

# The fewest bytes of memory that a value takes when its JSON is parsed; in the text it may have one or two characters.
BYTES_OF_A_VALUE = 64

# The most characters of a line that are in memory at once: a packed file of a megabyte may hold a line of a gigabyte.
# A longer line that is a row of a table, or a text by itself, is refused; a longer line of a text is read in pieces.
LONGEST_LINE = LONGEST_CELL
LONGEST_LINE_PIECE = 1 << 22

# A piece of a line ends behind a space, if there is one among so many characters at its end.
SPACE_WITHIN = 1000

# The most columns of rows that name their own, as lines of JSON do. Each row is written with all columns, so that a
# small file of rows with a column each would become a very large one. The same holds in Parquet for names in cells.
MOST_COLUMNS = 4096

# The most lists and objects that are in each other in a cell. 950 take PyArrow 3 GB, and of more than 100 levels, two
# for a list, it reads no Parquet file.
MOST_DEPTH = 40

OBJECT_LINE = re.compile(rb'\s*\{\s*"[^"]*"\s*:(.*\}\s*|.{1000000,})')  # a long one may be cut off
# An escape; the group is half a surrogate pair, which no encoding has. What else begins with a backslash is skipped.
HALF_CHARACTER = re.compile(r"\\[^u]|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)")


def suffix_unpacked(file: Path) -> str:
    """The suffix of a file in lower case, after the one of a packed file is removed: `.jsonl` for `rows.jsonl.gz`."""
    return Path(re.sub(r"\.(gz|zst|bz2)$", "", file.name.lower())).suffix


def open_unpacked(file: Path) -> pa.NativeFile:
    """
    Open a file for reading bytes, unpacked if its name or its first bytes say that it is packed.

    Raises:
        UserError: the file is an archive, or a document that is not plain text.
        OSError: the file cannot be opened; also while reading, as when it is cut short.
    """
    with file.open("rb") as opened:
        beginning = opened.read(32)
    for magic, what in UNREAD.items():
        if beginning.startswith(magic):
            raise UserError(f"{file}: {what}, which is not read as text; give the text that is in it, in UTF-8")
    compression = next((codec for codec, magic in PACKED_SUFFIXES.values() if beginning.startswith(magic)), None)
    suffix = file.suffix.lower()
    if suffix in PACKED_SUFFIXES and compression is None and beginning:
        raise OSError(f"its name says that it is packed, and it is not: take {suffix} off its name")
    # As bytes: PyArrow encodes a string as UTF-8, which not every name is.
    return pa.input_stream(pa.OSFile(os.fsencode(file)), compression=compression)


def way_out_of(file: Path) -> str:
    """What to do about a file that cannot be read."""
    if file.suffix.lower() == ".zst":
        return "unpack it with `zstd -d --long=31` if it was packed with --long; else repair it, or leave it out"
    return "repair it, or leave it out"


def refuse_pipe(path: str | Path, what: str, way_out: str) -> None:
    """
    Refuse a pipe or a device in place of a file. It can be read only once, and files are read twice: first to see what
    they are. A pipe also waits for whoever writes to it, and a device such as /dev/zero never ends.

    Args:
        what: what names the path, for the message.
        way_out: what to give instead.

    Raises:
        UserError: the path is such.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{what}: is a pipe or a device, and not a file that can be read twice; {way_out}")


def lines_of(
    file: Path, stdin: BinaryIO | None = None, longest: int = LONGEST_LINE, in_pieces: bool = False
) -> Iterator[str]:
    """
    The lines of a text file with their ends (`LINE_END`): UTF-8, or what a byte order mark says.

    Args:
        file: opened as `open_unpacked`.
        stdin: read this stream instead of the file.
        longest: the most characters of a line, which bounds the memory.
        in_pieces: give a longer line in pieces, of which only the last has an end, instead of refusing it.

    Raises:
        UserError, OSError: as in `open_unpacked`.
        ValueError: the file is binary, or has another encoding, or a longer line; the message says in which line and
            what to do.
    """
    opened = io.BufferedReader(open_unpacked(file) if stdin is None else stdin, 1 << 20)
    number = 0
    beginning = opened.peek(4)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS.items() if beginning.startswith(mark)), "utf-8-sig")
    with io.TextIOWrapper(opened, encoding, newline="") as text:
        try:
            before = ""  # the end of the last piece, which begins with the last word
            is_ascii = True  # all lines before
            ended_with_cr = False  # the line before
            for line in iter(functools.partial(text.readline, longest), ""):
                if ended_with_cr and line == "\r\n":  # the rest of one end, \r\r\n
                    ended_with_cr = False
                    continue
                ended_with_cr = line[-1] == "\r"
                if "\0" in line:
                    raise ValueError(
                        f"line {number + 1:,}: holds NUL, as binary files do; leave it out, or write UTF-8"
                    )
                is_ascii = is_ascii and line.isascii()
                if len(line) < longest or line[-1] in "\r\n":
                    number += 1
                    yield before + line
                    before = ""
                elif in_pieces:
                    line = before + line
                    end = line.rfind(" ", len(line) - SPACE_WITHIN) + 1 or len(line)
                    before = line[end:]
                    yield line[:end]
                else:
                    raise ValueError(f"line {number + 1:,}: has more than {longest:,} characters; divide it")
            if before:
                yield before
        except UnicodeDecodeError as error:  # its bytes follow the lines that are read
            read_before = str(error.object[: error.start], error.encoding)
            number += 1 + len(LINE_END.findall(read_before))
            raise ValueError(
                f"line {number:,}: not {error.encoding.upper()} text (byte {error.object[error.start]:#x}); "
                f"{_way_out_of_bytes(error, is_ascii)}, or leave it out"
            ) from None


def _way_out_of_bytes(error, is_ascii):
    """
    What to do about bytes that are not in the encoding of their file.

    Args:
        error: the `UnicodeDecodeError`, with the bytes about it.
        is_ascii: whether all lines before have characters of one byte only.
    """
    if error.encoding != "utf-8" or bytes(1) in error.object:
        return "it is damaged, or binary: repair it"
    around = error.object.decode("utf-8", "replace")
    damaged = around.count("\ufffd")
    of_several_bytes = sum(not character.isascii() for character in around) - damaged
    is_cut_off = error.reason == "unexpected end of data"
    if is_cut_off or not is_ascii or of_several_bytes > damaged:
        return "the file is UTF-8 but for such bytes: repair the line, or drop them with `iconv -c -f UTF-8 -t UTF-8`"
    return "convert it from the encoding that it has, as with `iconv -f CP1252 -t UTF-8`"


def file_kind(file: Path) -> str:
    """
    What a file holds: `jsonl`, `csv`, `tsv`, `parquet`, `json` (a document of JSON), or `text`.

    The suffix says so. Without one of a table the content does: lines most of which look like objects of JSON are
    `jsonl`, also in a `.json` file.

    Raises:
        UserError: as `open_unpacked`, or the file cannot be read.
    """
    if kind := TABLE_SUFFIXES.get(suffix_unpacked(file)):
        return kind
    with (
        explained(f"{file}: cannot be read", way_out_of(file), OSError),
        open_unpacked(file) as opened,
    ):
        beginning = opened.read(BEGINNING)
    lines = [line for line in beginning.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()][:16]
    objects = [line for line in lines if OBJECT_LINE.fullmatch(line)]
    are_objects = 2 * len(objects) > len(lines)
    if suffix_unpacked(file) == ".json" and not (are_objects and len(lines) > 1):
        return "json"
    return "jsonl" if are_objects else "text"


def check_separator(separator: str, files: Iterable[Path]) -> None:
    """
    Refuse the option `separator` where it has no effect.

    Args:
        separator: as in `table_rows`.
        files: all that are read.

    Raises:
        UserError: a separator is given, and no file is CSV or TSV; or as in `file_kind`.
    """
    if separator == "auto":
        return
    if not any(file.is_file() and file_kind(file) in ("csv", "tsv") for file in files):
        raise UserError("separator is for the cells of CSV and TSV, and no such file is read; leave it out")


def refuse_header(line: str, columns: Iterable[str], source: object) -> None:
    """
    Refuse the first line of what is read as texts, one in each line, if it has the names of columns.

    Args:
        columns: the names; the letters' case does not count.
        source: where the line stands, for the message.

    Raises:
        UserError: between commas, semicolons, tabs or bars the line has all of these names.
    """
    wanted = {column.casefold() for column in columns}
    for separator in ",;\t|":
        cells = {cell.strip().strip('"').casefold() for cell in line.split(separator)}
        if wanted <= cells:
            raise UserError(
                f"{source}: its first line has names of columns ({line!r:.100}), so it is a table; give it as a file "
                f"whose name ends in .csv or .tsv, or take this line out"
            )


def text_rows(file: Path, column: str, separator: str = "auto", all_cells: bool = False) -> Iterator[tuple[str, dict]]:
    """
    The text in a column of each row of a table, in order, and the row's cells; "" for a row without text.

    Args:
        column: name of the column.
        file, separator: as in `table_rows`.
        all_cells: also read the other columns of a Parquet file.

    Raises:
        UserError: the file cannot be read, is damaged or is not UTF-8, or has no such column of text.
    """
    rows = table_rows(file, None if all_cells else [column], separator)
    return texts_in(rows, column, explained(file, "", *READ_ERRORS))


def texts_in(
    rows: Iterable[tuple[str, dict]], column: str, errors: contextlib.AbstractContextManager
) -> Iterator[tuple[str, dict]]:
    """
    The text in a column of each row, and the row; "" for a row without text. Rows are given with their places.

    Args:
        errors: a block for the reading, which makes a `UserError` of what the rows raise, and of the `ValueError` that
            a row has something other than text there, or that no row has the column.
    """
    names = {}
    with errors:
        for place, row in rows:
            text = row.get(column)
            if not isinstance(text, str | None):
                raise ValueError(
                    f"{place}: column {column!r:.100} holds {type(text).__name__}, not text; write a text there, or "
                    f"name another column with --text_column"
                )
            names |= row
            yield text or "", row
        _check_columns(list(names), [column])


def parquet_columns(file: Path) -> list[str]:
    """
    The names of the columns of a Parquet file, of which nothing else is read; [] of an empty file.

    Raises:
        ValueError: the file is damaged.
    """
    with explained("cannot be read", "repair the file, or leave it out", OSError, pa.ArrowException):
        if not file.stat().st_size:
            return []
        with pa.OSFile(os.fsencode(file)) as opened:
            return pa.parquet.read_schema(opened).names


def table_rows(
    file: Path, columns: Sequence[str] | None = None, separator: str = "auto"
) -> Iterator[tuple[str, dict]]:
    """
    The rows of a table, each with its place: the line at which it begins, of Parquet the number of the row.

    Every value of a CSV or TSV file is text, as `00012` and `NA` are.

    Args:
        file: a table, read as `file_kind` says: JSONL (an object a line), CSV and TSV (the first line has the names of
            the columns), or Parquet. A TSV file has no quotes: a tab or the end of a line ends a cell.
        columns: those that will be used, so that others need not be read; None for all.
        separator: between the cells of a line: `,`, `;`, `tab` or `pipe`. `auto` is the tab in TSV; in CSV it is the
            one that a first line such as `sep=;` gives, as Excel writes it, or that stands most often in the first
            line, and is logged if it is not the comma. Rows of several cells are left out if all are empty.

    Raises:
        ValueError: the file is damaged, has no such column, or a cell or a row that is too long; the message says in
            which line and what to do.
    """
    kind = file_kind(file)
    with explained("cannot be read", way_out_of(file), OSError, UnicodeDecodeError, pa.ArrowException):
        if kind == "jsonl":
            yield from few_columns(_json_rows(file))
        elif kind != "parquet":
            yield from _cell_rows(file, columns, separator, kind == "tsv")
        elif file.stat().st_size:
            yield from _parquet_rows(file, columns)


def _parquet_rows(file, columns):
    """The rows of a Parquet file."""
    number = 0
    told = set()
    # Pages are read as they are needed, and few rows at once: a row may be some MB.
    with pa.parquet.ParquetFile(pa.OSFile(os.fsencode(file)), pre_buffer=False, buffer_size=1 << 20) as table:
        _check_columns(table.schema_arrow.names, columns)
        for batch in table.iter_batches(_rows_at_once(table.metadata, columns), columns=columns):
            batch = _bytes_as_text(batch)
            is_large = batch.nbytes > LONGEST_CELL
            single_rows = (batch.slice(row, 1) for row in range(len(batch)))
            for part in single_rows if is_large else [batch]:
                if is_large:
                    _check_cells(part, f"row {number + 1:,}")
                for row in values_of(part, number + 1, file, told):
                    number += 1
                    yield f"row {number:,}", row


def _bytes_as_text(batch):
    """A batch whose columns of bytes are text, as far as they are UTF-8: some databases write text so."""
    for place, field in enumerate(batch.schema):
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            with contextlib.suppress(pa.ArrowInvalid):  # no UTF-8, as of an image
                batch = batch.set_column(place, field.name, batch.column(place).cast(pa.large_string()))
    return batch


def values_of(rows: pa.RecordBatch | pa.Table, first: int, source: object, told: set[str]) -> list[dict]:
    """
    The rows of a table of PyArrow as Python's values.

    Python has no dates before year 1 and after year 9999, and not every time zone. Such a time is read as text: one
    with a zone in UTC, with a Z at its end; a duration as its number and unit.

    Args:
        first: the number of the first row, for messages.
        source: where the rows are from, for messages.
        told: the columns with such times of which the user has been told; this adds to them.

    Raises:
        ValueError: another value has no form in Python.
    """
    with contextlib.suppress(*NO_VALUE):
        return rows.to_pylist()
    columns = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        columns[name] = [_value_of(cell, f"row {number:,}", name) for number, cell in enumerate(column, first)]
        is_new_time = _is_time(column.type) and name not in told
        if is_new_time and any(isinstance(value, str) for value in columns[name]):
            told.add(name)
            column_name = shortened(repr(name), 25)
            where = short_name(Path(str(source)).name)
            logger.warning(f"{where}: the times in {column_name} are beyond Python's, and read as text")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _value_of(cell, place, name):
    """The value of a cell, a scalar of PyArrow, in the column `name`; as in `values_of`."""
    try:
        return cell.as_py()
    except NO_VALUE as error:
        if not _is_time(cell.type):
            reason = shortened(" ".join(str(error).split()), 200)
            raise ValueError(
                f"{place}: column {name!r:.100} ({shortened(str(cell.type), 100)}) cannot be read ({reason}); write "
                f"it as text, or take the column out"
            ) from None
    if pa.types.is_date32(cell.type):
        unit = "D"
    elif pa.types.is_date64(cell.type):
        unit = "ms"
    else:
        unit = cell.type.unit
    if pa.types.is_duration(cell.type):
        return f"{cell.value} {unit}"
    zone = "Z" if pa.types.is_timestamp(cell.type) and cell.type.tz else ""
    return f"{np.datetime64(cell.value, unit)}{zone}"


def _is_time(kind):
    """Whether a type of PyArrow is that of times whose texts `_value_of` knows."""
    return pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind)


def _rows_at_once(metadata, columns):
    """
    How many rows of a Parquet file to unpack at once (`LARGE_CHUNK`).

    Args:
        metadata: of the file.
        columns: those that are read; None for all.

    Raises:
        ValueError: the cells of a part of a column are longer than `LONGEST_CELL` on average.
    """
    rows = PARQUET_ROWS
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            path = chunk.path_in_schema
            unpacked = chunk.total_uncompressed_size
            if columns is not None and not any(f"{path}.".startswith(f"{name}.") for name in columns):
                continue
            if unpacked > 4 * LONGEST_CELL * max(1, chunk.num_values):  # a character has up to 4 bytes
                raise ValueError(
                    f"column {path!r:.100} has cells of more than {LONGEST_CELL:,} characters; divide them"
                )
            if unpacked > LARGE_CHUNK and unpacked > USUAL_PACKING * chunk.total_compressed_size:
                rows = 1
    return rows


def _check_cells(row, place):
    """Refuse a row, a record batch of its own, with a cell that is too long."""
    for name, cell in zip(row.schema.names, row.columns, strict=True):
        if pa.types.is_dictionary(cell.type):
            cell = cell.dictionary_decode()
        size = cell.nbytes
        is_text = pa.types.is_string(cell.type) or pa.types.is_large_string(cell.type)
        if is_text and size > LONGEST_CELL:  # in bytes
            size = pc.utf8_length(cell)[0].as_py() or 0
        if size > LONGEST_CELL:
            raise ValueError(
                f"{place}: column {name!r:.100} has more than {LONGEST_CELL:,} characters in a cell; divide it"
            )


@dataclass
class Memory:
    """
    Counts what rows take that are held in memory all at once.

    Args:
        used: bytes, as Python holds the rows.
    """

    used: int = 0

    def hold(self, rows: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
        """All rows, given with their places. Raises `ValueError` once all that are held pass `MOST_MEMORY`."""
        held = []
        for row in rows:
            self.used += _size_of(row)
            if self.used > MOST_MEMORY:
                raise ValueError(
                    f"{row[0]}: the rows up to here take more than {MOST_MEMORY:,} bytes, and all are held in memory "
                    f"at once; give fewer rows, or shorter ones"
                )
            held.append(row)
        return held


def _size_of(value):
    """How many bytes a value of JSON or Parquet takes, with all that is in it."""
    size = 0
    for part in values_in(value):
        size += sys.getsizeof(part)
        if isinstance(part, dict):
            size += sum(map(len, part))  # most names of columns are shared by all rows
    return size


def whole_characters(text: str) -> str:
    """A text of JSON with U+FFFD for each escape of half a character: what stands behind it begins where it did."""
    if "\\u" not in text:
        return text
    return HALF_CHARACTER.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)


def check_values(text: str) -> None:
    """
    Refuse a text of JSON with so many values that they would take more than `MOST_MEMORY`, before it is parsed.

    Raises:
        ValueError: it has so many.
    """
    if len(text) * BYTES_OF_A_VALUE > MOST_MEMORY:
        values = sum(map(text.count, ",[{"))
        if values * BYTES_OF_A_VALUE > MOST_MEMORY:
            raise ValueError(f"it has more than {MOST_MEMORY // BYTES_OF_A_VALUE:,} values; divide it")


def few_columns(rows: Iterable[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    """
    The rows of JSON, given with their places.

    Raises:
        ValueError: one has a cell of more than `MOST_DEPTH` lists and objects in each other, or the rows up to it have
            more than `MOST_COLUMNS` columns.
    """
    seen = set()
    for place, row in rows:
        _check_depth(row, place)
        if not row.keys() <= seen:
            seen |= row.keys()
            if len(seen) > MOST_COLUMNS:
                raise ValueError(
                    f"{place}: the rows up to here have more than {MOST_COLUMNS:,} different columns; give all rows "
                    f"the same ones"
                )
        yield place, row


def _check_depth(row, place):
    """Refuse a row with too many lists and objects in each other in a cell."""
    level = [row]  # all lists and objects of a depth
    for _ in range(MOST_DEPTH + 1):
        values = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in itertools.chain(*values) if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"{place}: a cell has more than {MOST_DEPTH} lists or objects in each other; write it as text")


def check_names(rows: Iterable[dict]) -> None:
    """
    Refuse rows in whose cells objects have more than `MOST_COLUMNS` names, all together: in Parquet each is a column.

    Raises:
        ValueError: they have more.
    """
    count = 0
    tree = {}
    waiting = []
    for row in rows:
        for column, cell in row.items():
            if isinstance(cell, dict | list):
                waiting.append((cell, tree.setdefault(column, {})))
    while waiting:
        value, names = waiting.pop()
        for name, entry in value.items() if isinstance(value, dict) else [("", entry) for entry in value]:
            if name not in names:
                names[name] = {}
                count += 1
            if isinstance(entry, dict | list):
                waiting.append((entry, names[name]))
        if count > MOST_COLUMNS:
            raise ValueError(f"more than {MOST_COLUMNS:,} names in objects in the cells, which Parquet has as columns")


def _check_columns(names, columns):
    """
    Refuse names without one of the columns, and a column that stands twice, of all if `columns` is None.

    Without any names there are no rows, as in an empty file, so no column is missing.
    """
    times = Counter(names)
    for name in filter(None, names):
        if (columns is None or name in columns) and times[name] > 1:
            raise ValueError(
                f"two columns have the name {shortened(repr(name), 100)}; rename one, or, where the first line is no "
                f"header, write one above"
            )
    for column in columns or ():
        if names and column not in times:
            known = shortened(", ".join(map(repr, names)), 500)
            raise ValueError(f"no column {column!r:.100}; it has {known}: name one with --text_column")


def _json_rows(file):
    """The rows of a JSONL file."""
    replaced = 0
    for number, line in enumerate(lines_of(file), 1):
        if line.isspace():
            continue
        whole = whole_characters(line)
        replaced += whole != line
        try:
            check_values(whole)
            row = json.loads(whole)
            if not isinstance(row, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # the whole message counts lines within this one
            raise ValueError(f"line {number:,}: not a row of JSON ({reason}); repair it, or take it out") from None
        yield f"line {number:,}", row
    if replaced:
        name = short_name(file.name)
        logger.warning(f"{name}: half a character (a lone surrogate) is replaced by U+FFFD in {replaced:,} rows")


def _cell_rows(file, columns, separator, is_tsv):
    """The rows of a CSV or TSV file."""
    between = {"auto": "\t", "tab": "\t", "pipe": "|"}.get(separator, separator)
    first = next(filter(str.strip, lines_of(file)), "")
    declared = None if is_tsv else re.fullmatch(r"sep=([,;\t|])\s*", first)  # the first line that Excel writes
    if separator == "auto" and not is_tsv:
        header = re.sub('"[^"]*"', "", first)
        between = declared[1] if declared else max(",;\t|", key=header.count)
        if between != ",":
            logger.info(f"{short_name(file.name)}: the separator is {between!r}, as the first line shows")
    rows = _numbered_cells(file, between, is_tsv)
    if declared:
        next(rows)
    header = next(rows, None)
    if header is None:  # an empty file
        return
    names = header[1]
    _check_columns(names, columns)
    quoted = 0
    headers = []  # the lines of rows that are the header once more
    for number, cells in rows:
        # Excel writes rows of empty cells behind the last one. Of one column an empty cell in quotes is a row.
        is_of_one_column = len(names) == 1 and len(cells) == 1
        if not any(map(str.strip, cells)) and not is_of_one_column:
            continue
        if len(cells) != len(names):
            raise ValueError(
                f"line {number:,}: not the {len(names):,} cells of the header, but {len(cells):,}, if {between!r} "
                f"separates them; repair the line, or name another --separator"
            )
        if is_tsv:
            quoted += sum(len(cell) > 2 and cell[0] == cell[-1] == '"' for cell in cells)
        if cells == names:
            headers.append(number)
        yield f"line {number:,}", dict(zip(names, cells, strict=True))
    if headers:
        again = f"stands again in line {headers[0]:,} ({len(headers):,} in all)"
        logger.warning(f"{short_name(file.name)}: the header {again}; take it out")
    if quoted:
        cells = counted(quoted, "cell")
        logger.warning(f"{short_name(file.name)}: {cells} in quotes, which are text in TSV; of pandas? name it .csv")


def _numbered_cells(file, between, is_tsv):
    """
    The rows of a CSV or TSV file, the header as well, each with the number of its first line; without empty lines.

    Args:
        between: the character between the cells.
    """
    csv.field_size_limit(LONGEST_CELL)
    number = 1  # the line at which a row begins
    characters = 0  # of this row up to here
    quotes = 0
    space_before_quote = re.compile(f'{re.escape(between)} +"')

    def lines():
        """The lines that `csv` reads: a cell in quotes may have several."""
        nonlocal characters, quotes
        for line in lines_of(file):
            for found in () if is_tsv else space_before_quote.finditer(line):
                if (quotes + line.count('"', 0, found.start())) % 2 == 0:  # not within quotes
                    raise ValueError(
                        f"line {number:,}: a space stands before the quotes of a cell, which would be part of it; "
                        f"take such spaces out"
                    )
            quotes += line.count('"')
            characters += len(line)
            if characters > LONGEST_LINE:
                raise csv.Error(f"it has more than {LONGEST_LINE:,} characters")
            yield line

    reader = csv.reader(
        lines(), delimiter=between, quoting=csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL, strict=True
    )
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1
            characters = 0
            quotes = 0
    except csv.Error as error:
        raise ValueError(
            f"line {number:,}: a row begins here with a cell whose quotes do not match ({error}); close them, and "
            f"write a quote inside a cell as two"
        ) from None
