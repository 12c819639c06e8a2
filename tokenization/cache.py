"""Where prepared text is kept between runs: folders written whole, and found again by content."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import constants

from d2l_bert.errors import ENVIRONMENT, UserError, launched_rank, why_unwritable


logger = logging.getLogger(__name__)


SILENT_SECONDS = 1.0  # that a process waits for another one before it says so

ANOTHER_CACHE = ", or set HF_HOME to another folder"


def cache_folder() -> Path:
    """Where prepared text is kept between runs: `$HF_HOME/d2l_bert`."""
    return Path(constants.HF_HOME) / "d2l_bert"


def fingerprint(*parts) -> str:
    """A short name for whatever `parts` say, from their JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def code_of(*modules) -> list[str]:
    """What changes when the modules' code does."""
    return [hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() for module in modules]


@contextmanager
def waited_for(lock: Path, what: str) -> Iterator[None]:
    """
    Hold a lock file. Waiting for another process to release it is said after a moment, of several ranks by the first.

    Args:
        what: what a process does that holds it, such as "reading books".
    """
    lock = FileLock(lock)
    try:
        lock.acquire(timeout=SILENT_SECONDS)
    except Timeout:
        if launched_rank() == 0:
            logger.info(f"waiting for another process that is {what} (cache {Path(lock.lock_file).parent})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def written_whole(path: Path, what: str, write: Callable[[Path], object]) -> None:
    """
    Have `write` fill a temporary folder, which becomes `path` when it is done; if `write` fails, nothing of it stays.

    Of several processes that want the same folder one writes it. The others wait, and find it; if the one was killed,
    another of them writes.

    Args:
        what: what `write` does, such as "reading books", for processes that wait to say.
        write: takes an empty folder. It is not called if `path` is there. An `OSError` of it is one of the cache:
            what it reads must raise others.

    Raises:
        UserError: the cache cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with waited_for(path.with_name(f".{path.name}.lock"), what):
            if path.exists():  # the process that had the lock before has written it
                return
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed in the middle
            try:
                temporary.mkdir()
                write(temporary)
                temporary.rename(path)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cache {path.parent}: {why_unwritable(error, ANOTHER_CACHE)}") from None


@contextmanager
def undamaged(folder: Path) -> Iterator[None]:
    """
    Name the folder of the cache, and the mend, if what was written there cannot be read.

    For one call of a library: what a damaged file makes NumPy and PyArrow raise is of any class.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in ENVIRONMENT:
            raise UserError(
                f"cache {folder}: cannot be read ({error.strerror}); see that it can, or delete it"
            ) from None
        reason = " ".join(str(error).split())
        raise UserError(f"cache {folder}: damaged ({reason}); delete this folder and run again") from None
