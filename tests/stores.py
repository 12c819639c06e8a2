"""Token stores of documents whose sentences have given lengths, for tests that read them."""

import numpy as np

from d2l_bert.tokenization.token_store import Section, TokenizedCorpus, join_stores
from d2l_bert.tokenization.token_store import write_store as write_sections


def write_store(folder, documents, vocab_size=2**20, ids=None, source_ends=None):
    """
    Write a token store of documents, each a list of the lengths of its sentences.

    By default token i of the store has the id i, and all documents are of one source. A word counts as one token.
    """
    folder.mkdir(parents=True)
    lengths = np.array([length for document in documents for length in document], dtype=np.int64)
    source_ends = source_ends or [len(documents)]
    numbers = np.arange(len(documents))
    section = Section(
        ids=np.arange(lengths.sum()) if ids is None else ids,
        token_counts=lengths,
        word_counts=lengths,
        document_ends=np.cumsum([len(document) for document in documents], dtype=int),
        hashes=numbers,
        sources=np.searchsorted(source_ends, numbers, side="right"),
    )
    write_sections(folder, vocab_size, len(source_ends), [section])
    return folder


def tokens_of(corpus, document):
    """The token ids of a document, as a list."""
    return corpus.ids[slice(*corpus.first_tokens([document, document + 1]))].tolist()


def corpus_of(folder, *stores, source_ends=None):
    """The documents of one store, given as in `write_store`, or of several that are joined, as one corpus."""
    corpora = [
        TokenizedCorpus(write_store(folder / str(number), documents, source_ends=source_ends))
        for number, documents in enumerate(stores)
    ]
    if len(corpora) == 1:
        return corpora[0]
    (folder / "joined").mkdir()
    join_stores(folder / "joined", 2**20, corpora, [np.arange(len(corpus)) for corpus in corpora])
    return TokenizedCorpus(folder / "joined")
