"""Token stores: token ids on disk with the borders of sentences and documents; joins several stores to one.

A store is a folder with these files, of little-endian numbers and nothing else:

- `ids.bin`: the ids of all tokens of the text, in order; uint16 if they fit, else int32;
- `sentence_starts.bin`: the first token of each sentence, and then the number of all tokens;
- `document_starts.bin`: the first sentence of each document, and then the number of all sentences;
- `words_before.bin`: the number of words before each document, and then that of all words;
- `hashes.bin`: for each document, a hash of its sentences, the same for each copy of the document;
- `store.json`: the types of these numbers, the number of documents up to the end of each source, and a fingerprint of
  all this.

All but the ids are int64. Sentences and documents without a token are left out.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np

from d2l_bert.folders import content_hash, short_hash
from d2l_bert.messages import UserError, with_progress
from d2l_bert.records import inside, read_record


# Raise STORE_FORMAT by 1 when the content of the files changes: the cache's keys hold it.
STORE_FORMAT = 3

STORE_FILE = "store.json"
TABLES = ("sentence_starts", "document_starts", "words_before")  # these begin with 0, and end with the number of all
ARRAYS = ("ids", *TABLES, "hashes")

JOINED_AT_ONCE = 1 << 22  # about the tokens that are copied at once where stores are joined
CHECKED_AT_ONCE = 1 << 22  # numbers of a file that are checked at once

# So many ids of a store, the first ones, are checked whenever a prepared folder is opened, in some 0.1 s.
CHECKED_IDS = 1 << 26


class Types(TypedDict):
    """The types of the numbers in the files. No other is read: `O` of NumPy would take the bytes for addresses."""

    ids: Literal["<u2", "<i4"]
    sentence_starts: Literal["<i8"]
    document_starts: Literal["<i8"]
    words_before: Literal["<i8"]
    hashes: Literal["<i8"]


class StoreRecord(TypedDict):
    """The content of `store.json`."""

    types: Types
    source_ends: list[int]
    fingerprint: str


@dataclass
class Section:
    """
    A stretch of a tokenized text, without the sentences that have no token. All numbers count from its start.

    Args:
        ids: the token ids (tokens,).
        token_counts, word_counts: how many tokens and words each sentence has (sentences,).
        document_ends: the number of sentences up to the end of each document that ends here (documents,).
        hashes, sources: the hash, and the number of the source, of each of these documents (documents,).
    """

    ids: np.ndarray
    token_counts: np.ndarray
    word_counts: np.ndarray
    document_ends: np.ndarray
    hashes: np.ndarray
    sources: np.ndarray


def write_store(
    folder: Path,
    vocab_size: int,
    source_count: int,
    sections: Iterable[Section],
    label: str = "tokenizing",
    documents: int | None = None,
) -> None:
    """
    Write a token store into an empty folder, and show the progress.

    Args:
        vocab_size: the size of the tokenizer's vocabulary; every token id is smaller.
        source_count: how many sources the text has.
        sections: the text, one section after the other. A document may go on in the next section.
        label, documents: what is done, and with how many documents, as in `with_progress`.
    """
    types = dict.fromkeys(ARRAYS, "<i8")
    types["ids"] = "<u2" if vocab_size <= 2**16 else "<i4"
    documents_of_sources = np.zeros(source_count, dtype=np.int64)
    # Of the sections that are written.
    token_count = 0
    sentence_count = 0
    word_count = 0
    last_document_end = 0  # in sentences

    def documents_in(section):
        return len(section.document_ends)

    shown_sections = with_progress(sections, label, total=documents, documents_in=documents_in, says_end=False)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS}

        def append(name, numbers):
            files[name].write(np.ascontiguousarray(numbers, dtype=types[name]).data)

        for name in TABLES:
            append(name, [0])
        for section in shown_sections:
            words_before = word_count + np.append(0, np.cumsum(section.word_counts))  # each sentence, and the end
            document_ends = sentence_count + section.document_ends
            has_tokens = np.diff(document_ends, prepend=last_document_end) > 0
            append("ids", section.ids)
            # Each end is the start of the next, and the first start, 0, is written: for sentences of 5, 2 and 4 tokens
            # the file holds 0, and here gets 5, 7 and 11.
            sentence_ends = token_count + np.cumsum(section.token_counts)
            append("sentence_starts", sentence_ends)
            append("document_starts", document_ends[has_tokens])
            append("words_before", words_before[section.document_ends][has_tokens])
            append("hashes", section.hashes[has_tokens])
            documents_of_sources += np.bincount(section.sources[has_tokens], minlength=source_count)
            token_count += len(section.ids)
            sentence_count += len(section.token_counts)
            word_count = words_before[-1]
            if len(document_ends):
                last_document_end = document_ends[-1]
    source_ends = np.cumsum(documents_of_sources).tolist()
    file_hashes = [content_hash(folder / f"{name}.bin") for name in ARRAYS]
    record = {
        "types": types,
        "source_ends": source_ends,
        "fingerprint": _fingerprint(types, source_ends, file_hashes),
    }
    (folder / STORE_FILE).write_text(json.dumps(record, indent=2) + "\n")


def join_stores(folder: Path, vocab_size: int, corpora: list["TokenizedCorpus"], kept: list[np.ndarray]) -> None:
    """
    Write some documents of several stores as one store, in which each of the stores is a source.

    Args:
        folder, vocab_size: as in `write_store`.
        kept: the numbers of the documents that are kept of each store, ascending (n,).
    """

    def sections():
        for source, (corpus, documents) in enumerate(zip(corpora, kept, strict=True)):
            yield from corpus.sections(documents, source)

    write_store(folder, vocab_size, len(corpora), sections(), "joining prepared folders", sum(map(len, kept)))


def ranges(firsts: np.ndarray | int, ends: np.ndarray) -> np.ndarray:
    """
    The whole numbers from each first to its end - 1, one range after the other.

    For the firsts 2 and 7 and the ends 5 and 9, these are 2 3 4 7 8.
    """
    counts = ends - firsts  # 3 2
    counts_before = np.cumsum(counts) - counts  # 0 3
    distance = np.repeat(firsts - counts_before, counts)  # 2 2 2 4 4: from each place to the number that stands there
    return np.arange(counts.sum()) + distance


def find(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """
    The number of the stretch in which each place lies (p,), such as the sentence of a token.

    Of stretches that start at 0, 4 and 9, the places 3, 4 and 10 lie in the numbers 0, 1 and 2.

    Args:
        starts: where the stretches start, ascending (n,).
        places: (p,).
    """
    return np.searchsorted(starts, places, side="right") - 1


class TokenizedCorpus:
    """
    The documents of a token store. Its arrays are memory-mapped, and read on access.

    `ids` (tokens,), `sentence_starts` (sentences + 1,), `document_starts` and `words_before` (documents + 1,) and
    `hashes` (documents,) are those of the files. `source_ends` lists the documents up to the end of each source.
    Stores with equal numbers have an equal `fingerprint`, 16 hexadecimal digits.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            UserError: a file is missing or cannot be read, or the sizes of the files do not fit together. What the
                numbers are is not looked at (`check`).
        """
        self.folder = folder
        record = read_record(folder / STORE_FILE, StoreRecord)
        if not record:
            raise UserError(f"{folder}: holds no {STORE_FILE}; prepare the text again")
        self.types = record["types"]
        self.source_ends = record["source_ends"]
        self.fingerprint = record["fingerprint"]
        self.ids = self._mapped("ids")
        self.sentence_starts = self._mapped("sentence_starts")
        self.document_starts = self._mapped("document_starts")
        self.words_before = self._mapped("words_before")
        self.hashes = self._mapped("hashes")
        self._check_sizes()

    def _mapped(self, name):
        """The numbers of a file; an empty one cannot be mapped."""
        file = inside(self.folder, f"{name}.bin")
        kind = np.dtype(self.types[name])
        if not file.exists():
            raise UserError(f"{file}: there is no such file; prepare the text again")
        size = file.stat().st_size
        if size % kind.itemsize:
            raise UserError(
                f"{file}: has {size:,} bytes, and each number takes {kind.itemsize}; prepare the text again"
            )
        if not size:
            return np.zeros(0, kind)
        # As a plain array, which still reads the file on access: a part of a `memmap` takes 100 times as long to make.
        return np.asarray(np.memmap(file, kind, "r"))

    def _check_sizes(self):
        """Refuse files whose sizes, or first and last numbers, do not fit together."""
        documents = len(self.hashes)
        ends = [0, *self.source_ends]
        if len(self.document_starts) != documents + 1 or len(self.words_before) != documents + 1:
            self._refuse("hashes.bin, document_starts.bin and words_before.bin are of different numbers of documents")
        if not len(self.sentence_starts):
            self._refuse("sentence_starts.bin is empty")
        if self.document_starts[0] != 0 or self.document_starts[-1] != len(self.sentence_starts) - 1:
            self._refuse("document_starts.bin does not end with the number of sentences")
        if self.sentence_starts[0] != 0 or self.sentence_starts[-1] != len(self.ids):
            self._refuse("sentence_starts.bin does not end with the number of tokens")
        if self.words_before[0] != 0 or (documents and self.words_before[-1] < 1):
            self._refuse("words_before.bin does not begin with 0, or counts no word")
        if ends != sorted(ends) or ends[-1] != documents:
            self._refuse(f"source_ends in {STORE_FILE} does not end with the number of documents")

    def _refuse(self, reason):
        raise UserError(f"{self.folder}: damaged, as {reason}; prepare the text again")

    def check(self, vocab_size: int, file_hashes: list[str], whole: bool = True) -> None:
        """
        Check the numbers of the store, which a reader relies on: starts that ascend, and ids below `vocab_size`.

        Args:
            file_hashes: the SHA-256 of each file of `ARRAYS`, of which the fingerprint must be.
            whole: check all ids; else the first `CHECKED_IDS`.

        Raises:
            UserError: a number or the fingerprint is not as `write_store` writes it.
        """
        if self.fingerprint != _fingerprint(self.types, self.source_ends, file_hashes):
            self._refuse(f"the fingerprint in {STORE_FILE} is of other files")
        self.check_starts()
        self.check_ids(self.ids if whole else self.ids[:CHECKED_IDS], vocab_size)

    def check_starts(self) -> None:
        """Raise `UserError` if the starts of sentences and documents, or the words before these, do not ascend."""
        for name in ("sentence_starts", "document_starts"):
            if not _is_ascending(getattr(self, name), strictly=True):
                self._refuse(f"{name}.bin does not ascend")
        if not _is_ascending(self.words_before, strictly=False):
            self._refuse("words_before.bin descends")

    def check_ids(self, ids: np.ndarray, vocab_size: int) -> None:
        """Raise `UserError` if some of the store's ids are not of a vocabulary of this size."""
        for first in range(0, len(ids), CHECKED_AT_ONCE):
            some = ids[first : first + CHECKED_AT_ONCE]
            if some.max() >= vocab_size or some.min() < 0:
                self._refuse(f"ids.bin has an id that is not in the vocabulary of {vocab_size:,} entries")

    def __reduce__(self):  # another process maps the files again
        return TokenizedCorpus, (self.folder,)

    def __len__(self):
        """The number of documents."""
        return len(self.document_starts) - 1

    def word_count(self) -> int:
        """The number of words."""
        return int(self.words_before[-1])

    def first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """The number of the first token of each document (n,); `len(self)` as a document gives the corpus's size."""
        return self.sentence_starts[self.document_starts[documents]]

    def sections(self, documents: np.ndarray, source: int) -> Iterator[Section]:
        """
        Yield the documents with these numbers, ascending (n,), as some of a source with this number.

        A section has about `JOINED_AT_ONCE` tokens. If that is 10, documents of 4, 5, 3 and 9 tokens end at 4, 9, 12
        and 21, and make the sections 4 5, 3 and 9.
        """
        token_counts = self.first_tokens(documents + 1) - self.first_tokens(documents)
        section_of_document = np.cumsum(token_counts) // JOINED_AT_ONCE  # 0 0 1 2
        borders = np.flatnonzero(np.diff(section_of_document)) + 1
        for some in np.split(documents, borders):
            sentences = ranges(self.document_starts[some], self.document_starts[some + 1])
            starts = self.sentence_starts[sentences]
            ends = self.sentence_starts[sentences + 1]
            document_ends = np.cumsum(self.document_starts[some + 1] - self.document_starts[some])
            # `write_store` writes the words of documents alone, so the words of a document, which the store knows, may
            # be counted to any of its sentences, whose words it does not know: here to the last.
            words_of_documents = self.words_before[some + 1] - self.words_before[some]
            word_counts = np.zeros(len(sentences), dtype=np.int64)
            word_counts[document_ends - 1] = words_of_documents
            yield Section(
                ids=self.ids[ranges(starts, ends)],
                token_counts=ends - starts,
                word_counts=word_counts,
                document_ends=document_ends,
                hashes=self.hashes[some],
                sources=np.full(len(some), source),
            )


def _fingerprint(types, source_ends, file_hashes):
    """A hash of the types, of where the sources end, and of the SHA-256 of each file of `ARRAYS`."""
    return short_hash({"types": types, "source_ends": source_ends}, file_hashes)


def _is_ascending(numbers, strictly):
    """Whether each number is larger than the one before, or, if not `strictly`, as large."""
    is_wrong = np.less_equal if strictly else np.less
    for first in range(0, len(numbers) - 1, CHECKED_AT_ONCE):
        some = numbers[first : first + CHECKED_AT_ONCE + 1]
        if is_wrong(some[1:], some[:-1]).any():
            return False
    return True
