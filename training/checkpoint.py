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
from safetensors.torch import load_file, save_file


STATE_FILE = "training_state.json"
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


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's folder, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("checkpoint-*") if (m := re.fullmatch(r".*-(\d+)", path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def find_checkpoint(wanted: str, folder: Path) -> Path | None:
    """
    The checkpoint that `--resume_from_checkpoint` names: a path, or `latest`, which may find none.

    Raises:
        ValueError: a path that is no checkpoint.
    """
    if wanted == "latest":
        return next(reversed(checkpoints(folder)), None)
    path = Path(wanted)
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"{path}: not a checkpoint (no {STATE_FILE}); give a checkpoint-<step> folder, or latest")
    return path


def read_state(checkpoint: Path) -> dict:
    """The JSON part of a checkpoint."""
    return json.loads((checkpoint / STATE_FILE).read_text())


def load_checkpoint(checkpoint: Path, model, optimizer) -> None:
    """Put a checkpoint's weights and moments into the bare model and its AdamW."""
    weights = load_file(checkpoint / "model.safetensors")
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
