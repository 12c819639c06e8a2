"""The order of pairs: windows tile the text, a cursor goes on where the pairs before end, weights hold."""

import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import corpus_of

from d2l_bert.tokenization.token_store import find
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.data.order import START, EpochPairs


@contextmanager
def small(stretch_tokens, window_stretches=3):
    """Stretches of a few tokens, and windows of a few stretches."""
    with mock.patch.multiple(order, STRETCH_TOKENS=stretch_tokens, WINDOW_STRETCHES=window_stretches):
        yield


@pytest.fixture
def several_windows():
    """Stretches and windows so small that the corpus below has 8 windows."""
    with small(300, 4):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """In two stores 120 documents of 2 to 29 sentences, with 1 to 9 tokens each; some 9,000 tokens."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 10, rng.integers(2, 30)).tolist() for _ in range(120)]
    return corpus_of(tmp_path_factory.mktemp("stores"), documents[:50], documents[50:])


def make(corpus, weights=()):
    """The pairs of a corpus of two sources."""
    return EpochPairs(corpus, PretrainConfig(objective="nsp", seed=1, source_weights=[*map(str, weights)]), 24)


def windows_of(pairs, epoch):
    return [pairs.window(epoch, number) for number in range(pairs.windows(epoch))]


def laid_out_by(pairs):
    """A list that grows by each window that these pairs lay out."""
    found, pieces = [], pairs.pieces
    pairs.pieces = lambda *number: (found.append(number), pieces(*number))[1]
    return found


def sentences_in(pairs, epoch):
    """The numbers of the sentences in an epoch's windows, in their order."""
    pieces = [pairs.pieces(epoch, window) for window in range(pairs.windows(epoch))]
    spans = [span for firsts, ends in pieces for span in zip(firsts, ends, strict=True)]
    return [sentence for first, end in spans for sentence in range(first, end)]


# ---------------------------------------------------------------------------------------------------------------------
# Stretches


@st.composite
def cases(draw):
    """Documents of some lengths in one or two stores; whether the sources have weights; sizes as in `small`."""
    stores = draw(
        st.lists(
            st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
            min_size=1,
            max_size=2,
        )
    )
    count = len(stores[0])
    source_ends = [*sorted(draw(st.lists(st.integers(0, count), max_size=2))), count] if len(stores) == 1 else None
    sizes = (draw(st.integers(1, 60)), draw(st.integers(1, 6)))
    return stores, source_ends, draw(st.booleans()), sizes


@settings(max_examples=50)
@given(cases())
def test_the_windows_of_an_epoch_hold_each_sentence_once(case):
    stores, source_ends, is_weighted, small_sizes = case
    with tempfile.TemporaryDirectory() as folder, small(*small_sizes):
        corpus = corpus_of(Path(folder), *stores, source_ends=source_ends)
        ends = corpus.first_tokens(np.append(0, corpus.source_ends))
        # With its own number of tokens as its weight, a source is read once in an epoch.
        pairs = make(corpus, np.diff(ends).tolist() if is_weighted else ())
        found, pieces_of = [], Counter()
        for window in range(pairs.windows(3)):
            firsts, ends = pairs.pieces(3, window)
            documents = find(corpus.document_starts, firsts)
            for document, first, end in zip(documents, firsts, ends, strict=True):
                inside = corpus.sentences(document).tolist()
                assert inside[0] <= first < end <= inside[-1] + 1
                found += range(first, end)
                pieces_of[int(document)] += 1
        assert sorted(found) == list(range(corpus.document_starts[-1]))
        sizes = np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))
        for document, count in pieces_of.items() if not is_weighted else ():
            # Only a document that is longer than a stretch is cut, into pieces of that length.
            assert count <= max(1, -(-sizes[document] // small_sizes[0]) + 1)
            assert count == 1 or sizes[document] > small_sizes[0]


# ---------------------------------------------------------------------------------------------------------------------
# Pairs after a cursor


def test_pairs_are_taken_from_window_to_window_and_have_masks_of_their_own(corpus, several_windows):
    expected = np.concatenate([window for epoch in range(3) for window in windows_of(make(corpus), epoch)])
    pairs = make(corpus)
    np.testing.assert_array_equal(pairs.take(START, len(expected))[0], expected)
    assert len(set(expected["key"].tolist())) == len(expected)
    cursors = [START]
    for start in range(0, len(expected) - 100, 100):
        some, cursor = pairs.take(cursors[-1], 100)
        np.testing.assert_array_equal(some, expected[start : start + 100])
        cursors.append(cursor)
    for number in range(len(cursors) - 2, 0, -3):  # backwards
        np.testing.assert_array_equal(pairs.take(cursors[number], 100)[0], expected[number * 100 : number * 100 + 100])


@pytest.mark.parametrize("start", [0, 1, 400, 1700])
def test_pairs_go_on_after_a_cursor_without_laying_out_what_is_before_it(corpus, several_windows, start):
    whole = make(corpus)
    cursor = whole.take(START, start)[1] if start else START
    pairs = make(corpus)
    laid_out = laid_out_by(pairs)
    np.testing.assert_array_equal(pairs.take(cursor, 600)[0], whole.take(START, start + 600)[0][start:])
    # Every window from the one that holds the first pair on, each once.
    following = [cursor[:2]]
    while len(following) < len(laid_out):
        epoch, window = following[-1]
        is_last = window + 1 == pairs.windows(epoch)
        following.append((epoch + 1, 0) if is_last else (epoch, window + 1))
    assert laid_out == following
    assert cursor[2] <= len(whole.window(*cursor[:2]))


def test_a_window_taken_to_its_last_pair_is_followed_by_the_next(corpus, several_windows):
    pairs = make(corpus)
    first, second = pairs.window(0, 0), pairs.window(0, 1)
    cursor = pairs.take(START, len(first))[1]
    np.testing.assert_array_equal(pairs.take(cursor, 3)[0], second[:3])


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("share", [0, 0.2, 0.5, "as it is", 0.9, 1])
def test_a_sentence_comes_as_often_as_the_weight_of_its_source_says(corpus, share):
    """An epoch has as many tokens as the corpus; a source has its share of them, whatever its own size is."""
    border = int(corpus.document_starts[50])
    tokens = np.diff(corpus.first_tokens([0, 50, 120]))
    share = tokens[1] / tokens.sum() if share == "as it is" else share
    pairs = make(corpus, weights=(3 * (1 - share), 3 * share))  # up to a common factor
    assert min(pairs.stretches) >= order.WEIGHTED_STRETCHES
    taken = [np.array(sentences_in(pairs, epoch)) for epoch in range(5)]
    lengths, sides = np.diff(corpus.sentence_starts), ((0, border), (border, int(corpus.document_starts[-1])))
    for number, (first, end) in enumerate(sides):
        often = (1 - share, share)[number] * tokens.sum() / tokens[number]
        for found in taken:
            of_source = lengths[found[(found >= first) & (found < end)]].sum()
            # An epoch takes whole stretches, each about one 32nd of the source.
            assert abs(of_source - often * tokens[number]) < tokens[number] / 16
        counts = np.bincount(np.concatenate(taken), minlength=sides[1][1])[first:end]
        assert counts.max() - counts.min() <= 1 and counts.mean() == pytest.approx(5 * often, abs=0.05)
    assert taken[0].tolist() != taken[1].tolist()
