"""The split of a text into training and held-out documents."""

import numpy as np

from d2l_bert.errors import UserError


HELD_OUT_SEED = 20_181_011  # the same held-out documents, pairs and masks for every run on a corpus


def split_documents(sizes: np.ndarray, fraction: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Which documents train and which are held out; the same for every run on a corpus.

    Args:
        sizes: size of each document, in characters or tokens (documents,).
        fraction: share of the text to hold out.
        most: most text to hold out, in the unit of `sizes`: more would cost time and tell no more. The last document
            may go beyond it; one that alone is more is held out only if there are no others.

    Returns:
        Document numbers to train on and to hold out, ascending; at least two of each.

    Raises:
        UserError: fewer than four documents.
    """
    if len(sizes) < 4:
        raise UserError(
            f"too little text: {len(sizes)} documents with sentences, and training and held-out part need two each; "
            f"add text, or break one long sentence into several"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(sizes))
    wanted = min(fraction * sizes.sum(), most)
    # Documents that are more than that alone go last, smaller ones first.
    order = order[np.argsort(np.where(sizes[order] > wanted, sizes[order], 0), kind="stable")]
    count = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    count = min(max(count, 2), len(sizes) - 2)
    return np.sort(order[count:]), np.sort(order[:count])
