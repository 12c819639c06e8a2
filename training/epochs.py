"""A corpus -> the pairs of every epoch: which documents `pairs` gets, in which order, by the weights of the sources.

The corpus is cut into stretches of 16,384 tokens. An epoch is a random order of the stretches, read in windows of
1,024; the pairs of a window are shuffled. The pairs are a pure function of (corpus, options, seed, epoch, window):
every process that makes batches lays out the windows that it needs (`pairs.lay_out`), some 700,000 pairs a second, and
no pair is stored on disk.
"""

import bisect
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.random_numbers import random_keys, random_order
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, ranges
from d2l_bert.training.pairs import Pieces, lay_out


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

# After this many windows without a pair, one after the other, a run stops: no pair can be made of the text.
MOST_EMPTY_WINDOWS = 100

# The second entry of every seed says what the random numbers are for. Without this entry, even seeds of different
# length could collide: NumPy draws the same numbers from (1, 2), which would be the seed of the order of epoch 2, and
# from (1, 2, 0), which would be the seed of that epoch's window 0.
_PAIRS, _MASKS, _VISITS, _ORDER = 1, 2, 3, 4


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


@dataclass
class Selection:
    """
    A corpus to make pairs of, and how often its sources are read.

    Args:
        passes: how many times an epoch goes through each source (sources,); None for once.
    """

    corpus: TokenizedCorpus
    passes: np.ndarray | None = None

    def source_ends(self) -> Sequence[int]:
        """Documents up to the end of each source; without weights the sources are read as one."""
        return [len(self.corpus)] if self.passes is None else self.corpus.source_ends

    def source_tokens(self) -> np.ndarray:
        """The number of tokens of each source of `source_ends` (sources,)."""
        return np.diff(self.corpus.first_tokens(np.append(0, self.source_ends())))


