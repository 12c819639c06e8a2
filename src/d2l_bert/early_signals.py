"""Ctrl-C and SIGTERM while the command imports its libraries, which takes seconds: a line and an exit code."""

import os
import re
import signal
import sys


def is_the_command() -> bool:
    """Whether this process was started as `d2l-bert` or `python -m d2l_bert`, and not a program that imports it."""
    # The original arguments end with those of the program; the script or the module stands before them. A process
    # that multiprocessing has spawned has the same sys.argv, and other original arguments.
    started = (sys.orig_argv or [""])[-len(sys.argv) :][0]
    return started in ("d2l_bert", "-md2l_bert") or bool(re.search(r"(^|[/\\])d2l-bert(\.exe)?$", started))


def answer_signals() -> None:
    """Have Ctrl-C and SIGTERM end this process with 130 and 143. A signal that the caller ignores stays ignored."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number, default in defaults.items():
        if signal.getsignal(number) is default:
            signal.signal(number, leave)


def leave(number, frame) -> None:
    """End the process. An exception would be lost in an import that passes over every error."""
    said = b"interrupted" if number == signal.SIGINT else b"terminated"
    os.write(2, b"d2l-bert: " + said + b"\n")
    os._exit(128 + number)


if is_the_command():
    answer_signals()
