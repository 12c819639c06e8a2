"""The trained WordPiece vocabulary: exact and reproducible, in files that every BERT tokenizer can read."""

import random
import re
import tracemalloc
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertTokenizer

from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.wordpiece import SPECIAL_TOKENS, save_tokenizer, train_wordpiece


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_texts(seed=0, sentences=300):
    """
    Sentences of made-up words: every letter both starts words and continues them; many pairs are equally frequent.
    """
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(400)]
    words += [a + b for a, b in zip(LETTERS, reversed(LETTERS), strict=True)]
    return [*(" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(sentences)), " ".join(words)]


def test_a_small_text_gives_exactly_the_pieces_worked_out_by_hand():
    """In 9 hug, 5 pug, 12 pun, 9 bun and 5 hugs, ##u ##n is the most frequent pair (21 times).

    Then come ##u ##g (19; p ##u had 17 and has 5 left), h ##ug (14) and p ##un (12). That makes 20 entries.
    """
    tokenizer = train_wordpiece(["hug " * 9 + "pug " * 5 + "pun " * 12 + "bun " * 9 + "hugs " * 5], vocab_size=20)
    characters = ["b", "g", "h", "n", "p", "s", "u", "##g", "##n", "##s", "##u"]
    expected = [*SPECIAL_TOKENS, *characters, "##un", "##ug", "hug", "pun"]
    assert tokenizer.get_vocab() == {piece: index for index, piece in enumerate(expected)}
    assert tokenizer.tokenize("Hugs bug pun mug") == ["hug", "##s", "b", "##ug", "pun", "[UNK]"]
    assert unknown_share(tokenizer, ["Hugs bug", "pun mug."]) == 4 / 14  # mug and the full stop


def test_a_vocab_size_below_the_alphabet_is_refused_with_the_smallest_possible_one():
    with pytest.raises(ValueError, match="vocab_size 20 is below the alphabet") as caught:
        train_wordpiece(make_texts(), vocab_size=20)
    least = int(re.search(r"need (\d+) entries", str(caught.value)).group(1))
    assert least == 5 + 26 + 26 + 1  # special tokens, letters at the start and inside of words, the full stop
    assert len(train_wordpiece(make_texts(), vocab_size=least)) == least
    with pytest.raises(ValueError, match="below the alphabet"):
        train_wordpiece(make_texts(), vocab_size=least - 1)


def test_an_iterator_gives_the_same_tokenizer_and_its_texts_are_never_held_in_memory():
    of_list, of_iterator = (train_wordpiece(make(make_texts()), vocab_size=400) for make in (list, iter))
    assert of_list.backend_tokenizer.to_str() == of_iterator.backend_tokenizer.to_str()
    tracemalloc.start()
    train_wordpiece((f"{'ab cd ' * 100}{number % 10}" for number in range(2500)), vocab_size=40)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # the text has 1.5 million characters
    tracemalloc.stop()


def test_vocab_txt_alone_makes_the_same_tokenizer(tmp_path):
    tokenizer = train_wordpiece(make_texts(), vocab_size=400)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    loaded, texts = BertTokenizer.from_pretrained(tmp_path), make_texts(seed=1, sentences=20)
    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=5))
def test_any_text_can_be_trained_on_and_has_no_unknown_token_afterwards(texts):
    """Except for white space and the characters that BERT removes."""
    has_text = any(not (c.isspace() or unicodedata.category(c)[0] in "CZ") for c in "".join(texts))
    try:
        tokenizer = train_wordpiece(texts, lowercase=False)
    except ValueError as error:
        assert "no text" in str(error) and not has_text
        return
    for text in texts:
        assert tokenizer.unk_token not in tokenizer.tokenize(text.replace("[UNK]", ""))
