"""What a person can mend: the one class of errors that the command line shows as a line."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


# What to do after most failures of a run.
GO_ON = "go on with --resume_from_checkpoint latest"


class UserError(ValueError):
    """
    Something that whoever started the command can mend: an option, a file, a full disk.

    Its message is one line that says what is wrong, where, and how to mend it. Every other exception is a bug of this
    package, and is shown with its traceback.
    """


# What the operating system refuses for reasons that lie outside of this package: space, rights, memory, the network.
ENVIRONMENT = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ESTALE", "ENOMEM", "EMFILE", "ENFILE"),
        *("ENAMETOOLONG", "ELOOP"),
        *("EPIPE", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "ETIMEDOUT"),
    )
    if hasattr(errno, name)  # Windows lacks some
}

NO_SPACE = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


def why_unwritable(error: OSError, mend: str) -> str:
    """
    Why a file or a folder cannot be written, and what to do about that: it takes space, or the right to write.

    Args:
        mend: what comes behind that, such as ", or name another folder".
    """
    first = "free some space" if error.errno in NO_SPACE else "make it writable"
    if error.errno == errno.ENAMETOOLONG:
        first = "give a shorter name"
    return f"cannot be written ({error.strerror or error}); {first}{mend}"


@contextlib.contextmanager
def refusals_are_the_users(what: str = "") -> Iterator[None]:
    """
    Raise a `ValueError` of the block as `UserError`, with `what` before its message.

    For blocks that hand a person's values to `modeling`, which refuses them with a plain `ValueError`: its files are
    published, and import nothing else of this package.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}{error}") from error


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
        raise UserError(f"{what}{name}: cannot be loaded: {why_unreadable(name, error)}") from None


@contextlib.contextmanager
def reading_tokenizer(name: str) -> Iterator[None]:
    """
    Say what is wrong with the tokenizer of a model, in a block of `reading_model`.

    Raises:
        UserError: whatever the block raised, in one line.
    """
    try:
        yield
    except Exception as error:
        raise UserError(why_unreadable(name, error, "tokenizer")) from None


def another_kind(name: str, kind: str) -> str:
    """What to say of a model that is not of this package: what it is, and how to get one that is."""
    first = f"first d2l-bert convert {name} DST --from bert"
    mend = first if kind == "bert" else "give one of d2l-bert pretrain or convert"
    return f"it is a {kind} model, not a d2l-bert one; {mend}"


def why_unreadable(name: str, error: Exception, what: str = "model") -> str:
    """
    Why a model or a tokenizer cannot be read, and the mend.

    The libraries raise what they come upon first, so that what is wrong is looked for in the folder itself. What this
    package raises says it already.

    Args:
        name: a folder or an id on the Hub.
        error: what reading it has raised.
        what: "model" or "tokenizer".
    """
    said, folder = " ".join(str(error).split()) or type(error).__name__, Path(name)
    if isinstance(error, UserError) or "which is never run" in said:  # from `conversion.stock_tokenizer`
        return said
    if "custom code which must be executed" in said:  # Transformers asks for an option that we do not have
        return (
            "its config.json asks for code of its own, which is never run; give a d2l-bert model, or a stock BERT for "
            "convert --from bert"
        )
    not_found = ("is not a local folder", "couldn't connect", "Repo id must", "Cannot find the requested files")
    if not folder.exists() and any(words in said for words in not_found):
        return (
            f"no folder here has this name, and the Hub gave no {what} of it; for a private one log in with "
            f"`hf auth login`, or set HF_TOKEN"
        )
    if folder.is_file() and "is not a valid JSON file" in said:
        return f"it is a file; give the folder that holds the {what}"
    again = "save it there again with save_pretrained, or copy the file anew"
    if "deserializing header" in said:
        return f"{_first_unreadable(folder) or 'model.safetensors'} is damaged or cut short ({said}); {again}"
    if "Weights only load failed" in said:
        return f"pytorch_model.bin is damaged, or holds more than tensors, which are all that is read; {again}"
    if "no file named model.safetensors" in said:
        return "it has no model.safetensors; save the model there with save_pretrained, or copy the file there"
    if "is not a valid JSON file" in said:
        return f"its config.json is no JSON; {again}"
    if " must be " in said and (folder / "config.json").is_file():  # from D2lBertConfig
        return f"its config.json: {said}; put back the one that was saved with the weights"
    if what == "model" and "Unrecognized model in" in said:
        if (folder / "prepared.json").is_file():  # what `d2l-bert prepare` leaves
            return f"it is a prepared text, not a model; d2l-bert pretrain --corpus {name} trains one on it"
        return "it is no model: it has no config.json with a model_type; give a folder of pretrain or save_pretrained"
    if what == "tokenizer" and folder.is_dir():
        if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.txt")):
            return (
                "it has no tokenizer: no tokenizer.json and no vocab.txt; give a folder with one, or save one there "
                "with save_pretrained"
            )
        return f"its tokenizer is damaged ({said:.150}); {again}"
    return said[:300]


def _first_unreadable(folder):
    """The first file of weights in a folder that cannot be opened; None if all can, or the model is on the Hub."""
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
    The number of this process among those that were launched together; 0 for one alone.

    Raises:
        UserError: a launcher's variable is no number, or RANK is not below WORLD_SIZE.
    """
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not (value := os.environ.get(variable, "0")).isdecimal():
            raise UserError(f"{variable} in the environment must be a whole number, got {value!r}; unset it")
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if processes <= 1:  # a RANK without a WORLD_SIZE is left over from something else
        return 0
    if rank >= processes:
        raise UserError(f"the environment has RANK {rank} and WORLD_SIZE {processes}: ranks count from 0; unset both")
    return rank


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the machine. PyTorch has several exceptions for that."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("not enough memory", "can't allocate memory", "out of memory")
    )
