"""Logging of a run: progress on the terminal, training_log.jsonl, trackers such as TensorBoard, and events."""

import datetime
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from d2l_bert.errors import GO_ON, UserError, explained, launched_rank, refuse_first, writing
from d2l_bert.pair_tasks import PAIR_TASKS, pair_task
from d2l_bert.training.batching import stage_changes
from d2l_bert.training.checkpoint import checkpoints
from d2l_bert.training.distributed import on_main, report_errors_once
from d2l_bert.training.job import Job
from d2l_bert.training.meter import MATMUL_DTYPES, Meter, StepStats, matmul_peak, training_arithmetic


logger = logging.getLogger(__name__)


def line_of(row: dict, total: int) -> str:
    """
    A row of the training log as a line for a person.

    Args:
        total: the number of steps of the run.
    """
    if "event" in row:
        return row["reason"]
    task = pair_task(row)
    if kind_of(row) == "held_out":
        keys = ("mlm", task.key) if task else ("mlm",)
        figures = (
            f"{k.upper()} loss {row[f'eval_{k}_loss']:.3f}, accuracy {row[f'eval_{k}_accuracy']:.1%}" for k in keys
        )
        one_segment = f" (one segment alone: {row[f'eval_{task.key}_one_segment_accuracy']:.1%})" if task else ""
        return f"held out: {'; '.join(figures)}{one_segment}"
    parts = (
        f"step {row['step']:>{len(str(total))}}/{total}",
        losses_of(row),
        f"skipped {row['skipped_steps']}" if "skipped_steps" in row else "",
        f"rate {row['learning_rate']:.2e}",
        speed_of(row),
        f"{datetime.timedelta(seconds=round(row['seconds_left']))} left",
    )
    return "  ".join(filter(None, parts))


def losses_of(row: dict) -> str:
    """The losses in a row of kind `train`; "no loss" if each of its steps was left out or had no token to predict."""
    if "loss" not in row:
        return "no loss"
    task = pair_task(row)
    pair_loss = f", {task.short} {row[f'{task.key}_loss']:.3f}" if task else ""
    return f"loss {row['loss']:.3f} (MLM {row['mlm_loss']:.3f}{pair_loss})"


def speed_of(row: dict) -> str:
    """The speed in a row of kind `train`."""
    return f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"


def kind_of(row: dict) -> str:
    """The kind of a row of the training log: `train`, `held_out`, or the name of its event, such as `skipped`."""
    return row.get("event") or ("held_out" if any(name.startswith("eval_") for name in row) else "train")


