"""Measures the steps, and writes nothing: losses, speed, memory, waiting for batches, and loss spikes."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import psutil
import torch

from d2l_bert.pair_tasks import PairTask, unit


class StepStats(NamedTuple):
    """
    The losses and counts of one optimizer step, over all processes.

    Args:
        mlm_loss: nats per masked token.
        pair_loss: nats per pair; 0 if there is no pair task.
        grad_norm: the norm of the gradient before clipping to `max_grad_norm`.
        masked_tokens: tokens to predict.
        examples: pairs, or sequences if there is no pair task.
        tokens: tokens without padding.
        padded_tokens: tokens including padding.
        squared_lengths: the sum of the squared lengths of the sequences; the cost of attention grows with this sum.
        skipped: 1 if the step was skipped because the loss or the gradient was not finite, else 0.
    """

    mlm_loss: float
    pair_loss: float
    grad_norm: float
    masked_tokens: float
    examples: float
    tokens: float
    padded_tokens: float
    squared_lengths: float
    skipped: float


class Meter:
    """
    Collects the statistics of steps, for the rows of the training log and for the whole run.

    Time counts only while the run trains, not during evaluations and saves.
    """

    def __init__(
        self,
        state: dict,
        task: PairTask | None,
        arithmetic: Callable[[StepStats], float],
        peak: float,
        device: torch.device,
    ):
        """
        Args:
            state: a checkpoint's `training_state.json`, whose totals are continued; without totals they start at 0.
            task: the pair task of the run, if there is one.
            arithmetic: returns the floating-point operations of a step (`training_arithmetic`).
            peak: operations a second of all processes together (the sum of their `matmul_peak`).
            device: the device of the model.
        """
        self.task, self.unit = task, unit(task)
        self.arithmetic, self.peak, self.device = arithmetic, peak, device
        names = ("train_seconds", "train_wait_seconds", "train_tokens", "train_padded_tokens", f"train_{self.unit}")
        # `train_possible_arithmetic` sums time x peak: a resumed run may continue on a machine with another peak.
        names += ("train_skipped_steps", "train_arithmetic", "train_possible_arithmetic")
        self.totals = {name: state.get(name, 0.0) for name in (*names, "train_memory_mb")}
        used_memory(device)  # resets the peak, so that the first row does not include the memory of the setup
        self.start_clock()
        self.steps, self.waited = [], 0.0  # since the last row: statistics of the steps, seconds of waiting

    def waiting(self, batches: Iterable) -> Iterator:
        """Yield the batches, and measure how long the training waits for each of them."""
        batches = iter(batches)
        while True:
            start = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.monotonic() - start
            yield batch

    def add(self, stats: StepStats) -> None:
        """Add one step to the next row."""
        self.steps.append(stats)

    def row(self, learning_rate: float, steps_left: int) -> dict[str, float]:
        """
        A row of the training log over the steps since the last row; adds these steps to the totals of the run.

        Returns:
            Finite numbers. Means over the steps that were not skipped, absent if all were skipped: `loss`, `mlm_loss`,
            with a pair task `nsp_loss` or `sop_loss`, and `grad_norm`. Over all steps: `tokens_per_second` without
            padding; `padding_share`, the padding as a share of the tokens including padding; `data_wait_share`, the
            share of the time that training waited for batches; `mfu`, the operations on real tokens as a share of the
            peak; `memory_mb`, from `used_memory` on this process; `seconds_left`; `skipped_steps`, only if above 0.
            And `learning_rate`.
        """
        seconds = time.monotonic() - self.clock_start
        tokens, padded_tokens = (
            sum(getattr(step, name) for step in self.steps) for name in ("tokens", "padded_tokens")
        )
        skipped = round(sum(step.skipped for step in self.steps))
        arithmetic, possible = sum(map(self.arithmetic, self.steps)), seconds * self.peak
        memory = used_memory(self.device)
        examples = sum(step.examples for step in self.steps)
        spent = (seconds, self.waited, tokens, padded_tokens, examples, skipped, arithmetic, possible)
        for name, value in zip(self.totals, spent, strict=False):
            self.totals[name] += value
        self.totals["train_memory_mb"] = max(self.totals["train_memory_mb"], memory)
        row = {
            **self._losses(),
            "learning_rate": learning_rate,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / padded_tokens,
            "data_wait_share": self.waited / seconds,
            "seconds_left": steps_left * seconds / len(self.steps),
            "mfu": arithmetic / possible,
            "memory_mb": memory,
            **({"skipped_steps": skipped} if skipped else {}),
        }
        self.steps, self.waited = [], 0.0
        self.start_clock()
        return row

    def _losses(self):
        counted = [step for step in self.steps if not step.skipped]
        if not counted:
            return {}
        mlm_loss, pair_loss, norm = (
            statistics.fmean(getattr(step, name) for step in counted)
            for name in ("mlm_loss", "pair_loss", "grad_norm")
        )
        pair_entry = {f"{self.task.key}_loss": pair_loss} if self.task else {}
        return {"loss": mlm_loss + pair_loss, "mlm_loss": mlm_loss, **pair_entry, "grad_norm": norm}

    def speed(self) -> dict[str, float]:
        """
        The `train_...` entries of metrics.json, over all rows of the run.

        Seconds, examples and real tokens a second, the shares of padding and of waiting, MFU, the number of skipped
        steps, and the largest `memory_mb` of a row.
        """
        seconds = self.totals["train_seconds"]
        return {
            "train_seconds": seconds,
            f"train_{self.unit}_per_second": self.totals[f"train_{self.unit}"] / seconds,
            "train_tokens_per_second": self.totals["train_tokens"] / seconds,
            "train_padding_share": 1 - self.totals["train_tokens"] / self.totals["train_padded_tokens"],
            "train_data_wait_share": self.totals["train_wait_seconds"] / seconds,
            "train_mfu": self.totals["train_arithmetic"] / self.totals["train_possible_arithmetic"],
            "train_skipped_steps": round(self.totals["train_skipped_steps"]),
            "train_memory_mb": self.totals["train_memory_mb"],
        }

    def start_clock(self) -> None:
        """Start the clock of the next row."""
        self.clock_start = time.monotonic()

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """A block, such as an evaluation or a save, whose time does not count."""
        start = time.monotonic()
        yield
        self.clock_start += time.monotonic() - start


def used_memory(device: torch.device) -> float:
    """
    Memory of this process in megabytes (10^6 bytes).

    On an NVIDIA GPU, the most memory that was allocated on the GPU since the last call. On other devices, the resident
    memory of the process now; on Linux without shared pages and memory-mapped files, such as the tokens.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e6
    memory = psutil.Process().memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 1e6


