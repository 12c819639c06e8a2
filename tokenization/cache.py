"""The cache of prepared text: folders named by a hash of text, options and versions; atomic writes, under a lock."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import constants

from d2l_bert import folders
from d2l_bert.errors import ENVIRONMENT_ERRNOS, UserError, launched_rank, why_unwritable


logger = logging.getLogger(__name__)


SILENT_SECONDS = 1.0  # a process that waits longer than this for a lock logs that it waits

ANOTHER_CACHE = ", or set HF_HOME to another folder"


def cache_folder() -> Path:
    """The folder of the cache: `$HF_HOME/d2l_bert`."""
    return Path(constants.HF_HOME) / "d2l_bert"


def fingerprint(*values) -> str:
    """16 hexadecimal digits: the start of the SHA-256 of the values' JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def content_hash(file: Path) -> str:
    """The SHA-256 of a file. Raises `UserError` if the file cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); allow reading it, or leave it out") from None


@contextmanager
def hold_lock(lock: Path, label: str) -> Iterator[None]:
    """
    Hold a lock file while the block runs. If another process holds the lock, wait for it; rank 0 logs a long wait.

    Args:
        lock: path of the lock file, in the cache.
        label: what the process that holds the lock is doing, for that message: "reading books".
    """
    lock = FileLock(lock)
    try:
        lock.acquire(timeout=SILENT_SECONDS)
    except Timeout:
        if launched_rank() == 0:
            logger.info(f"waiting for another process that is {label} (cache {Path(lock.lock_file).parent})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.with_name(f".{path.name}.lock"), label):
            if not path.exists():  # else another process wrote the folder while this one waited for the lock
                with folders.atomic_folder(path) as partial:
                    write(partial)
    except OSError as error:
        raise UserError(f"cache {path.parent}: {why_unwritable(error, ANOTHER_CACHE)}") from None


@contextmanager
def reading_cache(folder: Path) -> Iterator[None]:
    """
    Turn any exception that the block raises into a `UserError` that names the folder of the cache, and the mend.

    NumPy and PyArrow raise exceptions of many classes for a damaged file. The block should hold only the call that
    reads: a bug inside the block would be reported as a damaged file.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in ENVIRONMENT_ERRNOS:
            raise UserError(
                f"cache {folder}: cannot be read ({error.strerror}); make this folder readable, or delete it"
            ) from None
        reason = " ".join(str(error).split())
        raise UserError(f"cache {folder}: damaged ({reason}); delete this folder and run again") from None
