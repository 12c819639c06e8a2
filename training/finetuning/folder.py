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
from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.folders import LOCK_FILE, check_no_file, locked_folder
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RUN_FILE
from d2l_bert.training.checkpoint import checkpoints, step_of
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import Data
from d2l_bert.training.finetuning.kind import Kind
from d2l_bert.training.finetuning.start import Start
from d2l_bert.training.finetuning.trainer import COMPLETE_FILE, rows_per_step, warmup


logger = logging.getLogger(__name__)


WORK_FOLDER = "models_in_training"
PARTIAL_FOLDER = ".model.part"
WEIGHTS_FILE = "model.safetensors"
PREDICTIONS_FILE = "predictions.csv"

# What a finished run leaves beside the weights, the metrics and the pictures that the metrics name.
RUN_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "configuration_d2l_bert.py",
    "modeling_d2l_bert.py",
    CARD_FILE,
    CURVES_FILE,
    PREDICTIONS_FILE,
)


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
        check_output_folder(config, folder)
        try:
            with folders.os_errors():
                yield folder
        except OSError as error:
            raise UserError(f"{error.filename or folder}: {why_unwritable(error, f', and {GO_ON}')}") from None
        except (KeyboardInterrupt, SystemExit):
            if (folder / RUN_FILE).exists():
                logger.warning(f"stopped: {GO_ON} and the same options")
            raise


def folder_of(config: FinetuneConfig) -> Path:
    """`output_dir`, or `MODEL-TASK` in the working directory."""
    return Path(config.output_dir or f"{folders.base_name(config.model)}-{config.task}")


def check_output_folder(config: FinetuneConfig, folder: Path) -> None:
    """
    Check that a run may write to a folder that may exist.

    Raises:
        UserError: the path is a file; the folder holds the model to start from, other files, or a run that the options
            neither resume nor replace.
    """
    check_no_file(folder)
    if not folder.exists():
        return
    entries = {path.name for path in folder.iterdir()} - {LOCK_FILE, f".{RUN_FILE}.part"}
    start = Path(config.model).resolve()
    if start.exists() and folder.resolve() in (start, *start.parents):
        raise UserError(f"output_dir {folder}: holds the model to start from; name another folder")
    if RUN_FILE not in entries:
        if entries:
            raise UserError(
                f"output_dir {folder}: holds other files ({sorted(entries)[0]}) and no run; name a new or empty folder"
            )
        return
    if "finetune" not in folders.read_json(folder / RUN_FILE):
        raise UserError(f"output_dir {folder}: holds a run of another command; name a new or empty folder")
    if config.overwrite_output_dir and config.resume_from_checkpoint:
        raise UserError("resume_from_checkpoint continues a run and overwrite_output_dir replaces the run; give one")
    if not config.overwrite_output_dir and WEIGHTS_FILE in entries:
        raise UserError(
            f"output_dir {folder}: holds a finished run; replace it with --overwrite_output_dir, or name another "
            f"folder"
        )
    if not config.overwrite_output_dir and not config.resume_from_checkpoint:
        raise UserError(
            f"output_dir {folder}: holds a run; go on with --resume_from_checkpoint latest, replace it with "
            f"--overwrite_output_dir, or name another folder"
        )


def start_folder(config: FinetuneConfig, folder: Path, record: dict) -> None:
    """
    Write `run_config.json`; when resuming, compare it with that of the run first; when replacing, delete the run.

    Raises:
        UserError: the run to resume had other options, rows or another model; or `resume_from_checkpoint` names no
            checkpoint of this folder.
    """
    if config.resume_from_checkpoint and (folder / RUN_FILE).exists():
        _compare(folder, folders.read_json(folder / RUN_FILE), record)
        if config.resume_from_checkpoint != "latest":
            _go_back_to(folder, Path(config.resume_from_checkpoint))
        return
    if config.resume_from_checkpoint not in (None, "latest"):
        raise UserError(
            f"resume_from_checkpoint {config.resume_from_checkpoint}: is in another folder than output_dir {folder}; "
            f"give the output_dir of that run"
        )
    if config.resume_from_checkpoint == "latest":
        logger.warning(f"{folder}: no run yet, starting from the beginning")
    _delete_run(folder)
    folders.write_json(folder / RUN_FILE, record)


