"""Checkpoints, and models saved by words seen: which are kept, renamed ones, and what a stopped run leaves."""

import itertools
import json
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
from conftest import SMALL
from promises.driving import command, end, read_json, start, wait_for, weights_of
from runs import log_rows, run, spoilt_step, steps_counted

from d2l_bert.__main__ import main
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import checkpoint, processes, run_folder
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import words_in
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.learner import Learner
from d2l_bert.training.log import RunLog
from d2l_bert.training.signals import StopSignals
from d2l_bert.training.words_seen import folder_name, word_marks


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


@pytest.mark.slow
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


def evaluations(folder):
    """The rows of a log with figures on held-out text."""
    return [row for row in log_rows(folder) if "eval_mlm_loss" in row]


def losses(folder):
    """Of each row of a log, the losses and the number of skipped steps."""
    found = []
    for row in log_rows(folder):
        found.append({name: row[name] for name in row if "loss" in name or name == "skipped_steps"})
    return found


@pytest.mark.slow
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
    rows = evaluations(folder)
    assert rows == evaluations(whole)
    assert [row["step"] for row in rows] == [0, 4, 8, 10]


@pytest.mark.slow
def test_checkpoints_that_resuming_will_delete_are_named_before_the_first_step(whole, go_on, tmp_path, capsys):
    """From the checkpoint of step 4 the run goes on differently from those of steps 8 and 10."""
    folder = shutil.copytree(whole, tmp_path / "out")
    assert go_on(folder / "checkpoint-4") == (0, 6)
    before = capsys.readouterr().err.partition("step  5/")[0]
    (told,) = [line for line in before.splitlines() if "deleted" in line]
    assert "checkpoint-8" in told and "checkpoint-10" in told
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-4"]


@pytest.mark.slow
def test_only_the_latest_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_being_deleted_no_longer_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # as if killed before the files are deleted
    checkpoint.delete(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)


# ---------------------------------------------------------------------------------------------------------------------
# Signals: a run ends after its step with a checkpoint, or at once at a second Ctrl-C


LONG = (*SMALL, "--mixed_precision=no", "--logging_steps=1", "--max_steps=40", "--save_steps=10", "--eval_steps=40")


@pytest.mark.parametrize("question", (3, 4, 7, 11))
def test_whenever_a_signal_comes_the_last_step_taken_is_saved(books, monkeypatch, tmp_path, question):
    """The signal comes right before the loop asks for the n-th time whether a signal has come."""
    asked = itertools.count(1)

    def wanted(stop):
        if next(asked) >= question:
            stop.agreed_signal = signal.SIGTERM
        return bool(stop.agreed_signal)

    monkeypatch.setattr(StopSignals, "should_stop", wanted)
    with pytest.raises(SystemExit, match="143"):
        main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path}", *LONG])
    last_step = log_rows(tmp_path)[-1]["step"]  # 0: of the figures before the first step
    saved = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert saved == ([f"checkpoint-{last_step}"] if last_step else [])


# In each of these runs step 2 is skipped.
SKIPPING = [*SMALL, "--mixed_precision=no", "--license=mit", "--max_steps=4", "--logging_steps=1", "--eval_steps=4"]


@pytest.fixture(scope="module")
def skipping(books, tmp_path_factory):
    """The folder of a run that skips step 2 and is never stopped, with checkpoints at steps 1, 3 and 4."""
    folder = tmp_path_factory.mktemp("skipping") / "out"
    with spoilt_step(2):
        run(books, folder, *SKIPPING, "--save_steps=1", "--save_total_limit=9")
    assert [path.name for path in checkpoint.checkpoints(folder)] == [f"checkpoint-{step}" for step in (1, 3, 4)]
    return folder


