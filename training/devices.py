"""The processes and devices of a run: one protocol for errors, Accelerate, defaults, shards, the peak."""

import contextlib
import ctypes
import dataclasses
import datetime
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    GradientAccumulationPlugin,
    broadcast,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)
from huggingface_hub.utils.tqdm import progress_bar_states
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.benchmark import Timer
from transformers.utils import logging as transformers_logging

from d2l_bert.messages import UserError, explained
from d2l_bert.modeling import modeling_d2l_bert
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training.config import MICRO_BATCH_TOKENS, PretrainConfig


logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# Processes

# Variables that `accelerate launch` sets for engines that this package does not train with.
UNSUPPORTED_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}

# The other processes wait while the main process reads and tokenizes the text, which may take an hour.
PROCESS_TIMEOUT = datetime.timedelta(hours=3)


def start_processes() -> PartialState:
    """
    Connect the launched processes of a run, unless they are connected already; `together` needs that.

    The processes stay connected until they end, so that a program can call `pretrain` again.

    Raises:
        UserError: the launcher asked for an unsupported engine, or for other processes than Accelerate sees.
    """
    for variable, name in UNSUPPORTED_ENGINES.items():
        if parse_flag_from_env(variable):
            raise UserError(f"{name} is not supported; launch with FSDP2, which shards a model over GPUs as well")
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not has_gpu  # Accelerate reads the variable only later
    state = PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != state.num_processes:
        raise UserError(
            f"{launched} processes were launched, but Accelerate sees {state.num_processes}; set "
            f"ACCELERATE_USE_CPU=true or fix the launcher's configuration"
        )
    if state.num_processes > 1:
        # A reference that is never given back, so that Python does not free the process group: the thread that frees
        # it would hold the GIL while it waits for gloo's threads, and these need the GIL to free their last tensors.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.distributed.group.WORLD))
    return state


@contextlib.contextmanager
def together() -> Iterator[None]:
    """
    A block that every process runs; all go on after it, or none.

    Raises:
        Exception: in the first process in which the block fails, its error.
        SystemExit: in the other processes after such an error, with exit code 2 and no message.
    """
    state = PartialState()
    error = None
    try:
        yield
    except Exception as raised:
        if getattr(raised, "is_agreed", False):  # a block within this one has told all processes, as below
            raise
        error = raised
    if state.num_processes > 1:
        failed = gather_object([error is not None])
        if any(failed) and failed.index(True) != state.process_index:
            raise SystemExit(2)
    if error is not None:
        error.is_agreed = True
        raise error


def on_main(function: Callable, *arguments, share_result: bool = True):
    """
    Call a function in the main process, `together`.

    Args:
        share_result: whether every process gets the result, which is then pickled; else the others get None.
    """
    state = PartialState()
    result = None
    with together():
        if state.is_main_process:
            result = function(*arguments)
    return broadcast_object_list([result])[0] if share_result and state.num_processes > 1 else result


def main_first(function: Callable, *arguments):
    """
    Call a function in the main process, and then in the others, `together`.

    What it writes to the cache, the others find there; another machine, which may have another cache, writes it again.
    """
    result = on_main(function, *arguments, share_result=False)
    with together():
        return result if PartialState().is_main_process else function(*arguments)


def share_weights(model, accelerator: Accelerator) -> None:
    """Give every process the weights that the model has in the main process."""
    if accelerator.num_processes > 1:
        for tensor in model.state_dict().values():
            tensor.copy_(broadcast(tensor.to(accelerator.device)))


def shut_down(accelerator: Accelerator) -> None:
    """End the run: wait for all processes, so that none exits while another still needs it, and end the trackers."""
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.2)  # time for gloo's threads to free their last tensors
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:
            logger.warning(f"{tracker.name} did not end ({error!r:.300}); training_log.jsonl has all metrics")


@contextlib.contextmanager
def restore_host_settings() -> Iterator[None]:
    """
    Restore, when the block ends or fails, the settings of the whole process that a run changes.

    These are the state that all `Accelerator` objects share, such as mixed precision and gradient accumulation, the
    kernels that PyTorch may choose (`make_accelerator`), and the progress bars of Transformers and huggingface_hub.
    PyTorch's global RNG is not restored: a run seeds it.
    """
    shared = [AcceleratorState._shared_state, GradientState._shared_state, progress_bar_states]  # dicts
    before = [dict(state) for state in shared]
    has_bars = transformers_logging.is_progress_bar_enabled()
    precision = torch.get_float32_matmul_precision()
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        if has_bars:
            transformers_logging.enable_progress_bar()  # also enables huggingface_hub's bars, which are restored below
        for state, content in zip(shared, before, strict=True):
            state.clear()
            state.update(content)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)


# ---------------------------------------------------------------------------------------------------------------------
# Accelerate, and the defaults of a device


