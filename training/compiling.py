"""Compile the encoder's blocks, where a run is long enough to earn that back."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate import Accelerator
from torch import nn

from d2l_bert.errors import UserError, is_out_of_memory
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training import checkpoint, distributed
from d2l_bert.training.arithmetic import peak_of, training_arithmetic
from d2l_bert.training.batching import (
    counts_of_full_pairs,
    make_batch_maker,
    make_steps,
    micro_batch_pairs,
    pairs_of,
    trial_micro_batches,
)
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.pair_tasks import PAIR_TASKS
from d2l_bert.training.prepare import PreparedText
from d2l_bert.training.run_length import decide_steps
from d2l_bert.training.tracking import say


# Seconds that a run's arithmetic alone must take at the device's peak. Compiling takes 10 to 60 and spares a tenth or
# so of a step, which in turn takes two to four times as long as its arithmetic.
LEAST_SECONDS = 300.0

MOST_PROGRAMS = 64

# Steps that tell whether compiling pays, and the fewest operations a second that any device might have.
TIMED_TO_COMPILE, SLOWEST_PEAK = 3, 2e10


def settle_compiling(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    learner: checkpoint.Learner,
    step_model,
    text,
    cutting,
    resumed,
    train_on,
) -> PretrainConfig:
    """The run with `torch_compile` as true or false, and the model compiled: as its checkpoint says, or if it pays."""
    accelerator, model = learner.accelerator, learner.model
    wanted = resumed.state.get("torch_compile", "false") if resumed and run.torch_compile == "auto" else None
    wanted = wanted or run.torch_compile

    def try_step():
        kinds = micro_batches_of_every_kind(trial_micro_batches(run, text, micro_batch_pairs(run), **cutting)[-1])
        if cutting["world_size"] > 1:  # a process may have a row less than the others
            kinds.append(make_batch_maker(run, text, run.max_seq_length).empty())
        try:
            for batch in kinds:
                batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
                with distributed.summed_later(accelerator, step_model, is_last=False):  # a process may fail here alone
                    with accelerator.autocast():
                        loss = step_model(**batch, skip_logits=not distributed.is_sharded(step_model)).loss
                    accelerator.backward(loss)
        finally:
            step_model.zero_grad()

    if wanted == "auto":
        wanted = "false"
        # FSDP2 gathers a block's weights around it, which a program made beforehand does not know of.
        if not distributed.is_sharded(model) and is_long(run, architecture, text, cutting, accelerator):
            steps = make_steps(run, text, 1000, **cutting)
            timed = [functools.partial(train_on, steps[step], 0.0) for step in range(1000 - TIMED_TO_COMPILE, 1000)]
            wanted = str(pays(accelerator, model, try_step, timed)).lower()
            learner.forget_moments()
    elif wanted == "true":
        if error := compile_now(model, try_step):
            raise UserError(f"torch_compile: {error}; give --torch_compile false, or PyTorch's compiler what it needs")
        learner.forget_moments()
    return dataclasses.replace(run, torch_compile=wanted)


def is_long(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, cutting, accelerator) -> bool:
    """Whether the run is so long that compiling may pay, going by its arithmetic; all processes agree."""
    if run.max_minutes is not None:
        return 60 * run.max_minutes > 2 * LEAST_SECONDS
    max_steps = decide_steps(run, text, cutting, None, None, None)
    counts = counts_of_full_pairs(run, pairs_of(run, max_steps))
    arithmetic = training_arithmetic(architecture, counts, run.objective in PAIR_TASKS)
    if arithmetic < LEAST_SECONDS * SLOWEST_PEAK:
        return False  # nowhere, and all that measuring takes is spared
    peak = accelerator.reduce(torch.tensor(peak_of(accelerator), device=accelerator.device), "sum")
    return arithmetic / float(peak) > LEAST_SECONDS


def micro_batches_of_every_kind(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """
    A micro-batch, some of its rows and one of them, with padding and without, and one of a single prediction: whatever
    gets programs of its own. The compiler makes one for each size of 1.

    Args:
        batch: the model's arguments, as large as any of the run; its rows (B, T) may be packed.
    """
    kinds = []
    for rows in (list(range(len(batch["input_ids"]))), [0, 0], [0]):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        for padding in (0, 1) if "sequence_ids" not in batch else (0,):  # packed rows always have a mask
            real = torch.ones_like(part["attention_mask"])
            real[:, real.shape[1] - padding :] = 0
            kinds.append(part if "sequence_ids" in batch else {**part, "attention_mask": real})
    if "next_sentence_label" not in batch:  # with it [CLS] is read beside
        slots = ("masked_positions", "labels")
        kinds += [{**kind, **{name: kind[name][:, :1] for name in slots}} for kind in kinds]
    return kinds


def compile_blocks(model: nn.Module) -> None:
    """
    Have PyTorch's compiler make one program for all blocks of the encoder, for rows of any number and width.

    Regional compilation: what is compiled is one block, so that a deep model takes no longer than a flat one. Names of
    parameters and what a checkpoint holds stay as they are. Nothing is compiled before the next step. Three settings
    of the compiler are changed for the whole process.

    Args:
        model: a d2l-bert with an encoder, without a distributed wrapper.
    """
    # Masks and activations are cheaper to compute again than to write and read.
    torch._functorch.config.aggressive_recomputation = True
    # Training and evaluation, blocks and the last one, rows with padding and without, single rows and queries: each
    # has a program. Past the limit, 8 by default, all others would run as written.
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
    # Sizes that are equal by chance stay apart: a width of 128 beside a hidden size of 128 would have a program alone.
    torch.fx.experimental._config.use_duck_shape = False
    for block in model.base_model.encoder.layer:
        block.compute = torch.compile(type(block).compute.__get__(block), dynamic=True)


def leave_as_written(model: nn.Module) -> None:
    """Undo `compile_blocks`."""
    for block in model.base_model.encoder.layer:
        vars(block).pop("compute", None)


def compile_now(model: nn.Module, try_step: Callable[[], object]) -> str | None:
    """
    Compile the blocks by computing with them.

    Args:
        try_step: takes micro-batches of every kind that gets a program of its own forward and back, in this process
            alone, so that all programs are made here.

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
        # Under DDP the message begins with a line "backend='compile_fn' raised:", and the reason follows.
        reasons = (line for line in str(error).strip().splitlines() if not line.endswith(" raised:"))
        return next(reasons, type(error).__name__)
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
    if accelerator.is_main_process or error:  # a rank that cannot compile says why
        say(outcome)
    return compiled < as_written
