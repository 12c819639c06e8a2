"""What is seen of a run: its figures, its log that only grows, its warnings, and its trackers."""

import ctypes
import errno
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training import evaluate, tracking
from d2l_bert.training.curves import plot_curves
from d2l_bert.training.meter import Meter, SpikeWatch, StepFigures, used_memory
from d2l_bert.training.tracking import Progress, TrainingLog


NSP, CPU = PAIR_TASKS["nsp"], torch.device("cpu")
STEP = StepFigures(
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
SKIPPED = STEP._replace(mlm_loss=math.nan, pair_loss=math.inf, grad_norm=math.nan, skipped=1.0)


def operations(step):
    """An arithmetic of the tests' own."""
    return 7 * step.tokens + step.squared_lengths


def meter_of(*steps, state=None, task=NSP, peak=1e6):
    """A meter that has taken in some steps."""
    meter = Meter(state or {}, task, operations, peak, CPU)
    for step in steps:
        meter.add(step)
    return meter


def strictly(content):
    """Through JSON and back, as a strict reader takes it: no NaN and no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(json.dumps(content), parse_constant=refuse)


# ---------------------------------------------------------------------------------------------------------------------
# The meter


def test_the_meter_knows_what_was_padding_and_how_long_it_waited():
    def slow():
        for _ in range(2):
            time.sleep(0.05)
            yield STEP

    meter = meter_of()
    for step in meter.waiting(slow()):
        time.sleep(0.05)
        meter.add(step)
    row = meter.row(0.1, 0)
    assert row["padding_share"] == 0.25 and row["loss"] == 5 and row["data_wait_share"] == pytest.approx(0.5, abs=0.2)
    assert meter.waited == 0
    assert meter.totals["train_pairs"] == 6 and meter.speed()["train_padding_share"] == 0.25


def test_the_fields_of_a_row_keep_their_order():
    names = (
        "loss mlm_loss nsp_loss grad_norm learning_rate tokens_per_second padding_share data_wait_share seconds_left"
    )
    assert list(meter_of(STEP).row(0.1, 0)) == [*names.split(), "mfu", "memory_mb"]
    assert "nsp_loss" not in meter_of(STEP, task=None).row(0.1, 0)


def test_the_share_of_the_peak_is_arithmetic_by_time_and_peak():
    meter = meter_of(STEP, STEP, peak=1e5)
    time.sleep(0.02)
    row = meter.row(0.1, 10)
    seconds = 2 * 60 / row["tokens_per_second"]
    assert seconds >= 0.02 and row["seconds_left"] == pytest.approx(10 * seconds / 2)
    assert row["mfu"] == pytest.approx(2 * (7 * 60 + 1200) / (seconds * 1e5))
    assert meter.speed()["train_mfu"] == pytest.approx(row["mfu"])


def test_losses_are_means_over_the_steps_that_were_not_skipped_and_time_is_that_of_all():
    meter = meter_of(STEP, SKIPPED, STEP._replace(mlm_loss=2.0, grad_norm=1.5), SKIPPED)
    time.sleep(0.02)
    row = strictly(meter.row(0.1, 0))
    assert (row["mlm_loss"], row["nsp_loss"], row["loss"], row["grad_norm"]) == (3, 1, 4, 1)
    assert row["skipped_steps"] == 2
    assert row["tokens_per_second"] == pytest.approx(4 * 60 / meter.totals["train_seconds"])
    assert "skipped_steps" not in meter_of(STEP).row(0.1, 0)


def test_a_row_of_skipped_steps_only_has_no_losses_and_is_json():
    row = strictly(meter_of(SKIPPED, SKIPPED).row(0.1, 0))
    assert row["skipped_steps"] == 2
    assert not {"loss", "mlm_loss", "nsp_loss", "grad_norm"} & set(row) and row["tokens_per_second"] > 0


def test_totals_go_on_from_a_checkpoint_on_a_machine_with_another_peak():
    first = meter_of(STEP, SKIPPED, peak=1e5)
    time.sleep(0.01)
    first.row(0.1, 0)
    second = meter_of(STEP, state=strictly(first.totals), peak=3e5)
    time.sleep(0.01)
    second.row(0.1, 0)
    parts = [first.totals["train_seconds"], second.totals["train_seconds"] - first.totals["train_seconds"]]
    speed = strictly(second.speed())
    assert speed["train_seconds"] == sum(parts) and speed["train_skipped_steps"] == 1
    assert second.totals["train_arithmetic"] == 3 * operations(STEP)
    assert speed["train_mfu"] == pytest.approx(3 * operations(STEP) / (parts[0] * 1e5 + parts[1] * 3e5))


@pytest.mark.skipif(
    not hasattr(psutil.Process().memory_info(), "shared"), reason="the system does not tell them apart"
)
def test_memory_is_what_the_process_holds_without_the_files_it_maps(tmp_path):
    (tmp_path / "file").write_bytes(bytes(64_000_000))
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what runs before in this process have kept would be taken for `held`
    meter = meter_of(STEP)
    before = meter.row(0.1, 0)["memory_mb"]
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0
    meter.add(STEP)
    assert meter.row(0.1, 0)["memory_mb"] < before + 16
    held = np.ones(64_000_000, np.uint8)
    meter.add(STEP)
    most = meter.row(0.1, 0)["memory_mb"]
    assert most > before + 48
    del held
    meter.add(STEP)
    meter.row(0.1, 0)
    assert meter.speed()["train_memory_mb"] == most


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_of_a_gpu_is_the_most_since_the_last_row():
    device = torch.device("cuda")
    used_memory(device)
    before = used_memory(device)
    torch.empty(64_000_000, dtype=torch.uint8, device=device)  # let go of at once
    assert used_memory(device) == pytest.approx(before + 64, abs=1)
    assert used_memory(device) == pytest.approx(before, abs=1)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def test_lines_show_the_share_of_the_peak_and_cope_with_rows_without_a_loss(capsys, shown):
    progress = Progress(0, 100, visible=True)
    progress.show({"step": 5, **meter_of(STEP).row(0.1, 0), "mfu": 0.4567})
    progress.show({"step": 10, **meter_of(SKIPPED, SKIPPED).row(0.1, 0)})
    first, second = capsys.readouterr().err.splitlines()
    assert "loss 5.000 (MLM 4.000, NSP 1.000)" in first and "tokens/s, MFU 45.7%" in first and "skipped" not in first
    assert "no loss  skipped 2" in second and "rate 1.00e-01" in second


def test_the_bar_shows_the_share_of_the_peak_and_copes_with_rows_without_a_loss(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress, shown = Progress(0, 100, visible=True), []
    monkeypatch.setattr(progress.bar, "set_postfix_str", shown.append)
    progress.show({"step": 5, **meter_of(STEP).row(0.1, 0), "mfu": 0.4567})
    progress.show({"step": 10, **meter_of(SKIPPED).row(0.1, 0)})
    progress.close()
    assert shown[0].startswith("loss 5.000, ") and shown[0].endswith("tokens/s, MFU 45.7%")
    assert shown[1].startswith("no loss, skipped 1, ")


def test_curves_mark_the_steps_left_out_and_take_rows_in_any_order(tmp_path):
    def drawn(rows):
        plot_curves(rows, tmp_path / "curves.png")
        return (tmp_path / "curves.png").read_bytes()

    rows = [{"step": step, **meter_of(STEP._replace(mlm_loss=9.0 - step)).row(0.1, 0)} for step in range(1, 6)]
    whole = drawn(rows)
    assert drawn([rows[step] for step in (0, 3, 1, 4, 2)]) == whole
    rows[2] = {"step": 3, **meter_of(SKIPPED).row(0.1, 0)}
    assert drawn(rows) != whole


STAGES = [
    (101, (16, 32), (32, 32), "16 → 32 tokens"),  # before the first evaluation
    (1201, (32, 128), (32, 32), "32 → 128 tokens"),
    (1501, (128, 128), (32, 64), "batch 32 → 64"),
    (1701, (128, 512), (64, 1024), "128 → 512 tokens, batch 64 → 1024"),
    (2901, (512, 512), (1024, 2048), "batch 1024 → 2048"),
]


@pytest.mark.parametrize("count", range(len(STAGES) + 1))
@pytest.mark.parametrize("task", [NSP, None])
def test_curves_mark_each_stage_with_a_line_and_a_label_that_nothing_overlaps(task, count, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **how: drawn.append(figure))
    rows = [{"step": 30 * n, **meter_of(STEP, task=task).row(0.1, 0), "mlm_loss": 9 - n / 20} for n in range(100)]
    rows += [{"step": 300 * n, "eval_mlm_loss": 6.0, "eval_mlm_accuracy": 0.2} for n in range(1, 10)]
    for row in rows[100:] if task else ():
        row |= {"eval_nsp_loss": 0.6, "eval_nsp_accuracy": 0.7}
    for step, (length_before, length), (batch_before, batch), _ in STAGES[:count]:
        stage = {"length_before": length_before, "length": length, "batch_before": batch_before, "batch": batch}
        rows.append({"step": step, "event": "stage", "reason": "", **stage})
    plot_curves(rows, tmp_path / "curves.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    assert len(figure.axes) == (3 if task else 2)
    taken = []
    for panel in figure.axes:
        assert [text.get_text() for text in panel.texts] == [label for *_, label in STAGES[:count]]
        vertical = [line.get_xdata()[0] for line in panel.lines if line.get_xdata()[0] == line.get_xdata()[-1]]
        assert vertical == [step - 1 for step, *_ in STAGES[:count]]
        taken += [text.get_window_extent() for text in (*panel.texts, panel.title)]
        taken.append(panel.get_legend().get_window_extent())
        assert all(text.get_window_extent().y0 >= panel.bbox.y1 for text in panel.texts), "above the curves"
    for one, other in itertools.combinations(taken, 2):
        assert not one.overlaps(other)
    assert all(figure.bbox.containsx(x) for box in taken for x in (box.x0, box.x1))
    assert all(figure.bbox.containsy(y) for box in taken for y in (box.y0, box.y1))


def test_the_report_at_the_end_says_them_too(trained, monkeypatch):
    monkeypatch.setattr(evaluate, "showcase", lambda *arguments: "")
    metrics = json.loads((trained / "metrics.json").read_text()) | {"train_mfu": 0.4567}
    said = evaluate.report(trained, None, None, metrics, {}, [])
    assert "45.7% of the peak (MFU)" in said and "left out" not in said
    said = evaluate.report(trained, None, None, metrics | {"train_skipped_steps": 1234}, {}, [])
    assert "steps left out, their loss or gradient not being finite: 1,234\n" in said


# ---------------------------------------------------------------------------------------------------------------------
# The log


def made_again(log, first, last):
    """Write what steps leave in the log: a row each, an evaluation every second one, an event in the fifth."""
    for step in range(first, last + 1):
        log.write({"step": step, "loss": 0.1 * step, "learning_rate": 0.1})
        if step == 5:
            log.write({"step": step, "event": "loss_spike"})
        if step % 2 == 0:
            log.write({"step": step, "eval_mlm_loss": 0.2 * step})


def test_a_log_cut_anywhere_is_gone_on_with_and_nothing_is_in_it_twice_or_lost(tmp_path):
    """Killed after the checkpoint of step 4, at every byte that the log has from there on."""
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(0)
    made_again(log, 1, 4)
    kept = log.path.stat().st_size
    made_again(log, 5, 8)
    content = log.path.read_bytes()
    assert content.count(b"\n") == 8 + 4 + 1
    for size in range(kept, len(content) + 1):
        log.path.write_bytes(content[:size])
        resumed = TrainingLog(log.path)
        resumed.start_at(4)
        made_again(resumed, 5, 8)
        now = log.path.read_bytes()
        whole = content[: content[:size].rfind(b"\n") + 1]
        assert now.startswith(whole) and now == content, size
        rows = [json.loads(line) for line in now.decode().splitlines()]
        kinds = [(row["step"], tracking.kind_of(row)) for row in rows]
        assert len(set(kinds)) == len(kinds) == 13, size


def test_what_is_written_is_never_removed_by_going_back(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(0)
    made_again(log, 1, 8)
    before = log.path.read_bytes()
    again = TrainingLog(log.path)
    again.start_at(2)
    assert log.path.read_bytes() == before
    assert not again.write({"step": 3, "loss": 9.0}) and again.write({"step": 3, "eval_mlm_loss": 9.0})
    assert not again.write({"step": 5, "event": "loss_spike"}) and again.write({"step": 5, "event": "other"})
    assert again.write({"step": 9, "skipped_steps": 4}) and not again.write({"step": 9, "loss": 1.0})
    assert log.path.read_bytes().startswith(before) and len(again.rows()) == 13 + 3


def test_a_new_run_begins_a_new_log(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.path.write_text('{"step": 1, "loss": 3.0}\n')
    log.start_at(0)
    assert log.path.read_bytes() == b"" and log.write({"step": 1, "loss": 4.0})
    assert log.rows() == [{"step": 1, "loss": 4.0}] and [path.name for path in tmp_path.iterdir()] == [log.path.name]


def test_going_on_without_a_log_starts_one(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(7)
    assert log.rows() == [] and log.write({"step": 8, "loss": 4.0}) and len(log.rows()) == 1


def test_what_json_cannot_hold_is_not_written(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(0)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"eval_perplexity is {value} at step 1: training has diverged; lower"):
            log.write({"step": 1, "eval_perplexity": value})
    assert log.path.read_bytes() == b"" and log.write({"step": 1, "loss": 1.0})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_names_the_log_and_the_mend(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(0)
    log.path.unlink()
    log.path.symlink_to("/dev/full")
    with pytest.raises(ValueError) as caught:
        log.write({"step": 1, "loss": 1.0})
    line = str(caught.value)
    assert line.startswith(f"{log.path}: cannot be written (") and "\n" not in line
    assert line.endswith("free some space, and go on with --resume_from_checkpoint latest")
    log.path.unlink()
    assert log.write({"step": 1, "loss": 1.0})  # it was not taken for written


def test_a_log_that_cannot_be_written_names_itself(tmp_path):
    (tmp_path / "training_log.jsonl").mkdir()
    for use in (lambda log: log.start_at(0), lambda log: log.write({"step": 1})):
        with pytest.raises(ValueError, match="training_log.jsonl: cannot be written .*make it writable"):
            use(TrainingLog(tmp_path / "training_log.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# The watch for spikes


def warnings_of(losses, watch=None):
    """The steps, counted from 1, that are warned of."""
    watch = watch or SpikeWatch()
    return [step for step, loss in enumerate(losses, 1) if watch.see(step, loss)]


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.005, 0.05, 0.2]))
def test_noise_around_a_falling_loss_is_silent_over_20000_steps(seed, size):
    steps = np.arange(20_000)
    falling = 3 + 7 * np.exp(-steps / 300) + np.exp(-steps / 5000)
    assert not warnings_of(falling + np.random.default_rng(seed).normal(0, size, len(steps)))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(60, 900), st.sampled_from([1, 5, 1000]))
def test_a_jump_is_reported_once_whether_it_comes_back_or_stays(seed, place, lasting):
    losses = 4 + np.random.default_rng(seed).normal(0, 0.05, 1000)
    losses[place : place + lasting] += 2
    assert warnings_of(losses) == [place + 1]


def test_two_jumps_far_apart_are_reported_each_and_a_jump_down_is_not():
    losses = 4 + np.random.default_rng(0).normal(0, 0.05, 2000)
    losses[[500, 1500]] += 2
    losses[1000] -= 2
    assert warnings_of(losses) == [501, 1501]


def test_the_first_steps_are_not_judged():
    losses = np.r_[np.full(20, 4.0), 30.0, np.full(40, 4.0)] + np.random.default_rng(0).normal(0, 0.05, 61)
    assert not warnings_of(losses)


def test_a_jump_is_told_with_the_losses_before_it():
    watch = SpikeWatch()
    for step, loss in enumerate(4 + np.random.default_rng(0).normal(0, 0.05, 300), 1):
        watch.see(step, loss)
    line = watch.see(301, 9.5)
    jump, before, usual = map(float, re.findall(r"\d\.\d{3}", line))
    assert line.startswith("step 301: ") and "\n" not in line
    assert jump == 9.5 and before == pytest.approx(4, abs=0.03) and usual == pytest.approx(0.04, abs=0.015)


def test_a_loss_that_is_not_finite_leaves_the_watch_as_it_was():
    watch = SpikeWatch()
    warnings_of([4.0, 4.1, 3.9], watch)
    before = watch.state()
    assert watch.see(4, math.nan) is None and watch.see(5, math.inf) is None and watch.state() == before


def test_a_resumed_watch_warns_as_one_that_was_never_stopped():
    losses = 4 + np.random.default_rng(0).normal(0, 0.05, 400)
    losses[[100, 130, 200]] += 2  # the second in the silence after the first
    whole = SpikeWatch()
    expected = warnings_of(losses, whole)
    assert expected == [101, 201]
    for stop in (0, 10, 99, 100, 101, 125, 180, 300):
        first = SpikeWatch()
        found = warnings_of(losses[:stop], first)
        resumed = SpikeWatch(strictly(first.state()))
        found += [stop + step for step in warnings_of(losses[stop:], resumed)]
        assert found == expected and resumed.state() == whole.state(), stop


# ---------------------------------------------------------------------------------------------------------------------
# Trackers


RECORD = {"run": {"learning_rate": 1e-3, "corpus": ["a", "b"], "init_from": None}, "machine": {"device": "cpu"}}


def events(folder):
    """(step, value) of every scalar, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def report_run(folder, first, last):
    """Report steps of a run of its own, from a log."""
    accelerator = Accelerator(cpu=True, log_with=tracking.check_trackers(["tensorboard"]), project_dir=folder)
    tracking.start_trackers(accelerator, folder, RECORD, first - 1)
    rows = []
    for step in range(first, last + 1):
        rows.append({"step": step, **meter_of(STEP._replace(mlm_loss=float(step))).row(0.1, 0)})
        rows.append({"step": step, "event": "loss_spike", "loss": 99.0})
        rows.append({"step": step, "eval_mlm_loss": 0.5 * step, "eval_pairs": 7})
        for row in rows[-3:]:
            tracking.send_to_trackers(accelerator, row)
    accelerator.end_training()
    return rows


def test_tensorboard_holds_the_numbers_of_the_log_and_resumed_steps_once(tmp_path):
    rows = [row for row in report_run(tmp_path, 1, 6) if row["step"] <= 4]
    rows += report_run(tmp_path, 5, 8)  # on from the checkpoint of step 4
    found = events(tmp_path / "d2l-bert")
    expected = {}
    for row in rows:
        group = None if "event" in row else "eval" if "eval_mlm_loss" in row else "train"
        for name, value in row.items():
            if group and name != "step":
                tag = f"{group}/{name.removeprefix('eval_')}"
                expected.setdefault(tag, []).append((row["step"], pytest.approx(value, rel=1e-6)))
    assert [step for step, _ in found["train/mlm_loss"]] == list(range(1, 9))
    assert "train/mfu" in found and "eval/mlm_loss" in found
    assert found == expected


def test_a_runs_options_become_a_flat_table():
    assert tracking.flat(RECORD) == {"run/learning_rate": 1e-3, "run/corpus": "a b", "machine/device": "cpu"}


def test_trackers_that_are_not_there_are_refused_in_one_line():
    assert tracking.check_trackers([]) is None and tracking.check_trackers(["none"]) is None
    assert tracking.check_trackers(["tensorboard"]) == ["tensorboard"]
    for names, words in (
        (["tensorbord"], "report_to takes aim, .*tensorboard.* or none, got 'tensorbord'"),
        (["all"], "report_to takes"),
        (["tensorboard", "none"], "none stands alone"),
    ):
        with pytest.raises(ValueError, match=words):
            tracking.check_trackers(names)


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    """Accelerate alone would drop it and say nothing."""
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet_ml", "comet-ml")):
        with pytest.raises(ValueError, match=f"report_to {name}: it is not installed; pip install {package}"):
            tracking.check_trackers([name])


def test_a_tracker_that_does_not_start_is_refused_in_one_line(tmp_path):
    (tmp_path / "d2l-bert").write_text("where TensorBoard's folder should be")
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    with pytest.raises(ValueError, match="report_to tensorboard: does not start .*mend that") as caught:
        tracking.start_trackers(accelerator, tmp_path, RECORD, 0)
    assert "\n" not in str(caught.value)


def test_a_tracker_that_fails_is_said_and_the_others_go_on(capsys, shown):
    def fail(values, step):
        raise OSError(errno.EPIPE, "the line\nis down")

    taken = []
    broken = SimpleNamespace(name="broken", log=fail)
    whole = SimpleNamespace(name="whole", log=lambda values, step: taken.append((step, values)))
    tracking.send_to_trackers(SimpleNamespace(trackers=[broken, whole]), {"step": 3, "loss": 1.0})
    said = capsys.readouterr().err
    assert "step 3: broken did not take the figures (BrokenPipeError" in said and said.count("\n") == 1
    assert taken == [(3, {"train/loss": 1.0})]
