"""The command `d2l-bert`: parses arguments, runs a command, turns errors and signals into messages and exit codes."""

import contextlib
import errno
import os
import re
import signal
import socket
import sys
import threading
import traceback
from importlib.metadata import version

from d2l_bert.errors import ENVIRONMENT_ERRNOS, UserError, is_out_of_memory, launched_rank
from d2l_bert.flags import make_parser, with_underscores
from d2l_bert.progress import messages_shown


# A process that has not handled a signal after this many seconds is ended.
SECONDS_TO_HANDLE_SIGNAL = 5


def main(argv: list[str] | None = None) -> int:
    """
    Run one command of `d2l-bert`.

    Args:
        argv: the arguments of the command; None for the arguments of this process.

    Returns:
        The exit code: 0; 2 for an error that the user can mend, with one line on stderr; 1 for a bug, with a
        traceback; 130 after Ctrl-C. argparse and SIGTERM end the process by `SystemExit` instead (2 and 143).
    """
    argv = with_underscores(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot show becomes "?", not an error
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    if without_value := next((flag for flag in argv if re.fullmatch(r"--[^=]+=--", flag)), None):
        print(f"d2l-bert: error: {without_value} has no value; write a value after the =", file=sys.stderr)
        return 2
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0].partition("=")[0])
    try:
        with messages_shown(), _signals_handled():
            arguments.command(arguments)
    except KeyboardInterrupt:
        print(f"d2l-bert {arguments.name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _exit_if_distributed(_show_error(arguments.name, error))
    except SystemExit as leaving:
        if leaving.code == 2:  # another rank has shown the error
            _exit_if_distributed(2)
        raise
    return 0


def _exit_if_distributed(code):
    """End this process at once if it is one of several ranks; else return the exit code.

    gloo's threads may still wait for other ranks, and an ordinary exit of the interpreter would abort them.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _show_error(command, error):
    """Print why a command failed; return the exit code, 2 for an error that the user can mend and 1 for a bug."""
    line = " ".join(str(error).split())
    if is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, UserError) and getattr(error, "errno", None) not in ENVIRONMENT_ERRNOS:
        traceback.print_exception(error)
        print(
            f"d2l-bert {command}: this is a bug of d2l-bert {version('d2l-bert')}, not an error in your input: please "
            f"report it with the lines above (CONTRIBUTING.md says where, under Bugs)",
            file=sys.stderr,
        )
        return 1
    elif getattr(error, "errno", None) == errno.ENAMETOOLONG:
        line = f"{str(error.filename):.60}...: {error.strerror}; give a shorter name"
    process = f"process {launched_rank()}: " if launched_rank() else ""
    print(f"d2l-bert {command}: error: {process}{line}", file=sys.stderr)
    return 2


def _raise_system_exit(number, frame):
    """The handler of SIGTERM."""
    os.write(2, b"d2l-bert: terminated\n")  # not by `print`: a handler may run in the middle of another one
    sys.exit(128 + number)


@contextlib.contextmanager
def _signals_handled():
    """
    Within the block, SIGTERM raises `SystemExit` with code 143, and Ctrl-C raises `KeyboardInterrupt`, so that the
    command cleans up as after an error. If the signal is not handled within `SECONDS_TO_HANDLE_SIGNAL`, the process is
    ended. An ignored signal stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_handlers = {}
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        previous_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, _raise_system_exit)
    previous_wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_unless_handled, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup_fd)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        writer.shutdown(socket.SHUT_RDWR)  # ends the thread; close() would not, as a forked process may hold a copy
        writer.close()


def _end_unless_handled(signals):
    """
    Wait for signals in a thread; end the process if it still runs `SECONDS_TO_HANDLE_SIGNAL` after a signal.

    Python calls a signal's handler only when the main thread returns from library code to the interpreter. Such code
    may wait forever, for example for a rank that has ended.

    Args:
        signals: socket that receives the number of each signal as one byte, and is shut down when the command ends.
    """
    with signals:
        while number := signals.recv(1):
            # Training installs handlers of its own, which wait for the end of a step.
            if signal.getsignal(number[0]) not in (_raise_system_exit, signal.default_int_handler):
                continue
            signals.settimeout(SECONDS_TO_HANDLE_SIGNAL)
            try:
                while signals.recv(1):
                    pass
            except TimeoutError:
                os.write(2, b"d2l-bert: terminated\n")
                os._exit(128 + number[0])
            return
