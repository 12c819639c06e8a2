"""The cache of prepared text: this user's own folder, and folders in it that are written once and checked."""

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import constants

from d2l_bert.folders import atomic_folder, content_hash, delete, short_hash, write_json
from d2l_bert.messages import UserError, writing


logger = logging.getLogger(__name__)

ANOTHER_CACHE = ", or set HF_HOME to another folder"

# Beside the files of a folder of the cache: what they are, so that a changed or cut one is noticed.
SEAL_FILE = "written.json"


def cache_folder() -> Path:
    """
    The folder of the cache, which is this user's own and closed to others: `$HF_HOME/d2l_bert`.

    Several users may share `HF_HOME`. What another one put there, a folder or a link, could change every run that
    reads it, so it is not read: if `d2l_bert` belongs to another user, the folder is `d2l_bert-N` with the number of
    this one. (Prepared folders are for sharing; they are checked when they are read.)

    Raises:
        UserError: that folder, too, belongs to another user.
    """
    usual = Path(constants.HF_HOME) / "d2l_bert"
    if os.name == "nt" or is_own(usual):
        return _closed(usual)
    own = usual.with_name(f"d2l_bert-{os.geteuid()}")
    if not is_own(own):
        raise UserError(f"cache {own}: belongs to another user; set HF_HOME to a folder of your own")
    _say_once(f"the cache {usual} belongs to another user; {own} is used instead")
    return _closed(own)


def is_own(folder):
    """
    Whether a folder belongs to this user and, if it is a link, the link does, too; or nothing is there.

    A folder of some network drives seems to belong to another user: they report one owner for all files. It is this
    user's if a new file in it has that owner, too.
    """
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        return False
    with writing(f"cache {folder}", ANOTHER_CACHE):
        owners = {folder.lstat().st_uid, folder.stat().st_uid}
        if owners == {os.geteuid()}:
            return True
        try:
            with tempfile.TemporaryFile(dir=folder) as new:
                owner_of_new_file = os.fstat(new.fileno()).st_uid
        except OSError:  # this user may not even write there
            return False
        return owners == {owner_of_new_file}


def _closed(folder):
    """Close a folder to other users, if it exists and its file system has permissions; returns the folder."""
    with contextlib.suppress(OSError):
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
    return folder


@functools.cache
def _say_once(line):
    logger.warning(line)


def cached(folder: Path, kind: str, identity: Sequence, write: Callable[[Path], object]) -> Path:
    """
    A folder of the cache whose content follows from `identity`; `write_once` writes it if it is not there.

    Its name has a hash of `identity`, and of the versions of what splits text and tokenizes: two libraries and
    Python's Unicode tables.

    Args:
        folder: the cache.
        kind: the beginning of the name.
        identity: values of JSON.
        write: as in `write_once`.

    Raises:
        UserError: the cache cannot be written.
    """
    versions = [importlib.metadata.version(name) for name in ("sentencex", "tokenizers")]
    path = folder / f"{kind}-{short_hash(versions, unicodedata.unidata_version, *identity)}"
    write_once(path, write)
    return path


def write_once(path: Path, write: Callable[[Path], object]) -> None:
    """
    Write a folder of the cache atomically, unless it exists and is whole (`_is_whole`).

    `write` fills a temporary folder, which is renamed to `path` when `write` returns, or deleted when `write` raises.
    If several processes need the folder, one writes it while the others wait. If the writing process is killed,
    another one writes the folder. One whose files have changed is deleted and written anew.

    Args:
        write: gets the path of the empty temporary folder. An `OSError` that it raises is reported as an error of
            writing the cache, so `write` must turn errors of reading its sources into other exceptions.

    Raises:
        UserError: the cache cannot be written.
    """
    with writing(f"cache {path.parent}", ANOTHER_CACHE):
        if _is_whole(path):
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            held = lock.acquire(timeout=1.0)
        except Timeout:
            logger.info(f"waiting for another process, which writes the same text into the cache {path.parent}")
            held = lock.acquire()
        with held:
            if _is_whole(path):  # another process wrote it while this one waited
                return
            if os.path.lexists(path):
                logger.warning(f"cache {path}: is not as it was written; it is made anew")
                delete(path)
            with atomic_folder(path, ANOTHER_CACHE) as partial:
                write(partial)
                _seal(partial, path.name)


def _seal(folder, name):
    """Write down what the files of a folder of the cache are, which will have this name."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            place = path.relative_to(folder).as_posix()
            files[place] = {"bytes": path.stat().st_size, "sha256": content_hash(path), "marks": _marks(path)}
    write_json(folder / SEAL_FILE, {"name": name, "files": files})


def _is_whole(folder):
    """
    Whether a folder of the cache has the files that were written into it, and they are as they were written.

    Of each file, the size is compared first, then its marks. If both are as they were written, that is all: hashing a
    large text would take longer than all else before a run starts. If only the size is, as in a copied cache, the file
    is hashed. What the disk itself damages without a write, `prepare` notices: it hashes what it copies.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        if not (folder / SEAL_FILE).is_file():  # a pipe would wait
            return False
        seal = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))
        if seal["name"] != folder.name:
            return False
        for name, file in seal["files"].items():
            if not _is_as_sealed(folder / name, file):
                return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # the seal itself is damaged
        return False
    return True


def _is_as_sealed(path, sealed):
    """Whether a file is as its entry in `SEAL_FILE` says; it is read only if its marks are others."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != sealed["bytes"]:
        return False
    if sealed["marks"] == _marks(path):
        return True
    return sealed["sha256"] == content_hash(path)


def _marks(path):
    """Numbers of the file system that change when a file is written or replaced; a copy has others, too."""
    status = path.stat()
    return [status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
