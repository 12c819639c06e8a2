"""Choose what a masked language model must predict (BERT, section 3.1; d2l, section 15.9.1.2)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np


Masking = Literal["token", "whole_word", "span"]

# SpanBERT (Joshi et al., 2020), section 3.1: lengths in words, geometric, at most 10; 3.8 on average.
SPAN_PROBABILITY, LONGEST_SPAN = 0.2, 10
_SPAN_LENGTHS = (1 - SPAN_PROBABILITY) ** np.arange(LONGEST_SPAN)
_SPAN_LENGTHS_UP_TO = np.cumsum(_SPAN_LENGTHS) / _SPAN_LENGTHS.sum()

# SplitMix64's step from one state to the next, and how many states are a key's own.
_STEP, _NUMBERS_OF_A_KEY = 0x9E3779B97F4A7C15, 2**20
# Which of them are for what: the first says how many to choose.
_COUNT, _UNITS, _FATES, _TOKENS = 0, 1, 2**18, 2**19


def share_at(step: int, first: float, last: float, max_steps: int) -> float:
    """The share to predict in a step, counted from 0, on a straight line from `first` to `last` over the run."""
    return first + (last - first) * step / max(max_steps - 1, 1)


def mask_tokens(
    tokens: np.ndarray,
    candidates: np.ndarray,
    keys: np.ndarray,
    mask_token_id: int,
    first_ordinary_id: int,
    vocab_size: int,
    mlm_probability: float = 0.15,
    masking: Masking = "token",
    is_continuation: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Mask sequences, each by its own key, whatever stands beside it.

    What is chosen, a token or a whole word, each as likely, is `mlm_probability` of all, rounded up or down at random
    so that the share is right on average, and at least one. Of the chosen tokens 80 % become `[MASK]`, 10 % a random
    ordinary token, 10 % stay as they are.

    Args:
        tokens: token ids (B, T), T below 2^18; left as they are.
        candidates: whether a token may be chosen (B, T): ordinary ones.
        keys: the only source of randomness (B,), `random_keys`.
        mask_token_id: id of `[MASK]`.
        first_ordinary_id, vocab_size: random tokens are drawn from this range, so that no special token is among them
            (the book draws those too).
        mlm_probability: share to predict.
        masking: `token` chooses tokens one by one; `whole_word` all the pieces of a word or none; `span` whole words
            in runs of geometric length (SpanBERT). A run that meets the end of a segment goes on in the other.
        is_continuation: for each id of the vocabulary whether it goes on with a word (V,); unless `masking` is
            `token`. A piece that follows no candidate starts a word of its own: its word was cut off.

    Returns:
        The masked ids (B, T), and what is to be predicted (B, T), booleans.
    """
    starts = candidates.copy()  # of what is chosen as a whole
    if masking != "token":
        starts[:, 1:] &= ~(is_continuation[tokens[:, 1:]] & candidates[:, :-1])
    unit = np.cumsum(starts, axis=1) - 1  # of each candidate
    units = starts.sum(1)
    counts = np.minimum(np.maximum((mlm_probability * units + random_numbers(keys, _COUNT)).astype(int), 1), units)
    chosen_units = np.zeros((len(tokens), max(1, units.max(initial=1))), dtype=bool)
    if masking == "span":
        for row in np.flatnonzero(units):
            chosen_units[row, _spans(units[row], counts[row], np.random.default_rng(keys[row]))] = True
    else:
        ranked = random_numbers(keys[:, None], _UNITS + np.arange(chosen_units.shape[1]))
        ranked[np.arange(chosen_units.shape[1]) >= units[:, None]] = 1  # behind all others
        first = np.argsort(ranked, axis=1)[:, : counts.max(initial=0)]
        np.put_along_axis(chosen_units, first, np.arange(first.shape[1]) < counts[:, None], axis=1)
    chosen = candidates & np.take_along_axis(chosen_units, np.maximum(unit, 0), axis=1)

    masked, (rows, places) = tokens.copy(), chosen.nonzero()
    fate = random_numbers(keys[rows], _FATES + places)
    ordinary = random_numbers(keys[rows], _TOKENS + places) * (vocab_size - first_ordinary_id)
    became = np.where(fate < 0.8, mask_token_id, first_ordinary_id + ordinary.astype(int))
    masked[rows, places] = np.where(fate < 0.9, became, tokens[rows, places])
    return masked, chosen


def random_keys(seed: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Keys (n,) for `random_numbers`, of a seed and different numbers (n,): different ones, far apart."""
    (start,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return start + numbers.astype(np.uint64) * np.uint64(_STEP * _NUMBERS_OF_A_KEY % 2**64)


def random_numbers(keys: np.ndarray, places: np.ndarray | int) -> np.ndarray:
    """
    Uniform numbers from 0 up to 1, functions of key and place alone: they broadcast.

    SplitMix64 (Steele et al., 2014), a generator that can start anywhere: many short streams at once cost what one
    long one does.

    Args:
        keys: an array from `random_keys`.
        places: below 2^20.
    """
    state = keys + np.asarray(places + 1, dtype=np.uint64) * np.uint64(_STEP)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def _spans(words, count, rng):
    """`count` of `words` numbers in runs of geometric length, gaps between them, on a circle: each is as likely."""
    # More lengths than can be needed. Their order is random already; the last is cut to fit.
    lengths = np.searchsorted(_SPAN_LENGTHS_UP_TO, rng.random(count)) + 1
    ends = np.minimum(np.cumsum(lengths), count)
    lengths = np.diff(ends[: np.searchsorted(ends, count) + 1], prepend=0)
    runs, free = len(lengths), words - count
    least = min(1, free // runs)  # a word free after each run, or two would be one
    loose = free - least * runs
    bars = np.sort(rng.permutation(loose + runs - 1)[: runs - 1]) - np.arange(runs - 1)
    gaps = least + np.diff(bars, prepend=0, append=loose)  # every way to share out the free words is as likely
    before = np.cumsum(gaps) - gaps
    return (np.arange(count) + np.repeat(before, lengths) + rng.integers(words)) % words
