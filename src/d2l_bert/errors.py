"""What a person can mend: the one class of errors that the command line shows as a line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """
    Something that whoever started the command can mend: an option, a file, a full disk.

    Its message is one line that says what is wrong, where, and how to mend it. Every other exception is a bug of this
    package, and is shown with its traceback.
    """


@contextlib.contextmanager
def refusals_are_the_users() -> Iterator[None]:
    """
    Raise a `ValueError` of the block as `UserError`.

    For blocks that hand a person's values to `modeling`, which refuses them with a plain `ValueError`: its files are
    published, and import nothing else of this package.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def reading_model(name: str, what: str = "") -> Iterator[None]:
    """
    Name a model that cannot be read: the libraries have another class of exception for every way to miss.

    Args:
        name: the model, a folder or an id on the Hub.
        what: the option that gives it, with a space behind.

    Raises:
        UserError: whatever the block raised, in one line.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        unknown = ("is not a local folder", "couldn't connect", "Repo id must", "Cannot find the requested files")
        if not Path(name).exists() and any(words in reason for words in unknown):
            reason = (
                "no folder here has this name, and the Hub gave no model of it; for a private one log in with "
                "`hf auth login`, or set HF_TOKEN"
            )
        if "custom code which must be executed" in reason:  # Transformers asks for an option that we do not have
            reason = (
                "its config.json asks for code of its own, which is never run; give a d2l-bert model, or a stock BERT "
                "for convert --from bert"
            )
        raise UserError(f"{what}{name}: cannot be loaded: {reason:.300}") from None


def launched_rank() -> int:
    """
    The number of this process among those that were launched together; 0 for one alone.

    Raises:
        UserError: RANK or WORLD_SIZE is no number.
    """
    for variable in ("WORLD_SIZE", "RANK"):
        if not (value := os.environ.get(variable, "0")).isdecimal():
            raise UserError(f"{variable} in the environment must be a whole number, got {value!r}; unset it")
    # A RANK without a WORLD_SIZE is left over from something else.
    return int(os.environ.get("RANK", 0)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the machine. PyTorch has several exceptions for that."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("not enough memory", "can't allocate memory", "out of memory")
    )
