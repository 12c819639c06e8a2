"""The order of pairs: windows tile the text, a cursor goes on, weights hold; pairs in rows and micro-batches."""

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import corpus_of

from d2l_bert.tokenization.token_store import find
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.data import rows as packing
from d2l_bert.training.data.order import START, EpochPairs
from d2l_bert.training.data.rows import Ranks


def small(stretch_tokens, window_stretches):
    """Stretches of a few tokens, and windows of a few stretches."""
    return mock.patch.multiple(order, STRETCH_TOKENS=stretch_tokens, WINDOW_STRETCHES=window_stretches)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """In two stores 120 documents of 2 to 29 sentences, with 1 to 9 tokens each; some 9,000 tokens."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 10, rng.integers(2, 30)).tolist() for _ in range(120)]
    return corpus_of(tmp_path_factory.mktemp("stores"), documents[:50], documents[50:])


def make(corpus, weights=()):
    """The pairs of a corpus of two sources."""
    return EpochPairs(corpus, PretrainConfig(objective="nsp", seed=1, source_weights=[*map(str, weights)]), 24)


def pieces_in(pairs, epoch):
    """The first sentence of each piece of an epoch's windows, and that after its last, in their order."""
    found = []
    for window in range(pairs.window_count(epoch)):
        found += zip(*pairs.pieces(epoch, window), strict=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Stretches


sentence_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)
documents = st.lists(sentence_lengths, min_size=1, max_size=8)


@st.composite
def cases(draw):
    """The documents of one or two stores, as `corpus_of` takes them, and of one store where its sources end."""
    stores = draw(st.lists(documents, min_size=1, max_size=2))
    if len(stores) == 2:
        return stores, None
    count = len(stores[0])
    ends = draw(st.lists(st.integers(0, count), max_size=2))
    return stores, [*sorted(ends), count]


