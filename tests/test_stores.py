"""Text on disk: sentences, token ids in one store or several, samples of the text, which documents are held out."""

import pickle
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import write_store

from d2l_bert.errors import UserError
from d2l_bert.random_numbers import random_keys, random_numbers
from d2l_bert.tokenization import encoding, prepare, token_store, wordpiece
from d2l_bert.tokenization.cache import cache_folder
from d2l_bert.tokenization.encoding import SentenceEncoder, prepare_tokens
from d2l_bert.tokenization.sentences import Cleaning, Document
from d2l_bert.tokenization.sources import Source, file_source
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import (
    AllBut,
    JoinedTable,
    Only,
    TokenizedCorpus,
    held_out_documents,
)
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


def read_text(documents, folder):
    """The text store of documents, each a list of paragraphs."""
    documents = (Document(f"d{number}", iter(paragraphs)) for number, paragraphs in enumerate(documents))
    return TextStore(prepare_text([Source("x", ["y"], documents, Counter())], "en", Cleaning(), folder))


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


def test_the_fingerprint_of_a_corpus_follows_from_its_numbers_alone(tmp_path):
    documents, ids = [[2, 3], [1]], [7, 8, 9, 10, 11, 12]

    def fingerprint(name, found=documents, found_ids=ids, vocab_size=400):
        return TokenizedCorpus(write_store(tmp_path / name, found, vocab_size, found_ids)).fingerprint()

    first = fingerprint("a")
    assert first == fingerprint("b") == fingerprint("wide", vocab_size=70_000)
    others = {fingerprint("c", [[3, 2], [1]]), fingerprint("d", [[2], [3, 1]]), fingerprint("e", found_ids=ids[::-1])}
    assert len(others | {first}) == 4
    both = [TokenizedCorpus(*(tmp_path / name for name in names)).fingerprint() for names in ("ac", "ca", "ac")]
    assert both[0] == both[2] != both[1]


@pytest.mark.parametrize(("vocab_size", "bytes_an_id"), [(400, 2), (2**16, 2), (2**16 + 1, 4)])
def test_ids_take_two_bytes_where_the_vocabulary_fits(tmp_path, vocab_size, bytes_an_id):
    ids = [0, 5, vocab_size - 1]
    corpus = TokenizedCorpus(write_store(tmp_path / "store", [[3]], vocab_size, ids))
    assert corpus.stores[0].ids.itemsize == bytes_an_id
    assert (tmp_path / "store" / "ids.npy").stat().st_size == 128 + 3 * bytes_an_id
    assert corpus.tokens(0).tolist() == ids


@given(documents_of_a_store, st.data())
def test_a_store_written_in_stretches_is_that_written_at_once(documents, data):
    """Stretches end after any sentence, also inside a document."""
    lengths = [length for document in documents for length in document]
    ends = np.cumsum([len(document) for document in documents])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {len(lengths)})
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = write_store(Path(folder, "whole"), documents), Path(folder, "parts")
        parts.mkdir()
        sections, start, token = [], 0, 0
        for end in cuts:
            sentence_ends = np.cumsum(lengths[start:end])
            inside = ends[(ends > start) & (ends <= end)] - start
            words = np.append(sentence_ends[inside - 1], sentence_ends[-1])
            sections.append((token + np.arange(sentence_ends[-1]), sentence_ends, inside, inside, words))
            start, token = end, token + int(sentence_ends[-1])
        token_store.write_store(parts, 2**20, sections)
        for file in whole.iterdir():
            assert (parts / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "damaged ("),
        ("emptied", "damaged ("),
        ("missing", "damaged ([Errno 2] No such file or directory"),
        ("record", "damaged (Expecting value"),
        ("count", "damaged (its files have lengths that contradict each other)"),
        ("ends", "damaged (its files have lengths that contradict each other); delete this folder and run again"),
    ],
)
def test_a_damaged_store_is_refused_in_one_line(tmp_path, damage, words):
    folder = write_store(tmp_path / "store", [[2000, 3], [1]])
    if damage == "cut":
        (folder / "ids.npy").write_bytes((folder / "ids.npy").read_bytes()[:1000])
    elif damage == "emptied":
        (folder / "ids.npy").write_bytes(b"")
    elif damage == "missing":
        (folder / "ids.npy").unlink()
    elif damage == "record":
        (folder / "store.json").write_text("")
    elif damage == "count":
        shutil.copyfile(write_store(tmp_path / "other", [[1] * 4]) / "sentence_ends.npy", folder / "sentence_ends.npy")
    else:
        other = write_store(tmp_path / "other", [[5, 3], [1]])
        shutil.copyfile(other / "sentence_ends.npy", folder / "sentence_ends.npy")
    with pytest.raises(UserError) as refusal:
        TokenizedCorpus(folder)
    said = str(refusal.value)
    assert str(folder) in said and words in said and "\n" not in said and "delete this folder" in said


