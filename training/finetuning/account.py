"""What was read of the rows, for a person to look at before the training: some lines, and all of it in a file."""

import itertools
import unicodedata
from collections import Counter
from pathlib import Path

from d2l_bert import folders
from d2l_bert.messages import counted, shortened
from d2l_bert.tokenization.account import ACCOUNT_FILE
from d2l_bert.tokenization.coverage import remarks_on_damage
from d2l_bert.tokenization.rules import contents_of, count_words
from d2l_bert.training.finetuning.cells import LONGEST_SHOWN, shown_line, visible
from d2l_bert.training.finetuning.features import Features
from d2l_bert.training.finetuning.rows import Row, Split
from d2l_bert.training.finetuning.tasks import Task


# The most classes in a line: half of them the most frequent, half the rarest.
MOST_CLASSES = 10

# Of a class the most characters in a line; of a text in `ACCOUNT_FILE`.
LONGEST_NAME = 20
LONGEST_TEXT = 2_000

# The most rows, doubles and contradictions that `ACCOUNT_FILE` lists.
MOST_EXAMPLES = 5
MOST_LISTED = 50


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def lines_about_rows(task: Task, splits: dict[str, Split]) -> list[str]:
    """
    What a person sees at a glance, and a program cannot know to be wrong: columns, labels, a row, doubled rows.

    Returns:
        At most seven lines, and one for each split with rows that were left out.
    """
    lines = lines_about_labelled_rows(task, splits["train"].columns, rows_as_given(splits))
    for name, split in splits.items():
        if split.left_out:
            what = counted(len(split.left_out), "row is", "rows are")
            lines.append(shown_line(f"{name}: {what} left out: {split.left_out[0]}"))
    return lines


def lines_about_labelled_rows(task: Task, columns: list[str], rows: list[Row]) -> list[str]:
    """As `lines_about_rows`, of rows that have these columns; at most six lines."""
    lines = [line_of_columns(task, columns), line_of_labels(task, rows)]
    remarks = task.remarks(rows)
    if not remarks and (alike := names_alike(task.classes)):
        groups = " | ".join(_quoted(names) for names in alike)
        remarks = [f"differ by case, white space or unseen signs alone: {groups}"]
    lines += [line_of_row(task, rows[0]), *remarks]
    doubled = doubled_rows(rows)
    several = texts_with_several_labels(rows)
    if doubled or several:
        line = f"{counted(len(doubled), 'row')} with texts and label of an earlier one"
        if several:
            line += f"; {counted(len(several), 'text')} with several labels, as in {_places(several[0])}"
        lines.append(line)
    lines += damage_in(rows)[:1]
    return list(map(shown_line, lines))


def line_of_split(task: Task, name: str, split: Split, features: Features, max_seq_length: int) -> str:
    """How many rows a split has, and what becomes of those longer than `max_seq_length`."""
    if split.held_out:
        rows = counted(len(split.rows), "more row")
        note = f"; {features.note}" if features.note else ""
        what = f"{rows}, held out by seed {task.config.seed} to choose the model{note}"
        return shown_line(f"{name}: {what}; --validation_share 0 holds out none")
    rows = counted(len(split.rows), "row")
    labels = "" if split.is_labelled else ", without labels"
    shared = f", {split.shared:,} of them with the texts of a training row" if split.shared else ""
    note = features.note or f"none is longer than {max_seq_length} tokens"
    return shown_line(f"{name}: {rows} of {shortened(split.name, 40)}{labels}{shared}; {note}")


def lines_about_new_rows(task: Task, split: Split) -> list[str]:
    """What `predict` reads: the columns, and the first row with a text."""
    lines = [line_of_columns(task, split.columns), line_of_row(task, split.rows[0]), *task.remarks(split.rows)]
    return list(map(shown_line, lines))


def line_of_columns(task: Task, names: list[str]) -> str:
    """
    The columns that are read, those of texts before that of labels, and the others.

    Args:
        names: of all columns.
    """
    read = set(task.more_columns)
    of_texts = []
    of_labels = ""
    for option, columns in task.columns.items():
        if option != "label_column":
            of_texts.append(_quoted(columns))
        elif task.reads_labels:
            of_labels = f" -> {_quoted(columns)}"
        else:
            continue
        read.update(columns)
    others = [name for name in names if name not in read]
    not_read = f"; not read: {_quoted(others)}" if others else ""
    return f"columns: {' | '.join(of_texts)}{of_labels}{not_read}"


def _quoted(names: list[str]) -> str:
    """Names in quotes, with an escape for each sign that is not seen."""
    return ", ".join(repr(shortened(name, 40)) for name in names)


