"""Pictures: training_curves.png, the losses and accuracies of a run; and bars."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from d2l_bert.pair_tasks import pair_task


def plot_curves(rows: list[dict], path: Path) -> None:
    """
    Draw the rows of a training log into a PNG: a panel for each loss, and a panel for the held-out accuracies.

    Where the sequence length or the batch size changes, there is a dashed line.
    """
    from matplotlib.figure import Figure

    # A run that was resumed with another logging_steps may have written rows of earlier steps after later ones.
    rows = sorted(rows, key=lambda row: row["step"])
    train = [row for row in rows if "learning_rate" in row]
    held_out = [row for row in rows if "eval_mlm_loss" in row]
    # The axis counts finished steps. A stage whose first step is n begins when n - 1 steps are finished.
    stages = [row["step"] - 1 for row in rows if row.get("event") == "stage"]
    task = pair_task(name for row in rows for name in row)
    losses = {"mlm": "masked language model"} | ({task.key: task.name} if task else {})
    figure = Figure(figsize=(11 / 3 * (len(losses) + 1), 4), layout="constrained")
    *loss_panels, accuracies = panels = figure.subplots(1, len(losses) + 1)
    for panel, (key, name) in zip(loss_panels, losses.items(), strict=True):
        measured_at = [row["step"] for row in held_out]
        # NaN leaves a gap in the line where a row has no loss.
        trained = [row.get(f"{key}_loss", math.nan) for row in train]
        panel.plot([row["step"] for row in train], trained, color="0.7", label="training")
        panel.plot(measured_at, [row[f"eval_{key}_loss"] for row in held_out], "o-", label="held out")
        panel.set_title(f"{name}: loss (nats)", fontsize=10)
        if key != "mlm":
            panel.axhline(math.log(2), linestyle=":", color="0.5", label="chance (ln 2)")
        accuracies.plot(measured_at, [100 * row[f"eval_{key}_accuracy"] for row in held_out], "o-", label=name)
    accuracies.set_title("held-out accuracy (%)", fontsize=10)
    accuracies.set_ylim(0, 100)
    for panel in panels:
        for step in stages:
            panel.axvline(step, color="0.4", linestyle="--", linewidth=0.8)
        panel.legend(facecolor="white", edgecolor="none")  # opaque, so that the dashed lines do not cross the text
        panel.set_xlabel("optimizer step")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------------------------------------------------
# Bars


def draw_bars(
    groups: list[tuple],
    names: Sequence[str],
    title: str,
    path: Path,
    errors: np.ndarray,
    chance: float,
) -> None:
    """
    Draw horizontal bars of shares into a PNG.

    Args:
        groups: for each group its name, and the figures from 0 to 1, one for each of `names`.
        errors: the standard errors of the figures (groups, names).
        chance: where to draw a line, the share that guessing gives.
    """
    figure, panel = one_panel((7, 1.8 + 0.24 * len(names) * len(groups)), title)
    values, height = np.array([figures for _, figures in groups]), 0.8 / len(names)
    for number, name in enumerate(names):
        places = np.arange(len(groups)) + (number - (len(names) - 1) / 2) * height
        how = {"xerr": errors[:, number], "error_kw": {"lw": 1}, "label": name}
        bars = panel.barh(places, values[:, number], 0.92 * height, **how)
        panel.bar_label(bars, [f"{value:.1%}" for value in values[:, number]], fontsize=7, padding=2)
    panel.axvline(chance, color="0.2", linestyle="--", linewidth=1, label=f"chance ({chance:.0%})", zorder=0)
    panel.set_yticks(range(len(groups)), [name for name, _ in groups])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def one_panel(size: tuple[float, float], title: str):
    """A figure of this size in inches with one panel, and the panel; a long title is wrapped."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    panel.set_title("\n".join(textwrap.wrap(title, int(10 * size[0]))), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel
