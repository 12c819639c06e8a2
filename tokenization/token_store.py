"""Token stores: token ids on disk with the ends of sentences and documents; joins stores to one corpus.

A store is a folder with these files:

- `ids.npy`: the ids of all tokens of the text, in order; uint16 if they fit, else int32;
- `sentence_ends.npy`: for each sentence, the number of tokens up to the sentence's end;
- `document_ends.npy`: for each document, the number of sentences up to the document's end;
- `document_words.npy`: for each document, the number of words of the text up to the document's end;
- `document_hashes.npy`: for each document, a hash of its sentences, the same for each copy of the document;
- `store.json`: the number of documents up to the end of each source, the length of each array, and a fingerprint of
  all this.

Sentences and documents without a token are left out. Tables of ends are int64 and ascending, and count
from the start of the store. The `.npy` files hold numbers only, no pickled objects.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2l_bert.tokenization.cache import content_hash, reading_cache, short_hash


# Raise STORE_FORMAT by 1 when the content of the files changes: the cache's keys hold it.
STORE_FORMAT = 2

STORE_FILE = "store.json"
END_TABLES = ("sentence_ends", "document_ends", "document_words")
ARRAYS = ("ids", *END_TABLES, "document_hashes")

# A fixed seed: all runs on a corpus have the same held-out pairs and masks.
HELD_OUT_SEED = 20_181_011


# Joined tables of at most this many entries are copied into memory, 256 MB for ends: with 1,000 parts a look-up in one
# table is some five times as fast as in each table that is met.
MOST_IN_MEMORY = 1 << 25


class NumberFile:
    """A `.npy` file that grows by appending numbers, or rows of them, so that a long table need not fit into memory.

    Args:
        row: the shape of a row; () for single numbers.
    """

    def __init__(self, path: Path, dtype: str = "<i8", row: tuple[int, ...] = ()):
        self.dtype, self.row, self.count = np.dtype(dtype), row, 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self):  # NumPy pads the header: a header with a larger count has the same size
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, numbers: np.ndarray) -> None:
        """Append numbers (n,), or rows (n, ...)."""
        self.file.write(np.ascontiguousarray(numbers, dtype=self.dtype).data)
        self.count += len(numbers)

    def close(self) -> None:
        """Write the count into the header."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


@dataclass
class Section:
    """
    A stretch of a tokenized text, without the sentences that have no token. All numbers count from its start.

    Args:
        ids: the token ids (tokens,).
        tokens, words: how many each sentence has (sentences,).
        document_ends: sentences up to the end of each document that ends here.
        hashes, sources: the hash, and the number of the source, of each of these documents.
    """

    ids: np.ndarray
    tokens: np.ndarray
    words: np.ndarray
    document_ends: np.ndarray
    hashes: np.ndarray
    sources: np.ndarray


def write_store(folder: Path, vocab_size: int, source_count: int, sections: Iterable[Section]) -> None:
    """
    Write a token store into an empty folder.

    Args:
        vocab_size: the size of the tokenizer's vocabulary; every token id is smaller.
        source_count: how many sources the text has.
        sections: the text, one section after the other. A document may go on in the next section.
    """
    in_sources = np.zeros(source_count, dtype=np.int64)  # documents
    with contextlib.ExitStack() as stack:
        dtypes = {"ids": "<u2" if vocab_size <= 2**16 else "<i4"}
        files = {
            name: stack.enter_context(closing(NumberFile(folder / f"{name}.npy", dtypes.get(name, "<i8"))))
            for name in ARRAYS
        }
        words_before = last_document = 0
        for section in sections:
            tokens, sentences = files["ids"].count, files["sentence_ends"].count
            words = words_before + np.append(0, np.cumsum(section.words))
            document_ends = sentences + section.document_ends
            has_tokens = np.diff(document_ends, prepend=last_document) > 0
            files["ids"].append(section.ids)
            files["sentence_ends"].append(tokens + np.cumsum(section.tokens))
            files["document_ends"].append(document_ends[has_tokens])
            files["document_words"].append(words[section.document_ends][has_tokens])
            files["document_hashes"].append(section.hashes[has_tokens])
            in_sources += np.bincount(section.sources[has_tokens], minlength=source_count)
            words_before = int(words[-1])
            last_document = max([last_document, *document_ends[-1:].tolist()])
    record = {
        "counts": {name: file.count for name, file in files.items()},
        "source_ends": np.cumsum(in_sources).tolist(),
    }
    hashes = [content_hash(folder / f"{name}.npy") for name in ARRAYS]
    record["fingerprint"] = short_hash(hashes, record["source_ends"])
    (folder / STORE_FILE).write_text(json.dumps(record, indent=2) + "\n")


