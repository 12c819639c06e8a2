"""`d2l-bert embed` and `attention`: vectors of lines and of words, their files, the nearest lines, the picture."""

import json
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SIZES
from matplotlib import font_manager
from numpy.testing import assert_allclose
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, RobertaConfig, RobertaModel

from d2l_bert import D2lBertConfig, D2lBertForPreTraining, train_wordpiece
from d2l_bert.__main__ import main
from d2l_bert.inference import attention
from d2l_bert.inference import embed as module
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.messages import UserError
from d2l_bert.modeling.conversion import save_model
from d2l_bert.modeling.loading import load_encoder
from d2l_bert.tokenization.wordpiece import save_tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Small encoders on disk, ours and stock ones, with a tokenizer


WORDS = "the a crane is flying over an old tower while driver came home and left it near water again".split()
POSITIONS = 32


def write_encoders(folder):
    """Folders `ours`, `stock` and `roberta` with random weights that are large enough to make a difference."""
    tokenizer = train_wordpiece([" ".join(WORDS)] * 3, min_frequency=1)
    tokenizer.model_max_length = POSITIONS
    padding = tokenizer.pad_token_id
    sizes = {**SIZES, "vocab_size": len(tokenizer), "initializer_range": 0.3}
    sizes["max_position_embeddings"] = POSITIONS
    of_roberta = {**sizes, "type_vocab_size": 1, "pad_token_id": padding}
    of_roberta["max_position_embeddings"] = (
        POSITIONS + padding + 1
    )  # it counts positions from the padding token's id + 1
    for name in ("ours", "stock", "roberta"):
        (folder / name).mkdir(parents=True)
        save_tokenizer(tokenizer, folder / name)
    torch.manual_seed(0)
    save_model(D2lBertForPreTraining(D2lBertConfig(**sizes)), folder / "ours")
    BertModel(BertConfig(**sizes)).save_pretrained(folder / "stock")
    RobertaModel(RobertaConfig(**of_roberta)).save_pretrained(folder / "roberta")
    return folder


def embed(model, texts, **options):
    """What `embed` makes of a model and a file."""
    return module.embed(str(model), str(texts), EmbedConfig(**options))


def vectors_file(model, texts, file):
    """Write the vectors of a file's texts by a model to another file; returns its path."""
    embed(model, texts, output=str(file))
    return file


def write_json_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(folder, **options):
    return AutoModel.from_pretrained(folder, **options).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


