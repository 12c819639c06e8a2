"""The schedule of one run: each step's learning rate, and the steps after which it logs, evaluates and saves."""

import math

from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.optim import learning_rate_share


# Numbers in a whole run without --logging_steps, --eval_steps, --save_steps.
DEFAULT_ROWS, DEFAULT_EVALUATIONS, DEFAULT_CHECKPOINTS = 100, 10, 10


class RunSchedule:
    """
    Answers for each step, counted from 1. The last step is always logged, evaluated and saved.

    Args:
        max_steps: the number of steps in the run.
    """

    def __init__(self, run: PretrainConfig, max_steps: int):
        self.run, self.max_steps = run, max_steps
        self.log_every = run.logging_steps or math.ceil(max_steps / DEFAULT_ROWS)
        self.evaluate_every = run.eval_steps or math.ceil(max_steps / DEFAULT_EVALUATIONS)
        self.save_every = run.save_steps or math.ceil(max_steps / DEFAULT_CHECKPOINTS)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        warmup_steps, decay_steps = self.run.schedule_steps(self.max_steps)
        kind = self.run.lr_scheduler_type
        return self.run.learning_rate * learning_rate_share(kind, step - 1, warmup_steps, self.max_steps, decay_steps)

    def should_log(self, step: int) -> bool:
        """Whether to write a row of the log after a step."""
        return self._is_due(step, self.log_every) or self.should_evaluate(step) or self.should_save(step)

    def should_evaluate(self, step: int) -> bool:
        """Whether to evaluate after a step."""
        return self._is_due(step, self.evaluate_every)

    def should_save(self, step: int) -> bool:
        """Whether to save a checkpoint after a step."""
        return self._is_due(step, self.save_every)

    def _is_due(self, step, every):
        return step % every == 0 or step == self.max_steps
