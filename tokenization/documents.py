"""`Document`: a text as a sequence of paragraphs; splits a text into paragraphs; hashes the texts of documents."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np


@dataclasses.dataclass
class Document:
    """
    One text as a sequence of paragraphs.

    Args:
        name: names the origin of the text, such as a file.
        paragraphs: strings without blank lines. May be an iterator: read the paragraphs only once.
        source: the number of the document's source in the list of the run's sources, from 0.
        is_rows: whether each paragraph is a row of a table, and so a separate text.
    """

    name: str
    paragraphs: Iterable[str]
    source: int = 0
    is_rows: bool = False


BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines separate, each on one line (see `join_lines`)."""
    return join_lines(BLANK_LINE.split(text))


def join_lines(paragraphs: Iterable[str]) -> list[str]:
    """Each paragraph on one line, with single spaces as white space. Empty paragraphs are left out."""
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [line for line in lines if line]


def hashed(documents: Iterable[Document], write: Callable[[np.ndarray], object]) -> Iterator[Document]:
    """
    Yield the same documents, and hash each text while the caller reads the text's paragraphs.

    A text is a file, or a row of a table. Texts with equal paragraphs have equal hashes.

    Args:
        write: called with the hash of each text, an int64 array (1,).
    """
    for document in documents:
        yield dataclasses.replace(document, paragraphs=_hashed(document, write))


def _hashed(document, write):
    digest, is_empty = hashlib.blake2b(digest_size=8), True
    for paragraph in document.paragraphs:
        yield paragraph
        is_empty = False
        digest.update(paragraph.encode(errors="surrogatepass") + b"\n\n")
        if document.is_rows:
            write(_as_int64(digest))
            digest, is_empty = hashlib.blake2b(digest_size=8), True
    if not is_empty:
        write(_as_int64(digest))


def _as_int64(digest):
    """A digest of 8 bytes as an array (1,)."""
    return np.frombuffer(digest.digest(), dtype="<i8")
