"""The schedule of a run: how many steps it has, the learning rate of each, and what is to be done after each."""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable

from d2l_bert.messages import UserError, counted
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.rows import Ranks
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.learner import Learner
from d2l_bert.training.processes import largest, on_main, together


logger = logging.getLogger(__name__)

# Numbers in a whole run without --logging_steps, --eval_steps, --save_steps.
DEFAULT_ROWS = 100
DEFAULT_EVALUATIONS = 10
DEFAULT_CHECKPOINTS = 10

# The assumed length of a run, in steps, while its real length is not known; and the steps to time at each length.
PROVISIONAL_STEPS = 1000
STEPS_TIMED = 20

# Steps are timed in at most this share of `max_minutes`, and an evaluation in as much; some at each length are needed.
SHARE_FOR_TIMING = 0.1
FEWEST_STEPS_TIMED = 3

# For each schedule, a function from the share of the decay steps that is left, from 1 to nearly 0, to the share of the
# peak rate. The decay 1 - sqrt is the best that Hägele et al. (2024, section 3) found for `warmup_stable_decay`.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: math.sin(math.pi / 2 * left) ** 2,  # (1 - cos(pi left)) / 2
    "constant": lambda left: 1.0,
    "constant_with_warmup": lambda left: 1.0,
    "warmup_stable_decay": lambda left: 1 - math.sqrt(1 - left),
}


def learning_rate(run: PretrainConfig, step: int) -> float:
    """
    The learning rate of a step, counted from 1, of a run with a number of steps; above 0 in the first and last step.

    The rate rises on a straight line; the last step of warm-up has the peak rate. `linear` and `cosine` (half a wave:
    Loshchilov and Hutter, 2016) fall from the end of warm-up on; `warmup_stable_decay` (Hu et al., 2024) falls in the
    last steps alone, as 1 - sqrt. `constant` and `constant_with_warmup` do not fall.
    """
    warmup_steps = math.ceil(run.warmup_ratio * run.max_steps)
    if step <= warmup_steps:
        return run.learning_rate * step / warmup_steps
    decay_steps = run.max_steps - warmup_steps
    if run.lr_scheduler_type == "warmup_stable_decay":
        decay_steps = min(math.floor(run.decay_ratio * run.max_steps), decay_steps)
    steps_left = run.max_steps - step + 1  # this one included
    left = min(steps_left / max(1, decay_steps), 1.0)
    return run.learning_rate * _DECAYS[run.lr_scheduler_type](left)


def due_after(run: PretrainConfig, step: int) -> set[str]:
    """
    What is to be done after a step, counted from 1: `log`, `evaluate`, `save`.

    Every evaluation and checkpoint is logged. The last step is always logged, evaluated and saved.
    """
    if step == run.max_steps:
        return {"log", "evaluate", "save"}
    due = set()
    if step % (run.logging_steps or math.ceil(run.max_steps / DEFAULT_ROWS)) == 0:
        due.add("log")
    if step % (run.eval_steps or math.ceil(run.max_steps / DEFAULT_EVALUATIONS)) == 0:
        due |= {"log", "evaluate"}
    if step % (run.save_steps or math.ceil(run.max_steps / DEFAULT_CHECKPOINTS)) == 0:
        due |= {"log", "save"}
    return due


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps


def find_max_steps(run: PretrainConfig, text: PreparedText, learner: Learner, held_out, ranks: Ranks) -> int:
    """
    The number of steps in the run, from `max_steps`, `num_train_epochs` or `max_minutes`: the minutes are an estimate
    from some steps that are timed here, and nothing watches the clock later.

    Args:
        held_out: gives the micro-batches of an evaluation; `max_minutes` includes the time of evaluations.

    Raises:
        UserError: `max_minutes` has no time for two steps beside the evaluations.
    """
    if run.max_steps is not None:
        return run.max_steps
    with together():
        on_gpu = learner.accelerator.device.type == "cuda"
        steps = TrainingSteps(run, text, PROVISIONAL_STEPS, ranks, on_gpu)
    if run.num_train_epochs is not None:
        epochs_a_step = steps.epochs() / PROVISIONAL_STEPS
        return max(1, math.ceil(run.num_train_epochs / epochs_a_step - 1e-6))  # not a step more for a rounding error
    most_seconds = 60 * run.max_minutes * SHARE_FOR_TIMING
    logger.info(f"max_minutes {run.max_minutes:g}: timing steps and an evaluation first, to fix the number of steps")
    try:
        seconds, _ = time_steps(learner, steps, most_seconds)
        learner.reset_optimizers()
        evaluation_seconds = time_evaluation(learner, held_out, most_seconds)
    except KeyboardInterrupt:
        logger.warning("Ctrl-C: ended while steps were timed; nothing is saved yet; start with the same options")
        raise
    return on_main(steps_for_minutes, run, seconds / PROVISIONAL_STEPS, evaluation_seconds)


