"""OpenMP's threads sleep early at barriers while other programs take their cores, unless the user says otherwise."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from d2l_bert.training import openmp
from d2l_bert.training.openmp import (
    FEW,
    MANY,
    QUIET_MEASUREMENTS,
    WAIT_VARIABLES,
    Waits,
    is_supported,
    waited_seconds,
)


has_waits = pytest.mark.skipif(
    not openmp.openmp_libraries() or waited_seconds() is None, reason="not GNU's OpenMP, or waits are not counted"
)


@pytest.fixture
def supported(monkeypatch):
    """A machine where waits can be adapted."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(openmp, "openmp_libraries", lambda: ["/libgomp.so.1"])
    monkeypatch.setattr(openmp, "waited_seconds", lambda: 0.0)
    assert is_supported({}) and is_supported({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": ""})


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_users_own_choice_stays(chosen, supported, monkeypatch):
    assert not is_supported(chosen)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with openmp.short_waits() as waits:
        assert waits is None


def test_waits_are_short_while_threads_wait_for_cores(monkeypatch):
    teams = []
    monkeypatch.setattr(openmp, "IdleTeam", lambda: teams.append(Team()) or teams[-1])
    waits = Waits()

    def states(*measurements):
        return [waits.see(waiting) or waits.are_short for waiting in measurements]

    middle = (FEW + MANY) / 2
    assert states(0.0, middle, 2 * MANY) == [False, False, True]
    assert states(2 * MANY, middle, *[0.0] * (QUIET_MEASUREMENTS - 1), middle) == [True] * (3 + QUIET_MEASUREMENTS - 1)
    assert states(*[0.0] * QUIET_MEASUREMENTS) == [True] * (QUIET_MEASUREMENTS - 1) + [False]
    assert states(0.0, 2 * MANY) == [False, True]
    assert [team.ended for team in teams] == [True, False]


class Team:
    ended = False

    def end(self):
        self.ended = True


def test_the_block_measures_and_leaves_no_thread(supported, monkeypatch):
    """Each measurement finds that a thread has waited for as long as the measurement took."""
    measured, waited = threading.Semaphore(0), iter(range(10_000))
    monkeypatch.setattr(openmp, "IdleTeam", Team)
    monkeypatch.setattr(openmp, "SECONDS", 0.001)
    monkeypatch.setattr(openmp, "waited_seconds", lambda: measured.release() or float(next(waited)))
    before = threading.active_count()
    with openmp.short_waits() as waits:
        for _ in range(6):  # `is_supported` and the start of the thread measure, too
            measured.acquire(timeout=20)
        assert waits.are_short
    assert not waits.are_short and threading.active_count() == before


def threads():
    """The numbers of the threads of this process."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


BESIDE_BUSY_PROGRAMS = """
import json, subprocess, sys, time
import torch
from d2l_bert.training.openmp import short_waits

torch.set_num_threads(2)
numbers = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))

def work_until(reached, seconds=20):
    end = time.monotonic() + seconds
    while True:
        for _ in range(20):
            total = torch.tanh(numbers).sum().item()
        if reached() or time.monotonic() > end:
            return total

with short_waits() as waits:
    totals = [work_until(lambda: False, 0.5)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    totals.append(work_until(lambda: waits.are_short))
    were_short = waits.are_short
    for process in busy:
        process.kill()
    assert were_short
totals.append(work_until(lambda: False, 0.5))
print(json.dumps([waits.are_short, len(set(totals))]))
"""


@has_waits
@pytest.mark.slow
def test_waits_are_short_beside_other_programs_and_results_stay_the_same():
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{0, 1}})\n{BESIDE_BUSY_PROGRAMS}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, 1]
