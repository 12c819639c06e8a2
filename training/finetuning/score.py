"""A fine-tuned model on labelled rows: its figures and how sure they are, the confusion of classes, its mistakes."""

import dataclasses
import importlib.metadata
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, explained, result_in_words, shortened
from d2l_bert.model_cards import card, figures, pictures
from d2l_bert.modeling import loading
from d2l_bert.modeling.records import RunRecord
from d2l_bert.tokenization.files import STDIN
from d2l_bert.training import processes
from d2l_bert.training.finetuning import account, intervals, scoring
from d2l_bert.training.finetuning.config import TEXT_TASKS, ScoreConfig
from d2l_bert.training.finetuning.intervals import Estimate
from d2l_bert.training.finetuning.outputs import outputs_of
from d2l_bert.training.finetuning.predict import check_model, read_rows, restored_task
from d2l_bert.training.finetuning.rows import Split, check_writable, write_csv, write_predictions
from d2l_bert.training.finetuning.splits import as_the_task_reads
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)

# The files in the output folder.
FIGURES_FILE = "figures.json"
CONFUSION_TABLE = "confusion.csv"
MISTAKES_FILE = "wrong.csv"

# With more classes than these, the confusion is no table on the screen, or in a file.
MOST_ON_SCREEN = 8
MOST_IN_FILE = 1_000

# The most mistakes in a list on the screen, and the longest name there.
MOST_LISTED = 10
LONGEST_NAME = 16

# What a span of words is called that is no entity on one side.
NO_ENTITY = "no entity"


@dataclasses.dataclass(frozen=True)
class Score:
    """
    What a fine-tuned model scores on labelled rows.

    Args:
        model: its name, as given.
        rows_name: the base name of the file, or what data in memory are called.
        rows: how many rows it has.
        figures: the metrics of the model's task, each with standard error and interval.
        baseline: what a prediction without a model scores on these rows: its `prediction` in words, `figures`, and
            `is_beaten`, whether the model is better; None for a task of words or choices.
        class_of_f1: the class that `f1` is of; None where it is a mean over several, or there is none.
        confusion: a table: the names of its columns, then for each class its name and how many rows of it were
            predicted to be of each class. Of several labels, how often each was right, missed and wrong. [] for a
            task without classes.
        by_class: scikit-learn's `classification_report`; {} for a task without classes.
        wrong: how many rows are not right; None for numbers, which are off by more or less.
        notes: what these rows cannot show, for the user.
        folder: the output folder; None if there is none.
    """

    model: str
    rows_name: str
    rows: int
    figures: dict[str, Estimate] = dataclasses.field(repr=False)
    baseline: dict | None = dataclasses.field(repr=False)
    class_of_f1: str | None
    confusion: list[list[str | int]] = dataclasses.field(repr=False)
    by_class: dict = dataclasses.field(repr=False)
    wrong: int | None
    notes: list[str]
    folder: Path | None

    def __repr__(self) -> str:
        return result_in_words(self, {name: estimate.value for name, estimate in self.figures.items()})

    @property
    def report(self) -> str:
        """What the command prints."""
        return "\n".join(lines_of_score(self))


@processes.restore_host_settings()
def score(name: str, data: Any, config: ScoreConfig) -> Score:
    """
    Measure a model of `finetune` on labelled rows, on all launched processes.

    Args:
        name: the model, a folder or an id on the Hub.
        data: the rows, as in `predict`, with labels.
        config: how to read them, and where to write; its `test_file` is not read.

    Raises:
        UserError: the model was not fine-tuned by this package, an option is not for its task, the file or one of its
            rows cannot be read, a label is missing or unknown to the model, or the output cannot be written. No
            folder is left.
    """
    state = processes.start_processes()
    with processes.together():
        scoring.check_libraries("evaluate --test_file")
        config.check()
        if isinstance(data, str) and data == STDIN and state.num_processes > 1:
            raise UserError("test_file -: one process alone can read the standard input; give a file")
        if config.output_dir:
            folders.check_new_folder(Path(config.output_dir))
        record = loading.read_run_record(name)
        task = labelled_task(name, record, config)
        split = read_labelled_rows(data, task, config)
        for line in account.lines_about_labelled_rows(task, split.columns, split.rows):
            logger.info(line)
        model, tokenizer, _ = loading.load_pretrained(getattr(transformers, task.auto_class), name)
        check_model(name, record, task, model, tokenizer)
        features = task.features(split, tokenizer, record["max_seq_length"])
        logger.info(account.line_of_split(task, "test_file", split, features, record["max_seq_length"]))
    logits = outputs_of(task, model, tokenizer, features.inputs, config.per_device_eval_batch_size).logits
    row_results = task.row_results(split, features, logits, is_finished=True)
    mistakes = task.mistakes(split, features, logits, row_results)
    return processes.on_main(_measure_and_write, name, config, task, split, row_results, mistakes)


