"""Makes OpenMP's threads sleep at barriers while other programs use the cores, and spin while the cores are free."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch


# Variables by which users decide for themselves how long threads wait.
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

OWN_STATISTICS, THREADS = Path("/proc/self/schedstat"), Path("/proc/self/task")
MAPPED_FILES = Path("/proc/self/maps")

SECONDS = 0.25  # the length of a measurement

# Thread-seconds a second that threads of this process wait for a core. Alone, a step waits 0.01 to 0.05; beside one
# busy program 1.0 while the threads spin, and 0.5 while they sleep (two cores, recipe tiny).
MANY, FEW = 0.25, 0.12

QUIET_MEASUREMENTS = 4  # the threads spin again after this many measurements with few waits


@contextlib.contextmanager
def short_waits() -> Iterator["Waits | None"]:
    """
    Within the block, OpenMP's threads go to sleep early at barriers whenever threads of this process wait for cores.

    A thread that has nothing left to do spins: it looks at the barrier 300,000 times before it goes to sleep, some
    milliseconds. That is fast on free cores. Beside another program it keeps a core from the very thread that it waits
    for: on two cores and beside one busy program, recipe tiny keeps 2 % of its speed. If its threads sleep after 100
    looks, it keeps half, but loses a quarter on free cores (benchmarks/LOG.md).

    If GNU's OpenMP has more threads than cores, its threads look at a barrier 100 times only. So when threads wait for
    cores, a second team of threads is started. It does nothing, and ends when the cores are free again. The team that
    computes stays as it is, with the same number of threads, so the results are the same to the bit.

    Yields None, and does nothing, if the user has set how long threads wait, if computations have one thread, if
    OpenMP is not GNU's, or if the system does not count how long threads wait for cores (only Linux does).
    """
    if not is_supported(os.environ):
        yield None
        return
    waits = Waits()
    waits.start()
    try:
        yield waits
    finally:
        waits.stop()


def is_supported(environment: Mapping[str, str]) -> bool:
    """Whether `short_waits` does something in this process, with these environment variables."""
    return (
        not any(environment.get(name) for name in WAIT_VARIABLES)
        and torch.get_num_threads() > 1
        and bool(openmp_libraries())
        and waited_seconds() is not None
    )


class Waits(threading.Thread):
    """
    The thread that measures how long others wait for cores.

    `are_short` says whether OpenMP's threads go to sleep early now.
    """

    def __init__(self):
        super().__init__(name="d2l-bert-openmp-waits", daemon=True)
        self.are_short = False
        self._quiet, self._stopped, self._team = 0, threading.Event(), None

    def run(self):
        waited = waited_seconds()
        while not self._stopped.wait(SECONDS) and waited is not None:
            last, waited = waited, waited_seconds()
            self.see(((waited or last) - last) / SECONDS)
        self._release()

    def stop(self) -> None:
        """Let OpenMP's threads spin again, and end the thread."""
        self._stopped.set()
        self.join()

    def see(self, waiting: float) -> None:
        """
        Judge a measurement.

        Args:
            waiting: thread-seconds a second that threads of this process have waited for cores.
        """
        self._quiet = self._quiet + 1 if waiting < FEW else 0
        if waiting > MANY and not self.are_short:
            self._team, self.are_short = IdleTeam(), True
        elif self._quiet >= QUIET_MEASUREMENTS and self.are_short:
            self._release()

    def _release(self):
        if self.are_short:
            self._team.end()
            self._team, self.are_short = None, False


class IdleTeam:
    """
    A team of OpenMP threads that makes OpenMP have more threads than cores, until `end`.

    Each copy of OpenMP that is loaded gets a team: the compiler's programs may bring another copy than PyTorch. A team
    belongs to the thread that has started it, and ends with that thread.
    """

    def __init__(self):
        self._ended, started = threading.Event(), threading.Event()
        self._owner = threading.Thread(target=self._own, args=(started,), name="d2l-bert-idle-team", daemon=True)
        self._owner.start()
        started.wait()

    def _own(self, started):
        # The team's owner counts as a thread of the program already, so a team adds one thread less than it has.
        threads = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
        try:
            for path in openmp_libraries():
                library = ctypes.CDLL(path)
                # void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags): each
                # thread of the team calls the function, here one of OpenMP's own that returns a number.
                library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                library.GOMP_parallel(ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p), None, threads, 0)
        finally:
            started.set()
        self._ended.wait()

    def end(self) -> None:
        """End the team's threads; OpenMP's other threads spin again."""
        self._ended.set()
        self._owner.join()


def openmp_libraries() -> list[str]:
    """The files of GNU's OpenMP that this process has loaded; empty where files cannot be listed."""
    try:
        lines = MAPPED_FILES.read_text().splitlines()
    except OSError:
        return []
    # A line has five columns and the path, in which spaces may stand; a file that was deleted has more words behind.
    return sorted(
        {
            columns[5]
            for line in lines
            if len(columns := line.split(maxsplit=5)) == 6
            and Path(columns[5]).name.startswith("libgomp")
            and not columns[5].endswith("(deleted)")
        }
    )


def waited_seconds() -> float | None:
    """
    How long the threads of this process have waited for a core, in seconds of all threads together.

    Threads that have ended are not included. None if the system does not count it.
    """
    nanoseconds = 0
    try:
        OWN_STATISTICS.read_text()  # else there is no such file for a thread either
        for thread in THREADS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended in the meantime
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return nanoseconds / 1e9
