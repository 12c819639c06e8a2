"""The figures that a card may show: their names and units, where metrics.json has them; the table of a fine-tuning."""

import math
import re
from typing import NamedTuple

from d2l_bert.messages import counted
from d2l_bert.model_cards.blimp import PARADIGMS_OF
from d2l_bert.model_cards.markdown import shown
from d2l_bert.pair_tasks import PAIR_TASKS


# Figures of `d2l-bert evaluate` in metrics.json: those on a text have keys such as "eval/wikitext-2/mlm_loss".
OF_A_TEXT = re.compile(r"eval/(?P<text>.+)/(?P<figure>\w+)", re.DOTALL)

# BLiMP's accuracy in metrics.json and on a card.
BLIMP = "eval_blimp_accuracy"
BLIMP_NAME = "BLiMP accuracy"

# The accuracy on one paradigm of each phenomenon, beside that on all paradigms.
BLIMP_ONE_OF_EACH = "eval_blimp_one_of_each_accuracy"

# BLiMP's accuracy on one phenomenon, such as "eval_blimp_accuracy/island_effects".
BLIMP_PHENOMENON = f"{BLIMP}/"

# Figures of models that were fine-tuned from a released one, such as "finetune/sst2/test_accuracy": means over seeds.
# Their standard deviations have an ending, and so have the same figures of models that were trained from scratch.
FINETUNED = re.compile(r"finetune/(?P<task>[^/]+)/(?P<split>validation|test)_(?P<figure>\w+)")
FINETUNED_SD = ":sd"
FROM_SCRATCH = ":from_scratch"

# For each score of a sentence: how it is computed.
SCORES = {
    "pll": "pseudo-log-likelihood, each token masked alone",
    "within_word_l2r": "pseudo-log-likelihood, each token masked with the tokens behind it in its word",
}


class Figure(NamedTuple):
    """
    A figure that a card may show.

    Args:
        name: in the card.
        unit: `nats`, `%`, `1` (a number with four decimals) or "" (with one decimal).
        metric_type: the kind of the metric in the card's metadata, by the Hub's name where it has one.
        task: the Hub's task and its name in the card's metadata; None for a figure that the metadata leaves out, and
            `OWN_TASK` for the task that a model was fine-tuned for.
        key: in metrics.json; "" in the tables below, whose figures have several.
        text: for a figure of `d2l-bert evaluate`, the text or the data set that it was measured on; "" for a figure of
            models that were fine-tuned from this one; else None.
    """

    name: str
    unit: str
    metric_type: str
    task: tuple[str, str | None] | None = None
    key: str = ""
    text: str | None = None


OWN_TASK = ("", None)
MLM = ("fill-mask", "Masked language modeling")
OF_MINIMAL_PAIRS = ("text-classification", "Minimal pairs")

# The figures of a fine-tuning, by their keys in metrics.json without `validation_` or `test_`. A number of the unit
# `1` is from -1 to 1, or from 0 on.
METRICS = {
    "accuracy": Figure("accuracy", "%", "accuracy", OWN_TASK),
    "f1": Figure("f1", "%", "f1", OWN_TASK),
    "accuracy_f1_mean": Figure("accuracy f1 mean", "%", "mean of accuracy and F1", OWN_TASK),
    "macro_f1": Figure("macro f1", "%", "f1", OWN_TASK),
    "exact_match": Figure("exact match", "%", "exact_match", OWN_TASK),
    "precision": Figure("precision", "%", "precision", OWN_TASK),
    "recall": Figure("recall", "%", "recall", OWN_TASK),
    "strict_f1": Figure("strict f1", "%", "f1", OWN_TASK),
    "matthews_correlation": Figure("matthews correlation", "1", "matthews_correlation", OWN_TASK),
    "pearson": Figure("pearson", "1", "pearsonr", OWN_TASK),
    "spearman": Figure("spearman", "1", "spearmanr", OWN_TASK),
    "pearson_spearman_mean": Figure(
        "pearson spearman mean", "1", "mean of Pearson's and Spearman's correlation", OWN_TASK
    ),
    "mse": Figure("mse", "1", "mse", OWN_TASK),
    "mae": Figure("mae", "1", "mae", OWN_TASK),
    "loss": Figure("loss", "1", "loss", OWN_TASK),
}

# The MLM loss on held-out text before the first step, of a run that did not begin with random weights.
INITIAL_LOSS = "eval_initial_mlm_loss"

# The figures on a text, by their keys in metrics.json without `eval_`.
ON_A_TEXT = {
    "mlm_loss": Figure("MLM loss", "nats", "loss", MLM),
    INITIAL_LOSS.removeprefix("eval_"): Figure("MLM loss before the first step", "nats", "loss"),
    "perplexity": Figure("MLM perplexity", "", "perplexity", MLM),
    "mlm_accuracy": Figure("MLM accuracy", "%", "accuracy", MLM),
    "mlm_top_5_accuracy": Figure("MLM top-5 accuracy", "%", "accuracy", MLM),
}
for _task in PAIR_TASKS.values():
    _of_pairs = ("text-classification", _task.name.capitalize())
    ON_A_TEXT[f"{_task.key}_loss"] = Figure(f"{_task.short} loss", "nats", "loss", _of_pairs)
    ON_A_TEXT[f"{_task.key}_accuracy"] = Figure(f"{_task.short} accuracy", "%", "accuracy", _of_pairs)
    ON_A_TEXT[f"{_task.key}_one_segment_accuracy"] = Figure(
        f"{_task.short} accuracy of one segment alone", "%", "accuracy"
    )
ON_A_TEXT["pseudo_perplexity"] = Figure("pseudo-perplexity of a word", "", "perplexity", MLM)

