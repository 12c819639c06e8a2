"""`Rules`: how a tokenizer normalises a text and splits it into words; chosen from what the text is made of."""

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import regex
from tokenizers import Regex, normalizers, pre_tokenizers

from d2l_bert.messages import UserError
from d2l_bert.tokenization.odd_words import (
    count_capital_sigmas,
    count_compatible,
    count_decomposed,
    count_entities,
    count_escapes,
    count_mojibake,
    count_reversed,
    count_spelled_twice,
    count_tags,
    count_twins,
    count_two_alphabets,
    count_types_of_case,
    count_zawgyi,
)


# WordPiece reads a word of more characters as `[UNK]` (`max_input_chars_per_word` in BERT's code).
LONGEST_WORD = 100

# Smaller shares, of the letters, the words or the characters, change no rule: one stray emoji decides nothing.
NOTICEABLE = 0.001

# The scripts in use today, by Unicode's names (UAX #31, tables 5 and 7).
SCRIPTS = (
    "Adlam Arabic Armenian Balinese Bamum Batak Bengali Bopomofo Canadian_Aboriginal Chakma Cham Cherokee Cyrillic "
    "Devanagari Ethiopic Georgian Greek Gujarati Gurmukhi Han Hangul Hanifi_Rohingya Hebrew Hiragana Javanese Kannada "
    "Katakana Kayah_Li Khmer Lao Latin Lepcha Limbu Lisu Malayalam Mandaic Meetei_Mayek Miao Mongolian Myanmar Newa "
    "New_Tai_Lue Nko Nyiakeng_Puachue_Hmong Ol_Chiki Oriya Osage Saurashtra Sinhala Sundanese Syloti_Nagri Syriac "
    "Tai_Le Tai_Tham Tai_Viet Tamil Telugu Thaana Thai Tibetan Tifinagh Vai Wancho Yi"
).split()

# Those that write no space between words: Chinese and Japanese, those whose lines break where a dictionary says (UAX
# #14, class SA), Tibetan, Javanese and Balinese.
SPACELESS = (
    "Han Hiragana Katakana Thai Lao Khmer Myanmar Tai_Le New_Tai_Lue Tai_Tham Tai_Viet Tibetan Javanese Balinese"
).split()

# If more than this share of a text's characters is in `SPACELESS` scripts or in words over `LONGEST_WORD`, white space
# does not say what a word is.
MOST_SPACELESS = 0.05

# If more than this share of the words has a capital letter inside (aBc), case tells words apart (benchmarks/LOG.md,
# 2026-11-27: books 0.01 %, tweets 2.6 %; SMILES 12 %, C code 18 %, base64 88 %).
MOST_MIXED_CASE = 0.03

ZERO_WIDTH_SPACE = "\u200b"
JOINERS = "\u180e\u200c\u200d"  # of Mongolian vowels; zero-width non-joiner and joiner

# What BERT's cleaning deletes, but for the joiners: a control, format or private-use character, or U+FFFD, that is
# none of those which stay.
_STAY = rf"\t\n\r{JOINERS}"
NO_CONTROLS = rf"(?![{_STAY}])[\p{{Cc}}\p{{Cf}}\p{{Co}}\uFFFD]"

# Control characters that BERT's cleaning deletes, and `str.split` splits at.
DELETED = re.compile("[\x0b\x0c\x1c-\x1f\x85]")

# What to count as words: what stands between white space, or what a tokenizer splits into pieces.
WordUnit = Literal["white space", "tokenizer"]

_RUN = re.compile(r"[^\W_]+")  # letters and digits

