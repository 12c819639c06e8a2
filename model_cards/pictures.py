"""Pictures: training_curves.png, the losses and accuracies of a run; and a figure with one panel."""

import math
import textwrap
from pathlib import Path

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


def one_panel(size: tuple[float, float], title: str):
    """A figure of this size in inches with one panel, and the panel; a long title is wrapped."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    panel.set_title("\n".join(textwrap.wrap(title, int(10 * size[0]))), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel
