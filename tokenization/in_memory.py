"""Texts and rows that a program has in memory: lists, datasets and pandas frames, as a `datasets.Dataset`."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from d2l_bert.messages import UserError, explained


# What data in memory are called, in messages and on cards.
NAME = "data in memory"


def is_in_memory(data: object) -> bool:
    """Whether data are in memory, and not the name of a file, a folder or a data set."""
    return not isinstance(data, (str, Path))


def as_dataset(data: Any, text_column: str = "text", split: str | None = None):
    """
    Data in memory as a `datasets.Dataset`.

    Args:
        data: a list of texts, or of rows as dicts; a pandas frame, whose index is left out, or a Series of texts; a
            `datasets.Dataset`; or several splits, of which one is taken: a `datasets.DatasetDict`, or a dict of data.
        text_column: the column that the texts of a list or a Series become.
        split: the split to take of several; None to refuse them.

    Raises:
        UserError: the data are something else, have no such split, have no rows, or have values that no column holds.
    """
    import datasets

    pandas = sys.modules.get("pandas")  # a program that has a frame has imported it
    if isinstance(data, Mapping):
        if split not in data:
            raise UserError(f"{NAME}: several splits; give one of them: {', '.join(map(str, data))}")
        data = data[split]
    if pandas is not None and isinstance(data, pandas.Series):
        data = data.tolist()
    with _values_explained():
        if pandas is not None and isinstance(data, pandas.DataFrame):
            data = datasets.Dataset.from_pandas(data, preserve_index=False)
        elif isinstance(data, (list, tuple)):
            data = _dataset_of_list(list(data), text_column)
    if not isinstance(data, datasets.Dataset):
        raise UserError(
            f"{NAME}: a {type(data).__name__} cannot be read; give a list of texts or of dicts, a pandas "
            f"frame or Series, a datasets.Dataset, or a dict of splits"
        )
    if len(data) == 0:
        raise UserError(f"{NAME}: there are no rows; give some")
    return data


def as_splits(data: Any):
    """
    Data in memory as a `datasets.DatasetDict`: the splits of one or of a dict, or else the split `train` alone.

    Raises:
        UserError: as in `as_dataset`, of a split with its name.
    """
    import datasets

    if not isinstance(data, Mapping):
        return datasets.DatasetDict(train=as_dataset(data))
    splits = datasets.DatasetDict()
    for name, rows in data.items():
        with explained(f"split {name}", "", UserError):
            splits[str(name)] = rows if isinstance(rows, datasets.Dataset) else as_dataset(rows)
    return splits


def _dataset_of_list(entries: list, text_column: str):
    """A `datasets.Dataset` with a row for each text or dict; an empty one for an empty list."""
    import datasets

    if all(isinstance(entry, str) for entry in entries):
        return datasets.Dataset.from_dict({text_column: entries})
    kind = Mapping if isinstance(entries[0], Mapping) else str
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, kind):
            raise UserError(
                f"{NAME}: entry {number:,} of the list is a {type(entry).__name__}; give texts alone, or dicts alone"
            )
    return datasets.Dataset.from_list(entries)


@contextlib.contextmanager
def _values_explained() -> Iterator[None]:
    """Turn PyArrow's errors about the values of a column into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - 30) : error.end]
        shown = " ".join(before.encode(errors="backslashreplace").decode().split())
        raise UserError(
            f"{NAME}: a text holds half of a surrogate pair, which is no character: '{shown}'; repair the "
            f"text, or take it out"
        ) from None
    except (ValueError, TypeError, OverflowError) as error:  # those of PyArrow, too
        reason = " ".join(str(error).split())
        raise UserError(f"{NAME}: a column has values of several kinds ({reason:.200}); make them one") from None
