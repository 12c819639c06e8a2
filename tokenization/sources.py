"""`Source`: a file, folder or dataset as documents; `WhatToRead` and `HowToRead`, which say which and how."""

import itertools
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from d2l_bert.folders import base_name, content_hash, short_hash
from d2l_bert.messages import UserError, explained, shortened
from d2l_bert.tokenization import hub_datasets, in_memory, tables
from d2l_bert.tokenization.config import SourceConfig, dataset_and_config
from d2l_bert.tokenization.documents import Document, row_documents, text_documents
from d2l_bert.tokenization.files import PREPARED_FILE, lines_of_text_file, text_files
from d2l_bert.tokenization.python_docs import PYTHON_DOCS, python_docs, required_distributions
from d2l_bert.tokenization.seen_lines import SeenLines
from d2l_bert.tokenization.text_formats import ARTICLE_BEGINS, LINES_OF_FORMAT, articles


@dataclass(frozen=True, kw_only=True)
class WhatToRead:
    """
    The files and datasets of a text.

    Args:
        paths: files, folders, or `python-docs`.
        datasets: ids and folders, as `config.dataset_and_config` reads them.
        split: the split to read of each dataset.
        paths_flag, split_flag: the flags that give `paths` and `split`, for error messages.
    """

    paths: Sequence[str] = ()
    datasets: Sequence[str] = ()
    split: str = "train"
    paths_flag: str = "--corpus"
    split_flag: str = "--dataset_split"


@dataclass(frozen=True, kw_only=True)
class HowToRead:
    """
    How each source of a text is read.

    Args:
        text_column: the column of text in tables and datasets.
        separator: between the cells of CSV files, as in `tables.table_rows`.
        documents: where documents end in files and in rows (`SourceConfig`). `python-docs` has its own documents.
        max_documents: most documents to read; files and rows without text do not count. None for all.
        streaming: read the rows of datasets over the network or from the files one by one; without it, a whole dataset
            is first downloaded and converted to Arrow.
        processes: how many processes read `python-docs`. All else is read in this process.
    """

    text_column: str = "text"
    separator: str = "auto"
    documents: str = "auto"
    max_documents: int | None = None
    streaming: bool = False
    processes: int = 1

    @classmethod
    def of(cls, run: SourceConfig) -> "HowToRead":
        """As the options of a run say."""
        return cls(
            text_column=run.text_column,
            separator=run.separator,
            documents=run.documents,
            max_documents=run.max_documents,
            streaming=run.streaming,
            processes=run.processes(),
        )


@dataclass
class Source:
    """
    One file, folder or dataset with text.

    Args:
        name: shown in messages and on the model card.
        identity: JSON values that change whenever the documents do, but not with the place of the files: hashes of
            their content, and the options they are read with.
        documents: an iterator, so the documents can be read only once.
        counts: increased while the documents are read: "rows without text" of tables and datasets, "files without
            text", and how the others were read (`TextLayout.description`).
        seen: keeps some lines of the files or rows while they are read.
        is_on_hub: whether the source is a dataset on the Hub.
        linked, remarks: of a folder, as in `files.FoundFiles`.
    """

    name: str
    identity: list
    documents: Iterator[Document]
    counts: Counter
    seen: SeenLines
    is_on_hub: bool = False
    linked: int = 0
    remarks: str = ""


def open_sources(what: WhatToRead, how: HowToRead) -> list[Source]:
    """
    One source for each path, then one source for each dataset.

    Raises:
        UserError: a source does not exist or cannot be opened, or is given twice.
    """
    sources = [file_source(path, how) for path in what.paths]
    sources += [dataset_source(dataset, what, how) for dataset in what.datasets]
    identities = set()
    for source in sources:
        identity = short_hash(source.identity)
        if identity in identities:
            raise UserError(f"{shortened(source.name, 200)} is given twice; give it once")
        identities.add(identity)
    return sources


def all_documents(sources: Sequence[Source]) -> Iterator[Document]:
    """
    The documents of all sources, one source after the other, each with the number of its source.

    Raises:
        UserError: a source cannot be read, or a process that reads `python-docs` was killed or could not be started.
    """
    for number, source in enumerate(sources):
        for document in source.documents:
            document.source = number
            yield document


