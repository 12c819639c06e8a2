"""`Source`, an iterator of documents, and how files, folders and datasets become sources; the lines of a file."""

import contextlib
import dataclasses
import io
import itertools
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from d2l_bert.errors import UserError, explained
from d2l_bert.folders import base_name
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.cache import content_hash
from d2l_bert.tokenization.division import divided, find_division
from d2l_bert.tokenization.python_docs import python_docs, required_distributions
from d2l_bert.tokenization.sentences import Document
from d2l_bert.tokenization.tables import TABLE_SUFFIXES, suffix_unpacked, text_rows


PYTHON_DOCS = "python-docs"
PREPARED_FILE = "prepared.json"  # the record of a prepared folder
READ_SUFFIXES = (".txt", ".md", *tables.TABLE_SUFFIXES)

# A text file is read in pieces of at most this many characters, so a file may be larger than the memory. How its lines
# divide it is found from the first piece; how those of rows do, from the first rows with as many characters.
READ_CHARACTERS = 1 << 20

# With `--documents file`, this many rows of a table or a dataset make one document.
BLOCK_ROWS = 64

# How files and rows were read: the keys of `Source.counts`, and in words.
READ_AS = {
    f"{unit}_{documents}_{lines}": f"{unit} {in_documents}, {in_words}"
    for unit in ("files", "rows")
    for documents, in_documents in {
        "file": "read as a document each",
        "blank_line": "with a document between empty lines",
        "line": "with a document a line",
        "block": f"in documents of {BLOCK_ROWS}",
    }.items()
    for lines, in_words in {
        "wrapped": "their lines joined",
        "paragraphs": "a paragraph a line",
        "sentences": "a sentence a line",
    }.items()
}


@dataclasses.dataclass
class Source:
    """
    One file, folder or dataset with text.

    Args:
        name: shown in messages and on the model card.
        identity: JSON values that change whenever the documents do, but not with the place of the files: hashes of
            their content, and the options they are read with.
        documents: an iterator, so the documents can be read only once.
        counts: increased while the documents are read: `rows_without_text` of tables and datasets,
            `files_without_text`, and how the others were read (`READ_AS`). A folder's `files_of_other_kinds` are
            counted at the start.
        is_on_hub: whether the source is a dataset on the Hub.
    """

    name: str
    identity: list
    documents: Iterator[Document]
    counts: Counter
    is_on_hub: bool = False


def all_documents(sources: Sequence[Source]) -> Iterator[Document]:
    """
    The documents of all sources, one source after the other, each with the number of its source.

    Raises:
        UserError: a source cannot be read, or a process that reads `python-docs` was killed or could not be started.
    """
    for number, source in enumerate(sources):
        with explained(f"{source.name}: cannot be read", "put it back or leave it out", OSError):
            for document in source.documents:
                document.source = number
                yield document


def file_source(
    path: str | Path,
    text_column: str = "text",
    max_documents: int | None = None,
    processes: int = 1,
    documents: str = "auto",
) -> Source:
    """
    The source for a text file, a table, a folder of them in sorted order, or `python-docs`.

    The first `READ_CHARACTERS` characters of a text file show whether it is one document or several, and what its
    lines are (`find_division`). In a table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) each row is a document. Text files
    and tables other than Parquet may be packed (`.gz`, `.zst`). A file with another suffix is read as text if `path`
    is this file. A folder is searched for files with known suffixes and packed files; hidden files and folders are
    skipped.

    Args:
        text_column: column of text in the tables.
        max_documents: most documents to read; files and rows without text do not count.
        processes: how many processes read `python-docs`. Files and folders are read in this process.
        documents: where documents end in files (`SourceConfig`). `python-docs` has its own documents.

    Raises:
        UserError: as in `text_files`, or a file cannot be read. While documents are read: a file is damaged or not
            UTF-8 text, a table has no text in the column, or one of several processes was killed or could not be
            started.
    """
    counts = Counter()
    if str(path) == PYTHON_DOCS:
        versions = {package.metadata["Name"]: package.version for package in required_distributions("d2l-bert")}
        identity = [PYTHON_DOCS, platform.python_version(), versions, max_documents]
        return Source(PYTHON_DOCS, identity, itertools.islice(python_docs(processes), max_documents), counts)
    files = text_files(path, counts)
    identity = [[[file.name, content_hash(file)] for file in files], text_column, max_documents]
    found = itertools.islice(_of_files(files, text_column, documents, counts), max_documents)
    return Source(base_name(path), [*identity, *_unless_auto(documents)], found, counts)


