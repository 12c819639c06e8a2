"""The account of a text: what its tokenizer drops, reads as `[UNK]` or makes equal, said with cause and option."""

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from d2l_bert.tokenization.encoding import WordUnit, text_backend
from d2l_bert.tokenization.rules import (
    MOST_MIXED_CASE,
    NOTICEABLE,
    ZERO_WIDTH_SPACE,
    Contents,
    count_characters,
    count_words,
)
from d2l_bert.tokenization.wordpiece import CONTINUATION


# Words that are encoded in one call.
WORDS_AT_ONCE = 10_000

# Beyond these shares a line names the cause, and the option that mends it: of characters in [UNK], of marks dropped
# beside all characters, of word types that became equal to another, and of vocabulary entries with a digit.
REMARKED_UNKNOWN, REMARKED_MARKS, REMARKED_MERGED, REMARKED_DIGITS = 0.01, 0.005, 0.01, 0.25

# The scripts of languages that are not written in Latin letters, as `unicodedata.name` begins.
SCRIPTS = {
    "CYRILLIC": "ab ba be bg ce cv kk ky mk mn os ru sah sr tg tt udm uk",
    "GREEK": "el grc",
    "ARABIC": "ar arz ckb fa ks ps sd ug ur",
    "HEBREW": "he yi",
    "DEVANAGARI": "bho hi kok mai mr ne sa",
    "BENGALI": "as bn",
    "CJK": "ja wuu yue zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "ARMENIAN": "hy",
    "GEORGIAN": "ka",
    "ETHIOPIC": "am ti",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "KANNADA": "kn",
    "KHMER": "km",
    "LAO": "lo",
    "MALAYALAM": "ml",
    "MYANMAR": "my",
    "ORIYA": "or",
    "SINHALA": "si",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
    "TIBETAN": "bo dz",
}

# Languages of other scripts that are also written in Latin letters.
LATIN_TOO = {"kk", "mn", "sr", "tg", "tt", "ug"}


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """The share of the texts' characters, white space aside, that stand in `[UNK]`; 0 for a text without any."""
    return describe(tokenizer, texts)["unknown_share"]


def describe(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], word_unit: WordUnit = "white space"
) -> dict[str, float]:
    """
    Statistics of a tokenizer on a text.

    Args:
        word_unit: as in `SentenceEncoder`.

    Returns:
        `words`: number of words in the texts.
        `pieces_per_word`: mean number of tokens in a word; 0 without words.
        `unknown_share`: share of the characters, white space aside, that stand in `[UNK]`.
    """
    words = count_words(texts)
    counts = unknown_and_pieces(tokenizer, words, word_unit)
    return {
        "words": counts["words"],
        "pieces_per_word": counts["pieces"] / max(counts["words"], 1),
        "unknown_share": counts["unknown_characters"] / max(sum(len(word) * words[word] for word in words), 1),
    }


def unknown_and_pieces(
    tokenizer: PreTrainedTokenizerBase, words: Counter, word_unit: WordUnit = "white space"
) -> Counter:
    """The `unknown_characters`, which stand in `[UNK]`, the `words` and the `pieces` of what `count_words` counted."""
    counts = Counter()
    for word, encoding in encodings(tokenizer, words):
        by_tokens = word_unit == "tokenizer"
        begun = sum(not token.startswith(CONTINUATION) for token in encoding.tokens) if by_tokens else 1
        counts["words"] += words[word] * begun
        counts["pieces"] += words[word] * len(encoding)
        counts["unknown_characters"] += words[word] * _unknown(encoding, tokenizer)
    return counts


