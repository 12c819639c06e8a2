"""`TextLayout`: how the lines of a text divide it into documents, paragraphs and sentences; finds it, and divides."""

import dataclasses
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from d2l_bert.tokenization.rules import DELETED


# Where documents end. Within a table, `file` stands for a row.
DocumentEnds = Literal["file", "blank_line", "line"]

# What the counts of a text call the characters `DELETED`.
DROPPED = "control characters (page breaks, vertical tabs), dropped"

# A file with fewer lines is one document: so few lines, as those of a poem, say too little about the others.
FEWEST_LINES = 20

# The shares of the lines with text that `find_layout` tests.
NEARLY_ALL_END = 0.8  # with a full stop at their end, where each line ends a sentence; wrapped lines have no more
LEAST_IN_PROSE = 0.1  # with a full stop anywhere, where a text holds prose
MOST_CUT = 0.5  # with a full stop where a splitter could cut them: if there are fewer, the lines are sentences

# The other numbers that it tests.
LINES_IN_BLOCK = 1.5  # on average, where lines stand in blocks
NEARLY_ALL_WITH_TEXT = 0.95  # of all lines, those with text, where empty lines do not divide the text

# Shares that `_are_wrapped` tests, and the lines that it takes to have one width.
MANY_GO_ON = 0.3  # of the lines without a full stop at their end, those that go on in the next line
MANY_ARE_FULL = 0.5  # of the lines that go on, those in which the next word would not have fit
MANY_BEGIN_ALIKE = 0.25  # of the lines behind these, those that begin with the same word
LINES_OF_ONE_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """
    How the lines of a text divide it.

    Args:
        documents: whether the text is one document, or each block of lines between empty lines is one, or each line.
        lines: whether the lines of a block are joined (`wrapped`), each is a paragraph (`paragraphs`), or each is a
            sentence of the block (`sentences`).
    """

    documents: DocumentEnds
    lines: Literal["wrapped", "paragraphs", "sentences"]

    def description(self) -> str:
        """What the counts of a text say about how it was read, such as "read whole, lines joined"."""
        documents = {"file": "read whole", "blank_line": "divided at empty lines", "line": "divided into lines"}
        lines = {"wrapped": "lines joined", "paragraphs": "a paragraph a line", "sentences": "a sentence a line"}
        return f"{documents[self.documents]}, {lines[self.lines]}"


# Full stops. These also stand within words and numbers: they end a sentence only before white space or a line's end.
_LATIN_STOPS = ".!?…"
# These end one wherever they stand: those of Chinese, Devanagari, Urdu, Arabic, Ethiopic, Burmese, Khmer, Tibetan,
# Armenian, Mongolian, Ol Chiki, Meetei.
_OTHER_STOPS = "。！？｡．।॥۔؟؞።፧፨၊။។៕།༎։᠃᱾᱿꫰꯫"
_STOPS = {*_LATIN_STOPS, *_OTHER_STOPS}
_CLOSING = " \t\"'`*_)]}>”’“‘»«›‹」』】）］〉》〕〗"  # may follow the full stop
_STOP_INSIDE = re.compile(rf"[{_LATIN_STOPS}][{re.escape(_CLOSING)}]*\s|[{_OTHER_STOPS}]")
# Stands in a line of several words: white space; in Chinese and Japanese, which have none, a comma or a full stop.
_BETWEEN_WORDS = re.compile(r"[\s，、。]")
# The first word of a line; in Chinese and Japanese, whose lines break behind any character, the first character.
_FIRST_WORD = re.compile(r"[\u2e80-\u9fff\uff00-\uffef]|\S+")
_OTHER_SPACE = re.compile(r"\s{2,}|[^\S ]")  # white space other than a single space
# A line's end that is no space: between letters of Japanese and Chinese.
_BREAK_IN_WORD = re.compile(
    r"(?<=[\u3001-\u30ff\u3400-\u9fff\uff66-\uff9f])\n(?=[\u3001-\u30ff\u3400-\u9fff\uff66-\uff9f])"
)


