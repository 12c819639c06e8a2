"""A step whose loss or gradient is not finite: left out, also with the scaler of fp16, by a stand-in on the CPU."""

import math

import pytest
import torch
from fast_models import make_batch, make_model
from interrupted_runs import SHORT
from safetensors.torch import load_file

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.data.order import START
from d2l_bert.training.data.steps import Step
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.optimizer import Learner


pytestmark = pytest.mark.usefixtures("one_thread")


class SpoiltGradient(torch.autograd.Function):
    """The identity in the forward pass; NaN in the backward pass."""

    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


def make_learner():
    accelerator = make_accelerator("no")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # so that gradients are unscaled
    return Learner(accelerator, make_model(), PretrainConfig(learning_rate=1e-3))


def step_of(learner):
    """A step of one micro-batch."""
    batch = make_batch(learner.model)
    return Step([batch], counts_of(batch), START, words=0.0)


def weights(learner):
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner.model.parameters()])


def test_a_trial_leaves_the_scale_as_it_was():
    learner = make_learner()
    for _ in range(5):
        learner.take_step(*step_of(learner)[:2])
    assert learner.accelerator.scaler.get_scale() > 1024
    learner.reset_optimizers()
    assert learner.accelerator.scaler.get_scale() == 1024
    assert learner.accelerator.scaler.state_dict()["_growth_tracker"] == 0


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped_and_the_next_is_taken(monkeypatch, spoilt):
    forward, is_spoilt = D2lBertForPreTraining.forward, []

    def spoil(model, *arguments, **named):
        outputs = forward(model, *arguments, **named)
        if is_spoilt and spoilt == "loss":  # the gradient stays that of the finite loss
            outputs.mlm_loss = outputs.mlm_loss.detach() * math.nan
        elif is_spoilt:
            outputs.loss = SpoiltGradient.apply(outputs.loss)
        return outputs

    monkeypatch.setattr(D2lBertForPreTraining, "forward", spoil)
    learner = make_learner()
    learner.step(1, step_of(learner), 1e-3)
    before = weights(learner)
    is_spoilt.append(True)
    assert learner.step(2, step_of(learner), 1e-3).skipped
    assert torch.equal(weights(learner), before)
    is_spoilt.clear()
    assert not learner.step(3, step_of(learner), 1e-3).skipped
    assert not torch.equal(weights(learner), before)


# ---------------------------------------------------------------------------------------------------------------------
# Left-out steps and the moving average


def test_a_skipped_step_does_not_change_the_moving_average(command, monkeypatch, tmp_path):
    forward, taken = D2lBertForPreTraining.forward, []

    def spoil_the_second(model, *arguments, **named):
        outputs = forward(model, *arguments, **named)
        if model.training:  # a step has one micro-batch here
            taken.append(None)
            outputs.loss = outputs.loss * (math.nan if len(taken) == 2 else 1)
        return outputs

    monkeypatch.setattr(D2lBertForPreTraining, "forward", spoil_the_second)
    assert main(command(tmp_path, *SHORT, "--save_steps=1", "--ema_decay=0.5", "--max_steps=3")) == 0
    averages = [(tmp_path / f"checkpoint-{step}" / "average.safetensors") for step in (1, 3)]
    assert not (tmp_path / "checkpoint-2").exists(), "no save among steps that are left out"
    weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    before, after = map(load_file, averages)
    for name in weights:  # decay of the second step taken: min(0.5, (1 + 3) / (10 + 3))
        torch.testing.assert_close(after[name], before[name] * 4 / 13 + weights[name] * 9 / 13)