# `kmers:N`: the N up to 100 that divide `sentences.LONGEST_PIECE`, 600. They are 1 to 6 and 8; 10, 12 and 15; 20, 24
# and 25; 30, 40, 50 and 60; 75; 100.
PRE_TOKENIZER = re.compile(r"bert|characters|kmers:([1-68]|1[025]|2[045]|[3-6]0|75|100)")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """
    What happens to a text before WordPiece.

    Args:
        lowercase: convert to lower case.
        strip_accents: remove the nonspacing marks of the decomposed text: accents, vowel signs, tones.
        pre_tokenizer: `bert` splits at white space, punctuation and Chinese characters; `characters` also between all
            characters; `kmers:6` also into pieces of six characters that do not overlap. `kmers:100` cuts only words
            that would be `[UNK]` else.
        individual_digits: every digit is a word.
        zero_width_spaces: U+200B, the zero-width space, ends a word; else it is deleted, as in BERT.
        keep_joiners: the zero-width non-joiner (U+200C) and joiner (U+200D), and Mongolian's (U+180E), stay; else they
            are deleted, as in BERT.
        unicode_normalization: `NFC`, `NFKC` or `none`, before all else.

    Raises:
        UserError: `pre_tokenizer` is none of these.
    """

    lowercase: bool = True
    strip_accents: bool = False
    pre_tokenizer: str = "bert"
    individual_digits: bool = False
    zero_width_spaces: bool = False
    keep_joiners: bool = False
    unicode_normalization: str = "none"

    def __post_init__(self):
        if not PRE_TOKENIZER.fullmatch(self.pre_tokenizer):
            raise UserError(
                f"pre_tokenizer is bert, characters or kmers:N with N from 1 to 100 that divides 600, got "
                f"{self.pre_tokenizer!r}"
            )

    def normalizer(self) -> normalizers.Normalizer:
        """The rules' normalizer."""
        steps = []
        if self.unicode_normalization != "none":
            form = getattr(normalizers, self.unicode_normalization)
            steps.append(form())
        if self.zero_width_spaces:
            steps.append(normalizers.Replace(Regex(ZERO_WIDTH_SPACE), " "))
        if self.keep_joiners:
            steps.append(normalizers.Replace(Regex(NO_CONTROLS), ""))
        of_bert = normalizers.BertNormalizer(
            clean_text=not self.keep_joiners, strip_accents=self.strip_accents, lowercase=self.lowercase
        )
        return normalizers.Sequence([*steps, of_bert]) if steps else of_bert

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """The rules' pre-tokenizer."""
        patterns = [r"\p{Nd}"] if self.individual_digits else []
        if self.pre_tokenizer != "bert":
            length = PRE_TOKENIZER.fullmatch(self.pre_tokenizer)[1]
            patterns.append(f".{{1,{length}}}" if length else ".")
        of_bert = pre_tokenizers.BertPreTokenizer()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([of_bert, *splits]) if splits else of_bert


class RulesRecord(TypedDict):
    """The fields of `Rules`, in a file."""

    lowercase: bool
    strip_accents: bool
    pre_tokenizer: str
    individual_digits: bool
    zero_width_spaces: bool
    keep_joiners: bool
    unicode_normalization: Literal["none", "NFC", "NFKC"]


