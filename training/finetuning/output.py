"""The output folder of a fine-tuning run: lock, `run_config.json`, the finished model, `metrics.json`, predictions."""

import csv
import dataclasses
import importlib.metadata
import itertools
import json
import logging
import math
import platform
import re
import shlex
import shutil
import statistics
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers.pipelines import PIPELINE_REGISTRY

from d2l_bert import folders, messages, options
from d2l_bert.model_cards import card, figures, pictures
from d2l_bert.modeling import conversion, loading
from d2l_bert.tokenization import coverage, tables, wordpiece
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.training import run_folder
from d2l_bert.training.checkpoint import WEIGHTS_FILE
from d2l_bert.training.finetuning import metrics as measures
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.splits import Split
from d2l_bert.training.finetuning.tasks import LEARNT


logger = logging.getLogger(__name__)

# A table of more cells than this has a filled cell for each so many.
MOST_CELLS = 10_000_000
MOST_CELLS_FOR_ONE = 100

# What Excel and its like may compute as a formula, also behind white space and with signs of full width
# (https://owasp.org/www-community/attacks/CSV_Injection); numbers begin with such signs, too.
FORMULA = re.compile("[\t\r\n]|\\s*[-=+@\uff1d\uff0b\uff0d\uff20]")
A_NUMBER = re.compile(r"[+-]?(\d+([.,]\d+)*|[.,]\d+)(e[+-]?\d+)?\s?%?", re.IGNORECASE | re.ASCII)

# In the folder of each rate and seed: the best one's model.
MODEL_FOLDER = "model"


def make_record(run) -> dict:
    """The content of `run_config.json`: options, rows, base model, versions, and the command that repeats the run."""
    config, splits, task = run.config, run.splits, run.task
    arguments, dataset = run.arguments(run.rates[0], config.seed), config.dataset_name()
    warmup, tag = arguments.warmup_steps, card.PIPELINE_TAGS[task.auto_class.removeprefix("AutoModel")]
    hub_dataset = dataset_and_config(dataset)[0] if splits["train"].is_dataset else None
    is_on_hub = hub_dataset is not None and not Path(hub_dataset).exists()
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")
    fingerprint = loading.hash_of_model(config.model) if Path(config.model).exists() else None
    read = {
        config.model: fingerprint,
        **{getattr(config, f"{name}_file"): split.fingerprint for name, split in splits.items()},
    }
    base = {
        "name": card.local_name(config.model),
        "revision": run.revision,
        "fingerprint": fingerprint,
    }
    record = card.portable(
        {
            "kind": config.task_type,
            "auto_class": task.auto_class,
            "pipeline_task": tag if tag in PIPELINE_REGISTRY.get_supported_tasks() else None,
            "rows_per_step": arguments.per_device_train_batch_size
            * run.processes
            * config.gradient_accumulation_steps,
            "warmup": f"{warmup:,} steps" if warmup >= 1 else f"{100 * warmup:.3g} % of the steps",
            "finetune": dataclasses.asdict(config),
            "identity": {
                **{**config.identity(), "learning_rates": run.rates, "processes": run.processes},
                **{f"the fingerprint of the {name} rows": split.fingerprint for name, split in splits.items()},
                "the model": base,
            },
            "learning_rates": run.rates,
            "max_seq_length": run.max_seq_length,
            "learnt": {name: vars(task)[name] for name in LEARNT if name in vars(task)},
            "dropout": run.dropout,
            "base_model": {
                **base,
                "model_type": run.model_config.model_type,
                "language": loading.read_run_record(config.model).get("run", {}).get("language")
                if fingerprint
                else None,
            },
            "data": {
                "splits": {
                    name: {"name": split.name, "rows": len(split.rows), "fingerprint": split.fingerprint}
                    for name, split in splits.items()
                },
                "held_out": splits["validation"].held_out if "validation" in splits else 0.0,
                "test_is_labelled": "test" in run.measured(),
                "shared_with_training": {name: split.shared for name, split in splits.items() if name != "train"},
                "hub_datasets": [hub_dataset] if is_on_hub else [],
                "has_pairs": len(task.columns) > 2,  # beside the column of labels, several
                "has_unanswerable": task.has_unanswerable,
            },
            "local_paths": {
                path: {"name": card.local_name(path), "fingerprint": fingerprint}
                for path, fingerprint in read.items()
                if path
            },
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in libraries},
            },
        }
    )
    given, others = (
        record["finetune"],
        ("train_file", "validation_file", "test_file", "dataset", "license", "num_seeds"),
    )
    words = options.flags(FinetuneConfig, given, dataclasses.asdict(FinetuneConfig()), others)
    return {**record, "command": shlex.join(["d2l-bert", "finetune", given["model"], *words])}


