"""Sentences and tokens on disk: written once into memory-mapped Arrow, never held in memory, found again by content.

Text lies in blocks, rows of some paragraphs of a document; small tables beside it say where documents end.
"""

import hashlib
import importlib.metadata
import itertools
import json
import os
import signal
import sys
import unicodedata
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from d2l_bert.errors import UserError
from d2l_bert.progress import watched
from d2l_bert.tokenization import documents, python_docs, sentences, tables
from d2l_bert.tokenization import sources as readers
from d2l_bert.tokenization.cache import code_of, fingerprint, undamaged, written_whole
from d2l_bert.tokenization.sentences import FEWEST_DOCUMENTS, Cleaning, clean, enough_blocks, split_sentences
from d2l_bert.tokenization.sources import Source, all_documents


# A tokenizer sees an even sample of the text, not more: its memory and time stay bounded, and 50 million characters
# (some 9 million words) settle the order of the commonest 30,000 pieces.
TOKENIZER_SAMPLE_CHARACTERS = 50_000_000

TOKENIZED_AT_ONCE = 64  # blocks
MOST_KNOWN_WORDS = 200_000  # whose tokens a process remembers: those that come first, and so the common ones


class NumberFile:
    """Whole numbers appended to a `.npy` file, so that a long table need not fit into memory."""

    def __init__(self, path: Path):
        self.file, self.count = path.open("wb"), 0
        self._write_header()

    def _write_header(self):  # numpy leaves room in it for the count to grow
        header = {"descr": "<i8", "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, numbers: np.ndarray) -> None:
        """Write some more numbers."""
        self.file.write(numbers.astype("<i8").tobytes())
        self.count += len(numbers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.seek(0)
        self._write_header()
        self.file.close()


def read_arrow(path: Path) -> datasets.Dataset:
    """The memory-mapped rows of a folder written here."""
    with undamaged(path):
        return datasets.Dataset.from_file(str(path / "data.arrow"))


def read_table(path: Path, name: str) -> np.ndarray:
    """A memory-mapped table of a folder written here."""
    with undamaged(path):
        return np.load(path / f"{name}.npy", mmap_mode="r")


def _writer(path, schema):
    return ArrowWriter(
        features=datasets.Features.from_arrow_schema(schema), path=str(path / "data.arrow"), writer_batch_size=200
    )


# ---------------------------------------------------------------------------------------------------------------------
# Text

_TEXT_SCHEMA = pa.schema(
    [("name", pa.string()), ("sentences", pa.list_(pa.string())), ("paragraph_ends", pa.list_(pa.int32()))]
)


def prepare_text(sources: Sequence[Source], language: str, cleaning: Cleaning, folder: Path) -> Path:
    """
    The sentences of all sources in Arrow, written once for every (sources, language, cleaning).

    Returns:
        A folder with `data.arrow` (a row is a block), `document_ends.npy` (the number of blocks up to the end of each
        document), `document_characters.npy`, `document_sources.npy` and `counts.json`.
    """
    identity = [source.identity for source in sources]
    identity.append([importlib.metadata.version("sentencex"), unicodedata.unidata_version])
    code = code_of(readers, tables, python_docs, documents, sentences, sys.modules[__name__])
    path = folder / f"text-{fingerprint(identity, language, vars(cleaning), code)}"
    name = ", ".join(source.name for source in sources)

    def write(partial):
        counts = Counter()
        documents = clean(watched(all_documents(sources), f"reading {name}"), cleaning, counts)
        _write_text(enough_blocks(split_sentences(documents, language, counts)), partial)
        for source in sources:
            counts.update(source.counts)
        (partial / "counts.json").write_text(json.dumps(counts))

    if not path.exists():
        written_whole(path, f"reading {name}", write)
    return path


def _write_text(blocks, folder):
    document_of, source_of, characters = array("q"), array("q"), array("q")  # for each block
    with _writer(folder, _TEXT_SCHEMA) as writer:
        for block in blocks:
            writer.write({name: getattr(block, name) for name in _TEXT_SCHEMA.names})
            document_of.append(block.document)
            source_of.append(block.source)
            characters.append(sum(map(len, block.sentences)))
        writer.finalize()
    document_of, source_of, characters = (np.array(column) for column in (document_of, source_of, characters))
    if len(np.unique(document_of)) < FEWEST_DOCUMENTS:
        document_of = np.arange(len(document_of))
    ends = np.append(np.flatnonzero(np.diff(document_of)) + 1, len(document_of)) if len(document_of) else document_of
    np.save(folder / "document_ends.npy", ends)
    np.save(folder / "document_sources.npy", source_of[ends - 1])
    np.save(folder / "document_characters.npy", np.diff(np.cumsum(characters)[ends - 1], prepend=0))


def text_counts(text: Path) -> dict[str, int]:
    """What was counted while the text was read: paragraphs, and what was cleaned away or passed over."""
    with undamaged(text):
        return json.loads((text / "counts.json").read_text())


class SentenceSample:
    """
    Sentences of some documents, all of them, or of blocks spread evenly over them if they are a lot. It can be gone
    through many times, and holds none of them.

    Args:
        text: what `prepare_text` left.
        documents: document numbers, ascending.
        most_characters: about how much text to give at most.
    """

    def __init__(self, text: Path, documents: np.ndarray, most_characters: int = TOKENIZER_SAMPLE_CHARACTERS):
        ends = read_table(text, "document_ends")
        first, last = np.append(0, ends)[documents], ends[documents]
        total = int(read_table(text, "document_characters")[documents].sum())
        self.text, self.share = text, min(1.0, most_characters / max(total, 1))
        blocks = np.concatenate([np.arange(*span) for span in zip(first, last, strict=True)])
        self.blocks = blocks[np.unique((np.arange(int(len(blocks) * self.share)) / self.share).astype(int))]

    def __iter__(self) -> Iterator[str]:
        sentences = read_arrow(self.text).select_columns("sentences")
        for first in range(0, len(self.blocks), 100):
            for block in sentences[self.blocks[first : first + 100].tolist()]["sentences"]:
                yield from block


# ---------------------------------------------------------------------------------------------------------------------
# Tokens

_TOKEN_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32()))])
_TABLES = ("sentence_ends", "paragraph_ends", "document_ends")
_CONTENT_FILE = "content.json"


