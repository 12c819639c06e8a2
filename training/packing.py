"""A step's sequences to rows and micro-batches with as little padding as may be.

Only lengths matter here. How a step is cut changes how it is computed, not what is learnt from it.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

import numpy as np


WIDTH_MULTIPLE = 8  # rows are padded to a multiple of this

# What a micro-batch costs beyond its tokens, in tokens: a few dozen kernels to start.
MICRO_BATCH_COST = 256


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


def micro_batches(lengths: Sequence[int], most_tokens: int, world_size: int = 1, rank: int = 0) -> list[list[int]]:
    """
    Cut a step's rows into the micro-batches of one process.

    Rows are sorted by length, and each `world_size` of them go to as many processes: all have about the same to do,
    in equally many micro-batches. Cuts between lengths are where padding and `MICRO_BATCH_COST` together are least.

    Args:
        lengths: tokens in each row.
        most_tokens: most tokens in a micro-batch, padding included; one row is allowed at any length.

    Returns:
        For each micro-batch the numbers of its rows, longest first. One may be empty where rows run out.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    widths = [padded(lengths[first]) for first in order[::world_size].tolist()]  # of each process's n-th row
    mine = order[rank::world_size].tolist()
    found = []
    start = 0
    for width, rows in _groups(Counter(widths), most_tokens):
        parts = -(-rows // _rows_that_fit(width, most_tokens))
        for part in range(parts):
            first, last = start + rows * part // parts, start + rows * (part + 1) // parts
            found.append(mine[first:last])
        start += rows
    return found


def padded(length: int) -> int:
    """The width of a row of so many tokens."""
    return -(-int(length) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _groups(rows_of, most_tokens):
    """Neighbouring widths that are computed together: the width and the number of rows of each group, widest first.

    Solved from the narrow end: best[i] is the least cost from the i-th width on, and where its first group ends.
    """
    widths = sorted(rows_of, reverse=True)
    best = [(0, 0)] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        rows, options = 0, []
        for last in range(first, len(widths)):
            rows += rows_of[widths[last]]
            parts = -(-rows // _rows_that_fit(widths[first], most_tokens))
            cost = rows * widths[first] + parts * MICRO_BATCH_COST + best[last + 1][0]
            options.append((cost, last + 1))
        best[first] = min(options)
    first = 0
    while first < len(widths):
        end = best[first][1]
        yield widths[first], sum(rows_of[width] for width in widths[first:end])
        first = end


def _rows_that_fit(width, most_tokens):
    return max(1, most_tokens // width)
