"""Masking: which tokens are chosen and drawn, random numbers that are each sequence's own, whole words and spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert.training.data.masking import mask_tokens
from d2l_bert.training.data.random_numbers import random_keys, random_numbers, random_order


MASK = 4
FIRST_ORDINARY = 5
VOCAB_SIZE = 45
IS_CONTINUATION = np.arange(2000) >= 1000  # of the ids that `pieces` draws


def mask(tokens, candidates, rng, mlm_probability, masking="token"):
    """Mask sequences (sequences, tokens), each with a key that is drawn: the masked ids, and which are predicted."""
    keys = random_keys([0], rng.integers(2**40, size=len(tokens)))
    how = (MASK, FIRST_ORDINARY, VOCAB_SIZE, mlm_probability, masking, IS_CONTINUATION)
    return mask_tokens(tokens, candidates, keys, *how)


def assert_uncorrelated(one, other):
    """Assert that the correlation of two arrays is 0, up to four standard errors."""
    correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(one.size)


def assert_equally_likely(counts, trials):
    """Assert that counts are those of equally likely cases: none is more than four standard errors off."""
    expected = trials / len(counts)
    standard_error = np.sqrt(expected * (1 - 1 / len(counts)))
    assert np.abs(counts - expected).max() < 4 * standard_error


def test_random_tokens_are_ordinary_tokens_and_equally_likely():
    """The tokens lie outside the range of random tokens, so that no token is replaced by itself."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1000, 2000, (20_000, 40))
    masked, chosen = mask(tokens, np.ones(tokens.shape, dtype=bool), rng, 0.15)
    after = masked[chosen]
    random = after[(after != MASK) & (after != tokens[chosen])]
    counts = np.bincount(random - FIRST_ORDINARY)  # raises for a token below the range
    assert len(counts) == VOCAB_SIZE - FIRST_ORDINARY, "none is beyond the range"
    assert_equally_likely(counts, len(random))


def test_all_candidates_are_equally_likely():
    may = np.zeros((5000, 30), dtype=bool)
    may[:, [1, 2, 5, 6, 7, 10, 14, 15, 16, 17, 20, 21, 22, 25, 26, 27]] = True
    tokens = np.tile(np.arange(1000, 1030), (5000, 1))
    _, chosen = mask(tokens, may, np.random.default_rng(1), 0.25)
    assert (chosen.sum(1) == 4).all()
    assert not chosen[~may].any()
    assert_equally_likely(chosen.sum(0)[may[0]], 4 * 5000)


# ---------------------------------------------------------------------------------------------------------------------
# Many sequences at once, each with its own random numbers


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 65_536, 100_003])
def test_a_random_order_holds_each_number_once_and_any_part_of_it_is_found_alone(count):
    whole = random_order(np.arange(count), count, (1, 2))
    assert sorted(whole.tolist()) == list(range(count))
    places = np.random.default_rng(0).integers(count, size=50)
    np.testing.assert_array_equal(random_order(places, count, (1, 2)), whole[places])
    if count >= 1000:
        assert (whole == random_order(np.arange(count), count, (1, 3))).mean() < 0.01
        assert_uncorrelated(whole, np.arange(count))


def test_the_random_numbers_are_those_of_splitmix64():
    """Compared with the first outputs for the seed 1234567, published with the algorithm."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [(number >> 11) * 2.0**-53 for number in published]
    np.testing.assert_array_equal(random_numbers(np.uint64(1234567), np.arange(4)), expected)


def test_the_numbers_of_neighbouring_keys_and_positions_are_uncorrelated():

    def numbers_of(key):
        keys = random_keys(key, np.arange(2000))
        return random_numbers(keys[:, None], np.arange(500))

    numbers = numbers_of([1, 2])
    other = numbers_of([1, 3])
    assert abs(numbers.mean() - 0.5) < 4 / np.sqrt(12 * numbers.size)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert_uncorrelated(numbers[1:], numbers[:-1])
    assert_uncorrelated(numbers[:, 1:], numbers[:, :-1])
    assert_uncorrelated(numbers, other)


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_a_sequences_masks_do_not_depend_on_the_rest_of_the_batch(masking):
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 2000, (40, 30))
    keys = random_keys([7], np.arange(40))
    candidates = np.arange(30) < rng.integers(1, 31, (40, 1))
    how = (MASK, FIRST_ORDINARY, VOCAB_SIZE, 0.3, masking, np.arange(2000) >= 1000)
    masked, chosen = mask_tokens(tokens, candidates, keys, *how)
    for rows in (slice(7, 8), slice(5, 20), np.array([9, 3, 30])):
        width = candidates[rows].sum(1).max()
        again = mask_tokens(tokens[rows, :width], candidates[rows, :width], keys[rows], *how)
        np.testing.assert_array_equal(again[0], masked[rows, :width])
        np.testing.assert_array_equal(again[1], chosen[rows, :width])


# ---------------------------------------------------------------------------------------------------------------------
# Whole words and spans of words


def pieces(lengths, rng):
    """Token ids of words with these numbers of pieces: first pieces are below 1000, all later ones 1000 or more."""
    count = np.sum(lengths)
    is_first = np.zeros(count, dtype=bool)
    is_first[np.cumsum(lengths) - lengths] = True
    return np.where(is_first, rng.integers(5, 1000, count), rng.integers(1000, 2000, count))


@st.composite
def texts(draw):
    """Words of one to nine pieces in two segments, [CLS] A [SEP] B [SEP]; B may start inside a word."""
    a, b = (draw(st.lists(st.integers(1, 9), min_size=1, max_size=20)) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    second = pieces(b, rng)
    if draw(st.booleans()):
        second[0] = 1500
    tokens = np.concatenate(([2], pieces(a, rng), [3], second, [3]))
    words_of_a = np.repeat(np.arange(len(a)), a)
    words_of_b = len(a) + np.repeat(np.arange(len(b)), b)
    words = np.concatenate(([-1], words_of_a, [-1], words_of_b, [-1]))
    return tokens, words, rng


@pytest.mark.slow
@given(texts(), st.floats(0, 1, exclude_min=True), st.sampled_from(["whole_word", "span"]))
def test_a_words_pieces_are_chosen_together_and_the_number_of_words_is_right(text, probability, masking):
    tokens, words, rng = text  # `words` is -1 at [CLS] and [SEP]
    ((masked,), (chosen,)) = mask(tokens[None], words[None] >= 0, rng, probability, masking)
    found = set(words[chosen].tolist())
    np.testing.assert_array_equal(chosen, np.isin(words, [*found]))
    assert found and -1 not in found
    wanted = probability * (words.max() + 1)
    assert len(found) == 1 or abs(len(found) - wanted) < 1
    np.testing.assert_array_equal(masked[~chosen], tokens[~chosen])


@pytest.mark.slow
def test_spans_have_the_lengths_of_spanbert():
    rng = np.random.default_rng(3)
    tokens = rng.integers(5, 1000, (1000, 2000))
    _, chosen = mask(tokens, np.ones(tokens.shape, dtype=bool), rng, 0.1, "span")
    borders = np.diff(np.pad(chosen, ((0, 0), (1, 1))).astype(int))
    _, starts = np.nonzero(borders == 1)
    _, ends = np.nonzero(borders == -1)
    lengths = ends - starts
    counts = np.bincount(lengths, minlength=12)
    wanted = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)
    # One span in fifty is shortened to reach the right count, or continues at the start of the sequence.
    np.testing.assert_allclose(counts[1:11] / counts.sum(), wanted, atol=0.01)
    assert counts[11:].sum() == 0
    assert lengths.mean() == pytest.approx(3.8, abs=0.1)
