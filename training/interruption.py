"""Early ends of a run: signals, diverged training, out of memory, a lost process; each with its message."""

import contextlib
import itertools
import logging
import os
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
from d2l_bert.training.meter import StepStats


logger = logging.getLogger(__name__)


# Healthy runs skip single steps too. After ten skipped steps in a row the weights themselves are bad.
MAX_SKIPPED_IN_A_ROW = 10


class StopSignals:
    """
    A context manager that catches SIGTERM and Ctrl-C, so that the training loop can finish its step, save a
    checkpoint and exit.

    A second Ctrl-C ends the process at once. A signal that the process ignored before the block stays ignored: a shell
    without job control starts background commands with SIGINT ignored, so that Ctrl-C ends the foreground command
    only.

    Attributes:
        received_signal: the number of the last signal that this process received; 0 if there was none.
        agreed_signal: the signal on which all processes have agreed to stop; 0 while the run goes on.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.received_signal = 0
        self.agreed_signal = 0

    def __enter__(self):
        # Python allows signal handlers in the main thread only. In another thread no signal is caught.
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        handlers = {number: signal.getsignal(number) for number in numbers}
        self.previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        for number in self.previous:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """
        Whether any process has received a signal.

        Every process must call this at the same point of the run; all get the same answer.
        """
        if not self.agreed_signal:
            vote = torch.tensor(float(self.received_signal), device=self.accelerator.device)
            # The maximum is the number of a signal; a sum over several processes is not.
            votes = self.accelerator.gather(vote) if self.accelerator.num_processes > 1 else vote
            self.agreed_signal = int(votes.max())
        return bool(self.agreed_signal)

    def is_stopping(self) -> bool:
        """Whether this process has received a signal, or all have agreed to stop; without communication."""
        return bool(self.received_signal or self.agreed_signal)

    def until_stop(self, items: Iterable) -> Iterator:
        """Yield items until any process receives a signal; the same number of items in every process."""
        return itertools.takewhile(lambda _: not self.should_stop(), items)

    def exit(self) -> SystemExit:
        """The exception that ends the process with the signal's exit code: 143 for SIGTERM, 130 for Ctrl-C."""
        return SystemExit(128 + self.agreed_signal)

    def _receive(self, number, frame):
        is_ctrl_c = number == signal.SIGINT
        if self.accelerator.is_main_process and not self.received_signal:
            hint = "; a second Ctrl-C ends the run at once, without saving" if is_ctrl_c else ""
            # Not by logging: a handler may run inside another write to stderr, which cannot be entered twice.
            os.write(2, f"{signal_name(number)}: finishing the step and saving{hint}\n".encode())
        self.received_signal = number
        if is_ctrl_c:  # the next Ctrl-C ends the process
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """The name of a signal in messages: `Ctrl-C` for SIGINT, else the signal's own name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class NonFiniteGuard:
    """
    Ends a run in which `MAX_SKIPPED_IN_A_ROW` steps in a row were skipped: training has diverged.

    A step is skipped when its loss or gradient is not finite. A single skipped step does no harm.

    Args:
        folder: the run's output folder, whose last checkpoint the message names.
        state: the state in a checkpoint to resume from, or an empty dict: where the count of skipped steps starts.
    """

    def __init__(self, folder: Path, state: dict):
        self.folder, self.in_a_row = folder, state.get("skipped_in_a_row", 0)

    def state(self) -> dict:
        """The state that a checkpoint keeps."""
        return {"skipped_in_a_row": self.in_a_row}

    def check(self, step: int, step_stats: StepStats) -> None:
        """
        Count a step, skipped or not.

        Raises:
            UserError: this step is the last of `MAX_SKIPPED_IN_A_ROW` skipped steps in a row.
        """
        self.in_a_row = self.in_a_row + 1 if step_stats.skipped else 0
        if self.in_a_row == MAX_SKIPPED_IN_A_ROW:
            saved = checkpoints(self.folder)
            mend = "start again with a lower --learning_rate or --max_grad_norm"
            if saved:
                mend += f", or from the last good weights, with a lower rate, by --init_from {saved[-1]}"
            raise UserError(
                f"training has diverged: loss or gradient was not finite in {self.in_a_row} steps in a row, up to "
                f"step {step} ({non_finite_values(step_stats)}); {mend}"
            )


def non_finite_values(step_stats: StepStats) -> str:
    """The loss and the gradient norm of a skipped step, for a message."""
    loss = step_stats.mlm_loss + step_stats.pair_loss
    return f"loss {loss:g}, gradient norm {step_stats.grad_norm:g}"


@contextlib.contextmanager
def explain_failures(run: PretrainConfig, micro_batch_is_auto: bool = False):
    """
    Turn two kinds of errors in the block into a `UserError` with a hint: out of memory, and a lost process.

    Args:
        micro_batch_is_auto: whether `auto` chose `run.micro_batch_size`; then the hint does not recommend `auto`.

    Raises:
        UserError: memory ran out, or another process of this run has ended or cannot be reached.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        is_lost_process = isinstance(error, torch.distributed.DistError) or bool(
            re.search("gloo|NCCL|Connection .* by peer", reason)
        )
        if is_lost_process and torch.distributed.is_initialized():
            raise UserError(
                f"another process of this run is gone, or cannot be reached ({without_source_lines(reason):.80}): "
                f"read the messages of that process; {GO_ON}"
            ) from None
        if not is_out_of_memory(error):
            raise
        tried = "" if run.micro_batch_size == "auto" else f" with micro-batches of {micro_batch_pairs(run)} pairs"
        hint = "lower --micro_batch_size, or give auto"
        if micro_batch_is_auto or not tried:
            hint = "give --micro_batch_size a number below the one that auto found"
        raise UserError(
            f"out of memory{tried}; {hint}, or give --gradient_checkpointing: the steps stay the same; {GO_ON}"
        ) from None


def without_source_lines(reason: str) -> str:
    """A message of gloo or NCCL without file names and line numbers of C++ code."""
    return re.sub(r"\[?[^\s\[]*\.(cc|cpp|cu|h|hpp):\d+[\],]?\s*", "", reason)
