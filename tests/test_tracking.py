"""What a run reports: lines and bar on the terminal, curves, the log that only grows, trackers."""

import errno
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from measured_steps import NSP, SKIPPED, STEP, meter_of

from d2l_bert.training import run_report, tracking
from d2l_bert.training.pictures import plot_curves
from d2l_bert.training.tracking import TrainingLog, line_of


# ---------------------------------------------------------------------------------------------------------------------
# Terminal and curves


def test_lines_show_mfu_and_allow_rows_without_a_loss():
    first = line_of({"step": 5, **meter_of(STEP).row(0.1, 0), "mfu": 0.4567}, 100)
    second = line_of({"step": 10, **meter_of(SKIPPED, SKIPPED).row(0.1, 0)}, 100)
    assert "loss 5.000 (MLM 4.000, NSP 1.000)" in first and "tokens/s, MFU 45.7%" in first and "skipped" not in first
    assert "no loss  skipped 2" in second and "rate 1.00e-01" in second


def test_curves_mark_skipped_steps_and_take_rows_in_any_order(tmp_path):
    def drawn(rows):
        plot_curves(rows, tmp_path / "curves.png")
        return (tmp_path / "curves.png").read_bytes()

    rows = [{"step": step, **meter_of(STEP._replace(mlm_loss=9.0 - step)).row(0.1, 0)} for step in range(1, 6)]
    whole = drawn(rows)
    assert drawn([rows[step] for step in (0, 3, 1, 4, 2)]) == whole
    rows[2] = {"step": 3, **meter_of(SKIPPED).row(0.1, 0)}
    assert drawn(rows) != whole


STAGES = [
    (101, "16 → 32 tokens"),  # before the first evaluation
    (1201, "32 → 128 tokens"),
    (1501, "batch 32 → 64"),
    (1701, "128 → 512 tokens, batch 64 → 1024"),
    (2901, "batch 1024 → 2048"),
]


@pytest.mark.parametrize("count", range(len(STAGES) + 1))
@pytest.mark.parametrize("task", [NSP, None])
def test_curves_mark_each_stage_with_a_line_and_a_label(task, count, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **how: drawn.append(figure))
    rows = [{"step": 30 * n, **meter_of(STEP, task=task).row(0.1, 0), "mlm_loss": 9 - n / 20} for n in range(100)]
    rows += [{"step": 300 * n, "eval_mlm_loss": 6.0, "eval_mlm_accuracy": 0.2} for n in range(1, 10)]
    for row in rows[100:] if task else ():
        row |= {"eval_nsp_loss": 0.6, "eval_nsp_accuracy": 0.7}
    rows += [{"step": step, "event": "stage", "reason": "", "label": label} for step, label in STAGES[:count]]
    plot_curves(rows, tmp_path / "curves.png")
    (figure,) = drawn
    assert len(figure.axes) == (3 if task else 2)
    for panel in figure.axes:
        assert [text.get_text() for text in panel.texts] == [label for *_, label in STAGES[:count]]
        vertical = [line.get_xdata()[0] for line in panel.lines if line.get_xdata()[0] == line.get_xdata()[-1]]
        assert vertical == [step - 1 for step, *_ in STAGES[:count]]


def test_the_report_at_the_end_shows_mfu_and_skipped_steps(trained, monkeypatch):
    monkeypatch.setattr(run_report, "show_example", lambda *arguments: "")
    metrics = json.loads((trained / "metrics.json").read_text()) | {"train_mfu": 0.4567}
    said = run_report.report(trained, None, None, metrics, {}, [], 1000)
    assert "45.7% of the peak (MFU)" in said and "left out" not in said
    said = run_report.report(trained, None, None, metrics | {"train_skipped_steps": 1234}, {}, [], 1000)
    assert "steps skipped because their loss or gradient was not finite: 1,234\n" in said


# ---------------------------------------------------------------------------------------------------------------------
# The log


def made_again(log, first, last):
    """Write the rows of some steps: one per step, an evaluation every second step, an event in step 5."""
    for step in range(first, last + 1):
        log.write({"step": step, "loss": 0.1 * step, "learning_rate": 0.1})
        if step == 5:
            log.write({"step": step, "event": "loss_spike"})
        if step % 2 == 0:
            log.write({"step": step, "eval_mlm_loss": 0.2 * step})