# ---------------------------------------------------------------------------------------------------------------------
# The end of a run


def write_folder(run, model, outputs: dict, tried: list[dict], seeds: list[dict], kept: dict) -> str:
    """
    Write the finished folder; only the main process calls this.

    Args:
        run: the `Run`.
        model: the trained model to keep, as in training.
        outputs: its outputs for the test rows, and for the rows to report on, by split.
        tried, seeds, kept: what `Run.train` has returned.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    task, splits, folder = run.task, run.splits, run.folder
    attempt = run.folder_of(kept["learning_rate"], kept["seed"])
    metrics = make_metrics(run, tried, seeds, kept)
    with folders.replacing_files(folder, last=WEIGHTS_FILE) as partial:
        task.finish(model)
        conversion.save_model(model, partial)
        wordpiece.save_tokenizer(run.tokenizer, partial)
        if "test" in splits:
            predicted = task.in_csv(task.predictions(splits["test"], outputs["test"]))
            write_table(partial / run_folder.PREDICTIONS_FILE, splits["test"], predicted)
        pictures.plot_finetuning(
            kept["log"],
            run.metric,
            f"{folder.resolve().name}: {run.config.task}, {attempt.name}",
            partial / card.CURVES_FILE,
        )
        metrics["pictures"] = {card.CURVES_FILE: "Loss and metric over the steps"}
        # Of the test rows, or of the validation rows if the test rows have no labels.
        for name in run.measured()[-1:]:
            if sides := task.sides(splits[name], outputs[name]):
                metrics["classification_report"] = {name: measures.report_by_class(*sides)}
                place = partial / pictures.CONFUSION_FILE
                if caption := pictures.plot_confusion(*sides, splits[name].name, place):
                    metrics["pictures"][place.name] = caption
        folders.write_json(partial / card.METRICS_FILE, metrics)
        folders.write_json(partial / card.RUN_FILE, run.record)
        text = card.render_card(partial, folder.resolve().name)
        if run.config.resume_from_checkpoint:
            text = card.updated_card(folder, text)
        (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
    for other in {*attempt.parent.iterdir()} - {attempt}:
        shutil.rmtree(other / MODEL_FOLDER, ignore_errors=True)
    # Of 264 letters: after 36 steps a model tells three classes half of the time, after 180 four fifths.
    few = (
        f"; {kept['steps']} steps are few: try --num_train_epochs 20"
        if kept["steps"] < 200 and not (run.config.num_train_epochs or run.config.max_steps)
        else ""
    )
    lines = [
        figures.results_table(metrics, run.record["data"]["splits"]),
        f"trained in {metrics['train_seconds']:,.0f} s; the model of seed {metrics['kept_seed']} with rate "
        f"{metrics['learning_rate']:g} is in {folder}{few}",
    ]
    if "test" in splits:
        lines.append(f"predictions for the test rows: {folder / run_folder.PREDICTIONS_FILE}")
    return "\n".join(lines)


def check_table(path: Path, split: Split) -> None:
    """
    Refuse rows that `write_table` could not write, before anything is predicted for them.

    Args:
        path: as in `write_table`.
        split: with all of its rows.

    Raises:
        UserError: a column of a Parquet file would have values of several kinds, or objects with too many names; or
            nearly all cells of the table would be empty, as where each row of JSONL has keys of its own.
    """
    if path.suffix == ".jsonl":  # a row has its own cells alone
        return
    cells = len(split.rows) * len(split.columns)
    filled = sum(len(row.cells) for row in split.rows)
    if cells > max(MOST_CELLS, MOST_CELLS_FOR_ONE * filled):
        raise messages.UserError(
            f"{split.label}: {len(split.columns):,} columns, of which a row has {filled / len(split.rows):.3g}, so "
            f"that a table of the predictions would be all but empty; give the rows the same columns"
        )
    if path.suffix == ".parquet":
        with messages.explained(split.label, "give the rows the same names, or write .jsonl", ValueError):
            tables.check_names(row.cells for row in split.rows)
        with _one_kind_a_column(split):
            columns = {name: pa.array([row.cells.get(name) for row in split.rows]) for name in split.columns}
            schema = pa.table(columns).schema
            pq.write_table(schema.empty_table(), pa.BufferOutputStream())  # not every kind has a form in Parquet


def _one_kind_a_column(split):
    """Turn PyArrow's errors about the kinds of values into a `UserError`."""
    what = f"{split.label}: a column has values of several kinds, or whole numbers of more than 63 bits"
    return messages.explained(what, "make them one kind, or write .jsonl", pa.ArrowException, OverflowError)


