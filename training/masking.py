"""Choose what a masked language model must predict (BERT, section 3.1; d2l, section 15.9.1.2)."""

import numpy as np


def mask_tokens(
    tokens: np.ndarray,
    candidates: np.ndarray,
    rng: np.random.Generator,
    mask_token_id: int,
    first_ordinary_id: int,
    vocab_size: int,
    mlm_probability: float = 0.15,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Mask one sequence.

    Of the chosen tokens 80 % become `[MASK]`, 10 % a random ordinary token, 10 % stay as they are. How many are chosen
    is `mlm_probability` of the candidates, rounded up or down at random so that the share is right on average, and at
    least one.

    Args:
        tokens: token ids (T,); left as they are.
        candidates: positions (C,) that may be chosen: those of ordinary tokens.
        rng: the only source of randomness.
        mask_token_id: id of `[MASK]`.
        first_ordinary_id, vocab_size: random tokens are drawn from this range, so that no special token is among them
            (the book draws those too).
        mlm_probability: share of the candidates to predict.

    Returns:
        The masked ids (T,), the predicted positions (P,), ascending, and the true ids there (P,).
    """
    expected = mlm_probability * len(candidates)
    count = min(max(int(expected + rng.random()), 1), len(candidates))
    positions = np.sort(rng.permutation(candidates)[:count])
    labels = tokens[positions]
    fate = rng.random(count)
    masked = tokens.copy()
    masked[positions[fate < 0.8]] = mask_token_id
    at_random = positions[(fate >= 0.8) & (fate < 0.9)]
    masked[at_random] = rng.integers(first_ordinary_id, vocab_size, len(at_random))
    return masked, positions, labels
