"""Files and datasets -> the rows of a split; rows and their predictions -> a file."""

import csv
import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, short_name
from d2l_bert.model_cards.card import local_name
from d2l_bert.records import values_in
from d2l_bert.tokenization import hub_datasets, in_memory, tables
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.training.finetuning.cells import name_of, shown_line
from d2l_bert.training.finetuning.config import FinetuneConfig


logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")

LONGEST_DOCUMENT = 1 << 30  # characters in a line of a document of JSON, which may be the whole

# How many rows of a dataset are converted to Python's values at once; then their memory is counted.
DATASET_ROWS = 100

# A table of more than `MOST_CELLS` cells has at most `MOST_CELLS_A_FILLED_ONE` cells for each cell that is filled: one
# that is all but empty would take far more memory than its rows.
MOST_CELLS = 10_000_000
MOST_CELLS_A_FILLED_ONE = 100

# The beginnings of what Excel and similar programs may compute as a formula, also behind white space and with signs of
# full width (https://owasp.org/www-community/attacks/CSV_Injection). Numbers may begin with the same signs.
FORMULA = re.compile("[\t\r\n]|\\s*[-=+@\uff1d\uff0b\uff0d\uff20]")
A_NUMBER = re.compile(r"[+-]?(\d+([.,]\d+)*|[.,]\d+)(e[+-]?\d+)?\s?%?", re.IGNORECASE | re.ASCII)

# The first word of a text in CoNLL-U, whose lines have ten fields.
CONLL_U_WORD = re.compile(r"1(\t[^\t]*){9}")

# The number of a word in its text: of CoNLL-U and the like; 1-2 is two words in one, 8.1 is not in the text.
A_WORDS_NUMBER = re.compile(r"[0-9]{1,9}")
A_PLACE_IN_A_TEXT = re.compile(r"[0-9]{1,9}([-.][0-9]{1,9})?")

# A word of tweets, such as #weir; not the marks between the documents of CoNLL-2012.
HASHTAG = re.compile(r"#(?!(begin|end)$)\w.*")


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


