"""`Document`: a text as paragraphs; the documents that the lines of a file, or the rows of a table, make."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from d2l_bert.tokenization import tables
from d2l_bert.tokenization.seen_lines import SeenLines
from d2l_bert.tokenization.text_layout import find_layout, split_documents, with_single_spaces


# How lines divide a text file or rows is found from the first lines or rows with this many characters. A paragraph of
# several lines that is longer is cut between them, so a file may be larger than the memory.
READ_CHARACTERS = 1 << 20

# With `--documents file`, this many rows of a table or a dataset make one document.
BLOCK_ROWS = 64


@dataclass
class Document:
    """
    One text as a sequence of paragraphs.

    Args:
        paragraphs: strings of one line each, or of one line a sentence. May be an iterator: read the paragraphs only
            once.
        source: the number of the document's source in the list of the run's sources, from 0.
        are_sentences: whether each line of a paragraph is a sentence.
    """

    paragraphs: Iterable[str]
    source: int = 0
    are_sentences: bool = False


def text_documents(
    lines: Iterator[str], counts: Counter, seen: SeenLines, documents: str = "auto"
) -> Iterator[Document]:
    """
    The documents of a text file.

    Args:
        lines: of the file, as in `files.lines_of_text_file`.
        counts: how the file was read is counted.
        seen: keeps some of its lines.
        documents: where documents end, as in `find_layout`.

    Raises:
        UserError: as in `lines_of_text_file`.
    """
    first_lines = _beginning(lines)
    layout = find_layout(first_lines, documents)
    seen.add(first_lines, are_joined=layout.lines == "wrapped")
    are_sentences = layout.lines == "sentences"
    paragraphs_of_documents = split_documents(itertools.chain(first_lines, lines), layout, READ_CHARACTERS, counts)
    for number, paragraphs in enumerate(paragraphs_of_documents):
        if number == 0:  # only a file with a document is counted
            counts[f"files {layout.description()}"] += 1
        yield Document(paragraphs, are_sentences=are_sentences)


def row_documents(
    texts: Iterable[str], counts: Counter, seen: SeenLines, documents: str = "auto"
) -> Iterator[Document]:
    """
    The documents of rows: each row with text is one, unless `documents` says otherwise.

    What the lines of the rows are is found for all rows together, from the first ones.

    Args:
        counts: how the rows were read is counted, and those without text.
        seen: keeps some of their lines.
        documents: `auto`, `blank_line`, `line`, or `file` for documents of `BLOCK_ROWS` rows, in which each row is a
            paragraph.
    """
    joins_rows = documents == "file"  # BLOCK_ROWS rows make a document
    ends_in_row = "file" if documents == "auto" else documents  # to `find_layout` a row is a file
    texts = _with_text(texts, counts)
    first_rows = _beginning(texts)
    lines_of_rows = []  # with an empty line between two rows
    for text in first_rows:
        if lines_of_rows:
            lines_of_rows.append("")
        lines_of_rows += tables.LINE_END.split(text.strip())
    layout = find_layout(lines_of_rows, ends_in_row)
    seen.add(lines_of_rows, are_joined=layout.lines == "wrapped")
    are_sentences = layout.lines == "sentences"
    rows = itertools.chain(first_rows, texts)
    if joins_rows:
        paragraphs = (with_single_spaces(text, READ_CHARACTERS, counts) for text in rows)
        while block := list(itertools.islice(paragraphs, BLOCK_ROWS)):
            counts[f"rows read in documents of {BLOCK_ROWS} rows"] += len(block)
            yield Document(block, are_sentences=are_sentences)
        return
    for text in rows:
        counts[f"rows {layout.description()}"] += 1
        for paragraphs in split_documents(tables.LINE_END.split(text), layout, READ_CHARACTERS, counts):
            yield Document(paragraphs, are_sentences=are_sentences)


def _with_text(texts, counts):
    """The texts that are not empty or only white space."""
    for text in texts:
        if text and not text.isspace():
            yield text
        else:
            counts["rows without text"] += 1


def _beginning(texts):
    """Take the first texts from an iterator, until they have `READ_CHARACTERS` characters; the rest stays in it."""
    beginning = []
    characters = 0
    for text in texts:
        beginning.append(text)
        characters += len(text) + 1  # and a line end
        if characters >= READ_CHARACTERS:
            break
    return beginning
