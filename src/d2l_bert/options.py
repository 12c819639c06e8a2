"""How a dataclass declares its fields as command-line options: their flags, their ranges, checks of each value."""

import argparse
import dataclasses
import difflib
import functools
import inspect
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d2l_bert.messages import UserError


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

# The heading below which the docstring of a dataclass lists its options.
OPTIONS_IN_DOCSTRING = "Attributes:"

# The type of an option that is a path. A program may give a `pathlib.Path`; `Options` keeps it as a string.
PathOption = str | Path


def option(
    default,
    help,
    group,
    *,
    identity=True,
    metavar=None,
    within=None,
    common=False,
    needs=None,
    needs_value=None,
):
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
        common: whether `--help` shows the option, and not only `--help_all`.
        needs: another option without which this one has no effect.
        needs_value: the value that the option in `needs` must have, if not just any.
    """
    metadata = {
        "help": help,
        "group": group,
        "identity": identity,
        "metavar": metavar,
        "within": within,
        "common": common,
        "needs": needs,
        "needs_value": needs_value,
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
    return dataclasses.field(
        default=field.default, default_factory=field.default_factory, metadata={**field.metadata, **changes}
    )


class Options:
    """
    Base class of dataclasses whose fields are options.

    Values are kept as `plain` gives them, those of an option that is a list of strings as `listed` does.
    """

    def __init_subclass__(cls) -> None:
        """Add the options to the docstring of the class, which `help` shows, with the words of `--help`."""
        super().__init_subclass__()
        own = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        fields = {**getattr(cls, "__dataclass_fields__", {}), **own}
        lines = [inspect.cleandoc(cls.__doc__ or "").partition(f"\n\n{OPTIONS_IN_DOCSTRING}")[0], ""]
        lines.append(OPTIONS_IN_DOCSTRING)
        for name, field in fields.items():
            if "help" in field.metadata:
                lines.append(f"    {name}: {with_default(field.metadata['help'], default_of(field))}")
        cls.__doc__ = "\n".join(lines)

    def __setattr__(self, name: str, value: object) -> None:
        value = plain(value)
        field = self.__dataclass_fields__.get(name)
        if field is not None and list[str] in members_of(field.type):
            value = listed(value)
        super().__setattr__(name, value)

    def check(self) -> None:
        """
        Refuse wrong values and options that do not go together.

        Raises:
            UserError: as in `check_values`; an option is given without the one that it is for; or the first message
                of `contradictions`.
        """
        self.check_values()
        given = self.given()
        for field in dataclasses.fields(self):
            if field.name in given and self._lacks(field):
                wanted = field.metadata["needs"]
                if field.metadata["needs_value"] is not None:
                    wanted = f"{wanted} {field.metadata['needs_value']}"
                raise UserError(f"{field.name} is for {wanted}; give that too, or leave it out")
        for message in self.contradictions(given):
            raise UserError(message)

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """
        Yield a message for each contradiction between options; only the first is shown.

        A subclass yields its own, and says `yield from super().contradictions(given)` for those of its base class. The
        code behind a `yield` runs only if there is no contradiction before.

        Args:
            given: the names of the options whose values are not the defaults.
        """
        yield from ()

    def given(self) -> set[str]:
        """The names of the options whose values are not the defaults."""
        return {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != default_of(field)}

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
            is_path = field.metadata.get("metavar") == "PATH"
            within = field.metadata.get("within")
            if wrong := what_is_wrong(getattr(self, field.name), kinds[field.name], within, is_path):
                raise UserError(f"{field.name} {wrong}")

    def _lacks(self, field):
        """Whether the option without which this one has no effect is not given, or has another value."""
        needed = field.metadata.get("needs")
        if needed is None:
            return False
        value = field.metadata["needs_value"]
        if value is None:
            return not getattr(self, needed)
        return getattr(self, needed) != value


def plain(value: object) -> object:
    """A value as options keep it: a `pathlib.Path` as a string, a number of NumPy as Python's; also in a list."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    return value


def listed(value: object) -> object:
    """
    A value as an option keeps it that is a list of strings, as a command line gives them: 3e-4 and [3e-4] as
    ["0.0003"], "label" as ["label"]. What is neither string, number nor list stays as it is.
    """
    if isinstance(value, str) or is_number(value):
        value = [value]
    if not isinstance(value, list):
        return value
    return [str(entry) if is_number(entry) else entry for entry in value]