@dataclass(frozen=True, kw_only=True)
class Split:
    """
    The rows of a split: as they were read, or as the task reads them.

    Args:
        title: what the rows are, for messages: an option and a name, such as `train_file rows.csv`.
        name: the file's base name, or the dataset's id with its configuration and split.
        rows: the rows.
        fingerprint: a hash of the content of the file or dataset; of rows held out, too, that of the whole.
        class_names: for columns of the kind `ClassLabel` of a dataset, or of lists of it, the names of the classes.
        is_dataset: whether the rows come from a dataset, not from a file.
        is_labelled: whether the rows have labels.
        held_out: the share of the training rows that was held out as these validation rows; 0 if none was.
        shared: how many rows have the texts of a training row.
        left_out: the places of the rows of a dataset that cannot be used, each with what is wrong with it.
    """

    title: str
    name: str
    rows: list[Row]
    fingerprint: str
    class_names: dict[str, list[str]] = field(default_factory=dict)
    is_dataset: bool = False
    is_labelled: bool = False
    held_out: float = 0.0
    shared: int = 0
    left_out: list[str] = field(default_factory=list)

    @functools.cached_property
    def columns(self) -> list[str]:
        """The names of the columns that a row has."""
        return list(dict.fromkeys(itertools.chain(*(row.cells for row in self.rows))))


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_file(
    path: str,
    option: str,
    separator: str = "auto",
    text_column: str = "text",
    columns: Sequence[str] | None = None,
    memory: tables.Memory | None = None,
    title: str = "",
) -> Split:
    """
    Read a whole table, packed or not.

    - `.csv`, `.tsv`: all values are strings.
    - `.jsonl`, `.parquet`: values as they are.
    - `.json`: SQuAD's form, with the columns `id`, `title`, `context`, `question`, `answers` and `is_impossible`; or a
      list of objects, also below `data`.
    - `.conll`, `.conllup`, `.cupt`: a word a line, its tag last, and an empty line after each text: the columns
      `tokens` and `tags`, and of further fields `field 2`, `field 3` and so on. Where the first field numbers the
      words, the word is the second. Or CoNLL-U, also as `.conllu`, with the universal parts of speech as tags.
    - any other text: each line that is not empty is a text.

    Args:
        option: the option that names the file, for messages; "" if it is an argument.
        separator: between the cells of a CSV file, as in `tokenization.tables.table_rows`.
        text_column: the column of the texts in lines.
        columns: those that are needed of a Parquet file; None for all.
        memory: counts what this and other splits take.
        title: what the file is called in messages, in place of its option and name.

    Raises:
        UserError: the file does not exist, cannot be read, is damaged, has another form, or has no rows; or its rows
            take too much memory.
    """
    file = Path(path)
    given = f"{option} {path}".strip()
    if not title:
        title = f"{option} {folders.base_name(path)}" if option else path
    tables.refuse_pipe(path, given, "write its rows to a file, and give that")
    if file.is_dir():
        way_out = "give one of its files, or the folder with --dataset" if option else "give one of its files"
        raise UserError(f"{given}: is a folder; {way_out}")
    if not file.is_file():
        raise UserError(f"{given}: no such file; give a table, or a text in each line")
    memory = memory or tables.Memory()
    way_out = "repair the file; .json is a list of objects (pandas: orient='records'), or SQuAD's form"
    # The messages of `LookupError` and `ValueError` say the way out themselves, those of the system do not.
    with explained(f"{title}: cannot be read", way_out, OSError), explained(title, "", LookupError, ValueError):
        if tables.file_kind(file) in tables.TABLE_KINDS:
            found = tables.table_rows(file, columns, separator)
        elif _is_document(file):
            of_lines = tables.Memory()  # not `memory`: the rows replace the lines
            lines = [line for _, line in of_lines.hold(_numbered_lines(file))]
            with explained("cannot be read", way_out, *READ_ERRORS, TypeError, RecursionError):
                found = list(_rows_of_document(file, lines, title))
        else:
            found = ((place, {text_column: line}) for place, line in _lines_with_text(file, title))
        rows = memory.hold(found)
    if not rows:
        raise UserError(f"{title}: has no rows; give a file with rows")
    return Split(
        title=title,
        name=folders.base_name(path),
        rows=list(itertools.starmap(Row, rows)),
        fingerprint=folders.content_hash(file)[:16],
    )


def _is_document(file) -> bool:
    """Whether a file is read whole, before its first row is known: JSON and CoNLL."""
    return tables.file_kind(file) == "json" or _is_conll(file)


def _is_conll(file) -> bool:
    return tables.suffix_unpacked(file) in (".conll", ".conllu", ".conllup", ".cupt")


def _numbered_lines(file) -> Iterator[tuple[str, str]]:
    """The lines of a text file, each with its place."""
    longest = LONGEST_DOCUMENT if tables.file_kind(file) == "json" else tables.LONGEST_LINE
    for number, line in enumerate(tables.lines_of(file, longest=longest), 1):
        yield f"line {number:,}", line.rstrip("\r\n")


def _lines_with_text(file, title) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not empty, each with its place; says how many others there are."""
    empty = 0
    for place, line in _numbered_lines(file):
        if line.strip():
            yield place, line
        else:
            empty += 1
    if empty:
        what = counted(empty, "empty line is", "empty lines are")
        name = short_name(Path(title).name)
        logger.info(f"{name}: {what} left out, so that rows do not have the numbers of their lines")


def _rows_of_document(file, lines, title) -> Iterator[tuple[str, dict]]:
    """The rows of a file of JSON or CoNLL, each with its place."""
    return _conll_rows(lines, title) if _is_conll(file) else _json_rows("\n".join(lines))


def _json_rows(text) -> Iterator[tuple[str, dict]]:
    """The rows of a list of objects, or of SQuAD's nested form, each with its place."""
    tables.check_values(text)
    return tables.few_columns((f"row {number:,}", row) for number, row in enumerate(_objects_in(text), 1))


