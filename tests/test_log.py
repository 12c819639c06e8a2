"""What a run measures and reports: arithmetic, speed, padding, memory; the log, also of a resumed run; trackers."""

import ctypes
import errno
import itertools
import math
import os
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import SIZES
from runs import forward_passes, log_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.records import read_record
from d2l_bert.training import log
from d2l_bert.training.checkpoint import Progress
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.devices import matmul_peak
from d2l_bert.training.learner import StepStats
from d2l_bert.training.log import RunLog, kind_of, training_arithmetic


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

    def started(folder=tmp_path, step=0, accelerator=None, rows=0):
        accelerator = accelerator or Accelerator(cpu=True)
        run = PretrainConfig(corpus=["a"], objective="nsp", max_steps=20)
        return RunLog(accelerator, folder, run, ARCHITECTURE, Progress(step=step), rows)

    return started


def take(run_log, stats):
    """A step with these figures, as the training loop counts and logs it."""
    run_log.progress.add((0, 0, 0), 0.0, bool(stats.skipped))
    run_log.add_step(stats, 0.1)


def row_of(run_log, *steps):
    """The row of some more steps."""
    for step in steps:
        take(run_log, step)
    run_log.write_row()
    assert log_rows(run_log.path.parent)[-1] == run_log.rows[-1]
    return run_log.rows[-1]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; returns a function that moves it on by some seconds."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return lambda seconds: setattr(now, "seconds", now.seconds + seconds)


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


def test_speed_is_arithmetic_and_tokens_divided_by_the_time_of_training_alone(start, clock):
    """Two steps of 60 tokens and 80 with padding take 4 s, of which 1 s is waiting; an evaluation takes 100 s."""
    run_log = start()
    with run_log.waiting():
        clock(1)
    with run_log.pausing():
        clock(100)
    clock(3)
    row = row_of(run_log, STEP, STEP)
    share = 2 * training_arithmetic(ARCHITECTURE, STEP, True) / (4 * 1e6)
    expected = {"seconds": 4, "tokens_per_second": 30, "padding_share": 0.25, "data_wait_share": 0.25, "mfu": share}
    assert row.items() >= {**expected, "seconds_left": 18 * 2, "pairs": 6, "loss": 5, "mlm_loss": 4}.items()
    clock(2)
    assert row_of(run_log, STEP)["data_wait_share"] == 0
    speed = run_log.speed()
    assert (speed["train_seconds"], speed["train_pairs_per_second"], speed["train_tokens_per_second"]) == (6, 1.5, 30)
    assert speed["train_padding_share"] == pytest.approx(0.25)
    assert speed["train_data_wait_share"] == 1 / 6
    assert speed["train_mfu"] == pytest.approx(share)


