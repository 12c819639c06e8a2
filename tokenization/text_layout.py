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
Documents = Literal["file", "blank_line", "line"]

# A file with fewer lines is one document: so few lines, as those of a poem, say too little about the others.
FEWEST_LINES = 20


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """
    How the lines of a text divide it.

    Args:
        documents: whether the text is one document, or each block of lines between empty lines is one, or each line.
        lines: whether the lines of a block are joined (`wrapped`), each is a paragraph (`paragraphs`), or each is a
            sentence of the block (`sentences`).
    """

    documents: Documents
    lines: Literal["wrapped", "paragraphs", "sentences"]

    def description(self) -> str:
        """What the counts of a text say about how it was read, such as "read whole, lines joined"."""
        documents = {"file": "read whole", "blank_line": "divided at empty lines", "line": "divided into lines"}
        lines = {"wrapped": "lines joined", "paragraphs": "a paragraph a line", "sentences": "a sentence a line"}
        return f"{documents[self.documents]}, {lines[self.lines]}"


# Full stops: those that also stand within words and numbers end a sentence only before white space or a line's end.
_LATIN_STOPS = ".!?…"
# Chinese, Devanagari, Urdu, Arabic, Ethiopic, Burmese, Khmer, Tibetan, Armenian, Mongolian, Ol Chiki, Meetei.
_OTHER_STOPS = "。！？｡．।॥۔؟؞።፧፨၊။។៕།༎։᠃᱾᱿꫰꯫"
_STOPS = {*_LATIN_STOPS, *_OTHER_STOPS}
_CLOSING = " \t\"'`*_)]}>”’“‘»«›‹」』】）］〉》〕〗"  # may follow the full stop
_STOP_INSIDE = re.compile(rf"[{_LATIN_STOPS}][{re.escape(_CLOSING)}]*\s|[{_OTHER_STOPS}]")
# Lines of Chinese and Japanese, which have no spaces, break behind any character.
_SPACE = re.compile(r"[\s，、。]")
_SPACES = re.compile(r"\s{2,}|[^\S ]")  # white space other than a single space
_FIRST_WORD = re.compile(r"[\u2e80-\u9fff\uff00-\uffef]|\S+")
# A line's end that is no space: between letters of Japanese and Chinese.
_BREAK_IN_WORD = re.compile(
    r"(?<=[\u3001-\u30ff\u3400-\u9fff\uff66-\uff9f])\n(?=[\u3001-\u30ff\u3400-\u9fff\uff66-\uff9f])"
)


def find_layout(lines: Sequence[str], documents: Literal["auto"] | Documents = "auto") -> TextLayout:
    """
    The layout of a text with these lines.

    - Wrapped prose: many lines do not end a sentence, and end where the next word would not have fit. The text is one
      document.
    - Nearly all lines end a sentence, and there are several in a block: BERT's own format, a document for each block.
    - Few lines end a sentence, and few are empty, as in logs and tables: each line is a document.
    - Any other text is one document.

    Lines that are not wrapped are sentences if few of them have a full stop where a splitter could cut them, as it
    would cut "c. acme."; else they are paragraphs. Few are:

    - where each block is a document, less than half with a full stop before their end;
    - where each line is a document, less than half with a full stop anywhere;
    - where the text is one document, less than 10 % with a full stop anywhere: code and tables may stand beside prose,
      which must be split.

    Args:
        lines: the lines of the text, or of its beginning, white space at their ends aside.
        documents: where documents end, if it is known.
    """
    lines = [line.strip() for line in lines]
    texts = [line for line in lines if line]
    block_count = sum(has_text for has_text, _ in itertools.groupby(lines, key=bool))
    ends_with_stop = [_ends_with_stop(line) for line in texts]
    has_stop_inside = [_has_stop_inside(line) for line in texts]
    share_ending = sum(ends_with_stop) / max(len(texts), 1)
    count_inside = sum(has_stop_inside)
    count_anywhere = sum(at_end or inside for at_end, inside in zip(ends_with_stop, has_stop_inside, strict=True))
    wrapped = share_ending <= 0.8 and count_anywhere >= 0.1 * len(texts) and _are_wrapped(lines)
    if documents == "auto":
        if wrapped or len(texts) < FEWEST_LINES:
            documents = "file"
        elif share_ending >= 0.8:
            documents = "blank_line" if len(texts) >= 1.5 * block_count else "file"
        else:
            documents = "line" if len(texts) > 0.95 * len(lines) else "file"
    if wrapped and documents != "line":
        return TextLayout(documents, "wrapped")
    if documents == "blank_line":
        are_sentences = count_inside < 0.5 * len(texts)
    elif documents == "line":
        are_sentences = count_anywhere < 0.5 * len(texts)
    else:
        are_sentences = count_anywhere < 0.1 * len(texts)
    return TextLayout(documents, "sentences" if are_sentences else "paragraphs")


