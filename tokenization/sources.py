"""How files, folders and datasets become sources, which are iterators of documents; the lines of a file."""

import contextlib
import hashlib
import heapq
import itertools
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypedDict

import pyarrow as pa

from d2l_bert.folders import base_name, content_hash
from d2l_bert.messages import UserError, counted, explained, shortened, standard_input
from d2l_bert.records import inside, read_record, refuse_link_outwards
from d2l_bert.tokenization import dataset_cards, tables
from d2l_bert.tokenization.cache import cache_folder, is_own, write_once
from d2l_bert.tokenization.division import divided, find_division, grouped
from d2l_bert.tokenization.python_docs import python_docs, required_distributions
from d2l_bert.tokenization.rules import DELETED
from d2l_bert.tokenization.sentences import Document, Source


logger = logging.getLogger(__name__)


PYTHON_DOCS = "python-docs"
STDIN = "-"  # in place of a file: the standard input
PREPARED_FILE = "prepared.json"  # the record of a prepared folder
READ_SUFFIXES = (".txt", ".md", ".log", *tables.TABLE_SUFFIXES)

# How lines divide a text file or rows is found from the first lines or rows with this many characters. A paragraph of
# several lines that is longer is cut between them, so a file may be larger than the memory.
READ_CHARACTERS = 1 << 20

# With `--documents file`, this many rows of a table or a dataset make one document.
BLOCK_ROWS = 64


def file_source(
    path: str | Path,
    text_column: str = "text",
    max_documents: int | None = None,
    processes: int = 1,
    documents: str = "auto",
    separator: str = "auto",
) -> Source:
    """
    The source for a text file, a table, a folder of them in sorted order, or `python-docs`.

    The first `READ_CHARACTERS` of a text file show whether it is one document or several, and what its lines are
    (`find_division`). In a table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) each row is a document. Text files and tables
    other than Parquet may be packed (`.gz`, `.zst`, `.bz2`). A file with another suffix is read if `path` is this
    file, as JSONL if its lines are objects of JSON, else as text.

    Args:
        text_column: column of text in the tables.
        max_documents: most documents to read; files and rows without text do not count.
        processes: how many processes read `python-docs`. Files and folders are read in this process.
        documents: where documents end in files (`SourceConfig`). `python-docs` has its own documents.
        separator: between the cells of CSV files, as in `tables.table_rows`.

    Raises:
        UserError: as in `text_files`, or a file cannot be read. While documents are read: a file is damaged or is not
            text, a table has no text in the column, or one of several processes was killed or could not be started.
    """
    counts = Counter()
    if str(path) == PYTHON_DOCS:
        versions = {package.metadata["Name"]: package.version for package in required_distributions("d2l-bert")}
        identity = [PYTHON_DOCS, platform.python_version(), versions, max_documents]
        return Source(PYTHON_DOCS, identity, itertools.islice(python_docs(processes), max_documents), counts)
    with explained(f"{shortened(str(path), 200)}: cannot be read", "allow reading it, or leave it out", OSError):
        files, linked = text_files(path)
    identity = [[[file.name, content_hash(file)] for file in files], text_column, max_documents, documents, separator]
    found = itertools.islice(_of_files(files, text_column, documents, counts, separator), max_documents)
    return Source(base_name(path), identity, found, counts, linked=linked)


def _of_files(files, text_column, documents, counts, separator):
    """The documents of all files. Files without text are counted."""
    for file in files:
        if tables.file_kind(file) in tables.TABLE_KINDS:
            texts = (text for text, _ in tables.text_rows(file, text_column, separator))
            found = row_documents(texts, counts, documents)
        else:
            found = text_documents(file, counts, documents)
        first = list(itertools.islice(found, 1))
        counts["files without text"] += not first
        yield from itertools.chain(first, found)


