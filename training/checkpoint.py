"""Resumable state: `checkpoint-<step>/`, complete or not there at all, and without a pickle.

The data order and every dropout mask follow from the step: weights, optimizer moments and the step are all it takes.
A checkpoint is also a model folder: `from_pretrained` loads it.
"""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from d2l_bert.training.tracking import say


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


def save_checkpoint(folder: Path, step: int, model, optimizer, state: dict, keep: int) -> Path:
    """
    Write `folder/checkpoint-<step>` beside and rename it when it is complete and synced; drop all but the last `keep`.

    Args:
        step: optimizer steps done.
        model: the bare model (not the distributed wrapper).
        optimizer: its AdamW.
        state: what else to keep, as JSON; `step` is added.
    """
    final = folder / f"checkpoint-{step}"
    partial = folder / f".checkpoint-{step}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    save_file(_optimizer_tensors(model, optimizer), partial / OPTIMIZER_FILE)
    (partial / STATE_FILE).write_text(json.dumps({**state, "step": step}, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if final.exists():  # from a run that was resumed from an earlier step
        shutil.rmtree(final)
    partial.rename(final)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """The checkpoints in a run's folder, oldest first; with those that were never finished if asked for."""
    pattern = r"\.?checkpoint-\d+(\.part)?" if unfinished else r"checkpoint-\d+"
    found = (path for path in folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_dir())
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(re.search(r"\d+", path.name).group())


def find_checkpoint(wanted: str, folder: Path) -> Path | None:
    """
    The checkpoint that `--resume_from_checkpoint` names: a path, or `latest`, the last one that is whole, if any is.

    Raises:
        ValueError: a path that is no checkpoint, or a damaged one.
    """
    if wanted != "latest":
        read_state(Path(wanted))
        return Path(wanted)
    for path in reversed(checkpoints(folder)):
        try:
            read_state(path)
            return path
        except ValueError as error:
            say(f"{error}; trying the one before")
    say(f"{folder}: no checkpoint yet, starting from the beginning")
    return None


def read_state(checkpoint: Path) -> dict:
    """
    The JSON part of a checkpoint whose files are whole.

    Raises:
        ValueError: not a checkpoint, or a damaged one.
    """
    if not (checkpoint / STATE_FILE).is_file():
        raise ValueError(
            f"{checkpoint}: not a checkpoint (no {STATE_FILE}); give a checkpoint-<step> folder, or latest"
        )
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
        for name in ("step", "max_steps", "identity"):
            state[name]
        for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
            with safe_open(checkpoint / name, "pt"):
                pass
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{checkpoint}: damaged ({type(error).__name__}: {error}); give another checkpoint") from None
    return state


def load_checkpoint(checkpoint: Path, model, optimizer) -> None:
    """Put a checkpoint's weights and moments into the bare model and its AdamW."""
    weights = load_file(checkpoint / WEIGHTS_FILE)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(model.all_tied_weights_keys)
    if set(missing) - tied or unexpected:
        raise ValueError(f"{checkpoint}: its weights are not this model's ({[*missing, *unexpected][0]})")
    moments = load_file(checkpoint / OPTIMIZER_FILE)
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            tensor = moments[f"{name}|{key}"]
            optimizer.state[parameter][key] = tensor.to(parameter.device)


def _optimizer_tensors(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            tensors[f"{name}|{key}"] = tensor.contiguous()
    return tensors


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
