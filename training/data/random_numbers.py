"""Random numbers without a state: each number is a function of a seed, a key and an index."""

from collections.abc import Sequence

import numpy as np


_INCREMENT = 0x9E3779B97F4A7C15  # SplitMix64 adds this to its state for each random number
_NUMBERS_PER_KEY = 2**20  # the random numbers in the stream of a key
_ROUNDS = 6  # of `random_order`


def random_keys(seed: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """
    Keys (n,) for `random_numbers`, from a seed and n different whole numbers.

    The streams of two keys with the same seed do not overlap: their states are at least 2^20 increments apart.
    """
    (start,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    distance = np.uint64(_INCREMENT * _NUMBERS_PER_KEY % 2**64)  # of two neighbouring keys
    return start + numbers.astype(np.uint64) * distance


def random_numbers(keys: np.ndarray, indices: np.ndarray | int) -> np.ndarray:
    """
    Uniform random numbers in [0, 1), each a function of a key and an index; `keys` and `indices` broadcast.

    SplitMix64 (Steele et al., 2014) can jump to any index of a stream: n numbers from n streams take no longer than n
    numbers from one stream.

    Args:
        keys: from `random_keys`.
        indices: the index of each number in the stream of its key, below 2^20.
    """
    state = keys + np.asarray(indices + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
    return (_mixed(state) >> np.uint64(11)) * 2.0**-53


def random_order(places: np.ndarray, count: int, seed: Sequence[int]) -> np.ndarray:
    """
    The entries at these places (n,) of a random order of the numbers from 0 to `count` - 1.

    The order is computed entry by entry, not stored, so that `count` may be large. A Feistel network of six rounds
    (Luby and Rackoff, 1988) permutes the numbers below the next power of four. Where its output is `count` or larger,
    it is applied again to the output.
    """
    bits = (count - 1).bit_length()
    half = np.uint64(max(1, (bits + 1) // 2))  # the bits in the left half of a number, and in its right half
    lowest_bits = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    entries = np.array(places, dtype=np.uint64)
    pending = np.arange(entries.size)
    while len(pending):
        left = entries[pending] >> half
        right = entries[pending] & lowest_bits
        for key in keys:
            new_right = left ^ (_mixed(right + key) & lowest_bits)
            left = right
            right = new_right
        entries[pending] = left << half | right
        pending = pending[entries[pending] >= count]
    return entries.astype(np.int64)


def _mixed(state):
    """The output of SplitMix64 for a state."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
