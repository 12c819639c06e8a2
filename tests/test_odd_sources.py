"""Unusual texts: pipes, devices, links, depth, lines without an end, thousands of files."""

import gzip
import json
import os
import random
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from promises.driving import PEOPLE
from text_sources import lines_of, texts, write_files

from d2l_bert.messages import UserError
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.sources import HowToRead, WhatToRead, file_source, open_sources
from d2l_bert.training.finetuning.rows import read_file


# ---------------------------------------------------------------------------------------------------------------------
# What a folder holds


def test_pipes_and_devices_in_a_folder_are_left_out_and_said(tmp_path):
    write_files(tmp_path, {"a.txt": "Text."})
    os.mkfifo(tmp_path / "b.txt")
    os.mkfifo(tmp_path / "README")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    (tmp_path / "d").symlink_to("/dev/stdin")
    source = file_source(tmp_path)
    assert texts(source) == [["Text."]]
    assert "pipes and devices: 4 files" in source.remarks


def test_files_behind_links_out_of_a_folder_are_read_said_and_counted(tmp_path):
    folder = tmp_path / "texts"
    secret = {f"secret-{number}.txt": f"{name} went away. He came back." for number, name in enumerate(PEOPLE)}
    write_files(tmp_path, {"texts/a.txt": "Inside.", "texts/b.txt": "Too.", **secret})
    (folder / "c.txt").symlink_to("b.txt")
    for name in secret:
        (folder / name).symlink_to(tmp_path / name)
    prepared = prepare(TextConfig(corpus=[str(folder)]))
    said = "\n".join(prepared.account)
    assert f"{len(PEOPLE)} files behind links out of this folder, such as secret-0.txt -> {tmp_path}" in said
    assert prepared.reading["files behind links out of their folder"] == len(PEOPLE)
    assert prepared.counts()["reading"] == prepared.reading


def test_the_order_of_files_and_the_paths_behind_links_follow_from_names_and_not_from_the_disk(tmp_path, monkeypatch):
    """The same folder, listed in two orders."""
    write_files(tmp_path, {"far/one.txt": "1", "far/sub/two.txt": "2", "t/b/x.txt": "3", "t/b-c/y.txt": "4"})
    for name, target in {"t/z": "../far", "t/a": "../far/sub", "t/m": "b", "t/w.txt": "b/x.txt"}.items():
        (tmp_path / name).symlink_to(target)
    identities = []
    listed = type(tmp_path).iterdir
    for is_reversed in (False, True):
        monkeypatch.setattr(
            type(tmp_path), "iterdir", lambda path, order=is_reversed: iter(sorted(listed(path), reverse=order))
        )
        source = file_source(tmp_path / "t")
        identities.append((source.identity, texts(source)))
    assert identities[0] == identities[1]
    assert sorted(identities[0][1]) == [["1"], ["2"], ["3"], ["4"]]


@pytest.mark.slow
def test_folders_may_be_nested_in_any_depth(tmp_path):
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        with open("a.txt", "w") as file:
            file.write("Deep.")
    finally:
        os.chdir(before)
    try:
        assert texts(file_source(tmp_path)) == [["Deep."]]
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # pytest's own cleaning is recursive


@pytest.mark.slow
def test_thousands_of_sources_are_opened_at_once_and_their_names_are_short(tmp_path, capsys, shown):
    contents = {f"{number:05d}.txt": f"{PEOPLE[number % len(PEOPLE)]} came {number} times." for number in range(3000)}
    names = [str(path) for path in sorted(write_files(tmp_path, contents).iterdir())]
    start = time.monotonic()
    sources = open_sources(WhatToRead(paths=names), HowToRead())
    assert len(sources) == 3000 and time.monotonic() - start < 10
    with pytest.raises(UserError, match="00000.txt is given twice"):
        open_sources(WhatToRead(paths=[*names, names[0]]), HowToRead())
    prepared = prepare(TextConfig(corpus=names[:300], vocab_size=100))
    assert max(map(len, capsys.readouterr().err.splitlines())) < 700
    assert len(prepared.corpus_name) <= 200
    assert prepared.train.source_ends[-1] == len(prepared.train)
    assert len(prepared.train.source_ends) == 300


# ---------------------------------------------------------------------------------------------------------------------
# Pipes by name


