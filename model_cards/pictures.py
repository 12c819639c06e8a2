"""Pictures: training_curves.png, the losses and accuracies of a run; and panels with curves over its steps."""

import math
from pathlib import Path

import numpy as np

from d2l_bert.pair_tasks import pair_task


def plot_curves(rows: list[dict], path: Path) -> None:
    """
    Draw the rows of a training log into a PNG: a panel for each loss, and a panel for the held-out accuracies.

    Where the sequence length or the batch size changes, there is a dashed line.
    """
    # A run that was resumed with another logging_steps may have written rows of earlier steps after later ones.
    rows = sorted(rows, key=lambda row: row["step"])
    # The axis counts finished steps. A stage whose first step is n begins when n - 1 steps are finished.
    stages = [row["step"] - 1 for row in rows if row.get("event") == "stage"]
    task = pair_task(name for row in rows for name in row)
    losses = {"mlm": "masked language model"} | ({task.key: task.name} if task else {})
    panels = {
        f"{name}: loss (nats)": {"training": f"{key}_loss", "held out": f"eval_{key}_loss"}
        for key, name in losses.items()
    }
    accuracies = {name: f"eval_{key}_accuracy" for key, name in losses.items()}
    figure = panels_of_curves(rows, {**panels, "held-out accuracy (%)": accuracies})
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
    for panel, (title, curves) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        unit = 100 if title.endswith("(%)") else 1
        for name, key in curves.items():
            points = np.array([(row["step"], unit * row[key]) for row in rows if key in row]).reshape(-1, 2)
            panel.plot(*points.T, label=name, **({"color": "0.7"} if name == "training" else {"marker": "o"}))
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("optimizer step")
        if unit == 100:  # the whole axis, so that one row of few does not look like a collapse
            panel.set_ylim(0, 100)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
