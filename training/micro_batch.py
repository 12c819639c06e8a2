"""How many pairs to compute at once, found by trying: the steps stay the same, whatever the answer."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator

from d2l_bert.errors import UserError, is_out_of_memory
from d2l_bert.training import checkpoint
from d2l_bert.training.batching import trial_micro_batches
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import is_sharded, summed_later
from d2l_bert.training.tracking import say


# Doubling a micro-batch must gain so much; below it is noise, and memory is worth more.
LEAST_GAIN = 1.05

NO_MEMORY_FOR_ONE = (
    "out of memory with a single pair; give --gradient_checkpointing, lower --max_seq_length, or take a smaller model"
)


def settle_micro_batch(
    run: PretrainConfig, learner: checkpoint.Learner, step_model, text, cutting, resumed, train_on
) -> PretrainConfig:
    """The run with its micro-batch as a number: `auto` is what its checkpoint was made with, or what is found."""
    if run.micro_batch_size != "auto":
        return run
    if resumed:
        found = resumed.state["micro_batch_size"]
    else:
        micro_batches = functools.partial(trial_micro_batches, run, text, **cutting)
        try_step = functools.partial(train_on, rate=0.0)
        most = -(-run.global_batch_size // learner.accelerator.num_processes)
        found = find_micro_batch(micro_batches, most, learner.accelerator, step_model, try_step)
        if learner.accelerator.is_main_process:
            say(f"micro-batches of {found} pairs of {run.max_seq_length} tokens are the fastest that the memory holds")
        learner.forget_moments()
    return dataclasses.replace(run, micro_batch_size=found)


def find_micro_batch(
    micro_batches: Callable[[int], list[dict]], most: int, accelerator: Accelerator, model, try_step: Callable
) -> int:
    """
    The micro-batch that this machine trains on fastest and has the memory for. All processes must call, and agree.

    Args:
        micro_batches: of a number of pairs computed at once, what the run then has of largest ones.
        most: pairs that a process has in a step.
        model: as Accelerate prepared it. Under FSDP2 its forward pass is the work of all processes, and memory that
            runs out in one alone leaves the others waiting.
        try_step: takes a list of micro-batches through an optimizer step; it is called once, so that the optimizer's
            moments have their memory.

    Raises:
        UserError: there is no memory for a single pair.
    """

    def speed(size):
        seconds, tokens = math.inf, 0
        try:
            tried = micro_batches(size)
            tokens = sum(int(batch["attention_mask"].sum()) for batch in tried)
            tried = [{name: tensor.to(accelerator.device) for name, tensor in batch.items()} for batch in tried]
            for _ in range(3):  # the first one allocates
                start = time.monotonic()
                for batch in tried:
                    with summed_later(accelerator, model, is_last=False):  # a process may fail here alone
                        with accelerator.autocast():
                            loss = model(**batch, skip_logits=not is_sharded(model)).loss
                        accelerator.backward(loss)
                    loss.item()
                seconds = min(seconds, time.monotonic() - start)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = math.inf
        model.zero_grad()
        speeds = accelerator.gather(torch.tensor(tokens / seconds, device=accelerator.device))
        return float(speeds.min())

    try:
        try_step(micro_batches(1)[:1])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(NO_MEMORY_FOR_ONE) from None
    return fastest(speed, most)


def fastest(speed: Callable[[int], float], most: int) -> int:
    """
    The size that is worked off fastest, doubled from 1 until that gains next to nothing.

    Args:
        speed: of a size, per second; 0 if it is too much.
        most: sizes above it are not tried.

    Raises:
        UserError: even 1 is too much.
    """
    best, highest = 0, 0.0
    for size in (min(2**power, most) for power in itertools.count()):
        reached = speed(size)
        if not reached or reached < LEAST_GAIN * highest:
            break
        best, highest = size, reached
        if size == most:
            break
    if not best:
        raise UserError(NO_MEMORY_FOR_ONE)
    return best