def test_a_run_stopped_after_a_skipped_step_goes_on_to_the_bytes_of_one_that_was_not_stopped(
    skipping, books, tmp_path
):
    """The signal comes in step 3, the second that is taken."""
    words = ["pretrain", "--corpus", books, "--output_dir", tmp_path, *SKIPPING, "--save_steps=4"]
    with spoilt_step(2), steps_counted(sigterm_at=2):
        assert command(*words) == 143
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-3"]
    assert command(*words, "--resume_from_checkpoint=latest") == 0
    for step in (3, 4):
        for name in ("model.safetensors", "optimizer.safetensors", "training_state.json"):
            place = f"checkpoint-{step}/{name}"
            assert (tmp_path / place).read_bytes() == (skipping / place).read_bytes(), place
    assert losses(tmp_path) == losses(skipping)
    assert read_json(tmp_path / "metrics.json")["train_skipped_steps"] == 1


def test_no_checkpoint_is_saved_by_a_signal_in_a_skipped_step(skipping, books, tmp_path, monkeypatch):
    """The run goes on from the checkpoint before, and skips the step again."""
    words = ["pretrain", "--corpus", books, "--output_dir", tmp_path, *SKIPPING, "--save_steps=1"]
    shutil.copytree(skipping / "checkpoint-1", tmp_path / "checkpoint-1")
    for name in ("run_config.json", "training_log.jsonl"):
        shutil.copy(skipping / name, tmp_path)
    add_step = RunLog.add_step

    def stop_after_it(log, *arguments):
        add_step(log, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, spoilt_step(2, taken=1):
        patch.setattr(RunLog, "add_step", stop_after_it)
        assert command(*words, "--resume_from_checkpoint=latest") == 143
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]


