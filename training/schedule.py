"""The schedule of a run: how many steps it has, the learning rate of each, and what is to be done after each."""

import itertools
import logging
import math
import time
from collections.abc import Callable

import torch

from d2l_bert.messages import UserError, counted
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Ranks
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.devices import on_main, together
from d2l_bert.training.optimizer import Learner


logger = logging.getLogger(__name__)

# Numbers in a whole run without --logging_steps, --eval_steps, --save_steps.
DEFAULT_ROWS, DEFAULT_EVALUATIONS, DEFAULT_CHECKPOINTS = 100, 10, 10

# The assumed length of a run, in steps, while its real length is not known; and the steps to time at each length.
PROVISIONAL_STEPS, STEPS_TIMED = 1000, 20

# For each schedule, a function from the remaining share of the decay steps, in [0, 1], to the share of the peak rate.
# The decay 1 - sqrt is the best that Hägele et al. (2024, section 3) found for `warmup_stable_decay`.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: math.sin(math.pi / 2 * left) ** 2,
    "warmup_stable_decay": lambda left: 1 - math.sqrt(1 - left),
}


def learning_rate_share(kind: str, step: int, warmup_steps: int, max_steps: int, decay_steps: int = 0) -> float:
    """
    The learning rate at a step as a share of the peak rate, in (0, 1]: above 0 in the first and in the last step.

    Args:
        kind: how the rate decays after warm-up. `linear` and `cosine` (half a wave: Loshchilov and Hutter, 2016) decay
            from the end of warm-up on; `warmup_stable_decay` (Hu et al., 2024) decays in the last `decay_steps`, as
            1 - sqrt.
        step: counted from 0.
        warmup_steps: steps in which the rate rises on a straight line; the last of these steps has the peak rate.
        max_steps: steps of the run.
        decay_steps: for `warmup_stable_decay` alone.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    steps_after_warmup = max_steps - warmup_steps
    if kind == "warmup_stable_decay":
        decay_steps = min(decay_steps, steps_after_warmup)
    else:
        decay_steps = steps_after_warmup
    return _DECAYS[kind](min((max_steps - step) / max(1, decay_steps), 1.0))


class RunSchedule:
    """
    The learning rate, and what is to be done after each step, counted from 1.

    The last step is always logged, evaluated and saved.

    Args:
        run: the options, with the number of steps.
    """

    def __init__(self, run: PretrainConfig):
        self.run, self.max_steps = run, run.max_steps
        self.every = {
            "log": run.logging_steps or math.ceil(run.max_steps / DEFAULT_ROWS),
            "evaluate": run.eval_steps or math.ceil(run.max_steps / DEFAULT_EVALUATIONS),
            "save": run.save_steps or math.ceil(run.max_steps / DEFAULT_CHECKPOINTS),
        }

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        warmup_steps, decay_steps = self.run.schedule_steps(self.max_steps)
        kind = self.run.lr_scheduler_type
        return self.run.learning_rate * learning_rate_share(kind, step - 1, warmup_steps, self.max_steps, decay_steps)

    def due_at(self, step: int) -> set[str]:
        """What is to be done after a step: `log`, `evaluate`, `save`. Every evaluation and checkpoint is logged."""
        due = {name for name, every in self.every.items() if step % every == 0 or step == self.max_steps}
        return {*due, "log"} if due else due


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps


def find_max_steps(run: PretrainConfig, text: PreparedText, learner: Learner, held_out, ranks: Ranks) -> int:
    """
    The number of steps in the run, from `max_steps`, `num_train_epochs` or `max_minutes`.

    Args:
        held_out: the batches of an evaluation, which `max_minutes` includes.

    Raises:
        UserError: `max_minutes` has no time for two steps beside the evaluations.
    """
    if run.max_steps is not None:
        return run.max_steps
    with together():
        steps = TrainingSteps(run, text, PROVISIONAL_STEPS, ranks, learner.accelerator.device.type == "cuda")
    if run.num_train_epochs is not None:
        epochs_a_step = steps.epochs() / PROVISIONAL_STEPS
        return math.ceil(run.num_train_epochs / epochs_a_step - 1e-6)  # not a step more for a rounding error
    step_seconds = time_steps(learner, steps) / PROVISIONAL_STEPS
    learner.reset_optimizers()
    start = time.monotonic()
    learner.evaluate(held_out)
    evaluation_seconds = mean_of_processes(learner, time.monotonic() - start)
    return on_main(steps_for_minutes, run, step_seconds, evaluation_seconds)


def time_steps(learner: Learner, steps: TrainingSteps) -> float:
    """
    The seconds that all steps take, averaged over the processes; some are timed of each stage, at a rate of 0.

    The optimizers keep the state of these steps.
    """
    seconds = 0.0
    for stage in steps.stages:
        count, times = stage.end_step - stage.first_step, []
        for step in itertools.islice(steps.walk(stage.first_step), min(count, STEPS_TIMED)):
            if not times:  # taken twice: the first time it allocates memory, and compiles
                learner.take_step(step.micro_batches, step.counts)
            start = time.monotonic()
            learner.take_step(step.micro_batches, step.counts)
            times.append(time.monotonic() - start)
        seconds += count * sum(times) / max(1, len(times))
    return mean_of_processes(learner, seconds)


def mean_of_processes(learner: Learner, seconds: float) -> float:
    """The mean of a number over all processes."""
    return float(learner.accelerator.reduce(torch.tensor(seconds, device=learner.accelerator.device), "mean"))


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
