"""Counts of the tokens that stand side by side in a text, and word vectors that tell a token from its neighbours.

`x` and `w` are two tokens of a vocabulary of V, x before w; K is the size of a word vector. The pointwise mutual
information of the two (PMI: Church and Hanks, 1990) is

    log(n(x w) + d) - log(e(x w) + d),    e(x w) = n(x) n(w) / n,

where n(x w) is how often w stood after x, e(x w) how often it would by chance, and d smooths both. Its leading
directions are word vectors (Levy and Goldberg, 2014). The matrix of V times V is never made: it is the sum of
log(1 + n(x w) / d), which is 0 for tokens that never stood side by side, and of -log(1 + e(x w) / d), a smooth
function of log n(x) + log n(w) alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.tokenization.token_store import TokenizedCorpus, ranges
from d2l_bert.training.data.pairs import tokens_in


TOKENS_AT_ONCE = 2**23  # that are counted at once
MOST_TOKENS = 2**28  # that are counted in all; more change little, and take 0.15 s a million

# The most different bigrams that are kept, the most frequent ones (lossy counting; Manku and Motwani, 2002). Ten
# million words of books have 1.2 million.
MOST_BIGRAMS = 2**23

# The most columns of a word vector. With 30,522 entries and 6 million different bigrams, vectors of 384 columns took
# 19 s on a core of an EPYC (Zen 3).
MOST_COLUMNS = 384

# d above.
SMOOTHING = 0.3

# The subspace iteration (Halko et al., 2011) computes this many directions more than are kept, this many times.
EXTRA_DIRECTIONS = 32
ITERATIONS = 2

# The distance of the nodes between which log(1 + e / d) is interpolated, in log n(x): an error below 0.0004.
NODE_DISTANCE = 0.1


@dataclass
class Bigrams:
    """
    How often the tokens of a text stand side by side.

    Attributes:
        keys: V x + w of each bigram that is kept, ascending, int64 (n,).
        counts: how often each occurred, int64 (n,).
        as_first, as_second: how often each token was the first, or the second, of any bigram, int64 (V,).
        tokens: how often each token stood in the text; [CLS] and [SEP], which rows add, are not of the text (V,).
    """

    keys: np.ndarray
    counts: np.ndarray
    as_first: np.ndarray
    as_second: np.ndarray
    tokens: np.ndarray


@dataclass
class WordVectors:
    """
    What the counts tell of a token and its neighbours, in float32.

    `words[x] @ form @ words[w]` is about the PMI of the tokens x and w.

    Attributes:
        words: (V, K), by falling importance of the columns.
        form: (K, K).
        shares: of each token in the text, [CLS] and [SEP] nearly 0, smoothed (V,).
    """

    words: torch.Tensor
    form: torch.Tensor
    shares: torch.Tensor


def flat_rows(corpus: TokenizedCorpus, pairs: np.ndarray, cls: int, sep: int) -> np.ndarray:
    """The ids of all rows of these pairs, one row after the other (n,): [CLS] A [SEP] B [SEP], or [CLS] A [SEP]."""
    starts = np.stack([pairs["a_start"], pairs["b_start"]], axis=1).ravel()
    ends = np.stack([pairs["a_end"], pairs["b_end"]], axis=1).ravel()
    begins_row = np.tile([True, False], len(pairs))
    is_there = begins_row | (ends > starts)
    starts = starts[is_there]
    ends = ends[is_there]
    begins_row = begins_row[is_there]
    lengths = ends - starts
    sizes = begins_row + lengths + 1  # with [CLS] and [SEP]
    places = np.cumsum(sizes) - sizes  # of each segment in the result, [CLS] included
    ids = np.full(sizes.sum(), sep, dtype=np.int64)
    ids[places[begins_row]] = cls
    first_tokens = places + begins_row
    ids[ranges(first_tokens, first_tokens + lengths)] = corpus.ids[ranges(starts, ends)]
    return ids


def count_bigrams(corpus: TokenizedCorpus, parts: Iterable[np.ndarray], cls: int, sep: int, entries: int) -> Bigrams:
    """
    Count the bigrams in the rows of some pairs; the end of a row and the begin of the next are none.

    Args:
        parts: arrays of `pairs.PAIR`. Those after the first `MOST_TOKENS` tokens are not read.
        cls, sep: the ids of [CLS] and [SEP].
        entries: V.
    """
    found = Bigrams(
        keys=np.zeros(0, dtype=np.int64),
        counts=np.zeros(0, dtype=np.int64),
        as_first=np.zeros(entries, dtype=np.int64),
        as_second=np.zeros(entries, dtype=np.int64),
        tokens=np.zeros(entries, dtype=np.int64),
    )
    for pairs in parts:
        for some in _in_blocks(pairs):
            ids = flat_rows(corpus, some, cls, sep)
            corpus.check_ids(ids, entries)
            found.tokens += np.bincount(ids, minlength=entries)
            is_bigram = ids[1:] != cls
            first = ids[:-1][is_bigram]
            second = ids[1:][is_bigram]
            found.as_first += np.bincount(first, minlength=entries)
            found.as_second += np.bincount(second, minlength=entries)
            keys, counts = np.unique(first * entries + second, return_counts=True)
            found.keys, found.counts = _merged(found, keys, counts)
        if found.tokens.sum() >= MOST_TOKENS:
            break
    found.tokens[[cls, sep]] = 0
    return found


def _in_blocks(pairs):
    """The pairs in blocks of about `TOKENS_AT_ONCE` tokens."""
    if not len(pairs):
        return []
    tokens_up_to = np.cumsum(tokens_in(pairs))
    borders = np.arange(TOKENS_AT_ONCE, tokens_up_to[-1], TOKENS_AT_ONCE)
    return np.split(pairs, np.searchsorted(tokens_up_to, borders))


def _merged(found, keys, counts):
    """The keys and counts of `found` and of further bigrams, of the `MOST_BIGRAMS` most frequent ones."""
    places = np.searchsorted(found.keys, keys)
    is_known = np.append(found.keys, -1)[places] == keys  # -1 is no key, at the place behind the last one
    found.counts[places[is_known]] += counts[is_known]
    keys = np.insert(found.keys, places[~is_known], keys[~is_known])
    counts = np.insert(found.counts, places[~is_known], counts[~is_known])
    surplus = len(keys) - MOST_BIGRAMS
    if surplus > 0:
        # The count that is number `surplus` in ascending order; bigrams that occur as often go, too.
        largest_to_go = np.partition(counts, surplus - 1)[surplus - 1]
        is_kept = counts > largest_to_go
        keys = keys[is_kept]
        counts = counts[is_kept]
    return keys, counts


class WeightedPmi:
    """
    The PMI of all tokens, times a weight for each row and each column, as a matrix (V, V) that is only multiplied.

    The weight of a token is the square root of how often it stands in a bigram, relative to the mean: squared errors
    then count as often as the two tokens would stand side by side by chance.
    """

    def __init__(self, bigrams: Bigrams):
        entries = len(bigrams.tokens)
        contexts = torch.from_numpy(bigrams.as_first + bigrams.as_second).float() + 0.5
        self.weights = (contexts / contexts.mean()).sqrt()
        first, second = np.divmod(bigrams.keys, entries)
        counted = torch.from_numpy(bigrams.counts).float().div_(SMOOTHING).log1p_()
        values = counted * self.weights[first] * self.weights[second]
        by_second = torch.from_numpy(np.argsort(second, kind="stable"))
        first = torch.from_numpy(first.astype(np.int32))
        second = torch.from_numpy(second.astype(np.int32))
        self.counted = SparseMatrix(_offsets(first, entries), second, values)
        self.counted_transposed = SparseMatrix(
            _offsets(second[by_second], entries), first[by_second], values[by_second]
        )
        # What is expected by chance, log(1 + e / d), is read from a table over log n(x) and log n(w).
        self.first_nodes = _between_nodes(bigrams.as_first)
        self.second_nodes = _between_nodes(bigrams.as_second)
        last_node = 1 + max(int(self.first_nodes.below.max()), int(self.second_nodes.below.max()))
        nodes = NODE_DISTANCE * torch.arange(last_node + 1)
        total = float(bigrams.as_first.sum())
        self.table = F.softplus(nodes[:, None] + nodes - np.log(total * SMOOTHING))

    def products(self, right: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The products of the matrix with `right` (V, K), and of its transpose with `left` (V, K): both (V, K)."""
        by_chance = self._of_chance(self.first_nodes, self.second_nodes, right)
        by_chance_transposed = self._of_chance(self.second_nodes, self.first_nodes, left)
        return (
            self.counted.product(right) - by_chance,
            self.counted_transposed.product(left) - by_chance_transposed,
        )

    def _of_chance(self, rows, columns, factor):
        """
        The product (V, K) of the weighted log(1 + e / d) and a matrix (V, K).

        An entry between two nodes of the table is a mean of theirs. So the factor is first summed up at the nodes of
        its rows, then multiplied with the table, which is small, and then read at the nodes of each token.
        """
        weighted = factor * self.weights[:, None]
        at_nodes = factor.new_zeros(len(self.table), factor.shape[1])
        at_nodes.index_add_(0, columns.below, weighted * (1 - columns.share_above))
        at_nodes.index_add_(0, columns.below + 1, weighted * columns.share_above)
        of_nodes = self.table @ at_nodes
        below = of_nodes[rows.below] * (1 - rows.share_above)
        above = of_nodes[rows.below + 1] * rows.share_above
        return (below + above) * self.weights[:, None]


