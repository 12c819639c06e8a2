"""Files with one common fault: they are read, or a line says what is wrong and what mends it."""

import gzip
import logging

import pyarrow as pa
import pyarrow.parquet
import pytest

from d2l_bert.messages import UserError
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.account import WIDTH
from d2l_bert.tokenization.files import lines_and_cells, lines_of_text_file, text_files
from d2l_bert.training.finetuning.rows import read_file


def refused(path):
    """What is said of a file that cannot be read."""
    with pytest.raises(UserError) as error:
        list(lines_of_text_file(path))
    return str(error.value)


@pytest.mark.parametrize(
    "content, way_out",
    [
        ("Größe für alle.\n".encode() * 40 + b"Stra\xdfe.\n" + b"Ende.\n", "iconv -c -f UTF-8"),
        (b"Ende.\n" * 40 + b"Stra\xdfe.\n" + "Größe für alle.\n".encode() * 9, "iconv -c -f UTF-8"),
        (b"Ende.\n" * 40 + "für".encode()[:2], "iconv -c -f UTF-8"),  # cut off within a character
        ("Größe für alle.\n".encode("cp1252") * 40, "iconv -f CP1252"),
        (b"Ende.\n" * 40 + "Straße.\n".encode("cp1252"), "iconv -f CP1252"),
        (b"\x00\x01\xff\xfe" * 40, "binary"),
    ],
)
def test_one_damaged_byte_is_told_from_another_encoding(content, way_out, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    said = refused(path)
    assert way_out in said
    assert ("-c -f" in said) == ("-c -f" in way_out)


def test_a_file_that_is_not_packed_as_its_name_says_is_named(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_text("Plain text.\n")
    assert "take .gz off its name" in refused(path)
    path.write_bytes(gzip.compress(b"Packed.\n"))
    assert list(lines_of_text_file(path)) == ["Packed."]


def test_long_windows_of_zstd_have_a_way_out(tmp_path):
    path = tmp_path / "a.txt.zst"
    # A frame whose window is of 2 ** 31 bytes: magic number, descriptor, window, and an empty last block.
    path.write_bytes(bytes.fromhex("28b52ffd 00 a8 010000"))
    assert "zstd -d --long=31" in refused(path)


def test_a_line_end_that_was_converted_twice_is_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\r\ntwo\r\r\n\r\r\nthree\r\rfour\r\n\r\nfive")
    lines = ["one", "two", "", "three", "", "four", "", "five"]
    assert list(lines_of_text_file(path)) == lines
    assert tables.LINE_END.split(path.read_bytes().decode()) == lines


def test_text_as_bytes_in_parquet_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    texts = ["Größe.", None, "Ende."]
    for kind in (pa.binary(), pa.large_binary()):
        values = [text and text.encode() for text in texts]
        pa.parquet.write_table(pa.table({"text": pa.array(values, kind), "image": [b"\xff\xd8"] * 3}), path)
        rows = [row for _, row in tables.table_rows(path)]
        assert [row["text"] for row in rows] == texts
        assert rows[0]["image"] == b"\xff\xd8"  # no UTF-8


def test_a_space_before_quotes_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"He said, ""no"", once.","good"\n"It rained.", "bad"\n')
    with pytest.raises(ValueError, match="line 3: a space stands before the quotes"):
        list(tables.table_rows(path))
    path.write_text('text,label\n"He wrote: a, ""b"" and\nc, ""d""","good"\n')  # within quotes it is text
    assert [row["text"] for _, row in tables.table_rows(path)] == ['He wrote: a, "b" and\nc, "d"']


def test_quotes_about_the_cells_of_a_tsv_are_remarked_on(tmp_path, caplog):
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"She said ""no""."\tgood\nA "word".\tbad\n')
    with caplog.at_level(logging.WARNING, "d2l_bert"):
        rows = [row for _, row in tables.table_rows(path)]
    assert rows[0]["text"] == '"She said ""no""."'
    assert "1 cell in quotes" in caplog.text


def test_the_header_of_a_table_is_no_text_to_predict_on(tmp_path):
    path = tmp_path / "unicode.txt"
    path.write_text("no\ttext\n0\tIt rains.\n", encoding="utf-16")
    with pytest.raises(UserError, match="names of columns"):
        list(lines_and_cells(str(path)))
    path.write_text("text\nIt rains.\n")  # one word is a text
    assert [line for line, _ in lines_and_cells(str(path))] == ["text", "It rains."]


def test_a_header_that_stands_again_is_said(tmp_path, caplog):
    path = tmp_path / "joined.csv"
    path.write_text("text,label\nIt rains.,a\ntext,label\nIt snows.,b\ntext,label\ntext,b\n")
    with caplog.at_level(logging.WARNING, "d2l_bert"):
        rows = [row["text"] for _, row in tables.table_rows(path)]
    assert rows == ["It rains.", "text", "It snows.", "text", "text"]
    assert "the header stands again in line 3 (2 in all)" in caplog.text


def test_a_pointer_of_git_lfs_is_no_text(tmp_path):
    for name in ("a.txt", "a.csv", "a.parquet"):
        path = tmp_path / name
        path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'9' * 64}\nsize 330454481\n")
        assert "git lfs pull" in refused(path)
    path.write_text("version 2 of this text\n")
    assert list(lines_of_text_file(path)) == ["version 2 of this text"]


def test_files_for_tests_beside_those_for_training_are_said(tmp_path):
    for name in ("wiki.train.txt", "wiki.test.txt", "dev/a.txt", "latest.txt", "developers.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("It rains.\n")
    assert text_files(tmp_path).remarks == "also read, though for tests by their names: dev/a.txt, wiki.test.txt"
    (tmp_path / "wiki.train.txt").unlink()
    assert text_files(tmp_path).remarks == ""


def test_empty_lines_among_texts_are_counted(tmp_path, caplog):
    path = tmp_path / "new.txt"
    path.write_text("It rains.\n\nIt snows.\n \n")
    with caplog.at_level(logging.INFO, "d2l_bert"):
        rows = read_file(str(path), "").rows
    assert [row.place for row in rows] == ["line 1", "line 3"]
    assert "2 empty lines are left out" in caplog.text


def test_lines_about_a_file_with_a_long_name_stay_short(tmp_path, caplog):
    """A person reads at a glance what is logged of what was read (`account.WIDTH`)."""
    name = "x" * 90
    rows = 'text\tlabel\n"One."\ta\n' + "text\tlabel\n" + '"Two."\tb\n'
    (tmp_path / f"{name}.tsv").write_text(rows)
    (tmp_path / f"{name}.jsonl").write_text('{"text": "\\ud800", "label": "a"}\n')
    times = pa.table({"text": ["One."], "w" * 90: pa.array([10**15], pa.timestamp("ms"))})
    pyarrow.parquet.write_table(times, tmp_path / f"{name}.parquet")
    with caplog.at_level("INFO"):
        for suffix in (".tsv", ".jsonl", ".parquet"):
            list(tables.table_rows(tmp_path / f"{name}{suffix}"))
    assert len(caplog.messages) == 4
    assert max(map(len, caplog.messages)) <= WIDTH
