"""Masks token ids for the masked language model (BERT, section 3.1; d2l, section 15.9.1.2)."""

import numpy as np

from d2l_bert.training.data.random_numbers import random_numbers


# SpanBERT (Joshi et al., 2020), section 3.1: a span is 1 to 10 words long, geometrically distributed with p = 0.2, on
# average 3.8.
SPAN_PROBABILITY, LONGEST_SPAN = 0.2, 10
_SPAN_LENGTHS = (1 - SPAN_PROBABILITY) ** np.arange(LONGEST_SPAN)
_SPAN_LENGTHS_UP_TO = np.cumsum(_SPAN_LENGTHS) / _SPAN_LENGTHS.sum()

# Where the random numbers for each purpose start in a key's stream: how many units to choose (one number), which
# units, what a chosen token becomes ([MASK], random or itself), and which random token.
_COUNT, _UNITS, _FATES, _TOKENS = 0, 1, 2**18, 2**19


def mask_tokens(
    tokens: np.ndarray,
    candidates: np.ndarray,
    keys: np.ndarray,
    mask_token_id: int,
    first_ordinary_id: int,
    vocab_size: int,
    mlm_probability: float = 0.15,
    masking: str = "token",
    is_continuation: np.ndarray | None = None,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Mask the sequences of a batch; what happens to a sequence depends on that sequence and its key alone.

    A unit is a token, or a whole word unless `masking` is `token`. The number of chosen units is `mlm_probability` of
    all units, rounded up or down at random so that the share is right on average, and at least one. Every unit is
    equally likely. Of the chosen tokens, as in BERT, 80 % become `[MASK]`, 10 % a random ordinary token, 10 % stay
    unchanged.

    Args:
        tokens: token ids (B, T), T below 2^18; not changed in place.
        candidates: whether a token may be chosen (B, T): true for tokens that are not special; `[UNK]` is special.
        keys: from `random_keys` (B,); the only source of randomness.
        mask_token_id: id of `[MASK]`.
        first_ordinary_id, vocab_size: random tokens are drawn from first_ordinary_id to vocab_size - 1, which leaves
            out the special tokens. The book also draws special tokens.
        mlm_probability: the share of units to predict.
        masking: `token` chooses single tokens; `whole_word` chooses words, with all their pieces; `span` chooses
            spans of words of geometric length (SpanBERT). A span that reaches the end of a segment continues in the
            other segment.
        is_continuation: for each id of the vocabulary, whether the piece continues a word (V,); needed unless
            `masking` is `token`. A continuation piece that does not follow a candidate counts as a word: truncation
            removed the beginning of that word.
        mask_replace_prob, random_replace_prob: shares of the chosen tokens that become `[MASK]`, and a random token.

    Returns:
        The masked ids (B, T), and whether each token is to be predicted (B, T), bool.
    """
    starts = candidates.copy()  # whether a unit starts at this token
    if masking != "token":
        starts[:, 1:] &= ~(is_continuation[tokens[:, 1:]] & candidates[:, :-1])
    unit = np.cumsum(starts, axis=1) - 1  # the number of each candidate's unit in its row
    units = starts.sum(1)  # units in each row
    counts = np.minimum(np.maximum((mlm_probability * units + random_numbers(keys, _COUNT)).astype(int), 1), units)
    chosen_units = np.zeros((len(tokens), max(1, units.max(initial=1))), dtype=bool)
    if masking == "span":
        for row in np.flatnonzero(units):
            chosen_units[row, _spans(units[row], counts[row], np.random.default_rng(keys[row]))] = True
    else:
        # Draw a number for each unit, and choose the units with the smallest numbers.
        drawn = random_numbers(keys[:, None], _UNITS + np.arange(chosen_units.shape[1]))
        drawn[np.arange(chosen_units.shape[1]) >= units[:, None]] = 1  # columns beyond the row's units sort last
        smallest = np.argsort(drawn, axis=1)[:, : counts.max(initial=0)]
        np.put_along_axis(chosen_units, smallest, np.arange(smallest.shape[1]) < counts[:, None], axis=1)
    chosen = candidates & np.take_along_axis(chosen_units, np.maximum(unit, 0), axis=1)

    masked, (rows, columns) = tokens.copy(), chosen.nonzero()
    fate = random_numbers(keys[rows], _FATES + columns)
    ordinary = random_numbers(keys[rows], _TOKENS + columns) * (vocab_size - first_ordinary_id)
    replaced = np.where(fate < mask_replace_prob, mask_token_id, first_ordinary_id + ordinary.astype(int))
    is_replaced = fate < mask_replace_prob + random_replace_prob
    masked[rows, columns] = np.where(is_replaced, replaced, tokens[rows, columns])
    return masked, chosen


def _spans(words, count, rng):
    """
    Choose `count` of the words 0 to `words` - 1, in spans of geometric length.

    The words form a circle that is rotated at random, so that every word is equally likely. Where enough words are
    left, at least one word lies between two spans.
    """
    # Draw `count` lengths, which is always enough, and cut off the last span where the sum reaches `count`.
    lengths = np.searchsorted(_SPAN_LENGTHS_UP_TO, rng.random(count)) + 1
    ends = np.minimum(np.cumsum(lengths), count)
    lengths = np.diff(ends[: np.searchsorted(ends, count) + 1], prepend=0)
    spans, unchosen = len(lengths), words - count
    min_gap = min(1, unchosen // spans)  # without a gap two spans would merge into one
    spare = unchosen - min_gap * spans
    # Stars and bars: every way to distribute the spare words over the gaps is equally likely.
    bars = np.sort(rng.permutation(spare + spans - 1)[: spans - 1]) - np.arange(spans - 1)
    gaps = min_gap + np.diff(bars, prepend=0, append=spare)
    unchosen_before = np.cumsum(gaps) - gaps  # for each span
    return (np.arange(count) + np.repeat(unchosen_before, lengths) + rng.integers(words)) % words
