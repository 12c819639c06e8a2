"""The figures that a card may show: their names and units, and where metrics.json has them."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import jinja2

from d2l_bert import model_cards
from d2l_bert.pair_tasks import pair_task


# Figures of `d2l-bert evaluate` in metrics.json: those on a text have keys such as "eval/wikitext-2/mlm_loss".
OF_A_TEXT = re.compile(r"eval/(?P<text>.+)/(?P<figure>\w+)", re.DOTALL)

BLIMP = "eval_blimp_accuracy"

# BLiMP's accuracy on one phenomenon, such as "eval_blimp_accuracy/island_effects".
BLIMP_PHENOMENON = f"{BLIMP}/"

# Figures of models that were fine-tuned from a released one, such as "finetune/sst2/test_accuracy": means over seeds.
# Their standard deviations have an ending, and so have the same figures of models that were trained from scratch.
FINETUNED = re.compile(r"finetune/(?P<task>[^/]+)/(?P<split>validation|test)_(?P<figure>\w+)")
FINETUNED_SD, FROM_SCRATCH = ":sd", ":from_scratch"

# Two models' figures agree if they differ by at most this many standard deviations of one model. The difference of two
# models has sqrt(2) standard deviations, so this is four of the difference: chance alone exceeds that in 1.6 % of the
# cases if the deviation was measured on five models, and in 5.7 % if on three.
DEVIATIONS = 4 * math.sqrt(2)

# For each score of a sentence: how it is computed.
SCORES = {
    "pll": "pseudo-log-likelihood, each token masked alone",
    "within_word_l2r": "pseudo-log-likelihood, each token masked with the tokens behind it in its word",
}


# Figures of fine-tuned models have this instead of the name of a text, which is never empty.
FINE_TUNING = ""


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


class ReportedMetric(NamedTuple):
    """
    A metric that the card shows.

    Args:
        name: in the card.
        key: in metrics.json.
        unit: `nats`, `%`, `1` (a number with four decimals) or nothing.
        task_type, task_name: the Hub's task, and the task's name in the card's metadata.
        metric_type: the kind of the metric in the card's metadata.
        text: for a figure of `d2l-bert evaluate`, the text or the data set that it was measured on; for one of a
            fine-tuned model, `FINE_TUNING`; else None.
        in_metadata: whether the card's metadata has it, too.
    """

    name: str
    key: str
    unit: str
    task_type: str
    task_name: str
    metric_type: str
    text: str | None = None
    in_metadata: bool = True


def reported_metrics(metrics: dict) -> list[ReportedMetric]:
    """The metrics that the card shows, as far as `metrics` (the content of metrics.json) has them."""
    known = [
        ReportedMetric(metric.name, f"eval_{key}", *metric[2:])
        for key, metric in _of_text_figures(pair_task(metrics)).items()
        if key not in ("mlm_top_5_accuracy", "pseudo_perplexity")
    ]
    known += [
        ReportedMetric(name, key, unit, "", "", metric_type)
        for name, key, unit, metric_type in finetuned_metrics(metrics)
    ]
    return [metric for metric in known if metric.key in metrics] + evaluated_metrics(metrics)


def evaluated_metrics(metrics: dict) -> list[ReportedMetric]:
    """As `reported_metrics`, but only the figures that were measured after the run."""
    found = []
    for key in metrics:
        if match := OF_A_TEXT.fullmatch(key):
            task = pair_task([match["figure"]])
            if metric := _of_text_figures(task).get(match["figure"]):
                found.append(metric._replace(name=f"{metric.name} on {match['text']}", key=key, text=match["text"]))
    if BLIMP in metrics:
        paradigms = metrics.get("eval_blimp_paradigms")
        of = "BLiMP" if paradigms in (None, 67) else f"BLiMP, {paradigms} of 67 paradigms"
        shared = ("text-classification", "Minimal pairs", "accuracy", of)
        found.append(ReportedMetric("BLiMP accuracy", BLIMP, "%", *shared))
        if (key := "eval_blimp_standard_error") in metrics:
            found.append(ReportedMetric("BLiMP standard error", key, "%", *shared, in_metadata=False))
        for key in metrics:
            if key.startswith(BLIMP_PHENOMENON):
                name = f"BLiMP: {key.removeprefix(BLIMP_PHENOMENON).replace('_', ' ')}"
                found.append(ReportedMetric(name, key, "%", *shared, in_metadata=False))
    for key in metrics:
        if (match := FINETUNED.fullmatch(key)) and match["figure"] in METRICS:
            name = f"{match['task']}: {match['split']} {match['figure'].replace('_', ' ')}"
            metric_type, unit = METRICS[match["figure"]]
            shared = ("text-classification", match["task"], metric_type, FINE_TUNING)
            found.append(ReportedMetric(name, key, unit, *shared, in_metadata=False))
    return found


def _of_text_figures(task):
    """The metrics of a text by their keys in metrics.json without `eval_`; `task` is the pair task or None."""
    mlm = ("fill-mask", "Masked language modeling")
    known = {
        "mlm_loss": ReportedMetric("MLM loss", "", "nats", *mlm, "loss"),
        "perplexity": ReportedMetric("MLM perplexity", "", "", *mlm, "perplexity"),
        "mlm_accuracy": ReportedMetric("MLM accuracy", "", "%", *mlm, "accuracy"),
        "mlm_top_5_accuracy": ReportedMetric("MLM top-5 accuracy", "", "%", *mlm, "accuracy"),
    }
    if task:
        pair = ("text-classification", task.name.capitalize())
        known[f"{task.key}_loss"] = ReportedMetric(f"{task.short} loss", "", "nats", *pair, "loss")
        known[f"{task.key}_accuracy"] = ReportedMetric(f"{task.short} accuracy", "", "%", *pair, "accuracy")
        name = f"{task.short} accuracy of one segment alone"
        known[f"{task.key}_one_segment_accuracy"] = ReportedMetric(name, "", "%", *pair, "accuracy", in_metadata=False)
    known["pseudo_perplexity"] = ReportedMetric("pseudo-perplexity of a word", "", "", *mlm, "perplexity")
    return known


def deviations(release: dict, metrics: dict) -> dict[str, float]:
    """
    The standard deviations of a model's figures between models of other seeds, by their keys in metrics.json.

    Args:
        release: the content of release.json; its recipe has them for what was pretrained.
        metrics: the content of metrics.json; it has them for what was fine-tuned, over the seeds of the fine-tuning.
    """
    known = {metric.key: metrics.get(f"{metric.key}{FINETUNED_SD}") for metric in reported_metrics(metrics)}
    known = {key: release["recipe"]["deviations"].get(key, sd) for key, sd in known.items()}
    return {key: sd for key, sd in known.items() if sd is not None}


def formatted(value: float, unit: str) -> str:
    """The value of a metric as the card's text shows it."""
    return {"nats": f"{value:.3f} nats", "%": f"{100 * value:.1f} %", "1": f"{value:.4f}"}.get(unit, f"{value:,.1f}")


