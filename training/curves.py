"""Draws training_curves.png: losses and accuracies over the steps of a run."""

import math
from pathlib import Path

from d2l_bert.pair_tasks import pair_task
from d2l_bert.training.tracking import kind_of


STAGE_LABEL_POINTS = 7  # font size of the labels at changes of sequence length or batch size


def plot_curves(rows: list[dict], path: Path) -> None:
    """
    Draw the rows of a training log into a PNG: a panel for each loss, and a panel for the held-out accuracies.

    Skipped steps have red marks. Changes of sequence length or batch size have a dashed line with a label.
    """
    from matplotlib.figure import Figure

    # A run that was resumed with another logging_steps may have written rows of earlier steps after later ones.
    rows = sorted(rows, key=lambda row: row["step"])
    train = [row for row in rows if kind_of(row) == "train"]
    held_out = [row for row in rows if "eval_mlm_loss" in row]
    skipped = [row["step"] for row in train if "skipped_steps" in row]
    # The axis counts finished steps. A stage whose first step is n begins when n - 1 steps are finished.
    stages = {row["step"] - 1: _stage_label(row) for row in rows if kind_of(row) == "stage"}
    losses = [("mlm", "masked language model", "masked tokens")]
    if task := pair_task(name for row in rows for name in row):
        losses.append((task.key, task.name, task.name.removesuffix(" prediction")))
    figure = Figure(figsize=(11 / 3 * (len(losses) + 1), 4), layout="constrained")
    panels = figure.subplots(1, len(losses) + 1)
    *loss_panels, accuracies = panels
    for panel, (task_key, name, examples) in zip(loss_panels, losses, strict=True):
        key = f"{task_key}_loss"
        # NaN leaves a gap in the line where a row has no loss.
        panel.plot([r["step"] for r in train], [r.get(key, math.nan) for r in train], color="0.7", label="training")
        panel.plot([r["step"] for r in held_out], [r[f"eval_{key}"] for r in held_out], "o-", label="held out")
        if skipped:
            # The x axis transform has y from 0 at the bottom of the panel to 1 at the top.
            panel.plot(
                skipped, [0.02] * len(skipped), "r^", transform=panel.get_xaxis_transform(), label="steps left out"
            )
        panel.set_title(f"{name}: loss (nats)", fontsize=10)
        percentages = [100 * r[f"eval_{task_key}_accuracy"] for r in held_out]
        accuracies.plot([r["step"] for r in held_out], percentages, "o-", label=examples)
    for panel in loss_panels[1:]:
        panel.axhline(0.6931, linestyle=":", color="0.5", label="chance (ln 2)")
    accuracies.set_title("held-out accuracy (%)", fontsize=10)
    accuracies.set_ylim(0, 100)
    for panel in panels:
        _mark_stages(panel, stages)
        panel.legend(facecolor="white", edgecolor="none")  # opaque, so that the dashed lines do not cross the text
        panel.set_xlabel("optimizer step")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _stage_label(row):
    parts = []
    if row["length"] != row["length_before"]:
        parts.append(f"{row['length_before']} → {row['length']} tokens")
    if row["batch"] != row["batch_before"]:
        parts.append(f"batch {row['batch_before']} → {row['batch']}")
    return ", ".join(parts)


def _mark_stages(panel, stages):
    """Draw a line at each stage, with its label along the line; `stages` has labels by step."""
    for step, label in stages.items():
        panel.axvline(step, color="0.4", linestyle="--", linewidth=0.8)
        place = {"rotation": 90, "va": "top", "ha": "right", "transform": panel.get_xaxis_transform()}
        panel.text(step, 0.98, label, fontsize=STAGE_LABEL_POINTS, color="0.3", **place)
