"""The optimizer and its learning rate."""

import torch
from torch import nn


def make_adamw(
    model: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2017), fused; no decay on biases and LayerNorms, as in BERT (appendix A.2)."""
    decayed, others = parameter_groups(model)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=betas,
        eps=epsilon,
        fused=True,
    )


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with weight decay (matrices and embeddings) and without (biases and LayerNorms)."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    assert len(decayed) + len(others) == len(list(model.parameters()))
    return decayed, others


def linear_schedule(step: int, warmup_steps: int, max_steps: int) -> float:
    """The share of the peak learning rate at a step, counted from 0: up in `warmup_steps`, then down to nothing.

    The first step already moves, and so does the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (max_steps - step) / max(1, max_steps - warmup_steps)


class MovingAverage:
    """Provisional."""
