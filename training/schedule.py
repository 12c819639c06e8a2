"""Each step's learning rate, and what is due after it: a row of the log, an evaluation, a checkpoint."""

import math

from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.optim import learning_rate_share


# Of a run that does not say how many.
ROWS, EVALUATIONS, CHECKPOINTS = 100, 10, 10


class RunSchedule:
    """
    Steps are counted from 1. The last one has a row, an evaluation and a checkpoint.

    Args:
        max_steps: the run's.
    """

    def __init__(self, run: PretrainConfig, max_steps: int):
        self.run, self.max_steps = run, max_steps
        self.log_every = run.logging_steps or math.ceil(max_steps / ROWS)
        self.evaluate_every = run.eval_steps or math.ceil(max_steps / EVALUATIONS)
        self.save_every = run.save_steps or math.ceil(max_steps / CHECKPOINTS)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        warmup_steps, decay_steps = self.run.schedule_steps(self.max_steps)
        kind = self.run.lr_scheduler_type
        return self.run.learning_rate * learning_rate_share(kind, step - 1, warmup_steps, self.max_steps, decay_steps)

    def logs(self, step: int) -> bool:
        """Whether the log gets a row after a step."""
        return self._is_due(step, self.log_every) or self.evaluates(step) or self.saves(step)

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after a step."""
        return self._is_due(step, self.evaluate_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is saved after a step."""
        return self._is_due(step, self.save_every)

    def _is_due(self, step, every):
        return step % every == 0 or step == self.max_steps
