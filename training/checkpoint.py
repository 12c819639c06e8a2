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
from typing import NotRequired, TypedDict

from safetensors.torch import save_file

from d2l_bert import folders
from d2l_bert.messages import GO_ON, UserError, explained
from d2l_bert.model_cards import card
from d2l_bert.modeling.conversion import save_model
from d2l_bert.records import inside, read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.devices import on_main


logger = logging.getLogger(__name__)


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
MANIFEST_FILE = "manifest.json"


class Manifest(TypedDict):
    """The content of manifest.json: the SHA-256 of each other file, by its name."""

    sha256: dict[str, str]


class Step(TypedDict):
    """What names a checkpoint: the number of steps done."""

    step: int


class State(Step):
    """The content of training_state.json, as far as it is read; what earlier versions did not write may be absent."""

    cursor: list[int]
    max_steps: int
    identity: dict
    skipped_in_a_row: NotRequired[int]
    rows: NotRequired[int]
    words_seen: NotRequired[float]
    scaler: dict | None


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


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Checkpoint:
    """An undamaged checkpoint: its folder, whatever its name, and the content of its JSON file."""

    path: Path
    state: dict


def checkpoints(folder: Path, unfinished: bool = False) -> list[Path]:
    """
    The checkpoint folders in a run's output folder, by step.

    Args:
        unfinished: include hidden folders whose writing or deletion was interrupted.
    """
    pattern = r"\.*checkpoint-\d+(\.part)*" if unfinished else r"checkpoint-\d+"
    # `glob` finds nothing where the output folder does not exist, as on another machine.
    paths = (path for path in folder.glob("*checkpoint-*") if re.fullmatch(pattern, path.name) and path.is_dir())
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint, whatever its folder's name; of a damaged one, the step in the name."""
    try:
        return read_record(path / STATE_FILE, Step)["step"]
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
    if wanted != "latest":
        return wanted and read_checkpoint(Path(wanted))
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


def check_hashes(path: Path, hashes: dict[str, str], read: tuple[str, ...] = ()) -> None:
    """
    Check the files of a checkpoint.

    Args:
        hashes: the SHA-256 of each file, by its name, from a record of the checkpoint.
        read: the files that will be read, if they are there: each must have a hash.

    Raises:
        UserError: a file is missing, is not as it was saved, or has no hash; or a name leads out of the folder.
    """
    for name, saved_hash in hashes.items():
        file = inside(path, name)
        if not file.exists():
            raise UserError(f"{name} is missing")
        if folders.content_hash(file) != saved_hash:
            raise UserError(f"{name} is not as it was saved")
    for name in read:
        if name not in hashes and (path / name).exists():
            raise UserError(f"{name} was not saved with it")


def check_state(state: State) -> None:
    """Raise `UserError` if a number in the state is none that a run can have."""
    numbers = [state["step"], *state["cursor"], state.get("rows", 0), state.get("skipped_in_a_row", 0)]
    if len(state["cursor"]) != 3 or min(numbers) < 0 or max(numbers) >= 2**63:
        raise UserError(f"{STATE_FILE}: has numbers that no run has")
    if not 1 <= state["step"] <= state["max_steps"] < 2**31:
        raise UserError(f"{STATE_FILE}: step {state['step']} of {state['max_steps']} steps is none of a run")
    words = state.get("words_seen", 0.0)
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
    Counts the words that a run has seen, and saves the model when they reach a number of `--save_words`.

    Every process must call each method at the same point of the run.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        record: the content of the run's run_config.json.
        tokenizer: saved with every model.
        marks: the numbers of words, ascending.
        state: the state in a checkpoint to resume from; a dict without counts of words at the start of a run.
    """

    def __init__(self, learner, folder: Path, record: dict, tokenizer, marks: list[int], state: dict):
        self.learner, self.folder, self.record, self.tokenizer = learner, folder, record, tokenizer
        self.seen = state.get("words_seen", 0.0)  # the run adds the words of each step
        self.waiting = [mark for mark in marks if mark > self.seen]

    def keep_earlier(self) -> None:
        """
        In the main process, delete saved models that the run will save again, or, at its start, those of an earlier
        run; those that were saved before the checkpoint to resume from stay.
        """
        for file in [*self.folder.glob(f"{PREFIX}*/{WORDS_FILE}")]:
            if read_record(file, Words)["words"] in self.waiting or not self.seen:
                delete(file.parent)

    def save_due(self, step: int) -> None:
        """
        Save the model under the name of every number that the words seen have reached since the last call.

        The model has the weights that the run evaluates and publishes: their moving average, if the run keeps one. It
        has a record and a card of its own, and can be published as it is.

        Raises:
            UserError: a folder cannot be written.
        """
        while self.waiting and self.waiting[0] <= self.seen:
            on_main(self._save, self.waiting.pop(0), step, self.learner.full_model(averaged=True))

    def _save(self, words, step, model):
        path = self.folder / folder_name(words)
        with folders.atomic_folder(path, f", and {GO_ON}; the checkpoints are unchanged") as partial:
            save_model(model, partial)
            save_tokenizer(self.tokenizer, partial)
            folders.write_json(partial / WORDS_FILE, {"words": words, "step": step, "words_seen": self.seen})
            record = {**self.record, "checkpoint_step": step, "checkpoint_words": words}
            folders.write_json(partial / card.RUN_FILE, record)
            text = card.render_card(partial, self.folder.resolve().name)
            (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
        logger.info(f"{path}: saved after {self.seen:,.0f} words (step {step:,})")