class SparseMatrix(NamedTuple):
    """
    A matrix (V, V) with few entries that are not 0, row for row.

    Args:
        offsets: where the entries of each row begin, int32 (V,).
        columns: the column of each entry, int32 (n,).
        values: of the entries (n,).
    """

    offsets: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    def product(self, factor: torch.Tensor) -> torch.Tensor:
        """The product (V, K) with a dense matrix (V, K)."""
        # `contiguous`, as the rows of what `qr` gives are not, and then this takes six times as long.
        factor = factor.contiguous()
        return F.embedding_bag(self.columns, factor, self.offsets, mode="sum", per_sample_weights=self.values)


class Nodes(NamedTuple):
    """
    Where the logarithms of some counts lie between the nodes of a table.

    Args:
        below: the node below each (V,).
        share_above: how far each is to the next node, from 0 to 1 (V, 1).
    """

    below: torch.Tensor
    share_above: torch.Tensor


def _offsets(sorted_numbers, entries):
    """Where the run of each number from 0 to `entries` - 1 begins in a sorted array, int32 (V,)."""
    return torch.searchsorted(sorted_numbers, torch.arange(entries, dtype=torch.int32), out_int32=True)


def _between_nodes(counts):
    """The `Nodes` of the logarithms of these counts (V,)."""
    places = torch.from_numpy(np.log(np.maximum(counts, 1))).float() / NODE_DISTANCE
    return Nodes(places.long(), places.frac()[:, None])