@dataclass
class TokenStore:
    """
    The arrays of one token store.

    Args:
        source_ends: documents up to the end of each source.
        folder: where the arrays are memory-mapped from; None if they are in memory.
    """

    ids: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray
    document_words: np.ndarray
    document_hashes: np.ndarray
    source_ends: list[int]
    fingerprint: str
    folder: Path | None = None

    def __reduce__(self):  # another process maps the files again
        return (read_store, (self.folder,)) if self.folder else (TokenStore, tuple(vars(self).values()))


def read_store(folder: Path) -> TokenStore:
    """
    The store in a folder, memory-mapped.

    Raises:
        UserError: the store is damaged.
    """
    with reading_cache(folder):
        record = json.loads((folder / STORE_FILE).read_text())
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS}
        store = TokenStore(
            **arrays, source_ends=record["source_ends"], fingerprint=record["fingerprint"], folder=folder
        )
        ends = store.sentence_ends[-1:].sum(), store.document_ends[-1:].sum()
        lengths = {name: len(array) for name, array in arrays.items()}
        if lengths != record["counts"] or ends != (lengths["ids"], lengths["sentence_ends"]):
            raise ValueError("its files have lengths that contradict each other")
    return store


class JoinedTable:
    """The tables of several stores, of ends or of token ids, as one table.

    Entries are numbered on from one table to the next. An end includes the totals of all tables before.

    Args:
        tables: one array of ascending ends (n,) for each store.
        totals: for each store, the number of all units that the ends count, such as its tokens.
    """

    def __init__(self, tables: list[np.ndarray], totals: list[int]):
        offsets = np.cumsum([0, *totals])
        if len(tables) > 1 and sum(map(len, tables)) <= MOST_IN_MEMORY:
            tables = [
                np.concatenate([of + of.dtype.type(before) for of, before in zip(tables, offsets, strict=False)])
            ]
            offsets = offsets[[0, -1]]
        self.tables = tables
        self.starts = np.cumsum([0, *map(len, tables)])  # number of each table's first entry
        self.offsets = offsets  # the sum of the totals before each table

    def __len__(self):
        return int(self.starts[-1])

    def _by_table(self, numbers, starts, read):
        """
        Of each table, what `read` finds for the numbers that lie in it, counted from the table's start.

        Args:
            starts: the first number of each table, and the number after the last table.

        Returns:
            The table of each number, and what was found, in arrays of the shape of `numbers`.
        """
        flat = numbers.ravel()
        of_table = np.minimum(np.searchsorted(starts, flat, side="right"), len(self.tables)) - 1
        # Numbers of one table stand together: a slice for each table is ten times as fast as a mask for each.
        order = np.argsort(of_table, kind="stable")
        tables, local = of_table[order], (flat - starts[of_table])[order]
        borders = np.flatnonzero(np.diff(tables, prepend=-1)).tolist()
        spans = itertools.pairwise([*borders, len(flat)])
        pieces = [read(self.tables[tables[first]], local[first:end]) for first, end in spans]
        found = np.empty(len(flat), dtype=np.int64)
        found[order] = np.concatenate([local[:0], *pieces])
        return of_table.reshape(numbers.shape), found.reshape(numbers.shape)

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """The ends of the entries with these numbers, in an array of the same shape."""
        numbers = np.asarray(numbers)
        if len(self.tables) == 1:
            return np.asarray(self.tables[0][numbers])
        of_table, ends = self._by_table(numbers, self.starts, np.ndarray.take)
        return ends + self.offsets[of_table]

    def before(self, numbers: np.ndarray) -> np.ndarray:
        """The starts of the entries with these numbers: the end of the previous entry; 0 for the first entry."""
        numbers = np.asarray(numbers)
        return np.where(numbers > 0, self.at(np.maximum(numbers - 1, 0)), 0)

    def find(self, places: np.ndarray) -> np.ndarray:
        """For each place, such as a token's number, the entry that contains the place: the first with a later end."""
        places = np.asarray(places, dtype=np.int64)
        if len(self.tables) == 1:
            return np.searchsorted(self.tables[0], places, side="right")
        of_table, entries = self._by_table(places, self.offsets, lambda ends, some: ends.searchsorted(some, "right"))
        return entries + self.starts[of_table]


