"""The finished folder of a fine-tuning: the model, `metrics.json`, predictions, pictures and the card."""

import json
import shlex
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from d2l_bert import folders
from d2l_bert.model_cards import card, figures, pictures
from d2l_bert.modeling import conversion
from d2l_bert.tokenization import coverage, hub_datasets, wordpiece
from d2l_bert.tokenization.files import STDIN
from d2l_bert.training import run_folder
from d2l_bert.training.checkpoint import WEIGHTS_FILE
from d2l_bert.training.finetuning import scoring
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.plan import Outcome, Plan, Result, attempt_of
from d2l_bert.training.finetuning.rows import Split, write_predictions
from d2l_bert.training.finetuning.tasks import Task


# In the folder of each rate and seed: the best one's model.
MODEL_FOLDER = "model"

# Fewer steps than this are few. Of 264 letters: after 36 steps a model tells three classes half of the time, after 180
# four fifths.
FEW_STEPS = 200

# The epochs that Mosbach et al. (2021) take where rows are few.
MANY_EPOCHS = 20

# The most characters of a text in the command that `report` shows.
SHORT_TEXT = 40

# What metrics.json has of a result, beside the metrics of its splits.
OF_A_RESULT = ("seed", "learning_rate", "steps", "best_step", "seconds")


def write_folder(plan: Plan, record: dict, model, row_results: dict, outcome: Outcome) -> str:
    """
    Write the finished folder; only the main process calls this.

    Args:
        record: the content of run_config.json.
        model: the trained model to keep, as in training.
        row_results: by split, what it says about the test rows, and about the rows to report on by class, as of
            `Task.row_results`.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    folder = plan.folder
    kept_folder = plan.folder_of(attempt_of(outcome.best))
    metrics = make_metrics(plan, outcome)
    with folders.replacing_files(folder, last=WEIGHTS_FILE) as partial:
        plan.task.finish(model)
        conversion.save_model(model, partial)
        wordpiece.save_tokenizer(plan.start.tokenizer, partial)
        if "test" in plan.splits:
            predicted = plan.task.in_csv(plan.task.predictions(plan.splits["test"], row_results["test"]))
            write_predictions(partial / run_folder.PREDICTIONS_FILE, plan.splits["test"], predicted)
        title = f"{folder.resolve().name}: {plan.config.task}, {kept_folder.name}"
        pictures.plot_finetuning(outcome.best["log"], plan.metric, title, partial / card.CURVES_FILE)
        metrics["pictures"] = {card.CURVES_FILE: "Loss and metric over the steps"}
        reported = plan.reported_by_class()
        if reported:
            errors = standard_errors(plan.task, plan.splits[reported], row_results[reported])
            metrics[figures.STANDARD_ERRORS] = {reported: errors}
        sides = plan.task.sides(plan.splits[reported], row_results[reported]) if reported else None
        if sides:
            metrics["classification_report"] = {reported: scoring.report_by_class(*sides)}
            picture = partial / pictures.CONFUSION_FILE
            if caption := pictures.plot_confusion(*sides, plan.splits[reported].name, picture):
                metrics["pictures"][picture.name] = caption
        folders.write_json(partial / card.METRICS_FILE, metrics)
        folders.write_json(partial / card.RUN_FILE, record)
        text = card.render_card(partial, folder.resolve().name)
        if plan.config.resume_from_checkpoint:
            text = card.updated_card(folder, text)
        (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
    for other in kept_folder.parent.iterdir():
        if other != kept_folder:
            shutil.rmtree(other / MODEL_FOLDER, ignore_errors=True)
    return report(plan, record, metrics, outcome.best["steps"])


def report(plan: Plan, record: dict, metrics: dict, steps: int) -> str:
    """
    The report for the user.

    Args:
        metrics: the content of metrics.json.
        steps: of the model that is kept.
    """
    advice = advice_on_length(plan.config, steps)
    lines = [
        figures.results_table(metrics, record["data"]["splits"]),
        f"trained in {metrics['train_seconds']:,.0f} s; the model of seed {metrics['kept_seed']} with rate "
        f"{metrics['learning_rate']:g} is in {plan.folder}{advice}",
    ]
    if "test" in plan.splits:
        lines.append(f"predictions for the test rows: {plan.folder / run_folder.PREDICTIONS_FILE}")
    lines.append(f"next: {next_command(plan)}")
    return "\n".join(lines)


def advice_on_length(config: FinetuneConfig, steps: int) -> str:
    """What a run of few steps may be told, behind a line of its report; "" if the steps are many, or were chosen."""
    epochs = config.num_train_epochs or 0
    if steps >= FEW_STEPS or config.max_steps is not None or epochs >= MANY_EPOCHS:
        return ""
    return f"; {steps} steps are few: try --num_train_epochs {MANY_EPOCHS}"


def next_command(plan: Plan) -> str:
    """A command of `predict` that works as it stands, on rows that this run has read; of rows in memory a call."""
    config = plan.config
    if config.dataset and hub_datasets.was_in_memory(config.dataset):
        return f"d2l_bert.predict({str(plan.folder)!r}, [{first_row(plan)}])"
    words = ["d2l-bert", "predict", str(plan.folder)]
    piped = ""
    file = config.test_file or config.validation_file or config.train_file
    if file is not None:
        words.append(file)
        if config.separator != "auto":
            words += ["--separator", config.separator]
    elif "test" in plan.splits:  # of a dataset
        words.append(str(plan.folder / run_folder.PREDICTIONS_FILE))
    else:
        words.append(STDIN)
        piped = f"echo {shlex.quote(json.dumps(first_row(plan), ensure_ascii=False))} | "
    output = Path("predicted.csv")
    number = 1
    while output.exists():
        number += 1
        output = Path(f"predicted-{number}.csv")
    return piped + shlex.join([*words, "--output", str(output)])


def first_row(plan: Plan) -> dict:
    """The cells that the task reads of the first training row without its label, with short texts."""
    row = plan.splits["train"].rows[0]
    cells = {}
    for option, columns in plan.task.columns.items():
        if option != "label_column":
            cells.update({column: row.cells.get(column) for column in columns})
    return with_short_texts(cells)


def with_short_texts(value):
    """A cell, with the first `SHORT_TEXT` characters of each text in it."""
    if isinstance(value, dict):
        return {name: with_short_texts(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [with_short_texts(entry) for entry in value]
    return " ".join(value[:SHORT_TEXT].split()) if isinstance(value, str) else value


# ---------------------------------------------------------------------------------------------------------------------
# metrics.json


def make_metrics(plan: Plan, outcome: Outcome) -> dict:
    """
    The content of metrics.json, without pictures and the report by class.

    Returns:
        `test_accuracy` and the like: the figures of the model in the folder. `mean` and `sd`: mean and standard
        deviation (with n - 1) over the seeds, by split and metric; `sd` is None for one seed. `know_nothing`
        (`figures.BASELINES`): the baseline of each split: its `prediction` in words, its `figures`, and `is_beaten`,
        whether the model in the folder is better. `f1_of`: the class that F1 is of, where there are two. `seeds`: each
        seed's figures. `rates`: the figures of the first seed with each rate.
    """
    measured = plan.measured()
    names = (*plan.task.metrics_shown, "loss")
    best = outcome.best
    metrics = {}
    for split in measured:
        for name in names:
            metrics[f"{split}_{name}"] = best[split][name]
    metrics[figures.BASELINES] = {split: baseline_of(plan, split, best[split]) for split in measured}
    metrics["f1_of"] = plan.task.class_of_f1()
    metrics["best_metric"] = plan.metric
    metrics["kept_seed"] = best["seed"]
    metrics["learning_rate"] = best["learning_rate"]
    metrics["mean"] = {split: over_seeds(statistics.fmean, outcome, split, names) for split in measured}
    metrics["sd"] = {split: over_seeds(deviation, outcome, split, names) for split in measured}
    metrics["seeds"] = [part_of_result(result, measured) for result in outcome.of_seeds]
    metrics["rates"] = [part_of_result(result, measured) for result in outcome.of_rates]
    metrics["metrics_shown"] = list(plan.task.metrics_shown)
    metrics["train_seconds"] = train_seconds(outcome)
    metrics["unknown_share"] = {name: unknown_share(plan, name) for name in plan.splits if name != "train"}
    metrics["lost_to_length"] = {name: features.note for name, features in plan.features.items()}
    metrics["diverged_rates"] = sorted(set(plan.rates) - rates_of(outcome))
    metrics["diverged_seeds"] = sorted(set(plan.seeds) - {result["seed"] for result in outcome.of_seeds})
    return metrics


def over_seeds(statistic: Callable, outcome: Outcome, split: str, names: tuple[str, ...]) -> dict[str, float | None]:
    """A statistic of each metric of a split over the seeds."""
    return {name: statistic([result[split][name] for result in outcome.of_seeds]) for name in names}


def deviation(values: list[float]) -> float | None:
    """The standard deviation, with n - 1; None for one value."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_errors(task: Task, split: Split, row_results) -> dict[str, float | None]:
    """The standard error of each metric of a split, over its rows; None where the rows do not show it."""
    return {name: found.standard_error for name, found in task.estimates(split, row_results).items()}


