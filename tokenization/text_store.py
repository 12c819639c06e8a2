"""Text stores: the sentences of all sources on disk, in blocks; parts of them; what is held out.

A text store is an Arrow file. Each of its rows is a block: some consecutive sentences of a document
(`sentences.split_sentences`), with the numbers of its document and its source, its characters, and a hash of its
sentences.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, shortened, with_progress
from d2l_bert.records import read_record
from d2l_bert.tokenization.cache import cached
from d2l_bert.tokenization.seen_lines import describe_lines
from d2l_bert.tokenization.sentences import FEWEST_DOCUMENTS, split_sentences
from d2l_bert.tokenization.sources import Source, all_documents
from d2l_bert.tokenization.token_store import find


# Raise TEXT_FORMAT by 1 when the same sources with the same options would give other sentences, blocks or hashes: text
# stores that older versions cached are then written again. `tests/test_formats.py` fails until it is raised.
TEXT_FORMAT = 10

# A tokenizer is trained on an even sample of the text with at most this many characters, which bounds memory and time.
# 50 million characters (some 9 million words) settle the order of the 30,000 most frequent pieces.
TOKENIZER_SAMPLE_CHARACTERS = 50_000_000

_NUMBERS = ("document", "source", "characters", "hash")
_SCHEMA = pa.schema({"sentences": pa.list_(pa.string()), **dict.fromkeys(_NUMBERS, pa.int64())})

# Blocks are written, and read by `TextStore.read`, in batches of at least this many characters. Of a log, in which
# each line is a document and a block, a batch has some 10,000 blocks.
BATCH_CHARACTERS = 1 << 20


COUNTS_FILE = "counts.json"


class TextCounts(TypedDict):
    """The content of counts.json: what was read and how, the number of sources, and what their lines show."""

    reading: dict[str, int]
    sources: int
    lines: list[str]


def prepare_text(sources: Sequence[Source], language: str, folder: Path) -> Path:
    """
    Write a text store, unless `folder` already has a store of the same sources and language.

    Args:
        folder: the cache.

    Returns:
        The store's path in `folder`, for `TextStore`.

    Raises:
        UserError: as in `all_documents`, or the cache cannot be written.
    """

    def write(partial):
        counts = Counter()
        names = shortened(", ".join(source.name for source in sources), 200)
        documents = with_progress(all_documents(sources), f"reading {names}", says_end=False)
        with pa.ipc.new_file(str(partial / "data.arrow"), _SCHEMA) as writer:
            for batch in _batches(split_sentences(documents, language, counts)):
                writer.write_batch(batch)
        for source in sources:
            counts.update(source.counts)
        lines = describe_lines([source.seen for source in sources])
        reading = {what: count for what, count in counts.items() if count}
        content = {"reading": reading, "sources": len(sources), "lines": lines}
        (partial / COUNTS_FILE).write_text(json.dumps(content))

    identity = [TEXT_FORMAT, [source.identity for source in sources], language]
    return cached(folder, "text", identity, write)


def _batches(blocks):
    """Yield the blocks in record batches; the last may be empty."""
    batch = _Batch()
    for document, source, sentences in blocks:
        batch.add(document, source, sentences)
        if batch.characters >= BATCH_CHARACTERS:
            yield batch.finished()
            batch = _Batch()
    yield batch.finished()


class _Batch:
    """
    Blocks that become a record batch.

    The sentences of all blocks are kept in one list, and where those of each block end. Keeping the lists of 10,000
    blocks took twice the time, in garbage collections.
    """

    def __init__(self):
        self.sentences = []
        self.ends = [0]
        self.numbers = []  # for each block, one for each of `_NUMBERS`
        self.characters = 0

    def add(self, document, source, sentences):
        characters = sum(map(len, sentences))
        self.sentences += sentences
        self.ends.append(len(self.sentences))
        self.numbers.append((document, source, characters, _hash_of(sentences)))
        self.characters += characters

    def finished(self):
        """The record batch."""
        lists = pa.ListArray.from_arrays(pa.array(self.ends, pa.int32()), pa.array(self.sentences, pa.string()))
        table = np.array(self.numbers, dtype=np.int64).reshape(-1, len(_NUMBERS))  # (blocks, 4), also of no blocks
        columns = [pa.array(np.ascontiguousarray(column)) for column in table.T]
        return pa.record_batch([lists, *columns], schema=_SCHEMA)


def _hash_of(sentences):
    """The sum of the sentences' hashes, so that `TextStore` can add up those of a document's blocks, in 64 bits."""
    hashes = []
    for sentence in sentences:
        content = sentence.encode(errors="surrogatepass")
        hashes.append(hashlib.blake2b(content, digest_size=8).digest())
    return np.frombuffer(b"".join(hashes), "<i8").sum()


class Blocks:
    """The blocks of a text store that `prepare_text` has written, read from the disk a batch at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        # The file is opened twice. Sentences are read from `file`: of a mapped file, all pages that were ever read
        # would stay in memory. The numbers are mapped, as `table`: these pages are few.
        self.file = pa.ipc.open_file(pa.OSFile(str(folder / "data.arrow")))
        if self.file.schema != _SCHEMA:
            raise ValueError(f"{folder}: holds other columns than a text store")
        mapped = pa.ipc.open_file(pa.memory_map(str(folder / "data.arrow")))
        self.table = mapped.read_all().select(_NUMBERS)
        self.batch_starts = np.cumsum([0, *map(len, self.table["hash"].chunks)])

    def read(self, blocks: np.ndarray) -> Iterator[pa.RecordBatch]:
        """
        Yield the rows of the blocks with these numbers, ascending (n,).

        Of the blocks 1, 5 and 6, in batches that start at the blocks 0, 4 and 8, batch 0 is read for its row 1, and
        batch 1 for its rows 1 and 2.
        """
        batch_of_block = find(self.batch_starts, blocks)  # (n,), ascending, too
        for number in np.unique(batch_of_block).tolist():
            first, end = np.searchsorted(batch_of_block, (number, number + 1))
            rows = blocks[first:end] - self.batch_starts[number]
            with explained(f"cache {self.folder}: is damaged", "delete it, and read the text again", *READ_ERRORS):
                batch = self.file.get_batch(number)
                batch.validate(full=True)  # numbers that point elsewhere would end the process
            yield batch.take(pa.array(rows))