def line_of_labels(task: Task, rows: list[Row]) -> str:
    """The classes with their numbers of rows, of tags with those of words, the most frequent and the rarest."""
    if not task.classes:
        return task.about_labels(rows)
    counts = counts_of_classes(task, rows)
    line = f"{len(counts):,} {task.about_classes()}: "
    for half in range(MOST_CLASSES // 2, 0, -1):
        shown = [f"{name!r} {count:,}" for name, count in _shortened_names(counts[:half])]
        if len(counts) > 2 * half:
            shown.append("...")
        rarest = counts[max(half, len(counts) - half) :]
        shown += [f"{name!r} {count:,}" for name, count in _shortened_names(rarest)]
        if len(line) + len(", ".join(shown)) <= LONGEST_SHOWN:
            break
    return line + ", ".join(shown)


def _shortened_names(counts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(shortened(name, LONGEST_NAME), count) for name, count in counts]


def line_of_row(task: Task, row: Row) -> str:
    """A row as the model will read it: its texts, each cut to an equal share of the line, and its label."""
    label = task.shown_label(row) if task.reads_labels else ""
    behind = f" -> {shortened(visible(label[:LONGEST_SHOWN]), 30)}" if label else ""
    begin = f"{row.place} is read as: "
    texts = [visible(text[:LONGEST_SHOWN]) for text in task.shown_texts(row)]
    between = " | "
    left = LONGEST_SHOWN - len(begin) - len(behind) - len(between) * (len(texts) - 1)
    shown = [shortened(text, left // len(texts)) for text in texts]
    return begin + between.join(shown) + behind


# ---------------------------------------------------------------------------------------------------------------------
# What is counted


def rows_as_given(splits: dict[str, Split]) -> list[Row]:
    """The training rows, also those that are held out."""
    validation = splits.get("validation")
    held_out = validation.rows if validation and validation.held_out else []
    return [*splits["train"].rows, *held_out]


def counts_of_classes(task: Task, rows: list[Row]) -> list[tuple[str, int]]:
    """The classes, each with the number of rows that have it, or of words; the most frequent first."""
    counts = Counter(dict.fromkeys(task.classes, 0))
    for row in rows:
        counts.update(task.names_of(row))
    return counts.most_common()


def names_alike(names: list[str]) -> list[list[str]]:
    """The names that are equal without case, white space and invisible signs, and in the forms of NFKC."""
    groups = {}
    for name in names:
        signs = unicodedata.normalize("NFKC", name).casefold()
        seen = "".join(sign for sign in signs if sign.isprintable() and not sign.isspace())
        groups.setdefault(seen, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def doubled_rows(rows: list[Row]) -> list[tuple[Row, Row]]:
    """The rows with the texts and the label of an earlier one, behind that one."""
    first = {}
    doubled = []
    for row in rows:
        earlier = first.setdefault((row.texts, repr(row.label)), row)
        if earlier is not row:
            doubled.append((earlier, row))
    return doubled


def texts_with_several_labels(rows: list[Row]) -> list[list[Row]]:
    """For each text, or texts of a pair, with several labels: the first row with each of the labels."""
    by_texts = {}
    for row in rows:
        by_texts.setdefault(row.texts, {}).setdefault(repr(row.label), row)
    return [list(by_label.values()) for by_label in by_texts.values() if len(by_label) > 1]


def damage_in(rows: list[Row]) -> list[str]:
    """A line for each way in which the words of the texts were damaged before, as by a wrong encoding."""
    words = count_words(itertools.chain.from_iterable(row.texts for row in rows))
    return [f"texts: {remark}" for remark in remarks_on_damage(contents_of(words))]


def _places(rows: list[Row]) -> str:
    return " and ".join(row.place for row in rows[:3])


# ---------------------------------------------------------------------------------------------------------------------
# The file


def write_account(folder: Path, task: Task, splits: dict[str, Split]) -> None:
    """Write `ACCOUNT_FILE`, which has what the lines have no room for, to the folder of a run."""
    with folders.atomic_file(folder / ACCOUNT_FILE) as partial:
        partial.write_text("\n".join(whole_account(task, splits)) + "\n", encoding="utf-8", errors="replace")


def whole_account(task: Task, splits: dict[str, Split]) -> list[str]:
    """The lines of `ACCOUNT_FILE`."""
    rows = rows_as_given(splits)
    lines = ["What d2l-bert finetune has read. It has texts of the rows: d2l-bert publish leaves it here.", ""]
    lines += [line_of_columns(task, splits["train"].columns), *task.remarks(rows), *damage_in(rows), ""]
    if task.classes:
        lines.append(f"{task.about_classes()}, with the number of each in {', '.join(splits)}:")
        by_split = [dict(counts_of_classes(task, split.rows)) for split in splits.values()]
        for name, _ in counts_of_classes(task, rows):
            lines.append(f"  {name!r}: {', '.join(f'{counts[name]:,}' for counts in by_split)}")
        for alike in names_alike(task.classes):
            lines.append(f"  alike: {', '.join(map(repr, alike))}")
    else:
        lines.append(task.about_labels(rows))
    doubled = doubled_rows(rows)
    lines += ["", f"rows with texts and label of an earlier one: {len(doubled):,}"]
    lines += [f"  {earlier.place} and {row.place}" for earlier, row in doubled[:MOST_LISTED]]
    several = texts_with_several_labels(rows)
    lines += ["", f"texts with several labels: {len(several):,}"]
    for of_text in several[:MOST_LISTED]:
        lines.append("  " + "; ".join(f"{row.place}: {_whole_row(task, row, True)}" for row in of_text))
    for name, split in splits.items():
        lines += ["", f"{name}: {counted(len(split.rows), 'row')} of {split.name}"]
        for row in split.rows[:MOST_EXAMPLES]:
            lines.append(f"  {row.place}: {_whole_row(task, row, split.is_labelled)}")
        if split.left_out:
            lines.append(f"  left out: {len(split.left_out):,}")
        lines += [f"  {visible(reason)}" for reason in split.left_out[:MOST_LISTED]]
    return lines


def _whole_row(task, row, is_labelled) -> str:
    """A row with its label, of its texts up to `LONGEST_TEXT` characters."""
    texts = [visible(text[:LONGEST_TEXT]) for text in task.shown_texts(row)]
    label = task.shown_label(row) if is_labelled else ""
    return " | ".join(texts) + (f" -> {visible(label[:LONGEST_TEXT])}" if label else "")
