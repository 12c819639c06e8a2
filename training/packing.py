"""A step's sequences to rows and micro-batches with as little padding as may be.

Only lengths matter here. How a step is cut changes how it is computed, not what is learnt from it.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

import numpy as np


WIDTH_MULTIPLE = 8  # rows are padded to a multiple of this

# A step has so many bunches of rows at least, a full micro-batch so many, and cuts come between them: micro-batches
# then have few shapes, for each of which a CPU has to prepare its products, and are hardly wider or less full.
LEAST_BUNCHES, LEAST_BUNCHES_AT_ONCE = 16, 8

# What a micro-batch costs beyond its tokens, in tokens, where the model is not known (`arithmetic.micro_batch_cost`).
MICRO_BATCH_COST = 128


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Put sequences into rows: the longest first, each into the fullest row that still has room (best fit decreasing).

    Args:
        lengths: tokens in each sequence, none above `capacity`.
        capacity: most tokens in a row.

    Returns:
        For each row the numbers of its sequences.
    """
    rows, free = [], []  # `free` holds (tokens left, number of the row), ascending
    for sequence in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[sequence])
        place = bisect.bisect_left(free, (length, -1))
        if place < len(free):
            left, row = free.pop(place)
            rows[row].append(sequence)
        else:
            left, row = capacity, len(rows)
            rows.append([sequence])
        if left > length:
            bisect.insort(free, (left - length, row))
    return rows


def micro_batches(
    lengths: Sequence[int], most_tokens: int, world_size: int = 1, rank: int = 0, cost: int = MICRO_BATCH_COST
) -> list[list[int]]:
    """
    Cut a step's rows into the micro-batches of one process.

    Rows are sorted by length, and each `world_size` of them go to as many processes: all have about the same to do,
    in equally many micro-batches. Cuts between bunches are where padding and costs together are least.

    Args:
        lengths: tokens in each row.
        most_tokens: most tokens in a micro-batch, padding included; one row is allowed at any length.
        cost: of a micro-batch beyond its tokens, in tokens.

    Returns:
        For each micro-batch the numbers of its rows, longest first. One may be empty where rows run out.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    mine = order[rank::world_size].tolist()
    longest = [padded(length) for length in np.asarray(lengths)[order[::world_size]]]  # of each process's n-th row
    bunch = bunch_size(len(longest), most_tokens // longest[0])
    found = []
    start = 0
    for width, bunches in _groups(Counter(longest[::bunch]), bunch, most_tokens, cost):
        parts = -(-bunches // _bunches_that_fit(width, bunch, most_tokens))
        for part in range(parts):
            first, last = (start + bunches * each // parts for each in (part, part + 1))
            found.append(mine[first * bunch : last * bunch])
        start += bunches
    return found


def bunch_size(rows: int, most: int) -> int:
    """How many of so many rows stay together, a power of two, where `most` of the longest fit into a micro-batch."""
    limit = max(1, min(rows // LEAST_BUNCHES, most // LEAST_BUNCHES_AT_ONCE))
    return 1 << limit.bit_length() - 1


def padded(length: int) -> int:
    """The width of a row of so many tokens."""
    return -(-int(length) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _groups(bunches_of, bunch, most_tokens, cost):
    """Neighbouring widths that are computed together: width and number of bunches of each group, widest first.

    Solved from the narrow end: best[i] is the least cost from the i-th width on, and where its first group ends.
    """
    widths = sorted(bunches_of, reverse=True)
    best = [(0, 0)] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        bunches, options = 0, []
        for last in range(first, len(widths)):
            bunches += bunches_of[widths[last]]
            parts = -(-bunches // _bunches_that_fit(widths[first], bunch, most_tokens))
            tokens = bunches * bunch * widths[first]
            options.append((tokens + parts * cost + best[last + 1][0], last + 1))
        best[first] = min(options)
    first = 0
    while first < len(widths):
        end = best[first][1]
        yield widths[first], sum(bunches_of[width] for width in widths[first:end])
        first = end


def _bunches_that_fit(width, bunch, most_tokens):
    return max(1, most_tokens // (width * bunch))
