"""Text stores: the sentences of all sources on disk, in blocks, memory-mapped; samples of the sentences.

The sentences are in an Arrow file. Each of its rows is a block: some consecutive paragraphs of a document
(`sentences.Block`). Tables in `.npy` files say where documents end.
"""

import array
import hashlib
import importlib.metadata
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from d2l_bert.progress import with_progress
from d2l_bert.tokenization.cache import fingerprint, reading_cache, write_once
from d2l_bert.tokenization.sentences import (
    FEWEST_DOCUMENTS,
    Block,
    Cleaning,
    clean,
    enough_blocks,
    hashed,
    split_sentences,
)
from d2l_bert.tokenization.sources import Source, all_documents
from d2l_bert.tokenization.token_store import NumberFile, read_table


# Raise TEXT_FORMAT by 1 when the same sources with the same options would give other sentences, blocks or tables: text
# stores that older versions cached are then written again. `tests/test_formats.py` fails until it is raised.
TEXT_FORMAT = 3

# A tokenizer is trained on an even sample of the text with at most this many characters, which bounds memory and time.
# 50 million characters (some 9 million words) settle the order of the 30,000 most frequent pieces.
TOKENIZER_SAMPLE_CHARACTERS = 50_000_000

_SCHEMA = pa.schema([("sentences", pa.list_(pa.string())), ("paragraph_ends", pa.list_(pa.int32()))])

# Blocks are written, and read by `SentenceSample`, in batches of at least this many characters: some 10,000 of the
# blocks of a log in which each line is a document.
BATCH_CHARACTERS = 1 << 20


def prepare_text(sources: Sequence[Source], language: str, cleaning: Cleaning, folder: Path) -> Path:
    """
    Write a text store, unless `folder` already has a store of the same sources, language and cleaning.

    Args:
        folder: the cache.

    Returns:
        The store's path in `folder`, for `TextStore`.

    Raises:
        UserError: as in `all_documents`, or the cache cannot be written.
    """
    # Sentences depend on the splitter, and on Python's Unicode tables.
    versions = [importlib.metadata.version("sentencex"), unicodedata.unidata_version]
    identity = [TEXT_FORMAT, versions, [source.identity for source in sources], language, vars(cleaning)]
    path = folder / f"text-{fingerprint(identity)}"
    name = ", ".join(source.name for source in sources)

    def write(partial):
        counts = Counter()
        with closing(NumberFile(partial / "text_hashes.npy")) as hashes:
            documents = clean(with_progress(all_documents(sources), f"reading {name}"), cleaning, counts)
            blocks = enough_blocks(split_sentences(hashed(documents, hashes.append), language, counts))
            source_ends, is_by_block = _write_blocks(blocks, len(sources), partial)
        for source in sources:
            counts.update(source.counts)
        ends = read_table(partial / "document_characters.npy")
        reading = dict(counts)
        if is_by_block and len(ends):
            reading["blocks_as_documents"] = len(ends)
        (partial / "counts.json").write_text(json.dumps({"reading": reading, "source_ends": source_ends}))

    write_once(path, f"reading {name}", write)
    return path


def _write_blocks(blocks: Iterable[Block], sources: int, folder: Path) -> tuple[list[int], bool]:
    """
    Write the blocks as rows, and the tables of documents.

    If there are fewer than `FEWEST_DOCUMENTS` documents, each block counts as a document.

    Returns:
        For each source, the number of documents up to the source's end; and whether each block counts as a document.
    """
    columns = [array.array("q") for _ in range(3)]  # of each row: its document, its source, its characters
    with pa.ipc.new_stream(str(folder / "data.arrow"), _SCHEMA) as writer:
        lists, size = _no_lists(), 0
        for block in blocks:
            characters = sum(map(len, block.sentences))
            for column, value in zip(columns, (block.document, block.source, characters), strict=True):
                column.append(value)
            for (values, ends), new in zip(lists, (block.sentences, block.paragraph_ends), strict=True):
                values += new
                ends.append(len(values))
            size += characters
            if size >= BATCH_CHARACTERS:
                writer.write_batch(_record_batch(lists))
                lists, size = _no_lists(), 0
        writer.write_batch(_record_batch(lists))
    documents, sources_of_rows, characters = (np.array(column, dtype=np.int64) for column in columns)
    ends = np.flatnonzero(np.diff(documents, append=-1)) + 1  # the number of rows up to the end of each document
    if one_for_each_block := len(ends) < FEWEST_DOCUMENTS:
        ends = np.arange(1, len(documents) + 1)
    np.save(folder / "document_ends.npy", ends)
    np.save(folder / "document_characters.npy", np.cumsum(characters)[ends - 1])
    source_ends = np.searchsorted(sources_of_rows[ends - 1], np.arange(sources), side="right")
    return source_ends.tolist(), one_for_each_block


