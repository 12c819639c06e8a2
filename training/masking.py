"""Choose what a masked language model must predict (BERT, section 3.1; d2l, section 15.9.1.2)."""

from typing import Literal

import numpy as np


Masking = Literal["token", "whole_word", "span"]

# SpanBERT (Joshi et al., 2020), section 3.1: lengths in words, geometric, at most 10; 3.8 on average.
SPAN_PROBABILITY, LONGEST_SPAN = 0.2, 10
_SPAN_LENGTHS = (1 - SPAN_PROBABILITY) ** np.arange(LONGEST_SPAN)
_SPAN_LENGTHS_UP_TO = np.cumsum(_SPAN_LENGTHS) / _SPAN_LENGTHS.sum()


def share_at(step: int, first: float, last: float, max_steps: int) -> float:
    """The share to predict in a step, counted from 0, on a straight line from `first` to `last` over the run."""
    return first + (last - first) * step / max(max_steps - 1, 1)


def mask_tokens(
    tokens: np.ndarray,
    candidates: np.ndarray,
    rng: np.random.Generator,
    mask_token_id: int,
    first_ordinary_id: int,
    vocab_size: int,
    mlm_probability: float = 0.15,
    masking: Masking = "token",
    is_continuation: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Mask one sequence.

    What is chosen, a token or a whole word, each as likely, is `mlm_probability` of all, rounded up or down at random
    so that the share is right on average, and at least one. Of the chosen tokens 80 % become `[MASK]`, 10 % a random
    ordinary token, 10 % stay as they are.

    Args:
        tokens: token ids (T,); left as they are.
        candidates: positions (C,) that may be chosen, ascending: those of ordinary tokens.
        rng: the only source of randomness.
        mask_token_id: id of `[MASK]`.
        first_ordinary_id, vocab_size: random tokens are drawn from this range, so that no special token is among them
            (the book draws those too).
        mlm_probability: share to predict.
        masking: `token` chooses tokens one by one; `whole_word` all the pieces of a word or none; `span` whole words
            in runs of geometric length (SpanBERT). A run that meets the end of a segment goes on in the other.
        is_continuation: for each id of the vocabulary whether it goes on with a word (V,); unless `masking` is
            `token`. A piece that follows no candidate starts a word of its own: its word was cut off.

    Returns:
        The masked ids (T,), the predicted positions (P,), ascending, and the true ids there (P,).
    """
    if masking == "token":
        count = _how_many(len(candidates), mlm_probability, rng)
        positions = np.sort(rng.permutation(candidates)[:count])
    else:
        starts = ~is_continuation[tokens[candidates]]
        starts[0] = True
        starts[1:] |= np.diff(candidates) > 1
        word = np.cumsum(starts) - 1  # of each candidate
        words = word[-1] + 1
        count = _how_many(words, mlm_probability, rng)
        chosen = np.zeros(words, dtype=bool)
        chosen[_spans(words, count, rng) if masking == "span" else rng.permutation(words)[:count]] = True
        positions = candidates[chosen[word]]
    labels = tokens[positions]
    fate = rng.random(len(positions))
    masked = tokens.copy()
    masked[positions[fate < 0.8]] = mask_token_id
    at_random = positions[(fate >= 0.8) & (fate < 0.9)]
    masked[at_random] = rng.integers(first_ordinary_id, vocab_size, len(at_random))
    return masked, positions, labels


def _how_many(units, share, rng):
    return min(max(int(share * units + rng.random()), 1), units)


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
