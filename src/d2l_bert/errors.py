"""`UserError`, the error that a user can mend and the command shows as one line; why a model cannot be read."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


# The mend that ends most messages about a run that failed.
GO_ON = "go on with --resume_from_checkpoint latest"


class UserError(ValueError):
    """
    An error that the user can mend: a wrong option, a damaged file, a full disk.

    The message is one line that says what is wrong, where, and how to mend it. The command shows this line and leaves
    with exit code 2. Nearly every other exception counts as a bug of this package and is shown with its traceback.
    """


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


def why_unwritable(error: OSError, mend: str) -> str:
    """
    The part of a message that says why a file or a folder cannot be written, and how to mend that.

    Args:
        mend: an alternative to appending to the mend, such as ", or name another folder".
    """
    first = "free some space" if error.errno in NO_SPACE_ERRNOS else "make it writable"
    if error.errno == errno.ENAMETOOLONG:
        first = "give a shorter name"
    return f"cannot be written ({error.strerror or error}); {first}{mend}"


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
        raise UserError(f"{prefix}{name}: cannot be loaded: {why_unreadable(name, error)}") from None


@contextlib.contextmanager
def reading_tokenizer(name: str) -> Iterator[None]:
    """
    Turn any exception that the block raises into a `UserError` about the model's tokenizer.

    For use inside a block of `reading_model`, which puts the model's name before the message.
    """
    try:
        yield
    except Exception as error:
        raise UserError(why_unreadable(name, error, "tokenizer")) from None


def wrong_model_type(name: str, model_type: str) -> str:
    """The message about a model that is not a d2l-bert model: its type, and how to get a d2l-bert model."""
    first = f"first d2l-bert convert {name} DST --from bert"
    mend = first if model_type == "bert" else "give one of d2l-bert pretrain or convert"
    return f"it is a {model_type} model, not a d2l-bert one; {mend}"


def why_unreadable(name: str, error: Exception, kind: str = "model") -> str:
    """
    Why a model or a tokenizer cannot be read, and the way out. The message of a `UserError` is returned as it is.

    Args:
        name: a folder or an id on the Hub.
        error: the exception that reading it raised.
        kind: "model" or "tokenizer".
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return message
    if "trust_remote_code" in message:  # from Transformers, which advises the user to run it
        return "it asks for code of its own, which is never run; give a d2l-bert model or a stock BERT"
    if not Path(name).exists():
        return (
            f"no folder here has this name, and the Hub gave no {kind} of this name ({message:.200}); check the name, "
            f"connect to the network, or log in with `hf auth login` for a private one"
        )
    return f"{message:.300}; give a folder of pretrain or save_pretrained, or save the {kind} there again"


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
