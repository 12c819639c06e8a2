"""What `d2l-bert evaluate` has measured, as tables: models side by side, and a row for runs of several seeds."""

import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from d2l_bert import folders, messages
from d2l_bert.model_cards import card, markdown
from d2l_bert.model_cards.blimp import BLIMP, PHENOMENON_OF
from d2l_bert.modeling.records import Metrics
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.records import read_record
from d2l_bert.tokenization import wordpiece
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel


class TableFigure(NamedTuple):
    """
    A figure on a text, in the two tables of this file.

    Args:
        label: its line in the table of models.
        name: its key in the result of `text.evaluate_text` or `text.pseudo_perplexity`.
        format: of its number.
        column: its column in the table of runs; None for a figure that this table leaves out.
    """

    label: str
    name: str
    format: str
    column: str | None = None


def _figures_on_a_text() -> list[TableFigure]:
    """The figures on a text, in the order of the tables."""
    figures = [
        TableFigure("characters in [UNK]", "unknown_share", ".1%"),
        TableFigure("MLM loss (nats a token)", "mlm_loss", ".3f", "MLM loss"),
        TableFigure("MLM perplexity", "perplexity", ",.1f"),
        TableFigure("MLM accuracy", "mlm_accuracy", ".1%", "MLM accuracy"),
        TableFigure("MLM top-5 accuracy", "mlm_top_5_accuracy", ".1%"),
        TableFigure("masked tokens", "masked_tokens", ",d"),
    ]
    tasks = list(PAIR_TASKS.values())
    for task in tasks:
        figures.append(TableFigure(f"{task.short} loss", f"{task.key}_loss", ".3f"))
    for task in tasks:
        figures.append(TableFigure(f"{task.short} accuracy", f"{task.key}_accuracy", ".1%", f"{task.short} accuracy"))
    for task in tasks:
        figures.append(TableFigure(f"{task.short}, one segment alone", f"{task.key}_one_segment_accuracy", ".1%"))
    figures += [
        TableFigure("pairs", "pairs", ",d"),
        TableFigure("single segments", "sequences", ",d"),
        TableFigure("pseudo-perplexity of a word", "pseudo_perplexity", ",.1f", "pseudo-perplexity of a word"),
        TableFigure("  its sentences", "pppl_sentences", ",d"),
        TableFigure("  their words without [UNK]", "pppl_words", ",d"),
        TableFigure("  the tokens of these words", "pppl_tokens", ",d"),
    ]
    return figures


FIGURES_ON_A_TEXT = _figures_on_a_text()


# ---------------------------------------------------------------------------------------------------------------------
# Models side by side


class Line(NamedTuple):
    """A line of the table of models: its label, and a cell for each model."""

    label: str
    cells: list[str]


def table_of_models(content: dict) -> str:
    """
    The figures as text for the terminal, with a dash where a model has no such figure.

    Args:
        content: what `evaluate` returned.
    """
    models = content["models"]
    lines = [
        Line("", [folders.base_name(model["model"]) for model in models]),  # in the order of the command
        Line("parameters", [f"{model['parameters']:,}" for model in models]),
    ]
    texts = [model["text"] for model in models if "text" in model]
    if texts:
        lines += [Line("", []), Line(f"Text: {content['text']}", []), *lines_on_a_text(texts)]
    blimps = [model["blimp"] for model in models if "blimp" in model]
    if blimps:
        lines += [Line("", []), Line(_title_of_pairs(blimps[0]), []), *lines_on_pairs(blimps)]
    widths = [len(cell) for line in lines for cell in line.cells]
    width = max(14, *widths)
    shown = []
    for line in lines:
        cells = "".join(f"  {cell:>{width}}" for cell in line.cells)
        shown.append(f"{line.label:<38}{cells}".rstrip())
    for note in content["notes"]:
        shown.append(f"\n{note}".rstrip())
    return "\n".join(shown)


def lines_on_a_text(texts: list[dict]) -> list[Line]:
    """A line for each figure that a model has on the text."""
    lines = []
    for figure in FIGURES_ON_A_TEXT:
        if any(figure.name in text for text in texts):
            lines.append(Line(f"  {figure.label}", [_cell(figure, text) for text in texts]))
    return lines


def _cell(figure: TableFigure, text: dict) -> str:
    """The figure of a model; a dash if it has none."""
    return format(text[figure.name], figure.format) if figure.name in text else "-"


def lines_on_pairs(blimps: list[dict]) -> list[Line]:
    """A line for the accuracy on all minimal pairs, and one for that on each phenomenon."""
    lines = [
        Line("  characters in [UNK]", [f"{blimp['unknown_share']:.1%}" for blimp in blimps]),
        _line_of_accuracies("all paradigms", blimps),
    ]
    for name in blimps[0]["phenomena"]:
        lines.append(_line_of_accuracies(name, [blimp["phenomena"][name] for blimp in blimps]))
    return lines


def _line_of_accuracies(name: str, figures: list[dict]) -> Line:
    """The accuracies of all models on some pairs, with their standard errors."""
    cells = [f"{100 * each['accuracy']:.1f} ± {100 * each['standard_error']:.1f} %" for each in figures]
    return Line(f"  {name.replace('_', ' ')} ({figures[0]['paradigm_count']})", cells)


def _title_of_pairs(blimp: dict) -> str:
    """The line above the accuracies on minimal pairs."""
    counted = f"{messages.counted(blimp['pairs'], 'pair')} in {blimp['paradigm_count']}"
    of_all = f" of {len(PHENOMENON_OF)}" if blimp["title"] == BLIMP else ""
    paradigms = "paradigm" if blimp["paradigm_count"] == 1 and not of_all else "paradigms"
    return f"{blimp['title']}, score {blimp['score']}: {counted}{of_all} {paradigms}"


