"""Text on disk: sentences, token ids in one store or several, samples of the text, which documents are held out."""

import itertools
import pickle
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import tokens_of, write_store
from tokenizers import AddedToken
from transformers import AutoTokenizer, BertTokenizer

from d2l_bert import train_wordpiece
from d2l_bert.folders import cache_folder
from d2l_bert.tokenization import encoding, prepare, text_store, token_store, wordpiece
from d2l_bert.tokenization.encoding import SentenceEncoder, prepare_tokens
from d2l_bert.tokenization.rules import Rules
from d2l_bert.tokenization.sources import file_source
from d2l_bert.tokenization.text_store import TextStore, held_out_documents, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, join_stores
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


def ids_of(tokenizer, paragraphs):
    return [tokenizer(paragraph, add_special_tokens=False)["input_ids"] for paragraph in paragraphs]


# ---------------------------------------------------------------------------------------------------------------------
# Several stores as one


documents_of_a_store = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5)


@given(
    st.lists(documents_of_a_store, min_size=1, max_size=4),
    st.sampled_from([1, 7, 10**6]),
    st.randoms(use_true_random=False),
)
def test_joined_stores_hold_the_documents_that_are_kept_one_after_the_other(stores, at_once, rng):
    with tempfile.TemporaryDirectory() as folder:
        parts, kept, documents, hashes = [], [], [], []
        vocab_size = rng.choice([400, 70_000])  # ids of either type
        for number, lengths in enumerate(stores):
            of_documents = [[[rng.randrange(vocab_size) for _ in range(n)] for n in document] for document in lengths]
            ids = list(itertools.chain(*itertools.chain(*of_documents)))
            parts.append(TokenizedCorpus(write_store(Path(folder, str(number)), lengths, vocab_size, ids)))
            kept.append([one for one in range(len(lengths)) if rng.random() < 0.7])
            documents += [of_documents[one] for one in kept[-1]]
            hashes += kept[-1]
        Path(folder, "all").mkdir()
        with mock.patch.object(token_store, "JOINED_AT_ONCE", at_once):
            join_stores(Path(folder, "all"), vocab_size, parts, [np.array(some, dtype=int) for some in kept])
        corpus = TokenizedCorpus(Path(folder, "all"))
        assert corpus.ids.itemsize == (2 if vocab_size == 400 else 4)
        assert corpus.source_ends == np.cumsum(list(map(len, kept))).tolist()
        assert corpus.hashes.tolist() == hashes and len(corpus) == len(documents)
        everything = [sum(document, []) for document in documents]
        ends = np.cumsum([0, *map(len, everything)])
        assert corpus.first_tokens(np.arange(len(documents) + 1)).tolist() == ends.tolist()
        assert corpus.words_before.tolist() == ends.tolist()  # a word of these stores is a token
        for found in (corpus, pickle.loads(pickle.dumps(corpus))):
            for number, document in enumerate(documents):
                assert tokens_of(found, number) == everything[number]
                sentences = found.sentences(number)
                assert np.diff(found.sentence_starts[[*sentences, sentences[-1] + 1]]).tolist() == [
                    *map(len, document)
                ]
                inside = np.arange(ends[number], ends[number + 1])
                assert (find(corpus.document_starts, find(corpus.sentence_starts, inside)) == number).all()


# ---------------------------------------------------------------------------------------------------------------------
# From text to token ids


@pytest.mark.parametrize("characters", [1, 300, 1 << 20])
def test_a_sample_of_many_small_documents_is_spread_over_all_batches(characters, tmp_path, monkeypatch):
    monkeypatch.setattr(text_store, "BATCH_CHARACTERS", characters)
    lines = [f"line {number} of the log" for number in range(1000)]
    (tmp_path / "app.log").write_text("\n".join(lines))
    found = TextStore(prepare_text([file_source(tmp_path / "app.log")], None, tmp_path))
    assert len(found) == len(found.hashes) == len(set(found.hashes.tolist())) == 1000
    assert list(found.part()) == lines
    assert found.reading["characters"] == found.characters.sum() == sum(map(len, lines))
    assert found.reading["documents"] == found.reading["sentences"] == 1000
    is_chosen = np.isin(np.arange(1000), [0, 7, 500, 999])
    kept = [line for line, is_out in zip(lines, is_chosen, strict=True) if not is_out]
    assert list(found.part(is_chosen)) == [lines[number] for number in (0, 7, 500, 999)]
    assert list(found.part(~is_chosen)) == kept and list(found.part(~is_chosen).sample()) == kept
    sample = list(found.part(~is_chosen).sample(3000))
    assert 2900 < sum(map(len, sample)) < 3100 and sample == [line for line in kept if line in sample]
    gaps = np.diff([kept.index(line) for line in sample])
    assert gaps.min() >= 0.9 * gaps.max() - 1


