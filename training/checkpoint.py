"""Checkpoints on disk: written atomically as `checkpoint-<step>/`, checked by SHA-256 when read, without pickle.

Batches and dropout masks follow from the seed and the step, so a checkpoint holds weights, optimizer moments and the
step, but no RNG state. A checkpoint is also a model folder that `from_pretrained` loads.
"""

import importlib.metadata
import json
import logging
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from safetensors.torch import save_file

from d2l_bert import folders
from d2l_bert.messages import GO_ON, UserError, explained
from d2l_bert.modeling.conversion import save_model
from d2l_bert.records import inside, read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.data.order import START, Cursor
from d2l_bert.training.processes import on_main


logger = logging.getLogger(__name__)


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
MANIFEST_FILE = "manifest.json"


class Manifest(TypedDict):
    """The content of manifest.json: the SHA-256 of each other file, by its name."""

    sha256: dict[str, str]


class StepDone(TypedDict):
    """The entry of training_state.json that says of which step a checkpoint is."""

    step: int


class State(StepDone):
    """
    The entries of training_state.json that are read.

    They are those of `Progress`; `rows`, how many the training log had; `max_steps`, of the run; `identity`, what a
    run that goes on must share (`run_folder.make_identity`); `scaler`, the state of fp16's scaler.
    """

    cursor: list[int]
    skipped_in_a_row: int
    rows: int
    words_seen: float
    max_steps: int
    identity: dict
    scaler: dict | None