def word_vectors(bigrams: Bigrams, size: int, generator: torch.Generator) -> WordVectors:
    """
    Word vectors whose products are about the PMI: the leading directions of the weighted PMI and of its transpose.

    With M the weighted PMI, the directions are eigenvectors of M^T M + M M^T. An orthonormal basis of the leading ones
    is found by multiplying random directions with that matrix, twice (subspace iteration); then the eigenvectors are
    those of the small matrix which it is in this basis.

    Args:
        size: K, at most V; `MOST_COLUMNS` if that is less.
        generator: of the directions that the iteration starts from.
    """
    pmi = WeightedPmi(bigrams)
    entries = len(pmi.weights)
    size = min(size, MOST_COLUMNS)
    basis = torch.randn(entries, min(size + EXTRA_DIRECTIONS, entries), generator=generator)
    for _ in range(ITERATIONS):
        after, before = pmi.products(basis, basis)  # M basis, and M^T basis
        of_rows, of_columns = pmi.products(before, after)  # M M^T basis, and M^T M basis
        basis = torch.linalg.qr(of_rows + of_columns).Q
    after, before = pmi.products(basis, basis)
    squares, turn = torch.linalg.eigh(after.T @ after + before.T @ before)  # ascending
    squares = squares.flip(0)[:size].clamp(min=1e-9)
    turn = turn.flip(1)[:, :size]
    roots = squares**0.25  # `squares**0.5` is the size of a direction; a product of two words has it once
    words = basis @ turn * roots / pmi.weights[:, None]
    form = turn.T @ (basis.T @ after) @ turn / roots / roots[:, None]
    shares = torch.from_numpy(bigrams.tokens).float() + 0.5
    return WordVectors(words, form, shares / shares.sum())
