"""`d2l-bert attention`: the picture of all heads, and the distance of a word's vectors in two texts."""

import re

import numpy as np
import pytest
import torch
from encoders import load, write_encoders
from matplotlib import font_manager
from numpy.testing import assert_allclose

from d2l_bert.__main__ import main
from d2l_bert.inference import attention
from d2l_bert.modeling.loading import load_encoder


pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = "a crane is flying", "a crane driver came"


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.mark.parametrize("name", ["ours", "stock", "roberta"])
def test_the_weights_of_all_heads_are_read_with_their_tokens_and_segments(encoders, name):
    model, tokenizer = load_encoder(str(encoders / name), attn_implementation="eager")
    tokens, border, weights = attention.attention_of(name, model, tokenizer, FIRST, SECOND)
    assert tokens == ["[CLS]", *FIRST.split(), "[SEP]", *SECOND.split(), "[SEP]"] and border == 6
    assert weights.shape == (2, 3, 11, 11)
    assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert weights.std() > 0.01
    assert attention.attention_of(name, model, tokenizer, FIRST)[1] == 0


def test_a_token_is_drawn_in_a_font_that_has_it_and_dollars_are_text(encoders, tmp_path, monkeypatch, recwarn):
    """What no font has is said, and another character drawn; as a formula `$x_y$` is an error."""
    fonts, installed = font_manager.fontManager, font_manager.fontManager.ttflist
    stix, dejavu = (font_manager.get_font(fonts.findfont(name)) for name in ("STIXGeneral", "DejaVu Sans"))
    rare = next(c for c in map(chr, stix.get_charmap()) if not dejavu.get_char_index(ord(c)) and c.isprintable())
    monkeypatch.setattr(attention, "attention_of", lambda *_: (["$x_y$", rare], 0, np.ones((1, 1, 2, 2))))
    others = [font for font in installed if not font.name.startswith("STIX") and "matplotlib" in str(font.fname)]
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
