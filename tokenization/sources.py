"""Sources of text, each an iterator of documents: files and folders, and datasets.

Nothing here knows of tokens.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import operator
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from d2l_bert.errors import UserError
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.documents import BLANK_LINE, Document, split_paragraphs, squeezed
from d2l_bert.tokenization.python_docs import python_docs, required_distributions


PYTHON_DOCS = "python-docs"
READ_SUFFIXES = (".txt", ".md", *tables.TABLE_SUFFIXES)

# What is held in memory at a time, of a text however long: some paragraphs of it, in pieces of at most so many bytes.
READ_BYTES = 1 << 20


# Where the rows of a table or a dataset are single lines, so many make a document.
BLOCK_ROWS = 64


@dataclasses.dataclass
class Source:
    """
    Text to train on: its name, what identifies its content wherever it lies, and its documents.

    Reading the documents adds to `counts` what was passed over: `rows_without_text` of tables and datasets, and
    `files_without_text`.
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
        UserError: a source cannot be read.
    """
    for number, source in enumerate(sources):
        try:
            for document in source.documents:
                yield dataclasses.replace(document, source=number)
        except OSError as error:  # a file that is gone since the folder was searched
            what = error.filename or source.name
            raise UserError(
                f"{what}: cannot be read ({error.strerror or error}); put it back or leave it out"
            ) from None


def file_source(path: str | Path, text_column: str = "text", max_documents: int | None = None) -> Source:
    """
    A text file, a table or a folder of them, in sorted order; `python-docs` names the embedded corpus.

    A text file is a document, a blank line ends a paragraph; of a table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) each
    row is one, or, where rows are single lines, `BLOCK_ROWS` of them are (`row_documents`). Any of them but Parquet
    may be packed (`.gz`, `.zst`). A file of another name is read as text if it is named, or packed; folders are
    searched for the known ones, hidden files and folders passed over.

    Args:
        text_column: column of text in the tables.
        max_documents: most text files and rows to read; those without text do not count.

    Raises:
        UserError: a path that does not exist or a folder without texts; while it is read, a file that is not UTF-8
            text, or a table without texts in that column.
    """
    counts = Counter()
    if str(path) == PYTHON_DOCS:
        versions = {found.metadata["Name"]: found.version for found in required_distributions("d2l-bert")}
        identity = [PYTHON_DOCS, platform.python_version(), versions, max_documents]
        return Source(PYTHON_DOCS, identity, itertools.islice(python_docs(), max_documents), counts)
    files = text_files(path, counts)
    identity = [[[file.name, content_hash(file)] for file in files], text_column, max_documents]
    documents = _documents(files, text_column, max_documents, counts)
    return Source(_name(Path(path).resolve()), identity, documents, counts)


def _name(path):
    """The name of a file or folder as text, whatever bytes it has."""
    return os.fsencode(path.name).decode(errors="replace")


def _documents(files, text_column, most, counts):
    texts = itertools.islice(_texts(files, text_column, counts), most)
    for file, group in itertools.groupby(texts, key=operator.itemgetter(0)):
        if tables.kind_of(file) in tables.TABLE_SUFFIXES:
            yield from row_documents(_name(file), (text for _, text in group))
        else:
            yield from (Document(_name(file), paragraphs) for _, paragraphs in group)


def _texts(files, text_column, counts):
    """Pairs of a file and a text: a text file's paragraphs, a table's rows. Files without any are counted."""
    for file in files:
        if file.stat().st_size == 0:  # nothing, whatever its name promises
            texts = ()
        elif tables.kind_of(file) in tables.TABLE_SUFFIXES:
            texts = rows_with_text(tables.text_rows(file, text_column), counts)
        else:
            paragraphs = text_paragraphs(file)
            first = list(itertools.islice(paragraphs, 1))
            texts = (itertools.chain(part, paragraphs) for part in [first] if part)
        found = False
        for text in texts:
            found = True
            yield file, text
        counts["files_without_text"] += not found


def content_hash(file: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        UserError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); mend its permissions or leave it out") from None


def text_files(path: str | Path, counts: Counter | None = None) -> list[Path]:
    """
    The files of text that `path`, a file or a folder, stands for, sorted.

    Args:
        counts: gets `files_of_other_kinds` and `broken_links` that were passed over. Hidden files do not count.

    Raises:
        UserError: none there, or a folder in it that cannot be read.
    """
    path = Path(path)
    if path.is_file():
        if tables.kind_of(path) == ".json":
            raise UserError(f"{path}: a JSON file is no text; write its texts as lines of JSON (.jsonl)")
        return [path]
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a text file, a folder, or {PYTHON_DOCS}")
    if not path.is_dir():
        raise UserError(f"{path}: neither a file nor a folder; write its text into a file")
    files, counts = [], Counter() if counts is None else counts
    for file in _files_below(path):
        if tables.kind_of(file) not in READ_SUFFIXES and file.suffix.lower() not in tables.PACKED_SUFFIXES:
            counts["files_of_other_kinds"] += 1
        elif not file.is_file():
            counts["broken_links"] += 1
        else:
            files.append(file)
    if not files:
        raise UserError(
            f"{path}: no text file in this folder; what is read is {', '.join(READ_SUFFIXES)}, "
            f"and {' and '.join(tables.PACKED_SUFFIXES)} of them"
        )
    return sorted(files)


def _files_below(path):
    """All files but hidden ones, links to folders followed, each folder once."""

    def refuse(error):
        raise UserError(
            f"{error.filename}: cannot be read ({error.strerror}); mend its permissions or leave it out"
        ) from None

    seen = set()
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = (
            name
            for name in sorted(folders)
            if not name.startswith(".") and os.path.realpath(os.path.join(folder, name)) not in seen
        )
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def text_paragraphs(file: Path) -> Iterator[str]:
    """
    The paragraphs of one UTF-8 file, unpacked if its name ends in `.gz` or `.zst`; the file is never held in memory.

    Raises:
        UserError: unreadable, cut short, binary, or in another encoding.
    """
    pending = ""  # the paragraph that goes on
    for text in _decoded(file):
        *whole, pending = BLANK_LINE.split(pending + text)
        if len(pending) > READ_BYTES:  # a paragraph without end
            cut = pending.rfind(" ") + 1 or len(pending)
            whole, pending = [*whole, pending[:cut]], pending[cut:]
        yield from squeezed(whole)
    yield from squeezed([pending])


def _decoded(file):
    """The text of a UTF-8 file in pieces."""
    with tables.opened(file) as stream:
        start, data = 0, stream.read(READ_BYTES)  # `data` begins with byte `start`
        if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            raise UserError(
                f"{file}: UTF-32 text; convert it, for example with `iconv -f UTF-32 -t UTF-8`, or leave it out"
            )
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(
                f"{file}: UTF-16 text; convert it, for example with `iconv -f UTF-16 -t UTF-8`, or leave it out"
            )
        while data:
            more = stream.read(READ_BYTES)
            if b"\0" in data:
                raise UserError(f"{file}: a binary file (NUL at byte {start + data.index(0)}), not text; leave it out")
            try:
                text, used = codecs.utf_8_decode(data, "strict", not more)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {start + error.start}); "
                    f"convert it, for example with `iconv -f LATIN1 -t UTF-8`, or leave it out"
                ) from None
            yield text.removeprefix("" if start else "\ufeff")
            start, data = start + used, data[used:] + more


def dataset_source(
    name: str,
    config: str | None = None,
    split: str = "train",
    text_column: str = "text",
    streaming: bool = False,
    max_documents: int | None = None,
) -> Source:
    """
    A dataset that `datasets.load_dataset` finds, on the Hub or in a local folder, or a folder left by `save_to_disk`.

    A row is a document. Where rows are single lines, as in WikiText, blocks of them are.

    Args:
        streaming: read the rows where they lie, instead of downloading and converting all of them first.
        max_documents: most rows to read; those without text do not count.

    Raises:
        UserError: no such dataset, configuration, split or column, or a column that does not hold text; while it is
            read, a damaged row.
    """
    if Path(name).is_file():
        raise UserError(f"dataset {name}: a file; give it with --corpus")
    is_on_hub = not Path(name).exists()
    shown = name if is_on_hub else _name(Path(name).resolve())
    try:
        with _quiet_datasets():
            if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
                rows, content = _open_saved(name, config, split)
            else:
                rows, content = _open_dataset(name, config, split, streaming)
    except StopIteration:  # what the library's JSON reader says of empty files
        raise UserError(f"dataset {name}: its files hold no rows; give one with text") from None
    except UserError as error:
        raise UserError(f"dataset {name}: {error}") from None
    except Exception as error:  # the library has another class of exception for every way to miss
        raise UserError(f"dataset {name}: cannot be loaded ({_reason(error)}); {_dataset_mend(name, error)}") from None
    if rows.features is not None:  # else a stream whose columns show when it is read
        tables.check_column(f"dataset {name}", text_column, rows.features)
        kind = rows.features[text_column]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise UserError(f"dataset {name}: column {text_column!r} holds no text but {kind}; name another")
        rows = rows.select_columns([text_column])
    counts = Counter()
    texts = itertools.islice(rows_with_text(_dataset_texts(name, rows, text_column), counts), max_documents)
    identity = [shown, config, split, text_column, max_documents, content]
    return Source(shown, identity, row_documents(shown, texts), counts, is_on_hub)


def _dataset_mend(name, error):
    """What to do about a dataset that cannot be loaded."""
    if re.search("Unknown split|Bad split|Split name", str(error)):
        return "name a split that it has with --dataset_split"
    if re.search("Config name is missing|BuilderConfig", str(error)):
        return f"name a configuration that it has: {name}:CONFIG"
    if not Path(name).exists():
        return (
            "no folder here has this name, and the Hub gave no dataset of it; for a private one log in with "
            "`hf auth login`, or set HF_TOKEN"
        )
    return "give a folder of save_to_disk or of data files (.jsonl, .csv, .parquet, .txt), or its texts with --corpus"


def _open_dataset(name, config, split, streaming):
    """Rows, and what names their content: hashes of local files, else the library's own, which knows the revision."""
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


