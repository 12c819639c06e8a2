"""A corpus -> the pairs of every epoch, in their order: which documents `pairs` gets, by the weights of the sources.

The corpus is cut into stretches of 16,384 tokens. An epoch is a random order of the stretches, read in windows of
1,024; the pairs of a window are shuffled. The pairs are a pure function of (corpus, options, seed, epoch, window):
every process of a run lays out the windows that it needs (`pairs.lay_out`), some 700,000 pairs a second. No pair is
stored on disk.

The words of this file, with a source of three stretches of which an epoch takes 1.5 passes:

    stretch    a part of a source, here 0, 1 or 2
    turn       all stretches of a source once, in an order of its own:        2 0 1, then 1 2 0, then 0 2 1, ...
    visit      one stretch of a turn; numbered through all turns:             visit 3 is stretch 1, in turn 1
    passes     how many turns an epoch takes; epoch 0 has the visits 0 to 3:  2 0 1 1, epoch 1 the next five: 2 0 0 2 1
    window     the visits of an epoch, of all its sources, in random order, are cut into windows
    piece      what a stretch has of one document: pairs are made of pieces
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from d2l_bert.messages import UserError
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, ranges
from d2l_bert.training.data.pairs import lay_out
from d2l_bert.training.data.random_numbers import random_keys, random_order


# Every checkpoint contains DATA_ORDER, and a run does not resume from a checkpoint with another value. Raise it
# by 1 when the same run would train on other pairs, with other masks or in another order.
DATA_ORDER = 7

# Tokens in a stretch. Stretches are short, so that a window has text from 1,024 places: a step of 512 pairs then has
# text from 400 different books, against 500 if a large epoch is shuffled as a whole. Only documents with more tokens
# are cut.
STRETCH_TOKENS = 2**14

# A window has 16.8 million tokens: 131,000 pairs of 128 tokens in 6 MB, laid out in 0.2 s.
WINDOW_STRETCHES = 1024

# With weights, a source has at least this many stretches: an epoch takes a whole number of stretches of each source.
WEIGHTED_STRETCHES = 32

# After this many windows without a pair, one after the other, a run stops: no pair can be made of the text. As many
# are looked through for a token to predict.
MOST_EMPTY_WINDOWS = 20

# The second entry of every seed says what the random numbers are for. Without this entry, even seeds of different
# length could collide: NumPy draws the same numbers from (1, 2), which would be the seed of the order of epoch 2, and
# from (1, 2, 0), which would be the seed of that epoch's window 0.
_PAIRS = 1
_MASKS = 2
_VISITS = 3
_ORDER = 4


class Cursor(NamedTuple):
    """
    Where a run stands in its pairs.

    Args:
        epoch, window: the window that has the next pair, and its epoch.
        first: the next pair in the window; the number of its pairs if all are taken.
    """

    epoch: int
    window: int
    first: int


START = Cursor(0, 0, 0)


class EpochPairs:
    """
    The pairs of all epochs. Each epoch has other pairs in another order.

    The window that was used last is kept in memory.

    Args:
        corpus: the text to make pairs of.
        run: its options say how pairs are made (`objective`, `pairing`, `short_seq_prob`), their random numbers
            (`seed`), and each source's share of an epoch's tokens, up to a common factor (`source_weights`). Without
            weights an epoch takes every document once.
        length: the most tokens in a pair, special tokens included.
        name: the name of the text, for error messages.

    Raises:
        UserError: there are more or fewer weights than sources, or a source without text has a weight above 0.
    """

    def __init__(self, corpus: TokenizedCorpus, run, length: int, name: str = "the corpus"):
        assert run.objective != "auto", "with_objective decides"
        self.corpus = corpus
        self.run = run
        self.length = length
        self.name = name
        weights = np.array(run.source_weights or [1], dtype=float)
        source_ends = corpus.source_ends if run.source_weights else [len(corpus)]  # in documents
        if len(weights) != len(source_ends):
            raise UserError(
                f"source_weights: {len(weights)} weights for {len(source_ends)} sources; give one for each"
            )
        # Source i has the tokens from borders[i] to borders[i + 1] - 1. What follows has one number for each source.
        self.borders = corpus.first_tokens(np.append(0, source_ends))
        self.token_counts = np.diff(self.borders)
        is_missing = (self.token_counts == 0) & (weights > 0)
        if is_missing.any():
            raise UserError(f"source_weights: source {int(is_missing.argmax()) + 1} is empty")
        # An epoch has as many tokens as all sources together.
        shares = weights / weights.sum()
        self.passes = shares * self.token_counts.sum() / np.maximum(self.token_counts, 1)
        # A stretch has STRETCH_TOKENS, or fewer in a source that would else have too few stretches.
        fewest_stretches = WEIGHTED_STRETCHES if run.source_weights else 1
        largest = _ceil_div(self.token_counts, fewest_stretches)  # larger stretches would be fewer
        self.stretch_tokens = np.clip(largest, 1, STRETCH_TOKENS)
        self.stretch_counts = _ceil_div(self.token_counts, self.stretch_tokens)
        # The window that was used last, as (epoch, window), and its pairs.
        self._open_window = None
        self._open_pairs = None

    # -----------------------------------------------------------------------------------------------------------------
    # Which stretches an epoch takes

    def _visits(self, epoch):
        """
        For each source, the numbers of its first visit in an epoch and of its first visit after it (2, sources).

        Without weights an epoch is one turn. With weights an epoch takes the next visits of each source: with 0.5
        passes a stretch is visited in every second epoch, with 1.5 passes once or twice in an epoch.
        """
        return np.rint(np.outer([epoch, epoch + 1], self.passes * self.stretch_counts)).astype(np.int64)

    def window_count(self, epoch: int) -> int:
        """How many windows an epoch has, at least one."""
        firsts, ends = self._visits(epoch)
        return max(1, _ceil_div(int((ends - firsts).sum()), WINDOW_STRETCHES))

    def pieces(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The pieces of a window: the first sentence of each, and the one after its last, each (pieces,).

        They stand in the order of the turns, not of the visits: the pairs of a window are shuffled later.
        """
        sources, turns, places = self._visits_in_window(epoch, window)
        firsts = [np.zeros(0, dtype=np.int64)]
        ends = [np.zeros(0, dtype=np.int64)]
        for source, turn in sorted(set(zip(sources.tolist(), turns.tolist(), strict=True))):
            # The turn is a random order of the source's stretches; the window has those at some places of this order.
            is_of_turn = (sources == source) & (turns == turn)
            seed = (self.run.seed, _VISITS, source, turn)
            stretches = random_order(places[is_of_turn], int(self.stretch_counts[source]), seed)
            firsts.append(self._first_sentences(source, stretches))
            ends.append(self._first_sentences(source, stretches + 1))
        return self._cut_into_documents(np.concatenate(firsts), np.concatenate(ends))

    def _visits_in_window(self, epoch, window):
        """
        The visits of a window: the source of each, its turn, and its place in the turn, each (visits,).

        In an epoch that has the visits 4 to 8 of a first source and 10 to 12 of a second one, they are numbered 0 to 4
        and 5 to 7: number 6 is visit 6 - 5 + 10 = 11 of the second source.
        """
        firsts, ends = self._visits(epoch)
        end_numbers = np.cumsum(ends - firsts)  # of each source: 5 and 8 above
        first_numbers = end_numbers - (ends - firsts)  # 0 and 5 above
        count = int(end_numbers[-1])
        # The epoch is a random order of all numbers. A window takes the next ones of this order.
        places_in_order = np.arange(window * WINDOW_STRETCHES, min((window + 1) * WINDOW_STRETCHES, count))
        numbers = random_order(places_in_order, count, (self.run.seed, _ORDER, epoch))
        sources = np.searchsorted(end_numbers, numbers, side="right")
        visits = numbers - first_numbers[sources] + firsts[sources]
        turns, places_in_turn = np.divmod(visits, self.stretch_counts[sources])
        return sources, turns, places_in_turn

    def _first_sentences(self, source, stretches):
        """
        The sentence with which each of these stretches of a source begins.

        Every `stretch_tokens` tokens there is a border. A stretch begins

        - with the first document that begins at its border or behind it, if that is before the next border;
        - else, inside a document that covers all from its border to the next: with the first sentence that begins at
          its border or behind it.

        It ends where the next one begins. The last stretch ends with the source: where "the stretch after the last"
        would begin, which may be asked for, too. For stretches of ten tokens and three documents:

            tokens       0         10        20        30
            documents    AAAAAAABBBBBBBCCCCCCCCCCCCCCCCCC
            stretches    00000000000000111111112222222222

        From the border at 10 on, C is the first document to begin: stretch 1 begins at 14. From the border at 20 to
        that at 30 none begins: stretch 2 begins with a sentence of C, here at 22. Stretch 3 begins at 32, the end of
        the text: it is empty.
        """
        sentence_starts = self.corpus.sentence_starts
        document_starts = self.corpus.document_starts
        size = self.stretch_tokens[source]
        borders = self.borders[source] + stretches * size  # in tokens
        next_borders = borders + size
        borders = np.minimum(borders, self.borders[source + 1])  # "the stretch after the last" begins at the end
        sentences = np.searchsorted(sentence_starts, borders)  # the first from each border on
        documents = np.searchsorted(document_starts, sentences)  # the first from each border on
        sentences_of_documents = document_starts[documents]
        is_document_before_next_border = sentence_starts[sentences_of_documents] < next_borders
        return np.where(is_document_before_next_border, sentences_of_documents, sentences)

    def _cut_into_documents(self, firsts, ends):
        """
        Cut stretches, some of them empty, at the borders of documents.

        Stretches of the sentences 0 to 4 and 9, in documents that begin with the sentences 0, 3 and 8, are three
        pieces: the sentences 0 to 2, 3 and 4, and 9.

        Args:
            firsts, ends: the first sentence of each stretch, and the one after its last (stretches,).

        Returns:
            The first sentence of each piece, and the one after its last, each (pieces,).
        """
        is_there = firsts < ends
        firsts = firsts[is_there]
        ends = ends[is_there]
        starts = self.corpus.document_starts
        first_documents = find(starts, firsts)
        end_documents = find(starts, ends - 1) + 1
        pieces_of_stretch = end_documents - first_documents
        document = ranges(first_documents, end_documents)  # of each piece
        piece_firsts = np.maximum(starts[document], np.repeat(firsts, pieces_of_stretch))
        piece_ends = np.minimum(starts[document + 1], np.repeat(ends, pieces_of_stretch))
        return piece_firsts, piece_ends

    # -----------------------------------------------------------------------------------------------------------------
    # Pairs

    def window(self, epoch: int, number: int) -> np.ndarray:
        """
        The pairs of one window, shuffled and with the keys of their masks: an array of `pairs.PAIR`.

        Args:
            number: of the window in its epoch, from 0.
        """
        if self._open_window != (epoch, number):
            self._open_pairs = self._make_window(epoch, number)
            self._open_window = (epoch, number)
        return self._open_pairs

    def _make_window(self, epoch, number):
        run = self.run
        rng = np.random.default_rng((run.seed, _PAIRS, epoch, number))
        firsts, ends = self.pieces(epoch, number)
        pairs = lay_out(
            self.corpus,
            firsts,
            ends,
            rng,
            max_seq_length=self.length,
            pairing=run.pairing,
            objective=run.objective,
            short_seq_prob=run.short_seq_prob,
        )
        pairs = pairs[rng.permutation(len(pairs))]
        pairs["key"] = random_keys((run.seed, _MASKS, epoch, number), np.arange(len(pairs)))
        return pairs

    def parts(self, epoch: int, most: int | None = None) -> Iterator[np.ndarray]:
        """
        Yield the pairs of an epoch, one window at a time.

        Args:
            most: the most pairs in all; None for all.
        """
        remaining = most or sys.maxsize
        for window in range(self.window_count(epoch)):
            pairs = self.window(epoch, window)[:remaining]
            if len(pairs):
                yield pairs
            remaining -= len(pairs)
            if not remaining:
                return

    def parts_of_one_reading(self) -> Iterator[np.ndarray]:
        """
        Yield the pairs of the first epoch, one window at a time, for as many stretches as the text has.

        That is the whole epoch, unless weights repeat documents in it, some a billion times.
        """
        windows_of_text = _ceil_div(int(self.stretch_counts.sum()), WINDOW_STRETCHES)
        for window in range(min(self.window_count(0), windows_of_text)):
            pairs = self.window(0, window)
            if len(pairs):
                yield pairs

    def take(self, cursor: Cursor, count: int) -> tuple[np.ndarray, Cursor]:
        """
        The next `count` pairs, through as many windows and epochs as it takes, and the cursor behind the last pair.

        Raises:
            UserError: no pair can be made of the text.
        """
        epoch, window, first = cursor
        found = []
        empty_windows = 0
        while True:
            pairs = self.window(epoch, window)
            taken = pairs[first : first + count]
            found.append(taken)
            count -= len(taken)
            if count == 0:
                return np.concatenate(found), Cursor(epoch, window, first + len(taken))
            empty_windows = 0 if len(pairs) else empty_windows + 1
            if empty_windows == MOST_EMPTY_WINDOWS:
                raise UserError(f"{self.name}: no pair of segments in the text to train on; give more text")
            first = 0
            window += 1
            if window == self.window_count(epoch):
                epoch += 1
                window = 0

    def has(self, cursor: Cursor, taken: int) -> bool:
        """
        Whether a cursor may stand behind the last of some pairs: its window exists, and has so many pairs.

        Args:
            taken: the number of pairs that were taken from `START` on.
        """
        epoch, window, first = cursor
        # For each pair `take` passes fewer than MOST_EMPTY_WINDOWS windows, and so no more epochs than that.
        if epoch > taken * MOST_EMPTY_WINDOWS or window >= self.window_count(epoch):
            return False
        return first <= len(self.window(epoch, window))

    def pairs_in_an_epoch(self) -> float:
        """
        The number of pairs in an epoch: exact if an epoch is one window; else an estimate from the first window with a
        pair, which assumes as many pairs a token in the rest of the epoch.

        Raises:
            UserError: no pair can be made of the text.
        """
        _, cursor = self.take(START, 1)
        pairs = self.window(cursor.epoch, cursor.window)
        if self.window_count(cursor.epoch) == 1:
            return float(len(pairs))
        firsts, ends = self.pieces(cursor.epoch, cursor.window)
        starts = self.corpus.sentence_starts
        tokens_in_window = float((starts[ends] - starts[firsts]).sum())
        tokens_in_epoch = float((self.token_counts * self.passes).sum())
        return len(pairs) / tokens_in_window * tokens_in_epoch


def _ceil_div(number, divisor):
    """The quotient, rounded up."""
    return -(-number // divisor)
