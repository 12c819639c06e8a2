"""Errors in one process of a run: all processes end within seconds, with the right message and exit code."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL
from processes import free_port


FAULTS = Path(__file__).with_name("faults.py")
SOON = 10.0  # seconds from an error to the end of every process


class Run:
    """
    The command in `processes` ranks. Each rank starts a session, which also holds the processes that the rank starts.
    """

    def __init__(self, folder, options, fault, processes=1, **environment):
        self.said, self.processes = [], []
        port = str(free_port())
        for rank in range(processes):
            self.said.append(folder / f"said-{rank}.txt")
            given = {"FAULT": fault, "OMP_NUM_THREADS": "1", **environment}
            if processes > 1:
                given |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            with self.said[-1].open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(FAULTS), *options],
                        stdout=file,
                        stderr=file,
                        env={**os.environ, **given},
                        start_new_session=True,
                    )
                )

    def text(self, rank=0):
        return self.said[rank].read_text()

    def errors(self, rank=0):
        return [line for line in self.text(rank).splitlines() if "error:" in line]

    def wait_for(self, words, seconds=120, rank=0):
        end = time.monotonic() + seconds
        while not re.search(words, self.text(rank)):
            assert time.monotonic() < end and self.processes[0].poll() is None, self.text(rank)
            time.sleep(0.02)

    def codes(self, seconds):
        """The exit codes of all ranks. Fails if a rank or a process that it started is alive after `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.1, end - time.monotonic()))
        while left := self.left():
            assert time.monotonic() < end, left
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def left(self):
        sessions, left = {process.pid for process in self.processes}, []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process.cmdline())
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return left

    def end(self):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


@pytest.fixture
def start(books, tmp_path):
    """Start a run with a fault; its processes are killed at the end of the test."""
    runs = []

    def started(fault, *options, processes=1, **environment):
        given = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'model'}", "--max_steps=40"]
        given += ["--mixed_precision=no", "--logging_steps=1", "--eval_steps=40", "--save_steps=10", *SMALL, *options]
        runs.append(Run(tmp_path, given, fault, processes, **environment))
        return runs[-1]

    yield started
    for run in runs:
        run.end()


# ---------------------------------------------------------------------------------------------------------------------
# Loader workers


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_in_one_line(start):
    run = start("endless worker", "--dataloader_num_workers=1")
    run.wait_for(r"step 15/40")
    (worker,) = psutil.Process(run.processes[0].pid).children()
    worker.kill()
    assert run.codes(SOON) == [2]
    assert "a process that makes batches has ended" in run.errors()[0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.slow
def test_the_workers_of_a_killed_run_end_too(start, method):
    """The workers are in the middle of a step that takes ten minutes."""
    run = start("endless worker", "--dataloader_num_workers=3", START_METHOD=method)
    run.wait_for(r"step 15/40")
    run.processes[0].kill()
    assert run.codes(SOON) == [-signal.SIGKILL]


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


@pytest.mark.parametrize("told", [[0, 1], [0], [1]], ids=["both are told", "rank 0 is told", "rank 1 is told"])
@pytest.mark.slow
def test_sigterm_ends_ranks_that_wait_for_each_other_within_seconds(start, told):
    """Rank 1 waits for a message that is never sent, rank 0 waits for rank 1. Python handles no signal meanwhile."""
    run = start("stuck before the first step", processes=2, FAULTY_RANK="1")
    run.wait_for("never sent", rank=1)
    time.sleep(1)  # until both ranks wait
    for rank in told:
        run.processes[rank].send_signal(signal.SIGTERM)
    codes = run.codes(8)
    for rank in (0, 1):
        assert codes[rank] == (-signal.SIGTERM if rank in told else 2) and "Traceback" not in run.text(rank)


# ---------------------------------------------------------------------------------------------------------------------
# Bugs and memory


@pytest.mark.slow
def test_a_bug_is_shown_with_its_traceback_and_where_to_report_it(start):
    run = start("bug")
    run.wait_for("this is a bug")
    assert run.codes(SOON) == [1]
    assert "in stumble" in run.text() and "CONTRIBUTING.md" in run.text().splitlines()[-1]


@pytest.mark.slow
def test_out_of_memory_is_one_line(start):
    said, fault, options = (
        "out of memory; lower --micro_batch_size, or give --gradient_checkpointing",
        "out of memory",
        [],
    )
    run = start(fault, *options)
    assert run.codes(60) == [2]
    (line,) = run.errors()
    assert said in line and "Traceback" not in run.text()
