"""The output folder of a fine-tuning run: lock, `run_config.json`, the finished model, `metrics.json`, predictions."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import logging
import platform
import shlex
import shutil
import statistics
from collections import Counter
from pathlib import Path

from d2l_bert import folders, messages, options
from d2l_bert.model_cards import card, figures
from d2l_bert.modeling import configuration_d2l_bert, conversion
from d2l_bert.tokenization import account, wordpiece
from d2l_bert.training import run_folder
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.metrics import draw_confusion, draw_curves


logger = logging.getLogger(__name__)


# The folder with a folder for each rate and seed: its result, and the best one's model.
WORK_FOLDER = "attempts"
MODEL_FOLDER = "model"
WEIGHTS_FILE = "model.safetensors"
PREDICTIONS_FILE = "predictions.csv"


@contextlib.contextmanager
def output_folder(config: FinetuneConfig, folder: Path):
    """
    Make the output folder and lock it for the block, so that no other run writes there.

    If the folder is new and still empty after the block, it is deleted. Only the main process calls this.

    Raises:
        UserError: the folder cannot be written, is locked by another run, or is refused by `check_output_folder`.
    """
    with folders.locked_folder(folder):
        run_folder.check_output_folder(config, folder, config.model, is_finetuning=True)
        try:
            with messages.writing(folder, f", and {messages.GO_ON}"):
                yield
        except (KeyboardInterrupt, SystemExit):
            if (folder / card.RUN_FILE).exists():
                logger.warning(f"stopped: {messages.GO_ON} and the same options")
            raise


def start_folder(config: FinetuneConfig, folder: Path, record: dict) -> None:
    """
    Write `run_config.json`; when resuming, compare it with that of the run first; when replacing, delete the run.

    Raises:
        UserError: the run to resume had other options, rows or another model, or more seeds.
    """
    then = folders.read_json(folder / card.RUN_FILE) if config.resume_from_checkpoint else {}
    if then:
        before, now = _identity(then), _identity(record)
        seeds = then["finetune"]["num_seeds"]
        cases = {
            f"{name} was {before.get(name)!r} when the run was started, and is {value!r} now; give the same, or start "
            f"a new run in another folder": before.get(name) != value
            for name, value in now.items()
        }
        cases[f"num_seeds was {seeds}; give as many or more, or start a new run in another folder"] = (
            config.num_seeds < seeds
        )
        return messages.refuse_first(cases, f"output_dir {folder}: ")
    if config.resume_from_checkpoint:
        logger.warning(f"{folder}: no run yet, starting from the beginning")
    # What this run may not replace of an earlier one, the weights first; all other files stay.
    drawn = folders.read_json(folder / card.METRICS_FILE).get("pictures", {})
    for name in (WEIGHTS_FILE, PREDICTIONS_FILE, *(Path(picture).name for picture in drawn), card.METRICS_FILE):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / WORK_FOLDER, *(folder / "runs").glob("rate-*-seed-*")):
        shutil.rmtree(path, ignore_errors=True)
    folders.write_json(folder / card.RUN_FILE, record)


def _identity(record):
    """What a run and its resumption must share, by the names in messages: options, rows and model."""
    rows = {f"the {split} rows": table["fingerprint"] for split, table in record["data"]["splits"].items()}
    options = {name: value for name, value in record["identity"].items() if name != "num_seeds"}
    return {**options, **rows, "the model": record["base_model"]}


def make_record(run) -> dict:
    """The content of `run_config.json`: options, rows, base model, versions, and the command that repeats the run."""
    config, start, splits, task = run.config, run.start, run.splits, run.task
    arguments = run.arguments(run.rates[0], config.seed)
    warmup = arguments.warmup_steps
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")
    prints = {getattr(config, f"{name}_file", None): split.fingerprint for name, split in splits.items()}
    prints |= {config.model: start.fingerprint}
    paths = [config.train_file, config.validation_file, config.test_file, config.output_dir]
    paths += [path for path in (config.model, config.dataset) if path and Path(path).exists()]
    record = {
        "kind": config.task_type,
        "auto_class": task.auto_class,
        "pipeline_task": task.pipeline_task,
        "rows_per_step": arguments.per_device_train_batch_size * run.processes * config.gradient_accumulation_steps,
        "warmup": f"{warmup:,} steps" if warmup >= 1 else f"{100 * warmup:.3g} % of the steps",
        "finetune": dataclasses.asdict(config),
        "identity": {**config.identity(), "learning_rates": run.rates, "processes": run.processes},
        "learning_rates": run.rates,
        "max_seq_length": start.max_seq_length,
        "dropout": start.dropout,
        "base_model": {
            "name": start.name if start.fingerprint is None else folders.base_name(start.name),
            "revision": start.revision,
            "fingerprint": start.fingerprint,
            "model_type": start.config.model_type,
        },
        "data": {
            "splits": {
                name: {"name": split.name, "rows": len(split.cells), "fingerprint": split.fingerprint}
                for name, split in splits.items()
            },
            "held_out": splits["validation"].held_out if "validation" in splits else 0.0,
            "test_is_labelled": "test" in run.measured(),
            "shared_with_training": {name: split.shared for name, split in splits.items() if name != "train"},
            "hub_datasets": [splits["train"].hub_id] if splits["train"].hub_id else [],
            "labels": task.classes or None,
            **task.recorded,
        },
        "local_paths": {
            path: {"name": folders.base_name(path), "fingerprint": prints.get(path)} for path in filter(None, paths)
        },
        "command": command_line(config),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }
    return card.portable(record)


def command_line(config: FinetuneConfig) -> str:
    """The shell command that repeats a run: options with other values than the defaults; paths by their last part."""
    words, defaults = ["d2l-bert", "finetune"], FinetuneConfig()
    inputs = ("model", "train_file", "validation_file", "test_file", "dataset", "license")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(defaults, field.name) and (field.name in inputs or field.metadata["identity"]):
            if field.name.endswith("_file") or (field.name in ("model", "dataset") and Path(value).exists()):
                value = folders.base_name(value)
            words += [value] if field.name == "model" else options.flag(field.name, value)
    return shlex.join(words)


# ---------------------------------------------------------------------------------------------------------------------
# The end of a run


def write_folder(run, model, outputs: dict, metrics: dict, logs: dict[str, list[dict]]) -> str:
    """
    Write the finished folder; only the main process calls this.

    Args:
        run: the `Run`.
        model: the trained model to keep, as in training.
        outputs: its outputs for the test rows, and for the rows to report on, by split.
        metrics: what `make_metrics` has made.
        logs: the rows of Trainer's log, by the name of the model; the kept one's first.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    task, splits, folder = run.task, run.splits, run.folder
    with folders.replacing_files(folder, last=WEIGHTS_FILE) as partial:
        task.finish(model)
        is_ours = isinstance(model.config, configuration_d2l_bert.D2lBertConfig)
        conversion.save_with_code(model, partial) if is_ours else conversion.save_model(model, partial)
        wordpiece.save_tokenizer(run.start.tokenizer, partial)
        if "test" in splits:
            predicted = task.predictions(splits["test"], outputs["test"])
            write_table(partial / PREDICTIONS_FILE, splits["test"].columns, splits["test"].cells, predicted)
        title = f"{folder.resolve().name}: {run.config.task}, {next(iter(logs))}"
        metrics["pictures"] = draw_curves(logs, run.metric, title, partial)
        # Of the test rows, or of the validation rows if the test rows have no labels.
        for name in run.measured()[-1:]:
            metrics["classification_report"] = {name: task.report(splits[name], outputs[name])}
            if numbers := task.numbers(splits[name], outputs[name]):
                metrics["pictures"] |= draw_confusion(*numbers, task.classes, splits[name].name, partial)
        folders.write_json(partial / card.METRICS_FILE, metrics)
        folders.write_json(partial / card.RUN_FILE, run.record)
        text = card.render_card(partial, folder.resolve().name)
        (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
    for other in set((folder / WORK_FOLDER).iterdir()) - {folder / WORK_FOLDER / next(iter(logs))}:
        shutil.rmtree(other / MODEL_FOLDER, ignore_errors=True)
    return results_text(run, metrics)


def write_table(path: Path, columns: list[str], rows: list[dict], predicted: dict[str, list]) -> None:
    """Write rows and what was predicted for them as CSV in UTF-8; lists and dicts as JSON."""
    names = [f"{name} (predicted)" if name in columns else name for name in predicted]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *names])
        for cells, *more in zip(rows, *predicted.values(), strict=True):
            values = [*(cells.get(column) for column in columns), *more]
            writer.writerow(
                json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value for value in values
            )


