"""`Coverage`: what a tokenizer drops of a text, reads as `[UNK]` or makes equal; said with cause and option."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypedDict

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from d2l_bert.tokenization.rules import (
    MOST_MIXED_CASE,
    NOTICEABLE,
    ZERO_WIDTH_SPACE,
    Contents,
    count_characters,
    count_marks,
    count_words,
    normalized,
    split_words,
)
from d2l_bert.tokenization.wordpiece import literal_json, literal_tokenizer


# Beyond these shares a line names the cause, and the option that mends it. For marks, it is `NOTICEABLE`.
REMARKED_UNKNOWN = 0.01  # of the characters, in [UNK]
REMARKED_DROPPED = 0.005  # of the characters
REMARKED_MERGED = 0.01  # of the word types, which became equal to another
REMARKED_ESCAPES = 0.005  # of the words; the strings in Python's code have them in 0.1 %
REMARKED_DIGITS = 0.25  # of the vocabulary's entries, which hold a digit


class Coverage(TypedDict):
    """What a tokenizer makes of a text, as `coverage_of` counts it: the entry `account` of the records."""

    characters: int
    unknown_characters: int
    dropped_marks: int
    dropped_characters: int
    word_types: int
    merged_types: int
    merged_examples: list[list[str]]


# A count, and the count that it is a part of.
PARTS_OF_COUNTS = {
    "unknown_characters": "characters",
    "dropped_characters": "characters",
    "merged_types": "word_types",
}


def check_coverage(coverage: Coverage) -> None:
    """Raise `ValueError` if a coverage that was read from a file holds numbers that no text has."""
    for name, value in coverage.items():
        if name != "merged_examples":
            check_count(name, value)
    for part, whole in PARTS_OF_COUNTS.items():
        if coverage[part] > coverage[whole]:
            raise ValueError(f"the count of {part} is more than that of {whole}")
    for pair in coverage["merged_examples"]:
        if len(pair) != 2:
            raise ValueError("merged_examples holds something else than pairs")


def check_count(name: str, value: object) -> None:
    """Raise `ValueError` if the value of an entry that was read from a file is no count of 63 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"the count of {name:.100} is {value!r:.100}")


def measure_unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """`unknown_share` of some texts."""
    return unknown_share(coverage_of(count_words(texts), tokenizer))


def unknown_share(coverage: Coverage) -> float:
    """The share of a text's characters, white space aside, that stand in `[UNK]`; 0 for a text without any."""
    return coverage["unknown_characters"] / max(coverage["characters"], 1)


def coverage_of(words: Counter, tokenizer: PreTrainedTokenizerBase) -> Coverage:
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
    normalizer = tokenizer.backend_tokenizer.normalizer
    # `words` are what stands between white space. To some tokenizers a zero-width space is white space, too.
    ends_a_word = normalized(ZERO_WIDTH_SPACE, normalizer).isspace()
    if ends_a_word:
        words = split_words(words, None, pre_tokenizers.Split(ZERO_WIDTH_SPACE, "removed"))
    characters = count_characters(words)
    dropped_marks, dropped_characters = _count_dropped(characters, normalizer)
    unknown_characters, words_by_ids = _encode(words, tokenizer)
    merged_types, merged_examples = _find_merged(words_by_ids, words)
    return {
        "characters": sum(characters.values()),
        "unknown_characters": unknown_characters,
        "dropped_marks": dropped_marks,
        "dropped_characters": dropped_characters,
        "word_types": len(words),
        "merged_types": merged_types,
        "merged_examples": merged_examples,
    }


def _count_dropped(characters, normalizer):
    """How many marks, and how many other characters, a normalizer drops."""
    dropped_marks = 0
    dropped_characters = 0
    for character, count in characters.items():
        kept = normalized(character, normalizer)
        lost_marks = count_marks(character) - count_marks(kept)
        dropped_marks += count * max(lost_marks, 0)
        if not kept and not lost_marks:
            dropped_characters += count
    return dropped_marks, dropped_characters


def _encode(words, tokenizer):
    """How many characters of the words stand in `[UNK]`; the words that have the same ids, in a list for these ids."""
    backend = literal_tokenizer(literal_json(tokenizer))
    unk = tokenizer.unk_token_id
    unknown_characters = 0
    words_by_ids = {}
    for word, count in words.items():
        encoding = backend.encode(word, add_special_tokens=False)
        ids = encoding.ids
        if unk in ids:
            spans = zip(ids, encoding.offsets, strict=True)
            in_unknown = sum(end - start for index, (start, end) in spans if index == unk)
            # A tokenizer may make several tokens of one character.
            unknown_characters += count * min(in_unknown, len(word))
        words_by_ids.setdefault(tuple(ids), []).append(word)
    return unknown_characters, words_by_ids


