"""Pictures: training_curves.png, the losses and metrics of a run over its steps; and a confusion matrix."""

import math
import textwrap
from pathlib import Path

import numpy as np

from d2l_bert.messages import shortened
from d2l_bert.model_cards.figures import ON_ROWS
from d2l_bert.pair_tasks import pair_task


CONFUSION_FILE = "confusion_matrix.png"

# With more classes than this, there is no confusion matrix: nothing in it could be read.
MOST_CLASSES_DRAWN = 30

# Names may hold two $, which matplotlib would read as mathematics.
AS_TEXT = {"text.parse_math": False}


def plot_curves(rows: list[dict], path: Path) -> None:
    """
    Draw the rows of a training log into a PNG: a panel for each loss, and a panel for the held-out accuracies.

    Where the sequence length or the batch size changes, there is a dashed line.
    """
    # A run that was resumed with another logging_steps may have written rows of earlier steps after later ones.
    rows = sorted(rows, key=lambda row: row["step"])
    # The axis counts finished steps. A stage whose first step is n begins when n - 1 steps are finished.
    stages = [row["step"] - 1 for row in rows if row.get("event") == "stage"]
    task = pair_task(set().union(*rows))
    losses = {"mlm": "masked language model"}
    if task:
        losses[task.key] = task.name
    panels = {}
    for key, name in losses.items():
        panels[f"{name}: loss (nats)"] = {"training": f"{key}_loss", "held out": f"eval_{key}_loss"}
    panels["held-out accuracy (%)"] = {name: f"eval_{key}_accuracy" for key, name in losses.items()}
    figure = panels_of_curves(rows, panels)
    if task:
        figure.axes[1].axhline(math.log(2), linestyle=":", color="0.5", label="chance (ln 2)")
    for panel in figure.axes:
        for step in stages:
            panel.axvline(step, color="0.4", linestyle="--", linewidth=0.8)
        panel.legend(facecolor="white", edgecolor="none")  # opaque, so that the dashed lines do not cross the text
    figure.savefig(path, dpi=120)


def panels_of_curves(rows: list[dict], panels: dict[str, dict[str, str]]):
    """
    A figure of panels with curves over the steps, without legends.

    Args:
        rows: of a log, in the order of their steps.
        panels: by the title of a panel its curves: by the name of a curve the key of its values in the rows that have
            them. The curve "training" is a line without markers. A title that ends in (%) has shares as percentages.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 / 3 * len(panels), 4), layout="constrained")
    places = np.atleast_1d(figure.subplots(1, len(panels)))
    for panel, (title, curves) in zip(places, panels.items(), strict=True):
        unit = 100 if title.endswith("(%)") else 1
        for name, key in curves.items():
            steps = [row["step"] for row in rows if key in row]
            values = [unit * row[key] for row in rows if key in row]
            style = {"color": "0.7"} if name == "training" else {"marker": "o"}
            panel.plot(steps, values, label=name, **style)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("optimizer step")
        if unit == 100:  # the whole axis, so that one row of few does not look like a collapse
            panel.set_ylim(0, 100)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def plot_finetuning(rows: list[dict], metric: str, title: str, path: Path) -> None:
    """
    Draw the losses of a fine-tuning, and the metric that chooses, over the steps.

    Args:
        rows: those of Trainer's log.
        metric: the name of the metric.
    """
    import matplotlib

    panels = {"loss": {"training": "loss", "validation": "eval_loss"}}
    if metric != "loss" and any("eval_loss" in row for row in rows):
        unit = " (%)" if ON_ROWS[metric].unit == "%" else ""
        panels[metric.replace("_", " ") + unit] = {"validation": f"eval_{metric}"}
    with matplotlib.rc_context(AS_TEXT):
        figure = panels_of_curves(rows, panels)
        figure.suptitle(title, fontsize=10)
        for panel in figure.axes:
            panel.legend(frameon=False, fontsize=9)
        figure.savefig(path, dpi=120)


def plot_confusion(true, predicted, names: list[str], rows_name: str, path: Path) -> str:
    """
    Draw a confusion matrix: in each cell the share of the true class, so that rare classes show as clearly as others.

    Args:
        true, predicted: names of classes (N,), or 0 or 1 for each row and class (N, C).
        names: the classes.
        rows_name: the name of the data, for the title.

    Returns:
        What the picture shows; "" if there is none: for more than `MOST_CLASSES_DRAWN` classes, for several labels of
        a row, and for entities, which may have no type on one side.
    """
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    if len(names) > MOST_CLASSES_DRAWN or np.ndim(true) == 2 or not set(true) <= set(names):
        return ""
    shown = [shortened(name, 24) for name in names]
    caption = f"Confusion matrix on {rows_name}"
    default_font = font_manager.findfont(font_manager.FontProperties())
    drawn = font_manager.get_font(default_font).get_charmap()
    if any(ord(letter) not in drawn for letter in "".join(shown)):  # matplotlib's font has no CJK, among others
        shown = list(range(len(names)))
        caption += "; classes by their numbers in config.json"
    share = np.mean([one == other for one, other in zip(true, predicted, strict=True)])
    side = max(5.0, 2.5 + 0.5 * len(names))  # inches
    with matplotlib.rc_context(AS_TEXT):
        figure = Figure(figsize=(side, side), layout="constrained")
        panel = figure.subplots()
        title = f"Confusion matrix on {rows_name}: {len(true):,} labels, accuracy {share:.1%}"
        # Some ten letters an inch. matplotlib's own wrapping reads two $ as mathematics, whatever `AS_TEXT` says.
        panel.set_title(textwrap.fill(title, round(10 * side)), fontsize=10)
        ConfusionMatrixDisplay.from_predictions(
            true,
            predicted,
            labels=names,
            display_labels=shown,
            normalize="true",
            values_format=".0%",
            cmap="Blues",
            colorbar=False,  # each cell has its number
            xticks_rotation="vertical" if len(names) > 2 else "horizontal",
            ax=panel,
        )
        figure.savefig(path, dpi=120)
    return caption
