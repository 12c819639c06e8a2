"""Folders and files written atomically: complete or not at all; JSON files read; an output folder locked."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from d2l_bert import folders
from d2l_bert.errors import UserError, why_unwritable


@contextlib.contextmanager
def new_folder(folder: Path):
    """
    Give the block a temporary folder to write into, and rename it to `folder` when the block ends. A block that raises
    leaves no folder.

    Raises:
        UserError: `folder` exists and is not an empty folder, or cannot be written.
    """
    folder = folder.absolute()
    check_name(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists already; name a new or empty folder")
    try:
        parent = next(parent for parent in folder.parents if parent.exists())
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        with os_errors():
            yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp gives permissions to the owner only
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(folder)  # replaces an empty folder of this name
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    except OSError as error:
        if error.errno is None:  # shutil.Error: args[0] lists (source, destination, reason) of each file
            error.strerror = error.args[0][0][-1]
        raise UserError(f"{folder}: {why_unwritable(error, ', or name another folder')}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path):
    """
    Give the block a temporary path with the suffix of `path` to write to, and rename the file to `path` when the block
    ends. A block that raises leaves no file.

    Raises:
        UserError: `path` exists, its folder does not, or the file cannot be written.
    """
    path = path.absolute()
    check_new_file(path)
    partial = _partial_file(path)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())  # mkstemp gives permissions to the owner only
        partial.rename(path)
    except OSError as error:
        raise UserError(f"{path}: {why_unwritable(error, ', or name another file')}") from None
    finally:
        partial.unlink(missing_ok=True)


def _partial_file(path):
    """A new empty file beside `path`, with another name and the same suffix."""
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.stem[:100]}.", suffix=path.suffix, dir=path.parent)
    except OSError as error:
        raise UserError(f"{path}: {why_unwritable(error, ', or name another file')}") from None
    os.close(descriptor)
    return Path(partial)


def check_new_file(path: Path) -> None:
    """Raise `UserError` if a file of this name exists, its folder does not, or no file can be made there."""
    if path.is_symlink() or path.exists():
        raise UserError(f"{path}: exists already; name another file, or delete this one")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make the folder, or name another file")
    _partial_file(path).unlink()


@contextlib.contextmanager
def os_errors():
    """
    Turn an operating system error that a Rust library (tokenizers, safetensors) raises in the block into `OSError`.

    Such a library raises exceptions of its own, with "(os error 28)" in the message.
    """
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def check_name(folder: Path) -> None:
    """Refuse a folder's name that is not UTF-8: JSON files and the model card could not hold it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"output_dir {ascii(str(folder))}: its name is not UTF-8; name another folder") from None


def base_name(path: str) -> str:
    """The last component of a path. Bytes that are not UTF-8 become a replacement character."""
    return os.fsencode(os.path.basename(os.path.abspath(path))).decode(errors="replace")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, from the operating system's cache to the disk (fsync)."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically: a reader finds the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    """
    The object in a JSON file; an empty dict if the file does not exist.

    Raises:
        UserError: the file cannot be read, or holds something else than a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); take it out, or put the right one back") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object; take it out, or put the right one back")
    return content


# ---------------------------------------------------------------------------------------------------------------------

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
