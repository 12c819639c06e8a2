"""What people read while a command runs: the errors that they can fix, the package's messages, progress bars."""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


logger = logging.getLogger(__name__)

# The logger for the report at the end of a run. A command shows the report on stdout, all other messages on stderr.
report = logging.getLogger("d2l_bert.report")

# The way out that ends most messages about a run that failed.
GO_ON = "go on with --resume_from_checkpoint latest"


class UserError(ValueError):
    """
    An error that the user can fix: a wrong option, a damaged file, a full disk.

    The message is one line that says what is wrong, where, and how to fix it. The command shows this line and leaves
    with exit code 2. Nearly every other exception counts as a bug of this package and is shown with its traceback.

    Messages are written for the command line: they name options by their flags. `str` of the error, which programs
    show, names them as arguments (`as_arguments`).

    Args:
        message: the line.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return as_arguments(self.message)


class ErrorElsewhere(UserError):
    """A `UserError` of another process of the run. The command shows it there."""


# A flag in a message; or a command, which stays as it is up to the end of the message.
FLAG_OR_COMMAND = re.compile(r"d2l-bert .*|(?<![^ (])--(?=[a-z_]+(?![\w=-]))", re.DOTALL)


def as_arguments(message: str) -> str:
    """A message as programs show it: "give --max_steps" becomes "give max_steps"."""
    return FLAG_OR_COMMAND.sub(lambda found: found[0].removeprefix("--"), message)


# The causes of an OSError that lie outside of this package: space, a file in use, permissions, memory or the network.
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
IN_USE = {errno.EBUSY, errno.ETXTBSY, errno.EAGAIN}
IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
ENVIRONMENT_ERRORS = {
    *NO_SPACE,
    *IN_USE,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ENOLCK),
    *(errno.ENODEV, errno.ENXIO, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EPIPE, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT),
}

# The number of an error in the message of a Rust library (tokenizers, safetensors).
OS_ERROR = r"\(os error (\d+)\)"

# What libraries say of a failed write whose cause they do not name: PyTorch its source file, NumPy two numbers. Nearly
# always the disk is full.
NO_CAUSE = r"inline_container\.cc|\d+ requested and \d+ written"


@contextlib.contextmanager
def writing(place: object, way_out: str = "") -> Iterator[None]:
    """
    Turn an `OSError` that the block raises while it writes a file or a folder into a `UserError`.

    Libraries raise exceptions of their own for a failed write (`OS_ERROR`, `NO_CAUSE`), which are turned, too.

    Args:
        place: what is written, for the message. If it is a path, and the error names a file elsewhere, such as one of
            a cache, the message names that file.
        way_out: an alternative to append to the way out, such as ", or name another folder".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not _is_of_the_system(error):
            raise
        number = _error_number(error)
        said = os.strerror(number) if number else error
        if number in IN_THE_WAY:
            what = f"{place}: cannot be written ({said}: {_named(error) or place})"
            raise UserError(f"{what}; take out what is in the way{way_out}") from None
        if elsewhere := _elsewhere(error, place):
            raise UserError(f"{elsewhere}: cannot be used ({said}); {_advice(number)}") from None
        raise UserError(f"{place}: cannot be written ({said}); {_advice(number)}{way_out}") from None


def _is_of_the_system(error):
    """Whether an exception is an `OSError`, or a library's own one of a failed write."""
    return isinstance(error, OSError) or re.search(rf"{OS_ERROR}|{NO_CAUSE}", str(error)) is not None


def _error_number(error):
    """The operating system's number of an error; None if it has none."""
    if in_message := re.search(OS_ERROR, str(error)):
        return int(in_message[1])
    number = getattr(error, "errno", None)
    if number is None and re.search(NO_CAUSE, str(error)):
        return errno.ENOSPC
    return number


def _named(error):
    """The file that an `OSError` names; of a copy that fails the one that is written, which Python names second."""
    return getattr(error, "filename2", None) or getattr(error, "filename", None)


def _advice(number):
    """The way out of an `OSError` of this number."""
    if number in NO_SPACE:
        return "free some space"
    if number in IN_USE:
        return "end the program that uses it, or try again"
    return "make it writable"


def _elsewhere(error, place):
    """The file that an `OSError` names, if it is not `place`, in it, or in the hidden folder beside it."""
    named = _named(error)
    if not isinstance(named, (str, bytes)) or not isinstance(place, Path):
        return None
    named = Path(os.fsdecode(named)).absolute()
    place = place.absolute()
    if place.is_relative_to(named):  # a parent, in which it cannot be made
        return None
    if named.is_relative_to(place.parent):
        beside = named.relative_to(place.parent).parts[0]
        # `folders.hidden` makes the names of hidden folders.
        if beside.startswith((place.name, f".{place.name[:40]}")):
            return None
    return named