class TrainingLog:
    """
    The file training_log.jsonl: a row for every logged step, every evaluation and every event.

    Rows are only appended, never changed. A resumed run repeats the steps after its checkpoint; for these steps, rows
    that the log already has are not written again.

    Raises:
        UserError: from `start_at` and `write`, if the file cannot be written; from `write`, if a number in the row is
            not finite, as JSON has no such numbers.
    """

    def __init__(self, path: Path):
        self.path = path
        self.written = set()  # step and kind of each row in the file

    def start_at(self, step: int) -> None:
        """
        Prepare the log: at step 0, an empty file replaces the log of an earlier run; else the existing rows stay.

        An incomplete last line, from a write that was interrupted, is removed.
        """
        with writing(self.path, f", and {GO_ON}"):
            if step == 0:
                self.path.write_bytes(b"")
            elif self.path.exists():
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self.written = {(row["step"], kind_of(row)) for row in self.rows()}

    def write(self, row: dict) -> bool:
        """Append a row, unless the log has a row of the same step and kind; returns whether the row was appended."""
        key = (row["step"], kind_of(row))
        if key in self.written:
            return False
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(
                    f"{name} is {value} at step {row['step']}: training has diverged; lower learning_rate and start "
                    f"again"
                )
        line = json.dumps(row, allow_nan=False) + "\n"
        with writing(self.path, f", and {GO_ON}"), self.path.open("a") as file:
            file.write(line)  # buffered: the line reaches the disk in one write, when the file is closed
        self.written.add(key)
        return True

    def rows(self) -> list[dict]:
        """All rows of the file in order, without incomplete lines from a write that was interrupted."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

# The name of the project in the trackers, and of TensorBoard's folder in the run's folder.
PROJECT = "d2l-bert"


def check_trackers(names: list[str], installed: Iterable[str]) -> list[str] | None:
    """
    The trackers that the option `report_to` asks for; None for `[]` and for `["none"]`.

    Raises:
        UserError: a tracker is unknown, or not installed; Accelerate and Transformers would ignore it.
    """
    if names in ([], ["none"]):
        return None
    known = f"none, or trackers that are installed here ({', '.join(installed) or 'none is'})"
    refuse_first({f"report_to takes {known}, got {name!r}": name not in installed for name in names})
    return names


def start_trackers(accelerator: Accelerator, folder: Path, record: dict, start: int) -> None:
    """
    Start the trackers of `accelerator.log_with`, on the main process.

    TensorBoard writes to the folder `d2l-bert` in the accelerator's `project_dir`. When a run is resumed, the files of
    the earlier start remain, and TensorBoard drops their points after step `start`, as the resumed run reports these
    steps again. In other trackers a resumed run becomes a new run that begins at step `start` + 1.

    Args:
        folder: the run's folder; its name becomes the name of the run in trackers that have names for runs.
        record: the content of run_config.json.
        start: the number of steps done before.

    Raises:
        UserError: a tracker does not start; the message quotes the tracker's error.
    """
    name = folder.resolve().name
    arguments = {
        "tensorboard": {"purge_step": start + 1},
        "wandb": {"name": name, "dir": str(folder)},
        "trackio": {"name": name},
        "mlflow": {"run_name": name},
    }
    what = f"report_to {' '.join(map(str, accelerator.log_with))}: a tracker does not start"
    with explained(what, "fix the error, or leave the tracker out", Exception):
        accelerator.init_trackers(PROJECT, flat(record), arguments)


def flat(record: dict, prefix: str = "") -> dict[str, bool | int | float | str]:
    """
    A nested dict as a flat dict with keys such as `run/learning_rate`, as trackers take it.

    A list becomes a string with spaces between the elements. Entries that are None are left out.
    """
    result = {}
    for name, value in record.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}/")
        elif value is not None:
            is_scalar = isinstance(value, (bool, int, float, str))
            result[f"{prefix}{name}"] = value if is_scalar else " ".join(map(str, value))
    return result


def send_to_trackers(accelerator: Accelerator, row: dict) -> None:
    """
    Send a row of the training log to the trackers, as `train/loss`, `eval/mlm_loss` and so on, except events.

    If a tracker fails, a warning is logged and the run continues: the training log has every row.
    """
    if "event" in row:
        return
    group = {"train": "train", "held_out": "eval"}[kind_of(row)]
    values = {f"{group}/{name.removeprefix('eval_')}": value for name, value in row.items() if name != "step"}
    for tracker in accelerator.trackers:
        try:
            tracker.log(values, step=row["step"])
        except Exception as error:
            logger.warning(
                f"step {row['step']}: {tracker.name} did not take the metrics ({error!r:.300}); "
                f"training_log.jsonl has them"
            )


# ---------------------------------------------------------------------------------------------------------------------


# Healthy runs skip single steps too. After ten skipped steps in a row the weights themselves are bad.
MAX_SKIPPED_IN_A_ROW = 10


class RunMonitor:
    """
    Collects the losses and counts of every step, writes rows of the log, and reports events: a change of sequence
    length or batch size, a skipped step.

    Every process must call each method at the same point of the run.

    Args:
        log: the run's log file; only the main process writes to the file.
        state: the state in a checkpoint to resume from; a dict with only `step` at the start of a run.
    """

    def __init__(self, job: Job, log: TrainingLog, state: dict):
        self.accelerator, self.log, self.max_steps = job.accelerator, log, job.max_steps
        self.step, self.learning_rate, self.held_out_metrics = state["step"], 0.0, None
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        self.changes = stage_changes(job.run, job.max_steps)
        task, device = PAIR_TASKS.get(job.run.objective), self.accelerator.device
        arithmetic = functools.partial(training_arithmetic, job.architecture, pair_task=task is not None)
        peaks = self.accelerator.gather(
            torch.tensor(matmul_peak(device, MATMUL_DTYPES[self.accelerator.mixed_precision]), device=device)
        )
        self.meter = Meter(state, task, arithmetic, float(peaks.sum()), device)
        self.bar = tqdm(
            total=self.max_steps,
            initial=self.step,
            desc="training",
            unit="step",
            disable=not sys.stderr.isatty() or bool(launched_rank()),
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )

    def add_step(self, step: int, step_stats: StepStats, learning_rate: float) -> None:
        """
        Add the losses and counts of a step, and report events of that step.

        Raises:
            UserError: training has diverged: too many steps in a row were skipped. Or the log cannot be written.
        """
        self.step, self.learning_rate = step, learning_rate
        self.meter.add(step_stats)
        self.bar.update()
        if step in self.changes:
            self._record(self.changes[step])
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step_stats.skipped else 0
        if step_stats.skipped:
            loss = step_stats.mlm_loss + step_stats.pair_loss
            values = f"loss {loss:g}, gradient norm {step_stats.grad_norm:g}"
            reason = f"step {step} is left out, as it is not finite: {values}"
            self._record({"step": step, "event": "skipped", "reason": reason})
            if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                last = checkpoints(self.log.path.parent)[-1:]
                with report_errors_once():
                    raise UserError(
                        f"training has diverged: loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a "
                        f"row, up to step {step} ({values}); start again with a lower --learning_rate or "
                        f"--max_grad_norm" + "".join(f", or lower the rate from --init_from {path}" for path in last)
                    )

    def write_row(self) -> None:
        """Write a log row with the means over the steps since the last row; nothing if there were none."""
        if self.meter.steps:
            self._record({"step": self.step, **self.meter.row(self.learning_rate, self.max_steps - self.step)})

    def write_evaluation(self, metrics: dict) -> None:
        """Write a log row with the result of `Learner.evaluate` after the last step."""
        self.held_out_metrics = metrics
        self._record({"step": self.step, **metrics})

    def _record(self, row):
        """Send a row to the log file, the trackers and the terminal."""
        on_main(self.accelerator, self.log.write, row)
        send_to_trackers(self.accelerator, row)
        if kind_of(row) == "train" and not self.bar.disable:
            self.bar.set_postfix_str(f"{losses_of(row)}, {speed_of(row)}")
        else:
            level = logging.WARNING if kind_of(row) == "skipped" else logging.INFO
            logger.log(level, line_of(row, self.max_steps))
