"""Words of others in Markdown, in code and in shell commands: they show as they are, and become no markup."""

import json
import re
import shlex

from d2l_bert.messages import shortened


# Characters that show nothing, or turn the order of those beside them: control characters, marks of the direction of
# writing (Unicode's annex 9), separators of lines, halves of characters (which no file in UTF-8 can hold), and
# Unicode's tag characters, invisible copies of ASCII.
HIDDEN = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff"
    "\U000e0000-\U000e007f]"
)

# The most characters of a name or a text that a card shows.
MOST_SHOWN = 1000

# A token such as [MASK] is a link only where a line `[MASK]: address` or brackets with an address follow.
TOKEN = r"\[[A-Za-z0-9]+\](?![(\[:])"

# What CommonMark and GitHub's extensions take for emphasis, code, links, pictures, tags, entities, formulas, words
# that are struck out, cells, the end of a heading, and addresses that become links of their own. `_` inside a word is
# no emphasis.
MARKUP = re.compile(
    rf"{TOKEN}|[\\`*\[\]<|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|#$|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):",
    re.IGNORECASE,
)


def shown(text: object) -> str:
    """Text in one line, cut if it is long; characters that show nothing are written as escapes, such as `\\u202e`."""
    return HIDDEN.sub(_escape, shortened(" ".join(str(text).split()), MOST_SHOWN))


def cell(text: object) -> str:
    """Text in one line that Markdown shows as it is: in a sentence, a heading, a caption or a cell of a table."""
    return MARKUP.sub(_inert, shown(text))


def code(text: object, in_table: bool = True) -> str:
    """
    Text in one line as code.

    Args:
        in_table: whether it stands in a cell of a table, where a sign for the next cell is escaped even in code.
    """
    line = shown(text)
    if in_table and "\\|" in line:  # readers of Markdown differ in which of the two signs such a backslash escapes
        return f"<code>{cell(line)}</code>"
    fence = "`" * (1 + _longest_run(line))
    space = " " if "`" in line or not line else ""
    content = line.replace("|", "\\|") if in_table else line
    return f"{fence}{space}{content}{space}{fence}"


def fenced(language: str, text: str) -> str:
    """A block of code, whose fences are longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + _longest_run(text))
    return f"{fence}{language}\n{text}\n{fence}"


def quoted(value: str | float) -> str:
    """Text or a number as a literal of Python, JavaScript and JSON."""
    return HIDDEN.sub(_escape, json.dumps(value, ensure_ascii=False))


def shell_words(words: list[str]) -> str:
    """A command of the shell in one line, each word quoted."""
    return " ".join(_shell_word(word) for word in words)


def authored(text: str) -> str:
    """Markdown that the maker of a release has written: without HTML, and without pictures from elsewhere."""
    return re.sub(r"!\[(?![^\[\]]*\]\([\w.-]+\))", r"!\\[", text.replace("<", "&lt;"))


# The first line of a block of code; after backticks, which may also begin a span of code, the line has no other.
FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")


def without_code(text: str) -> str:
    """
    Markdown without its blocks of code between fences, and without its spans of code between backticks.

    The time grows with the length of the text alone: one pattern for both would look for the end of each run of
    backticks again.
    """
    kept = []
    paragraph = []
    fence = ""
    for line in text.split("\n"):
        opening = FENCE.match(line)
        if fence:
            if _ends(line, fence):
                fence = ""
        elif opening or not line.strip():  # a span of code ends with its paragraph
            kept.append(_without_spans("\n".join(paragraph)))
            paragraph = []
            fence = opening[1] if opening else ""
        else:
            paragraph.append(line)
    return "\n".join([*kept, _without_spans("\n".join(paragraph))])


def _ends(line, fence):
    """Whether a line ends a block of code that this fence began."""
    marks = line.strip()
    return len(marks) >= len(fence) and set(marks) == {fence[0]} and not line.startswith("    ")


def _without_spans(text):
    """A paragraph without its spans of code: each from a run of backticks to the next one of the same length."""
    runs = list(re.finditer(r"(?<!\\)(\\*)(`+)", text))  # with the backslashes before them
    ends = _next_of_same_length(runs)
    kept = []
    place = 0  # in the text, behind the last span
    for number, run in enumerate(runs):
        is_in_a_span = run.start(2) < place
        is_escaped = len(run[1]) % 2 == 1
        end = ends[number]
        if is_in_a_span or is_escaped or end is None:
            continue
        kept.append(text[place : run.start(2)])
        place = end.end()
    return "".join([*kept, text[place:]])


def _next_of_same_length(runs):
    """Of each run of backticks the next one of the same length, or None."""
    ends = [None] * len(runs)
    last_of = {}
    for number in reversed(range(len(runs))):
        length = len(runs[number][2])
        ends[number] = last_of.get(length)
        last_of[length] = runs[number]
    return ends


def _inert(sign):
    if sign[0].startswith("[") and sign[0] != "[":
        return sign[0]  # a token
    # A backslash as an entity: two of them before a bracket would be a formula on the Hub.
    return "&#92;" if sign[0] == "\\" else f"\\{sign[0]}"


def _shell_word(word):
    if not HIDDEN.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    escaped = HIDDEN.sub(lambda sign: f"\\U{ord(sign[0]):08x}", escaped)
    return f"$'{escaped}'"


def _escape(character):
    """The character as JSON, JavaScript and Python's text write it, beyond the first 65,536 in two halves."""
    if ord(character[0]) > 0xFFFF:
        return json.dumps(character[0])[1:-1]
    return f"\\u{ord(character[0]):04x}"


def _longest_run(text):
    return max(map(len, re.findall("`+", text)), default=0)
