"""An account of a text: what is read, what the tokenizer drops, what stands in `[UNK]`, which words become equal."""

from collections import Counter
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


# Words that are encoded in one call.
WORDS_AT_ONCE = 10_000


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word, separated by white space, occurs in the texts."""
    words = Counter()
    for text in texts:
        words.update(text.split())
    return words


def unknown_characters(tokenizer: PreTrainedTokenizerBase, words: Counter) -> tuple[int, int]:
    """
    Of the characters of some words, how many stand in `[UNK]`, by the tokens' offsets, and how many there are.

    Args:
        words: how often each word occurs (`count_words`).
    """
    unknown = 0
    for word, encoding in encodings(tokenizer, words):
        if tokenizer.unk_token_id in encoding.ids:
            inside = (e - s for i, (s, e) in zip(encoding.ids, encoding.offsets, strict=True) if i == tokenizer.unk_token_id)
            unknown += words[word] * sum(inside)
    return unknown, sum(len(word) * count for word, count in words.items())


def encodings(tokenizer, words):
    """Pairs (word, its encoding without special tokens), word by word."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True  # a "[MASK]" in a text is text
    backend.no_truncation()
    backend.no_padding()
    words = list(words)
    for first in range(0, len(words), WORDS_AT_ONCE):
        some = words[first : first + WORDS_AT_ONCE]
        yield from zip(some, backend.encode_batch(some, add_special_tokens=False), strict=True)


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> float:
    """The share of the texts' characters, white space aside, that stand in `[UNK]`; 0 for a text without any."""
    unknown, characters = unknown_characters(tokenizer, count_words(texts))
    return unknown / characters if characters else 0.0
