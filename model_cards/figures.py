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
BLIMP, BLIMP_NAME = "eval_blimp_accuracy", "BLiMP accuracy"

# The accuracy on one paradigm of each phenomenon, beside that on all paradigms.
BLIMP_ONE_OF_EACH = "eval_blimp_one_of_each_accuracy"

# BLiMP's accuracy on one phenomenon, such as "eval_blimp_accuracy/island_effects".
BLIMP_PHENOMENON = f"{BLIMP}/"

# Figures of models that were fine-tuned from a released one, such as "finetune/sst2/test_accuracy": means over seeds.
# Their standard deviations have an ending, and so have the same figures of models that were trained from scratch.
FINETUNED = re.compile(r"finetune/(?P<task>[^/]+)/(?P<split>validation|test)_(?P<figure>\w+)")
FINETUNED_SD, FROM_SCRATCH = ":sd", ":from_scratch"

# For each score of a sentence: how it is computed.
SCORES = {
    "pll": "pseudo-log-likelihood, each token masked alone",
    "within_word_l2r": "pseudo-log-likelihood, each token masked with the tokens behind it in its word",
}


# The Hub's kind (`metric_type`) and the unit of each metric; `1` is a number from -1 to 1 or from 0 on.
METRICS = {
    "accuracy": ("accuracy", "%"),
    "f1": ("f1", "%"),
    "accuracy_f1_mean": ("mean of accuracy and F1", "%"),
    "macro_f1": ("f1", "%"),
    "exact_match": ("exact_match", "%"),
    "precision": ("precision", "%"),
    "recall": ("recall", "%"),
    "strict_f1": ("f1", "%"),
    "matthews_correlation": ("matthews_correlation", "1"),
    "pearson": ("pearsonr", "1"),
    "spearman": ("spearmanr", "1"),
    "pearson_spearman_mean": ("mean of Pearson's and Spearman's correlation", "1"),
    "mse": ("mse", "1"),
    "mae": ("mae", "1"),
    "loss": ("loss", "1"),
}


# An encoder whose vectors of different tokens have a mean cosine above this has collapsed. Trained models had 0.27 to
# 0.73, and those that a high rate had made constant 0.9996 to 1 (benchmarks/LOG.md).
COLLAPSED = 0.95


class ReportedMetric(NamedTuple):
    """
    A metric that the card shows.

    Args:
        name: in the card.
        key: in metrics.json.
        unit: `nats`, `%`, `1` (a number with four decimals) or nothing.
        metric_type: the kind of the metric in the card's metadata.
        task: the Hub's task and its name in the card's metadata; None for a figure that the metadata leaves out, and
            ("", None) for the task that a model was fine-tuned for.
        text: for a figure of `d2l-bert evaluate`, the text or the data set that it was measured on; "" for a figure of
            models that were fine-tuned from this one; else None.
    """

    name: str
    key: str
    unit: str
    metric_type: str
    task: tuple[str, str | None] | None = None
    text: str | None = None


MLM = ("fill-mask", "Masked language modeling")
PAIRS = {key: ("text-classification", task.name.capitalize()) for key, task in PAIR_TASKS.items()}

# The MLM loss on held-out text before the first step, of a run that did not begin with random weights.
INITIAL_LOSS = "eval_initial_mlm_loss"

# The figures on a text, by their keys in metrics.json without `eval_`.
ON_A_TEXT = {
    "mlm_loss": ReportedMetric("MLM loss", "", "nats", "loss", MLM),
    INITIAL_LOSS.removeprefix("eval_"): ReportedMetric("MLM loss before the first step", "", "nats", "loss"),
    "perplexity": ReportedMetric("MLM perplexity", "", "", "perplexity", MLM),
    "mlm_accuracy": ReportedMetric("MLM accuracy", "", "%", "accuracy", MLM),
    "mlm_top_5_accuracy": ReportedMetric("MLM top-5 accuracy", "", "%", "accuracy", MLM),
    **{
        f"{key}_{figure}": ReportedMetric(f"{PAIR_TASKS[key].short} {name}", "", unit, metric_type, task)
        for key, of_task in PAIRS.items()
        for figure, name, unit, metric_type, task in (
            ("loss", "loss", "nats", "loss", of_task),
            ("accuracy", "accuracy", "%", "accuracy", of_task),
            ("one_segment_accuracy", "accuracy of one segment alone", "%", "accuracy", None),
        )
    },
    "pseudo_perplexity": ReportedMetric("pseudo-perplexity of a word", "", "", "perplexity", MLM),
}