def standard_input() -> BinaryIO:
    """The bytes of the standard input. Raises `UserError` if it is closed."""
    if sys.stdin is None:
        raise UserError("standard input: is closed; give a file, or a pipe")
    return sys.stdin.buffer


# What libraries raise for a damaged file; PyArrow's own exceptions are subclasses of these.
READ_ERRORS = (OSError, ValueError, LookupError)


def one_line(error: BaseException) -> str:
    """The message of an exception in one line; of a `UserError` with flags, so that it can be part of another."""
    said = error.message if isinstance(error, UserError) else str(error)
    return " ".join(said.split())


@contextlib.contextmanager
def explained(what: object, way_out: str, *kinds: type[BaseException]) -> Iterator[None]:
    """
    Turn exceptions that the block raises into a `UserError` of one line, which quotes them.

    Args:
        what: what went wrong, and where.
        way_out: what the user can do; "" if the exception says so itself, as the `ValueError`s of `modeling` do: its
            files are copied into model folders, so they cannot import `UserError`.
        kinds: the classes of exceptions; others pass unchanged, as bugs of this package.
    """
    try:
        yield
    except kinds as error:
        reason = one_line(error)
        if way_out:
            raise UserError(f"{what} ({reason:.500}); {way_out}") from None
        raise UserError(f"{what}: {reason}") from None


@contextlib.contextmanager
def reading_model(name: str, prefix: str = "") -> Iterator[None]:
    """
    Turn any exception that the block raises into a `UserError` that names the model.

    Transformers, safetensors and the Hub's client raise many classes of exceptions for a model that cannot be read.

    Args:
        name: the model, a folder or an id on the Hub.
        prefix: put before the name: the option that gives the model, and a space.
    """
    try:
        yield
    except Exception as error:
        said = one_line(error) or type(error).__name__
        why = said if isinstance(error, UserError) else _why_unreadable(name, said)
        raise UserError(f"{prefix}{name}: cannot be loaded: {why}") from None


def _why_unreadable(name, said):
    """Why a model of this name cannot be read, and the way out, from what a library said of it."""
    folder = Path(name)
    has_config = (folder / "config.json").is_file()
    if "trust_remote_code" in said:  # Transformers advises the user to run such code
        return "it asks for code of its own, which is never run; give a d2l-bert model or a stock BERT"
    if "weights_only" in said:  # PyTorch advises the same
        return "its weights are a damaged pickle, or one with code, which is never run; give model.safetensors"
    if (folder / "run_config.json").is_file() and not has_config:
        return f"its run is not finished; {GO_ON}, or give one of its checkpoints, such as {name}/checkpoint-100"
    if "model_type" in said:  # as Transformers says of a folder without a model's config.json
        if (folder / "prepared.json").is_file():
            return f"it is a folder of prepare; train a model on it: d2l-bert pretrain --corpus {name}"
        if folder.is_dir() and not has_config:
            return "it holds no config.json, so it is no model; give a folder of pretrain or save_pretrained"
    if not folder.exists():
        return (
            f"no folder here has this name, and the Hub gave nothing of this name ({said:.200}); check the name, "
            f"connect to the network, or log in with `hf auth login` for a private one"
        )
    return f"{said:.300}; give a folder of pretrain or save_pretrained, or save it there again"


def launched_rank() -> int:
    """The rank of this process, from the environment variables of torchrun or accelerate; 0 for a single process."""
    # A RANK without a WORLD_SIZE is not from a launcher of this process.
    if int(os.environ.get("WORLD_SIZE", 1)) <= 1:
        return 0
    return int(os.environ.get("RANK", 0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the CPU. PyTorch raises several kinds."""
    if isinstance(error, RuntimeError):
        return re.search("not enough memory|can't allocate memory|out of memory", str(error)) is not None
    return isinstance(error, MemoryError)


# ---------------------------------------------------------------------------------------------------------------------
# Progress and logging


def counted(count: int, one: str, more: str | None = None) -> str:
    """
    A number with its unit: "1 document", "1,000 documents".

    Args:
        one, more: the unit's singular and plural; without `more`, the plural is the singular with an "s".
    """
    if count == 1:
        return f"1 {one}"
    return f"{count:,} {more or f'{one}s'}"


def printable(text: str) -> str:
    r"""
    Text for a terminal: control characters, of which a vocabulary or a stranger's file may be full, as `\x1b`.

    A terminal obeys them: they move the cursor, change the window's title, or turn the text around. Line ends and tabs
    stay.
    """
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda sign: ascii(sign[0])[1:-1], text)


class Printable(logging.Formatter):
    """Writes log messages by `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        """The message of a record."""
        return printable(super().format(record))


class PrintableInPython(Printable):
    """The same for a notebook, with options as arguments."""

    def format(self, record: logging.LogRecord) -> str:
        """The message of a record."""
        return as_arguments(super().format(record))


def show(*lines: str) -> None:
    """Print what a command answers, by `printable`."""
    for line in lines:
        print(printable(line))


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and three dots if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def result_in_words(result: object, figures: Mapping[str, float]) -> str:
    """How Python shows a dataclass of results: the fields that are to be shown, and figures with four digits."""
    shown = [f"{field.name}={getattr(result, field.name)!r}" for field in dataclasses.fields(result) if field.repr]
    for name, value in figures.items():
        shown.append(f"{name}={value if isinstance(value, int) else f'{value:.4g}'}")
    return f"{type(result).__name__}({', '.join(shown)})"


def short_name(name: str) -> str:
    """The name of a text or of a file, short enough for a line of what was read."""
    return shortened(name, 40)


SECONDS_BETWEEN_LINES = 60


def with_progress(
    items: Iterable,
    label: str,
    total: int | None = None,
    documents_in: Callable[[object], int] | None = None,
    unit: str = "document",
    says_end: bool = True,
) -> Iterator:
    """
    Yield the items, with a progress bar where one is seen (`shows_bars`), else with a line every minute.

    Args:
        label: what is done with the items, such as "reading books".
        total: number of documents, if it is known.
        documents_in: returns the number of documents in an item; without it an item is a document.
        unit: what a document is called, such as "line".
        says_end: log the number of documents and the time at the end.
    """
    start = time.monotonic()
    said = start
    count = 0
    with tqdm(total=total, desc=label, unit=f" {unit}s", leave=False, disable=not shows_bars()) as bar:
        for item in items:
            yield item
            done = documents_in(item) if documents_in else 1
            count += done
            bar.update(done)
            if bar.disable and time.monotonic() > said + SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                logger.info(f"{label}: {counted(count, unit)} so far")
    if says_end:
        logger.info(f"{label}: {counted(count, unit)} in {time.monotonic() - start:.0f} s")


def is_interactive() -> bool:
    """Whether Python reads its code from a person: in a notebook, or at Python's or IPython's prompt."""
    return hasattr(sys, "ps1")


def shows_bars() -> bool:
    """
    Whether a person sees progress bars: in a terminal, and in a notebook, where stderr is none; unless tqdm's own
    variable TQDM_DISABLE turns bars off.
    """
    if os.environ.get("TQDM_DISABLE"):
        return False
    return sys.stderr.isatty() or is_interactive()


@contextlib.contextmanager
def messages_shown_to_person() -> Iterator[None]:
    """
    As `messages_shown`, for a call at a prompt or in a notebook, unless `logging` is set up to take the messages, or a
    level is set for the logger `d2l_bert`. In a program the block does nothing.
    """
    ours = logging.getLogger("d2l_bert")
    is_set_up = ours.level != logging.NOTSET or ours.isEnabledFor(logging.INFO)
    with contextlib.ExitStack() as stack:
        if is_interactive() and not is_set_up:
            stack.enter_context(messages_shown(PrintableInPython()))
        yield


@contextlib.contextmanager
def messages_shown(formatter: logging.Formatter | None = None) -> Iterator[None]:
    """
    Within the block, write the package's log messages to stderr, without a prefix, and a run's report to stdout.

    Only commands use this, and calls in a notebook. A program that calls the package configures `logging` itself.

    Args:
        formatter: how messages are written; by default as for a command.

    Raises:
        OSError: at the end of the block, if the report could not be written.
    """
    messages = logging.getLogger("d2l_bert")  # the parent of all loggers of this package
    # tqdm's handlers give a message its own line above a progress bar. They write to stderr unless told otherwise.
    with contextlib.ExitStack() as undo, logging_redirect_tqdm([messages, report]):
        for logger in (messages, report):
            undo.callback(setattr, logger, "propagate", logger.propagate)
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR if launched_rank() else logging.INFO)  # rank 0 speaks for all
            logger.propagate = False
            for handler in logger.handlers:
                undo.callback(handler.setFormatter, handler.formatter)
                handler.setFormatter(formatter or Printable())
        to_stdout = report.handlers[-1]
        to_stdout.setStream(sys.stdout)
        failures = []
        to_stdout.handleError = functools.partial(_failed, to_stdout.handleError, failures)
        yield
    if failures:
        raise failures[0]


def _failed(show_traceback, failures, record):
    """
    Handle an error of writing the report to stdout: its reader has left (`| head`), or its disk is full.

    The error is kept until the command ends: what is left of a run, such as publishing it, is done before.
    """
    error = sys.exception()
    if isinstance(error, OSError):
        failures.append(error)
    else:
        show_traceback(record)
