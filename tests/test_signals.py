"""Signals to the processes of a run: it ends after its step with a checkpoint, and resumes to the same weights."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import processes
import psutil
import pytest
from interrupted_runs import LONG, RESUME, rows, weights

from d2l_bert.cli import main
from d2l_bert.training.interruption import StopSignals


pytestmark = pytest.mark.usefixtures("one_thread")


def run_through(arguments, said, count):
    """Run the command to its end in `count` processes."""
    launched = processes.launch(arguments, said, count)
    finish(launched)
    assert [process.exitcode for process in launched] == [0] * count, said.read_text()


def finish(launched):
    """Wait for the end of all processes; fails if one takes too long."""
    end = time.monotonic() + 60
    for process in launched:
        process.join(max(0, end - time.monotonic()))
    late = [process for process in launched if process.is_alive()]
    for process in late:
        process.kill()
    assert not late


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    """The weights after 40 steps, by the number of processes: 1 and 2."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for count in (1, 2):
        run_through(command(folder / f"{count}", *LONG), folder / f"{count}.txt", count)
    return {count: weights(folder / f"{count}") for count in (1, 2)}


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


def check_stopped(folder, said):
    """The run stopped between two regular saves, saved its last step, and left no unfinished checkpoint.

    Returns that step.
    """
    stop = max(steps_in(said))
    assert 13 <= stop < 20, said.read_text()
    saved = {path.name for path in folder.iterdir() if "checkpoint" in path.name}
    assert saved == {"checkpoint-10", f"checkpoint-{stop}"}
    assert not (folder / "model.safetensors").exists() and rows(folder)[-1]["step"] == stop
    return stop


def check_resumed(command, folder, said, stop, count, expected):
    """Resume the run after step `stop`; it ends with the weights and the log of a run that never stopped."""
    run_through(command(folder, *LONG, RESUME), said, count)
    assert steps_in(said) == list(range(stop + 1, 41))
    assert weights(folder) == expected
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, 41))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_to_the_loader_worker_too_does_no_harm(command, start, undisturbed, tmp_path, number, code):
    """Ctrl-C in a terminal and SIGTERM by a scheduler go to the whole process group."""
    (process,) = start("--dataloader_num_workers=1")
    os.killpg(process.pid, number)
    finish([process])
    assert process.exitcode == code, (tmp_path / "said.txt").read_text()
    stop = check_stopped(tmp_path / "model", tmp_path / "said.txt")
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 1, undisturbed[1])


@pytest.mark.parametrize("question", range(3, 12))
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


@pytest.mark.parametrize("told", ["one process", "the launcher"])
@pytest.mark.slow
def test_a_signal_under_torchrun_reaches_all_ranks(command, undisturbed, tmp_path, told):
    said = tmp_path / "said.txt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [processes.__file__, "1", "0.05", *command(tmp_path / "model", *LONG)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with said.open("w") as file:
        agent = subprocess.Popen([*launcher, *script], env=environment, stdout=file, stderr=file)
    try:
        wait_for_step(said, 13, lambda: agent.poll() is None)
        workers = psutil.Process(agent.pid).children()
        assert len(workers) == 2
        # One of the two processes. Its rank is not known, and must make no difference.
        os.kill(workers[1].pid if told == "one process" else agent.pid, signal.SIGTERM)
        assert agent.wait(60) != 0
        assert not psutil.wait_procs(workers, timeout=5)[1]
    finally:
        for process in [*psutil.Process(agent.pid).children(), agent] if agent.poll() is None else []:
            process.kill()
    stop = check_stopped(tmp_path / "model", said)
    check_resumed(command, tmp_path / "model", tmp_path / "again.txt", stop, 2, undisturbed[2])
