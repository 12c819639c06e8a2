"""Measured steps and meters of them, for tests of what a run measures and reports."""

import torch

from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.meter import Meter, StepStats


NSP, CPU = PAIR_TASKS["nsp"], torch.device("cpu")
STEP = StepStats(
    mlm_loss=4.0,
    pair_loss=1.0,
    grad_norm=0.5,
    masked_tokens=9.0,
    examples=3.0,
    tokens=60.0,
    padded_tokens=80.0,
    squared_lengths=1200.0,
    skipped=0.0,
)


def operations(step):
    """A made-up number of operations of a step."""
    return 7 * step.tokens + step.squared_lengths


def meter_of(*steps, state=None, task=NSP, peak=1e6):
    """A meter to which some steps were added."""
    meter = Meter(state or {}, task, operations, peak, CPU)
    for step in steps:
        meter.add(step)
    return meter
