"""Measurements before the first step that choose the micro-batch size, torch.compile and the number of steps."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable

import torch

from d2l_bert.errors import UserError, is_out_of_memory
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.progress import counted
from d2l_bert.tokenization.prepare import PreparedText
from d2l_bert.training import distributed
from d2l_bert.training.arithmetic import peak_of, training_arithmetic
from d2l_bert.training.batching import (
    counts_of_full_pairs,
    full_length_pairs,
    make_batch_maker,
    make_steps,
    micro_batch_pairs,
    trial_micro_batches,
)
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.compilation import compile_now, compiling_pays, micro_batches_of_every_kind
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import PretrainingSteps
from d2l_bert.training.learner import Learner
from d2l_bert.training.schedule import DEFAULT_EVALUATIONS


logger = logging.getLogger(__name__)


# The least gain in speed for which a micro-batch is doubled. Smaller gains are noise, and not worth the memory.
MIN_GAIN = 1.05

# The most turns in which a size and its half are timed. If the size is faster in none of them, the search ends.
TURNS_OF_SIZES = 3

NO_MEMORY_FOR_ONE = (
    "out of memory with a single pair; give --gradient_checkpointing, lower --max_seq_length, or take a smaller model"
)


def choose_micro_batch_size(
    run: PretrainConfig, learner: Learner, text: PreparedText, cutting: dict, resumed: Checkpoint | None
) -> PretrainConfig:
    """
    Resolve `micro_batch_size` to a number.

    `auto` takes the size in the checkpoint to resume from. Without a checkpoint, `auto` is the fastest size that fits
    into memory.

    Args:
        cutting: what `batching.how_to_cut` returned for this process.

    Returns:
        The options of the run with the size.
    """
    if run.micro_batch_size != "auto":
        return run
    if resumed:
        size = resumed.state["micro_batch_size"]
    else:
        # Each size is timed several times: its batches are made once.
        micro_batches = functools.cache(functools.partial(trial_micro_batches, run, text, **cutting))
        pairs_per_process = -(-run.global_batch_size // learner.accelerator.num_processes)
        size = find_micro_batch(learner, micro_batches, pairs_per_process)
        if learner.accelerator.is_main_process:
            logger.info(
                f"micro-batches of {size} pairs of {run.max_seq_length} tokens are the fastest that fit into memory"
            )
        learner.reset_optimizers()
    return dataclasses.replace(run, micro_batch_size=size)


def find_micro_batch(learner: Learner, micro_batches: Callable[[int], list[dict]], most: int) -> int:
    """
    The micro-batch size, in pairs, that trains fastest and fits into the memory of every process.

    Every process must call this function; all get the same answer. On FSDP2 the other processes hang if a single
    process runs out of memory, because all of them take part in each forward pass.

    Args:
        micro_batches: returns, for a micro-batch size, the largest micro-batches that the run would have.
        most: the number of pairs of a process in a step, which is the largest size to try.

    Raises:
        UserError: a single pair does not fit into memory.
    """

    def speed(size):
        """Tokens per second of the slowest process; 0 if a process runs out of memory."""
        seconds, tokens = math.inf, 0
        try:
            tried = micro_batches(size)
            tokens = sum(int(batch["attention_mask"].sum()) for batch in tried)
            for _ in range(3):  # take the fastest of 3: the first includes memory allocation
                start = time.monotonic()
                for batch in tried:
                    learner.try_gradient(batch).item()
                seconds = min(seconds, time.monotonic() - start)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = math.inf
        learner.clear_gradients()
        speeds = learner.accelerator.gather(torch.tensor(tokens / seconds, device=learner.accelerator.device))
        return float(speeds.min())

    try:
        learner.try_step(micro_batches(1)[:1])  # allocates the optimizer's moments, which need memory too
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(NO_MEMORY_FOR_ONE) from None
    return fastest(speed, most)


def fastest(speed: Callable[[int], float], most: int) -> int:
    """
    The fastest size, found by doubling from 1 until the gain in speed is below `MIN_GAIN`.

    A size and its half are timed alternately, up to `TURNS_OF_SIZES` times, and their highest speeds are compared: the
    search does not end because another program slows down one measurement.

    Args:
        speed: returns the speed at a size; 0 if the size does not fit into memory.
        most: the largest size to try.

    Raises:
        UserError: size 1 does not fit into memory.
    """
    best, speed_of_best = 1, speed(1)
    if not speed_of_best:
        raise UserError(NO_MEMORY_FOR_ONE)
    while best < most:
        size, highest = min(2 * best, most), 0.0
        for _ in range(TURNS_OF_SIZES):
            speed_at_size = speed(size)
            if not speed_at_size:
                return best
            highest, speed_of_best = max(highest, speed_at_size), max(speed_of_best, speed(best))
            if highest >= MIN_GAIN * speed_of_best:
                break
        else:
            return best
        best, speed_of_best = size, highest
    return best


# `auto` tries torch.compile if the run's arithmetic takes longer than this at the device's peak. Compiling takes 10 to
# 80 s and saves at most about a tenth of a step; a step takes two to four times as long as its arithmetic at the peak.
MIN_SECONDS_TO_COMPILE = 450.0

# A lower bound for the operations per second of any device.
LOWEST_PEAK = 2e10


def choose_torch_compile(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    learner: Learner,
    text: PreparedText,
    cutting: dict,
    resumed: Checkpoint | None,
) -> PretrainConfig:
    """
    Resolve `torch_compile` to `true` or `false`, and compile the encoder blocks for `true`.

    `auto` takes the choice in the checkpoint to resume from. Without a checkpoint, `auto` is `true` for a long run
    whose steps are measured to be faster when compiled.

    Returns:
        The options of the run with the choice.

    Raises:
        UserError: `torch_compile` is `true` and compiling fails.
    """
    accelerator, model = learner.accelerator, learner.model
    choice = resumed.state.get("torch_compile", "false") if resumed and run.torch_compile == "auto" else None
    choice = choice or run.torch_compile

    def try_step():
        kinds = micro_batches_of_every_kind(trial_micro_batches(run, text, micro_batch_pairs(run), **cutting)[-1])
        # With several processes, a process without rows in a micro-batch gets an empty one.
        if cutting["world_size"] > 1:
            kinds.append(make_batch_maker(run, text.tokens, text.tokenizer, run.max_seq_length).empty())
        try:
            for batch in kinds:
                learner.try_gradient(batch)
        finally:
            learner.clear_gradients()

    if choice == "auto":
        choice = "false"
        # Not with FSDP2, which gathers a block's weights at each forward pass; compiled programs do not expect that.
        if not distributed.is_sharded(model) and is_long_enough_to_compile(
            run, architecture, text, cutting, accelerator
        ):
            last_step = make_steps(run, text, PROVISIONAL_STEPS, **cutting)[PROVISIONAL_STEPS - 1]
            timed = functools.partial(learner.try_step, last_step)
            choice = str(compiling_pays(accelerator, model, try_step, timed)).lower()
            learner.reset_optimizers()
    elif choice == "true":
        if error := compile_now(model, try_step):
            raise UserError(f"torch_compile: {error}; give --torch_compile false, or PyTorch's compiler what it needs")
        learner.reset_optimizers()
    return dataclasses.replace(run, torch_compile=choice)


def is_long_enough_to_compile(
    run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, cutting, accelerator
) -> bool:
    """Whether the run's arithmetic takes so long that compiling may save time; the same answer in all processes."""
    if run.max_minutes is not None:
        return 60 * run.max_minutes > 2 * MIN_SECONDS_TO_COMPILE
    max_steps = run.max_steps or steps_for_epochs(run, make_steps(run, text, PROVISIONAL_STEPS, **cutting))
    counts = counts_of_full_pairs(run, full_length_pairs(run, max_steps))
    arithmetic = training_arithmetic(architecture, counts, run.objective in PAIR_TASKS)
    if arithmetic < MIN_SECONDS_TO_COMPILE * LOWEST_PEAK:
        return False  # too short on any device: save the time of measuring the peak
    peak = accelerator.reduce(torch.tensor(peak_of(accelerator), device=accelerator.device), "sum")
    return arithmetic / float(peak) > MIN_SECONDS_TO_COMPILE


