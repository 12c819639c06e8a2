"""Sequences -> rows -> micro-batches of each process, by their lengths alone.

How a step is cut into micro-batches changes its time and memory; the gradient stays the same, apart from rounding and
dropout masks.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


WIDTH_MULTIPLE = 8  # rows are padded to a multiple of this, in tokens

# Rows of similar length form groups of equal size, and a micro-batch consists of whole groups. A step has at least 16
# groups, and a full micro-batch at least 8. Larger groups give fewer tensor shapes, and a CPU prepares its matrix
# products once for each shape. Smaller groups give less padding.
MIN_GROUPS_IN_STEP = 16
MIN_GROUPS_IN_MICRO_BATCH = 8

# A micro-batch ends where its padding would be more than this share of a full one, and more than these tokens. Less
# padding would need more micro-batches, each of which casts all weights to the compute dtype and writes all gradients.
MOST_PADDING = 1 / 32
LEAST_PADDING = 256


class Ranks(NamedTuple):
    """The processes of a run, which share each step: how many there are, and which of them this one is."""

    count: int = 1
    own: int = 0


ALONE = Ranks()  # a single process


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Put sequences into rows: the longest first, each into the fullest row that it fits into (best fit decreasing).

    Args:
        lengths: tokens in each sequence, at most `capacity`.
        capacity: the largest number of tokens in a row.

    Returns:
        For each row the indices of its sequences in `lengths`.
    """
    rows = []
    free = []  # (free tokens, index of the row) of rows that are not full, in ascending order
    for sequence in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[sequence])
        fullest = bisect.bisect_left(free, (length, -1))
        if fullest < len(free):
            space, row = free.pop(fullest)
            rows[row].append(sequence)
        else:
            space = capacity
            row = len(rows)
            rows.append([sequence])
        if space > length:
            bisect.insort(free, (space - length, row))
    return rows


def rows_of_micro_batches(lengths: Sequence[int], most_tokens: int, ranks: Ranks = ALONE) -> list[list[int]]:
    """
    Cut the rows of a step into micro-batches, and return those of one process.

    Rows are sorted by length and dealt out to the processes (`deal`): every process gets about the same work, and the
    same number of micro-batches. A micro-batch takes groups of rows, longest first, until it is full or has too much
    padding. All rows of a micro-batch are padded to the width of its first.

    Three groups of 16 rows, whose first rows have the widths 128, 120 and 96: after the first group, the second would
    bring 16 * 8 = 128 tokens of padding, and the third 16 * 32 = 512 more. If 300 tokens of padding are too much, the
    first two groups are a micro-batch, and the third begins the next one.

    Args:
        lengths: tokens in each row.
        most_tokens: the largest number of tokens in a micro-batch, padding included; a single row may be longer.

    Returns:
        For each micro-batch the indices of its rows in `lengths`, longest first. The last may be empty, if this
        process has fewer rows than another.
    """
    own_rows = rows_of_rank(deal(lengths, ranks.count), ranks.own)
    # The n-th rows of all processes get one width, that of the longest of them, so that all processes cut alike.
    longest_first = np.sort(lengths)[::-1]
    widths = [padded(length) for length in longest_first[:: ranks.count]]
    group_size = _group_size(len(widths), most_tokens // widths[0])
    most_padding = max(LEAST_PADDING, MOST_PADDING * most_tokens)
    starts = [0]  # the first row of each micro-batch
    padding = 0  # tokens of padding in the last micro-batch
    for first in range(group_size, len(widths), group_size):  # the first row of each further group
        width = widths[starts[-1]]
        padding += (width - widths[first]) * group_size
        rows_with_group = first + group_size - starts[-1]
        if rows_with_group * width > most_tokens or padding > most_padding:
            starts.append(first)
            padding = 0
    return [own_rows[start:end] for start, end in itertools.pairwise([*starts, len(widths)])]


def rows_without_padding(lengths: Sequence[int], most_tokens: int, ranks: Ranks = ALONE) -> list[list[int]]:
    """
    As `rows_of_micro_batches`, for rows that are computed without padding: a micro-batch is full of their tokens.

    All processes cut where one of them has to, and get the same number of micro-batches.

    Args:
        most_tokens: the largest number of tokens in a micro-batch; a single row may be longer.
    """
    dealt = deal(lengths, ranks.count)
    own_rows = rows_of_rank(dealt, ranks.own)
    tokens_dealt = np.where(dealt == NO_ROW, 0, np.asarray(lengths)[dealt])  # (rounds, processes)
    totals = tokens_dealt.cumsum(0)  # up to each round, that round included
    starts = [0]  # the first row of each micro-batch
    while True:
        start = starts[-1]
        total_before = totals[start] - tokens_dealt[start]
        of_fullest = (totals - total_before).max(1)  # from `start` up to each round: ascends
        end = max(start + 1, int(np.searchsorted(of_fullest, most_tokens, side="right")))
        if end >= len(dealt):
            break
        starts.append(end)
    return [own_rows[start:end] for start, end in itertools.pairwise([*starts, len(dealt)])]


NO_ROW = -1  # where the last round has no row for a process


def deal(lengths: Sequence[int], count: int) -> np.ndarray:
    """
    Deal rows out to processes, the longest first, there and back: each row goes to one process.

    Rows of 9, 8, 7, 6, 5 and 4 tokens, numbered from 0, for three processes: [[0, 1, 2], [5, 4, 3]]. Each process gets
    13 tokens; dealt in turn, they would get 15, 13 and 11.

    Args:
        count: of the processes.

    Returns:
        The numbers of the rows (rounds, processes); `NO_ROW` where the last round has none.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    missing = -len(order) % count
    dealt = np.pad(order, (0, missing), constant_values=NO_ROW).reshape(-1, count)
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return dealt


def rows_of_rank(dealt: np.ndarray, rank: int) -> list[int]:
    """The numbers of the rows that `deal` has given to a process."""
    own = dealt[:, rank]
    return own[own != NO_ROW].tolist()


def _group_size(rows_in_step, rows_in_micro_batch):
    """The rows of a group, a power of two, of which a step and a full micro-batch have enough groups."""
    most = min(rows_in_step // MIN_GROUPS_IN_STEP, rows_in_micro_batch // MIN_GROUPS_IN_MICRO_BATCH)
    size = 1
    while 2 * size <= most:
        size *= 2
    return size


def padded(length: int) -> int:
    """The width, in tokens, of a row of `length` tokens: the next multiple of `WIDTH_MULTIPLE`."""
    return -(-int(length) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
