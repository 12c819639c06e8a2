"""`pretrain --save_words`: how words are counted, and which weights are saved."""

import json

import numpy as np
import pytest
from runs import run

from d2l_bert.messages import UserError
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.checkpoint import folder_name, word_marks
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import words_in
from d2l_bert.training.data.order import EpochPairs


OPTIONS = ("--max_steps=12", "--save_steps=5", "--save_total_limit=1", "--mixed_precision=no")


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_numbers_of_words_are_read_and_named_as_babylm_names_them():
    assert word_marks(["500", "10k", "1_500_000", "2m", "1000M"]) == [500, 10**4, 1_500_000, 2 * 10**6, 10**9]
    names = {500: "chck_500", 10**4: "chck_10k", 10**6: "chck_1M", 1_500_000: "chck_1500k", 10**9: "chck_1000M"}
    for words, name in names.items():
        assert folder_name(words) == name and word_marks([name.removeprefix("chck_")]) == [words]


@pytest.mark.parametrize("entries", [["2M", "1M"], ["1M", "1_000_000"], ["1k", "1K"]])
def test_numbers_that_do_not_increase_are_refused(entries):
    with pytest.raises(UserError, match=f"save_words: {entries[1]} must be more than the {entries[0]} before it"):
        word_marks(entries)


def test_words_are_counted_by_each_documents_words_a_token(tmp_path):
    """Twenty texts of 160 words, of which each has words of another length, so that tokens a word differ."""
    (tmp_path / "text").mkdir()
    for number, letter in enumerate("abcdefghijklmnopqrst"):
        words = " ".join(letter * (1 + number) + " of the book." for _ in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    text = prepare(TextConfig(corpus=[str(tmp_path / "text")], vocab_size=60, preprocessing_num_workers=1))
    corpus = text.train
    pairs = EpochPairs(corpus, PretrainConfig(objective="nsp"), 32).window(0, 0)
    sizes = np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))
    words_of_tokens = np.repeat(160 / sizes, sizes)
    expected = sum(
        words_of_tokens[pair[f"{side}_start"] : pair[f"{side}_end"]].sum() for pair in pairs for side in "ab"
    )
    assert (np.diff(corpus.words_before) == 160).all() and len(corpus.ids) > 1.1 * corpus.words_before[-1]
    assert words_in(corpus, pairs) == pytest.approx(expected, rel=1e-9) and expected > 500


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def test_the_weights_are_those_of_the_step_that_reached_the_words(books, tmp_path):
    """Of a run that saves after 600, 1,000 and 1,001 words; 99M are more than it sees."""
    whole, again = tmp_path / "whole", tmp_path / "run"
    run(books, whole, *OPTIONS, "--save_words", "600", "1k", "1_001", "99M")
    step = json.loads((whole / "chck_600" / "words_seen.json").read_text())["step"]
    run(books, again, *OPTIONS, f"--save_steps={step}", "--save_total_limit=99")
    weights = (again / f"checkpoint-{step}" / "model.safetensors").read_bytes()
    assert (whole / "chck_600" / "model.safetensors").read_bytes() == weights
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert sorted(path.name for path in whole.glob("chck_*")) == ["chck_1001", "chck_1k", "chck_600"]
    assert not list(again.glob("chck_*"))