def text_files(path: str | Path) -> tuple[list[Path], int]:
    """
    The text files and tables in a folder and its subfolders; for the path of a file, this file.

    Of a folder, files with the suffixes `READ_SUFFIXES` and text files without a suffix are taken, packed or not.
    Hidden files and folders are skipped. Links are followed, also those out of the folder, as texts are often
    collected by links. A file that several paths lead to is taken once. What is left out, and how many files lie
    outside, is logged in one line.

    Returns:
        The files, sorted by the names of their folders and their own, the same on every machine; how many of them lie
        outside of the folder.

    Raises:
        UserError: the path does not exist, is a `.json` file, or is neither a file nor a folder; or the folder has no
            text file.
        OSError: the file system refuses to say.
    """
    path = Path(path)
    shown = shortened(str(path), 200)
    if path.is_file() and tables.file_kind(path) != "json":
        return [path], 0
    if not path.is_dir():
        tables.refuse_pipe(path, shown, "write its text to a file, and give that")
        if path.exists():
            raise UserError(f"{shown}: no text; give texts of JSON as lines of JSON (.jsonl)")
        if str(path) == STDIN:
            raise UserError(f"{STDIN}: the standard input is not read here; write its text to a file, and give that")
        raise UserError(f"{shown}: there is no such file or folder; give one, or {PYTHON_DOCS}")
    taken, left_out = {}, {}
    for file, real in _files_below(path):
        suffix = tables.suffix_unpacked(file)
        if file.exists() and not file.is_file():
            left_out.setdefault("pipes and devices", []).append(0)
        elif suffix in READ_SUFFIXES or not (suffix or _is_binary(file)):
            taken.setdefault(real, file)
        else:
            left_out.setdefault(suffix or "binary without a suffix", []).append(file.lstat().st_size)
    parts = (f"{kind}: {counted(len(sizes), 'file')}, {sum(sizes):,} bytes" for kind, sizes in left_out.items())
    said = shortened("; ".join(parts), 1000)
    if not taken:
        raise UserError(
            f"{shown}: no text file in this folder{said and f' ({said})'}; give a folder with files of these kinds: "
            f"{', '.join(READ_SUFFIXES)} or without a suffix, also packed as {' or '.join(tables.PACKED_SUFFIXES)}"
        )
    home = os.path.realpath(path)
    outside = [real for real in taken if not real.is_relative_to(home)]
    lines = []
    if outside:
        first = f"{taken[outside[0]].relative_to(path)} -> {outside[0]}"
        lines.append(f"{counted(len(outside), 'file')} behind links out of this folder, such as {first}")
    if said:
        lines.append(f"left out: {said}")
    if lines:
        logger.info(f"{shown}: {'; '.join(lines)}")
    return sorted(taken.values(), key=lambda file: file.parts), len(outside)


