"""AdamW, Muon, and the moving average of the weights."""

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn


# What the optimizers keep of each parameter.
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")
MUON_KEYS = ("momentum_buffer",)

# Of these, the number of steps and the mean of squares.
NEVER_NEGATIVE = ("step", "exp_avg_sq")

# Momentum below this share of the matrix' largest becomes 0. A hidden unit that ReLU has shut for all tokens gets no
# gradient, and its momentum halves every 14 steps, down to numbers (denormals) with which an Intel Xeon multiplies
# thirty times more slowly: after 4,000 steps that took 60 % of a run's time (benchmarks/LOG.md).
NEGLIGIBLE = 1e-12

# The root of the mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025, section 2.2).
ADAMW_RMS = 0.2


def make_optimizers(
    model: nn.Module,
    optim: str,
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
    assert optim == "muon"
    matrices = [parameter for parameter in model.base_model.encoder.parameters() if parameter.ndim == 2]
    matrix_ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
    return [
        Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"),
        make_adamw(others, learning_rate, weight_decay, betas, epsilon),
    ]


class Muon(torch.optim.Muon):
    """
    PyTorch's Muon (Jordan et al., 2024), but where bf16 may be emulated, its updates are made orthogonal in float32.

    PyTorch does that in bf16, which a CPU without bf16 instructions emulates: there a step of the recipe tiny took six
    times as long. In float32 a step takes a seventh longer than with AdamW (benchmarks/LOG.md). NVIDIA's GPUs before
    Ampere emulate it, too. The state is that of PyTorch's Muon, but for momentum that is `NEGLIGIBLE`.
    """

    @torch.no_grad()
    def step(self, closure=None):
        device = self.param_groups[0]["params"][0].device.type
        is_emulated = device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if device != "cpu" and not is_emulated:
            return super().step(closure)
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                average.masked_fill_(average.abs() < NEGLIGIBLE * average.abs().max(), 0)
                direction = gradient.lerp(average, momentum)  # Nesterov: a step further along the average
                update = orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * ADAMW_RMS * math.sqrt(max(parameter.shape))
                parameter.add_(update, alpha=-rate)


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
    for _ in range(steps):  # x becomes first x + (third g + fifth g g) x, with g = x x^T
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.addmm(x, polynomial, x, beta=first)
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


def keys_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of the tensors that an optimizer keeps of each of its parameters, from the first step on."""
    return MUON_KEYS if isinstance(optimizer, Muon) else ADAMW_KEYS


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
