"""Text on disk: sentences, token ids in one store or several, samples of the text, which documents are held out."""

import pickle
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import tokens_of, write_store
from transformers import BertTokenizer

from d2l_bert import train_wordpiece
from d2l_bert.tokenization import encoding, prepare, text_store, token_store, wordpiece
from d2l_bert.tokenization.encoding import SentenceEncoder, prepare_tokens
from d2l_bert.tokenization.rules import Rules
from d2l_bert.tokenization.sources import HowToRead, file_source
from d2l_bert.tokenization.text_store import TextStore, held_out_documents, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus, join_stores
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


# ---------------------------------------------------------------------------------------------------------------------
# Several stores as one


documents_of_a_store = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.slow
@given(
    st.lists(documents_of_a_store, min_size=1, max_size=4),
    st.sampled_from([1, 7, 10**6]),
    st.randoms(use_true_random=False),
)
def test_joined_stores_hold_the_documents_that_are_kept_one_after_the_other(stores, at_once, rng):
    """As one store that is written from the documents that are kept."""
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        kept = []
        documents = []
        ids = []
        vocab_size = rng.choice([400, 70_000])  # ids of either type
        for number, lengths in enumerate(stores):
            tokens = sum(map(sum, lengths))
            drawn = np.array([rng.randrange(vocab_size) for _ in range(tokens)])
            part = TokenizedCorpus(write_store(Path(folder, str(number)), lengths, vocab_size, drawn))
            kept_here = [one for one in range(len(lengths)) if rng.random() < 0.7]
            for one in kept_here:
                documents.append(lengths[one])
                ids += tokens_of(part, one)
            parts.append(part)
            kept.append(np.array(kept_here, dtype=int))
        ends = np.cumsum([len(some) for some in kept]).tolist()
        expected = TokenizedCorpus(write_store(Path(folder, "expected"), documents, vocab_size, ids, ends))
        Path(folder, "all").mkdir()
        with mock.patch.object(token_store, "JOINED_AT_ONCE", at_once):
            join_stores(Path(folder, "all"), vocab_size, parts, kept)
        corpus = pickle.loads(pickle.dumps(TokenizedCorpus(Path(folder, "all"))))
        for name in ("ids", *token_store.TABLES):
            assert getattr(corpus, name).tolist() == getattr(expected, name).tolist(), name
        assert corpus.ids.itemsize == (2 if vocab_size == 400 else 4)
        assert corpus.hashes.tolist() == np.concatenate(kept).tolist() and corpus.source_ends == ends


# ---------------------------------------------------------------------------------------------------------------------
# From text to token ids


@pytest.mark.parametrize("characters", [1, 300, 1 << 20])
def test_a_sample_of_many_small_documents_is_spread_over_all_batches(characters, tmp_path, monkeypatch):
    monkeypatch.setattr(text_store, "BATCH_CHARACTERS", characters)
    lines = [f"line {number} of the log" for number in range(1000)]
    (tmp_path / "app.log").write_text("\n".join(lines))
    found = TextStore(prepare_text([file_source(tmp_path / "app.log")], None, tmp_path))
    assert len(found) == len(found.hashes) == 1000
    assert len(set(found.hashes.tolist())) == 1000
    assert list(found.part()) == lines
    assert found.reading["characters"] == found.characters.sum() == sum(map(len, lines))
    assert found.reading["documents"] == found.reading["sentences"] == 1000
    is_chosen = np.isin(np.arange(1000), [0, 7, 500, 999])
    kept = [line for line, is_out in zip(lines, is_chosen, strict=True) if not is_out]
    assert list(found.part(is_chosen)) == [lines[number] for number in (0, 7, 500, 999)]
    assert list(found.part(~is_chosen)) == kept
    assert list(found.part(~is_chosen).sample()) == kept
    sample = list(found.part(~is_chosen).sample(3000))
    assert 2900 < sum(map(len, sample)) < 3100
    assert sample == [line for line in kept if line in sample]
    gaps = np.diff([kept.index(line) for line in sample])
    assert gaps.min() >= 0.9 * gaps.max() - 1


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "processes"), [(1, 1), (200, 1), (2000, 2), (400_000, 1)])
def test_tokens_on_disk_are_those_of_the_tokenizer(at_once, processes, text, tmp_path, monkeypatch):
    """A document of many blocks, of a single paragraph, goes on in several sections; others have no token."""
    monkeypatch.setattr(encoding, "TOKENIZED_AT_ONCE", at_once)
    for source in ("a", "b"):
        (tmp_path / source).mkdir()
        for number in range(1, 25):
            sentences = " ".join(f"Anna met {source} number {place}." for place in range(number * 20))
            has_no_token = number % 5 == 2 or (source == "b" and number < 4)
            content = "\ue000" * number if has_no_token else sentences
            (tmp_path / source / f"{number:02d}.txt").write_text(content)
    found = TextStore(prepare_text([file_source(tmp_path / source) for source in ("a", "b")], "en", tmp_path))
    corpus = TokenizedCorpus(prepare_tokens(found.part(), text.tokenizer, tmp_path, processes))
    numbers = np.arange(len(found))
    documents = []
    lengths = []
    for number in numbers:
        sentences = list(found.part(numbers == number))
        ids = text.tokenizer(sentences, add_special_tokens=False)["input_ids"]
        if any(ids):
            documents.append(sum(ids, []))
            lengths += map(len, ids)
    assert [tokens_of(corpus, number) for number in range(len(corpus))] == documents
    assert np.diff(corpus.sentence_starts).tolist() == lengths
    assert corpus.source_ends == [19, 19 + 17]


