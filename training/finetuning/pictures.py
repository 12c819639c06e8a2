"""Pictures of a fine-tuning: curves, confusion matrix, predicted and true numbers."""

from pathlib import Path

import numpy as np

from d2l_bert.model_cards.finetuned import METRICS


# With more classes than this, a confusion matrix has no numbers in its cells: they would be too small to read.
NUMBERED_CLASSES = 30

LABEL_CHARACTERS = 24


def draw_confusion(true, predicted, classes: list[str], rows_name: str, path: Path, unit: str = "rows"):
    """
    Draw a confusion matrix, with true classes in rows, predicted classes in columns and counts in the cells.

    The colour of a cell is its share of the row, so that rare classes show as clearly as frequent ones.

    Args:
        true, predicted: numbers of classes (N,).
        rows_name: the name of the data, for the title.
        unit: what is counted, in the plural.
    """
    from matplotlib.figure import Figure

    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (np.asarray(true), np.asarray(predicted)), 1)
    totals = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    names = [shortened(name) for name in classes]
    longest = max(map(len, names))
    size = max(3.2, 0.55 * len(classes)) if len(classes) <= NUMBERED_CLASSES else 12
    figure = Figure(figsize=(size + 2.2 + 0.08 * longest, size + 1.4 + 0.08 * longest), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=panel, shrink=0.8, label=f"share of the true class's {unit}")
    bar.ax.yaxis.set_major_formatter("{x:.0%}")
    turned = longest > 4 and len(classes) > 2
    panel.set_xticks(range(len(classes)), names, rotation=90 if turned else 0)
    panel.set_yticks(
        range(len(classes)), [f"{name} ({total:,})" for name, total in zip(names, totals[:, 0], strict=True)]
    )
    panel.set_xlabel("predicted class")
    panel.set_ylabel(f"true class ({unit})")
    if len(classes) <= NUMBERED_CLASSES:
        small = 7 if len(classes) > 8 else 9
        for row, column in np.ndindex(counts.shape):
            share = f"\n{shares[row, column]:.0%}" if len(classes) <= 12 else ""
            panel.text(
                column,
                row,
                f"{counts[row, column]:,}{share}",
                ha="center",
                va="center",
                fontsize=small,
                color="white" if shares[row, column] > 0.55 else "0.15",
            )
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    panel.set_title(
        f"Confusion matrix on {rows_name}:\n{counts.sum():,} {unit}, accuracy {accuracy:.1%}", fontsize=10, wrap=True
    )
    figure.savefig(path, dpi=120)
    return figure


def draw_scatter(true, predicted, rows_name: str, path: Path):
    """
    Draw predicted numbers over true numbers, with the line on which they are equal; returns the figure.

    Args:
        true, predicted: numbers (N,).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.6), layout="constrained")
    panel = figure.subplots()
    panel.scatter(true, predicted, s=12, alpha=0.5, linewidths=0)
    ends = [min(np.min(true), np.min(predicted)), max(np.max(true), np.max(predicted))]
    panel.plot(ends, ends, linestyle=":", color="0.4", label="predicted = true")
    panel.set_xlabel("true number")
    panel.set_ylabel("predicted number")
    panel.legend(frameon=False)
    panel.grid(alpha=0.3)
    panel.set_title(f"Predicted and true numbers on {rows_name} ({len(true):,} rows)", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return figure


def draw_curves(attempts: list[dict], kept: int, metric: str, title: str, path: Path):
    """
    Draw the losses and the metric that chooses over the steps, other seeds and rates grey behind; returns the figure.

    Args:
        attempts: for each model trained, `name` and `log`, the rows of Trainer's log.
        kept: the number of the attempt whose model is kept.
        metric: the name of the metric.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    is_share = METRICS[metric][1] == "%"
    has_validation = any("eval_loss" in row for row in attempts[kept]["log"])
    panels = [("loss", {"training": "loss", "validation": "eval_loss"})]
    if has_validation and metric != "loss":
        name = f"{metric.replace('_', ' ')} on validation rows{', %' if is_share else ''}"
        panels.append((name, {"validation": f"eval_{metric}"}))
    figure = Figure(figsize=(9 if len(panels) > 1 else 5, 4.2), layout="constrained")
    last_step = max((row["step"] for attempt in attempts for row in attempt["log"]), default=1)
    labelled = {}
    for panel, (name, keys) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for number in [*(number for number in range(len(attempts)) if number != kept), kept]:
            is_kept = number == kept
            for kind, key in keys.items():
                scale = 100 if is_share and key == f"eval_{metric}" else 1
                points = [(row["step"], scale * row[key]) for row in attempts[number]["log"] if key in row]
                if points:
                    label, style = kind if is_kept else f"{kind}, other seeds and rates", _curve_style(kind, is_kept)
                    if len(points) == 1:
                        style.setdefault("marker", ".")  # there is no line to see
                    labelled[label] = panel.plot(*zip(*points, strict=True), **style)[0]
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.set_xlim(0, 1.03 * last_step)
        if is_share and name != "loss":  # whole, so that one row of few does not look like a collapse
            panel.set_ylim(0, 100)
        panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if labelled:  # a run of few steps has logged no loss
        names = sorted(labelled, key=lambda label: "other" in label)
        lines = [labelled[label] for label in names]
        figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    return figure


def _curve_style(kind, is_kept):
    """The style of a curve: validation has dots; the kept attempt is thick, coloured and in front, others are grey."""
    style = {"marker": "o", "markersize": 4 if is_kept else 2.5} if kind == "validation" else {}
    if is_kept:
        return {**style, "linewidth": 1.6, "zorder": 3, "color": "C0" if kind == "validation" else "C1"}
    return {**style, "linewidth": 0.8, "zorder": 1, "color": "0.6" if kind == "validation" else "0.8"}


def shortened(name: str) -> str:
    """A name for the axis of a picture."""
    return name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}…"