def _is_binary(file):
    """Whether a file is an archive, or its beginning holds NUL, which text without a byte order mark does not."""
    with (
        explained(f"{file}: cannot be read", "repair it, or leave it out", OSError),
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
    plain, linked, seen = [], [], set()
    waiting, links = [(folder, Path(os.path.realpath(folder)))], []  # the links are a heap
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
            is_link, is_folder = path.is_symlink(), path.is_dir()
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
    if any((folder / name).exists() for name in (PREPARED_FILE, "hashes.bin", "tokenizer_config.json")):
        raise UserError(
            f"{shortened(str(folder), 200)}: a prepared folder or a model, where text is wanted; take it out, or give "
            f"text alone (pretrain takes prepared folders, each with its {PREPARED_FILE}, and none beside text)"
        )


def text_documents(file: Path, counts: Counter, documents: str = "auto") -> Iterator[Document]:
    """
    The documents of a text file, as `decoded` reads it.

    Args:
        counts: how the file was read is counted.
        documents: where documents end, as in `find_division`.

    Raises:
        UserError: as in `decoded`.
    """
    lines = decoded(file, in_pieces=True)
    first = _beginning(lines)
    division = find_division(first, documents)
    for number, paragraphs in enumerate(divided(itertools.chain(first, lines), division, READ_CHARACTERS)):
        counts[f"files {division}"] += number == 0
        yield Document(paragraphs, are_sentences=division.lines == "sentences")


def _beginning(texts):
    """The first texts of an iterator, until they have `READ_CHARACTERS` characters."""
    return next(grouped(texts, lambda text: 1 + len(text), READ_CHARACTERS), [])


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
    with explained(f"{file}: cannot be read", "repair it, or leave it out", OSError), explained(file, "", ValueError):
        for line in tables.lines_of(file, stdin, longest, in_pieces):
            yield line.rstrip("\r\n")


def lines_and_cells(file: str, text_column: str = "text", separator: str = "auto") -> Iterator[tuple[str, dict]]:
    """
    The lines of a file in order, each without the characters at its end, and the cells of each row by their columns.

    Whether the file is there is checked at once; it is read with the lines. A line ends as in editors
    (`tables.LINE_END`). In a table each row counts as a line. Empty lines and rows without text are empty strings.

    Args:
        file: a text file as in `decoded`, or a table; `-` for text on the standard input. The file may be
            larger than the memory; a line may have `tables.LONGEST_LINE` characters.
        text_column: the column of text in a table, and in the cells of other lines.
        separator: between the cells of a CSV file, as in `tables.table_rows`.

    Raises:
        UserError: there is no such file, or it is a folder or a `.json` file; while it is read, the file cannot be
            read, is damaged or is not text, or has no such column.
    """
    path = Path(file)
    if file != STDIN:
        tables.refuse_pipe(path, file, f"give a file, or {STDIN} and pipe the text into the command")
    kind = "text" if file == STDIN else tables.file_kind(path) if path.is_file() else None
    if kind in (None, "json"):
        raise UserError(
            f"{file}: no file with a text in each line; give one, or {STDIN} for the standard input, and texts of "
            f"JSON as lines of JSON (.jsonl)"
        )
    if kind != "text":
        return tables.text_rows(path, text_column, separator, all_cells=True)
    lines = _texts_of_stdin(text_column) if file == STDIN else decoded(path)
    return ((line, {text_column: line}) for line in lines)


def _texts_of_stdin(text_column: str) -> Iterator[str]:
    """
    The lines of the standard input, which are texts.

    Raises:
        UserError: it is closed; or the first line is that of a table with the column, which would be read as texts.
    """
    source = "standard input"
    for number, line in enumerate(decoded(Path(source), standard_input())):
        if number == 0 and line.strip().casefold() != text_column.casefold():  # one word is a text
            tables.refuse_header(line, [text_column], source)
        if number == 0 and text_column in _object_in(line):
            raise UserError(
                f"{source}: holds objects of JSON with {text_column!r}; give them as a file that ends in .jsonl"
            )
        yield line


def _object_in(line: str) -> dict:
    """The object of JSON that a line is; empty for any other line."""
    try:
        content = json.loads(line) if line.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return content


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
    is_on_hub = not Path(name).exists()
    shown = name if is_on_hub else base_name(name)
    with dataset_errors(
        name,
        f"give an id on the Hub, or a folder of save_to_disk or of data files; {options[0]} takes files; {options[1]} "
        f"names the split, ID:CONFIG a configuration",
    ):
        if Path(name, PREPARED_FILE).exists():
            raise ValueError("a prepared folder, which --corpus of pretrain takes")
        rows, hub_version = _open_dataset(name, config, split, streaming)
        rows = rows.select_columns([text_column])
        content = hub_version if is_on_hub else rows_hash(rows)
    counts = Counter()
    places = ((f"row {number:,}", row) for number, row in enumerate(rows, 1))
    texts = tables.texts_in(places, text_column, dataset_errors(name, "repair it, or leave it out"))
    found = itertools.islice(row_documents((text for text, _ in texts), counts, documents), max_documents)
    identity = [shown, config, split, text_column, max_documents, content, documents]
    return Source(shown, identity, found, counts, is_on_hub)


def rows_hash(rows) -> str:
    """16 hexadecimal digits: the start of the SHA-256 of the rows of a dataset of `datasets`, wherever they lie."""
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(1000):
        digest.update(json.dumps(batch, default=repr).encode())
    return digest.hexdigest()[:16]


def dataset_folder(rows, column: str) -> str:
    """
    Write the text of a `datasets.Dataset` that a program has in memory to the cache, under the hash of this text.

    Returns:
        The folder, for `dataset_source`.

    Raises:
        UserError: `rows` is something else, has no such column, or the cache cannot be written.
    """
    import datasets

    with dataset_errors(
        "in memory",
        "give an id on the Hub, a folder or a datasets.Dataset, such as a split of a DatasetDict, and its text_column",
    ):
        rows = rows.select_columns([column])
        path = cache_folder() / f"dataset-{rows_hash(rows)}"
        # As a dataset of no split: which one it is of is said by whoever hands it over.
        write = datasets.concatenate_datasets([rows]).save_to_disk
    write_once(path, write)
    return str(path)


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
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        if isinstance(cause, StopIteration | KeyError | AssertionError):  # a bare name says nothing to a reader
            reason = "a file in it is empty or damaged"
        raise UserError(f"dataset {name}: cannot be read ({reason}); {way_out}") from None
    finally:
        logging.set_verbosity(before)


def is_saved_dataset(folder: str) -> bool:
    """Whether this is a folder of `save_to_disk`."""
    return any((Path(folder) / file).is_file() for file in (DATASET_FILE, SPLITS_FILE))


DATASET_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"  # of `save_to_disk`


class DataFileRecord(TypedDict):
    """A file of a dataset of `save_to_disk`."""

    filename: str


class DatasetRecord(TypedDict):
    """What is relied on of `DATASET_FILE`."""

    _data_files: list[DataFileRecord]


class SplitsRecord(TypedDict):
    """The content of `SPLITS_FILE`."""

    splits: list[str]


def saved_splits(folder: str) -> dict:
    """
    The splits of a folder of `save_to_disk`, by their names; a dataset that was saved alone has the name "", if it
    does not say of which split it is.

    The files that its records name must lie in the folder. Arrow maps a file into memory and follows the places in it
    unchecked, so everything is validated before it is read: else a changed byte can end the process.

    Raises:
        UserError, ValueError: a record or a file is damaged, or leads out of the folder.
    """
    import datasets

    home = Path(folder)
    splits = read_record(home / SPLITS_FILE, SplitsRecord).get("splits")
    for part in ["."] if splits is None else splits:
        beside = "" if part == "." else f"{part}/"
        state = read_record(inside(home, f"{beside}{DATASET_FILE}"), DatasetRecord)
        if not state:
            raise ValueError(f"{beside}{DATASET_FILE} is missing")
        for name in ("dataset_info.json", *(file["filename"] for file in state["_data_files"])):
            path = inside(home, f"{beside}{name}")
            if name != "dataset_info.json":  # whatever its name, Arrow maps it
                _validate_arrow(path)
    found = datasets.load_from_disk(folder)
    return found if isinstance(found, datasets.DatasetDict) else {str(found.split or ""): found}


def _validate_arrow(file):
    """Raise an exception of Arrow's if its numbers do not fit the file: the places of texts, their lengths, UTF-8."""
    with pa.memory_map(os.fspath(file)) as opened:
        try:
            batches = iter(pa.ipc.open_stream(opened))
        except pa.ArrowInvalid:
            opened.seek(0)
            reader = pa.ipc.open_file(opened)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)


