"""What a run reports: the log that only grows, and trackers."""

import errno
import json
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from measured_steps import STEP, meter_of

from d2l_bert.training import tracking
from d2l_bert.training.tracking import TrainingLog


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


def test_trackers_that_are_unknown_or_not_installed_are_refused():
    """Accelerate alone would leave them out without a message."""
    known = ["tensorboard"]
    assert tracking.check_trackers([], known) is None and tracking.check_trackers(["none"], known) is None
    assert tracking.check_trackers(["tensorboard"], known) == ["tensorboard"]
    for names in (["tensorbord"], ["wandb"], ["tensorboard", "none"]):
        with pytest.raises(ValueError, match=f"report_to takes none, or .*tensorboard.*, got '{names[-1]}'"):
            tracking.check_trackers(names, known)


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
