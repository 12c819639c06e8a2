"""Documents as paragraphs; cleans paragraphs, splits them into sentences, groups sentences into blocks."""

import dataclasses
import hashlib
import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import sentencex


@dataclasses.dataclass
class Document:
    """
    One text as a sequence of paragraphs.

    Args:
        name: names the origin of the text, such as a file.
        paragraphs: strings of one line each, or of one line a sentence. May be an iterator: read the paragraphs only
            once.
        source: the number of the document's source in the list of the run's sources, from 0.
        is_rows: whether each paragraph is a row of a table, and so a separate text.
        are_sentences: whether each line of a paragraph is a sentence.
    """

    name: str
    paragraphs: Iterable[str]
    source: int = 0
    is_rows: bool = False
    are_sentences: bool = False


def hashed(documents: Iterable[Document], write: Callable[[np.ndarray], object]) -> Iterator[Document]:
    """
    Yield the same documents, and hash each text while the caller reads the text's paragraphs.

    A text is a document, or a row of a table in a block of them. Texts with equal paragraphs have equal hashes.

    Args:
        write: called with the hash of each text, an int64 array (1,).
    """
    for document in documents:
        document.paragraphs = _hashed(document.paragraphs, document.is_rows, write)
        yield document


def _hashed(paragraphs, are_rows, write):
    digest = None  # of the text so far
    for paragraph in itertools.chain(paragraphs, [None]):
        if digest is not None and (are_rows or paragraph is None):
            write(np.frombuffer(digest.digest(), dtype="<i8"))
            digest = None
        if paragraph is not None:
            yield paragraph
            digest = digest or hashlib.blake2b(digest_size=8)
            digest.update(paragraph.encode(errors="surrogatepass") + b"\n\n")


# ---------------------------------------------------------------------------------------------------------------------
# Sentences


# Characters. A longer "sentence" is text without full stops: it is cut, or truncating pairs would lose most of it.
LONGEST_SENTENCE = 1000

# Characters of a piece that is cut where there is no space: a multiple of the pieces that `Rules` cut words into, 100
# characters and k-mers of 1 to 6, so that a long word has the same ids in training as in use.
LONGEST_PIECE = 600

# A block ends with the first paragraph that brings it to this many sentences, or at twice as many.
BLOCK_SENTENCES = 64

# A corpus with fewer documents has too few for random pairs from other documents, and for a held-out split of the
# wanted size. Each block then counts as a document.
FEWEST_DOCUMENTS = 20


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """What to change in paragraphs, and which to drop; nothing by default. Fields are those of `TextConfig`."""

    unicode_normalization: str = "none"
    min_paragraph_characters: int = 0
    drop_duplicate_paragraphs: bool = False

    @classmethod
    def of(cls, options: dict) -> "Cleaning":
        """From `TextConfig.token_options`."""
        return cls(**{field.name: options[field.name] for field in dataclasses.fields(cls)})


def clean(documents: Iterable[Document], cleaning: Cleaning, counts: Counter) -> Iterator[Document]:
    """
    The same documents with cleaned paragraphs. Paragraphs are cleaned one by one, when the caller reads them.

    Of equal paragraphs the first is kept. They are recognised by a hash of 8 bytes, which takes some 70 bytes of
    memory for each paragraph.

    Args:
        counts: increased by the numbers of `documents`, `paragraphs` and their `characters` before cleaning; by the
            numbers that each rule changed or dropped: `normalized`, `too_short`, `duplicates`; and by the
            `characters_cleaned`, those of the paragraphs that were dropped.
    """
    seen = set()
    for document in documents:
        counts["documents"] += 1
        document.paragraphs = _cleaned(document.paragraphs, cleaning, counts, seen)
        yield document