class SpikeDetector:
    """
    Reports a step whose loss is far above the losses before: the learning rate may be too high, or the text broken.

    A loss counts as a spike if it is more than `THRESHOLD` mean absolute deviations above the mean; both are moving
    averages. Nothing is reported in the first `QUIET_STEPS` steps after a start, a spike or `pause`.

    In 600 steps of the recipe `tiny`, which include a change of sequence length, no loss was more than 2.6 mean
    absolute deviations above the mean. For normally distributed losses, ten of these are eight standard deviations.
    """

    DECAY = 0.98  # of the moving averages: they reach back about 50 steps
    QUIET_STEPS = 50  # without a report, after a start, a spike or `pause`: mean and deviation have to settle first
    THRESHOLD = 10  # mean absolute deviations

    def __init__(self, state: dict | None = None):
        """
        Args:
            state: what `state` returned before the run was interrupted; None for a new run.
        """
        state = state or {"mean": None, "deviation": 0.0, "quiet": self.QUIET_STEPS}
        self.mean, self.deviation, self.quiet = state["mean"], state["deviation"], state["quiet"]

    def state(self) -> dict[str, float | None]:
        """The state to save in a checkpoint, as JSON, so that a resumed run reports the same spikes."""
        return {"mean": self.mean, "deviation": self.deviation, "quiet": self.quiet}

    def pause(self) -> None:
        """Report nothing for `QUIET_STEPS` steps; to be called where losses change for a known reason."""
        self.quiet = self.QUIET_STEPS

    def update(self, step: int, loss: float) -> str | None:
        """
        Add the loss of a step; a loss that is not finite is ignored.

        Returns:
            A line for the log if the loss is a spike, else None.
        """
        if not math.isfinite(loss):
            return None
        mean = loss if self.mean is None else self.mean
        distance = loss - mean
        is_spike = self.quiet == 0 and distance > self.THRESHOLD * self.deviation
        line = None
        if is_spike:
            line = (
                f"step {step}: the loss jumped to {loss:.3f} from about {mean:.3f}, where {self.deviation:.3f} up or "
                f"down is usual; if the loss does not come back, start again with a lower learning_rate"
            )
        self.quiet = self.QUIET_STEPS if is_spike else max(0, self.quiet - 1)
        self.mean = mean + (1 - self.DECAY) * distance
        self.deviation += (1 - self.DECAY) * (abs(distance) - self.deviation)
        return line