# The accuracy on other minimal pairs than BLiMP's, as a figure of `d2l-bert evaluate`: of the pairs of a name.
MINIMAL_PAIRS = "minimal_pairs_accuracy"
OF_PAIRS = Figure("accuracy on minimal pairs", "%", "accuracy", OF_MINIMAL_PAIRS)

# An encoder whose vectors of different tokens have a mean cosine above this has collapsed. Trained models had 0.27 to
# 0.73, and those that a high rate had made constant 0.9996 to 1 (benchmarks/LOG.md).
COLLAPSED = 0.95


def reported_metrics(metrics: dict) -> list[Figure]:
    """The figures that the card shows, as far as `metrics` (the content of metrics.json) has them."""
    return [*own_metrics(metrics), *evaluated_metrics(metrics)]


def own_metrics(metrics: dict) -> list[Figure]:
    """As `reported_metrics`, but only the figures of the run itself: on held-out text, or on rows of a table."""
    known = [figure._replace(key=f"eval_{name}") for name, figure in ON_A_TEXT.items()]
    for split in ("validation", "test"):
        for name in metrics.get("metrics_shown", []):
            figure = METRICS.get(name) or Figure(name.replace("_", " "), "1", name, OWN_TASK)
            known.append(figure._replace(name=f"{split} {figure.name}", key=f"{split}_{name}"))
    return [figure for figure in known if figure.key in metrics]


def evaluated_metrics(metrics: dict) -> list[Figure]:
    """As `reported_metrics`, but only the figures that were measured after the run."""
    found = (_evaluated_figure(key, metrics) for key in metrics)
    return [figure for figure in found if figure is not None]


def _evaluated_figure(key, metrics):
    """The figure that a key of metrics.json stands for; None if it is none that was measured after the run."""
    if key == BLIMP and has_blimp(metrics):
        paradigms = metrics.get("eval_blimp_paradigms")
        text = "BLiMP" if paradigms in (None, 67) else f"BLiMP, {paradigms} of 67 paradigms"
        return Figure(BLIMP_NAME, "%", "accuracy", OF_MINIMAL_PAIRS, key, text)
    if on_text := OF_A_TEXT.fullmatch(key):
        text = on_text["text"]
        if figure := ON_A_TEXT.get(on_text["figure"]):
            return figure._replace(name=f"{figure.name} on {shown(text)}", key=key, text=text)
        if on_text["figure"] == MINIMAL_PAIRS:
            return OF_PAIRS._replace(name=f"{OF_PAIRS.name} of {shown(text)}", key=key, text=text)
    if tuned := FINETUNED.fullmatch(key):
        if figure := METRICS.get(tuned["figure"]):
            name = f"{tuned['task']}: {tuned['split']} {figure.name}"
            return figure._replace(name=name, key=key, task=None, text="")
    return None


def has_blimp(metrics: dict) -> bool:
    """Whether the figures that metrics.json has under BLiMP's name are of its phenomena."""
    phenomena = (key.removeprefix(BLIMP_PHENOMENON) for key in metrics if key.startswith(BLIMP_PHENOMENON))
    return BLIMP in metrics and set(phenomena) <= PARADIGMS_OF.keys()


def has_collapsed(metrics: dict) -> bool:
    """Whether a run's encoder gives every token nearly the same vector, by `metrics`, the content of metrics.json."""
    return metrics.get("token_cosine", 0) > COLLAPSED


def of_knowing_nothing(metrics: dict) -> dict[str, float]:
    """
    What a model scores that reads no text and knows how frequent tokens or labels are: by the keys of own figures.

    Args:
        metrics: the content of metrics.json; its `eval_token_entropy` is the MLM loss of such a model.
    """
    found = {}
    for split, known in metrics.get("know_nothing", {}).items():
        for name, value in known["figures"].items() if known else ():
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
    return formatted(value, METRICS[name].unit if name in METRICS else "1")


def no_better(metrics: dict, split: str) -> str:
    """
    A sentence with the figures of a prediction that needs no model, and whether the model on a split is better.

    Args:
        metrics: the content of metrics.json.

    Returns:
        "" for a task without such a prediction.
    """
    known = metrics.get("know_nothing", {}).get(split)
    if not known:
        return ""
    shown = [f"{name.replace('_', ' ')} {shown_metric(name, value)}" for name, value in known["figures"].items()]
    beaten = "" if known["is_beaten"] else "; the model does no better"
    return f"{known['prediction']}: {', '.join(shown)}{beaten}"


def results_table(metrics: dict, splits: dict[str, dict]) -> str:
    """
    The figures of a fine-tuned model, for the terminal: for each measured split a line for each seed, their mean and
    standard deviation, and what a prediction reaches that needs no model.

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
        if metrics["f1_of"]:
            lines.append(f"  f1 is that of the class {metrics['f1_of']!r}")
        if comparison := no_better(metrics, split):
            lines.append(f"  {comparison}")
    return "\n".join(lines)


def _rows_of_seeds(metrics, split):
    """The cells of a table: a column for each metric; a row for each seed, and for mean and deviation of several."""
    results = {f"seed {result['seed']}": result[split] for result in metrics["seeds"]}
    if len(results) > 1:
        kept = f"seed {metrics['kept_seed']}"
        results = {f"{label} (kept)" if label == kept else label: result for label, result in results.items()}
        results["mean"] = metrics["mean"][split]
        results["sd"] = metrics["sd"][split]
    names = metrics["metrics_shown"]
    table = [["", *names]]
    for label, result in results.items():
        table.append([label, *(shown_metric(name, result[name]) for name in names)])
    return table


def aligned(table: list[list[str]]) -> list[str]:
    """The lines of a table, each column as wide as its longest cell and three letters more, flush right."""
    widths = [max(map(len, column)) + 3 for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("".join(cells))
    return lines
