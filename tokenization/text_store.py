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
from d2l_bert.tokenization.sentences import FEWEST_DOCUMENTS, split_sentences
from d2l_bert.tokenization.sources import Source, all_documents


# Raise TEXT_FORMAT by 1 when the same sources with the same options would give other sentences, blocks or hashes: text
# stores that older versions cached are then written again. `tests/test_formats.py` fails until it is raised.
TEXT_FORMAT = 9

# A tokenizer is trained on an even sample of the text with at most this many characters, which bounds memory and time.
# 50 million characters (some 9 million words) settle the order of the 30,000 most frequent pieces.
TOKENIZER_SAMPLE_CHARACTERS = 50_000_000

_NUMBERS = ("document", "source", "characters", "hash")
_SCHEMA = pa.schema([("sentences", pa.list_(pa.string())), *((name, pa.int64()) for name in _NUMBERS)])

# Blocks are written, and read by `TextStore.read`, in batches of at least this many characters: some 10,000 of the
# blocks of a log in which each line is a document.
BATCH_CHARACTERS = 1 << 20


COUNTS_FILE = "counts.json"


class TextCounts(TypedDict):
    """The content of counts.json: what was read and how, and the number of sources."""

    reading: dict[str, int]
    sources: int


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
        documents = with_progress(all_documents(sources), f"reading {names}")
        with pa.ipc.new_file(str(partial / "data.arrow"), _SCHEMA) as writer:
            for batch in _batches(split_sentences(documents, language, counts)):
                writer.write_batch(batch)
        for source in sources:
            counts.update(source.counts)
        (partial / COUNTS_FILE).write_text(json.dumps({"reading": +counts, "sources": len(sources)}))

    return cached(folder, "text", [TEXT_FORMAT, [source.identity for source in sources], language], write, _check_text)


def _check_text(folder):
    """Raise an exception if a folder is no text store, or its blocks are of no document or no source."""
    counts = read_record(folder / COUNTS_FILE, TextCounts)
    numbers = {name: column.to_numpy() for name, column in zip(_NUMBERS, Blocks(folder).table.columns, strict=True)}
    documents, sources = numbers["document"], numbers["source"]
    if len(documents) and (documents[0] != 0 or not np.isin(np.diff(documents), (0, 1)).all()):
        raise ValueError("the blocks are of documents that do not follow each other")
    if len(sources) and not 0 <= sources.min() <= sources.max() < counts["sources"]:
        raise ValueError("a block is of no source")
    if len(sources) and numbers["characters"].min() < 0:
        raise ValueError("a block has fewer than no characters")


def _batches(blocks):
    """
    Yield the blocks in record batches; the last may be empty.

    The sentences of all blocks are kept in one list, and where those of each block end. Keeping the lists of 10,000
    blocks took twice the time, in garbage collections.
    """
    sentences, ends, numbers, size = [], [0], [], 0
    for document, source, added in blocks:
        sentences += added
        ends.append(len(sentences))
        # The sum of the sentences' hashes does not depend on the blocks: `TextStore` adds those of a document up.
        hashes = [
            hashlib.blake2b(sentence.encode(errors="surrogatepass"), digest_size=8).digest() for sentence in added
        ]
        content = np.frombuffer(b"".join(hashes), "<i8").sum()
        numbers.append((document, source, sum(map(len, added)), content))
        size += numbers[-1][2]
        if size >= BATCH_CHARACTERS:
            yield _batch(sentences, ends, numbers)
            sentences, ends, numbers, size = [], [0], [], 0
    yield _batch(sentences, ends, numbers)


def _batch(sentences, ends, numbers):
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(sentences, pa.string()))
    columns = np.array(numbers, dtype=np.int64).reshape(-1, len(_NUMBERS)).T
    return pa.record_batch([lists, *map(pa.array, np.ascontiguousarray(columns))], schema=_SCHEMA)


class Blocks:
    """The blocks of a text store that `prepare_text` has written, read from the disk a batch at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        # A map of the file would keep the pages that were read in memory; of the numbers it reads no others.
        self.file = pa.ipc.open_file(pa.OSFile(str(folder / "data.arrow")))
        if self.file.schema != _SCHEMA:
            raise ValueError(f"{folder}: holds other columns than a text store")
        self.table = pa.ipc.open_file(pa.memory_map(str(folder / "data.arrow"))).read_all().select(_NUMBERS)
        self.batch_starts = np.cumsum([0, *map(len, self.table["hash"].chunks)])

    def read(self, blocks: np.ndarray) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the blocks with these numbers, ascending (n,)."""
        for number in np.unique(np.searchsorted(self.batch_starts, blocks, side="right") - 1).tolist():
            first, end = self.batch_starts[number : number + 2]
            inside = blocks[slice(*np.searchsorted(blocks, (first, end)))]
            with explained(f"cache {self.folder}: is damaged", "delete it, and read the text again", *READ_ERRORS):
                batch = self.file.get_batch(number)
                batch.validate(full=True)  # numbers that point elsewhere would end the process
            yield batch.take(pa.array(inside - first))


