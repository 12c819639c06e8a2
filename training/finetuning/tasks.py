"""`Task`: what a task brings to a run: its columns, rows, features, loss, metrics, predictions; readers of cells."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from transformers import DataCollatorWithPadding

from d2l_bert.messages import UserError, explained, refuse_first, shortened
from d2l_bert.modeling.records import Learnt
from d2l_bert.tokenization import long_texts, tables
from d2l_bert.training.finetuning.config import FinetuneConfig


# No tokenizer gets more rows at once: its encodings, with what is cut off, take far more memory than the ids.
ROWS_AT_ONCE = 100

# A context, or the words of a text, is read to its end in windows; a longer one, in characters, is refused. Few books
# are longer. Its tokens take up to 3 GB.
LONGEST_READ_WHOLE = 1 << 22

# Half of a surrogate pair, which no encoding has.
SURROGATE = re.compile("[\ud800-\udfff]")

# Columns that need not be there.
OPTIONAL = ("text_pair_column", "context_column", "question_column")

# The attributes, of one task or another, that `find_columns` and `learn` set.
LEARNT = (
    *("columns", "classes", "number_of", "mean", "deviation", "default", "scheme", "has_unanswerable"),
    *("count", "begin"),
)


class EmptyText(ValueError):
    """A row has no text where one is read."""


class Row(NamedTuple):
    """
    A row of a split.

    Args:
        place: where it stands in its file, for messages.
        cells: its values, by the names of the columns.
        texts: the texts that its task reads, by which equal rows are found; of token classification the words.
        label: the label as the task reads it; None for a row without.
    """

    place: str
    cells: dict
    texts: tuple[str, ...] = ()
    label: object = None


class Window(NamedTuple):
    """
    The part of a row that one feature has.

    Args:
        source: the number of the row.
        positions: the positions of the tokens to predict at (P,).
        places: for each of these tokens its word in the row (P,), or its first character and the one behind its last
            in the context (P, 2).
    """

    source: int
    positions: np.ndarray
    places: np.ndarray


class Task:
    """
    A task. `trainer.py` names a subclass for each of `config.TASKS`.

    The run calls `find_columns` with the names of the training rows' columns, `read` with every row, `learn` with the
    training rows, `checked` with every row that was read, and `features` with every split. `outputs` below are the
    model's `logits`, in the order of `Split.features`, as a NumPy array; `rescaled` has been applied to them. A
    `ValueError` about a row says what is wrong in which column, and the way out.

    A subclass defines these methods:

    - `read(row, split)`: the `Row` with texts and label, which are in its cells; raises `ValueError`;
    - `learn(train)` learns from the training rows what the labels are; raises `UserError` if they cannot be learnt;
    - `features(split, tokenizer, max_seq_length)` sets the split's `features`, and what else the task needs to read
      the model's outputs (`windows`, `note`). Each feature has `labels`, of which -100 does not count in the loss;
      in a split without labels they are not read. Raises `UserError` for a tokenizer or a length that cannot be used;
    - `metrics(split, outputs)`: the metrics of a labelled split by name, without the loss;
    - `predictions(split, outputs)`: columns with the predictions for each row of a split.

    Attributes:
        auto_class: the Auto class that loads the model, such as `AutoModelForSequenceClassification`.
        main_metric: the metric that chooses, unless `metric_for_best_model` or a named data set gives another.
        metrics_shown: the metrics in the order of the tables; those in `metrics.LOWER_IS_BETTER` are best when small.
        collator: the class of the function that makes a padded batch of features.
        default_length: the default of `max_seq_length`.
        usual_columns: by the option that names a column, its usual names.
        columns: by the option, the columns of this run, which `find_columns` finds; `label` is that of labels, the
            first one if there are several.
        classes: the names of the classes in the order of their numbers, which `learn` finds; [] for tasks without.
        settings: the fields of the model's configuration that the task decides: `num_labels`, `id2label`, ...
        problem_type: that of the model's configuration, which has one for `AutoModelForSequenceClassification`.
        has_unanswerable: whether training rows have questions without an answer.
        no_label: what is wrong with a column of labels that has none, and the way out.
        learnt: the entries of `Learnt`, beside the columns, that the predictions of a finished model need.
        least_texts: how many columns of texts a row has at least, choices apart.
        more_columns: columns that `read` looks at where they are, and that no option names.
    """

    problem_type = None
    has_unanswerable = False
    no_label = "is empty; write a label, or take the row out"
    main_metric = "accuracy"
    collator = DataCollatorWithPadding
    default_length = 128
    learnt: tuple[str, ...] = ()
    least_texts = 1
    more_columns: tuple[str, ...] = ()

    def __init__(self, config: FinetuneConfig):
        self.config = config
        self.columns: dict[str, list[str]] = {}
        self.classes: list[str] = []
        self.settings: dict = {"problem_type": self.problem_type}
        self.known = config.named.get("labels", ())  # names of classes, by their numbers

    def metric(self) -> str:
        """
        The name of the metric that chooses checkpoint, rate and seed.

        Raises:
            UserError: `metric_for_best_model` is not a metric of the task.
        """
        chosen = self.config.metric_for_best_model or self.config.named.get("metric", self.main_metric)
        known = (*self.metrics_shown, "loss")
        refuse_first(
            {
                f"metric_for_best_model {chosen!r}: --task {self.config.task} has {', '.join(known)}; give one": (
                    chosen.removeprefix("eval_") not in known
                )
            }
        )
        return chosen.removeprefix("eval_")

    def restore(self, learnt: Learnt) -> None:
        """
        Take what a finished run has learnt, in place of `find_columns` and `learn`.

        Raises:
            ValueError: a part of it is missing, or cannot be that of a finished run of this task.
        """
        for name in ("columns", *self.learnt):
            if name not in learnt:
                raise ValueError(f"learnt lacks the entry {name!r}")
        for option in self.usual_columns:
            if names := learnt["columns"].get(option):
                self.columns[option] = names
        of_texts = self.options_of_texts()
        if len(of_texts) < self.least_texts or any(len(self.columns[option]) != 1 for option in of_texts):
            raise ValueError("learnt.columns does not name a column for each text of a row")
        if "choices_column" in self.usual_columns and "choices_column" not in self.columns:
            raise ValueError("learnt.columns names no column of choices")
        for name in self.learnt:
            setattr(self, name, learnt[name])
        if "classes" in self.learnt and not self.classes:
            raise ValueError("learnt.classes is empty")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("learnt.classes has two classes of one name")
        if any(SURROGATE.search(name) for name in self.classes):
            raise ValueError("learnt.classes has half a character (a surrogate alone)")
        if "default" in self.learnt and self.default not in self.classes:
            raise ValueError("learnt.default is no class")

    def options_of_texts(self) -> list[str]:
        """The options whose columns hold a text each: all but those of choices and of labels."""
        return [option for option in self.columns if option not in ("choices_column", "label_column")]

    # -----------------------------------------------------------------------------------------------------------------
    # Rows

    def find_columns(self, names: list[str]) -> None:
        """
        Find the columns: the option's, or a usual one, or the named data set's; `check_columns` follows.

        Args:
            names: of the columns of the training rows.
        """
        for option, usual in self.usual_columns.items():
            wanted = [*usual, *filter(None, [self.config.named.get(option)])]
            found = getattr(self.config, option) or next((name for name in wanted if name in names), None)
            if found or option not in OPTIONAL or option in self.config.named:
                self.columns[option] = found if isinstance(found, list) else [found or wanted[0]]
        self.label = self.columns["label_column"][0]

    def check_columns(self, label: str, names: list[str], has_labels: bool = True) -> None:
        """
        Refuse rows without one of the columns, and a column that has two uses.

        Args:
            label: what the rows are, for the message.
            names: of their columns.
            has_labels: whether the column of labels must be there.

        Raises:
            UserError: as above.
        """
        used = [column for columns in self.columns.values() for column in columns]
        for column in used:
            if used.count(column) > 1:
                raise UserError(f"column {column!r:.100} cannot have two uses; name another column")
        for option, columns in self.columns.items():
            for column in columns:
                if column not in names and (has_labels or option != "label_column"):
                    raise UserError(
                        f"{label}: no column {column!r:.100}; it has {listed(names) or 'none'}: name one with "
                        f"--{option}"
                    )

    def checked(self, row: Row, split) -> Row:
        """
        The row.

        Raises:
            ValueError: it has no label and others of its split have, or the training rows have not shown how to learn
                it.
        """
        if split.is_labelled and row.label is None and not self.has_unanswerable:
            raise ValueError(f"column {self.label!r:.100} {self.no_label}")
        for name in self.names_of(row):
            if name not in self.number_of:
                raise ValueError(
                    f"label {name!r:.100} in column {self.label!r:.100} is none of {listed(list(self.number_of))}; "
                    f"correct the label{', or add training rows with it' if self.classes else ''}"
                )
        return row

    def names_of(self, row: Row) -> list[str]:
        """The names of the classes of a row; [] for a task without classes."""
        if isinstance(row.label, str):
            return [row.label]
        return row.label or [] if self.classes else []

    def learn_classes(self, train, found: set[str], named: list[str] | tuple[str, ...] | None, least: int = 2) -> None:
        """
        Set the classes.

        Args:
            found: the names in the training rows.
            named: all names in their order, if the dataset or its publishers give it; a name may stand there twice, as
                two spellings are made one.
            least: the fewest classes; of one alone there is nothing to learn.
        """
        are_numbers = all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in found)
        by_number = sorted(found, key=lambda name: (int(name) if are_numbers else 0, name))
        self.classes = [name for name in dict.fromkeys(named) if name in found] if named else by_number
        refuse_first(
            {
                f"{train.label}: every row has the label {self.classes[0]!r:.100} in column {self.label!r:.100}; "
                f"there is nothing to tell apart: give rows of two classes at least, or name another column with "
                f"--label_column": len(self.classes) < least
            }
        )
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        self.settings |= {
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": dict(self.number_of),
        }

    def texts(self, cells: dict) -> tuple[str, ...]:
        """The texts in a row's columns, without choices; raises `ValueError` as `check_text`."""
        texts = []
        for option in self.options_of_texts():
            column = self.columns[option][0]
            texts.append(
                check_text(cells.get(column), f"column {column!r:.100}", f", or name another column with --{option}")
            )
        return tuple(texts)

    # -----------------------------------------------------------------------------------------------------------------
    # The model and its outputs

    def logits(self, outputs, attention_mask) -> torch.Tensor:
        """What the task reads of a model's outputs for a batch, (B, ...); with tokens, they are in dimension 1."""
        return outputs.logits

    def loss(self, logits, labels) -> torch.Tensor:
        """The sum of the losses of all labels that are not -100."""
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def rescaled(self, outputs):
        """The outputs of a model in training, in the units of the labels."""
        return outputs

    def finish(self, model) -> None:
        """Change a trained model in place, so that its outputs are those of `rescaled`."""

    def know_nothing(self, train, split) -> tuple[str, dict] | None:
        """A prediction that needs no model, in words, and its metrics of a split; None for a task without one."""
        return None

    def in_csv(self, predicted: dict[str, list]) -> dict[str, list]:
        """The columns of `predictions` as a CSV file has them, where lists are JSON unless a task joins them."""
        return predicted

    def sides(self, split, outputs) -> tuple | None:
        """The true and the predicted classes in a labelled split, and their names, as in `metrics.report_by_class`."""
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def check_text(text: object, place: str, way_out: str = "") -> str:
    """A text at a place of a row; raises `EmptyText` if it is empty, and another `ValueError` if it is no text."""
    way_out = f"write a text there, or take the row out{way_out}"
    if not is_filled(text):
        raise EmptyText(f"{place} is empty; {way_out}")
    if not isinstance(text, str):
        raise ValueError(f"{place} holds {type(text).__name__}, not text; {way_out}")
    return text