def ranges(firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The whole numbers from each first up to the end that belongs to it, one range after the other."""
    counts = ends - firsts
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)


class TokenizedCorpus:
    """
    The documents of one or more token stores as one corpus. Arrays on disk are memory-mapped and read on access.

    Tokens, sentences and documents are numbered on from one store to the next. Each array is a `JoinedTable`: `ids`
    holds the token ids; `sentence_ends` counts tokens up to the end of each sentence, `document_ends` sentences and
    `document_words` words up to the end of each document. `source_ends` lists documents up to the end of each source;
    each of several stores is one source.
    """

    def __init__(self, *stores: TokenStore):
        self.stores = stores
        sizes, sentences, words = (
            [int(getattr(store, table)[-1:].sum()) for store in stores]
            for table in ("sentence_ends", "document_ends", "document_words")
        )
        totals_of = dict(zip(END_TABLES, (sizes, sentences, words), strict=True))
        for name, totals in {"ids": [0] * len(stores), **totals_of}.items():
            setattr(self, name, JoinedTable([getattr(store, name) for store in stores], totals))
        documents = np.cumsum([len(store.document_ends) for store in stores]).tolist()
        self.source_ends = stores[0].source_ends if len(stores) == 1 else documents

    def __reduce__(self):
        return TokenizedCorpus, self.stores

    def __len__(self):
        """The number of documents."""
        return len(self.document_ends)

    def fingerprint(self) -> str:
        """A hash of all arrays, 16 hexadecimal digits: stores with equal numbers have equal fingerprints."""
        fingerprints = [store.fingerprint for store in self.stores]
        return fingerprints[0] if len(fingerprints) == 1 else short_hash(fingerprints)

    def hashes(self) -> np.ndarray:
        """The hash of each document (documents,)."""
        return np.concatenate([store.document_hashes for store in self.stores])

    def only(self, documents: np.ndarray) -> "TokenizedCorpus":
        """The documents with these numbers, ascending (n,), as a corpus in memory: for a small one."""
        firsts, ends = self.document_ends.before(documents), self.document_ends.at(documents)
        sentences = ranges(firsts, ends)
        starts, token_ends = self.sentence_ends.before(sentences), self.sentence_ends.at(sentences)
        words = self.document_words.at(documents) - self.document_words.before(documents)
        store = TokenStore(
            ids=self.ids.at(ranges(starts, token_ends)),
            sentence_ends=np.cumsum(token_ends - starts),
            document_ends=np.cumsum(ends - firsts),
            document_words=np.cumsum(words),
            document_hashes=self.hashes()[documents],
            source_ends=np.searchsorted(documents, self.source_ends).tolist(),
            fingerprint=short_hash(self.fingerprint(), documents.tolist()),
        )
        return TokenizedCorpus(store)

    def first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """The number of the first token of each document (n,); `len(self)` as a document gives the corpus's size."""
        return self.sentence_ends.before(self.document_ends.before(documents))

    def words(self, starts: np.ndarray, ends: np.ndarray) -> float:
        """
        The words in stretches of tokens, summed: each token counts as its document's words divided by its tokens.

        Args:
            starts, ends: the numbers of the first token and of the token after the last of each stretch (n,). A
                stretch lies in one document.
        """
        documents = self.document_ends.find(self.sentence_ends.find(starts))
        borders = np.stack([documents, documents + 1])
        (words,), (sizes,) = (np.diff(of(borders), axis=0) for of in (self.document_words.before, self.first_tokens))
        return float(((ends - starts) * (words / sizes)).sum())

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of a document (tokens,)."""
        first, end = self.first_tokens(np.array([document, document + 1]))
        return self.ids.at(np.arange(first, end))

    def sentences(self, document: int) -> np.ndarray:
        """The numbers of a document's sentences (sentences,)."""
        first, end = self.document_ends.before(np.array([document, document + 1]))
        return np.arange(first, end)
