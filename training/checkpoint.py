"""Resumable state: `checkpoint-<step>/`, complete or not there at all, every byte as it was saved, and no pickle.

The data order and every dropout mask follow from the step: weights, optimizer moments and the step are all it takes.
A checkpoint is also a model folder: `from_pretrained` loads it.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from d2l_bert import folders
from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.modeling.saving import save_with_code
from d2l_bert.progress import say
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.distributed import on_main, plain_model, spread, whole
from d2l_bert.training.optim import MovingAverage


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
MANIFEST_FILE = "manifest.json"


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint holds


@dataclass
class Learner:
    """What an optimizer step changes: weights, moments, and what else depends on the steps before."""

    accelerator: Accelerator
    model: nn.Module  # the bare one; its parameters may be FSDP's shards
    optimizers: list[torch.optim.Optimizer]
    average: MovingAverage | None = None

    def __post_init__(self):
        # Once and for all: in the middle of things FSDP shows others under these names.
        self.parameters = dict(self.model.named_parameters())

    def plain(self, averaged: bool = False) -> nn.Module | None:
        """The model in one piece, on the processor, in the main process; None in others. All must call.

        Args:
            averaged: with the moving average of the weights, if there is one.
        """
        weights = self.averages() if averaged and self.average else self._gather(self.parameters.items())
        return plain_model(self.model, weights) if self.accelerator.is_main_process else None

    def averages(self) -> dict[str, torch.Tensor]:
        """The moving average of every parameter, whole, in the main process; as `plain`."""
        return self._gather(self.average.tensors().items() if self.average else ())

    def moments(self) -> dict[str, torch.Tensor]:
        """What the optimizers know of each parameter, as `<parameter>|<key>`; as `plain`."""
        return self._gather(
            (f"{name}|{key}", tensor)
            for name, parameter in self.parameters.items()
            for key, tensor in self._state_of(parameter).items()
        )

    def load(self, folder: Path, scaler: dict | None) -> None:
        """
        Take over what the files in a checkpoint's folder hold. The main process reads them, for all.

        Raises:
            UserError: they are of another model.
        """
        self._fill(folder / WEIGHTS_FILE, self.parameters)
        self.model.tie_weights()
        moments = {}
        self.forget_moments()
        for full_name, shape in self._shapes(folder / OPTIMIZER_FILE).items():
            name, _, key = full_name.rpartition("|")
            if name in self.parameters:
                # Adam's count of steps is a number beside its moments, which have the parameter's shape.
                like = self.parameters[name]
                has_its_shape = shape == list(like.shape)
                moment = torch.zeros_like(like) if has_its_shape else torch.zeros(shape, device=like.device)
                moments[full_name] = self._state_of(like)[key] = moment.detach()
        self._fill(folder / OPTIMIZER_FILE, moments)
        if self.average:
            self._fill(folder / AVERAGE_FILE, self.average.tensors())
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(scaler)

    def forget_moments(self) -> None:
        """Leave no trace of steps that were tried at a rate of 0: the weights are as they were."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def _state_of(self, parameter):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(parameter is other for other in group["params"]):
                    return optimizer.state[parameter]
        raise AssertionError("a parameter without an optimizer")

    def _gather(self, named: Iterable[tuple[str, torch.Tensor]]):
        gathered = {}
        for name, tensor in named:
            tensor = whole(tensor)
            if self.accelerator.is_main_process:
                gathered[name] = tensor.cpu().contiguous()
        return gathered

    def _shapes(self, path):
        return on_main(self.accelerator, _read_shapes, path)

    def _fill(self, path, targets):
        found = self._shapes(path)
        other = found.keys() ^ targets.keys() or {n for n in found if found[n] != list(targets[n].shape)}
        if other:
            raise UserError(f"{path}: not of this model ({min(other)}); give a checkpoint of this run")
        reads = self.accelerator.is_main_process
        with safe_open(path, "pt") if reads else contextlib.nullcontext() as file:
            for name, target in targets.items():
                spread(file.get_tensor(name) if reads else None, target)


def _read_shapes(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}


# ---------------------------------------------------------------------------------------------------------------------
# Write


