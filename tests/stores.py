"""Token stores of documents whose sentences have given lengths, for tests that read them."""

import numpy as np

from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.tokenization.token_store import write_store as write_sections


def write_store(folder, documents, vocab_size=2**20, ids=None):
    """
    Write a token store of documents, each a list of the lengths of its sentences; each document is one paragraph.

    By default token i of the store has the id i. A word counts as one token.
    """
    folder.mkdir(parents=True)
    lengths = np.array([length for document in documents for length in document], dtype=np.int64)
    document_ends = np.cumsum([len(document) for document in documents])
    document_words = np.cumsum([sum(document) for document in documents])
    ids = np.arange(lengths.sum()) if ids is None else np.array(ids)
    section = (ids, np.cumsum(lengths), document_ends, document_ends, np.append(document_words, len(ids)))
    write_sections(folder, vocab_size, [section])
    return folder


def corpus_of(folder, *stores):
    """The documents of several stores, each given as in `write_store`, as one corpus."""
    return TokenizedCorpus(*(write_store(folder / str(number), found) for number, found in enumerate(stores)))