# The assumed length of a run, in steps, while its real length is not known.
PROVISIONAL_STEPS = 1000

# Evaluations that take a larger share of `max_minutes` are warned of.
MOST_FOR_EVALUATIONS = 0.5

# Steps to time at each sequence length for `max_minutes`.
STEPS_TIMED_PER_LENGTH = 20


def choose_max_steps(run: PretrainConfig, learner: Learner, text: PreparedText, cutting: dict, held_out) -> int:
    """
    The number of steps in the run, from `max_steps`, `num_train_epochs` or `max_minutes`.

    The number is saved in `run_config.json` and in every checkpoint, so that a resumed run keeps its schedule.

    Args:
        held_out: the batches of an evaluation, which `max_minutes` includes.
    """
    if run.max_steps is not None:
        return run.max_steps
    steps = make_steps(run, text, PROVISIONAL_STEPS, **cutting)
    if run.max_minutes is None:
        return steps_for_epochs(run, steps)
    max_steps, share = steps_for_minutes(run, *time_steps(steps, learner, held_out))
    if share > MOST_FOR_EVALUATIONS and learner.accelerator.is_main_process:
        logger.warning(
            f"max_minutes {run.max_minutes:g}: evaluations take {share:.0%} of them, which leaves time for "
            f"{counted(max_steps, 'step')}; lower --max_eval_pairs, give more --eval_steps, or more minutes"
        )
    return max_steps


