"""The schedule of a run: learning rates equal Transformers', what is due after each step, the number of steps."""

from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler, get_wsd_schedule

from d2l_bert.messages import UserError
from d2l_bert.training import recipes, schedule
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.steps import Stage
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.schedule import due_after, learning_rate, steps_for_minutes, time_steps


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate

KINDS = ["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]


def transformers_shares(kind, warmup_steps, max_steps, decay_steps):
    """The factors by which Transformers' scheduler multiplies the learning rate, for each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    if kind == "warmup_stable_decay":
        scheduler = get_wsd_schedule(optimizer, warmup_steps, decay_steps, max_steps, decay_type="1-sqrt")
    else:
        scheduler = get_scheduler(kind, optimizer, warmup_steps, max_steps)
    return [scheduler.lr_lambdas[0](step) for step in range(max_steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup_steps, decay_steps", [(0, 20), (7, 20), (30, 70), (99, 1)])
def test_learning_rates_equal_transformers_except_that_the_first_step_is_not_zero(kind, warmup_steps, decay_steps):
    """Transformers starts at 0, so during warm-up our rate is that of its next step. Afterwards both are equal."""
    theirs = transformers_shares(kind, warmup_steps, 100, decay_steps)
    expected = theirs[1 : warmup_steps + 1] + theirs[warmup_steps:100]
    ratios = {"warmup_ratio": max(0, warmup_steps - 0.5) / 100, "decay_ratio": (decay_steps + 0.5) / 100}
    run = PretrainConfig(max_steps=100, lr_scheduler_type=kind, learning_rate=1.0, **ratios)
    ours = [learning_rate(run, step) for step in range(1, 101)]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_a_constant_rate_has_no_warm_up():
    _, run = recipes.RECIPES["tiny"]()
    run = recipes.override_options(run, {"lr_scheduler_type": "constant"})
    run.check()
    assert {learning_rate(run, step) for step in range(1, run.max_steps + 1)} == {run.learning_rate}
    with pytest.raises(UserError, match="warm-up"):
        recipes.override_options(run, {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}).check()


def test_the_rates_of_a_run_rise_to_its_learning_rate_and_fall_in_its_last_steps():
    run = PretrainConfig(max_steps=100, learning_rate=0.5, warmup_ratio=0.25, decay_ratio=0.5)
    run.lr_scheduler_type = "warmup_stable_decay"
    theirs = transformers_shares("warmup_stable_decay", 25, 100, 50)
    rates = [learning_rate(run, step) for step in range(1, 101)]
    assert rates == pytest.approx([0.5 * share for share in theirs[1:26] + theirs[25:100]], abs=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# What is due


def test_what_is_due_after_each_step():
    run = PretrainConfig(max_steps=20, logging_steps=3, eval_steps=5, save_steps=7)
    due = {step: due_after(run, step) for step in range(1, 21)}
    assert {step for step in due if "evaluate" in due[step]} == {5, 10, 15, 20}
    assert {step for step in due if "save" in due[step]} == {7, 14, 20}
    assert {step for step in due if "log" in due[step]} == {3, 6, 9, 12, 15, 18} | {5, 10, 15, 20} | {7, 14, 20}


def test_a_run_without_these_options_has_a_hundred_rows_ten_evaluations_and_ten_checkpoints():
    run = PretrainConfig(max_steps=5000)
    due = [due_after(run, step) for step in range(1, 5001)]
    counts = {name: sum(name in of_step for of_step in due) for name in ("log", "evaluate", "save")}
    assert counts == {"log": 100, "evaluate": 10, "save": 10}


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps


class Timed:
    """A learner on a clock of its own: a step takes the seconds that stand in it, the first of each stage 9."""

    def __init__(self, monkeypatch):
        self.now, self.last, self.taken = 0.0, None, []
        self.accelerator = make_accelerator("no")
        monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: self.now))

    def take_step(self, micro_batches, counts):
        seconds = micro_batches[0]
        self.taken.append(seconds)
        self.now += seconds if seconds == self.last else 9.0
        self.last = seconds


def steps_of(*stages):
    """Steps of some stages, each (first step, end, seconds of each step)."""
    made = [Stage(first, end, None, None, 0) for first, end, _ in stages]

    def walk(start):
        for first, end, seconds in stages:
            for _ in range(max(start, first), end):
                yield SimpleNamespace(micro_batches=[seconds], counts=None)

    return SimpleNamespace(stages=made, walk=walk)


def test_the_time_of_a_run_is_that_of_all_steps_of_each_stage(monkeypatch):
    """Also of a stage with a single step."""
    learner = Timed(monkeypatch)
    stages = ((0, 40, 1.0), (40, 90, 0.25), (90, 99, 3.0), (99, 100, 2.0))
    assert time_steps(learner, steps_of(*stages)) == pytest.approx(40 * 1.0 + 50 * 0.25 + 9 * 3.0 + 2.0)
    assert learner.taken == [1.0] * 21 + [0.25] * 21 + [3.0] * 10 + [2.0] * 2


def test_minutes_hold_the_steps_and_their_evaluations(caplog):
    run = PretrainConfig(max_minutes=10)
    # Ten evaluations of 12 s take 120 of 600 s.
    assert steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12) == 960
    assert not caplog.records
    # An evaluation each 100 steps: 100 steps and an evaluation take 62 s.
    run = PretrainConfig(max_minutes=10, eval_steps=100)
    steps = steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12)
    assert steps == int(600 / 62 * 100)


def test_evaluations_that_take_most_of_the_minutes_are_told_and_all_of_them_refused(caplog):
    run = PretrainConfig(max_minutes=1)
    assert steps_for_minutes(run, step_seconds=1, evaluation_seconds=4.5) == 15
    assert "evaluations take 75% of them" in caplog.text and "lower --max_eval_pairs" in caplog.text
    with pytest.raises(UserError, match="evaluations take 100% of them, .* 0 steps of 1 s; lower --max_eval_pairs"):
        steps_for_minutes(run, step_seconds=1, evaluation_seconds=6.1)