def labelled_task(name: str, record: RunRecord, config: ScoreConfig) -> Task:
    """
    The task of a model, as of `restored_task`, which reads labels by the options.

    Raises:
        UserError: as there; or an option about labels is not for this task.
    """
    task = restored_task(name, record, config)
    if task.config.task_type != "multi_label_classification":
        if len(config.label_column) > 1:
            raise UserError("label_column: several columns are for multi_label_classification; name one")
        if config.label_separator is not None:
            raise UserError("label_separator is for a model of multi_label_classification; leave it out")
    if config.label_separator is not None:
        task.config.label_separator = config.label_separator
    with explained(f"{name}: run_config.json", "", ValueError):
        task.read_labels(config.label_column)
    return task


def read_labelled_rows(data: Any, task: Task, config: ScoreConfig) -> Split:
    """
    The rows as the task reads them, with their labels.

    Raises:
        UserError: the data cannot be read; or a row cannot be used, has no label, or one that the model does not know.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given = read_rows(data, task, config, Path(scratch))
    check_writable(Path(MISTAKES_FILE).suffix, given)
    split = as_the_task_reads("evaluated", given, task)
    if split.left_out:  # of a file each is refused at once
        raise UserError(f"{split.title}: {split.left_out[0]}")
    return split


def _measure_and_write(name, config, task, split, row_results, mistakes) -> Score:
    sides = task.sides(split, row_results)
    estimates = in_order(task, task.estimates(split, row_results))
    found = Score(
        model=name,
        rows_name=split.name,
        rows=len(split.rows),
        figures=estimates,
        baseline=baseline_of(task, split, estimates[task.main_metric].value),
        class_of_f1=task.class_of_f1(),
        confusion=confusion_table(sides) if sides else [],
        by_class=scoring.report_by_class(*sides) if sides else {},
        wrong=None if task.problem_type == "regression" else int(np.isfinite(mistakes).sum()),
        notes=notes_on(split),
        folder=Path(config.output_dir) if config.output_dir else None,
    )
    if found.folder:
        with folders.new_folder(found.folder) as partial:
            write_score(partial, found, config, task, split, row_results, mistakes)
    return found


def in_order(task: Task, estimates: dict[str, Estimate]) -> dict[str, Estimate]:
    """The estimates in the order of the tables."""
    return {name: estimates[name] for name in task.metrics_shown}


def baseline_of(task: Task, split: Split, of_model: float) -> dict | None:
    """
    The entry `baseline` of a `Score`.

    The training rows are not at hand: the most frequent class is that of the measured rows, and has the highest
    accuracy of all constant predictions. The usual tag of each word, of the same rows, would know the answers: words
    have no baseline.

    Args:
        of_model: the model's value of the task's main metric.
    """
    if task.config.task_type not in TEXT_TASKS:
        return None
    baseline = task.baseline(split, split, known="measured")
    return task.entry_of_baseline(baseline, task.main_metric, of_model)


def notes_on(split: Split) -> list[str]:
    """What these rows cannot show."""
    notes = []
    if len(split.rows) == 1:
        notes.append("one row shows next to nothing: a bootstrap needs several, and Wilson's interval is wide")
    classes = {row.label for row in split.rows if isinstance(row.label, str)}
    if len(classes) == 1 and len(split.rows) > 1:
        notes.append(
            f"every row has the label {shortened(classes.pop(), LONGEST_NAME)!r}: these rows do not show how well the "
            f"model tells classes apart"
        )
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# The confusion of classes


def confusion_table(sides: scoring.Sides) -> list[list[str | int]]:
    """
    How many rows, words or spans of each class are predicted to be of each class, as in `Score`.

    For example, of entities:

        true \\ predicted   LOC   PER   no entity
        LOC                 12     1           3
        PER                  0    20           2
        no entity            1     0           0
    """
    if np.ndim(sides.true) == 2:
        return _table_of_labels(sides)
    names = list(sides.names)
    shown = list(names)
    pairs = Counter(zip(sides.true, sides.predicted, strict=True))
    if "O" in {*sides.true, *sides.predicted} and "O" not in names:  # spans of entities
        names.append("O")
        shown.append(NO_ENTITY)
        del pairs["O", "O"]
    table = [["true \\ predicted", *shown]]
    for name, of_class in zip(names, shown, strict=True):
        table.append([of_class, *(pairs[name, other] for other in names)])
    return table


def _table_of_labels(sides) -> list[list[str | int]]:
    """Of each label how many rows have it and get it, have it alone, and get it alone."""
    table = [["label", "right", "missed", "wrong"]]
    for name, true, predicted in zip(sides.names, sides.true.T, sides.predicted.T, strict=True):
        both = int((true & predicted).sum())
        table.append([name, both, int(true.sum()) - both, int(predicted.sum()) - both])
    return table


def lines_of_confusion(table: list[list[str | int]]) -> list[str]:
    """The table for the terminal; of many classes the most frequent mistakes."""
    header, *rows = table
    if len(rows) <= MOST_ON_SCREEN or header[0] == "label":
        shown = [[_short(cell) for cell in row] for row in table[: 1 + MOST_LISTED]]
        return figures.aligned(shown)
    mistakes = Counter()
    for number, (name, *counts) in enumerate(rows):
        for other, count in enumerate(counts):
            if other != number and count:
                mistakes[name, header[1 + other]] = count
    listed = [["true", "predicted", "times"]]
    for (true, predicted), count in mistakes.most_common(MOST_LISTED):
        listed.append([_short(true), _short(predicted), f"{count:,}"])
    return figures.aligned(listed)


def _short(cell: str | int) -> str:
    return shortened(cell, LONGEST_NAME) if isinstance(cell, str) else f"{cell:,}"


# ---------------------------------------------------------------------------------------------------------------------
# For the terminal


def lines_of_score(found: Score) -> list[str]:
    """What the command shows."""
    not_right = "" if found.wrong is None else f", of which {found.wrong:,} not right"
    lines = [f"{found.rows_name}: {counted(found.rows, 'row')}{not_right}"]
    table = [["", "value", "standard error", "95 % interval", "by"]]
    for name, estimate in found.figures.items():
        table.append([name, *_cells_of(name, estimate)])
    lines += figures.aligned(table)
    if found.baseline:
        lines.append(f"  {figures.baseline_sentence(found.baseline)}")
    if found.class_of_f1:
        lines.append(f"  f1 is that of the class {found.class_of_f1!r}")
    ways = {estimate.interval for estimate in found.figures.values()}
    if intervals.BOOTSTRAP in ways:
        lines.append(f"  bootstrap: {intervals.DRAWS:,} draws of the rows, seed {intervals.SEED}, BCa")
    if any(estimate.low is None for estimate in found.figures.values()):
        lines.append("  -: every draw of these rows gives the same, so they do not show how far chance goes")
    lines += [f"  {note}" for note in found.notes]
    if found.confusion:
        lines += lines_of_confusion(found.confusion)
    if found.folder:
        lines.append(f"{found.folder}: {MISTAKES_FILE} has the rows that are not right, worst first")
    else:
        lines.append("--output_dir DIR writes the rows that are not right, worst first, and all figures")
    return lines


def _cells_of(name: str, estimate: Estimate) -> list[str]:
    """The cells of a figure in the table."""
    error = "-" if estimate.standard_error is None else figures.shown_metric(name, estimate.standard_error)
    interval = "-"
    if estimate.low is not None:
        interval = f"{figures.shown_metric(name, estimate.low)} to {figures.shown_metric(name, estimate.high)}"
    return [figures.shown_metric(name, estimate.value), error, interval, estimate.interval]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def write_score(folder: Path, found: Score, config: ScoreConfig, task: Task, split: Split, row_results, mistakes):
    """
    Write figures, confusion and mistakes into a folder.

    Args:
        row_results: what the model says about the rows.
        mistakes: of `Task.mistakes` (N,).
    """
    sides = task.sides(split, row_results)
    if 1 < len(found.confusion) <= 1 + MOST_IN_FILE:
        write_csv(folder / CONFUSION_TABLE, found.confusion, config.excel)
    if sides:
        pictures.plot_confusion(*sides, split.name, folder / pictures.CONFUSION_FILE)
    is_wrong = np.isfinite(mistakes)
    worst_first = np.argsort(np.where(is_wrong, -mistakes, np.inf), kind="stable")[: is_wrong.sum()]
    columns = {**task.predictions(split, row_results), task.mistake: np.round(mistakes, 6).tolist()}
    columns = task.in_csv(columns)
    of_mistakes = {name: [values[row] for row in worst_first] for name, values in columns.items()}
    wrong_rows = dataclasses.replace(split, rows=[split.rows[row] for row in worst_first])
    write_predictions(folder / MISTAKES_FILE, wrong_rows, of_mistakes, config.excel)
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "scikit-learn", "scipy")
    content = {
        "model": card.local_name(found.model),
        "rows": {"name": split.name, "rows": found.rows, "fingerprint": split.fingerprint},
        "figures": {figure: dataclasses.asdict(estimate) for figure, estimate in found.figures.items()},
        "baseline": found.baseline,
        "f1_of": found.class_of_f1,
        "wrong": found.wrong,
        "classification_report": found.by_class,
        "notes": found.notes,
        "bootstrap": {"draws": intervals.DRAWS, "seed": intervals.SEED},
        "versions": {library: importlib.metadata.version(library) for library in libraries},
    }
    folders.write_json(folder / FIGURES_FILE, content)
