"""Text on disk: sentences, token ids in one store or several, samples of the text, which documents are held out."""

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import write_store
from tokenizers import AddedToken
from transformers import AutoTokenizer

from d2l_bert import train_wordpiece
from d2l_bert.random_numbers import random_keys, random_numbers
from d2l_bert.tokenization import prepare, text_store, token_store, wordpiece
from d2l_bert.tokenization.cache import cache_folder
from d2l_bert.tokenization.encoding import SentenceEncoder, prepare_tokens
from d2l_bert.tokenization.rules import Rules
from d2l_bert.tokenization.sentences import Cleaning
from d2l_bert.tokenization.sources import file_source
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import (
    JoinedTable,
    TokenizedCorpus,
    held_out_documents,
)
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


def ids_of(tokenizer, paragraphs):
    return [tokenizer(paragraph, add_special_tokens=False)["input_ids"] for paragraph in paragraphs]


# ---------------------------------------------------------------------------------------------------------------------
# Several stores as one


tables = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 3)), min_size=1, max_size=4
)


@given(tables)
def test_joined_tables_of_ends_are_one_table(parts):
    """Each part: what its entries count, and what is left behind its last entry."""
    ends, totals = [np.cumsum(sizes) for sizes, _ in parts], [sum(sizes) + rest for sizes, rest in parts]
    starts = np.cumsum([0, *totals])
    plain = np.concatenate([start + part for start, part in zip(starts, ends, strict=False)])
    joined = JoinedTable(ends, totals)
    numbers = np.arange(len(plain))
    assert len(joined) == len(plain)
    np.testing.assert_array_equal(joined.at(numbers), plain)
    np.testing.assert_array_equal(joined.at(numbers[::-1, None]), plain[::-1, None])
    np.testing.assert_array_equal(joined.before(np.append(numbers, len(plain))), np.append(0, plain))
    places = np.arange(starts[-1])
    np.testing.assert_array_equal(joined.find(places), np.searchsorted(plain, places, side="right"))
    for number in numbers.tolist():  # single numbers, too
        assert joined.at(number) == plain[number] and joined.before(number) == [0, *plain][number]


documents_of_a_store = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5)