def made(kind, config, given: dict):
    """
    The options of a command.

    Args:
        kind: the dataclass of its options.
        config: an object of it; None for the defaults.
        given: options by name, which replace those of `config`.

    Raises:
        UserError: there is no option of a name.
    """
    check_names(kind, given)
    return kind(**given) if config is None else dataclasses.replace(config, **given)


def check_names(kind, given: dict) -> None:
    """
    Check that a dataclass of options has each of these.

    Raises:
        UserError: there is no option of a name.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in given:
        if name in known:
            continue
        similar = difflib.get_close_matches(name, known, n=1)
        way_out = f"did you mean {similar[0]}?" if similar else f"help({kind.__name__}) has all"
        raise UserError(f"there is no option {name!r:.100}; {way_out}")


def default_of(field: dataclasses.Field) -> Any:
    """The default value of a field of a dataclass."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flag(name: str, value: object) -> list[str]:
    """An option as words of a command line; no words for None, which is always the default."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(as_word, value or ["none"])]
    return [f"--{name}", as_word(value)]


def as_word(value: object) -> str:
    """A value as a word of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def flags(config: type, values: dict, defaults: dict, others: Sequence[str]) -> list[str]:
    """
    The options that differ from the defaults, as words of a command line that repeats a run.

    Args:
        config: the dataclass of options.
        values, defaults: of all options, by name.
        others: options to give beside those that decide what the run computes (`Options.identity`).
    """
    words = []
    for field in dataclasses.fields(config):
        is_relevant = field.metadata["identity"] or field.name in others
        if is_relevant and values[field.name] != defaults[field.name]:
            words += flag(field.name, values[field.name])
    return words


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def members_of(kind: type) -> tuple:
    """The types of a union; a tuple of one type for any other."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


# ---------------------------------------------------------------------------------------------------------------------
# Values


class Kind(NamedTuple):
    """A type of options: its values in words, and whether a value is one."""

    words: str
    holds: Callable[[object], bool]


def is_whole(value: object) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a number; True and False are none."""
    return is_whole(value) or isinstance(value, float)


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold; a whole number may be beyond that."""
    return is_number(value) and abs(value) <= sys.float_info.max


def are_strings(value: object) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


# All types of options but choices of words.
KINDS = {
    bool: Kind("true or false", lambda value: isinstance(value, bool)),
    int: Kind("a whole number", is_whole),
    float: Kind("a finite number", is_finite),
    str: Kind("a string", lambda value: isinstance(value, str)),
    list[str]: Kind("a list of strings", are_strings),
    Path: Kind("", lambda value: False),  # a path is kept as a string
    types.NoneType: Kind("", lambda value: value is None),
}


def kind_of(member: type) -> Kind:
    """The kind of a type of `KINDS`, or of a `Literal`."""
    if member in KINDS:
        return KINDS[member]
    choices = typing.get_args(member)
    return Kind(" or ".join(choices), choices.__contains__)


# The largest numbers of an option whose interval has no end. Whole numbers above are not exact as a float, as JSON's
# readers have them, and overflow what counts in 64 bits.
MOST_WHOLE = 2**53
MOST = 10**9


def _with_largest_number(within, is_float):
    """The interval of an option, with the largest number for an end that is open: `[1, inf)` -> `[1, 1000000000]`."""
    largest = MOST if is_float else MOST_WHOLE
    if within is None:
        return f"[-{largest}, {largest}]"
    least, most = within.split(", ")
    if most == "inf)":
        most = f"{largest}]"
    return f"{least}, {most}"


def what_is_wrong(value: object, kind: type, within: str | None = None, is_path: bool = False) -> str:
    """
    Why a value cannot be that of an option, to follow the option's name in a message; "" if it can be.

    Args:
        kind: the option's type, such as `int | None` or `Literal["a", "b"]`.
        within: the interval of a number, as in `option`.
        is_path: whether strings are paths, whose bytes need not be UTF-8.
    """
    members = members_of(kind)
    if not _is_value(value, members):
        words = [kind_of(member).words for member in members]
        return f"must be {' or '.join(filter(None, words))}, got {' '.join(repr(value).split()):.200}"
    unwanted = "\0" if is_path else "[\0\ud800-\udfff]"
    for string in value if isinstance(value, list) else [value]:
        if isinstance(string, str) and (not string.strip() or re.search(unwanted, string)):
            return f"is empty, holds a NUL character, or is not UTF-8, got {string!a}; give a value"
    if is_number(value):
        within = _with_largest_number(within, float in members)
        if not _is_within(value, within):
            return f"must be a number in {within}, got {value}"
    return ""


def _is_value(value, members):
    """Whether a value is of one of these types, whatever the interval of its option."""
    return any(kind_of(member).holds(value) for member in members)


def _is_within(number, within):
    """Whether a number lies in an interval, such as `[0, 1)`."""
    least, most = map(float, within[1:-1].split(","))
    if number == least:
        return within[0] == "["
    if number == most:
        return within[-1] == "]"
    return least < number < most


def value_of(kind: type, text: str, within: str | None = None, is_path: bool = False):
    """The value of an option's type that a word of the command line stands for, checked by `what_is_wrong`."""
    value = text
    # A word is a value of the first kind that the option's type has; to a type that is int alone, 5.0 is none.
    for read in (_truth, float, int):
        try:
            read_as = read(text.lower())
        except ValueError:
            continue
        if _is_value(read_as, members_of(kind)):
            value = read_as
            break
    if wrong := what_is_wrong(value, kind, within, is_path):
        raise argparse.ArgumentTypeError(wrong)
    return value


