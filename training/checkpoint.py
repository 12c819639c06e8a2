"""Checkpoints on disk: written atomically as `checkpoint-<step>/`, checked by SHA-256 when read, without pickle.

Batches and dropout masks follow from the seed and the step, so a checkpoint holds weights, optimizer moments and the
step, but no RNG state. A checkpoint is also a model folder that `from_pretrained` loads.
"""

import dataclasses
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
from d2l_bert.model_cards import card
from d2l_bert.modeling.conversion import save_model
from d2l_bert.records import inside, read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.data.order import START
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
    """What names a checkpoint: the number of steps done."""

    step: int


class State(StepDone):
    """The content of training_state.json, as far as it is read: `Progress`, and what the run must share with it."""

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
    How far a run has come. Its checkpoints say so, and a resumed run goes on from there.

    Attributes:
        step: the number of steps done.
        cursor: where the pairs of the next step are (`Step.cursor` of data/steps.py).
        skipped_in_a_row: how many of the last steps were skipped, one after the other; 0 if the last one was not.
        rows: the number of rows in the training log, which the log counts itself.
        words_seen: the words of the text in all steps.
    """

    step: int = 0
    cursor: tuple[int, int, int] = START
    skipped_in_a_row: int = 0
    rows: int = 0
    words_seen: float = 0.0

    def add(self, cursor: tuple[int, int, int], words: float, is_skipped: bool) -> None:
        """Count a step, with the cursor behind it and the words in it."""
        self.step += 1
        self.cursor = cursor
        self.words_seen += words
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_checkpoint(final: Path, model, tokenizer, tensors: dict[str, dict], state: dict, keep: int) -> None:
    """
    Write a checkpoint, and delete all but the last `keep` checkpoints of the run.

    The checkpoint is written to a hidden folder, synced to the disk, and then renamed to `final`, so that `final` is
    never incomplete.

    Args:
        model: an unsharded model on the CPU.
        tensors: further files by name, each a dict of named tensors; no file is written for an empty dict.
        state: the content of the checkpoint's JSON file.

    Raises:
        UserError: the checkpoint cannot be written, for example because the disk is full. Earlier checkpoints are
            unchanged.
    """
    with folders.atomic_folder(final, f", and {GO_ON}; earlier checkpoints are unchanged") as partial:
        save_model(model, partial)
        save_tokenizer(tokenizer, partial)
        for name, named in tensors.items():
            if named:
                save_file(named, partial / name)
        state = {**state, "versions": versions()}
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
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
            logger.warning(str(error))


def delete(checkpoint: Path) -> None:
    """
    Delete a checkpoint. The folder is renamed first, so that its name never stands for half a checkpoint.

    Raises:
        UserError: it cannot be deleted, for example as a program has one of its files open on a network's disk.
    """
    hidden = checkpoint if checkpoint.name.startswith(".") else folders.hidden(checkpoint)
    try:
        if hidden != checkpoint:
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
        progress: how far the run has come; the training loop moves it on.
        last: the checkpoint that the run goes on from.

    Attributes:
        last: the last checkpoint, if there is one.
    """

    def __init__(self, learner, folder: Path, tokenizer, run, identity: dict, progress: Progress, last):
        self.learner = learner
        self.folder = folder
        self.tokenizer = tokenizer
        self.run = run
        self.identity = identity
        self.progress = progress
        self.last = last

    def save(self) -> None:
        """
        Save a checkpoint of the step that was done last. Every process must call this at the same point of the run.

        Raises:
            UserError: as `write_checkpoint`.
        """
        scaler = self.learner.accelerator.scaler
        state = dataclasses.asdict(self.progress)
        state["max_steps"] = self.run.max_steps
        state["identity"] = self.identity
        state["scaler"] = scaler.state_dict() if scaler else None
        path = self.folder / f"checkpoint-{self.progress.step}"
        model = self.learner.full_model()
        tensors = self.learner.tensors()
        on_main(write_checkpoint, path, model, self.tokenizer, tensors, state, self.run.save_total_limit)
        self.last = Checkpoint(path, state)

    def is_latest(self, saved: "Checkpoint") -> bool:
        """Whether `--resume_from_checkpoint latest` finds this checkpoint."""
        return checkpoints(saved.path.parent)[-1:] == [saved.path]


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Checkpoint:
    """An undamaged checkpoint: its folder, whatever its name, and the content of its JSON file."""

    path: Path
    state: dict

    def progress(self) -> Progress:
        """How far the run had come; a new object, which the caller may change."""
        state = self.state
        return Progress(
            state["step"], tuple(state["cursor"]), state["skipped_in_a_row"], state["rows"], state["words_seen"]
        )


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """
    The checkpoint folders in a run's output folder, by step.

    Args:
        unfinished: include hidden folders whose writing or deletion was interrupted.
    """
    pattern = r"checkpoint-\d+"
    if unfinished:
        pattern = rf"\.*{pattern}(\.part)*"  # as `folders.hidden` names them
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
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return read_checkpoint(path)
        except UserError as error:
            if path == paths[0]:
                raise UserError(
                    f"{error}; there is no earlier checkpoint: --overwrite_output_dir starts anew"
                ) from None
            logger.warning(f"{error}; trying the checkpoint before")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """
    Read a checkpoint, and check the SHA-256 hash of each file.

    Raises:
        UserError: the folder is not a checkpoint, or a file is missing or is not as it was saved.
    """
    with explained(
        f"{path}: not a checkpoint, or a damaged one", "give another checkpoint-<step> folder, or latest", ValueError
    ):
        manifest = read_record(path / MANIFEST_FILE, Manifest)
        if not manifest:
            raise UserError(f"there is no {MANIFEST_FILE}")
        for name in (STATE_FILE, WEIGHTS_FILE, OPTIMIZER_FILE):
            if name not in manifest["sha256"]:
                raise UserError(f"there is no {name}")
        check_hashes(path, manifest["sha256"], (STATE_FILE, WEIGHTS_FILE, OPTIMIZER_FILE, AVERAGE_FILE))
        state = read_record(path / STATE_FILE, State)
        check_state(state)
        return Checkpoint(path, state)