def test_tokens_on_disk_are_those_of_the_tokenizer(text, books, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "TOKENIZED_AT_ONCE", 2000)  # several spans, on two processes
    found = TextStore(prepare_text([file_source(books)], "en", cache_folder()))
    several = TokenizedCorpus(prepare_tokens(found.part(), text.tokenizer, tmp_path, processes=2))
    is_held_out = np.isin(several.hashes, text.held_out.hashes)
    assert is_held_out.sum() == len(text.held_out) == 24 - len(text.train)
    for is_chosen, tokens in ((is_held_out, text.held_out), (~is_held_out, text.train), (np.ones(24, bool), several)):
        for number, document in enumerate(np.flatnonzero(is_chosen)):
            expected = ids_of(text.tokenizer, list(found.part(np.arange(24) == document)))
            sentences, first = tokens.sentences(number), int(tokens.first_tokens(number))
            assert tokens_of(tokens, number) == [token for ids in expected for token in ids]
            ends = np.cumsum(list(map(len, expected))).tolist()
            assert (tokens.sentence_starts[sentences + 1] - first).tolist() == ends


def test_what_the_cache_keeps_of_a_text_is_kept_apart_by_all_that_it_follows_from(text, books, tmp_path):
    assert len({prepare_text([file_source(books)], language, tmp_path) for language in ("en", "zh")}) == 2
    part = TextStore(prepare_text([file_source(books)], "en", tmp_path)).part()
    other = train_wordpiece(part, vocab_size=60)
    kept = [
        TokenizedCorpus(prepare_tokens(part, tokenizer, tmp_path, 1, unit))
        for tokenizer in (text.tokenizer, other)
        for unit in ("white space", "tokenizer")
    ]
    assert len({(len(corpus.ids), int(corpus.words_before[-1])) for corpus in kept}) == 4
    options = [{"vocab_size": 300}, {"vocab_size": 60}, {"vocab_size": 300, "lowercase": False}]
    trained = [prepare.prepare(PretrainConfig(corpus=[str(books)], **some)) for some in options]
    assert len({wordpiece.tokenizer_fingerprint(prepared.tokenizer) for prepared in trained}) == 3
    # An existing tokenizer has an account of its own.
    few = BertTokenizer(vocab={piece: index for index, piece in enumerate([*wordpiece.SPECIAL_TOKENS, *"abc", "##a"])})
    run = PretrainConfig(corpus=[str(books)], max_unknown_share=1)
    many, most = (prepare.prepare(run, tokenizer).account["unknown_characters"] for tokenizer in (other, few))
    assert most > 10 * many


def test_ids_of_a_large_vocabulary_are_whole_also_in_joined_stores(tmp_path):
    pieces = [*wordpiece.SPECIAL_TOKENS, *(f"w{number}" for number in range(70_000))]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})
    (tmp_path / "rows.txt").write_text("".join(f"w{number} w69999.\n" for number in range(40)))
    part = TextStore(prepare_text([file_source(tmp_path / "rows.txt", documents="line")], "en", tmp_path)).part()
    corpus = TokenizedCorpus(prepare_tokens(part, tokenizer, tmp_path))
    assert corpus.ids.max() == 5 + 69_999 and corpus.ids[0] == 5
    (tmp_path / "joined").mkdir()
    join_stores(tmp_path / "joined", len(tokenizer), [corpus, corpus], [np.arange(40), np.arange(3)])
    assert TokenizedCorpus(tmp_path / "joined").ids.tolist() == [*corpus.ids, *corpus.ids[: 3 * 3]]


