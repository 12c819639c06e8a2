"""What is settled by trying before the first step: micro-batch, compiling, number of steps."""

import dataclasses
import functools
import itertools
import logging
import math
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
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import PreparedText
from d2l_bert.training import distributed
from d2l_bert.training.arithmetic import peak_of, training_arithmetic
from d2l_bert.training.batching import (
    counts_of_full_pairs,
    make_batch_maker,
    make_steps,
    micro_batch_pairs,
    pairs_of,
    trial_micro_batches,
)
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import PretrainingSteps
from d2l_bert.training.host_settings import RECOMPUTATION_LIMITS
from d2l_bert.training.learner import Learner
from d2l_bert.training.schedule import EVALUATIONS


logger = logging.getLogger(__name__)


# Doubling a micro-batch must gain so much; below it is noise, and memory is worth more.
LEAST_GAIN = 1.05

NO_MEMORY_FOR_ONE = (
    "out of memory with a single pair; give --gradient_checkpointing, lower --max_seq_length, or take a smaller model"
)


def settle_micro_batch(
    run: PretrainConfig, learner: Learner, text: PreparedText, cutting: dict, resumed: Checkpoint | None
) -> PretrainConfig:
    """The run with its micro-batch as a number: `auto` is what its checkpoint was made with, or what is found."""
    if run.micro_batch_size != "auto":
        return run
    if resumed:
        found = resumed.state["micro_batch_size"]
    else:
        micro_batches = functools.partial(trial_micro_batches, run, text, **cutting)
        most = -(-run.global_batch_size // learner.accelerator.num_processes)
        found = find_micro_batch(learner, micro_batches, most)
        if learner.accelerator.is_main_process:
            logger.info(
                f"micro-batches of {found} pairs of {run.max_seq_length} tokens are the fastest that the memory holds"
            )
        learner.forget_moments()
    return dataclasses.replace(run, micro_batch_size=found)


def find_micro_batch(learner: Learner, micro_batches: Callable[[int], list[dict]], most: int) -> int:
    """
    The micro-batch that this machine trains on fastest and has the memory for. All processes must call, and agree.

    Under FSDP2 a forward pass is the work of all processes, and memory that runs out in one alone leaves the others
    waiting.

    Args:
        micro_batches: of a number of pairs computed at once, what the run then has of largest ones.
        most: pairs that a process has in a step.

    Raises:
        UserError: there is no memory for a single pair.
    """

    def speed(size):
        seconds, tokens = math.inf, 0
        try:
            tried = micro_batches(size)
            tokens = sum(int(batch["attention_mask"].sum()) for batch in tried)
            for _ in range(3):  # the first one allocates
                start = time.monotonic()
                for batch in tried:
                    learner.try_gradient(batch).item()
                seconds = min(seconds, time.monotonic() - start)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seconds = math.inf
        learner.forget_gradient()
        speeds = learner.accelerator.gather(torch.tensor(tokens / seconds, device=learner.accelerator.device))
        return float(speeds.min())

    try:
        learner.try_step(micro_batches(1)[:1])  # the optimizer's moments have their memory from here on
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


# Seconds that a run's arithmetic alone must take at the device's peak. Compiling takes 10 to 60 and spares a tenth or
# so of a step, which in turn takes two to four times as long as its arithmetic.
LEAST_SECONDS = 300.0

MOST_PROGRAMS = 64

# Steps that tell whether compiling pays, and the fewest operations a second that any device might have.
TIMED_TO_COMPILE, SLOWEST_PEAK = 3, 2e10


def settle_compiling(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    learner: Learner,
    text: PreparedText,
    cutting: dict,
    resumed: Checkpoint | None,
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
                learner.try_gradient(batch)
        finally:
            learner.forget_gradient()

    if wanted == "auto":
        wanted = "false"
        # FSDP2 gathers a block's weights around it, which a program made beforehand does not know of.
        if not distributed.is_sharded(model) and is_long(run, architecture, text, cutting, accelerator):
            steps = make_steps(run, text, 1000, **cutting)
            timed = [functools.partial(learner.try_step, steps[step]) for step in range(1000 - TIMED_TO_COMPILE, 1000)]
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
    max_steps = run.max_steps or count_steps(run, make_steps(run, text, STAND_IN, **cutting))
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
    parameters and what a checkpoint holds stay as they are. Nothing is compiled before the next step. Some settings
    of the compiler are changed for the whole process.

    Args:
        model: a d2l-bert with an encoder, without a distributed wrapper.
    """
    # Activations are cheaper to compute again than to write and read. Not by `aggressive_recomputation`: it would also
    # draw dropout's masks a second time, with other random numbers.
    for name in RECOMPUTATION_LIMITS:
        setattr(torch._functorch.config, name, False)
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
        logger.info(outcome)
    return compiled < as_written


# Steps that stand for the run while its length is not known.
STAND_IN = 1000

# Steps of each length that `max_minutes` is worked out from.
TIMED_STEPS = 20


def decide_steps(run: PretrainConfig, learner: Learner, text: PreparedText, cutting: dict, held_out) -> int:
    """
    The number of optimizer steps, from whichever option gives the length of the run.

    What was decided is kept in run_config.json and in every checkpoint, so that a resumed run keeps its schedule.

    Args:
        held_out: the batches of an evaluation.
    """
    if run.max_steps is not None:
        return run.max_steps
    steps = make_steps(run, text, STAND_IN, **cutting)
    if run.max_minutes is None:
        return count_steps(run, steps)
    return steps_in(run, *time_steps(steps, learner, held_out))


def count_steps(run: PretrainConfig, steps: PretrainingSteps) -> int:
    """
    The steps of a run whose length is `num_train_epochs`.

    Args:
        steps: of a run of `STAND_IN` steps.
    """
    # Each length has a plan of its own, of which a step is some part.
    passes = sum(
        (end - phase.first_step) / STAND_IN * phase.global_batch_size / len(phase.plans.epoch(0))
        for phase, end in _with_ends(steps.phases)
    )
    return math.ceil(run.num_train_epochs / passes)


def time_steps(steps: PretrainingSteps, learner: Learner, held_out) -> tuple[float, float]:
    """
    Seconds of an average step and of an evaluation, averaged over the processes.

    Some steps of every length are timed at a rate of 0, and one evaluation: nothing is learnt.
    """
    step_seconds = 0.0
    for phase, end in _with_ends(steps.phases):
        learner.try_step(steps[phase.first_step])  # the first step allocates, and is slow
        start = time.monotonic()
        timed = range(phase.first_step, end)[1 : TIMED_STEPS + 1] or [phase.first_step]
        for step in timed:
            learner.try_step(steps[step])
        step_seconds += (end - phase.first_step) / STAND_IN * (time.monotonic() - start) / len(timed)
    start = time.monotonic()
    learner.evaluate(held_out)
    evaluation_seconds = time.monotonic() - start
    learner.forget_moments()
    timings = torch.tensor([step_seconds, evaluation_seconds], device=learner.accelerator.device)
    return tuple(learner.accelerator.reduce(timings, "mean").tolist())


def _with_ends(phases):
    """Each phase, and the step with which the next one begins."""
    return zip(phases, [*(later.first_step for later in phases[1:]), STAND_IN], strict=True)


def steps_in(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> int:
    """Steps that `max_minutes` have room for, evaluations included."""
    seconds = 60 * run.max_minutes
    if run.eval_steps:
        return max(1, int(seconds / (step_seconds + evaluation_seconds / run.eval_steps)))
    return max(1, int((seconds - EVALUATIONS * evaluation_seconds) / step_seconds))
