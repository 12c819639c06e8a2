"""How many steps a run has, and after which of them it writes, evaluates and saves."""

import math
import time

import torch

from d2l_bert.training import checkpoint
from d2l_bert.training.batching import make_steps
from d2l_bert.training.config import PretrainConfig


EVALUATIONS = 10  # of a run that does not say how many

# Steps of each length that `max_minutes` is worked out from.
TIMED_STEPS = 20


def decide_steps(run, text, cutting, learner: checkpoint.Learner, train_on, evaluate_now) -> int:
    """
    The number of optimizer steps, from whichever option gives the length of the run.

    For `max_minutes` some steps of every length and one evaluation are timed, at a rate of 0, which leaves the weights
    as they are, and averaged over the processes. What was decided is kept in run_config.json and in every checkpoint,
    so that a resumed run keeps its schedule.
    """
    if run.max_steps is not None:
        return run.max_steps
    whole = 1000  # steps that stand for the run while its length is not known
    steps = make_steps(run, text, whole, **cutting)
    phases = steps.phases
    ends = [*(later.first_step for later in phases[1:]), whole]
    if run.num_train_epochs is not None:
        # Each length has a plan of its own, of which a step is some part.
        passes = sum(
            (end - phase.first_step) / whole * phase.global_batch_size / len(phase.plans.epoch(0))
            for phase, end in zip(phases, ends, strict=True)
        )
        return math.ceil(run.num_train_epochs / passes)
    return steps_in(run, *time_steps(steps, ends, learner, train_on, evaluate_now))


def time_steps(steps, ends, learner: checkpoint.Learner, train_on, evaluate_now) -> tuple[float, float]:
    """Seconds of an average step and of an evaluation, averaged over the processes; nothing is learnt meanwhile."""
    step_seconds, whole = 0.0, ends[-1]
    for phase, end in zip(steps.phases, ends, strict=True):
        train_on(steps[phase.first_step], 0.0)  # the first step allocates, and is slow
        start = time.monotonic()
        timed = range(phase.first_step, end)[1 : TIMED_STEPS + 1] or [phase.first_step]
        for step in timed:
            train_on(steps[step], 0.0)
        step_seconds += (end - phase.first_step) / whole * (time.monotonic() - start) / len(timed)
    start = time.monotonic()
    evaluate_now()
    evaluation_seconds = time.monotonic() - start
    learner.forget_moments()
    timings = torch.tensor([step_seconds, evaluation_seconds], device=learner.accelerator.device)
    return tuple(learner.accelerator.reduce(timings, "mean").tolist())


def steps_in(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> int:
    """Steps that `max_minutes` have room for, evaluations included."""
    seconds = 60 * run.max_minutes
    if run.eval_steps:
        return max(1, int(seconds / (step_seconds + evaluation_seconds / run.eval_steps)))
    return max(1, int((seconds - EVALUATIONS * evaluation_seconds) / step_seconds))


def intervals(run: PretrainConfig, max_steps: int) -> tuple[int, int, int]:
    """Steps from one row of the log to the next, from evaluation to evaluation, and from checkpoint to checkpoint."""
    return (
        run.logging_steps or math.ceil(max_steps / 100),
        run.eval_steps or math.ceil(max_steps / EVALUATIONS),
        run.save_steps or math.ceil(max_steps / 10),
    )
