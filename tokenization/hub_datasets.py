"""Datasets of the library `datasets`: opens those of the Hub, of folders of data files, and of `save_to_disk`."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import pyarrow as pa

from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError, shortened, shows_bars
from d2l_bert.records import inside, read_record, refuse_link_outwards
from d2l_bert.tokenization import dataset_cards
from d2l_bert.tokenization.cache import cache_folder, is_own, write_once
from d2l_bert.tokenization.in_memory import NAME, as_dataset, as_splits


logger = logging.getLogger(__name__)

# The records of `save_to_disk`: of a dataset, and of several splits.
DATASET_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"

# What the names of the cache's folders with data in memory begin with; a hash follows.
IN_MEMORY = "dataset-"


def open_dataset(name: str, config: str | None, split: str, streaming: bool) -> tuple:
    """
    A dataset's rows, and what identifies them on the Hub: the hash of the library, which includes the revision.

    Args:
        streaming: read the rows over the network or from the files one by one; without it, the whole dataset is
            first downloaded and converted to Arrow.

    Raises:
        ValueError: there is no such configuration or split, or a file is damaged; the library raises others.
    """
    if is_saved_dataset(name):
        if config is not None:
            raise ValueError(f"a folder of save_to_disk has no configurations, so none is called {config}")
        splits = saved_splits(name)
        # A dataset that was saved alone may have no name of a split. It is taken for those that are the defaults.
        if "" in splits and split in ("train", "validation", "test"):
            split = ""
        if split not in splits:
            known = ", ".join(filter(None, splits)) or "no splits"
            raise ValueError(f"it has {known}, and no {split!r}; name one that it has")
        # A format such as "numpy" is saved, too: it would turn texts into arrays.
        return splits[split].with_format(None), None
    builder = dataset_builder(name, config)
    if streaming:
        rows = builder.as_streaming_dataset(split=split)
    else:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    return rows, [builder.config_id, builder.hash]


def rows_hash(rows) -> str:
    """16 hexadecimal digits: the start of the SHA-256 of the rows of a dataset of `datasets`, wherever they lie."""
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(1000):
        digest.update(json.dumps(batch, default=repr).encode())
    return digest.hexdigest()[:16]


def dataset_folder(data, column: str, split: str) -> str:
    """
    Write the text of data in memory to the cache, under the hash of this text.

    Args:
        data, split: as in `in_memory.as_dataset`.
        column: the column of the text.

    Returns:
        The folder, for `dataset_source`.

    Raises:
        UserError: as in `as_dataset`; or there is no such column, or the cache cannot be written.
    """
    rows = as_dataset(data, column, split)
    if column not in rows.column_names:
        raise UserError(
            f"{NAME}: no column {column!r:.100}; name its column of text with text_column: "
            f"{', '.join(rows.column_names)!s:.100}"
        )
    rows = rows.select_columns([column])
    return _written_to_cache(rows, rows_hash(rows))


def splits_folder(data) -> str:
    """
    Write all columns of data in memory to the cache, of several splits those of each; returns the folder.

    Raises:
        UserError: as in `dataset_folder`.
    """
    splits = as_splits(data)
    hashes = [[split, repr(rows.features), rows_hash(rows)] for split, rows in splits.items()]
    return _written_to_cache(splits, short_hash(hashes))


def _written_to_cache(data, digest):
    """The folder of the cache for a `Dataset` or a `DatasetDict`, which is written if it is not there."""
    import datasets

    path = cache_folder() / f"{IN_MEMORY}{digest}"
    if isinstance(data, datasets.Dataset):
        # Concatenated, rows lose the name of their split: the saved copy is the same whichever split they are from.
        data = datasets.concatenate_datasets([data])
    with contextlib.ExitStack() as undo:
        if not shows_bars() and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        write_once(path, data.save_to_disk)
    return str(path)


def was_in_memory(name: str) -> bool:
    """Whether a dataset is a folder of the cache for data in memory."""
    path = Path(name)
    return path.name.startswith(IN_MEMORY) and path.parent == cache_folder()


@contextlib.contextmanager
def dataset_errors(name: str, way_out: str) -> Iterator[None]:
    """
    Raise any exception of the block as `UserError` with the dataset's name.

    The library `datasets` raises many classes of exceptions; it also logs them, which is silenced in the block.
    """
    from datasets import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        if isinstance(cause, StopIteration | KeyError | AssertionError):  # a bare name says nothing to a reader
            reason = "a file in it is empty or damaged"
        raise UserError(f"dataset {name}: cannot be read ({reason}); {way_out}") from None
    finally:
        logging.set_verbosity(before)


def is_saved_dataset(folder: str) -> bool:
    """Whether this is a folder of `save_to_disk`."""
    return Path(folder, DATASET_FILE).is_file() or Path(folder, SPLITS_FILE).is_file()


class DataFileRecord(TypedDict):
    """A file of a dataset of `save_to_disk`."""

    filename: str


class DatasetRecord(TypedDict):
    """What is relied on of `DATASET_FILE`."""

    _data_files: list[DataFileRecord]


class SplitsRecord(TypedDict):
    """The content of `SPLITS_FILE`."""

    splits: list[str]


def saved_splits(folder: str) -> dict:
    """
    The splits of a folder of `save_to_disk`, by their names; a dataset that was saved alone has the name "", if it
    does not say of which split it is.

    The files that its records name must lie in the folder. Arrow maps a file into memory and follows the places in it
    unchecked, so everything is validated before it is read: else a changed byte can end the process.

    Raises:
        UserError, ValueError: a record or a file is damaged, or leads out of the folder.
    """
    import datasets

    home = Path(folder)
    splits = read_record(home / SPLITS_FILE, SplitsRecord).get("splits")
    if splits is None:
        _validate_saved(home, "")
    else:
        for split in splits:
            _validate_saved(home, f"{split}/")
    found = datasets.load_from_disk(folder)
    return found if isinstance(found, datasets.DatasetDict) else {str(found.split or ""): found}


def _validate_saved(home, place):
    """Raise an exception if the record of a dataset, or a file that the record names, is not as it should be."""
    state = read_record(inside(home, f"{place}{DATASET_FILE}"), DatasetRecord)
    if not state:
        raise ValueError(f"{place}{DATASET_FILE} is missing")
    inside(home, f"{place}dataset_info.json")
    for file in state["_data_files"]:
        _validate_arrow(inside(home, f"{place}{file['filename']}"))  # whatever its name, Arrow maps it


def _validate_arrow(file):
    """Raise an exception of Arrow's if its numbers do not fit the file: the places of texts, their lengths, UTF-8."""
    with pa.memory_map(os.fspath(file)) as opened:
        try:
            batches = iter(pa.ipc.open_stream(opened))
        except pa.ArrowInvalid:
            opened.seek(0)
            reader = pa.ipc.open_file(opened)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)