def file_source(path: str | Path, how: HowToRead = HowToRead()) -> Source:
    """
    The source for a text file, a table, a folder of them in sorted order, or `python-docs`.

    The first `READ_CHARACTERS` of a text file show whether it is one document or several, and what its lines are
    (`find_layout`). In a table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) each row is a document. Text files and tables
    other than Parquet may be packed (`.gz`, `.zst`, `.bz2`). A file with another suffix is read if `path` is this
    file, as JSONL if its lines are objects of JSON, else as text.

    Raises:
        UserError: as in `text_files`, or a file cannot be read. While documents are read: a file is damaged or is not
            text, a table has no text in the column, or one of several processes was killed or could not be started.
    """
    if str(path) == PYTHON_DOCS:
        versions = {package.metadata["Name"]: package.version for package in required_distributions("d2l-bert")}
        identity = [PYTHON_DOCS, platform.python_version(), versions, how.max_documents]
        documents = itertools.islice(python_docs(how.processes), how.max_documents)
        return Source(PYTHON_DOCS, identity, documents, Counter(), SeenLines())
    with explained(f"{shortened(str(path), 200)}: cannot be read", "allow reading it, or leave it out", OSError):
        found = text_files(path)
    contents = [[file.name, content_hash(file)] for file in found.files]
    identity = [contents, how.text_column, how.max_documents, how.documents, how.separator]
    counts = Counter()
    seen = SeenLines()
    documents = itertools.islice(_documents_of_files(found.files, how, counts, seen), how.max_documents)
    return Source(base_name(path), identity, documents, counts, seen, linked=found.linked, remarks=found.remarks)


def _documents_of_files(files, how, counts, seen):
    """The documents of all files, one file after the other. Files without text are counted."""
    for file in files:
        if tables.file_kind(file) in tables.TABLE_KINDS:
            texts_and_cells = tables.text_rows(file, how.text_column, how.separator)
            texts = (text for text, _cells in texts_and_cells)
            documents = row_documents(texts, counts, seen, how.documents)
        else:
            documents = _documents_of_text_file(file, how, counts, seen)
        first = next(documents, None)
        has_text = first is not None
        counts["files without text"] += 0 if has_text else 1  # adding 0 gives this count its place among the others
        if has_text:
            yield first
            yield from documents


def _documents_of_text_file(file, how, counts, seen):
    """The documents of a text file, without what its format adds to the text."""
    lines = lines_of_text_file(file, in_pieces=True)
    suffix = tables.suffix_unpacked(file)
    if suffix in LINES_OF_FORMAT:
        lines_with_text = LINES_OF_FORMAT[suffix](lines, file)
        return text_documents(lines_with_text, counts, seen, how.documents)
    first = list(itertools.islice(lines, 1))
    lines = itertools.chain(first, lines)
    if first and first[0].startswith(ARTICLE_BEGINS):
        return row_documents(articles(lines), counts, seen, how.documents)
    return text_documents(lines, counts, seen, how.documents)


def dataset_source(dataset: str, what: WhatToRead = WhatToRead(), how: HowToRead = HowToRead()) -> Source:
    """
    The source for a dataset: on the Hub, in a folder that `datasets.load_dataset` can load, or from `save_to_disk`.

    A row is a document.

    Args:
        dataset: one of `what.datasets`.

    Raises:
        UserError: `dataset` is a file; the dataset cannot be loaded or has no rows; the configuration, split or column
            does not exist, or the column does not hold text. While documents are read: a row cannot be read, or
            has something other than text in the column.
    """
    name, config = dataset_and_config(dataset)
    is_on_hub = not Path(name).exists()
    base = name if is_on_hub else base_name(name)
    shown = in_memory.NAME if hub_datasets.was_in_memory(name) else base
    way_out = (
        f"give an id on the Hub, or a folder of save_to_disk or of data files; {what.paths_flag} takes files; "
        f"{what.split_flag} names the split, ID:CONFIG a configuration"
    )
    with hub_datasets.dataset_errors(name, way_out):
        if Path(name, PREPARED_FILE).exists():
            raise ValueError("a prepared folder, which --corpus of pretrain takes")
        rows, hub_version = hub_datasets.open_dataset(name, config, what.split, how.streaming)
        rows = rows.select_columns([how.text_column])
        # What changes whenever the rows do: on the Hub the library's own hash, without reading the rows.
        version = hub_version if is_on_hub else hub_datasets.rows_hash(rows)
    identity = [base, config, what.split, how.text_column, how.max_documents, version, how.documents]
    rows_with_places = ((f"row {number:,}", row) for number, row in enumerate(rows, 1))
    errors = hub_datasets.dataset_errors(name, "repair it, or leave it out")
    texts_and_cells = tables.texts_in(rows_with_places, how.text_column, errors)
    texts = (text for text, _cells in texts_and_cells)
    counts = Counter()
    seen = SeenLines()
    documents = itertools.islice(row_documents(texts, counts, seen, how.documents), how.max_documents)
    return Source(shown, identity, documents, counts, seen, is_on_hub)