def make_lines(count=60, seed=0):
    """Lines of very different lengths: some empty, some longer than the model reads."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        length = rng.choice([1, 2, 3, 5, 8, 13, 21, 60])
        lines.append(" ".join(rng.choices(WORDS, k=length)))
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
    table = pq.read_table(vectors_file(encoders / "ours", texts, tmp_path / "vectors.parquet"))
    assert table["text"].to_pylist() == make_lines()
    monkeypatch.undo()  # one group, and vectors that tests/promises compares with those of sentence-transformers
    expected = np.load(vectors_file(encoders / "ours", texts, tmp_path / "vectors.npy"))
    assert_allclose(np.array(table["vector"].to_pylist()), expected, atol=1e-5)
    assert table.schema.field("vector").type.list_size == 24


@pytest.mark.slow
def test_a_parquet_file_keeps_the_columns_of_a_table(encoders, tmp_path, fails, monkeypatch):
    (tmp_path / "rows.csv").write_text("id,text,note\n007,the crane,a\n008,a crane,\n")
    table = pq.read_table(vectors_file(encoders / "ours", tmp_path / "rows.csv", tmp_path / "rows.parquet"))
    assert table.column_names == ["id", "text", "note", "vector"]
    assert table["id"].to_pylist() == ["007", "008"]
    assert table["text"].to_pylist() == ["the crane", "a crane"]
    assert table["note"].to_pylist() == ["a", ""]
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 1)
    words = ["embed", encoders / "ours", tmp_path / "mixed.jsonl", "--output", tmp_path / "mixed.parquet"]
    for more in ('"x": "one"', '"x": 18446744073709551616', '"x": 1.5', '"x": 2, "y": 3'):
        (tmp_path / "mixed.jsonl").write_text(f'{{"text": "a", "x": 1}}\n{{"text": "b", {more}}}\n')
        assert "a column holds values of several kinds, or begins after the first rows" in fails(*words)


@pytest.mark.parametrize("cell", [{}, [{}], [{"a": {}}]], ids=str)
def test_what_parquet_has_no_form_for_is_said_before_any_work(cell, encoders, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(module, "vectors_of", lambda texts, *_: pytest.fail("computed") if texts else None)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a", "meta": cell}) + "\n")
    line = fails("embed", encoders / "ours", tmp_path / "rows.jsonl", "--output", tmp_path / "out.parquet")
    assert "has empty objects" in line
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.slow
def test_objects_with_names_of_their_own_make_no_parquet_file(encoders, tmp_path, fails):
    file = write_json_lines(
        tmp_path / "rows.jsonl", [{"text": "a", "x": {f"key {number}": 1}} for number in range(4097)]
    )
    line = fails("embed", encoders / "ours", file, "--output", tmp_path / "out.parquet")
    assert "more than 4,096 names in objects" in line


VECTOR_CELLS = [[9 * 10**399], [0.5] * 23, [[0.5] * 24], [float("nan")] * 24, [10**39] * 24, "a", None, {"a": 1}]


@pytest.mark.parametrize("cell", VECTOR_CELLS, ids=lambda cell: str(cell)[:20])
def test_a_row_with_no_vector_of_this_model_is_named(cell, encoders, tmp_path, fails):
    rows = [{"text": "a", "vector": [0.5] * 24}, {"text": "b", "vector": cell}]
    file = write_json_lines(tmp_path / "rows.jsonl", rows)
    line = fails("embed", encoders / "ours", file, "--nearest", "the crane")
    assert "row 2: column 'vector' holds no vectors of 24 finite numbers" in line


def nearest_shown(result):
    """The cosines and the numbers of the lines that `embed` shows, for each text."""
    shown = [[]]
    for line in result.report.splitlines():
        if line.startswith("nearest to"):
            shown.append([])
        else:
            cosine, _, number, *_ = line.split()
            shown[-1].append((float(cosine), int(number.replace(",", "")) - 1))
    return [each for each in shown if each]


def test_the_nearest_lines_are_those_of_the_largest_cosine_after_half_of_whitening(encoders, tmp_path):
    """Whitening is written here by the singular values of the centred vectors, not by the covariance."""
    lines = [line for line in make_lines(300, seed=1) if line.strip()]
    queries = [lines[3], "the crane"]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "all.txt").write_text("\n".join([*lines, *queries]) + "\n")
    vectors = np.load(vectors_file(encoders / "ours", tmp_path / "all.txt", tmp_path / "all.npy")).astype(np.float64)
    mean = vectors[: len(lines)].mean(0)
    _, values, directions = np.linalg.svd(vectors[: len(lines)] - mean, full_matrices=False)
    deviations = values / np.sqrt(len(lines) - 1)
    least = np.sqrt(1e-3) * deviations.max()
    even = (vectors - mean) @ directions.T / np.sqrt(np.maximum(deviations, least))
    even /= np.linalg.norm(even, axis=1, keepdims=True)
    all_cosines = even[len(lines) :] @ even[: len(lines)].T  # (queries, lines)
    shown = nearest_shown(embed(encoders / "ours", tmp_path / "lines.txt", nearest=queries, top_k=5))
    for found, cosines in zip(shown, all_cosines, strict=True):
        largest = pytest.approx(np.sort(cosines)[::-1][:5], abs=2e-4)
        assert [cosine for cosine, _ in found] == largest
        assert [cosines[number] for _, number in found] == largest


@pytest.mark.slow
def test_vectors_that_were_saved_find_the_same_lines_and_are_not_computed_again(
    encoders, tmp_path, monkeypatch, fails
):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(make_lines(200, seed=2)) + "\n")
    model = encoders / "ours"
    saved = vectors_file(model, lines, tmp_path / "saved.parquet")
    asked = {"nearest": ["the crane"], "top_k": 4}
    fresh = embed(model, lines, **asked)
    computed = []
    vectors_of = module.vectors_of

    def counted(texts, *more):
        computed.append(len(texts))
        return vectors_of(texts, *more)

    monkeypatch.setattr(module, "vectors_of", counted)
    assert nearest_shown(embed(model, saved, **asked)) == nearest_shown(fresh)
    assert computed == [1, module.COMPARED]  # the text, and some lines, by which another model is told
    assert "another model" in fails("embed", encoders / "stock", saved, "--nearest", "the crane")
    ours = pq.read_table(saved)
    theirs = pq.read_table(vectors_file(encoders / "stock", lines, tmp_path / "stock.parquet"))
    mixed = pa.concat_tables([ours.slice(0, 150), theirs.slice(150)])
    pq.write_table(mixed, tmp_path / "mixed.parquet")
    assert "another model" in fails("embed", model, tmp_path / "mixed.parquet", "--nearest", "the crane")
    assert "has vectors already" in fails("embed", model, saved, "--output", tmp_path / "again.parquet")
    for name, rows in (
        ("a.csv", "text,vector\na,of the eye\n"),
        ("a.jsonl", '{"text": "a", "vector": [1]}\n{"text": "b"}\n'),
    ):
        (tmp_path / name).write_text(rows)
        assert "'vector' holds no vectors" in fails("embed", model, tmp_path / name, "--nearest", "the crane")


def test_equal_lines_are_equally_near(encoders, tmp_path):
    (tmp_path / "lines.txt").write_text("the crane\n" * 120)
    (found,) = nearest_shown(embed(encoders / "ours", tmp_path / "lines.txt", nearest=["a crane"]))
    assert len({cosine for cosine, _ in found}) == 1
    assert not np.isnan(found[0][0])


@pytest.mark.slow
def test_an_error_in_the_middle_leaves_no_file(encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 500 * 256)
    (tmp_path / "late.txt").write_bytes(b"the crane\n" * 2000 + "Zürich".encode("latin-1"))
    out = tmp_path / "out"
    out.mkdir()
    for name in ("vectors.npy", "vectors.parquet"):
        with pytest.raises(UserError, match="late.txt: line 2,001: .*0xfc"):
            vectors_file(encoders / "ours", tmp_path / "late.txt", out / name)
    assert list(out.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# `attention`: the picture of all heads, and the distance of a word's vectors in two texts


FIRST = "a crane is flying"
SECOND = "a crane driver came"


@pytest.mark.parametrize("name", ["ours", "stock", "roberta"])
def test_the_weights_of_all_heads_are_read_with_their_tokens_and_segments(encoders, name):
    model, tokenizer = load_encoder(str(encoders / name), attn_implementation="eager")
    tokens, border, weights = attention.attention_of(name, model, tokenizer, FIRST, SECOND)
    assert tokens == ["[CLS]", *FIRST.split(), "[SEP]", *SECOND.split(), "[SEP]"]
    assert border == 6
    assert weights.shape == (2, 3, 11, 11)
    assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert weights.std() > 0.01
    assert attention.attention_of(name, model, tokenizer, FIRST)[1] == 0


@pytest.mark.slow
def test_a_token_is_drawn_in_a_font_that_has_it_and_dollars_are_text(encoders, tmp_path, monkeypatch, recwarn):
    """What no font has is said, and another character drawn; as a formula `$x_y$` is an error."""
    fonts = font_manager.fontManager
    installed = font_manager.fontManager.ttflist
    stix, dejavu = (font_manager.get_font(fonts.findfont(name)) for name in ("STIXGeneral", "DejaVu Sans"))
    only_in_stix = [code for code in stix.get_charmap() if not dejavu.get_char_index(code)]
    rare = next(filter(str.isprintable, map(chr, only_in_stix)))
    weights = np.ones((1, 1, 2, 2))
    monkeypatch.setattr(attention, "attention_of", lambda *_: (["$x_y$", rare], 0, weights))
    of_matplotlib = [font for font in installed if "matplotlib" in str(font.fname)]
    others = [font for font in of_matplotlib if not font.name.startswith("STIX")]
    for drawn, known in (("\N{REPLACEMENT CHARACTER}", others), (rare, installed)):
        monkeypatch.setattr(fonts, "ttflist", known)
        figure, said = attention.attention_figure(str(encoders / "stock"), "a crane")
        figure.savefig(tmp_path / "figure.png")
        assert (rare in said) == (rare != drawn)
        assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["$x_y$", drawn]
    assert not [each for each in recwarn if "Glyph" in str(each.message)]


@pytest.mark.parametrize("name", ["ours", "stock", "roberta"])
def test_a_words_vectors_are_compared_layer_by_layer(encoders, capsys, name):
    texts = ["The Crane is flying over the crane", "a crane driver"]
    assert main(["attention", str(encoders / name), *texts, "--word", "crane"]) == 0
    printed = capsys.readouterr().out
    assert "[Crane]" in printed and "a [crane] driver" in printed and "tokens: crane" in printed
    model, tokenizer = load(encoders / name)
    vectors = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        vectors.append([layer[0, 2] for layer in hidden])  # [CLS], the or a, crane
    rows = re.findall(r"^  (embeddings|layer \d) +(-?\d\.\d+) +(-?\d\.\d+)$", printed, re.MULTILINE)
    assert [row for row, *_ in rows] == ["embeddings", "layer 1", "layer 2"]
    for (_, cosine, distance), first, second in zip(rows, *vectors, strict=True):
        expected = float(torch.cosine_similarity(first, second, dim=0))
        assert float(cosine) == pytest.approx(expected, abs=6e-4)
        assert float(distance) == pytest.approx(1 - expected, abs=6e-4)
