"""`Rules`: how a tokenizer normalises a text and splits it into words; chosen from what the text is made of."""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Regex, normalizers, pre_tokenizers

from d2l_bert.errors import UserError


# WordPiece reads a word of more characters as `[UNK]` (`max_input_chars_per_word` in BERT's code).
LONGEST_WORD = 100

# Smaller shares, of the letters, the words or the characters, change no rule: one stray emoji decides nothing.
NOTICEABLE = 0.001

# Scripts that write no space between words, as `unicodedata.name` begins.
SPACELESS = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE"}

# Of the characters of a text, in `SPACELESS` scripts or in words over `LONGEST_WORD`: with more, white space does not
# say what a word is.
MOST_SPACELESS = 0.05

# Of the words, with a capital letter inside (aBc): with more, case tells words apart (benchmarks/LOG.md, 2026-11-27:
# books 0.01 %, tweets 2.6 %; SMILES 12 %, C code 18 %, base64 88 %).
MOST_MIXED_CASE = 0.03

ZERO_WIDTH_SPACE = "\u200b"
JOINERS = "\u180e\u200c\u200d"  # of Mongolian vowels; zero-width non-joiner and joiner

# What BERT's cleaning deletes, but for the joiners.
NO_CONTROLS = rf"(?![\t\n\r{JOINERS}])[\p{{Cc}}\p{{Cf}}\p{{Co}}\uFFFD]"

# Control characters that BERT's cleaning deletes, and `str.split` splits at.
DELETED = re.compile("[\x0b\x0c\x1c-\x1f\x85]")

PRE_TOKENIZER = re.compile(r"bert|characters|kmers:([1-9][0-9]?)")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """
    What happens to a text before WordPiece.

    Args:
        lowercase: convert to lower case.
        strip_accents: remove the nonspacing marks of the decomposed text: accents, vowel signs, tones.
        pre_tokenizer: `bert` splits at white space, punctuation and Chinese characters; `characters` also between all
            characters; `kmers:6` also into pieces of six characters that do not overlap.
        individual_digits: every digit is a word.
        zero_width_spaces: U+200B ends a word; else it is deleted, as in BERT.
        keep_joiners: the zero-width non-joiner (U+200C) and joiner (U+200D), and Mongolian's (U+180E), stay; else they
            are deleted, as in BERT.
        cut_long_words: words over `LONGEST_WORD` characters are cut into pieces of this length; else they are `[UNK]`.
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
    cut_long_words: bool = False
    unicode_normalization: str = "none"

    def __post_init__(self):
        if not PRE_TOKENIZER.fullmatch(self.pre_tokenizer):
            raise UserError(
                f"pre_tokenizer is bert, characters or kmers:N with N from 1 to 99, got {self.pre_tokenizer!r}"
            )

    def is_bert(self) -> bool:
        """Whether a `BertTokenizer` has these rules: whether they are BERT's own, but for case and accents."""
        return self == Rules(lowercase=self.lowercase, strip_accents=self.strip_accents)

    def normalizer(self) -> normalizers.Normalizer:
        """The rules' normalizer."""
        parts = [] if self.unicode_normalization == "none" else [getattr(normalizers, self.unicode_normalization)()]
        if self.zero_width_spaces:
            parts.append(normalizers.Replace(Regex(ZERO_WIDTH_SPACE), " "))
        if self.keep_joiners:
            parts.append(normalizers.Replace(Regex(NO_CONTROLS), ""))
        of_bert = normalizers.BertNormalizer(
            clean_text=not self.keep_joiners, strip_accents=self.strip_accents, lowercase=self.lowercase
        )
        return normalizers.Sequence([*parts, of_bert]) if parts else of_bert

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """The rules' pre-tokenizer."""
        patterns = [r"\p{Nd}"] if self.individual_digits else []
        if self.pre_tokenizer == "characters":
            patterns.append(".")
        elif kmers := PRE_TOKENIZER.fullmatch(self.pre_tokenizer)[1]:
            patterns.append(f".{{1,{kmers}}}")
        elif self.cut_long_words:
            patterns.append(f".{{1,{LONGEST_WORD}}}")
        of_bert = pre_tokenizers.BertPreTokenizer()
        if not patterns:
            return of_bert
        return pre_tokenizers.Sequence(
            [of_bert, *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns)]
        )

    def __str__(self):
        parts = {
            "lower case" if self.lowercase else "case kept": True,
            "accents stripped" if self.strip_accents else "accents and marks kept": True,
            {"bert": "", "characters": "single characters"}.get(self.pre_tokenizer, self.pre_tokenizer): True,
            "single digits": self.individual_digits,
            "U+200B ends a word": self.zero_width_spaces,
            "joiners kept": self.keep_joiners,
            f"words over {LONGEST_WORD} characters cut": self.cut_long_words,
            self.unicode_normalization: self.unicode_normalization != "none",
        }
        return ", ".join(part for part, holds in parts.items() if part and holds)


