"""The figures that a card may show: their names and units, where metrics.json has them; the table of a fine-tuning."""

import math
import re
from enum import Enum
from typing import NamedTuple

from d2l_bert.messages import counted
from d2l_bert.model_cards.blimp import PARADIGMS_OF
from d2l_bert.model_cards.markdown import shown
from d2l_bert.pair_tasks import PAIR_TASKS


# Figures of `d2l-bert evaluate` in metrics.json: those on a text have keys such as "eval/wikitext-2/mlm_loss".
KEY_ON_TEXT = re.compile(r"eval/(?P<text>.+)/(?P<figure>\w+)", re.DOTALL)

# BLiMP's accuracy in metrics.json and on a card.
BLIMP = "eval_blimp_accuracy"
BLIMP_NAME = "BLiMP accuracy"

# The accuracy on one paradigm of each phenomenon, beside that on all paradigms.
BLIMP_ONE_OF_EACH = "eval_blimp_one_of_each_accuracy"

# BLiMP's accuracy on one phenomenon, such as "eval_blimp_accuracy/island_effects".
BLIMP_PHENOMENON = f"{BLIMP}/"

# Figures of models that were fine-tuned from a released one, such as "finetune/sst2/test_accuracy": means over seeds.
# Their standard deviations have an ending, and so have the same figures of models that were trained from scratch.
KEY_OF_FINETUNING = re.compile(r"finetune/(?P<task>[^/]+)/(?P<split>validation|test)_(?P<figure>\w+)")
FINETUNED_SD = ":sd"
FROM_SCRATCH = ":from_scratch"

# For each score of a sentence: how it is computed.
SCORES = {
    "pll": "pseudo-log-likelihood, each token masked alone",
    "within_word_l2r": "pseudo-log-likelihood, each token masked with the tokens behind it in its word",
}


class HubTask(NamedTuple):
    """A task in the card's metadata: the Hub's `type`, and a `name` for people."""

    type: str | None
    name: str | None


# The task that a model was fine-tuned for: the metadata have the model's own `pipeline_tag`, and no name.
OWN_TASK = HubTask(None, None)
MLM_TASK = HubTask("fill-mask", "Masked language modeling")
MINIMAL_PAIRS_TASK = HubTask("text-classification", "Minimal pairs")


class Origin(Enum):
    """Where a figure comes from."""

    RUN = "the run itself: held-out text, or the rows of a table"
    EVALUATION = "`d2l-bert evaluate`: a text, or minimal pairs"
    FINETUNING = "models that were fine-tuned from this one"


class CardFigure(NamedTuple):
    """
    A figure that a card may show.

    Args:
        name: in the card.
        unit: `nats`, `%`, `1` (a number with four decimals) or "" (with one decimal).
        metric_type: the kind of the metric in the card's metadata, by the Hub's name where it has one.
        task: in the card's metadata; None for a figure that the metadata leave out.
        key: in metrics.json. `ON_ROWS` and `ON_A_TEXT` leave it out, with what follows: a figure of theirs stands
            under several keys, such as the MLM loss under "eval_mlm_loss" and "eval/wikitext-2/mlm_loss".
        origin: see `Origin`.
        split: of the run's own figures, what they were measured on: `eval` for held-out text, else `validation` or
            `test` for the rows of a table.
        text: of the figures of `d2l-bert evaluate`, the name of the text or of the minimal pairs.
    """

    name: str
    unit: str
    metric_type: str
    task: HubTask | None = None
    key: str = ""
    origin: Origin = Origin.RUN
    split: str = ""
    text: str = ""


