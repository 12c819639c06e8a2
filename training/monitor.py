"""Logging of a run: what `meter` measures of its steps, and events, go to the outputs of `tracking`."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.arithmetic import peak_of, training_arithmetic
from d2l_bert.training.batching import stage_changes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import on_main, report_errors_once
from d2l_bert.training.interruption import NonFiniteGuard, non_finite_values
from d2l_bert.training.meter import Meter, SpikeDetector, StepStats
from d2l_bert.training.tracking import Progress, TrainingLog, kind_of, send_to_trackers


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

    def time_waits(self, batches: Iterable) -> Iterator:
        """Yield the same batches, and measure the time that training waits for each."""
        return self.meter.waiting(batches)

    def start_clock(self) -> None:
        """Start the clock of the training: time before this call does not count as training time."""
        self.meter.start_clock()

    def clock_stopped(self) -> contextlib.AbstractContextManager:
        """A block, such as an evaluation or a save, whose time does not count as training time."""
        return self.meter.clock_stopped()

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
