"""The scaler of fp16, by a stand-in on the CPU, where Accelerate has none: trials leave it, bad losses skip a step."""

import math

import pytest
import torch
from fast_models import make_batch, make_model
from test_not_finite import SpoiltGradient

from d2l_bert import D2lBertForPreTraining
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.learner import Learner


pytestmark = pytest.mark.usefixtures("one_thread")


def make_learner():
    accelerator = make_accelerator("no")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # so that gradients are unscaled
    return Learner(accelerator, make_model(), PretrainConfig(learning_rate=1e-3))


def weights(learner):
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner.model.parameters()])


def test_a_trial_leaves_the_scale_as_it_was():
    learner = make_learner()
    for _ in range(5):
        learner.take_step([make_batch(learner.model)])
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
    learner.step(1, [make_batch(learner.model)], 1e-3)
    before = weights(learner)
    is_spoilt.append(True)
    assert learner.step(2, [make_batch(learner.model)], 1e-3).skipped
    assert torch.equal(weights(learner), before)
    is_spoilt.clear()
    assert not learner.step(3, [make_batch(learner.model)], 1e-3).skipped
    assert not torch.equal(weights(learner), before)