def _unless_auto(documents):
    """What `documents` adds to a source's identity: nothing by default, as in the fingerprints of released models."""
    return [] if documents == "auto" else [documents]


def _of_files(files, text_column, documents, counts):
    """The documents of all files. Files without text are counted."""
    for file in files:
        if file.stat().st_size == 0:  # the readers of tables would refuse an empty file
            found = ()
        elif tables.suffix_unpacked(file) in tables.TABLE_SUFFIXES:
            rows = rows_with_text(tables.text_rows(file, text_column), counts)
            found = row_documents(base_name(file), rows, counts, documents)
        else:
            found = text_documents(file, counts, documents)
        has_text = False
        for document in found:
            has_text = True
            yield document
        counts["files_without_text"] += not has_text


def text_files(path: str | Path, counts: Counter | None = None) -> list[Path]:
    """
    The text files and tables in a folder and its subfolders, sorted; for the path of a file, this file.

    Args:
        counts: its entry `files_of_other_kinds` is increased by the files that are left out, but for hidden ones.

    Raises:
        UserError: the path does not exist, is a `.json` file, or is neither a file nor a folder; or the folder has no
            text file, or one of its folders cannot be read.
    """
    path = Path(path)
    if path.is_file() and tables.suffix_unpacked(path) != ".json":
        return [path]
    if not path.is_dir():
        raise UserError(
            f"{path}: no text file or folder; give one, or {PYTHON_DOCS}, and texts of JSON as lines of JSON (.jsonl)"
        )
    files, counts = [], Counter() if counts is None else counts
    for file in _files_below(path):
        if tables.suffix_unpacked(file) not in READ_SUFFIXES and file.suffix.lower() not in tables.PACKED_SUFFIXES:
            counts["files_of_other_kinds"] += 1
        elif file.is_file():
            files.append(file)
    if not files:
        raise UserError(
            f"{path}: no text file in this folder; give a folder with files of these kinds: "
            f"{', '.join(READ_SUFFIXES)}, also packed as {' or '.join(tables.PACKED_SUFFIXES)}"
        )
    return sorted(files)


def _files_below(path):
    """All files in a folder and its subfolders but hidden ones. Links to folders are followed, each folder once."""

    def refuse(error):
        raise error

    seen = set()
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(folder))
        if {PREPARED_FILE, "text_hashes.npy"} & set(names):  # also one that has lost its record
            raise UserError(
                f"{folder}: a prepared folder, not text; give the text, or name every prepared folder to pretrain: "
                f"--corpus {folder} ..."
            )
        folders[:] = (
            name
            for name in sorted(folders)
            if not name.startswith(".") and os.path.realpath(os.path.join(folder, name)) not in seen
        )
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def text_documents(file: Path, counts: Counter, documents: str = "auto") -> Iterator[Document]:
    """
    The documents of a UTF-8 file, unpacked if its name ends in `.gz` or `.zst`; reads the file in pieces.

    Args:
        counts: how the file was read (`READ_AS`) is counted.
        documents: where documents end, as in `find_division`.

    Raises:
        UserError: the file cannot be read, is cut short, is binary, or has another encoding.
    """
    pieces = decoded(file)
    first = next(pieces, "")
    beginning = first.split("\n")
    if len(beginning) > 1:  # the last line is empty, or goes on in the next piece
        del beginning[-1]
    division = find_division(beginning, documents)
    # A line that is a document is not cut.
    longest = math.inf if division.documents == "line" else READ_CHARACTERS
    lines = split_lines(itertools.chain([first], pieces), longest)
    name, are_sentences = base_name(file), division.lines == "sentences"
    for number, paragraphs in enumerate(divided(lines, division, READ_CHARACTERS)):
        if number == 0:
            counts[f"files_{division.documents}_{division.lines}"] += 1
        yield Document(name, paragraphs, are_sentences=are_sentences)


