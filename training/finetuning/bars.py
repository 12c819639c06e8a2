"""Pictures of bars: entities by type, labels, answers by question, the probabilities of right choices."""

import textwrap
from collections import Counter
from pathlib import Path

import numpy as np

from d2l_bert.training.finetuning.pictures import shortened
from d2l_bert.training.finetuning.span_metrics import precision_recall_f1


# The most groups that a picture shows; the others stand together in one.
MOST_GROUPS = 20

COLORS = ("#9ecae1", "#fdae6b", "#08519c")


def draw_entity_bars(counts: dict[str, Counter], rows_name: str, path: Path):
    """
    Draw precision, recall and F1 of each type of entity, the most frequent first, and of all; returns the figure.

    Args:
        counts: as of `span_metrics.entity_counts`.
        rows_name: the name of the data, for the title.
    """
    title = f"Entities on {rows_name}: precision, recall and F1 by type (number of true entities)"
    return _draw_counts(counts, "types", title, path)


def draw_label_bars(counts: dict[str, Counter], rows_name: str, path: Path):
    """
    Draw precision, recall and F1 of each label, the most frequent first, and of all; returns the figure.

    Args:
        counts: counters `right`, `predicted` and `gold` of rows by label.
    """
    title = f"Labels on {rows_name}: precision, recall and F1 by label (number of rows with the label)"
    return _draw_counts(counts, "labels", title, path)


def _draw_counts(counts, unit, title, path):
    kinds = [kind for kind, _ in (counts["gold"] + counts["predicted"]).most_common()]
    # A list of pairs, because a type may be called "all".
    groups = [(f"all ({counts['gold'].total():,})", [counter.total() for counter in counts.values()])]
    groups += [
        (f"{shortened(kind) or 'entity'} ({counts['gold'][kind]:,})", [counter[kind] for counter in counts.values()])
        for kind in kinds[:MOST_GROUPS]
    ]
    if rest := kinds[MOST_GROUPS:]:
        totals = [sum(counter[kind] for kind in rest) for counter in counts.values()]
        groups.append((f"{len(rest):,} other {unit} ({totals[2]:,})", totals))
    figures = [precision_recall_f1(*totals) for _, totals in groups]
    return _draw([name for name, _ in groups], np.array(figures).T, ("precision", "recall", "F1"), title, path)


def draw_answer_bars(scores: dict[str, list[tuple[float, float]]], rows_name: str, path: Path):
    """
    Draw exact match and F1 of groups of questions, the largest group first, and of all; returns the figure.

    Args:
        scores: exact match and F1 of each question of a group, by the group's name.
    """
    groups = sorted(scores.items(), key=lambda group: -len(group[1]))
    # A list of pairs, because the first word of a question may be "all" or "other".
    shown = [("all", [pair for _, pairs in groups for pair in pairs]), *groups[: MOST_GROUPS // 2]]
    if rest := groups[MOST_GROUPS // 2 :]:
        shown.append(("other", [pair for _, pairs in rest for pair in pairs]))
    names = [f"{shortened(name)} ({len(pairs):,})" for name, pairs in shown]
    figures = np.array([np.mean(pairs, axis=0) for _, pairs in shown]).T
    title = f"Answers on {rows_name}: exact match and F1 by first word of the question (number of questions)"
    return _draw(names, figures, ("exact match", "F1"), title, path)


def _draw(names, figures, figure_names, title, path):
    """Horizontal bars: figures (F, G) from 0 to 1 for each of G groups."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.8 + 0.24 * len(figure_names) * len(names)), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(figure_names)
    for number, (name, values) in enumerate(zip(figure_names, figures, strict=True)):
        heights = np.arange(len(names)) + (number - (len(figure_names) - 1) / 2) * width
        bars = panel.barh(heights, values, 0.92 * width, label=name, color=COLORS[-len(figure_names) :][number])
        panel.bar_label(bars, [f"{value:.1%}" for value in values], fontsize=7, padding=2)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")
    panel.set_title("\n".join(textwrap.wrap(title, 76)), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    return figure


def draw_choice_probabilities(probabilities, is_right, choices: int, rows_name: str, path: Path):
    """
    Draw how often the model gave the true choice which probability; rows with a right prediction are set apart;
    returns the figure.

    Args:
        probabilities: of the true choice of each row (N,).
        is_right: whether the true choice has the highest score (N,).
        choices: how many choices a row has.
    """
    from matplotlib.figure import Figure

    probabilities, is_right = np.asarray(probabilities), np.asarray(is_right, dtype=bool)
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    panel = figure.subplots()
    panel.hist(
        [probabilities[is_right], probabilities[~is_right]],
        bins=np.linspace(0, 1, 21),
        stacked=True,
        color=("#08519c", "#fdae6b"),
        label=(
            f"right: the true choice has the highest score ({is_right.sum():,})",
            f"wrong: another choice has ({(~is_right).sum():,})",
        ),
    )
    panel.axvline(1 / choices, color="0.4", linestyle=":", label=f"chance, 1 of {choices} choices")
    panel.xaxis.set_major_formatter("{x:.0%}")
    panel.set_xlabel("probability that the model gives to the true choice")
    panel.set_ylabel("rows")
    title = f"True choices on {rows_name}: {len(is_right):,} rows, accuracy {is_right.mean():.1%}"
    panel.set_title("\n".join(textwrap.wrap(title, 70)), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)
    return figure