def _no_lists():
    """
    For each column of a batch, the values of its lists one after the other, and where each list starts and ends.

    Keeping the lists of 10,000 blocks instead took twice the time, in garbage collections.
    """
    return [([], [0]) for _ in _SCHEMA]


def _record_batch(lists):
    arrays = [
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, field.type.value_type))
        for field, (values, ends) in zip(_SCHEMA, lists, strict=True)
    ]
    return pa.record_batch(arrays, schema=_SCHEMA)


class TextStore:
    """
    A text store that `prepare_text` has written, memory-mapped.

    `document_ends` counts rows and `document_characters` counts characters up to the end of each document;
    `source_ends` counts documents up to the end of each source. `text_hashes` has a hash of each text that was read
    (`hashed`). `reading` counts what was read and how: documents, paragraphs, sentences and characters, and the files,
    rows and sentences that were left out or cut.

    Raises:
        UserError: the store is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.document_ends, self.document_characters, self.text_hashes = (
            read_table(folder / f"{name}.npy") for name in ("document_ends", "document_characters", "text_hashes")
        )
        with reading_cache(folder):
            counts = json.loads((folder / "counts.json").read_text())
            self.reading, self.source_ends = counts["reading"], counts["source_ends"]

    def __len__(self):
        """The number of documents."""
        return len(self.document_ends)

    def rows(self) -> datasets.Dataset:
        """
        The store as a memory-mapped `Dataset`, with a row for each block.

        A row has the `sentences`, and `paragraph_ends`: for each paragraph that ends in the
        block, the number of the block's sentences up to the paragraph's end.
        """
        with reading_cache(self.folder):
            return datasets.Dataset.from_file(str(self.folder / "data.arrow"))


class SentenceSample:
    """
    The sentences of a text, or of blocks spread evenly over the text if the text is too large.

    A sample can be iterated many times. Sentences are read from the disk in each iteration, not kept in memory.

    Args:
        documents: the numbers of the documents to take sentences from, ascending (n,).
        leave_out: whether to take the sentences of all other documents instead.
        most_characters: the approximate largest number of characters in the sample.
    """

    def __init__(
        self,
        text: TextStore,
        documents: np.ndarray,
        leave_out: bool = False,
        most_characters: int = TOKENIZER_SAMPLE_CHARACTERS,
    ):
        self.text = text
        is_taken = np.full(len(text.document_ends), leave_out)
        is_taken[np.asarray(documents, dtype=np.int64)] = not leave_out
        rows, characters = (np.diff(table, prepend=0) for table in (text.document_ends, text.document_characters))
        blocks = np.flatnonzero(np.repeat(is_taken, rows))
        self.share = min(1.0, most_characters / max(int(characters[is_taken].sum()), 1))
        self.blocks = blocks[np.unique((np.arange(int(len(blocks) * self.share)) / self.share).astype(int))]

    def identity(self) -> list[str]:
        """Changes whenever the sentences do."""
        blocks = np.ascontiguousarray(self.blocks, dtype="<i8")
        return [self.text.folder.name, hashlib.sha256(blocks).hexdigest()]

    def __iter__(self) -> Iterator[str]:
        first = 0
        for batch in self.text.rows().data.column("sentences").chunks:
            start, end = np.searchsorted(self.blocks, (first, first + len(batch)))
            if start < end:
                yield from batch.take(pa.array(self.blocks[start:end] - first)).flatten().to_pylist()
            first += len(batch)
