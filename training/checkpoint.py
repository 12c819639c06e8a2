"""Resumable state: `checkpoint-<step>/`, complete or not there at all, every byte as it was saved, and no pickle.

The data order and every dropout mask follow from the step: weights, optimizer moments and the step are all it takes.
A checkpoint is also a model folder: `from_pretrained` loads it.
"""

import hashlib
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
    Write a checkpoint beside and rename it to `final` when it is complete and synced; drop all but the last `keep`.

    Args:
        model: in one piece.
        tensors: what else to keep, by the name of its file: named tensors each, or none.
        state: what else to keep, as JSON.

    Raises:
        UserError: it cannot be written, the disk is full perhaps. What was saved before is still there.
    """
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
            logger.warning(f"{old}: cannot be deleted ({error.strerror or error}), and stays")
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


class Saver:
    """
    Saves the checkpoints of a run, each step once. All processes must call.

    `path` is the last one, or that which the run goes on from; None before the first.

    Args:
        learner: a `Learner`.
        folder: the run's.
        tokenizer: saved with the model.
        decided: what the run has decided by measuring, and its identity: kept in every checkpoint.
        resumed: the checkpoint that the run goes on from.
    """

    def __init__(self, learner, folder: Path, tokenizer, decided: dict, resumed: "Checkpoint | None"):
        self.learner, self.folder, self.tokenizer, self.decided = learner, folder, tokenizer, decided
        self.step, self.path = (resumed.state["step"], resumed.path) if resumed else (0, None)

    def save(self, step: int, state: dict) -> None:
        """
        Save a checkpoint after a step, unless there is one of it already.

        Args:
            state: what else to keep, as JSON.

        Raises:
            UserError: it cannot be written.
        """
        if step > self.step:
            self.path = self.learner.save(self.folder, step, self.tokenizer, {**state, **self.decided})
            self.step = step


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


def find_checkpoint(wanted: str | None, folder: Path) -> Checkpoint | None:
    """
    The checkpoint that `--resume_from_checkpoint` names: a path, or `latest`, the last one that is whole; None if none
    is asked for, or there is none yet.

    Raises:
        UserError: a path that is no checkpoint, or a damaged one; or all of them are damaged.
    """
    if wanted is None:
        return None
    if wanted != "latest":
        return read_checkpoint(Path(wanted))
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except UserError as error:
            if path == found[0]:
                raise UserError(f"{error}; there is none before it: --overwrite_output_dir starts anew") from None
            logger.warning(f"{error}; trying the one before")
    logger.warning(f"{folder}: no checkpoint yet, starting from the beginning")
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
