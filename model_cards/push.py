"""Sends the checkpoints of a running training to the Hub in the background; at the end `publish` sends the model."""

import logging
import queue
import shlex
import shutil
import tempfile
import threading
from pathlib import Path

from huggingface_hub import HfApi

from d2l_bert import folders
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import CARD_FILE, RUN_FILE, STAGED, render_card
from d2l_bert.model_cards.config import PublishConfig, check_license
from d2l_bert.model_cards.outgoing import outgoing, published_files
from d2l_bert.model_cards.publish import (
    AGAIN,
    check_repo_id,
    full_repo_id,
    hub_errors,
    publish,
    send,
    warn_of_earlier_commits,
)


logger = logging.getLogger(__name__)


def check_push(repo_id: str, license: str | None, private: bool, dry_run: bool) -> None:
    """
    Check at the start of a run that the model can be published at the end: name, licence, token, right to write.

    To check the right to write, the repository is created now, except on a dry run. The repository is private until
    `Pusher.finish` has sent the finished model, whatever `private` says.

    Args:
        license: the licence for the model's card.
        private: whether the repository stays private after the run.

    Raises:
        UserError: the model could not be published.
    """
    check_repo_id(repo_id)
    if license is None:
        raise UserError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    check_license(license)
    with hub_errors(repo_id, again="try again when it can, or leave push_to_hub out"):
        api = HfApi()
        repo_id = full_repo_id(api, repo_id)
        if not private:
            warn_of_earlier_commits(api, repo_id)
        if not dry_run:
            api.create_repo(repo_id, private=True, exist_ok=True)


class Pusher:
    """
    Sends the checkpoints of a run to the Hub in a background thread, and the finished model at the end.

    Of a checkpoint the model, tokenizer and code are sent, with a card, but not the state of the optimizer. The
    strategy `every_save` sends checkpoints to the main branch, `checkpoint` to the branch last-checkpoint; both skip a
    checkpoint while an earlier one is being sent. `all_checkpoints` sends each checkpoint to a branch of its name.
    If a checkpoint cannot be sent, a warning is logged, and the run continues.
    """

    def __init__(self, folder: Path, record: dict, repo_id: str, strategy: str, public: bool):
        """
        Args:
            folder: the run's folder.
            record: the content of the run's run_config.json; the file may still be that of an earlier run.
            strategy: which checkpoints are sent, as above; `end` sends none.
            public: whether the finished model makes the repository public.
        """
        self.folder, self.record = folder, record
        self.repo_id, self.strategy, self.public = repo_id, strategy, public
        self.waiting = queue.Queue()
        self.thread = None

    def saved(self, checkpoint: Path, step: int) -> None:
        """Send the checkpoint that was written after `step` optimizer steps, as the strategy says; returns at once."""
        if self.strategy == "end":
            return
        if self.strategy != "all_checkpoints" and self.waiting.unfinished_tasks:
            logger.warning(
                f"{self.repo_id}: {checkpoint.name} is not sent, as an earlier checkpoint is still being sent"
            )
            return
        branch = {"every_save": None, "checkpoint": "last-checkpoint"}.get(self.strategy, checkpoint.name)
        self._send(checkpoint, branch, {"checkpoint_step": step})

    def saved_by_words(self, saved: list[Path]) -> None:
        """
        Send models that were saved by the number of words seen, each to a branch of its name; returns at once.

        They are sent with every strategy. A model that is on its branch already is not sent again.

        Args:
            saved: folders with a `words_seen.json`, from `training.checkpoint`.
        """
        for folder in saved:
            reached = folders.read_json(folder / "words_seen.json")
            entries = {"checkpoint_step": reached["step"], "checkpoint_words": reached["words"]}
            self._send(folder, folder.name, entries)

    def _send(self, checkpoint, branch, entries):
        """
        Copy a folder, and queue the copy for the background thread: the folder may be deleted before it is sent.

        `entries` are added to the record of the run.
        """
        try:
            staged = tempfile.TemporaryDirectory(prefix=STAGED, dir=self.folder)
            for path in published_files(checkpoint):
                shutil.copyfile(path, Path(staged.name, path.name))
            folders.write_json(Path(staged.name, RUN_FILE), {**self.record, **entries})
            card = render_card(Path(staged.name), self.folder.resolve().name)
            Path(staged.name, CARD_FILE).write_text(card, encoding="utf-8")
        except Exception as error:  # the run continues after any error
            self._not_sent(checkpoint.name, error)
            return
        self.waiting.put((staged, branch, checkpoint.name))
        if self.thread is None:  # a daemon, so that a run that stops does not wait for uploads
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self):
        """The background thread: send the waiting checkpoints, until None arrives."""
        while task := self.waiting.get():
            staged, branch, name = task
            try:
                config = PublishConfig(revision=branch, commit_message=name)
                files, _ = outgoing(Path(staged.name), config)
                send(files, None, self.folder.resolve().name, self.repo_id, config)
            except Exception as error:  # the run continues after any error
                self._not_sent(name, error)
            finally:
                staged.cleanup()
                self.waiting.task_done()

    def _not_sent(self, name, error):
        """Log why a checkpoint was not sent; for a bug of this package, with the traceback."""
        is_bug = not isinstance(error, (UserError, OSError))
        logger.warning(f"{self.repo_id}: {name} was not sent: {error}", exc_info=error if is_bug else None)

    def finish(self) -> str:
        """
        Wait for the checkpoints, then send the finished model.

        Returns:
            The message of `publish`.

        Raises:
            UserError: the model cannot be sent; the model folder is complete all the same.
        """
        self.waiting.join()
        self.waiting.put(None)  # ends the thread
        public = " --public" if self.public else ""
        command = f"d2l-bert publish {shlex.quote(str(self.folder))} {self.repo_id}{public}"
        try:
            return publish(self.folder, self.repo_id, PublishConfig(public=self.public))
        except UserError as error:
            reason = str(error).removesuffix(f"; {AGAIN}")
            raise UserError(f"{reason}; the model is complete in {self.folder}: {command}") from None
        except (KeyboardInterrupt, SystemExit):
            logger.warning(f"{self.repo_id}: not sent; the model is complete in {self.folder}: {command}")
            raise
