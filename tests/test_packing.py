"""Sequences in rows, and rows in micro-batches: each once, full, equally many on all ranks, with little padding."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert.training.data import batches as packing
from d2l_bert.training.data.batches import Ranks


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packed_rows_are_full_and_hold_each_sequence_once(lengths):
    rows = packing.pack(lengths, 50)
    assert sorted(sequence for row in rows for sequence in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[sequence] for sequence in row) for row in rows)
    assert filled[-1] <= 50
    assert len(filled) == 1 or filled[0] + filled[1] > 50, "two rows would fit into one"


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 2000), st.sampled_from([1, 2, 3, 8, 1024])
)
def test_the_micro_batches_of_all_ranks_hold_each_row_once_and_are_equally_many(lengths, most_tokens, world_size):
    ranks = range(min(world_size, len(lengths) + 2))
    found = [packing.micro_batches(lengths, most_tokens, Ranks(world_size, rank)) for rank in ranks]
    assert sorted(row for part in found for micro_batch in part for row in micro_batch) == list(range(len(lengths)))
    assert len({len(part) for part in found}) == 1
    for micro_batch in (micro_batch for part in found for micro_batch in part if len(micro_batch) > 1):
        assert len(micro_batch) * packing.padded(max(lengths[row] for row in micro_batch)) <= most_tokens


@given(st.lists(st.integers(1, 300), min_size=1, max_size=31), st.integers(300, 20_000))
def test_a_micro_batch_ends_where_it_is_full_or_a_row_more_would_be_too_much_padding(lengths, most_tokens):
    """Of fewer than 32 rows each is a group of its own, so that the limits hold row by row."""

    def tokens_and_padding(widths):
        return max(widths) * len(widths), sum(max(widths) - width for width in widths)

    most_padding = max(256, most_tokens / 32)
    found = packing.micro_batches(lengths, most_tokens)
    widths = [[-(-lengths[row] // 8) * 8 for row in micro_batch] for micro_batch in found]
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
    found = packing.micro_batches(lengths, 16_384)
    assert len(found) > 1 and all(len(micro_batch) % size == 0 for micro_batch in found[:-1])
    computed = sum(len(micro_batch) * packing.padded(lengths[micro_batch].max()) for micro_batch in found)
    # Between groups at most a 32nd of a full micro-batch in each; in a group as much as its rows differ.
    assert computed <= sum(map(packing.padded, lengths)) + len(found) * 512 + 128 * size