def _objects_in(text) -> Iterator[dict]:
    """The rows in a document of JSON."""
    content = json.loads(tables.whole_characters(text))
    for entry in content["data"] if isinstance(content, dict) else content:
        if not isinstance(entry, dict):
            raise TypeError(f"{entry!r:.50} is no object")
        if "paragraphs" not in entry:
            yield dict(entry)
        for paragraph in entry.get("paragraphs", []):
            shared = {"title": entry.get("title", ""), "context": paragraph["context"], "id": ""}
            for question in paragraph["qas"]:
                yield {**shared, **question}


def _conll_rows(lines, title) -> Iterator[tuple[str, dict]]:
    """
    The words and the tags of each text, with the line at which it begins; no tags if a line has one field alone.

    Raises:
        ValueError: a word is empty, or a line has more or fewer fields than the first.
    """
    fields_of = _fields_of_conll
    place_of_word = 1
    if any(CONLL_U_WORD.fullmatch(line) for line in lines):
        fields_of = _fields_of_conll_u
    elif _numbers_words(lines):
        fields_of = _fields_behind_a_number
        place_of_word = 2
    numbered = [(number, fields_of(line)) for number, line in enumerate(lines, 1)]
    for number, fields in numbered:
        if fields and not fields[0]:
            raise ValueError(f"line {number:,}: its word is empty; repair the line")
    kept = _without_comments(numbered)
    if comments := len(numbered) - len(kept):
        kept_lines = {number for number, _ in kept}
        first = next(number for number, _ in numbered if number not in kept_lines)
        what = f"{counted(comments, 'line is', 'lines are')} left out as comments"
        logger.info(shown_line(f"{short_name(Path(title).name)}: {what}, first line {first:,}: {lines[first - 1]}"))
    count = next((len(fields) for _, fields in kept if fields), 0)
    for number, fields in kept:
        if len(fields) not in (0, count):
            raise ValueError(f"line {number:,}: {len(fields)} fields, and {count} in the first; repair the line")
    for has_words, group in itertools.groupby(kept, lambda line: bool(line[1])):
        if has_words:
            text = list(group)
            row = {"tokens": [fields[0] for _, fields in text]}
            for place in range(1, count - 1):
                row[f"field {place + place_of_word}"] = [fields[place] for _, fields in text]
            if count > 1:
                row["tags"] = [fields[-1] for _, fields in text]
            yield f"line {text[0][0]:,}", row


def _without_comments(numbered: list[tuple[int, list[str] | None]]) -> list[tuple[int, list[str]]]:
    """
    The fields of lines, given with their numbers, without comments.

    A comment begins with #, as in CoNLL-U, and is not like the lines of words. For example, among words with 2 fields
    whose tags are O and B-LOC:

        # sent_id = 7    a comment: 4 fields
        # draft          a comment: "draft" is no tag
        # O              the word "#"
        #weir HT         a word: a hashtag, if one with this tag stands directly behind another word

    Args:
        numbered: the fields of a line are [] between texts, and None for what is surely no word.
    """
    # How lines of words look: a line that does not begin with # is surely one.
    surely_words = [fields for _, fields in numbered if fields and fields[0][0] != "#"]
    count = len(surely_words[0]) if surely_words else 0
    tags = {fields[-1] for fields in surely_words}
    for (_, before), (_, fields) in itertools.pairwise(numbered):
        is_behind_a_word = before and before[0][0] != "#"
        if is_behind_a_word and fields and len(fields) == count and HASHTAG.fullmatch(fields[0]):
            tags.add(fields[-1])
    kept = []
    for number, fields in numbered:
        if fields is None:
            continue
        if not fields:
            kept.append((number, fields))
            continue
        is_like_a_word = len(fields) == count and (count == 1 or fields[-1] in tags)
        if fields[0][0] != "#" or is_like_a_word:
            kept.append((number, fields))
    return kept


