"""`locked_folder`: makes an output folder and locks it, so that one run at a time writes there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from d2l_bert import folders
from d2l_bert.errors import UserError


LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """
    Make a run's output folder and lock it for the block, so that no other run writes there.

    If the folder is new and still empty after the block, it is deleted.

    Raises:
        UserError: the path is a file, the folder cannot be written, or another run has locked it.
    """
    folders.check_name(folder)
    check_no_file(folder)
    existed, lock = folder.exists(), FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"output_dir {folder}: another run is writing there; wait, or name another folder") from None
    except OSError as error:
        raise UserError(f"output_dir {folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        yield
    finally:
        # The lock file is deleted before the lock is released. Deleted afterwards, a second run could already hold the
        # lock of the deleted file while a third run makes and locks a new file. A run that opened the file before its
        # deletion notices, once it has the lock, that the file name is gone.
        try:
            with contextlib.suppress(PermissionError):  # Windows does not delete an open file; filelock does it later
                (folder / LOCK_FILE).unlink(missing_ok=True)
        finally:
            lock.release()
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def check_no_file(folder: Path) -> None:
    """Refuse the path of a file as an output folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder}: a file; name a folder")
