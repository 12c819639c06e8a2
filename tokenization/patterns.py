"""`is_endless`: whether the pattern of a stranger's tokenizer can take the time of the machine for a short text."""

import re
from dataclasses import dataclass


# Characters of a pattern. Those of usual tokenizers have some 300.
LONGEST_PATTERN = 2**12

# Parts of a pattern that repeat, one behind the other. GPT-4's and o200k's tokenizers have 2. Of 4, a text of 200
# characters can take half a minute.
MOST_REPETITIONS = 2

# Ways in which the choices of a pattern, one behind the other, can be taken. o200k's tokenizer has 16.
MOST_WAYS = 1000

# The parts of a pattern: the beginning of a group, a choice, or a group's end or a character with its quantifier.
QUANTIFIER = r"[*+?]|\{\d*,?\d*\}"
PARTS_OF_PATTERN = re.compile(
    rf"(?P<opened>\((?:\?(?:[=!>:]|<[=!]|<\w+>|[a-z-]+:?))?)|(?P<choice>\|)|(?P<quantified>{QUANTIFIER})"
    rf"|(?P<sign>.)(?P<quantifier>[*+][?+]?|\?[?+]?|\{{\d*,?\d*\}}\??)?",
    re.DOTALL,
)


# An escape, such as \p{L}; a class of characters, which may hold others.
ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]*\}|.)", re.DOTALL)
CLASS = re.compile(r"\[(?:\[[^\]]*\]|[^\]\[])+\]")

# The second characters of escapes that refer to groups, or stand for control characters.
REFUSED_ESCAPES = "123456789kgcCM"

# A comment, which may hide what follows, or a part that must be absent.
COMMENT = re.compile(r"\(\?(#|~|[^():<>=!]*x)")

# An option after the beginning: it makes a group of what follows.
OPTION_INSIDE = re.compile(r".\(\?[\w-]+\)", re.DOTALL)


@dataclass
class _Group:
    """
    What has been read of a group of a pattern, or of the whole.

    Args:
        ways: in how many ways the parts of this alternative can match by their choices alone.
        repetitions: how many of them repeat.
        ways_before, repetitions_before: of the alternatives before it, the sum and the largest.
    """

    ways: int = 1
    repetitions: int = 0
    ways_before: int = 0
    repetitions_before: int = 0

    def end_alternative(self):
        self.ways_before += self.ways
        self.repetitions_before = max(self.repetitions_before, self.repetitions)
        self.ways = 1
        self.repetitions = 0

    def add(self, ways, repetitions):
        self.ways *= ways
        self.repetitions += repetitions

    def costs_too_much(self):
        return self.ways > MOST_WAYS or self.repetitions > MOST_REPETITIONS


def is_endless(pattern: str) -> bool:
    """
    Whether the time to match a pattern may grow faster than the third power of the text's length, or with a large
    factor.

    That is so for a repeated group with a repetition or a choice inside, such as `(a+)+`, for a reference to another
    group, for several repetitions in a row, such as `a*a*a*`, and for many choices in a row, such as `a?` or `(a|b)`
    twenty times. A pattern that is none of these may be refused too, such as one with comments.
    """
    for escape in ESCAPE.findall(pattern):
        if escape[1] in REFUSED_ESCAPES:
            return True
    plain = ESCAPE.sub("e", pattern)
    if COMMENT.search(plain) or OPTION_INSIDE.search(plain):
        return True
    groups = [_Group()]
    for part in PARTS_OF_PATTERN.finditer(CLASS.sub("c", plain)):
        if part["quantified"]:  # what has a quantifier already, or nothing
            return True
        if part["opened"]:
            groups.append(_Group())
            continue
        if part["choice"]:
            groups[-1].end_alternative()
            continue
        ways = 1
        repetitions = 0
        if part["sign"] == ")" and len(groups) > 1:
            inner = groups.pop()
            inner.end_alternative()
            ways = inner.ways_before
            repetitions = inner.repetitions_before
        quantifier = part["quantifier"] or ""
        if quantifier.startswith("?"):
            ways += 1
        elif quantifier:
            if ways > 1 or repetitions:
                return True
            repetitions = 1
        groups[-1].add(ways, repetitions)
        if groups[-1].costs_too_much():
            return True
    return False
