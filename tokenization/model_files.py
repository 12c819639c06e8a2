"""The files of a model, a stranger's too: where they lie; config.json, checked before any library reads it."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from huggingface_hub.utils.tqdm import progress_bar_states
from transformers.utils import cached_file, logging

from d2l_bert.messages import UserError
from d2l_bert.records import read_record, refuse_link_outwards


# The names of all files that Transformers may read in a model's folder.
READ_BY_LIBRARIES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja", "*/*.jinja")


def find_file(name: str | Path, file: str) -> Path | None:
    """
    The path of a model's file, in its folder or in the cache of the Hub's client; None if the model has no such file.

    Args:
        name: a folder or an id on the Hub.
        file: the file's name.

    Raises:
        UserError: the file is a link that leads out of the folder, or no regular file.
        Exception: one of the Hub's client, if it cannot be reached or has no such model.
    """
    folder = Path(name)
    if not folder.is_dir():
        found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found else None
    path = folder / file
    check_within(path, folder)
    return path if path.is_file() else None


def check_within(path: Path, folder: Path) -> None:
    """
    Refuse a path in a model's folder that is a link out of it, a pipe or a device; nothing may be there.

    Raises:
        UserError: the path is one of these.
    """
    refuse_link_outwards(path, folder)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; take it out")


def check_folder(name: str | Path) -> None:
    """
    Refuse a model whose files lead out of its folder, or whose config.json a library should not be given at all.

    Everything that loads a model or a tokenizer calls this first, as Transformers reads config.json for either: what
    the libraries read lies in the folder itself, and no entry makes them read other places or fill the memory.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: a file or an entry is refused.
        Exception: one of the Hub's client, if there is no such model.
    """
    folder = Path(name)
    if folder.is_dir():
        for pattern in READ_BY_LIBRARIES:
            for path in folder.glob(pattern):
                if path.is_symlink() or not path.is_dir():
                    check_within(path, folder)
    if find_file(name, "adapter_config.json"):
        raise UserError(
            "it holds an adapter (adapter_config.json), which names another model to load; merge the adapter into its "
            "model, and save that"
        )
    read_config_file(name)


@contextlib.contextmanager
def without_log_messages() -> Iterator[None]:
    """
    Within the block, Transformers logs nothing.

    It logs what a checkpoint lacks, which is told here in other words, and entries of a stranger's files as they stand
    there, which may hold what a terminal obeys.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.CRITICAL)
        yield


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Within the block, Transformers shows no progress bar for each file of a model that it loads or saves."""
    has_bars = logging.is_progress_bar_enabled()
    of_hub = dict(progress_bar_states)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bars:
            logging.enable_progress_bar()  # also enables huggingface_hub's bars, which are restored below
        progress_bar_states.clear()
        progress_bar_states.update(of_hub)


# ---------------------------------------------------------------------------------------------------------------------
# config.json


class ConfigFile(TypedDict, total=False):
    """The entries of config.json that are read before Transformers makes a configuration of it."""

    model_type: str
    architectures: list[str] | None
    id2label: dict[str, str] | None
    label2id: dict[str, int] | None
    num_labels: int | None
    problem_type: str | None
    quantization_config: dict | None


# Transformers writes a name for each label when it reads config.json.
MOST_LABELS = 2**20

# Layers, groups or blocks. Transformers lists them when it reads config.json.
MOST_PARTS = 2**16


def read_config_file(name: str | Path) -> ConfigFile:
    """
    The content of a model's config.json; an empty one if there is none.

    Raises:
        UserError: it is no JSON object, an entry has another type, a number is not finite, there are too many labels
            or layers, or the weights are quantized.
    """
    file = find_file(name, "config.json")
    if file is None:
        return {}
    content = read_record(file, ConfigFile)
    if (content.get("num_labels") or 0) > MOST_LABELS:
        raise UserError(f"{file}: num_labels {content['num_labels']:,} is more than {MOST_LABELS:,}; correct it")
    for place, value in walk(content):
        if _counts_parts(place) and type(value) is int and value > MOST_PARTS:
            raise UserError(f"{file}: {place:.100} is {value:,}, which no model has; put back the model's own")
    if "transformers_weights" in content:
        raise UserError(f"{file}: transformers_weights names another file of weights; take the entry out")
    if content.get("quantization_config"):
        raise UserError("its weights are quantized (quantization_config); give the model that it was made of")
    return content


def _counts_parts(place):
    """Whether the entry of config.json at a place counts layers, groups or blocks."""
    return re.search(r"layers?\b|groups?\b|blocks?\b|repeat|depth|experts", place.replace("_", " ")) is not None


def walk(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Each value inside of a value of JSON, and before it its place: {"a": [5]} at "" gives "", "a" and "a[0]"."""
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}".lstrip("."), entry) for name, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{number}]", entry) for number, entry in enumerate(value)]


def place_of_wrong_count(content: dict, weights: int) -> str:
    """
    The first place in config.json that counts more layers, groups or blocks than the model has weights; "" if none.

    Args:
        content: of config.json.
        weights: the number of tensors in the file of weights.
    """
    without_labels = {name: value for name, value in content.items() if name not in ("id2label", "label2id")}
    for place, value in walk(without_labels):
        if _counts_parts(place) and type(value) is int and value > max(weights, 1024):
            return place
    return ""
