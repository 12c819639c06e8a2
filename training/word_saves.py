"""Models saved on the way by the number of words that the run has seen (`--save_words`), as BabyLM asks for.

**Words seen** are the words of the text in all pairs so far, repetitions in later epochs included. A pair is made of
parts of documents, so words are counted by tokens: each token counts as its document's words divided by its document's
tokens. A document that was seen whole counts with all its words; special tokens count as nothing.

A folder `chck_1M` holds the model, its code and its tokenizer, as `from_pretrained` reads them, and no state to resume
from. It is no checkpoint of the run, and is never deleted for a later one.
"""

import logging
from pathlib import Path

from d2l_bert import folders
from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.modeling.saving import save_with_code
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.checkpoint import delete
from d2l_bert.training.distributed import on_main
from d2l_bert.training.word_marks import folder_name, words_of


logger = logging.getLogger(__name__)


WORDS_FILE = "words_seen.json"


def word_folders(folder: Path, unfinished: bool = False) -> dict[Path, int]:
    """
    The models that runs have saved in an output folder, each with the number in its name.

    Args:
        unfinished: include hidden folders whose writing or deletion was interrupted.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        is_partial = unfinished and path.name.startswith(".") and path.name.endswith(".part")
        name = path.name[1 : -len(".part")] if is_partial else path.name
        is_of_a_run = is_partial or (path / WORDS_FILE).is_file()
        if path.is_dir() and is_of_a_run and (words := words_of(name)) is not None:
            found[path] = words
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
        self.seen = state.get("words_seen", 0.0)
        # Words seen when the last model was due: a step that is skipped saves none, and the next step makes up for it.
        self.settled = state.get("words_settled", 0.0)
        self.waiting = [mark for mark in marks if mark > self.settled]
        self.passed = [mark for mark in marks if mark <= self.settled]

    def start(self, most_words: float) -> list[Path] | None:
        """
        Delete saved models that the run will save again, or that are of an earlier run; warn if the run cannot reach
        the last number.

        Args:
            most_words: the most words that the run may see.

        Returns:
            In the main process, the models that were saved before the checkpoint to resume from; else None.

        Raises:
            UserError: something else than a model of a run has the name of a model to save.
        """
        if self.waiting and self.waiting[-1] > most_words and self.learner.accelerator.is_main_process:
            logger.warning(
                f"save_words: the run sees about {most_words:,.0f} words at most, so {folder_name(self.waiting[-1])} "
                f"will not be saved; give more steps, or lower numbers"
            )
        return on_main(self.learner.accelerator, self._start, share_result=False)

    def _start(self):
        found = word_folders(self.folder, unfinished=True)
        for path in (self.folder / folder_name(mark) for mark in self.waiting):
            if path.exists() and path not in found:
                raise UserError(
                    f"save_words: {path} exists already and is no model of a run (it has no {WORDS_FILE}); move it, "
                    f"or name another output_dir"
                )
        for path, words in found.items():
            if path.name.startswith(".") or words > self.settled:
                delete(path)
        there = word_folders(self.folder)
        for mark in self.passed:
            if mark not in there.values():
                logger.warning(
                    f"save_words: {self.folder / folder_name(mark)} is missing, and the run has seen "
                    f"{self.seen:,.0f} words already; only a new run can save it"
                )
        return [path for path, words in there.items() if words in self.passed]

    def add(self, words: float) -> None:
        """Count the words of a step."""
        self.seen += words

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
        model = self.learner.full_model(averaged=True)
        arguments = (self.folder, model, self.tokenizer, reached, {"step": step, "words_seen": self.seen})
        return on_main(self.learner.accelerator, write_models, *arguments)

    def report_missing(self) -> None:
        """Log a warning for the numbers that the finished run has not reached."""
        if self.waiting and self.learner.accelerator.is_main_process:
            names = ", ".join(map(folder_name, self.waiting))
            logger.warning(f"save_words: the run has seen {self.seen:,.0f} words, so it has not saved {names}")


def write_models(folder: Path, model, tokenizer, marks: list[int], reached: dict) -> list[Path]:
    """
    Write the model once for each number of words. A folder appears when all of it is on the disk.

    Args:
        model: an unsharded model on the CPU.
        reached: the step, and the words seen after it: the content of `words_seen.json`.

    Raises:
        UserError: a folder cannot be written. Checkpoints are unchanged.
    """
    paths = []
    for mark in marks:
        final = folder / folder_name(mark)
        try:
            with folders.atomic_folder(final) as partial:
                save_with_code(model, partial)
                save_tokenizer(tokenizer, partial)
                folders.write_json(partial / WORDS_FILE, {"words": mark, **reached})
        except OSError as error:
            raise UserError(
                f"{final}: {why_unwritable(error, f', and {GO_ON}')}; the checkpoints are unchanged"
            ) from None
        logger.info(f"{final}: saved after {reached['words_seen']:,.0f} words (step {reached['step']:,})")
        paths.append(final)
    return paths
