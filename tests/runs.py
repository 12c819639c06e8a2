"""Runs of a few steps, a signal at a certain step, and the logs that they leave."""

import contextlib
import json
import math
import os
import signal

import pytest
import torch
from conftest import SMALL
from torch.optim.optimizer import register_optimizer_step_pre_hook

from d2l_bert.__main__ import main
from d2l_bert.modeling.modeling_d2l_bert import D2lBertPreTrainedModel


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


@contextlib.contextmanager
def forward_passes(hook):
    """Within the block, `hook(model, outputs)` is called after each pass of a model with a head, on any batch.

    It is no hook of PyTorch's: with one of all modules, the model would compute its loss in the plain way.
    """

    def call(model, *given, **named):
        outputs = torch.nn.Module.__call__(model, *given, **named)
        if "loss" in outputs:
            hook(model, outputs)
        return outputs

    D2lBertPreTrainedModel.__call__ = call
    try:
        yield
    finally:
        del D2lBertPreTrainedModel.__call__


@contextlib.contextmanager
def spoilt_step(number, taken=0):
    """Within the block, the loss and the gradient of one step are not finite: the run skips that step.

    Args:
        number: the step, of one micro-batch as all the others.
        taken: how many steps the run had taken before, if it is resumed.
    """
    passes = [None] * taken

    def spoil(model, outputs):
        if model.training:
            passes.append(None)
            if len(passes) == number:
                outputs.loss = outputs.loss * math.nan

    with forward_passes(spoil):
        yield
