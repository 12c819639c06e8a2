"""Steps whose loss or gradient is not finite are left out; ten in a row end the run."""

import pytest
import torch
from interrupted_runs import SHORT
from safetensors.torch import load_file

from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main


pytestmark = pytest.mark.usefixtures("one_thread")


class SpoiltGradient(torch.autograd.Function):
    """The identity in the forward pass; NaN in the backward pass."""

    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")


SPOILERS = {
    "no loss": lambda loss: loss * float("nan"),
    "an endless loss": lambda loss: loss + float("inf"),
    "no gradient": SpoiltGradient.apply,
}


@pytest.fixture
def spoil(monkeypatch):
    """Spoil the loss of some steps of the next run; returns a list that gets one entry for each step taken."""

    def spoilt_steps(steps, how):
        forward, made = D2lBertForPreTraining.forward, []

        def spoilt(model, *arguments, **named):
            outputs = forward(model, *arguments, **named)
            if model.training:  # a step has one micro-batch here
                made.append(None)
                if len(made) in steps:
                    outputs.mlm_loss = SPOILERS[how](outputs.mlm_loss)
                    outputs.loss = outputs.mlm_loss + outputs.nsp_loss
            return outputs

        monkeypatch.setattr(D2lBertForPreTraining, "forward", spoilt)
        return made

    return spoilt_steps


def test_a_skipped_step_does_not_change_the_moving_average(command, spoil, tmp_path):
    spoil({2}, "no loss")
    assert main(command(tmp_path, *SHORT, "--save_steps=1", "--ema_decay=0.5", "--max_steps=3")) == 0
    averages = [(tmp_path / f"checkpoint-{step}" / "average.safetensors") for step in (1, 3)]
    assert not (tmp_path / "checkpoint-2").exists(), "no save among steps that are left out"
    weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    before, after = map(load_file, averages)
    for name in weights:  # decay of the second step taken: min(0.5, (1 + 3) / (10 + 3))
        torch.testing.assert_close(after[name], before[name] * 4 / 13 + weights[name] * 9 / 13)
