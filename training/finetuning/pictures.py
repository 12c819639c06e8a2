"""Pictures of a fine-tuning: curves, confusion matrix, predicted and true numbers, bars."""

from pathlib import Path

import numpy as np

from d2l_bert.messages import shortened
from d2l_bert.model_cards.figures import METRICS
from d2l_bert.model_cards.pictures import draw_bars, one_panel
from d2l_bert.training.finetuning.metrics import precision_recall_f1


# With more classes than this, a confusion matrix has no numbers in its cells: they would be too small to read.
NUMBERED_CLASSES = 30

LABEL_CHARACTERS = 24

# The most groups of bars in a picture.
MOST_GROUPS = 20


def draw_confusion(true, predicted, classes: list[str], rows_name: str, path: Path, unit: str = "rows"):
    """
    Draw a confusion matrix: in each cell the share of the true class, so that rare classes show as clearly as others.

    Args:
        true, predicted: numbers of classes (N,).
        rows_name: the name of the data, for the title.
        unit: what is counted, in the plural.

    Returns:
        The figure.
    """
    from sklearn.metrics import ConfusionMatrixDisplay

    true, predicted = np.asarray(true), np.asarray(predicted)
    size = max(5.0, 2.5 + 0.5 * min(len(classes), NUMBERED_CLASSES))
    figure, panel = one_panel(
        (size, size),
        f"Confusion matrix on {rows_name}\n{len(true):,} {unit}, accuracy {np.mean(true == predicted):.1%}",
    )
    ConfusionMatrixDisplay.from_predictions(
        true,
        predicted,
        labels=range(len(classes)),
        display_labels=[shortened(name, LABEL_CHARACTERS) for name in classes],
        normalize="true",
        include_values=len(classes) <= NUMBERED_CLASSES,
        values_format=".0%",
        cmap="Blues",
        xticks_rotation="vertical" if len(classes) > 2 else "horizontal",
        ax=panel,
    )
    figure.savefig(path, dpi=120)
    return figure


def draw_scatter(true, predicted, rows_name: str, path: Path):
    """Draw predicted numbers (N,) over true numbers (N,) and the line of equal ones; returns the figure."""
    from sklearn.metrics import PredictionErrorDisplay

    figure, panel = one_panel((5, 4.6), f"Predicted and true numbers on {rows_name} ({len(true):,} rows)")
    PredictionErrorDisplay.from_predictions(true, predicted, kind="actual_vs_predicted", ax=panel)
    figure.savefig(path, dpi=120)
    return figure


def draw_counts(counts: dict[str, np.ndarray], title: str, path: Path):
    """
    Draw precision, recall and F1 of each class, the most frequent first, and of all; returns the figure.

    Args:
        counts: for each class how often it was predicted rightly, predicted, and true (3,).
    """
    frequent = sorted(counts.items(), key=lambda item: -item[1][2])
    groups = [("all", sum(counts.values())), *frequent[:MOST_GROUPS]]
    if rest := frequent[MOST_GROUPS:]:
        groups.append((f"{len(rest):,} others", sum(count for _, count in rest)))
    figures = [
        (f"{shortened(name, LABEL_CHARACTERS)} ({count[2]:,})", precision_recall_f1(*count.tolist()))
        for name, count in groups
    ]
    return draw_bars(figures, ("precision", "recall", "F1"), title, path)


def draw_curves(logs: dict[str, list[dict]], kept: str, metric: str, title: str, path: Path):
    """
    Draw the losses and the metric that chooses over the steps, other seeds and rates grey behind; returns the figure.

    Args:
        logs: for each model trained, by its name, the rows of Trainer's log.
        kept: the name of the model that is kept.
        metric: the name of the metric.
    """
    from matplotlib.figure import Figure

    is_share = METRICS[metric][1] == "%"
    panels = {"loss": {"training": "loss", "validation": "eval_loss"}}
    if metric != "loss" and any("eval_loss" in row for row in logs[kept]):
        panels[f"{metric.replace('_', ' ')}{', %' if is_share else ''}"] = {"validation": f"eval_{metric}"}
    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for panel, (name, keys) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        for model in sorted(logs, key=lambda model: model == kept):
            for curve, key in keys.items():
                scale = 100 if is_share and name != "loss" else 1
                points = [(row["step"], scale * row[key]) for row in logs[model] if key in row]
                own, grey = ("C0", "0.6") if curve == "validation" else ("C1", "0.8")
                style = {"color": own, "label": curve} if model == kept else {"color": grey, "linewidth": 0.8}
                marker = "o" if curve == "validation" or len(points) == 1 else ""
                panel.plot(*np.reshape(points, (-1, 2)).T, marker=marker, markersize=3, **style)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("optimizer step")
        if is_share and name != "loss":  # whole, so that one row of few does not look like a collapse
            panel.set_ylim(0, 100)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    return figure
