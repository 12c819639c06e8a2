"""The text in the lines of a file of another format: subtitles, FASTA and FASTQ, articles of WikiExtractor."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from d2l_bert.messages import UserError
from d2l_bert.tokenization.text_layout import ends_with_stop


# The most characters of a sequence in a line, as a chromosome may be larger than the memory. A multiple of
# `sentences.LONGEST_PIECE`, at which lines without spaces are cut.
SEQUENCE_CHARACTERS = 600 * 1024

# Lines of subtitles without a full stop that are joined.
MOST_JOINED = 50

_TIMES = re.compile(r"\s*(\d+:)?\d+:\d+[.,]\d+ --> (\d+:)?\d+:\d+[.,]\d+")
_TAG = re.compile(r"</?[a-z][^<>]*>|\{\\[^{}]*\}", re.IGNORECASE)  # of HTML and WebVTT, and of a style

ARTICLE_BEGINS = '<doc id="'
ARTICLE_ENDS = "</doc>"


def subtitle_lines(lines: Iterator[str], file: Path) -> Iterator[str]:
    """
    What is said in subtitles (SubRip, WebVTT), without tags: a line up to the end of a sentence.

    What stands above the times, as the number of a subtitle and notes, is left out.
    """
    is_said = False
    parts = []
    for line in lines:
        if not line.strip():
            is_said = False
        elif _TIMES.match(line):
            is_said = True
        elif is_said and (said := _TAG.sub("", line).strip()):
            parts.append(said)
            if ends_with_stop(said) or len(parts) == MOST_JOINED:
                yield " ".join(parts)
                parts = []
    if parts:
        yield " ".join(parts)


def fasta_lines(lines: Iterator[str], file: Path) -> Iterator[str]:
    """The sequences of FASTA, each a line without its header, which begins with `>`, or `;` as in the oldest files."""
    parts = []
    size = 0
    for line in lines:
        begins = line.startswith((">", ";"))
        if begins or size >= SEQUENCE_CHARACTERS:
            if size:
                yield "".join(parts)
            parts = []
            size = 0
        if not begins:
            parts.append(line.strip())
            size += len(parts[-1])
    if size:
        yield "".join(parts)


def fastq_lines(lines: Iterator[str], file: Path) -> Iterator[str]:
    """
    The sequences of FASTQ: the second of every four lines.

    Raises:
        UserError: the first of four lines does not begin with `@`, or the third with `+`.
    """
    place = 0  # within the four lines
    for number, line in enumerate(lines, 1):
        if place == 0 and not line.strip():
            continue  # behind the last
        if (place == 0 and not line.startswith("@")) or (place == 2 and not line.startswith("+")):
            raise UserError(
                f"{file}: line {number:,} is not as in FASTQ, which has four lines a read (@name, sequence, +, "
                f"qualities); write so, or a sequence a line as .txt"
            )
        if place == 1:
            yield line.strip()
        place = (place + 1) % 4


# By the suffix of the unpacked file.
LINES_OF_FORMAT: dict[str, Callable[[Iterator[str], Path], Iterator[str]]] = {
    ".srt": subtitle_lines,
    ".vtt": subtitle_lines,
    ".fastq": fastq_lines,
    ".fq": fastq_lines,
    **dict.fromkeys((".fa", ".fasta", ".fna", ".ffn", ".faa"), fasta_lines),
}


def articles(lines: Iterator[str]) -> Iterator[str]:
    """The articles of WikiExtractor, `<doc id="..." url="..." title="...">` to `</doc>`, each as a text of lines."""
    article = []
    for line in lines:
        if line.startswith(ARTICLE_BEGINS) or line == ARTICLE_ENDS:
            if article:
                yield "\n".join(article)
            article = []
        else:
            article.append(line)
    if article:
        yield "\n".join(article)
