"""Puts the sequences of a step into rows, and the rows into micro-batches, with little padding.

These functions take the lengths of sequences, not their tokens. How a step is cut into micro-batches changes the time
and memory of the step; the gradient stays the same, apart from rounding and dropout masks.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


WIDTH_MULTIPLE = 8  # rows are padded to a multiple of this, in tokens

# Rows of similar length form groups of equal size, and a micro-batch consists of whole groups. A step has at least 16
# groups, and a full micro-batch at least 8. Larger groups give fewer tensor shapes, and a CPU prepares its matrix
# products once for each shape. Smaller groups give less padding.
MIN_GROUPS_IN_STEP, MIN_GROUPS_IN_MICRO_BATCH = 16, 8

# The fixed cost of a micro-batch, in tokens, if the caller gives none; `meter.micro_batch_cost` computes the cost
# for a model.
MICRO_BATCH_COST = 128


@dataclass(frozen=True)
class Sharding:
    """
    Which part of each step one process computes.

    Args:
        world_size, rank: the number of processes, and that of this process.
        cost: the fixed cost of a micro-batch, in tokens.
    """

    world_size: int = 1
    rank: int = 0
    cost: int = MICRO_BATCH_COST


ALONE = Sharding()  # a single process


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Put sequences into rows: the longest first, each into the fullest row that it fits into (best fit decreasing).

    Args:
        lengths: tokens in each sequence, at most `capacity`.
        capacity: the largest number of tokens in a row.

    Returns:
        For each row the indices of its sequences in `lengths`.
    """
    rows, free = [], []  # `free` holds (free tokens, index of the row), in ascending order
    for sequence in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[sequence])
        fullest = bisect.bisect_left(free, (length, -1))
        if fullest < len(free):
            space, row = free.pop(fullest)
            rows[row].append(sequence)
        else:
            space, row = capacity, len(rows)
            rows.append([sequence])
        if space > length:
            bisect.insort(free, (space - length, row))
    return rows


def micro_batches(lengths: Sequence[int], most_tokens: int, sharding: Sharding = ALONE) -> list[list[int]]:
    """
    Cut the rows of a step into micro-batches, and return those of one process.

    Rows are sorted by length and dealt out to the processes in turn: every process gets about the same work, and the
    same number of micro-batches. Rows of different lengths share a micro-batch where that makes the sum of padding and
    fixed costs smallest.

    Args:
        lengths: tokens in each row.
        most_tokens: the largest number of tokens in a micro-batch, padding included; a single row may be longer.
        sharding: the process.

    Returns:
        For each micro-batch the indices of its rows in `lengths`, longest first. The last may be empty, if this
        process has fewer rows than rank 0.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    own_rows = order[sharding.rank :: sharding.world_size].tolist()
    # The n-th rows of all processes get one width, that of the longest of them, so that all processes cut alike.
    widths = [padded(length) for length in np.asarray(lengths)[order[:: sharding.world_size]]]
    rows_at_once = most_tokens // widths[0]  # of the longest
    limit = max(1, min(len(widths) // MIN_GROUPS_IN_STEP, rows_at_once // MIN_GROUPS_IN_MICRO_BATCH))
    size = 1 << limit.bit_length() - 1  # of a group, in rows: a power of two
    result = []
    start = 0  # in groups
    for width, groups in _merged_widths(Counter(widths[::size]), size, most_tokens, sharding.cost):
        count = -(-groups // _groups_that_fit(width, size, most_tokens))  # micro-batches of this width
        for index in range(count):
            first, end = (start + groups * number // count for number in (index, index + 1))
            result.append(own_rows[first * size : end * size])
        start += groups
    return result


def padded(length: int) -> int:
    """The width, in tokens, of a row of `length` tokens: the next multiple of `WIDTH_MULTIPLE`."""
    return -(-int(length) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _merged_widths(groups_of_width, size, most_tokens, cost):
    """
    Choose which neighbouring widths are padded to one width, so that padding and fixed costs are least in all.

    Dynamic programming from the narrowest width: best[i] holds the least cost of the widths from index i on, and the
    index after the last width that is padded to the i-th.

    Args:
        groups_of_width: the number of groups of each width.
        size: rows in a group.

    Yields:
        Each width that remains, widest first, and the number of groups that are padded to this width.
    """
    widths = sorted(groups_of_width, reverse=True)
    best = [(0, 0)] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        groups, options = 0, []
        for last in range(first, len(widths)):
            groups += groups_of_width[widths[last]]
            count = -(-groups // _groups_that_fit(widths[first], size, most_tokens))  # micro-batches of this width
            options.append((groups * size * widths[first] + count * cost + best[last + 1][0], last + 1))
        best[first] = min(options)
    first = 0
    while first < len(widths):
        end = best[first][1]
        yield widths[first], sum(groups_of_width[width] for width in widths[first:end])
        first = end


def _groups_that_fit(width, size, most_tokens):
    """How many groups of `size` rows fit into a micro-batch of at most `most_tokens`; at least 1."""
    return max(1, most_tokens // (width * size))