# ---------------------------------------------------------------------------------------------------------------------
# What a text is made of


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word, separated by white space, occurs in the texts."""
    return Counter(itertools.chain.from_iterable(DELETED.sub("", text).split() for text in texts))


def count_characters(words: Counter) -> dict[str, int]:
    """How often each character occurs in a text, from how often each word does."""
    characters_of_words = "".join(words).encode("utf-32-le", "surrogatepass")  # four bytes for each: its code point
    codes = np.frombuffer(characters_of_words, dtype="<u4")
    # A character counts as often as its word occurs: for "ab" three times and "c" once, the weights are 3, 3, 1.
    occurrences = np.fromiter(words.values(), dtype=float)
    lengths = np.fromiter(map(len, words), dtype=int)
    weights = np.repeat(occurrences, lengths)
    count_of_code = np.bincount(codes, weights)
    return {chr(code): int(count_of_code[code]) for code in np.flatnonzero(count_of_code)}


@functools.cache
def count_marks(text: str) -> int:
    """How many nonspacing marks the decomposed text has: accents, vowel signs, tones."""
    return sum(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", text))


def normalized(text: str, normalizer: normalizers.Normalizer | None) -> str:
    """A text as a normalizer makes it; unchanged without one."""
    return normalizer.normalize_str(text) if normalizer else text


def split_words(
    words: Counter, normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None
) -> Counter:
    """
    How often each word occurs, as a normalizer and a pre-tokenizer make words of those between white space.

    With BERT's, "[MASK]" in a text is three words: a word is one punctuation mark, one Chinese character, or a run of
    other characters without white space.

    Args:
        words: how often each word between white space occurs (`count_words`).
        normalizer: None to leave words as they are.
        splitter: the pre-tokenizer; None to leave words whole.
    """
    split = Counter()
    for word, count in words.items():
        text = normalized(word, normalizer)
        parts = [part for part, _ in splitter.pre_tokenize_str(text)] if splitter else [text]
        for part in parts:
            split[part] += count
    return split


class Contents(TypedDict):
    """
    What a text is made of.

    Of the characters:
        `long_words`: the share in words over `LONGEST_WORD` characters, as BERT's rules split words.
    Of the letters:
        `marks`: the number of nonspacing marks of the decomposed text for each letter, which may be more than 1.
        `dotless`: the share of the Turkish ones ı and İ.
        `script`: the commonest of their `SCRIPTS`; "" if they are of no such.
        `has_hangul`: whether one is a Hangul syllable, which decomposing takes apart, also if it is apart.
    Of the words, shares:
        `zero_width_spaces`: those that U+200B ends, between letters.
        `joiners`: those with one of `JOINERS` between letters; or the share of the word types that differ in joiners
            alone, whichever is larger.
        `mixed_forms`: those in the rarer of the normal forms NFC and NFD, if the two differ; or those whose commoner
            spelling NFC makes equal, whichever are more.
        `compatible_forms`, `mojibake`, `entities`, `tags`, `escapes`, `reversed`, `two_alphabets`, `twins`,
            `decomposed`, `zawgyi`, `capital_sigmas`: those that the functions of `odd_words` count.
    Of the word types, a share:
        `types_of_case`: those that differ from another in case alone.
    Of the runs of letters and digits, a share:
        `mixed_case`: those with a capital letter behind the first and a small one.
    And what to count as words:
        `word_unit`: "tokenizer" if more than `MOST_SPACELESS` of the characters are in long words or in `SPACELESS`
            scripts, else "white space" (`WordUnit`).
    """

    marks: float
    has_hangul: bool
    zero_width_spaces: float
    joiners: float
    long_words: float
    word_unit: WordUnit
    mixed_forms: float
    mixed_case: float
    dotless: float
    compatible_forms: float
    mojibake: float
    entities: float
    tags: float
    escapes: float
    reversed: float
    two_alphabets: float
    twins: float
    decomposed: float
    zawgyi: float
    capital_sigmas: float
    types_of_case: float
    script: str


def contents_of(words: Counter) -> Contents:
    """
    What a text is made of.

    Args:
        words: how often each word occurs (`count_words`).
    """
    characters = count_characters(words)
    all_characters = sum(characters.values()) or 1
    all_words = sum(words.values()) or 1
    letters = sum(count for character, count in characters.items() if character.isalpha()) or 1
    marks = sum(count * count_marks(character) for character, count in characters.items())
    scripts = count_scripts(characters)
    # Only words with a character beyond ASCII can have a zero-width space, a joiner or two normal forms.
    beyond_ascii = {word: count for word, count in words.items() if not word.isascii()}
    # A zero-width space makes two words of one between white space.
    more_words = sum(count * _between_letters(word, ZERO_WIDTH_SPACE) for word, count in beyond_ascii.items())
    in_two_forms = max(_count_rarer_form(beyond_ascii), count_spelled_twice(words))
    long_words = _characters_in_long_words(words) / all_characters
    spaceless = sum(scripts[script] for script in SPACELESS) / all_characters
    return {
        "marks": marks / letters,
        "has_hangul": any(map(_is_hangul, characters)),
        "zero_width_spaces": more_words / (all_words + more_words),
        "joiners": _share_of_joiners(beyond_ascii, words, all_words),
        "long_words": long_words,
        "word_unit": "white space" if spaceless + long_words <= MOST_SPACELESS else "tokenizer",
        "mixed_forms": in_two_forms / all_words,
        "mixed_case": _share_of_mixed_case(words),
        "dotless": (characters.get("ı", 0) + characters.get("İ", 0)) / letters,
        "compatible_forms": count_compatible(beyond_ascii) / all_words,
        "mojibake": count_mojibake(beyond_ascii) / all_words,
        "entities": count_entities(words) / all_words,
        "tags": count_tags(words) / all_words,
        "escapes": count_escapes(words) / all_words,
        "reversed": (count_reversed(beyond_ascii) if scripts["Hebrew"] else 0) / all_words,
        "two_alphabets": (count_two_alphabets(beyond_ascii) if scripts["Cyrillic"] else 0) / all_words,
        "twins": count_twins(beyond_ascii) / all_words,
        "decomposed": count_decomposed(beyond_ascii) / all_words,
        "zawgyi": (count_zawgyi(beyond_ascii) if scripts["Myanmar"] else 0) / all_words,
        "capital_sigmas": count_capital_sigmas(beyond_ascii) / all_words,
        "types_of_case": count_types_of_case(words) / max(len(words), 1),
        "script": scripts.most_common(1)[0][0] if scripts else "",
    }


def _is_hangul(character):
    """Whether a character is a Hangul syllable, or a letter of one that was decomposed."""
    return "가" <= character <= "힣" or "ᄀ" <= character <= "ᇿ"


def _characters_in_long_words(words):
    """How many characters stand in words over `LONGEST_WORD`, as BERT's rules split words."""
    long = Counter({word: count for word, count in words.items() if len(word) > LONGEST_WORD})
    of_bert = Rules()
    parts = split_words(long, of_bert.normalizer(), of_bert.splitter())
    return sum(count * len(part) for part, count in parts.items() if len(part) > LONGEST_WORD)


