"""Chooses the held-out documents of a corpus; selections of documents by number."""

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.progress import counted
from d2l_bert.random_numbers import random_keys, random_numbers


# A fixed seed: all runs on a corpus have the same held-out documents, pairs and masks.
HELD_OUT_SEED = 20_181_011

_AT_ONCE = 1 << 20  # documents that are sorted together, to bound memory


class AllBut:
    """
    A selection: all documents of a corpus but some.

    Args:
        count: the number of documents in the corpus.
        left_out: the numbers of the documents that are not selected, ascending (n,).
    """

    def __init__(self, count: int, left_out: np.ndarray):
        self.count, self.left_out = count, left_out
        self._kept_before = left_out - np.arange(len(left_out))  # selected documents before each of `left_out`

    def __len__(self):
        return self.count - len(self.left_out)

    def nth(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers in the corpus of the n-th documents of this selection; n counts from 0, in any shape."""
        return numbers + np.searchsorted(self._kept_before, numbers, side="right")

    def before(self, document: int) -> int:
        """How many documents of this selection have a smaller number than `document`."""
        return int(document - np.searchsorted(self.left_out, document))

    def within(self, first: int, end: int) -> np.ndarray:
        """The documents of this selection with numbers from `first` to `end` - 1, ascending (n,)."""
        return self.nth(np.arange(self.before(first), self.before(end)))


class Only:
    """A selection: the documents with these numbers, ascending (n,). The methods are those of `AllBut`."""

    def __init__(self, documents: np.ndarray):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def nth(self, numbers: np.ndarray) -> np.ndarray:
        """As in `AllBut`."""
        return self.documents[numbers]

    def before(self, document: int) -> int:
        """As in `AllBut`."""
        return int(np.searchsorted(self.documents, document))

    def within(self, first: int, end: int) -> np.ndarray:
        """As in `AllBut`."""
        return self.documents[self.before(first) : self.before(end)]


def held_out_documents(ends: np.ndarray, fraction: float, most: int) -> np.ndarray:
    """
    Choose the documents to hold out; the choice is the same for every run on a corpus.

    Documents are taken in a random order until they have enough text. Memory grows with the held-out documents, not
    with the corpus. A document with more text than is to be held out in all is taken only if the smaller documents do
    not suffice, the smallest first.

    Args:
        ends: characters, or tokens, up to the end of each document (documents,).
        fraction: the share of the text to hold out.
        most: the largest amount of text to hold out, in the unit of `ends`; the last document may exceed it. More text
            would take longer to evaluate and hardly make the metrics more exact.

    Returns:
        Document numbers, ascending (n,): at least two documents are held out, and at least two are left to train on.

    Raises:
        UserError: the corpus has fewer than four documents.
    """
    documents = len(ends)
    if documents < 4:
        raise UserError(
            f"too little text: {counted(documents, 'document')} with sentences, and training and evaluation need two "
            f"each; add text, or break one long sentence into several"
        )
    wanted = min(fraction * int(ends[-1]), most)
    small, large = (np.zeros(0, dtype=_ENTRY) for _ in range(2))
    for first in range(0, documents, _AT_ONCE):
        sizes = np.diff(ends[first : first + _AT_ONCE], prepend=ends[first - 1] if first else 0)
        entries = np.zeros(len(sizes), dtype=_ENTRY)
        entries["document"], entries["size"] = first + np.arange(len(sizes)), sizes
        entries["random"] = random_numbers(random_keys((HELD_OUT_SEED,), entries["document"]), 0)
        fits = sizes <= wanted
        if _is_enough(small, wanted):
            fits &= entries["random"] < small["random"][-1]
        small = np.sort(np.concatenate([small, entries[fits]]), order=("random", "document"))
        small = small[: max(2, _count_enough(small, wanted))]
        large = np.concatenate([large, entries[sizes > wanted]])
        large = np.sort(large, order=("size", "random", "document"))[:2]
    chosen = np.concatenate([small, large])
    chosen = chosen[: min(max(_count_enough(chosen, wanted), 2), documents - 2)]
    return np.sort(chosen["document"])


# A document, the amount of its text, and the random number that gives its place in the random order.
_ENTRY = np.dtype([("document", "i8"), ("size", "i8"), ("random", "f8")])


def _count_enough(entries, wanted):
    """How many of these documents, taken in order, have the wanted amount of text."""
    return int(np.searchsorted(np.cumsum(entries["size"]), wanted)) + 1


def _is_enough(entries, wanted):
    """Whether these documents are at least two and have the wanted amount of text."""
    return len(entries) >= 2 and entries["size"].sum() >= wanted
