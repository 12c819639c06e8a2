"""Signals that stop a run: SIGTERM and Ctrl-C end the training loop after its step, in all processes at once."""

import os
import signal
import threading

from accelerate import Accelerator

from d2l_bert.training.processes import largest


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
        self.handlers_before = {}
        # Python allows signal handlers in the main thread only. In another thread no signal is caught.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:
                    self.handlers_before[number] = handler
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """
        Whether any process has received a signal.

        Every process must call this at the same point of the run; all get the same answer.
        """
        if not self.agreed_signal:
            self.agreed_signal = largest(self.received_signal)  # 0 in a process without a signal
        return bool(self.agreed_signal)

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
