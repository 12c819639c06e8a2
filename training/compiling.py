"""Compile the encoder's blocks, where a run is long enough to earn that back."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch._dynamo.config
import torch._functorch.config
from accelerate import Accelerator
from torch import nn

from d2l_bert.training.interruption import is_out_of_memory
from d2l_bert.training.tracking import say


# Seconds that a run's arithmetic alone must take at the device's peak. Compiling takes 10 to 60 and spares a tenth or
# so of a step, which in turn takes two to four times as long as its arithmetic.
LEAST_SECONDS = 300.0

MOST_PROGRAMS = 64


def compile_blocks(model: nn.Module) -> None:
    """
    Have PyTorch's compiler make one program for all blocks of the encoder, for rows of any number and width.

    Regional compilation: what is compiled is one block, so that a deep model takes no longer than a flat one. Names of
    parameters and what a checkpoint holds stay as they are. Nothing is compiled before the next step.

    Args:
        model: a d2l-bert with an encoder, without a distributed wrapper.
    """
    # Masks and activations are cheaper to compute again than to write and read.
    torch._functorch.config.aggressive_recomputation = True
    # Training and evaluation, blocks and the last one, rows with padding and without, single rows and queries: each
    # has a program. Past the limit, 8 by default, all others would run as written.
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
    for block in model.base_model.encoder.layer:
        block.compute = torch.compile(type(block).compute.__get__(block), dynamic=True)


def leave_as_written(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in model.base_model.encoder.layer:
        vars(block).pop("compute", None)


def compile_now(model: nn.Module, try_step: Callable[[], object]) -> str | None:
    """
    Compile the blocks by taking a step.

    Args:
        try_step: takes a step that learns nothing, with micro-batches of every kind that gets a program of its own, so
            that all programs are made here: always of the same shapes, and so alike in a resumed run.

    Returns:
        What went wrong, in a line, and then nothing is compiled; or None.
    """
    compile_blocks(model)
    try:
        try_step()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        leave_as_written(model)
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


def pays(
    accelerator: Accelerator, model: nn.Module, try_step: Callable[[], object], steps: Iterable[Callable]
) -> bool:
    """
    Whether steps are faster compiled; if so, the blocks are from here on. All processes must call, and agree.

    Args:
        try_step: as in `compile_now`.
        steps: callables that each take a step that learns nothing, for timing.
    """

    def seconds():
        taken = []
        for step in steps:
            start = time.monotonic()
            step()
            taken.append(time.monotonic() - start)
        return taken

    def typical():
        seconds()  # the first time allocates
        taken = torch.tensor(statistics.median(seconds()), device=accelerator.device)
        return float(accelerator.reduce(taken, "mean"))

    as_written = typical()
    start = time.monotonic()
    error = compile_now(model, try_step)
    compiling = time.monotonic() - start
    failed = float(accelerator.reduce(torch.tensor(float(error is not None), device=accelerator.device), "sum"))
    if failed:
        leave_as_written(model)
        outcome = f"not compiled: {error or 'another process could not'}"
        compiled = as_written
    else:
        compiled = typical()
        outcome = f"compiled in {compiling:.0f} s: a step takes {compiled:.3g} s instead of {as_written:.3g}"
    if not failed and compiled >= as_written:
        leave_as_written(model)
        outcome += ", so it is left as written"
    if accelerator.is_main_process:
        say(outcome)
    return compiled < as_written
