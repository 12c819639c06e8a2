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
from d2l_bert.folders import content_hash
from d2l_bert.messages import GO_ON, UserError, explained, refuse_first
from d2l_bert.model_cards.card import RUN_FILE
from d2l_bert.modeling.conversion import save_with_code
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
        save_with_code(model, partial)
        save_tokenizer(tokenizer, partial)
        for name, named in tensors.items():
            if named:
                save_file(named, partial / name)
        (partial / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        hashes = {path.name: content_hash(path) for path in sorted(partial.iterdir())}
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

    def way_back(self) -> str:
        """The value of `--resume_from_checkpoint` that finds this checkpoint."""
        return "latest" if self.path in checkpoints(self.path.parent)[-1:] else str(self.path)


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
    if not (path / MANIFEST_FILE).is_file():
        problem = "damaged" if (path / STATE_FILE).exists() else "not a checkpoint"
        raise UserError(f"{path}: {problem} (no {MANIFEST_FILE}); give a checkpoint-<step> folder, or latest")
    with explained(
        f"{path}: damaged", "give another checkpoint", OSError, ValueError, KeyError, TypeError, AttributeError
    ):
        for name, saved_hash in json.loads((path / MANIFEST_FILE).read_text())["sha256"].items():
            if content_hash(path / name) != saved_hash:
                raise UserError(f"{name} is not as it was saved")
        return Checkpoint(path, json.loads((path / STATE_FILE).read_text()))


# ---------------------------------------------------------------------------------------------------------------------
# The output folder of a run


def check_output_folder(run, folder: Path, start: str | None, is_finetuning: bool = False) -> None:
    """
    Check that a run may write to a folder, which need not exist.

    Args:
        run: the options, with `overwrite_output_dir` and `resume_from_checkpoint`.
        start: the folder or id of the model to start from, if there is one.
        is_finetuning: whether the command is `finetune`.

    Raises:
        UserError: the path is a file; the folder holds the model to start from, other files without a run, or a run
            of another command; or a run that the options neither resume nor replace, or both, or that is finished and
            has no checkpoint to resume from.
    """
    if not folder.is_dir():
        return
    entries = {path.name for path in folder.iterdir()} - {folders.LOCK_FILE, f".{RUN_FILE}.part"}  # of killed runs
    source, resumed = Path(start or "").resolve(), run.resume_from_checkpoint
    of_finetuning = "finetune" in folders.read_json(folder / RUN_FILE)
    is_named, is_kept = resumed not in (None, "latest"), not run.overwrite_output_dir
    ways_out = "replace it with --overwrite_output_dir, or name another folder"
    cases = {
        "holds the model to start from; name another folder": (
            start and source.exists() and folder.resolve() in (source, *source.parents)
        ),
        f"holds other files ({min(entries, default='')}) and no run; name a new or empty folder": (
            entries and RUN_FILE not in entries
        ),
    }
    if RUN_FILE in entries:
        cases |= {
            "holds a run of another command; name a new or empty folder": is_finetuning != of_finetuning,
            "resume_from_checkpoint continues a run and overwrite_output_dir replaces the run; give one": (
                resumed and not is_kept
            ),
            f"holds another run than that of {resumed}; name a new folder": (
                is_named and Path(resumed).resolve().parent != folder.resolve()
            ),
            f"holds a finished run and no checkpoint to go on from; {ways_out}": (
                is_kept and not is_named and WEIGHTS_FILE in entries and not checkpoints(folder)
            ),
            f"holds a run; go on with --resume_from_checkpoint latest, {ways_out}": is_kept and not resumed,
        }
    refuse_first(cases, f"output_dir {folder}: ")


# ---------------------------------------------------------------------------------------------------------------------
# Models saved by the number of words seen (--save_words)


WORDS_FILE = "words_seen.json"

PREFIX = "chck_"  # BabyLM's names: chck_1M, chck_10M
UNITS = {"": 1, "k": 10**3, "M": 10**6}


def word_marks(entries: list[str]) -> list[int]:
    """
    The numbers of words in `save_words`, ascending: 10k is 10,000, 1M and 1_000_000 are a million.

    Raises:
        UserError: an entry is no number of words, or is not more than the entry before it.
    """
    marks = []
    for entry in entries:
        match = re.fullmatch(r"([0-9][0-9_]{0,40})([kKmM]?)", entry)
        unit = match and {"": "", "k": "k", "m": "M"}[match[2].lower()]
        words = match and int(match[1].replace("_", "")) * UNITS[unit]
        if not words or words >= 2**63:
            raise UserError(f"save_words takes numbers of words such as 10k, 1M or 1_000_000, got {entry!r:.40}")
        if marks and words <= marks[-1]:
            before = entries[len(marks) - 1]
            raise UserError(f"save_words: {entry} must be more than the {before} before it; give each once, in order")
        marks.append(words)
    return marks


def folder_name(words: int) -> str:
    """The name of a folder and of a branch, such as chck_1M, chck_10k or chck_1234."""
    unit = next(unit for unit in ("M", "k", "") if words % UNITS[unit] == 0)
    return f"{PREFIX}{words // UNITS[unit]}{unit}"


def word_folders(folder: Path) -> dict[Path, int]:
    """The models that runs have saved in an output folder, each with its number of words."""
    found = {file.parent: folders.read_json(file)["words"] for file in folder.glob(f"{PREFIX}*/{WORDS_FILE}")}
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


class WordSaver:
    """
    Counts the words that a run has seen, and saves the model when they reach a number of `--save_words`.

    Every process must call each method at the same point of the run.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        tokenizer: saved with every model.
        marks: the numbers of words, ascending.
        state: the state in a checkpoint to resume from; a dict without counts of words at the start of a run.
    """

    def __init__(self, learner, folder: Path, tokenizer, marks: list[int], state: dict):
        self.learner, self.folder, self.tokenizer = learner, folder, tokenizer
        self.seen = state.get("words_seen", 0.0)  # the run adds the words of each step
        # Words seen when the last model was due: a step that is skipped saves none, and the next step makes up for it.
        self.settled = state.get("words_settled", 0.0)
        self.waiting = [mark for mark in marks if mark > self.settled]

    def start(self) -> list[Path]:
        """
        Delete saved models that the run will save again, or, at its start, those of an earlier run.

        Returns:
            The models that were saved before the checkpoint to resume from.
        """

        def keep_earlier():
            for path, words in word_folders(self.folder).items():
                if words in self.waiting or not self.settled:
                    delete(path)
            return list(word_folders(self.folder))

        return on_main(keep_earlier)

    def save_due(self, step: int) -> list[Path]:
        """
        Save the model under the name of every number that the words seen have reached since the last call.

        The model has the weights that the run evaluates and publishes: their moving average, if the run keeps one.

        Returns:
            The new folders.

        Raises:
            UserError: a folder cannot be written.
        """
        reached = [mark for mark in self.waiting if mark <= self.seen]
        self.settled = self.seen
        if not reached:
            return []
        self.waiting = self.waiting[len(reached) :]
        model, state = self.learner.full_model(averaged=True), {"step": step, "words_seen": self.seen}
        paths = [self.folder / folder_name(mark) for mark in reached]

        def write():
            for path, words in zip(paths, reached, strict=True):
                with folders.atomic_folder(path, f", and {GO_ON}; the checkpoints are unchanged") as partial:
                    save_with_code(model, partial)
                    save_tokenizer(self.tokenizer, partial)
                    folders.write_json(partial / WORDS_FILE, {"words": words, **state})
                logger.info(f"{path}: saved after {self.seen:,.0f} words (step {step:,})")

        on_main(write)
        return paths
