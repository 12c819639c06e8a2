"""Checkpoints, and runs that go on from them: the same bytes as without a stop, and what is refused."""

import hashlib
import importlib.metadata
import json
import shutil

from conftest import SMALL, write_books
from runs import log_rows, run
from transformers import AutoTokenizer

from d2l_bert.cli import main
from d2l_bert.tokenization.wordpiece import make_tokenizer
from d2l_bert.training import checkpoint
from d2l_bert.training.run_folder import start_folder


def test_only_the_latest_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_being_deleted_no_longer_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # as if killed before the files are deleted
    checkpoint.delete(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)


def test_resuming_from_a_checkpoint_removes_the_later_ones(tmp_path):
    """They would count as the latest, so that new checkpoints would be deleted instead."""
    for name in ("checkpoint-3", "checkpoint-6", "checkpoint-12", ".checkpoint-3.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-notes.txt").write_text("not one of ours")
    start_folder(tmp_path, {}, 6)
    left = {path.name for path in tmp_path.iterdir()} - {"run_config.json", "training_log.jsonl"}
    assert left == {"checkpoint-3", "checkpoint-6", "checkpoint-notes.txt"}


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


LONG_OPTIONS = ("--optim=muon", "--ema_decay=0.7", "--lr_scheduler_type=warmup_stable_decay", "--save_steps=4")
LONG_OPTIONS += ("--max_steps=10", "--batch_size_schedule", "2:0.3", "4:0.2", "--length_schedule", "16:0.5")


def test_a_resumed_run_with_muon_average_and_schedules_ends_with_the_same_bytes(books, tmp_path):
    """Besides AdamW's moments, Muon's moment, the average, and the schedules of rate, batch size and length."""
    whole = run(books, tmp_path / "whole", *LONG_OPTIONS)
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", stopped)
    shutil.rmtree(stopped / "checkpoint-10")
    (stopped / "model.safetensors").unlink()
    assert run(books, stopped, *LONG_OPTIONS, "--resume_from_checkpoint=latest") == whole
    rates = [row["learning_rate"] for row in log_rows(stopped) if "loss" in row]
    assert rates[:8] == [rates[0]] * 8 and rates[8] > rates[9], "flat, then a fall over the last fifth"


def test_changes_of_length_and_batch_size_are_reported_once_and_logged_once(books, tmp_path, capsys):
    out = tmp_path / "out"
    # First 2, then 4 pairs of 48 tokens a step, or as many tokens in pairs of 16; from step 6 on 8 pairs of 48.
    run(books, out, *LONG_OPTIONS, "--save_total_limit=9")
    first = "step 4: from here on, a step has 12 pairs of 16 tokens"
    second = "step 6: from here on, a step has 8 pairs of 48 tokens; the evaluation always uses 48 tokens"
    said = [line for line in capsys.readouterr().err.splitlines() if "from here on" in line]
    events = [row for row in log_rows(out) if "event" in row]
    assert said == [first, second] == [row.pop("reason") for row in events]
    assert events == [
        {"step": 4, "event": "stage", "label": "batch 2 → 4"},
        {"step": 6, "event": "stage", "label": "16 → 48 tokens, batch 4 → 8"},
    ]
    for name in ("checkpoint-8", "checkpoint-10"):
        shutil.rmtree(out / name)
    run(books, out, *LONG_OPTIONS, "--resume_from_checkpoint=latest")
    assert [line for line in capsys.readouterr().err.splitlines() if "from here on" in line] == [second]
    assert [row["step"] for row in log_rows(out) if "event" in row] == [4, 6]


def test_resuming_with_another_text_or_tokenizer_is_refused(books, trained, tmp_path, capsys):
    other = write_books(tmp_path / "books", seed=1)
    prepared = ["--max_steps=40", "--mixed_precision=no", *SMALL, f"--output_dir={tmp_path / 'out'}"]
    prepared.append(f"--resume_from_checkpoint={trained / 'checkpoint-20'}")
    assert main(["pretrain", f"--corpus={other}", *prepared]) == 2
    assert "another run: corpus (fingerprint) was" in capsys.readouterr().err
    vocabulary = [option for option in prepared if not option.startswith("--vocab_size")]
    shutil.copytree(trained, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("checkpoint-*"))
    pieces = AutoTokenizer.from_pretrained(trained).get_vocab()
    swapped = sorted(pieces, key=pieces.get)
    swapped[-2:] = swapped[-1], swapped[-2]
    make_tokenizer(swapped, lowercase=True).save_pretrained(tmp_path / "tokenizer")
    assert main(["pretrain", f"--corpus={books}", f"--tokenizer={tmp_path / 'tokenizer'}", *vocabulary]) == 2
    assert "another run: tokenizer (fingerprint) was" in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_can_be_resumed_with_another_sentence_splitter_that_splits_alike(
    books, trained, tmp_path, monkeypatch, capsys
):
    arguments = ["pretrain", f"--corpus={books}", "--max_steps=40", "--save_steps=20", "--mixed_precision=no", *SMALL]
    arguments += ["--license=apache-2.0", f"--resume_from_checkpoint={trained / 'checkpoint-20'}"]
    version = importlib.metadata.version
    new = {"sentencex": "99.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: new.get(name) or version(name))
    assert main([*arguments, f"--output_dir={tmp_path / 'resumed'}"]) == 0
    assert "reading books" in capsys.readouterr().err, "the text is another one for the cache"
    assert (tmp_path / "resumed" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    new["sentencex"] = "100.0"
    monkeypatch.setattr("sentencex.segment", lambda language, paragraph: [paragraph])
    assert main([*arguments, f"--output_dir={tmp_path / 'refused'}"]) == 2
    assert "another run: corpus (fingerprint) was" in capsys.readouterr().err.splitlines()[-1]


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