def make_accelerator(mixed_precision: str | None, **options) -> Accelerator:
    """
    The `Accelerator` of a run, for the launched processes and this machine's devices.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`; None for the launcher's, else bf16 if the hardware has it.
        options: further arguments of `Accelerator`.

    Raises:
        UserError: the device does not have this precision, the launcher asked for something that this package does
            not support, or Accelerate did not set up what the launcher asked for.
    """
    state = start_processes()
    on_cpu = state.device.type == "cpu"
    launchers = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if on_cpu:
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    # `accelerate launch` also sets `no` if its user has not chosen a precision.
    asked_for = mixed_precision or (launchers if launchers != "no" else None)
    precision = asked_for or ("bf16" if has_bf16 else "no")
    if precision not in MATMUL_DTYPES:
        raise UserError(f"mixed_precision {precision} is not supported; give bf16, fp16 or no")
    if precision == "fp16" and on_cpu:
        raise UserError("mixed_precision fp16 needs a GPU; give bf16 or no")
    if mixed_precision is None and "ACCELERATE_MIXED_PRECISION" in os.environ and precision != launchers:
        logger.info(f"mixed_precision {precision}, not the launcher's {launchers}; --mixed_precision sets another")
    # cuDNN's attention plans each new shape anew (20 ms to a second), and has given NaN for rows without a key.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        # `Learner.take_step` divides the losses; Accelerate must not divide them again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
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
    if is_fsdp:
        # Each encoder block is sharded as a unit, whatever the launcher's configuration says. Accelerate's own policy
        # would put weights, losses and even counts into bf16. Without a policy they stay float32, and only matrix
        # products are bf16, as they are without FSDP2.
        plugin = accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = [modeling_d2l_bert.D2lBertEncoderBlock.__name__]
        plugin.mixed_precision_policy = None
    return accelerator


# The most tokens of the default micro-batch on a GPU; and the bytes that a step in bf16 keeps for each token, block
# and hidden unit (94 kB for a token in a block of BERT-base), so that the default takes at most half of the memory.
GPU_TOKENS = 2**16
BYTES_A_UNIT = 122


def with_defaults(run: PretrainConfig, architecture: D2lBertConfig, accelerator: Accelerator) -> PretrainConfig:
    """
    The options of a run, with the defaults that depend on the device.

    - `attn_implementation`: on a CPU, PyTorch's fused kernel (`sdpa`) has no dropout, and falls back on a slow path: a
      step of BERT-base at 512 tokens takes 5.9 s, and 4.5 s with `eager`. Without dropout `sdpa` is a tenth slower
      than `eager`, but saves memory at long sequence lengths.
    - `torch_compile`: true on CUDA.
    - `micro_batch_size`: on a CPU of `MICRO_BATCH_TOKENS`; on a GPU more, as many as fit into half of its memory.

    Raises:
        UserError: the device cannot compute the attention that was asked for.
    """
    device = accelerator.device.type
    has_dropout = architecture.attention_probs_dropout_prob > 0
    if run.attn_implementation == "flex_attention" and device == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a CPU; give eager or sdpa")
    can_run_varlen = device == "cuda" and accelerator.mixed_precision != "no" and not has_dropout
    if run.attn_implementation == "varlen" and not can_run_varlen:
        raise UserError(
            "attn_implementation varlen needs an NVIDIA GPU, mixed_precision bf16 or fp16, and no dropout of "
            "attention; give sdpa, or --attention_probs_dropout_prob 0"
        )
    is_eager_faster = run.max_seq_length <= 256 or has_dropout
    tokens = MICRO_BATCH_TOKENS
    if device == "cuda":
        memory = torch.cuda.get_device_properties(accelerator.device).total_memory
        bytes_a_token = architecture.num_hidden_layers * architecture.hidden_size * BYTES_A_UNIT
        tokens = min(GPU_TOKENS, 2 ** int(math.log2(memory / 2 / bytes_a_token)))
    defaults = {
        "mixed_precision": accelerator.mixed_precision,
        "attn_implementation": "eager" if device == "cpu" and is_eager_faster else "sdpa",
        "torch_compile": device == "cuda",
        "micro_batch_size": max(1, tokens // run.max_seq_length),
    }
    missing = {name: value for name, value in defaults.items() if getattr(run, name) is None}
    return dataclasses.replace(run, **missing)


# ---------------------------------------------------------------------------------------------------------------------
# Shards of FSDP2


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


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile

# Programs that the compiler may make for the encoder block: one for training, one for evaluation, for the last block,
# for rows with and without padding, and wherever a size is 1. PyTorch would make 8, and run the rest uncompiled.
RECOMPILE_LIMIT = 64


@contextlib.contextmanager
def compiled_blocks(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """
    Within the block, run the encoder blocks compiled, with one program for all blocks and dynamic shapes.

    This is regional compilation: one block is compiled, so that a deep model compiles as fast as a shallow one. Names
    of parameters and the content of checkpoints do not change. Programs are compiled when they are first needed.

    Args:
        model: a d2l-bert model with an MLM head, without a DDP or FSDP2 wrapper.
        is_compiled: whether to compile; nothing is done if not.

    Raises:
        UserError: a program cannot be compiled.
    """
    if not is_compiled:
        yield
        return
    blocks = model.base_model.encoder.layer
    model.mlm.compiles_gradient = True
    for block in blocks:
        block.compute = torch.compile(type(block).compute.__get__(block), dynamic=True)
    try:
        with (
            explained("torch_compile", "give --torch_compile false", torch._dynamo.exc.TorchDynamoException),
            torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
            # Recomputing activations is cheaper than writing and reading them. `aggressive_recomputation` is wrong
            # here: it would also recompute dropout masks, with other random numbers.
            torch._functorch.config.patch(
                ban_recompute_used_far_apart=False,
                ban_recompute_long_fusible_chains=False,
                ban_recompute_materialized_backward=False,
            ),
            # Duck shapes would compile a separate program for a sequence length of 128 beside a hidden size of 128.
            torch.fx.experimental._config.patch(use_duck_shape=False),
        ):
            yield
    finally:
        model.mlm.compiles_gradient = False
        for block in blocks:
            vars(block).pop("compute", None)
