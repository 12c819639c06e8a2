"""Checkpoints on disk: written atomically as `checkpoint-<step>/`, checked by SHA-256 when read, without pickle.

Batches and dropout masks follow from the seed and the step, so a checkpoint holds weights, optimizer moments and the
step, but no RNG state. A checkpoint is also a model folder that `from_pretrained` loads.
"""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from d2l_bert import folders
from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.modeling.saving import save_with_code
from d2l_bert.tokenization.cache import content_hash
from d2l_bert.tokenization.wordpiece import save_tokenizer


logger = logging.getLogger(__name__)


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
MANIFEST_FILE = "manifest.json"


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_checkpoint(final: Path, model, tokenizer, tensors: dict[str, dict], state: dict, keep: int) -> Path:
    """
    Write a checkpoint, and delete all but the last `keep` checkpoints of the run.

    The checkpoint is written to a hidden folder, synced to the disk, and then renamed to `final`, so that `final` is
    never incomplete.

    Args:
        model: an unsharded model on the CPU.
        tensors: further files by name, each a dict of named tensors; no file is written for an empty dict.
        state: the content of the checkpoint's JSON file.

    Returns:
        `final`.

    Raises:
        UserError: the checkpoint cannot be written, for example because the disk is full. Earlier checkpoints are
            unchanged.
    """
    try:
        with folders.atomic_folder(final) as partial:
            save_with_code(model, partial)
            save_tokenizer(tokenizer, partial)
            for name, named in tensors.items():
                if named:
                    save_file(named, partial / name)
            (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
            hashes = {path.name: content_hash(path) for path in sorted(partial.iterdir())}
            (partial / MANIFEST_FILE).write_text(json.dumps({"sha256": hashes}, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"{final}: {why_unwritable(error, f', and {GO_ON}')}; earlier checkpoints are unchanged"
        ) from None
    for old in checkpoints(final.parent)[:-keep]:
        try:
            delete(old)
        except OSError as error:
            logger.warning(f"{old}: cannot be deleted ({error.strerror or error}); delete this checkpoint yourself")
    return final


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. The folder is renamed first, so that its name never stands for half a checkpoint."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    if not checkpoint.name.startswith("."):
        checkpoint = checkpoint.rename(folders.hidden(checkpoint))
    shutil.rmtree(checkpoint)


class Saver:
    """
    Saves the checkpoints of a run, at most one for each step. Every process must call `save`.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        tokenizer: saved in every checkpoint.
        run_state: entries of the JSON file that are the same in every checkpoint of the run: the micro-batch size and
            number of steps that the run chose at its start, and the run's identity.
        resumed: the checkpoint that the run resumes from.

    Attributes:
        path: the last checkpoint, or `resumed`; None if there is neither.
    """

    def __init__(self, learner, folder: Path, tokenizer, run_state: dict, resumed: "Checkpoint | None"):
        self.learner, self.folder, self.tokenizer, self.run_state = learner, folder, tokenizer, run_state
        self.step, self.path = (resumed.state["step"], resumed.path) if resumed else (0, None)

    def save(self, step: int, state: dict) -> None:
        """
        Save a checkpoint after a step; nothing if a checkpoint of this step exists.

        Args:
            state: entries of the checkpoint's JSON file that change from step to step.

        Raises:
            UserError: the checkpoint cannot be written.
        """
        if step > self.step:
            self.path = self.learner.save(self.folder, step, self.tokenizer, {**state, **self.run_state})
            self.step = step


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Checkpoint:
    """An undamaged checkpoint: its folder, and the content of its JSON file."""

    path: Path
    state: dict


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """
    The checkpoint folders in a run's output folder, by step.

    Args:
        unfinished: include hidden folders whose writing or deletion was interrupted.
    """
    if not folder.is_dir():  # on another machine the output folder may not exist
        return []
    pattern = r"\.?checkpoint-\d+(\.part)?" if unfinished else r"checkpoint-\d+"
    paths = (path for path in folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_dir())
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(re.search(r"\d+", path.name).group())


def find_checkpoint(wanted: str | None, folder: Path) -> Checkpoint | None:
    """
    The checkpoint to resume from.

    Args:
        wanted: the value of `--resume_from_checkpoint`: a checkpoint folder, or `latest` for the last undamaged
            checkpoint in `folder`, or None.

    Returns:
        The checkpoint; None if `wanted` is None, or if `wanted` is `latest` and there is no checkpoint yet.

    Raises:
        UserError: `wanted` is not a checkpoint, or is damaged; or all checkpoints in `folder` are damaged.
    """
    if wanted is None:
        return None
    if wanted != "latest":
        return read_checkpoint(Path(wanted))
    paths = checkpoints(folder)
    if not paths:
        logger.warning(f"{folder}: no checkpoint yet, starting from the beginning")
        return None
    for path in reversed(paths[1:]):
        try:
            return read_checkpoint(path)
        except UserError as error:
            logger.warning(f"{error}; trying the checkpoint before")
    try:
        return read_checkpoint(paths[0])
    except UserError as error:
        raise UserError(f"{error}; there is no earlier checkpoint: --overwrite_output_dir starts anew") from None


def read_checkpoint(path: Path) -> Checkpoint:
    """
    Read a checkpoint, and check the SHA-256 hash of each file.

    Raises:
        UserError: the folder is not a checkpoint, or a file is missing or is not as it was saved.
    """
    if not (path / MANIFEST_FILE).is_file():
        problem = "damaged" if (path / STATE_FILE).exists() else "not a checkpoint"
        raise UserError(f"{path}: {problem} (no {MANIFEST_FILE}); give a checkpoint-<step> folder, or latest")
    try:
        for name, saved_hash in json.loads((path / MANIFEST_FILE).read_text())["sha256"].items():
            if content_hash(path / name) != saved_hash:
                raise UserError(f"{name} is not as it was saved")
        return Checkpoint(path, json.loads((path / STATE_FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); give another checkpoint") from None
