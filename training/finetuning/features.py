"""Texts -> the model's inputs: truncated to a length, or cut into windows."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from d2l_bert.tokenization import long_texts
from d2l_bert.training.finetuning.rows import Split


# No tokenizer gets more rows at once: its encodings, with what is cut off, take far more memory than the ids.
ROWS_AT_ONCE = 100


class Window(NamedTuple):
    """
    The part of a row that one feature has.

    Args:
        row: the number of the row.
        positions: the positions of the tokens to predict at (P,).
        places: for each of these tokens its word in the row (P,), or its first character and the one behind its last
            in the context (P, 2).
    """

    row: int
    positions: np.ndarray
    places: np.ndarray


class Features(NamedTuple):
    """
    The rows of a split as a model reads them.

    Args:
        inputs: the model's arguments for each feature, not padded, with `labels`, of which -100 does not count in the
            loss. A row has one feature, or several where there are windows.
        windows: for each feature its window; [] for a task whose rows have one feature each.
        note: what happened to rows longer than `max_seq_length`, for the user; "" if every row fits.
    """

    inputs: list[dict]
    windows: list[Window]
    note: str


def note_of_windows(split: Split, windows: list[Window], max_seq_length: int) -> str:
    """How many rows of a split are cut into windows, for the user; "" if none is."""
    counts = Counter(window.row for window in windows)
    long = sum(count > 1 for count in counts.values())
    if not long:
        return ""
    share = long / len(split.rows)
    return f"{long:,} ({share:.1%}) are longer than {max_seq_length} tokens and are cut into windows"


def encoded(tokenizer, columns: list, max_seq_length: int, **options) -> Iterator[tuple]:
    """
    The inputs of texts or of pairs of texts, truncated, from the longer text of a pair.

    Args:
        columns: the texts of each row, and the second texts of pairs.
        options: further arguments of the tokenizer; `return_overflowing_tokens` gives all windows of a long row.

    Yields:
        The number of the row, the inputs, and the `tokenizers.Encoding` that they are of.
    """
    # To read a long text takes long: where its beginning or its end alone is kept, the tokenizer gets little more.
    reads_all = options.keys() & {"return_overflowing_tokens", "is_split_into_words"}
    if not reads_all and tokenizer.truncation_side == "right":
        columns = _beginnings(tokenizer, columns, max_seq_length)
    elif not reads_all:
        columns = _endings(columns)
    options = {"truncation": True, "max_length": max_seq_length, "verbose": False, **options}
    for begin in range(0, len(columns[0]), ROWS_AT_ONCE):
        texts = [list(column[begin : begin + ROWS_AT_ONCE]) for column in columns]
        batch = tokenizer(*texts, **options)
        numbers = batch.pop("overflow_to_sample_mapping", range(len(batch.encodings)))
        for window, number in enumerate(numbers):
            inputs = {name: values[window] for name, values in batch.items()}
            yield begin + number, inputs, batch.encodings[window]


def _endings(columns: list) -> list:
    """The columns of `encoded`, of texts whose beginning is truncated, without most of it."""
    endings = []
    for column in columns:
        endings.append([long_texts.ending_of(text) for text in column])
    return endings


def _beginnings(tokenizer, columns: list, max_seq_length: int) -> list:
    """
    The columns of `encoded`, of texts that are truncated, without most of what the truncation would leave out.

    Of a pair, the tokenizer truncates the text of more tokens; if both are truncated, the longer one keeps one token
    more than the other where an odd number of tokens fits. The beginnings must therefore be in the same order of
    length as the texts: the shorter text is cut first, and the longer one to more tokens than are left of it.

    For example, of a first text of 5,000 tokens and a second one of 3,000, with a `max_seq_length` of 128: the second
    is cut to a little more than 128 tokens, say 131. The first is then cut to more than 131 tokens, say 135. With 129
    tokens it would be the shorter one, and the second text would get the odd token.
    """
    has_long = any(long_texts.is_long(text, max_seq_length) for column in columns for text in column)
    if not has_long:
        return columns
    plain = long_texts.without_limits(tokenizer.backend_tokenizer)
    rows = []
    for texts in zip(*columns, strict=True):
        cut = [text[: long_texts.MOST_CHARACTERS] for text in texts]
        most = max_seq_length
        for place in _shorter_first(cut, plain):
            cut[place] = long_texts.beginning_of(cut[place], most, plain)
            most = max(most, long_texts.token_count(cut[place], plain))
        rows.append(cut)
    return list(zip(*rows, strict=True))


def _shorter_first(texts: list[str], plain) -> list[int]:
    """The numbers of a text, or of the two texts of a pair: that of more tokens last."""
    if len(texts) == 1:
        return [0]
    first, second = (long_texts.token_count(text, plain) for text in texts)
    return [1, 0] if first > second else [0, 1]


def truncated(tokenizer, columns: list, max_seq_length: int) -> Features:
    """The features of texts or of pairs, as of `encoded`, one for each row; the note says how many are truncated."""
    inputs = []
    truncated_rows = 0
    for number, of_row, encoding in encoded(tokenizer, columns, max_seq_length):
        inputs.append(of_row)
        longest = max(len(column[number]) for column in columns)
        if encoding.overflowing or longest > long_texts.MOST_CHARACTERS:
            truncated_rows += 1
    note = f"{truncated_rows:,} are truncated to {max_seq_length} tokens" if truncated_rows else ""
    return Features(inputs, [], note)