def encodings(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> Iterator[tuple[str, Encoding]]:
    """Yield each word with its encoding, without special tokens."""
    backend = Tokenizer.from_str(text_backend(tokenizer))
    backend.encode_special_tokens = True  # a "[MASK]" in a text is text
    backend.no_truncation()
    backend.no_padding()
    words = list(words)
    for first in range(0, len(words), WORDS_AT_ONCE):
        some = words[first : first + WORDS_AT_ONCE]
        yield from zip(some, backend.encode_batch(some, add_special_tokens=False), strict=True)


def _unknown(encoding, tokenizer):
    """The characters of an encoded text that stand in `[UNK]`, by the tokens' offsets."""
    if tokenizer.unk_token_id not in (ids := encoding.ids):
        return 0
    return sum(
        end - start for id, (start, end) in zip(ids, encoding.offsets, strict=True) if id == tokenizer.unk_token_id
    )


def account_of(words: Counter, tokenizer: PreTrainedTokenizerBase) -> dict:
    """
    What a tokenizer makes of a text, in numbers that can be added up over texts.

    Args:
        words: how often each word occurs (`count_words`).

    Returns:
        `characters`, white space aside; of them `unknown_characters`, which stand in `[UNK]`, `dropped_marks` (as many
        nonspacing marks of the decomposed text) and `dropped_characters` (any other, such as control characters);
        `word_types`, and of them `merged_types`, which have the tokens of another word type that differs by more than
        case; `merged_examples`, a few of these.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalize = normalizer.normalize_str if normalizer else str
    if normalize(ZERO_WIDTH_SPACE).isspace():  # to this tokenizer it ends a word
        spaced = Counter()
        for word, count in words.items():
            for part in filter(None, word.split(ZERO_WIDTH_SPACE)):
                spaced[part] += count
        words = spaced
    characters = count_characters(words)
    marks, dropped, unknown = 0, 0, 0
    for character, count in characters.items():
        kept = normalize(character)
        lost = _marks(character) - _marks(kept)
        marks += count * max(lost, 0)
        dropped += count * (not kept and not lost)
    of_tokens = {}
    for word, encoding in encodings(tokenizer, words):
        unknown += words[word] * _unknown(encoding, tokenizer)
        of_tokens.setdefault(tuple(encoding.ids), []).append(word)
    merged, examples = 0, []
    for same in of_tokens.values():
        if len(same) > 1 and len(different := {word.lower(): word for word in same}) > 1:
            merged += len(same)
            examples.append((sum(words[word] for word in same), list(different.values())[:2]))
    return {
        "characters": sum(characters.values()),
        "unknown_characters": unknown,
        "dropped_marks": marks,
        "dropped_characters": dropped,
        "word_types": len(words),
        "merged_types": merged,
        "merged_examples": [pair for _, pair in sorted(examples, reverse=True)[:3]],
    }


@functools.cache
def _marks(text):
    return sum(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", text))


def case_and_marks(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Whether a tokenizer has `lowercase`, and whether it has `strip_accents`: read off what it makes of letters."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalize = normalizer.normalize_str if normalizer else str
    return {"lowercase": normalize("A") == "a", "strip_accents": normalize("\u00e9") == "e"}


def entries_with_digits(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many entries of the vocabulary are digits, or hold one."""
    return sum(any(map(str.isdecimal, entry)) for entry in tokenizer.get_vocab())


# ---------------------------------------------------------------------------------------------------------------------
# Lines for the user


def account_line(account: dict) -> str:
    """What a tokenizer loses of a text (`account_of`), in one line."""
    characters, types = max(account["characters"], 1), max(account["word_types"], 1)
    return (
        f"of {account['characters']:,} characters: {account['unknown_characters'] / characters:.2%} stand in [UNK]; "
        f"dropped are {account['dropped_marks']:,} marks and {account['dropped_characters']:,} control, invisible or "
        f"private-use characters; of {account['word_types']:,} word types {account['merged_types'] / types:.2%} "
        f"became equal to another that differs by more than case"
    )


def remarks(
    account: dict, contents: Contents, tokenizer: PreTrainedTokenizerBase, is_given: bool, language: str | None
) -> list[str]:
    """
    A line for each thing that is lost, with its cause and the option that mends it.

    Args:
        account: from `account_of`.
        contents: what the text is made of.
        is_given: whether the tokenizer existed before.
        language: the option.
    """
    drops, characters = case_and_marks(tokenizer), max(account["characters"], 1)
    other = "another tokenizer, or leave --tokenizer and --init_from out to train one on this text"
    strip = f"give {other}" if is_given else "--strip_accents false keeps them"
    case = f"give {other}" if is_given else "--lowercase false keeps it"
    alphabet = (
        f"the tokenizer lacks their characters: give {other}, or add words with --extend_vocab"
        if is_given
        else "their characters are too many for the vocabulary: raise --vocab_size, or --limit_alphabet if it is given"
    )
    examples = "; ".join(" = ".join(map(repr, pair)) for pair in account["merged_examples"])
    invisible = "BERT's cleaning drops control, invisible and private-use characters: take them out, or replace them"
    counts = [account[key] for key in ("dropped_characters", "unknown_characters", "dropped_marks")]
    cause = (invisible, alphabet, strip)[counts.index(max(counts))]
    digits = entries_with_digits(tokenizer) / len(tokenizer)
    wanted = SCRIPTS.get(contents.script, "").split()
    # A language without an entry in SCRIPTS is written in Latin letters.
    known = {code for codes in SCRIPTS.values() for code in codes.split()}
    code = (language or "en").partition("-")[0]
    is_turkish = contents.dotless > NOTICEABLE or code in ("tr", "az")
    lines = {
        f"{account['unknown_characters'] / characters:.1%} of the characters stand in [UNK]; {alphabet}": (
            account["unknown_characters"] > REMARKED_UNKNOWN * characters
        ),
        f"{account['dropped_marks']:,} marks (accents, vowel signs, tones) are dropped; {strip}": (
            account["dropped_marks"] > REMARKED_MARKS * characters
        ),
        f"{account['merged_types']:,} of {account['word_types']:,} word types became equal to another that differs by "
        f"more than case ({examples}); {cause}": (account["merged_types"] > REMARKED_MERGED * account["word_types"]),
        "the text mixes composed and decomposed letters (NFC and NFD), so that equal words have other tokens; "
        "--unicode_normalization NFC makes them one": contents.mixed_forms > NOTICEABLE,
        f"{contents.mixed_case:.0%} of the words have a capital letter inside (aBc), so that case tells words apart, "
        f"and the tokenizer drops it; {case}": drops["lowercase"] and contents.mixed_case > MOST_MIXED_CASE,
        f"lower-casing follows English, and I and \u0131, \u0130 and i are different letters in Turkish and Azeri; "
        f"{case}": drops["lowercase"] and is_turkish,
        f"{digits:.0%} of the vocabulary's entries hold digits; --individual_digits true makes every digit a word": (
            digits > REMARKED_DIGITS and not is_given
        ),
        f"most letters are {contents.script.capitalize().replace('Cjk', 'Chinese')}, and sentences are split as in "
        f"language {code!r}{'' if language else ', the default'}; name the text's own with --language": (
            code not in wanted if wanted else contents.script == "LATIN" and code in known - LATIN_TOO
        ),
    }
    return [line for line, holds in lines.items() if holds]
