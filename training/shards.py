"""Shards of FSDP2: made of a model, and made full tensors and whole models again."""

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """
    Replace the parameters of a model by shards: of each encoder block as a unit, and of all others as one unit.

    Accelerate would also make units of the embeddings and the decoder. The weights of a unit are whole only after its
    module is called, and the loss without logits reads the decoder's weight without a call. Here the decoder is in the
    unit of the whole model. The parts are float32: only matrix products are bf16 or fp16, as they are without FSDP2.

    Args:
        plugin: the launcher's options.
    """
    options = {"offload_policy": plugin.cpu_offload}
    for block in model.base_model.encoder.layer:
        fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **options)
    fully_shard(model, **options)


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
