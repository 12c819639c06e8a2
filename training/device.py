"""Defaults that depend on the device (CPU or GPU), and a check that the device can train the model."""

import psutil
import torch
from accelerate import Accelerator

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training.arithmetic import encoder_weights
from d2l_bert.training.config import PretrainConfig


def faster_attention(architecture: D2lBertConfig, run: PretrainConfig, device: str) -> str:
    """
    The faster implementation of attention on a device: `eager` or `sdpa`.

    On a CPU, PyTorch's fused kernel (`sdpa`) has no dropout. With dropout `sdpa` falls back on a slow path: a step of
    BERT-base at 512 tokens takes 5.9 s, and 4.5 s with `eager`. Without dropout `sdpa` is a tenth slower than `eager`,
    but saves memory at long sequence lengths.

    Args:
        device: the type of the device, such as `cpu` or `cuda`.
    """
    is_eager_faster = run.max_seq_length <= 256 or architecture.attention_probs_dropout_prob > 0
    return "eager" if device == "cpu" and is_eager_faster else "sdpa"


def resolve_num_workers(run: PretrainConfig, device: str) -> int:
    """
    The number of worker processes that make batches.

    The default is 1 for a GPU, and 0 (a thread of this process) on a CPU, where a worker would take cores from the
    training step.
    """
    return int(device != "cpu") if run.dataloader_num_workers is None else run.dataloader_num_workers


def check_device(architecture: D2lBertConfig, run: PretrainConfig, accelerator: Accelerator) -> None:
    """
    Check that the device can train the model.

    Raises:
        UserError: the device cannot compute flex attention, or has less memory than the encoder needs.
    """
    device = accelerator.device
    if run.attn_implementation == "flex_attention" and device.type == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a CPU; give eager or sdpa")
    # At least weights, gradients and one moment, each 4 bytes; FSDP2 splits them over the processes. Checked before
    # the model is built, because building the model would fill the memory slowly before failing.
    needed = 12 * encoder_weights(architecture) // (accelerator.num_processes if accelerator.is_fsdp2 else 1)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    if needed > memory:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size")
        sizes = ", ".join(f"{name} ({getattr(architecture, name):,})" for name in names)
        raise UserError(
            f"out of memory: the encoder's weights, gradients and optimizer state take {needed / 1e9:,.0f} GB at "
            f"least, and this machine has {memory / 1e9:,.0f} GB; lower one of {sizes}"
        )