def check_hashes(path: Path, hashes: dict[str, str], needed: tuple[str, ...] = ()) -> None:
    """
    Check the files of a checkpoint.

    Args:
        hashes: the SHA-256 of each file, by its name, from a record of the checkpoint.
        needed: the files that will be read, if they are there: each must have a hash.

    Raises:
        UserError: a file is missing, is not as it was saved, or has no hash; or a name leads out of the folder.
    """
    for name, saved_hash in hashes.items():
        file = inside(path, name)
        if not file.exists():
            raise UserError(f"{name} is missing")
        if folders.content_hash(file) != saved_hash:
            raise UserError(f"{name} is not as it was saved")
    for name in needed:
        if name not in hashes and (path / name).exists():
            raise UserError(f"{name} was not saved with it")


def check_state(state: State) -> None:
    """Raise `UserError` if a number in the state is none that a run can have."""
    numbers = [state["step"], *state["cursor"], state["rows"], state["skipped_in_a_row"]]
    if len(state["cursor"]) != 3 or min(numbers) < 0 or max(numbers) >= 2**63:
        raise UserError(f"{STATE_FILE}: has numbers that no run has")
    if not 1 <= state["step"] <= state["max_steps"] < 2**31:
        raise UserError(f"{STATE_FILE}: step {state['step']} of {state['max_steps']} steps is none of a run")
    words = state["words_seen"]
    if not math.isfinite(words) or words < 0:
        raise UserError(f"{STATE_FILE}: no run has seen {words} words")


# ---------------------------------------------------------------------------------------------------------------------
# Models saved by the number of words seen (--save_words)


WORDS_FILE = "words_seen.json"


class Words(TypedDict):
    """The content of words_seen.json, as far as it is read."""

    words: int


