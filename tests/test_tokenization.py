"""The trained WordPiece vocabulary: exact and reproducible, in files that every BERT tokenizer can read."""

import random
import re
import tracemalloc
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer

from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.encoding import SentenceEncoder
from d2l_bert.tokenization.wordpiece import SPECIAL_TOKENS, save_tokenizer, text_backend, train_wordpiece


# The first test below derives its pieces: b g h n p s u, ##g ##n ##s ##u, ##un ##ug hug pun.
HUGS = ["hug " * 9 + "pug " * 5 + "pun " * 12 + "bun " * 9 + "hugs " * 5]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_texts(seed=0, sentences=300):
    """
    Sentences of made-up words: every letter both starts words and continues them; many pairs are equally frequent.
    """
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(400)]
    words += [a + b for a, b in zip(LETTERS, reversed(LETTERS), strict=True)]
    texts = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(sentences)]
    return [*texts, " ".join(words)]


def pieces_of(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    return sorted(vocabulary, key=vocabulary.get)


@pytest.fixture(scope="module")
def tokenizer():
    return train_wordpiece(make_texts(), vocab_size=400)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary


def test_a_small_text_gives_exactly_the_pieces_worked_out_by_hand():
    """In 9 hug, 5 pug, 12 pun, 9 bun and 5 hugs, ##u ##n is the most frequent pair (21 times).

    Then come ##u ##g (19; p ##u had 17 and has 5 left), h ##ug (14) and p ##un (12). That makes 20 entries.
    """
    tokenizer = train_wordpiece(HUGS, vocab_size=20)
    characters = ["b", "g", "h", "n", "p", "s", "u", "##g", "##n", "##s", "##u"]
    assert pieces_of(tokenizer) == [*SPECIAL_TOKENS, *characters, "##un", "##ug", "hug", "pun"]
    assert tokenizer.tokenize("Hugs bug pun mug") == ["hug", "##s", "b", "##ug", "pun", "[UNK]"]


def test_a_vocab_size_below_the_alphabet_is_refused_with_the_smallest_possible_one():
    with pytest.raises(ValueError, match="vocab_size 20 is below the alphabet") as caught:
        train_wordpiece(make_texts(), vocab_size=20)
    least = int(re.search(r"need (\d+) entries", str(caught.value)).group(1))
    assert least == 5 + 26 + 26 + 1  # special tokens, letters at the start and inside of words, the full stop
    assert len(train_wordpiece(make_texts(), vocab_size=least)) == least
    with pytest.raises(ValueError, match="below the alphabet"):
        train_wordpiece(make_texts(), vocab_size=least - 1)


@pytest.mark.slow
def test_an_iterator_gives_the_same_bytes_and_its_texts_are_never_held_in_memory(folder, tmp_path):
    save_tokenizer(train_wordpiece(iter(make_texts()), vocab_size=400), tmp_path)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    tracemalloc.start()
    train_wordpiece((f"{'ab cd ' * 100}{number % 10}" for number in range(2500)), vocab_size=40)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # the text has 1.5 million characters
    tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_vocab_txt_alone_makes_the_same_tokenizer(tokenizer, folder, tmp_path):
    (tmp_path / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes())
    loaded = BertTokenizer.from_pretrained(tmp_path)
    for text in make_texts(seed=1, sentences=20):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


words = st.text(LETTERS, min_size=1, max_size=20)


@given(words)
def test_a_word_is_split_into_the_longest_pieces_from_the_left(tokenizer, word):
    """Compared with BERT's WordPiece (google-research/bert, tokenization.py), written out here."""
    vocabulary, expected, rest = tokenizer.get_vocab(), [], word
    while rest:
        prefix = "##" if expected else ""
        piece = next(prefix + rest[:end] for end in range(len(rest), 0, -1) if prefix + rest[:end] in vocabulary)
        expected.append(piece)
        rest = rest[len(piece) - len(prefix) :]
    assert tokenizer.tokenize(word) == expected


@settings(max_examples=50)
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


# ---------------------------------------------------------------------------------------------------------------------
# The report on a tokenizer


def counted(tokenizer, texts, word_unit):
    """The numbers of words and of tokens in some texts."""
    ids, _, words = SentenceEncoder(text_backend(tokenizer), word_unit)(texts)
    return words.sum(), len(ids)


def test_the_report_on_a_small_text_is_the_one_worked_out_by_hand():
    """Hugs -> hug ##s, bug -> b ##ug, pun, mug -> [UNK], . -> [UNK]: 4 words, 7 tokens, and 4 of 14 characters."""
    tokenizer = train_wordpiece(HUGS, vocab_size=20)
    texts = ["Hugs bug", "pun mug."]
    assert counted(tokenizer, texts, "white space") == (4, 7) and counted(tokenizer, texts, "tokenizer") == (5, 7)
    assert unknown_share(tokenizer, texts) == 4 / 14


def test_the_report_agrees_with_what_the_tokenizer_encodes(tokenizer):
    texts = [*make_texts(seed=1, sentences=50), "Ünknown: 7 ж, 漢字"]
    encodings = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    words = sum(len(set(encodings.word_ids(number))) for number in range(len(texts)))
    ids = [token for row in encodings["input_ids"] for token in row]
    assert counted(tokenizer, texts, "tokenizer") == (words, len(ids))
    spans = [span for row in encodings["offset_mapping"] for span in row]
    unknown = sum(end - start for id, (start, end) in zip(ids, spans, strict=True) if id == tokenizer.unk_token_id)
    assert unknown_share(tokenizer, iter(texts)) == unknown / sum(len("".join(text.split())) for text in texts) > 0
