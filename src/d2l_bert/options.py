"""Fields of the dataclasses whose fields are command-line options, and their checks."""

import dataclasses
import math
import os
import types
import typing
from typing import Literal

import numpy as np

from d2l_bert.errors import UserError


TEXT, TOKENIZER, BATCHES, LENGTH, OPTIMIZER, MACHINE, OUTPUT, HUB = (
    "text",
    "tokenizer",
    "pairs and masks",
    "length of the run (one of them)",
    "optimizer",
    "machine",
    "output",
    "the Hugging Face Hub",
)


# Whole numbers are stored in 64 bits.
LARGEST_WHOLE = 2**63 - 1


def option(default, help, group, *, identity=True, metavar=None, largest=None):
    """
    A field of a dataclass whose fields are command-line options.

    Args:
        help: one line for `--help`.
        group: heading in `--help`.
        identity: the option says what is trained, and so must be the same on resuming; not how a run is computed,
            watched or kept, or where its text lies.
        largest: the largest number that is taken.
    """
    metadata = {"help": help, "group": group, "identity": identity, "metavar": metavar, "largest": largest}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """What dataclasses of options have in common: checks of single fields, each an error of one line.

    Raises:
        UserError: from each check, for a value of another type or out of its range.
    """

    def check_types(self) -> None:
        """Refuse a value of another type than its field says."""
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
        # What is trained is computed in float32, where a very small number is 0 and a very large one infinite.
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
        """Refuse more processes than four a core, or 16 where that is more: they would take turns, and memory each."""
        self._check_range(name, least)
        value, most = getattr(self, name), max(16, 4 * cores())
        if value is not None and value > most:
            raise UserError(
                f"{name}: this machine has {cores()} cores, so give at most {most} processes, got {value:,}"
            )


def check_texts(config) -> None:
    """
    Refuse an option whose text is empty, as an unset shell variable leaves it, or holds a NUL character.

    Args:
        config: a dataclass of options.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.strip():
                raise UserError(f"{field.name} is empty (got {text!r}); give a value, or leave it out")
            if isinstance(text, str) and "\0" in text:
                raise UserError(f"{field.name} {text!r}: holds a NUL character, which no name has; take it out")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_float32(value):
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def _in_words(kind):
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "a list of texts"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]


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
