"""What the device of a run settles: defaults that depend on it, and a model that it cannot hold."""

import psutil
import torch
from accelerate import Accelerator

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training.arithmetic import encoder_weights
from d2l_bert.training.config import PretrainConfig


def faster_attention(architecture: D2lBertConfig, run: PretrainConfig, device: str) -> str:
    """
    The kernel that computes attention sooner.

    On a CPU PyTorch's own has no dropout, and falls back on more steps than attention spelt out: a step of
    BERT-base at 512 takes 5.9 s with it and 4.5 without. Without dropout it is a tenth slower, and saves memory where
    rows are long.
    """
    spelt_out = run.max_seq_length <= 256 or architecture.attention_probs_dropout_prob > 0
    return "eager" if device == "cpu" and spelt_out else "sdpa"


def processes_that_load(run: PretrainConfig, device: str) -> int:
    """A process of its own keeps a GPU busy; on a CPU it would take the step's cores."""
    return int(device != "cpu") if run.dataloader_num_workers is None else run.dataloader_num_workers


def check_device(architecture: D2lBertConfig, run: PretrainConfig, accelerator: Accelerator) -> None:
    """Refuse what the device cannot do, and a model that it cannot hold."""
    device = accelerator.device
    if run.attn_implementation == "flex_attention" and device.type == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a CPU; give eager or sdpa")
    # Weights, gradients and a moment at least, in float32; FSDP shares them out. Built all the same, the model would
    # fill the memory block by block before it fails.
    needed = 12 * encoder_weights(architecture) // (accelerator.num_processes if accelerator.is_fsdp2 else 1)
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    if needed > there:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size")
        sizes = ", ".join(f"{name} ({getattr(architecture, name):,})" for name in names)
        raise UserError(
            f"out of memory: the encoder's weights, gradients and optimizer state take {needed / 1e9:,.0f} GB at "
            f"least, and this machine has {there / 1e9:,.0f} GB; lower one of {sizes}"
        )
