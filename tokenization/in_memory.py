"""Texts and rows that a program has in memory: lists, datasets and pandas frames, as a `datasets.Dataset`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d2l_bert.messages import UserError


def is_in_memory(data: object) -> bool:
    """Whether data are in memory, and not the name of a file, a folder or a data set."""
    return not isinstance(data, (str, Path))


def as_dataset(data: Any, text_column: str = "text", split: str | None = None):
    """
    Data in memory as a `datasets.Dataset`.

    Args:
        data: a list of texts, or of rows as dicts; a pandas frame, whose index is left out; a `datasets.Dataset`; or
            a `datasets.DatasetDict`, of which one split is taken.
        text_column: the column that the texts of a list become.
        split: the split of a `DatasetDict`; None to refuse one.

    Raises:
        UserError: the data are something else, have no such split, or have no rows.
    """
    import datasets

    pandas = sys.modules.get("pandas")  # a program that has a frame has imported it
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"a DatasetDict in memory: give one of its splits: {', '.join(data)}")
        data = data[split]
    if pandas is not None and isinstance(data, pandas.DataFrame):
        data = datasets.Dataset.from_pandas(data, preserve_index=False)
    elif isinstance(data, (list, tuple)):
        data = _dataset_of_list(list(data), text_column)
    if not isinstance(data, datasets.Dataset):
        raise UserError(
            f"data in memory: a {type(data).__name__} cannot be read; give a list of texts or of dicts, a pandas "
            f"frame, a datasets.Dataset or a DatasetDict"
        )
    if len(data) == 0:
        raise UserError("data in memory: there are no rows; give some")
    return data


def _dataset_of_list(entries: list, text_column: str):
    """A `datasets.Dataset` with a row for each text or dict; an empty one for an empty list."""
    import datasets

    if all(isinstance(entry, str) for entry in entries):
        return datasets.Dataset.from_dict({text_column: entries})
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping):
            raise UserError(
                f"data in memory: entry {number:,} of the list is a {type(entry).__name__}; give texts alone, or "
                f"dicts alone"
            )
    try:
        return datasets.Dataset.from_list(entries)
    except (ValueError, TypeError, OverflowError) as error:  # those of PyArrow, too
        reason = " ".join(str(error).split())
        raise UserError(
            f"data in memory: a column has values of several kinds ({reason:.200}); make them one"
        ) from None