def _share_of_joiners(beyond_ascii, words, all_words):
    """The larger of two shares: of words with a joiner between letters, and of types that differ in joiners alone."""
    joined = sum(count * _between_letters(word, JOINERS) for word, count in beyond_ascii.items())
    share_joined = joined / all_words
    types_without_joiners = Counter(re.sub(f"[{JOINERS}]", "", word) for word in beyond_ascii)
    alike_without = sum(types for types in types_without_joiners.values() if types > 1)
    share_alike_without = alike_without / max(len(words), 1)
    return max(share_joined, share_alike_without)


def _count_rarer_form(beyond_ascii):
    """How many words are in the rarer of the normal forms NFC and NFD, of those that differ in them."""
    only_composed = 0
    only_decomposed = 0
    for word, count in beyond_ascii.items():
        is_composed = unicodedata.is_normalized("NFC", word)
        is_decomposed = unicodedata.is_normalized("NFD", word)
        if is_composed and not is_decomposed:
            only_composed += count
        elif is_decomposed and not is_composed:
            only_decomposed += count
    return min(only_composed, only_decomposed)


def _share_of_mixed_case(words):
    """The share of runs of letters and digits that are not lower, UPPER or Capital: aBc, ABc."""
    mixed = 0
    total = 0
    for word, count in words.items():
        for run in _RUN.findall(word):
            total += count
            if run not in (run.lower(), run.upper(), run.capitalize()):
                mixed += count
    return mixed / max(total, 1)


def count_scripts(characters: dict[str, int]) -> Counter:
    """How many letters and marks are of each of the `SCRIPTS`, from the number of each character."""
    letters = "".join(character for character in characters if unicodedata.category(character)[0] in "LM")
    scripts = Counter()
    # A character that several scripts share, as the long vowel sign of Hiragana and Katakana, is of no script alone
    # (`Script`). It counts for the first of those that use it (`Script_Extensions`).
    for relation in ("Script", "Script_Extensions"):
        for script in SCRIPTS:
            found = regex.findall(rf"\p{{{relation}={script}}}", letters)
            if found:
                scripts[script] += sum(characters[character] for character in found)
                letters = letters.translate(dict.fromkeys(map(ord, found)))  # without those found
    return scripts


def _between_letters(word, characters):
    """How often some of these characters stand between letters, marks or digits."""
    parts = re.split(f"[{characters}]+", word)
    count = 0
    for before, after in itertools.pairwise(parts):
        if before and after and _is_of_a_word(before[-1]) and _is_of_a_word(after[0]):
            count += 1
    return count


def _is_of_a_word(character):
    """Whether a character is a letter, a mark or a digit."""
    return unicodedata.category(character)[0] in "LMN"


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def choose_rules(
    contents: Contents,
    lowercase: bool = True,
    strip_accents: bool | Literal["auto"] = "auto",
    pre_tokenizer: str = "bert",
    individual_digits: bool = False,
    unicode_normalization: str = "none",
) -> Rules:
    """
    The rules for a text: as the options say, and else as the text needs them (`contents_of`).

    With `auto`, marks are stripped only from lower-cased text that has hardly any (`NOTICEABLE`), where they are
    foreign names, and no Hangul.
    """
    if pre_tokenizer == "bert" and contents["long_words"] > NOTICEABLE:
        pre_tokenizer = f"kmers:{LONGEST_WORD}"  # as BERT's, but words that would be [UNK] are cut
    if strip_accents == "auto":
        has_marks = contents["marks"] >= NOTICEABLE or contents["has_hangul"]
        strip_accents = lowercase and not has_marks
    return Rules(
        lowercase=lowercase,
        strip_accents=strip_accents,
        pre_tokenizer=pre_tokenizer,
        individual_digits=individual_digits,
        unicode_normalization=unicode_normalization,
        zero_width_spaces=contents["zero_width_spaces"] > NOTICEABLE,
        keep_joiners=contents["joiners"] > NOTICEABLE,
    )
