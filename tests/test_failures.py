"""Errors in one process of a run: all processes end within seconds, with the right message and exit code."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL
from promises.driving import end, error_lines, start, wait_for

from d2l_bert.__main__ import main


FAULTS = Path(__file__).with_name("faults.py")
RUN = ["--max_steps=40", "--mixed_precision=no", "--logging_steps=1", "--eval_steps=40", "--save_steps=10", *SMALL]
SOON = 10.0  # seconds from an error to the end of every process


@pytest.fixture
def hang(books, tmp_path):
    """Start a run with a fault; returns its ranks, and the files of what they say. All are killed after the test."""
    started = []

    def run(fault, *options, processes=1, **environment):
        words = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'model'}", *RUN, *options]
        how = {"environment": {"FAULT": fault, **environment}, "processes": processes, "said": tmp_path / "said.txt"}
        started.extend(start(words, script=FAULTS, **how))
        return started, [tmp_path / "said.txt", tmp_path / "said.txt.1"]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def workers_of(hang, *options, **environment):
    """A run that waits for a batch that takes ten minutes: its process, what it says, and its loader's processes."""
    (run,), (said, _) = hang("endless step", *options, **environment)
    wait_for(lambda: "step 15/40" in said.read_text(), [run])
    return run, said, psutil.Process(run.pid).children(recursive=True)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_in_one_line(hang):
    run, said, (worker,) = workers_of(hang, "--dataloader_num_workers=1")
    worker.kill()
    assert run.wait(SOON) == 2
    (line,) = error_lines(said.read_text())
    assert "a process that makes batches has ended" in line


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.slow
def test_the_workers_of_a_killed_run_end_too(hang, method):
    run, _, workers = workers_of(hang, "--dataloader_num_workers=3", START_METHOD=method)
    assert len(workers) >= 3
    run.kill()
    limit = time.monotonic() + SOON
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            while worker.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < limit, worker
                time.sleep(0.05)


@pytest.mark.parametrize("told", [[0, 1], [0], [1]], ids=["both are told", "rank 0 is told", "rank 1 is told"])
@pytest.mark.slow
def test_sigterm_ends_ranks_that_wait_for_each_other_within_seconds(hang, told):
    """Rank 1 waits for a message that is never sent, rank 0 waits for rank 1. Python handles no signal meanwhile."""
    ranks, said = hang("stuck before the first step", processes=2)
    wait_for(lambda: "never sent" in said[1].read_text(), ranks)
    time.sleep(1)  # until both ranks wait
    for rank in told:
        ranks[rank].send_signal(signal.SIGTERM)
    assert end(ranks, 8) == [-signal.SIGTERM if rank in told else 2 for rank in (0, 1)]
    assert not any("Traceback" in file.read_text() for file in said)


# ---------------------------------------------------------------------------------------------------------------------
# Bugs and memory


def break_at(place, error, monkeypatch):
    """Raise an error in a function, instead of what it does."""

    def stumble(*arguments, **named):
        raise error

    monkeypatch.setattr(f"d2l_bert.{place}", stumble)


def test_a_bug_is_shown_with_its_traceback_and_where_to_report_it(books, tmp_path, monkeypatch, capsys):
    break_at("training.optimizer.Learner.take_step", ValueError("operands could not be broadcast"), monkeypatch)
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *RUN]) == 1
    said = capsys.readouterr().err
    assert "in stumble" in said and "this is a bug" in said and "CONTRIBUTING.md" in said.splitlines()[-1]


@pytest.mark.parametrize("reader", ["read_sources", "count_words", "prepare_tokens", ""])
def test_out_of_memory_is_one_line_and_in_a_step_advises_smaller_ones(books, tmp_path, fails, monkeypatch, reader):
    """Not while the text is read."""
    text = tmp_path / "text.txt"  # not in the cache yet
    text.write_text("\n\n".join(file.read_text().replace("nobody", reader) for file in sorted(books.iterdir())))
    if reader:
        error = MemoryError("Unable to allocate 8.00 TiB for an array")
        break_at(f"tokenization.prepare.{reader}", error, monkeypatch)
    else:
        error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 B.")
        break_at("training.optimizer.Learner.take_step", error, monkeypatch)
    line = fails("pretrain", "--corpus", text, "--documents=blank_line", "--output_dir", tmp_path / "out", *RUN)
    assert "out of memory" in line
    assert ("--micro_batch_size" in line and "--gradient_checkpointing" in line) == (not reader)