def _cleaned(paragraphs, cleaning, counts, seen):
    for paragraph in paragraphs:
        counts["paragraphs"] += 1
        length = len(paragraph)
        counts["characters"] += length
        if cleaning.unicode_normalization != "none":
            normal = unicodedata.normalize(cleaning.unicode_normalization, paragraph)
            counts["normalized"] += normal != paragraph
            paragraph = normal
        if len(paragraph) < cleaning.min_paragraph_characters:
            counts["too_short"] += 1
            counts["characters_cleaned"] += length
            continue
        if cleaning.drop_duplicate_paragraphs:
            digest = hashlib.blake2b(paragraph.encode(errors="surrogatepass"), digest_size=8).digest()
            key = int.from_bytes(digest, "big")
            if key in seen:
                counts["duplicates"] += 1
                counts["characters_cleaned"] += length
                continue
            seen.add(key)
        yield paragraph


@dataclasses.dataclass
class Block:
    """
    Some consecutive paragraphs of a document, split into sentences.

    Args:
        document: number of the document, from 0.
        source: number of the document's source, from 0.
        paragraph_ends: for each paragraph that ends in this block, the number of sentences from the start of the
            block to the end of the paragraph.
    """

    document: int
    source: int
    sentences: list[str]
    paragraph_ends: list[int]


def split_sentences(
    documents: Iterable[Document], language: str = "en", counts: Counter | None = None
) -> Iterator[Block]:
    """
    Split documents into sentences with `sentencex`, unless their lines are sentences, and yield them in blocks.

    A block ends at the end of a paragraph (see `BLOCK_SENTENCES`); in a very long paragraph, at the end of a sentence.
    Sentences longer than `LONGEST_SENTENCE` are cut between words. Documents without a sentence get no number.

    Args:
        language: ISO 639 code of the language whose rules `sentencex` applies.
        counts: its entry `sentences` is increased by the number of sentences, and `long_sentences` by the number of
            those that were cut.
    """
    counts = Counter() if counts is None else counts
    number = 0
    for document in documents:
        has_sentences = False
        for sentences, paragraph_ends in _blocks(document, language, counts):
            counts["sentences"] += len(sentences)
            yield Block(number, document.source, sentences, paragraph_ends)
            has_sentences = True
        number += has_sentences


def _blocks(document, language, counts):
    sentences, paragraph_ends = [], []
    for paragraph in document.paragraphs:
        for sentence in paragraph.split("\n") if document.are_sentences else sentencex.segment(language, paragraph):
            counts["long_sentences"] += len(sentence) > LONGEST_SENTENCE
            for piece in _cut(sentence.strip()):
                if len(sentences) == 2 * BLOCK_SENTENCES:
                    yield sentences, paragraph_ends
                    sentences, paragraph_ends = [], []
                sentences.append(piece)
        paragraph_ends.append(len(sentences))
        if len(sentences) >= BLOCK_SENTENCES:
            yield sentences, paragraph_ends
            sentences, paragraph_ends = [], []
    if sentences:
        yield sentences, paragraph_ends


def _cut(sentence):
    """A sentence in pieces of at most `LONGEST_SENTENCE` characters, cut at spaces where there are any."""
    start = 0
    while len(sentence) - start > LONGEST_SENTENCE:
        end = sentence.rfind(" ", start + 1, start + LONGEST_SENTENCE)
        end = start + LONGEST_PIECE if end < 0 else end
        yield sentence[start:end]
        start = end + (sentence[end] == " ")
    if start < len(sentence):
        yield sentence[start:]


def enough_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """
    Yield the blocks; if there are fewer than `FEWEST_DOCUMENTS`, cut them into about that many smaller blocks.

    In a corpus that is so small, each block counts as a document (see `FEWEST_DOCUMENTS`).
    """
    blocks = iter(blocks)
    first = list(itertools.islice(blocks, FEWEST_DOCUMENTS))
    if len(first) == FEWEST_DOCUMENTS:
        yield from itertools.chain(first, blocks)
        return
    smallest = -(-sum(len(block.sentences) for block in first) // FEWEST_DOCUMENTS)  # sentences, rounded up
    for block in first:
        start, paragraph_ends = 0, set(block.paragraph_ends)
        for end in range(1, len(block.sentences) + 1):
            size = end - start
            if end == len(block.sentences) or size == 2 * smallest or (size >= smallest and end in paragraph_ends):
                ends = [old_end - start for old_end in block.paragraph_ends if start < old_end <= end]
                yield Block(block.document, block.source, block.sentences[start:end], ends)
                start = end
