"""The output folder of a fine-tuning run: checks and lock, `run_config.json`, the finished model with its tables."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import logging
import platform
import shlex
import shutil
from pathlib import Path

from d2l_bert import folders
from d2l_bert.folders import locked_folder
from d2l_bert.messages import GO_ON, refuse_first, writing
from d2l_bert.model_cards.card import METRICS_FILE, RUN_FILE
from d2l_bert.options import flag
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import Data
from d2l_bert.training.finetuning.kind import Kind
from d2l_bert.training.finetuning.start import Start
from d2l_bert.training.finetuning.trainer import rows_per_step, warmup
from d2l_bert.training.run_folder import check_output_folder


logger = logging.getLogger(__name__)


WORK_FOLDER = "models_in_training"
WEIGHTS_FILE = "model.safetensors"
PREDICTIONS_FILE = "predictions.csv"


@contextlib.contextmanager
def output_folder(config: FinetuneConfig):
    """
    Make the output folder and lock it for the block, so that no other run writes there; yields the folder.

    If the folder is new and still empty after the block, it is deleted. Only the main process calls this.

    Raises:
        UserError: the folder cannot be written, is locked by another run, or is refused by `check_output_folder`.
    """
    folder = folder_of(config)
    with locked_folder(folder):
        check_output_folder(config, folder, config.model, is_finetuning=True)
        try:
            with writing(folder, f", and {GO_ON}"):
                yield folder
        except (KeyboardInterrupt, SystemExit):
            if (folder / RUN_FILE).exists():
                logger.warning(f"stopped: {GO_ON} and the same options")
            raise


def folder_of(config: FinetuneConfig) -> Path:
    """`output_dir`, or `MODEL-TASK` in the working directory."""
    return Path(config.output_dir or f"{folders.base_name(config.model)}-{config.task}")


def start_folder(config: FinetuneConfig, folder: Path, record: dict) -> None:
    """
    Write `run_config.json`; when resuming, compare it with that of the run first; when replacing, delete the run.

    Raises:
        UserError: the run to resume had other options, rows or another model.
    """
    if config.resume_from_checkpoint and (folder / RUN_FILE).exists():
        then = _identity(folders.read_json(folder / RUN_FILE))
        cases = {
            f"{name} was {then.get(name)!r} when the run was started, and is {value!r} now; give the same, or start a "
            f"new run in another folder": then.get(name) != value
            for name, value in _identity(record).items()
        }
        return refuse_first(cases, f"output_dir {folder}: ")
    if config.resume_from_checkpoint:
        logger.warning(f"{folder}: no run yet, starting from the beginning")
    # What this run may not replace of an earlier one, the weights first; all other files stay.
    pictures = folders.read_json(folder / METRICS_FILE).get("pictures", {})
    for name in (WEIGHTS_FILE, PREDICTIONS_FILE, *(Path(picture).name for picture in pictures), METRICS_FILE):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / WORK_FOLDER, *(folder / "runs").glob("rate-*-seed-*")):
        shutil.rmtree(path, ignore_errors=True)
    folders.write_json(folder / RUN_FILE, record)


def _identity(record):
    """What a run and its resumption must share, by the names in messages: options, rows and model."""
    rows = {f"the {split} rows": table["fingerprint"] for split, table in record["data"]["splits"].items()}
    return {**record["identity"], **rows, "the model": record["base_model"]}


def make_record(
    config: FinetuneConfig, kind: Kind, data: Data, start: Start, rates: list[float], processes: int
) -> dict:
    """The content of `run_config.json`: options, rows, base model, versions, and the command that repeats the run."""
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")
    paths = [config.train_file, config.validation_file, config.test_file, config.output_dir]
    paths += [path for path in (config.model, config.dataset) if path and Path(path).exists()]
    prints = {"train_file": "train", "validation_file": "validation", "test_file": "test"}
    of_files = {
        getattr(config, option): data.splits()[split].fingerprint
        for option, split in prints.items()
        if getattr(config, option)
    }
    of_files[config.model] = start.fingerprint
    identity = {**config.identity(), "learning_rates": rates, "processes": processes}
    dataset = config.dataset_name()
    return {
        "kind": config.kind,
        "auto_class": kind.auto_class,
        "pipeline_task": kind.pipeline_task,
        "rows_per_step": rows_per_step(config, processes),
        "warmup": f"{warmup(config):,} steps" if config.warmup_steps else f"{100 * warmup(config):.3g} % of the steps",
        "finetune": dataclasses.asdict(config),
        "identity": identity,
        "learning_rates": rates,
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
                split: {"name": table.name, "rows": len(table), "fingerprint": table.fingerprint}
                for split, table in data.splits().items()
            },
            "held_out": data.held_out,
            "test_is_labelled": data.test_is_labelled,
            "shared_with_training": data.shared,
            "hub_datasets": [dataset.partition(":")[0]] if data.train.is_on_hub else [],
            "labels": kind.classes or None,
            **kind.recorded,
        },
        "local_paths": {
            path: {"name": folders.base_name(path), "fingerprint": of_files.get(path)} for path in filter(None, paths)
        },
        "command": command_line(config),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }


def command_line(config: FinetuneConfig) -> str:
    """The shell command that repeats a run: options with other values than the defaults; paths by their last part."""
    words = ["d2l-bert", "finetune", folders.base_name(config.model) if Path(config.model).exists() else config.model]
    shortened = ("train_file", "validation_file", "test_file")
    inputs = (*shortened, "dataset", "license")
    defaults = FinetuneConfig(model=config.model)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "model" or value == getattr(defaults, field.name):
            continue
        if field.name not in inputs and not field.metadata["identity"]:
            continue
        if field.name in shortened or (field.name == "dataset" and Path(value).exists()):
            value = folders.base_name(value)
        words += flag(field.name, value)
    return shlex.join(words)


def write_table(path: Path, columns: dict[str, list], predicted: dict[str, list]) -> None:
    """Write the columns of rows, and what was predicted for the rows, as CSV in UTF-8; lists and dicts as JSON."""
    columns = dict(columns)
    for name, values in predicted.items():
        while name in columns:
            name = f"{name} (predicted)"
        columns[name] = values
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow(
                json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value for value in row
            )
