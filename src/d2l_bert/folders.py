"""Folders and files written atomically: complete or not at all; hashes; locks."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from d2l_bert.messages import UserError, explained, writing


IS_WINDOWS = os.name == "nt"


def short_hash(*values) -> str:
    """16 hexadecimal digits: the start of the SHA-256 of the values' JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def content_hash(file: Path) -> str:
    """The SHA-256 of a file. Raises `UserError` if the file cannot be read."""
    with explained(f"{file}: cannot be read", "allow reading it, or leave it out", OSError), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hidden(path: Path) -> Path:
    """
    The hidden folder in which a file or folder is written or deleted, so that `path` is always whole.

    Its name is made of the whole name of `path`: of a long one, which would not fit with the dot and the suffix, the
    beginning and a hash.
    """
    name = path.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f"{name[:40]}-{short_hash(name)}"
    return path.with_name(f".{name}.part")


def lock_of(path: Path) -> Path:
    """The lock that a process holds while it writes to the hidden folder of `path`."""
    folder = hidden(path)
    return folder.with_name(f"{folder.name}.lock")


# In bytes; a file system takes 255. A character of UTF-8 has up to four.
LONGEST_NAME = 200

# For how long to wait for another process that writes the same small file, in seconds.
PATIENCE = 30


@contextlib.contextmanager
def atomic_folder(final: Path, way_out: str) -> Iterator[Path]:
    """
    Give the block a hidden folder to write into; sync it to the disk and rename it to `final` when the block ends.

    A block that raises leaves no folder but the parents; what a killed process left is deleted.

    Args:
        way_out: the end of the message if the folder cannot be written, such as ", or name another folder".

    Raises:
        UserError: the folder cannot be written, or another process is writing it; nothing has been done then.
    """
    with writing(final, way_out), _locked_hidden_folder(final) as partial:
        yield partial
        _move(partial, final)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """
    As `atomic_folder`, for a folder that a user names.

    Raises:
        UserError: before the block, if `folder` exists and is not an empty folder, cannot be replaced, or is written
            by another process; or it cannot be written.
    """
    folder = folder.absolute()
    way_out = ", or name another folder"
    check_new_folder(folder)
    with writing(folder, way_out), _locked_hidden_folder(folder) as partial:
        check_new_folder(folder)  # another process may have written it before this one had the lock
        if folder.is_dir():
            _check_replaceable(folder)
        yield partial
        _move(partial, folder)


def check_new_folder(folder: Path) -> None:
    """Raise `UserError` if `folder` exists and is not an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: exists already; name a new or empty folder")


def _check_replaceable(folder):
    """Refuse an empty folder that cannot be replaced: a mount point, or one that belongs to another user."""
    inside = f"{folder}: is an empty folder that cannot be replaced ({{}}); name a folder in it: {folder / 'model'}"
    if os.path.samefile(folder, os.curdir):  # the shell would stay in the folder that is gone
        raise UserError(inside.format("it is the working folder"))
    mode = folder.stat().st_mode
    try:
        folder.rmdir()
    except OSError as error:
        raise UserError(inside.format(error.strerror)) from None
    folder.mkdir()
    folder.chmod(mode)


def _move(partial, final):
    """Sync a whole folder to the disk, and give it its name; `final` does not exist, or is an empty folder."""
    _sync_all(partial)
    if IS_WINDOWS and final.is_dir():  # Windows renames a folder to no name that exists
        final.rmdir()
    partial.rename(final)
    sync(final.parent)


@contextlib.contextmanager
def replacing_files(folder: Path, last: str) -> Iterator[Path]:
    """
    Give the block a hidden folder to write into; then move its files into `folder`, the file `last` after all others.

    An older file of that name is deleted first, so that it never stands beside the new files. A block that raises
    changes nothing in `folder`.
    """
    hidden_beside_the_files = folder / "model"  # gives the hidden folder its name, .model.part; is not made itself
    with _locked_hidden_folder(hidden_beside_the_files) as partial:
        yield partial
        _sync_all(partial)
        (folder / last).unlink(missing_ok=True)
        sync(folder)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
            path.replace(folder / path.name)
            sync(folder)


@contextlib.contextmanager
def _locked_hidden_folder(final, seconds=0):
    """
    Give the block the hidden folder of `final`, new and empty, and delete it afterwards.

    One process at a time is in such a block. What a process left that was killed there is deleted by the next one.

    Args:
        seconds: for how long to wait for another process.

    Raises:
        UserError: another process is in such a block.
    """
    partial = hidden(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    in_use = f"{final}: another process is writing there; wait, or name another"
    with locked(lock_of(final), in_use, seconds):
        delete(partial)
        try:
            partial.mkdir()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _sync_all(folder):
    """Flush a folder and what is in it to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


