"""The numbers of words of `--save_words`: read from the command line, and as the names of folders and branches."""

import re

from d2l_bert.errors import UserError


PREFIX = "chck_"  # BabyLM's names: chck_1M, chck_10M
UNITS = {"": 1, "k": 10**3, "M": 10**6}


def word_marks(entries: list[str]) -> list[int]:
    """
    The numbers of words in `save_words`, ascending: 10k is 10,000, 1M and 1_000_000 are a million.

    Raises:
        UserError: an entry is no number of words, or is not more than the entry before it.
    """
    marks = []
    for entry in entries:
        match = re.fullmatch(r"([0-9][0-9_]{0,40})([kKmM]?)", entry)
        unit = match and {"": "", "k": "k", "m": "M"}[match[2].lower()]
        words = match and int(match[1].replace("_", "")) * UNITS[unit]
        if not words or words >= 2**63:
            raise UserError(f"save_words takes numbers of words such as 10k, 1M or 1_000_000, got {entry!r:.40}")
        if marks and words <= marks[-1]:
            before = entries[len(marks) - 1]
            raise UserError(f"save_words: {entry} must be more than the {before} before it; give each once, in order")
        marks.append(words)
    return marks


def folder_name(words: int) -> str:
    """The name of a folder and of a branch, such as chck_1M, chck_10k or chck_1234."""
    unit = next(unit for unit in ("M", "k", "") if words % UNITS[unit] == 0)
    return f"{PREFIX}{words // UNITS[unit]}{unit}"


def words_of(name: str) -> int | None:
    """The number of words in the name of a folder; None for any other name."""
    match = re.fullmatch(rf"{PREFIX}(\d+)([kM]?)", name)
    return match and int(match[1]) * UNITS[match[2]]
