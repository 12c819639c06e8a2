"""What depends on the machine: defaults, torch.compile, what is found by timing steps; and its description."""

import contextlib
import dataclasses
import logging
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate import Accelerator
from torch import nn

from d2l_bert.errors import UserError, explained, is_out_of_memory
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.progress import counted
from d2l_bert.training.batching import DEFAULT_EVALUATIONS, make_steps, trial_micro_batches
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import PretrainingSteps
from d2l_bert.training.job import Job
from d2l_bert.training.learner import Learner


logger = logging.getLogger(__name__)


def with_defaults(run: PretrainConfig, architecture: D2lBertConfig, accelerator: Accelerator) -> PretrainConfig:
    """
    The options of a run, with the defaults that depend on the device.

    - `attn_implementation`: on a CPU, PyTorch's fused kernel (`sdpa`) has no dropout, and falls back on a slow path: a
      step of BERT-base at 512 tokens takes 5.9 s, and 4.5 s with `eager`. Without dropout `sdpa` is a tenth slower
      than `eager`, but saves memory at long sequence lengths.
    - `dataloader_num_workers`: 1 for a GPU; 0 on a CPU, where a worker would take cores from the training step.
    - `torch_compile`: true on CUDA, but for FSDP2, which gathers a block's weights at each forward pass; compiled
      programs do not expect that.

    Raises:
        UserError: the device cannot compute flex attention.
    """
    device = accelerator.device.type
    if run.attn_implementation == "flex_attention" and device == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a CPU; give eager or sdpa")
    is_eager_faster = run.max_seq_length <= 256 or architecture.attention_probs_dropout_prob > 0
    defaults = {
        "mixed_precision": accelerator.mixed_precision,
        "attn_implementation": "eager" if device == "cpu" and is_eager_faster else "sdpa",
        "dataloader_num_workers": int(device != "cpu"),
        "torch_compile": device == "cuda" and not accelerator.is_fsdp2,
    }
    return dataclasses.replace(run, **{name: value for name, value in defaults.items() if getattr(run, name) is None})


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile

# Programs that the compiler may make for the encoder block: one for training, one for evaluation, for the last block,
# for rows with and without padding, and wherever a size is 1. PyTorch would make 8, and run the rest uncompiled.
RECOMPILE_LIMIT = 64


