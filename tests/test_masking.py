"""Masking: which tokens are chosen and drawn, random numbers that are each sequence's own, whole words and spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert.training.data.masking import mask_tokens
from d2l_bert.training.data.order import random_keys, random_numbers, random_order


MASK, FIRST_ORDINARY, VOCAB_SIZE = 4, 5, 45
SEQUENCES = 20_000
IS_CONTINUATION = np.arange(2000) >= 1000  # of the ids that `pieces` draws


def mask(tokens, candidates, rng, mlm_probability=0.15, *how):
    """Mask one sequence: returns the masked ids, the predicted positions, and the original ids there."""
    may = np.zeros((1, len(tokens)), dtype=bool)
    may[0, candidates] = True
    keys = random_keys([0], rng.integers(2**40, size=1))
    masked, chosen = mask_tokens(tokens[None], may, keys, MASK, FIRST_ORDINARY, VOCAB_SIZE, mlm_probability, *how)
    return masked[0], chosen[0].nonzero()[0], tokens[chosen[0]]


def standard_errors(count, trials, probability):
    """The distance of a binomial count from its expectation, in standard errors."""
    return (count - trials * probability) / np.sqrt(trials * probability * (1 - probability))


@pytest.fixture(scope="module")
def many():
    """20,000 masked sequences of 10 to 60 tokens: (tokens, masked, positions) each.

    Their tokens lie outside the range of random tokens, so a token replaced by itself does not look like one kept.
    """
    rng = np.random.default_rng(0)
    may = np.arange(60) < rng.integers(10, 61, (SEQUENCES, 1))
    tokens = rng.integers(1000, 2000, may.shape)
    keys = random_keys([0], rng.integers(2**40, size=SEQUENCES))
    masked, chosen = mask_tokens(tokens, may, keys, MASK, FIRST_ORDINARY, VOCAB_SIZE, 0.15)
    return [(tokens[row, may[row]], masked[row, may[row]], chosen[row].nonzero()[0]) for row in range(SEQUENCES)]


def test_random_tokens_are_ordinary_tokens_and_equally_likely(many):
    before = np.concatenate([tokens[positions] for tokens, _, positions in many])
    after = np.concatenate([masked[positions] for _, masked, positions in many])
    random = after[(after != MASK) & (after != before)]
    ordinary = VOCAB_SIZE - FIRST_ORDINARY
    counts = np.bincount(random - FIRST_ORDINARY, minlength=ordinary)  # raises for a token below the range
    assert len(counts) == ordinary, "none is beyond the range"
    # The largest of 40 standard normal numbers is above 4 in one of 400 cases.
    assert np.abs(standard_errors(counts, len(random), 1 / ordinary)).max() < 4


def test_all_candidates_are_equally_likely():
    rng = np.random.default_rng(1)
    tokens, candidates = np.arange(1000, 1030), np.array([1, 2, 5, 6, 7, 10, 14, 15, 16, 17, 20, 21, 22, 25, 26, 27])
    counts = np.zeros(len(tokens))
    for _ in range(5000):
        counts[mask(tokens, candidates, rng, 0.25)[1]] += 1  # exactly 4 of the 16 candidates
    assert counts.sum() == 4 * 5000
    assert np.abs(standard_errors(counts[candidates], 5000, 0.25)).max() < 4
    assert np.delete(counts, candidates).max() == 0


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
        assert abs(np.corrcoef(whole, np.arange(count))[0, 1]) < 4 / np.sqrt(count)


def test_the_random_numbers_are_those_of_splitmix64():
    """Compared with the first outputs for the seed 1234567, published with the algorithm."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = random_numbers(np.uint64(1234567), np.arange(4))
    np.testing.assert_array_equal(found, [(number >> 11) * 2.0**-53 for number in published])


def test_the_numbers_of_neighbouring_keys_and_positions_are_uncorrelated():
    numbers = random_numbers(random_keys([1, 2], np.arange(2000))[:, None], np.arange(500))
    other = random_numbers(random_keys([1, 3], np.arange(2000))[:, None], np.arange(500))
    assert abs(numbers.mean() - 0.5) < 4 / np.sqrt(12 * numbers.size)
    assert numbers.min() >= 0 and numbers.max() < 1
    for one, another in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1]), (numbers, other)):
        correlation = np.corrcoef(one.ravel(), another.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(one.size)


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_a_sequences_masks_do_not_depend_on_the_rest_of_the_batch(masking):
    rng = np.random.default_rng(0)
    tokens, keys = rng.integers(5, 2000, (40, 30)), random_keys([7], np.arange(40))
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
    lengths = np.asarray(lengths)
    first = np.zeros(lengths.sum(), dtype=bool)
    first[np.cumsum(lengths) - lengths] = True
    return np.where(first, rng.integers(5, 1000, len(first)), rng.integers(1000, 2000, len(first)))


def mask_words(tokens, candidates, rng, masking, mlm_probability=0.15):
    return mask(tokens, candidates, rng, mlm_probability, masking, IS_CONTINUATION)


@st.composite
def texts(draw):
    """Words of one to nine pieces in two segments, [CLS] A [SEP] B [SEP]; B may start inside a word."""
    a, b = (draw(st.lists(st.integers(1, 9), min_size=1, max_size=20)) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    second = pieces(b, rng)
    if draw(st.booleans()):
        second[0] = 1500
    tokens = np.concatenate(([2], pieces(a, rng), [3], second, [3]))
    b_start = sum(a) + 2
    candidates = np.concatenate((np.arange(1, b_start - 1), np.arange(b_start, len(tokens) - 1)))
    words = np.concatenate((np.repeat(np.arange(len(a)), a), len(a) + np.repeat(np.arange(len(b)), b)))
    return tokens, candidates, words, rng, draw(st.floats(0, 1, exclude_min=True))


@given(texts(), st.sampled_from(["whole_word", "span"]))
def test_a_words_pieces_are_chosen_together_and_the_number_of_words_is_right(text, masking):
    tokens, candidates, words, rng, probability = text
    masked, positions, labels = mask_words(tokens, candidates, rng, masking, probability)
    chosen = np.isin(candidates, positions)
    assert chosen.sum() == len(positions) > 0
    for word in range(words[-1] + 1):
        assert chosen[words == word].all() or not chosen[words == word].any()
    count = len(set(words[chosen].tolist()))
    assert count == 1 or abs(count - probability * (words[-1] + 1)) < 1
    np.testing.assert_array_equal(labels, tokens[positions])
    np.testing.assert_array_equal(np.delete(masked, positions), np.delete(tokens, positions))


@pytest.mark.slow
def test_spans_have_the_lengths_of_spanbert():
    rng = np.random.default_rng(3)
    lengths = []
    for _ in range(5000):
        _, positions, _ = mask_words(pieces(np.ones(2000, dtype=int), rng), np.arange(2000), rng, "span", 0.1)
        ends = np.flatnonzero(np.diff(positions) > 1) + 1
        lengths.extend(map(len, np.split(positions, ends)))
    counts = np.bincount(lengths, minlength=12)
    wanted = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)
    # One span in fifty is shortened to reach the right count, or continues at the start of the sequence.
    np.testing.assert_allclose(counts[1:11] / counts.sum(), wanted, atol=0.01)
    assert counts[11:].sum() == 0 and np.mean(lengths) == pytest.approx(3.8, abs=0.1)
