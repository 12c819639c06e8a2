"""Logging of a run: progress on the terminal, training_log.jsonl, trackers such as TensorBoard, and events."""

import contextlib
import functools
import json
import logging
import math
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from tqdm.auto import tqdm

from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS, pair_task
from d2l_bert.training.arithmetic import peak_of, training_arithmetic
from d2l_bert.training.batching import stage_changes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import on_main, report_errors_once
from d2l_bert.training.interruption import NonFiniteGuard, non_finite_values
from d2l_bert.training.meter import Meter, SpikeDetector, StepStats


logger = logging.getLogger(__name__)


class Progress:
    """Shows the rows of the training log: in a progress bar on a terminal, else as lines of the logger."""

    def __init__(self, start: int, total: int, visible: bool):
        self.total, self.visible = total, visible
        self.on_terminal = visible and sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            initial=start,
            desc="training",
            unit="step",
            disable=not self.on_terminal,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )

    def step(self) -> None:
        """Move the bar on by one optimizer step."""
        self.bar.update()

    def show(self, row: dict) -> None:
        """Show a row of kind `train`: losses, skipped steps, learning rate, speed, time left."""
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        loss = f"loss {row['loss']:.3f}" if "loss" in row else "no loss"
        skipped = f"skipped {row['skipped_steps']}" if "skipped_steps" in row else ""
        if self.on_terminal:
            self.bar.set_postfix_str(", ".join(filter(None, (loss, skipped, speed))))
        elif self.visible:
            task = pair_task(row)
            pair_loss = f", {task.short} {row[f'{task.key}_loss']:.3f}" if task else ""
            losses = f" (MLM {row['mlm_loss']:.3f}{pair_loss})" if "loss" in row else ""
            parts = (
                f"step {row['step']:>{len(str(self.total))}}/{self.total}",
                loss + losses,
                skipped,
                f"rate {row['learning_rate']:.2e}",
                speed,
                f"{_clock(row['seconds_left'])} left",
            )
            logger.info("  ".join(filter(None, parts)))

    def show_event(self, row: dict) -> None:
        """Log the reason of an event: as a warning, except for a new stage of the run."""
        if self.visible:
            logger.log(logging.INFO if row["event"] == "stage" else logging.WARNING, row["reason"])

    def show_held_out(self, metrics: dict) -> None:
        """Show the losses and accuracies of an evaluation."""
        if self.visible:
            task = pair_task(metrics)
            keys = ("mlm", task.key) if task else ("mlm",)
            losses = (
                f"{key.upper()} loss {metrics[f'eval_{key}_loss']:.3f}, accuracy {metrics[f'eval_{key}_accuracy']:.1%}"
                for key in keys
            )
            logger.info(f"held out: {'; '.join(losses)}")

    def close(self) -> None:
        """Close the bar, and free its line on the terminal."""
        self.bar.close()


def _clock(seconds):
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def kind_of(row: dict) -> str:
    """The kind of a row of the training log: `train`, `held_out`, or the name of its event, such as `loss_spike`."""
    if "event" in row:
        return row["event"]
    return "held_out" if any(name.startswith("eval_") for name in row) else "train"


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
        with self._writing():
            if step == 0:
                partial = self.path.with_name(f".{self.path.name}.part")
                partial.write_bytes(b"")
                partial.replace(self.path)
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
        with self._writing(), self.path.open("a") as file:
            file.write(line)  # buffered: the line reaches the disk in one write, when the file is closed
        self.written.add(key)
        return True

    def rows(self) -> list[dict]:
        """All rows of the file in order, without incomplete lines from a write that was interrupted."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    @contextlib.contextmanager
    def _writing(self):
        """Raise an `OSError` of this block as `UserError`."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path}: {why_unwritable(error, f', and {GO_ON}')}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

# The name of the project in the trackers, and of TensorBoard's folder in the run's folder.
PROJECT = "d2l-bert"

# The argument of pip install for trackers whose package has another name, or works in some versions only.
TRACKER_PACKAGES = {"comet_ml": "comet-ml", "aim": "'aim<4'"}


