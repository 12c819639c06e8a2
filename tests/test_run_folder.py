"""At no time do a finished model's weights stand beside the files of another run, even if a run is killed."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from conftest import MODEL_FILES, SMALL
from filelock import FileLock, Timeout

from d2l_bert import folders
from d2l_bert.__main__ import main
from d2l_bert.training import run_folder
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.log import RunLog


WEIGHTS = "model.safetensors"
OPTIONS = (*SMALL, "--max_steps=2", "--save_total_limit=1", "--mixed_precision=no")

# A run with another model and tokenizer; and a run that resumes the first one with another micro-batch size.
REPLACED = ("--overwrite_output_dir", "--seed=1", "--hidden_size=16", "--vocab_size=150")
RESUMED = ("--resume_from_checkpoint=latest", "--micro_batch_size=4")

pytestmark = pytest.mark.usefixtures("one_thread", "same_figures")


class Killed(BaseException):
    """Ends the run like a kill: nothing after it in the process is carried out."""


@pytest.fixture
def same_figures(monkeypatch):
    """Make a run's files independent of the time it took, and skip drawing the curves and measuring the peak."""
    speed = RunLog.speed
    monkeypatch.setattr(RunLog, "speed", lambda log: dict.fromkeys(speed(log), 0.5))
    monkeypatch.setattr("d2l_bert.training.log.matmul_peak", lambda *_: 1e12)

    def plot(rows, path):
        path.write_text(json.dumps([row for row in rows if "eval_mlm_loss" in row]))

    monkeypatch.setattr(run_folder, "plot_curves", plot)


@pytest.fixture
def dying(monkeypatch):
    """Kill the run right before its n-th rename or deletion in `start_folder` or `finish_folder`.

    Returns:
        A function of n, which returns two lists that fill during the run: the function at work, and what was done:
        ("rename", "delete" or "sync", name of the file).
    """
    inside, done, last, dead = [], [], None, False

    def counted(what, function):
        def call(path, *arguments, **how):
            nonlocal dead
            if inside:
                if dead or sum(kind != "sync" for kind, _ in done) == last:
                    dead = True
                    raise Killed
                done.append((what, os.path.basename(arguments[0] if what == "rename" else path)))
            return function(path, *arguments, **how)

        return call

    def watched(function):
        def call(*arguments):
            inside.append(function.__name__)
            made = function(*arguments)
            inside.clear()
            return made

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, counted("rename", getattr(os, name)))
    for name in ("unlink", "remove", "rmdir"):
        monkeypatch.setattr(os, name, counted("delete", getattr(os, name)))
    monkeypatch.setattr(folders, "sync", counted("sync", folders.sync))
    for function in (run_folder.start_folder, run_folder.finish_folder):
        monkeypatch.setattr(run_folder, function.__name__, watched(function))

    def die(number):
        nonlocal last, dead
        last, dead = number, False
        inside.clear()
        done.clear()
        return inside, done

    return die


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in MODEL_FILES}


@pytest.fixture
def runs(books, tmp_path):
    """The arguments of a run, its folder after a first run, and a copy of that folder."""
    folder, kept = tmp_path / "model", tmp_path / "kept"
    command = ["pretrain", f"--corpus={books}", f"--output_dir={folder}", *OPTIONS]
    assert main(command) == 0
    shutil.copytree(folder, kept)
    return command, folder, kept


@pytest.mark.parametrize("changes", [REPLACED, RESUMED])
@pytest.mark.slow
def test_a_run_killed_at_any_rename_leaves_no_weights_beside_files_of_another_run(runs, dying, changes):
    command, folder, kept = runs
    _, done = dying(None)
    assert main([*command, *changes]) == 0
    whole, count = {"before": contents(kept), "after": contents(folder)}, sum(kind != "sync" for kind, _ in done)
    assert whole["before"].keys() == whole["after"].keys() == MODEL_FILES and count > len(MODEL_FILES)
    assert whole["before"]["run_config.json"] != whole["after"]["run_config.json"]
    seen = set()
    for number in range(count):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        inside, done = dying(number)
        with pytest.raises(Killed):
            main([*command, *changes])
        (function,) = inside
        found = contents(folder)
        state = next((name for name in whole if found == whole[name]), "without weights")
        assert state != "without weights" or WEIGHTS not in found, done
        seen.add(state)
        dying(None)
        if function == "finish_folder":
            assert main([*command, *changes, *resumed(changes)]) == 0
            found = contents(folder)
            assert found.keys() == MODEL_FILES
            assert all(found[name] == whole["after"][name] for name in MODEL_FILES - {"run_config.json"})
            assert not (folder / ".model.part").exists() and not (folder / ".lock").exists()
    assert seen == {"before", "without weights", "after"}


def resumed(changes):
    """The options that resume a run instead of replacing it."""
    return ("--overwrite_output_dir=false", "--resume_from_checkpoint=latest") if changes == REPLACED else ()


def test_deletions_and_new_files_are_on_disk_before_the_new_weights(runs, dying):
    command, folder, _ = runs
    _, done = dying(None)
    assert main([*command, *RESUMED]) == 0
    gone, there = done.index(("delete", WEIGHTS)), done.index(("rename", WEIGHTS))
    assert set(done[:gone]) >= {("sync", name) for name in MODEL_FILES}
    others = [("rename", name) for name in MODEL_FILES - {WEIGHTS}]
    assert done[gone + 1] == ("sync", folder.name) and sorted(done[gone + 2 : there - 1]) == sorted(others)
    assert done[there - 1] == done[there + 1] == ("sync", folder.name)


def test_a_folder_in_which_a_run_was_killed_while_it_wrote_its_record_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: os._exit(9))
    if (child := os.fork()) == 0:
        folders.write_json(tmp_path / run_folder.card.RUN_FILE, {})
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    with run_folder.output_folder(PretrainConfig(), tmp_path):
        pass


def test_a_run_that_waited_for_a_deleted_lock_file_locks_the_new_one(tmp_path):
    """The folder's lock relies on this behaviour of filelock."""
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire()
    waiting = threading.Thread(target=second.acquire, kwargs={"timeout": 20, "poll_interval": 0.01})
    waiting.start()
    time.sleep(0.1)
    (tmp_path / "lock").unlink()
    first.release()
    waiting.join(20)
    assert (tmp_path / "lock").exists()
    with pytest.raises(Timeout):
        FileLock(tmp_path / "lock").acquire(timeout=0)