def json_in(cell: object, column: str) -> object:
    """
    The value of a cell; of a text that is a list or an object in JSON, as CSV has them, that list or object.

    Raises:
        ValueError: the text looks like JSON, and is none, such as a list that pandas has written.
    """
    if not isinstance(cell, str) or cell.strip()[:1] + cell.strip()[-1:] not in ("[]", "{}"):
        return cell
    with explained(
        f"column {column!r:.100} holds {cell:.40}, which is not JSON",
        'write ["a", "b"], as json.dumps does, or give JSONL or Parquet with lists',
        *(ValueError, RecursionError),
    ):
        return json.loads(tables.whole_characters(cell))


def list_in(cells: dict, column: str, option: str, separator: str | None = None) -> list:
    """
    The entries of a cell: a list, also as JSON, or a text with the separator (white space) between the entries.

    Raises:
        ValueError: the cell is neither.
    """
    value = json_in(cells.get(column), column)
    if isinstance(value, str):
        return [entry for entry in value.split(separator) if entry.strip()]
    if value is not None and not isinstance(value, list):
        raise ValueError(
            f"column {column!r:.100} holds {type(value).__name__}, not a list; name another column with --{option}"
        )
    return value or []


def name_of(entry: object, column: str, classes: list[str] | None = None) -> str:
    """
    The name of a class in a cell: a string, or the number of a dataset's class.

    Args:
        classes: the names of the dataset's classes.

    Raises:
        ValueError: the entry is no name, or no number of a class; or the name has half a character.
    """
    is_number = classes and isinstance(entry, int) and not isinstance(entry, bool)
    is_name = is_filled(entry) and not isinstance(entry, float | list | dict)
    if not is_name or (is_number and not 0 <= entry < len(classes)):
        raise ValueError(
            f"column {column!r:.100} holds {entry!r:.100}, which is no label; write a name or a whole number"
        )
    name = classes[entry] if is_number else str(entry).strip()
    if SURROGATE.search(name):
        raise ValueError(
            f"column {column!r:.100} has the label {ascii(name):.100}, whose half character (a surrogate "
            f"alone) cannot be written; correct it"
        )
    return unicodedata.normalize("NFC", name)  # systems write ü as one character or as two