def part_of_result(result: Result, measured: list[str]) -> dict:
    """What metrics.json has of the result of a seed or a rate."""
    return {name: result[name] for name in (*OF_A_RESULT, *measured)}


def train_seconds(outcome: Outcome) -> float:
    """The seconds of training of all models; the first seed with the best rate is in both lists, and counts once."""
    seconds = {}
    for result in (*outcome.of_rates, *outcome.of_seeds):
        seconds[attempt_of(result)] = result["seconds"]
    return round(sum(seconds.values()), 2)


def rates_of(outcome: Outcome) -> set[float]:
    """The rates of all models that did not diverge."""
    return {result["learning_rate"] for result in (*outcome.of_rates, *outcome.of_seeds)}


def unknown_share(plan: Plan, split: str) -> float:
    """The share of the characters of a split that are unknown to the tokenizer."""
    texts = (text for row in plan.splits[split].rows for text in row.texts)
    return coverage.measure_unknown_share(plan.start.tokenizer, texts)


def baseline_of(plan: Plan, split: str, of_best: dict[str, float]) -> dict | None:
    """
    The baseline of a split as metrics.json has it, in the entry `figures.BASELINES`; None for a task without one.

    Args:
        of_best: the metrics of the best model on the split.
    """
    baseline = plan.task.baseline(plan.splits["train"], plan.splits[split])
    if baseline is None:
        return None
    metric = plan.metric if plan.metric in baseline.metrics else plan.task.main_metric
    return plan.task.entry_of_baseline(baseline, metric, of_best[metric])
