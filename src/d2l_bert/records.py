"""JSON files, which may be a stranger's, read as the type that is declared; names of files that stay in a folder."""

import contextlib
import importlib.metadata
import json
import math
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from d2l_bert.messages import READ_ERRORS, UserError, explained


# A record is small. A larger file is no record, and would fill the memory.
LARGEST_RECORD = 1 << 28  # bytes


def read_record(path: Path, kind: type = dict, allow_nan: bool = False) -> dict:
    """
    The object in a JSON file, as it stands there; an empty dict if nothing of this name exists.

    Args:
        kind: a `TypedDict` that declares the entries which this package reads: the others are kept, unchecked. With
            `dict`, any object is taken, and none of its entries may be relied on.
        allow_nan: whether a number may be NaN or infinite, as a figure that is not defined.

    Raises:
        UserError: the file cannot be read, is no regular file, or holds no JSON object, or one that is not as `kind`
            declares it; or a number is not finite.
    """
    if not path.is_symlink() and not path.exists():
        return {}
    with explained(f"{path}: cannot be read", "take it out, or put the right one back", *READ_ERRORS, RecursionError):
        if not path.is_file():
            raise ValueError("it is no file")  # a pipe would wait, and a device would never end
        if path.stat().st_size > LARGEST_RECORD:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, and such a file has at most {LARGEST_RECORD:,}")
        finite = {} if allow_nan else {"parse_float": _finite, "parse_constant": _finite}
        content = json.loads(path.read_text(encoding="utf-8"), **finite)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        try:
            check_type(content, kind)
        except ValueError as error:
            raise ValueError(f"{error}{_other_version(content)}") from None
    return content


def _finite(number):
    """A number of JSON as a float; NaN, Infinity and a number beyond a float's range, such as 1e400, are refused."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number:.50} is no finite number")
    return value


def _other_version(content):
    """The end of a message: which version has written a record, if it says so and it is not this one."""
    ours = importlib.metadata.version("d2l-bert")
    versions = content.get("versions")
    theirs = versions.get("d2l-bert") if isinstance(versions, dict) else None
    if not isinstance(theirs, str) or theirs == ours:
        return ""
    return f"; it was written by d2l-bert {theirs!r:.50}, and this is {ours}: use that version for it"


def check_type(value: object, kind: object, place: str = "") -> None:
    """
    Check a value that was read from JSON.

    Args:
        kind: `str`, `int`, `float`, `bool`, `dict`, `list`, `object` for anything; a `TypedDict`, a union, also with
            `None`, or a `Literal`; a `list[...]` or `dict[str, ...]` of these.
        place: where the value stands, such as `files.a.bin`, for the message.

    Raises:
        ValueError: the value is of another type.
    """
    origin = typing.get_origin(kind)
    members = typing.get_args(kind)
    if typing.is_typeddict(kind):
        _check_entries(value, kind, place)
    elif origin in (typing.Union, types.UnionType):
        if not any(_is_of(value, member) for member in members):
            alike = [member for member in members if _is_of(value, _container(member))]
            if alike:  # what is wrong stands inside of it
                check_type(value, alike[0], place)
            _check_plain(value, members, place)
    elif origin is list:
        _check_plain(value, (list,), place)
        for number, entry in enumerate(value):
            check_type(entry, members[0], f"{place}[{number}]")
    elif origin is dict:
        _check_plain(value, (dict,), place)
        for name, entry in value.items():
            check_type(entry, members[1], f"{place}.{name:.100}".lstrip("."))
    else:
        _check_plain(value, (kind,), place)


def _check_entries(value, kind, place):
    """Check an object by a `TypedDict`; entries that the `TypedDict` does not declare may have any type."""
    _check_plain(value, (dict,), place)
    for name, of_entry in typing.get_type_hints(kind).items():
        if name in value:
            check_type(value[name], of_entry, f"{place}.{name}".lstrip("."))
        elif name in kind.__required_keys__:
            raise ValueError(f"{place or 'the object'} lacks the entry {name!r}")


def _check_plain(value, kinds, place):
    """Raise unless a value is of one of these types; an entry of a list or an object is not looked at."""
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            if any(value == one and type(value) is type(one) for one in typing.get_args(kind)):  # True == 1
                return
        elif kind is object:
            return
        elif isinstance(value, bool):  # which is an `int` of Python, but no number of JSON
            if kind is bool:
                return
        elif kind is float and isinstance(value, int):
            if abs(value) <= sys.float_info.max:
                return
        elif isinstance(kind, type) and isinstance(value, kind):
            return
    names = " or ".join(_in_words(kind) for kind in kinds)
    raise ValueError(f"{place or 'the whole'} must be {names}, got {value!r:.100}")


def _in_words(kind):
    """A type as a message names it: of a `Literal` its values."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.is_typeddict(kind):
        return "an object"
    kind = typing.get_origin(kind) or kind
    return {dict: "an object", list: "a list", types.NoneType: "null"}.get(kind) or kind.__name__


def _container(kind):
    """`list` or `dict` for a type of lists or of objects; any other type as it is."""
    return dict if typing.is_typeddict(kind) else typing.get_origin(kind) or kind


def _is_of(value, kind):
    try:
        check_type(value, kind)
    except ValueError:
        return False
    return True


def values_in(value: object) -> Iterator[object]:
    """A value of JSON or of a table, and every value inside of it, in no order."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def inside(folder: Path, name: str) -> Path:
    """
    The path of a file that a record, an index or a card names, and that belongs into the folder itself.

    Args:
        name: from a stranger: a path with forward slashes, relative to `folder`.

    Raises:
        UserError: the name is empty or absolute, has a part such as `..`, or links lead out of the folder; the file
            exists and is no regular file.
    """
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") or ":" in part for part in parts):
        raise UserError(f"{folder}: names {name!r:.200}, which is no file in this folder; do not use this folder")
    path = folder.joinpath(*parts)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, ValueError) as error:  # it is too long, or no text that a file system takes
        why = getattr(error, "strerror", None) or "no file has such a name"
        raise UserError(
            f"{folder}: names {name!r:.200}, which cannot be read ({why}); do not use this folder"
        ) from None
    refuse_link_outwards(path, folder)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; do not use this folder")
    return path


def refuse_link_outwards(path: Path, folder: Path) -> None:
    """
    Refuse a path in a folder that leads to something outside of it by a link: whoever made the folder would choose
    which files of this machine are read, copied or published.

    The cache of the Hub's client keeps its files as links from `snapshots/<commit>/` to `blobs/` beside them: a path
    may lead to these.

    Raises:
        UserError: the path leads out of the folder.
    """
    real = Path(os.path.realpath(path))  # `resolve` raises for a link to itself
    home = folder.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not real.is_relative_to(home) and not real.is_relative_to(blobs):
        raise UserError(f"{path}: is a link that leads out of {folder}; put the file itself there, or take it out")
