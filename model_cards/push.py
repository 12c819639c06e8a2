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
from d2l_bert.messages import UserError, explained
from d2l_bert.model_cards import card, checks, config, publish


logger = logging.getLogger(__name__)


def check_push(repo_id: str, license: str | None, dry_run: bool) -> None:
    """
    Check at the start of a run that the model can be published at the end: name, licence, token, right to write.

    To check the right to write, the repository is created now, except on a dry run. The repository is private until
    `Pusher.finish` has sent the finished model.

    Args:
        license: the licence for the model's card.

    Raises:
        UserError: the model could not be published.
    """
    publish.check_repo_id(repo_id)
    if license is None:
        raise UserError("push_to_hub: a model of this text needs a licence; give --license, such as apache-2.0")
    with publish.hub_errors(repo_id, again="try again when it can, or leave push_to_hub out"):
        HfApi().whoami()
        if not dry_run:
            HfApi().create_repo(repo_id, private=True, exist_ok=True)


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

    def saved(self, folder: Path) -> None:
        """
        Send a checkpoint as the strategy says; returns at once.

        A model that was saved by the number of words seen (it has a `words_seen.json`) is sent with every strategy, to
        a branch of its name. If it is on its branch already, it is not sent again.
        """
        reached, branch = folders.read_json(folder / "words_seen.json"), folder.name
        if not reached:
            if self.strategy == "end":
                return
            if self.strategy != "all_checkpoints" and self.waiting.unfinished_tasks:
                logger.warning(f"{self.repo_id}: {folder.name} is not sent, as an earlier one is still being sent")
                return
            branch = {"every_save": None, "checkpoint": "last-checkpoint"}.get(self.strategy, folder.name)
            reached = {"step": int(folder.name.removeprefix("checkpoint-")), "words": None}
        with self._only_warned(folder.name):  # a copy, as the run may delete the checkpoint before it is sent
            staged = tempfile.TemporaryDirectory()
            copy = Path(staged.name)
            for path in checks.published_files(folder).values():
                shutil.copyfile(path, copy / path.name)
            entries = {f"checkpoint_{name}": reached[name] for name in ("step", "words")}
            folders.write_json(copy / card.RUN_FILE, {**self.record, **entries})
            (copy / card.CARD_FILE).write_text(card.render_card(copy, self.folder.resolve().name), encoding="utf-8")
            self.waiting.put((staged, branch, folder.name))

    def _work(self):
        """The background thread: send the waiting copies, until None arrives."""
        for staged, branch, name in iter(self.waiting.get, None):
            with self._only_warned(name), staged as copy:
                checks.check_paths(Path(copy))
                publish.send(
                    publish.outgoing(Path(copy), None),
                    self.repo_id,
                    config.PublishConfig(revision=branch, commit_message=name),
                )
            self.waiting.task_done()

    @contextlib.contextmanager
    def _only_warned(self, name):
        """Log why a checkpoint was not sent, whatever the reason: the run continues. Of a bug with the traceback."""
        try:
            yield
        except Exception as error:
            logger.warning(
                f"{self.repo_id}: {name} was not sent: {error}",
                exc_info=not isinstance(error, (UserError, OSError)),
            )

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
        command = ["d2l-bert", "publish", str(self.folder), self.repo_id, *(["--public"] if self.public else [])]
        with explained(f"the model is complete in {self.folder}, and {shlex.join(command)} sends it", "", UserError):
            return publish.publish(self.folder, self.repo_id, config.PublishConfig(public=self.public))
