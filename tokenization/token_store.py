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

import numpy as np

from d2l_bert.folders import content_hash, short_hash
from d2l_bert.messages import with_progress


# Raise STORE_FORMAT by 1 when the content of the files changes: the cache's keys hold it.
STORE_FORMAT = 3

STORE_FILE = "store.json"
TABLES = ("sentence_starts", "document_starts", "words_before")
ARRAYS = ("ids", *TABLES, "hashes")

JOINED_AT_ONCE = 1 << 22  # about the tokens that are copied at once where stores are joined


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
    types = dict.fromkeys(ARRAYS, "<i8") | {"ids": "<u2" if vocab_size <= 2**16 else "<i4"}
    in_sources = np.zeros(source_count, dtype=np.int64)  # documents
    tokens = sentences = words_before = last_document = 0
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS}

        def append(name, numbers):
            files[name].write(np.ascontiguousarray(numbers, dtype=types[name]).data)

        for name in TABLES:
            append(name, [0])
        for section in with_progress(sections, label, documents, lambda section: len(section.document_ends)):
            words = words_before + np.append(0, np.cumsum(section.words))
            document_ends = sentences + section.document_ends
            has_tokens = np.diff(document_ends, prepend=last_document) > 0
            append("ids", section.ids)
            append("sentence_starts", tokens + np.cumsum(section.tokens))
            append("document_starts", document_ends[has_tokens])
            append("words_before", words[section.document_ends][has_tokens])
            append("hashes", section.hashes[has_tokens])
            in_sources += np.bincount(section.sources[has_tokens], minlength=source_count)
            tokens, sentences, words_before = tokens + len(section.ids), sentences + len(section.tokens), words[-1]
            last_document = max([last_document, *document_ends[-1:]])
    record = {"types": types, "source_ends": np.cumsum(in_sources).tolist()}
    record["fingerprint"] = short_hash(record, [content_hash(folder / f"{name}.bin") for name in ARRAYS])
    (folder / STORE_FILE).write_text(json.dumps(record, indent=2) + "\n")


def join_stores(folder: Path, vocab_size: int, corpora: list["TokenizedCorpus"], kept: list[np.ndarray]) -> None:
    """
    Write some documents of several stores as one store, in which each of the stores is a source.

    Args:
        folder, vocab_size: as in `write_store`.
        kept: the numbers of the documents that are kept of each store, ascending (n,).
    """
    sections = (
        section
        for source, (corpus, some) in enumerate(zip(corpora, kept, strict=True))
        for section in corpus.sections(some, source)
    )
    write_store(folder, vocab_size, len(corpora), sections, "joining prepared folders", sum(map(len, kept)))


def ranges(firsts: np.ndarray | int, ends: np.ndarray) -> np.ndarray:
    """The whole numbers from each first up to the end that belongs to it, one range after the other."""
    counts = ends - firsts
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)


def find(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The number of the stretch in which each place lies, such as a token's sentence; `starts` are ascending (n,)."""
    return np.searchsorted(starts, places, side="right") - 1


class TokenizedCorpus:
    """
    The documents of a token store. Its arrays are memory-mapped, and read on access.

    `ids` (tokens,), `sentence_starts` (sentences + 1,), `document_starts` and `words_before` (documents + 1,) and
    `hashes` (documents,) are those of the files. `source_ends` lists the documents up to the end of each source.
    Stores with equal numbers have an equal `fingerprint`, 16 hexadecimal digits.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        record = json.loads((folder / STORE_FILE).read_text())
        self.source_ends, self.fingerprint = record["source_ends"], record["fingerprint"]
        self.ids, self.sentence_starts, self.document_starts, self.words_before, self.hashes = (
            _mapped(folder / f"{name}.bin", record["types"][name]) for name in ARRAYS
        )

    def __reduce__(self):  # another process maps the files again
        return TokenizedCorpus, (self.folder,)

    def __len__(self):
        """The number of documents."""
        return len(self.document_starts) - 1

    def first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """The number of the first token of each document (n,); `len(self)` as a document gives the corpus's size."""
        return self.sentence_starts[self.document_starts[documents]]

    def sections(self, documents: np.ndarray, source: int) -> Iterator[Section]:
        """Yield the documents with these numbers, ascending (n,), as some of a source with this number."""
        sizes = self.first_tokens(documents + 1) - self.first_tokens(documents)
        borders = np.flatnonzero(np.diff(np.cumsum(sizes) // JOINED_AT_ONCE)) + 1
        for some in np.split(documents, borders):
            sentences = ranges(self.document_starts[some], self.document_starts[some + 1])
            starts, ends = self.sentence_starts[sentences], self.sentence_starts[sentences + 1]
            document_ends = np.cumsum(self.document_starts[some + 1] - self.document_starts[some])
            words = np.zeros(len(sentences), dtype=np.int64)
            words[document_ends - 1] = self.words_before[some + 1] - self.words_before[some]
            sources = np.full(len(some), source)
            yield Section(
                self.ids[ranges(starts, ends)], ends - starts, words, document_ends, self.hashes[some], sources
            )


def _mapped(file, kind):
    """The numbers of a file; an empty one cannot be mapped."""
    return np.asarray(np.memmap(file, kind, "r")) if file.stat().st_size else np.zeros(0, kind)
