"""`benchmarks.neighbours`: our training beside busy programs."""

import argparse
import functools
import io
import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from printed import numbers

from benchmarks import neighbours, peers
from d2l_bert import openmp
from d2l_bert.openmp import wait_settings


pytestmark = pytest.mark.usefixtures("one_thread")


class TimedContestant:
    """A contestant without a process: its speed depends on its setting and on the busy processes."""

    # Steps in a turn, by `short_waits`: alone, beside one, beside two
    STEPS = {False: (100, 10, 5), True: (99, 50, 31)}

    def __init__(self, name, task, variables):
        assert variables["OMP_WAIT_POLICY"] == ("ACTIVE" if task["short_waits"] else None)
        self.short_waits, self.description = task["short_waits"], "ours"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, method, file, seconds, untimed_seconds):
        return self.STEPS[self.short_waits][len(Neighbours.there)], 2.0


class Neighbours:
    """The busy processes that run now, without a process."""

    there = []

    def __init__(self, command, start_new_session):
        assert not start_new_session
        self.there.append(self)

    def kill(self):
        self.there.remove(self)

    def wait(self):
        assert self not in self.there


@pytest.fixture
def beside(monkeypatch, capsys):
    """Runs `benchmarks.neighbours` with some options; returns its exit code and the printed lines."""
    monkeypatch.setattr(neighbours, "Contestant", TimedContestant)
    monkeypatch.setattr(neighbours, "subprocess", SimpleNamespace(Popen=Neighbours))
    monkeypatch.setattr(neighbours, "AUTOGROUP", Path("/none"))
    monkeypatch.setattr(neighbours, "SETTLING_SECONDS", 0)
    monkeypatch.setattr(neighbours, "wait_until_quiet", lambda patience: None)
    monkeypatch.setattr(neighbours.OtherCores, "__exit__", lambda self, *_: setattr(self, "cores", next(self.now)))

    def run(*options, others=None):
        monkeypatch.setattr(neighbours.OtherCores, "now", others or itertools.repeat(0.0), raising=False)
        monkeypatch.setattr(sys, "argv", ["neighbours", "--pairs=4", "--max_seq_length=25", *options])
        with pytest.raises(SystemExit) as left:
            neighbours.main()
        assert not Neighbours.there
        return left.value.code, capsys.readouterr().out.splitlines()

    return run


def test_speeds_beside_busy_processes_are_compared_with_the_first_setting_alone(beside):
    code, lines = beside("--settings", "default", "run", "--repetitions=3")
    assert code == 0 and lines[2].endswith("ours; 100 tokens a step")
    shown = [numbers(line) for line in lines if line.startswith(("  default", "  run"))]
    speeds, ratios = [row[0] for row in shown], [row[3] for row in shown]
    assert speeds == [5000, 4950, 500, 2500, 250, 1550] and ratios == [1, 0.99, 0.1, 0.5, 0.05, 0.31]
    assert [line.rpartition(" ")[2] for line in lines if "the goal is" in line] == ["reached"] * 3


def test_a_goal_that_is_missed_is_said_and_is_the_exit_code(beside, monkeypatch):
    monkeypatch.setitem(TimedContestant.STEPS, True, (97, 50, 29))
    code, lines = beside("--settings", "default", "run", "--repetitions=3")
    assert code == 1 and [line.rpartition(" ")[2] for line in lines if "the goal is" in line] == [
        "MISSED",
        "reached",
        "MISSED",
    ]


def test_a_disturbed_turn_is_repeated_and_the_quietest_counts(beside):
    others = iter([0.0, 0.9, 0.3, 0.5, 0.2, 0.05])
    _, lines = beside("--settings", "default", "--repetitions=3", "--neighbours", "--tries=3", others=others)
    assert "cores that other programs used in a turn: 0.05 (0.03 to 0.17), at most 0.30" in lines[-1]
    assert next(others, None) is None


@pytest.mark.parametrize("own_sessions", [False, True])
def test_busy_processes_work_during_a_turn_only(own_sessions):
    with neighbours.busy_processes(2, own_sessions):
        mine = [child for child in psutil.Process().children() if neighbours.BUSY in child.cmdline()]
        time.sleep(0.3)
        assert len(mine) == 2 and all(sum(child.cpu_times()[:2]) > 0 for child in mine)
        sessions = {os.getsid(child.pid) for child in mine}
        assert sessions == ({child.pid for child in mine} if own_sessions else {os.getsid(0)})
    assert not any(child.is_running() for child in mine)


@pytest.mark.parametrize(("text", "priority"), [("/autogroup-12 nice 5\n", 5), ("", 0), (None, 0)])
def test_a_kernel_without_groups_of_sessions_has_no_priority(text, priority, monkeypatch, tmp_path):
    file = tmp_path / "autogroup"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(neighbours, "AUTOGROUP", file)
    assert neighbours.autogroup_priority() == priority


@pytest.mark.skipif(not wait_settings({}), reason="not GNU's OpenMP")
def test_a_setting_names_variables_of_openmp():
    assert neighbours.setting("run")[1]["OMP_WAIT_POLICY"] == "ACTIVE"
    assert set(neighbours.setting("default")[1].values()) == {None}
    name, variables = neighbours.setting("GOMP_SPINCOUNT=30,OMP_NUM_THREADS=1")
    assert name == "GOMP_SPINCOUNT=30,OMP_NUM_THREADS=1" and variables["OMP_WAIT_POLICY"] is None
    assert (variables["GOMP_SPINCOUNT"], variables["OMP_NUM_THREADS"]) == ("30", "1")
    with pytest.raises(argparse.ArgumentTypeError, match="'OMP_THREADS': give default"):
        neighbours.setting("OMP_THREADS=1")


def test_a_turn_lasts_some_seconds_and_its_first_steps_are_not_timed(monkeypatch, tmp_path):
    """A step takes a quarter of a second, the first one of a turn a whole second."""
    clock, steps = [0.0], []

    def step(batches, rate):
        clock[0] += 0.25 if steps else 1.0
        steps.append(batches)

    file = peers.write_step([{"input_ids": torch.ones(2, 3)}], tmp_path / "step")
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    worker = SimpleNamespace(
        contestant=SimpleNamespace(batches=len, step=step), synchronize=lambda: None, device="cpu"
    )
    worker._repeat = functools.partial(peers.ContestantProcess._repeat, worker)
    assert peers.ContestantProcess.steps_for(worker, file, 0.6, 1.2) == (3, 0.75) and steps == [1] * 5
    assert peers.ContestantProcess.steps_for(worker, file, 0.0, 0.0) == (1, 0.25), "one step at least"


@pytest.mark.skipif(not wait_settings({}), reason="not GNU's OpenMP")
def test_a_contestant_computes_with_the_variables_of_its_setting(monkeypatch):
    environments = []

    def start(command, env, **_):
        environments.append(env.get("GOMP_SPINCOUNT"))
        return SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO('"ready"\n'))

    monkeypatch.setattr(peers.subprocess, "Popen", start)
    for name in openmp.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, variables in (("ours", None), ("stock", None), ("ours", {}), ("ours", {"GOMP_SPINCOUNT": "5"})):
        assert peers.Contestant(name, {"device": "cpu"}, variables=variables).description == "ready"
    monkeypatch.setenv("GOMP_SPINCOUNT", "34")
    peers.Contestant("ours", {"device": "cpu"})
    peers.Contestant("ours", {"device": "cpu"}, variables={"GOMP_SPINCOUNT": None})
    assert environments == ["300000", None, None, "5", "34", None]
