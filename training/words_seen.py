"""Models that a run saves when it has seen so many words (`--save_words`), in folders such as `chck_1M`."""

import logging
import re
from pathlib import Path
from typing import TypedDict

from d2l_bert import folders
from d2l_bert.messages import GO_ON, UserError
from d2l_bert.model_cards import card
from d2l_bert.modeling.conversion import save_model
from d2l_bert.records import read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.checkpoint import Progress, delete
from d2l_bert.training.processes import on_main


logger = logging.getLogger(__name__)


WORDS_FILE = "words_seen.json"


class WordsRecord(TypedDict):
    """The entry of words_seen.json that is read: after how many words the model was to be saved."""

    words: int


PREFIX = "chck_"  # BabyLM's names: chck_1M, chck_10M
# What may stand behind a number in --save_words. A folder's name has the first of these that divides the number.
UNITS = {"M": 10**6, "m": 10**6, "k": 10**3, "K": 10**3, "": 1}


def word_marks(entries: list[str]) -> list[int]:
    """
    The numbers of words in `save_words`, ascending: 10k is 10,000, 1M and 1_000_000 are a million.

    Raises:
        UserError: an entry is no number of words, or is not more than the entry before it.
    """
    marks = []
    for number, entry in enumerate(entries):
        match = re.fullmatch(r"([0-9][0-9_]{0,40})([kKmM]?)", entry)
        words = int(match[1].replace("_", "")) * UNITS[match[2]] if match else 0
        if not 0 < words < 2**63:
            raise UserError(f"save_words takes numbers of words such as 10k, 1M or 1_000_000, got {entry!r:.40}")
        if marks and words <= marks[-1]:
            raise UserError(
                f"save_words: {entry} must be more than the {entries[number - 1]} before it; give each once, in order"
            )
        marks.append(words)
    return marks


def folder_name(words: int) -> str:
    """The name of the model saved after so many words, as a folder and a branch: chck_1M, chck_10k or chck_1234."""
    unit = next(unit for unit, size in UNITS.items() if words % size == 0)
    return f"{PREFIX}{words // UNITS[unit]}{unit}"


class WordSaver:
    """
    Saves the model when the words that a run has seen reach a number of `--save_words`.

    Every process must call each method at the same point of the run.

    Args:
        learner: the run's `Learner`.
        folder: the run's output folder.
        record: the content of the run's run_config.json.
        tokenizer: saved with every model.
        marks: the numbers of words, ascending (`word_marks`).
        progress: how far the run has come.
    """

    def __init__(self, learner, folder: Path, record: dict, tokenizer, marks: list[int], progress: Progress):
        self.learner = learner
        self.folder = folder
        self.record = record
        self.tokenizer = tokenizer
        self.marks = marks
        self.progress = progress
        self.marks_ahead = [mark for mark in marks if mark > progress.words_seen]

    def delete_outdated(self) -> None:
        """
        Delete the saved models in the run's folder that are not of the run as it goes on now; the main process alone
        calls this.

        A new run deletes all, which an earlier run has left. A resumed run deletes those that it will save again, and
        keeps those of no more words than its checkpoint has seen.
        """
        is_new_run = self.progress.words_seen == 0
        for file in [*self.folder.glob(f"{PREFIX}*/{WORDS_FILE}")]:
            is_saved_again = read_record(file, WordsRecord)["words"] in self.marks_ahead
            if is_new_run or is_saved_again:
                delete(file.parent)

    def save_due(self) -> None:
        """
        Save the model once for each number of words that the run has reached since the last call.

        The model has the weights that the run evaluates and publishes: their moving average, if the run keeps one. It
        has a record and a card of its own, and can be published as it is.

        Raises:
            UserError: a folder cannot be written.
        """
        while self.marks_ahead and self.marks_ahead[0] <= self.progress.words_seen:
            mark = self.marks_ahead.pop(0)
            on_main(self._save, mark, self.learner.full_model(averaged=True))

    def report_missing(self) -> None:
        """
        When the run has ended, warn of the models that it has not saved: it saw fewer words, or was resumed from a
        checkpoint of more words when --save_words first named that number.
        """
        names = [folder_name(mark) for mark in self.marks]
        missing = [name for name in names if not (self.folder / name).exists()]
        if missing:
            logger.warning(
                f"save_words: {', '.join(missing)} not saved: the run was beyond that when it was given, or has ended "
                f"before, after {self.progress.words_seen:,.0f} words"
            )

    def _save(self, mark, model):
        step = self.progress.step
        words_seen = self.progress.words_seen  # the mark, or some more: all words of the step that reached the mark
        path = self.folder / folder_name(mark)
        with folders.atomic_folder(path, f", and {GO_ON}; the checkpoints are unchanged") as partial:
            save_model(model, partial)
            save_tokenizer(self.tokenizer, partial)
            folders.write_json(partial / WORDS_FILE, {"words": mark, "step": step, "words_seen": words_seen})
            record = {**self.record, "checkpoint_step": step, "checkpoint_words": mark}
            folders.write_json(partial / card.RUN_FILE, record)
            text = card.render_card(partial, self.folder.resolve().name)
            (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
        logger.info(f"{path}: saved after {words_seen:,.0f} words (step {step:,})")
