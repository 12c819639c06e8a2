"""The values in the cells of a row: texts, lists, names of classes; what is wrong with one."""

import json
import re
import unicodedata

from d2l_bert.messages import explained, shortened
from d2l_bert.tokenization import tables


# The most characters of a context, or of the words of a text, both of which are read to their end in windows: more
# than most books have. Their tokens take up to 3 GB.
LONGEST_READ_WHOLE = 1 << 22

# Half of a surrogate pair, which UTF-8 cannot encode.
SURROGATE = re.compile("[\ud800-\udfff]")


# The most characters of a line that shows what was read.
LONGEST_SHOWN = 120

# A whole number as pandas writes it in a column that has an empty cell: 5.0.
WHOLE_FLOAT = re.compile(r"([+-]?[0-9]{1,15})\.0*")


class EmptyText(ValueError):
    """A row has no text where one is read."""


def check_text(text: object, place: str, way_out: str = "") -> str:
    """A text at a place of a row; raises `EmptyText` if it is empty, and another `ValueError` if it is no text."""
    way_out = f"write a text there, or take the row out{way_out}"
    if not is_filled(text):
        raise EmptyText(f"{place} is empty; {way_out}")
    if not isinstance(text, str):
        raise ValueError(f"{place} holds {type(text).__name__}, not text; {way_out}")
    return text


def json_in(cell: object, column: str) -> object:
    """
    The value of a cell; of a text that is a list or an object in JSON, as CSV has them, that list or object.

    Raises:
        ValueError: the text looks like JSON, and is none, such as a list that pandas has written.
    """
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return cell
    with explained(
        f"column {column!r:.100} holds {cell:.40}, which is not JSON",
        'write ["a", "b"], as json.dumps does, or give JSONL or Parquet with lists',
        *(ValueError, RecursionError),
    ):
        return json.loads(tables.whole_characters(cell))


def list_in(cells: dict, column: str, option: str, separator: str | None = None) -> list:
    """
    The entries of a cell: a list, also as JSON, or a text with the separator (white space) between the entries.

    Raises:
        ValueError: the cell is neither.
    """
    value = json_in(cells.get(column), column)
    if isinstance(value, str):
        return [entry for entry in value.split(separator) if entry.strip()]
    if value is not None and not isinstance(value, list):
        raise ValueError(
            f"column {column!r:.100} holds {type(value).__name__}, not a list; name another column with --{option}"
        )
    return value or []


def name_of(entry: object, column: str, classes: list[str] | None = None) -> str:
    """
    The name of a class in a cell: a string, or the number of a dataset's class.

    Args:
        classes: the names of the dataset's classes.

    Raises:
        ValueError: the entry is no name, or no number of a class; or the name has half a character.
    """
    entry = whole(entry)
    is_number = classes and isinstance(entry, int) and not isinstance(entry, bool)
    is_name = is_filled(entry) and not isinstance(entry, float | list | dict)
    if not is_name or (is_number and not 0 <= entry < len(classes)):
        raise ValueError(
            f"column {column!r:.100} holds {entry!r:.100}, which is no label; write a name or a whole number"
        )
    name = classes[entry] if is_number else str(entry).strip()
    if SURROGATE.search(name):
        raise ValueError(
            f"column {column!r:.100} has the label {ascii(name):.100}, whose half character (a surrogate "
            f"alone) cannot be written; correct it"
        )
    return unicodedata.normalize("NFC", name)  # systems write ü as one character or as two


def whole(entry: object) -> object:
    """The whole number that a float is, such as 5 of 5.0; every other value as it is."""
    if isinstance(entry, float) and abs(entry) < 1e15 and entry.is_integer():
        return int(entry)
    return entry


def check_length(characters: int, place: str) -> None:
    """Raise `ValueError` if what is read in windows has more than `LONGEST_READ_WHOLE` characters."""
    if characters > LONGEST_READ_WHOLE:
        raise ValueError(
            f"{place} has {characters:,} characters, and {LONGEST_READ_WHOLE:,} at most are read in windows; divide "
            f"it into several rows"
        )


def is_filled(value: object) -> bool:
    """Whether a cell holds more than white space."""
    return value is not None and str(value).strip() != ""


def visible(text: str) -> str:
    r"""
    Text with an escape, such as `\n` or `\u200b`, for each sign that is not seen.

    Those that join letters stay, as words of Persian and Hindi have them.
    """
    signs = []
    for sign in text:
        is_seen = sign.isprintable() or sign in "\u200c\u200d"
        signs.append(sign if is_seen else ascii(sign)[1:-1])
    return "".join(signs)


def shown_line(text: str) -> str:
    """A line that shows what was read, shortened to `LONGEST_SHOWN` characters."""
    return shortened(visible(text), LONGEST_SHOWN)


def listed(names: list[str]) -> str:
    """Names in quotes with commas between, for a message; shortened to 200 characters."""
    return shortened(", ".join(map(repr, names)), 200)