# The figures of a fine-tuning, on the rows of a table, by their keys in metrics.json without `validation_` or `test_`.
# A number of the unit `1` is from -1 to 1, or from 0 on.
ON_ROWS = {
    "accuracy": CardFigure("accuracy", "%", "accuracy", OWN_TASK),
    "f1": CardFigure("f1", "%", "f1", OWN_TASK),
    "accuracy_f1_mean": CardFigure("accuracy f1 mean", "%", "mean of accuracy and F1", OWN_TASK),
    "macro_f1": CardFigure("macro f1", "%", "f1", OWN_TASK),
    "exact_match": CardFigure("exact match", "%", "exact_match", OWN_TASK),
    "precision": CardFigure("precision", "%", "precision", OWN_TASK),
    "recall": CardFigure("recall", "%", "recall", OWN_TASK),
    "strict_f1": CardFigure("strict f1", "%", "f1", OWN_TASK),
    "matthews_correlation": CardFigure("matthews correlation", "1", "matthews_correlation", OWN_TASK),
    "pearson": CardFigure("pearson", "1", "pearsonr", OWN_TASK),
    "spearman": CardFigure("spearman", "1", "spearmanr", OWN_TASK),
    "pearson_spearman_mean": CardFigure(
        "pearson spearman mean", "1", "mean of Pearson's and Spearman's correlation", OWN_TASK
    ),
    "mse": CardFigure("mse", "1", "mse", OWN_TASK),
    "mae": CardFigure("mae", "1", "mae", OWN_TASK),
    "loss": CardFigure("loss", "1", "loss", OWN_TASK),
}

# The MLM loss on held-out text before the first step, of a run that did not begin with random weights.
INITIAL_LOSS = "eval_initial_mlm_loss"

# The figures on a text, by their keys in metrics.json without `eval_`.
ON_A_TEXT = {
    "mlm_loss": CardFigure("MLM loss", "nats", "loss", MLM_TASK),
    INITIAL_LOSS.removeprefix("eval_"): CardFigure("MLM loss before the first step", "nats", "loss"),
    "perplexity": CardFigure("MLM perplexity", "", "perplexity", MLM_TASK),
    "mlm_accuracy": CardFigure("MLM accuracy", "%", "accuracy", MLM_TASK),
    "mlm_top_5_accuracy": CardFigure("MLM top-5 accuracy", "%", "accuracy", MLM_TASK),
}
for _task in PAIR_TASKS.values():
    _of_pairs = HubTask("text-classification", _task.name.capitalize())
    ON_A_TEXT[f"{_task.key}_loss"] = CardFigure(f"{_task.short} loss", "nats", "loss", _of_pairs)
    ON_A_TEXT[f"{_task.key}_accuracy"] = CardFigure(f"{_task.short} accuracy", "%", "accuracy", _of_pairs)
    ON_A_TEXT[f"{_task.key}_one_segment_accuracy"] = CardFigure(
        f"{_task.short} accuracy of one segment alone", "%", "accuracy"
    )
ON_A_TEXT["pseudo_perplexity"] = CardFigure("pseudo-perplexity of a word", "", "perplexity", MLM_TASK)

# The accuracy on other minimal pairs than BLiMP's, as a figure of `d2l-bert evaluate`: of the pairs of a name.
MINIMAL_PAIRS_KEY = "minimal_pairs_accuracy"
ACCURACY_ON_PAIRS = CardFigure("accuracy on minimal pairs", "%", "accuracy", MINIMAL_PAIRS_TASK)

# An encoder whose vectors of different tokens have a mean cosine above this has collapsed. Trained models had 0.27 to
# 0.73, and those that a high rate had made constant 0.9996 to 1 (benchmarks/LOG.md).
COLLAPSED = 0.95


def reported_figures(metrics: dict) -> list[CardFigure]:
    """The figures that the card shows, as far as `metrics` (the content of metrics.json) has them."""
    return [*own_figures(metrics), *evaluated_figures(metrics)]


def own_figures(metrics: dict) -> list[CardFigure]:
    """As `reported_figures`, but only the figures of the run itself: on held-out text, or on rows of a table."""
    known = [figure._replace(key=f"eval_{name}", split="eval") for name, figure in ON_A_TEXT.items()]
    for split in ("validation", "test"):
        for name in metrics.get("metrics_shown", []):
            figure = ON_ROWS.get(name) or CardFigure(name.replace("_", " "), "1", name, OWN_TASK)
            known.append(figure._replace(name=f"{split} {figure.name}", key=f"{split}_{name}", split=split))
    return [figure for figure in known if figure.key in metrics]