class TextStore(Blocks):
    """
    The blocks of a text store, and its documents.

    If fewer than `FEWEST_DOCUMENTS` documents were read, or few hold more than four fifths of the text, each block
    counts as a document: below, the documents are then the blocks.

    Attributes:
        reading: how much was read and how, by what it is: documents, paragraphs, sentences and characters, and the
            files, rows and sentences that were left out or cut.
        source_count: the number of sources.
        lines: what recurs in the lines of the files (`describe_lines`).
        block_columns: the columns of the file, but for the sentences, by their names (`_NUMBERS`), each (blocks,).
        document_of_block: the number of each block's document (blocks,).
        sources, characters, hashes: of each document the number of its source, its characters, and a hash, the same
            for documents with the same sentences (documents,).
        fingerprint: a hash of all sentences; that of two texts together is the sum of theirs in int64.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        counts = read_record(folder / COUNTS_FILE, TextCounts)
        self.reading = counts["reading"]
        self.source_count = counts["sources"]
        self.lines = counts["lines"]
        self.block_columns = {name: self.table[name].to_numpy() for name in _NUMBERS}
        block_count = len(self.table)
        # The first block of each document that was read.
        self._firsts_as_read = np.flatnonzero(np.diff(self.block_columns["document"], prepend=-1))
        characters_as_read = np.add.reduceat(self.block_columns["characters"], self._firsts_as_read)
        if block_count and _few_hold_most(characters_as_read):
            firsts = np.arange(block_count)  # every block is the first of a document
            self.reading["blocks of sentences in place of documents, as few hold most of the text"] = block_count
        else:
            firsts = self._firsts_as_read
        blocks_of_documents = np.diff(firsts, append=block_count)
        self.document_of_block = np.repeat(np.arange(len(firsts)), blocks_of_documents)
        self.sources = self.block_columns["source"][firsts]
        self.characters = np.add.reduceat(self.block_columns["characters"], firsts)
        self.hashes = np.add.reduceat(self.block_columns["hash"], firsts)
        self.fingerprint = int(self.hashes.sum())

    def __len__(self):
        """The number of documents."""
        return len(self.hashes)

    def count_as_read(self) -> int:
        """The number of documents that were read, also where each block counts as one."""
        return len(self._firsts_as_read)

    def ends_as_read(self, document: int) -> tuple[str, str]:
        """The first and the last sentence of the document with this number, as documents were read."""
        blocks = np.flatnonzero(self.block_columns["document"] == document)
        (first_block,) = self.read(blocks[:1])
        (last_block,) = self.read(blocks[-1:])
        return first_block["sentences"][0][0].as_py(), last_block["sentences"][0][-1].as_py()

    def part(self, is_chosen: np.ndarray | None = None) -> "TextPart":
        """The documents whose entry is true (documents,), or all."""
        is_chosen = np.ones(len(self), dtype=bool) if is_chosen is None else is_chosen
        return TextPart(self, np.flatnonzero(is_chosen[self.document_of_block]))

    def count_documents_also_in(self, hashes_of_other: np.ndarray) -> tuple[int, int]:
        """
        How many documents were read, and how many of them are also in another text.

        If each block counts as a document in the other text, the other's hashes are those of blocks: a document is
        then in that text if all its blocks are.

        Args:
            hashes_of_other: the hash of each document of the other text.
        """
        hashes_of_blocks = self.block_columns["hash"]
        hashes_of_documents = np.add.reduceat(hashes_of_blocks, self._firsts_as_read)
        is_block_there = np.isin(hashes_of_blocks, hashes_of_other)
        are_all_blocks_there = np.minimum.reduceat(is_block_there, self._firsts_as_read)  # the least of 0 and 1: "and"
        is_there = np.isin(hashes_of_documents, hashes_of_other) | are_all_blocks_there
        return len(hashes_of_documents), int(is_there.sum())


def _few_hold_most(sizes):
    """
    Whether documents of these sizes are fewer than 20, or few of them hold more than four fifths of the text.

    Of such documents, as of three books beside the lines of a log, only small ones would be held out. The small ones,
    which have a twentieth of the text or less, should have a fifth of the text together. Of twenty books whose sizes
    differ, they have a third or more.
    """
    if len(sizes) < FEWEST_DOCUMENTS:
        return True
    all_characters = sizes.sum()
    is_small = FEWEST_DOCUMENTS * sizes <= all_characters
    in_small = sizes[is_small].sum()
    return 5 * in_small < all_characters


@dataclass(frozen=True)
class TextPart:
    """
    Some blocks of a text store. Iterates over their sentences; can be iterated many times.

    Sentences are read from the disk in each iteration, not kept in memory.

    Args:
        store: the text store.
        blocks: the numbers of the blocks, ascending (n,).
    """

    store: TextStore
    blocks: np.ndarray

    def characters(self) -> int:
        """The number of characters."""
        return int(self.store.block_columns["characters"][self.blocks].sum())

    def document_count(self) -> int:
        """The number of documents that the blocks are of."""
        return len(np.unique(self.store.document_of_block[self.blocks]))

    def sample(self, most_characters: int = TOKENIZER_SAMPLE_CHARACTERS) -> "TextPart":
        """
        Blocks spread evenly over this part, of about `most_characters` in all; all blocks if it has fewer characters.

        For a share of 0.4 of ten blocks, these are the blocks 0, 2, 5 and 7.
        """
        share = min(1.0, most_characters / max(self.characters(), 1))
        count = int(len(self.blocks) * share)
        evenly = np.arange(count) / share  # 0, 2.5, 5 and 7.5
        places = np.unique(evenly.astype(int))
        return TextPart(self.store, self.blocks[places])

    def identity(self) -> list[str]:
        """Two strings that change whenever the sentences do: of the whole text, and of the choice of blocks."""
        name_with_hash = self.store.folder.name  # `cached` puts a hash into it of all that decides the text
        numbers = np.ascontiguousarray(self.blocks, dtype="<i8")
        return [name_with_hash, hashlib.sha256(numbers).hexdigest()]

    def __iter__(self) -> Iterator[str]:
        for batch in self.store.read(self.blocks):
            yield from batch["sentences"].flatten().to_pylist()


def held_out_documents(hashes: np.ndarray, characters: np.ndarray, fraction: float, most: int) -> np.ndarray:
    """
    Choose the documents to hold out: those with the smallest hashes, until they have enough text.

    The choice follows from the content alone. Copies of a document have its hash, and are held out together. A
    document that, with its copies, has more text than is to be held out in all is taken only if the others do not
    suffice; of several such, the one with the least text first.

    Args:
        hashes, characters: the hash and the number of characters of each document (documents,).
        fraction: the share of the text to hold out.
        most: the most characters to hold out; the last document may exceed it. More text would take longer to evaluate
            and hardly make the metrics more exact.

    Returns:
        Whether each document is held out (documents,): at least two different documents are, and two are not.

    Raises:
        UserError: the corpus has fewer than four different documents.
    """
    # The different hashes, ascending, and for each document the place of its hash among them.
    different, place = np.unique(hashes, return_inverse=True)
    if len(different) < 4:
        raise UserError(
            f"too little text: {counted(len(different), 'document')} with different sentences, and training "
            f"and evaluation need two each; add text, or break one long sentence into several"
        )
    sizes = np.bincount(place, characters)  # of each different document, with its copies
    wanted = min(fraction * int(sizes.sum()), most)
    # Sizes of 4, 90, 5, 60 and 6, of which 8 are wanted, are sorted as 0, 90, 0, 60 and 0: the order is 0, 2, 4, 3, 1.
    # The documents that are not too large keep the order of their hashes, as the sort is stable.
    size_if_too_large = np.where(sizes > wanted, sizes, 0)
    order = np.argsort(size_if_too_large, kind="stable")
    sizes_up_to = np.cumsum(sizes[order])  # 4, 9, 15, 75, 165: the second reaches the 8
    first_that_suffices = int(np.searchsorted(sizes_up_to, wanted))
    count = min(max(first_that_suffices + 1, 2), len(different) - 2)
    return np.isin(place, order[:count])
