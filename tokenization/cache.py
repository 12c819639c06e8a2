"""The cache of prepared text: folders named by a hash of text, options and versions; atomic writes, under a lock."""

import hashlib
import importlib.metadata
import json
import logging
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import constants

from d2l_bert import folders
from d2l_bert.errors import UserError, explained, writing


logger = logging.getLogger(__name__)


SILENT_SECONDS = 1.0  # a process that waits longer than this for a lock logs that it waits

ANOTHER_CACHE = ", or set HF_HOME to another folder"


def cache_folder() -> Path:
    """The folder of the cache: `$HF_HOME/d2l_bert`."""
    return Path(constants.HF_HOME) / "d2l_bert"


def short_hash(*values) -> str:
    """16 hexadecimal digits: the start of the SHA-256 of the values' JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def entry(folder: Path, kind: str, *identity) -> Path:
    """
    The path in a folder of the cache of what follows from these values of JSON.

    The name changes with them, and with what splits text and tokenizes: two libraries and Python's Unicode tables.
    """
    versions = [importlib.metadata.version(name) for name in ("sentencex", "tokenizers")]
    return folder / f"{kind}-{short_hash(versions, unicodedata.unidata_version, *identity)}"


def content_hash(file: Path) -> str:
    """The SHA-256 of a file. Raises `UserError` if the file cannot be read."""
    with explained(f"{file}: cannot be read", "allow reading it, or leave it out", OSError), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
        The folder, for `sources.dataset_source`.

    Raises:
        UserError: `rows` is something else, has no such column, or the cache cannot be written.
    """
    import datasets

    if not isinstance(rows, datasets.Dataset):
        raise UserError(
            f"dataset: a {type(rows).__name__} is neither a name, a folder nor a datasets.Dataset; give one of these, "
            f"such as a split of a DatasetDict, or a folder of save_to_disk"
        )
    if column not in rows.column_names:
        raise UserError(
            f"dataset: the datasets.Dataset has no column {column}, but {', '.join(rows.column_names)}; name one of "
            f"them with text_column"
        )
    rows = rows.select_columns([column])
    path = cache_folder() / f"dataset-{rows_hash(rows)}"
    write_once(path, "writing a dataset", rows.save_to_disk)
    return str(path)


def write_once(path: Path, label: str, write: Callable[[Path], object]) -> None:
    """
    Write a folder of the cache atomically, unless it exists.

    `write` fills a temporary folder, which is renamed to `path` when `write` returns, or deleted when `write` raises.
    If several processes need the folder, one writes it while the others wait. If the writing process is killed,
    another one writes the folder.

    Args:
        label: what `write` does, for the message of a waiting process: "reading books".
        write: gets the path of the empty temporary folder. An `OSError` that it raises is reported as an error of
            writing the cache, so `write` must turn errors of reading its sources into other exceptions.

    Raises:
        UserError: the cache cannot be written.
    """
    if path.exists():
        return
    with writing(f"cache {path.parent}", ANOTHER_CACHE):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            held = lock.acquire(timeout=SILENT_SECONDS)
        except Timeout:
            logger.info(f"waiting for another process that is {label} (cache {path.parent})")
            held = lock.acquire()
        with held:
            if not path.exists():  # else another process wrote the folder while this one waited for the lock
                with folders.atomic_folder(path, ANOTHER_CACHE) as partial:
                    write(partial)


def cached_json(path: Path, label: str, compute: Callable[[], object]):
    """
    What `compute` returns, as JSON keeps it; computed once, and then read from a folder of the cache.

    Args:
        path, label: as in `write_once`.

    Raises:
        UserError: the cache cannot be written, or is damaged.
    """
    write_once(path, label, lambda partial: (partial / "content.json").write_text(json.dumps(compute())))
    with reading_cache(path):
        return json.loads((path / "content.json").read_text())


def reading_cache(folder: Path) -> AbstractContextManager:
    """
    Turns exceptions of a damaged file into a `UserError` that names the folder of the cache.

    NumPy and PyArrow raise exceptions of many classes for a damaged file. The block should hold only the call that
    reads: a bug inside the block would be reported as a damaged file.
    """
    kinds = (OSError, ValueError, LookupError, TypeError, EOFError)  # of NumPy, PyArrow and json
    return explained(f"cache {folder}: damaged", "delete this folder and run again", *kinds)