PREFIX = "chck_"  # BabyLM's names: chck_1M, chck_10M
UNITS = {"m": 10**6, "k": 10**3, "": 1}


def word_marks(entries: list[str]) -> list[int]:
    """
    The numbers of words in `save_words`, ascending: 10k is 10,000, 1M and 1_000_000 are a million.

    Raises:
        UserError: an entry is no number of words, or is not more than the entry before it.
    """
    marks = []
    for entry in entries:
        match = re.fullmatch(r"([0-9][0-9_]{0,40})([kKmM]?)", entry)
        words = match and int(match[1].replace("_", "")) * UNITS[match[2].lower()]
        if not words or words >= 2**63:
            raise UserError(f"save_words takes numbers of words such as 10k, 1M or 1_000_000, got {entry!r:.40}")
        if marks and words <= marks[-1]:
            raise UserError(
                f"save_words: {entry} must be more than the {entries[len(marks) - 1]} before it; give each once, in "
                f"order"
            )
        marks.append(words)
    return marks


def folder_name(words: int) -> str:
    """The name of a folder and of a branch, such as chck_1M, chck_10k or chck_1234."""
    unit = next(unit for unit, size in UNITS.items() if words % size == 0)
    return f"{PREFIX}{words // UNITS[unit]}{unit.replace('m', 'M')}"


class WordSaver:
    """
    Saves the model when the words that a run has seen reach a number of `--save_words`.

    Every process must call each method at the same point of the run.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        record: the content of the run's run_config.json.
        tokenizer: saved with every model.
        marks: the numbers of words, ascending.
        progress: how far the run has come; the training loop moves it on.
    """

    def __init__(self, learner, folder: Path, record: dict, tokenizer, marks: list[int], progress: Progress):
        self.learner = learner
        self.folder = folder
        self.record = record
        self.tokenizer = tokenizer
        self.marks = marks
        self.progress = progress
        self.waiting = [mark for mark in marks if mark > progress.words_seen]

    def delete_later_ones(self) -> None:
        """
        In the main process, delete saved models that the run will save again, or, at its start, those of an earlier
        run; those that were saved before the checkpoint to resume from stay.
        """
        is_new_run = self.progress.words_seen == 0
        for file in [*self.folder.glob(f"{PREFIX}*/{WORDS_FILE}")]:
            is_saved_again = read_record(file, Words)["words"] in self.waiting
            if is_new_run or is_saved_again:
                delete(file.parent)

    def save_due(self) -> None:
        """
        Save the model under the name of every number that the words seen have reached since the last call.

        The model has the weights that the run evaluates and publishes: their moving average, if the run keeps one. It
        has a record and a card of its own, and can be published as it is.

        Raises:
            UserError: a folder cannot be written.
        """
        while self.waiting and self.waiting[0] <= self.progress.words_seen:
            on_main(self._save, self.waiting.pop(0), self.learner.full_model(averaged=True))

    def report_missing(self) -> None:
        """Warn of the models that the run has not saved, when it has ended."""
        names = [folder_name(mark) for mark in self.marks]
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            logger.warning(
                f"save_words: {', '.join(missing)} not saved: the run was beyond that when it was given, or has ended "
                f"before, after {self.progress.words_seen:,.0f} words"
            )

    def _save(self, words, model):
        step = self.progress.step
        words_seen = self.progress.words_seen
        path = self.folder / folder_name(words)
        with folders.atomic_folder(path, f", and {GO_ON}; the checkpoints are unchanged") as partial:
            save_model(model, partial)
            save_tokenizer(self.tokenizer, partial)
            folders.write_json(partial / WORDS_FILE, {"words": words, "step": step, "words_seen": words_seen})
            record = {**self.record, "checkpoint_step": step, "checkpoint_words": words}
            folders.write_json(partial / card.RUN_FILE, record)
            text = card.render_card(partial, self.folder.resolve().name)
            (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
        logger.info(f"{path}: saved after {words_seen:,.0f} words (step {step:,})")
