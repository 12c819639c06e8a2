"""AdamW and Muon, the shapes of the learning rate's schedules, and the moving average of the weights."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn


Optim = Literal["adamw", "muon"]
Schedule = Literal["linear", "cosine", "warmup_stable_decay"]

# For each schedule, a function from the remaining share of the decay steps, in [0, 1], to the share of the peak rate.
# The decay 1 - sqrt is the best that Hägele et al. (2024, section 3) found for `warmup_stable_decay`.
_DECAYS: dict[str, Callable[[float], float]] = {
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
    The optimizers of a model. Each parameter is in exactly one parameter group of one optimizer.

    `adamw` gives one AdamW. `muon` gives Muon for the matrices of the encoder blocks, and AdamW for all other
    parameters. Muon makes every direction of an update equally long. That suits matrices that map hidden states to
    hidden states, and does not suit embedding tables and heads (Jordan et al., 2024). Muon's updates are scaled to the
    size of AdamW's (Liu et al., 2025, section 2.2), so that both use the same learning rate and weight decay.

    Args:
        model: its `base_model` has an `encoder`, as BERT models of Transformers and of this package have.
        learning_rate: the initial rate of every group; the training step sets the rate again at each step.
        weight_decay: for matrices and embeddings; biases and LayerNorms get 0.
        betas, epsilon: for AdamW.
    """
    if optim == "adamw":
        return [make_adamw(model.parameters(), learning_rate, weight_decay, betas, epsilon)]
    matrices = [parameter for parameter in model.base_model.encoder.parameters() if parameter.ndim == 2]
    matrix_ids = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
    assert len(matrices) + len(others) == len(list(model.parameters()))
    return [
        Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"),
        make_adamw(others, learning_rate, weight_decay, betas, epsilon),
    ]


class Muon(torch.optim.Muon):
    """
    PyTorch's Muon (Jordan et al., 2024), but on a CPU its updates are made orthogonal in float32.

    PyTorch does that in bf16, which a CPU without bf16 instructions emulates: there a step of the recipe tiny took six
    times as long. In float32 a step takes a seventh longer than with AdamW (benchmarks/LOG.md). The state is that of
    PyTorch's Muon.
    """

    @torch.no_grad()
    def step(self, closure=None):
        if any(parameter.device.type != "cpu" for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)
        assert closure is None, "steps here have their gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_float32(parameter, group)

    def _step_float32(self, parameter, group):
        state, gradient, keep = self.state[parameter], parameter.grad, group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - keep)
        update = orthogonal(gradient.lerp(average, keep), group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """
    The nearest matrix whose singular values are all about 1, by Newton-Schulz iterations (Jordan et al., 2024).

    Args:
        matrix: (m, n).
        coefficients: of x, x^3 and x^5 in the polynomial that each iteration applies to the singular values.
        eps: the least norm to divide by.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # (k, l) with k <= l, so that x x^T is the smaller product
    x = x / x.norm().clamp(min=eps)
    first, third, fifth = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


def make_adamw(
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter, 2017), without decay of biases and LayerNorms, as in BERT (appendix A.2)."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},  # matrices, embeddings
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate


def learning_rate_share(kind: Schedule, step: int, warmup_steps: int, max_steps: int, decay_steps: int = 0) -> float:
    """
    The learning rate at a step as a share of the peak rate, in (0, 1]: above 0 in the first and in the last step.

    Args:
        kind: how the rate decays after warm-up. `linear` and `cosine` (half a wave: Loshchilov and Hutter, 2016) decay
            from the end of warm-up on; `warmup_stable_decay` (Hu et al., 2024) decays in the last `decay_steps`, as
            1 - sqrt.
        step: counted from 0.
        warmup_steps: steps in which the rate rises on a straight line; the last of these steps has the peak rate.
        max_steps: steps of the run.
        decay_steps: for `warmup_stable_decay` alone.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    steps_after_warmup = max_steps - warmup_steps
    if kind == "warmup_stable_decay":
        decay_steps = min(decay_steps, steps_after_warmup)
    else:
        decay_steps = steps_after_warmup
    return _DECAYS[kind](min((max_steps - step) / max(1, decay_steps), 1.0))


# ---------------------------------------------------------------------------------------------------------------------
# The average of the weights


class MovingAverage:
    """
    An exponential moving average of a model's weights (Polyak and Juditsky, 1992).

    The average is often better than the last weights, above all while the learning rate is high (Morales-Brotons et
    al., 2024).

    Sharded weights (DTensors) are averaged shard by shard: all operations are elementwise, in place, and between
    tensors of the same type. Create the average after FSDP2 has sharded the model, as FSDP2 replaces the parameters.

    Args:
        model: the model that is trained, without a distributed wrapper.
        decay: the average's weight in an update, in (0, 1); the average reaches back about 1 / (1 - decay) steps.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._parameters = dict(model.named_parameters())  # a tied parameter appears once
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """
        Add the current weights to the average, after optimizer step `step`, counted from 1.

        The decay is min(decay, (1 + step) / (10 + step)), as in TensorFlow: with the full decay from the first step
        on, the initial weights would stay in the average for long.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), list(self._parameters.values()), 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """In this block the model has the averaged weights; afterwards, even after an error, the trained weights."""
        trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._write(self.averages)
            yield
        finally:
            self._write(trained)

    @torch.no_grad()
    def _write(self, tensors):
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