@contextlib.contextmanager
def atomic_file(path: Path, seconds: float = PATIENCE) -> Iterator[Path]:
    """
    Give the block a path in a hidden folder to write to, and move the file to `path` when the block ends: a reader
    finds the old file or the new one, never a part. A block that raises leaves `path` as it was.

    Args:
        seconds: for how long to wait for another process that writes the file.

    Raises:
        UserError: another process is writing the file for longer than that.
    """
    with _locked_hidden_folder(path, seconds) as folder:
        yield folder / path.name
        (folder / path.name).replace(path)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """
    As `atomic_file`, for a file that a user names.

    Raises:
        UserError: before the block, if `path` exists, its folder does not, or another process is writing it; or the
            file cannot be written.
    """
    path = path.absolute()
    check_new_file(path)
    with writing(path, ", or name another file"), atomic_file(path, seconds=0) as partial:
        check_new_file(path)  # another process may have written it before this one had the lock
        yield partial


def check_new_file(path: Path) -> None:
    """Raise `UserError` if a file of this name exists, its folder does not, or no file can be made there."""
    if path.is_symlink() or path.exists():
        raise UserError(f"{path}: exists already; name another file, or delete this one")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make the folder, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path}: the folder {path.parent} cannot be written; name another file")


def base_name(path: str | Path) -> str:
    """The last component of a path. Bytes that are not UTF-8 become a replacement character."""
    return os.fsencode(os.path.basename(os.path.abspath(path))).decode(errors="replace")


def real(path: str | Path) -> Path:
    """The absolute path that a path leads to, without links; for a link to itself `Path.resolve` raises."""
    return Path(os.path.realpath(path))


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, from the operating system's cache to the disk (fsync)."""
    if IS_WINDOWS:  # Windows opens no folder, and flushes no file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically: a reader finds the old file or the new one, never a part."""
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def delete(path: Path) -> None:
    """Delete a folder, or what stands in its place, if anything: a link, but not what it leads to; a pipe unread."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------

LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(file: Path, in_use: str, seconds: float = 0) -> Iterator[None]:
    """
    Hold a lock for the block; the operating system takes it from a process that is killed.

    Args:
        file: of the lock; the folder exists. The file is made, and deleted afterwards.
        in_use: the message if another process, or another thread, has the lock.
        seconds: for how long to wait for it.

    Raises:
        UserError: another process has the lock.
        OSError: the file cannot be made.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise UserError(in_use) from None
    try:
        yield
    finally:
        # The lock file is deleted before the lock is released. Deleted afterwards, a second process could already hold
        # the lock of the deleted file while a third one makes and locks a new file. A process that opened the file
        # before its deletion notices, once it has the lock, that the file name is gone. Windows does not delete an
        # open file (filelock does it later), and on a network's disk a file may be busy: it then stays, and is free.
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """
    Make a run's output folder and lock it for the block, so that no other run writes there.

    If the folder is new and still empty after the block, it is deleted.

    Raises:
        UserError: the path is a file, the folder cannot be written, or another run has locked it.
    """
    existed = folder.exists()
    place = f"output_dir {folder}"
    try:
        with contextlib.ExitStack() as stack:
            with writing(place, ", or name another folder"):
                folder.mkdir(parents=True, exist_ok=True)
                in_use = f"{place}: another run is writing there; wait, or name another"
                stack.enter_context(locked(folder / LOCK_FILE, in_use))
            yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # it is not empty, or gone
                folder.rmdir()
