"""Epochs of pairs: windows tile the text, windows follow from seed and number alone, weights hold, nothing leaks."""

import pickle
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

from d2l_bert.errors import UserError
from d2l_bert.tokenization.token_store import AllBut, Only
from d2l_bert.training import epochs
from d2l_bert.training.epochs import EpochPairs, Place, Selection, source_passes


SEGMENTS = {"pairing": "segments", "max_seq_length": 24, "short_seq_prob": 0.1}


@contextmanager
def small(stretch_tokens, window_stretches=3):
    """Stretches of a few tokens, and windows of a few stretches."""
    with mock.patch.multiple(epochs, STRETCH_TOKENS=stretch_tokens, WINDOW_STRETCHES=window_stretches):
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


HELD_OUT = np.arange(0, 120, 12)


def make(corpus, seed=1, passes=None, pairing=SEGMENTS):
    """The pairs of a corpus of two sources, ten of whose documents are held out."""
    return EpochPairs(Selection(corpus, AllBut(120, HELD_OUT), [40, 120], passes), pairing, seed)


def windows_of(pairs, epoch):
    return [pairs.window(epoch, number) for number in range(pairs.windows(epoch))]


def documents_of(corpus, tokens):
    return corpus.document_ends.find(corpus.sentence_ends.find(tokens))


def laid_out_by(pairs):
    """A list that grows by each window that these pairs lay out."""
    found, pieces = [], pairs.pieces
    pairs.pieces = lambda *number: (found.append(number), pieces(*number))[1]
    return found


def sentences_in(pairs, epoch):
    """The numbers of the sentences in an epoch's windows, in their order."""
    pieces = [pairs.pieces(epoch, window) for window in range(pairs.windows(epoch))]
    spans = [span for piece in pieces for span in zip(piece.firsts, piece.ends, strict=True)]
    return [sentence for first, end in spans for sentence in range(first, end)]


# ---------------------------------------------------------------------------------------------------------------------
# Stretches


@st.composite
def cases(draw):
    """Documents of some lengths in one or two stores, some of them selected, in sources; sizes as in `small`."""
    stores = draw(
        st.lists(
            st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
            min_size=1,
            max_size=2,
        )
    )
    count = sum(map(len, stores))
    named = np.array(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))), dtype=np.int64)
    if len(named) < count and draw(st.booleans()):
        documents, listed = AllBut(count, named), np.setdiff1d(np.arange(count), named).tolist()
    else:
        documents, listed = Only(named), named.tolist()
    source_ends = [*sorted(draw(st.lists(st.integers(0, count), max_size=2))), count]
    sizes = (draw(st.integers(1, 60)), draw(st.integers(1, 6)))
    return stores, documents, listed, source_ends, sizes