def _find_merged(words_by_ids, counts):
    """How many words have the ids of another that differs by more than case and normal form; three pairs of them."""
    merged = 0
    pairs = []
    for words in words_by_ids.values():
        # "Café", "CAFÉ" and "cafe" are the forms "café" and "cafe", and of "café" the last word is shown.
        word_of_form = {unicodedata.normalize("NFKC", word).lower(): word for word in words}
        if len(word_of_form) > 1:
            merged += len(words)
            occurrences = sum(counts[word] for word in words)
            pairs.append((occurrences, list(word_of_form.values())[:2]))
    pairs.sort(reverse=True)
    return merged, [pair for _, pair in pairs[:3]]


def facts_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """
    What a tokenizer is.

    Returns:
        `class`: its name; `lowercase` and `strip_accents`: whether it has them, read off what it makes of letters;
        `entries_with_digits`: how many entries of the vocabulary are digits, or hold one.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    entries_with_digits = [entry for entry in tokenizer.get_vocab() if any(map(str.isdecimal, entry))]
    return {
        "class": type(tokenizer).__name__,
        "lowercase": normalized("A", normalizer) == "a",
        "strip_accents": normalized("\u00e9", normalizer) == "e",
        "entries_with_digits": len(entries_with_digits),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Lines for the user


def tokenizer_line(tokenizer: PreTrainedTokenizerBase, coverage: Coverage) -> str:
    """What a tokenizer is, and how much of a text it does not know, in a short line."""
    facts = facts_of(tokenizer)
    case = "lower case" if facts["lowercase"] else "with capitals"
    accents = ", no accents" if facts["strip_accents"] else ""
    return (
        f"tokenizer: {len(tokenizer):,} entries, {case}{accents}; of the text {unknown_share(coverage):.2%} stand in "
        f"[UNK], dropped are {coverage['dropped_marks'] + coverage['dropped_characters']:,} characters"
    )


def coverage_line(coverage: Coverage) -> str:
    """What a tokenizer loses of a text (`coverage_of`), in one line."""
    merged = coverage["merged_types"] / max(coverage["word_types"], 1)
    return (
        f"of {coverage['characters']:,} characters: {unknown_share(coverage):.2%} stand in [UNK]; dropped are "
        f"{coverage['dropped_marks']:,} marks and {coverage['dropped_characters']:,} control, invisible or "
        f"private-use characters; of {coverage['word_types']:,} word types {merged:.2%} became equal to another that "
        f"differs by more than case (--lowercase false keeps case)"
    )


def remarks(
    coverage: Coverage,
    contents: Contents,
    tokenizer: PreTrainedTokenizerBase,
    is_given: bool,
    language: str | None,
) -> Iterator[str]:
    """
    A short line for each thing that is lost or damaged, with what mends it; what loses most comes first.

    Args:
        coverage: from `coverage_of`.
        contents: what the text is made of (`contents_of`).
        is_given: whether the tokenizer existed before.
        language: the option.
    """
    yield from _remarks_on_losses(coverage, is_given)
    yield from remarks_on_damage(contents)
    yield from _remarks_on_letters(contents, tokenizer, is_given, language)
    with_digits = facts_of(tokenizer)["entries_with_digits"] / len(tokenizer)
    if with_digits > REMARKED_DIGITS and not is_given:
        yield f"{with_digits:.0%} of the entries hold digits; --individual_digits true makes every digit a word"
    if contents["script"] not in ("", "Latin") and not language:
        script = "Chinese" if contents["script"] == "Han" else contents["script"].replace("_", " ")
        yield f"most letters are {script}, and sentences end as in English; name the language with --language"


def _remarks_on_losses(coverage, is_given):
    """Lines about characters in `[UNK]`, characters that are dropped, and words that became equal."""
    if is_given:
        keep_marks = "train a tokenizer (without --tokenizer) to keep them"
        know_more = "train a tokenizer (without --tokenizer), or add words with --extend_vocab"
    else:
        keep_marks = "--strip_accents false keeps them"
        know_more = "raise --vocab_size, or --limit_alphabet if it is given"
    replace_them = "replace what BERT drops"
    unknown = unknown_share(coverage)
    if unknown > REMARKED_UNKNOWN:
        yield f"{unknown:.1%} of the characters stand in [UNK]; {know_more}"
    if coverage["dropped_marks"] > NOTICEABLE * coverage["characters"]:
        yield f"{coverage['dropped_marks']:,} marks (accents, vowel signs, tones) are dropped; {keep_marks}"
    if coverage["dropped_characters"] > REMARKED_DROPPED * coverage["characters"]:
        dropped = f"{coverage['dropped_characters']:,} control, invisible or private-use characters"
        yield f"{dropped} are dropped; {replace_them}"
    if coverage["merged_types"] > REMARKED_MERGED * coverage["word_types"]:
        # Words become equal by what is lost of them. The advice is against what is lost most.
        lost = {
            replace_them: coverage["dropped_characters"],
            know_more: coverage["unknown_characters"],
            keep_marks: coverage["dropped_marks"],
        }
        advice = max(lost, key=lost.get)
        one, other = coverage["merged_examples"][0]
        share = coverage["merged_types"] / coverage["word_types"]
        yield f"{share:.0%} of the words became another ({one:.20} = {other:.20}); {advice}"


# Ways in which words were damaged before they were read: the share in `Contents`, how large it is before it is said,
# and what it is, with what repairs it.
DAMAGE = (
    (
        "mojibake",
        NOTICEABLE,
        "were read in a wrong encoding, as Windows-1252 (fÃ¼r for für); repair them: ftfy, or iconv",
    ),
    ("entities", NOTICEABLE, "hold entities of HTML (&quot;); replace them: html.unescape"),
    ("tags", NOTICEABLE, "hold tags: <br />, <unk>, [SEP] or the like; take them out"),
    ("escapes", REMARKED_ESCAPES, r"hold escapes for characters (\n, \u00e9); write the characters"),
    ("reversed", NOTICEABLE, "are Hebrew written backwards, as out of PDF; reverse the lines"),
    ("two_alphabets", NOTICEABLE, "mix Latin and Cyrillic letters, which look alike; write each word in one"),
    ("twins", NOTICEABLE, "have the rarer of ş and ș, ي and ی or ك and ک, which look alike; write one of the two"),
    ("zawgyi", NOTICEABLE, "are Burmese in Zawgyi, not Unicode; convert it: myanmar-tools"),
)


def remarks_on_damage(contents: Contents) -> Iterator[str]:
    """A short line for each way in which words were damaged before, with what repairs them."""
    for kind, least, what in DAMAGE:
        if contents[kind] > least:
            yield f"{contents[kind]:.1%} of the words {what}"


def _remarks_on_letters(contents, tokenizer, is_given, language):
    """Lines about normal forms and case."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    is_lower_case = normalized("A", normalizer) == "a"
    keep_case = "train a tokenizer with --lowercase false" if is_given else "--lowercase false keeps it"
    # A letter of Devanagari as one character, and as a letter and a mark, in which NFC and NFKC, too, write it.
    as_one = "\u0958"
    as_two = "\u0915\u093c"
    keeps_two_forms = normalized(as_one, normalizer) != normalized(as_two, normalizer)
    if contents["mixed_forms"] > NOTICEABLE and keeps_two_forms:
        make_one = "convert it to NFC" if is_given else "--unicode_normalization NFC makes them one"
        yield f"{contents['mixed_forms']:.1%} of the words are spelled in two forms of Unicode; {make_one}"
    elif contents["decomposed"] > NOTICEABLE and keeps_two_forms:
        compose = "convert it to NFC" if is_given else "--unicode_normalization NFC composes it"
        yield f"{contents['decomposed']:.1%} of the words are decomposed (NFD), as few other texts are; {compose}"
    has_compatible = contents["compatible_forms"] > max(NOTICEABLE, contents["mojibake"])  # as it holds º and µ
    if has_compatible and normalized("ﬁ", normalizer) != "fi":
        make_plain = "convert it to NFKC" if is_given else "--unicode_normalization NFKC makes them plain"
        yield f"{contents['compatible_forms']:.1%} of the words hold ligatures or wide letters (ﬁ, Ａ); {make_plain}"
    if is_lower_case and contents["mixed_case"] > MOST_MIXED_CASE:
        yield f"{contents['mixed_case']:.0%} of the words have a capital inside (aBc), which is dropped; {keep_case}"
    is_turkish = (language or "").partition("-")[0] in ("tr", "az")
    if is_lower_case and (is_turkish or contents["dotless"] > NOTICEABLE):
        yield f"lower case is as in English: I becomes i, also in Turkish and Azeri, which have ı; {keep_case}"
    if is_lower_case and contents["capital_sigmas"] > NOTICEABLE:
        yield f"ΔΡΟΜΟΣ becomes δρομοσ, which Greek writes δρόμος: capitals are other words here; {keep_case}"
