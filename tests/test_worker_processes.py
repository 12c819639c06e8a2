"""Processes that prepare text: their errors, their start, and their end with the process that started them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch

from d2l_bert.messages import UserError
from d2l_bert.tokenization.processes import in_order


def test_an_exception_in_another_process_is_raised_here():
    """An `OSError` of the function does not say that processes cannot be started."""
    with pytest.raises(FileNotFoundError, match="no/such/file") as caught:
        list(in_order(os.stat, ["/", "/no/such/file"], 2))
    traceback.clear_frames(caught.tb)  # frees the loader: ended by the garbage collector, it waits for seconds


def test_the_items_come_in_order_and_the_run_draws_the_same_random_numbers():
    before = torch.get_rng_state()
    assert list(in_order(slow_when_even, list(range(12)), 2)) == list(range(12))
    assert torch.equal(torch.get_rng_state(), before)


def slow_when_even(number):
    time.sleep(0.05 * (number % 2 == 0))
    return number


def test_processes_that_cannot_be_started_are_said_in_one_line(monkeypatch):
    def refuse(process):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    with pytest.raises(UserError, match="cannot be started .*lower --preprocessing_num_workers"):
        list(in_order(int, "12", 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_other_processes_end_with_the_one_that_started_them(number):
    code = (
        "import time; from d2l_bert.tokenization.processes import in_order\n"
        # The other processes wait, for work or until a result of a megabyte is taken.
        "for number, _ in enumerate(in_order(bytes, [10**6] * 1000, 2)):\n"
        "    print(number, flush=True); time.sleep(0.5)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        # The other processes hold stdout open, so this returns when all of them are gone.
        _, errors = process.communicate(timeout=30)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    # After an interrupt some libraries change Python's own exit code, which is that of the signal else.
    assert process.returncode == -number or number == signal.SIGINT
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == (number == signal.SIGINT), errors
