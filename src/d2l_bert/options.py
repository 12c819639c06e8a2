"""How a dataclass declares its fields as command-line options, with their ranges; checks each value by itself."""

import dataclasses
import math
import os
import re
import types
import typing
from typing import Literal

from d2l_bert.errors import UserError, refuse_first


# Groups of options: each is a heading in `--help`, which lists the options of a group below its heading.
TEXT = "text"
TOKENIZER = "tokenizer"
BATCHES = "pairs and masks"
LENGTH = "length of the run (one of them)"
OPTIMIZER = "optimizer"
MACHINE = "machine"
OUTPUT = "output"
HUB = "the Hugging Face Hub"
MINIMAL_PAIRS = "minimal pairs"


def option(default, help, group, *, identity=True, metavar=None, within=None, common=False, needs=()):
    """
    A dataclass field that is also a command-line option.

    Args:
        default: the default value; a list is copied for each instance.
        help: one line for `--help`.
        group: one of the groups above: the heading in `--help`.
        identity: True if the option changes what is trained: a resumed run must then give the same value. False for
            options that say how a run is computed, logged or saved, or where its text lies.
        metavar: the name of the value in `--help`.
        within: the interval of a number, such as `[0, 1)`: at least 0 and below 1.
        common: whether `--help` shows the option, and not only `--help-all`.
        needs: another option without which this one has no effect, and the values that it must have, if not just any.
    """
    metadata = {
        "help": help,
        "group": group,
        "identity": identity,
        "metavar": metavar,
        "within": within,
        "common": common,
        "needs": needs,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(config: type, name: str, **changes):
    """
    The option `name` of another dataclass of options, with the same default and meaning.

    Args:
        changes: what differs in the other arguments of `option`, such as `help`.
    """
    field = config.__dataclass_fields__[name]
    metadata = {**field.metadata, **changes}
    return dataclasses.field(default=field.default, default_factory=field.default_factory, metadata=metadata)


class Options:
    """Base class of dataclasses whose fields are options."""

    def check(self) -> None:
        """
        As `check_values`; then refuse an option without the one that it is for, and what contradicts itself.

        Raises:
            UserError: the first of `contradictions` that holds, or as in `check_values`.
        """
        self.check_values()
        for field in dataclasses.fields(self):
            default = [] if field.default is dataclasses.MISSING else field.default
            other, *values = field.metadata.get("needs") or [None]
            if other is None or getattr(self, field.name) == default:
                continue
            if getattr(self, other) not in values if values else not getattr(self, other):
                wanted = " ".join([other, " or ".join(values)]).rstrip()
                raise UserError(f"{field.name} is for {wanted}; give that too, or leave it out")
        refuse_first(self.contradictions())

    def contradictions(self) -> dict[str, object]:
        """The cases in which options contradict each other: a message for each, and whether it holds."""
        return {}

    def identity(self) -> dict:
        """The options that decide what a run computes: a run that resumes must have the same values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["identity"]}

    def check_values(self) -> None:
        """
        Check each value by itself, as its field declares it.

        Raises:
            UserError: a value has another type or is out of its range, or a string is empty, as an unset variable of
                the shell is, or holds a NUL character, which no path can have.
        """
        kinds = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind, within = getattr(self, field.name), kinds[field.name], field.metadata.get("within")
            kinds_of_field = members_of(kind)
            if not any(_is_a(value, kind) for kind in kinds_of_field):
                wanted = " or ".join(_in_words(kind) for kind in kinds_of_field if kind is not types.NoneType)
                raise UserError(f"{field.name} must be {wanted}, got {' '.join(repr(value).split()):.200}")
            for string in value if isinstance(value, list) else [value]:
                if isinstance(string, str) and field.metadata.get("metavar") == "PATH":
                    string = re.sub("[\udc80-\udcff]", "?", string)  # bytes of file names need not be UTF-8
                if isinstance(string, str) and not is_written(string):
                    raise UserError(
                        f"{field.name} is empty, holds a NUL character, or is not UTF-8, got {string!a}; give a value"
                    )
            if within and isinstance(value, (int, float)) and not _is_within(value, within):
                raise UserError(f"{field.name} must be a number in {within}, got {value}")


def flag(name: str, value: object) -> list[str]:
    """An option as words of a command line; no words for None, which is always the default."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *(value or ["none"])]
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


def is_written(text: str) -> bool:
    """Whether a text has a character, no NUL, which no path can have, and is UTF-8."""
    return bool(text.strip()) and not re.search("[\0\ud800-\udfff]", text)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def members_of(kind: type) -> tuple:
    """The types of a union; a tuple of one type for any other."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _is_within(value, interval):
    """Whether a number lies in an interval such as `[0, 1)`."""
    least, most = map(float, interval[1:-1].split(","))
    return (value > least or (value == least and interval[0] == "[")) and (
        value < most or (value == most and interval[-1] == "]")
    )


def _in_words(kind):
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "a list of strings"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}[kind]


def _is_a(value, kind):
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
