"""The trained WordPiece vocabulary: exact and reproducible, in files that every BERT tokenizer can read."""

import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer

from d2l_bert.tokenization.wordpiece import (
    SPECIAL_TOKENS,
    added_entries,
    describe,
    extend_wordpiece,
    save_tokenizer,
    train_wordpiece,
)


# The first test below derives its pieces: b g h n p s u, ##g ##n ##s ##u, ##un ##ug hug pun.
HUGS = ["hug " * 9 + "pug " * 5 + "pun " * 12 + "bun " * 9 + "hugs " * 5]
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# Trains on `make_texts` in a new process.
TRAIN_ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_tokenization import make_texts
from d2l_bert.tokenization.wordpiece import save_tokenizer, train_wordpiece
save_tokenizer(train_wordpiece(make_texts(), vocab_size=400), sys.argv[2])
"""


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


def test_special_tokens_have_the_ids_0_to_4(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = ("pad", "unk", "cls", "sep", "mask")
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [80, 150, 400])
def test_vocab_size_is_reached_if_the_text_is_large_enough(size):
    assert len(train_wordpiece(make_texts(), vocab_size=size)) == size


def test_a_small_text_gives_a_smaller_vocabulary():
    assert pieces_of(train_wordpiece(["ab"] * 3, vocab_size=8192)) == [*SPECIAL_TOKENS, "a", "b", "##b", "ab"]


def test_pairs_rarer_than_min_frequency_are_not_merged():
    text = ["ab ab ab cd cd"]
    assert {"ab", "cd"} <= set(pieces_of(train_wordpiece(text, min_frequency=2)))
    often = set(pieces_of(train_wordpiece(text, min_frequency=3)))
    assert "ab" in often and "cd" not in often


def test_a_vocab_size_below_the_alphabet_is_refused_with_the_smallest_possible_one():
    with pytest.raises(ValueError, match="vocab_size 20 is below the alphabet") as caught:
        train_wordpiece(make_texts(), vocab_size=20)
    least = int(re.search(r"need (\d+) entries", str(caught.value)).group(1))
    assert least == 5 + 26 + 26 + 1  # special tokens, letters at the start and inside of words, the full stop
    assert len(train_wordpiece(make_texts(), vocab_size=least)) == least
    with pytest.raises(ValueError, match="below the alphabet"):
        train_wordpiece(make_texts(), vocab_size=least - 1)


@pytest.mark.parametrize("texts", [[], [""], ["  \n\t", "\u3000"]], ids=["none", "empty", "white space"])
def test_a_text_without_words_is_refused(texts):
    with pytest.raises(ValueError, match="no text"):
        train_wordpiece(iter(texts))


def test_every_piece_but_special_tokens_and_characters_occurs_in_the_text(tokenizer):
    words = set(re.findall(r"[a-z]+", " ".join(make_texts()).lower()))
    merged = [piece for piece in pieces_of(tokenizer)[5:] if len(piece.removeprefix("##")) > 1]
    assert len(merged) > 300
    for piece in merged:
        if piece.startswith("##"):
            assert any(piece[2:] in word[1:] for word in words), piece
        else:
            assert any(word.startswith(piece) for word in words), piece


def test_any_iterator_of_text_can_be_trained_on(tokenizer):
    for texts in (iter(make_texts()), (text for text in make_texts()), tuple(make_texts())):
        assert train_wordpiece(texts, vocab_size=400).get_vocab() == tokenizer.get_vocab()


class Texts:
    """An iterable that reads its strings anew for each iterator."""

    def __init__(self, read):
        self.read = read

    def __iter__(self):
        return self.read()


def test_texts_that_can_be_read_again_give_the_same_bytes_and_are_never_held_in_memory(folder, tmp_path):
    reads = []

    def read():
        reads.append(len(reads))
        return iter(make_texts())

    save_tokenizer(train_wordpiece(Texts(read), vocab_size=400), tmp_path)
    assert len(reads) == 3
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name

    def peak(texts):
        tracemalloc.start()
        train_wordpiece(texts, vocab_size=40)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    def long_text():
        return (f"{'ab cd ' * 100}{number % 10}" for number in range(2500))

    assert peak(Texts(long_text)) < 1_000_000 < 1_400_000 < peak(long_text())  # the text has 1.5 million characters


# ---------------------------------------------------------------------------------------------------------------------
# Case, accents, rare characters


def test_case_is_folded_unless_lowercase_is_false():
    text = ["Anna saw anna"] * 5
    folded, kept = train_wordpiece(text), train_wordpiece(text, lowercase=False)
    assert folded.tokenize("Anna anna ANNA") == ["anna"] * 3
    assert kept.tokenize("Anna anna") == ["Anna", "anna"]
    assert not any(piece.lower() != piece for piece in pieces_of(folded)[5:])


@pytest.mark.parametrize(
    ("lowercase", "strip_accents", "expected"),
    [
        (True, None, "cafe"),  # like BERT's uncased models
        (True, False, "café"),
        (False, None, "Café"),  # like BERT's cased models
        (False, True, "Cafe"),
    ],
)
def test_accents_are_stripped_on_request_and_by_default_where_case_is_folded(
    lowercase, strip_accents, expected, tmp_path
):
    tokenizer = train_wordpiece(["Café"] * 5, lowercase=lowercase, strip_accents=strip_accents)
    assert tokenizer.tokenize("Café") == [expected]
    assert ("é" in "".join(pieces_of(tokenizer))) == ("é" in expected)
    save_tokenizer(tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("Café") == [expected]


def test_the_rarest_characters_beyond_limit_alphabet_become_unknown():
    text = ["aaa aab abc"] * 5 + ["ж"]
    assert "[UNK]" not in train_wordpiece(text).tokenize("a b c ж")
    assert train_wordpiece(text, limit_alphabet=3).tokenize("a b c ж") == ["a", "b", "c", "[UNK]"]
    assert train_wordpiece(text, limit_alphabet=2).tokenize("a b c ж") == ["a", "b", "[UNK]", "[UNK]"]


def test_special_tokens_in_the_text_give_no_pieces_and_no_second_entry():
    tokenizer = train_wordpiece(["a [MASK] ##ab [CLS]"] * 5)
    assert pieces_of(tokenizer)[:5] == list(SPECIAL_TOKENS)
    assert tokenizer.tokenize("##ab") == ["#", "#", "ab"]


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(folder, tmp_path):
    """Hash maps of the trainer and of Python have another seed in every process, which must not show in the files."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-c", TRAIN_ELSEWHERE, os.path.dirname(__file__), str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=120)
    names = {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_vocab_txt_holds_each_piece_on_the_line_of_its_id(tokenizer, folder):
    assert (folder / "vocab.txt").read_bytes().decode("utf-8").split("\n") == [*pieces_of(tokenizer), ""]


def test_the_folder_names_a_stock_bert_tokenizer(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "BertTokenizer"
    assert config["model_max_length"] == 512
    assert "auto_map" not in config


@pytest.mark.parametrize("loader", [AutoTokenizer, BertTokenizer])
def test_the_saved_folder_loads_in_transformers_with_the_same_ids(tokenizer, folder, loader):
    loaded = loader.from_pretrained(folder)
    assert type(loaded) is BertTokenizer
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.model_max_length == 512
    texts = [*make_texts(seed=1, sentences=20), "Unknown: 7 ж", "A [MASK] here"]
    assert [loaded(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
    assert loaded.mask_token_id in loaded("A [MASK] here")["input_ids"]


def test_vocab_txt_alone_makes_the_same_tokenizer(tokenizer, folder, tmp_path):
    (tmp_path / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes())
    loaded = BertTokenizer.from_pretrained(tmp_path)
    for text in make_texts(seed=1, sentences=20):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_model_max_length_is_the_length_after_truncation(tokenizer):
    short = train_wordpiece(make_texts(), vocab_size=100, model_max_length=16)
    assert len(short(make_texts()[-1], truncation=True)["input_ids"]) == 16
    assert len(tokenizer(make_texts()[-1], truncation=True)["input_ids"]) == 512


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def test_a_pair_is_encoded_as_cls_a_sep_b_sep_with_its_segments():
    tokenizer = train_wordpiece(["ab cd ef"] * 5)
    encoded = tokenizer("ab cd", "ef")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["[CLS]", "ab", "cd", "[SEP]", "ef", "[SEP]"]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert encoded["attention_mask"] == [1] * 6
    alone = tokenizer("ab")
    assert tokenizer.convert_ids_to_tokens(alone["input_ids"]) == ["[CLS]", "ab", "[SEP]"]


words = st.text(LETTERS, min_size=1, max_size=20)


@given(st.lists(words, min_size=1, max_size=10))
def test_words_over_the_alphabet_survive_encoding_and_decoding(tokenizer, words):
    text = " ".join(words)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


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


def test_the_report_on_a_small_text_is_the_one_worked_out_by_hand():
    """Hugs -> hug ##s, bug -> b ##ug, pun, mug -> [UNK], . -> [UNK]: 5 words, 7 tokens."""
    report = describe(train_wordpiece(HUGS, vocab_size=20), ["Hugs bug", "pun mug."])
    assert report == {
        "words": 5,
        "pieces_per_word": 7 / 5,
        "unknown_share": 2 / 7,
    }


def test_the_report_agrees_with_what_the_tokenizer_encodes(tokenizer):
    texts = [*make_texts(seed=1, sentences=50), "Ünknown: 7 ж, 漢字"]
    encodings = tokenizer(texts, add_special_tokens=False)
    words = sum(len(set(encodings.word_ids(number))) for number in range(len(texts)))
    ids = [token for row in encodings["input_ids"] for token in row]
    report = describe(tokenizer, iter(texts))
    assert report["words"] == words and report["pieces_per_word"] == len(ids) / words
    assert report["unknown_share"] == ids.count(tokenizer.unk_token_id) / len(ids) > 0


def test_a_mask_token_in_the_text_is_text():
    pieces = [*SPECIAL_TOKENS, "[unused17]", "[", "mask", "]", "##longest"]
    report = describe(BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}), ["[MASK]"])
    assert report == {
        "words": 3,
        "pieces_per_word": 1.0,
        "unknown_share": 0.0,
    }


def test_the_report_on_a_text_without_words_divides_by_nothing(tokenizer):
    report = describe(tokenizer, ["  "])
    assert (report["words"], report["pieces_per_word"], report["unknown_share"]) == (0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Extension

# Tokens saved: pugs 2 x 2, hugs 3 x 1, bun and gun 2 x 1. Not added: pun (it is a piece), mugs (m is unknown) and
# bugs (it occurs once).
MORE_HUGS = ["Pugs hugs pugs, hugs bun!", "gun bun HUGS gun", "pun pun pun pun mugs mugs bugs"]


def test_the_words_that_save_the_most_tokens_are_added_after_the_old_entries():
    old = train_wordpiece(HUGS, vocab_size=20)
    for count, added in ((3, ["pugs", "hugs", "bun"]), (99, ["pugs", "hugs", "bun", "gun"]), (0, [])):
        new = extend_wordpiece(old, iter(MORE_HUGS), count)
        assert pieces_of(new) == [*pieces_of(old), *added]
        assert added_entries(old, new) == added
        for word in added:
            assert new.tokenize(word.title()) == [word]
    assert len(old) == 20 and old.tokenize("pugs") == ["p", "##ug", "##s"]
    rarer = extend_wordpiece(old, MORE_HUGS, 99, min_frequency=1)
    assert added_entries(old, rarer) == ["pugs", "hugs", "bugs", "bun", "gun"]
    assert added_entries(old, extend_wordpiece(old, MORE_HUGS, 99, min_frequency=3)) == ["hugs"]


def test_only_words_that_start_with_an_added_word_are_split_differently(tokenizer):
    texts = make_texts(seed=3)
    new = extend_wordpiece(tokenizer, texts, 30)
    added = added_entries(tokenizer, new)
    assert len(added) == 30
    changed = set()
    for word in set(re.findall("[a-z]+", " ".join(texts).lower())):
        if new.tokenize(word) != tokenizer.tokenize(word):
            assert word.startswith(tuple(added)), word
            changed.add(word)
    assert changed >= set(added)


def test_the_rest_of_a_word_after_an_added_word_may_be_unknown():
    pieces = [*SPECIAL_TOKENS, "a", "##b", "##bc"]
    old = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})
    new = extend_wordpiece(old, ["ab ab"], 1)
    assert old.tokenize("abc") == ["a", "##bc"] and new.tokenize("abc") == ["[UNK]"]


@pytest.mark.parametrize("lowercase", [True, False])
def test_an_extended_tokenizer_is_saved_as_a_stock_bert_tokenizer(lowercase, tmp_path):
    old = train_wordpiece(make_texts(), vocab_size=150, lowercase=lowercase, strip_accents=False, model_max_length=77)
    new = extend_wordpiece(old, make_texts(), 50)
    save_tokenizer(new, tmp_path)
    loaded = BertTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == new.get_vocab() and len(loaded) == 200
    assert loaded.model_max_length == 77 and loaded.all_special_ids == old.all_special_ids
    for text in (*make_texts(seed=1, sentences=20), *make_texts()[:20], "A [MASK] é"):
        assert loaded(text)["input_ids"] == new(text)["input_ids"]
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [token["content"] for token in saved["added_tokens"]] == list(SPECIAL_TOKENS)
    assert len(saved["model"]["vocab"]) == 200
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").split() == pieces_of(new)


def test_tokens_outside_the_vocabulary_and_other_vocabularies_are_refused(tokenizer):
    other = train_wordpiece(HUGS, vocab_size=20)
    with pytest.raises(ValueError, match="must begin with the model's vocabulary"):
        added_entries(other, tokenizer)
    with pytest.raises(ValueError, match=r"has none for 'pugs' \(20\)"):
        added_entries(extend_wordpiece(other, MORE_HUGS, 1), other)
    other.add_tokens(["pugs"])
    with pytest.raises(ValueError, match="tokens beside its WordPiece vocabulary"):
        extend_wordpiece(other, MORE_HUGS, 1)
