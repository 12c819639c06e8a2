"""The text files below a folder; the lines of a file, a table or the standard input."""

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
from d2l_bert.tokenization import in_memory, tables
from d2l_bert.tokenization.python_docs import PYTHON_DOCS
from d2l_bert.tokenization.text_formats import LINES_OF_FORMAT


logger = logging.getLogger(__name__)

STDIN = "-"  # in place of a file: the standard input
PREPARED_FILE = "prepared.json"  # the record of a prepared folder

# Names of files, or of their folders: train.txt, wiki.test.tokens, dev/a.txt.
A_TRAINING_FILE = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
A_TEST_FILE = re.compile(r"(?<![a-z])(test|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)

# Each of these files shows that a folder is no text. The first two are in a prepared folder, from which the record may
# have been lost; the third is in a model.
NOT_IN_TEXT = (PREPARED_FILE, "hashes.bin", "tokenizer_config.json")

READ_SUFFIXES = (".txt", ".md", ".log", *LINES_OF_FORMAT, *tables.TABLE_SUFFIXES)


@dataclass(frozen=True)
class FoundFiles:
    """
    What a path leads to.

    Args:
        files: sorted by the names of their folders and their own, the same on every machine.
        linked: how many of them lie outside of the folder, behind links.
        remarks: what to say of a folder: that files lie behind links, and which were left out; "" for nothing.
    """

    files: list[Path]
    linked: int = 0
    remarks: str = ""


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
    kinds_left_out = shortened("; ".join(_kinds(left_out)), 1000)
    if not taken:
        raise UserError(
            f"{shown}: no text file in this folder{f' ({kinds_left_out})' if kinds_left_out else ''}; name its files, "
            f"as {shown}/*.txt: a file that is named is read as text. Of a folder these are read: "
            f"{', '.join(READ_SUFFIXES)} and files without a suffix, also packed as "
            f"{' or '.join(tables.PACKED_SUFFIXES)}"
        )
    _refuse_mostly_left_out(shown, taken, left_out)
    home = os.path.realpath(path)
    linked = [(file, real) for real, file in taken.items() if not real.is_relative_to(home)]
    remarks = []
    if linked:
        link, real = linked[0]
        example = f"{link.relative_to(path)} -> {real}"
        remarks.append(f"{counted(len(linked), 'file')} behind links out of this folder, such as {example}")
    if tests := _files_for_tests(taken.values(), path):
        whose = "its name" if len(tests) == 1 else "their names"
        remarks.append(f"also read, though for tests by {whose}: {', '.join(tests)}")
    if kinds_left_out:
        remarks.append(f"left out: {kinds_left_out}")
    files = sorted(taken.values(), key=lambda file: file.parts)
    return FoundFiles(files, len(linked), "; ".join(remarks))


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
        is_suffix = kind.startswith(".")  # else "pipes and devices" or "binary without a suffix", which are no text
        if not is_suffix or size <= read:
            continue
        readable = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
        is_text = bool(readable) and not _is_binary(readable[0])  # one file shows what those of its suffix are
        if is_text:
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
    taken = {}  # the path without links -> the path in the folder
    left_out = {}  # the kind -> paths
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
    with explained(f"{file}: cannot be read", tables.way_out_of(file), OSError):
        try:
            beginning = tables.open_unpacked(file).read(1 << 16)
        except UserError:  # which `open_unpacked` raises for an archive
            return True
    has_byte_order_mark = beginning.startswith((*tables.BYTE_ORDER_MARKS,))
    return b"\0" in beginning and not has_byte_order_mark


def _files_below(top):
    """
    All files in a folder and its subfolders but hidden ones, each with its path without links.

    Files come first, then links to files; both are sorted by their paths.

    Links to folders are followed after all folders that need no link: the path of a file then follows from the names
    alone. Each folder is read once. The folders to be read are in a list, as they may be nested in any depth.
    """
    plain = []
    linked = []
    seen = set()
    waiting = [(top, Path(os.path.realpath(top)))]
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
    """Refuse a prepared folder or a model, whose vocabulary and card are no text."""
    for name in NOT_IN_TEXT:
        if (folder / name).exists():
            raise UserError(
                f"{shortened(str(folder), 200)}: a prepared folder or a model, where text is wanted; take it out, or "
                f"give text alone (pretrain takes prepared folders, each with its {PREPARED_FILE}, and none beside "
                f"text)"
            )


def lines_of_text_file(file: Path, stdin: BinaryIO | None = None, in_pieces: bool = False) -> Iterator[str]:
    """
    The lines of a text file, decoded by `tables.lines_of`, without the characters at their ends.

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
        data: a text file as in `lines_of_text_file`, or a table; `-` for text on the standard input. The file may be
            larger than the memory; a line may have `tables.LONGEST_LINE` characters. Or data in memory, as in
            `in_memory.as_dataset`, of which each row counts as a line.
        text_column: the column of text in a table, and in the cells of other lines.
        separator: between the cells of a CSV file, as in `tables.table_rows`.

    Raises:
        UserError: there is no such file, or it is a folder or a `.json` file; while it is read, the file cannot be
            read, is damaged or is not text, or has no such column.
    """
    if in_memory.is_in_memory(data):
        rows = in_memory.as_dataset(data, text_column).with_format(None)
        with_places = ((f"row {number:,}", row) for number, row in enumerate(rows, 1))
        return tables.texts_in(with_places, text_column, explained(in_memory.NAME, "", ValueError))
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
        return _with_cells(_texts_of(lines_of_text_file(path), text_column, file), text_column)
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
    lines = _texts_of(lines_of_text_file(Path(source), standard_input()), text_column, source)
    for number, line in enumerate(lines):
        if number == 0 and text_column in _object_in(line):
            raise UserError(
                f"{source}: holds objects of JSON with {text_column!r}; give them as a file that ends in .jsonl"
            )
        yield line


def _texts_of(lines: Iterator[str], text_column: str, source: str) -> Iterator[str]:
    """Lines that are texts. Raises `UserError` if the first is the header of a table with the column."""
    for number, line in enumerate(lines):
        # The column's name alone may be the header of a table with one column. It is read as a text of one word.
        is_name_alone = line.strip().casefold() == text_column.casefold()
        if number == 0 and not is_name_alone:
            tables.refuse_header(line, [text_column], source)
        yield line


def _object_in(line: str) -> dict:
    """The object of JSON that a line is; empty for any other line."""
    try:
        content = json.loads(line) if line.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return content