def check_length(characters: int, place: str) -> None:
    """Raise `ValueError` if what is read in windows has more than `LONGEST_READ_WHOLE` characters."""
    if characters > LONGEST_READ_WHOLE:
        raise ValueError(
            f"{place} has {characters:,} characters, and {LONGEST_READ_WHOLE:,} at most are read in windows; divide "
            f"it into several rows"
        )


def is_filled(value: object) -> bool:
    """Whether a cell holds more than white space."""
    return value is not None and str(value).strip() != ""


def listed(names: list[str]) -> str:
    """Names in a sentence, as many as a line may have."""
    return shortened(", ".join(map(repr, names)), 200)


# ---------------------------------------------------------------------------------------------------------------------
# Texts to inputs


def note_of_windows(split, max_seq_length: int) -> str:
    """How many rows of a split are cut into windows, for the user; "" if none is."""
    long = sum(count > 1 for count in Counter(window.source for window in split.windows).values())
    return (
        f"{long:,} ({long / len(split.rows):.1%}) are longer than {max_seq_length} tokens and are cut into windows"
        if long
        else ""
    )


def encoded(tokenizer, columns: list, max_seq_length: int, **options) -> Iterator[tuple]:
    """
    The inputs of texts or of pairs of texts, truncated, from the longer text of a pair.

    Args:
        columns: the texts of each row, and the second texts of pairs.
        options: further arguments of the tokenizer; `return_overflowing_tokens` gives all windows of a long row.

    Yields:
        The number of the row, the inputs, and the `tokenizers.Encoding` that they are of.
    """
    reads_beginnings = options.keys().isdisjoint(("return_overflowing_tokens", "is_split_into_words"))
    if reads_beginnings and tokenizer.truncation_side == "right":
        columns = _beginnings(tokenizer, columns, max_seq_length)
    elif reads_beginnings:
        columns = [[long_texts.ending_of(text) for text in column] for column in columns]
    options = {"truncation": True, "max_length": max_seq_length, "verbose": False, **options}
    for begin in range(0, len(columns[0]), ROWS_AT_ONCE):
        batch = tokenizer(*(list(column[begin : begin + ROWS_AT_ONCE]) for column in columns), **options)
        sources = batch.pop("overflow_to_sample_mapping", range(len(batch.encodings)))
        for window, source in enumerate(sources):
            inputs = {name: values[window] for name, values in batch.items()}
            yield begin + source, inputs, batch.encodings[window]


