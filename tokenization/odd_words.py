"""Words that were damaged before, or that a tokenizer writes in two ways: how many of them a text holds."""

import contextlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

import regex


ENTITY = re.compile(r"&(?:[a-z]{2,8}|#\d{2,6}|#x[0-9a-f]{2,6});", re.IGNORECASE)

# The vowel sign E of Burmese stands behind its consonant in Unicode, and before it in the encoding Zawgyi.
_ZAWGYI = re.compile("(?:^|[^\u1000-\u102a\u103b-\u103f\u1039\u104e\u1050-\u1109])\u1031|[\u1060-\u1063\u1069-\u106d]")

# A tag of HTML, and what stands for a word or marks a text's end in prepared corpora: <br, <br/>, </p>, <unk>, [SEP].
_TAG = re.compile(
    r"</?(?:a|b|i|u|p|br|em|li|ol|ul|td|tr|div|img|span|strong|table|h[1-6]|ref|s|pad|unk|eos|bos)(?:/?>|$)"
    r"|<\|\w+\|>|\[(?:CLS|SEP|PAD|UNK|MASK)\]",
    re.IGNORECASE,
)

# An escape of JSON, Python or a database's export; neither \nu of LaTeX nor "\n" at the end of a string in code.
_ESCAPE = re.compile(r"\\(?:[nrt](?![a-z\"'])|u[0-9a-fA-F]{4})")

_TWO_ALPHABETS = regex.compile(r"\p{Latin}\p{Cyrillic}|\p{Cyrillic}\p{Latin}")

# Letters that look alike, of which a language has one: of Romanian the second, of Persian and Urdu, too.
_TWINS = ("ŞȘ", "şș", "ŢȚ", "ţț", "يی", "كک")

# A letter that Hebrew writes at the end of a word alone, before another letter.
_FINAL_LETTER_FIRST = re.compile("(?:^|[^א-ת])[ךםןףץ][א-ת]")

# Letters of another alphabet, or of Greek, read as Windows-1252: each is a letter with an accent.
_ACCENTS_ALONE = re.compile("[À-ÖØ-öø-ÿ]{4}")

# The encodings as which UTF-8 is read most often, and what each makes of the first byte of a character: of any, of
# a Cyrillic one, of a Latin one with an accent.
_LEAD_BYTES = {
    "cp1252": re.compile("[\u00c2-\u00f4]"),
    "latin-1": re.compile("[\u00c2-\u00f4][\u0080-\u009f]"),
    "cp1251": re.compile("[РС]"),
    "mac_roman": re.compile("√"),
}


def _count(words, is_odd):
    """How many words a function finds odd, such as the `search` of a pattern."""
    return sum(count for word, count in words.items() if is_odd(word))


def count_tags(words: Mapping[str, int]) -> int:
    """How many words hold a tag (`<br />`), a stand-in (`<unk>`) or a special token (`[SEP]`) as text."""
    return _count(words, _TAG.search)


def count_escapes(words: Mapping[str, int]) -> int:
    r"""How many words hold an escape as text: the two characters `\n` for the end of a line, `\u00e9` for é."""
    return _count(words, _ESCAPE.search)


def count_two_alphabets(words: Mapping[str, int]) -> int:
    """How many words have a Latin letter beside a Cyrillic one, which may look alike: "cлово" with a Latin c."""
    return _count(words, _TWO_ALPHABETS.search)


def count_twins(words: Mapping[str, int]) -> int:
    """How many words have the rarer of two letters that look alike, of the pair with the most of these (`_TWINS`)."""
    rarer = []
    for one, other in _TWINS:
        counts = [sum(count for word, count in words.items() if letter in word) for letter in (one, other)]
        rarer.append(min(counts))
    return max(rarer)


def count_reversed(words: Mapping[str, int]) -> int:
    """How many words of Hebrew are written backwards, as programs take them out of PDF: a final letter is first."""
    return _count(words, _FINAL_LETTER_FIRST.search)


def count_decomposed(words: Mapping[str, int]) -> int:
    """How many words NFC changes: e and an accent in place of é, as macOS writes names of files."""
    return _count(words, lambda word: not unicodedata.is_normalized("NFC", word))


def count_mojibake(words: Mapping[str, int]) -> int:
    """How many words were read in an encoding that they did not have: "fÃ¼r" is "für", and "Ïðèâåò" is "Привет"."""
    return _count(words, lambda word: _ACCENTS_ALONE.search(word) or _was_utf_8(word))


def _was_utf_8(word):
    """Whether a word is UTF-8 that was read as one of `_LEAD_BYTES`."""
    for encoding, lead_byte in _LEAD_BYTES.items():
        if lead_byte.search(word):
            with contextlib.suppress(UnicodeError):
                word.encode(encoding).decode("utf-8")
                return True
    return False


def count_entities(words: Mapping[str, int]) -> int:
    """How many words hold an entity of HTML, as `&quot;`."""
    return _count(words, ENTITY.search)


def count_zawgyi(words: Mapping[str, int]) -> int:
    """How many words of Burmese are written in Zawgyi, which looks like Unicode and has another order."""
    return _count(words, _ZAWGYI.search)


def count_capital_sigmas(words: Mapping[str, int]) -> int:
    """How many words of Greek end with a capital sigma, which in lower case is ς there, and σ to a tokenizer."""
    return _count(words, lambda word: len(word) > 1 and word.rstrip(".,;:!?»”)'").endswith("Σ"))


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
    return _count(words, re.compile(f"[{compatible}]").search)


def _is_compatible(character):
    if unicodedata.category(character) not in ("Lu", "Ll", "Lo", "Nd"):
        return False
    plain = unicodedata.normalize("NFKC", character)
    # The vowel AM of Thai and Lao is one letter, which NFKC takes apart into a mark and a letter.
    return plain != unicodedata.normalize("NFC", character) and unicodedata.category(plain[0])[0] != "M"


def count_types_of_case(words: Mapping[str, int]) -> int:
    """How many word types differ from another one in case alone."""
    return len(words) - len({word.lower() for word in words})
