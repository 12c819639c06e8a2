"""What ends a run before its time: a signal, a loss that is no number any more, memory that is gone."""

import contextlib
import itertools
import logging
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from d2l_bert.errors import GO_ON, UserError, is_out_of_memory
from d2l_bert.training.batching import micro_batch_pairs
from d2l_bert.training.checkpoint import checkpoints
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.meter import StepFigures


logger = logging.getLogger(__name__)


# A step or two go wrong in good runs too; after ten the weights themselves are to blame.
MOST_SKIPPED_IN_A_ROW = 10


class StopSignals:
    """
    SIGTERM and Ctrl-C as a wish to stop: within the block the running step is finished, and a checkpoint saved.

    A second Ctrl-C ends the process at once, whatever it is doing. A signal that was ignored before stays ignored:
    a shell without job control starts its background commands so, for Ctrl-C to end the foreground alone.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.received = 0  # the number of the signal
        self.agreed = 0

    def __enter__(self):
        # Python lets only the main thread have handlers; elsewhere whoever started the thread has to stop it.
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.before = {number: signal.getsignal(number) for number in numbers}
        self.before = {number: handler for number, handler in self.before.items() if handler is not signal.SIG_IGN}
        for number in self.before:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def wanted(self) -> bool:
        """Whether any process was told to stop. All must ask at the same point, and get the same answer."""
        if not self.agreed:
            vote = torch.tensor(float(self.received), device=self.accelerator.device)
            # The sum would be no signal's number if several processes had got one.
            votes = self.accelerator.gather(vote) if self.accelerator.num_processes > 1 else vote
            self.agreed = int(votes.max())
        return bool(self.agreed)

    def is_told(self) -> bool:
        """Whether this process has got a signal, or all have agreed to stop."""
        return bool(self.received or self.agreed)

    def until_wanted(self, items: Iterable) -> Iterator:
        """Pass items on, as many in every process, until any process was told to stop."""
        return itertools.takewhile(lambda _: not self.wanted(), items)

    def exit(self) -> SystemExit:
        """What to raise to leave with the signal's exit code: 143 for SIGTERM, 130 for Ctrl-C."""
        return SystemExit(128 + self.agreed)

    def _receive(self, number, frame):
        again = number == signal.SIGINT
        if self.accelerator.is_main_process and not self.received:
            leaving = "; again, it leaves at once, without" if again else ""
            logger.warning(f"{name_of(number)}: finishing the step and saving{leaving}")
        self.received = number
        if again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def name_of(number: int) -> str:
    """What a person calls a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class NonFiniteGuard:
    """
    Ends a run whose steps are left out one after the other, because their loss or gradient is not finite.

    A single such step does no harm; many in a row mean that training has diverged.

    Args:
        state: a checkpoint's, to go on counting.
    """

    def __init__(self, folder: Path, state: dict):
        self.folder, self.in_a_row = folder, state.get("skipped_in_a_row", 0)

    def state(self) -> dict:
        """What a checkpoint keeps of it."""
        return {"skipped_in_a_row": self.in_a_row}

    def check(self, step: int, figures: StepFigures) -> None:
        """
        Take in one step.

        Raises:
            UserError: it was the last of `MOST_SKIPPED_IN_A_ROW` that were left out.
        """
        self.in_a_row = self.in_a_row + 1 if figures.skipped else 0
        if self.in_a_row == MOST_SKIPPED_IN_A_ROW:
            saved = checkpoints(self.folder)
            mend = "start again with a lower --learning_rate or --max_grad_norm"
            if saved:
                mend += f", or from the last good weights, with a lower rate, by --init_from {saved[-1]}"
            raise UserError(
                f"training has diverged: loss or gradient was not finite in {self.in_a_row} steps in a row, up to "
                f"step {step} ({non_finite(figures)}); {mend}"
            )


def non_finite(figures: StepFigures) -> str:
    """Why a step was left out."""
    loss = figures.mlm_loss + figures.pair_loss
    return f"loss {loss:g}, gradient norm {figures.grad_norm:g}"


@contextlib.contextmanager
def failures_explained(run: PretrainConfig, micro_batch_was_found: bool = False):
    """
    Say which option to turn when memory runs out in the block, and what has happened when another process is gone.

    Args:
        micro_batch_was_found: whether `run.micro_batch_size` is what `auto` found; then `auto` is no advice.

    Raises:
        UserError: out of memory, or a process of those that train together is gone.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        is_of_peers = isinstance(error, torch.distributed.DistError) or bool(
            re.search("gloo|NCCL|Connection .* by peer", reason)
        )
        if is_of_peers and torch.distributed.is_initialized():
            raise UserError(
                f"another process of this run is gone, or cannot be reached ({without_source_lines(reason):.80}): "
                f"look at what it said; {GO_ON}"
            ) from None
        if not is_out_of_memory(error):
            raise
        tried = "" if run.micro_batch_size == "auto" else f" with micro-batches of {micro_batch_pairs(run)} pairs"
        helps = "lower --micro_batch_size, or let it be found (auto)"
        if micro_batch_was_found or not tried:
            helps = "give --micro_batch_size a number below the one that auto found"
        raise UserError(
            f"out of memory{tried}; {helps}, or give --gradient_checkpointing: the steps stay the same; {GO_ON}"
        ) from None


def without_source_lines(reason: str) -> str:
    """What gloo or NCCL says, without the places in their C++ code."""
    return re.sub(r"\[?[^\s\[]*\.(cc|cpp|cu|h|hpp):\d+[\],]?\s*", "", reason)
