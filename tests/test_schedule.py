"""The schedule of a run: learning rates equal Transformers', what is due after each step, the number of steps."""

import itertools
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
    run = PretrainConfig(max_steps=100, lr_scheduler_type=kind, learning_rate=0.5, **ratios)
    ours = [learning_rate(run, step) / 0.5 for step in range(1, 101)]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_a_constant_rate_has_no_warm_up():
    _, run = recipes.RECIPES["tiny"]()
    run = recipes.override_options(run, {"lr_scheduler_type": "constant"})
    run.check()
    assert {learning_rate(run, step) for step in range(1, run.max_steps + 1)} == {run.learning_rate}
    with pytest.raises(UserError, match="warm-up"):
        recipes.override_options(run, {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}).check()


# ---------------------------------------------------------------------------------------------------------------------
# What is due


def steps_due(run):
    """The steps after which something is to be done, by its name."""
    every = range(1, run.max_steps + 1)
    return {name: [step for step in every if name in due_after(run, step)] for name in ("log", "evaluate", "save")}


def test_what_is_due_after_each_step():
    due = steps_due(PretrainConfig(max_steps=20, logging_steps=3, eval_steps=5, save_steps=7))
    assert due["evaluate"] == [5, 10, 15, 20] and due["save"] == [7, 14, 20]
    assert due["log"] == sorted({3, 6, 9, 12, 15, 18, *due["evaluate"], *due["save"]})
    of_itself = steps_due(PretrainConfig(max_steps=5000))
    assert {name: len(steps) for name, steps in of_itself.items()} == {"log": 100, "evaluate": 10, "save": 10}


@pytest.mark.parametrize("max_steps, schedule", [(10, ["16:0.96"]), (3, ["16:0.5", "32:0.4"]), (1, ["16:0.5"])])
def test_a_schedule_of_lengths_leaves_a_step_of_full_length(max_steps, schedule):
    run = PretrainConfig(max_seq_length=48, length_schedule=schedule, batch_size_schedule=[])
    first, length, _ = run.stages(max_steps)[-1]
    assert length == 48 and first < max_steps


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps


def test_the_time_of_a_run_is_that_of_all_steps_of_each_stage(monkeypatch):
    """On a clock on which a step takes the seconds that stand in it, and the first of each stage 9 s."""
    clock, taken = SimpleNamespace(now=0.0), [None]
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stages = {0: 1.0, 40: 0.25, 90: 3.0, 99: 2.0}  # the last one is a single step

    def take_step(micro_batches, counts):
        (seconds,) = micro_batches
        clock.now += 9.0 if seconds != taken[-1] else seconds
        taken.append(seconds)

    def walk(start):
        seconds = next(seconds for first, seconds in reversed(stages.items()) if first <= start)
        return itertools.repeat(SimpleNamespace(micro_batches=[seconds], counts=None))

    made = [Stage(first, end, None, None, 0) for first, end in itertools.pairwise([*stages, 100])]
    learner = SimpleNamespace(take_step=take_step, accelerator=make_accelerator("no"))
    total = time_steps(learner, SimpleNamespace(stages=made, walk=walk))
    assert total == pytest.approx(40 * 1.0 + 50 * 0.25 + 9 * 3.0 + 2.0)
    assert taken[1:] == [1.0] * 21 + [0.25] * 21 + [3.0] * 10 + [2.0] * 2


def test_minutes_hold_the_steps_and_their_evaluations(caplog):
    run = PretrainConfig(max_minutes=10)
    # Ten evaluations of 12 s take 120 of 600 s.
    assert steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12) == 960
    assert not caplog.records
    # An evaluation each 100 steps: 100 steps and an evaluation take 62 s.
    run.eval_steps = 100
    assert steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12) == int(600 / 62 * 100)


def test_evaluations_that_take_most_of_the_minutes_are_told_and_all_of_them_refused(caplog):
    run = PretrainConfig(max_minutes=1)
    assert steps_for_minutes(run, step_seconds=1, evaluation_seconds=4.5) == 15
    assert "evaluations take 75% of them" in caplog.text and "lower --max_eval_pairs" in caplog.text
    with pytest.raises(UserError, match="evaluations take 100% of them, .* 0 steps of 1 s; lower --max_eval_pairs"):
        steps_for_minutes(run, step_seconds=1, evaluation_seconds=6.1)