def split_lines(pieces: Iterable[str], longest: float = math.inf) -> Iterator[str]:
    """
    The lines of a text that is given in pieces.

    Args:
        longest: characters. A longer line is cut at spaces where there are any, to bound the memory.
    """
    unfinished = ""
    for piece in pieces:
        *lines, unfinished = f"{unfinished}{piece}".split("\n")
        yield from lines
        if len(text := unfinished.strip()) > longest:
            # Both parts hold text: an empty line may end a document.
            unfinished = unfinished.lstrip()
            cut = text.rfind(" ") + 1 or len(text) - 1
            yield unfinished[:cut]
            unfinished = unfinished[cut:]
    if unfinished:
        yield unfinished


def decoded(file: Path, stdin: BinaryIO | None = None) -> Iterator[str]:
    """
    The text of a UTF-8 file in pieces of `READ_CHARACTERS`, unpacked if its name ends in `.gz` or `.zst`.

    Args:
        stdin: read this stream instead of the file, whose name then only serves for messages.

    Raises:
        UserError: the file cannot be read, is cut short, is binary, or has another encoding.
    """
    with explained(
        f"{file}: cannot be read as UTF-8 text",
        "convert it, as with `iconv -f LATIN1 -t UTF-8`, or leave it out",
        OSError,
        UnicodeError,
    ):
        text = io.TextIOWrapper(tables.open_unpacked(file) if stdin is None else stdin, "utf-8-sig", newline="")
        while piece := text.read(READ_CHARACTERS):
            if "\0" in piece:
                raise UserError(f"{file}: a binary file, not text (it holds NUL); leave it out")
            yield piece


def dataset_source(
    name: str,
    config: str | None = None,
    split: str = "train",
    text_column: str = "text",
    streaming: bool = False,
    max_documents: int | None = None,
    options: tuple[str, str] = ("--corpus", "--dataset_split"),
    documents: str = "auto",
) -> Source:
    """
    The source for a dataset: on the Hub, in a folder that `datasets.load_dataset` can load, or from `save_to_disk`.

    A row is a document.

    Args:
        streaming: read the rows over the network or from the files one by one; without it, the whole dataset is
            first downloaded and converted to Arrow.
        max_documents: most documents to read; rows without text do not count.
        options: the options that take a file instead, and the split: for error messages.
        documents: where documents end, as in `row_documents`.

    Raises:
        UserError: `name` is a file; the dataset cannot be loaded or has no rows; the configuration, split or column
            does not exist, or the column does not hold text. While documents are read: a row cannot be read, or
            has something other than text in the column.
    """
    of_files, of_split = options
    is_on_hub = not Path(name).exists()
    shown = name if is_on_hub else base_name(name)
    hint = f"give an id on the Hub, or a folder of save_to_disk or of data files; {of_files} takes files"
    with dataset_errors(name, f"{hint}; {of_split} names the split, ID:CONFIG a configuration"):
        if Path(name, PREPARED_FILE).exists():
            raise ValueError("a prepared folder, which --corpus of pretrain takes")
        if is_saved_dataset(name):
            if config is not None:
                raise ValueError(f"a folder of save_to_disk has no configurations, so none is called {config}")
            rows, content = _open_saved(name, split)
        else:
            rows, content = _open_dataset(name, config, split, streaming)
        if rows.features is not None:  # None for a stream whose columns are known only from its rows
            rows = rows.select_columns([text_column])
    counts = Counter()
    texts = rows_with_text(_dataset_texts(name, rows, text_column), counts)
    found = itertools.islice(row_documents(shown, texts, counts, documents), max_documents)
    identity = [shown, config, split, text_column, max_documents, content, *_unless_auto(documents)]
    return Source(shown, identity, found, counts, is_on_hub)


@contextlib.contextmanager
def dataset_errors(name: str, way_out: str) -> Iterator[None]:
    """
    Raise any exception of the block as `UserError` with the dataset's name.

    The library `datasets` raises many classes of exceptions; it also logs them, which is silenced in the block.
    """
    from datasets import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise UserError(f"dataset {name}: cannot be read ({reason}); {way_out}") from None
    finally:
        logging.set_verbosity(before)


