"""Reads JSON files (SQuAD's nested form, lists of rows) and CoNLL's text files into columns."""

import json
from pathlib import Path

from d2l_bert.errors import UserError
from d2l_bert.tokenization.tables import open_unpacked


Columns = dict[str, list]


def read_json(file: Path, label: str) -> tuple[Columns, list[str] | None]:
    """
    The columns of a JSON file: SQuAD's `{"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}`, a list of
    objects, or `{"data": [...]}` with such a list.

    Args:
        label: names the file in messages.

    Returns:
        The columns, and where each row stands, in words. SQuAD's form gives `id`, `title`, `context`, `question`,
        `answers`, and `is_impossible` if the file has it; `answers` is left out if no question has it.

    Raises:
        UserError: the file is not UTF-8, not JSON, has another form, or lacks a value that other rows have.
    """
    with open_unpacked(file) as stream:
        try:
            content = json.loads(stream.read().removeprefix(b"\xef\xbb\xbf"))
        except UnicodeDecodeError as error:
            raise UserError(f"{label}: not UTF-8 text ({error.reason}); convert the file") from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{label}: not JSON ({error}); repair the file, or name a file with a JSON object a line .jsonl"
            ) from None
    entries = content.get("data") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f'{label}: neither a list of objects nor an object with such a list under "data"; convert it to JSONL'
        )
    if not any("paragraphs" in entry for entry in entries):
        return _columns(label, entries, [f"row {number:,}" for number in range(1, len(entries) + 1)])
    rows, places = [], []
    for number, entry in enumerate(entries, 1):
        title = entry.get("title", "")
        for paragraph in _list_in(entry, "paragraphs", f"{label}, article {number:,}"):
            for question in _list_in(paragraph, "qas", f"{label}, article {number:,}, a paragraph"):
                place = f"question {question.get('id', len(rows) + 1)!r}"
                if "context" not in paragraph or "question" not in question:
                    lacking = "context" if "context" not in paragraph else "question"
                    raise UserError(f"{label}, {place}: no value {lacking!r}; add it, as in SQuAD's files")
                row = {"id": question.get("id", ""), "title": title, "context": paragraph["context"]}
                row |= {name: question[name] for name in ("question", "answers", "is_impossible") if name in question}
                rows.append(row)
                places.append(place)
    return _columns(label, rows, places)


def _list_in(entry, name, place):
    value = entry.get(name)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise UserError(f"{place}: no list of objects {name!r}; write it as in SQuAD's files")
    return value


def _columns(label, rows, places):
    for row, place in zip(rows, places, strict=True):
        if row.keys() != rows[0].keys():
            name = min(row.keys() ^ rows[0].keys())
            lacking = place if name in rows[0] else places[0]
            raise UserError(f"{label}, {lacking}: no value {name!r}, which other rows have; add it there")
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}, places


def read_conll(file: Path, label: str) -> tuple[Columns, list[int]]:
    """
    The columns of a text file with a word a line and an empty line after each text, as CoNLL's shared tasks have it.

    The first field of a line is the word, the last one its tag; fields between them are left out. A file with one
    field a line has no tags. Lines that begin with `-DOCSTART-` are left out.

    Args:
        label: names the file in messages.

    Returns:
        The columns `tokens` and `tags`, and the line of the first word of each text.

    Raises:
        UserError: the file is not UTF-8, or a line has another number of fields than the first line.
    """
    texts, lines, fields = [], [], None
    begins_text = True
    with open_unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                parts = line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode().split()
            except UnicodeDecodeError as error:
                raise UserError(f"{label}, line {number}: not UTF-8 text ({error.reason}); convert the file") from None
            if not parts or parts[0] == "-DOCSTART-":
                begins_text = True
                continue
            fields = fields or len(parts)
            if len(parts) != fields:
                raise UserError(
                    f"{label}, line {number}: {len(parts)} fields, and the first line has {fields}; write a word, and "
                    f"its tag last, in every line"
                )
            if begins_text:
                texts.append([])
                lines.append(number)
                begins_text = False
            texts[-1].append(parts)
    columns = {"tokens": [[parts[0] for parts in text] for text in texts]}
    if fields is not None and fields > 1:
        columns["tags"] = [[parts[-1] for parts in text] for text in texts]
    return columns, lines
