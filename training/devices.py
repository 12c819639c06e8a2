"""The device of a run: Accelerate, the defaults that depend on the device, its peak."""

import dataclasses
import logging
import math
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    parse_flag_from_env,
)
from torch.nn.attention import activate_flash_attention_impl
from torch.utils.benchmark import Timer

from d2l_bert.messages import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training.config import MICRO_BATCH_TOKENS, PretrainConfig
from d2l_bert.training.data.unpadded import VARLEN
from d2l_bert.training.processes import start_processes


logger = logging.getLogger(__name__)


def make_accelerator(mixed_precision: str | None, **options) -> Accelerator:
    """
    The `Accelerator` of a run, for the launched processes and this machine's devices.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`; None for the launcher's, else `default_precision`.
        options: further arguments of `Accelerator`.

    Raises:
        UserError: the device does not have this precision, the launcher asked for something that this package does
            not support, or Accelerate did not set up what the launcher asked for.
    """
    state = start_processes()
    on_cpu = state.device.type == "cpu"
    launchers = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # `accelerate launch` also sets `no` if its user has not chosen a precision.
    asked_for = mixed_precision or (launchers if launchers != "no" else None)
    precision = asked_for or default_precision(state.device)
    if precision not in MATMUL_DTYPES:
        raise UserError(f"mixed_precision {precision} is not supported; give bf16, fp16 or no")
    if precision == "fp16" and on_cpu:
        raise UserError("mixed_precision fp16 needs a GPU; give bf16 or no")
    if mixed_precision is None and "ACCELERATE_MIXED_PRECISION" in os.environ and precision != launchers:
        logger.info(f"mixed_precision {precision}, not the launcher's {launchers}; the option sets another")
    # cuDNN's attention plans each new shape anew (20 ms to a second), and has given NaN for rows without a key.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    if state.distributed_type == DistributedType.FSDP:
        state.distributed_type = DistributedType.MULTI_GPU  # before that run; Accelerate makes FSDP of this alone
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        # `Learner.update` divides the losses; Accelerate must not divide them again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # Each gradient lies in the bucket in which DDP sends it, and is in memory once.
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        **options,
    )
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and not is_fsdp:
        raise UserError(
            f"FSDP was asked for, but Accelerate has none on {accelerator.device.type} with "
            f"{accelerator.num_processes} processes; launch without FSDP, or on several GPUs"
        )
    if is_fsdp and not accelerator.is_fsdp2:
        raise UserError("FSDP's first version is not supported; set fsdp_version: 2 in the launcher's configuration")
    if is_fsdp and accelerator.state.fsdp_plugin.activation_checkpointing:
        raise UserError(
            "fsdp_activation_checkpointing is not supported; set it to false, and give --gradient_checkpointing"
        )
    return accelerator


def default_precision(device: torch.device) -> str:
    """
    The fastest `mixed_precision` that a device has: `bf16` if it has that.

    Else it is `fp16` on an NVIDIA GPU with tensor cores (Volta and Turing, compute capability 7), which are eight
    times as fast as its float32; and `no` on other GPUs and on CPUs.
    """
    if device.type == "cpu":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "no"
    if device.type != "cuda":
        return "no"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "no"


# The most tokens of the default micro-batch on a GPU; and the bytes that a step in bf16 or fp16 keeps for each token,
# block and hidden unit (94 kB for a token in a block of BERT-base), so that the default takes at most half of the
# memory. In float32 it keeps twice as many.
GPU_TOKENS = 2**16
BYTES_A_UNIT = 122


