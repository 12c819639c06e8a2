"""Other programs on the machine: their use of the cores, and the one warning to a run that they slow down."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL

from d2l_bert.cli import main
from d2l_bert.training import other_programs
from d2l_bert.training.other_programs import OtherPrograms, SlowdownWatch, busy_seconds, own_seconds
from d2l_bert.training.tracking import TrainingLog, kind_of


TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY = "import time; start = time.process_time()\nwhile time.process_time() < start + 0.5: pass"


def watch(*windows, cores=2, threads=2):
    """The lines of a watch that sees windows of 100 steps, each given as (cores of other programs, speed)."""
    watch = SlowdownWatch(cores, threads)
    return [watch.see(100, others, speed) for others, speed in windows]


def test_steps_that_became_slower_beside_other_programs_are_told_once():
    *quiet, line, again = watch((0.1, 0.10), (0.3, 0.12), (0.0, 0.11), (1.04, 0.044), (2.0, 0.01))
    assert quiet == [None] * 3 and again is None
    assert line == (
        "other programs used 1.0 of 2 cores during the last 100 steps, and steps took 2.5 times as long as before: "
        "stop them, or give this run a machine or cores of its own"
    )


def test_other_programs_that_were_there_from_the_start_are_told_without_a_comparison():
    line, again = watch((0.6, 0.05), (1.0, 0.05))
    assert line == (
        "other programs used 0.6 of 2 cores during the last 100 steps, and this run needs 2: stop them, or give this "
        "run a machine or cores of its own"
    )
    assert again is None


@pytest.mark.parametrize(
    ("windows", "machine"),
    [
        pytest.param([(0.0, 0.10), (0.5, 0.01)], {}, id="slow, with few others"),
        pytest.param([(0.0, 0.10), (1.5, 0.09)], {}, id="others, and hardly slower"),
        pytest.param([(0.0, 0.10), (5.0, 0.04)], {"cores": 8}, id="enough cores for both"),
        pytest.param([(6.0, 0.04)], {"cores": 8}, id="enough cores for both from the start"),
    ],
)
def test_a_run_that_others_do_not_slow_down_is_not_warned(windows, machine):
    assert watch(*windows, **machine) == [None] * len(windows)


def test_steps_of_another_length_are_not_compared_with_earlier_ones():
    watch = SlowdownWatch(2, 2)
    assert watch.see(100, 0.0, 0.10) is None
    watch.new_stage()
    assert watch.see(100, 0.1, 0.04) is None
    assert watch.see(100, 0.9, 0.039) is None, "as fast as before in this stage"
    assert "steps took 2.0 times as long" in watch.see(100, 0.9, 0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def test_busy_seconds_are_the_work_of_the_given_cores(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu  {10**6} 0 0 0 0 0 0 0 0 0\n"
        f"cpu0 {TICKS} {2 * TICKS} {3 * TICKS} {50 * TICKS} {60 * TICKS} {4 * TICKS} {5 * TICKS} {70 * TICKS} 0 0\n"
        f"cpu1 {100 * TICKS} 0 0 0 0 0 0 0 0 0\n"
        f"cpu10 {1000 * TICKS} 0 0 0 0 0 0 0 0 0\n"
        "intr 1 2 3\n\n"
    )
    monkeypatch.setattr(other_programs, "STAT", stat)
    assert busy_seconds({0}) == 15 and busy_seconds({0, 1}) == 115
    monkeypatch.setattr(other_programs, "STAT", tmp_path / "none")
    assert busy_seconds({0}) is None


def test_own_seconds_count_the_processes_of_this_one_while_they_run_and_after():
    """This process works too, while it waits: its own seconds are left out here."""

    def seconds_below():
        return own_seconds() - time.process_time()

    child = f"{BUSY}\nprint(flush=True)\ninput()"
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for program in (child, grandchild):
        before = seconds_below()
        with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as process:
            process.stdout.readline()
            assert seconds_below() - before > 0.45
            process.communicate(b"\n")
        assert seconds_below() - before > 0.45


class Machine:
    """
    A fake machine of two cores: its clock, and the CPU seconds of all programs and of this process.

    Args:
        other_rank: what a second rank sends, in the order of the calls; None for the same as this rank.
    """

    def __init__(self, monkeypatch, threads=2, other_rank=()):
        self.now, self.busy, self.own, self.other_rank = 0.0, 1000.0, 5.0, list(other_rank)
        monkeypatch.setattr(other_programs, "usable_cores", lambda: {0, 1})
        monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: self.busy)
        monkeypatch.setattr(other_programs, "own_seconds", lambda: self.own)
        monkeypatch.setattr(other_programs, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        cpu = torch.device("cpu")
        self.accelerator = SimpleNamespace(device=cpu, gather=self.gather, is_main_process=True, num_processes=1)

    def gather(self, mine):
        if not self.other_rank:
            return mine
        other = self.other_rank.pop(0)
        return torch.cat([mine, mine if other is None else torch.tensor([other])])

    def work(self, seconds, own, others=0.0):
        """Advance the clock, while this process and the other programs each use a number of cores."""
        self.now += seconds
        self.own += seconds * own
        self.busy += seconds * (own + others)


def totals(speed, seconds, before=(0.0, 0.0)):
    return {"train_arithmetic": before[0] + speed * seconds, "train_possible_arithmetic": before[1] + seconds}


def test_a_program_that_starts_beside_a_run_is_noticed(monkeypatch):
    machine = Machine(monkeypatch)
    programs = OtherPrograms(machine.accelerator, totals(0, 0))
    machine.work(25, 1.9, others=0.05)
    assert programs.see(100, totals(0.1, 25)) is None
    machine.work(15, 1.0, others=1.0)
    assert programs.see(30, totals(0.05, 15, (2.5, 25))) is None, "too short to tell"
    machine.work(15, 1.0, others=1.0)
    line = programs.see(20, totals(0.05, 30, (2.5, 25)))
    assert "used 1.0 of 2 cores during the last 50 steps, and steps took 2.0 times" in line


def test_an_evaluation_is_no_slower_step(monkeypatch):
    """The run works while it evaluates, and its log counts the training alone."""
    machine = Machine(monkeypatch)
    programs = OtherPrograms(machine.accelerator, totals(0, 0))
    machine.work(25, 1.9)
    assert programs.see(100, totals(0.1, 25)) is None
    machine.work(25, 1.0, others=0.9)
    assert programs.see(100, totals(0.1, 5, (2.5, 25))) is None


def test_another_rank_on_this_machine_is_no_other_program(monkeypatch):
    machine = Machine(monkeypatch, threads=1, other_rank=[None, 1.0, 25.0, 10.0])
    programs = OtherPrograms(machine.accelerator, totals(0, 0))
    assert programs.watch.threads == 2
    machine.work(25, 1.0, others=1.0)
    assert programs.see(100, totals(0.1, 25)) is None
    machine.work(25, 0.5, others=1.5)
    assert "used 1.1 of 2 cores" in programs.see(100, totals(0.05, 25, (2.5, 25)))


def test_a_rank_on_another_machine_counts_for_nothing_on_this_one(monkeypatch):
    machine = Machine(monkeypatch, threads=1, other_rank=[0.0, 1.0, 25.0, 25.0])
    programs = OtherPrograms(machine.accelerator, totals(0, 0))
    assert programs.watch.threads == 1
    machine.work(25, 1.0, others=1.0)
    assert programs.see(100, totals(0.1, 25)) is None, "a core is left for the only thread"
    machine.work(25, 0.4, others=1.6)
    assert "used 1.6 of 2 cores" in programs.see(100, totals(0.05, 25, (2.5, 25)))


def test_a_system_that_does_not_tell_is_not_asked_again(monkeypatch):
    machine = Machine(monkeypatch)
    monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: None)
    programs = OtherPrograms(machine.accelerator, totals(0, 0))
    machine.now += 100
    assert programs.see(100, totals(0.1, 25)) is None


def test_a_run_warns_once_on_the_terminal_and_in_its_log(books, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(OtherPrograms, "SECONDS", 0.0)
    monkeypatch.setattr(other_programs, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(other_programs, "busy_seconds", lambda cores: 1.9 * time.monotonic())
    monkeypatch.setattr(other_programs, "own_seconds", lambda: 0.0)
    out = tmp_path / "out"
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *SMALL, "--max_steps=4"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("other programs used 1.9 of 2")]
    rows = [row for row in TrainingLog(out / "training_log.jsonl").rows() if kind_of(row) == "other_programs"]
    assert len(said) == 1 and [row["reason"] for row in rows] == said
