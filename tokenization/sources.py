"""`Source`, an iterator of documents, and how files, folders and datasets become sources; the lines of a file."""

import contextlib
import dataclasses
import io
import itertools
import operator
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
from d2l_bert.tokenization.python_docs import python_docs, required_distributions
from d2l_bert.tokenization.sentences import BLANK_LINE, Document, join_lines, split_paragraphs
from d2l_bert.tokenization.tables import TABLE_SUFFIXES, suffix_unpacked, text_rows


PYTHON_DOCS = "python-docs"
PREPARED_FILE = "prepared.json"  # the record of a prepared folder
READ_SUFFIXES = (".txt", ".md", *tables.TABLE_SUFFIXES)

# A text file is read in pieces of at most this many characters, so a file may be larger than the memory.
READ_CHARACTERS = 1 << 20

# If the rows of a table or a dataset are single lines, this many rows make one document.
BLOCK_ROWS = 64


@dataclasses.dataclass
class Source:
    """
    One file, folder or dataset with text.

    Args:
        name: shown in messages and on the model card.
        identity: JSON values that change whenever the documents do, but not with the place of the files: hashes of
            their content, and the options they are read with.
        documents: an iterator, so the documents can be read only once.
        counts: increased while the documents are read: `rows_without_text` of tables and datasets, and
            `files_without_text`. A folder's `files_of_other_kinds` are counted at the start.
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
                yield dataclasses.replace(document, source=number)


def file_source(
    path: str | Path, text_column: str = "text", max_documents: int | None = None, processes: int = 1
) -> Source:
    """
    The source for a text file, a table, a folder of them in sorted order, or `python-docs`.

    A text file is one document; blank lines separate its paragraphs. In a table (`.jsonl`, `.csv`, `.tsv`, `.parquet`)
    each row is a document, or `BLOCK_ROWS` rows are one if they are single lines (`row_documents`). Text files and
    tables other than Parquet may be packed (`.gz`, `.zst`). A file with another suffix is read as text if `path` is
    this file. A folder is searched for files with known suffixes and packed files; hidden files and folders are
    skipped.

    Args:
        text_column: column of text in the tables.
        max_documents: most text files and rows to read; files and rows without text do not count.
        processes: how many processes read `python-docs`. Files and folders are read in this process.

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
    return Source(base_name(path), identity, _documents(files, text_column, max_documents, counts), counts)


def _documents(files, text_column, max_documents, counts):
    texts = itertools.islice(_texts(files, text_column, counts), max_documents)
    for file, group in itertools.groupby(texts, key=operator.itemgetter(0)):
        if tables.suffix_unpacked(file) in tables.TABLE_SUFFIXES:
            yield from row_documents(base_name(file), (text for _, text in group))
        else:
            yield from (Document(base_name(file), paragraphs) for _, paragraphs in group)


def _texts(files, text_column, counts):
    """
    Pairs (file, text) for all texts: a text is an iterator of paragraphs for a text file, and a string for each row of
    a table. Files without text are counted.
    """
    for file in files:
        if file.stat().st_size == 0:  # the readers of tables would refuse an empty file
            texts = ()
        elif tables.suffix_unpacked(file) in tables.TABLE_SUFFIXES:
            texts = rows_with_text(tables.text_rows(file, text_column), counts)
        else:
            paragraphs = text_paragraphs(file)
            first = list(itertools.islice(paragraphs, 1))
            texts = [itertools.chain(first, paragraphs)] if first else []
        has_text = False
        for text in texts:
            has_text = True
            yield file, text
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


def text_paragraphs(file: Path) -> Iterator[str]:
    """
    The paragraphs of a UTF-8 file, unpacked if its name ends in `.gz` or `.zst`; reads the file in pieces.

    Raises:
        UserError: the file cannot be read, is cut short, is binary, or has another encoding.
    """
    unfinished = ""  # the start of a paragraph that continues in the next piece of the file
    for text in decoded(file):
        *paragraphs, unfinished = BLANK_LINE.split(unfinished + text)
        if len(unfinished) > READ_CHARACTERS:  # a paragraph of a mebibyte is cut at a space, to bound the memory
            cut = unfinished.rfind(" ") + 1 or len(unfinished)
            paragraphs, unfinished = [*paragraphs, unfinished[:cut]], unfinished[cut:]
        yield from join_lines(paragraphs)
    yield from join_lines([unfinished])


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
) -> Source:
    """
    The source for a dataset: on the Hub, in a folder that `datasets.load_dataset` can load, or from `save_to_disk`.

    A row is a document. If rows are single lines, as in WikiText, `BLOCK_ROWS` rows are one document.

    Args:
        streaming: read the rows over the network or from the files one by one; without it, the whole dataset is
            first downloaded and converted to Arrow.
        max_documents: most rows to read; rows without text do not count.
        options: the options that take a file instead, and the split: for error messages.

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
    texts = itertools.islice(rows_with_text(_dataset_texts(name, rows, text_column), counts), max_documents)
    identity = [shown, config, split, text_column, max_documents, content]
    return Source(shown, identity, row_documents(shown, texts), counts, is_on_hub)


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


def row_documents(name: str, texts: Iterable[str]) -> Iterator[Document]:
    """
    One document for each row, or, if each of the first 1,000 rows is a single line, one for every `BLOCK_ROWS` rows.

    In a document of several rows, each row is a paragraph.
    """
    texts = iter(texts)
    first = list(itertools.islice(texts, 1000))
    rows = itertools.chain(first, texts)
    if any("\n" in text.strip() for text in first):
        yield from (Document(f"{name} row {number}", split_paragraphs(text)) for number, text in enumerate(rows))
        return
    lines = (" ".join(text.split()) for text in rows)
    for number in itertools.count():
        block = list(itertools.islice(lines, BLOCK_ROWS))
        if not block:
            return
        yield Document(f"{name} block {number}", block, is_rows=True)


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
    unfinished = ""
    for piece in decoded(Path("standard input"), sys.stdin.buffer) if file == STDIN else decoded(Path(file)):
        *lines, unfinished = f"{unfinished}{piece}".split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if unfinished:
        yield unfinished.removesuffix("\r")
