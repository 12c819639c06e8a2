"""Writes the model card of a fine-tuned model. All numbers come from its run_config.json and metrics.json."""

import json
import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from d2l_bert import model_cards
from d2l_bert.progress import counted


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


def shown_metric(name: str, value: float) -> str:
    """The value of a metric for a table: in percent, or with four decimals."""
    return f"{100 * value:.1f} %" if METRICS.get(name, ("", ""))[1] == "%" else f"{value:.4f}"


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
    sentence = f"always the most frequent class: accuracy {shown_metric('accuracy', share)}"
    if metrics[f"{split}_accuracy"] <= share:
        sentence += "; the model does no better"
    return sentence


KINDS = {
    "classification": "the classification of {texts} into {classes} classes",
    "multilabel": "the choice of any of {classes} labels for {texts}",
    "regression": "the prediction of a number for {texts}",
    "tags": "the choice of one of {classes} tags for each word of a text",
    "answers": "answers to questions, as spans of a context",
    "multiple_choice": "the choice of the right one of several texts",
}


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


def finetuned_card(
    name: str,
    config: dict,
    parameters: int,
    record: dict,
    metrics: dict,
    auto_class: str,
    pipeline_tag: str,
    formatted,
) -> str:
    """
    The card of a fine-tuned model: metadata for the Hub, and a text for people.

    Args:
        name: the name of the model.
        config: the content of config.json.
        parameters: the number of weights.
        record: the content of run_config.json, with an entry `finetune`.
        metrics: the content of metrics.json.
        auto_class: the Auto class that loads the model.
        pipeline_tag: the Hub's task.
        formatted: a function of a value and a unit that writes the value of a figure.
    """
    run, base, data = record["finetune"], record["base_model"], record["data"]
    kind = record["kind"]
    is_ours = config.get("model_type") == "d2l-bert"
    is_derived = base["revision"] is not None and not run.get("from_scratch")  # a model on the Hub, and its weights
    hub_dataset = next(iter(data["hub_datasets"]), None)
    measured = [split for split in ("validation", "test") if split in metrics.get("mean", {})]
    card_data = ModelCardData(
        license=run.get("license"),
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=[*(["d2l-bert"] if is_ours else []), "bert", "fine-tuned", kind.replace("_", "-")],
        datasets=data["hub_datasets"] or None,
        model_name=name,
        base_model=base["name"] if is_derived else None,
        eval_results=_eval_results(metrics, data, run, hub_dataset, pipeline_tag) or None,
    )
    if is_derived:
        card_data.base_model_relation = "finetune"
    pair = data.get("has_pairs")
    texts = "pairs of texts" if pair else "texts"
    classes = len(config.get("id2label") or {})
    first = "A text pair's first text.", "Its second text."
    example = json.dumps({"text": first[0], "text_pair": first[1]} if pair else "A text of your own.")
    size = f"{parameters:,} parameters"
    if run.get("from_scratch"):
        base_sentence = f"The architecture of {base['name']} ({size}) with fresh weights, without pretraining"
    else:
        base_sentence = f"{base['name']} ({size})"
    card = ModelCard.from_template(
        card_data,
        template_path=str(Path(model_cards.__file__).parent / "FINETUNED.md"),
        name=name,
        quoted_name=json.dumps(name, ensure_ascii=False),
        is_ours=is_ours,
        kind=kind,
        base_sentence=base_sentence,
        task_sentence=KINDS.get(kind, kind.replace("_", " ")).format(texts=texts, classes=classes),
        pipeline_task=record["pipeline_task"],
        auto_class=auto_class,
        example=record.get("example") or example,
        how_to_read=_how_to_read(kind, data),
        null_threshold=run["null_score_diff_threshold"] if data.get("has_unanswerable") else None,
        versions=record.get("versions", {}),
        figures=[(shown, formatted(metrics[key], unit)) for shown, key, unit, _ in finetuned_metrics(metrics)],
        notes=_notes(metrics, data, run),
        seed_tables=[_seed_table(metrics, split) for split in measured],
        pictures=list(metrics.get("pictures", {}).items()),
        data_rows=[(row, cell(text)) for row, text in _data_rows(record, metrics)],
        procedure_rows=[(row, cell(text)) for row, text in _procedure_rows(record, metrics)],
        length=record["max_seq_length"],
        command=record["command"],
    )
    return card.content