@settings(max_examples=50)
@given(cases())
def test_the_windows_of_an_epoch_hold_each_sentence_of_the_selected_documents_once(case):
    stores, documents, listed, source_ends, small_sizes = case
    with tempfile.TemporaryDirectory() as folder, small(*small_sizes):
        corpus = corpus_of(Path(folder), *stores)
        pairs = EpochPairs(Selection(corpus, documents, source_ends), SEGMENTS, 1)
        found, pieces_of = [], Counter()
        for window in range(pairs.windows(3)):
            pieces = pairs.pieces(3, window)
            for document, first, end in zip(pieces.documents, pieces.firsts, pieces.ends, strict=True):
                inside = corpus.sentences(document).tolist()
                assert inside[0] <= first < end <= inside[-1] + 1
                found += range(first, end)
                pieces_of[int(document)] += 1
        assert sorted(found) == [sentence for document in listed for sentence in corpus.sentences(document)]
        sizes = corpus.sizes(np.arange(len(corpus)))
        for document, count in pieces_of.items():
            # Only a document that is longer than a stretch is cut, into pieces of that length.
            assert count <= max(1, -(-sizes[document] // small_sizes[0]) + 1)
            assert count == 1 or sizes[document] > small_sizes[0]


@settings(max_examples=30)
@given(cases(), st.sampled_from(["nsp", "none"]), st.sampled_from(["segments", "sentences"]))
def test_the_pairs_of_an_epoch_hold_the_selected_documents_and_no_other(case, objective, pairing):
    stores, documents, listed, source_ends, small_sizes = case
    with tempfile.TemporaryDirectory() as folder, small(*small_sizes):
        corpus = corpus_of(Path(folder), *stores)
        options = {"pairing": pairing, "max_seq_length": 16, "objective": objective}
        found = np.concatenate(windows_of(EpochPairs(Selection(corpus, documents, source_ends), options, 1), 0))
        is_covered = np.zeros(len(corpus.ids), dtype=bool)
        for pair in found:
            for side in ("a", "b"):
                is_covered[pair[f"{side}_start"] : pair[f"{side}_end"]] = True
        tokens = np.flatnonzero(is_covered)
        assert set(documents_of(corpus, tokens).tolist()) == set(listed)
        if objective == "none":
            expected = [sentence for document in listed for sentence in corpus.sentences(document)]
            assert sorted(set(corpus.sentence_ends.find(tokens).tolist())) == expected


@given(cases())
def test_the_tokens_of_a_source_are_those_of_its_selected_documents(case):
    stores, documents, listed, source_ends, *_ = case
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(Path(folder), *stores)
        expected = [0] * len(source_ends)
        for document in listed:
            expected[int(np.searchsorted(source_ends, document, side="right"))] += len(corpus.tokens(document))
        assert Selection(corpus, documents, source_ends).source_tokens().tolist() == expected


def test_few_documents_of_a_large_corpus_are_laid_out_together(corpus, several_windows):
    selection = Selection(corpus, Only(HELD_OUT), [120], is_one_stretch=True)
    pairs = EpochPairs(selection, SEGMENTS, 1)
    assert pairs.windows(0) == 1 and len(pairs.sources[0].pieces(np.arange(1)).documents) == len(HELD_OUT)
    assert pairs.pieces(0, 0).documents.tolist() == HELD_OUT.tolist()
    assert EpochPairs(Selection(corpus, Only(HELD_OUT), [120]), SEGMENTS, 1).windows(0) > 5


# ---------------------------------------------------------------------------------------------------------------------
# Windows


def test_a_window_follows_from_seed_epoch_and_number_alone(corpus, several_windows):
    asked = [(epoch, window) for epoch in range(3) for window in range(8)]
    expected = {place: make(corpus).window(*place) for place in asked}
    pairs, rng = make(corpus), np.random.default_rng(0)
    for turn in range(40):
        place = asked[6 + rng.integers(4)]  # the last two windows of an epoch, and the first two of the next
        np.testing.assert_array_equal(pairs.window(*place), expected[place])
        if turn % 10 == 9:
            pairs = pickle.loads(pickle.dumps(pairs))
        if turn % 20 == 19:
            pairs.place_of(int(rng.integers(2000)))
    others = make(corpus, seed=2)
    assert not any(np.array_equal(others.window(*place), expected[place]) for place in asked)


def test_each_epoch_holds_all_documents_in_another_order_with_other_pairs(corpus, several_windows):
    pairs = make(corpus)
    found = [np.concatenate(windows_of(pairs, epoch)) for epoch in (0, 1)]
    for made in found:
        documents = documents_of(corpus, made["a_start"])
        assert sorted(set(documents)) == np.setdiff1d(np.arange(120), HELD_OUT).tolist()
        assert (documents[1:] == documents[:-1]).mean() < 0.3  # above 0.8 if pairs came document by document
    assert sentences_in(pairs, 0) != sentences_in(pairs, 1)
    assert len(set(found[0].tolist()) & set(found[1].tolist())) < 0.1 * len(found[0])


def test_pairs_are_shuffled_over_a_whole_window(corpus):
    with small(300, 100):
        (window,) = windows_of(make(corpus), 0)
        documents = documents_of(corpus, window["a_start"])
        assert (documents[1:] == documents[:-1]).mean() < 0.05
        assert abs(np.corrcoef(np.arange(len(documents)), documents)[0, 1]) < 0.1


def test_no_window_is_pickled_and_two_are_held(corpus, several_windows):
    pairs = make(corpus)
    before = len(pickle.dumps(pairs))
    window = pairs.window(0, 0)
    assert pairs.window(0, 0) is window and len(pickle.dumps(pairs)) == before
    for number in range(1, 4):
        pairs.window(0, number)
    assert list(pairs._open) == [(0, 2), (0, 3)]


# ---------------------------------------------------------------------------------------------------------------------
# Pairs by their number


@settings(max_examples=6)  # each lays out three epochs
@given(st.sets(st.integers(1, 1499), max_size=12))
def test_slices_in_any_cutting_give_the_same_pairs_and_keys(corpus, cuts):
    with small(300, 4):
        expected, expected_keys = make(corpus).slice(0, 1500)
        pairs, cuts = make(corpus), [0, *sorted(cuts), 1500]
        parts = [pairs.slice(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), expected)
        np.testing.assert_array_equal(np.concatenate([keys for _, keys in parts]), expected_keys)


def test_pairs_are_numbered_from_window_to_window_and_have_masks_of_their_own(corpus, several_windows):
    expected = np.concatenate([window for epoch in range(3) for window in windows_of(make(corpus), epoch)])
    pairs = make(corpus)
    found, keys = pairs.slice(0, len(expected))
    np.testing.assert_array_equal(found, expected)
    assert len(set(keys.tolist())) == len(expected)
    for start in range(len(expected) - 100, 0, -300):  # backwards
        np.testing.assert_array_equal(pairs.slice(start, start + 100)[0], expected[start : start + 100])


@pytest.mark.parametrize("start", [0, 1, 400, 1700])
def test_pairs_go_on_from_a_place_without_laying_out_what_is_before_it(corpus, several_windows, start):
    whole = make(corpus)
    whole.slice(0, start + 1)
    position = whole.position(start)
    expected = whole.slice(start, start + 600)
    pairs = make(corpus)
    laid_out = laid_out_by(pairs)
    pairs.go_on_from(Place(**position))
    for found, of_whole in zip(pairs.slice(start, start + 600), expected, strict=True):
        np.testing.assert_array_equal(found, of_whole)
    # Every window from the one that holds the first pair on, each once.
    following = [(position["epoch"], position["window"])]
    while len(following) < len(laid_out):
        epoch, window = following[-1]
        is_last = window + 1 == pairs.windows(epoch)
        following.append((epoch + 1, 0) if is_last else (epoch, window + 1))
    assert laid_out == following
    assert position["first_pair"] <= start < position["first_pair"] + len(whole.window(*list(position.values())[:2]))
    # An earlier pair is found, too.
    np.testing.assert_array_equal(pairs.slice(0, 5)[0], whole.slice(0, 5)[0])


def test_the_pairs_of_an_epoch_are_counted_and_of_many_windows_estimated(corpus):
    for passes in (None, np.array([0.5, 1.5])):
        with small(300, 1000):
            exact = make(corpus, passes=passes)
            assert exact.windows(0) == 1
            assert exact.pairs_in_an_epoch() == len(exact.window(0, 0))
        with small(300, 10):
            many = make(corpus, passes=passes)
            assert many.windows(0) > 2
            assert many.pairs_in_an_epoch() == pytest.approx(len(np.concatenate(windows_of(many, 0))), rel=0.1)


def test_a_text_without_a_pair_is_refused(tmp_path):
    words = corpus_of(tmp_path, [[1]] * 30)  # a sentence of one token has no order
    pairs = EpochPairs(Selection(words, AllBut(30, HELD_OUT[:0]), [30]), {**SEGMENTS, "objective": "sop"}, 1, "words")
    with small(1, 1), pytest.raises(UserError, match="^words: no pair of segments in the text to train on; give more"):
        pairs.place_of(0)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("often", [0, 0.4, 0.5, 1, 2.5])
def test_a_sentence_comes_as_often_as_the_passes_of_its_source_say(corpus, often):
    pairs = make(corpus, passes=np.array([1, often]))
    assert min(source.stretches for source in pairs.sources) >= epochs.WEIGHTED_STRETCHES
    taken = [np.array(sentences_in(pairs, epoch)) for epoch in range(5)]
    border = int(corpus.document_ends.before(np.array(40)))
    trained = [
        sentence for document in range(120) if document not in HELD_OUT for sentence in corpus.sentences(document)
    ]
    first, second = ([sentence for sentence in trained if (sentence < border) == is_first] for is_first in (1, 0))
    for found in taken:
        assert sorted(found[found < border].tolist()) == first
        # An epoch takes whole stretches, each about one 32nd of the source.
        assert abs((found >= border).sum() - often * len(second)) < len(second) / 16
    counts = np.bincount(np.concatenate(taken), minlength=trained[-1] + 1)[second]
    assert counts.max() - counts.min() <= 1 and counts.mean() == pytest.approx(5 * often, abs=0.05)
    assert taken[0].tolist() != taken[1].tolist()


def test_a_source_with_weights_gives_its_share_of_the_tokens(corpus):
    tokens = Selection(corpus, AllBut(120, HELD_OUT), [40, 120]).source_tokens()
    pairs = make(corpus, passes=source_passes(tokens, [3, 1]), pairing={**SEGMENTS, "objective": "none"})
    found = np.concatenate([window for epoch in range(4) for window in windows_of(pairs, epoch)])
    from_first = found["a_start"] < corpus.first_tokens(np.array([40]))
    sizes = found["a_end"] - found["a_start"]
    assert sizes[from_first].sum() / sizes.sum() == pytest.approx(0.75, abs=0.02)
    assert sizes.sum() == pytest.approx(4 * tokens.sum(), rel=0.02)


def test_source_weights_are_shares_of_an_epochs_tokens():
    passes = source_passes(np.array([1000, 3000, 500]), [1, 1, 0])
    assert (passes * [1000, 3000, 500]).tolist() == [2250, 2250, 0]
    with pytest.raises(ValueError, match="source 2 is empty"):
        source_passes(np.array([1000, 0]), [1, 1])


# ---------------------------------------------------------------------------------------------------------------------
# Random second segments


def random_pairs(corpus, pairs, number_of_epochs):
    """The documents of A and of B of the pairs with a random B."""
    found = np.concatenate([window for epoch in range(number_of_epochs) for window in windows_of(pairs, epoch)])
    found = found[found["next_sentence_label"] == 1]
    return documents_of(corpus, found["a_start"]), documents_of(corpus, found["b_start"])


def test_random_second_segments_come_from_the_whole_corpus(corpus):
    with small(100, 2):
        pairs = make(corpus)
        _, b = random_pairs(corpus, pairs, 5)
        counts = np.bincount(b, minlength=120)[np.setdiff1d(np.arange(120), HELD_OUT)]
        expected = len(b) / 110
        assert expected > 10
        # Each document equally often: a chi-squared number with some 109 degrees of freedom.
        assert ((counts - expected) ** 2 / expected).sum() < 109 + 4 * np.sqrt(2 * 109)


@pytest.mark.parametrize(("passes", "share"), [((0.5, 1.5), 0.36 / (0.36 + 3 * 0.73)), ((0, 1), 0.0), ((1, 0), 1.0)])
def test_random_second_segments_come_from_each_source_as_often_as_it_is_gone_through(corpus, passes, share):
    pairs = make(corpus, passes=np.array(passes))
    a, b = random_pairs(corpus, pairs, 6)
    assert (a != b).all() and len(b) > 300
    of_first = np.mean(b < 40)
    assert abs(of_first - share) <= 4 * np.sqrt(share * (1 - share) / len(b))


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("passes", [None, np.array([0.5, 2.0])])
def test_held_out_documents_are_in_no_training_pair(corpus, several_windows, pairing, passes):
    pairs = make(corpus, passes=passes, pairing={"pairing": pairing, "max_seq_length": 24})
    found = np.concatenate([window for epoch in range(3) for window in windows_of(pairs, epoch)])
    assert len(found) > 1000
    for side in ("a", "b"):
        for place in (found[f"{side}_start"], found[f"{side}_end"] - 1):
            assert not np.isin(documents_of(corpus, place), HELD_OUT).any()