def replaced(metrics: dict, text: str | None, figures: dict | None, blimp: dict | None) -> dict:
    """
    `metrics` with the figures of an evaluation instead of earlier ones on the same text, or of BLiMP.

    Args:
        metrics: the content of metrics.json.
        text: the name of the text; None without one.
        figures: the figures on the text, by their names; None without one.
        blimp: the results on BLiMP (`training.evaluation.blimp.blimp_results`, with `score`); None without them.
    """
    kept = {
        key: value
        for key, value in metrics.items()
        if not (figures is not None and key.startswith(f"eval/{text}/") and "/" not in key[len(f"eval/{text}/") :])
        and not (blimp is not None and key.startswith("eval_blimp_"))
    }
    if figures is not None:
        kept |= {f"eval/{text}/{name}": value for name, value in figures.items() if value is not None}
    if blimp is not None:
        kept |= {
            BLIMP: blimp["accuracy"],
            "eval_blimp_standard_error": blimp["standard_error"],
            "eval_blimp_paradigms": blimp["paradigm_count"],
            "eval_blimp_pairs": blimp["pairs"],
            "eval_blimp_score": blimp["score"],
            **{f"{BLIMP_PHENOMENON}{name}": figure["accuracy"] for name, figure in blimp["phenomena"].items()},
        }
    return kept