def write_table(
    path: Path,
    split: Split,
    predicted: dict[str, list],
    is_for_excel: bool = False,
) -> None:
    """
    Write the rows of a split, and what was predicted for them.

    Args:
        path: ends in `.jsonl` or `.parquet`, which have values as they are; else it is CSV, with lists and dicts as
            JSON. In JSON, which has no form for them, numbers that are not finite become null. Columns with bytes are
            left out of JSONL and CSV.
        predicted: by the names of new columns, a value for each row; None leaves the cell empty.
        is_for_excel: whether CSV has `;` between the cells, decimal commas, a byte order mark at its beginning, and an
            apostrophe before what Excel would take for a formula.

    Raises:
        UserError: a column of a Parquet file has values of several kinds.
    """
    # Columns of the rows keep their names, also those that an earlier `predict` has left.
    taken, renamed = {*split.columns, *predicted}, {}
    for name, values in predicted.items():
        new = name
        while new in split.columns or new in renamed or (new != name and new in taken):
            new += " (predicted)"
        renamed[new] = values
    predicted = renamed
    kept = split.columns if path.suffix == ".parquet" else _columns_without_bytes(split)
    new_cells = zip(*predicted.values(), strict=True) if predicted else itertools.repeat(())
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            kept_names = set(kept)
            for row, more in zip(split.rows, new_cells, strict=False):
                cells = {name: cell for name, cell in row.cells.items() if name in kept_names}
                file.write(f"{_as_json({**cells, **dict(zip(predicted, more, strict=True))})}\n")
    elif path.suffix == ".parquet":
        with _one_kind_a_column(split):
            columns = {name: [row.cells.get(name) for row in split.rows] for name in split.columns}
            pq.write_table(pa.table({**columns, **predicted}), path)
    else:
        with path.open("w", encoding="utf-8-sig" if is_for_excel else "utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=";" if is_for_excel else ",")
            rows = ([*map(row.cells.get, kept), *more] for row, more in zip(split.rows, new_cells, strict=False))
            for row in itertools.chain([[*kept, *predicted]], rows):
                cells = [_as_json(cell) if isinstance(cell, list | dict) else cell for cell in row]
                writer.writerow([_excel_cell(cell) for cell in cells] if is_for_excel else cells)


def _as_json(value):
    """A value as JSON; dates become texts, numbers that are not finite null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value):
    """A value with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(of_name) for name, of_name in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns_without_bytes(split):
    """The names of the columns of a split in which no cell holds bytes; of the others the user is told."""
    left_out = set()
    for row in split.rows:
        left_out.update(name for name, cell in row.cells.items() if _has_bytes(cell))
    for name in sorted(left_out):
        logger.warning(
            f"{split.label}: column {name!r:.100} holds bytes, and is left out, as a file of text has no form for "
            f"them; .parquet has"
        )
    return [name for name in split.columns if name not in left_out]


def _has_bytes(cell):
    """Whether a cell is bytes, or a list or a dict with some in it."""
    waiting = [cell]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bytes):
            return True
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return False


