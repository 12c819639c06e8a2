"""The optimizers, their learning rate, and the moving average of the weights."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn


Optim = Literal["adamw", "muon"]
Schedule = Literal["linear", "cosine", "warmup_stable_decay"]

# The share of the peak rate from the share of the fall that is left, in [0, 1]. The last one is the cooldown that
# Hägele et al. (2024, section 3) found best, 1 - sqrt.
_FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: math.sin(math.pi / 2 * left) ** 2,
    "warmup_stable_decay": lambda left: 1 - math.sqrt(1 - left),
}


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


def make_optimizers(
    model: nn.Module,
    optim: Optim,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> list[torch.optim.Optimizer]:
    """
    The optimizers of a model, each parameter in exactly one group of one of them.

    `adamw` is one AdamW. `muon` is Muon for the matrices of the encoder's blocks, and AdamW for all that is left: Muon
    makes every direction of an update equally long, which is meant for matrices that map hidden states to hidden
    states, not for tables of embeddings and heads (Jordan et al., 2024). Its updates get the size that AdamW's have
    (Liu et al., 2025, section 2.2), so that one rate and one decay serve both.

    Args:
        model: one whose `base_model` has an `encoder`, as Transformers' BERTs and ours have.
        learning_rate: of every group, to be set anew at each step.
        weight_decay: of matrices and embeddings; biases and LayerNorms have none.
        betas, epsilon: AdamW's.
    """
    if optim == "adamw":
        return [make_adamw(model, learning_rate, weight_decay, betas, epsilon)]
    matrices = [parameter for parameter in model.base_model.encoder.parameters() if parameter.ndim == 2]
    taken = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    assert len(matrices) + len(others) == len(list(model.parameters()))
    return [
        torch.optim.Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"),
        _adamw(others, learning_rate, weight_decay, betas, epsilon),
    ]


def make_adamw(
    model: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2017), fused; no decay on biases and LayerNorms, as in BERT (appendix A.2)."""
    return _adamw(model.parameters(), learning_rate, weight_decay, betas, epsilon)


def _adamw(parameters, learning_rate, weight_decay, betas, epsilon):
    decayed, others = parameter_groups(parameters)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=betas,
        eps=epsilon,
        fused=True,
    )


def parameter_groups(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with weight decay (matrices and embeddings) and without (biases and LayerNorms)."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    assert len(decayed) + len(others) == len(parameters)
    return decayed, others


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate


def learning_rate_share(kind: Schedule, step: int, warmup_steps: int, max_steps: int, decay_steps: int = 0) -> float:
    """
    The share of the peak learning rate at a step, in (0, 1]. The first step already moves, and so does the last.

    Args:
        kind: how the rate falls after warm-up: `linear` and `cosine` (half a wave: Loshchilov and Hutter, 2016) from
            there on, `warmup_stable_decay` (Hu et al., 2024) in the last `decay_steps`, as 1 - sqrt.
        step: counted from 0.
        warmup_steps: steps in which the rate rises on a straight line; the last of them has the peak rate.
        max_steps: steps of the run.
        decay_steps: of `warmup_stable_decay`; the others do not look at them.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    fall = max_steps - warmup_steps
    if kind == "warmup_stable_decay":
        fall = min(decay_steps, fall)
    left = (max_steps - step) / max(1, fall)
    return _FALLS[kind](min(left, 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# The average of the weights


class MovingAverage:
    """
    An exponential moving average of a model's weights (Polyak and Juditsky, 1992), often better than the last weights,
    above all while the rate is high (Morales-Brotons et al., 2024).

    Only elementwise operations in place between tensors of one kind are done, so sharded weights (DTensors) are
    averaged shard by shard. It must be made of the parameters that are trained: after whatever shards the model.

    Args:
        model: what is trained, without a distributed wrapper.
        decay: what stays of the average in a step, in (0, 1); 1 / (1 - decay) steps are averaged, about.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters = dict(model.named_parameters())  # a tied one once
        self._averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """
        Take in the weights after an optimizer step, counted from 1.

        The first averages are short, min(decay, (1 + step) / (10 + step)), as in TensorFlow's: the weights that
        training starts from would else stay in for long.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._averages.values()), list(self._parameters.values()), 1 - decay)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages themselves, to save or to copy into, named as in `model.named_parameters()`."""
        return self._averages

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model holds the averages; then its own weights again, bit for bit, come what may."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, tensors):
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