# ---------------------------------------------------------------------------------------------------------------------
# A row for runs of several seeds


class Column(NamedTuple):
    """
    A column of the table of runs.

    Args:
        label: above the column.
        source: where its figure is: `text` or `blimp` of a model's results, or `run`, the metrics.json of its own run.
        name: of the figure there.
        format: of its number in Markdown.
        factor: to the unit of the column.
    """

    label: str
    source: str
    name: str
    format: str
    factor: float = 1


OF_A_RUN = (
    Column("words seen, millions", "run", "train_words_seen", ".1f", 1e-6),
    Column("minutes", "run", "train_seconds", ".1f", 1 / 60),
)

DEVIATION = "{}, standard deviation"


class MeasuredRun(NamedTuple):
    """A model in the table of runs: its name there, and its figures by the sources of `Column`."""

    name: str
    figures: dict


def columns_of(figures: dict) -> list[Column]:
    """The columns of the table of runs; that of minimal pairs only where there are such figures."""
    columns = list(OF_A_RUN)
    for figure in FIGURES_ON_A_TEXT:
        if figure.column is not None:
            columns.append(Column(figure.column, "text", figure.name, figure.format))
    if "blimp" in figures:
        columns.append(Column(figures["blimp"]["title"], "blimp", "accuracy", ".1%"))
    return columns


def table_of_runs(models: Sequence[MaskedModel], results: list[dict]) -> list[dict]:
    """
    The rows of a table of models: finished pretraining runs that differ in their seed alone are one row.

    Args:
        results: of each model what `evaluate` has measured.

    Returns:
        For each row `runs`, the model's name, or what the names of several runs have in common; `seeds`, how many runs
        they are; and of each figure the mean, and the standard deviation (n - 1) if there are several seeds.
    """
    groups: dict[object, dict[object, MeasuredRun]] = {}  # for each row the runs, by their seeds
    for number, (model, name, measured) in enumerate(zip(models, names_apart(models), results, strict=True)):
        metrics = read_record(Path(model.name, card.METRICS_FILE), Metrics, allow_nan=True)
        seed = model.record.get("run", {}).get("seed")
        is_finished_run = "run" in model.record and bool(metrics)
        group = identity_but_seed(model) if is_finished_run else number  # a number: a row of its own
        if seed in groups.get(group, {}):
            group = number  # the same run again is no further seed
        groups.setdefault(group, {})[seed] = MeasuredRun(name, {**measured, "run": metrics})
    return [_row_of(list(runs.values())) for runs in groups.values()]


def names_apart(models: Sequence[MaskedModel]) -> list[str]:
    """The last parts of the models' names; the whole names where two have the same last part."""
    short = [folders.base_name(model.name) for model in models]
    return short if len(set(short)) == len(short) else [model.name for model in models]


def identity_but_seed(model: MaskedModel) -> str:
    """
    What decides what a run of `pretrain` has computed, its seed apart: equal for runs that differ in their seed alone.

    These are the options that decide, the architecture, the fingerprints of texts, of the model to start from and of
    the tokenizer. Names of files and folders do not count.
    """
    record = model.record
    options = {name: record["run"].get(name) for name in PretrainConfig().identity() if name != "seed"}
    data = record.get("data", {})
    of_text = {name: data.get(name) for name in ("corpus_fingerprint", "text_fingerprint", "held_out_fingerprint")}
    read = [entry["fingerprint"] for entry in record.get("fingerprints", [])]
    tokenizer = wordpiece.tokenizer_fingerprint(model.tokenizer)
    return json.dumps([options, record.get("architecture"), of_text, read, tokenizer], sort_keys=True)


def _row_of(runs: list[MeasuredRun]) -> dict:
    """The row of runs that differ in their seed alone, or of one model."""
    row = {"runs": _name_of([run.name for run in runs]), "seeds": len(runs)}
    for column in columns_of(runs[0].figures):
        values = []
        for run in runs:
            figures = run.figures.get(column.source, {})
            if column.name in figures:
                values.append(column.factor * figures[column.name])
        if values:
            row[column.label] = statistics.fmean(values)
        if len(values) > 1:
            row[DEVIATION.format(column.label)] = statistics.stdev(values)
    return row


def _name_of(names: list[str]) -> str:
    """The beginning that the names of runs share, without a number at its end; all names if they share none."""
    if len(names) == 1:
        return names[0]
    in_common = re.sub(r"[-_. ]*\d*$", "", os.path.commonprefix(names))
    return in_common or ", ".join(names)


def as_markdown(table: list[dict], results: list[dict], notes: Sequence[str]) -> str:
    """
    The table of runs as Markdown, with deviations in brackets, and the notes below it.

    Args:
        table: of `table_of_runs`.
        results: of each model what `evaluate` has measured.
        notes: of `evaluate.notes_on`.
    """
    columns = [column for column in columns_of(results[0]) if any(column.label in row for row in table)]
    lines = [
        ["runs", "seeds", *(markdown.cell(column.label) for column in columns)],
        ["---"] * (len(columns) + 2),
    ]
    for row in table:
        cells = [_markdown_cell(row, column) for column in columns]
        lines.append([markdown.cell(row["runs"]), str(row["seeds"]), *cells])
    shown = [f"| {' | '.join(cells)} |\n" for cells in lines]
    shown += [f"\n{note}\n" for note in notes]
    return "".join(shown)


def _markdown_cell(row: dict, column: Column) -> str:
    """A mean with its deviation in brackets, if it has one; "" where the row has no such figure."""
    if column.label not in row:
        return ""
    mean = format(row[column.label], column.format)
    deviation = row.get(DEVIATION.format(column.label))
    return mean if deviation is None else f"{mean} ({deviation:{column.format}})"