@pytest.mark.slow
def test_what_the_cache_keeps_of_a_text_is_kept_apart_by_all_that_it_follows_from(text, books, tmp_path):
    assert len({prepare_text([file_source(books)], language, tmp_path) for language in ("en", "zh")}) == 2
    part = TextStore(prepare_text([file_source(books)], "en", tmp_path)).part()
    other = train_wordpiece(part, vocab_size=60)
    kept = set()
    for tokenizer in (text.tokenizer, other):
        for unit in ("white space", "tokenizer"):
            corpus = TokenizedCorpus(prepare_tokens(part, tokenizer, tmp_path, 1, unit))
            kept.add((len(corpus.ids), int(corpus.words_before[-1])))
    assert len(kept) == 4
    options = [{"vocab_size": 300}, {"vocab_size": 60}, {"vocab_size": 300, "lowercase": False}]
    trained = [prepare.prepare(PretrainConfig(corpus=[str(books)], **some)) for some in options]
    assert len({wordpiece.tokenizer_fingerprint(prepared.tokenizer) for prepared in trained}) == 3
    # An existing tokenizer has a coverage of its own.
    run = PretrainConfig(corpus=[str(books)], max_unknown_share=1)
    pieces = [*wordpiece.SPECIAL_TOKENS, *"abc", "##a"]
    few = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})
    many = prepare.prepare(run, other).coverage["unknown_characters"]
    most = prepare.prepare(run, few).coverage["unknown_characters"]
    assert most > 10 * many


@pytest.mark.slow
def test_ids_of_a_large_vocabulary_are_whole_also_in_joined_stores(tmp_path):
    pieces = [*wordpiece.SPECIAL_TOKENS, *(f"w{number}" for number in range(70_000))]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})
    (tmp_path / "rows.txt").write_text("".join(f"w{number} w69999.\n" for number in range(40)))
    source = file_source(tmp_path / "rows.txt", HowToRead(documents="line"))
    part = TextStore(prepare_text([source], "en", tmp_path)).part()
    corpus = TokenizedCorpus(prepare_tokens(part, tokenizer, tmp_path))
    assert corpus.ids.max() == 5 + 69_999 and corpus.ids[0] == 5
    (tmp_path / "joined").mkdir()
    kept = [np.arange(40), np.arange(3)]
    join_stores(tmp_path / "joined", len(tokenizer), [corpus, corpus], kept)
    joined = TokenizedCorpus(tmp_path / "joined")
    assert joined.ids.tolist() == [*corpus.ids, *corpus.ids[: 3 * 3]]


RULES = [
    {},
    {"lowercase": False},
    {"strip_accents": True, "individual_digits": True},
    {"zero_width_spaces": True, "keep_joiners": True, "pre_tokenizer": "kmers:100", "individual_digits": True},
    {"zero_width_spaces": True, "pre_tokenizer": "kmers:3", "unicode_normalization": "NFKC"},
]


@pytest.mark.slow
@given(st.lists(st.text(), max_size=5), st.sampled_from(RULES))
def test_tokenizing_word_by_word_equals_tokenizing_the_sentence(sentences, rules):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc[]é你.,0", *(f"##{piece}" for piece in "abcé0")]
    tokenizer = wordpiece.make_tokenizer(pieces, Rules(**rules))
    given = (*sentences, "Abc, b\u0301 [MASK] caab.", "你a你 \u0301b\x07c", "a\u200bb a\u200cb" + "ab0" * 50)
    sentences = [" ".join(text.split()) for text in given]
    encode = SentenceEncoder(tokenizer.backend_tokenizer.to_str())
    assert encode.encodes_words
    encode.encodes_words = False
    ids, lengths, words = whole = encode(sentences)
    assert words.tolist() == [len(sentence.split()) for sentence in sentences]
    assert len(ids) == lengths.sum()
    encode.encodes_words = True
    encode.known_ids = {}
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


# ---------------------------------------------------------------------------------------------------------------------
# The split


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(1, 30), st.integers(500, 2000)), st.integers(1, 3)), min_size=4, max_size=60
    ),
    st.floats(0.01, 0.9),
    st.sampled_from([10, 100, 10**9]),
    st.randoms(use_true_random=False),
)
def test_held_out_documents_are_those_of_the_smallest_hashes_the_large_ones_last(texts, fraction, most, rng):
    """Each text has a size and some copies, which stand anywhere."""
    hashes = list(range(len(texts)))
    rng.shuffle(hashes)
    documents = []
    for number, (_, copies) in enumerate(texts):
        documents += [number] * copies
    rng.shuffle(documents)
    totals = [size * copies for size, copies in texts]
    wanted = min(fraction * sum(totals), most)

    def place(text):
        """Texts that are larger than what is wanted come last, the largest after all others."""
        return totals[text] if totals[text] > wanted else 0, hashes[text]

    order = sorted(range(len(texts)), key=place)
    chosen = order[:2]
    for text in order[2:-2]:
        if sum(totals[one] for one in chosen) < wanted:
            chosen.append(text)
    of_documents = np.array([hashes[text] for text in documents])
    sizes = np.array([texts[text][0] for text in documents])
    found = held_out_documents(of_documents, sizes, fraction, most)
    assert found.tolist() == [text in chosen for text in documents]


def test_copies_are_no_different_documents():
    with pytest.raises(ValueError, match="too little text: 3 documents"):
        held_out_documents(np.array([1, 2, 3, 3]), np.full(4, 5), 0.1, 10**9)