# ---------------------------------------------------------------------------------------------------------------------
# From text to token ids


def test_tokens_on_disk_are_those_of_the_tokenizer(text, books, tmp_path):
    found = TextStore(prepare_text([file_source(books)], "en", Cleaning(), cache_folder()))
    rows, ends = found.rows(), found.document_ends
    several = TokenizedCorpus(prepare_tokens(found, text.tokenizer, tmp_path, processes=2))
    assert several.fingerprint() == text.tokens.fingerprint()
    for document in (0, 5, len(text.tokens) - 1):
        blocks = rows[int(ends[document - 1]) if document else 0 : int(ends[document])]
        assert len(set(blocks["name"])) == 1
        expected = ids_of(text.tokenizer, [sentence for block in blocks["sentences"] for sentence in block])
        for tokens in (text.tokens, several):
            sentences, first = tokens.sentences(document), int(tokens.first_tokens(document))
            assert tokens.tokens(document).tolist() == [token for ids in expected for token in ids]
            assert (tokens.sentence_ends.at(sentences) - first).tolist() == np.cumsum(
                list(map(len, expected))
            ).tolist()
            ends_inside = [sentences[0] + 3 * paragraph for paragraph in range(1, 11)]
            assert set(ends_inside) <= set(tokens.paragraph_ends.at(np.arange(len(tokens.paragraph_ends))))


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_tokenizing_word_by_word_equals_tokenizing_the_sentence(sentences, lowercase):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc[]é你.,0", *(f"##{piece}" for piece in "abcé0")]
    tokenizer = wordpiece.make_tokenizer(pieces, lowercase)
    sentences = [" ".join(text.split()) for text in (*sentences, "Abc, b\u0301 [MASK] caab.", "你a你 \u0301b\x07c")]
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


def test_the_number_of_cached_words_is_limited(monkeypatch):
    monkeypatch.setattr(encoding, "MOST_KNOWN_WORDS", 3)
    tokenizer = wordpiece.make_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"], True)
    encode = SentenceEncoder(tokenizer.backend_tokenizer.to_str())
    assert [numbers.tolist() for numbers in encode(["a b", "", "c a"])] == [[5, 6, 7, 5], [2, 0, 2], [2, 0, 2]]
    assert encode(["a d b e"])[0].tolist() == [5, 8, 6, 9] and set(encode.known) == {"a", "b", "c"}
    assert encode(["f d"])[0].tolist() == [10, 8] and set(encode.known) == {"a", "b", "c"}


def test_the_blocks_of_a_single_book_count_as_documents(text, tmp_path):
    paragraphs = [f"Anna has {number} apples. Boris has none. Nobody sold the {number}." for number in range(1000)]
    found = read_text([paragraphs], tmp_path)
    tokens = TokenizedCorpus(prepare_tokens(found, text.tokenizer, tmp_path))
    assert len(tokens) == len(found) == len(found.rows()) == 46  # the first 22 paragraphs reach 64 sentences
    assert found.document_characters[-1] == sum(len(text.replace(". ", ".")) for text in paragraphs)
    assert found.source_ends == [46]


