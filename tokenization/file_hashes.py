"""The SHA-256 of files, remembered in the cache by path, size and times of change."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from d2l_bert import folders
from d2l_bert.errors import UserError
from d2l_bert.tokenization.cache import cache_folder, fingerprint


# The hash of a file that changed less than this many seconds ago is not remembered: on a file system that records
# whole seconds, the file may change again without a new time of change.
UNSETTLED_SECONDS = 2


def content_hash(file: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); mend its permissions or leave it out") from None


def content_hashes(files: list[Path], remembered_as: str) -> list[str]:
    """
    The SHA-256 of each file, in order. A file is read only if its path, size or times of change are new.

    Args:
        remembered_as: the key of the record in the cache that remembers these hashes, such as the path of a folder.

    Raises:
        UserError: a file cannot be read.
    """
    now = time.time_ns()  # taken before any file is read: a file that changes later is not settled
    record = cache_folder() / "hashes" / f"{fingerprint(remembered_as)}.json"
    remembered, entries = _read(record), {}
    for file in files:
        path = os.path.realpath(file)
        try:
            state = _state(path)
        except OSError:
            state = None
        entry = remembered.get(path)
        if entry is None or state is None or entry[:-1] != state:
            entry = [*(state or []), content_hash(file)]
        entries[path] = entry
    settled = {
        path: entry for path, entry in entries.items() if remembered.get(path) == entry or _is_settled(entry, now)
    }
    if settled != remembered:
        _write(record, settled)
    return [entries[os.path.realpath(file)][-1] for file in files]


def _state(path):
    """Size, time of the last change of the content, and time of the last change of the file's metadata (ns)."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _is_settled(entry, now):
    """Whether the file of an entry (*state, hash) last changed more than `UNSETTLED_SECONDS` before `now` (ns)."""
    return len(entry) == 4 and max(entry[1:3]) < now - UNSETTLED_SECONDS * 10**9


def _read(record):
    """The entry (*state, hash) of each path in a record; no entry if the record is missing or damaged."""
    try:
        content = json.loads(record.read_text())
        return {path: entry for path, entry in content.items() if isinstance(entry, list) and len(entry) == 4}
    except (OSError, ValueError, AttributeError):
        return {}


def _write(record, content):
    """Write a record; do nothing if the cache cannot be written, as writing the text will report the error."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        folders.write_json(record, content)
