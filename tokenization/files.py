"""The text files below a folder; the lines of a file, a table or the standard input."""

import contextlib
import heapq
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from d2l_bert.messages import UserError, counted, explained, shortened, standard_input
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.in_memory import as_dataset, is_in_memory
from d2l_bert.tokenization.python_docs import PYTHON_DOCS
from d2l_bert.tokenization.text_formats import LINES_OF_FORMAT


logger = logging.getLogger(__name__)

STDIN = "-"  # in place of a file: the standard input
PREPARED_FILE = "prepared.json"  # the record of a prepared folder
# Names of files, or of their folders: train.txt, wiki.test.tokens, dev/a.txt.
A_TRAINING_FILE = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
A_TEST_FILE = re.compile(r"(?<![a-z])(test|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)

READ_SUFFIXES = (".txt", ".md", ".log", *LINES_OF_FORMAT, *tables.TABLE_SUFFIXES)


@dataclass(frozen=True)
class FoundFiles:
    """
    What a path leads to.

    Args:
        files: sorted by the names of their folders and their own, the same on every machine.
        outside: how many of them lie outside of the folder, behind links.
        said: of a folder, what was left out and what lies outside, in words; "" if there is nothing to say.
    """

    files: list[Path]
    outside: int = 0
    said: str = ""


def text_files(path: str | Path) -> FoundFiles:
    """
    The text files and tables in a folder and its subfolders; for the path of a file, this file.

    Of a folder, files with the suffixes `READ_SUFFIXES` and text files without a suffix are taken, packed or not.
    Hidden files and folders are skipped. Links are followed, also those out of the folder, as texts are often
    collected by links. A file that several paths lead to is taken once.

    Raises:
        UserError: the path does not exist, is a `.json` file, or is neither a file nor a folder; or the folder has no
            text file, or more text in files of a kind that is left out.
        OSError: the file system refuses to say.
    """
    path = Path(path)
    if path.is_file() and tables.file_kind(path) != "json":
        return FoundFiles([path])
    if not path.is_dir():
        _refuse_path(path)
    shown = shortened(str(path), 200)
    taken, left_out = _sort_out(path)
    said = shortened("; ".join(_kinds(left_out)), 1000)
    if not taken:
        raise UserError(
            f"{shown}: no text file in this folder{f' ({said})' if said else ''}; name its files, as {shown}/*.txt: a "
            f"file that is named is read as text. Of a folder these are read: {', '.join(READ_SUFFIXES)} and files "
            f"without a suffix, also packed as {' or '.join(tables.PACKED_SUFFIXES)}"
        )
    _refuse_mostly_left_out(shown, taken, left_out)
    home = os.path.realpath(path)
    outside = [real for real in taken if not real.is_relative_to(home)]
    lines = []
    if outside:
        first = f"{taken[outside[0]].relative_to(path)} -> {outside[0]}"
        lines.append(f"{counted(len(outside), 'file')} behind links out of this folder, such as {first}")
    if tests := _files_for_tests(taken.values(), path):
        lines.append(
            f"also read, though for tests by {'its name' if len(tests) == 1 else 'their names'}: {', '.join(tests)}"
        )
    if said:
        lines.append(f"left out: {said}")
    return FoundFiles(sorted(taken.values(), key=lambda file: file.parts), len(outside), "; ".join(lines))


def _files_for_tests(files, folder):
    """The files whose names say that they are to evaluate on, such as `test.txt`, if others are for training."""
    names = [str(file.relative_to(folder)) for file in sorted(files)]
    if not any(A_TRAINING_FILE.search(name) for name in names):
        return []
    return [name for name in names if A_TEST_FILE.search(name)]


def _kinds(left_out):
    """A line for each kind of the files that are left out: how many, and their bytes."""
    for kind, files in left_out.items():
        size = sum(file.lstat().st_size for file in files)
        yield f"{kind}: {counted(len(files), 'file')}, {size:,} bytes"


def _refuse_mostly_left_out(shown, taken, left_out):
    """Refuse a folder where files of one kind that is left out hold more text than all that are read."""
    read = sum(file.stat().st_size for file in taken.values())
    for kind, files in left_out.items():
        size = sum(file.lstat().st_size for file in files)
        if not kind.startswith(".") or size <= read:
            continue
        readable = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
        if readable and not _is_binary(readable[0]):
            raise UserError(
                f"{shown}: most of its text is left out: {kind}: {counted(len(files), 'file')}, {size:,} bytes, "
                f"beside {read:,} bytes that are read; name the files that are to be read, as {shown}/*{kind}"
            )


def _refuse_path(path):
    """Say why a path that is no folder, and no file with text, cannot be read; raises `UserError`."""
    shown = shortened(str(path), 200)
    tables.refuse_pipe(path, shown, "write its text to a file, and give that")
    if path.exists():
        raise UserError(f"{shown}: no text; give texts of JSON as lines of JSON (.jsonl)")
    if str(path) == STDIN:
        raise UserError(f"{STDIN}: the standard input is not read here; write its text to a file, and give that")
    raise UserError(f"{shown}: there is no such file or folder; give one, or {PYTHON_DOCS}")


def _sort_out(folder):
    """
    The files in a folder that are read, by their paths without links; and those that are not, in a list for each kind.
    """
    taken = {}
    left_out = {}
    for file, real in _files_below(folder):
        suffix = tables.suffix_unpacked(file)
        if file.exists() and not file.is_file():
            left_out.setdefault("pipes and devices", []).append(file)
        elif suffix in READ_SUFFIXES or (not suffix and not _is_binary(file)):
            taken.setdefault(real, file)
        else:
            left_out.setdefault(suffix or "binary without a suffix", []).append(file)
    return taken, left_out


def _is_binary(file):
    """Whether a file is an archive, or its beginning holds NUL, which text without a byte order mark does not."""
    with (
        explained(f"{file}: cannot be read", tables.way_out_of(file), OSError),
        contextlib.suppress(UserError),  # of an archive
    ):
        beginning = tables.open_unpacked(file).read(1 << 16)
        return b"\0" in beginning and not beginning.startswith((*tables.BYTE_ORDER_MARKS,))
    return True


def _files_below(folder):
    """
    All files in a folder and its subfolders but hidden ones, each with its path without links, those that are no links
    first, each sorted by their names.

    Links to folders are followed, each folder once: after all folders that need no link, so that the path of a file
    follows from the names alone. The folders to be read are in a list: they may be nested in any depth.
    """
    plain = []
    linked = []
    seen = set()
    waiting = [(folder, Path(os.path.realpath(folder)))]
    links = []  # to folders; a heap, as the first by name is followed next
    while waiting or links:
        if not waiting:
            link = Path(*heapq.heappop(links))
            waiting.append((link, Path(os.path.realpath(link))))
        folder, real = waiting.pop()
        if real in seen:
            continue
        seen.add(real)
        _refuse_prepared(folder)
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            is_link = path.is_symlink()
            is_folder = path.is_dir()
            if is_link and is_folder:
                heapq.heappush(links, path.parts)
            elif is_folder:
                waiting.append((path, real / path.name))
            elif is_link:
                linked.append((path, Path(os.path.realpath(path))))
            else:
                plain.append((path, real / path.name))
    yield from sorted(plain, key=lambda found: found[0].parts)
    yield from sorted(linked, key=lambda found: found[0].parts)


def _refuse_prepared(folder):
    """Refuse a prepared folder, also without its record, or a model, whose vocabulary and card are no text."""
    for name in (PREPARED_FILE, "hashes.bin", "tokenizer_config.json"):
        if (folder / name).exists():
            raise UserError(
                f"{shortened(str(folder), 200)}: a prepared folder or a model, where text is wanted; take it out, or "
                f"give text alone (pretrain takes prepared folders, each with its {PREPARED_FILE}, and none beside "
                f"text)"
            )


def decoded(file: Path, stdin: BinaryIO | None = None, in_pieces: bool = False) -> Iterator[str]:
    """
    The lines of a text file, without the characters at their ends, as `tables.lines_of` reads them.

    Args:
        stdin: read this stream instead of the file, whose name then only serves for messages.
        in_pieces: give a line of more than `tables.LONGEST_LINE_PIECE` characters in pieces.

    Raises:
        UserError: the file cannot be read, is cut short, is binary, has another encoding, or a line is too long.
    """
    longest = tables.LONGEST_LINE_PIECE if in_pieces else tables.LONGEST_LINE
    with explained(f"{file}: cannot be read", tables.way_out_of(file), OSError), explained(file, "", ValueError):
        for line in tables.lines_of(file, stdin, longest, in_pieces):
            yield line.rstrip("\r\n")


def lines_and_cells(data: Any, text_column: str = "text", separator: str = "auto") -> Iterator[tuple[str, dict]]:
    """
    The lines of a file in order, each without the characters at its end, and the cells of each row by their columns.

    Whether the file is there is checked at once; it is read with the lines. A line ends as in editors
    (`tables.LINE_END`). In a table each row counts as a line. Empty lines and rows without text are empty strings.

    Args:
        data: a text file as in `decoded`, or a table; `-` for text on the standard input. The file may be larger than
            the memory; a line may have `tables.LONGEST_LINE` characters. Or data in memory, as in
            `in_memory.as_dataset`, of which each row counts as a line.
        text_column: the column of text in a table, and in the cells of other lines.
        separator: between the cells of a CSV file, as in `tables.table_rows`.

    Raises:
        UserError: there is no such file, or it is a folder or a `.json` file; while it is read, the file cannot be
            read, is damaged or is not text, or has no such column.
    """
    if is_in_memory(data):
        rows = as_dataset(data, text_column).with_format(None)
        with_places = ((f"row {number:,}", row) for number, row in enumerate(rows, 1))
        return tables.texts_in(with_places, text_column, explained("data in memory", "", ValueError))
    file = str(data)
    if file == STDIN:
        return _with_cells(_texts_of_stdin(text_column), text_column)
    path = Path(file)
    tables.refuse_pipe(path, file, f"give a file, or {STDIN} and pipe the text into the command")
    kind = tables.file_kind(path) if path.is_file() else "none"
    if kind in ("none", "json"):
        raise UserError(
            f"{file}: no file with a text in each line; give one, or {STDIN} for the standard input, and texts of "
            f"JSON as lines of JSON (.jsonl)"
        )
    if kind == "text":
        return _with_cells(_texts_of(decoded(path), text_column, file), text_column)
    return tables.text_rows(path, text_column, separator, all_cells=True)


def _with_cells(lines, text_column):
    """Each line, and the cells of a row that has it as its text."""
    for line in lines:
        yield line, {text_column: line}


def _texts_of_stdin(text_column: str) -> Iterator[str]:
    """
    The lines of the standard input, which are texts.

    Raises:
        UserError: it is closed; or the first line is that of a table with the column, which would be read as texts.
    """
    source = "standard input"
    lines = _texts_of(decoded(Path(source), standard_input()), text_column, source)
    for number, line in enumerate(lines):
        if number == 0 and text_column in _object_in(line):
            raise UserError(
                f"{source}: holds objects of JSON with {text_column!r}; give them as a file that ends in .jsonl"
            )
        yield line


def _texts_of(lines: Iterator[str], text_column: str, source: str) -> Iterator[str]:
    """Lines that are texts. Raises `UserError` if the first is the header of a table with the column."""
    for number, line in enumerate(lines):
        if number == 0 and line.strip().casefold() != text_column.casefold():  # one word is a text
            tables.refuse_header(line, [text_column], source)
        yield line


def _object_in(line: str) -> dict:
    """The object of JSON that a line is; empty for any other line."""
    try:
        content = json.loads(line) if line.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return content
