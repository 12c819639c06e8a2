"""A step whose loss or gradient is not finite: left out, also with the scaler of fp16, by a stand-in on the CPU."""

import math

import pytest
import torch
from fast_models import make_batch, make_model

from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.data.order import START
from d2l_bert.training.data.steps import Step
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.optimizer import Learner


pytestmark = pytest.mark.usefixtures("one_thread")


def make_learner():
    accelerator = make_accelerator("no")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # so that gradients are unscaled
    return Learner(accelerator, make_model(), PretrainConfig(learning_rate=1e-3, ema_decay=0.5))


def step_of(learner):
    """A step of one micro-batch."""
    batch = make_batch(learner.model)
    return Step([batch], counts_of(batch), START, words=0.0)


def test_a_trial_leaves_the_scale_as_it_was():
    learner = make_learner()
    for _ in range(5):
        learner.take_step(*step_of(learner)[:2])
    assert learner.accelerator.scaler.get_scale() > 1024
    learner.reset_optimizers()
    assert learner.accelerator.scaler.get_scale() == 1024
    assert learner.accelerator.scaler.state_dict()["_growth_tracker"] == 0


def spoil_the_loss(model, inputs, outputs):
    outputs.mlm_loss = outputs.mlm_loss.detach() * math.nan  # the gradient stays that of the finite loss


def spoil_the_gradient(gradient):
    return gradient * math.nan


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped_and_the_next_is_taken(spoilt):
    learner = make_learner()
    parameters = list(learner.model.parameters())

    def step(number):
        """Whether the step is skipped; the weights and their moving averages after it."""
        skipped = learner.step(number, step_of(learner), 1e-3).skipped
        return skipped, torch.cat([of.detach().flatten() for of in (*parameters, *learner.average.averages.values())])

    _, first = step(1)
    if spoilt == "loss":
        hook = learner.model.register_forward_hook(spoil_the_loss)
    else:
        hook = parameters[0].register_hook(spoil_the_gradient)
    skipped, second = step(2)
    hook.remove()
    assert skipped and torch.equal(first, second)
    skipped, third = step(3)
    assert not skipped and not torch.equal(second, third)
