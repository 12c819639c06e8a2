"""A document: one text of a source, as paragraphs."""

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass
class Document:
    """One text: `name` says where it comes from, `paragraphs` are strings without blank lines, to be read once.

    `source` is the number of the source that it came with.
    """

    name: str
    paragraphs: Iterable[str]
    source: int = 0


BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split_paragraphs(text: str) -> list[str]:
    """Blocks of text between blank lines, each on one line, white space squeezed."""
    return squeezed(BLANK_LINE.split(text))


def squeezed(blocks: Iterable[str]) -> list[str]:
    """Blocks of text, each on one line, white space squeezed; those of white space alone are left out."""
    lines = (" ".join(block.split()) for block in blocks)
    return [line for line in lines if line]
