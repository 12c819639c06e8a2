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
from d2l_bert.training.tracking import say


STAGED = ".hub-"  # a checkpoint that is being sent


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
        self.config = PublishConfig(public=not run.hub_private_repo)
        self.waiting = queue.Queue()
        self.idle = threading.Event()
        self.idle.set()
        self.thread = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for staged in self.folder.glob(f"{STAGED}*"):
            shutil.rmtree(staged, ignore_errors=True)

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint was written."""
        if self.strategy == "end":
            return
        if self.strategy != "all_checkpoints" and not self.idle.is_set():
            say(f"{self.repo_id}: {checkpoint.name} is not sent, an earlier one still is")
            return
        try:
            staged = self._stage(checkpoint)
        except OSError as error:
            say(f"{self.repo_id}: {checkpoint.name} is not sent ({error.strerror or error})")
            return
        branch = {"every_save": None, "checkpoint": "last-checkpoint"}.get(self.strategy, checkpoint.name)
        self.idle.clear()
        self.waiting.put((staged, branch, checkpoint.name))
        if self.thread is None:  # a daemon: a run that is told to stop does not wait for it
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _stage(self, checkpoint):
        """A copy of what is sent, as the checkpoint may be deleted meanwhile."""
        staged = Path(tempfile.mkdtemp(prefix=STAGED, dir=self.folder))
        try:
            for path in published_files(checkpoint):
                (staged / path.relative_to(checkpoint)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, staged / path.relative_to(checkpoint))
            shutil.copyfile(self.folder / RUN_FILE, staged / RUN_FILE)
            (staged / CARD_FILE).write_text(render_card(staged, self.folder.resolve().name), encoding="utf-8")
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return staged

    def _work(self):
        while True:
            staged, branch, name = self.waiting.get()
            try:
                config = PublishConfig(public=self.config.public, revision=branch, commit_message=name)
                files, _ = outgoing(staged, config)
                send(files, None, staged, self.repo_id, config)
            except Exception as error:  # whatever it is, the run goes on
                say(f"{self.repo_id}: {name} was not sent: {error}")
            finally:
                shutil.rmtree(staged, ignore_errors=True)
                self.waiting.task_done()
                if self.waiting.empty():
                    self.idle.set()

    def finish(self) -> str:
        """
        Send the finished model when all else is sent.

        Raises:
            ValueError: it cannot be sent; the folder is complete all the same.
        """
        self.waiting.join()
        try:
            return publish(self.folder, self.repo_id, self.config)
        except ValueError as error:
            public = " --public" if self.config.public else ""
            raise ValueError(
                f"{error}; the model is complete in {self.folder}: "
                f"d2l-bert publish {shlex.quote(str(self.folder))} {self.repo_id}{public}"
            ) from None