def _delete_run(folder):
    """Delete what an earlier run wrote to the folder, the weights first; all other files stay."""
    for path in _files_of_run(folder):
        path.unlink(missing_ok=True)
    for path in _folders_of_run(folder):
        shutil.rmtree(path)


def _files_of_run(folder):
    """The files that a run leaves in its output folder, the weights first; without `run_config.json`."""
    pictures = folders.read_json(folder / METRICS_FILE).get("pictures", {})
    names = (WEIGHTS_FILE, *RUN_FILES, *(Path(picture).name for picture in pictures), METRICS_FILE)
    return [folder / name for name in names]


def _folders_of_run(folder):
    """The folders that a run has made in its output folder."""
    made = (folder / WORK_FOLDER, folder / PARTIAL_FOLDER, *(folder / "runs").glob("rate-*-seed-*"))
    return [path for path in made if path.exists()]


def _compare(folder, before, now):
    # A run of an earlier version has no values of newer options: it ran with what are their defaults now.
    identity = {**FinetuneConfig(model="").identity(), **before.get("identity", {})}
    for name, value in now["identity"].items():
        if identity.get(name) != value:
            then, given = (
                f"without {name}" if setting in (None, []) else f"with {name} {_written(setting)}"
                for setting in (identity.get(name), value)
            )
            raise UserError(
                f"output_dir {folder}: the run was started {then}, and is resumed {given}; give the same, or start "
                f"a new run in another folder"
            )
    for split in now["data"]["splits"]:
        if before["data"]["splits"].get(split) != now["data"]["splits"][split]:
            raise UserError(
                f"output_dir {folder}: the {split} rows are others than when the run was started; give the same rows, "
                f"or start a new run in another folder"
            )
    if before["base_model"] != now["base_model"]:
        raise UserError(
            f"output_dir {folder}: the run was started from another model ({before['base_model']['name']}, "
            f"{before['base_model']['revision'] or before['base_model']['fingerprint']}); give the same, or start a "
            f"new run in another folder"
        )


def _written(setting):
    """An option's value as it is written on the command line."""
    return " ".join(map(str, setting)) if isinstance(setting, list) else str(setting)


def _go_back_to(folder, checkpoint):
    """Delete the later checkpoints of the model that a checkpoint belongs to."""
    if (
        not (checkpoint / COMPLETE_FILE).is_file()
        or checkpoint.resolve().parent.parent != (folder / WORK_FOLDER).resolve()
    ):
        raise UserError(
            f"resume_from_checkpoint {checkpoint}: no complete checkpoint of output_dir {folder}; give latest, or a "
            f"folder checkpoint-* below {folder / WORK_FOLDER}"
        )
    for later in checkpoints(checkpoint.parent):
        if step_of(later) > step_of(checkpoint):
            shutil.rmtree(later)


def make_record(
    config: FinetuneConfig, kind: Kind, data: Data, start: Start, rates: list[float], processes: int
) -> dict:
    """The content of `run_config.json`: options, rows, base model, versions, and the command that repeats the run."""
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")
    paths = [config.train_file, config.validation_file, config.test_file, config.output_dir]
    paths += [config.resume_from_checkpoint] if config.resume_from_checkpoint != "latest" else []
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
        "kind": config.kind_name(),
        "auto_class": kind.auto_class,
        "pipeline_task": kind.pipeline_task,
        "rows_per_step": rows_per_step(config, processes),
        "warmup": f"{warmup(config):,} steps" if config.warmup_steps else f"{100 * warmup(config):.3g} % of the steps",
        "finetune": dataclasses.asdict(config),
        "identity": identity,
        "learning_rates": rates,
        "max_seq_length": start.max_seq_length,
        "dropout": start.dropout,
        "base_model": start.record(),
        "data": {
            **data.record(),
            "hub_datasets": [dataset.partition(":")[0]] if data.train.is_on_hub else [],
            **kind.data_record(),
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
        words.append(f"--{field.name}")
        if isinstance(value, bool):
            words.append(str(value).lower())
        else:
            words += [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def write_table(path: Path, columns: dict[str, list]) -> None:
    """Write columns as CSV in UTF-8; lists and dicts as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow(
                json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value for value in row
            )
