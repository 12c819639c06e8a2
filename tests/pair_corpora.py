"""Corpora whose sentences have given lengths, and the pairs made from them, for the tests of pairs."""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

from d2l_bert.training.data import pairs as made_by
from d2l_bert.training.data.pairs import PAIR, SPECIALS_IN_A_PAIR


IS_NEXT, NOT_NEXT, NO_LABEL = 0, 1, -100  # as in Hugging Face's BERT; the book's labels are the opposite


# A pair as the tests below look at it: documents, and tokens counted from the start of each document.
IN_DOCUMENTS = np.dtype([("a_document", "i8"), ("b_document", "i8"), *PAIR.descr])


class Corpus:
    """Documents of sentences with given lengths in tokens."""

    def __init__(self, documents):
        self.ends = [np.cumsum(lengths) for lengths in documents]
        self.starts = [ends - lengths for ends, lengths in zip(self.ends, documents, strict=True)]
        self.document_starts = np.cumsum([0, *map(len, documents)])
        self.sentence_starts = np.cumsum([0, *itertools.chain.from_iterable(documents)])
        self.first_tokens = self.sentence_starts[self.document_starts[:-1]]
        self.ids = np.arange(self.sentence_starts[-1])  # no two tokens are equal

    def pairs(self, pairing, max_seq_length, seed=0, **options):
        """The pairs that are made of all documents, as `IN_DOCUMENTS`."""
        pieces, rng = (self.document_starts[:-1], self.document_starts[1:]), np.random.default_rng(seed)
        pairs = made_by.lay_out(self, *pieces, rng, max_seq_length=max_seq_length, pairing=pairing, **options)
        assert pairs.dtype == PAIR
        found = np.zeros(len(pairs), dtype=IN_DOCUMENTS)
        found[list(PAIR.names)] = pairs
        for side in ("a", "b"):
            # An empty B stands where A ends, which may be the end of the corpus.
            token = np.where(pairs["b_end"] > pairs["b_start"], pairs[f"{side}_start"], pairs["a_start"])
            document = np.searchsorted(self.first_tokens, token, side="right") - 1
            found[f"{side}_document"] = document
            found[f"{side}_start"] -= self.first_tokens[document]
            found[f"{side}_end"] -= self.first_tokens[document]
        return found


def lengths_of(pairs):
    return pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]


def assert_balanced(labels, tosses=None):
    """Assert that half of some labels are 1, within four standard errors of as many coin tosses."""
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(tosses or len(labels))


def steady_corpus(seed=0, documents=60, sentence=3):
    """Thousands of sentences of one length. If the capacity is a multiple of that length, no pair is truncated."""
    rng = np.random.default_rng(seed)
    return Corpus([[sentence] * int(size) for size in rng.integers(2, 150, documents)])


STEADY_LENGTH = 8 * 3 + SPECIALS_IN_A_PAIR  # eight sentences of the steady corpus


def short_documents(seed=0, documents=1200):
    """Documents of two to four sentences, whose lengths differ as those of prose."""
    rng = np.random.default_rng(seed)
    return Corpus([np.maximum(2, rng.lognormal(3, 0.7, rng.integers(2, 5))).astype(int) for _ in range(documents)])


def long_documents(seed=0, documents=120):
    """Documents of sixty sentences, whose lengths differ as those of prose."""
    rng = np.random.default_rng(seed)
    return Corpus([np.maximum(2, rng.lognormal(3, 0.7, 60)).astype(int) for _ in range(documents)])


both_pairings = pytest.mark.parametrize("pairing", ["segments", "sentences"])


@st.composite
def corpora(draw):
    return Corpus(draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=1, max_size=6)))


@st.composite
def any_pairs(draw):
    """A corpus of any shape, its pairs for any objective, and the tokens that a pair may have."""
    corpus, seed, capacity = draw(corpora()), draw(st.integers(0, 2**32)), draw(st.integers(5, 40))
    options = {"objective": draw(st.sampled_from(["nsp", "sop"]))}
    pairing = draw(st.sampled_from(["segments", "sentences"]))
    if pairing == "segments":
        options["short_seq_prob"] = draw(st.sampled_from([0.0, 0.1, 1.0]))
    return corpus, corpus.pairs(pairing, capacity + SPECIALS_IN_A_PAIR, seed, **options), capacity