def make_metrics(run, tried: list[dict], seeds: list[dict], kept: dict) -> dict:
    """
    The content of metrics.json, without pictures and the report by class.

    Returns:
        `test_accuracy` and the like: the figures of the model in the folder. `mean` and `sd`: mean and standard
        deviation (with n - 1) over the seeds, by split and metric; `sd` is None for one seed. `most_frequent_class`:
        of one class of several, the share of the most frequent one, by split. `f1_of`: the class that F1 is of, where
        there are two. `seeds`: each seed's figures. `rates`: the figures of the first seed with each rate.
    """
    task, splits, measured = run.task, run.splits, run.measured()
    names, shown = (*task.metrics_shown, "loss"), ("seed", "learning_rate", "steps", "best_step", "seconds", *measured)
    over = {split: {name: [result[split][name] for result in seeds] for name in names} for split in measured}
    beside = {name: split for name, split in splits.items() if name != "train"}
    trained = {(result["learning_rate"], result["seed"]): result["seconds"] for result in (*tried, *seeds)}
    has_one_class = run.config.task_type == "text-classification"
    return {
        **{f"{split}_{name}": kept[split][name] for split in measured for name in names},
        "most_frequent_class": {
            name: Counter(example.label for example in splits[name].examples).most_common(1)[0][1]
            / len(splits[name].examples)
            for name in (measured if has_one_class else [])
        },
        "f1_of": task.classes[1] if has_one_class and len(task.classes) == 2 else None,
        "best_metric": run.metric,
        "kept_seed": kept["seed"],
        "learning_rate": kept["learning_rate"],
        "mean": {
            split: {name: statistics.fmean(values) for name, values in over[split].items()} for split in measured
        },
        "sd": {
            split: {name: statistics.stdev(values) if len(seeds) > 1 else None for name, values in over[split].items()}
            for split in measured
        },
        "seeds": [{name: result[name] for name in shown} for result in seeds],
        "rates": [{name: result[name] for name in shown} for result in tried],
        "metrics_shown": list(task.metrics_shown),
        "train_seconds": round(sum(trained.values()), 2),
        "unknown_share": {
            name: account.unknown_share(
                run.start.tokenizer, (text for example in split.examples for text in example.texts)
            )
            for name, split in beside.items()
        },
        "lost_to_length": {name: split.note for name, split in splits.items()},
        "shared_with_training": {name: split.shared for name, split in beside.items()},
        "diverged_rates": sorted(set(run.rates) - {result["learning_rate"] for result in (*tried, *seeds)}),
        "diverged_seeds": sorted(set(run.seeds) - {result["seed"] for result in seeds}),
    }