def dataset_builder(name: str, config: str | None, **options):
    """
    The builder of a dataset on the Hub, or in a folder of data files, which are those of this dataset alone.

    The card of a dataset may name other files in `data_files`: a folder must not name what lies outside of it, nor a
    dataset on the Hub a file of this machine.

    Raises:
        ValueError: it does; or the name is one of the formats that the library `datasets` reads, of which it would
            read the working folder.
    """
    import datasets
    from datasets import packaged_modules

    if name in packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ValueError(f"{name!r} is a format of files, and no dataset; a folder of this name is ./{name}")
    dataset_cards.check_dataset(name)
    builder = datasets.load_dataset_builder(name, config, **options)
    cache = Path(builder.cache_dir)
    if os.name != "nt" and not is_own(cache):
        logger.warning(
            f"dataset {shortened(name, 200)}: the cache {cache} belongs to another user, who can change what is read; "
            f"set HF_HOME to a folder of your own"
        )
    files = builder.config.data_files or {}
    is_folder = Path(name).exists()
    for file in itertools.chain.from_iterable(files.values()):
        file = str(file)
        is_remote = "://" in file
        if is_folder and is_remote:
            raise ValueError(f"its card names {file:.200}, which is not in the folder")
        if not is_folder and not is_remote:
            raise ValueError(f"its card names {file:.200}, a file of this machine")
        if is_folder:
            path = Path(os.path.abspath(file))
            refuse_link_outwards(path, Path(name))
            if not path.is_file():
                raise ValueError(f"{file:.200} is no regular file")
            if path.suffix == ".arrow" or builder.name == "arrow":
                _validate_arrow(path)
    return builder


