"""The figures of `d2l-bert evaluate`: a table with models side by side, and a picture of BLiMP's phenomena."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from d2l_bert.model_cards.figures import SCORES
from d2l_bert.pair_tasks import PAIR_TASKS


LABEL_WIDTH = 38
NOTHING = "-"


def evaluation_table(content: dict) -> str:
    """
    The figures as text for the terminal.

    Args:
        content: what `run.evaluate` returned.
    """
    models = content["models"]
    short = short_names([model["model"] for model in models])
    rows = [("", short), ("parameters", [f"{model['parameters']:,}" for model in models])]
    if content["text"] is not None:
        rows += [None, (f"Text: {content['text']}", []), *_text_rows([model["text"] for model in models])]
    if "blimp" in models[0]:
        rows += [None, *_blimp_rows([model["blimp"] for model in models])]
    width = max(14, *(len(cell) for row in rows if row for cell in row[1]))
    lines = [
        "" if row is None else (f"{row[0]:<{LABEL_WIDTH}}" + "".join(f"  {cell:>{width}}" for cell in row[1])).rstrip()
        for row in rows
    ]
    return "\n".join(lines + _notes(content))


def short_names(names: list[str]) -> list[str]:
    """The last parts of folders and Hub ids; the whole names if two last parts are the same."""
    names = [name.rstrip("/") for name in names]
    short = [name.rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(short) else names


def _text_rows(texts):
    def row(label, key, form):
        return label, [format(text[key], form) if text.get(key) is not None else NOTHING for text in texts]

    rows = [
        row("  MLM loss (nats a token)", "mlm_loss", ".3f"),
        row("  MLM perplexity", "perplexity", ",.1f"),
        row("  MLM accuracy", "mlm_accuracy", ".1%"),
        row("  MLM top-5 accuracy", "mlm_top_5_accuracy", ".1%"),
        row("  masked tokens", "masked_tokens", ",d"),
    ]
    for key in dict.fromkeys(text["pair_task"] for text in texts):
        if key is None:
            continue
        short = PAIR_TASKS[key].short
        for figure, form in ((f"{key}_loss", ".3f"), (f"{key}_accuracy", ".1%")):
            label = f"  {short} {figure.removeprefix(key + '_')}"
            rows.append((label, [format(t[figure], form) if figure in t else _why_no_pairs(t, short) for t in texts]))
    if all(text["pair_task"] is None for text in texts):
        rows.append(("  NSP or SOP", [_why_no_pairs(text, "NSP or SOP") for text in texts]))
    rows.append(("  pairs, or single segments", [f"{text.get('pairs', text.get('sequences')):,}" for text in texts]))
    if "pseudo_perplexity" in texts[0]:
        rows.append(row("  pseudo-perplexity of a word", "pseudo_perplexity", ",.1f"))
        rows.append(row("    its sentences", "pppl_sentences", ",d"))
        rows.append(row("    their tokens", "pppl_tokens", ",d"))
        rows.append(row("    of them unknown to the tokenizer", "pppl_unknown_tokens", ",d"))
    return rows


def _why_no_pairs(text, short):
    """Why a model has no figure for the tasks named in `short`, such as `NSP` or `NSP or SOP`."""
    return "not asked for" if text["pair_head"] in short.lower().split(" or ") else f"no {short} head"


def _blimp_rows(results):
    first = results[0]
    paradigms, pairs = first["paradigm_count"], first["pairs"]
    rows = [(f"BLiMP, score {first['score']}: {pairs:,} pairs in {paradigms} of 67 paradigms", [])]
    rows.append(("  accuracy", [_with_error(blimp) for blimp in results]))
    rows += [
        (f"    {name.replace('_', ' ')}", [_with_error(blimp["phenomena"][name]) for blimp in results])
        for name in first["phenomena"]
    ]
    return rows


def _with_error(figures):
    return f"{100 * figures['accuracy']:.1f} ± {100 * figures['standard_error']:.1f} %"


def _notes(content):
    notes, models = [], content["models"]
    if content["text"] is not None:
        inputs = {model["text"]["pair_task"] for model in models}
        if len(inputs) > 1:
            notes.append(
                "The models' rows hold different things (pairs for NSP, pairs for SOP, or single segments): with "
                "--objective none all MLM figures are on single segments."
            )
        if len({model["text"]["tokens"] for model in models}) > 1:
            notes.append(
                "The models' tokenizers differ: compare the pseudo-perplexities, which are of words, not the losses "
                "and perplexities of tokens."
            )
    return ["", *notes] if notes else []


# ---------------------------------------------------------------------------------------------------------------------

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