# The accuracy on other minimal pairs than BLiMP's, as a figure of `d2l-bert evaluate`: of the pairs of a name.
MINIMAL_PAIRS = "minimal_pairs_accuracy"
OF_PAIRS = ReportedMetric("accuracy on minimal pairs", "", "%", "accuracy", ("text-classification", "Minimal pairs"))


def reported_metrics(metrics: dict) -> list[ReportedMetric]:
    """The metrics that the card shows, as far as `metrics` (the content of metrics.json) has them."""
    return [*own_metrics(metrics), *evaluated_metrics(metrics)]


def own_metrics(metrics: dict) -> list[ReportedMetric]:
    """As `reported_metrics`, but only the figures of the run itself: on held-out text, or on rows of a table."""
    known = [metric._replace(key=f"eval_{figure}") for figure, metric in ON_A_TEXT.items()]
    known += [
        ReportedMetric(f"{split} {name.replace('_', ' ')}", f"{split}_{name}", unit, metric_type, ("", None))
        for split in ("validation", "test")
        for name in metrics.get("metrics_shown", [])
        for metric_type, unit in [METRICS.get(name, (name, "1"))]
    ]
    return [metric for metric in known if metric.key in metrics]


def evaluated_metrics(metrics: dict) -> list[ReportedMetric]:
    """As `reported_metrics`, but only the figures that were measured after the run."""
    found = []
    for key in metrics:
        on_text, tuned = OF_A_TEXT.fullmatch(key), FINETUNED.fullmatch(key)
        if on_text and on_text["figure"] in ON_A_TEXT:
            metric = ON_A_TEXT[on_text["figure"]]
            name = f"{metric.name} on {shown(on_text['text'])}"
            found.append(metric._replace(name=name, key=key, text=on_text["text"]))
        elif on_text and on_text["figure"] == MINIMAL_PAIRS:
            name = f"{OF_PAIRS.name} of {shown(on_text['text'])}"
            found.append(OF_PAIRS._replace(name=name, key=key, text=on_text["text"]))
        elif key == BLIMP and has_blimp(metrics):
            paradigms = metrics.get("eval_blimp_paradigms")
            of = "BLiMP" if paradigms in (None, 67) else f"BLiMP, {paradigms} of 67 paradigms"
            task = ("text-classification", "Minimal pairs")
            found.append(ReportedMetric(BLIMP_NAME, BLIMP, "%", "accuracy", task, of))
        elif tuned and tuned["figure"] in METRICS:
            metric_type, unit = METRICS[tuned["figure"]]
            name = f"{tuned['task']}: {tuned['split']} {tuned['figure'].replace('_', ' ')}"
            found.append(ReportedMetric(name, key, unit, metric_type, text=""))
    return found


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
    entropy = metrics.get("eval_token_entropy")
    found = {
        f"{split}_{name}": value
        for split, known in metrics.get("know_nothing", {}).items()
        for name, value in (known or {"figures": {}})["figures"].items()
    }
    for task in PAIR_TASKS:
        found |= {f"eval_{task}_loss": math.log(2), f"eval_{task}_accuracy": 0.5}
    return found | ({"eval_mlm_loss": entropy, "eval_perplexity": math.exp(entropy)} if entropy else {})


def formatted(value: float, unit: str) -> str:
    """The value of a metric as the card's text shows it."""
    return {"nats": f"{value:.3f} nats", "%": f"{100 * value:.1f} %", "1": f"{value:.4f}"}.get(unit, f"{value:,.1f}")


def shown_metric(name: str, value: float) -> str:
    """The value of a metric for a table: in percent, or with four decimals."""
    return formatted(value, METRICS.get(name, ("", "1"))[1])


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
    names, kept, lines = metrics["metrics_shown"], metrics["kept_seed"], []
    for split, means in metrics["mean"].items():
        rows = {f"seed {of['seed']}": of[split] for of in metrics["seeds"]}
        if len(rows) > 1:
            rows = {f"{label}{' (kept)' * (label == f'seed {kept}')}": row for label, row in rows.items()}
            rows |= {"mean": means, "sd": metrics["sd"][split]}
        table = [["", *names]]
        table += [[label, *(shown_metric(name, row[name]) for name in names)] for label, row in rows.items()]
        widths = [max(map(len, column)) + 3 for column in zip(*table, strict=True)]
        lines += [
            f"{split}: {counted(splits[split]['rows'], 'row')} of {splits[split]['name']}; "
            f"{metrics['unknown_share'][split]:.1%} of the characters in [UNK]"
            f"{'; they chose the model, which is worse on new rows' if split == 'validation' else ''}",
            *("".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table),
        ]
        if metrics["f1_of"]:
            lines.append(f"  f1 is that of the class {metrics['f1_of']!r}")
        if comparison := no_better(metrics, split):
            lines.append(f"  {comparison}")
    return "\n".join(lines)
