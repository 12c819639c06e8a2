"""Tables with a column of text: what is read, skipped and counted, and damaged tables."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import random
import tracemalloc
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_sources import lines_of, packed_by_zstd, texts, write_files, write_table

from d2l_bert.messages import UserError
from d2l_bert.tokenization.files import lines_and_cells
from d2l_bert.tokenization.hub_datasets import dataset_errors
from d2l_bert.tokenization.sources import HowToRead, WhatToRead, file_source, open_sources
from d2l_bert.tokenization.tables import file_kind
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.rows import read_dataset, read_file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.zst", "a.parquet"])
@pytest.mark.parametrize("column", ["text", "content"])
def test_a_table_row_is_a_document(name, column, tmp_path):
    rows = ["First, with a comma.\n\nSecond – naïve.", None, "Another document.\nOf two lines."]
    write_table(tmp_path / name, [{"id": str(number), column: text} for number, text in enumerate(rows)])
    for path in (tmp_path / name, tmp_path):  # given by its name, then found in its folder
        assert texts(file_source(path, HowToRead(text_column=column))) == [
            ["First, with a comma.", "Second – naïve."],
            ["Another document.", "Of two lines."],
        ]
    assert lines_of(str(tmp_path / name), column) == [text or "" for text in rows]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": 3}\n'),
        ("a.jsonl", b'{"text": {"en": "x"}}\n'),
        ("a.csv", " \n".encode("utf-16")),
        # mtime=0: the content is part of the test's name, which must not change with the time of day.
        ("a.csv.gz", gzip.compress(b"text\n" + b"fine\n" * 1000, mtime=0)[:-20]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 1000, mtime=0)[:-20]),
        ("a.jsonl.zst", packed_by_zstd(b'"fine"\n' * 100_000)[:-20]),
        ("a.txt.zst", packed_by_zstd(b"fine. " * 100_000)[:-20]),
        ("a.txt.zst", b"not packed at all"),
        ("a.csv", b"text\nfine\ncaf\xe9\n"),
        ("a.json", b'[{"text": "fine"}]'),
        ("a.parquet", b"PAR1" + bytes(60) + (40).to_bytes(4, "little") + b"PAR1"),
    ],
)
def test_a_damaged_table_is_refused_with_its_name(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        texts(file_source(tmp_path / name))


def test_a_parquet_file_with_two_columns_of_a_name_is_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: two columns"):
        texts(file_source(tmp_path))


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".zst"])
def test_rows_and_files_without_text_are_counted_and_skipped(packed, tmp_path):
    contents = {"blank.txt": "\ufeff \n\n\t\n", "lines.jsonl": "\n \n\n", "header.csv": "id,text\n", "lines.tsv": "\n"}
    contents |= dict.fromkeys(["empty.txt", "empty.jsonl", "empty.csv", "empty.tsv"], "")
    files = {f"{name}{packed}": PACKERS[packed](content.encode()) for name, content in contents.items()}
    write_files(tmp_path, {**files, f"nothing.txt{packed}": "", "empty.parquet": ""})
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    write_table(tmp_path / "some.jsonl", [{"text": None}, {"text": ""}, {"text": " \n"}, {"text": "A text."}])
    source = file_source(tmp_path)
    assert texts(source) == [["A text."]]
    assert source.counts == {
        "files without text": 11,
        "rows without text": 3,
        "rows read whole, a paragraph a line": 1,
    }
    assert lines_of(str(tmp_path / f"empty.csv{packed}")) == []


# ---------------------------------------------------------------------------------------------------------------------
# CSV and TSV


def columns_of(file, *separator):
    """The columns of a table as `finetune` reads it."""
    split = read_file(str(file), "train_file", *separator)
    found = {}
    for name in split.columns:
        found[name] = [row.cells[name] for row in split.rows]
    return found


READERS = {  # of text to train on, of texts to embed, of labelled rows
    "train": lambda file: texts(file_source(file)),
    "embed": lambda file: lines_of(str(file)),
    "finetune": lambda file: read_file(str(file), "train_file"),
}
every_reader = pytest.mark.parametrize("reader", READERS)


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_cells_of_a_csv_file_are_those_that_were_written(between, end, encoding, tmp_path):
    drawn = random.Random(between + end)
    letters = ["a", "é", " ", '"', ",", ";", "\t", "|", "'", "\\", "\n", "\r\n"]
    cells = ["".join(drawn.choices(letters, k=8)) for _ in range(400)]
    rows = [(str(number), cell, "NA") for number, cell in enumerate(cells)]
    written = io.StringIO()
    quoting = csv.QUOTE_ALL if end == "\r" else csv.QUOTE_MINIMAL  # it would leave a newline without quotes
    writer = csv.writer(written, delimiter=between, lineterminator=end, quoting=quoting)
    writer.writerows([("id", "text", "label"), *rows])
    file = tmp_path / "rows.csv"
    file.write_bytes(written.getvalue().encode(encoding))
    assert lines_of(str(file)) == cells
    table = read_file(str(file), "train_file")
    assert [tuple(row.cells.values()) for row in table.rows] == rows
    line_ends = [1 + cell.count("\n") for cell in ["", *cells]]  # each row begins behind those of the rows before it
    starts = list(itertools.accumulate(line_ends, initial=1))[1:-1]
    assert [row.place for row in table.rows] == [f"line {line:,}" for line in starts]


ROW = "1,A row of text.\n"
BROKEN = {  # the lines below `label,text`, and the line that is named
    "a quote that no line closes": (ROW * 3 + '1,"The harbour was quiet.\n' + ROW * 30, 5),
    "a quote that text behind a later quote closes": (
        ROW + '1,"The harbour.\n' + ROW * 9 + '0,He said no" and left.\n' + ROW,
        3,
    ),
    "text behind a closing quote": (ROW * 2 + '1,"a"b\n' + ROW, 4),
    "a backslash before a quote": (ROW + '1,"She said \\"no\\" to him."\n' + ROW, 3),
    "single quotes": (ROW + "1,'No, not now.'\n" + ROW, 3),
    "an open quote in the second cell below one of two lines": (ROW + '"1\n2","open\n' + ROW * 4, 3),
    "a separator in a cell": (ROW + "1,No, not now.\n", 3),
    "a row cut short": (ROW + '1,"two\nlines"\n' + ROW + "1\n" + ROW, 6),
    "an open quote in the last line": (ROW + '1,"', 3),
}


@every_reader
@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_file_whose_cells_cannot_be_told_apart_is_refused_with_the_line_by_every_reader(
    case, end, reader, tmp_path
):
    content, line = BROKEN[case]
    (tmp_path / "rows.csv").write_bytes(f"label,text\n{content}".replace("\n", end).encode())
    with pytest.raises(UserError, match=f"rows.csv: line {line}: "):
        READERS[reader](tmp_path / "rows.csv")


@every_reader
def test_quotes_in_a_tsv_file_are_text_and_a_row_of_other_cells_is_refused_with_its_line(reader, tmp_path):
    cells = ["a film", '"great fun" for all', '"i loved it, she said', 'added "a joy"', '"', "it's", '""', '5" pipe']
    file = tmp_path / "rows.tsv"
    file.write_text("label\ttext\n" + "".join(f"1\t{cell}\n" for cell in cells))
    assert lines_of(str(file)) == cells
    assert columns_of(file) == {"label": ["1"] * len(cells), "text": cells}
    for row in ("1\ta\tb", "1"):
        file.write_text(f"label\ttext\n1\ta\n{row}\n")
        with pytest.raises(UserError, match="rows.tsv: line 3: "):
            READERS[reader](file)


@pytest.mark.parametrize(
    ("content", "given", "cells", "said"),
    [
        ('id;text;"a, b, c"\n1;Schön, gut;1\n', "auto", ["Schön, gut"], "';'"),
        ('id,text\n1,a; b; c\n2,"d, e"\n', "auto", ["a; b; c", "d, e"], ""),
        ("n,m,k;text\n1,2,3;a, b\n", ";", ["a, b"], ""),
        ("a b|text\n1|a, b\n", "auto", ["a, b"], "'|'"),
        ("a b|text\n1|a, b\n", "pipe", ["a, b"], ""),
    ],
)
def test_the_separator_is_said_and_another_can_be_given(content, given, cells, said, tmp_path, caplog):
    caplog.set_level("INFO")
    file = write_files(tmp_path, {"rows.csv": content}) / "rows.csv"
    assert lines_of(str(file), "text", given) == columns_of(file, given)["text"] == cells
    (source,) = open_sources(WhatToRead(paths=[str(file)]), HowToRead(separator=given))
    assert texts(source) == [[cell] for cell in cells]
    assert (source.identity == file_source(file).identity) == (given == "auto")
    for message in caplog.messages:
        _, _, separator = message.partition("the separator is ")
        assert separator.partition(",")[0] == said


def test_a_file_far_down_in_folders_leaves_its_separator_a_short_line(tmp_path, caplog):
    caplog.set_level("INFO")
    place = f"{'folder/' * 20}{'questions' * 20}.csv"
    file = write_files(tmp_path, {place: "id;text\n1;Schön\n"}) / place
    assert lines_of(str(file), "text", "auto") == ["Schön"]
    assert caplog.messages and all(len(message) <= 120 for message in caplog.messages)


def test_the_first_line_of_excel_sets_the_separator_and_rows_of_empty_cells_are_left_out(tmp_path):
    write_files(tmp_path, {"rows.csv": "sep=;\nlabel;a, b, c, text\n1;Schön\n;\n"})
    rows = [("line 3", {"label": "1", "a, b, c, text": "Schön"}, (), None)]
    assert read_file(str(tmp_path / "rows.csv"), "train_file").rows == rows


# ---------------------------------------------------------------------------------------------------------------------
# JSONL


LINES = {  # the lines of a file, the one that is named, and what else is said
    "cut short": ('{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n', 3, ""),
    "no object": ('{"text": "a"}\n["b"]\n', 2, ""),
    "null": ('{"text": "a"}\nnull\n', 2, ""),
    "two objects": ('{"text": "a"} {"text": "b"}\n', 1, ""),
    "a comma too many": ('{"text": "a",}\n', 1, ""),
    "nested without end": ('{"text": "a"}\n' + "[" * 100_000, 2, ""),
    "nested deeply": (
        '{"text": "a"}\n{"text": "b", "x": ' + '{"a": [' * 21 + "1" + "]}" * 21 + "}\n",
        2,
        "more than 40",
    ),
    "another encoding": ('{"text": "a"}\n' * 9999 + '{"text": "caf\udce9"}\n', 10_000, "iconv -f CP1252"),
    "half a character in UTF-8": ('{"text": "a"}\n{"text": "\udced\udca0\udc80"}\n', 2, ""),
    "NUL": ('{"text": "a"}\n{"text": "\0"}\n', 2, "NUL"),
}


@every_reader
@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_no_row_is_named_by_every_reader(case, reader, tmp_path):
    content, line, words = LINES[case]
    (tmp_path / "rows.jsonl").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=f"rows.jsonl: line {line:,}: .*{words}"):
        READERS[reader](tmp_path / "rows.jsonl")


def test_a_cell_may_be_nested_as_deep_as_parquet_can_be_read(tmp_path):
    for depth, is_read in ((40, True), (41, False)):
        cell = json.loads("[" * depth + "1" + "]" * depth)
        (tmp_path / "rows.json").write_text(json.dumps([{"text": "a", "x": cell}]))
        if is_read:
            pq.write_table(pa.table({"x": [cell]}), tmp_path / "rows.parquet")
            assert columns_of(tmp_path / "rows.json")["x"] == columns_of(tmp_path / "rows.parquet")["x"] == [cell]
        else:
            with pytest.raises(UserError, match="rows.json: cannot be read .row 1: a cell has more than 40 lists"):
                read_file(str(tmp_path / "rows.json"), "")


def test_half_a_character_is_replaced_and_counted(tmp_path, caplog):
    whole = '{"text": "a \U0001f600 b", "tags": ["\\ud83d\\ude00"]}'
    half = '{"text": "a \\ud83d b", "tags": ["\\ude00"]}'
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([whole, half, whole, '{"text": "\\\\ud83d", "tags": []}']))
    expected = ["a \U0001f600 b", "a \ufffd b", "a \U0001f600 b", "\\ud83d"]
    assert lines_of(str(file)) == expected and "in 1 rows" in caplog.text
    assert columns_of(file) == {"text": expected, "tags": [["\U0001f600"], ["\ufffd"], ["\U0001f600"], []]}


def test_the_columns_that_are_there_are_listed(tmp_path):
    rows = [{"id": "1", "body": "a"}, {"id": "2", "title": "b"}]
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        write_table(tmp_path / name, rows if name == "rows.jsonl" else rows[:1])
        with pytest.raises(UserError, match=f"{name}: no column 'text'; it has 'id', 'body'.*text_column"):
            lines_of(str(tmp_path / name))


# ---------------------------------------------------------------------------------------------------------------------
# Parquet


def test_parquet_columns_of_each_type_of_text_are_read_and_numbers_are_refused_with_their_row(tmp_path):
    file = tmp_path / "rows.parquet"
    values = ["one", None, "two"]
    columns = [pa.array(values, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    for column in (*columns, columns[1].dictionary_encode(), pa.nulls(2)):
        pq.write_table(pa.table({"text": column}), file)
        assert lines_of(str(file)) == [text or "" for text in column.to_pylist()]
    pq.write_table(pa.table({"text": [None, 2.5]}), file)
    with pytest.raises(UserError, match="row 2: column 'text' holds float"):
        lines_of(str(file))


# ---------------------------------------------------------------------------------------------------------------------
# Kinds and packed files


ROWS = "".join(json.dumps({"id": number, "text": f"Page {number}."}) + "\n" for number in range(30))
CELLS = "id,text\n" + "".join(f"{number},Page {number}.\n" for number in range(30))
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": packed_by_zstd}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.txt", "wiki_00", "A.JSONL", "a.csv"])
def test_a_table_is_read_as_such_whatever_its_name(name, packed, tmp_path):
    file = tmp_path / f"{name}{packed}"
    content = CELLS if "csv" in name else "\n" + ROWS
    file.write_bytes(PACKERS[packed](content.encode()))
    expected = [f"Page {number}." for number in range(30)]
    assert texts(file_source(file)) == [[text] for text in expected]
    assert lines_of(str(file)) == columns_of(file)["text"] == expected
    unnamed = tmp_path / "unnamed"  # a packed file is known by its first bytes, too
    file.rename(unnamed)
    assert "csv" in name or lines_of(str(unnamed)) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("a.txt", some)
            for some in ("", "A line.\n", '{"a": 1}\n' + "A line.\n" * 3, "[1]\n[2]\n", "{\n}\n{\n", "1\n2\n")
        ),
        *(("a.json", some) for some in ("[\n{}\n]\n", '{"data": []}', "")),
    ],
)
def test_text_is_not_taken_for_lines_of_json(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert file_kind(tmp_path / name) == {"a.txt": "text", "a.json": "json"}[name]


@pytest.mark.parametrize("name", ["a.xz", "a.txt.xz", "a.docx", "a.zip", "a.txt", "a.csv"])
def test_archives_and_documents_are_named_as_what_they_are(name, tmp_path):
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("a.txt", "Some text.")
    is_xz = name.endswith(("xz", "csv"))
    packed = lzma.compress(b"Some text.") if is_xz else (tmp_path / "zipped").read_bytes()
    (tmp_path / name).write_bytes(packed)
    for read in (lambda: texts(file_source(tmp_path / name)), lambda: lines_of(str(tmp_path / name))):
        with pytest.raises(UserError, match="xz" if is_xz else "zip") as refused:
            read()
        assert name in str(refused.value) and "iconv" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_large_rows_are_not_held_together(name, tmp_path):
    write_table(tmp_path / name, [{"text": f"{number} " * 33_000} for number in range(10, 99)] * 2)
    tracemalloc.start()
    try:
        size = sum(len(line) for line, _ in lines_and_cells(str(tmp_path / name)))
        assert size == 3 * 33_000 * 178
        assert tracemalloc.get_traced_memory()[1] < size * 3 / 4
    finally:
        tracemalloc.stop()


# Times that Python has no value for, with their texts: years beyond 9999 and before 1, and a zone that nobody knows.
FAR_TIMES = [
    (pa.timestamp("us"), [0, 10**18], "33658-09-27T01:46:40.000000"),
    (pa.timestamp("s", "UTC"), [0, -(10**12)], "-29719-04-05T22:13:20.000Z"),
    (pa.timestamp("s", "Nowhere/X"), [None, 0], "1970-01-01T00:00:00.000Z"),
    (pa.date32(), [0, 10**7], "29349-01-26"),
    (pa.timestamp("ns", "Nowhere/X"), [None, 1], "1970-01-01T00:00:00.000000001Z"),
    (pa.duration("s"), [0, 10**18], "1000000000000000000 s"),
]


@pytest.mark.parametrize(("kind", "numbers", "shown"), FAR_TIMES, ids=[str(kind) for kind, *_ in FAR_TIMES])
def test_a_time_that_python_has_no_value_for_is_read_as_text(kind, numbers, shown, tmp_path, caplog):
    times = pa.array(numbers * 20, kind)
    pq.write_table(pa.table({"text": ["one", "two"] * 20, "time": times}), tmp_path / "a.parquet")
    split = read_file(str(tmp_path / "a.parquet"), "train_file")
    assert [row.cells["text"] for row in split.rows] == ["one", "two"] * 20
    assert {row.cells["time"] for row in split.rows[1::2]} == {shown}
    assert not isinstance(split.rows[0].cells["time"], str)
    assert len([record for record in caplog.records if "'time'" in record.message]) == 1
    # A list of such times has no text; it is refused with its place.
    lists = pa.array([[numbers[0]], [numbers[1]]], pa.list_(kind))
    pq.write_table(pa.table({"text": ["one", "two"], "times": lists}), tmp_path / "lists.parquet")
    with pytest.raises(UserError, match="row 2: column 'times'"):
        read_file(str(tmp_path / "lists.parquet"), "train_file")


def test_a_dataset_with_such_a_time_is_read(tmp_path):
    times = pa.array([0, 10**18], pa.timestamp("us"))
    (tmp_path / "saved").mkdir()
    pq.write_table(pa.table({"text": ["one", "two"], "time": times}), tmp_path / "saved" / "train.parquet")
    config = FinetuneConfig(model="", task="text-classification", dataset=str(tmp_path / "saved"), output_dir="")
    (split,) = read_dataset(str(tmp_path / "saved"), config, ()).values()
    assert split.rows[1].cells == {"text": "two", "time": "33658-09-27T01:46:40.000000"}


@pytest.mark.parametrize("error", [StopIteration(), KeyError("feature"), AssertionError()])
def test_a_dataset_at_which_the_library_breaks_is_said_to_be_empty_or_damaged(error):
    with pytest.raises(UserError, match="empty or damaged"), dataset_errors("rows", "give another"):
        raise error