def _open_dataset(name, config, split, streaming):
    """
    A dataset's rows, and what identifies them on the Hub: the hash of the library, which includes the revision.
    """
    if is_saved_dataset(name):
        if config is not None:
            raise ValueError(f"a folder of save_to_disk has no configurations, so none is called {config}")
        splits = saved_splits(name)
        if "" in splits and split in ("train", "validation"):  # the defaults
            split = ""
        if split not in splits:
            known = ", ".join(filter(None, splits)) or "no splits"
            raise ValueError(f"it has {known}, and no {split!r}; name one that it has")
        # A format such as "numpy" is saved, too: it would turn texts into arrays.
        return splits[split].with_format(None), None
    builder = dataset_builder(name, config)
    if streaming:
        rows = builder.as_streaming_dataset(split=split)
    else:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    return rows, [builder.config_id, builder.hash]


def _with_text(texts, counts):
    """The texts that are not empty or only white space."""
    for text in texts:
        if text and not text.isspace():
            yield text
        else:
            counts["rows without text"] += 1


def row_documents(texts: Iterable[str], counts: Counter, documents: str = "auto") -> Iterator[Document]:
    """
    The documents of rows: each row with text is one, unless `documents` says otherwise.

    What the lines of the rows are is found for all rows together, from the first ones.

    Args:
        counts: how the rows were read is counted, and those without text.
        documents: `auto`, `blank_line`, `line`, or `file` for documents of `BLOCK_ROWS` rows, in which each row is a
            paragraph.
    """
    texts = _with_text(texts, counts)
    first = _beginning(texts)
    beginning = [line for text in first for line in ("", *tables.LINE_END.split(text.strip()))]
    division = find_division(beginning[1:], "file" if documents == "auto" else documents)
    are_sentences = division.lines == "sentences"
    rows = itertools.chain(first, texts)
    if documents == "file":
        for block in iter(
            lambda: [" ".join(DELETED.sub("", text).split()) for text in itertools.islice(rows, BLOCK_ROWS)], []
        ):
            counts[f"rows read in documents of {BLOCK_ROWS} rows"] += len(block)
            yield Document(block, are_sentences=are_sentences)
    for text in rows:
        counts[f"rows {division}"] += 1
        for paragraphs in divided(tables.LINE_END.split(text), division, READ_CHARACTERS):
            yield Document(paragraphs, are_sentences=are_sentences)
