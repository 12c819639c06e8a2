"""Figures of the optimizer steps: losses, speed, memory, and losses that stand out."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import psutil
import torch

from d2l_bert.pair_tasks import PairTask, unit


class StepFigures(NamedTuple):
    """
    What one optimizer step did, over all processes.

    Args:
        mlm_loss: nats a masked token.
        pair_loss: nats a pair; 0 without a task of pairs.
        grad_norm: of the gradient, before it was cut to `max_grad_norm`.
        masked_tokens: tokens to predict.
        examples: pairs, or sequences without a task of pairs.
        tokens: real tokens.
        padded_tokens: tokens computed, padding included.
        squared_lengths: the sum over the sequences of their length squared: attention's share of the arithmetic.
        skipped: 1 if the loss or the gradient was not finite and the step was left out, else 0.
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
    Figures of the steps since the last row, and the time that training proper took.

    Losses and the norm are means over the steps that were not skipped; time, tokens and arithmetic are those of all.
    `padding_share` is the share of padding in the tokens computed, `data_wait_share` that of the time in which the
    step waited for its batches, `mfu` the share of the peak that the arithmetic on real tokens comes to, `memory_mb`
    what `used_memory` says on this process, in megabytes, and `skipped_steps`, where there were some, their number.
    """

    def __init__(
        self,
        state: dict,
        task: PairTask | None,
        arithmetic: Callable[[StepFigures], float],
        peak: float,
        device: torch.device,
    ):
        """
        Go on from the totals in a checkpoint's state, or from nothing.

        Args:
            arithmetic: floating-point operations that a step needs (`training_arithmetic`).
            peak: operations a second of all processes together (the sum of their `matmul_peak`).
            device: where the model is.
        """
        self.task, self.unit = task, unit(task)
        self.arithmetic, self.peak, self.device = arithmetic, peak, device
        names = ("train_seconds", "train_wait_seconds", "train_tokens", "train_padded_tokens", f"train_{self.unit}")
        # The last is what the machines could have done in that time; a resumed run may be on others.
        names += ("train_skipped_steps", "train_arithmetic", "train_possible_arithmetic")
        self.totals = {name: state.get(name, 0.0) for name in (*names, "train_memory_mb")}
        used_memory(device)  # the first row's peak starts here
        self.resume_clock()
        self.steps, self.waited = [], 0.0

    def waiting(self, batches: Iterable) -> Iterator:
        """Pass batches on, and keep the time that they were waited for."""
        batches = iter(batches)
        while True:
            start = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.monotonic() - start
            yield batch

    def add(self, figures: StepFigures) -> None:
        """Take in one step."""
        self.steps.append(figures)

    def row(self, learning_rate: float, steps_left: int) -> dict[str, float]:
        """The figures of a row of the log, all finite; without losses if every step was skipped. The next row starts
        from here."""
        seconds = time.monotonic() - self.since
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
        self.resume_clock()
        return row

    def _losses(self):
        taken = [step for step in self.steps if not step.skipped]
        if not taken:
            return {}
        mlm_loss, pair_loss, norm = (
            statistics.fmean(getattr(step, name) for step in taken) for name in ("mlm_loss", "pair_loss", "grad_norm")
        )
        pair_figure = {f"{self.task.key}_loss": pair_loss} if self.task else {}
        return {"loss": mlm_loss + pair_loss, "mlm_loss": mlm_loss, **pair_figure, "grad_norm": norm}

    def speed(self) -> dict[str, float]:
        """Over the whole run: seconds, pairs (or sequences) and real tokens a second, what was lost, the share of the
        peak, steps skipped, and the most memory of any row."""
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

    def resume_clock(self) -> None:
        """Training goes on from here: what came before, an evaluation or a save, does not count."""
        self.since = time.monotonic()


def used_memory(device: torch.device) -> float:
    """
    Memory of this process in megabytes (10^6 bytes).

    On a GPU the most that was allocated there since the last call; elsewhere what the process itself holds now: its
    resident memory without the pages shared with others or with files, such as memory-mapped tokens, where the system
    tells them apart (Linux).
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most / 1e6
    held = psutil.Process().memory_info()
    return (held.rss - getattr(held, "shared", 0)) / 1e6


class SpikeWatch:
    """
    Says when a step's loss stands far above those before it: the sign of a rate that is too high, or of broken text.

    The mean and the mean absolute deviation of the loss run along with it. In 600 steps of the recipe `tiny`, its
    change of length included, no loss stood more than 2.6 deviations above the mean; of normally distributed noise,
    ten deviations are eight standard deviations.
    """

    DECAY = 0.98  # a memory of some 50 steps
    QUIET_STEPS = 50  # for so long, at the start and after a spike, mean and deviation are not known well enough
    FAR = 10  # deviations

    def __init__(self, state: dict | None = None):
        """Go on from what `state` returned, or from nothing."""
        state = state or {"mean": None, "deviation": 0.0, "quiet": self.QUIET_STEPS}
        self.mean, self.deviation, self.quiet = state["mean"], state["deviation"], state["quiet"]

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps, as JSON: with it a resumed run warns where one that was never stopped does."""
        return {"mean": self.mean, "deviation": self.deviation, "quiet": self.quiet}

    def rest(self) -> None:
        """Be quiet for a while: from here on losses are of another kind."""
        self.quiet = self.QUIET_STEPS

    def see(self, step: int, loss: float) -> str | None:
        """
        Take in a step's loss; returns a line about it if it stands out.

        A loss that is not finite is passed over: its step is skipped, and that is said elsewhere.
        """
        if not math.isfinite(loss):
            return None
        mean = loss if self.mean is None else self.mean
        distance = loss - mean
        spike = self.quiet == 0 and distance > self.FAR * self.deviation
        line = None
        if spike:
            line = (
                f"step {step}: the loss jumped to {loss:.3f} from about {mean:.3f}, where {self.deviation:.3f} up or "
                f"down is usual; if it does not come back, start again with a lower learning_rate"
            )
        self.quiet = self.QUIET_STEPS if spike else max(0, self.quiet - 1)
        self.mean = mean + (1 - self.DECAY) * distance
        self.deviation += (1 - self.DECAY) * (abs(distance) - self.deviation)
        return line
