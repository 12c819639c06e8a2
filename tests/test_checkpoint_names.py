"""Checkpoints: which are kept and deleted; the step of one is what its JSON says, whatever its folder is called."""

import os
import re
import shutil
import signal

import pytest
from conftest import SMALL
from promises.driving import command, read_json, weights_of
from runs import log_rows, run, steps_counted

from d2l_bert.training import checkpoint
from d2l_bert.training.optimizer import Learner


pytestmark = pytest.mark.usefixtures("one_thread")

RUN = [*SMALL, "--mixed_precision=no", "--max_steps=10", "--save_total_limit=9", "--license=mit", "--eval_steps=4"]


@pytest.fixture(scope="module")
def whole(books, tmp_path_factory):
    """The folder of a run that was never stopped, with checkpoints at steps 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert command("pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--save_steps=4") == 0
    return folder


@pytest.fixture
def go_on(books, tmp_path):
    """Resume the run in the folder `out` from a checkpoint; returns the exit code and the number of steps taken."""
    words = ["pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *RUN, "--save_steps=100"]

    def resume(saved, sigterm_at=None):
        with steps_counted(sigterm_at) as taken:
            code = command(*words, "--resume_from_checkpoint", saved)
        return code, len(taken)

    return resume


def only_copy_of_step_4(whole, folder, name):
    """A run's folder whose only checkpoint is that of step 4, under another name; returns the checkpoint."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoint-*", "model.safetensors", "metrics.json"))
    return shutil.copytree(whole / "checkpoint-4", folder / name)


@pytest.mark.parametrize("name", ["best", "run2024", "checkpoint-9"])
def test_a_run_resumed_from_a_renamed_checkpoint_and_stopped_goes_on_where_it_stopped(whole, go_on, tmp_path, name):
    """Two steps after step 4, SIGTERM: step 6 is saved, and `latest` goes on from there to the same weights."""
    folder = tmp_path / "out"
    saved = only_copy_of_step_4(whole, folder, name)
    assert go_on(saved, sigterm_at=2) == (143, 2)
    states = [read_json(path) for path in folder.glob("*/training_state.json")]
    assert sorted(state["step"] for state in states) == [4, 6], "the checkpoint that it went on from stays"
    assert go_on("latest") == (0, 4)
    assert weights_of(folder) == weights_of(whole)


def test_a_run_stopped_before_its_first_step_loses_none_of_those_before(whole, go_on, tmp_path, monkeypatch, capsys):
    """
    SIGTERM in the evaluation of step 4, which an earlier interruption has left out: what the message advises goes on
    from step 4, and makes up for the evaluation.
    """
    folder = tmp_path / "out"
    saved = only_copy_of_step_4(whole, folder, "best")
    log = folder / "training_log.jsonl"
    log.write_text(log.read_text().partition('{"step": 4, "eval_')[0])
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert go_on(saved) == (143, 0)
    (advised,) = re.findall(r"--resume_from_checkpoint (\S+)", capsys.readouterr().err)
    assert go_on(advised) == (0, 6)
    assert weights_of(folder) == weights_of(whole)
    rows, expected = ([row for row in log_rows(place) if "eval_mlm_loss" in row] for place in (folder, whole))
    assert rows == expected and [row["step"] for row in rows] == [4, 8, 10]


def test_checkpoints_that_resuming_will_delete_are_named_before_the_first_step(whole, go_on, tmp_path, capsys):
    """From the checkpoint of step 4 the run goes on differently from those of steps 8 and 10."""
    folder = shutil.copytree(whole, tmp_path / "out")
    assert go_on(folder / "checkpoint-4") == (0, 6)
    before = capsys.readouterr().err.partition("step  5/")[0]
    (told,) = [line for line in before.splitlines() if "deleted" in line]
    assert "checkpoint-8" in told and "checkpoint-10" in told
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-4"]


def test_only_the_latest_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_being_deleted_no_longer_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # as if killed before the files are deleted
    checkpoint.delete(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)