def _ends_with_stop(line):
    """Whether a line ends with a full stop."""
    return line.rstrip(_CLOSING)[-1:] in _STOPS


def _has_stop_inside(line):
    """Whether a line holds a full stop before its end."""
    return _STOP_INSIDE.search(line.rstrip(_LATIN_STOPS + _OTHER_STOPS + _CLOSING)) is not None


def _are_wrapped(lines):
    """
    Whether the lines of a block go on in the next line, and end where its first word would not have fit.

    A line goes on if the next begins with a letter that is no capital. In wrapped prose 30 % of the lines without a
    full stop at their end do, the others are headings, lists and names. Half of those that go on are full: with the
    next word, such a line would be longer than nearly all of the hundred about it, as a file of several texts has
    several widths. Lines of logs and code go on as often, but have any length, or begin with the same word.
    """
    unfinished = 0
    going_on = []  # the lines, each with the first word of the next
    for line, following in itertools.pairwise(lines):
        if not line or not following or _ends_with_stop(line):
            continue
        unfinished += 1
        if _SPACE.search(line) and following[0].isalpha() and not following[0].isupper():
            going_on.append((line, _FIRST_WORD.match(following)[0]))
    if len(going_on) <= 0.3 * unfinished:
        return False
    full = 0
    for first in range(0, len(going_on), 100):
        part = going_on[first : first + 100]
        full += max(_count_full(part, len), _count_full(part, _columns))
    first_words = Counter(word for _, word in going_on)
    _, times = first_words.most_common(1)[0]
    begin_alike = times > 1 + 0.25 * len(going_on)
    return full >= 0.5 * len(going_on) and not begin_alike


def _count_full(going_on, size):
    """
    How many lines would be wider than the text, with the first word of the next.

    98 % of the lines are no longer than `nearly_longest`, as a few may stick out. The text counts as 5 % narrower than
    that: few lines end exactly at its width.
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


def split_documents(lines: Iterable[str], layout: TextLayout, longest: int) -> Iterator[Iterator[str]]:
    """
    The paragraphs of each document, with single spaces as white space; documents without text are left out.

    Where lines are sentences, the sentences of a paragraph are separated by newlines.

    Args:
        lines: the lines of the text.
        longest: characters. A longer paragraph of several lines is cut between lines, to bound the memory.
    """
    lines = (_with_single_spaces(line, longest) for line in lines)
    if layout.documents == "line":
        yield from ([line] for line in lines if line)
        return
    blocks = (block for has_text, block in itertools.groupby(lines, key=bool) if has_text)
    if layout.lines != "paragraphs":
        join = _unwrapped if layout.lines == "wrapped" else "\n".join
        blocks = (map(join, grouped(block, len, longest)) for block in blocks)
    if layout.documents == "blank_line":
        yield from blocks
    else:
        paragraphs = itertools.chain.from_iterable(blocks)
        if (first := next(paragraphs, None)) is not None:
            yield itertools.chain([first], paragraphs)


def _with_single_spaces(line, longest):
    """A line with single spaces as white space, and none at its ends; `longest` as in `split_documents`."""
    line = DELETED.sub("", line)  # the split at white space would keep apart what BERT joins
    if len(line) < longest:
        return " ".join(line.split())
    return _SPACES.sub(" ", line).strip()  # its words would take twelve times the memory of the line


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