@contextlib.contextmanager
def compiled_blocks(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """
    Within the block, run the encoder blocks compiled, with one program for all blocks and dynamic shapes.

    This is regional compilation: one block is compiled, so that a deep model compiles as fast as a shallow one. Names
    of parameters and the content of checkpoints do not change. Programs are compiled when they are first needed.

    Args:
        model: a d2l-bert model with an encoder, without a DDP or FSDP2 wrapper.
        is_compiled: whether to compile; nothing is done if not.

    Raises:
        UserError: a program cannot be compiled.
    """
    if not is_compiled:
        yield
        return
    blocks = model.base_model.encoder.layer
    for block in blocks:
        block.compute = torch.compile(type(block).compute.__get__(block), dynamic=True)
    try:
        with (
            explained("torch_compile", "give --torch_compile false", torch._dynamo.exc.TorchDynamoException),
            torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            # Recomputing activations is cheaper than writing and reading them. `aggressive_recomputation` is wrong
            # here: it would also recompute dropout masks, with other random numbers.
            torch._functorch.config.patch(
                ban_recompute_used_far_apart=False,
                ban_recompute_long_fusible_chains=False,
                ban_recompute_materialized_backward=False,
            ),
            # Duck shapes would compile a separate program for a sequence length of 128 beside a hidden size of 128.
            torch.fx.experimental._config.patch(use_duck_shape=False),
        ):
            yield
    finally:
        for block in blocks:
            vars(block).pop("compute", None)


# ---------------------------------------------------------------------------------------------------------------------
# The size of a micro-batch

# The least gain in speed for which a micro-batch is doubled. Smaller gains are noise, and not worth the memory.
MIN_GAIN = 1.05


def find_micro_batch(job: Job, learner: Learner) -> int:
    """
    The micro-batch size, in pairs, that trains fastest and fits into the memory of every process.

    Found by doubling from 1 until the gain in speed is below `MIN_GAIN`. Every process must call this function; all
    get the same answer. On FSDP2 the other processes hang if a single process runs out of memory, because all of them
    take part in each forward pass.

    Raises:
        UserError: a single pair does not fit into memory.
    """

    def speed(size):
        """Tokens per second of the slowest process; 0 if a process runs out of memory."""
        seconds, tokens = math.inf, 0
        try:
            tried = trial_micro_batches(job.run, job.text, size, job.sharding)
            tokens = sum(int(batch["attention_mask"].sum()) for batch in tried)
            for number in range(4):  # the first also allocates memory, and the optimizer's moments
                start = time.monotonic()
                for batch in tried:
                    learner.take_step([batch]) if number == 0 else learner.try_gradient(batch).item()
                seconds = min(seconds, time.monotonic() - start)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = math.inf
        learner.wrapped_model.zero_grad()
        speeds = learner.accelerator.gather(torch.tensor(tokens / seconds, device=learner.accelerator.device))
        return float(speeds.min())

    most, best, speed_of_best = -(-job.run.global_batch_size // learner.accelerator.num_processes), 1, speed(1)
    if not speed_of_best:
        raise UserError(
            "out of memory with a single pair; give --gradient_checkpointing, lower --max_seq_length, or take a "
            "smaller model"
        )
    while best < most and (speed_of_next := speed(min(2 * best, most))) >= MIN_GAIN * speed_of_best:
        best, speed_of_best = min(2 * best, most), speed_of_next
    learner.reset_optimizers()
    logger.info(f"micro-batches of {best} pairs of {job.run.max_seq_length} tokens are the fastest that fit")
    return best


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps

# The assumed length of a run, in steps, while its real length is not known.
PROVISIONAL_STEPS = 1000

# Steps to time at each sequence length for `max_minutes`.
STEPS_TIMED_PER_LENGTH = 20


def find_max_steps(job: Job, learner: Learner, held_out) -> int:
    """
    The number of steps in the run, from `max_steps`, `num_train_epochs` or `max_minutes`.

    Args:
        held_out: the batches of an evaluation, which `max_minutes` includes.

    Raises:
        UserError: `max_minutes` has no time for two steps beside the evaluations.
    """
    run = job.run
    if run.max_steps is not None:
        return run.max_steps
    steps = make_steps(run, job.text, PROVISIONAL_STEPS, job.sharding)
    if run.max_minutes is None:
        # Each sequence length has its own plan of an epoch's pairs; a step covers a share of a plan.
        epochs_per_step = sum(
            (end - phase.first_step) / PROVISIONAL_STEPS * phase.global_batch_size / phase.pairs.pairs_in_an_epoch()
            for phase, end in _with_ends(steps.phases)
        )
        return math.ceil(run.num_train_epochs / epochs_per_step)
    step_seconds, evaluation_seconds = time_steps(steps, learner, held_out)
    return steps_for_minutes(run, step_seconds, evaluation_seconds)


def time_steps(steps: PretrainingSteps, learner: Learner, held_out) -> tuple[float, float]:
    """
    Measure the seconds of an average step and of an evaluation, averaged over the processes.

    Times some steps of each sequence length, at a learning rate of 0, so that the weights do not change.

    Args:
        steps: the steps of a run that is `PROVISIONAL_STEPS` long.
    """
    step_seconds = 0.0
    for phase, end in _with_ends(steps.phases):
        learner.take_step(steps[phase.first_step])  # not timed: the first step allocates memory, and compiles
        start = time.monotonic()
        timed = range(phase.first_step, end)[1 : STEPS_TIMED_PER_LENGTH + 1] or [phase.first_step]
        for step in timed:
            learner.take_step(steps[step])
        step_seconds += (end - phase.first_step) / PROVISIONAL_STEPS * (time.monotonic() - start) / len(timed)
    start = time.monotonic()
    learner.evaluate(held_out)
    evaluation_seconds = time.monotonic() - start
    learner.reset_optimizers()
    timings = torch.tensor([step_seconds, evaluation_seconds], device=learner.accelerator.device)
    return tuple(learner.accelerator.reduce(timings, "mean").tolist())


def _with_ends(phases):
    """Pairs of a phase and the step after its last, counted from 0."""
    return zip(phases, [*(later.first_step for later in phases[1:]), PROVISIONAL_STEPS], strict=True)


def steps_for_minutes(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> int:
    """
    The number of steps that fit into `max_minutes`, with their evaluations. Says so if these take most of the time.

    Raises:
        UserError: fewer than two steps fit.
    """
    seconds, evaluations = 60 * run.max_minutes, DEFAULT_EVALUATIONS
    if run.eval_steps:
        evaluations = seconds / (step_seconds * run.eval_steps + evaluation_seconds)
    share = min(1.0, evaluations * evaluation_seconds / seconds)
    steps = int((1 - share) * seconds / step_seconds)
    told = f"max_minutes {run.max_minutes:g}: evaluations take {share:.0%} of them, which leaves time for "
    way_out = "lower --max_eval_pairs, give more --eval_steps, or more minutes"
    if steps < 2:
        raise UserError(f"{told}{counted(steps, 'step')} of {step_seconds:.2g} s; {way_out}")
    if share > 0.5:
        logger.warning(f"{told}{counted(steps, 'step')}; {way_out}")
    return steps


# ---------------------------------------------------------------------------------------------------------------------
# The machine's description

# Variables that set the number of OpenMP's threads, their cores, and how long they spin at a barrier.
OPENMP_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),
    *("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_AFFINITY"),
)

CPUINFO = Path("/proc/cpuinfo")


def describe_machine(accelerator: Accelerator) -> dict:
    """
    The entry `machine` of run_config.json, as this process sees the machine. It has no host or user name.

    `threads` is the number of threads of each process, `openmp` the environment variables of OpenMP, `memory_gb` the
    machine's memory in 10^9 bytes, and `accelerator` the name of the GPU, or None on a CPU.
    """
    device, processor = accelerator.device, platform.processor() or platform.machine()
    if CPUINFO.exists() and (match := re.search(r"^model name\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)):
        processor = " ".join(match[1].split())
    name_of = {"cuda": torch.cuda.get_device_name, "mps": lambda _: torch.backends.mps.get_name()}
    return {
        "device": str(device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in OPENMP_VARIABLES if name in os.environ},
        "processor": processor,
        "accelerator": name_of[device.type](device) if device.type in name_of else None,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }
