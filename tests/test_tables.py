"""Tables with a column of text: what is read, skipped and counted, and damaged tables."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_sources import texts, write_table

from d2l_bert.tokenization.sources import (
    file_source,
)


TEXTS = ["First, with a comma.\n\nSecond – naïve.", "Another document.\nOf two lines."]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.zst", "a.tsv", "a.parquet"])
@pytest.mark.parametrize("column", ["text", "content"])
def test_a_table_row_is_a_document(name, column, tmp_path):
    write_table(
        tmp_path / name, [{"id": "1", column: TEXTS[0]}, {"id": "2", column: None}, {"id": "3", column: TEXTS[1]}]
    )
    for path in (tmp_path / name, tmp_path):  # given by its name, then found in its folder
        found = texts(file_source(path, column))
        assert [paragraphs for _, paragraphs in found] == [
            ["First, with a comma.", "Second – naïve."],
            ["Another document.", "Of two lines."],
        ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n'),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut\n'),
        ("a.jsonl", b'{"text": "fine"}\n[1, 2]\n'),
        ("a.jsonl", b'{"text": "caf\xe9"}\n'),
        ("a.jsonl", b"[" * 100_000),
        ("a.csv", b"id,body\n1,x\n"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "a \\ud83d b"}\n'),
        ("a.jsonl", b'{"text": "\xed\xa0\x80"}\n'),
        ("a.jsonl", b'{"text": {"en": "x"}}\n'),
        ("a.csv", b"body\nx\n"),
        ("a.csv", " \n".encode("utf-16")),
        # mtime=0: the content is part of the test's name, which must not change with the time of day.
        ("a.csv.gz", gzip.compress(b"text\n" + b"fine\n" * 1000, mtime=0)[:-20]),
        ("a.jsonl.zst", bytes(pa.compress(b'"fine"\n' * 100_000, "zstd"))[:-20]),
        ("a.csv", b"text\nfine\ncaf\xe9\n"),
        ("a.parquet", b"PAR1 no more"),
        ("a.txt.zst", b"not packed at all"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 1000, mtime=0)[:-20]),
        ("a.txt.zst", bytes(pa.compress(b"fine. " * 100_000, "zstd"))[:-20]),
        ("a.json", b'[{"text": "fine"}]'),
    ],
)
def test_a_damaged_table_is_refused_with_its_name(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        texts(file_source(tmp_path / name))
    assert name in str(refused.value)


def test_damaged_parquet_files_and_duplicate_column_names_are_refused(tmp_path):
    write_table(tmp_path / "a.parquet", [{"text": "fine"}])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-60] + bytes(40) + whole[-20:])
    with pytest.raises(ValueError, match="a.parquet: cannot be read"):
        texts(file_source(tmp_path))
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: cannot be read"):
        texts(file_source(tmp_path))


def test_rows_and_files_without_text_are_counted_and_skipped(tmp_path):
    for name in ("empty.txt", "empty.csv", "empty.jsonl", "empty.parquet", "empty.txt.gz", "empty.csv.zst"):
        (tmp_path / name).touch()
    (tmp_path / "blank.txt").write_text("\ufeff \n\n\t\n")
    (tmp_path / "header.csv").write_text("text,id\n")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    source = file_source(tmp_path)
    assert texts(source) == [] and source.counts == {"files_without_text": 9}

    write_table(tmp_path / "some.jsonl", [{"text": None}, {"text": ""}, {"text": " \n"}, {"text": "A text."}])
    source = file_source(tmp_path)
    assert texts(source) == [("some.jsonl row 0", ["A text."])]
    assert source.counts == {"files_without_text": 9, "rows_without_text": 3, "rows_file_paragraphs": 1}