@given(st.lists(documents_of_a_store, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_tokens_of_several_stores_are_those_of_the_stores_one_after_the_other(stores, rng):
    with tempfile.TemporaryDirectory() as folder:
        folders, everything = [], []
        for number, documents in enumerate(stores):
            vocab_size = rng.choice([400, 70_000])  # ids of either type
            ids = [rng.randrange(vocab_size) for document in documents for _ in range(sum(document))]
            folders.append(write_store(Path(folder, str(number)), documents, vocab_size, ids))
            everything += ids
        corpus = TokenizedCorpus(*folders)
        sizes = [sum(document) for documents in stores for document in documents]
        ends = np.cumsum(sizes)
        assert len(corpus.ids) == len(everything) and len(corpus) == len(sizes)
        for found in (corpus, pickle.loads(pickle.dumps(corpus))):
            assert found.ids.at(np.arange(len(everything))).tolist() == everything
        backwards = np.arange(len(everything))[::-1].reshape(-1, 1)
        assert corpus.ids.at(backwards).tolist() == np.array(everything)[backwards].tolist()
        assert corpus.sizes(np.arange(len(sizes))).tolist() == sizes
        assert corpus.first_tokens(np.arange(len(sizes) + 1)).tolist() == [0, *ends]
        assert corpus.document_words.at(np.arange(len(sizes))).tolist() == ends.tolist()
        sentence = 0
        for number, document in enumerate(document for documents in stores for document in documents):
            assert corpus.tokens(number).tolist() == everything[ends[number] - sizes[number] : ends[number]]
            assert corpus.sentences(number).tolist() == list(range(sentence, sentence + len(document)))
            sentence += len(document)


# ---------------------------------------------------------------------------------------------------------------------
# From text to token ids


@pytest.mark.parametrize("characters", [1, 300, 1 << 20])
def test_a_sample_of_many_small_documents_is_spread_over_all_batches(characters, tmp_path, monkeypatch):
    monkeypatch.setattr(text_store, "BATCH_CHARACTERS", characters)
    lines = [f"line {number} of the log" for number in range(1000)]
    (tmp_path / "app.log").write_text("\n".join(lines))
    found = TextStore(prepare_text([file_source(tmp_path / "app.log")], None, Cleaning(), tmp_path))
    assert len(found) == len(found.text_hashes) == len(set(found.text_hashes.tolist())) == 1000
    assert [row["sentences"] for row in found.rows()] == [[line] for line in lines]
    assert found.reading["characters"] == found.document_characters[-1] == sum(map(len, lines))
    assert found.reading["documents"] == found.reading["sentences"] == 1000
    left_out = np.array([0, 7, 500, 999])
    kept = [line for number, line in enumerate(lines) if number not in left_out]
    assert list(SentenceSample(found, left_out)) == [lines[number] for number in left_out]
    assert list(SentenceSample(found, left_out, leave_out=True)) == kept
    sample = list(SentenceSample(found, left_out, leave_out=True, most_characters=3000))
    assert 2900 < sum(map(len, sample)) < 3100 and sample == [line for line in kept if line in sample]
    gaps = np.diff([kept.index(line) for line in sample])
    assert gaps.min() >= 0.9 * gaps.max() - 1


def test_tokens_on_disk_are_those_of_the_tokenizer(text, books, tmp_path):
    found = TextStore(prepare_text([file_source(books)], "en", Cleaning(), cache_folder()))
    rows, ends = found.rows(), found.document_ends
    several = TokenizedCorpus(prepare_tokens(found, text.tokenizer, tmp_path, processes=2))
    assert several.fingerprint() == text.tokens.fingerprint()
    for document in (0, 5, len(text.tokens) - 1):
        blocks = rows[int(ends[document - 1]) if document else 0 : int(ends[document])]
        expected = ids_of(text.tokenizer, [sentence for block in blocks["sentences"] for sentence in block])
        for tokens in (text.tokens, several):
            sentences, first = tokens.sentences(document), int(tokens.first_tokens(document))
            assert tokens.tokens(document).tolist() == [token for ids in expected for token in ids]
            assert (tokens.sentence_ends.at(sentences) - first).tolist() == np.cumsum(
                list(map(len, expected))
            ).tolist()
            ends_inside = [sentences[0] + 3 * paragraph for paragraph in range(1, 11)]
            assert set(ends_inside) <= set(tokens.paragraph_ends.at(np.arange(len(tokens.paragraph_ends))))


RULES = [
    {},
    {"lowercase": False},
    {"strip_accents": True, "individual_digits": True},
    {"zero_width_spaces": True, "keep_joiners": True, "cut_long_words": True, "individual_digits": True},
    {"zero_width_spaces": True, "pre_tokenizer": "kmers:3", "unicode_normalization": "NFKC"},
]


@given(st.lists(st.text(), max_size=5), st.sampled_from(RULES))
def test_tokenizing_word_by_word_equals_tokenizing_the_sentence(sentences, rules):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc[]é你.,0", *(f"##{piece}" for piece in "abcé0")]
    tokenizer = wordpiece.make_tokenizer(pieces, Rules(**rules))
    given = (*sentences, "Abc, b\u0301 [MASK] caab.", "你a你 \u0301b\x07c", "a\u200bb a\u200cb" + "ab0" * 50)
    sentences = [" ".join(text.split()) for text in given]
    encode = SentenceEncoder(tokenizer.backend_tokenizer.to_str())
    assert encode.by_word
    encode.by_word = False
    ids, lengths, words = whole = encode(sentences)
    assert words.tolist() == [len(sentence.split()) for sentence in sentences]
    assert len(ids) == lengths.sum()
    encode.by_word, encode.known = True, {}
    for _ in range(2):  # in the first round the words are new, in the second they are cached
        for found, expected in zip(encode(sentences), whole, strict=True):
            assert found.tolist() == expected.tolist()
    assert tokenizer.convert_tokens_to_ids("[MASK]") not in ids


def test_words_are_those_of_the_tokenizer_where_that_is_asked_for():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "c", "##c", "##d", "你", "."]
    tokenizer = wordpiece.make_tokenizer(pieces, Rules())
    sentences = ["abcd. 你你", "", "c c"]  # ab ##c ##d . 你 你; c c
    encode = SentenceEncoder(tokenizer.backend_tokenizer.to_str(), "tokenizer")
    assert encode(sentences)[2].tolist() == [4, 0, 2]
    assert SentenceEncoder(tokenizer.backend_tokenizer.to_str())(sentences)[2].tolist() == [2, 0, 2]
    assert [len(of) for of in encode([])] == [0, 0, 0]


def test_documents_without_a_token_do_not_shift_the_sources_or_the_held_out_documents(tmp_path):
    lines = []
    for source in ("a", "b"):
        (tmp_path / source).mkdir()
        for number in range(30):
            is_bare = number % 3 == 0 and number < 20 if source == "a" else number < 20
            lines.append("\ue000" if is_bare else f"Anna {source} has {number} apples. Boris sold {number}.")
            (tmp_path / source / f"{number:02d}.txt").write_text(lines[-1])
    run = PretrainConfig(corpus=[str(tmp_path / "a"), str(tmp_path / "b")], vocab_size=100, validation_fraction=0.3)
    prepared = prepare.prepare(run)
    kept = [number for number, line in enumerate(lines) if len(line) > 1]
    assert len(prepared.tokens) == len(kept) == 33 and prepared.source_ends == [23, 33]
    for number, line in enumerate(ids_of(prepared.tokenizer, [lines[number] for number in kept])):
        assert prepared.tokens.tokens(number).tolist() == line
    characters = np.cumsum([len(line.replace(". ", ".")) for line in lines])
    in_text = held_out_documents(characters, 0.3, 10**9).tolist()
    assert not set(in_text) <= set(kept)
    assert [kept[number] for number in prepared.held_out] == [number for number in in_text if number in kept]


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def test_a_sample_of_sentences_is_spread_over_the_text_limited_in_size_and_repeatable(books, text):
    found = TextStore(prepare_text([file_source(books)], "en", Cleaning(), cache_folder()))
    everything = SentenceSample(found, np.arange(24))
    assert list(everything) == list(everything) and len(list(everything)) == 24 * 30
    half = SentenceSample(found, np.arange(24), most_characters=sum(map(len, everything)) // 2)
    assert sum(map(len, half)) == pytest.approx(sum(map(len, everything)) / 2, rel=0.1)
    assert len(half.blocks) in (11, 12, 13) and half.blocks[0] < 3 and half.blocks[-1] > 19
    some = list(SentenceSample(found, np.array([3, 7])))
    assert len(some) == 60 and set(some) <= set(everything)


# ---------------------------------------------------------------------------------------------------------------------
# The split


@given(
    st.lists(st.one_of(st.integers(1, 30), st.integers(500, 2000)), min_size=4, max_size=60),
    st.floats(0.01, 0.9),
    st.sampled_from([10, 100, 10**9]),
)
def test_held_out_documents_are_the_first_by_random_rank_the_large_ones_last(sizes, fraction, most):
    ranks = random_numbers(random_keys((token_store.HELD_OUT_SEED,), np.arange(len(sizes))), 0)
    wanted = min(fraction * sum(sizes), most)
    order = sorted(
        range(len(sizes)), key=lambda number: (max(sizes[number] * (sizes[number] > wanted), 0), ranks[number])
    )
    chosen = []
    while len(chosen) < 2 or (sum(sizes[number] for number in chosen) < wanted and len(chosen) < len(sizes) - 2):
        chosen.append(order[len(chosen)])
    assert held_out_documents(np.cumsum(sizes), fraction, most).tolist() == sorted(chosen)


def test_held_out_documents_are_enough_text_and_no_more():
    sizes = np.random.default_rng(0).integers(50, 500, 300)
    held_out = held_out_documents(np.cumsum(sizes), 0.1, 10**9)
    assert 0.1 * sizes.sum() <= sizes[held_out].sum() < 0.1 * sizes.sum() + 500
    assert sizes[held_out_documents(np.cumsum(sizes), 0.1, 2000)].sum() < 2500
    assert len(held_out_documents(np.array([5, 10, 15, 20]), 0.9, 10**9)) == 2
    with pytest.raises(ValueError, match="too little text: 3 documents"):
        held_out_documents(np.array([5, 10, 15]), 0.1, 10**9)


# ---------------------------------------------------------------------------------------------------------------------
# Added tokens


SENTENCES = [f"The {thing} is on the {place}." for thing in ("cup", "book", "pen") for place in ("table", "floor")]


def test_an_added_token_of_two_words_is_encoded_in_training_as_in_use(tmp_path):
    tokenizer = train_wordpiece(SENTENCES, min_frequency=1)
    tokenizer.add_tokens([AddedToken("the table", normalized=True)])
    save_tokenizer(tokenizer, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids, lengths, _ = SentenceEncoder(tokenizer.backend_tokenizer.to_str())(SENTENCES)
    expected = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in SENTENCES]
    assert ids.tolist() == sum(expected, []) and lengths.tolist() == list(map(len, expected))
    assert tokenizer.convert_tokens_to_ids("the table") in ids
