"""`d2l-bert attention`: the picture of all heads, and the distance of a word's vectors in two texts."""

import re

import numpy as np
import pytest
import torch
from encoders import load, write_encoders
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.training.load_models import load_encoder
from d2l_bert.training.vectors import attention
from d2l_bert.training.vectors.attention import Panels, attention_of, draw, draw_attention
from d2l_bert.training.vectors.config import AttentionConfig


pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = "a crane is flying", "a crane driver came"


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures, save = [], Figure.savefig

    def keep(self, path, **options):
        figures.append(self)
        save(self, path, **{**options, "dpi": 20})

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def softmax_by_hand(folder, text):
    """The attention weights of stock BERT's first layer (heads, T, T), from the equation in the book (11.3)."""
    model, tokenizer = load(folder)
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        hidden = model.embeddings(encoded["input_ids"])[0]
        layer = model.encoder.layer[0].attention.self
        query, key = layer.query(hidden), layer.key(hidden)
        heads, width = model.config.num_attention_heads, hidden.shape[1] // model.config.num_attention_heads
        query, key = (part.view(-1, heads, width).transpose(0, 1) for part in (query, key))
        return torch.softmax(query @ key.transpose(1, 2) / width**0.5, -1)


@pytest.mark.parametrize("name", ["ours", "stock", "roberta"])
def test_the_weights_of_all_heads_are_read_with_their_tokens_and_segments(encoders, name):
    model, tokenizer = load_encoder(str(encoders / name), attn_implementation="eager")
    found = attention_of(name, model, tokenizer, FIRST, SECOND)
    assert found.tokens == ["[CLS]", *FIRST.split(), "[SEP]", *SECOND.split(), "[SEP]"]
    assert sum(found.segments) == (5 if name != "roberta" else len(found.tokens) - found.segments.index(1))
    assert found.tokens[found.segments.index(1)] == "a" and found.segments == sorted(found.segments)
    assert found.weights.shape == (2, 3, 11, 11)
    assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    assert found.weights.std() > 0.01
    alone = attention_of(name, model, tokenizer, FIRST)
    if name == "stock":
        assert_allclose(alone.weights[0], softmax_by_hand(encoders / name, FIRST), atol=1e-5)


def texts_in(figure):
    return [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]


def test_the_picture_has_a_panel_for_each_head_with_tokens_title_and_segments(encoders, tmp_path, drawn, capsys):
    out = tmp_path / "grid.png"
    assert main(["attention", str(encoders / "ours"), FIRST, SECOND, f"--output={out}"]) == 0
    assert capsys.readouterr().out == f"{out}: attention of 6 of 6 heads over 11 tokens\n"
    assert out.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    panels = [axes for axes in figure.axes if axes.images]
    assert [panel.get_title() for panel in panels] == [f"layer {n}, head {h}" for n in (1, 2) for h in (1, 2, 3)]
    model, tokenizer = load_encoder(str(encoders / "ours"), attn_implementation="eager")
    expected = attention_of("ours", model, tokenizer, FIRST, SECOND)
    for number, panel in enumerate(panels):
        assert_allclose(np.asarray(panel.images[0].get_array()), expected.weights[number // 3, number % 3], atol=1e-6)
    assert [label.get_text() for label in panels[0].get_yticklabels()] == expected.tokens
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == expected.tokens
    shown = " ".join(texts_in(figure))
    for words in ("of ours", "query", "key", "segment A", "segment B"):
        assert words in shown


@pytest.mark.parametrize(
    ("options", "panels"),
    [
        (["--layer=2", "--head=3"], ["layer 2, head 3"]),
        (["--layer=2"], [f"layer 2, head {n}" for n in (1, 2, 3)]),
        (["--head=1"], ["layer 1, head 1", "layer 2, head 1"]),
    ],
)
def test_a_layer_or_a_head_is_enlarged(encoders, tmp_path, drawn, monkeypatch, options, panels):
    monkeypatch.chdir(tmp_path)
    assert main(["attention", str(encoders / "stock"), FIRST, *options]) == 0
    assert (tmp_path / "attention.png").exists()
    (figure,) = drawn
    images = [axes for axes in figure.axes if axes.images]
    model, tokenizer = load_encoder(str(encoders / "stock"), attn_implementation="eager")
    weights = attention_of("stock", model, tokenizer, FIRST).weights
    for panel, name in zip(images, panels, strict=True):
        layer, head = (int(number) - 1 for number in re.findall(r"\d", name))
        assert panel.get_title() == name
        assert_allclose(np.asarray(panel.images[0].get_array()), weights[layer, head], atol=1e-6)


@pytest.mark.parametrize(("tokens", "layers", "heads"), [(510, 2, 2), (300, 1, 1), (20, 60, 2)])
def test_a_picture_has_no_more_than_8000_pixels_a_side(tokens, layers, heads, monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi, format: saved.extend(dpi * self.get_size_inches()))
    names, weights = [f"word{n}" for n in range(tokens)], np.full((layers, heads, tokens, tokens), 1 / tokens)
    draw(Panels("model", names, [0] * tokens, weights, range(layers), range(heads)), tmp_path / "large.png")
    assert 1500 < max(saved) <= (8000.5 if layers > 2 else 4000)


def test_a_picture_that_cannot_be_written_leaves_no_file(encoders, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(attention, "draw", fail)
    with pytest.raises(ValueError, match="grid.png: cannot be written .No space left on device.; free some space"):
        draw_attention(str(encoders / "ours"), FIRST, None, AttentionConfig(output=str(tmp_path / "grid.png")))
    assert list(tmp_path.iterdir()) == []


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


def test_a_full_stop_is_a_word_behind_letters(encoders):
    model, tokenizer = load_encoder(str(encoders / "ours"))
    for word, shown in ((".", "it left[.]"), ("left.", "it [left.]")):
        assert attention.word_in_text("ours", model, tokenizer, word, "it left.").shown == shown
    with pytest.raises(UserError, match="word 'eft.': is not in"):
        attention.word_in_text("ours", model, tokenizer, "eft.", "it left.")


def test_a_word_of_several_pieces_has_their_mean(encoders):
    model, tokenizer = load_encoder(str(encoders / "ours"))
    word = "cranewater"
    assert len(tokenizer.tokenize(word)) > 1
    found = attention.word_in_text("ours", model, tokenizer, word, f"the {word} left")
    count = len(tokenizer.tokenize(word))
    assert found.pieces == tokenizer.tokenize(word)
    with torch.no_grad():
        hidden = model(**tokenizer(f"the {word} left", return_tensors="pt"), output_hidden_states=True).hidden_states
    for got, layer in zip(found.vectors, hidden, strict=True):
        torch.testing.assert_close(got, layer[0, 2 : 2 + count].mean(0))


def test_too_long_texts_and_numbers_beyond_the_model_are_refused(encoders, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    ours = encoders / "ours"
    assert "the text has 42 tokens, 10 more than the model reads (32); give less text" in fails(
        "attention", ours, "a " * 40
    )
    assert "the two texts have 43 tokens, 11 more" in fails("attention", ours, "a " * 20, "a " * 20)
    assert "layer 3: " in (line := fails("attention", ours, FIRST, "--layer=3")) and "give one from 1 to 2" in line
    assert "head 4: " in (line := fails("attention", ours, FIRST, "--head=4")) and "give one from 1 to 3" in line
    line = fails("attention", ours, FIRST, "he just left", "--word=crane")
    assert "word 'crane': is not in 'he just left'; give a word of both texts" in line
    assert "is not in" in fails("attention", ours, "cranes fly", SECOND, "--word=crane")
    assert list(tmp_path.iterdir()) == []