# ---------------------------------------------------------------------------------------------------------------------
# What a text is made of


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word, separated by white space, occurs in the texts."""
    words = Counter()
    for text in texts:
        words.update((DELETED.sub("", text) if DELETED.search(text) else text).split())
    return words


def count_characters(words: Counter) -> dict[str, int]:
    """How often each character occurs in some words, each counted as often as it occurs."""
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    weights = np.repeat(np.fromiter(words.values(), dtype=float), np.fromiter(map(len, words), dtype=int))
    counts = np.bincount(codes, weights)
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """
    What a text is made of, as shares from 0 to 1.

    Args:
        marks: nonspacing marks of the decomposed text, beside its letters.
        has_hangul: whether it holds a Hangul syllable, which decomposing takes apart.
        zero_width_spaces: words that U+200B ends, between letters.
        joiners: words with one of `JOINERS` between letters; or, if more, word types that differ in them alone.
        long_words: characters in words over `LONGEST_WORD` characters.
        spaceless: characters in `SPACELESS` scripts.
        mixed_forms: words in the rarer of the normal forms NFC and NFD, of those that differ in them.
        mixed_case: words with a capital letter inside, beside small ones.
        dotless: Turkish dotless and dotted letters i, beside all letters.
        script: the commonest script of the letters, as `unicodedata.name` begins: LATIN, GREEK, CJK.
    """

    marks: float
    has_hangul: bool
    zero_width_spaces: float
    joiners: float
    long_words: float
    spaceless: float
    mixed_forms: float
    mixed_case: float
    dotless: float
    script: str

    @classmethod
    def of(cls, words: Counter) -> "Contents":
        """From `count_words`."""
        characters, scripts = count_characters(words), Counter()
        letters = marks = dotless = 0
        for character, count in characters.items():
            marks += count * sum(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", character))
            if unicodedata.category(character)[0] in "LM":
                scripts[unicodedata.name(character, "?").split(maxsplit=1)[0]] += count
                letters += count * character.isalpha()
                dotless += count * (character in "ıİ")
        total, characters_in_all = sum(words.values()) or 1, sum(characters.values()) or 1
        rare = [word for word in words if not word.isascii()]
        ended, joined = (
            sum(words[word] * _between_letters(word, some) for word in rare) for some in (ZERO_WIDTH_SPACE, JOINERS)
        )
        without = Counter(re.sub(f"[{JOINERS}]", "", word) for word in rare)
        merged = sum(count for word, count in without.items() if count > 1)
        composed, decomposed = (
            sum(words[word] for word in rare if _is_only(form, word, other))
            for form, other in (("NFC", "NFD"), ("NFD", "NFC"))
        )
        runs = [(run, count) for word, count in words.items() for run in _RUN.findall(word)]
        mixed = sum(count for run, count in runs if _is_mixed(run))
        return cls(
            marks=marks / max(letters, 1),
            has_hangul=any("가" <= character <= "힣" for character in characters),
            zero_width_spaces=ended / (total + ended),
            joiners=max(joined / total, merged / max(len(words), 1)),
            long_words=sum(words[word] * _in_long_words(word) for word in words) / characters_in_all,
            spaceless=sum(scripts[script] for script in SPACELESS) / characters_in_all,
            mixed_forms=min(composed, decomposed) / total,
            mixed_case=mixed / max(sum(count for _, count in runs), 1),
            dotless=dotless / max(letters, 1),
            script=scripts.most_common(1)[0][0] if scripts else "LATIN",
        )

    def has_white_space_words(self) -> bool:
        """Whether white space says what a word is (`MOST_SPACELESS`)."""
        return self.spaceless + self.long_words <= MOST_SPACELESS


_RUN = re.compile(r"[^\W_]+")  # letters and digits


def _between_letters(word, characters):
    """How often some of these characters stand between letters, marks or digits."""
    if not any(character in word for character in characters):
        return 0
    parts = re.split(f"[{characters}]+", word)
    return sum(
        all(side and unicodedata.category(side)[0] in "LMN" for side in (before[-1:], after[:1]))
        for before, after in itertools.pairwise(parts)
    )


def _is_only(form, word, other):
    """Whether a word is in one normal form and not in the other."""
    return unicodedata.is_normalized(form, word) and not unicodedata.is_normalized(other, word)


def _is_mixed(run):
    is_capitalised = run[0].isupper() and run[1:].islower()
    return run.lower() != run.upper() and not (run.islower() or run.isupper() or is_capitalised)


def _in_long_words(word):
    """The characters of a word that BERT's rules leave in a word over `LONGEST_WORD` characters."""
    if len(word) <= LONGEST_WORD:
        return 0
    rules = Rules()
    pieces = rules.splitter().pre_tokenize_str(rules.normalizer().normalize_str(word))
    return sum(len(piece) for piece, _ in pieces if len(piece) > LONGEST_WORD)


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
    The rules for a text: as the options say, and else as the text needs them.

    With `auto`, marks are stripped only from lower-cased text that has hardly any (`NOTICEABLE`), where they are
    foreign names, and no Hangul.
    """
    has_marks = contents.marks >= NOTICEABLE or contents.has_hangul
    return Rules(
        lowercase=lowercase,
        strip_accents=lowercase and not has_marks if strip_accents == "auto" else strip_accents,
        pre_tokenizer=pre_tokenizer,
        individual_digits=individual_digits,
        unicode_normalization=unicode_normalization,
        zero_width_spaces=contents.zero_width_spaces > NOTICEABLE,
        keep_joiners=contents.joiners > NOTICEABLE,
        cut_long_words=pre_tokenizer == "bert" and contents.long_words > NOTICEABLE,
    )