@pytest.mark.parametrize(
    "command",
    [
        "prepare --corpus PIPE --output_dir out",
        "pretrain --corpus PIPE --output_dir out",
        "prepare --corpus /dev/zero --output_dir out",
    ],
)
def test_a_pipe_that_is_named_is_refused_as_a_pipe_and_not_waited_for(command, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.txt")
    assert "is a pipe or a device" in fails(*command.replace("PIPE", "pipe.txt").split())


def test_a_pipe_is_no_table_and_its_lines_are_read_from_the_standard_input(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="train_file .*pipe or a device"):
        read_file(str(tmp_path / "pipe.txt"), "train_file")
    with pytest.raises(UserError, match="pipe or a device.*give a file, or - "):
        lines_of(str(tmp_path / "pipe.txt"))


def test_the_standard_input_is_no_corpus_and_this_is_said(tmp_path, fails):
    assert "standard input is not read here" in fails("prepare", "--corpus=-", "--output_dir", tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Lines without an end


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_line_of_any_length_is_read_in_pieces_that_end_between_words(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_LINE_PIECE", 1000)
    line = " ".join(f"word{number}" for number in range(2000))
    text = f"First line.\n{line}\nLast line.\n".encode()
    (tmp_path / f"a{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    ((*paragraphs,),) = texts(file_source(tmp_path / f"a{suffix}"))
    assert " ".join(paragraphs).split() == text.decode().split()


def test_a_row_of_any_length_is_refused_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_LINE", 1000)
    monkeypatch.setattr(tables.lines_of, "__defaults__", (None, 1000, False))
    row = json.dumps({"text": "x" * 2000})
    write_files(tmp_path, {"a.jsonl": f'{{"text": "a"}}\n{row}\n', "a.csv": f"text\na\n{'x' * 2000}\n"})
    write_files(tmp_path, {"a.txt": "a\n" + "x" * 2000})
    for name, number in (("a.jsonl", 2), ("a.csv", 3), ("a.txt", 2)):
        with pytest.raises(UserError, match=f"line {number}: has more than 1,000 characters"):
            lines_of(str(tmp_path / name))


@pytest.mark.slow
def test_a_packed_line_of_half_a_gigabyte_takes_little_memory(tmp_path):
    with gzip.open(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(512):
            file.write(b"." * (1 << 20))
    code = (
        "import re, sys; from d2l_bert.tokenization.sources import file_source\n"
        "print(sum(len(p) for d in file_source(sys.argv[1]).documents for p in d.paragraphs))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.txt.gz"], capture_output=True, text=True)
    characters, peak = map(int, done.stdout.split())
    assert characters == 1 << 29 and peak < 600_000  # KiB, two thirds of them for the libraries


# ---------------------------------------------------------------------------------------------------------------------
# Columns without an end


@pytest.mark.slow
def test_rows_with_a_column_each_are_refused_before_they_multiply(tmp_path):
    rows = "".join(json.dumps({"text": "a", f"k{number}": number}) + "\n" for number in range(5000))
    write_files(tmp_path, {"a.jsonl": rows, "a.json": json.dumps([json.loads(row) for row in rows.splitlines()])})
    with pytest.raises(UserError, match="line 4,096: .* 4,096 different columns"):
        lines_of(str(tmp_path / "a.jsonl"))
    for name in ("a.jsonl", "a.json"):
        with pytest.raises(UserError, match="different columns"):
            read_file(str(tmp_path / name), "train_file")


def test_a_header_of_many_columns_is_read_in_a_moment(tmp_path):
    names = [f"c{number}" for number in range(30_000)]
    header = ",".join(["text", *names])
    row = ",".join(["a"] * 30_001)
    write_files(tmp_path, {"a.csv": f"{header}\n{row}\n"})
    start = time.monotonic()
    assert lines_of(str(tmp_path / "a.csv")) == ["a"]
    with pytest.raises(UserError) as refusal:
        lines_of(str(tmp_path / "a.csv"), "nowhere")
    assert len(str(refusal.value)) < 800
    assert time.monotonic() - start < 5


# ---------------------------------------------------------------------------------------------------------------------
# Cells and rows that a small file holds many times


def write_parquet(file, **columns):
    """A Parquet file, whose equal cells are stored once."""
    pq.write_table(pa.table(columns), file, compression="zstd")


@pytest.mark.parametrize("cell", ["x" * 2000, ["x" * 2000], b"x" * 5000])
def test_a_cell_of_any_length_is_refused_with_its_row(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_CELL", 1000)
    write_parquet(tmp_path / "a.parquet", text=["a"] * 3, other=[None, None, cell])
    with pytest.raises(UserError, match="row 3: column 'other' has more than 1,000 characters"):
        read_file(str(tmp_path / "a.parquet"), "train_file")


def test_a_cell_is_measured_in_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_CELL", 1000)
    write_parquet(tmp_path / "a.parquet", text=["é" * 1000, None, "b" * 1000])
    assert lines_of(str(tmp_path / "a.parquet")) == ["é" * 1000, "", "b" * 1000]


def test_rows_are_unpacked_one_by_one_where_a_file_packs_much_into_little(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LARGE_CHUNK", 1000)
    rng = random.Random(0)
    write_parquet(tmp_path / "packed.parquet", text=["x" * 50_000] * 40)
    write_parquet(tmp_path / "usual.parquet", text=[rng.randbytes(500).hex() for _ in range(40)])
    numbers = []
    whole = pq.ParquetFile.iter_batches

    def noted(table, rows, **how):
        numbers.append(rows)
        return whole(table, rows, **how)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    for name in ("packed.parquet", "usual.parquet"):
        assert len(lines_of(str(tmp_path / name))) == 40
    assert numbers == [1, 16]


def test_a_row_of_csv_over_many_lines_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_LINE", 1000)
    cell = "x\n" * 300
    write_files(tmp_path, {"a.csv": f'text,other\na,b\n"{cell}","{cell}"\n'})
    with pytest.raises(UserError, match="line 3: .*more than 1,000 characters"):
        lines_of(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.txt", "a.conll", "a.parquet"])
def test_rows_that_are_held_all_at_once_are_bounded_together(name, tmp_path, monkeypatch):
    texts = [f"A text of some words, {number}." for number in range(1000)]
    rows = [{"text": text} for text in texts]
    files = {
        "a.csv": "text,other\n" + "".join(f'"{text}",a\n' for text in texts),
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json": json.dumps(rows, indent=1),
        "a.txt": "\n".join(texts),
        "a.conll": "\n".join("word TAG\n" for _ in texts),
    }
    if name == "a.parquet":
        write_parquet(tmp_path / name, text=texts)
    else:
        write_files(tmp_path, {name: files[name]})
    assert len(read_file(str(tmp_path / name), "train_file").rows) == 1000
    monkeypatch.setattr(tables, "MOST_MEMORY", 50_000)
    with pytest.raises(UserError, match=f"{name}.*in memory.*fewer rows"):
        read_file(str(tmp_path / name), "train_file")
