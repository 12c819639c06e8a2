"""Token stores: token ids on disk with the ends of sentences, paragraphs and documents; joins stores to one corpus.

A store is a folder with these files:

- `ids.npy`: the ids of all tokens of the text, in order; uint16 if they fit, else int32;
- `sentence_ends.npy`: for each sentence, the number of tokens up to the sentence's end;
- `paragraph_ends.npy`: for each paragraph, the number of sentences up to the paragraph's end;
- `document_ends.npy`: for each document, the number of sentences up to the document's end;
- `document_words.npy`: for each document, the number of words of the text up to the document's end;
- `empty_documents.npy`: the numbers of the documents without a token; all other files leave these documents out;
- `store.json`: the version of the format, the length of each array, and a fingerprint of all arrays.

Tables of ends are int64 and ascending, and count from the start of the store. The `.npy` files hold numbers only, no
pickled objects.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from d2l_bert.errors import UserError, refuse_first
from d2l_bert.progress import counted
from d2l_bert.random_numbers import random_keys, random_numbers
from d2l_bert.tokenization.cache import reading_cache


# Raise STORE_FORMAT by 1 when the content of the files changes: the cache's keys hold it.
STORE_FORMAT = 1

STORE_FILE = "store.json"
END_TABLES = ("sentence_ends", "paragraph_ends", "document_ends", "document_words")


class NumberFile:
    """A `.npy` file that grows by appending numbers, or rows of them, so that a long table need not fit into memory.

    `digest` is the SHA-256 of the numbers in little-endian order. Token ids are hashed as int32, so that equal ids
    have the same digest in a uint16 file and in an int32 file.

    Args:
        row: the shape of a row; () for single numbers.
    """

    def __init__(self, path: Path, dtype: str = "<i8", row: tuple[int, ...] = ()):
        self.dtype, self.row, self.count, self.digest = np.dtype(dtype), row, 0, hashlib.sha256()
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self):  # NumPy pads the header: a header with a larger count has the same size
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, numbers: np.ndarray) -> None:
        """Append numbers (n,), or rows (n, ...)."""
        hashed = "<i4" if self.dtype == np.uint16 else self.dtype
        self.digest.update(np.ascontiguousarray(numbers, dtype=hashed))
        self.file.write(np.ascontiguousarray(numbers, dtype=self.dtype).data)
        self.count += len(numbers)

    def close(self) -> None:
        """Write the count into the header."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


def read_table(path: Path) -> np.ndarray:
    """The array of a `.npy` file, memory-mapped.

    Raises:
        UserError: the file is damaged.
    """
    with reading_cache(path.parent):
        # An array without entries cannot be memory-mapped: files that small are read into memory.
        table = np.load(path, mmap_mode="r" if path.stat().st_size > np.lib.format.ARRAY_ALIGN * 2 else None)
        return np.asarray(table)


def write_store(folder: Path, vocab_size: int, sections: Iterable[tuple[np.ndarray, ...]]) -> None:
    """Write a token store into an empty folder.

    Args:
        vocab_size: the size of the tokenizer's vocabulary; every token id is smaller.
        sections: the text in sections, one after the other, each as `(ids, sentence_ends, paragraph_ends,
            document_ends, document_words)`: the token ids (tokens,); tokens up to the end of each sentence
            (sentences,); sentences up to the end of each paragraph, and of each document, that ends in the section;
            words up to the end of each of these documents, then all words of the section (documents + 1,). All count
            from the start of the section.
    """
    with contextlib.ExitStack() as stack:
        names = ("ids", *END_TABLES, "empty_documents")
        dtypes = {"ids": "<u2" if vocab_size <= 2**16 else "<i4"}
        files = {
            name: stack.enter_context(closing(NumberFile(folder / f"{name}.npy", dtypes.get(name, "<i8"))))
            for name in names
        }
        words_before = documents_before = last_paragraph = last_document = 0
        for ids, sentence_ends, paragraph_ends, document_ends, document_words in sections:
            tokens, sentences = files["ids"].count, files["sentence_ends"].count
            files["ids"].append(ids)
            files["sentence_ends"].append(tokens + sentence_ends)
            document_ends = sentences + document_ends
            has_tokens = np.diff(document_ends, prepend=last_document) > 0
            files["document_ends"].append(document_ends[has_tokens])
            files["document_words"].append(words_before + document_words[:-1][has_tokens])
            files["empty_documents"].append(documents_before + np.flatnonzero(~has_tokens))
            words_before += int(document_words[-1])
            last_document = max(last_document, *document_ends.tolist(), 0)
            documents_before += len(document_ends)
            paragraphs = np.unique(sentences + paragraph_ends)
            paragraphs = paragraphs[paragraphs > last_paragraph]  # a paragraph without tokens has no end
            files["paragraph_ends"].append(paragraphs)
            last_paragraph = max(last_paragraph, *paragraphs.tolist(), 0)
    digests = "".join(f"{name} {file.count} {file.digest.hexdigest()} " for name, file in files.items())
    counts = {name: file.count for name, file in files.items()}
    record = {"fingerprint": hashlib.sha256(digests.encode()).hexdigest()[:16], "counts": counts}
    (folder / STORE_FILE).write_text(json.dumps(record, indent=2) + "\n")


