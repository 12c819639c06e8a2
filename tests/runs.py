"""Runs of a few steps, a signal at a certain step, and the logs that they leave."""

import contextlib
import json
import os
import signal

import pytest
from conftest import SMALL
from torch.optim.optimizer import register_optimizer_step_pre_hook

from d2l_bert.__main__ import main


def run(books, folder, *options):
    """Train through the command line; returns the weights file's bytes."""
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *SMALL, *options]) == 0
    return (folder / "model.safetensors").read_bytes()


def log_rows(folder):
    """The rows of the log. Every line must be strict JSON, which has no NaN."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@contextlib.contextmanager
def steps_counted(sigterm_at=None):
    """Within the block, a list with an entry for each optimizer step; SIGTERM comes at the step of this number."""
    taken = []

    def count(*_):
        taken.append(None)
        if len(taken) == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)

    hook = register_optimizer_step_pre_hook(count)
    try:
        yield taken
    finally:
        hook.remove()