def save_checkpoint(folder: Path, step: int, learner: Learner, tokenizer, state: dict, keep: int) -> Path:
    """
    Write `folder/checkpoint-<step>` beside and rename it when it is complete and synced; drop all but the last `keep`.
    All processes must call; the main one writes.

    Args:
        step: optimizer steps done.
        tokenizer: saved with the model.
        state: what else to keep, as JSON; `step` is added.

    Raises:
        UserError: it cannot be written, the disk is full perhaps. What was saved before is still there.
    """
    scaler = learner.accelerator.scaler
    state = {**state, "step": step, "scaler": scaler.state_dict() if scaler else None}
    tensors = {OPTIMIZER_FILE: learner.moments(), AVERAGE_FILE: learner.averages()}
    model, final = learner.plain(), folder / f"checkpoint-{step}"
    return on_main(learner.accelerator, _write, final, model, tokenizer, tensors, state, keep)


def _write(final, model, tokenizer, tensors, state, keep):
    partial = _hidden(final)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with folders.os_errors():
            save_with_code(model, partial)
            save_tokenizer(tokenizer, partial)
            for name, named in tensors.items():
                if named:
                    save_file(named, partial / name)
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        (partial / MANIFEST_FILE).write_text(_manifest({path.name: _hash(path) for path in sorted(partial.iterdir())}))
        for path in (*partial.iterdir(), partial):
            folders.sync(path)
        partial.rename(final)
        folders.sync(final.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final}: {why_unwritable(error, f', and {GO_ON}')}; earlier checkpoints are as they were"
        ) from None
    for old in checkpoints(final.parent)[:-keep]:
        try:
            drop(old)
        except OSError as error:
            say(f"{old}: cannot be deleted ({error.strerror or error}), and stays")
    return final


def drop(checkpoint: Path) -> None:
    """Delete a checkpoint, never leaving half of one under its name."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    if not checkpoint.name.startswith("."):
        checkpoint = checkpoint.rename(_hidden(checkpoint))
    shutil.rmtree(checkpoint)


def _hidden(checkpoint):
    return checkpoint.with_name(f".{checkpoint.name}.part")


def _hash(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(hashes):
    return json.dumps({"sha256": hashes}, indent=2) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Checkpoint:
    """A checkpoint whose every byte is as it was saved, and the JSON part of it."""

    path: Path
    state: dict


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """The checkpoints in a run's folder, oldest first; with those that were never finished if asked for."""
    if not folder.is_dir():  # another machine's
        return []
    pattern = r"\.?checkpoint-\d+(\.part)?" if unfinished else r"checkpoint-\d+"
    found = (path for path in folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_dir())
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(re.search(r"\d+", path.name).group())


def find_checkpoint(wanted: str, folder: Path) -> Checkpoint | None:
    """
    The checkpoint that `--resume_from_checkpoint` names: a path, or `latest`, the last one that is whole; None if
    there is none yet.

    Raises:
        UserError: a path that is no checkpoint, or a damaged one; or all of them are damaged.
    """
    if wanted != "latest":
        return read_checkpoint(Path(wanted))
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except UserError as error:
            if path == found[0]:
                raise UserError(f"{error}; there is none before it: --overwrite_output_dir starts anew") from None
            say(f"{error}; trying the one before")
    say(f"{folder}: no checkpoint yet, starting from the beginning")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """
    A checkpoint, after comparing every byte of it with its manifest.

    Raises:
        UserError: not a checkpoint, or a damaged one.
    """
    try:
        manifest = (path / MANIFEST_FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        what = "damaged" if (path / STATE_FILE).exists() else "not a checkpoint"
        raise UserError(f"{path}: {what} (no {MANIFEST_FILE}); give a checkpoint-<step> folder, or latest") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({MANIFEST_FILE}: {error}); give another checkpoint") from None
    try:
        saved = json.loads(manifest)["sha256"]
        found = {name: _hash(path / name) for name in saved}
        changed = [name for name in saved if found[name] != saved[name]]
        # A manifest that was changed itself is not what would be written for what it says.
        if changed or manifest != _manifest(found):
            raise UserError(f"{(changed or [MANIFEST_FILE])[0]} is not as it was saved")
    except OSError as error:
        raise UserError(
            f"{path}: damaged ({Path(error.filename).name}: {error.strerror}); give another checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); give another checkpoint") from None
    return Checkpoint(path, json.loads((path / STATE_FILE).read_text()))