def is_saved_dataset(folder: str) -> bool:
    """Whether this is a folder of `save_to_disk`."""
    return any((Path(folder) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _open_dataset(name, config, split, streaming):
    """
    A dataset's rows, and values that identify their content: hashes of local files, or for the Hub the hash of the
    library, which includes the revision.
    """
    import datasets

    builder = datasets.load_dataset_builder(name, config)
    if streaming:
        rows = builder.as_streaming_dataset(split=split)
    else:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    of_splits = builder.config.data_files or {}
    files = of_splits.get(split) or itertools.chain.from_iterable(of_splits.values())
    files = [Path(file) for file in files]
    if files and all(file.is_file() for file in files):
        return rows, [[file.name, content_hash(file)] for file in files]
    return rows, [builder.config_id, builder.hash]


def _open_saved(folder, split):
    """The rows in a folder of `save_to_disk`, and the hashes of their files."""
    import datasets

    rows = datasets.load_from_disk(folder)
    rows = rows[split] if isinstance(rows, datasets.DatasetDict) else rows
    content = [content_hash(Path(file["filename"])) for file in rows.cache_files]
    return rows.with_format(None), content  # a format such as "numpy" is saved too: it would turn texts into arrays


def _dataset_texts(name, rows, column):
    """The texts of a dataset's rows, or None for rows without one."""
    with dataset_errors(name, "repair it, or leave it out"):
        for number, row in enumerate(rows, 1):
            if not isinstance(row[column], str | None):
                raise TypeError(f"row {number:,}: column {column!r} holds {type(row[column]).__name__}, not text")
            yield row[column]


def rows_with_text(texts: Iterable[str | None], counts: Counter) -> Iterator[str]:
    """The texts that are not None, empty or only white space; the others are counted as `rows_without_text`."""
    for text in texts:
        if text and not text.isspace():
            yield text
        else:
            counts["rows_without_text"] += 1


def row_documents(name: str, texts: Iterable[str], counts: Counter, documents: str = "auto") -> Iterator[Document]:
    """
    The documents of rows: each row is one, unless `documents` says otherwise.

    What the lines of the rows are is found for all rows together, from the first ones.

    Args:
        counts: how the rows were read (`READ_AS`) is counted.
        documents: `auto`, `blank_line`, `line`, or `file` for documents of `BLOCK_ROWS` rows, in which each row is a
            paragraph.
    """
    texts = iter(texts)
    first, size = [], 0
    while size < READ_CHARACTERS and (text := next(texts, None)) is not None:
        first.append(text)
        size += len(text)
    beginning = [line for text in first for line in ("", *text.strip().split("\n"))]
    division = find_division(beginning[1:], "file" if documents == "auto" else documents)
    in_blocks, are_sentences = documents == "file", division.lines == "sentences"
    read_as = f"rows_{'block' if in_blocks else division.documents}_{division.lines}"
    rows = itertools.chain(first, texts)
    if in_blocks:
        blocks = iter(lambda: [" ".join(text.split()) for text in itertools.islice(rows, BLOCK_ROWS)], [])
        for number, block in enumerate(blocks):
            counts[read_as] += len(block)
            yield Document(f"{name} block {number}", block, is_rows=True, are_sentences=are_sentences)
        return
    for number, text in enumerate(rows):
        counts[read_as] += 1
        for paragraphs in divided(text.split("\n"), division, READ_CHARACTERS):
            yield Document(f"{name} row {number}", paragraphs, are_sentences=are_sentences)


# ---------------------------------------------------------------------------------------------------------------------

STDIN = "-"


def check_lines_file(file: str) -> None:
    """
    Check that `text_lines` can open a file.

    Raises:
        UserError: there is no such file, it is a folder, or it is a `.json` file.
    """
    if file != STDIN and (not Path(file).is_file() or suffix_unpacked(Path(file)) == ".json"):
        raise UserError(
            f"{file}: no file with a text in each line; give one, or {STDIN} for the standard input, and texts of "
            f"JSON as lines of JSON (.jsonl)"
        )


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
    pieces = decoded(Path("standard input"), sys.stdin.buffer) if file == STDIN else decoded(Path(file))
    yield from (line.removesuffix("\r") for line in split_lines(pieces))
