"""The texts in a column of CSV, TSV, JSONL and Parquet files, read by PyArrow; opens files packed by gzip or zstd."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from d2l_bert.errors import READ_ERRORS, explained


TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
PACKED_SUFFIXES = (".gz", ".zst")

BLOCK_BYTES = 1 << 26  # PyArrow reads as much at a time; a row may not be longer


def suffix_unpacked(file: Path) -> str:
    """The suffix of a file in lower case, after `.gz` or `.zst` is removed: `.jsonl` for `rows.jsonl.gz`."""
    name = file.name.lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def open_unpacked(file: Path) -> pa.NativeFile:
    """Open a file for reading bytes, unpacked if its name ends in `.gz` or `.zst`. Raises `OSError` while reading."""
    return pa.input_stream(str(file), compression="detect")


def text_rows(file: Path, column: str) -> Iterator[str | None]:
    """
    The texts in a column of a table, one for each row, in order; None or an empty string for a row without text.

    Args:
        file: a table, read as its suffix says: `.jsonl` (an object a line), `.csv` and `.tsv` (the first line has the
            names of the columns), or `.parquet`.
        column: name of the column.

    Raises:
        UserError: the file cannot be read, is damaged or is not UTF-8, or has no such column of text.
    """
    with explained(
        f"{file}: cannot be read as a table with a column {column!r} of text",
        "name another column with --text_column, or repair the file",
        *READ_ERRORS,
    ):
        for batch in table_batches(file, column):
            yield from batch.column(column).to_pylist()


def table_batches(file: Path, column: str | None = None) -> Iterator[pa.RecordBatch]:
    """
    The rows of a table, in batches. Every column of a CSV or TSV file is text, as `00012` and `NA` are.

    Args:
        column: read this column alone, which must hold text; None for all columns.

    Raises:
        OSError, ValueError, LookupError: PyArrow cannot read the file.
    """
    kind = suffix_unpacked(file)
    if kind == ".parquet":
        with pa.parquet.ParquetFile(file) as table:
            if column is not None and not _is_text(table.schema_arrow.field(column).type):
                raise ValueError(f"{column} holds {table.schema_arrow.field(column).type}")
            yield from table.iter_batches(1000, columns=None if column is None else [column])
    elif kind == ".jsonl":
        options = {"read_options": pa.json.ReadOptions(block_size=BLOCK_BYTES)}
        if column is None:
            yield from pa.json.read_json(open_unpacked(file), **options).to_batches()
            return
        schema = pa.schema([(column, pa.string())])
        parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        for number, batch in enumerate(pa.json.open_json(open_unpacked(file), parse_options=parse, **options)):
            if number == 0 and batch.column(column).null_count == len(batch):
                raise LookupError(f"none of the first {len(batch):,} lines has it")
            yield batch
    else:
        options = {
            "read_options": pa.csv.ReadOptions(block_size=BLOCK_BYTES),
            "parse_options": pa.csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",", newlines_in_values=True),
        }
        names = pa.csv.open_csv(open_unpacked(file), **options).schema.names
        if column is not None and column not in names:
            raise LookupError(f"it has {', '.join(names)}")
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=None if column is None else [column]
        )
        yield from pa.csv.open_csv(open_unpacked(file), convert_options=convert, **options)


def _is_text(kind):
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
