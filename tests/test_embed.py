"""`d2l-bert embed`: the vectors of lines, the files that hold them, and the lines nearest to a text."""

import gzip
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from encoders import WORDS, write_encoders
from numpy.testing import assert_allclose

from d2l_bert.inference import embed as module
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.inference.embed import embed, evened
from d2l_bert.messages import UserError
from d2l_bert.tokenization.sources import lines_and_cells


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
    monkeypatch.setattr(module, "evened", None)  # which only `nearest` needs
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
    assert [line for line, _ in lines_and_cells(str(tmp_path / name))] == ["one", "two", "", "four"]


def test_a_parquet_file_keeps_the_columns_of_a_table(encoders, tmp_path, fails):
    (tmp_path / "rows.csv").write_text("id,text,note\n007,the crane,a\n008,a crane,\n")
    embed(str(encoders / "ours"), str(tmp_path / "rows.csv"), EmbedConfig(output=str(tmp_path / "rows.parquet")))
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.select(["id", "text", "note"]).to_pydict() == {
        "id": ["007", "008"],
        "text": ["the crane", "a crane"],
        "note": ["a", ""],
    }
    assert table.column_names == ["id", "text", "note", "vector"]
    (tmp_path / "mixed.jsonl").write_text('{"text": "a", "x": 1}\n{"text": "b", "x": "one"}\n')
    words = ["embed", encoders / "ours", tmp_path / "mixed.jsonl", "--output", tmp_path / "mixed.parquet"]
    assert "several kinds" in fails(*words)


def nearest_shown(said):
    """The cosines and the numbers of the lines that `embed` shows, for each text."""
    shown = [[]]
    for line in said.splitlines():
        if line.startswith("nearest to"):
            shown.append([])
        else:
            shown[-1].append((float(line.split()[0]), int(line.split()[2].replace(",", "")) - 1))
    return [each for each in shown if each]


def test_the_nearest_lines_are_those_of_the_largest_cosine_after_half_of_whitening(encoders, tmp_path):
    """Whitening is written here by the singular values of the centred vectors, not by the covariance."""
    lines = [line for line in make_lines(300, seed=1) if line.strip()]
    queries = [lines[3], "the crane"]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "all.txt").write_text("\n".join([*lines, *queries]) + "\n")
    embed(str(encoders / "ours"), str(tmp_path / "all.txt"), EmbedConfig(output=str(tmp_path / "all.npy")))
    vectors = np.load(tmp_path / "all.npy").astype(np.float64)
    mean = vectors[: len(lines)].mean(0)
    _, values, directions = np.linalg.svd(vectors[: len(lines)] - mean, full_matrices=False)
    deviations = values / np.sqrt(len(lines) - 1)
    even = (vectors - mean) @ directions.T / np.sqrt(np.maximum(deviations, np.sqrt(1e-3) * deviations.max()))
    even /= np.linalg.norm(even, axis=1, keepdims=True)
    shown = nearest_shown(
        embed(str(encoders / "ours"), str(tmp_path / "lines.txt"), EmbedConfig(nearest=queries, top_k=5))
    )
    for found, cosines in zip(shown, even[len(lines) :] @ even[: len(lines)].T, strict=True):
        assert [cosine for cosine, _ in found] == pytest.approx(np.sort(cosines)[::-1][:5], abs=2e-4)
        assert [cosines[number] for _, number in found] == pytest.approx(np.sort(cosines)[::-1][:5], abs=2e-4)


def test_vectors_that_were_saved_find_the_same_lines_and_are_not_computed_again(
    encoders, tmp_path, monkeypatch, fails
):
    (tmp_path / "lines.txt").write_text("\n".join(make_lines(200, seed=2)) + "\n")
    model, config = str(encoders / "ours"), EmbedConfig(nearest=["the crane"], top_k=4)
    fresh = embed(model, str(tmp_path / "lines.txt"), config)
    embed(model, str(tmp_path / "lines.txt"), EmbedConfig(output=str(tmp_path / "saved.parquet")))
    computed, vectors_of = [], module.vectors_of
    monkeypatch.setattr(
        module, "vectors_of", lambda texts, *more: computed.append(len(texts)) or vectors_of(texts, *more)
    )
    assert nearest_shown(embed(model, str(tmp_path / "saved.parquet"), config)) == nearest_shown(fresh)
    assert computed == [1, 1]  # the text, and the first line, by which another model is told
    assert "another model" in fails("embed", encoders / "stock", tmp_path / "saved.parquet", "--nearest", "the crane")
    words = ["embed", model, tmp_path / "saved.parquet", "--output", tmp_path / "again.parquet"]
    assert "has vectors already" in fails(*words)
    (tmp_path / "named.csv").write_text("text,vector\na crane,of the eye\n")
    assert "'vector' holds no vectors" in fails("embed", model, tmp_path / "named.csv", "--nearest", "the crane")


def test_equal_lines_are_equally_near(encoders, tmp_path):
    (tmp_path / "lines.txt").write_text("the crane\n" * 120)
    (found,) = nearest_shown(
        embed(str(encoders / "ours"), str(tmp_path / "lines.txt"), EmbedConfig(nearest=["a crane"]))
    )
    assert len({cosine for cosine, _ in found}) == 1 and not np.isnan(found[0][0])


def test_few_lines_are_compared_as_they_are():
    vectors = torch.randn(99, 8)
    assert evened(vectors)(vectors) is vectors


def test_an_error_in_the_middle_leaves_no_file(encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 500 * 256)
    (tmp_path / "late.txt").write_bytes(b"the crane\n" * 2000 + "Zürich".encode("latin-1"))
    out = tmp_path / "out"
    out.mkdir()
    for name in ("vectors.npy", "vectors.parquet"):
        with pytest.raises(UserError, match="late.txt: line 2,001: .*0xfc"):
            embed(str(encoders / "ours"), str(tmp_path / "late.txt"), EmbedConfig(output=str(out / name)))
    assert list(out.iterdir()) == []
