"""Files and folders written whole, never half of one; JSON files read with the mend for a damaged one."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from d2l_bert.errors import UserError, why_unwritable


@contextlib.contextmanager
def new_folder(folder: Path):
    """
    A folder to write into, which takes the name `folder` when the block is done; if the block fails it goes again.

    Raises:
        UserError: `folder` holds something already, or cannot be made.
    """
    folder = folder.absolute()
    check_name(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder}: there is something already; name a new or empty folder")
    try:
        beside = next(parent for parent in folder.parents if parent.exists())
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=beside))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        with os_errors():
            yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp lets only the owner in
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(folder)  # an empty folder of this name makes way
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    except OSError as error:
        if error.errno is None:  # shutil's own has a list of them, each with its reason
            error.strerror = error.args[0][0][-1]
        raise UserError(f"{folder}: {why_unwritable(error, ', or name another folder')}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def os_errors():
    """Raise what goes wrong with a disk as `OSError`; the libraries written in Rust have exceptions of their own."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def check_name(folder: Path) -> None:
    """Refuse a name that no JSON and no card could hold, before there is anything to lose."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"output_dir {ascii(str(folder))}: its name is not UTF-8; name another folder") from None


def base_name(path: str) -> str:
    """The last name of a path, as text, whatever bytes it has."""
    return os.fsencode(os.path.basename(os.path.abspath(path))).decode(errors="replace")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write `content` so that a reader finds the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    """
    The content of a JSON file; empty if there is none.

    Raises:
        UserError: it is damaged.
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
