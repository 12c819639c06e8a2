"""Shards of FSDP2: full tensors and whole models of them."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def reshard(model) -> None:
    """Reshard every parameter of an FSDP2 model: after an evaluation some parameters are still gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unsharded_model(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """
    A new model with the class and configuration of `model`, without FSDP2, with `weights` as its parameters.

    Args:
        weights: full tensors by parameter name; a tied parameter may be left out.
    """
    model_class = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        unsharded = model_class(model.config)
    unsharded.load_state_dict(weights, strict=False, assign=True)
    unsharded.tie_weights()
    return unsharded


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of an FSDP2 shard; any other tensor as it is. All processes must call this in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
