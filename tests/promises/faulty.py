"""The command with a fault, planted in torch or in Python itself: `PROMISES_...=... python faulty.py pretrain ...`.

Environment variables:
    PROMISES_AT_STEP     the optimizer step at which the fault happens, from 1
    PROMISES_SIGNAL      number of the signal that this process then gets
    PROMISES_ERROR       what an error that is raised then says
    PROMISES_LOADER      what an error in another thread or process than the training's says, after some steps
    PROMISES_RANK        the rank that has the fault; by default every one
    PROMISES_STEP_SECONDS   how much longer each step takes
"""

import os
import signal
import sys
import threading
import time
from importlib.metadata import entry_points

from torch.optim.optimizer import register_optimizer_step_pre_hook


settings = {name: os.environ.get(f"PROMISES_{name}") for name in ("AT_STEP", "SIGNAL", "ERROR", "LOADER", "RANK")}
taken = []


def fault(*_):
    taken.append(None)
    time.sleep(float(os.environ.get("PROMISES_STEP_SECONDS", 0)))
    if str(len(taken)) != settings["AT_STEP"] or settings["RANK"] not in (None, os.environ.get("RANK", "0")):
        return
    say_when()
    if settings["SIGNAL"]:
        os.kill(os.getpid(), int(settings["SIGNAL"]))
    if settings["ERROR"]:
        raise ValueError(settings["ERROR"])


def say_when():
    """The time of the fault, on stderr."""
    os.write(2, f"\nfault at {time.time()}\n".encode())


calls = []


def break_loader(frame, event, argument):
    """Raise in code of the package that a loader's thread or process runs, after some hundred calls."""
    if event == "call" and frame.f_globals.get("__name__", "").startswith("d2l_bert"):
        calls.append(None)
        if len(calls) == 401:
            say_when()
        if len(calls) > 400:
            raise ValueError(settings["LOADER"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands with SIGINT ignored
    register_optimizer_step_pre_hook(fault)
    if settings["LOADER"]:
        threading.setprofile(break_loader)
        os.register_at_fork(after_in_child=lambda: sys.setprofile(break_loader))
    (entry,) = entry_points(group="console_scripts", name="d2l-bert")
    sys.exit(entry.load()(sys.argv[1:]))
