"""How a dataclass declares its fields as command-line options: their flags, their ranges, checks of each value."""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
import types
import typing
from collections.abc import Sequence

from d2l_bert.messages import UserError, refuse_first


# Groups of options: each is a heading in `--help`, which lists the options of a group below its heading.
TEXT = "text"
TOKENIZER = "tokenizer"
BATCHES = "pairs and masks"
LENGTH = "length of the run (one of them)"
OPTIMIZER = "optimizer"
MACHINE = "machine"
OUTPUT = "output"
HUB = "the Hugging Face Hub"
SENTENCES = "minimal pairs and lines"


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
        within: the interval of a number, such as `[0, 1)`: at least 0 and below 1. `inf)` stands for the largest
            number that an option may have (`MOST_WHOLE`, `MOST`).
        common: whether `--help` shows the option, and not only `--help-all`.
        needs: another option without which this one has no effect, and the values that it must have, if not just any.
    """
    of_field = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(
        **of_field,
        metadata={
            "help": help,
            "group": group,
            "identity": identity,
            "metavar": metavar,
            "within": within,
            "common": common,
            "needs": needs,
        },
    )


def option_of(config: type, name: str, **changes):
    """
    The option `name` of another dataclass of options, with the same default and meaning.

    Args:
        changes: what differs in the other arguments of `option`, such as `help`.
    """
    field = config.__dataclass_fields__[name]
    return dataclasses.field(
        default=field.default, default_factory=field.default_factory, metadata={**field.metadata, **changes}
    )


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
            if field.metadata.get("needs") and getattr(self, field.name) not in (field.default, []):
                other, *values = field.metadata["needs"]
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
            value, is_path = getattr(self, field.name), field.metadata.get("metavar") == "PATH"
            if wrong := what_is_wrong(value, kinds[field.name], field.metadata.get("within"), is_path):
                raise UserError(f"{field.name} {wrong}")


def flag(name: str, value: object) -> list[str]:
    """An option as words of a command line; no words for None, which is always the default."""
    if value is None:
        return []
    values = (value or ["none"]) if isinstance(value, list) else [value]
    return [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values)]


def flags(config: type, given: dict, defaults: dict, others: Sequence[str]) -> list[str]:
    """
    The options that differ from the defaults, as words of a command line that repeats a run.

    Args:
        config: the dataclass of options.
        given, defaults: the values of all options, by name.
        others: options to give beside those that decide what the run computes (`Options.identity`).
    """
    relevant = [f.name for f in dataclasses.fields(config) if f.metadata["identity"] or f.name in others]
    return [word for name in relevant if given[name] != defaults[name] for word in flag(name, given[name])]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def members_of(kind: type) -> tuple:
    """The types of a union; a tuple of one type for any other."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


# For each type of an option but a choice of words: its values in words, and whether a value is one.
_VALUES = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: (
        "a finite number",
        # A whole number may be beyond what a float holds.
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        ),
    ),
    str: ("a string", lambda value: isinstance(value, str)),
    list[str]: (
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
    ),
    types.NoneType: ("", lambda value: value is None),
}


# The largest numbers of an option whose interval has no end. Whole numbers above are not exact as a float, as JSON's
# readers have them, and overflow what counts in 64 bits.
MOST_WHOLE, MOST = 2**53, 10**9


def _bounded(within, is_float):
    """The interval of an option, with ends."""
    most = MOST if is_float else MOST_WHOLE
    return within.replace("inf)", f"{most}]") if within else f"[-{most}, {most}]"


def what_is_wrong(value: object, kind: type, within: str | None = None, is_path: bool = False) -> str:
    """
    Why a value cannot be that of an option, to follow the option's name in a message; "" if it can be.

    Args:
        kind: the option's type, such as `int | None` or `Literal["a", "b"]`.
        within: the interval of a number, as in `option`.
        is_path: whether strings are paths, whose bytes need not be UTF-8.
    """
    members = members_of(kind)
    words = [_VALUES[one][0] if one in _VALUES else " or ".join(typing.get_args(one)) for one in members]
    if not _is_value(value, members):
        return f"must be {' or '.join(filter(None, words))}, got {' '.join(repr(value).split()):.200}"
    for string in value if isinstance(value, list) else [value]:
        if isinstance(string, str) and (
            not string.strip() or re.search("\0" if is_path else "[\0\ud800-\udfff]", string)
        ):
            return f"is empty, holds a NUL character, or is not UTF-8, got {string!a}; give a value"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        within = _bounded(within, float in members)
        least, most = map(float, within[1:-1].split(","))
        at_open_end = (value == least and within[0] == "(") or (value == most and within[-1] == ")")
        if at_open_end or not least <= value <= most:
            return f"must be a number in {within}, got {value}"
    return ""


def _is_value(value, members):
    """Whether a value is of one of these types, whatever the interval of its option."""
    return any(_VALUES[one][1](value) if one in _VALUES else value in typing.get_args(one) for one in members)


def value_of(kind: type, text: str, within: str | None = None, is_path: bool = False):
    """The value of an option's type that a word of the command line stands for, checked by `what_is_wrong`."""
    values = [text]
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        with contextlib.suppress(ValueError, KeyError):
            values.append(read(text.lower()))
    value = next((value for value in reversed(values) if _is_value(value, members_of(kind))), text)
    if wrong := what_is_wrong(value, kind, within, is_path):
        raise argparse.ArgumentTypeError(wrong)
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The flags


def add_options(parser: argparse.ArgumentParser, config: Options, shows_all: bool) -> None:
    """
    Add a flag for each option but `recipe`, in the option's group; its help shows the value.

    Args:
        config: an object of a dataclass of options.
        shows_all: whether the help shows all options, not only the common ones.
    """
    kinds = typing.get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if field.name not in ("recipe", "model")]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(f.metadata["group"] for f in fields)}
    for field in fields:
        about = field.metadata
        add_option(
            groups[about["group"]],
            field.name,
            kinds[field.name],
            getattr(config, field.name),
            about["help"] if about["common"] or shows_all else None,
            about["metavar"],
            about["within"],
        )


def add_option(
    group,
    name: str,
    kind: type,
    default: object,
    help: str | None,
    metavar: str | None = None,
    within: str | None = None,
) -> None:
    """
    Add the flag `--name` to an argument group.

    Args:
        kind: the type of the field, such as `int | None`.
        default: the field's value, shown in the help. A flag that is not given is left out of the parsed arguments.
        help: what the option does; None to leave it out of the help.
        metavar, within: as in `option`.
    """
    members = [member for member in members_of(kind) if member is not types.NoneType]
    names = {bool: "true|false", int: "N", float: "X", str: "NAME"}
    how = {
        "metavar": metavar or "|".join(names.get(member) or "|".join(typing.get_args(member)) for member in members),
        "type": functools.partial(
            value_of, str if list[str] in members else kind, within=within, is_path=metavar == "PATH"
        ),
    }
    if bool in members:
        how |= {"nargs": "?", "const": True}
    elif list[str] in members:
        how |= {"nargs": "+", "action": "extend"}
    shown = " ".join(default) if isinstance(default, list) else str(default).lower() if default is not None else ""
    line = argparse.SUPPRESS if help is None else f"{help} ({shown})".strip() if shown else help
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=line.replace("%", "%%"), **how)