def _numbers_words(lines) -> bool:
    """Whether the first field of each line numbers the words of its text: 1, 2, 3 ..., as in GermEval's files."""
    longest = 0
    for has_words, text in itertools.groupby(map(_fields_of_conll, lines), bool):
        words = [fields for fields in text if has_words and not fields[0].startswith("#")]
        if any(len(fields) < 2 or not A_PLACE_IN_A_TEXT.fullmatch(fields[0]) for fields in words):
            return False
        numbers = [fields[0] for fields in words if A_WORDS_NUMBER.fullmatch(fields[0])]
        first = int(numbers[0]) if numbers else 0
        if numbers != [str(first + place) for place in range(len(numbers))]:
            return False
        longest = max(longest, len(numbers))
    return longest > 1


def _fields_of_conll(line) -> list[str]:
    """The fields of a line, the word first and the tag last; [] between texts."""
    return [] if line.startswith("-DOCSTART-") else line.split()


def _fields_behind_a_number(line) -> list[str] | None:
    """As `_fields_of_conll`, of a line whose first field is the number of a word; None for other lines."""
    fields = _fields_of_conll(line)
    if not fields:
        return []
    if "\t" in line:  # then a word may have a space in it
        fields = re.split(r"\s*\t\s*", line.strip())
    return fields[1:] if A_WORDS_NUMBER.fullmatch(fields[0]) else None


def _fields_of_conll_u(line) -> list[str] | None:
    """As `_fields_of_conll`: the word, and its universal part of speech; None for a line that is no word."""
    fields = line.split("\t")
    if fields[0].isdigit():
        return fields[1:4:2]  # the second field, FORM, and the fourth, UPOS
    if not fields[0]:
        return []
    return None  # a comment, or no word of its own (1-2 is two words in one, 8.1 not in the text)


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def read_dataset(
    name: str, config: FinetuneConfig, from_files: Container[str], memory: tables.Memory | None = None
) -> dict[str, Split]:
    """
    The splits of a dataset: those that the options name, and for the others those of the usual names that it has.

    Args:
        name: an id on the Hub, or a folder of `save_to_disk` or of data files; `:` and a configuration may follow.
        from_files: the names of the splits that files give in place of the dataset.
        memory: counts what these and other splits take.

    Raises:
        UserError: the dataset cannot be loaded, has no rows in a split, or its rows take too much memory.
    """
    memory = memory or tables.Memory()
    found = _load_dataset(name)
    title = f"dataset {name}"
    shown = local_name(name)
    if hub_datasets.was_in_memory(name):
        title = shown = in_memory.NAME
    named = {split: getattr(config, f"{split}_split") for split in SPLITS if split not in from_files}
    splits = {}
    for split, given in named.items():
        used = given or config.named_data_set.get(split, split)
        if given is None:
            is_used_already = used in named.values()
            share_is_given = split == "validation" and config.validation_share is not None
            if used not in found or is_used_already or share_is_given:
                continue
        if not len(found.get(used, [])):
            raise UserError(
                f"{title}: no rows in split {used!r:.100}; it has {', '.join(found)}: name one with --{split}_split"
            )
        splits[split] = _split_of(found[used], f"{title}, split {used}", f"{shown}, split {used}", memory)
    return splits


def rows_in_memory(data, text_column: str) -> Split:
    """
    The rows of data in memory.

    Args:
        data, text_column: as in `in_memory.as_dataset`.

    Raises:
        UserError: the data are of another kind, have no rows, or take too much memory as Python's values.
    """
    rows = in_memory.as_dataset(data, text_column)
    return _split_of(rows, in_memory.NAME, in_memory.NAME, tables.Memory())


