"""Checkpoints: which are kept, how they are deleted, and an evaluation that an interruption left out."""

import shutil

import pytest
from runs import log_rows, run

from d2l_bert.training import checkpoint


# The options of the fixture `trained`.
AS_TRAINED = ("--max_steps=40", "--save_steps=20", "--mixed_precision=no", "--license=apache-2.0")


def test_only_the_latest_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_being_deleted_no_longer_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # as if killed before the files are deleted
    checkpoint.delete(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)


def test_a_checkpoint_under_another_name_is_gone_on_from(books, folder):
    """Its step and its place in the text stand in the checkpoint."""
    expected = (folder / "model.safetensors").read_bytes()
    (folder / "checkpoint-20").rename(folder / "before-the-holidays")
    run(books, folder, *AS_TRAINED, f"--resume_from_checkpoint={folder / 'before-the-holidays'}")
    assert (folder / "model.safetensors").read_bytes() == expected
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["checkpoint-40"]


@pytest.mark.slow
def test_an_evaluation_missed_by_an_interruption_is_made_up_for_on_resuming(books, tmp_path):
    options = ("--max_steps=8", "--save_steps=3", "--eval_steps=3", "--save_total_limit=9")
    run(books, tmp_path, *options)
    whole = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    log = tmp_path / "training_log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"step": 3, "eval' not in line))
    shutil.rmtree(tmp_path / "checkpoint-8")
    shutil.rmtree(tmp_path / "checkpoint-6")
    run(books, tmp_path, *options, "--resume_from_checkpoint=latest")
    again = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    assert [row["step"] for row in again] == [3, 6, 8]
    assert sorted(again, key=lambda row: row["step"]) == whole
