"""Signals to the processes of a run: it ends after its step with a checkpoint, and resumes to the same weights."""

import itertools
import os
import re
import signal
import time

import processes
import pytest
from interrupted_runs import LONG, rows

from d2l_bert.__main__ import main
from d2l_bert.training.pretrain import StopSignals


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def start(command, tmp_path):
    """Start a run of slow steps in `count` processes, and wait for `step`. All processes are killed after the test."""
    launched = []

    def started(*options, count=1, step=13, dawdle=(1, 0.05)):
        arguments = command(tmp_path / "model", *LONG, *options)
        launched.extend(processes.launch(arguments, tmp_path / "said.txt", count, dawdle))
        wait_for_step(tmp_path / "said.txt", step, lambda: launched[0].is_alive())
        return launched

    yield started
    for process in launched:
        process.kill()
        process.join()


def wait_for_step(said, step, alive):
    end = time.monotonic() + 90
    while step not in steps_in(said):
        assert alive() and time.monotonic() < end, said.read_text()
        time.sleep(0.01)


def steps_in(said):
    return [int(step) for step in re.findall(r"(?m)^step +(\d+)/40 ", said.read_text())]


@pytest.mark.parametrize("question", (3, 4, 7, 11))
def test_whenever_a_signal_comes_the_last_step_taken_is_saved(command, monkeypatch, tmp_path, question):
    """The signal comes right before the loop asks for the n-th time whether a signal has come."""
    asked = itertools.count(1)

    def wanted(stop):
        if next(asked) >= question:
            stop.agreed_signal = signal.SIGTERM
        return bool(stop.agreed_signal)

    monkeypatch.setattr(StopSignals, "should_stop", wanted)
    with pytest.raises(SystemExit) as stopped:
        main(command(tmp_path, *LONG))
    assert stopped.value.code == 143
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name == f"checkpoint-{rows(tmp_path)[-1]['step']}"


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_the_step(start, tmp_path):
    (process,) = start(step=12, dawdle=(13, 60.0))
    process.join(2)  # until it is within its slow step: between two steps one signal ends it at once
    os.kill(process.pid, signal.SIGINT)
    process.join(0.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(5)
    # By `sys.exit`, or by the signal, which a shell also shows as 130.
    assert process.exitcode in (130, -signal.SIGINT)
    assert {path.name for path in (tmp_path / "model").glob("*checkpoint*")} == {"checkpoint-10"}
