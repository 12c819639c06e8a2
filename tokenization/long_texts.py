"""The beginning of a long text that has all tokens which a model reads of it, so that the rest is not tokenized."""

import copy

from tokenizers import Tokenizer


# A text with more characters than this for each token that is read is cut before it is tokenized: a token takes some
# 650 bytes while a text is tokenized, and a line of 4 MB of full stops would take 2.6 GB. English has 4 to 5
# characters a token, so of usual texts those are cut of which three quarters are not read.
CHARACTERS_A_TOKEN = 16


# The most characters of a text that are tokenized to find the tokens which a model reads. So many have some 50,000
# tokens in usual texts. Where they have fewer than a model reads, words are longer than in any language, and the rest
# is not looked at: to tokenize 12 million characters without a space took 46 s and 1.2 GB.
MOST_CHARACTERS = 1 << 18

# Characters whose tokens are counted at once.
COUNTED_AT_ONCE = 1 << 20


def without_limits(backend: Tokenizer) -> Tokenizer:
    """A copy of a tokenizer that neither truncates nor pads."""
    unlimited = copy.deepcopy(backend)
    unlimited.no_truncation()
    unlimited.no_padding()
    return unlimited


def is_long(text: str, most: int) -> bool:
    """Whether `beginning_of` cuts a text, of which `most` tokens are read."""
    return len(text) > CHARACTERS_A_TOKEN * most


def beginning_of(text: str, most: int, unlimited: Tokenizer) -> str:
    """
    The beginning of a text whose first tokens are those of the whole text, and which has more tokens than `most`.

    A tokenizer cuts a text into words from left to right, so what stands behind a word does not change the words
    before it. The beginning ends behind two words more than are needed.

    A text that is not long (`is_long`) is returned as it is. If where words begin cannot be told, or there are fewer
    words than are needed, as where the whole text is one word, its first `MOST_CHARACTERS` characters are returned.

    Args:
        most: how many tokens are read; a few more, such as special tokens, do no harm.
        unlimited: of `without_limits`.
    """
    end = CHARACTERS_A_TOKEN * most
    text = text[: max(end, MOST_CHARACTERS)]
    while end < len(text):
        encoding = unlimited.encode(text[:end], add_special_tokens=False)
        words = encoding.word_ids
        if None in words:  # tokens of no word: where words begin is not known
            return text
        behind = [place for place in range(most, len(words)) if words[place] != words[place - 1]]
        # The third word that begins behind the tokens that are read; it may be cut, and the two before it are whole.
        if len(behind) >= 3:
            return text[: encoding.offsets[behind[2]][0]]
        end *= 4
    return text


def ending_of(text: str) -> str:
    """The end of a text that is tokenized where a model reads the last tokens: `MOST_CHARACTERS` characters."""
    return text[-MOST_CHARACTERS:]


def token_count(text: str, unlimited: Tokenizer) -> int:
    """
    How many tokens a text has, without special tokens. One of more than a million characters is counted in parts, and
    a word between two parts counts as two.

    Args:
        unlimited: of `without_limits`.
    """
    count = 0
    for begin in range(0, len(text), COUNTED_AT_ONCE):
        count += len(unlimited.encode(text[begin : begin + COUNTED_AT_ONCE], add_special_tokens=False))
    return count
