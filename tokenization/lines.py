"""The lines of a file, one text each: of a text file, of a column of a table, or of the standard input."""

import sys
from collections.abc import Iterator
from pathlib import Path

from d2l_bert.errors import UserError
from d2l_bert.tokenization.sources import decoded
from d2l_bert.tokenization.tables import TABLE_SUFFIXES, suffix_unpacked, text_rows


STDIN = "-"


def check_lines_file(file: str) -> None:
    """
    Check that `text_lines` can open a file.

    Raises:
        UserError: there is no such file, it is a folder, or it is a `.json` file.
    """
    path = Path(file)
    if file == STDIN:
        return
    if not path.exists():
        raise UserError(
            f"{file}: no such file; give a file with a text in each line, or {STDIN} for the standard input"
        )
    if path.is_dir():
        raise UserError(f"{file}: a folder; give one file with a text in each line")
    if suffix_unpacked(path) == ".json":
        raise UserError(f"{file}: a JSON file has no texts in lines; write its texts as lines of JSON (.jsonl)")


def text_lines(file: str, text_column: str = "text") -> Iterator[str]:
    """
    The lines of a file in order, each without the characters at its end; empty lines are empty strings.

    A line ends with a newline character, with or without a carriage return before. In a table (`.jsonl`, `.csv`,
    `.tsv`, `.parquet`), each row counts as a line; rows without text are empty strings.

    Args:
        file: a UTF-8 text file or a table, packed as `.gz` or `.zst` or not; `-` for text on the standard input. The
            file may be larger than the memory, a line may not.
        text_column: the column of text in a table.

    Raises:
        UserError: `check_lines_file` refuses the file, or the file cannot be read, is damaged or is not UTF-8 text, or
            has no such column.
    """
    check_lines_file(file)
    if file != STDIN and suffix_unpacked(Path(file)) in TABLE_SUFFIXES:
        if Path(file).stat().st_size:  # the readers of tables would refuse an empty file
            yield from (text or "" for text in text_rows(Path(file), text_column))
        return
    unfinished = ""
    for piece in decoded(Path("standard input"), sys.stdin.buffer) if file == STDIN else decoded(Path(file)):
        *lines, unfinished = f"{unfinished}{piece}".split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if unfinished:
        yield unfinished.removesuffix("\r")
