"""`benchmarks.whole_run`: a run stands still while the bare step works, goes on, and ends with the benchmark."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import throughput, whole_run


pytestmark = pytest.mark.usefixtures("one_thread")

COUNTING = """
import json, os, sys, time
from pathlib import Path
folder, start = Path(sys.argv[1]), time.monotonic()
(folder / "pid").write_text(str(os.getpid()))
with (folder / "counted").open("ab", 0) as counted:
    (folder / "training_log.jsonl").write_text(json.dumps({"step": 1, "tokens_per_second": 1}) + "\\n")
    while not (folder / "enough").exists() and time.monotonic() < start + 60:
        counted.write(b".")
"""


def test_a_run_stands_still_while_the_bare_step_works_and_goes_on_afterwards(tmp_path, monkeypatch):
    """The run is a process that counts as fast as it can until the bare step has worked twice."""
    seen, counted = [], tmp_path / "counted"

    def work(seconds):
        before = counted.stat().st_size
        time.sleep(seconds)
        seen.append((before, counted.stat().st_size))
        if len(seen) == 2:
            (tmp_path / "enough").touch()
        return 2 * seconds  # the run may work for this long now

    monkeypatch.setattr(whole_run, "TURN", 0.2)
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    stopped = whole_run.train_in_turns(command, "cpu", tmp_path, 4, SimpleNamespace(work=work))
    (first, still), (later, still_then) = seen
    assert first == still < later == still_then
    assert 0.4 <= stopped < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ending_the_benchmark_also_ends_a_run_that_is_stopped(number, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_run, "TURN", 0.2)
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    bare = SimpleNamespace(work=lambda seconds: signal.raise_signal(number))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program started in the background may ignore SIGINT
    try:
        throughput.exit_on_signals()
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            whole_run.train_in_turns(command, "cpu", tmp_path, 4, bare)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", "give --end_to_end more"),
        ("raise SystemExit('first\\nno text')", "exit code 1: no text$"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: $"),
    ],
)
def test_a_run_that_fails_or_ends_too_soon_is_refused(program, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(whole_run, "TURN", 0.01)
    with pytest.raises(ValueError, match=reason):
        whole_run.train_in_turns([sys.executable, "-c", program], "cpu", tmp_path, 4, None)