def find_layout(lines: Sequence[str], documents: Literal["auto"] | DocumentEnds = "auto") -> TextLayout:
    """
    The layout of a text with these lines.

    The lines are wrapped prose if at most `NEARLY_ALL_END` of them end with a full stop, at least `LEAST_IN_PROSE`
    hold one, and they end where the next word would not have fit (`_are_wrapped`).

    Where documents end, if that is not known; the first case that holds decides:

        the lines are wrapped, or fewer than `FEWEST_LINES` have text     file: the text is one document
        at least `NEARLY_ALL_END` of the lines end with a full stop:
            a block has `LINES_IN_BLOCK` or more on average               blank_line: BERT's own format
            else                                                          file
        more than `NEARLY_ALL_WITH_TEXT` of the lines have text           line: as in logs and tables
        else                                                              file

    What the lines are; the first case that holds decides:

        they are wrapped, and no documents themselves                     wrapped
        few hold a full stop where a splitter could cut them,
            as it would cut "c. acme." behind "c."                        sentences
        else                                                              paragraphs

    What these few are depends on where documents end. Of the lines with text,

        blank_line    less than `MOST_CUT` hold a full stop before their end
        line          less than `MOST_CUT` hold a full stop anywhere
        file          less than `LEAST_IN_PROSE` hold a full stop anywhere: code and tables may stand beside prose,
                      which must be split

    Args:
        lines: the lines of the text, or of its beginning, white space at their ends aside.
        documents: where documents end, if it is known.
    """
    lines = [line.strip() for line in lines]
    texts = [line for line in lines if line]
    block_count = _count_blocks(lines)
    end_with_stop = [ends_with_stop(line) for line in texts]
    has_stop_inside = [_has_stop_inside(line) for line in texts]
    share_ending = sum(end_with_stop) / max(len(texts), 1)
    count_inside = sum(has_stop_inside)
    count_anywhere = sum(at_end or inside for at_end, inside in zip(end_with_stop, has_stop_inside, strict=True))
    holds_prose = count_anywhere >= LEAST_IN_PROSE * len(texts)
    wrapped = share_ending <= NEARLY_ALL_END and holds_prose and _are_wrapped(lines)
    if documents == "auto":
        if wrapped or len(texts) < FEWEST_LINES:
            documents = "file"
        elif share_ending >= NEARLY_ALL_END:
            documents = "blank_line" if len(texts) >= LINES_IN_BLOCK * block_count else "file"
        else:
            documents = "line" if len(texts) > NEARLY_ALL_WITH_TEXT * len(lines) else "file"
    if wrapped and documents != "line":
        return TextLayout(documents, "wrapped")
    if documents == "blank_line":
        are_sentences = count_inside < MOST_CUT * len(texts)
    elif documents == "line":
        are_sentences = count_anywhere < MOST_CUT * len(texts)
    else:
        are_sentences = not holds_prose
    return TextLayout(documents, "sentences" if are_sentences else "paragraphs")


def _count_blocks(lines):
    """How many blocks of lines with text there are, between empty lines."""
    count = 0
    for before, line in itertools.pairwise(["", *lines]):
        if line and not before:
            count += 1
    return count


def ends_with_stop(line: str) -> bool:
    """Whether a line ends with a full stop."""
    return line.rstrip(_CLOSING)[-1:] in _STOPS


def _has_stop_inside(line):
    """Whether a line holds a full stop before those at its end."""
    return _STOP_INSIDE.search(line.rstrip(_LATIN_STOPS + _OTHER_STOPS + _CLOSING)) is not None


def _are_wrapped(lines):
    """
    Whether lines go on in the next line, and end where its first word would not have fit.

    A line goes on if it has several words and no full stop at its end, and the next line of the block begins with a
    letter that is no capital. Lines are wrapped if all of this holds:

    - more than `MANY_GO_ON` of the lines without a full stop at their end go on; others are headings, lists, names;
    - at least `MANY_ARE_FULL` of those that go on are full: with the next word, such a line would be wider than the
      text (`_count_full`). A file of several texts has several widths, so `LINES_OF_ONE_WIDTH` are tested at a time;
    - no word is the first in more than `MANY_BEGIN_ALIKE` of the next lines; one line more may be chance.

    Lines of logs and code go on as often, but have any length, or begin with the same word.
    """
    unfinished = 0
    going_on = []  # the lines, each with the first word of the next
    for line, following in itertools.pairwise(lines):
        if not line or not following or ends_with_stop(line):
            continue
        unfinished += 1
        if _BETWEEN_WORDS.search(line) and following[0].isalpha() and not following[0].isupper():
            going_on.append((line, _FIRST_WORD.match(following)[0]))
    if len(going_on) <= MANY_GO_ON * unfinished:
        return False
    full = 0
    for first in range(0, len(going_on), LINES_OF_ONE_WIDTH):
        part = going_on[first : first + LINES_OF_ONE_WIDTH]
        # Lines are wrapped by characters or by the columns of a terminal: the right of both finds more full lines.
        full_by_characters = _count_full(part, len)
        full_by_columns = _count_full(part, _columns)
        full += max(full_by_characters, full_by_columns)
    first_words = Counter(word for _, word in going_on)
    _, times = first_words.most_common(1)[0]
    begin_alike = times > 1 + MANY_BEGIN_ALIKE * len(going_on)
    return full >= MANY_ARE_FULL * len(going_on) and not begin_alike


