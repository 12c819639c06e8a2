"""What a run measures and reports: speed, padding, waiting, memory; the log, also of a resumed run; trackers."""

import ctypes
import errno
import functools
import itertools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from accelerate import Accelerator
from conftest import SIZES

from d2l_bert import D2lBertConfig
from d2l_bert.messages import UserError
from d2l_bert.modeling.arithmetic import training_arithmetic
from d2l_bert.training import log
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.log import RunLog, kind_of
from d2l_bert.training.optimizer import StepStats


STEP = StepStats(
    mlm_loss=4.0,
    pair_loss=1.0,
    grad_norm=0.5,
    masked_tokens=9.0,
    examples=3.0,
    tokens=60.0,
    padded_tokens=80.0,
    squared_lengths=1200.0,
    skipped=0.0,
)
LEFT_OUT = STEP._replace(mlm_loss=math.nan, skipped=1.0)
ARCHITECTURE = D2lBertConfig(**SIZES)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the log of a run of 20 steps, on a device with a peak of 1e6 operations a second."""
    monkeypatch.setattr(log, "matmul_peak", lambda *_: 1e6)

    def started(folder=tmp_path, step=0, accelerator=None, **state):
        accelerator = accelerator or Accelerator(cpu=True)
        run = PretrainConfig(corpus=["a"], objective="nsp", max_steps=20)
        return RunLog(accelerator, folder, run, ARCHITECTURE, {"step": step, **state})

    return started


def rows_of(run_log):
    return [json.loads(line) for line in run_log.path.read_text().splitlines()]


def row_of(run_log, *steps):
    """The row of some more steps."""
    for step in steps:
        run_log.add_step(run_log.step + 1, step, 0.1)
    run_log.write_row()
    assert rows_of(run_log)[-1] == run_log.rows[-1]
    return run_log.rows[-1]


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def test_padding_and_waiting_time_are_measured(start):
    run_log = start()
    for step in (1, 2):
        with run_log.time_added_to("waited"):
            time.sleep(0.05)
        time.sleep(0.05)
        run_log.add_step(step, STEP, 0.1)
    row = row_of(run_log)
    assert row["padding_share"] == 0.25 and row["loss"] == 5 and row["data_wait_share"] == pytest.approx(0.5, abs=0.2)
    time.sleep(0.02)
    assert row_of(run_log, STEP)["data_wait_share"] == 0
    assert sum(row["pairs"] for row in run_log.rows) == 9 and run_log.speed()["train_padding_share"] == pytest.approx(
        0.25
    )
    assert 0 < run_log.speed()["train_data_wait_share"] < row["data_wait_share"]


def test_mfu_is_arithmetic_divided_by_time_and_peak(start):
    run_log = start()
    time.sleep(0.02)
    row = row_of(run_log, STEP, STEP)
    seconds = 2 * 60 / row["tokens_per_second"]
    assert seconds >= 0.02 and row["seconds_left"] == pytest.approx(18 * seconds / 2)
    assert row["mfu"] == pytest.approx(2 * training_arithmetic(ARCHITECTURE, STEP, True) / (seconds * 1e6))
    assert run_log.speed()["train_mfu"] == pytest.approx(row["mfu"])


def test_an_evaluation_takes_no_time_from_the_speed(start):
    run_log = start()
    with run_log.time_added_to("clock_start"):
        time.sleep(0.3)
    row_of(run_log, STEP)
    assert run_log.speed()["train_seconds"] < 0.2


def test_a_row_leaves_steps_out_that_were_skipped_or_had_no_token_to_predict(start):
    run_log = start()
    row = row_of(run_log, STEP, LEFT_OUT, STEP._replace(mlm_loss=0.0, masked_tokens=0.0), STEP._replace(mlm_loss=6.0))
    assert (row["mlm_loss"], row["nsp_loss"], row["loss"], row["skipped_steps"]) == (5, 1, 6, 1)
    assert "loss" not in row_of(run_log, LEFT_OUT) and "skipped_steps" not in row_of(run_log, STEP)
    assert run_log.speed()["train_skipped_steps"] == 2


def test_a_resumed_run_adds_to_the_figures_of_the_run_before(start, tmp_path):
    first = start()
    row_of(first, STEP, STEP)
    before = first.speed()
    row_of(first, STEP)  # is lost, as the run goes on from step 2
    resumed = start(step=2)
    row_of(resumed, STEP, STEP)
    after = resumed.speed()
    assert before["train_pairs_per_second"] * before["train_seconds"] == pytest.approx(6)
    assert after["train_pairs_per_second"] * after["train_seconds"] == pytest.approx(12)
    assert after["train_tokens_per_second"] * after["train_seconds"] == pytest.approx(240)
    assert after["train_seconds"] > before["train_seconds"]


@pytest.mark.parametrize("damage", [b'{"step": 1, "los\n', b"[1, 2]\n", b'{"loss": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_log_is_refused_and_stays_as_it_is(start, tmp_path, damage):
    row_of(start(), STEP)
    path = tmp_path / "training_log.jsonl"
    content = damage + path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(UserError, match="training_log.jsonl: damaged"):
        start(step=1)
    assert path.read_bytes() == content


def test_rows_that_the_log_has_lost_are_said(start, tmp_path, caplog):
    first = start()
    row_of(first, STEP)
    row_of(first, STEP)
    start(step=2, rows=2)
    assert not caplog.records
    first.path.write_bytes(first.path.read_bytes().partition(b"\n")[2])
    with caplog.at_level("WARNING", "d2l_bert"):
        resumed = start(step=2, rows=2)
    assert "training_log.jsonl" in caplog.text and len(resumed.rows) == 1


def test_a_run_that_goes_on_from_its_last_step_without_its_log_says_so(start):
    with pytest.raises(UserError, match="training_log.jsonl"):
        start(step=20).speed()


@pytest.mark.skipif(
    not hasattr(psutil.Process().memory_info(), "shared"), reason="the system does not tell them apart"
)
def test_memory_is_the_memory_of_the_process_without_the_files_it_maps(start, tmp_path):
    (tmp_path / "file").write_bytes(bytes(64_000_000))
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # returns memory that earlier tests have freed; else it would count as `held`
    run_log = start()
    before = row_of(run_log, STEP)["memory_mb"]
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0
    assert row_of(run_log, STEP)["memory_mb"] < before + 16
    held = np.ones(64_000_000, np.uint8)
    most = row_of(run_log, STEP)["memory_mb"]
    assert most > before + 48
    del held
    row_of(run_log, STEP)
    assert run_log.speed()["train_memory_mb"] == most


# ---------------------------------------------------------------------------------------------------------------------
# The log


def made_again(run_log, first, last):
    """Write the rows of some steps: one per step, an evaluation every second step, an event in step 5."""
    for step in range(first, last + 1):
        run_log.add_step(step, LEFT_OUT if step == 5 else STEP._replace(mlm_loss=0.1 * step), 0.1)
        run_log.write_row()
        if step % 2 == 0:
            run_log.record({"step": step, "eval_mlm_loss": 0.2 * step, "eval_mlm_accuracy": 0.5})


def test_resuming_a_log_cut_at_any_byte_has_each_row_once_and_in_order(start, tmp_path, monkeypatch):
    """The run is killed after the checkpoint of step 4; the log may end at every byte from there on."""
    # Each row is written a second after the one before, by a process of the same size.
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=functools.partial(next, itertools.count())))
    monkeypatch.setattr(log, "used_memory", lambda device: 1.0)
    run_log = start()
    made_again(run_log, 1, 4)
    kept = run_log.path.stat().st_size
    made_again(run_log, 5, 6)
    content = run_log.path.read_bytes()
    assert content.count(b"\n") == 6 + 3 + 1
    for size in range(kept, len(content) + 1):
        run_log.path.write_bytes(content[:size])
        made_again(start(step=4), 5, 6)
        now = run_log.path.read_bytes()
        assert now == content, size
        rows = [json.loads(line) for line in now.decode().splitlines()]
        kinds = [(row["step"], kind_of(row)) for row in rows]
        assert len(set(kinds)) == len(kinds) == 10, size


def test_a_change_of_length_or_batch_is_an_event_before_the_first_step_of_its_stage():
    run = PretrainConfig(max_steps=100, max_seq_length=128, global_batch_size=32, objective="none")
    assert log.stage_changes(run) == {}
    run.length_schedule, run.batch_size_schedule = ["48:0.4"], ["8:0.1"]
    changes = log.stage_changes(run)
    assert {step: change["label"] for step, change in changes.items()} == {
        11: "batch 8 → 32",
        41: "48 → 128 tokens",
    }
    assert "step 11: from here on, a step has 85 sequences of 48 tokens" in changes[11]["reason"]
    assert "step 41: from here on, a step has 32 sequences of 128 tokens" in changes[41]["reason"]


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

RECORD = {"run": {"learning_rate": 1e-3, "corpus": ["a", "b"], "init_from": None}, "machine": {"device": "cpu"}}


def events(folder):
    """(step, value) of every scalar that TensorBoard shows, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def report_run(start, folder, first, last):
    """Report some steps to TensorBoard in a run that starts at `first`; returns the rows of its log."""
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=folder)
    log.start_trackers(accelerator, folder, RECORD, first - 1)
    (folder / f"from-{first}").mkdir()
    run_log = start(folder / f"from-{first}", first - 1, accelerator)
    made_again(run_log, first, last)
    accelerator.end_training()
    return rows_of(run_log)


