"""Documents to sentences: paragraphs cleaned, sentences found, blocks of them."""

import dataclasses
import hashlib
import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

import sentencex

from d2l_bert.tokenization.documents import Document


# A "sentence" that is longer, in characters, is a text without full stops. Cut, none of it is lost to truncation.
LONGEST_SENTENCE = 1000

# Sentences in a block of a document, at least.
BLOCK_SENTENCES = 64

# With fewer documents than this, "another document" says little and a held-out split takes too much or too little:
# their blocks then count as documents themselves.
FEWEST_DOCUMENTS = 20


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """What to do to paragraphs before anything else; nothing by default."""

    unicode_normalization: str = "none"
    min_paragraph_characters: int = 0
    drop_duplicate_paragraphs: bool = False


def clean(documents: Iterable[Document], cleaning: Cleaning, counts: Counter) -> Iterator[Document]:
    """
    Documents with their paragraphs cleaned, as they are read.

    Args:
        counts: gets how many paragraphs there were, and how many each rule changed or dropped. Of duplicates the first
            stays; those dropped are found by a hash of 8 bytes, some 70 bytes of memory for every paragraph.
    """
    seen = set()
    for document in documents:
        yield dataclasses.replace(document, paragraphs=_cleaned(document.paragraphs, cleaning, counts, seen))


def _cleaned(paragraphs, cleaning, counts, seen):
    for paragraph in paragraphs:
        counts["paragraphs"] += 1
        if cleaning.unicode_normalization != "none":
            normal = unicodedata.normalize(cleaning.unicode_normalization, paragraph)
            counts["normalized"] += normal != paragraph
            paragraph = normal
        if len(paragraph) < cleaning.min_paragraph_characters:
            counts["too_short"] += 1
            continue
        if cleaning.drop_duplicate_paragraphs:
            digest = hashlib.blake2b(paragraph.encode(errors="surrogatepass"), digest_size=8).digest()
            key = int.from_bytes(digest, "big")
            if key in seen:
                counts["duplicates"] += 1
                continue
            seen.add(key)
        yield paragraph


@dataclasses.dataclass
class Block:
    """
    Some paragraphs of a document in sentences.

    `document` is the document's number, from 0, `source` its source's. `paragraph_ends` holds the number of sentences
    up to the end of each paragraph that ends in the block.
    """

    document: int
    source: int
    name: str
    sentences: list[str]
    paragraph_ends: list[int]


def split_sentences(
    documents: Iterable[Document], language: str = "en", counts: Counter | None = None
) -> Iterator[Block]:
    """
    Documents in sentences, as `sentencex` finds them for `language` (an ISO code), a block at a time.

    A block ends with a paragraph, or, in a paragraph that goes on and on, with a sentence. Documents without a
    sentence are left out, and not counted. What is longer than `LONGEST_SENTENCE` is cut between two words; `counts`
    gets how many there were.
    """
    counts = Counter() if counts is None else counts
    number = 0
    for document in documents:
        found = 0
        for sentences, paragraph_ends in _blocks(document.paragraphs, language, counts):
            yield Block(number, document.source, document.name, sentences, paragraph_ends)
            found = 1
        number += found


def _blocks(paragraphs, language, counts):
    sentences, paragraph_ends = [], []
    for paragraph in paragraphs:
        for sentence in sentencex.segment(language, paragraph):
            counts["long_sentences"] += len(sentence) > LONGEST_SENTENCE
            for piece in _bounded(sentence.strip()):
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


def _bounded(sentence):
    start = 0
    while len(sentence) - start > LONGEST_SENTENCE:
        end = sentence.rfind(" ", start + 1, start + LONGEST_SENTENCE)
        end = start + LONGEST_SENTENCE if end < 0 else end
        yield sentence[start:end]
        start = end + (sentence[end] == " ")
    if start < len(sentence):
        yield sentence[start:]


def enough_blocks(blocks: Iterable[Block]) -> Iterator[Block]:
    """Pass blocks on; but cut fewer than `FEWEST_DOCUMENTS` of them into about as many, for they will be documents."""
    blocks = iter(blocks)
    first = list(itertools.islice(blocks, FEWEST_DOCUMENTS))
    if len(first) == FEWEST_DOCUMENTS:
        yield from itertools.chain(first, blocks)
        return
    least = -(-sum(len(block.sentences) for block in first) // FEWEST_DOCUMENTS)
    number = 0
    for block in first:
        start, paragraph_ends = 0, set(block.paragraph_ends)
        for end in range(1, len(block.sentences) + 1):
            size = end - start
            if end == len(block.sentences) or size == 2 * least or (size >= least and end in paragraph_ends):
                inside = [stop - start for stop in block.paragraph_ends if start < stop <= end]
                yield Block(number, block.source, block.name, block.sentences[start:end], inside)
                start, number = end, number + 1
