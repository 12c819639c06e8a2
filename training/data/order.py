"""A corpus -> the pairs of every epoch, in their order: which documents `pairs` gets, by the weights of the sources.

The corpus is cut into stretches of 16,384 tokens. An epoch is a random order of the stretches, read in windows of
1,024; the pairs of a window are shuffled. The pairs are a pure function of (corpus, options, seed, epoch, window):
every process of a run lays out the windows that it needs (`pairs.lay_out`), some 700,000 pairs a second. No pair is
stored on disk.
"""

import sys
from collections.abc import Iterator

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
_PAIRS, _MASKS, _VISITS, _ORDER = 1, 2, 3, 4


# Where a run stands in its pairs, its cursor: the epoch, the window in the epoch, and the next pair in the window.
START = (0, 0, 0)


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
        self.corpus, self.run, self.length, self.name = corpus, run, length, name
        weights = np.array(run.source_weights or [1], dtype=float)
        source_ends = corpus.source_ends if run.source_weights else [len(corpus)]  # in documents
        if len(weights) != len(source_ends):
            raise UserError(
                f"source_weights: {len(weights)} weights for {len(source_ends)} sources; give one for each"
            )
        self.borders = corpus.first_tokens(np.append(0, source_ends))  # the sources begin and end at these tokens
        self.tokens = np.diff(self.borders)
        is_missing = (self.tokens == 0) & (weights > 0)
        if is_missing.any():
            raise UserError(f"source_weights: source {int(is_missing.argmax()) + 1} is empty")
        # How many times an epoch goes through each source, which may be a fraction; an epoch has as many tokens as all
        # sources together.
        self.passes = weights / weights.sum() * self.tokens.sum() / np.maximum(self.tokens, 1)
        least = WEIGHTED_STRETCHES if run.source_weights else 1
        self.stretch_tokens = np.clip(-(-self.tokens // least), 1, STRETCH_TOKENS)
        self.stretches = -(-self.tokens // self.stretch_tokens)
        self._open = None, None  # the window that was used last: its epoch and number, and its pairs

    # -----------------------------------------------------------------------------------------------------------------
    # Which stretches an epoch takes

    def _visits(self, epoch):
        """
        For each source, the numbers of its first visit in an epoch and of its first visit after it (2, sources).

        A visit takes one stretch; a turn visits each stretch of a source once. The visits of a source are numbered
        through all its turns; each turn has another order. Without weights an epoch is one turn. With weights an epoch
        takes the next visits of each source: with 0.5 passes a stretch is visited in every second epoch, with 1.5
        passes once or twice in an epoch.
        """
        return np.rint(np.outer([epoch, epoch + 1], self.passes * self.stretches)).astype(np.int64)

    def windows(self, epoch: int) -> int:
        """The number of windows in an epoch, at least one."""
        firsts, ends = self._visits(epoch)
        return max(1, -(-int((ends - firsts).sum()) // WINDOW_STRETCHES))

    def pieces(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The sentences of a window, in pieces of one document each: the first, and that after the last (pieces,)."""
        firsts, ends = self._visits(epoch)
        # The stretches that this epoch takes from the first source, from the first two, and so on.
        visits_up_to = np.cumsum(ends - firsts)
        count = int(visits_up_to[-1])
        places = np.arange(window * WINDOW_STRETCHES, min((window + 1) * WINDOW_STRETCHES, count))
        visits = random_order(places, count, (self.run.seed, _ORDER, epoch))
        sources = np.searchsorted(visits_up_to, visits, side="right")
        # The turn of each visit, and its place in the turn, from its number through all turns of its source.
        turns, places = np.divmod(visits + (ends - visits_up_to)[sources], self.stretches[sources])
        spans = [np.zeros((2, 0), dtype=np.int64)]
        for source, turn in sorted(set(zip(sources.tolist(), turns.tolist(), strict=True))):
            seed, of_turn = (self.run.seed, _VISITS, source, turn), (sources == source) & (turns == turn)
            stretches = random_order(places[of_turn], int(self.stretches[source]), seed)
            spans.append(self._first_sentences(source, np.stack([stretches, stretches + 1])))
        spans = np.concatenate(spans, axis=1)
        firsts, ends = spans[:, spans[0] < spans[1]]
        starts = self.corpus.document_starts
        first_documents, last_documents = find(starts, firsts), find(starts, ends - 1)
        documents, counts = ranges(first_documents, last_documents + 1), last_documents - first_documents + 1
        firsts, ends = np.repeat(firsts, counts), np.repeat(ends, counts)
        return np.maximum(starts[documents], firsts), np.minimum(starts[documents + 1], ends)

    def _first_sentences(self, source, stretches):
        """
        The first sentence of each of these stretches of a source; of the one after the last, the end of the source.

        A border between two stretches is moved forward to the start of the next document; in a document that goes on
        to the next border, to the start of the next sentence.
        """
        size, starts = self.stretch_tokens[source], self.corpus.sentence_starts
        tokens = self.borders[source] + stretches * size
        sentences = np.searchsorted(starts, np.minimum(tokens, self.borders[source + 1]))
        documents = np.searchsorted(self.corpus.document_starts, sentences)
        following = self.corpus.document_starts[documents]
        return np.where(starts[following] < tokens + size, following, sentences)

    # -----------------------------------------------------------------------------------------------------------------
    # Pairs

    def window(self, epoch: int, number: int) -> np.ndarray:
        """The pairs of one window, shuffled and with the keys of their masks: an array of `pairs.PAIR`."""
        if self._open[0] != (epoch, number):
            rng, run = np.random.default_rng((self.run.seed, _PAIRS, epoch, number)), self.run
            options = {"pairing": run.pairing, "objective": run.objective, "short_seq_prob": run.short_seq_prob}
            pieces = self.pieces(epoch, number)
            pairs = lay_out(self.corpus, *pieces, rng, max_seq_length=self.length, **options)
            pairs = pairs[rng.permutation(len(pairs))]
            pairs["key"] = random_keys((run.seed, _MASKS, epoch, number), np.arange(len(pairs)))
            self._open = (epoch, number), pairs
        return self._open[1]

    def parts(self, epoch: int, most: int | None = None) -> Iterator[np.ndarray]:
        """
        Yield the pairs of an epoch, one window at a time.

        Args:
            most: the most pairs in all; None for all.
        """
        remaining = most or sys.maxsize
        for window in range(self.windows(epoch)):
            pairs = self.window(epoch, window)[:remaining]
            if len(pairs):
                yield pairs
            remaining -= len(pairs)
            if not remaining:
                return

    def take(self, cursor: tuple[int, int, int], count: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        """
        The next `count` pairs, through as many windows and epochs as it takes, and the cursor behind the last pair.

        Raises:
            UserError: no pair can be made of the text.
        """
        (epoch, window, first), found, empty = cursor, [], 0
        while True:
            pairs = self.window(epoch, window)
            found.append(pairs[first : first + count])
            count -= len(found[-1])
            if not count:
                return np.concatenate(found), (epoch, window, first + len(found[-1]))
            empty = 0 if len(pairs) else empty + 1
            if empty == MOST_EMPTY_WINDOWS:
                raise UserError(f"{self.name}: no pair of segments in the text to train on; give more text")
            is_last = window + 1 == self.windows(epoch)
            epoch, window, first = (epoch + 1, 0, 0) if is_last else (epoch, window + 1, 0)

    def has(self, cursor: tuple[int, int, int], taken: int) -> bool:
        """
        Whether a cursor may stand behind the last of some pairs.

        Args:
            taken: the number of pairs that were taken from `START` on.
        """
        epoch, window, first = cursor
        # `take` looks for the next pair in fewer than MOST_EMPTY_WINDOWS windows, and so in no more epochs.
        if epoch > taken * MOST_EMPTY_WINDOWS or window >= self.windows(epoch):
            return False
        return first <= len(self.window(epoch, window))

    def pairs_in_an_epoch(self) -> float:
        """
        The number of pairs in an epoch: exact if an epoch is one window; else an estimate from the first window with a
        pair, which assumes as many pairs a token in the rest of the epoch.

        Raises:
            UserError: no pair can be made of the text.
        """
        epoch, window, _ = self.take(START, 1)[1]
        pairs, (firsts, ends) = self.window(epoch, window), self.pieces(epoch, window)
        if self.windows(epoch) == 1:
            return float(len(pairs))
        starts = self.corpus.sentence_starts
        return len(pairs) / float((starts[ends] - starts[firsts]).sum()) * float((self.tokens * self.passes).sum())
