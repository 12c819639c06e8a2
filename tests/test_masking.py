"""Masking chooses as many tokens as it should, of those it may, and does to them what BERT does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2l_bert.training.masking import mask_tokens


MASK, FIRST_ORDINARY, VOCAB_SIZE = 4, 5, 45
SEQUENCES = 20_000


def mask(tokens, candidates, rng, mlm_probability=0.15):
    return mask_tokens(tokens, candidates, rng, MASK, FIRST_ORDINARY, VOCAB_SIZE, mlm_probability)


def standard_errors(count, trials, probability):
    """How many standard errors a binomial count is away from what it should be."""
    return (count - trials * probability) / np.sqrt(trials * probability * (1 - probability))


@pytest.fixture(scope="module")
def many():
    """20,000 masked sequences of 10 to 60 tokens: (tokens, masked, positions) each.

    Their tokens lie outside the range that random tokens come from, so that a token replaced by itself cannot be
    mistaken for one that was left alone.
    """
    rng = np.random.default_rng(0)
    results = []
    for _ in range(SEQUENCES):
        tokens = rng.integers(1000, 2000, rng.integers(10, 61))
        masked, positions, _ = mask(tokens, np.arange(len(tokens)), rng)
        results.append((tokens, masked, positions))
    return results


def test_fifteen_percent_of_the_candidates_are_chosen(many):
    lengths = np.array([len(tokens) for tokens, _, _ in many])
    chosen = np.array([len(positions) for _, _, positions in many])
    # Each count is the expected one rounded up or down, up with a probability of its fraction f: variance f (1 - f).
    fraction = (0.15 * lengths) % 1
    error = np.sqrt((fraction * (1 - fraction)).sum())
    assert abs(chosen.sum() - 0.15 * lengths.sum()) < 3 * error
    assert np.abs(chosen - 0.15 * lengths).max() < 1


def test_eighty_percent_become_mask_ten_percent_random_ten_percent_stay(many):
    before = np.concatenate([tokens[positions] for tokens, _, positions in many])
    after = np.concatenate([masked[positions] for _, masked, positions in many])
    became_mask, stayed = (after == MASK).sum(), (after == before).sum()
    became_random = len(after) - became_mask - stayed
    for count, share in ((became_mask, 0.8), (became_random, 0.1), (stayed, 0.1)):
        assert abs(standard_errors(count, len(after), share)) < 3


def test_random_tokens_are_ordinary_ones_and_each_is_as_likely(many):
    before = np.concatenate([tokens[positions] for tokens, _, positions in many])
    after = np.concatenate([masked[positions] for _, masked, positions in many])
    random = after[(after != MASK) & (after != before)]
    ordinary = VOCAB_SIZE - FIRST_ORDINARY
    counts = np.bincount(random - FIRST_ORDINARY, minlength=ordinary)  # refuses what is below the range
    assert len(counts) == ordinary, "none is beyond the range"
    # Of 40 standard normal figures the largest is above 4 once in 400 times.
    assert np.abs(standard_errors(counts, len(random), 1 / ordinary)).max() < 4


def test_every_candidate_is_as_likely():
    rng = np.random.default_rng(1)
    tokens, candidates = np.arange(1000, 1030), np.array([1, 2, 5, 6, 7, 10, 14, 15, 16, 17, 20, 21, 22, 25, 26, 27])
    counts = np.zeros(len(tokens))
    for _ in range(5000):
        counts[mask(tokens, candidates, rng, 0.25)[1]] += 1  # exactly 4 of 16
    assert counts.sum() == 4 * 5000
    assert np.abs(standard_errors(counts[candidates], 5000, 0.25)).max() < 4
    assert np.delete(counts, candidates).max() == 0


@st.composite
def maskings(draw):
    length = draw(st.integers(1, 80))
    candidates = np.array(sorted(draw(st.sets(st.integers(0, length - 1), min_size=1))))
    seed = draw(st.integers(0, 2**32))
    probability = draw(st.floats(0, 1, exclude_min=True))
    tokens = np.random.default_rng(seed + 1).integers(0, VOCAB_SIZE, length)
    return tokens, candidates, seed, probability


@settings(deadline=None)
@given(maskings())
def test_only_candidates_change_and_the_labels_are_what_stood_there(masking):
    tokens, candidates, seed, probability = masking
    masked, positions, labels = mask(tokens, candidates, np.random.default_rng(seed), probability)
    assert positions.tolist() == sorted(set(positions.tolist()) & set(candidates.tolist()))
    np.testing.assert_array_equal(labels, tokens[positions])
    np.testing.assert_array_equal(np.delete(masked, positions), np.delete(tokens, positions))
    new = masked[positions][masked[positions] != tokens[positions]]
    assert all(token == MASK or FIRST_ORDINARY <= token < VOCAB_SIZE for token in new.tolist())
    assert masked.shape == tokens.shape and masked.dtype == tokens.dtype


@settings(deadline=None)
@given(maskings())
def test_the_count_is_the_expected_one_rounded_and_at_least_one(masking):
    tokens, candidates, seed, probability = masking
    _, positions, _ = mask(tokens, candidates, np.random.default_rng(seed), probability)
    assert 1 <= len(positions) <= len(candidates)
    assert len(positions) == 1 or abs(len(positions) - probability * len(candidates)) < 1


@settings(deadline=None)
@given(maskings())
def test_the_input_is_left_as_it_is(masking):
    tokens, candidates, seed, _ = masking
    tokens_before, candidates_before = tokens.copy(), candidates.copy()
    mask(tokens, candidates, np.random.default_rng(seed), 1.0)
    np.testing.assert_array_equal(tokens, tokens_before)
    np.testing.assert_array_equal(candidates, candidates_before)


@settings(deadline=None)
@given(maskings())
def test_the_same_rng_gives_the_same_masks(masking):
    tokens, candidates, seed, probability = masking
    first, again = (mask(tokens, candidates, np.random.default_rng(seed), probability) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_rng_gives_other_masks():
    tokens = np.arange(1000, 1060)
    chosen = {tuple(mask(tokens, np.arange(60), np.random.default_rng(seed))[1]) for seed in range(20)}
    assert len(chosen) == 20


def test_a_probability_of_one_chooses_every_candidate():
    candidates = np.array([1, 3, 4])
    _, positions, _ = mask(np.arange(1000, 1006), candidates, np.random.default_rng(0), 1.0)
    assert positions.tolist() == [1, 3, 4]
