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
    document_ends = np.cumsum([len(document) for document in documents])
    source_ends = [len(documents)] if source_ends is None else source_ends
    numbers = np.arange(len(documents))
    section = Section(
        ids=np.arange(lengths.sum()) if ids is None else np.array(ids),
        tokens=lengths,
        words=lengths,
        document_ends=document_ends,
        hashes=numbers,
        sources=np.searchsorted(source_ends, numbers, side="right"),
    )
    write_sections(folder, vocab_size, len(source_ends), [section])
    return folder


def tokens_of(corpus, document):
    """The token ids of a document, as a list."""
    return corpus.ids[slice(*corpus.first_tokens([document, document + 1]))].tolist()


def corpus_of(folder, *stores, source_ends=None):
    """The documents of several stores, each given as in `write_store`, as one corpus."""
    folders = [
        write_store(folder / str(number), found, source_ends=source_ends) for number, found in enumerate(stores)
    ]
    return (
        joined(folder / "joined", [TokenizedCorpus(each) for each in folders])
        if len(stores) > 1
        else (TokenizedCorpus(folders[0]))
    )


def joined(folder, corpora, vocab_size=2**20):
    """All documents of some corpora as one corpus, written to a new folder."""
    folder.mkdir()
    join_stores(folder, vocab_size, corpora, [np.arange(len(corpus)) for corpus in corpora])
    return TokenizedCorpus(folder)