@pytest.mark.slow
@given(cases(), st.booleans(), st.integers(1, 60), st.integers(1, 6))
def test_the_windows_of_an_epoch_hold_each_sentence_once(case, is_weighted, stretch_tokens, window_stretches):
    stores, source_ends = case
    with tempfile.TemporaryDirectory() as folder, small(stretch_tokens, window_stretches):
        corpus = corpus_of(Path(folder), *stores, source_ends=source_ends)
        ends = corpus.first_tokens(np.append(0, corpus.source_ends))
        # With its own number of tokens as its weight, a source is read once in an epoch.
        pairs = make(corpus, np.diff(ends).tolist() if is_weighted else ())
        found = []
        pieces_of = Counter()
        for first, end in pieces_in(pairs, 3):
            document = int(find(corpus.document_starts, first))
            start, stop = corpus.document_starts[document : document + 2]
            assert start <= first < end <= stop
            found += range(first, end)
            pieces_of[document] += 1
        assert sorted(found) == list(range(corpus.document_starts[-1]))
        if is_weighted:
            return
        sizes = np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))
        for document, count in pieces_of.items():
            # Only a document that is longer than a stretch is cut, into pieces of that length.
            most = -(-sizes[document] // stretch_tokens) + 1
            assert count <= (most if sizes[document] > stretch_tokens else 1)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs after a cursor


@pytest.mark.slow
def test_pairs_are_taken_from_window_to_window_and_have_masks_of_their_own(corpus):
    """Also after a cursor that stands behind the last pair of a window, and without a look at what is before it."""
    with small(300, 4):
        whole = make(corpus)
        windows = []
        for epoch in range(6):
            windows += [whole.window(epoch, number) for number in range(whole.window_count(epoch))]
        expected = np.concatenate(windows)
        assert len(windows) == 54
        assert len(set(expected["key"].tolist())) == len(expected)
        for start in (1700, 400, len(windows[0]), 1):
            taken, cursor = whole.take(START, start)
            np.testing.assert_array_equal(taken, expected[:start])
            following = make(corpus)
            behind = cursor
            found = []
            with mock.patch.object(following, "pieces", wraps=following.pieces) as pieces:
                for count in (200, 5, 395):  # the second ends in the window that it begins in
                    some, behind = following.take(behind, count)
                    found.append(some)
            np.testing.assert_array_equal(np.concatenate(found), expected[start : start + 600])
            laid_out = [call.args for call in pieces.call_args_list]
            assert laid_out[0] == cursor[:2] and laid_out == sorted(set(laid_out))


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("share", [0, 0.2, 0.5, "as it is", 0.9, 1])
def test_a_sentence_comes_as_often_as_the_weight_of_its_source_says(corpus, share):
    """An epoch has as many tokens as the corpus; a source has its share of them, whatever its own size is."""
    tokens = np.diff(corpus.first_tokens([0, 50, 120]))
    borders = corpus.document_starts[[0, 50, 120]]
    share = tokens[1] / tokens.sum() if share == "as it is" else share
    pairs = make(corpus, weights=(3 * (1 - share), 3 * share))  # up to a common factor
    assert min(pairs.stretch_counts) >= order.WEIGHTED_STRETCHES
    taken = []
    for epoch in range(5):
        sentences = [np.arange(*piece) for piece in pieces_in(pairs, epoch)]
        taken.append(np.concatenate(sentences))
    counts = np.array([np.bincount(found, minlength=borders[-1]) for found in taken])  # (epochs, sentences)
    sentence_tokens = np.diff(corpus.sentence_starts)
    for number, of_all in enumerate((1 - share, share)):
        often = of_all * tokens.sum() / tokens[number]
        inside = slice(*borders[number : number + 2])
        of_source = counts[:, inside] @ sentence_tokens[inside]
        # An epoch takes whole stretches, each about one 32nd of the source.
        assert np.abs(of_source - often * tokens[number]).max() < tokens[number] / 16
        times = counts[:, inside].sum(0)
        assert times.max() - times.min() <= 1
        assert times.mean() == pytest.approx(5 * often, abs=0.05)
    assert taken[0].tolist() != taken[1].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Sequences in rows, and rows in micro-batches: each once, full, equally many on all ranks, with little padding


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packed_rows_are_full_and_hold_each_sequence_once(lengths):
    rows = packing.pack(lengths, 50)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    filled = sorted(sum(lengths[sequence] for sequence in row) for row in rows)
    assert filled[-1] <= 50
    assert len(filled) == 1 or filled[0] + filled[1] > 50, "two rows would fit into one"


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 2000), st.sampled_from([1, 2, 3, 8, 1024])
)
def test_the_micro_batches_of_all_ranks_hold_each_row_once_and_are_equally_many(lengths, most_tokens, world_size):
    ranks = range(min(world_size, len(lengths) + 2))
    found = [packing.rows_of_micro_batches(lengths, most_tokens, Ranks(world_size, rank)) for rank in ranks]
    assert len({len(part) for part in found}) == 1
    micro_batches = list(itertools.chain.from_iterable(found))
    assert sorted(itertools.chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        longest = max((lengths[row] for row in micro_batch), default=0)
        assert len(micro_batch) <= 1 or len(micro_batch) * packing.padded(longest) <= most_tokens


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 2000), st.sampled_from([1, 2, 3, 8, 1024])
)
def test_without_padding_micro_batches_are_full_of_the_tokens_of_the_fullest_rank(lengths, most_tokens, world_size):
    ranks = range(min(world_size, len(lengths) + 2))
    found = [packing.rows_without_padding(lengths, most_tokens, Ranks(world_size, rank)) for rank in ranks]
    assert len({len(part) for part in found}) == 1
    of_all_ranks = list(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))
    assert sorted(of_all_ranks) == list(range(len(lengths)))
    tokens = np.array([[sum(lengths[row] for row in rows) for rows in part] for part in found])
    assert (tokens == 0).sum() <= len(found), "at most the last one of a rank is empty"
    for part, tokens_of_rank in zip(found, tokens, strict=True):
        assert all(len(rows) <= 1 or count <= most_tokens for rows, count in zip(part, tokens_of_rank, strict=True))
    for number in range(1, len(found[0])):
        with_a_row_more = [
            tokens[rank, number - 1] + sum(lengths[row] for row in part[number][:1]) for rank, part in enumerate(found)
        ]
        assert max(with_a_row_more) > most_tokens