def test_tensorboard_holds_the_numbers_of_the_log_and_resumed_steps_only_once(start, tmp_path):
    rows = [row for row in report_run(start, tmp_path, 1, 6) if row["step"] <= 4]
    rows += report_run(start, tmp_path, 5, 8)  # resumed from the checkpoint of step 4
    found = events(tmp_path / "d2l-bert")
    expected = {}
    for row in rows:
        group = None if "event" in row else "eval" if "eval_mlm_loss" in row else "train"
        for name, value in row.items():
            if group and name != "step":
                tag = f"{group}/{name.removeprefix('eval_')}"
                expected.setdefault(tag, []).append((row["step"], pytest.approx(value, rel=1e-6)))
    assert any("event" in row for row in rows)
    assert [step for step, _ in found["train/mlm_loss"]] == [1, 2, 3, 4, 6, 7, 8]  # step 5 is left out
    assert [step for step, _ in found["train/mfu"]] == list(range(1, 9)) and "eval/mlm_loss" in found
    assert found == expected


def test_trackers_that_are_unknown_or_not_installed_are_refused():
    """Accelerate alone would leave them out without a message."""
    known = ["tensorboard"]
    assert log.check_trackers([], known) is None and log.check_trackers(["none"], known) is None
    assert log.check_trackers(["tensorboard"], known) == ["tensorboard"]
    for names in (["tensorbord"], ["wandb"], ["tensorboard", "none"]):
        with pytest.raises(ValueError, match=f"report_to takes none, or .*tensorboard.*, got '{names[-1]}'"):
            log.check_trackers(names, known)


def test_a_failing_tracker_is_reported_and_all_others_continue(capsys, shown):
    def fail(values, step):
        raise OSError(errno.EPIPE, "the line\nis down")

    taken = []
    broken = SimpleNamespace(name="broken", log=fail)
    whole = SimpleNamespace(name="whole", log=lambda values, step: taken.append((step, values)))
    log.send_to_trackers(SimpleNamespace(trackers=[broken, whole]), {"step": 3, "loss": 1.0})
    said = capsys.readouterr().err
    assert "step 3: broken did not take the metrics (BrokenPipeError" in said and said.count("\n") == 1
    assert taken == [(3, {"train/loss": 1.0})]