def _count_full(going_on, size):
    """
    How many lines would be wider than the text, with the first word of the next.

    98 % of the lines are no longer than `nearly_longest`, as a few may stick out. The text counts as 5 % narrower than
    that: few lines end exactly at its width.

    Args:
        going_on: the lines, each with the first word of the next.
        size: how wide a string is.
    """
    lengths = sorted(size(line) for line, _ in going_on)
    nearly_longest = lengths[int(0.98 * (len(lengths) - 1))]
    width = 0.95 * nearly_longest
    with_word = [size(line) + 1 + size(word) for line, word in going_on]
    return sum(length > width for length in with_word)


def _columns(text):
    """How many columns a text takes in a terminal: two for a letter of Chinese, Japanese or Korean."""
    if text.isascii():
        return len(text)
    return len(text) + sum(unicodedata.east_asian_width(character) in "WF" for character in text)


def split_documents(
    lines: Iterable[str], layout: TextLayout, longest: int, counts: Counter
) -> Iterator[Iterator[str]]:
    """
    The paragraphs of each document, with single spaces as white space; documents without text are left out.

    Where lines are sentences, the sentences of a paragraph are separated by newlines.

    Args:
        lines: the lines of the text.
        longest: characters. A longer paragraph of several lines is cut between lines, to bound the memory.
        counts: increased by the number of control characters that are dropped.
    """
    lines = (with_single_spaces(line, longest, counts) for line in lines)
    if layout.documents == "line":
        for line in lines:
            if line:
                yield [line]
        return
    paragraphs_of_blocks = _paragraphs_of_blocks(lines, layout, longest)
    if layout.documents == "blank_line":
        yield from paragraphs_of_blocks
        return
    paragraphs = itertools.chain.from_iterable(paragraphs_of_blocks)
    first = next(paragraphs, None)
    if first is not None:  # a text without paragraphs is no document
        yield itertools.chain([first], paragraphs)


def _paragraphs_of_blocks(lines, layout, longest):
    """
    For each block of lines between empty lines, its paragraphs: each line, or all lines joined, the latter in several
    paragraphs if they are longer than `longest`. Lines are read when their paragraph is, as a block may be large.
    """
    for has_text, block in itertools.groupby(lines, key=bool):
        if not has_text:
            continue
        if layout.lines == "paragraphs":
            yield block
        elif layout.lines == "sentences":
            yield map("\n".join, grouped(block, len, longest))
        else:
            yield map(_unwrapped, grouped(block, len, longest))


def with_single_spaces(line: str, longest: int, counts: Counter) -> str:
    """A line with single spaces as white space, and none at its ends; the others as in `split_documents`."""
    # BERT deletes these characters, so that the letters beside them become one word. `str.split`, below, would split
    # there.
    line, dropped = DELETED.subn("", line)
    if dropped:
        counts[DROPPED] += dropped
    if len(line) < longest:
        return " ".join(line.split())
    return _OTHER_SPACE.sub(" ", line).strip()  # its words would take twelve times the memory of the line


def _unwrapped(lines):
    """Wrapped lines as one line; between letters of Japanese and Chinese without a space."""
    return _BREAK_IN_WORD.sub("", "\n".join(lines)).replace("\n", " ")


def grouped(items: Iterable, size: Callable[[object], int], least: int) -> Iterator[list]:
    """Lists of consecutive items, each as soon as their sizes add up to `least`; the last may be smaller."""
    group = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group = []
            total = 0
    if group:
        yield group