def finetuned_entries(task: str, tuned: dict, from_scratch: dict) -> dict:
    """
    The entries of a model's metrics.json for the models that were fine-tuned from it for a task.

    The figure is the task's metric on the test rows, or on the validation rows if there are no labelled test rows.

    Args:
        tuned, from_scratch: the contents of metrics.json of `d2l-bert finetune`, from the model's weights and from
            fresh ones.
    """
    split = "test" if "test" in tuned["mean"] else "validation"
    name = tuned["best_metric"]
    key = f"finetune/{task}/{split}_{name}"
    entries = {f"finetune/{task}/seeds": len(tuned["seeds"])}
    for ending, metrics in (("", tuned), (FROM_SCRATCH, from_scratch)):
        entries[f"{key}{ending}"] = metrics["mean"][split][name]
        entries[f"{key}{ending}{FINETUNED_SD}"] = metrics["sd"][split][name]
    return entries


def evaluation_section(metrics: dict) -> str:
    """The card's section with the figures of `d2l-bert evaluate`; an empty string without such figures."""
    blocks = {}
    for metric in evaluated_metrics(metrics):
        blocks.setdefault(metric.text, []).append(metric)
    template = jinja2.Template((Path(model_cards.__file__).parent / "EVALUATION.md").read_text(encoding="utf-8"))
    shown = {"cell": cell, "formatted": formatted, "scores": SCORES, "fine_tuning": FINE_TUNING, "infinity": math.inf}
    return template.render(blocks=blocks, metrics=metrics, **shown) if blocks else ""


# The tasks for which transformers.js has a pipeline whose only input is a text.
JS_PIPELINES = ("fill-mask", "text-classification", "token-classification", "feature-extraction")


def onnx_section(metrics: dict, quoted_name: str, prompt: str) -> str:
    """
    The card's section on the files of `d2l-bert export`; an empty string without such files.

    Args:
        metrics: the content of metrics.json; `export` is what `d2l-bert export` has measured.
        quoted_name, prompt: the model's name and a text for it, as string literals.
    """
    if "export" not in metrics:
        return ""
    template = jinja2.Template((Path(model_cards.__file__).parent / "ONNX.md").read_text(encoding="utf-8"))
    example = prompt if metrics["export"]["task"] == "fill-mask" else quoted("A text of your own.")
    return template.render(
        export=metrics["export"], quoted_name=quoted_name, example=example, cell=cell, pipelines=JS_PIPELINES
    )


def quoted(text: str) -> str:
    """Text as a string literal of Python, JavaScript and JSON."""
    return json.dumps(text, ensure_ascii=False)


def shown_metric(name: str, value: float) -> str:
    """The value of a metric for a table: in percent, or with four decimals."""
    return formatted(value, METRICS.get(name, ("", "1"))[1])


def no_better(metrics: dict, split: str) -> str:
    """
    A sentence that compares the accuracy on a split with that of always predicting the most frequent class.

    Args:
        metrics: the content of metrics.json.

    Returns:
        "" for a task without classes.
    """
    share = metrics.get("most_frequent_class", {}).get(split)
    if share is None:
        return ""
    beaten = "" if metrics[f"{split}_accuracy"] > share else "; the model does no better"
    return f"always the most frequent class: accuracy {shown_metric('accuracy', share)}{beaten}"


def finetuned_metrics(metrics: dict) -> list[tuple[str, str, str, str]]:
    """
    The figures of a fine-tuned model that its card shows.

    Args:
        metrics: the content of metrics.json; of another run, nothing is found.

    Returns:
        For each figure: its name in the card, its key in metrics.json, its unit (`%` or `1`), the Hub's metric type.
    """
    return [
        (f"{split} {name.replace('_', ' ')}", f"{split}_{name}", METRICS.get(name, (name, "1"))[1], METRICS[name][0])
        for split in ("validation", "test")
        for name in metrics.get("metrics_shown", [])
        if f"{split}_{name}" in metrics and name in METRICS
    ]


def cell(text: object) -> str:
    """Text for a cell of a Markdown table: in one line, with | escaped."""
    return str(text).replace("|", "\\|").replace("\n", " ")