def results_text(run, metrics: dict) -> str:
    """The table at the end of a run: a line for each seed, mean and standard deviation, and what the folder holds."""
    names, lines = metrics["metrics_shown"], []
    for split in run.measured():
        rows = {f"seed {result['seed']}": result[split] for result in metrics["seeds"]}
        if len(rows) > 1:
            rows |= {"mean": metrics["mean"][split], "sd": metrics["sd"][split]}
        unknown = f"{metrics['unknown_share'][split]:.1%} of the characters in [UNK]"
        lines.append(
            f"{split}: {messages.counted(len(run.splits[split].cells), 'row')} of {run.splits[split].name}; {unknown}"
        )
        table = {"": names} | {
            label: [figures.shown_metric(name, row[name]) for name in names] for label, row in rows.items()
        }
        widths = [max(9, *map(len, column)) + 2 for column in zip(*table.values(), strict=True)]
        for label, cells in table.items():
            kept = " (kept)" if len(rows) > 1 and label == f"seed {metrics['kept_seed']}" else ""
            shown = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append("".join([f"  {label:>8}", *shown]) + kept)
        if metrics["f1_of"]:
            lines.append(f"  f1 is that of the class {metrics['f1_of']!r}")
        if comparison := figures.no_better(metrics, split):
            lines.append(f"  {comparison}")
    lines.append(
        f"trained in {metrics['train_seconds']:,.0f} s; the model of seed {metrics['kept_seed']} with rate "
        f"{metrics['learning_rate']:g} is in {run.folder}"
    )
    if "test" in run.splits:
        lines.append(f"predictions for the test rows: {run.folder / PREDICTIONS_FILE}")
    return "\n".join(lines)