def _open_saved(folder, config, split):
    import datasets

    if config is not None:
        raise UserError(f"it was saved by save_to_disk and has no configurations, so none that is called {config}")
    rows = datasets.load_from_disk(folder)
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(f"no split {split!r}; it has {', '.join(rows)}: name one with --dataset_split")
        rows = rows[split]
    content = [content_hash(Path(file["filename"])) for file in rows.cache_files]
    return rows.with_format(None), content  # a format is saved too, and would turn texts into arrays


def _dataset_texts(name, rows, column):
    """The texts of a dataset's rows, one row at a time."""
    rows = iter(rows)
    with _quiet_datasets():
        for number in itertools.count(1):
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # the reader of each format has its own
                where = f"dataset {name}: broke off after {number - 1:,} rows"
                raise UserError(f"{where} ({_reason(error)}); repair it or leave it out") from None
            tables.check_column(f"dataset {name}, row {number:,}", column, row)
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"dataset {name}, row {number:,}: column {column!r} holds no text but {type(text).__name__}"
                )
            yield text


def _reason(error):
    error = error.__cause__ or error
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def _quiet_datasets():
    """The library logs an error before it raises it; the exception says it."""
    from datasets import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def rows_with_text(texts: Iterable[str | None], counts: Counter) -> Iterator[str]:
    """Leave out the rows that are None, empty or white space, and count them as `rows_without_text`."""
    for text in texts:
        if text and not text.isspace():
            yield text
        else:
            counts["rows_without_text"] += 1


def row_documents(name: str, texts: Iterable[str]) -> Iterator[Document]:
    """Rows of texts as documents, one each; where they are single lines, `BLOCK_ROWS` of them make one."""
    texts = iter(texts)
    first = list(itertools.islice(texts, 1000))
    rows = itertools.chain(first, texts)
    if any("\n" in text.strip() for text in first):
        for number, text in enumerate(rows):
            yield Document(f"{name} row {number}", split_paragraphs(text))
        return
    lines = (" ".join(text.split()) for text in rows)
    for number in itertools.count():
        block = list(itertools.islice(lines, BLOCK_ROWS))
        if not block:
            return
        yield Document(f"{name} block {number}", block)
