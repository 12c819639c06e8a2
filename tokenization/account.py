"""The account of a text: what its tokenizer drops, reads as `[UNK]` or makes equal, said with cause and option."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from d2l_bert.tokenization.rules import (
    MOST_MIXED_CASE,
    NOTICEABLE,
    ZERO_WIDTH_SPACE,
    count_characters,
    count_marks,
    count_words,
    normalized,
    split_words,
)
from d2l_bert.tokenization.wordpiece import plain_backend, text_backend


# Beyond these shares a line names the cause, and the option that mends it: of characters in [UNK]; of characters that
# are dropped (marks: `NOTICEABLE`); of word types that became equal to another; of vocabulary entries with a digit.
REMARKED_UNKNOWN, REMARKED_DROPPED, REMARKED_MERGED, REMARKED_DIGITS = 0.01, 0.005, 0.01, 0.25


class AccountRecord(TypedDict):
    """As `account_of` counts."""

    characters: int
    unknown_characters: int
    dropped_marks: int
    dropped_characters: int
    word_types: int
    merged_types: int
    merged_examples: list[list[str]]


def check_account(account: AccountRecord) -> None:
    """Raise `ValueError` if an account that was read from a file holds numbers that no text has."""
    for name, value in account.items():
        is_count = name != "merged_examples"
        if is_count and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63):
            raise ValueError(f"the count of {name:.100} is {value!r:.100}")
    for part, whole in (
        ("unknown_characters", "characters"),
        ("dropped_characters", "characters"),
        ("merged_types", "word_types"),
    ):
        if account[part] > account[whole]:
            raise ValueError(f"the count of {part} is more than that of {whole}")
    if any(len(pair) != 2 for pair in account["merged_examples"]):
        raise ValueError("merged_examples holds something else than pairs")


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """The share of the texts' characters, white space aside, that stand in `[UNK]`; 0 for a text without any."""
    return share_unknown(account_of(count_words(texts), tokenizer))


def share_unknown(account: dict) -> float:
    """`unknown_share` of the text that an account is of."""
    return account["unknown_characters"] / max(account["characters"], 1)


def account_of(words: Counter, tokenizer: PreTrainedTokenizerBase) -> dict:
    """
    What a tokenizer makes of a text, in numbers that can be added up over texts.

    Args:
        words: how often each word occurs (`count_words`).

    Returns:
        `characters`, white space aside; of them `unknown_characters`, which stand in `[UNK]`, `dropped_marks` (as many
        nonspacing marks of the decomposed text) and `dropped_characters` (any other, such as control characters);
        `word_types`, and of them `merged_types`, which have the tokens of another word type that differs by more than
        case and normal form; `merged_examples`, a few of these.
    """
    normalizer, unk = tokenizer.backend_tokenizer.normalizer, tokenizer.unk_token_id
    if normalized(ZERO_WIDTH_SPACE, normalizer).isspace():  # to this tokenizer it ends a word
        words = split_words(words, None, pre_tokenizers.Split(ZERO_WIDTH_SPACE, "removed"))
    characters = count_characters(words)
    marks, dropped, unknown, merged = 0, 0, 0, 0
    for character, count in characters.items():
        kept = normalized(character, normalizer)
        lost = count_marks(character) - count_marks(kept)
        marks += count * max(lost, 0)
        dropped += count * (not kept and not lost)
    backend, of_tokens, examples = plain_backend(text_backend(tokenizer)), {}, []
    for word, count in words.items():
        encoding = backend.encode(word, add_special_tokens=False)
        if unk in (ids := encoding.ids):
            spans = zip(ids, encoding.offsets, strict=True)
            found = sum(end - start for id, (start, end) in spans if id == unk)
            unknown += count * min(found, len(word))  # of one character a tokenizer may make several tokens
        of_tokens.setdefault(tuple(ids), []).append(word)
    for same in of_tokens.values():
        different = {unicodedata.normalize("NFKC", word).lower(): word for word in same}
        if len(different) > 1:
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


