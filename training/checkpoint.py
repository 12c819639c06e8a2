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
from d2l_bert.messages import GO_ON, UserError, explained
from d2l_bert.model_cards import card
from d2l_bert.modeling.conversion import save_model
from d2l_bert.records import read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.devices import on_main


logger = logging.getLogger(__name__)


STATE_FILE = "training_state.json"
WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
MANIFEST_FILE = "manifest.json"


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
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        hashes = {path.name: folders.content_hash(path) for path in sorted(partial.iterdir())}
        (partial / MANIFEST_FILE).write_text(json.dumps({"sha256": hashes}, indent=2) + "\n")
    for old in checkpoints(final.parent)[:-keep]:
        try:
            delete(old)
        except OSError as error:
            logger.warning(f"{old}: cannot be deleted ({error.strerror or error}); delete this checkpoint yourself")


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint. The folder is renamed first, so that its name never stands for half a checkpoint."""
    if not checkpoint.name.startswith("."):
        checkpoint = checkpoint.rename(folders.hidden(checkpoint))
    shutil.rmtree(checkpoint)


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
        return int(json.loads((path / STATE_FILE).read_text())["step"])
    except (OSError, ValueError, LookupError, TypeError):
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
        f"{path}: not a checkpoint, or a damaged one",
        "give another checkpoint-<step> folder, or latest",
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
    ):
        for name, saved_hash in json.loads((path / MANIFEST_FILE).read_text())["sha256"].items():
            if folders.content_hash(path / name) != saved_hash:
                raise UserError(f"{name} is not as it was saved")
        return Checkpoint(path, json.loads((path / STATE_FILE).read_text()))


# ---------------------------------------------------------------------------------------------------------------------
# Models saved by the number of words seen (--save_words)


WORDS_FILE = "words_seen.json"

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
            if read_record(file)["words"] in self.waiting or not self.seen:
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