def _truth(text):
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


# ---------------------------------------------------------------------------------------------------------------------
# The flags


def add_options(
    parser: argparse.ArgumentParser, config: Options, shows_all: bool, but: Container[str] = ("recipe", "model")
) -> None:
    """
    Add a flag for each option, in the option's group; its help shows the value.

    Args:
        config: an object of a dataclass of options.
        shows_all: whether the help shows all options, not only the common ones.
        but: the names of options that get no flag here: `__main__` adds `--recipe`, and MODEL has no dashes.
    """
    kinds = typing.get_type_hints(type(config))
    groups = {}
    for field in dataclasses.fields(config):
        if field.name in but:
            continue
        about = field.metadata
        title = about["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add_option(
            groups[title],
            field.name,
            kinds[field.name],
            getattr(config, field.name),
            about["help"] if about["common"] or shows_all else None,
            about["metavar"],
            about["within"],
        )


# What stands for a value in `--help`, by the value's type; for a choice of words the words do.
METAVARS = {bool: "true|false", int: "N", float: "X", str: "NAME"}


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
    is_list = list[str] in members
    read = functools.partial(value_of, str if is_list else kind, within=within, is_path=metavar == "PATH")
    if metavar is None:
        metavar = "|".join(METAVARS.get(member) or "|".join(typing.get_args(member)) for member in members)
    how = {}
    if bool in members:
        how = {"nargs": "?", "const": True}
    elif is_list:
        how = {"nargs": "+", "action": "extend"}
    line = argparse.SUPPRESS if help is None else help_line(help, default)
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=line, metavar=metavar, type=read, **how)


def may_stand_bare(flag: argparse.Action) -> bool:
    """Whether a flag is one of true or false, and so may stand without a value."""
    return flag.const is True


def with_true_at_bare_flags(words: list[str], flags: dict[str, argparse.Action]) -> list[str]:
    """
    The words of a command line, with `=true` at each flag of true or false that no value follows.

    argparse would take the next word for the value: in `publish --dry_run my-bert me/x` the folder.

    Args:
        flags: of the command, by their names.
    """
    end = words.index("--") if "--" in words else len(words)  # what follows is no flag
    completed = list(words)
    for place, word in enumerate(words[:end]):
        if word not in flags or not may_stand_bare(flags[word]):
            continue
        try:
            flags[word].type("".join(words[place + 1 : place + 2]))
        except argparse.ArgumentTypeError:
            completed[place] = f"{word}=true"
    return completed


def help_line(help: str, default: object) -> str:
    """The line of an option in `--help`, with its default; argparse formats it by `%`."""
    return with_default(help, default).replace("%", "%%")


def with_default(help: str, default: object) -> str:
    """The sentence of an option with its default behind it, if it has one."""
    if isinstance(default, list):
        shown = " ".join(default)
    else:
        shown = "" if default is None else as_word(default)
    return f"{help} ({shown})".strip() if shown else help