def test_signals_are_caught_until_the_last_checkpoint_is_saved_and_no_longer(books, tmp_path, monkeypatch):
    """Nor while the finished folder is written and while processes part."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def noting(name, function):
        def call(*arguments, **options):
            seen.append((name, signal.getsignal(signal.SIGTERM) != before))
            return function(*arguments, **options)

        return call

    for module, name in ((checkpoint, "write_checkpoint"), (run_folder, "finish_folder"), (processes, "shut_down")):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    run(books, tmp_path, *SMALL, "--max_steps=1", "--save_words=1")
    assert seen == [("write_checkpoint", True), ("finish_folder", False), ("shut_down", False)]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_the_step(books, tmp_path):
    """Each step takes ten seconds more; a Ctrl-C between two of them would end the run at once."""
    said = tmp_path / "said.txt"
    slow = {"PROMISES_STEP_SECONDS": "10"}
    words = ["pretrain", "--corpus", books, "--output_dir", tmp_path / "model", *LONG]
    (run,) = start(words, script="faulty.py", environment=slow, said=said)
    for words in ("step  1/40", "a second Ctrl-C"):
        wait_for(lambda words=words: words in said.read_text(), [run])
        time.sleep(1)  # until the run is within its second step
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
    # By `sys.exit`, or by the signal, which a shell also shows as 130.
    assert end([run], 4)[0] in (130, -signal.SIGINT)
    assert not list((tmp_path / "model").glob("*checkpoint*"))


# ---------------------------------------------------------------------------------------------------------------------
# `--save_words`: how words are counted, and which weights are saved


OPTIONS = ("--max_steps=12", "--save_steps=5", "--save_total_limit=1", "--mixed_precision=no")


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_numbers_of_words_are_read_and_named_as_babylm_names_them():
    numbers = [500, 10**4, 1_500_000, 2 * 10**6, 10**9]
    assert word_marks(["500", "10k", "1_500_000", "2m", "1000M"]) == numbers
    names = {500: "chck_500", 10**4: "chck_10k", 10**6: "chck_1M", 1_500_000: "chck_1500k", 10**9: "chck_1000M"}
    for words, name in names.items():
        assert folder_name(words) == name and word_marks([name.removeprefix("chck_")]) == [words]


def test_words_are_counted_by_each_documents_words_a_token(tmp_path):
    """Twenty texts of 160 words, of which each has words of another length, so that tokens a word differ."""
    (tmp_path / "text").mkdir()
    for number, letter in enumerate("abcdefghijklmnopqrst"):
        words = " ".join(letter * (1 + number) + " of the book." for _ in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    text = prepare(TextConfig(corpus=[str(tmp_path / "text")], vocab_size=60, preprocessing_num_workers=1))
    corpus = text.train
    pairs = EpochPairs(corpus, PretrainConfig(objective="nsp"), 32).window(0, 0)
    sizes = np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))
    words_of_tokens = np.repeat(160 / sizes, sizes)
    expected = 0
    for pair in pairs:
        for side in "ab":
            expected += words_of_tokens[pair[f"{side}_start"] : pair[f"{side}_end"]].sum()
    assert (np.diff(corpus.words_before) == 160).all()
    assert len(corpus.ids) > 1.1 * corpus.words_before[-1]
    assert words_in(corpus, pairs) == pytest.approx(expected, rel=1e-9) and expected > 500


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.slow
def test_the_weights_are_those_of_the_step_that_reached_the_words(books, tmp_path, capsys):
    """Of a run that saves after 600, 1,000 and 1,001 words; 99M are more than it sees. And of one that is stopped."""
    whole, again, stopped = (tmp_path / name for name in ("whole", "run", "stopped"))
    options = (*OPTIONS, "--save_words", "600", "1k", "1_001", "99M")
    run(books, whole, *options)
    step = json.loads((whole / "chck_600" / "words_seen.json").read_text())["step"]
    run(books, again, *OPTIONS, f"--save_steps={step}", "--save_total_limit=99")
    weights = (again / f"checkpoint-{step}" / "model.safetensors").read_bytes()
    assert (whole / "chck_600" / "model.safetensors").read_bytes() == weights
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert sorted(path.name for path in whole.glob("chck_*")) == ["chck_1001", "chck_1k", "chck_600"]
    assert not list(again.glob("chck_*"))
    with steps_counted(sigterm_at=step - 1):
        assert command("pretrain", "--corpus", books, "--output_dir", stopped, *SMALL, *options) == 143
    run(books, stopped, *OPTIONS, "--save_words", "9", *options[-4:], "--resume_from_checkpoint=latest")
    assert "chck_9, chck_99M not saved" in capsys.readouterr().err
    for seen in whole.glob("chck_*/words_seen.json"):
        assert (stopped / seen.relative_to(whole)).read_text() == seen.read_text()


def test_words_that_are_reached_in_a_skipped_step_save_the_weights_of_the_step_after_it(skipping, books, tmp_path):
    """The words of a skipped step count: the run has read them, and goes on behind them."""
    seen = {step: read_json(skipping / f"checkpoint-{step}" / checkpoint.STATE_FILE)["words_seen"] for step in (1, 3)}
    with spoilt_step(2):
        run(books, tmp_path, *SKIPPING, f"--save_words={int(seen[1]) + 1}")
    (saved,) = tmp_path.glob("chck_*")
    counts = {"words": int(seen[1]) + 1, "step": 3, "words_seen": seen[3]}
    assert read_json(saved / "words_seen.json") == counts
    weights = (skipping / "checkpoint-3" / "model.safetensors").read_bytes()
    assert (saved / "model.safetensors").read_bytes() == weights != weights_of(skipping)


def test_the_words_of_a_run_are_those_of_its_steps_also_of_a_skipped_one(skipping, books, tmp_path):
    run(books, tmp_path, *SKIPPING, "--save_steps=1", "--save_total_limit=9")
    for step in (1, 3, 4):
        of_runs = [read_json(folder / f"checkpoint-{step}" / checkpoint.STATE_FILE) for folder in (skipping, tmp_path)]
        assert of_runs[0]["words_seen"] == of_runs[1]["words_seen"] > 0
    assert read_json(skipping / "metrics.json")["train_words_seen"] == of_runs[0]["words_seen"]
