"""The command `d2l-bert`: exit codes, what is said of errors, signals."""

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

from d2l_bert import early_signals
from d2l_bert.errors import ENVIRONMENT, UserError, is_out_of_memory, launched_rank
from d2l_bert.flags import make_parser, with_underscores
from d2l_bert.progress import messages_shown


# From a signal to the end of a process that does not come to answer it.
SECONDS_TO_ANSWER = 5


def main(argv: list[str] | None = None) -> int:
    """Run a command; what the user can mend is one line on stderr and exit code 2."""
    argv = with_underscores(sys.argv[1:] if argv is None else argv)
    try:
        launched_rank()
    except UserError as error:
        print(f"d2l-bert: error: {error}", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another, and no error
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    if bare := next((option for option in argv if re.fullmatch(r"--[^=]+=--", option)), None):
        print(f"d2l-bert: error: {bare} gives no value; write one behind the =", file=sys.stderr)
        return 2
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0].partition("=")[0])
    try:
        with messages_shown(), _terminated_cleanly():
            arguments.command(arguments)
    except KeyboardInterrupt:
        print(f"d2l-bert {arguments.name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _ended(_failed(arguments.name, error))
    except SystemExit as leaving:
        if leaving.code == 2:  # another process has said why
            _ended(2)
        raise
    return 0


def _ended(code):
    """Leave a failed run of several processes at once, else return the exit code."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        # gloo's threads may still be waiting for the others; the interpreter, on its way out, would abort them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _failed(command, error):
    """Show why a command failed; returns its exit code, 2 for what the user can mend and 1 for a bug."""
    line = " ".join(str(error).split())
    if is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, UserError) and getattr(error, "errno", None) not in ENVIRONMENT:
        traceback.print_exception(error)
        print(
            f"d2l-bert {command}: this is a bug of d2l-bert {version('d2l-bert')}, not of what you gave it: please "
            f"report it with the lines above, as its CONTRIBUTING.md says under Bugs",
            file=sys.stderr,
        )
        return 1
    elif getattr(error, "errno", None) == errno.ENAMETOOLONG:
        line = f"{str(error.filename):.60}...: {error.strerror}; give a shorter name"
    process = f"process {launched_rank()}: " if launched_rank() else ""
    print(f"d2l-bert {command}: error: {process}{line}", file=sys.stderr)
    return 2


def _terminate(number, frame):
    print("d2l-bert: terminated", file=sys.stderr)
    sys.exit(128 + number)


@contextlib.contextmanager
def _terminated_cleanly():
    """
    Have a command that gets a SIGTERM clean up as one that fails does, and leave with 143. An ignored signal stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python has no handlers elsewhere
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {}
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is early_signals.leave:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    told_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_if_unanswered, args=(ours,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.shutdown(socket.SHUT_RDWR)  # closing would not end it while a forked process has a copy
        theirs.close()


def _end_if_unanswered(told):
    """
    End the process some seconds after a signal, if it is still there.

    Python answers a signal when its main thread comes back from whatever library it is in, and that may be waiting
    for a process that never comes. `told` gets the number of each signal, and ends with the command.
    """
    with told:
        while number := told.recv(1):
            # In training signals have handlers of their own, which wait for the end of a step.
            if signal.getsignal(number[0]) not in (_terminate, signal.default_int_handler):
                continue
            told.settimeout(SECONDS_TO_ANSWER)
            try:
                while told.recv(1):
                    pass
            except TimeoutError:
                os.write(2, b"d2l-bert: terminated\n")
                os._exit(128 + number[0])
            return