def evaluated_figures(metrics: dict) -> list[CardFigure]:
    """As `reported_figures`, but only the figures that were measured after the run."""
    found = (_evaluated_figure(key, metrics) for key in metrics)
    return [figure for figure in found if figure is not None]


def _evaluated_figure(key, metrics):
    """The figure that a key of metrics.json stands for; None if it is none that was measured after the run."""
    if key == BLIMP and has_blimp(metrics):
        return _blimp_figure(metrics)
    if on_text := KEY_ON_TEXT.fullmatch(key):
        return _figure_on_text(key, on_text["text"], on_text["figure"])
    if tuned := KEY_OF_FINETUNING.fullmatch(key):
        return _figure_of_finetuning(key, tuned["task"], tuned["split"], tuned["figure"])
    return None


def _blimp_figure(metrics):
    paradigms = metrics.get("eval_blimp_paradigms")
    text = "BLiMP" if paradigms in (None, 67) else f"BLiMP, {paradigms} of 67 paradigms"
    return CardFigure(BLIMP_NAME, "%", "accuracy", MINIMAL_PAIRS_TASK, BLIMP, Origin.EVALUATION, text=text)


def _figure_on_text(key, text, name):
    """The figure of this name on a text or on minimal pairs; None if a card shows no such figure."""
    if figure := ON_A_TEXT.get(name):
        name_on_card = f"{figure.name} on {shown(text)}"
    elif name == MINIMAL_PAIRS_KEY:
        figure = ACCURACY_ON_PAIRS
        name_on_card = f"{figure.name} of {shown(text)}"
    else:
        return None
    return figure._replace(name=name_on_card, key=key, origin=Origin.EVALUATION, text=text)


def _figure_of_finetuning(key, task, split, name):
    """The figure of this name on a task; None if it is unknown."""
    figure = ON_ROWS.get(name)
    if figure is None:
        return None
    return figure._replace(name=f"{task}: {split} {figure.name}", key=key, task=None, origin=Origin.FINETUNING)


def has_blimp(metrics: dict) -> bool:
    """Whether the figures that metrics.json has under BLiMP's name are of its phenomena."""
    phenomena = (key.removeprefix(BLIMP_PHENOMENON) for key in metrics if key.startswith(BLIMP_PHENOMENON))
    return BLIMP in metrics and set(phenomena) <= PARADIGMS_OF.keys()


def has_collapsed(metrics: dict) -> bool:
    """Whether a run's encoder gives every token nearly the same vector, by `metrics`, the content of metrics.json."""
    return metrics.get("token_cosine", 0) > COLLAPSED


# ---------------------------------------------------------------------------------------------------------------------
# The baseline: what a model scores that reads no text, and only knows how frequent tokens or labels are


# The entry of metrics.json with the baseline of each split of a fine-tuning, None for a task without one. A baseline
# knows nothing of the text.
BASELINES = "know_nothing"


# The entry of metrics.json with the standard errors of a fine-tuned model's figures over the rows of a split, the test
# rows if they have labels, by metric; None where the rows do not show it, as where all are right.
STANDARD_ERRORS = "standard_errors"


def standard_error_sentences(metrics: dict) -> list[str]:
    """For the card: the standard errors on each split that has some."""
    sentences = []
    for split, errors in metrics.get(STANDARD_ERRORS, {}).items():
        shown = []
        for name, value in errors.items():
            if value is not None:
                shown.append(f"{name.replace('_', ' ')} {shown_metric(name, value)}")
        if shown:
            sentences.append(f"Standard errors over the {split} rows: {', '.join(shown)}.")
    return sentences


def baseline_figures(metrics: dict) -> dict[str, float]:
    """
    The baseline's figures, by the keys that the run's own figures have in metrics.json.

    Args:
        metrics: the content of metrics.json; its `eval_token_entropy` is the baseline's MLM loss.
    """
    found = {}
    for split, baseline in metrics.get(BASELINES, {}).items():
        if not baseline:
            continue
        for name, value in baseline["figures"].items():
            found[f"{split}_{name}"] = value
    for task in PAIR_TASKS:
        found[f"eval_{task}_loss"] = math.log(2)
        found[f"eval_{task}_accuracy"] = 0.5
    if entropy := metrics.get("eval_token_entropy"):
        found["eval_mlm_loss"] = entropy
        found["eval_perplexity"] = math.exp(entropy)
    return found


