"""How a dataclass declares its fields as command-line options, and checks of their values."""

import dataclasses
import math
import os
import types
import typing
from typing import Literal

import numpy as np

from d2l_bert.errors import UserError


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

# The largest value of an option that is a whole number: NumPy and PyTorch store it in 64 bits.
LARGEST_WHOLE = 2**63 - 1


def option(default, help, group, *, identity=True, metavar=None, largest=None):
    """
    A dataclass field that is also a command-line option.

    Args:
        default: the default value; a list is copied for each instance.
        help: one line for `--help`.
        group: one of the groups above: the heading in `--help`.
        identity: True if the option changes what is trained: a resumed run must then give the same value. False for
            options that say how a run is computed, logged or saved, or where its text lies.
        metavar: the name of the value in `--help`.
        largest: the largest number that is allowed.
    """
    metadata = {"help": help, "group": group, "identity": identity, "metavar": metavar, "largest": largest}
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
    """
    Base class of dataclasses whose fields are options, with checks of single fields.

    Raises:
        UserError: from each check, for a value of the wrong type or out of range.
    """

    def check_types(self) -> None:
        """Refuse a value whose type is not the type of its field."""
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
            if not any(_is_a(value, kind) for kind in kinds):
                wanted = " or ".join(_in_words(kind) for kind in kinds if kind is not types.NoneType)
                raise UserError(f"{name} must be {wanted}, got {value!r}")

    def _check_range(self, name, least, most=None, above=False, below=None):
        value = getattr(self, name)
        if value is None:
            return
        # Training computes in float32, where a very small number becomes 0 and a very large number infinity.
        rounded = _in_float32(value) if isinstance(value, float) else value

        def fits(number):
            within = number > least if above else number >= least
            return within and (most is None or number <= most) and (below is None or number < below)

        if not math.isfinite(rounded):
            raise UserError(f"{name} must be finite in float32 (at most 3.4e38), got {value}")
        if not (fits(value) and fits(rounded)):
            limits = [f"{'above' if above else 'at least'} {least}"]
            limits += [f"at most {most}"] * (most is not None) + [f"below {below}"] * (below is not None)
            shown = f"{value}, which is {rounded:g} in float32" if fits(value) else value
            raise UserError(f"{name} must be {' and '.join(limits)}, got {shown}")
        largest = self.__dataclass_fields__[name].metadata["largest"]
        if largest is None:
            largest = LARGEST_WHOLE if isinstance(value, int) else math.inf
        if value > largest:
            raise UserError(f"{name} must be at most {largest}, got {value}")

    def _check_processes(self, name, least):
        """Refuse more than max(16, 4 per core) processes: more would only take memory, and wait for a core."""
        self._check_range(name, least)
        value, most = getattr(self, name), max(16, 4 * cores())
        if value is not None and value > most:
            raise UserError(
                f"{name}: this machine has {cores()} cores, so give at most {most} processes, got {value:,}"
            )


def check_strings(config) -> None:
    """
    Refuse a string option, or an entry of a list option, that is empty or holds a NUL character.

    An unset shell variable gives an empty string. No path and no name on the Hub can hold a NUL character.

    Args:
        config: a dataclass of options.

    Raises:
        UserError: names the option.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for string in value if isinstance(value, list) else [value]:
            if isinstance(string, str) and not string.strip():
                raise UserError(f"{field.name} is empty (got {string!r}); give a value, or leave it out")
            if isinstance(string, str) and "\0" in string:
                raise UserError(f"{field.name} {string!r}: holds a NUL character, which no name may have; take it out")


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_float32(value):
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


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