def dataset_builder(name: str, config: str | None, **options):
    """
    The builder of a dataset on the Hub, or in a folder of data files, which are those of this dataset alone.

    The card of a dataset may name other files in `data_files`: a folder must not name what lies outside of it, nor a
    dataset on the Hub a file of this machine.

    Raises:
        ValueError: it does; or the name is one of the formats that the library `datasets` reads, of which it would
            read the working folder.
    """
    import datasets
    from datasets import packaged_modules

    if name in packaged_modules._PACKAGED_DATASETS_MODULES:
        raise ValueError(f"{name!r} is a format of files, and no dataset; a folder of this name is ./{name}")
    dataset_cards.check_dataset(name)
    builder = datasets.load_dataset_builder(name, config, **options)
    cache = Path(builder.cache_dir)
    if os.name != "nt" and not is_own(cache):
        logger.warning(
            f"dataset {shortened(name, 200)}: the cache {cache} belongs to another user, who can change what is read; "
            f"set HF_HOME to a folder of your own"
        )
    files = builder.config.data_files or {}
    is_folder = Path(name).exists()
    for file in map(str, itertools.chain.from_iterable(files.values())):
        is_remote = "://" in file
        if is_folder and is_remote:
            raise ValueError(f"its card names {file:.200}, which is not in the folder")
        if not is_folder and not is_remote:
            raise ValueError(f"its card names {file:.200}, a file of this machine")
        if is_folder:
            _check_data_file(file, Path(name), builder.name)
    return builder


def _check_data_file(file, folder, reader):
    """Check a file in a folder of data files; `reader` is what the library reads it with."""
    path = Path(os.path.abspath(file))
    refuse_link_outwards(path, folder)
    if not path.is_file():
        raise ValueError(f"{file:.200} is no regular file")
    if path.suffix == ".arrow" or reader == "arrow":
        _validate_arrow(path)
