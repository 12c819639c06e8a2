"""torch.compile for the encoder blocks: compiles all programs that a run needs, and measures whether that pays."""

import logging
import time
from collections.abc import Callable

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate import Accelerator
from torch import nn

from d2l_bert.errors import is_out_of_memory
from d2l_bert.training.host_settings import RECOMPUTATION_LIMITS


logger = logging.getLogger(__name__)


# Programs that the compiler may make for the encoder block.
RECOMPILE_LIMIT = 64

# In a turn, a step is timed with and without compiling. There are at least LEAST_TURNS turns, and more until the turns
# have taken SECONDS_OF_TURNS: another program often works for a second or two, and then leaves some turns undisturbed.
LEAST_TURNS, SECONDS_OF_TURNS = 5, 10.0


def micro_batches_of_every_kind(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """
    Variants of a micro-batch for which the compiler makes separate programs.

    These are micro-batches with all rows, two rows and one row, with and without padding, and with a single masked
    token: the compiler makes a separate program wherever a size is 1.

    Args:
        batch: the model's arguments, the largest micro-batch of the run; its rows (B, T) may be packed.
    """
    kinds = []
    for rows in (list(range(len(batch["input_ids"]))), [0, 0], [0]):
        chosen = {name: tensor[rows] for name, tensor in batch.items()}
        for padding in (0, 1) if "sequence_ids" not in batch else (0,):  # packed rows always have a mask
            real = torch.ones_like(chosen["attention_mask"])
            real[:, real.shape[1] - padding :] = 0
            kinds.append(chosen if "sequence_ids" in batch else {**chosen, "attention_mask": real})
    # With `next_sentence_label` the last block also computes [CLS], so that a single masked token is not a size of 1.
    if "next_sentence_label" not in batch:
        slots = ("masked_positions", "labels")
        kinds += [{**kind, **{name: kind[name][:, :1] for name in slots}} for kind in kinds]
    return kinds


def compile_blocks(model: nn.Module) -> None:
    """
    Set up torch.compile for the encoder blocks, with one program for all blocks and dynamic shapes.

    This is regional compilation: one block is compiled, so that a deep model compiles as fast as a shallow one. Names
    of parameters and the content of checkpoints do not change. Compiling happens in the next forward pass. This
    function changes settings of the compiler for the whole process; `restore_host_settings` restores them.

    Args:
        model: a d2l-bert model with an encoder, without a DDP or FSDP2 wrapper.
    """
    # Recomputing activations is cheaper than writing and reading them. `aggressive_recomputation` is wrong here: it
    # would also recompute dropout masks, with other random numbers.
    for name in RECOMPUTATION_LIMITS:
        setattr(torch._functorch.config, name, False)
    # There are separate programs for training and evaluation, for the last block, for padding, and for sizes of 1.
    # Beyond the limit, 8 by default, PyTorch would run further variants uncompiled.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Duck shapes would compile a separate program for a sequence length of 128 beside a hidden size of 128.
    torch.fx.experimental._config.use_duck_shape = False
    for block in model.base_model.encoder.layer:
        block.compute = torch.compile(type(block).compute.__get__(block), dynamic=True)


def undo_compile_blocks(model: nn.Module) -> None:
    """Run the encoder blocks uncompiled again, as before `compile_blocks`."""
    for block in model.base_model.encoder.layer:
        vars(block).pop("compute", None)


def compile_now(model: nn.Module, try_step: Callable[[], object]) -> str | None:
    """
    Compile the encoder blocks now, by running them.

    Args:
        try_step: runs `micro_batches_of_every_kind` forward and backward in this process, so that all programs are
            compiled here and none later during training.

    Returns:
        None; or, if compiling fails, the reason in one line. The blocks then run uncompiled.
    """
    compile_blocks(model)
    try:
        try_step()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        undo_compile_blocks(model)
        # With DDP the first line is "backend='compile_fn' raised:", and the reason is in the second.
        reasons = (line for line in str(error).strip().splitlines() if not line.endswith(" raised:"))
        return next(reasons, type(error).__name__)
    return None


def compiling_pays(
    accelerator: Accelerator, model: nn.Module, try_step: Callable[[], object], step: Callable[[], object]
) -> bool:
    """
    Compile the encoder blocks, and keep them compiled if a step becomes faster.

    Every process must call this function; all get the same answer.

    Args:
        try_step: as in `compile_now`.
        step: takes a training step at a learning rate of 0. This function is timed.

    Returns:
        Whether the compiled step is faster, and the blocks are now compiled.
    """
    start = time.monotonic()
    error = compile_now(model, try_step)
    compiling = time.monotonic() - start
    failed = float(accelerator.reduce(torch.tensor(float(error is not None), device=accelerator.device), "sum"))
    if failed:
        pays, outcome = False, f"not compiled: {error or 'another process could not'}"
    else:
        uncompiled, compiled = time_both_ways(accelerator, model, step)
        pays = compiled < uncompiled
        outcome = f"compiled in {compiling:.0f} s: a step takes {compiled:.3g} s instead of {uncompiled:.3g}"
        outcome += "" if pays else ", so the run goes on without compiling"
    if not pays:
        undo_compile_blocks(model)
    if accelerator.is_main_process or error:  # every rank that fails to compile logs its reason
        logger.info(outcome)
    return pays


def time_both_ways(accelerator: Accelerator, model: nn.Module, step: Callable[[], object]) -> tuple[float, float]:
    """
    The seconds of a step with uncompiled and with compiled blocks; the same in all processes.

    Each turn takes the step both ways, and the fastest time of each way is returned: other programs can only make a
    turn slower, so the fastest turn is the least disturbed. The blocks must be compiled, and are compiled afterwards.
    """
    blocks = model.base_model.encoder.layer
    compiled = [block.compute for block in blocks]

    def seconds(is_compiled):
        undo_compile_blocks(model)
        for block, compute in zip(blocks, compiled, strict=True) if is_compiled else ():
            block.compute = compute
        start = time.monotonic()
        step()
        return time.monotonic() - start

    seconds(False), seconds(True)  # not counted: the first step of each way allocates memory
    turns, spent = [], 0.0
    while len(turns) < LEAST_TURNS or spent < SECONDS_OF_TURNS:
        order = (False, True) if len(turns) % 2 else (True, False)
        taken = {is_compiled: seconds(is_compiled) for is_compiled in order}
        # The mean over the processes, so that all processes take the same number of turns and return the same.
        turn = torch.tensor([taken[False], taken[True]], device=accelerator.device)
        turns.append(accelerator.reduce(turn, "mean").tolist())
        spent += sum(turns[-1])
    if not order[-1]:
        for block, compute in zip(blocks, compiled, strict=True):
            block.compute = compute
    return min(turn[0] for turn in turns), min(turn[1] for turn in turns)
