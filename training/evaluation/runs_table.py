"""A table of pretraining runs: those that differ in their seed alone are one row, with means and deviations."""

import csv
import io
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from d2l_bert import folders
from d2l_bert.model_cards.card import METRICS_FILE
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel


# The figures by their columns: where `evaluate` has them, and their format in Markdown.
FIGURES = {
    "MLM loss": ("text", "mlm_loss", ".3f"),
    "MLM accuracy": ("text", "mlm_accuracy", ".1%"),
    **{f"{task.short} accuracy": ("text", f"{task.key}_accuracy", ".1%") for task in PAIR_TASKS.values()},
    "pseudo-perplexity of a word": ("text", "pseudo_perplexity", ",.1f"),
    "BLiMP": ("blimp", "accuracy", ".1%"),
}

# The figures of the runs themselves: the name in metrics.json, what it is divided by, and the format.
OF_THE_RUN = {"words seen, millions": ("train_words_seen", 1e6, ".1f"), "minutes": ("train_seconds", 60, ".1f")}

DEVIATION = "{}, standard deviation"


def table_of_runs(models: Sequence[MaskedModel], results: list[dict]) -> list[dict]:
    """
    The rows of the table.

    Args:
        models: those in a folder that a run of `pretrain` has left are in the table.
        results: of each model what `evaluate` has measured.

    Returns:
        For each group of runs `runs`, what their names have in common; `seeds`, how many they are; and of each figure
        the mean, and the standard deviation (n - 1) if there are several seeds.
    """
    groups = {}
    for model, measured in zip(models, results, strict=True):
        metrics = folders.read_json(Path(model.name, METRICS_FILE))
        if "run" in model.record and metrics:
            same = {**PretrainConfig(**model.record["run"]).identity(), "seed": None, **model.record["architecture"]}
            found = {label: metrics[name] / unit for label, (name, unit, _) in OF_THE_RUN.items()}
            found |= {label: measured.get(part, {}).get(name) for label, (part, name, _) in FIGURES.items()}
            groups.setdefault(json.dumps(same), []).append((folders.base_name(model.name), found))
    rows = []
    for runs in groups.values():
        names, figures = zip(*runs, strict=True)
        row = {"runs": re.sub(r"[-_. ]*\d*$", "", os.path.commonprefix(names)) or names[0], "seeds": len(runs)}
        for label in (label for label, value in figures[0].items() if value is not None):
            values = [found[label] for found in figures]
            row |= {label: statistics.fmean(values)}
            row |= {DEVIATION.format(label): statistics.stdev(values)} if len(values) > 1 else {}
        rows.append(row)
    return rows


def as_csv(rows: list[dict]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(rows: list[dict]) -> str:
    """The table as Markdown, with deviations in brackets."""
    formats = {label: form for label, (*_, form) in {**OF_THE_RUN, **FIGURES}.items()}
    labels = [label for label in formats if any(label in row for row in rows)]
    lines = [["runs", "seeds", *labels], ["---"] * (len(labels) + 2)]
    for row in rows:
        lines.append([row["runs"], str(row["seeds"])])
        for label in labels:
            deviation = row.get(DEVIATION.format(label))
            shown = f"{row[label]:{formats[label]}}" if label in row else ""
            lines[-1].append(shown if deviation is None else f"{shown} ({deviation:{formats[label]}})")
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