class TokenStore:
    """One token store, memory-mapped: `ids`, and a read-only array for each table of ends.

    Raises:
        UserError: the store is damaged, or has no token.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with reading_cache(folder):
            record = json.loads((folder / STORE_FILE).read_text())
            self.fingerprint, counts = record["fingerprint"], record["counts"]
        for name in ("ids", *END_TABLES, "empty_documents"):
            setattr(self, name, read_table(folder / f"{name}.npy"))
        lengths = {name: len(getattr(self, name)) for name in counts}
        ends = self.sentence_ends[-1:].sum(), self.document_ends[-1:].sum()
        cases = {
            "damaged (its files have lengths that contradict each other); delete this folder and run again": (
                lengths != counts or ends != (len(self.ids), len(self.sentence_ends))
            ),
            "no token in the text; give text in the tokenizer's language": not len(self.ids),
        }
        refuse_first(cases, f"cache {folder}: ")


class JoinedTable:
    """The tables of several stores, of ends or of token ids, as one table.

    Entries are numbered on from one table to the next. An end includes the totals of all tables before.

    Args:
        tables: one array of ascending ends (n,) for each store.
        totals: for each store, the number of all units that the ends count, such as its tokens.
    """

    def __init__(self, tables: list[np.ndarray], totals: list[int]):
        self.tables = tables
        self.starts = np.cumsum([0, *map(len, tables)])  # number of each table's first entry
        self.offsets = np.cumsum([0, *totals])  # the sum of the totals before each table

    def __len__(self):
        return int(self.starts[-1])

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """The ends of the entries with these numbers, in an array of the same shape."""
        numbers = np.asarray(numbers)
        if len(self.tables) == 1:
            return np.asarray(self.tables[0][numbers])
        ends = np.empty(numbers.shape, dtype=np.int64)
        table_of = np.searchsorted(self.starts, numbers, side="right") - 1
        for number in np.unique(table_of):
            in_table = table_of == number
            ends[in_table] = self.tables[number][numbers[in_table] - self.starts[number]] + self.offsets[number]
        return ends

    def before(self, numbers: np.ndarray) -> np.ndarray:
        """The starts of the entries with these numbers: the end of the previous entry; 0 for the first entry."""
        numbers = np.asarray(numbers)
        return np.where(numbers > 0, self.at(np.maximum(numbers - 1, 0)), 0)

    def find(self, places: np.ndarray) -> np.ndarray:
        """For each place, such as a token's number, the entry that contains the place: the first with a later end."""
        places = np.asarray(places, dtype=np.int64)
        if len(self.tables) == 1:
            return np.searchsorted(self.tables[0], places, side="right")
        entries = np.empty(places.shape, dtype=np.int64)
        table_of = np.minimum(np.searchsorted(self.offsets, places, side="right"), len(self.tables)) - 1
        for number in np.unique(table_of):
            in_table = table_of == number
            local = np.searchsorted(self.tables[number], places[in_table] - self.offsets[number], side="right")
            entries[in_table] = local + self.starts[number]
        return entries


class TokenizedCorpus:
    """
    The documents of one or more token stores as one corpus. All arrays are memory-mapped and read on access.

    Tokens, sentences, paragraphs and documents are numbered on from one store to the next. Each array is a
    `JoinedTable`: `ids` holds the token ids; `sentence_ends` counts tokens up to the end of each sentence,
    `paragraph_ends` sentences up to the end of each paragraph, `document_ends` sentences and `document_words` words up
    to the end of each document.
    """

    def __init__(self, *folders: Path):
        self.folders = folders
        self.stores = [TokenStore(folder) for folder in folders]
        sizes = [len(store.ids) for store in self.stores]
        sentences = [len(store.sentence_ends) for store in self.stores]
        words = [int(store.document_words[-1]) for store in self.stores]
        totals_of = dict(zip(END_TABLES, (sizes, sentences, sentences, words), strict=True))
        for name, totals in {"ids": [0] * len(folders), **totals_of}.items():
            setattr(self, name, JoinedTable([getattr(store, name) for store in self.stores], totals))

    def __reduce__(self):  # another process maps the files again
        return TokenizedCorpus, self.folders

    def __len__(self):
        """The number of documents."""
        return len(self.document_ends)

    def fingerprint(self) -> str:
        """A hash of all ids and ends, 16 hexadecimal digits: stores with equal numbers have equal fingerprints."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint
        return hashlib.sha256(" ".join(store.fingerprint for store in self.stores).encode()).hexdigest()[:16]

    def sizes(self, documents: np.ndarray) -> np.ndarray:
        """The number of tokens in each of these documents (n,)."""
        documents = np.asarray(documents)
        return self.first_tokens(documents + 1) - self.first_tokens(documents)

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
        words = self.document_words.at(documents) - self.document_words.before(documents)
        return float(((ends - starts) * (words / self.sizes(documents))).sum())

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of a document (tokens,)."""
        first, end = self.first_tokens(np.array([document, document + 1]))
        return self.ids.at(np.arange(first, end))

    def sentences(self, document: int) -> np.ndarray:
        """The numbers of a document's sentences (sentences,)."""
        first, end = self.document_ends.before(np.array([document, document + 1]))
        return np.arange(first, end)


# ---------------------------------------------------------------------------------------------------------------------
# Selections of documents by number


# A fixed seed: all runs on a corpus have the same held-out documents, pairs and masks.
HELD_OUT_SEED = 20_181_011


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


class Only(AllBut):
    """A selection: the documents with these numbers, ascending (n,)."""

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


def held_out_documents(ends: np.ndarray, fraction: float, most: int) -> np.ndarray:
    """
    Choose the documents to hold out; the choice is the same for every run on a corpus.

    Documents are taken in a random order until they have enough text. A document with more text than is to be held out
    in all is taken only if the smaller documents do not suffice, the smallest first.

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
    sizes, wanted = np.diff(ends, prepend=0), min(fraction * int(ends[-1]), most)
    random = random_numbers(random_keys((HELD_OUT_SEED,), np.arange(documents)), 0)
    # The large documents last, by size; the others, and equal sizes, by random numbers.
    order = np.lexsort((random, np.where(sizes > wanted, sizes, 0)))
    enough = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    return np.sort(order[: min(max(enough, 2), documents - 2)])