def prepare_tokens(text: Path, tokenizer, folder: Path, processes: int = 1) -> Path:
    """
    The token ids of every sentence in Arrow, written once for every (text, tokenizer).

    Returns:
        A folder with `data.arrow` (a row is a block), `sentence_ends.npy` (the number of tokens up to the end of each
        sentence of the whole text), `paragraph_ends.npy` and `document_ends.npy` (the number of sentences). A sentence
        of characters that the tokenizer drops leaves no token, and is not counted.
    """
    backend = tokenizer.backend_tokenizer
    path = folder / f"tokens-{fingerprint(text.name, backend.to_str())}"
    if not path.exists():
        blocks = len(read_arrow(text))
        spans = [(first, min(first + TOKENIZED_AT_ONCE, blocks)) for first in range(0, blocks, TOKENIZED_AT_ONCE)]
        done = in_order(_tokenize, spans, min(processes, len(spans)), _open_text, (text, backend.to_str()))
        documents = len(read_table(text, "document_ends"))
        done = watched(done, "tokenizing", documents, lambda part: len(part["document_ends"]))
        written_whole(path, "tokenizing", lambda partial: _write_tokens(done, partial))
    return path


def in_order(function: Callable, items: Iterable, processes: int, initializer: Callable, arguments: tuple) -> Iterator:
    """
    `map(function, items)` on several processes, a few items ahead of whoever takes the results.

    Args:
        processes: at most 1 computes here.
        initializer, arguments: called once in each process before the first item.

    Raises:
        UserError: a process was killed, or the system starts none.
    """
    if processes <= 1:
        initializer(*arguments)
        yield from map(function, items)
        return
    with ProcessPoolExecutor(processes, initializer=_alone_on_a_core, initargs=(initializer, arguments)) as pool:
        items, waiting = iter(items), deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"one of {processes} processes was killed, perhaps for want of memory; "
                f"lower --preprocessing_num_workers"
            ) from None
        except OSError as error:
            raise UserError(
                f"{processes} processes cannot be started ({error.strerror or error}); lower "
                f"--preprocessing_num_workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _alone_on_a_core(initializer, arguments):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # each would else speak for the command
    initializer(*arguments)


def _open_text(text, backend):
    global _rows, _document_ends, _encode
    _rows, _encode = read_arrow(text), SentenceEncoder(backend)
    _document_ends = read_table(text, "document_ends")


class SentenceEncoder:
    """
    Sentences to token ids, each word of a text once: some ten times faster than sentence by sentence.

    BERT's normaliser and pre-tokenizer treat what stands between two spaces for itself. With others the unit is the
    sentence.

    Args:
        backend: a tokenizer as JSON.
    """

    def __init__(self, backend: str):
        self.backend = Tokenizer.from_str(backend)
        self.backend.encode_special_tokens = True  # a "[MASK]" that somebody wrote about is text, not a mask
        self.backend.no_truncation()
        self.backend.no_padding()
        parts = (self.backend.normalizer, self.backend.pre_tokenizer)
        self.by_word = tuple(map(type, parts)) == (normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer)
        self.known = {}

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all sentences one after the other (tokens,), and how many each has (sentences,)."""
        split = [sentence.split() if self.by_word else [sentence] for sentence in sentences]
        new = list(set(itertools.chain.from_iterable(split)).difference(self.known))
        for word, encoding in zip(new, self.backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self.known[word] = encoding.ids
        ids, ends = [], []
        for words in split:
            for word in words:
                ids += self.known[word]
            ends.append(len(ids))
        if len(self.known) > MOST_KNOWN_WORDS:
            for word in new:
                del self.known[word]
        return np.array(ids, dtype=np.int32), np.diff(np.array(ends, dtype=np.int64), prepend=0)


def _tokenize(span):
    """The tokens of blocks `span`, and the tables of `prepare_tokens`, counted from the first of these blocks."""
    first, last = span
    rows = _rows[first:last]
    ids, lengths = _encode(list(itertools.chain(*rows["sentences"])))
    token_ends = np.cumsum(lengths)
    block_ends = np.cumsum([len(sentences) for sentences in rows["sentences"]])
    starts = np.append(0, block_ends[:-1])
    paragraph_ends = np.concatenate(
        [start + np.array(ends, dtype=np.int64) for start, ends in zip(starts, rows["paragraph_ends"], strict=True)]
    )
    some = slice(*np.searchsorted(_document_ends, (first, last), side="right"))
    document_ends = block_ends[_document_ends[some] - first - 1]
    kept = np.append(0, np.cumsum(lengths > 0))  # sentences with tokens, before each sentence
    return {
        "input_ids": ids,
        "block_ends": token_ends[block_ends - 1],
        "sentence_ends": token_ends[lengths > 0],
        "paragraph_ends": kept[paragraph_ends],
        "document_ends": kept[document_ends],
    }


def _write_tokens(parts, folder):
    tokens = sentences = last_paragraph = 0
    with (
        _writer(folder, _TOKEN_SCHEMA) as writer,
        NumberFile(folder / "sentence_ends.npy") as sentence_ends,
        NumberFile(folder / "paragraph_ends.npy") as paragraph_ends,
        NumberFile(folder / "document_ends.npy") as document_ends,
    ):
        for part in parts:
            offsets = np.append(0, part["block_ends"]).astype(np.int32)
            blocks = pa.ListArray.from_arrays(pa.array(offsets), pa.array(part["input_ids"]))
            writer.write_table(pa.Table.from_arrays([blocks], schema=_TOKEN_SCHEMA))
            sentence_ends.append(tokens + part["sentence_ends"])
            document_ends.append(sentences + part["document_ends"])
            paragraphs = np.unique(sentences + part["paragraph_ends"])
            paragraph_ends.append(paragraphs[paragraphs > last_paragraph])  # one without tokens ends nothing
            last_paragraph = max(last_paragraph, *paragraphs.tolist(), 0)
            tokens += len(part["input_ids"])
            sentences += len(part["sentence_ends"])
        writer.finalize()
    (folder / _CONTENT_FILE).write_text(json.dumps({"fingerprint": content_fingerprint(folder)}))


def content_fingerprint(folder: Path) -> str:
    """A short name for the token ids in a folder of `prepare_tokens` and the ends of its sentences, paragraphs and
    documents: the same for the same numbers, whatever code and whatever versions of libraries wrote them."""
    digest = hashlib.sha256()
    for batch in read_arrow(folder).data.table.to_batches():
        digest.update(np.ascontiguousarray(batch.column("input_ids").values.to_numpy(), dtype="<i4"))
    for name in _TABLES:
        table = read_table(folder, name)
        digest.update(f"{name} {len(table)} ".encode())
        digest.update(np.ascontiguousarray(table, dtype="<i8"))
    return digest.hexdigest()[:16]


class TokenizedCorpus:
    """Documents in memory-mapped Arrow: only what is asked for is read, and nothing is held in memory."""

    def __init__(self, path: Path):
        self.path = path
        columns = [batch.column("input_ids").values for batch in read_arrow(path).data.table.to_batches()]
        self._chunks = [column.to_numpy() for column in columns if len(column)]
        self._chunk_starts = np.cumsum([0, *map(len, self._chunks)])
        self._sentence_ends, self._paragraph_ends, self._document_ends = (read_table(path, name) for name in _TABLES)
        tokens, sentences = self._sentence_ends[-1:].sum(), len(self._sentence_ends)
        if self._chunk_starts[-1] != tokens or sentences != self._document_ends[-1]:
            raise UserError(
                f"cache {path}: damaged (its files do not fit each other); delete this folder and run again"
            )
        if not self._chunks:
            raise UserError(f"cache {path}: no token in the text; give text in the tokenizer's language")
        # All chunks lie in one mapped file: an array from the first to the end of the last reaches any token of them.
        addresses = np.array([chunk.ctypes.data for chunk in self._chunks])
        ends = addresses + [chunk.nbytes for chunk in self._chunks]
        mapped = pa.foreign_buffer(addresses.min(), ends.max() - addresses.min(), base=self._chunks)
        self._file = np.frombuffer(mapped, dtype=np.int32)
        self._gaps_before = (addresses - addresses.min()) // self._file.itemsize - self._chunk_starts[:-1]

    def __getstate__(self):  # a loader's worker opens the files itself
        return {"path": self.path}

    def __setstate__(self, state):
        self.__init__(state["path"])

    def __len__(self):
        return len(self._document_ends)

    def fingerprint(self) -> str:
        """`content_fingerprint` of this corpus, as it was written beside the tokens."""
        if not (self.path / _CONTENT_FILE).exists():  # a prepared folder of before
            return content_fingerprint(self.path)
        with undamaged(self.path):
            return json.loads((self.path / _CONTENT_FILE).read_text())["fingerprint"]

    def sizes(self) -> np.ndarray:
        """Tokens in each document (documents,)."""
        sentences = np.asarray(self._document_ends)
        ends = np.where(sentences > 0, self._sentence_ends[np.maximum(sentences - 1, 0)], 0)
        return np.diff(ends, prepend=0)

    def _sentences_of(self, document):
        return int(self._document_ends[document - 1]) if document else 0, int(self._document_ends[document])

    def _token_at(self, sentence):
        return int(self._sentence_ends[sentence - 1]) if sentence else 0

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Token ids of a document, or those from `start` to `end` of it (tokens,)."""
        first, last = map(self._token_at, self._sentences_of(document))
        return self.at(np.arange(first + start, last if end is None else first + end))

    def first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """Where documents start among all tokens: numbers (n,) -> (n,)."""
        sentences = np.where(documents > 0, self._document_ends[np.maximum(documents, 1) - 1], 0)
        return np.where(sentences > 0, self._sentence_ends[np.maximum(sentences, 1) - 1], 0)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Token ids at these numbers among all tokens, in an array of any shape."""
        chunks = np.searchsorted(self._chunk_starts, places, side="right") - 1
        return self._file[places + self._gaps_before[chunks]]

    def sentence_ends(self, document: int) -> np.ndarray:
        """The token offset at which each sentence of a document ends (sentences,)."""
        first, last = self._sentences_of(document)
        return np.asarray(self._sentence_ends[first:last]) - self._token_at(first)

    def paragraph_ends(self, document: int) -> np.ndarray:
        """The sentence number at which each paragraph of a document ends (paragraphs,)."""
        first, last = self._sentences_of(document)
        ends = self._paragraph_ends
        return np.asarray(ends[slice(*np.searchsorted(ends, (first, last), side="right"))]) - first
