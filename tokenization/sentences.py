"""Splits documents into sentences, and groups sentences into blocks."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import sentencex

from d2l_bert.tokenization.documents import Document


# Characters. A longer "sentence" is text without full stops: it is cut, or truncating pairs would lose most of it.
LONGEST_SENTENCE = 1000
CUT = f"sentences of more than {LONGEST_SENTENCE:,} characters, cut between words where there are any"

# Characters of a piece of a long sentence that is cut where there is no space. A tokenizer with `kmers:N` cuts the
# piece again, every N characters, and N divides 600 (`rules.PRE_TOKENIZER`). So a word of 1,400 letters is cut at the
# same places as if it were whole, and has the same ids in training as in use.
LONGEST_PIECE = 600

# Characters that `sentencex` gets at once. Where a quotation mark is never closed, its time grows with the square of
# them: 52 s for a megabyte, 0.01 s for these. A multiple of `LONGEST_PIECE`, as a window without a space is cut, too.
WINDOW_CHARACTERS = 27 * LONGEST_PIECE

# Ends that `sentencex` does not find: behind the full stops of Khmer and Tibetan, and behind two of Ethiopic's word
# spaces, which stand for its full stop; not where another full stop or a closing mark follows.
_KHMER_AND_TIBETAN_STOPS = "\u17d4\u17d5\u0f0d\u0f0e"
_TWO_ETHIOPIC_SPACES = "\u1361\u1361"
_ENDS_MISSED = re.compile(
    rf"(?:(?<=[{_KHMER_AND_TIBETAN_STOPS}])|(?<={_TWO_ETHIOPIC_SPACES}))(?=\s*[^\s{_KHMER_AND_TIBETAN_STOPS}»”’)])"
)

# A block ends with the paragraph that brings it to this many sentences; in a paragraph that goes on, at twice as many.
BLOCK_SENTENCES = 64

# A corpus with fewer documents has too few for a held-out split of the wanted size: each block then counts as a
# document.
FEWEST_DOCUMENTS = 20


def split_sentences(
    documents: Iterable[Document], language: str, counts: Counter
) -> Iterator[tuple[int, int, list[str]]]:
    """
    Split documents into sentences with `sentencex`, unless their lines are sentences, and yield them in blocks.

    A block is some consecutive sentences of a document: `(document, source, sentences)`, the first two as numbers from
    0. It ends at the end of a paragraph (`BLOCK_SENTENCES`); in a very long paragraph, at the end of a sentence.

    Blocks can be held out in place of documents, if these are few. A document among the first therefore begins with
    smaller blocks, so that a text of one short document has several. A long document always begins with smaller
    blocks: they must not depend on the documents before it.

    Sentences longer than `LONGEST_SENTENCE` are cut between words. Documents without a sentence get no number.

    Args:
        language: ISO 639 code of the language whose rules `sentencex` applies.
        counts: increased by the numbers of documents, paragraphs, characters, sentences, and sentences that were cut.
    """
    number = 0
    for document in documents:
        counts["documents"] += 1
        before = counts["sentences"]
        sentences_and_ends = _sentences_and_ends(document, language, counts)
        for sentences in _blocks(sentences_and_ends, is_early=number < FEWEST_DOCUMENTS):
            counts["sentences"] += len(sentences)
            yield number, document.source, sentences
        if counts["sentences"] > before:
            number += 1


def _blocks(sentences_and_ends, is_early):
    """
    The sentences of each block of a document.

    A block ends with the paragraph that brings it to `fewest` sentences; in a paragraph that goes on, at twice as
    many. `fewest` is `BLOCK_SENTENCES`, but less in the first blocks of a document that is early or long:

        sentences of the document before the block     0  4  8  100  252 and more
        fewest                                         1  2  3   26            64

    Args:
        sentences_and_ends: of `_sentences_and_ends`.
        is_early: whether the document is one of the first `FEWEST_DOCUMENTS`.
    """
    first = list(itertools.islice(sentences_and_ends, 2 * BLOCK_SENTENCES))
    is_long = len(first) == 2 * BLOCK_SENTENCES
    begins_small = is_early or is_long
    before = 0  # sentences in the blocks before this one
    sentences = []
    for sentence in itertools.chain(first, sentences_and_ends):
        fewest = min(BLOCK_SENTENCES, 1 + before // 4) if begins_small else BLOCK_SENTENCES
        is_end_of_paragraph = sentence is None
        if is_end_of_paragraph:
            is_full = len(sentences) >= fewest
        else:  # the paragraph goes on with this sentence
            is_full = len(sentences) >= 2 * fewest
        if is_full:
            yield sentences
            before += len(sentences)
            sentences = []
        if not is_end_of_paragraph:
            sentences.append(sentence)
    if sentences:
        yield sentences


def _sentences_and_ends(document, language, counts):
    """The sentences of a document, each piece of a long one as a sentence, and None at the end of each paragraph."""
    for paragraph in document.paragraphs:
        counts.update(paragraphs=1, characters=len(paragraph))
        sentences = paragraph.split("\n") if document.are_sentences else _segmented(paragraph, language)
        for sentence in sentences:
            counts[CUT] += len(sentence) > LONGEST_SENTENCE
            yield from _cut(sentence.strip())
        yield None


def _segmented(paragraph, language):
    """
    The sentences of a paragraph, found in windows of at most `WINDOW_CHARACTERS` that end between words.

    In windows of 20 characters, "It is one. It is two. It is a long third one." has these sentences:

        window                   sentences
        "It is one. It is "      "It is one. "; what follows may be unfinished, and the next window begins with it
        "It is two. It is a "    "It is two. "
        "It is a long third "    "It is a long third "; a sentence that fills a window is cut at its end
        "one."                   "one."
    """
    start = 0
    while start < len(paragraph):
        end = start + WINDOW_CHARACTERS
        if end < len(paragraph):
            last_space = paragraph.rfind(" ", start, end)
            if last_space >= 0:
                end = last_space + 1
        sentences = []
        for found in sentencex.segment(language, paragraph[start:end]):
            sentences += _ENDS_MISSED.split(found)
        if len(sentences) > 1 and end < len(paragraph):
            maybe_unfinished = sentences.pop()
            end -= len(maybe_unfinished)
        start = end
        yield from sentences


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