@pytest.mark.parametrize("at_once", [1, 200])
def test_a_store_does_not_depend_on_how_much_is_tokenized_at_once(text, at_once, tmp_path, monkeypatch):
    """A document of many blocks, of a single paragraph, goes on in several sections; others have no token."""
    (tmp_path / "texts").mkdir()
    for number in range(25):
        content = (
            "\ue000" if number % 5 == 2 else " ".join(f"Anna met number {place}." for place in range(number * 30))
        )
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(content)
    found = TextStore(prepare_text([file_source(tmp_path / "texts")], "en", tmp_path))
    expected = TokenizedCorpus(prepare_tokens(found.part(), text.tokenizer, tmp_path / "whole"))
    monkeypatch.setattr(encoding, "TOKENIZED_AT_ONCE", at_once)
    store = TokenizedCorpus(prepare_tokens(found.part(), text.tokenizer, tmp_path / "parts"))
    assert store.fingerprint == expected.fingerprint and len(store) == len(found) - 5 == 19
    for name in token_store.ARRAYS:
        assert getattr(store, name).tolist() == getattr(expected, name).tolist(), name


RULES = [
    {},
    {"lowercase": False},
    {"strip_accents": True, "individual_digits": True},
    {"zero_width_spaces": True, "keep_joiners": True, "pre_tokenizer": "kmers:100", "individual_digits": True},
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
            bare = "\ue000" * (1 + len(lines))
            lines.append(bare if is_bare else f"Anna {source} has {number} apples. Boris sold {number}.")
            (tmp_path / source / f"{number:02d}.txt").write_text(lines[-1])
    run = PretrainConfig(corpus=[str(tmp_path / "a"), str(tmp_path / "b")], vocab_size=100, validation_fraction=0.3)
    prepared = prepare.prepare(run)
    kept = [line for line in lines if "Anna" in line]
    ids = [tokens for line in kept for tokens in ids_of(prepared.tokenizer, [line])]
    train, held_out = (
        [tokens_of(corpus, number) for number in range(len(corpus))] for corpus in (prepared.train, prepared.held_out)
    )
    assert sorted(train + held_out) == sorted(ids) and len(ids) == 33 and len(held_out) > 2
    assert train == [tokens for tokens in ids if tokens in train]  # in the order of the text
    first_source = [tokens for line, tokens in zip(kept, ids, strict=True) if "Anna a" in line]
    for corpus, found in ((prepared.train, train), (prepared.held_out, held_out)):
        end = sum(tokens in first_source for tokens in found)
        assert corpus.source_ends == [end, len(found)]


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def test_a_sample_of_sentences_is_spread_over_the_text_limited_in_size_and_repeatable(books, text):
    found = TextStore(prepare_text([file_source(books)], "en", cache_folder()))
    everything = found.part()
    assert list(everything) == list(everything) and len(list(everything)) == 24 * 30
    half = everything.sample(sum(map(len, everything)) // 2)
    assert sum(map(len, half)) == pytest.approx(sum(map(len, everything)) / 2, rel=0.25)
    assert half.blocks[0] < 3 and half.blocks[-1] > len(everything.blocks) - 5
    some = list(found.part(np.isin(np.arange(24), (3, 7))))
    assert len(some) == 60 and set(some) <= set(everything)


# ---------------------------------------------------------------------------------------------------------------------
# The split


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
    documents = [number for number, (_, copies) in enumerate(texts) for _ in range(copies)]
    rng.shuffle(documents)
    totals = [size * copies for size, copies in texts]
    wanted = min(fraction * sum(totals), most)
    order = sorted(range(len(texts)), key=lambda text: (totals[text] * (totals[text] > wanted), hashes[text]))
    chosen = []
    while len(chosen) < 2 or (sum(totals[text] for text in chosen) < wanted and len(chosen) < len(texts) - 2):
        chosen.append(order[len(chosen)])
    found = held_out_documents(
        np.array([hashes[text] for text in documents]),
        np.array([texts[text][0] for text in documents]),
        fraction,
        most,
    )
    assert found.tolist() == [text in chosen for text in documents]


def test_held_out_documents_are_enough_text_and_no_more():
    rng = np.random.default_rng(0)
    sizes, hashes = rng.integers(50, 500, 300), rng.integers(-(2**63), 2**63, 300)
    held_out = held_out_documents(hashes, sizes, 0.1, 10**9)
    assert 0.1 * sizes.sum() <= sizes[held_out].sum() < 0.1 * sizes.sum() + 500
    assert sizes[held_out_documents(hashes, sizes, 0.1, 2000)].sum() < 2500
    assert held_out_documents(np.arange(4), np.full(4, 5), 0.9, 10**9).sum() == 2
    with pytest.raises(ValueError, match="too little text: 3 documents"):
        held_out_documents(np.array([1, 2, 3, 3]), np.full(4, 5), 0.1, 10**9)


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
