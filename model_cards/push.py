"""Sends the checkpoints of a running training to the Hub in the background; at the end `publish` sends the model."""

import contextlib
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
from d2l_bert.model_cards import card, checks, config, publish


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
    publish.check_repo_id(repo_id)
    if license is None:
        raise UserError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    config.check_license(license)
    with publish.hub_errors(repo_id, again="try again when it can, or leave push_to_hub out"):
        if dry_run:
            HfApi().whoami()
        else:
            publish.make_repository(HfApi(), repo_id, not private)


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
        # A daemon, so that a run that stops does not wait for uploads.
        threading.Thread(target=self._work, daemon=True).start()

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
        with self._only_warned(checkpoint.name):
            staged = tempfile.TemporaryDirectory(prefix=card.STAGED, dir=self.folder)
            copy = Path(staged.name)
            for path in checks.published_files(checkpoint).values():
                shutil.copyfile(path, copy / path.name)
            folders.write_json(copy / card.RUN_FILE, {**self.record, **entries})
            content = card.render_card(copy, self.folder.resolve().name)
            (copy / card.CARD_FILE).write_text(content, encoding="utf-8")
            self.waiting.put((staged, branch, checkpoint.name))

    def _work(self):
        """The background thread: send the waiting checkpoints, until None arrives."""
        for staged, branch, name in iter(self.waiting.get, None):
            with self._only_warned(name), staged as folder:
                checks.check_paths(Path(folder))
                publish.send(Path(folder), self.repo_id, config.PublishConfig(revision=branch, commit_message=name))
            self.waiting.task_done()

    @contextlib.contextmanager
    def _only_warned(self, name):
        """Log why a checkpoint was not sent, whatever the reason: the run continues. Of a bug with the traceback."""
        try:
            yield
        except Exception as error:
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
        public = ["--public"] if self.public else []
        command = shlex.join(["d2l-bert", "publish", str(self.folder), self.repo_id, *public])
        try:
            return publish.publish(self.folder, self.repo_id, config.PublishConfig(public=self.public))
        except UserError as error:
            reason = str(error).removesuffix(f"; {publish.AGAIN}")
            raise UserError(f"{reason}; the model is complete in {self.folder}: {command}") from None
        except (KeyboardInterrupt, SystemExit):
            logger.warning(f"{self.repo_id}: not sent; the model is complete in {self.folder}: {command}")
            raise
