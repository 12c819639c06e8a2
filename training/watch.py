"""What is seen of a run while it trains: its steps' figures, written to the log and the trackers, and shown."""

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
from d2l_bert.training.distributed import on_main, said_once
from d2l_bert.training.interruption import NonFiniteGuard, non_finite
from d2l_bert.training.meter import Meter, SpikeWatch, StepFigures
from d2l_bert.training.tracking import Progress, TrainingLog, kind_of, send_to_trackers


class RunWatch:
    """
    Takes in every step; writes rows of the log, and says what stands out: changes of length or batch size, losses that
    jump, steps left out.

    All processes must call its methods, at the same point.

    Args:
        folder: the run's.
        log: the run's; the main process writes it.
        state: a checkpoint's, to go on from, or one with `step` alone.
        max_steps: the run's.
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
        self.step, self.learning_rate, self.held_out = state["step"], 0.0, None
        self.changes = stage_changes(run, max_steps)
        task = PAIR_TASKS.get(run.objective)
        arithmetic = functools.partial(training_arithmetic, architecture, pair_task=task is not None)
        peaks = accelerator.gather(torch.tensor(peak_of(accelerator), device=accelerator.device))
        self.meter = Meter(state, task, arithmetic, float(peaks.sum()), accelerator.device)
        self.guard, self.spikes = NonFiniteGuard(folder, state), SpikeWatch(state.get("spikes"))
        self.progress = Progress(self.step, max_steps, visible=accelerator.is_main_process)

    def waiting(self, batches: Iterable) -> Iterator:
        """Pass batches on, and keep the time that they were waited for."""
        return self.meter.waiting(batches)

    def resume_clock(self) -> None:
        """Training goes on from here: what came before, an evaluation or a save, does not count."""
        self.meter.resume_clock()

    def see(self, step: int, figures: StepFigures, learning_rate: float) -> None:
        """
        Take in a step.

        Raises:
            UserError: training has diverged.
        """
        self.step, self.learning_rate = step, learning_rate
        self.meter.add(figures)
        self.progress.step()
        if step in self.changes:
            self.spikes.rest()  # other lengths, other losses
            self._note(self.changes[step])
        if figures.skipped:
            reason = f"step {step} is left out, as it is not finite: {non_finite(figures)}"
            self._note({"step": step, "event": "skipped", "reason": reason})
        elif reason := self.spikes.see(step, figures.mlm_loss + figures.pair_loss):
            self._note({"step": step, "event": "loss_spike", "reason": reason})
        with said_once():
            self.guard.check(step, figures)

    def write_row(self) -> None:
        """Write a row of the steps since the last one, if there were any."""
        if self.meter.steps:
            row = self.meter.row(self.learning_rate, self.max_steps - self.step)
            self._note({"step": self.step, **row})

    def write_held_out(self, figures: dict) -> None:
        """Write what an evaluation found."""
        self.held_out = figures
        self._note({"step": self.step, **figures})

    def is_sound(self) -> bool:
        """Whether the last step was taken. While steps are being skipped the weights may be bad."""
        return not self.guard.in_a_row

    def figures(self) -> dict:
        """The last held-out figures, and the speed of the whole run."""
        return {**self.held_out, **self.meter.speed()}

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON."""
        return {**self.meter.totals, **self.guard.state(), "spikes": self.spikes.state()}

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.close()

    def _note(self, row):
        """Give a row to the log, the trackers and the terminal."""
        on_main(self.accelerator, self.log.write, row)
        send_to_trackers(self.accelerator, row)
        show = {"train": self.progress.show, "held_out": self.progress.show_held_out}
        show.get(kind_of(row), self.progress.show_event)(row)
