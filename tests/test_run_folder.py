"""At no time do a finished model's weights stand beside the files of another run, even if a run is killed."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import MODEL_FILES, SMALL

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

pytestmark = pytest.mark.usefixtures("same_figures")


@pytest.fixture
def same_figures(monkeypatch):
    """Make a run's files independent of the time it took, and write the rows of evaluations in place of the curves."""
    speed = RunLog.speed
    monkeypatch.setattr(RunLog, "speed", lambda log: dict.fromkeys(speed(log), 0.5))
    monkeypatch.setattr("d2l_bert.training.log.matmul_peak", lambda *_: 1e12)

    def plot(rows, path):
        path.write_text(json.dumps([row for row in rows if "eval_mlm_loss" in row]))

    monkeypatch.setattr("d2l_bert.model_cards.pictures.plot_curves", plot)


@pytest.fixture
def instants(monkeypatch, tmp_path):
    """
    What `start_folder` and `finish_folder` do to the files of the run in `tmp_path / "model"`.

    Returns:
        A list that fills during the run: the function, ("rename", "delete" or "sync", name of the file), and a copy of
        the folder as it was right before, which is what a run that is killed there leaves.
    """
    at_work = []
    taken = []

    def noted(kind, function):
        def call(path, *arguments, **how):
            if at_work:
                name = os.path.basename(arguments[0] if kind == "rename" else path)
                copy = Path(tempfile.mkdtemp(dir=tmp_path), "model")
                taken.append((at_work[-1], (kind, name), shutil.copytree(tmp_path / "model", copy)))
            return function(path, *arguments, **how)

        return call

    def watched(function):
        def call(*arguments):
            at_work.append(function.__name__)
            made = function(*arguments)
            at_work.pop()
            return made

        return call

    kinds = {"rename": "rename", "replace": "rename", "unlink": "delete", "remove": "delete", "rmdir": "delete"}
    for name, kind in kinds.items():
        monkeypatch.setattr(os, name, noted(kind, getattr(os, name)))
    monkeypatch.setattr(folders, "sync", noted("sync", folders.sync))
    for function in (run_folder.start_folder, run_folder.finish_folder):
        monkeypatch.setattr(run_folder, function.__name__, watched(function))
    return taken


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in MODEL_FILES}


def run(books, folder, *changes):
    """A run of the command; returns the content of the files of its model."""
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *OPTIONS, *changes]) == 0
    return contents(folder)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [REPLACED, RESUMED], ids=["replaced", "resumed"])
def test_a_run_killed_at_any_rename_leaves_no_weights_beside_files_of_another_run(books, tmp_path, instants, changes):
    """And the same command with `--resume_from_checkpoint` completes the model."""
    folder = tmp_path / "model"
    before = run(books, folder)
    instants.clear()
    after = run(books, folder, *changes)
    assert before.keys() == after.keys() == MODEL_FILES
    assert before["run_config.json"] != after["run_config.json"]
    done = [what for _, what, _ in instants]
    copies = [(function, copy) for function, _, copy in instants]
    found = [contents(copy) for _, copy in copies]
    assert all(files in (before, after) or WEIGHTS not in files for files in found)
    assert before in found
    assert after in found
    assert any(WEIGHTS not in files for files in found)

    # Deletions and new files are on disk before the new weights; a model that is kept so far is deleted only then.
    gone = max(number for number, what in enumerate(done) if what == ("delete", WEIGHTS))
    there = max(number for number, what in enumerate(done) if what == ("rename", WEIGHTS))
    for number in (gone + 1, there - 1, there + 1):
        assert done[number] == ("sync", folder.name)
    assert set(done[: gone if changes == RESUMED else there]) >= {("sync", name) for name in MODEL_FILES}
    assert set(done[gone:there]) >= {("rename", name) for name in MODEL_FILES - {WEIGHTS}}

    killed = [copy for function, copy in copies if function == "finish_folder"]
    options = [change for change in changes if change != "--overwrite_output_dir"]
    for copy in killed[::10]:
        files = run(books, copy, *options, "--resume_from_checkpoint=latest")
        assert all(files[name] == after[name] for name in MODEL_FILES - {"run_config.json"})
        assert not (copy / ".model.part").exists() and not (copy / ".lock").exists()


def test_a_folder_in_which_a_run_was_killed_while_it_wrote_its_record_is_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: os._exit(9))
    if (child := os.fork()) == 0:
        folders.write_json(tmp_path / run_folder.card.RUN_FILE, {})
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2  # the hidden folder, and its lock, which is free
    run_folder.check_output_folder(PretrainConfig(), tmp_path, None)


def test_a_run_that_goes_on_deletes_the_locks_of_one_that_was_killed(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "model"))
    lock = folders.lock_of(folder / "checkpoint-40")
    lock.touch()
    run_folder.start_folder(folder, {}, start_step=40)
    assert not lock.exists() and (folder / "checkpoint-40").is_dir()