def test_resuming_a_log_cut_at_any_byte_repeats_and_loses_no_row(tmp_path):
    """The run is killed after the checkpoint of step 4; the log may end at every byte from there on."""
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


def test_going_back_to_an_earlier_step_removes_no_row(tmp_path):
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


def test_a_new_run_starts_a_new_log(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.path.write_text('{"step": 1, "loss": 3.0}\n')
    log.start_at(0)
    assert log.path.read_bytes() == b"" and log.write({"step": 1, "loss": 4.0})
    assert log.rows() == [{"step": 1, "loss": 4.0}] and [path.name for path in tmp_path.iterdir()] == [log.path.name]


def test_resuming_without_a_log_starts_one(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(7)
    assert log.rows() == [] and log.write({"step": 8, "loss": 4.0}) and len(log.rows()) == 1


def test_numbers_that_json_cannot_hold_are_refused(tmp_path):
    log = TrainingLog(tmp_path / "training_log.jsonl")
    log.start_at(0)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"eval_perplexity is {value} at step 1: training has diverged; lower"):
            log.write({"step": 1, "eval_perplexity": value})
    assert log.path.read_bytes() == b"" and log.write({"step": 1, "loss": 1.0})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_with_the_log_and_the_mend(tmp_path):
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
    assert log.write({"step": 1, "loss": 1.0})  # the failed row does not count as written


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "training_log.jsonl").mkdir()
    for use in (lambda log: log.start_at(0), lambda log: log.write({"step": 1})):
        with pytest.raises(ValueError, match="training_log.jsonl: cannot be written .*make it writable"):
            use(TrainingLog(tmp_path / "training_log.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

RECORD = {"run": {"learning_rate": 1e-3, "corpus": ["a", "b"], "init_from": None}, "machine": {"device": "cpu"}}


def events(folder):
    """(step, value) of every scalar that TensorBoard shows, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def report_run(folder, first, last):
    """Report some steps to TensorBoard in a run that starts at `first`; returns the rows."""
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=folder)
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


def test_tensorboard_holds_the_numbers_of_the_log_and_resumed_steps_only_once(tmp_path):
    rows = [row for row in report_run(tmp_path, 1, 6) if row["step"] <= 4]
    rows += report_run(tmp_path, 5, 8)  # resumed from the checkpoint of step 4
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


def test_trackers_that_are_unknown_or_not_installed_are_refused():
    """Accelerate alone would leave them out without a message."""
    known = ["tensorboard"]
    assert tracking.check_trackers([], known) is None and tracking.check_trackers(["none"], known) is None
    assert tracking.check_trackers(["tensorboard"], known) == ["tensorboard"]
    for names in (["tensorbord"], ["wandb"], ["tensorboard", "none"]):
        with pytest.raises(ValueError, match=f"report_to takes none, or .*tensorboard.*, got '{names[-1]}'"):
            tracking.check_trackers(names, known)


def test_a_tracker_that_cannot_start_is_refused_in_one_line(tmp_path):
    (tmp_path / "d2l-bert").write_text("where TensorBoard's folder should be")
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    with pytest.raises(ValueError, match="report_to tensorboard: a tracker does not start .*fix the error") as caught:
        tracking.start_trackers(accelerator, tmp_path, RECORD, 0)
    assert "\n" not in str(caught.value)


def test_a_failing_tracker_is_reported_and_all_others_continue(capsys, shown):
    def fail(values, step):
        raise OSError(errno.EPIPE, "the line\nis down")

    taken = []
    broken = SimpleNamespace(name="broken", log=fail)
    whole = SimpleNamespace(name="whole", log=lambda values, step: taken.append((step, values)))
    tracking.send_to_trackers(SimpleNamespace(trackers=[broken, whole]), {"step": 3, "loss": 1.0})
    said = capsys.readouterr().err
    assert "step 3: broken did not take the metrics (BrokenPipeError" in said and said.count("\n") == 1
    assert taken == [(3, {"train/loss": 1.0})]