class _Source:
    """
    One source, cut into stretches of about `stretch_tokens` tokens.

    A border between two stretches is moved forward to the start of the next document; in a document that is longer
    than a stretch, to the start of the next sentence.
    """

    def __init__(self, selection, first, end, stretch_tokens):
        self.corpus = selection.corpus
        self.first_sentence, self.end_sentence = self.corpus.document_starts[[first, end]].tolist()
        self.first_token, self.end_token = self.corpus.first_tokens([first, end]).tolist()
        self.stretch_tokens = max(1, stretch_tokens)
        self.stretches = -(-(self.end_token - self.first_token) // self.stretch_tokens)

    def pieces(self, stretches: np.ndarray) -> Pieces:
        """The documents in the stretches with these numbers (n,), and the sentences of each."""
        firsts, ends = self._borders(stretches), self._borders(stretches + 1)
        firsts, ends = firsts[firsts < ends], ends[firsts < ends]
        first_documents = find(self.corpus.document_starts, firsts)
        last_documents = find(self.corpus.document_starts, ends - 1)
        counts = last_documents - first_documents + 1
        documents = ranges(first_documents, last_documents + 1)
        starts = np.maximum(self.corpus.document_starts[documents], np.repeat(firsts, counts))
        return Pieces(starts, np.minimum(self.corpus.document_starts[documents + 1], np.repeat(ends, counts)))

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


@dataclass(frozen=True)
class Place:
    """The start of a window: the window's epoch, its number in the epoch, and the number of all pairs before it."""

    epoch: int = 0
    window: int = 0
    first_pair: int = 0


class EpochPairs:
    """
    The pairs of all epochs, numbered on from one epoch to the next. Each epoch has other pairs in another order.

    The two windows that were used last are kept in memory.

    Args:
        selection: the corpus to make pairs of.
        pairing: the keyword arguments of `pairs.lay_out`.
        seed: the seed of all random numbers.
        name: the name of the text, for error messages.
    """

    def __init__(self, selection: Selection, pairing: dict, seed: int, name: str = "the corpus"):
        self.selection, self.pairing, self.seed, self.name = selection, pairing, seed, name
        ends = np.append(0, selection.source_ends()).tolist()
        self.sources = []
        for first, end, tokens in zip(ends[:-1], ends[1:], selection.source_tokens().tolist(), strict=True):
            stretch_tokens = STRETCH_TOKENS
            if selection.passes is not None:
                stretch_tokens = min(STRETCH_TOKENS, -(-tokens // WEIGHTED_STRETCHES))
            self.sources.append(_Source(selection, first, end, stretch_tokens))
        self._forget()

    def _forget(self):
        # Where each window that the run has reached begins, in order.
        self._places = [Place()]

        # The pairs of at most two windows, by (epoch, window).
        self._open = {}

    def __getstate__(self):  # another process lays out its own windows
        return {**vars(self), "_open": {}}

    # -----------------------------------------------------------------------------------------------------------------
    # Which stretches an epoch takes

    def _visits_of_sources(self, epoch):
        """
        For each source, the numbers of its first visit in an epoch and of its first visit after it (sources, 2).

        A visit takes one stretch; a turn visits each stretch of a source once. The visits of a source are numbered
        through all its turns; each turn has another order. Without weights an epoch is one turn of each source. With
        weights an epoch takes the next visits of each source: with 0.5 passes a stretch is visited in every second
        epoch, with 1.5 passes once or twice in an epoch.
        """
        passes = [1] * len(self.sources) if self.selection.passes is None else self.selection.passes.tolist()
        return np.array(
            [
                [round(number * passes_of_source * source.stretches) for number in (epoch, epoch + 1)]
                for source, passes_of_source in zip(self.sources, passes, strict=True)
            ]
        )

    def windows(self, epoch: int) -> int:
        """The number of windows in an epoch, at least one."""
        firsts, ends = self._visits_of_sources(epoch).T
        return max(1, -(-int((ends - firsts).sum()) // WINDOW_STRETCHES))

    def pieces(self, epoch: int, window: int) -> Pieces:
        """The documents of a window, and the sentences of each."""
        firsts, ends = self._visits_of_sources(epoch).T
        # The stretches that this epoch takes from the first source, from the first two, and so on.
        visits_up_to = np.cumsum(ends - firsts)
        places = np.arange(window * WINDOW_STRETCHES, min((window + 1) * WINDOW_STRETCHES, int(visits_up_to[-1])))
        visits = random_order(places, int(visits_up_to[-1]), (self.seed, _ORDER, epoch))
        sources = np.searchsorted(visits_up_to, visits, side="right")
        visits += firsts[sources] - np.append(0, visits_up_to[:-1])[sources]  # numbers through all turns of a source
        pieces = []
        for number in np.unique(sources).tolist():
            source = self.sources[number]
            turns, in_turn = np.divmod(visits[sources == number], source.stretches)
            for turn in np.unique(turns).tolist():
                order = (self.seed, _VISITS, number, turn)
                pieces.append(source.pieces(random_order(in_turn[turns == turn], source.stretches, order)))
        return Pieces(
            *(
                np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(piece, field.name) for piece in pieces)])
                for field in dataclasses.fields(Pieces)
            )
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Pairs

    def window(self, epoch: int, number: int) -> np.ndarray:
        """The pairs of one window, shuffled: an array of `pairs.PAIR`."""
        if (epoch, number) not in self._open:
            rng = np.random.default_rng((self.seed, _PAIRS, epoch, number))
            pairs = lay_out(self.selection.corpus, self.pieces(epoch, number), rng, **self.pairing)
            pairs = pairs[rng.permutation(len(pairs))]
            self._open = {**dict(list(self._open.items())[-1:]), (epoch, number): pairs}
        return self._open[epoch, number]

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

    # -----------------------------------------------------------------------------------------------------------------
    # Pairs by their number

    def go_on_from(self, place: Place) -> None:
        """Resume at the start of a window: the pairs of the windows before need not be counted."""
        self._forget()
        self._places = [place]

    def place_of(self, pair: int) -> Place:
        """
        The start of the window that contains the pair with this number.

        Raises:
            UserError: no pair can be made of the text.
        """
        if pair < self._places[0].first_pair:
            self._forget()
        empty = 0
        while True:
            number = bisect.bisect_right(self._places, pair, key=lambda place: place.first_pair) - 1
            if number < len(self._places) - 1:
                return self._places[number]
            last = self._places[-1]
            count = len(self.window(last.epoch, last.window))
            empty = 0 if count else empty + 1
            if empty == MOST_EMPTY_WINDOWS:
                raise UserError(f"{self.name}: no pair of segments in the text to train on; give more text")
            ends_epoch = last.window + 1 == self.windows(last.epoch)
            following = (last.epoch + 1, 0) if ends_epoch else (last.epoch, last.window + 1)
            self._places.append(Place(*following, last.first_pair + count))

    def slice(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs number `start` to `stop` - 1 of the run, and for each the key of its random masks (n,)."""
        pairs, keys = [], []
        while start < stop:
            place = self.place_of(start)
            window = self.window(place.epoch, place.window)
            first, last = start - place.first_pair, min(stop - place.first_pair, len(window))
            pairs.append(window[first:last])
            keys.append(self.keys(place.epoch, place.window, first, last))
            start += last - first
        return np.concatenate(pairs), np.concatenate(keys)

    def keys(self, epoch: int, window: int, first: int, last: int) -> np.ndarray:
        """The keys of the masks of the pairs from `first` to `last` - 1 of a window (n,)."""
        return random_keys((self.seed, _MASKS, epoch, window), np.arange(first, last))

    def pairs_in_an_epoch(self) -> float:
        """
        The number of pairs in an epoch: exact if an epoch is one window; else an estimate from the first window, which
        assumes as many pairs a token in the rest of the epoch.

        Raises:
            UserError: no pair can be made of the text.
        """
        place = self.place_of(0)
        pairs, pieces = (make(place.epoch, place.window) for make in (self.window, self.pieces))
        if self.windows(place.epoch) == 1:
            return float(len(pairs))
        first_tokens, ends = (self.selection.corpus.sentence_starts[of] for of in (pieces.firsts, pieces.ends))
        passes = 1 if self.selection.passes is None else self.selection.passes
        return len(pairs) / float((ends - first_tokens).sum()) * float((self.selection.source_tokens() * passes).sum())

    def position(self, pair: int) -> dict:
        """The fields of the last known `Place` at or before this pair, for JSON."""
        index = bisect.bisect_right(self._places, pair, key=lambda place: place.first_pair) - 1
        return dataclasses.asdict(self._places[index])
