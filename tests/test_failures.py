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

    def wait_for(self, words, seconds=60, rank=0):
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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.slow
def test_an_error_in_a_loader_worker_ends_the_run_with_one_line(start, tmp_path, method):
    run = start("refusal in a worker", "--dataloader_num_workers=1", START_METHOD=method)
    run.wait_for(" error: ")
    assert run.codes(SOON) == [2]
    assert run.errors() == ["d2l-bert pretrain: error: the rope is too short; take a longer one"]
    assert "Traceback" not in run.text()


@pytest.mark.slow
def test_a_user_error_in_one_of_several_workers_is_shown_unchanged(start):
    run = start("refusal in a worker", "--dataloader_num_workers=2")
    run.wait_for(" error: ")
    assert run.codes(SOON) == [2]
    assert run.errors() == ["d2l-bert pretrain: error: the rope is too short; take a longer one"]
    assert "Traceback" not in run.text() and "step 15/40" in run.text()


@pytest.mark.slow
def test_an_error_in_the_worker_of_one_rank_ends_both_ranks(start):
    run = start("refusal in a worker", "--dataloader_num_workers=1", processes=2, FAULTY_RANK="1")
    run.wait_for(" error: ", rank=1)
    assert run.codes(SOON) == [2, 2]
    assert run.errors(1) == ["d2l-bert pretrain: error: process 1: the rope is too short; take a longer one"]
    assert "another process of this run is gone" in run.errors(0)[0]


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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_run_stopped_by_a_signal_does_not_wait_for_a_step_in_preparation(start, tmp_path, workers, number, code):
    run = start("endless worker", f"--dataloader_num_workers={workers}")
    run.wait_for(r"step 15/40")
    os.killpg(run.processes[0].pid, number)
    assert run.codes(SOON) == [code]
    assert (tmp_path / "model" / "checkpoint-15").is_dir() and "checkpoint-15 is saved" in run.text()


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


@pytest.mark.slow
def test_a_user_error_on_one_rank_is_shown_by_that_rank(start):
    run = start("refusal", processes=2, FAULTY_RANK="1")
    run.wait_for(" error: ", rank=1)
    assert run.codes(SOON) == [2, 2]
    assert run.errors(1) == ["d2l-bert pretrain: error: process 1: the rope is too short; take a longer one"]


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
def test_a_file_missing_inside_a_step_is_a_bug_with_a_traceback(start):
    """Only errors of space, permission, memory or network are for the user to fix, and are shown in one line."""
    run = start("missing file")
    run.wait_for("this is a bug")
    assert run.codes(SOON) == [1] and run.errors() == []
    assert "FileNotFoundError: [Errno 2]" in run.text() and "in miss_a_file" in run.text()
    assert "CONTRIBUTING.md" in run.text().splitlines()[-1]


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


@pytest.mark.parametrize(
    "fault, options, said",
    [
        ("out of memory", [], "out of memory; lower --micro_batch_size, or give --gradient_checkpointing"),
        (
            "out of memory at once",
            [],
            "out of memory with a single pair; give --gradient_checkpointing, lower --max_seq",
        ),
    ],
)
@pytest.mark.slow
def test_out_of_memory_advises_no_automatic_micro_batch_size_if_that_was_used(start, fault, options, said):
    run = start(fault, "--micro_batch_size=auto", *options)
    assert run.codes(60) == [2]
    (line,) = run.errors()
    assert re.search(f"error: {said}", line) and "(auto)" not in line
