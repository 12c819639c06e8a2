"""Checkpoints, and runs that go on from them: the same bytes as without a stop, and what is refused."""

import hashlib
import json
import shutil

from conftest import SMALL
from runs import log_rows, run

from d2l_bert.cli import main
from d2l_bert.training import checkpoint


def test_only_the_latest_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_being_deleted_no_longer_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # as if killed before the files are deleted
    checkpoint.delete(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)


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
    assert [row["step"] for row in again] == [6, 8, 3], "the log only grows"
    assert sorted(again, key=lambda row: row["step"]) == whole


def checkpoint_without(name, trained, folder):
    """A copy of the trained run's checkpoint, as of a version that did not have this part of the identity."""
    shutil.copytree(trained / "checkpoint-20", folder / "checkpoint-20")
    state, manifest = (folder / "checkpoint-20" / file for file in ("training_state.json", "manifest.json"))
    content = json.loads(state.read_text())
    del content["identity"][name]
    state.write_text(json.dumps(content))
    hashes = json.loads(manifest.read_text())
    hashes["sha256"][state.name] = hashlib.sha256(state.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(hashes, indent=2) + "\n")
    return folder / "checkpoint-20"


def test_a_checkpoint_without_a_version_of_the_data_order_is_refused(books, trained, tmp_path, capsys):
    saved = checkpoint_without("data order (version)", trained, tmp_path)
    arguments = [f"--output_dir={tmp_path / 'out'}", f"--resume_from_checkpoint={saved}"]
    assert main(["pretrain", f"--corpus={books}", "--max_steps=40", "--mixed_precision=no", *SMALL, *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint-20: a checkpoint of another run: data order (version) was None" in line
