"""The command with one fault, run in a process of its own: `FAULT=name python tests/faults.py pretrain ...`.

Environment variables: `FAULT` is a key of `FAULTS` below. `START_METHOD` is the start method of `multiprocessing`.
`FAULTY_RANK` is the rank that has the fault (0 by default); all other ranks run without a fault.
"""

import multiprocessing
import os
import signal
import sys
import time

import torch

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.training import initialize
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.optimizer import Learner


def at_step(step, act):
    take_step, taken = Learner.take_step, []

    def sometimes(*arguments):
        taken.append(None)
        if len(taken) == step:
            act()
        return take_step(*arguments)

    Learner.take_step = sometimes


def in_a_worker(act, step=15):
    make = TrainingSteps.__getitem__

    def sometimes(steps, drawn):
        if drawn[0] == step:
            act()
        return make(steps, drawn)

    TrainingSteps.__getitem__ = sometimes


def refuse():
    raise UserError("the rope is too short; take a longer one")


def stumble():
    raise ValueError("operands could not be broadcast together")


def miss_a_file():
    open("nowhere/rope.txt")


def run_out_of_memory():
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")


def stuck_before_the_first_step():
    """Make this rank hang: it waits for a message that no rank sends, and the other ranks then wait for this rank."""

    def wait(*_):
        print("waiting for a message that is never sent", file=sys.stderr, flush=True)
        torch.distributed.recv(torch.zeros(1), src=1 - torch.distributed.get_rank())

    initialize.make_model = wait


FAULTS = {
    "endless worker": lambda: in_a_worker(lambda: time.sleep(600)),
    "refusal": lambda: at_step(15, refuse),
    "bug": lambda: at_step(15, stumble),
    "missing file": lambda: at_step(15, miss_a_file),
    "stuck before the first step": stuck_before_the_first_step,
    "out of memory": lambda: at_step(15, run_out_of_memory),
    "out of memory at once": lambda: at_step(1, run_out_of_memory),
    "none": lambda: None,
}

if os.environ.get("FAULTY_RANK", "0") == os.environ.get("RANK", "0"):
    FAULTS[os.environ["FAULT"]]()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    if method := os.environ.get("START_METHOD"):
        multiprocessing.set_start_method(method)
    sys.exit(main(sys.argv[1:]))