def steps_for_epochs(run: PretrainConfig, steps: PretrainingSteps) -> int:
    """
    The number of steps in a run of `num_train_epochs`.

    Args:
        steps: the steps of a run that is `PROVISIONAL_STEPS` long.
    """
    # Each sequence length has its own plan of an epoch's pairs; a step covers a share of a plan.
    epochs_per_step = sum(
        (end - phase.first_step) / PROVISIONAL_STEPS * phase.global_batch_size / phase.pairs.pairs_in_an_epoch()
        for phase, end in _with_ends(steps.phases)
    )
    return math.ceil(run.num_train_epochs / epochs_per_step)


def time_steps(steps: PretrainingSteps, learner: Learner, held_out) -> tuple[float, float]:
    """
    Measure the seconds of an average step and of an evaluation, averaged over the processes.

    Times some steps of each sequence length, at a learning rate of 0, so that the weights do not change.

    Args:
        steps: the steps of a run that is `PROVISIONAL_STEPS` long.
    """
    step_seconds = 0.0
    for phase, end in _with_ends(steps.phases):
        learner.try_step(steps[phase.first_step])  # not timed: the first step allocates memory
        start = time.monotonic()
        timed = range(phase.first_step, end)[1 : STEPS_TIMED_PER_LENGTH + 1] or [phase.first_step]
        for step in timed:
            learner.try_step(steps[step])
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


def steps_for_minutes(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> tuple[int, float]:
    """
    The number of steps that fit into `max_minutes`, with their evaluations; at least one.

    Returns:
        The number, and the share of `max_minutes` that the evaluations take.
    """
    seconds, evaluations = 60 * run.max_minutes, DEFAULT_EVALUATIONS
    if run.eval_steps:
        evaluations = seconds / (step_seconds * run.eval_steps + evaluation_seconds)
    share = min(1.0, evaluations * evaluation_seconds / seconds)
    return max(1, int((1 - share) * seconds / step_seconds)), share
