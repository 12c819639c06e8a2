"""To the Hub while a run goes on: its checkpoints in the background, the finished model at its end."""

import queue
import shlex
import shutil
import tempfile
import threading
from pathlib import Path

from huggingface_hub import HfApi

from d2l_bert.training.card import CARD_FILE, RUN_FILE, render_card
from d2l_bert.training.card_rules import check_license
from d2l_bert.training.config import PretrainConfig, PublishConfig
from d2l_bert.training.publish import check_repo_id, hub_errors, outgoing, publish, published_files, send
from d2l_bert.training.run_folder import STAGED
from d2l_bert.training.tracking import say


def check_push(run: PretrainConfig, folder: Path) -> None:
    """
    Refuse at the start what would be refused when all the work is done: name, licence, token.

    Raises:
        ValueError: in one line.
    """
    repo_id = run.hub_model_id or folder.resolve().name
    check_repo_id(repo_id)
    license = run.known_license()
    if license is None:
        raise ValueError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    check_license(license)
    with hub_errors(repo_id):
        HfApi().whoami()


class Pusher:
    """
    Sends the run's checkpoints to the Hub while it goes on, and the finished model at its end.

    A checkpoint goes in the background: model, tokenizer, code and a card, never the optimizer's state. `every_save`
    puts each onto the main branch, `checkpoint` onto the branch last-checkpoint, and both pass over those that come
    while one is being sent; `all_checkpoints` sends every one to a branch of its name. What cannot be sent is said,
    and the run goes on.
    """

    def __init__(self, run: PretrainConfig, folder: Path):
        self.folder, self.strategy = folder, run.hub_strategy
        self.repo_id = run.hub_model_id or folder.resolve().name
        self.public = not run.hub_private_repo
        self.waiting = queue.Queue()
        # A daemon: a run that is told to stop does not wait for it.
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint was written."""
        if self.strategy == "end":
            return
        if self.strategy != "all_checkpoints" and self.waiting.unfinished_tasks:
            say(f"{self.repo_id}: {checkpoint.name} is not sent, as an earlier one still is")
            return
        try:
            staged = self._stage(checkpoint)
        except (ValueError, OSError) as error:
            say(f"{self.repo_id}: {checkpoint.name} is not sent: {error}")
            return
        branch = {"every_save": None, "checkpoint": "last-checkpoint"}.get(self.strategy, checkpoint.name)
        self.waiting.put((staged, branch, checkpoint.name))

    def _stage(self, checkpoint):
        """A copy of what is sent, as the checkpoint may be deleted meanwhile; it goes when this process does."""
        staged = tempfile.TemporaryDirectory(prefix=STAGED, dir=self.folder)
        for path in (*published_files(checkpoint), self.folder / RUN_FILE):
            shutil.copyfile(path, Path(staged.name, path.name))
        card = render_card(Path(staged.name), self.folder.resolve().name)
        Path(staged.name, CARD_FILE).write_text(card, encoding="utf-8")
        return staged

    def _work(self):
        while task := self.waiting.get():
            staged, branch, name = task
            try:
                config = PublishConfig(public=self.public, revision=branch, commit_message=name)
                files, _ = outgoing(Path(staged.name), config)
                send(files, None, self.repo_id, config)
            except Exception as error:  # whatever it is, the run goes on
                say(f"{self.repo_id}: {name} was not sent: {error}")
            finally:
                staged.cleanup()
                self.waiting.task_done()

    def finish(self) -> str:
        """
        Send the finished model when all else is sent; return what `publish` has to tell.

        Raises:
            ValueError: it cannot be sent; the folder is complete all the same.
        """
        self.waiting.join()
        self.waiting.put(None)  # the thread ends
        try:
            return publish(self.folder, self.repo_id, PublishConfig(public=self.public))
        except ValueError as error:
            public = " --public" if self.public else ""
            raise ValueError(
                f"{error}; the model is complete in {self.folder}: "
                f"d2l-bert publish {shlex.quote(str(self.folder))} {self.repo_id}{public}"
            ) from None
