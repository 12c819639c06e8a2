"""Masks token ids for the masked language model (BERT, section 3.1; d2l, section 15.9.1.2)."""

import numpy as np

from d2l_bert.training.data.random_numbers import random_numbers


# SpanBERT (Joshi et al., 2020), section 3.1: a span is 1 to 10 words long, geometrically distributed with p = 0.2, on
# average 3.8.
SPAN_PROBABILITY = 0.2
LONGEST_SPAN = 10
_SPAN_LENGTHS = (1 - SPAN_PROBABILITY) ** np.arange(LONGEST_SPAN)
_SPAN_LENGTHS_UP_TO = np.cumsum(_SPAN_LENGTHS) / _SPAN_LENGTHS.sum()

# Where the random numbers for each purpose start in a key's stream: how many units to choose (one number), which
# units, what a chosen token becomes ([MASK], random or itself), and which random token.
_COUNT = 0
_UNITS = 1
_FATES = 2**18
_TOKENS = 2**19


def mask_tokens(
    tokens: np.ndarray,
    candidates: np.ndarray,
    keys: np.ndarray,
    mask_token_id: int,
    first_ordinary_id: int,
    end_of_ordinary_ids: int,
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
        first_ordinary_id, end_of_ordinary_ids: random tokens are drawn from first_ordinary_id to end_of_ordinary_ids
            - 1, which leaves out the special tokens. The book also draws special tokens.
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
    starts_unit = candidates.copy()
    if masking != "token":
        continues_word = is_continuation[tokens[:, 1:]] & candidates[:, :-1]  # of a candidate before it
        starts_unit[:, 1:] &= ~continues_word
    unit_of_token = np.cumsum(starts_unit, axis=1) - 1  # the number, in its row, of each candidate's unit
    units_in_row = starts_unit.sum(1)
    wanted = (mlm_probability * units_in_row + random_numbers(keys, _COUNT)).astype(int)
    chosen_in_row = np.minimum(np.maximum(wanted, 1), units_in_row)
    if masking == "span":
        is_unit_chosen = _spans_of_units(units_in_row, chosen_in_row, keys)
    else:
        is_unit_chosen = _single_units(units_in_row, chosen_in_row, keys)
    chosen = candidates & np.take_along_axis(is_unit_chosen, np.maximum(unit_of_token, 0), axis=1)

    rows, columns = chosen.nonzero()
    fate = random_numbers(keys[rows], _FATES + columns)
    drawn = random_numbers(keys[rows], _TOKENS + columns) * (end_of_ordinary_ids - first_ordinary_id)
    random_tokens = first_ordinary_id + drawn.astype(int)
    becomes_mask = fate < mask_replace_prob
    stays = fate >= mask_replace_prob + random_replace_prob
    same_or_random = np.where(stays, tokens[rows, columns], random_tokens)
    masked = tokens.copy()
    masked[rows, columns] = np.where(becomes_mask, mask_token_id, same_or_random)
    return masked, chosen


def _single_units(units_in_row, chosen_in_row, keys):
    """
    Choose units of each row, all equally likely: whether each is chosen (B, units), false beyond the row's own.

    Args:
        units_in_row: the number of units (B,).
        chosen_in_row: how many to choose (B,).
        keys: of the rows (B,).
    """
    numbers = np.arange(max(1, units_in_row.max(initial=1)))
    # Draw a random number for each unit, and choose the units with the smallest ones.
    drawn = random_numbers(keys[:, None], _UNITS + numbers)
    drawn[numbers >= units_in_row[:, None]] = 1  # larger than those of the row's own units
    by_number = np.argsort(drawn, axis=1)[:, : chosen_in_row.max(initial=0)]  # the units of a row, smallest first
    is_among_smallest = np.arange(by_number.shape[1]) < chosen_in_row[:, None]
    is_chosen = np.zeros(drawn.shape, dtype=bool)
    np.put_along_axis(is_chosen, by_number, is_among_smallest, axis=1)
    return is_chosen


def _spans_of_units(units_in_row, chosen_in_row, keys):
    """As `_single_units`, but in spans of consecutive units."""
    most_units = max(1, units_in_row.max(initial=1))
    is_chosen = np.zeros((len(keys), most_units), dtype=bool)
    for row in np.flatnonzero(units_in_row):
        rng = np.random.default_rng(keys[row])
        is_chosen[row, _spans(units_in_row[row], chosen_in_row[row], rng)] = True
    return is_chosen


def _spans(words, count, rng):
    """
    Choose `count` of the words 0 to `words` - 1, in spans of geometric length.

    The words form a circle that is rotated at random, so that every word is equally likely. Where enough words are
    left, at least one word lies between two spans. For example, 6 of 12 words:

        lengths are drawn                         3, 2, 4, 1, ...
        as many as it takes, the last one cut     3, 2, 1            the other 6 words lie in gaps behind the spans
        a gap of 1 behind each span               1, 1, 1            3 words are to spare
        which are distributed over the gaps       1, 3, 2            every way is equally likely
        chosen (x) and other words                x x x . x x . . . x . .
        rotated at random, here by 2              . . x x x . x x . . . x
    """
    drawn = np.searchsorted(_SPAN_LENGTHS_UP_TO, rng.random(count)) + 1  # `count` lengths are always enough
    ends = np.minimum(np.cumsum(drawn), count)  # chosen words up to the end of each span: 3 5 6 6 6 6 above
    spans = np.searchsorted(ends, count) + 1  # how many it takes
    lengths = np.diff(ends[:spans], prepend=0)
    unchosen = words - count
    min_gap = min(1, unchosen // spans)  # without a gap two spans would merge into one
    spare = unchosen - min_gap * spans
    # "Stars and bars": a line of the spare words (*), with a bar (|) between those of one gap and those of the next.
    # Bars at random places of the line make every distribution equally likely. Above, the line is | * * | *: no spare
    # word for the first gap, two for the second, one for the third.
    bar_count = spans - 1
    bar_places = np.sort(rng.permutation(spare + bar_count)[:bar_count])  # 0 3
    stars_before = bar_places - np.arange(bar_count)  # each bar, without the bars before it: 0 2
    spare_in_gap = np.diff(stars_before, prepend=0, append=spare)  # 0 2 1
    gaps = min_gap + spare_in_gap  # 1 3 2
    unchosen_before = np.cumsum(gaps) - gaps  # each span: 0 1 4
    chosen = np.arange(count) + np.repeat(unchosen_before, lengths)
    rotation = rng.integers(words)
    return (chosen + rotation) % words