def _excel_cell(cell):
    """
    A cell as Excel shows it: numbers with decimal commas; an apostrophe before a text that Excel would compute as a
    formula, which may start programs. A text that is a number is none.
    """
    if isinstance(cell, float):
        return str(cell).replace(".", ",")
    if isinstance(cell, str) and FORMULA.match(cell) and not A_NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def make_metrics(run, tried: list[dict], seeds: list[dict], kept: dict) -> dict:
    """
    The content of metrics.json, without pictures and the report by class.

    Returns:
        `test_accuracy` and the like: the figures of the model in the folder. `mean` and `sd`: mean and standard
        deviation (with n - 1) over the seeds, by split and metric; `sd` is None for one seed. `know_nothing`: of a
        prediction that needs no model, by split, `prediction` in words, its `figures`, and `is_beaten`, whether the
        model in the folder is better. `f1_of`: the class that F1 is of, where there are two. `seeds`: each seed's
        figures. `rates`: the figures of the first seed with each rate.
    """
    task, splits, measured = run.task, run.splits, run.measured()
    names, shown = (*task.metrics_shown, "loss"), ("seed", "learning_rate", "steps", "best_step", "seconds", *measured)
    over = {split: {name: [result[split][name] for result in seeds] for name in names} for split in measured}
    trained = {(result["learning_rate"], result["seed"]): result["seconds"] for result in (*tried, *seeds)}
    return {
        **{f"{split}_{name}": kept[split][name] for split in measured for name in names},
        "know_nothing": {split: _know_nothing(run, split, kept[split]) for split in measured},
        "f1_of": task.classes[1] if "matthews_correlation" in names and len(task.classes) == 2 else None,
        "best_metric": run.metric,
        "kept_seed": kept["seed"],
        "learning_rate": kept["learning_rate"],
        "mean": {split: {name: statistics.fmean(of) for name, of in over[split].items()} for split in measured},
        "sd": {
            split: {name: statistics.stdev(of) if len(of) > 1 else None for name, of in over[split].items()}
            for split in measured
        },
        "seeds": [{name: result[name] for name in shown} for result in seeds],
        "rates": [{name: result[name] for name in shown} for result in tried],
        "metrics_shown": list(task.metrics_shown),
        "train_seconds": round(sum(trained.values()), 2),
        "unknown_share": {
            name: coverage.measure_unknown_share(run.tokenizer, (text for row in split.rows for text in row.texts))
            for name, split in splits.items()
            if name != "train"
        },
        "lost_to_length": {name: split.note for name, split in splits.items()},
        "diverged_rates": sorted(set(run.rates) - {rate for rate, _ in trained}),
        "diverged_seeds": sorted(set(run.seeds) - {result["seed"] for result in seeds}),
    }


def _know_nothing(run, name, reached):
    """The entry `know_nothing` of a split in metrics.json; None for a task without such a prediction."""
    split = run.splits[name]
    if (known := run.task.know_nothing(run.splits["train"], split)) is None:
        return None
    prediction, found = known
    metric = run.metric if run.metric in found else run.task.main_metric
    sign = -1 if metric in measures.LOWER_IS_BETTER else 1
    return {
        "prediction": prediction,
        # Its correlations are 0.
        "figures": {name: value for name, value in found.items() if value or figures.METRICS[name][1] == "%"},
        "is_beaten": sign * reached[metric] > sign * found[metric],
    }