def _load_dataset(name) -> dict:
    """All splits of a dataset, by name."""
    import datasets

    path, configuration = dataset_and_config(name)
    hint = "give an id on the Hub, or a folder of save_to_disk or of data files; --train_file takes a file"
    with hub_datasets.dataset_errors(path, hint):
        if hub_datasets.is_saved_dataset(path):
            return {split or "train": rows for split, rows in hub_datasets.saved_splits(path).items()}
        options = {}
        if hasattr(hub_datasets.dataset_builder(path, configuration).config, "keep_default_na"):
            options = {"keep_default_na": False}  # of CSV files pandas would read the words None, NA and null as empty
        return datasets.load_dataset(path, configuration, **options)


def _split_of(rows, title: str, name: str, memory: tables.Memory) -> Split:
    """The rows of a `datasets.Dataset`; `title` names it in messages, and `name` in the record."""
    with explained(title, "", ValueError):
        held = memory.hold(_dataset_rows(rows, title))
        class_names = {}
        for column, kind in rows.features.items():
            kind = getattr(kind, "feature", kind)  # that of the entries of a list
            if hasattr(kind, "names"):
                class_names[column] = [name_of(of_class, column) for of_class in kind.names]
    cells = [row for _, row in held]
    return Split(
        title=title,
        name=name,
        rows=list(itertools.starmap(Row, held)),
        fingerprint=folders.short_hash(repr(cells)),
        class_names=class_names,
        is_dataset=True,
    )


def _dataset_rows(rows, title: str) -> Iterator[tuple[str, dict]]:
    """The rows of a split of a dataset, each with its place; `title` names it in messages."""
    rows = rows.with_format("arrow")
    told = set()
    for start in range(0, len(rows), DATASET_ROWS):
        block = rows[start : start + DATASET_ROWS]
        for number, row in enumerate(tables.values_of(block, start + 1, title, told), start + 1):
            yield f"row {number:,}", row


# ---------------------------------------------------------------------------------------------------------------------
# Rows to a file


def check_writable(suffix: str, split: Split) -> None:
    """
    Refuse rows that `write_predictions` could not write, before anything is predicted for them.

    Args:
        suffix: of the file, such as `.csv`.
        split: with all of its rows.

    Raises:
        UserError: a column of a Parquet file would have values of several kinds, or objects with too many names; or
            nearly all cells of the table would be empty, as where each row of JSONL has keys of its own.
    """
    if suffix == ".jsonl":  # a row has its own cells alone
        return
    cells = len(split.rows) * len(split.columns)
    filled = sum(len(row.cells) for row in split.rows)
    if cells > max(MOST_CELLS, MOST_CELLS_A_FILLED_ONE * filled):
        raise UserError(
            f"{split.title}: {len(split.columns):,} columns, of which a row has {filled / len(split.rows):.3g}, so "
            f"that a table of the predictions would be all but empty; give the rows the same columns"
        )
    if suffix == ".parquet":
        with explained(split.title, "give the rows the same names, or write .jsonl", ValueError):
            tables.check_names(row.cells for row in split.rows)
        with _one_kind_a_column(split):
            schema = pa.table(_columns_of(split)).schema
            pq.write_table(schema.empty_table(), pa.BufferOutputStream())  # not every kind has a form in Parquet


def _one_kind_a_column(split):
    """Turn PyArrow's errors about the kinds of values into a `UserError`."""
    what = f"{split.title}: a column has values of several kinds, or whole numbers of more than 63 bits"
    return explained(what, "make them one kind, or write .jsonl", pa.ArrowException, OverflowError)


def _columns_of(split) -> dict[str, list]:
    """The cells of a split by column; None where a row has none."""
    columns = {}
    for name in split.columns:
        columns[name] = [row.cells.get(name) for row in split.rows]
    return columns


