"""`SeenLines`: some lines of a text as they stand in its files, and what recurs in them, for a person to look at."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from d2l_bert.messages import shortened
from d2l_bert.tokenization.rules import DELETED


# The most lines that are kept of a file (or of all rows of a table), and of all files of a source.
LINES_OF_A_FILE = 500
LINES_OF_A_SOURCE = 20_000

# Characters that are kept of each end of a long line.
LONGEST_END = 500

# What recurs is shown if at least 5 lines and 2 % of all have it.
# If it is only a word at their beginning or end, as "the" in a book or "INFO" in a log, 20 % of all must have it.
NOTICED = 0.02
FEWEST = 5
NOTICED_WORD = 0.2

# The share of lines with two words that the tokenizer makes one from which this is said. It is smaller, as such words
# are damaged.
NOTICED_GLUED = 0.001

# Characters that are shown of what lines have in common.
LONGEST_SHOWN = 30

_NUMBER = re.compile(r"\d+")
# What begins and ends lines of prose: a word, with or without punctuation behind it, and quotation marks or a dash.
_SIGNS = r"[.,;:!?…\"'“”‘’«»„‹›()\[\]—–-]*"
_ORDINARY = re.compile(rf"{_SIGNS}(?:[^\W\d_]|['’])*{_SIGNS}")
# The signs, or the tag, with which a line begins or ends.
_SIGNS_BEFORE = re.compile(r"</?\w[\w:-]*|[^\w\s]+")
_SIGNS_BEHIND = re.compile(r"(?:</?\w[\w:-]*>|[^\w\s]+)$")
_HYPHEN_AT_END = re.compile(r"[^\W\d_][-\u00ad\u2010]\s*$")
_GLUED = re.compile(rf"\w{DELETED.pattern}+\w")


class SeenLines:
    """Some lines of a source, spread evenly over the beginning of each of its files."""

    def __init__(self):
        self.lines = []
        self.joined = 0  # lines that are joined with the next
        self.hyphens = 0  # of these, those that end with a letter and a hyphen

    def add(self, lines: Sequence[str], are_joined: bool) -> None:
        """
        Keep some of the lines of a file's beginning.

        Args:
            are_joined: whether each line is read as one with the next (`TextLayout`).
        """
        room = min(LINES_OF_A_FILE, LINES_OF_A_SOURCE - len(self.lines))
        if room <= 0 or not lines:
            return
        step = -(-len(lines) // room)
        kept = [_without_middle(line) for line in lines[::step]]
        self.lines += kept
        if are_joined:
            self.joined += len(kept)
            self.hyphens += sum(_HYPHEN_AT_END.search(line) is not None for line in kept)


def _without_middle(line):
    return line if len(line) <= 2 * LONGEST_END else f"{line[:LONGEST_END]} {line[-LONGEST_END:]}"


def describe_lines(sources: Iterable[SeenLines]) -> list[str]:
    """
    What a person should know of the lines of a text, the most frequent first, each in a few words.

    Shown are beginnings, ends and whole lines that come again and again, lines without a letter, words that are
    divided by a hyphen at the end of a line, and words that a control character keeps apart. A number counts as any
    other number: "1." and "27." are one beginning. Prose has few of these, markup and tables have many.
    """
    sources = list(sources)
    lines = [line for source in sources for line in source.lines]
    texts = [line.strip() for line in lines]
    return [*_hyphens(sources), *_glued_words(lines), *_recurring([text for text in texts if text])]


def _hyphens(sources) -> Iterator[str]:
    joined = sum(source.joined for source in sources)
    hyphens = sum(source.hyphens for source in sources)
    if hyphens >= FEWEST and hyphens >= NOTICED * joined:
        yield f"{_share(hyphens, joined)} end with a hyphen, and are joined with a space: a divided word stays divided"


def _glued_words(lines) -> Iterator[str]:
    glued = [found[0] for line in lines if (found := _GLUED.search(line))]
    if glued and len(glued) >= NOTICED_GLUED * len(lines):
        sign = DELETED.search(glued[0])[0]
        yield (
            f"{_share(len(glued), len(lines))} hold a control character such as {ascii(sign)[1:-1]} between words, "
            f"which is dropped: put a space there"
        )


def _recurring(lines):
    """
    What recurs in lines without white space at their ends, the most frequent first.

    Lines are compared by their shapes, in which 0 stands for any number. What describes no other lines than an entry
    before it is left out.
    """
    least = max(FEWEST, NOTICED * len(lines))
    shapes = [_NUMBER.sub("0", line) for line in lines]
    found = [*_equal_lines(lines, shapes, least), *_without_letter(lines, shapes, least)]
    found += _alike(lines, shapes, least, "begin with", 0, _common_beginning)
    found += _alike(lines, shapes, least, "end with", -1, _common_end)
    found.sort(key=lambda entry: entry.count, reverse=True)
    described = set()
    for entry in found:
        if not entry.shapes <= described:
            described |= entry.shapes
            yield f"{_share(entry.count, len(lines))} {entry.says}"


@dataclass(frozen=True)
class _Recurring:
    """How many lines have something in common, what it is, and the shapes of these lines."""

    count: int
    says: str
    shapes: set[str]


def _equal_lines(lines, shapes, least):
    """The lines with letters that stand there again and again, but for their numbers."""
    first_of = dict(zip(reversed(shapes), reversed(lines), strict=True))
    for shape, count in Counter(shapes).items():
        if count >= least and any(map(str.isalpha, shape)):
            line = first_of[shape]
            numbers = ", with any number" if _NUMBER.search(line) else ""
            yield _Recurring(count, f"are {_quoted(line)}{numbers}", {shape})


def _without_letter(lines, shapes, least):
    """The lines without a letter, such as numbers of pages, times and rules."""
    without = [(line, shape) for line, shape in zip(lines, shapes, strict=True) if not any(map(str.isalpha, line))]
    if len(without) >= least:
        yield _Recurring(
            len(without), f"have no letter, such as {_quoted(without[0][0])}", {shape for _, shape in without}
        )


def _alike(lines, shapes, least, says, place, common):
    """
    The lines that begin (place 0) or end (place -1) with the same word or signs, and all that they have in common
    there.
    """
    groups = defaultdict(list)
    for line, shape in zip(lines, shapes, strict=True):
        groups[_signs_or_word(shape.split()[place], place)].append((line, shape))
    for word, group in groups.items():
        fewest = max(least, NOTICED_WORD * len(lines)) if _ORDINARY.fullmatch(word) else least
        if len(group) < fewest:
            continue
        shared = common([line for line, _ in group]).strip()
        what = _quoted(shared) if shared else f"a number, such as {_quoted(group[0][0].split()[place])}"
        yield _Recurring(len(group), f"{says} {what}", {shape for _, shape in group})


def _signs_or_word(word, place):
    """Of `<p>Anna` the `<p`, of `Anna.</p>` the `</p>`; a word whose signs there are ordinary as it is."""
    signs = _SIGNS_BEFORE.match(word) if place == 0 else _SIGNS_BEHIND.search(word)
    return signs[0] if signs and not _ORDINARY.fullmatch(signs[0]) else word


def _common_beginning(lines):
    return os.path.commonprefix(lines)[:LONGEST_SHOWN]


def _common_end(lines):
    backwards = os.path.commonprefix([line[::-1] for line in lines])
    return backwards[:LONGEST_SHOWN][::-1]


def _share(count, total):
    share = count / total
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _quoted(text):
    return f"`{shortened(text, LONGEST_SHOWN)}`"