def with_defaults(run: PretrainConfig, architecture: D2lBertConfig, accelerator: Accelerator) -> PretrainConfig:
    """
    The options of a run, with the defaults that depend on the device.

    - `attn_implementation`: `varlen` where the device can compute that (`has_varlen`), else `sdpa`. On a CPU,
      PyTorch's fused kernel (`sdpa`) has no dropout, and falls back on a slow path: a step of BERT-base at 512 tokens
      takes 5.9 s, and 4.5 s with `eager`. Without dropout `sdpa` is a tenth slower than `eager`, but saves memory at
      long sequence lengths.
    - `torch_compile`: true on CUDA.
    - `micro_batch_size`: on a CPU of `MICRO_BATCH_TOKENS`; on a GPU more, as many as fit into half of its memory.
    - `dataloader_num_workers`: 1 on CUDA. A thread would hold up the process that feeds the GPU, as Python runs one of
      them at a time; and where many processes share a step, it is the slower, as each draws the pairs of all: of 64
      H100s with BERT-base each would take a step in 10 ms, and its thread make one in 13 (docs/performance.md). 0
      elsewhere: on a CPU a worker would take a core from the training step.

    Raises:
        UserError: the device cannot compute the attention that was asked for.
    """
    device = accelerator.device.type
    is_float32 = accelerator.mixed_precision == "no"
    has_dropout = architecture.attention_probs_dropout_prob > 0
    if run.attn_implementation == "flex_attention" and device == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a CPU; give eager or sdpa")
    can_run_varlen = has_varlen(architecture, accelerator)
    if run.attn_implementation == VARLEN and not can_run_varlen:
        raise UserError(
            "attn_implementation varlen needs an NVIDIA GPU from Ampere on (compute capability 8.0), "
            "mixed_precision bf16 or fp16, no dropout of attention, and heads of 8, 16, 24 or up to 256 numbers; give "
            "sdpa, or --attention_probs_dropout_prob 0"
        )
    is_eager_faster = run.max_seq_length <= 256 or has_dropout
    attention = VARLEN if can_run_varlen else "sdpa"
    if device == "cpu" and is_eager_faster:
        attention = "eager"
    tokens = MICRO_BATCH_TOKENS
    if device == "cuda":
        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
        bytes_a_unit = 2 * BYTES_A_UNIT if is_float32 else BYTES_A_UNIT
        bytes_a_token = architecture.num_hidden_layers * architecture.hidden_size * bytes_a_unit
        tokens = min(GPU_TOKENS, 2 ** int(math.log2(memory / 2 / bytes_a_token)))
    defaults = {
        "mixed_precision": accelerator.mixed_precision,
        "attn_implementation": attention,
        "torch_compile": device == "cuda",
        "micro_batch_size": max(1, tokens // run.max_seq_length),
        "dataloader_num_workers": 1 if device == "cuda" else 0,
    }
    missing = {name: value for name, value in defaults.items() if getattr(run, name) is None}
    return dataclasses.replace(run, **missing)


def has_varlen(architecture: D2lBertConfig, accelerator: Accelerator) -> bool:
    """Whether a GPU can compute a model's attention without padding: by flash attention, which has no dropout here."""
    if accelerator.device.type != "cuda" or torch.version.hip or accelerator.mixed_precision == "no":
        return False
    head_size = architecture.hidden_size // architecture.num_attention_heads
    if architecture.attention_probs_dropout_prob > 0 or head_size > 256 or head_size % 8:
        return False
    return torch.cuda.get_device_capability(accelerator.device) >= (8, 0)


def use_flash_attention_3(run: PretrainConfig, accelerator: Accelerator) -> None:
    """
    Compute the attention of a run by FlashAttention 3 (Shah et al., 2024) on a Hopper GPU, where it is installed.

    It is in force for the whole process, until `processes.restore_host_settings` takes it back.
    """
    if run.attn_implementation != VARLEN or torch.cuda.get_device_capability(accelerator.device) != (9, 0):
        return
    try:
        activate_flash_attention_impl("FA3")
    except ModuleNotFoundError:
        pass  # PyTorch lists it even if it is not installed
    except (ImportError, OSError, RuntimeError) as error:  # one that was built for another PyTorch
        logger.warning(f"FlashAttention 3 cannot be used ({error!r:.200}); PyTorch's own flash attention is used")


def free_unused_memory(device: torch.device) -> None:
    """
    Free the memory that PyTorch keeps on Apple's GPUs for later tensors: there it keeps it for each size of a tensor,
    and the sizes of micro-batches vary. Other devices use such memory for other sizes, too.
    """
    if device.type == "mps":
        torch.mps.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# The peak of a device

# The dtype of matrix products for each `mixed_precision`.
MATMUL_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Side lengths of the square matrices that measure the peak. Two cores are fastest at 512, where the matrices fit into
# the CPU's caches; many cores need larger matrices to keep every core busy. A GPU or another accelerator computes far
# more at once, and needs the largest.
CPU_SIDES = (512, 1024, 2048)
ACCELERATOR_SIDES = (4096, 8192)


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """
    The peak of a device in operations a second: the fastest of many large matrix products.

    On a CPU, the products use the threads of this process. The global random generators are not used.

    Args:
        dtype: of the matrices; float32 uses the precision that `torch.set_float32_matmul_precision` has set.
        seconds: about how long to measure.
    """
    sides = CPU_SIDES if device.type == "cpu" else ACCELERATOR_SIDES
    peak = 0.0
    for side in sides:
        operations = 2 * side**3
        if peak and operations / peak > seconds:  # one such product takes seconds if the CPU only emulates the dtype
            break
        # Random numbers, not zeros: on zeros a GPU draws less power and runs faster.
        generator = torch.Generator(device)
        left = torch.randn(side, side, generator=generator, device=device).to(dtype)
        right = torch.randn(side, side, generator=generator, device=device).to(dtype)
        timer = Timer("left @ right", globals={"left": left, "right": right}, num_threads=torch.get_num_threads())
        timed = timer.blocked_autorange(min_run_time=seconds / len(sides))
        peak = max(peak, operations / min(timed.times))
    return peak
