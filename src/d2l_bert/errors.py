"""`UserError`, the error that a user can mend and the command shows as one line; why a model cannot be read."""

import contextlib
import errno
import os
import re
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
    Why a model or a tokenizer cannot be read, and the mend.

    The libraries' own messages often name a consequence, so this function looks into the folder for the cause. The
    message of a `UserError` is returned as it is.

    Args:
        name: a folder or an id on the Hub.
        error: the exception that reading it raised.
        kind: "model" or "tokenizer".
    """
    message, folder = " ".join(str(error).split()) or type(error).__name__, Path(name)
    if isinstance(error, UserError) or "which is never run" in message:  # from `existing.stock_tokenizer`
        return message
    if "custom code which must be executed" in message:  # from Transformers, which advises `trust_remote_code=True`
        return (
            "its config.json asks for code of its own, which is never run; give a d2l-bert model, or a stock BERT for "
            "convert --from bert"
        )
    not_found = ("is not a local folder", "couldn't connect", "Repo id must", "Cannot find the requested files")
    if not folder.exists() and any(words in message for words in not_found):
        return not_on_the_hub(message, kind)
    if folder.is_file() and "is not a valid JSON file" in message:
        return f"it is a file; give the folder that holds the {kind}"
    again = "save it there again with save_pretrained, or copy the file anew"
    if "deserializing header" in message:
        return f"{_damaged_weights(folder) or 'model.safetensors'} is damaged or cut short ({message}); {again}"
    if "Weights only load failed" in message:
        return f"pytorch_model.bin is damaged, or holds other objects than tensors, which are not read; {again}"
    if "no file named model.safetensors" in message:
        return "it has no model.safetensors; save the model there with save_pretrained, or copy the file there"
    if "is not a valid JSON file" in message:
        return f"its config.json is not JSON; {again}"
    if " must be " in message and (folder / "config.json").is_file():  # from D2lBertConfig
        return f"its config.json: {message}; put back the one that was saved with the weights"
    if kind == "model" and "Unrecognized model in" in message:
        if (folder / "prepared.json").is_file():  # written by `d2l-bert prepare`
            return f"it is a prepared text, not a model; d2l-bert pretrain --corpus {name} trains a model on it"
        return "it has no config.json with a model_type; give a folder that pretrain or save_pretrained has written"
    if kind == "tokenizer" and folder.is_dir():
        if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
            return (
                "it has no tokenizer: no tokenizer.json and no vocab.txt; give a folder with one, or save one there "
                "with save_pretrained"
            )
        return f"its tokenizer is damaged ({message:.150}); {again}"
    return message[:300]


def not_on_the_hub(message: str, kind: str) -> str:
    """
    The message for a name that neither a folder nor the Hub has, and the mend.

    Args:
        message: the library's own.
        kind: "model", "tokenizer" or "dataset".
    """
    nothing = f"no folder here has this name, and the Hub gave no {kind} of this name"
    if re.search("couldn't connect|couldn't reach|offline", message, re.IGNORECASE):
        return f"{nothing}: it cannot be reached; check the name, or connect to the network"
    return f"{nothing}; for a private one log in with `hf auth login`, or set HF_TOKEN"


def _damaged_weights(folder):
    """The first .safetensors file in a folder that cannot be opened; None without one, or for a model on the Hub."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file.name
    return None


def launched_rank() -> int:
    """
    The rank of this process, from the environment variables of torchrun or accelerate; 0 for a single process.

    Raises:
        UserError: WORLD_SIZE, RANK or LOCAL_RANK is not a number, or RANK is not below WORLD_SIZE.
    """
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not (value := os.environ.get(variable, "0")).isdecimal():
            raise UserError(f"{variable} in the environment must be a whole number, got {value!r}; unset it")
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if processes <= 1:  # a RANK without a WORLD_SIZE is not from a launcher of this process
        return 0
    if rank >= processes:
        raise UserError(f"the environment has RANK {rank} and WORLD_SIZE {processes}: ranks count from 0; unset both")
    return rank


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the CPU. PyTorch raises several kinds."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(
        words in message for words in ("not enough memory", "can't allocate memory", "out of memory")
    )
