"""Text stores: the sentences of all sources on disk, in blocks, memory-mapped; samples of the sentences.

The sentences are in an Arrow file. Each of its rows is a block: some consecutive paragraphs of a document
(`sentences.Block`). Tables in `.npy` files say where documents end.
"""

import importlib.metadata
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

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
TEXT_FORMAT = 2

# A tokenizer is trained on an even sample of the text with at most this many characters, which bounds memory and time.
# 50 million characters (some 9 million words) settle the order of the 30,000 most frequent pieces.
TOKENIZER_SAMPLE_CHARACTERS = 50_000_000

_SCHEMA = pa.schema(
    [("name", pa.string()), ("sentences", pa.list_(pa.string())), ("paragraph_ends", pa.list_(pa.int32()))]
)


def library_versions() -> list[str]:
    """The versions that change sentences: of the sentence splitter, and of Python's Unicode tables."""
    return [importlib.metadata.version("sentencex"), unicodedata.unidata_version]


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
    identity = [TEXT_FORMAT, library_versions(), [source.identity for source in sources], language, vars(cleaning)]
    path = folder / f"text-{fingerprint(identity)}"
    name = ", ".join(source.name for source in sources)

    def write(partial):
        counts = Counter()
        with NumberFile(partial / "text_hashes.npy") as hashes:
            documents = clean(with_progress(all_documents(sources), f"reading {name}"), cleaning, counts)
            blocks = enough_blocks(split_sentences(hashed(documents, hashes.append), language, counts))
            source_ends, is_by_block = _write_blocks(blocks, len(sources), partial)
        for source in sources:
            counts.update(source.counts)
        ends = read_table(partial / "document_characters.npy")
        reading = {**counts, "characters": int(ends[-1:].sum())}
        if is_by_block and len(ends):
            reading["blocks_as_documents"] = len(ends)
        (partial / "counts.json").write_text(json.dumps({"reading": reading, "source_ends": source_ends}))

    if not path.exists():
        write_once(path, f"reading {name}", write)
    return path


def _write_blocks(blocks: Iterable[Block], sources: int, folder: Path) -> tuple[list[int], bool]:
    """
    Write the blocks as rows, and the tables of documents.

    If there are fewer than `FEWEST_DOCUMENTS` documents, each block counts as a document.

    Returns:
        For each source, the number of documents up to the source's end; and whether each block counts as a document.
    """
    characters = rows = documents = 0
    source_rows, source_documents = [0] * sources, [0] * sources
    last_document = None
    with (
        ArrowWriter(
            features=datasets.Features.from_arrow_schema(_SCHEMA),
            path=str(folder / "data.arrow"),
            writer_batch_size=200,
        ) as writer,
        _EndTables(folder, "row") as row_tables,
        _EndTables(folder, "document") as document_tables,
    ):
        for block in blocks:
            if last_document is not None and block.document != last_document:
                document_tables.append(rows, characters)
            last_document = block.document
            writer.write({name: getattr(block, name) for name in _SCHEMA.names})
            rows += 1
            characters += sum(map(len, block.sentences))
            row_tables.append(rows, characters)
            source_rows[block.source] = rows
            source_documents[block.source] = documents = document_tables.count + 1
        if rows:
            document_tables.append(rows, characters)
        writer.finalize()
    one_for_each_block = documents < FEWEST_DOCUMENTS
    kept, dropped = ("row", "document") if one_for_each_block else ("document", "row")
    for name in ("ends", "characters"):
        (folder / f"{dropped}_{name}.npy").unlink()
        (folder / f"{kept}_{name}.npy").rename(folder / f"document_{name}.npy")
    # A source without text ends where the previous source ends.
    ends = np.maximum.accumulate(source_rows if one_for_each_block else source_documents)
    return ends.tolist(), one_for_each_block


class _EndTables:
    """
    Writes the tables `<unit>_ends.npy` and `<unit>_characters.npy`, with an entry for each unit: a row or a document.

    An entry is the number of rows, or of characters, from the start of the store up to the end of that unit. A row is
    one block.
    """

    def __init__(self, folder, unit):
        self.files = [NumberFile(folder / f"{unit}_{table}.npy") for table in ("ends", "characters")]
        self.unwritten, self.count = [], 0

    def append(self, rows, characters):
        self.unwritten.append((rows, characters))
        self.count += 1
        if len(self.unwritten) == 4096:
            self._write()

    def _write(self):
        for file, numbers in zip(self.files, zip(*self.unwritten, strict=True), strict=False):
            file.append(np.array(numbers))
        self.unwritten = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._write()
        for file in self.files:
            file.__exit__()


class TextStore:
    """
    A text store that `prepare_text` has written, memory-mapped.

    `document_ends` counts rows and `document_characters` counts characters up to the end of each document;
    `source_ends` counts documents up to the end of each source. `text_hashes` has a hash of each file or table row
    that was read, and `reading` the counts of paragraphs, and of files, rows and sentences that were left out or cut.

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

        A row has the document's `name`, the `sentences`, and `paragraph_ends`: for each paragraph that ends in the
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
        starts, ends = (_before(text.document_ends, documents + following) for following in (0, 1))
        # The number of rows of `documents` before each of these documents; the last entry counts all of these rows.
        rows_before = np.cumsum(np.append(0, ends - starts))
        characters = int(
            (_before(text.document_characters, documents + 1) - _before(text.document_characters, documents)).sum()
        )
        rows = int(rows_before[-1])
        if leave_out:
            characters = int(text.document_characters[-1:].sum()) - characters
            rows = int(text.document_ends[-1:].sum()) - rows
        self.share = min(1.0, most_characters / max(characters, 1))
        chosen = np.unique((np.arange(int(rows * self.share)) / self.share).astype(int)) if rows else np.zeros(0, int)
        if leave_out:
            # `starts - rows_before[:-1]` is the number of rows that stay before each document that is left out.
            documents_before = np.searchsorted(starts - rows_before[:-1], chosen, side="right")
            self.blocks = chosen + rows_before[documents_before]
        else:
            document = np.searchsorted(rows_before, chosen, side="right") - 1
            self.blocks = chosen - rows_before[document] + starts[document]

    def __iter__(self) -> Iterator[str]:
        sentences = self.text.rows().select_columns("sentences")
        for first in range(0, len(self.blocks), 100):
            for block in sentences[self.blocks[first : first + 100].tolist()]["sentences"]:
                yield from block


def _before(ends, documents):
    """The number of rows, or characters, before each of these documents (n,), from a table of ends."""
    return np.where(documents > 0, ends[np.maximum(documents, 1) - 1], 0)
