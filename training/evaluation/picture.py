"""Draws accuracies on BLiMP: a bar for each model and phenomenon, with error bars and the line of chance."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from d2l_bert.model_cards.figures import SCORES


OVERALL = "all paradigms"

BAR_INCHES, GAP_INCHES = 0.2, 0.2

# On the axis of accuracies, in percent: the accuracy of a coin, and the most that a number beside a bar takes up.
CHANCE, NUMBER_WIDTH = 50, 6


def plot_phenomena(results: Sequence[tuple[str, dict]], path: Path) -> None:
    """
    Draw the accuracies by phenomenon, and over all paradigms, into a PNG.

    Args:
        results: for each model its name, and its results (`blimp.blimp_results`, with `score`). All models have the
            same phenomena.
    """
    from matplotlib.figure import Figure

    _, first = results[0]
    phenomena = [OVERALL, *first["phenomena"]]
    group = len(results) * BAR_INCHES + GAP_INCHES  # inches on the page are units of the y axis
    figure = Figure(figsize=(8.5, 1.9 + group * len(phenomena)), layout="constrained")
    panel = figure.subplots()
    for number, (name, blimp) in enumerate(results):
        figures = [blimp, *(blimp["phenomena"][phenomenon] for phenomenon in phenomena[1:])]
        places = [group * row + BAR_INCHES * (number + 0.5) for row in range(len(phenomena))]
        accuracies, errors = ([100 * entry[key] for entry in figures] for key in ("accuracy", "standard_error"))
        panel.barh(places, accuracies, 0.9 * BAR_INCHES, label=textwrap.shorten(name, 60), color=f"C{number}")
        panel.errorbar(accuracies, places, xerr=errors, fmt="none", ecolor="0.2", elinewidth=1, capsize=2)
        for place, accuracy, error in zip(places, accuracies, errors, strict=True):
            start = accuracy + error + 0.8
            if CHANCE - NUMBER_WIDTH < start < CHANCE + 1:  # the line of chance would cross the number
                start = CHANCE + 1
            panel.text(start, place, f"{accuracy:.1f}", fontsize=7, verticalalignment="center")
    panel.axvline(CHANCE, color="0.2", linestyle="--", linewidth=1, label=f"chance ({CHANCE} %)")
    panel.axhline(group - GAP_INCHES / 2, color="0.6", linewidth=0.8)
    counts = [first["paradigm_count"], *(first["phenomena"][name]["paradigm_count"] for name in phenomena[1:])]
    labels = [f"{name.replace('_', ' ')} ({count})" for name, count in zip(phenomena, counts, strict=True)]
    panel.set_yticks([group * row + BAR_INCHES * len(results) / 2 for row in range(len(phenomena))], labels)
    panel.set_ylim(group * len(phenomena) - GAP_INCHES / 2, -GAP_INCHES / 2)  # the first row at the top
    panel.set_xlim(0, 105)
    panel.set_xticks(range(0, 101, 10))
    panel.set_xlabel("accuracy (%); the error bars are one standard error")
    panel.set_ylabel("phenomenon (number of paradigms)")
    figure.suptitle(
        "BLiMP: how often a model prefers the grammatical sentence of a minimal pair\n"
        f"{first['pairs']:,} pairs in {first['paradigm_count']} of 67 paradigms; {SCORES[first['score']]}",
        fontsize=10,
        x=0.01,
        horizontalalignment="left",
    )
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(results) + 1), frameon=False, fontsize=9)
    figure.savefig(path, dpi=120, format="png")
