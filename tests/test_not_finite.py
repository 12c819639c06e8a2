"""Steps whose loss or gradient is not finite are left out; ten in a row end the run."""

import itertools
from pathlib import Path

import pytest
import torch
from interrupted_runs import OPTIONS, RESUME, SHORT, error_line, rows, weights
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


@pytest.fixture
def leave_out(monkeypatch):
    """Make the optimizer do nothing at some steps of the next run."""

    def left_out(steps):
        step, number = torch.optim.AdamW.step, itertools.count(1)

        def sometimes(optimizer, *arguments):
            return step(optimizer, *arguments) if next(number) not in steps else None

        monkeypatch.setattr(torch.optim.AdamW, "step", sometimes)

    return left_out


LONGER = (*OPTIONS, "--max_steps=18", "--save_steps=3", "--eval_steps=18")


@pytest.mark.parametrize("how, steps", [*((how, {5}) for how in SPOILERS), ("no loss", set(range(5, 14)))])
def test_steps_without_a_finite_loss_and_gradient_are_skipped(
    command, spoil, leave_out, monkeypatch, tmp_path, how, steps
):
    """One step, or nine in a row. The result equals a run whose optimizer does nothing at these steps."""
    made = spoil(steps, how)
    assert main(command(tmp_path / "spoilt", *LONGER)) == 0
    assert len(made) == 18
    monkeypatch.undo()
    leave_out(steps)
    assert main(command(tmp_path / "expected", *LONGER)) == 0
    assert weights(tmp_path / "spoilt") == weights(tmp_path / "expected")
    for folder, skipped in ((tmp_path / "spoilt", sorted(steps)), (tmp_path / "expected", [])):
        assert [row["step"] for row in rows(folder) if row.get("event") == "skipped"] == skipped


def test_ten_steps_in_a_row_without_a_finite_loss_end_the_run(command, spoil, tmp_path, capsys):
    spoil(set(range(5, 18)), "no loss")
    folder = tmp_path / "model"
    assert main(command(folder, *LONGER)) == 2
    line = error_line(capsys)
    assert "diverged" in line and "10 steps in a row" in line and "learning_rate" in line
    assert str(folder / "checkpoint-3") in line
    assert [row["step"] for row in rows(folder) if row.get("event") == "skipped"] == list(range(5, 15))
    assert {path.name for path in folder.iterdir() if "checkpoint" in path.name} == {"checkpoint-3"}
    assert main(["fill-mask", str(folder / "checkpoint-3"), "anna [MASK] to the garden ."]) == 0
    assert not any(path.name in ("model.safetensors", "metrics.json") for path in Path(folder).iterdir())


def test_a_skipped_step_does_not_change_the_moving_average(command, spoil, tmp_path):
    spoil({2}, "no loss")
    assert main(command(tmp_path, *SHORT, "--save_steps=1", "--ema_decay=0.5", "--max_steps=3")) == 0
    averages = [(tmp_path / f"checkpoint-{step}" / "average.safetensors") for step in (1, 3)]
    assert not (tmp_path / "checkpoint-2").exists(), "no save among steps that are left out"
    weights = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    before, after = map(load_file, averages)
    for name in weights:  # decay of the second step taken: min(0.5, (1 + 3) / (10 + 3))
        torch.testing.assert_close(after[name], before[name] * 4 / 13 + weights[name] * 9 / 13)


def test_a_resumed_run_diverges_at_the_same_step(command, spoil, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "model"
    spoil(set(range(5, 19)), "no loss")
    assert main(command(folder, *LONGER)) == 2
    monkeypatch.undo()
    spoil(set(range(2, 19)), "no loss")  # this run starts at step 4
    assert main(command(folder, *LONGER, RESUME)) == 2
    assert "up to step 14" in capsys.readouterr().err.splitlines()[-1]