def time_steps(learner: Learner, steps: TrainingSteps, most_seconds: float = math.inf) -> tuple[float, float]:
    """
    The seconds that all steps of a run take on this process, and their words, estimated: some steps of each stage are
    timed, at a learning rate of 0, which changes no weight.

    Batches are made while the step before is computed: a step takes the longer of the two. Both are medians, as a step
    with a new shape may compile, for tens of times as long as it computes.

    Each step ends with a sum over all processes, so that all take as long. The optimizers keep the state of these
    steps (`Learner.reset_optimizers`).

    Args:
        most_seconds: where `STEPS_TIMED` steps of each stage would take longer in all, fewer are timed, but at least
            `FEWEST_STEPS_TIMED`.
    """
    makers = max(1, steps.run.dataloader_num_workers)  # processes, or one thread
    total_seconds = 0.0
    total_words = 0.0
    for stage in steps.stages:
        count = stage.end_step - stage.first_step
        made_in = []
        computed_in = []
        words = []
        # Without a cursor, the pairs are those at the start of the text: they take as long as any.
        walk = steps.walk(stage.first_step)
        start_of_timing = time.monotonic()
        for number in range(min(count, STEPS_TIMED)):
            is_enough = number >= FEWEST_STEPS_TIMED
            if is_enough and is_time_up(start_of_timing, most_seconds / len(steps.stages)):
                break
            start = time.monotonic()
            step = next(walk)
            made_in.append(time.monotonic() - start)
            if not words:  # the first step is taken twice: the first time it allocates memory, and compiles
                learner.update(step.micro_batches, step.counts, learning_rate=0.0)
                start_of_timing = time.monotonic()  # compiling takes nothing of `most_seconds`
            start = time.monotonic()
            learner.update(step.micro_batches, step.counts, learning_rate=0.0)
            computed_in.append(time.monotonic() - start)
            words.append(step.words)
        if words:
            step_seconds = max(statistics.median(computed_in), statistics.median(made_in) / makers)
            total_seconds += count * step_seconds
            total_words += count * statistics.fmean(words)
    return total_seconds, total_words


def time_evaluation(learner: Learner, held_out, most_seconds: float) -> float:
    """
    The seconds of an evaluation; of one that takes longer than `most_seconds`, estimated from its first batches.

    Args:
        held_out: as in `find_max_steps`.
    """
    learner.evaluate(itertools.islice(held_out, 1))  # the first batch allocates memory, and compiles
    all_batches = iter(held_out)
    count = 0
    start = time.monotonic()

    def in_time():
        nonlocal count
        for batch in all_batches:
            count += 1
            yield batch
            if is_time_up(start, most_seconds):
                return

    learner.evaluate(in_time())
    seconds = time.monotonic() - start
    left = sum(1 for _ in all_batches)  # made, and not computed
    return seconds * (count + left) / count


def is_time_up(start: float, most_seconds: float) -> bool:
    """
    Whether a process has worked for more than `most_seconds` since `start`, a time of its own `time.monotonic`. All
    processes must ask, and get the same answer.
    """
    return bool(largest(int(time.monotonic() - start > most_seconds)))


def steps_for_minutes(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> int:
    """
    The number of steps that fit into `max_minutes`, with their evaluations. Says so if these take most of the time.

    Raises:
        UserError: fewer than two steps fit.
    """
    seconds = 60 * run.max_minutes
    evaluations = DEFAULT_EVALUATIONS
    if run.eval_steps:
        evaluations = seconds / (step_seconds * run.eval_steps + evaluation_seconds)
    share = min(1.0, evaluations * evaluation_seconds / seconds)  # of the time, for evaluations
    steps = int((1 - share) * seconds / step_seconds)
    told = f"max_minutes {run.max_minutes:g}: evaluations take {share:.0%} of them, which leaves time for "
    way_out = "lower --max_eval_pairs, give more --eval_steps, or more minutes"
    if steps < 2:
        raise UserError(f"{told}{counted(steps, 'step')} of {step_seconds:.2g} s; {way_out}")
    if share > 0.5:
        logger.warning(f"{told}{counted(steps, 'step')}; {way_out}")
    return steps
