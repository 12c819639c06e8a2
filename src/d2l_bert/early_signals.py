"""Handlers for Ctrl-C and SIGTERM while the command imports its libraries, which takes seconds."""

import os
import re
import signal
import sys


def is_the_command() -> bool:
    """Whether this process was started as `d2l-bert` or `python -m d2l_bert`; False in other programs."""
    # The last entries of sys.orig_argv are the script or the module, and its arguments as in sys.argv. A process that
    # multiprocessing has spawned has the same sys.argv, but another sys.orig_argv: the result is False there.
    script = (sys.orig_argv or [""])[-len(sys.argv) :][0]
    return script in ("d2l_bert", "-md2l_bert") or bool(re.search(r"(^|[/\\])d2l-bert(\.exe)?$", script))


def install_handlers() -> None:
    """Make Ctrl-C end this process with exit code 130, and SIGTERM with 143. An ignored signal stays ignored."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number, default in defaults.items():
        if signal.getsignal(number) is default:
            signal.signal(number, exit_at_once)


def exit_at_once(number, frame) -> None:
    """End the process from a signal handler, with one line on stderr.

    The handler raises no exception, because an import may run in a `try` block that catches every exception.
    """
    message = b"interrupted" if number == signal.SIGINT else b"terminated"
    os.write(2, b"d2l-bert: " + message + b"\n")
    os._exit(128 + number)


if is_the_command():
    install_handlers()
