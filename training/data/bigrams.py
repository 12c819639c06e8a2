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

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.tokenization.token_store import TokenizedCorpus, ranges


# Tokens that are counted at once, and all that are counted at most: more change little, and take 0.15 s a million.
TOKENS_AT_ONCE, MOST_TOKENS = 2**23, 2**28

# The most different bigrams that are kept, the most frequent ones (lossy counting; Manku and Motwani, 2002). Ten
# million words of books have 1.2 million.
MOST_BIGRAMS = 2**23

# The most columns of a word vector. With 30,522 entries and 6 million different bigrams, vectors of 384 columns took
# 19 s on a core of an EPYC (Zen 3).
MOST_COLUMNS = 384

# d above.
SMOOTHING = 0.3

# The subspace iteration (Halko et al., 2011) computes this many directions more than are kept, this many times.
EXTRA_DIRECTIONS, ITERATIONS = 32, 2

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
    starts, ends, begins_row = starts[is_there], ends[is_there], begins_row[is_there]
    sizes = begins_row + (ends - starts) + 1
    places = np.cumsum(sizes) - sizes  # of each segment in the result, [CLS] included
    ids = np.full(sizes.sum(), sep, dtype=np.int64)
    ids[places[begins_row]] = cls
    firsts = places + begins_row
    ids[ranges(firsts, firsts + ends - starts)] = corpus.ids[ranges(starts, ends)]
    return ids


def count_bigrams(corpus: TokenizedCorpus, parts: Iterable[np.ndarray], cls: int, sep: int, entries: int) -> Bigrams:
    """
    Count the bigrams in the rows of some pairs; the end of a row and the begin of the next are none.

    Args:
        parts: arrays of `pairs.PAIR`. Those after the first `MOST_TOKENS` tokens are not read.
        cls, sep: the ids of [CLS] and [SEP].
        entries: V.
    """
    found = Bigrams(*np.zeros((2, 0), dtype=np.int64), *np.zeros((3, entries), dtype=np.int64))
    for pairs in parts:
        for some in _in_blocks(pairs):
            ids = flat_rows(corpus, some, cls, sep)
            corpus.check_ids(ids, entries)
            found.tokens += np.bincount(ids, minlength=entries)
            is_bigram = ids[1:] != cls
            first, second = ids[:-1][is_bigram], ids[1:][is_bigram]
            found.as_first += np.bincount(first, minlength=entries)
            found.as_second += np.bincount(second, minlength=entries)
            found.keys, found.counts = _merged(found, *np.unique(first * entries + second, return_counts=True))
        if found.tokens.sum() >= MOST_TOKENS:
            break
    found.tokens[[cls, sep]] = 0
    return found


def _in_blocks(pairs):
    """The pairs in blocks of about `TOKENS_AT_ONCE` tokens."""
    tokens_up_to = np.cumsum(pairs["a_end"] - pairs["a_start"] + pairs["b_end"] - pairs["b_start"])
    borders = range(TOKENS_AT_ONCE, int(tokens_up_to[-1]) if len(pairs) else 0, TOKENS_AT_ONCE)
    return np.split(pairs, np.searchsorted(tokens_up_to, borders))


def _merged(found, keys, counts):
    """The keys and counts of `found` and of further bigrams, of the `MOST_BIGRAMS` most frequent ones."""
    places = np.searchsorted(found.keys, keys)
    is_known = np.append(found.keys, -1)[places] == keys
    found.counts[places[is_known]] += counts[is_known]
    keys = np.insert(found.keys, places[~is_known], keys[~is_known])
    counts = np.insert(found.counts, places[~is_known], counts[~is_known])
    if len(keys) > MOST_BIGRAMS:
        last = len(keys) - MOST_BIGRAMS - 1  # in ascending order, the last one to go
        is_kept = counts > np.partition(counts, last)[last]
        keys, counts = keys[is_kept], counts[is_kept]
    return keys, counts