def facts_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """
    What a tokenizer is.

    Returns:
        `class`: its name; `lowercase` and `strip_accents`: whether it has them, read off what it makes of letters;
        `entries_with_digits`: how many entries of the vocabulary are digits, or hold one.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    return {
        "class": type(tokenizer).__name__,
        "lowercase": normalized("A", normalizer) == "a",
        "strip_accents": normalized("\u00e9", normalizer) == "e",
        "entries_with_digits": sum(any(map(str.isdecimal, entry)) for entry in tokenizer.get_vocab()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Lines for the user


def account_line(account: dict) -> str:
    """What a tokenizer loses of a text (`account_of`), in one line."""
    merged = account["merged_types"] / max(account["word_types"], 1)
    return (
        f"of {account['characters']:,} characters: {share_unknown(account):.2%} stand in [UNK]; dropped are "
        f"{account['dropped_marks']:,} marks and {account['dropped_characters']:,} control, invisible or private-use "
        f"characters; of {account['word_types']:,} word types {merged:.2%} became equal to another that differs by "
        f"more than case (--lowercase false keeps case)"
    )


def remarks(
    account: dict, contents: dict, tokenizer: PreTrainedTokenizerBase, is_given: bool, language: str | None
) -> list[str]:
    """
    A line for each thing that is lost, with its cause and the option that mends it.

    Args:
        account: from `account_of`.
        contents: what the text is made of (`contents_of`).
        is_given: whether the tokenizer existed before.
        language: the option.
    """
    facts, unknown = facts_of(tokenizer), share_unknown(account)
    composed, decomposed = (normalized(form, tokenizer.backend_tokenizer.normalizer) for form in ("\u00e9", "e\u0301"))
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
    causes = {
        invisible: account["dropped_characters"],
        alphabet: account["unknown_characters"],
        strip: account["dropped_marks"],
    }
    cause = max(causes, key=causes.get)
    digits = facts["entries_with_digits"] / len(tokenizer)
    is_turkish = contents["dotless"] > NOTICEABLE or (language or "").partition("-")[0] in ("tr", "az")
    script = {"Han": "Chinese"}.get(contents["script"], contents["script"].replace("_", " "))
    lines = {
        f"{unknown:.1%} of the characters stand in [UNK]; {alphabet}": unknown > REMARKED_UNKNOWN,
        f"{account['dropped_marks']:,} marks (accents, vowel signs, tones) are dropped; {strip}": (
            account["dropped_marks"] > NOTICEABLE * account["characters"]
        ),
        f"{account['dropped_characters']:,} characters are dropped; {invisible}": (
            account["dropped_characters"] > REMARKED_DROPPED * account["characters"]
        ),
        f"{account['merged_types']:,} of {account['word_types']:,} word types became equal to another that differs by "
        f"more than case ({examples}); {cause}": (account["merged_types"] > REMARKED_MERGED * account["word_types"]),
        f"the text mixes composed and decomposed letters (NFC and NFD), so that equal words have other tokens; "
        f"{'convert it to NFC' if is_given else '--unicode_normalization NFC makes them one'}": (
            contents["mixed_forms"] > NOTICEABLE and composed != decomposed
        ),
        f"{contents['mixed_case']:.0%} of the words have a capital letter inside (aBc), so that case tells words "
        f"apart, and the tokenizer drops it; {case}": facts["lowercase"] and contents["mixed_case"] > MOST_MIXED_CASE,
        f"lower-casing follows English, and I and \u0131, \u0130 and i are different letters in Turkish and Azeri; "
        f"{case}": facts["lowercase"] and is_turkish,
        f"{digits:.0%} of the vocabulary's entries hold digits; --individual_digits true makes every digit a word": (
            digits > REMARKED_DIGITS and not is_given
        ),
        f"most letters are {script}, and sentences are split as in English; name the language of the text with "
        f"--language": contents["script"] not in ("", "Latin") and not language,
    }
    return [line for line, holds in lines.items() if holds]
