"""`d2l-bert embed`: the vectors of lines, the files that hold them, and the lines nearest to a text."""

import gzip
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from encoders import WORDS, write_encoders
from numpy.testing import assert_allclose

from d2l_bert.inference import embed as module
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.inference.embed import embed, text_lines
from d2l_bert.messages import UserError


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


def test_a_parquet_file_holds_each_text_beside_its_vector(encoders, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 23 * 256)
    embed(str(encoders / "ours"), str(texts), EmbedConfig(output=str(tmp_path / "vectors.parquet")))
    table = pq.read_table(tmp_path / "vectors.parquet")
    assert table["text"].to_pylist() == make_lines()
    monkeypatch.undo()  # one group, and vectors that tests/promises compares with those of sentence-transformers
    embed(str(encoders / "ours"), str(texts), EmbedConfig(output=str(tmp_path / "vectors.npy")))
    assert_allclose(np.array(table["vector"].to_pylist()), np.load(tmp_path / "vectors.npy"), atol=1e-5)
    assert table.schema.field("vector").type.list_size == 24


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


def test_an_error_in_the_middle_leaves_no_file(encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 500 * 256)
    (tmp_path / "late.txt").write_bytes(b"the crane\n" * 2000 + "Zürich".encode("latin-1"))
    out = tmp_path / "out"
    out.mkdir()
    for name in ("vectors.npy", "vectors.parquet"):
        with pytest.raises(UserError, match="late.txt: line 2,001: .*0xfc"):
            embed(str(encoders / "ours"), str(tmp_path / "late.txt"), EmbedConfig(output=str(out / name)))
    assert list(out.iterdir()) == []