@pytest.mark.parametrize(("world_size", "with_padding", "without"), [(1, 10, 7), (8, 2, 1)])
def test_without_padding_there_are_fewer_micro_batches(world_size, with_padding, without):
    """Of 2,048 rows of at most 128 tokens, half of which are full, in micro-batches of 32,768 tokens."""
    lengths = np.random.default_rng(0).integers(32, 129, 2048)
    lengths[:1024] = 128
    ranks = Ranks(world_size, 0)
    assert len(packing.rows_of_micro_batches(lengths, 32_768, ranks)) == with_padding
    assert len(packing.rows_without_padding(lengths, 32_768, ranks)) == without


@pytest.mark.parametrize("rows_a_rank", [16, 64])
@pytest.mark.parametrize("cut", [packing.rows_of_micro_batches, packing.rows_without_padding])
def test_64_ranks_have_as_many_micro_batches_and_nearly_as_many_tokens(cut, rows_a_rank):
    """In 20 steps of rows of at most 128 tokens, half of which are full."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(16, 129, 64 * rows_a_rank)
        lengths[rng.random(len(lengths)) < 0.5] = 128
        found = [cut(lengths, 1024, Ranks(64, rank)) for rank in range(64)]
        assert len({len(part) for part in found}) == 1
        rows_of_ranks = [list(itertools.chain.from_iterable(part)) for part in found]
        assert sorted(itertools.chain.from_iterable(rows_of_ranks)) == list(range(len(lengths)))
        tokens = [lengths[rows].sum() for rows in rows_of_ranks]
        assert max(tokens) <= 1.03 * min(tokens)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=31), st.integers(300, 20_000))
def test_a_micro_batch_ends_where_it_is_full_or_a_row_more_would_be_too_much_padding(lengths, most_tokens):
    """Of fewer than 32 rows each is a group of its own, so that the limits hold row by row."""

    def tokens_and_padding(widths):
        tokens = max(widths) * len(widths)
        return tokens, tokens - sum(widths)

    def width(row):
        """The length of a row as a multiple of 8."""
        return -(-lengths[row] // 8) * 8

    most_padding = max(256, most_tokens / 32)
    found = packing.rows_of_micro_batches(lengths, most_tokens)
    widths = [list(map(width, micro_batch)) for micro_batch in found]
    assert sum(widths, []) == sorted(sum(widths, []), reverse=True)
    for own, following in itertools.zip_longest(widths, widths[1:]):
        tokens, padding = tokens_and_padding(own)
        assert len(own) == 1 or (tokens <= most_tokens and padding <= most_padding)
        if following:
            tokens, padding = tokens_and_padding([*own, following[0]])
            assert tokens > most_tokens or padding > most_padding


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        (1024, 16),  # a full micro-batch, of 128 rows of 128 tokens, has 8 groups
        (64, 4),  # a step has 16 groups
        (70, 4),  # a power of two
        (20, 1),
    ],
)
def test_micro_batches_consist_of_groups_so_that_there_are_few_shapes(rows, size):
    lengths = np.random.default_rng(0).integers(3, 129, rows)
    lengths[0] = 128
    found = packing.rows_of_micro_batches(lengths, 16_384)
    assert len(found) > 1
    assert all(len(micro_batch) % size == 0 for micro_batch in found[:-1])
    computed = sum(len(micro_batch) * packing.padded(lengths[micro_batch].max()) for micro_batch in found)
    needed = sum(map(packing.padded, lengths))
    # Between groups at most a 32nd of a full micro-batch in each; in a group as much as its rows differ.
    assert computed <= needed + len(found) * 512 + 128 * size
