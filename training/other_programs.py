"""Measures how much of the run's cores other programs use; warns if other programs slow the run down."""

import contextlib
import os
import statistics
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.training.distributed import on_main


STAT, BOOT_ID = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")

# The columns of a line of /proc/stat that count work of programs: user, nice, system, irq and softirq. Not counted are
# idle time, waiting for a disk (iowait), and time that the host gave to other virtual machines (steal).
WORK_COLUMNS = (1, 2, 3, 6, 7)


def busy_seconds(cores: Collection[int]) -> float | None:
    """
    CPU seconds that all programs together have used on these cores since the machine started.

    Programs outside a container are counted, even if the container does not show them. None on a system without
    /proc/stat.
    """
    try:
        lines = [line.split() for line in STAT.read_text().splitlines()]
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    ticks = sum(int(line[column]) for line in lines if line and line[0] in names for column in WORK_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds that this process and its descendants have used, ended descendants included."""
    seconds, this_process = 0.0, psutil.Process()
    for process in (this_process, *this_process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended in the meantime
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def usable_cores() -> Collection[int]:
    """The numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


class SlowdownWatch:
    """
    Decides whether other programs slow the run down, and words the warning.

    Args:
        cores: the number of cores that the run may use.
        threads: the number of threads that compute, over all ranks on these cores; with GPUs, one for each rank.
    """

    MOST_CORES = 0.5  # if other programs use no more cores than this, they do not count
    MIN_SLOWDOWN = 1.2  # warn if steps take this many times as long as before; equal steps differ by less

    def __init__(self, cores: int, threads: int):
        self.cores, self.threads, self.has_warned = cores, threads, False
        self.quiet_speeds = []  # the speeds of steps during which other programs did not count

    def new_stage(self) -> None:
        """Forget all speeds: steps of another sequence length or batch size have another speed."""
        self.quiet_speeds = []

    def see(self, steps: int, others: float, speed: float) -> str | None:
        """
        Judge the latest steps.

        If no earlier steps ran without other programs, there is no speed to compare with. The steps then count as
        slowed down if other programs leave fewer cores than the run has threads.

        Args:
            steps: the number of steps.
            others: the number of cores that other programs used during the steps, on average.
            speed: the speed of the steps, such as their MFU.

        Returns:
            The warning, in one line, the first time that other programs have made steps slower; else None.
        """
        if others <= self.MOST_CORES:
            self.quiet_speeds.append(speed)
            return None
        has_room = self.cores - others > self.threads - self.MOST_CORES
        slowdown = statistics.median(self.quiet_speeds) / speed if self.quiet_speeds else None
        if self.has_warned or has_room or (slowdown is not None and slowdown < self.MIN_SLOWDOWN):
            return None
        self.has_warned = True
        effect = (
            f"this run needs {self.threads}"
            if slowdown is None
            else f"steps took {slowdown:.1f} times as long as before"
        )
        return (
            f"other programs used {others:.1f} of {self.cores} cores during the last {steps:,} steps, and {effect}: "
            f"stop them, or give this run a machine or cores of its own"
        )


class OtherPrograms:
    """
    Measures how much of the main process's cores other programs use, and how fast the run is: for `SlowdownWatch`.

    All processes must create the object and call `see` at the same points of the run. A rank and its descendants, such
    as loader workers and compilers, belong to the run; all other processes are other programs.

    Args:
        totals: `Meter.totals`, with the entries `train_arithmetic` and `train_possible_arithmetic`.
    """

    SECONDS = 20.0  # the shortest measurement: short work of another program is no reason to warn

    def __init__(self, accelerator: Accelerator, totals: dict[str, float]):
        self.accelerator, self.cores = accelerator, usable_cores()
        # Ranks with the same boot id run on the same machine, even in containers with names of their own.
        machine = int(fingerprint(BOOT_ID.read_text() if BOOT_ID.exists() else ""), 16) % 2**24  # exact in float32
        machines = self._gather(machine)
        self.is_local = machines == machines[0]
        threads = self._gather(torch.get_num_threads() if accelerator.device.type == "cpu" else 1)
        self.watch = SlowdownWatch(len(self.cores), int(threads[self.is_local].sum()))
        self._start(totals)

    def new_stage(self) -> None:
        """Call this when the next steps have another sequence length or batch size."""
        self.watch.new_stage()

    def see(self, steps: int, totals: dict[str, float]) -> str | None:
        """
        Judge the steps of a measurement, if at least `SECONDS` have passed since the last measurement.

        Args:
            steps: the number of steps since the last call.
            totals: `Meter.totals` after these steps.

        Returns:
            The warning of `SlowdownWatch`, in every process; else None.
        """
        self.steps += steps
        if not on_main(self.accelerator, self._is_due):
            return None
        own = self._gather(own_seconds() - self.own)[self.is_local].sum()
        line = on_main(self.accelerator, self._judge, float(own), totals)
        self._start(totals)
        return line

    def _start(self, totals):
        """Start a measurement."""
        self.steps, self.totals, self.own = 0, dict(totals), own_seconds()
        self.busy, self.time = busy_seconds(self.cores), time.monotonic()

    def _is_due(self):
        """Whether the measurement is long enough."""
        return self.busy is not None and time.monotonic() - self.time >= self.SECONDS

    def _judge(self, own, totals):
        """End a measurement in which the run used `own` CPU seconds; returns the warning or None."""
        others = max(0.0, busy_seconds(self.cores) - self.busy - own) / (time.monotonic() - self.time)
        arithmetic, possible = (
            totals[name] - self.totals[name] for name in ("train_arithmetic", "train_possible_arithmetic")
        )
        return self.watch.see(self.steps, others, arithmetic / possible)

    def _gather(self, number):
        """The numbers of all ranks (ranks,)."""
        return self.accelerator.gather(torch.tensor([float(number)], device=self.accelerator.device)).cpu()
