"""Training on several processes: sets up Accelerate, runs functions on the main process only, gathers shards."""

import contextlib
import ctypes
import datetime
import os
import time
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, broadcast, broadcast_object_list
from huggingface_hub.utils.tqdm import progress_bar_states
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.utils import logging

from d2l_bert.errors import UserError, launched_rank, refuse_first
from d2l_bert.modeling.modeling_d2l_bert import D2lBertEncoderBlock


# Variables that `accelerate launch` sets for engines that this package does not train with.
UNSUPPORTED_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}

# The other processes wait while the main process reads and tokenizes the text, which may take an hour.
PROCESS_TIMEOUT = datetime.timedelta(hours=3)


def make_accelerator(mixed_precision: str | None, **options) -> Accelerator:
    """
    The `Accelerator` of a run, for the launched processes and this machine's devices.

    Args:
        mixed_precision: `no`, `bf16` or `fp16`; None for bf16 if the hardware has bf16, else `no`.
        options: further arguments of `Accelerator`.

    Raises:
        UserError: the launcher asked for something that this package does not support, or Accelerate did not set up
            what the launcher asked for.
    """
    check_launcher_environment()
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if on_cpu:
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    group = InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=mixed_precision or ("bf16" if has_bf16 else "no"),
        kwargs_handlers=[group],
        # `train_step` divides the losses; Accelerate must not divide them again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        **options,
    )
    check_engine(accelerator)
    keep_process_group(accelerator)
    if accelerator.is_fsdp2:
        # Each encoder block is sharded as a unit, whatever the launcher's configuration says. Accelerate's own policy
        # would put weights, losses and even counts into bf16. Without a policy they stay float32, and only matrix
        # products are bf16, as they are without FSDP2.
        plugin = accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = [D2lBertEncoderBlock.__name__]
        plugin.mixed_precision_policy = None
    return accelerator


def check_engine(accelerator: Accelerator) -> None:
    """
    Check what Accelerate has set up against what was launched.

    Raises:
        UserError: the number of processes differs, or FSDP was asked for and Accelerate did not set up FSDP2.
    """
    launched, is_fsdp = int(os.environ.get("WORLD_SIZE", 1)), accelerator.distributed_type == DistributedType.FSDP
    cases = {
        f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}; set "
        f"ACCELERATE_USE_CPU=true or fix the launcher's configuration": launched != accelerator.num_processes,
        f"FSDP was asked for, but Accelerate has none on {accelerator.device.type} with {accelerator.num_processes} "
        f"processes; launch without FSDP, or on several GPUs": is_set("ACCELERATE_USE_FSDP") and not is_fsdp,
        "FSDP's first version is not supported; set fsdp_version: 2 in the launcher's configuration": (
            is_fsdp and not accelerator.is_fsdp2
        ),
    }
    refuse_first(cases)


def check_launcher_environment() -> None:
    """
    Check the environment variables that launchers set.

    Raises:
        UserError: a variable asks for an unsupported engine.
    """
    way_out = "launch with FSDP2, which shards a model over GPUs as well"
    refuse_first({f"{name} is not supported; {way_out}": is_set(var) for var, name in UNSUPPORTED_ENGINES.items()})


def is_set(variable: str) -> bool:
    """Whether an environment variable of the launcher is true."""
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on")


@contextlib.contextmanager
def report_errors_once():
    """
    A block in which every launched process raises the same `UserError`: only rank 0 shows the message.

    Raises:
        UserError: on rank 0, the error of the block.
        SystemExit: on the other ranks, with exit code 2 and no message.
    """
    try:
        yield
    except UserError:
        if launched_rank():
            raise SystemExit(2) from None
        raise


def on_main(accelerator: Accelerator, function: Callable, *arguments, share_result: bool = True):
    """
    Call a function in the main process only, while the other processes wait.

    Args:
        share_result: send the function's result to the other processes. The result must then be picklable.

    Returns:
        The function's result; None in the other processes without `share_result`.

    Raises:
        Exception: in the main process, the error of the function.
        SystemExit: in the other processes after such an error, with exit code 2 and no message.
    """
    result = error = None
    if accelerator.is_main_process:
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
    if accelerator.num_processes > 1:
        failed, sent = broadcast_object_list([error is not None, result if share_result else None])
        if not accelerator.is_main_process:
            if failed:
                raise SystemExit(2)
            return sent
    if error is not None:
        raise error
    return result


def keep_process_group(accelerator: Accelerator) -> None:
    """
    Keep a reference to PyTorch's process group, so that Python never frees the group before the process ends.

    This avoids a deadlock: the thread that frees the group holds the GIL while it waits for gloo's threads, and gloo's
    threads need the GIL to free their last tensors.
    """
    if accelerator.num_processes > 1:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.distributed.group.WORLD))


def shut_down(accelerator: Accelerator) -> None:
    """End the run: wait for all processes, so that none exits while another still needs it, and end the trackers."""
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.2)  # time for gloo's threads to free their last tensors
    accelerator.end_training()


def defer_gradient_sync(accelerator: Accelerator, model, is_last: bool):
    """
    A context for one micro-batch: on DDP, gradients are summed over the processes after the last micro-batch only.

    Args:
        is_last: whether this is the last micro-batch of the step.
    """
    # Not on FSDP2, where every process would then hold the gradients of the whole model.
    return contextlib.nullcontext() if is_last or accelerator.is_fsdp2 else accelerator.no_sync(model)


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


@torch.no_grad()
def scatter(source: torch.Tensor | None, target: torch.Tensor) -> None:
    """
    Copy a full tensor of the main process into `target` in every process; each process gets its shard if sharded.

    Args:
        source: a tensor with the full shape of `target`; None in the other processes.
    """
    device = target.device
    if source is None:
        source = torch.empty(target.shape, dtype=target.dtype, device=device)
    source = source.to(device, target.dtype)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(source, target.device_mesh, target.placements))
    else:
        target.copy_(broadcast(source))


# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def restore_host_settings() -> Iterator[None]:
    """
    Restore, when the block ends or fails, the settings of the whole process that a run changes.

    These are the state that all `Accelerator` objects share, such as mixed precision and gradient accumulation
    (changed by `distributed.make_accelerator`), and the progress bars of Transformers and huggingface_hub. PyTorch's
    global RNG is not restored: a run seeds it.
    """
    shared_states = [(kind._shared_state, dict(kind._shared_state)) for kind in (AcceleratorState, GradientState)]
    bars, hub_bars = logging.is_progress_bar_enabled(), dict(progress_bar_states)
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()  # also enables huggingface_hub's bars, which are restored below
        for state, before in (*shared_states, (progress_bar_states, hub_bars)):
            state.clear()
            state.update(before)