def write_predictions(path: Path, split: Split, predicted: dict[str, list], is_for_excel: bool = False) -> None:
    """
    Write the rows of a split, and what was predicted for them.

    Args:
        path: ends in `.jsonl` or `.parquet`, which have values as they are; else it is CSV, with lists and dicts as
            JSON. In JSON, which has no form for them, numbers that are not finite become null. Columns with bytes are
            left out of JSONL and CSV.
        predicted: by the names of new columns, a value for each row; None leaves the cell empty.
        is_for_excel: whether CSV has `;` between the cells, decimal commas, a byte order mark at its beginning, and an
            apostrophe before what Excel would take for a formula.

    Raises:
        UserError: a column of a Parquet file has values of several kinds.
    """
    predicted = _renamed(predicted, split.columns)
    if path.suffix == ".parquet":
        with _one_kind_a_column(split):
            pq.write_table(pa.table({**_columns_of(split), **predicted}), path)
    elif path.suffix == ".jsonl":
        _write_jsonl(path, split, predicted)
    else:
        _write_csv(path, split, predicted, is_for_excel)


def _renamed(predicted: dict[str, list], columns: list[str]) -> dict[str, list]:
    """
    The predictions, under names that no column of the rows has.

    Columns of the rows keep their names, also those that an earlier `predict` has left.
    """
    renamed = {}
    for name, values in predicted.items():
        new = name
        if new in columns or new in renamed:
            taken = {*columns, *renamed, *predicted}
            while new in taken:
                new += " (predicted)"
        renamed[new] = values
    return renamed


def _new_cells(predicted: dict[str, list], count: int) -> list[tuple]:
    """The cells that each of `count` rows gets, in the order of the columns."""
    return list(zip(*predicted.values(), strict=True)) if predicted else [()] * count


def _write_jsonl(path, split, predicted) -> None:
    kept = set(_columns_without_bytes(split))
    with path.open("w", encoding="utf-8") as file:
        for row, new in zip(split.rows, _new_cells(predicted, len(split.rows)), strict=True):
            cells = {name: cell for name, cell in row.cells.items() if name in kept}
            cells.update(zip(predicted, new, strict=True))
            file.write(f"{_as_json(cells)}\n")


def _write_csv(path, split, predicted, is_for_excel) -> None:
    kept = _columns_without_bytes(split)
    write_csv(path, _csv_rows(split, kept, predicted), is_for_excel)


def _csv_rows(split, kept, predicted) -> Iterator[list]:
    """The names of the columns, and the cells of each row."""
    yield [*kept, *predicted]
    for row, new in zip(split.rows, _new_cells(predicted, len(split.rows)), strict=True):
        of_row = [row.cells.get(name) for name in kept]
        yield [*of_row, *new]


def write_csv(path: Path, table: Iterable[list], is_for_excel: bool = False) -> None:
    """
    Write the rows of a table as CSV, the names of the columns first.

    Args:
        is_for_excel: as in `write_predictions`.
    """
    with path.open("w", encoding="utf-8-sig" if is_for_excel else "utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=";" if is_for_excel else ",")
        for cells in table:
            writer.writerow(_csv_cells(cells, is_for_excel))


def _csv_cells(cells: list, is_for_excel: bool) -> list:
    """Cells as a CSV file has them, which has no form for lists and dicts."""
    shown = [_as_json(cell) if isinstance(cell, list | dict) else cell for cell in cells]
    return [_excel_cell(cell) for cell in shown] if is_for_excel else shown


def _as_json(value):
    """A value as JSON; dates become texts, numbers that are not finite null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value):
    """A value with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(of_name) for name, of_name in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns_without_bytes(split):
    """The names of the columns of a split in which no cell holds bytes; for each other column, a warning is logged."""
    left_out = set()
    for row in split.rows:
        for name, cell in row.cells.items():
            if any(isinstance(value, bytes) for value in values_in(cell)):
                left_out.add(name)
    for name in sorted(left_out):
        logger.warning(f"left out is column {name!r:.60}, which holds bytes; an output in .parquet has it")
    return [name for name in split.columns if name not in left_out]


def _excel_cell(cell):
    """
    A cell for Excel: numbers with decimal commas; an apostrophe before a text that Excel would compute as a formula,
    which may start programs. A text that is a number, such as "-5", is no formula.
    """
    if isinstance(cell, float):
        return str(cell).replace(".", ",")
    if isinstance(cell, str) and FORMULA.match(cell) and not A_NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell
