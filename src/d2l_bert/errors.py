"""`UserError`, the error that a user can fix and the command shows as one line; why a model cannot be read."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path


# The way out that ends most messages about a run that failed.
GO_ON = "go on with --resume_from_checkpoint latest"


class UserError(ValueError):
    """
    An error that the user can fix: a wrong option, a damaged file, a full disk.

    The message is one line that says what is wrong, where, and how to fix it. The command shows this line and leaves
    with exit code 2. Nearly every other exception counts as a bug of this package and is shown with its traceback.
    """


def refuse_first(cases: dict[str, object], prefix: str = "") -> None:
    """
    Raise `UserError` with the first message whose case holds.

    Args:
        cases: by the message, whether its case holds.
        prefix: put before the message.
    """
    for message, holds in cases.items():
        if holds:
            raise UserError(f"{prefix}{message}")


# An OSError with one of these errnos has its cause outside of this package: space, permissions, memory or the network.
ENVIRONMENT_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ESTALE", "ENOMEM", "EMFILE", "ENFILE"),
        *("ENAMETOOLONG", "ELOOP"),
        *("EPIPE", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "ETIMEDOUT"),
    )
    if hasattr(errno, name)  # Windows lacks some
}

NO_SPACE_ERRNOS = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


@contextlib.contextmanager
def writing(place: object, way_out: str = "") -> Iterator[None]:
    """
    Turn an `OSError` that the block raises while it writes a file or a folder into a `UserError`.

    Rust libraries (tokenizers, safetensors) raise exceptions of their own, with "(os error 28)" in the message.
    `torch.save` names only its source file inline_container.cc when a write fails: nearly always as the disk is full.

    Args:
        place: what is written, for the message.
        way_out: an alternative to append to the way out, such as ", or name another folder".
    """
    try:
        yield
    except Exception as error:
        in_message = re.search(r"\(os error (\d+)\)|inline_container\.cc", str(error))
        if isinstance(error, UserError) or not (isinstance(error, OSError) or in_message):
            raise
        number = int(in_message[1]) if in_message and in_message[1] else getattr(error, "errno", errno.ENOSPC)
        first = "free some space" if number in NO_SPACE_ERRNOS else "make it writable"
        reason = os.strerror(number) if number else error
        raise UserError(f"{place}: cannot be written ({reason}); {first}{way_out}") from None


# What libraries raise for a damaged file; PyArrow's own exceptions are subclasses of these.
READ_ERRORS = (OSError, ValueError, LookupError)


@contextlib.contextmanager
def explained(what: object, way_out: str, *kinds: type[BaseException]) -> Iterator[None]:
    """
    Turn exceptions that the block raises into a `UserError` of one line, which quotes them.

    Args:
        what: what went wrong, and where.
        way_out: what the user can do; "" if the exception says so itself.
        kinds: the classes of exceptions; others pass unchanged, as bugs of this package.
    """
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what} ({reason:.500}); {way_out}" if way_out else f"{what}: {reason}") from None


@contextlib.contextmanager
def value_errors_for_user(prefix: str = "") -> Iterator[None]:
    """
    Turn a `ValueError` that the block raises into a `UserError`.

    `modeling` refuses values that come from the user by a plain `ValueError`: its files are copied into model folders,
    so they cannot import `UserError`.

    Args:
        prefix: put before the message.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from error


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
        why = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UserError):
            pass
        elif "trust_remote_code" in why:  # from Transformers, which advises the user to run it
            why = "it asks for code of its own, which is never run; give a d2l-bert model or a stock BERT"
        elif not Path(name).exists():
            why = (
                f"no folder here has this name, and the Hub gave nothing of this name ({why:.200}); check the name, "
                f"connect to the network, or log in with `hf auth login` for a private one"
            )
        else:
            why = f"{why:.300}; give a folder of pretrain or save_pretrained, or save it there again"
        raise UserError(f"{prefix}{name}: cannot be loaded: {why}") from None


def launched_rank() -> int:
    """The rank of this process, from the environment variables of torchrun or accelerate; 0 for a single process."""
    # A RANK without a WORLD_SIZE is not from a launcher of this process.
    return int(os.environ.get("RANK", 0)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the CPU. PyTorch raises several kinds."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(
        words in message for words in ("not enough memory", "can't allocate memory", "out of memory")
    )
