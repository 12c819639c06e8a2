"""The texts of a source, and tables to read them from, for tests of sources."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from d2l_bert.tokenization import tables
from d2l_bert.tokenization.files import lines_and_cells


def packed_by_zstd(data):
    return bytes(pa.compress(data, "zstd"))


def write_files(folder, contents):
    """Write a file of each name, in folders that are made, with its text or bytes; returns the folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def texts(source):
    return [list(document.paragraphs) for document in source.documents]


def lines_of(*file):
    """The lines of a file as `embed` reads them."""
    return [line for line, _ in lines_and_cells(*file)]


def write_table(file, rows):
    """Write rows (dicts) in the format of the file's suffix, a missing value left out; returns the file."""
    kind = tables.suffix_unpacked(file)
    rows = list(rows)
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
        return file
    text = io.StringIO()
    if kind == ".jsonl":
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        tsv = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        writer = csv.DictWriter(text, list(rows[0]), **tsv if kind == ".tsv" else {})
        writer.writeheader()
        writer.writerows(rows)
    data = text.getvalue().encode()
    pack = {".gz": gzip.compress, ".zst": packed_by_zstd}.get(file.suffix, bytes)
    file.write_bytes(pack(data))
    return file
