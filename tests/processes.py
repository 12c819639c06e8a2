"""Starts the command in processes of its own, for tests that send signals to it.

`launch` forks from a process that has imported everything, which is quick. A launcher runs this file as a script:

    torchrun --nproc-per-node=2 tests/processes.py FIRST_STEP SECONDS pretrain --corpus=...

Both can slow the run down: from step FIRST_STEP on, each step takes SECONDS longer.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from d2l_bert.__main__ import main


def launch(arguments, said: Path, processes=1, dawdle=(1, 0.0)) -> list:
    """Start the command in `processes` ranks of one run; returns the `multiprocessing` processes.

    Rank 0 writes its stdout and stderr to the file `said`, the other ranks to files beside it. `dawdle` is
    (FIRST_STEP, SECONDS).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["processes", "d2l_bert.training.pretrain", "matplotlib.figure"])
    port = free_port() if processes > 1 else None
    method = multiprocessing.get_start_method()  # loaders start their workers by this method, as in a normal run
    launched = []
    for rank in range(processes):
        environment = _environment(rank, processes, port) if processes > 1 else {}
        file = said if rank == 0 else said.with_suffix(f".{rank}.txt")
        file.write_text("")
        launched.append(context.Process(target=_command, args=(list(arguments), environment, file, dawdle, method)))
        launched[-1].start()
    return launched


def _environment(rank, processes, port):
    """The variables that torchrun sets."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    threads = {"OMP_NUM_THREADS": 1}  # without it, Accelerate warns on every rank
    return {name: str(value) for name, value in {**ranks, **address, **threads}.items()}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _command(arguments, environment, said, dawdle, method):
    multiprocessing.set_start_method(method, force=True)
    os.setsid()  # a process group for the command and its loader's workers, as in a terminal
    os.environ.update(environment)
    file = os.open(said, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    _dawdle(*dawdle)
    sys.exit(main(arguments))


def _dawdle(first_step, seconds):
    done = 0

    def wait(*_):
        nonlocal done
        done += 1
        if done >= first_step:
            time.sleep(seconds)

    register_optimizer_step_pre_hook(wait)


if __name__ == "__main__":
    _dawdle(int(sys.argv[1]), float(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