def formatted(value: float, unit: str) -> str:
    """The value of a figure as the card's text shows it."""
    if unit == "nats":
        return f"{value:.3f} nats"
    if unit == "%":
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if unit == "1" else f"{value:,.1f}"


def shown_metric(name: str, value: float) -> str:
    """The value of a metric for a table: in percent, or with four decimals."""
    return formatted(value, ON_ROWS[name].unit if name in ON_ROWS else "1")


def any_baseline(metrics: dict) -> dict | None:
    """A fine-tuning's baseline on any split, for its `prediction`, which all splits share; None without a baseline."""
    for baseline in (metrics.get(BASELINES) or {}).values():
        if baseline:
            return baseline
    return None


def baseline_sentence(baseline: dict | None) -> str:
    """
    The figures of a baseline, and whether the model is better.

    Args:
        baseline: an entry of `BASELINES`.

    Returns:
        Such as "always the most frequent class of the training rows: accuracy 52.0 %; the model does no better"; ""
        for a task without a baseline.
    """
    if not baseline:
        return ""
    figures = [f"{name.replace('_', ' ')} {shown_metric(name, value)}" for name, value in baseline["figures"].items()]
    no_better = "" if baseline["is_beaten"] else "; the model does no better"
    return f"{baseline['prediction']}: {', '.join(figures)}{no_better}"


# ---------------------------------------------------------------------------------------------------------------------
# For the terminal


def results_table(metrics: dict, splits: dict[str, dict]) -> str:
    """
    The figures of a fine-tuned model, for the terminal: for each measured split a line for each seed, their mean and
    standard deviation, and the baseline.

    Args:
        metrics: the content of metrics.json.
        splits: by the name of a split the `name` of its data and its number of `rows`.
    """
    lines = []
    for split in metrics["mean"]:
        rows = counted(splits[split]["rows"], "row")
        unknown = f"{metrics['unknown_share'][split]:.1%} of the characters in [UNK]"
        warning = "; they chose the model, which is worse on new rows" if split == "validation" else ""
        lines.append(f"{split}: {rows} of {splits[split]['name']}; {unknown}{warning}")
        lines += aligned(_rows_of_seeds(metrics, split))
        if split in metrics.get(STANDARD_ERRORS, {}):
            lines.append("  standard error: over the rows; of a share of rows by its formula, else by a bootstrap")
        if metrics["f1_of"]:
            lines.append(f"  f1 is that of the class {metrics['f1_of']!r}")
        if baseline := baseline_sentence(metrics.get(BASELINES, {}).get(split)):
            lines.append(f"  {baseline}")
    return "\n".join(lines)


def _rows_of_seeds(metrics, split):
    """The cells of a table: a column for each metric; a row for each seed, and for mean and deviation of several."""
    results = {f"seed {result['seed']}": result[split] for result in metrics["seeds"]}
    if len(results) > 1:
        kept = f"seed {metrics['kept_seed']}"
        results = {f"{label} (kept)" if label == kept else label: result for label, result in results.items()}
        results["mean"] = metrics["mean"][split]
        results["sd"] = metrics["sd"][split]
    if split in metrics.get(STANDARD_ERRORS, {}):
        label = "standard error (kept)" if len(metrics["seeds"]) > 1 else "standard error"
        results[label] = metrics[STANDARD_ERRORS][split]
    names = metrics["metrics_shown"]
    table = [["", *names]]
    for label, result in results.items():
        cells = ["-" if result[name] is None else shown_metric(name, result[name]) for name in names]
        table.append([label, *cells])
    return table


def aligned(table: list[list[str]]) -> list[str]:
    """The lines of a table, each column as wide as its longest cell and three letters more, flush right."""
    widths = [max(map(len, column)) + 3 for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("".join(cells))
    return lines
