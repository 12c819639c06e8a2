"""Words that were damaged before, or that a tokenizer writes in two ways: how many of them a text holds."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping


ENTITY = re.compile(r"&(?:[a-z]{2,8}|#\d{2,6}|#x[0-9a-f]{2,6});", re.IGNORECASE)

# The vowel sign E of Burmese stands behind its consonant in Unicode, and before it in the encoding Zawgyi.
_ZAWGYI = re.compile("(?:^|[^\u1000-\u102a\u103b-\u103f\u1039\u104e\u1050-\u1109])\u1031|[\u1060-\u1063\u1069-\u106d]")

# What Windows-1252 makes of the first byte of a character of UTF-8.
_LEAD_BYTE = re.compile("[\u00c2-\u00f4]")


def count_mojibake(words: Mapping[str, int]) -> int:
    """How many words are UTF-8 that was read as Windows-1252: "fÃ¼r" is "für"."""
    return sum(count for word, count in words.items() if _LEAD_BYTE.search(word) and _repaired(word) is not None)


def _repaired(word):
    """A word as it was before it was read as Windows-1252; None if it was not."""
    try:
        return word.encode("cp1252").decode("utf-8")
    except UnicodeError:
        return None


def count_entities(words: Mapping[str, int]) -> int:
    """How many words hold an entity of HTML, as `&quot;`."""
    return sum(count for word, count in words.items() if "&" in word and ENTITY.search(word))


def count_zawgyi(words: Mapping[str, int]) -> int:
    """How many words of Burmese are written in Zawgyi, which looks like Unicode and has another order."""
    return sum(count for word, count in words.items() if _ZAWGYI.search(word))


def count_capital_sigmas(words: Mapping[str, int]) -> int:
    """How many words of Greek end with a capital sigma, which in lower case is ς there, and σ to a tokenizer."""
    found = 0
    for word, count in words.items():
        if "Σ" in word and len(word) > 1 and word.rstrip(".,;:!?»”)'").endswith("Σ"):
            found += count
    return found


def count_spelled_twice(words: Mapping[str, int]) -> int:
    """
    How many words NFC makes equal to another word of the text: of each such group, all but the commonest spelling.
    """
    spellings = {}
    for word, count in words.items():
        if word.isascii():
            continue
        normal = unicodedata.normalize("NFC", word)
        if word != normal:
            spellings.setdefault(normal, Counter())[word] += count
    more = 0
    for normal, counts in spellings.items():
        in_normal_form = words.get(normal, 0)
        more += in_normal_form + counts.total() - max(in_normal_form, *counts.values())
    return more


def count_compatible(words: Mapping[str, int]) -> int:
    """How many words hold a letter or a digit that NFKC replaces, and NFC does not: ligatures, full width."""
    compatible = "".join(character for character in set("".join(words)) if _is_compatible(character))
    if not compatible:
        return 0
    holds_one = re.compile(f"[{compatible}]").search
    return sum(count for word, count in words.items() if holds_one(word))


def _is_compatible(character):
    if unicodedata.category(character) not in ("Lu", "Ll", "Lo", "Nd"):
        return False
    return unicodedata.normalize("NFKC", character) != unicodedata.normalize("NFC", character)


def count_types_of_case(words: Mapping[str, int]) -> int:
    """How many word types differ from another one in case alone."""
    return len(words) - len({word.lower() for word in words})