@dataclass
class Progress:
    """
    How far a run has come. Its checkpoints say so, and a resumed run goes on from there. The training loop alone moves
    it on; the log and what saves models read it.

    Attributes:
        step: the number of steps done.
        cursor: where the pairs of the next step begin (`Step.cursor` of data/steps.py).
        skipped_in_a_row: how many of the last steps were skipped, one after the other; 0 if the last one was not.
        words_seen: the words of the text in all steps.
    """

    step: int = 0
    cursor: Cursor = START
    skipped_in_a_row: int = 0
    words_seen: float = 0.0

    def add(self, cursor: Cursor, words: float, is_skipped: bool) -> None:
        """Count a step: where the pairs of the next one begin, its words, and whether it was skipped."""
        self.step += 1
        self.cursor = cursor
        self.words_seen += words
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_checkpoint(final: Path, model, tokenizer, tensors: dict[str, dict], state: State, keep: int) -> None:
    """
    Write a checkpoint, and delete all but the last `keep` checkpoints of the run.

    The checkpoint is written to a hidden folder, synced to the disk, and then renamed to `final`, so that `final` is
    never incomplete.

    Args:
        model: an unsharded model on the CPU.
        tensors: for the name of each further file, its tensors by their names; without a tensor, no file is written.
        state: the content of training_state.json, but for `versions`.

    Raises:
        UserError: the checkpoint cannot be written, for example because the disk is full. Earlier checkpoints are
            unchanged.
    """
    with folders.atomic_folder(final, f", and {GO_ON}; earlier checkpoints are unchanged") as partial:
        save_model(model, partial)
        save_tokenizer(tokenizer, partial)
        for file_name, tensors_of_file in tensors.items():
            if tensors_of_file:
                save_file(tensors_of_file, partial / file_name)
        content = {**state, "versions": versions()}
        (partial / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n")
        (partial / MANIFEST_FILE).write_text(json.dumps({"sha256": hashes_of(partial)}, indent=2) + "\n")
    delete_old(checkpoints(final.parent)[:-keep])


def versions() -> dict[str, str]:
    """The entry `versions` of a record: which version has written it."""
    return {"d2l-bert": importlib.metadata.version("d2l-bert")}


def hashes_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by its name."""
    return {path.name: folders.content_hash(path) for path in sorted(folder.iterdir())}


def delete_old(paths: list[Path]) -> None:
    """Delete checkpoints that are not needed any more. One that cannot be deleted ends no run."""
    for path in paths:
        try:
            delete(path)
        except UserError as error:
            logger.warning(error.message)


def delete(checkpoint: Path) -> None:
    """
    Delete a checkpoint. The folder is renamed first, so that its name never stands for half a checkpoint.

    Raises:
        UserError: it cannot be deleted, for example as a program has one of its files open on a network's disk.
    """
    is_hidden = checkpoint.name.startswith(".")  # left by a run that was killed while it wrote or deleted it
    hidden = checkpoint if is_hidden else folders.hidden(checkpoint)
    try:
        if not is_hidden:
            checkpoint.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(
            f"{checkpoint}: cannot be deleted ({error.strerror or error}); delete this checkpoint yourself"
        ) from None


class CheckpointSaver:
    """
    Saves the checkpoints of a run.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        tokenizer: saved with every checkpoint.
        run: the options, with the number of steps.
        identity: what runs that go on from the checkpoints must share (`run_folder.make_identity`).
        progress: how far the run has come.
        last: the checkpoint that the run goes on from, if it is resumed.

    Attributes:
        last: the checkpoint that was saved last; before the first one, that which the run goes on from, or None.
    """

    def __init__(self, learner, folder: Path, tokenizer, run, identity: dict, progress: Progress, last):
        self.learner = learner
        self.folder = folder
        self.tokenizer = tokenizer
        self.run = run
        self.identity = identity
        self.progress = progress
        self.last = last

    def save(self, log_rows: int) -> None:
        """
        Save a checkpoint of the step that was done last. Every process must call this at the same point of the run.

        Args:
            log_rows: how many rows the training log has.

        Raises:
            UserError: as `write_checkpoint`.
        """
        progress = self.progress
        scaler = self.learner.accelerator.scaler
        state = {
            "step": progress.step,
            "cursor": list(progress.cursor),
            "skipped_in_a_row": progress.skipped_in_a_row,
            "rows": log_rows,
            "words_seen": progress.words_seen,
            "max_steps": self.run.max_steps,
            "identity": self.identity,
            "scaler": scaler.state_dict() if scaler else None,
        }
        path = self.folder / f"checkpoint-{progress.step}"
        model = self.learner.full_model()
        tensors = self.learner.tensors_beside_model()
        on_main(write_checkpoint, path, model, self.tokenizer, tensors, state, self.run.save_total_limit)
        self.last = Checkpoint(path, state)

    def is_latest(self, saved: "Checkpoint") -> bool:
        """Whether `--resume_from_checkpoint latest` finds this checkpoint."""
        return checkpoints(saved.path.parent)[-1:] == [saved.path]


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Checkpoint:
    """An undamaged checkpoint: its folder, whatever its name, and the content of training_state.json (`State`)."""

    path: Path
    state: State

    def progress(self) -> Progress:
        """How far the run had come; a new object, which the caller may change."""
        state = self.state
        return Progress(state["step"], Cursor(*state["cursor"]), state["skipped_in_a_row"], state["words_seen"])


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """
    The checkpoint folders in a run's output folder, by step.

    Args:
        unfinished: include hidden folders whose writing or deletion was interrupted, such as `.checkpoint-5.part`
            (`folders.hidden`).
    """
    pattern = r"checkpoint-\d+"
    if unfinished:
        pattern = rf"\.*{pattern}(\.part)*"
    # `glob` finds nothing where the output folder does not exist, as on another machine.
    found = []
    for path in folder.glob("*checkpoint-*"):
        if re.fullmatch(pattern, path.name) and path.is_dir():
            found.append(path)
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, whatever its folder's name; of a damaged one, the step in the name."""
    try:
        return read_record(path / STATE_FILE, StepDone)["step"]
    except (UserError, KeyError):
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
    if not wanted:
        return None
    if wanted != "latest":
        return read_checkpoint(Path(wanted))
    by_step = checkpoints(folder)
    for path in reversed(by_step):
        try:
            return read_checkpoint(path)
        except UserError as error:
            is_first = path == by_step[0]
            if is_first:
                raise UserError(
                    f"{error.message}; there is no earlier checkpoint: --overwrite_output_dir starts anew"
                ) from None
            logger.warning(f"{error.message}; trying the checkpoint before")
    return None  # the run has saved none yet


def read_checkpoint(path: Path) -> Checkpoint:
    """
    Read a checkpoint, and check the SHA-256 hash of each file.

    Raises:
        UserError: the folder is not a checkpoint, or a file is missing or is not as it was saved.
    """
    what = f"{path}: not a checkpoint, or a damaged one"
    # Each error of the block, a `UserError` without a path among them, becomes the reason in one message of this form.
    with explained(what, "give another checkpoint-<step> folder, or latest", ValueError):
        manifest = read_record(path / MANIFEST_FILE, Manifest)
        if not manifest:  # `read_record` gives an empty dict where there is no file
            raise UserError(f"there is no {MANIFEST_FILE}")
        in_every_checkpoint = (STATE_FILE, WEIGHTS_FILE, OPTIMIZER_FILE)
        for name in in_every_checkpoint:
            if name not in manifest["sha256"]:
                raise UserError(f"there is no {name}")
        check_hashes(path, manifest["sha256"], hashed_if_there=(*in_every_checkpoint, AVERAGE_FILE))
        state = read_record(path / STATE_FILE, State)
        check_state(state)
        return Checkpoint(path, state)


def check_hashes(path: Path, hashes: dict[str, str], hashed_if_there: tuple[str, ...] = ()) -> None:
    """
    Check the files of a checkpoint.

    Args:
        hashes: the SHA-256 of each file, by its name, from a record of the checkpoint.
        hashed_if_there: the files that will be read, if they are there: each must have a hash.

    Raises:
        UserError: a file is missing, is not as it was saved, or has no hash; or a name leads out of the folder.
    """
    for name, saved_hash in hashes.items():
        file = inside(path, name)
        if not file.exists():
            raise UserError(f"{name} is missing")
        if folders.content_hash(file) != saved_hash:
            raise UserError(f"{name} is not as it was saved")
    for name in hashed_if_there:
        if name not in hashes and (path / name).exists():
            raise UserError(f"{name} was not saved with it")


def check_state(state: State) -> None:
    """Raise `UserError` if a number in the state is none that a run can have."""
    counts = [state["step"], *state["cursor"], state["rows"], state["skipped_in_a_row"]]
    if len(state["cursor"]) != 3 or min(counts) < 0 or max(counts) >= 2**63:
        raise UserError(f"{STATE_FILE}: has numbers that no run has")
    if not 1 <= state["step"] <= state["max_steps"] < 2**31:
        raise UserError(f"{STATE_FILE}: step {state['step']} of {state['max_steps']} steps is none of a run")
    words = state["words_seen"]
    if not math.isfinite(words) or words < 0:
        raise UserError(f"{STATE_FILE}: no run has seen {words} words")