class WeightedPmi:
    """
    The PMI of all tokens, times a weight for each row and each column, as a matrix (V, V) that is only multiplied.

    The weight of a token is the square root of how often it stands in a bigram, relative to the mean: squared errors
    then count as often as the two tokens would stand side by side by chance.
    """

    def __init__(self, bigrams: Bigrams):
        entries = len(bigrams.tokens)
        first, second = np.divmod(bigrams.keys, entries)
        contexts = torch.from_numpy(bigrams.as_first + bigrams.as_second).float() + 0.5
        self.weights = (contexts / contexts.mean()).sqrt()
        counted = torch.from_numpy(bigrams.counts).float().div_(SMOOTHING).log1p_()
        values = counted * self.weights[first] * self.weights[second]
        by_second = torch.from_numpy(np.argsort(second, kind="stable"))
        first, second = (torch.from_numpy(each.astype(np.int32)) for each in (first, second))
        # For each row (column) where its entries begin, the columns (rows) of these, and their values.
        self.rows = _offsets(first, entries), second, values
        self.columns = _offsets(second[by_second], entries), first[by_second], values[by_second]
        # The row (column) of each token in the table of log(1 + e / d), between two nodes.
        self.of_first, self.of_second = (_between_nodes(each) for each in (bigrams.as_first, bigrams.as_second))
        nodes = NODE_DISTANCE * torch.arange(
            2 + max(int(places.max()) for places, _ in (self.of_first, self.of_second))
        )
        total = float(bigrams.as_first.sum())
        self.table = F.softplus(nodes[:, None] + nodes - np.log(total * SMOOTHING))

    def products(self, right: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The products of the matrix with `right` (V, K), and of its transpose with `left` (V, K): both (V, K)."""
        return (
            _sparse_product(self.rows, right) - self._of_chance(self.of_first, self.table, self.of_second, right),
            _sparse_product(self.columns, left) - self._of_chance(self.of_second, self.table, self.of_first, left),
        )

    def _of_chance(self, rows, table, columns, factor):
        (places, shares), weighted = columns, factor * self.weights[:, None]
        at_nodes = factor.new_zeros(len(table), factor.shape[1])
        at_nodes.index_add_(0, places, weighted * (1 - shares))
        at_nodes.index_add_(0, places + 1, weighted * shares)
        (places, shares), of_nodes = rows, table @ at_nodes
        return (of_nodes[places] * (1 - shares) + of_nodes[places + 1] * shares) * self.weights[:, None]


def _offsets(sorted_numbers, entries):
    """Where the run of each number from 0 to `entries` - 1 begins in a sorted array, int32 (V,)."""
    return torch.searchsorted(sorted_numbers, torch.arange(entries, dtype=torch.int32), out_int32=True)


def _sparse_product(matrix, factor):
    """The product (V, K) of a sparse matrix, as `WeightedPmi` has it, and a dense one (V, K)."""
    offsets, numbers, values = matrix
    # `contiguous`, as the rows of what `qr` gives are not, and then this takes six times as long.
    return F.embedding_bag(numbers, factor.contiguous(), offsets, mode="sum", per_sample_weights=values)


def _between_nodes(counts):
    """The node below the logarithm of each count (V,), and how far it is to the next node, from 0 to 1 (V, 1)."""
    places = torch.from_numpy(np.log(np.maximum(counts, 1))).float() / NODE_DISTANCE
    return places.long(), places.frac()[:, None]


def word_vectors(bigrams: Bigrams, size: int, generator: torch.Generator) -> WordVectors:
    """
    Word vectors whose products are about the PMI: the leading directions of the weighted PMI and of its transpose.

    Args:
        size: K, at most V; `MOST_COLUMNS` if that is less.
        generator: of the directions that the iteration starts from.
    """
    pmi, size = WeightedPmi(bigrams), min(size, MOST_COLUMNS)
    basis = torch.randn(len(pmi.weights), min(size + EXTRA_DIRECTIONS, len(pmi.weights)), generator=generator)
    for _ in range(ITERATIONS):
        after, before = pmi.products(basis, basis)
        of_rows, of_columns = pmi.products(before, after)
        basis = torch.linalg.qr(of_rows + of_columns).Q
    after, before = pmi.products(basis, basis)
    squares, turn = torch.linalg.eigh(after.T @ after + before.T @ before)
    squares, turn = squares.flip(0)[:size].clamp(min=1e-9), turn.flip(1)[:, :size]
    roots = squares**0.25
    words = basis @ turn * roots / pmi.weights[:, None]
    form = turn.T @ (basis.T @ after) @ turn / roots / roots[:, None]
    shares = torch.from_numpy(bigrams.tokens).float() + 0.5
    return WordVectors(words, form, shares / shares.sum())
