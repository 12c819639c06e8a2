"""To the Hub while a run goes on: its checkpoints in the background, the finished model at its end."""

import logging
import queue
import shlex
import shutil
import tempfile
import threading
import traceback
from pathlib import Path

from huggingface_hub import HfApi

from d2l_bert import folders
from d2l_bert.errors import UserError
from d2l_bert.model_cards.card import CARD_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.metadata import check_metadata
from d2l_bert.model_cards.publish import (
    AGAIN,
    check_repo_id,
    full_repo_id,
    hub_errors,
    outgoing,
    publish,
    published_files,
    send,
    warn_of_earlier_commits,
)


logger = logging.getLogger(__name__)


STAGED = ".hub-"  # folders of checkpoints on their way to the Hub, beside them


def check_push(repo_id: str, license: str | None, private: bool, dry_run: bool) -> None:
    """
    Refuse at the start what would be refused when all the work is done: name, licence, token, and whether it may write
    there. So the repository is made now, but for a dry run: private, whatever `private` says, until
    `Pusher.finish` has sent the finished model.

    Args:
        license: what the model's card will say.
        private: whether the repository stays private in the end.

    Raises:
        UserError: in one line.
    """
    check_repo_id(repo_id)
    if license is None:
        raise UserError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    check_metadata({"license": license})
    with hub_errors(repo_id, again="try again when it can, or leave push_to_hub out"):
        api = HfApi()
        repo_id = full_repo_id(api, repo_id)
        if not private:
            warn_of_earlier_commits(api, repo_id)
        if not dry_run:
            api.create_repo(repo_id, private=True, exist_ok=True)


class Pusher:
    """
    Sends the run's checkpoints to the Hub while it goes on, and the finished model at its end.

    A checkpoint goes in the background: model, tokenizer, code and a card, never the optimizer's state. `every_save`
    puts each onto the main branch, `checkpoint` onto the branch last-checkpoint, and both pass over those that come
    while one is being sent; `all_checkpoints` sends every one to a branch of its name. What cannot be sent is said,
    and the run goes on.
    """

    def __init__(self, folder: Path, record: dict, repo_id: str, strategy: str, public: bool):
        """
        Args:
            folder: the run's.
            record: the run's; while it goes on, the folder may still hold that of a finished run.
            strategy: what is sent before the end; `end` is nothing.
            public: whether the finished model makes the repository public.
        """
        self.folder, self.record = folder, record
        self.repo_id, self.strategy, self.public = repo_id, strategy, public
        self.waiting = queue.Queue()
        self.thread = None

    def saved(self, checkpoint: Path, step: int) -> None:
        """A checkpoint was written after `step` optimizer steps."""
        if self.strategy == "end":
            return
        if self.strategy != "all_checkpoints" and self.waiting.unfinished_tasks:
            logger.warning(f"{self.repo_id}: {checkpoint.name} is not sent, as an earlier one still is")
            return
        try:
            staged = self._stage(checkpoint, step)
        except Exception as error:  # whatever it is, the run goes on
            self._not_sent(checkpoint.name, error)
            return
        branch = {"every_save": None, "checkpoint": "last-checkpoint"}.get(self.strategy, checkpoint.name)
        self.waiting.put((staged, branch, checkpoint.name))
        if self.thread is None:  # a daemon: a run that is told to stop does not wait for it
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _stage(self, checkpoint, step):
        """A copy of what is sent, as the checkpoint may be deleted meanwhile; it goes when this process does."""
        staged = tempfile.TemporaryDirectory(prefix=STAGED, dir=self.folder)
        for path in published_files(checkpoint):
            shutil.copyfile(path, Path(staged.name, path.name))
        record = {**self.record, "checkpoint_step": step}
        folders.write_json(Path(staged.name, RUN_FILE), record)
        card = render_card(Path(staged.name), self.folder.resolve().name)
        Path(staged.name, CARD_FILE).write_text(card, encoding="utf-8")
        return staged

    def _work(self):
        while task := self.waiting.get():
            staged, branch, name = task
            try:
                config = PublishConfig(revision=branch, commit_message=name)
                files, _ = outgoing(Path(staged.name), config)
                send(files, None, self.folder.resolve().name, self.repo_id, config)
            except Exception as error:  # whatever it is, the run goes on
                self._not_sent(name, error)
            finally:
                staged.cleanup()
                self.waiting.task_done()

    def _not_sent(self, name, error):
        """Say why a checkpoint was not sent; a bug of this package is shown with its traceback."""
        if not isinstance(error, (UserError, OSError)):
            logger.warning("".join(traceback.format_exception(error)).rstrip())
            error = f"this is a bug of d2l-bert ({type(error).__name__}): please report it with the lines above"
        logger.warning(f"{self.repo_id}: {name} was not sent: {error}")

    def finish(self) -> str:
        """
        Send the finished model when all else is sent; return what `publish` has to tell.

        Raises:
            UserError: it cannot be sent; the folder is complete all the same.
        """
        self.waiting.join()
        self.waiting.put(None)  # the thread ends
        public = " --public" if self.public else ""
        command = f"d2l-bert publish {shlex.quote(str(self.folder))} {self.repo_id}{public}"
        try:
            return publish(self.folder, self.repo_id, PublishConfig(public=self.public))
        except UserError as error:
            what = str(error).removesuffix(f"; {AGAIN}")
            raise UserError(f"{what}; the model is complete in {self.folder}: {command}") from None
        except (KeyboardInterrupt, SystemExit):
            logger.warning(f"{self.repo_id}: not sent; the model is complete in {self.folder}: {command}")
            raise