def _beginnings(tokenizer, columns: list, max_seq_length: int) -> list:
    """
    The columns of `encoded`, of texts that are truncated, without most of what the truncation would leave out.

    Of a pair, the text of more tokens is truncated; if both are, it keeps one token more than the other where an odd
    number of tokens fits. So its beginning has more tokens than that of the other text.
    """
    if not any(long_texts.is_long(text, max_seq_length) for column in columns for text in column):
        return columns
    plain, rows = long_texts.without_limits(tokenizer.backend_tokenizer), []
    for texts in zip(*columns, strict=True):
        cut = [text[: long_texts.MOST_CHARACTERS] for text in texts]
        most = max_seq_length
        order = [0]
        if len(texts) > 1:
            first, second = (long_texts.token_count(text, plain) for text in cut)
            order = [1, 0] if first > second else [0, 1]  # the text of more tokens last
        for place in order:
            cut[place] = long_texts.beginning_of(cut[place], most, plain)
            most = max(most, long_texts.token_count(cut[place], plain))
        rows.append(cut)
    return list(zip(*rows, strict=True))


def truncated(tokenizer, columns: list, max_seq_length: int) -> tuple[list[dict], str]:
    """The inputs as of `encoded`, and how many rows are truncated, for the user; "" if none is."""
    rows, cut = [], 0
    for source, inputs, encoding in encoded(tokenizer, columns, max_seq_length):
        rows.append(inputs)
        longest = max(len(column[source]) for column in columns)
        cut += bool(encoding.overflowing) or longest > long_texts.MOST_CHARACTERS
    return rows, f"{cut:,} are truncated to {max_seq_length} tokens" if cut else ""
