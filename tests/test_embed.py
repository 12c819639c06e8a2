"""`d2l-bert embed`: the vectors of lines, the files that hold them, and the lines nearest to a text."""

import gzip
import io
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from encoders import WORDS, vectors_one_by_one, write_encoders
from numpy.testing import assert_allclose

from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.tokenization.sources import text_lines
from d2l_bert.training.vectors import embed as module
from d2l_bert.training.vectors.config import EmbedConfig
from d2l_bert.training.vectors.embed import embed


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


def make_lines(count=60, seed=0):
    """Lines of very different lengths: some empty, some longer than the model reads."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(WORDS, k=rng.choice([1, 2, 3, 5, 8, 13, 21, 60]))) for _ in range(count)]
    lines[7] = ""
    lines[11] = "  "
    return lines


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(make_lines()) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["ours", "stock", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_each_line_gets_the_vector_that_it_has_alone(encoders, texts, tmp_path, monkeypatch, name, pooling):
    monkeypatch.setattr(module, "GROUP_LINES", 23)  # three groups
    out = tmp_path / "vectors.npy"
    embed(str(encoders / name), str(texts), EmbedConfig(output=str(out), pooling=pooling, batch_tokens=100))
    vectors = np.load(out, mmap_mode="r")
    assert vectors.dtype == np.float32 and vectors.shape == (60, 24)
    assert_allclose(vectors, vectors_one_by_one(encoders / name, make_lines(), pooling), atol=1e-5)
    assert len({row.tobytes() for row in vectors}) > 50, "the lines are told apart"


def test_a_parquet_file_holds_each_text_beside_its_vector(encoders, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_LINES", 23)
    out = tmp_path / "vectors.parquet"
    embed(str(encoders / "ours"), str(texts), EmbedConfig(output=str(out)))
    table = pq.read_table(out)
    assert table["text"].to_pylist() == make_lines()
    vectors = np.array(table["vector"].to_pylist())
    assert_allclose(vectors, vectors_one_by_one(encoders / "ours", make_lines()), atol=1e-5)
    assert table.schema.field("vector").type.list_size == 24


def test_cut_and_empty_lines_are_counted_and_said(encoders, texts, tmp_path, capsys):
    model, out = str(encoders / "stock"), tmp_path / "vectors.npy"
    assert main(["embed", model, str(texts), f"--output={out}", "--max_seq_length=10"]) == 0
    captured = capsys.readouterr()
    too_long = sum(len(line.split()) > 8 for line in make_lines())  # [CLS], 8 words, [SEP]: each word is a token
    assert f"cut off: what is beyond 10 tokens, in {too_long} of 60 lines" in captured.err
    assert "empty lines: 2; each has the vector of a text without words" in captured.err
    assert captured.out == f"{out}: 60 vectors of 24 numbers, one for each line\n"
    assert_allclose(np.load(out), vectors_one_by_one(encoders / "stock", make_lines(), most=10), atol=1e-5)


def test_the_nearest_lines_are_those_with_the_largest_cosines(encoders, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "GROUP_LINES", 23)
    query = "a crane is flying"
    assert main(["embed", str(encoders / "ours"), str(texts), "--nearest", query, "--top_k=7"]) == 0
    vectors = vectors_one_by_one(encoders / "ours", [query, *make_lines()]).double()
    cosines = torch.cosine_similarity(vectors[:1], vectors[1:])
    cosines[[7, 11]] = -2  # empty lines are none of the nearest
    expected = cosines.topk(7)
    shown = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [float(cosine) for cosine, *_ in shown] == pytest.approx(expected.values.tolist(), abs=6e-5)
    assert all(len(cosine.partition(".")[2]) == 4 for cosine, *_ in shown)
    assert {int(number) for _, _, number, *_ in shown} == {index + 1 for index in expected.indices.tolist()}
    assert all(text == make_lines()[int(number) - 1][: len(text)] for _, _, number, text in shown)


def test_equal_lines_are_shown_in_their_order(encoders, tmp_path):
    path = tmp_path / "same.txt"
    path.write_text("the tower\n" * 5 + "water\n" + "the tower\n" * 5)
    done = embed(str(encoders / "ours"), str(path), EmbedConfig(nearest="the tower", top_k=3))
    assert [number for _, number, _ in done.nearest] == [1, 2, 3]
    assert done.nearest[0][0] == pytest.approx(1)


READ_AS = {
    "plain.txt": b"one\ntwo\n\nfour",
    "windows.txt": b"one\r\ntwo\r\n\r\nfour\r\n",
    "packed.txt.gz": gzip.compress(b"one\ntwo\n\nfour\n"),
    "rows.jsonl": b'{"text": "one"}\n{"text": "two"}\n{"text": null}\n{"text": "four"}\n',
    "rows.csv": b'text,x\none,1\ntwo,2\n"",3\nfour,4\n',
}


@pytest.mark.parametrize("name", READ_AS)
def test_a_line_is_a_line_in_every_kind_of_file(tmp_path, name):
    (tmp_path / name).write_bytes(READ_AS[name])
    assert list(text_lines(str(tmp_path / name))) == ["one", "two", "", "four"]


def test_only_a_newline_ends_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("d2l_bert.tokenization.sources.READ_CHARACTERS", 4)  # lines go on from piece to piece
    text = "ünï\u2028x\x85\x0b\x0c\rmid\nlonger than a piece\n\n\nend"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8", newline="")
    assert list(text_lines(str(tmp_path / "text.txt"))) == text.split("\n")


def test_lines_are_read_from_the_standard_input(encoders, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(texts.read_bytes())))
    out = tmp_path / "vectors.npy"
    assert main(["embed", str(encoders / "ours"), "-", f"--output={out}"]) == 0
    assert_allclose(np.load(out), vectors_one_by_one(encoders / "ours", make_lines()), atol=1e-5)


def test_an_error_in_the_middle_leaves_no_file(encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_LINES", 2)
    monkeypatch.setattr("d2l_bert.tokenization.sources.READ_CHARACTERS", 16)
    (tmp_path / "late.txt").write_bytes(b"the crane\n" * 50 + "Zürich".encode("latin-1"))
    out = tmp_path / "out"
    out.mkdir()
    for name in ("vectors.npy", "vectors.parquet"):
        with pytest.raises(UserError, match="late.txt: cannot be read as UTF-8 text .*0xfc in position"):
            embed(str(encoders / "ours"), str(tmp_path / "late.txt"), EmbedConfig(output=str(out / name)))
    assert list(out.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_no_file(encoders, texts, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.NumberFile, "append", fail)
    with pytest.raises(UserError, match="vectors.npy: cannot be written .No space left on device.; free some space"):
        embed(str(encoders / "ours"), str(texts), EmbedConfig(output=str(tmp_path / "vectors.npy")))
    assert list(tmp_path.iterdir()) == []


def test_wrong_models_and_files_are_refused(encoders, texts, tmp_path, fails):
    ours, out = encoders / "ours", f"--output={tmp_path / 'v.npy'}"
    assert "max_seq_length 33: the model reads 32 tokens at most" in fails(
        "embed", ours, texts, out, "--max_seq_length=33"
    )
    (tmp_path / "blank.txt").write_text("\n \n\n")
    assert "blank.txt: 3 empty lines and no text; give texts" in fails("embed", ours, tmp_path / "blank.txt", out)
    config = json.loads((ours / "config.json").read_text())
    wider = tmp_path / "wider"
    wider.mkdir()
    for path in ours.iterdir():
        (wider / path.name).write_bytes(path.read_bytes())
    (wider / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "without weights for encoder.layer.2" in fails("embed", wider, texts, out)
    assert not (tmp_path / "v.npy").exists()