def check_trackers(names: list[str]) -> list[str] | None:
    """
    The argument of `Accelerator(log_with=...)` for the option `report_to`; None for `[]` and for `["none"]`.

    Raises:
        UserError: Accelerate does not know a name, or a tracker is not installed. Accelerate itself would ignore a
            tracker that is not installed.
    """
    if names in ([], ["none"]):
        return None
    known = sorted(set(LoggerType.list()) - {"all"})
    for name in names:
        if name == "none":
            raise UserError("report_to: none cannot be combined with trackers; give either none or the trackers")
        if name not in known:
            raise UserError(f"report_to takes {', '.join(known)}, or none, got {name!r}")
        if LoggerType(name) not in get_available_trackers():
            raise UserError(
                f"report_to {name}: the package is not installed; pip install {TRACKER_PACKAGES.get(name, name)}, or "
                f"leave {name} out"
            )
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
    try:
        accelerator.init_trackers(PROJECT, flat(record), arguments)
    except Exception as error:
        names = ", ".join(map(str, accelerator.log_with))
        raise UserError(
            f"report_to {names}: a tracker does not start ({_one_line(error)}); fix the error, or leave the tracker "
            f"out"
        ) from error


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
                f"step {row['step']}: {tracker.name} did not take the metrics ({_one_line(error)}); "
                f"training_log.jsonl has them"
            )


def _one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ---------------------------------------------------------------------------------------------------------------------


class RunMonitor:
    """
    Collects the losses and counts of every step, writes rows of the log, and reports events: a change of sequence
    length or batch size, a loss spike, a skipped step.

    Every process must call each method at the same point of the run.

    Args:
        folder: the run's output folder.
        log: the run's log file; only the main process writes to the file.
        state: the state in a checkpoint to resume from; a dict with only `step` at the start of a run.
        max_steps: the number of steps in the run.
    """

    def __init__(
        self,
        run: PretrainConfig,
        architecture: D2lBertConfig,
        accelerator: Accelerator,
        folder: Path,
        log: TrainingLog,
        state: dict,
        max_steps: int,
    ):
        self.accelerator, self.log, self.max_steps = accelerator, log, max_steps
        self.step, self.learning_rate, self.held_out_metrics = state["step"], 0.0, None
        self.changes = stage_changes(run, max_steps)
        task = PAIR_TASKS.get(run.objective)
        arithmetic = functools.partial(training_arithmetic, architecture, pair_task=task is not None)
        peaks = accelerator.gather(torch.tensor(peak_of(accelerator), device=accelerator.device))
        self.meter = Meter(state, task, arithmetic, float(peaks.sum()), accelerator.device)
        self.guard, self.spikes = NonFiniteGuard(folder, state), SpikeDetector(state.get("spikes"))
        self.progress = Progress(self.step, max_steps, visible=accelerator.is_main_process)

    def add_step(self, step: int, step_stats: StepStats, learning_rate: float) -> None:
        """
        Add the losses and counts of a step, and report events of that step.

        Raises:
            UserError: training has diverged: too many steps in a row were skipped. Or the log cannot be written.
        """
        self.step, self.learning_rate = step, learning_rate
        self.meter.add(step_stats)
        self.progress.step()
        if step in self.changes:
            self.spikes.pause()  # a new sequence length has other losses: restart spike detection
            self._record(self.changes[step])
        if step_stats.skipped:
            reason = f"step {step} is left out, as it is not finite: {non_finite_values(step_stats)}"
            self._record({"step": step, "event": "skipped", "reason": reason})
        elif reason := self.spikes.update(step, step_stats.mlm_loss + step_stats.pair_loss):
            self._record({"step": step, "event": "loss_spike", "reason": reason})
        with report_errors_once():
            self.guard.check(step, step_stats)

    def write_row(self) -> None:
        """Write a log row with the means over the steps since the last row; nothing if there were none."""
        if self.meter.steps:
            row = self.meter.row(self.learning_rate, self.max_steps - self.step)
            self._record({"step": self.step, **row})

    def write_evaluation(self, metrics: dict) -> None:
        """Write a log row with the result of `Learner.evaluate` after the last step."""
        self.held_out_metrics = metrics
        self._record({"step": self.step, **metrics})

    def last_step_was_taken(self) -> bool:
        """Whether the last step updated the weights. After a skipped step the weights may be bad."""
        return not self.guard.in_a_row

    def run_metrics(self) -> dict:
        """The result of the last evaluation, and the speed of the whole run, for `metrics.json`."""
        return {**self.held_out_metrics, **self.meter.speed()}

    def state(self) -> dict:
        """The state that a checkpoint keeps, ready for JSON."""
        return {**self.meter.totals, **self.guard.state(), "spikes": self.spikes.state()}

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        self.progress.close()

    def _record(self, row):
        """Send a row to the log file, the trackers and the terminal."""
        on_main(self.accelerator, self.log.write, row)
        send_to_trackers(self.accelerator, row)
        show = {"train": self.progress.show, "held_out": self.progress.show_held_out}
        show.get(kind_of(row), self.progress.show_event)(row)