class TextStore(Blocks):
    """
    The blocks of a text store, and its documents.

    If fewer than `FEWEST_DOCUMENTS` documents were read, or few hold more than four fifths of the text, each block
    counts as a document. `documents` has the number of each block's document; `sources`, `characters` and `hashes`
    have an entry for each document. Documents with the same sentences have the same hash. `source_count` counts the
    sources. `reading` counts what was read and how, by what it is: documents, paragraphs, sentences and characters,
    and the files, rows and sentences that were left out or cut. `fingerprint` is a hash of all sentences: of two
    texts together, the sum of theirs in int64.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        counts = read_record(folder / COUNTS_FILE, TextCounts)
        self.reading, self.source_count = counts["reading"], counts["sources"]
        self.of_blocks = {name: self.table[name].to_numpy() for name in _NUMBERS}
        self._read_firsts = firsts = np.flatnonzero(np.diff(self.of_blocks["document"], prepend=-1))
        # Else the small documents alone would be held out, such as the lines of a log beside three books. Of twenty
        # books whose sizes differ, those below the mean have a third of the text or more.
        sizes = np.add.reduceat(self.of_blocks["characters"], firsts)
        if len(self.table) and (
            len(firsts) < FEWEST_DOCUMENTS or 5 * sizes[FEWEST_DOCUMENTS * sizes <= sizes.sum()].sum() < sizes.sum()
        ):
            firsts = np.arange(len(self.table))
            self.reading["blocks of sentences in place of documents, as few hold most of the text"] = len(firsts)
        self.documents = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(self.table)))
        self.sources = self.of_blocks["source"][firsts]
        self.characters, self.hashes = (np.add.reduceat(self.of_blocks[name], firsts) for name in _NUMBERS[2:])
        self.fingerprint = int(self.hashes.sum())

    def __len__(self):
        """The number of documents."""
        return len(self.hashes)

    def part(self, is_chosen: np.ndarray | None = None) -> "TextPart":
        """The documents whose entry is true (documents,), or all."""
        is_chosen = np.ones(len(self), dtype=bool) if is_chosen is None else is_chosen
        return TextPart(self, np.flatnonzero(is_chosen[self.documents]))

    def documents_in(self, hashes: np.ndarray) -> tuple[int, int]:
        """
        How many documents were read, and how many of them stand in a text whose documents have these hashes.

        In a text of few documents the hashes are those of blocks.
        """
        of_blocks, firsts = self.of_blocks["hash"], self._read_firsts
        are_blocks_there = np.minimum.reduceat(np.isin(of_blocks, hashes), firsts)
        return len(firsts), int((are_blocks_there | np.isin(np.add.reduceat(of_blocks, firsts), hashes)).sum())


@dataclass
class TextPart:
    """
    Some blocks of a text store. Iterates over their sentences; can be iterated many times.

    Sentences are read from the disk in each iteration, not kept in memory.

    Args:
        blocks: the numbers of the blocks, ascending (n,).
    """

    text: TextStore
    blocks: np.ndarray

    def characters(self) -> int:
        """The number of characters."""
        return int(self.text.of_blocks["characters"][self.blocks].sum())

    def document_count(self) -> int:
        """The number of documents that blocks are of."""
        return len(np.unique(self.text.documents[self.blocks]))

    def sample(self, most_characters: int = TOKENIZER_SAMPLE_CHARACTERS) -> "TextPart":
        """Blocks spread evenly over this part, of about `most_characters` in all; all blocks if these are fewer."""
        share = min(1.0, most_characters / max(self.characters(), 1))
        spread = np.unique((np.arange(int(len(self.blocks) * share)) / share).astype(int))
        return TextPart(self.text, self.blocks[spread])

    def identity(self) -> list[str]:
        """Changes whenever the sentences do."""
        return [self.text.folder.name, hashlib.sha256(np.ascontiguousarray(self.blocks, dtype="<i8")).hexdigest()]

    def __iter__(self) -> Iterator[str]:
        for batch in self.text.read(self.blocks):
            yield from batch["sentences"].flatten().to_pylist()


def held_out_documents(hashes: np.ndarray, characters: np.ndarray, fraction: float, most: int) -> np.ndarray:
    """
    Choose the documents to hold out: those with the smallest hashes, until they have enough text.

    The choice follows from the content alone. Copies of a document have its hash, and are held out together. A
    document that, with its copies, has more text than is to be held out in all is taken only if the smaller documents
    do not suffice, the smallest first.

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
    different, number = np.unique(hashes, return_inverse=True)
    if len(different) < 4:
        raise UserError(
            f"too little text: {counted(len(different), 'document')} with different sentences, and training "
            f"and evaluation need two each; add text, or break one long sentence into several"
        )
    sizes = np.bincount(number, characters)
    wanted = min(fraction * int(sizes.sum()), most)
    order = np.argsort(np.where(sizes > wanted, sizes, 0), kind="stable")  # the large documents last, by size
    enough = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    return np.isin(number, order[: min(max(enough, 2), len(different) - 2)])