def test_documents_span_several_blocks_and_tokenizer_batches(tmp_path, monkeypatch, text):
    monkeypatch.setattr(encoding, "TOKENIZED_AT_ONCE", 2)
    sentences = [f"Anna walked to the garden with {number} apples." for number in range(1000)]
    # 25 documents. Each: a zero-width space, which gives no token, then paragraphs of 3 sentences; every other
    # paragraph ends with one more zero-width space.
    documents = [sentences[40 * number : 40 * number + 40 * (1 + 3 * (number % 2))] for number in range(25)]
    paragraphs = [
        ["\u200b"]
        + [
            " ".join(document[start : start + 3]) + ("\u200b." if start % 2 else "")
            for start in range(0, len(document), 3)
        ]
        for document in documents
    ]
    found = read_text(paragraphs, tmp_path)
    assert len(found.rows()) > 40
    tokens = TokenizedCorpus(prepare_tokens(found, text.tokenizer, tmp_path))
    assert len(tokens) == 25
    all_ends = []
    words = [len(" ".join(sentences).split()) for sentences in found.rows()["sentences"]]
    for number, of_document in enumerate(paragraphs):
        expected = ids_of(text.tokenizer, of_document[1:])
        first = int(tokens.first_tokens(number))
        assert tokens.tokens(number).tolist() == [token for ids in expected for token in ids]
        all_ends += (first + np.cumsum([len(ids) for ids in expected])).tolist()
        assert tokens.document_words.at(number) == sum(words[: found.document_ends[number]])
    ends = tokens.paragraph_ends.at(np.arange(len(tokens.paragraph_ends)))
    assert tokens.sentence_ends.before(ends).tolist() == all_ends


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("bare", [[0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_documents_without_a_token_are_left_out_and_counted(tmp_path, monkeypatch, text, bare, processes):
    monkeypatch.setattr(encoding, "TOKENIZED_AT_ONCE", 1)
    documents = [["\ue000\ue001"] if number in bare else [f"Anna has {number} apples."] for number in range(3)]
    tokens = TokenizedCorpus(prepare_tokens(read_text(documents, tmp_path), text.tokenizer, tmp_path, processes))
    kept = [number for number in range(3) if number not in bare]
    ids = [ids for number in kept for ids in ids_of(text.tokenizer, documents[number])]
    assert len(tokens) == len(kept) and tokens.stores[0].empty_documents.tolist() == bare
    assert [tokens.tokens(number).tolist() for number in range(len(kept))] == ids
    assert tokens.ids.at(np.arange(len(tokens.ids))).tolist() == [token for document in ids for token in document]
    up_to = [sum(len(paragraph.split()) for (paragraph,) in documents[: number + 1]) for number in kept]
    assert tokens.document_words.at(np.arange(len(kept))).tolist() == up_to


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


def test_a_text_that_gives_no_token_is_refused(tmp_path, text):
    folder = prepare_tokens(read_text([["\ue000\ue001"]] * 4, tmp_path), text.tokenizer, tmp_path)
    with pytest.raises(UserError, match="no token in the text; give text in the tokenizer's language"):
        TokenizedCorpus(folder)


def test_special_tokens_in_a_text_are_ordinary_text_and_sentences_without_tokens_are_dropped(text, tmp_path):
    documents = [["The [MASK] was [SEP] red.", "\u200b", "Yes."]] * 25
    tokens = TokenizedCorpus(prepare_tokens(read_text(documents, tmp_path), text.tokenizer, tmp_path))
    for document in (0, 24):
        assert not set(tokens.tokens(document).tolist()) & {0, 2, 3, 4}
        # The zero-width space gives no token, so its sentence is dropped.
        assert len(tokens.sentences(document)) == 2
        assert tokens.paragraph_ends.at(2 * document + np.arange(2)).tolist() == [2 * document + 1, 2 * document + 2]


def test_preparing_the_same_text_again_writes_nothing(books, text):
    def times():
        return {path: path.stat().st_mtime_ns for path in cache_folder().rglob("*") if path.is_file()}

    before = times()
    again = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))
    assert again.tokens.folders == text.tokens.folders
    kept = {path: time for path, time in times().items() if path.suffix != ".lock"}
    assert kept.items() <= before.items()


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


@given(st.lists(st.integers(1, 3), min_size=20, max_size=30), st.data())
def test_a_sample_that_leaves_documents_out_is_one_of_all_others(blocks, data):
    """Documents of one to three blocks; every block is one sentence, its own number."""
    left_out = np.array(sorted(data.draw(st.sets(st.integers(0, len(blocks) - 1)))), dtype=np.int64)
    others = np.setdiff1d(np.arange(len(blocks)), left_out)
    most = data.draw(st.sampled_from([10**9, 40]))
    ends = np.cumsum(blocks)
    text = mock.Mock(document_ends=ends, document_characters=3 * ends)
    found, expected = SentenceSample(text, left_out, True, most), SentenceSample(text, others, False, most)
    assert found.blocks.tolist() == expected.blocks.tolist() and found.share == expected.share
    if most > 3 * ends[-1]:
        rows = [row for number in others for row in range(ends[number] - blocks[number], ends[number])]
        assert expected.blocks.tolist() == rows


# ---------------------------------------------------------------------------------------------------------------------
# The split


@given(st.integers(0, 30), st.data())
def test_a_selection_of_documents_is_an_ascending_list_of_them(count, data):
    named = sorted(data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=count)))
    rest = [document for document in range(count) if document not in named]
    array = np.array(named, dtype=np.int64)
    for selection, expected in ((Only(array), named), (AllBut(count, array), rest)):
        assert len(selection) == len(expected)
        assert selection.nth(np.arange(len(expected))).tolist() == expected
        for document in range(count + 1):
            assert selection.before(document) == sum(number < document for number in expected)
        first, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
        assert selection.within(first, end).tolist() == [number for number in expected if first <= number < end]


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


def test_a_document_larger_than_the_held_out_share_is_not_held_out():
    ends = np.cumsum([100] * 40 + [90_000])
    for fraction, most in ((0.05, 10**9), (0.9, 300)):
        held_out = held_out_documents(ends, fraction, most)
        assert 40 not in held_out and len(held_out) >= 2
    # All documents are larger than the share: the smallest are held out.
    assert held_out_documents(np.cumsum([900, 1000, 800, 700]), 0.05, 10**9).tolist() == [2, 3]