def test_evaluations_and_saves_are_no_training_time(trained, books, tmp_path, monkeypatch):
    """A clock on which a step takes a minute more than it does, and an evaluation and a flushed file an hour each."""
    late = SimpleNamespace(seconds=0)
    for clock in (time.monotonic, time.perf_counter):
        monkeypatch.setattr(time, clock.__name__, lambda clock=clock: clock() + late.seconds)

    def pass_slowly(model, outputs):
        late.seconds += 60 if model.training else 3600

    def flush_slowly(file, flush=os.fsync):
        late.seconds += 3600
        flush(file)

    monkeypatch.setattr(os, "fsync", flush_slowly)
    options = [f"--corpus={books}", f"--output_dir={tmp_path}", f"--init_from={trained}", "--license=mit"]
    options += ["--max_seq_length=48", "--global_batch_size=8", "--max_eval_pairs=8", "--max_steps=3"]
    options += ["--logging_steps=1", "--eval_steps=1", "--save_steps=2"]
    with forward_passes(pass_slowly):
        assert main(["pretrain", *options]) == 0
    assert late.seconds > 6 * 3600
    metrics = read_record(tmp_path / "metrics.json")
    rows = [row for row in log_rows(tmp_path) if "seconds" in row]
    assert [row["seconds"] // 60 for row in rows] == [1, 1, 1]
    assert 180 <= metrics["train_seconds"] < 240
    assert rows[0]["seconds_left"] == pytest.approx(120, abs=30)
    tokens = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
    assert metrics["train_tokens_per_second"] == pytest.approx(tokens / metrics["train_seconds"])


def test_a_row_leaves_steps_out_that_were_skipped_or_had_no_token_to_predict(start):
    run_log = start()
    row = row_of(run_log, STEP, LEFT_OUT, STEP._replace(mlm_loss=0.0, masked_tokens=0.0), STEP._replace(mlm_loss=6.0))
    assert (row["mlm_loss"], row["nsp_loss"], row["loss"], row["skipped_steps"]) == (5, 1, 6, 1)
    assert "loss" not in row_of(run_log, LEFT_OUT) and "skipped_steps" not in row_of(run_log, STEP)
    assert run_log.speed()["train_skipped_steps"] == 2


def test_a_resumed_run_adds_to_the_figures_of_the_run_before(start, clock):
    first = start()
    clock(1)
    row_of(first, STEP, STEP)
    clock(5)
    row_of(first, STEP)  # is lost, as the run goes on from step 2
    resumed = start(step=2)
    clock(3)
    row_of(resumed, STEP, STEP)
    speed = resumed.speed()
    assert (speed["train_seconds"], speed["train_pairs_per_second"], speed["train_tokens_per_second"]) == (4, 3, 60)


@pytest.mark.parametrize("damage", [b'{"step": 1, "los\n', b"[1, 2]\n", b'{"loss": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_log_is_refused_and_stays_as_it_is(start, tmp_path, damage):
    row_of(start(), STEP)
    path = tmp_path / "training_log.jsonl"
    content = damage + path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(UserError, match="training_log.jsonl: damaged"):
        start(step=1)
    assert path.read_bytes() == content


def test_rows_that_the_log_has_lost_are_said(start, caplog):
    first = start()
    row_of(first, STEP)
    row_of(first, STEP)
    assert len(start(step=2, rows=2).rows) == 2 and not caplog.records
    first.path.write_bytes(first.path.read_bytes().partition(b"\n")[2])
    assert len(start(step=2, rows=2).rows) == 1 and "training_log.jsonl" in caplog.text
    first.path.unlink()
    with pytest.raises(UserError, match="training_log.jsonl"):
        start(step=20).speed()


@pytest.mark.slow
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
    assert most > before + held.nbytes / 1e6 - 16
    del held
    row_of(run_log, STEP)
    assert run_log.speed()["train_memory_mb"] == most


# ---------------------------------------------------------------------------------------------------------------------
# The log


def made_again(run_log, first, last):
    """Write the rows of some steps: one per step, an evaluation every second step, an event in step 5."""
    for step in range(first, last + 1):
        take(run_log, LEFT_OUT if step == 5 else STEP._replace(mlm_loss=0.1 * step))
        run_log.write_row()
        if step % 2 == 0:
            run_log.record({"step": step, "eval_mlm_loss": 0.2 * step, "eval_mlm_accuracy": 0.5})


def test_resuming_a_log_cut_at_any_byte_has_each_row_once_and_in_order(start, monkeypatch):
    """The run is killed after the checkpoint of step 4; the log may end at every byte from there on."""
    # Each row is written a second after the one before, by a process of the same size.
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(log, "used_memory", lambda device: 1.0)
    run_log = start()
    made_again(run_log, 1, 4)
    kept = run_log.path.stat().st_size
    made_again(run_log, 5, 6)
    content = run_log.path.read_bytes()
    kinds = [(row["step"], kind_of(row)) for row in log_rows(run_log.path.parent)]
    assert len(set(kinds)) == len(kinds) == 6 + 3 + 1
    near_line_ends = [size for size in range(kept, len(content) + 1) if b"\n" in content[size - 2 : size + 2]]
    for size in [*near_line_ends, *range(kept, len(content), 37)]:
        run_log.path.write_bytes(content[:size])
        made_again(start(step=4), 5, 6)
        assert run_log.path.read_bytes() == content, size


def test_a_change_of_length_or_batch_is_an_event_before_the_first_step_of_its_stage():
    run = PretrainConfig(max_steps=100, max_seq_length=128, global_batch_size=32, objective="none")
    assert log.stage_changes(run) == {}
    run.length_schedule = ["48:0.4"]
    run.batch_size_schedule = ["8:0.1"]
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


def report_run(start, folder, first, last):
    """Report some steps to TensorBoard in a run that starts at `first`; returns the rows of its log."""
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=folder)
    log.start_trackers(accelerator, folder, RECORD, first - 1)
    (folder / f"from-{first}").mkdir()
    made_again(start(folder / f"from-{first}", first - 1, accelerator), first, last)
    accelerator.end_training()
    return log_rows(folder / f"from-{first}")


def test_tensorboard_holds_the_numbers_of_the_log_and_resumed_steps_only_once(start, tmp_path):
    rows = [row for row in report_run(start, tmp_path, 1, 6) if row["step"] <= 4]
    rows += report_run(start, tmp_path, 5, 8)  # resumed from the checkpoint of step 4
    shown = EventAccumulator(str(tmp_path / "d2l-bert"), size_guidance={"scalars": 0}).Reload()
    expected = {}
    groups = {"train": "train", "held_out": "eval"}
    for row in rows:
        for name in row.keys() - {"step"} if kind_of(row) in groups else ():
            points = expected.setdefault(f"{groups[kind_of(row)]}/{name.removeprefix('eval_')}", [])
            points.append((row["step"], pytest.approx(row[name], rel=1e-6)))
    found = {tag: [(at.step, at.value) for at in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}
    assert [step for step, _ in found["train/mlm_loss"]] == [1, 2, 3, 4, 6, 7, 8]  # step 5 is left out
    assert len(found["train/mfu"]) == 8 and len(found["eval/mlm_loss"]) == 4
    assert found == expected


def test_trackers_that_are_installed_are_taken():
    found = [log.check_trackers(given, ["tensorboard"]) for given in ([], ["none"], ["tensorboard"])]
    assert found == [None, None, ["tensorboard"]]


def test_a_failing_tracker_is_reported_and_all_others_continue(caplog):
    def fail(values, step):
        raise OSError(errno.EPIPE, "the line\nis down")

    taken = []
    broken = SimpleNamespace(name="broken", log=fail)
    whole = SimpleNamespace(name="whole", log=lambda values, step: taken.append((step, values)))
    log.send_to_trackers(SimpleNamespace(trackers=[broken, whole]), {"step": 3, "loss": 1.0})
    (line,) = caplog.messages
    assert "step 3: broken did not take the metrics (BrokenPipeError" in line and "\n" not in line
    assert taken == [(3, {"train/loss": 1.0})]


# ---------------------------------------------------------------------------------------------------------------------
# The operations of a training step, as PyTorch counts them, and the measured peak


ROWS = 5
LENGTH = 17
PREDICTED = 3
COUNTS = SimpleNamespace(
    tokens=ROWS * LENGTH, squared_lengths=ROWS * LENGTH**2, masked_tokens=ROWS * PREDICTED, examples=ROWS
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_pairs", [True, False])
def test_the_arithmetic_of_a_step_without_padding_is_what_pytorch_counts(with_pairs, tied):
    """With attention written out in matrix products: PyTorch's counter sees those, but not its attention kernel."""
    model_class = D2lBertForPreTraining if with_pairs else D2lBertForMaskedLM
    config = D2lBertConfig(**SIZES, tie_word_embeddings=tied)
    model = model_class._from_config(config, attn_implementation="eager")
    ids = torch.randint(1, config.vocab_size, (ROWS, LENGTH))
    batch = {"input_ids": ids, "masked_positions": torch.arange(PREDICTED).repeat(ROWS, 1)}
    batch["labels"] = ids[:, :PREDICTED]
    if with_pairs:
        batch["next_sentence_label"] = torch.zeros(ROWS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(**batch, skip_logits=False).loss.backward()
    assert training_arithmetic(config, COUNTS, pair_task=with_pairs) == counter.get_total_flops()


def test_the_measured_peak_is_plausible_and_leaves_the_random_number_generators_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    state = np.random.get_state()[1].copy()
    peak = matmul_peak(torch.device("cpu"), torch.float32, seconds=0.03)
    assert torch.equal(torch.rand(4), expected)
    assert (np.random.get_state()[1] == state).all()
    assert 1e8 < peak < 1e15  # any CPU reaches ten times the lower limit, and no CPU the upper
