"""The command with a process that hangs: `FAULT=name python faults.py pretrain ...`, with a key of `FAULTS` below.

`START_METHOD` is the start method of `multiprocessing`.
"""

import datetime
import multiprocessing
import os
import signal
import sys
import time

import torch

from d2l_bert.__main__ import main
from d2l_bert.training import checkpoint, initialize, processes
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.learner import Learner


def endless_step_15():
    make = TrainingSteps.make

    def sometimes(steps, drawn):
        if drawn.step == 15:
            time.sleep(600)
        return make(steps, drawn)

    TrainingSteps.make = sometimes


def stuck_before_the_first_step():
    """Make rank 1 hang: it waits for a message that no rank sends, and rank 0 then waits for rank 1."""

    def wait(*_):
        print("waiting for a message that is never sent", file=sys.stderr, flush=True)
        torch.distributed.recv(torch.zeros(1), src=0)

    if os.environ["RANK"] == "1":
        initialize.make_model = wait


def lost_in_step_15():
    """
    Rank 1 gets the signal `LOST_BY` in step 15. The processes wait 6 seconds for each other in a step, 4 to connect,
    and rank 0 takes 9 seconds to write a checkpoint.
    """
    processes.STEP_TIMEOUT = datetime.timedelta(seconds=6)
    processes.CONNECT_TIMEOUT = datetime.timedelta(seconds=4)
    write = checkpoint.write_checkpoint
    train_on = Learner.train_on

    def write_slowly(*arguments):
        time.sleep(9)
        write(*arguments)

    def lost(learner, step, number, rate):
        if number == 15 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), int(os.environ["LOST_BY"]))
        return train_on(learner, step, number, rate)

    checkpoint.write_checkpoint = write_slowly
    Learner.train_on = lost


def stuck_text_of_rank_1():
    """Rank 1 gets no batch for step 15, as from a disk that hangs; rank 0 comes to the vote before the step."""
    processes.STEP_TIMEOUT = datetime.timedelta(seconds=6)
    if os.environ["RANK"] == "1":
        endless_step_15()


FAULTS = {
    "endless step": endless_step_15,
    "stuck before the first step": stuck_before_the_first_step,
    "lost in a step": lost_in_step_15,
    "stuck text of rank 1": stuck_text_of_rank_1,
}

FAULTS[os.environ["FAULT"]]()  # also in a worker that imports this file

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    multiprocessing.set_start_method(os.environ.get("START_METHOD"))
    sys.exit(main(sys.argv[1:]))