def cell(text: object) -> str:
    """Text for a cell of a Markdown table: in one line, with | escaped."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def _how_to_read(kind, data):
    if kind == "classification" and len(data["labels"]) == 2:
        return f"F1 below is that of the class `{data['labels'][1]}`."
    if kind == "regression":
        return 'The number is in the units of the training labels: call the pipeline with `function_to_apply="none"`.'
    if kind == "tags":
        return 'Call the pipeline with `aggregation_strategy="first"` for whole words, entities of BIO tags joined.'
    if kind == "answers" and data.get("has_unanswerable"):
        return (
            "It has learnt that some questions have no answer in their context: it says so if the scores of [CLS] are "
            "larger than those of the best span by more than the threshold, a number in the code above."
        )
    if kind == "multilabel":
        return "Call the pipeline with `top_k=None`: every label with a score above 0.5 is predicted."
    return ""


def _notes(metrics, data, run):
    """Sentences below the figures: how the model was chosen, and which rows are known from training."""
    seeds = len(metrics.get("seeds", []))
    chosen = f"`{metrics['best_metric']}` on the validation rows chose"
    notes = []
    if "validation" in metrics.get("mean", {}):
        what = ["the checkpoint"] + ["the rate"] * (len(metrics["rates"]) > 1) + ["the seed"] * (seeds > 1)
        joined = f"{', '.join(what[:-1])} and {what[-1]}" if len(what) > 1 else what[0]
        notes.append(f"{chosen} {joined}: on these rows the figures are better than on new ones.")
    for split, count in data.get("shared_with_training", {}).items():
        if count:
            rows = data["splits"][split]["rows"]
            notes.append(
                f"**{count:,} of the {rows:,} {split} rows have the same texts as a training row**; there the figures "
                f"are better than on new texts."
            )
    for split in metrics.get("most_frequent_class", {}):
        notes.append(f"On the {split} rows, {no_better(metrics, split)}.")
    if not metrics.get("mean"):
        notes.append("It was not measured: there were no rows with labels beside the training rows.")
    return notes


def _seed_table(metrics, split):
    """The figures of each seed on a split, with mean and standard deviation."""
    names, seeds = metrics["metrics_shown"], metrics["seeds"]
    rows = [
        [f"{result['seed']}{' (this model)' if result['seed'] == metrics['kept_seed'] else ''}"]
        + [shown_metric(name, result[split][name]) for name in names]
        for result in seeds
    ]
    if len(seeds) > 1:
        rows.append(["mean", *(shown_metric(name, metrics["mean"][split][name]) for name in names)])
        rows.append(["standard deviation", *(shown_metric(name, metrics["sd"][split][name]) for name in names)])
    caption = f"{split.capitalize()} rows, by seed (rate {metrics['learning_rate']:g})"
    return split, caption, ["seed", *(name.replace("_", " ") for name in names)], rows


def _data_rows(record, metrics):
    data, rows = record["data"], []
    for split, table in data["splits"].items():
        lost = metrics.get("lost_to_length", {}).get(split)
        cut = f"; {lost}" if lost else ""
        rows.append(
            (split, f"{counted(table['rows'], 'row')} of {table['name']}, fingerprint `{table['fingerprint']}`{cut}")
        )
    if data.get("labels"):
        shown = ", ".join(f"`{label}`" for label in data["labels"][:30])
        more = len(data["labels"]) - 30
        rows.append(("labels", shown + (f" and {more:,} more" if more > 0 else "")))
    if data["held_out"]:
        rows.append(("held out", f"{data['held_out']:.3g} of the training rows, as validation rows"))
    return rows


def _procedure_rows(record, metrics):
    run, base = record["finetune"], record["base_model"]
    identity = f"revision `{base['revision']}`" if base["revision"] else f"fingerprint `{base['fingerprint']}`"
    kept = next(result for result in metrics["seeds"] if result["seed"] == metrics["kept_seed"])
    tried = ", ".join(f"{rate:g}" for rate in record["learning_rates"])
    rates = f"{metrics['learning_rate']:g}"
    if len(record["learning_rates"]) > 1:
        rates += f", of {tried} the best on the validation rows"
    batch = record["rows_per_step"]
    warmup = "" if run["lr_scheduler_type"] == "constant" else f", with {record['warmup']} warm-up"
    return [
        ("base model", f"{base['name']}, {identity}{'; its weights were not used' if run['from_scratch'] else ''}"),
        ("peak rate", rates),
        ("rows in a step", f"{batch:,}"),
        ("steps", f"{kept['steps']:,}; the checkpoint of step {kept['best_step']:,} was kept"),
        ("schedule", f"`{run['lr_scheduler_type']}`{warmup}"),
        (
            "optimizer",
            f"AdamW, betas {run['adam_beta1']} and {run['adam_beta2']}, weight decay {run['weight_decay']:g}"
            + (f", rates falling by {run['layerwise_decay']:g} a layer" if run["layerwise_decay"] else ""),
        ),
        ("dropout", ", ".join(f"`{name}={rate}`" for name, rate in record["dropout"].items() if rate is not None)),
        ("precision", "bf16" if run["bf16"] else "fp16" if run["fp16"] else "float32"),
        ("seeds", ", ".join(str(result["seed"]) for result in metrics["seeds"])),
        ("time of all training", f"{metrics['train_seconds']:,.0f} s"),
        ("software", ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())),
    ]


def _eval_results(metrics, data, run, hub_dataset, pipeline_tag):
    results = []
    for shown, key, _, metric_type in finetuned_metrics(metrics):
        split = key.partition("_")[0]
        table = data["splits"][split]["name"]
        source = run.get(f"{split}_file")  # rows of a file are not those of the Hub's dataset
        invented = re.sub(r"[^\w.-]+", "-", table, flags=re.ASCII).strip("-") or "table"
        if math.isfinite(metrics[key]):
            results.append(
                EvalResult(
                    task_type=pipeline_tag,
                    dataset_type=invented if source or not hub_dataset else hub_dataset,
                    dataset_name=table,
                    dataset_split=split,
                    metric_type=metric_type,
                    metric_name=shown,
                    metric_value=round(metrics[key], 4),
                )
            )
    return results
