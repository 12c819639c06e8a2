"""A corpus -> the pairs of every epoch, in their order: which documents `pairs` gets, by the weights of the sources.

The corpus is cut into stretches of 16,384 tokens. An epoch is a random order of the stretches, read in windows of
1,024; the pairs of a window are shuffled. The pairs are a pure function of (corpus, options, seed, epoch, window):
every process that makes batches lays out the windows that it needs (`pairs.lay_out`), some 700,000 pairs a second, and
no pair is stored on disk.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from d2l_bert.messages import UserError
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, ranges
from d2l_bert.training.data.pairs import Pieces, lay_out


# Every checkpoint contains DATA_ORDER, and a run does not resume from a checkpoint with another value. Raise it
# by 1 when the same run would train on other pairs, with other masks or in another order.
DATA_ORDER = 6

# Tokens in a stretch. Stretches are short, so that a window has text from 1,024 places: a step of 512 pairs then has
# text from 400 different books, against 500 if a large epoch is shuffled as a whole. Only documents with more tokens
# are cut.
STRETCH_TOKENS = 2**14

# A window has 16.8 million tokens: 131,000 pairs of 128 tokens in 4 MB, laid out in 0.2 s.
WINDOW_STRETCHES = 1024

# With weights, a source has at least this many stretches: an epoch takes a whole number of stretches of each source.
WEIGHTED_STRETCHES = 32

# After this many windows without a pair, one after the other, a run stops: no pair can be made of the text. As many
# are looked through for a token to predict.
MOST_EMPTY_WINDOWS = 20

# The second entry of every seed says what the random numbers are for. Without this entry, even seeds of different
# length could collide: NumPy draws the same numbers from (1, 2), which would be the seed of the order of epoch 2, and
# from (1, 2, 0), which would be the seed of that epoch's window 0.
_PAIRS, _MASKS, _VISITS, _ORDER = 1, 2, 3, 4


class Cursor(NamedTuple):
    """Where a run stands in its pairs: the epoch, the window in the epoch, and the next pair in the window."""

    epoch: int = 0
    window: int = 0
    pair: int = 0


START = Cursor()


def source_passes(tokens: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """
    How many times an epoch goes through each source (sources,); may be a fraction.

    An epoch has as many tokens as all sources together.

    Args:
        tokens: the number of training tokens of each source (sources,).
        weights: each source's share of an epoch's tokens, up to a common factor (sources,).

    Raises:
        UserError: a source without text has a weight above 0.
    """
    shares = np.asarray(weights) / np.sum(weights)
    if (shares[tokens == 0] > 0).any():
        raise UserError(f"source_weights: source {int(np.flatnonzero((tokens == 0) & (shares > 0))[0]) + 1} is empty")
    return shares * tokens.sum() / np.maximum(tokens, 1)


class EpochPairs:
    """
    The pairs of all epochs. Each epoch has other pairs in another order.

    The window that was used last is kept in memory.

    Args:
        corpus: the text to make pairs of.
        pairing: the keyword arguments of `pairs.lay_out`.
        seed: the seed of all random numbers.
        weights: each source's share of an epoch's tokens, up to a common factor; without weights an epoch takes every
            document once.
        name: the name of the text, for error messages.

    Raises:
        UserError: as in `source_passes`, or there are more or fewer weights than sources.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        pairing: dict,
        seed: int,
        weights: Sequence[float] = (),
        name: str = "the corpus",
    ):
        self.corpus, self.pairing, self.seed, self.name = corpus, pairing, seed, name
        if weights and len(weights) != len(corpus.source_ends):
            raise UserError(
                f"source_weights: {len(weights)} weights for {len(corpus.source_ends)} sources; give one for each"
            )
        ends = np.append(0, corpus.source_ends if weights else [len(corpus)])  # in documents
        self.tokens = np.diff(corpus.first_tokens(ends))  # of each source
        self.passes = source_passes(self.tokens, weights) if weights else np.ones(1)
        least = WEIGHTED_STRETCHES if weights else 1
        self.sources = [
            _Source(corpus, first, end, min(STRETCH_TOKENS, -(-tokens // least)))
            for first, end, tokens in zip(ends[:-1], ends[1:], self.tokens.tolist(), strict=True)
        ]
        self._open = None, None  # the window that was used last: its epoch and number, and its pairs

    def __getstate__(self):  # another process lays out its own windows
        return {**vars(self), "_open": (None, None)}

    # -----------------------------------------------------------------------------------------------------------------
    # Which stretches an epoch takes

    def _visits_of_sources(self, epoch):
        """
        For each source, the numbers of its first visit in an epoch and of its first visit after it (2, sources).

        A visit takes one stretch; a turn visits each stretch of a source once. The visits of a source are numbered
        through all its turns; each turn has another order. Without weights an epoch is one turn. With weights an epoch
        takes the next visits of each source: with 0.5 passes a stretch is visited in every second epoch, with 1.5
        passes once or twice in an epoch.
        """
        visits = self.passes * [source.stretches for source in self.sources]
        return np.array([[round(number * of_source) for of_source in visits] for number in (epoch, epoch + 1)])

    def windows(self, epoch: int) -> int:
        """The number of windows in an epoch, at least one."""
        firsts, ends = self._visits_of_sources(epoch)
        return max(1, -(-int((ends - firsts).sum()) // WINDOW_STRETCHES))

    def pieces(self, epoch: int, window: int) -> Pieces:
        """The documents of a window, and the sentences of each."""
        firsts, ends = self._visits_of_sources(epoch)
        # The stretches that this epoch takes from the first source, from the first two, and so on.
        visits_up_to = np.cumsum(ends - firsts)
        places = np.arange(window * WINDOW_STRETCHES, min((window + 1) * WINDOW_STRETCHES, int(visits_up_to[-1])))
        visits = random_order(places, int(visits_up_to[-1]), (self.seed, _ORDER, epoch))
        sources = np.searchsorted(visits_up_to, visits, side="right")
        visits += firsts[sources] - np.append(0, visits_up_to[:-1])[sources]  # numbers through all turns of a source
        pieces = [np.zeros((2, 0), dtype=np.int64)]
        for number in np.unique(sources).tolist():
            source = self.sources[number]
            turns, in_turn = np.divmod(visits[sources == number], source.stretches)
            for turn in np.unique(turns).tolist():
                order = (self.seed, _VISITS, number, turn)
                pieces.append(source.pieces(random_order(in_turn[turns == turn], source.stretches, order)))
        return Pieces(*np.concatenate(pieces, axis=1))

    # -----------------------------------------------------------------------------------------------------------------
    # Pairs

    def window(self, epoch: int, number: int) -> np.ndarray:
        """The pairs of one window, shuffled: an array of `pairs.PAIR`."""
        if self._open[0] != (epoch, number):
            rng = np.random.default_rng((self.seed, _PAIRS, epoch, number))
            pairs = lay_out(self.corpus, self.pieces(epoch, number), rng, **self.pairing)
            self._open = (epoch, number), pairs[rng.permutation(len(pairs))]
        return self._open[1]

    def keys(self, epoch: int, window: int, first: int, end: int) -> np.ndarray:
        """The keys of the random masks of the pairs from `first` to `end` - 1 of a window (n,)."""
        return random_keys((self.seed, _MASKS, epoch, window), np.arange(first, end))

    def parts(self, epoch: int, most: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """
        Yield the pairs of an epoch and the keys of their masks, one window at a time.

        Args:
            most: the most pairs in all; None for all.
        """
        remaining = most or sys.maxsize
        for window in range(self.windows(epoch)):
            pairs = self.window(epoch, window)[:remaining]
            if len(pairs):
                yield pairs, self.keys(epoch, window, 0, len(pairs))
            remaining -= len(pairs)
            if not remaining:
                return

    def take(self, cursor: Cursor, count: int) -> tuple[np.ndarray, np.ndarray, Cursor]:
        """
        The next `count` pairs, through as many windows and epochs as it takes.

        Returns:
            The pairs, the keys of their masks, and the cursor behind the last pair.

        Raises:
            UserError: no pair can be made of the text.
        """
        (epoch, window, first), pairs, keys, empty = cursor, [], [], 0
        while count:
            of_window = self.window(epoch, window)
            end = min(first + count, len(of_window))
            pairs.append(of_window[first:end])
            keys.append(self.keys(epoch, window, first, end))
            count -= end - first
            if count:
                empty = 0 if len(of_window) else empty + 1
                if empty == MOST_EMPTY_WINDOWS:
                    raise UserError(f"{self.name}: no pair of segments in the text to train on; give more text")
                epoch, window = (epoch + 1, 0) if window + 1 == self.windows(epoch) else (epoch, window + 1)
                end = 0
            first = end
        return np.concatenate(pairs), np.concatenate(keys), Cursor(epoch, window, first)

    def pairs_in_an_epoch(self) -> float:
        """
        The number of pairs in an epoch: exact if an epoch is one window; else an estimate from the first window with a
        pair, which assumes as many pairs a token in the rest of the epoch.

        Raises:
            UserError: no pair can be made of the text.
        """
        epoch, window, _ = self.take(START, 1)[2]
        pairs, pieces = self.window(epoch, window), self.pieces(epoch, window)
        if self.windows(epoch) == 1:
            return float(len(pairs))
        first_tokens, ends = (self.corpus.sentence_starts[of] for of in (pieces.firsts, pieces.ends))
        return len(pairs) / float((ends - first_tokens).sum()) * float((self.tokens * self.passes).sum())


class _Source:
    """
    One source, cut into stretches of about `stretch_tokens` tokens.

    A border between two stretches is moved forward to the start of the next document; in a document that is longer
    than a stretch, to the start of the next sentence.
    """

    def __init__(self, corpus, first, end, stretch_tokens):
        self.corpus = corpus
        self.first_sentence, self.end_sentence = corpus.document_starts[[first, end]].tolist()
        self.first_token, self.end_token = corpus.first_tokens([first, end]).tolist()
        self.stretch_tokens = max(1, stretch_tokens)
        self.stretches = -(-(self.end_token - self.first_token) // self.stretch_tokens)

    def pieces(self, stretches):
        """The first sentence of each document in the stretches with these numbers (n,), and the one after its last."""
        firsts, ends = self._borders(stretches), self._borders(stretches + 1)
        firsts, ends = firsts[firsts < ends], ends[firsts < ends]
        first_documents = find(self.corpus.document_starts, firsts)
        last_documents = find(self.corpus.document_starts, ends - 1)
        counts = last_documents - first_documents + 1
        documents = ranges(first_documents, last_documents + 1)
        starts = np.maximum(self.corpus.document_starts[documents], np.repeat(firsts, counts))
        return np.stack([starts, np.minimum(self.corpus.document_starts[documents + 1], np.repeat(ends, counts))])

    def _borders(self, stretches):
        """The first sentence of each of these stretches (n,)."""
        sentence_starts, document_starts = self.corpus.sentence_starts, self.corpus.document_starts
        tokens = self.first_token + stretches * self.stretch_tokens
        inside = np.minimum(tokens, self.end_token - 1)
        sentences = find(sentence_starts, inside)
        sentences += sentence_starts[sentences] < inside  # the first sentence that starts at `inside` or later
        documents = find(document_starts, np.minimum(sentences, self.end_sentence - 1))
        following = document_starts[documents + 1]
        # Move the border to the next document if that document begins before the next border.
        is_near = sentence_starts[following] < tokens + self.stretch_tokens
        begins_document = document_starts[documents] == sentences
        borders = np.where(is_near & ~begins_document, following, sentences)
        borders = np.where(tokens >= self.end_token, self.end_sentence, np.minimum(borders, self.end_sentence))
        return np.where(stretches == 0, self.first_sentence, borders)


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers without a state: each number is a function of a seed, a key and an index

# SplitMix64 adds this to its state for each random number; each key has a stream of 2^20 random numbers.
_INCREMENT, _NUMBERS_PER_KEY = 0x9E3779B97F4A7C15, 2**20


def random_keys(seed: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """
    Keys (n,) for `random_numbers`, from a seed and n different whole numbers.

    The streams of two keys with the same seed do not overlap: their states are at least 2^20 increments apart.
    """
    (start,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return start + numbers.astype(np.uint64) * np.uint64(_INCREMENT * _NUMBERS_PER_KEY % 2**64)


def random_numbers(keys: np.ndarray, indices: np.ndarray | int) -> np.ndarray:
    """
    Uniform random numbers in [0, 1), each a function of a key and an index; `keys` and `indices` broadcast.

    SplitMix64 (Steele et al., 2014) can jump to any index of a stream: n numbers from n streams take no longer than n
    numbers from one stream.

    Args:
        keys: from `random_keys`.
        indices: the index of each number in the stream of its key, below 2^20.
    """
    state = keys + np.asarray(indices + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
    return (_mixed(state) >> np.uint64(11)) * 2.0**-53


def random_order(places: np.ndarray, count: int, seed: Sequence[int]) -> np.ndarray:
    """
    The entries at these places (n,) of a random order of the numbers from 0 to `count` - 1.

    The order is computed entry by entry, not stored, so that `count` may be large. A Feistel network of six rounds
    (Luby and Rackoff, 1988) permutes the numbers below the next power of four. Where its output is `count` or larger,
    it is applied again to the output.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(6, np.uint64)
    entries = np.array(places, dtype=np.uint64)
    pending = np.arange(entries.size)
    while len(pending):
        left, right = entries[pending] >> half, entries[pending] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        entries[pending] = left << half | right
        pending = pending[entries[pending] >= count]
    return entries.astype(np.int64)


def _mixed(state):
    """The output of SplitMix64 for a state."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
