"""Several processes as one: Accelerate's engine, in force as it was asked for; one writer; shards made whole."""

import contextlib
import ctypes
import datetime
import os
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, broadcast, broadcast_object_list
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from d2l_bert.errors import UserError, launched_rank
from d2l_bert.modeling.modeling_d2l_bert import D2lBertEncoderBlock


# What `accelerate launch` may ask for by an environment variable, and what cannot be had.
OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}

# Processes wait for one another while the first of them reads and tokenizes a text, which may take an hour.
LONGEST_WAIT = datetime.timedelta(hours=3)


def make_accelerator(mixed_precision: str | None, **options) -> Accelerator:
    """
    Accelerate's engine for this machine.

    Args:
        mixed_precision: `no`, `bf16`, `fp16`; by default bf16 where the hardware has it.
        options: what else `Accelerator` takes.

    Raises:
        UserError: the engine in force is not the one that was launched.
    """
    refuse_other_engines()
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    precision = mixed_precision or ("bf16" if has_bf16(on_cpu) else "no")
    AcceleratorState._reset_state()  # a run before this one, in the same process, may have had another precision
    group = InitProcessGroupKwargs(timeout=LONGEST_WAIT)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        kwargs_handlers=[group],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # steps are divided once, by ourselves
        **options,
    )
    check_engine(accelerator)
    keep_group(accelerator)
    if accelerator.is_fsdp2:
        # Shards are blocks of the encoder, whatever the launcher's configuration says. Accelerate would have weights,
        # losses and even counts in bf16 with them; here they stay float32, and products alone are bf16, as elsewhere.
        plugin = accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = [D2lBertEncoderBlock.__name__]
        plugin.mixed_precision_policy = None
    return accelerator


def check_engine(accelerator: Accelerator) -> None:
    """Refuse to run as something else than what was launched: several first processes, or no shards at all."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != accelerator.num_processes:
        raise UserError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}; "
            f"set ACCELERATE_USE_CPU=true or mend the launcher's configuration"
        )
    if is_set("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise UserError(
            f"FSDP was asked for and is not in force: Accelerate has none on {accelerator.device.type} with "
            f"{accelerator.num_processes} processes; launch without it, or on several GPUs"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP's first version is not supported; set fsdp_version: 2 in the launcher's configuration")


def refuse_other_engines() -> None:
    """Refuse what Accelerate could start and this package does not train with, and half of what a launcher sets."""
    of_a_launcher = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [variable for variable in of_a_launcher if variable not in os.environ]
    if missing and (os.environ.get("WORLD_SIZE", "1") != "1" or "LOCAL_RANK" in os.environ):
        there = [variable for variable in of_a_launcher if variable in os.environ]
        raise UserError(
            f"the environment has {' and '.join(there)} and no {missing[0]}: start the processes by torchrun or "
            f"accelerate launch, or unset what is left of one"
        )
    for variable, name in OTHER_ENGINES.items():
        if is_set(variable):
            raise UserError(f"{name} is not supported; launch with FSDP2, which shards a model over GPUs as well")


def is_set(variable: str) -> bool:
    """Whether the launcher asked for something by an environment variable."""
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on")


def has_bf16(on_cpu: bool) -> bool:
    """Whether bf16 arithmetic is in the hardware, not emulated."""
    if on_cpu:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


@contextlib.contextmanager
def said_once():
    """
    For blocks that refuse the same in every launched process: the first one says it, the others leave with its exit
    code and without a word. Outside of such blocks each process speaks for itself.
    """
    try:
        yield
    except UserError:
        if launched_rank():
            raise SystemExit(2) from None
        raise


def on_main(accelerator: Accelerator, function: Callable, *arguments, shared: bool = True):
    """
    Call a function in the main process alone, while the others wait.

    Args:
        shared: whether all get what it returns; else the others get None.

    Raises:
        Exception: what the function raised, in the main process; `SystemExit` with code 2 in the others, so that all
            leave together and one speaks.
    """
    result = error = None
    if accelerator.is_main_process:
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
    if accelerator.num_processes > 1:
        failed, sent = broadcast_object_list([error is not None, result if shared else None])
        if not accelerator.is_main_process:
            if failed:
                raise SystemExit(2)
            return sent
    if error is not None:
        raise error
    return result


def keep_group(accelerator: Accelerator) -> None:
    """
    Never free the group of processes; it goes with the process.

    gloo's threads need the interpreter's lock to let go of the last tensors, and whoever frees the group holds that
    lock while it waits for those threads: both may wait for ever.
    """
    if accelerator.num_processes > 1:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.distributed.group.WORLD))


def part(accelerator: Accelerator) -> None:
    """End together: no process leaves while another still needs it."""
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(0.2)  # for gloo's threads to let go of the last tensors
    accelerator.end_training()


def summed_later(accelerator: Accelerator, model, is_last: bool):
    """A context for a micro-batch whose gradient is summed over the processes with the last one's, where that pays."""
    # FSDP2 would keep the gradients of the whole model in every process meanwhile.
    return contextlib.nullcontext() if is_last or accelerator.is_fsdp2 else accelerator.no_sync(model)


def is_sharded(model: nn.Module) -> bool:
    """
    Whether FSDP2 holds the model in shards.

    The decoder may then have shards of its own, gathered where it computes scores and nowhere else: they cannot be
    left out.
    """
    return isinstance(model, FSDPModule)


def reshard(model) -> None:
    """Have every parameter of an FSDP2 model in shards again; between an evaluation and a step some are whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plain_model(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A model of the same kind that consists of `weights`, each parameter once, without FSDP."""
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        plain = kind(model.config)
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    return plain


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in one piece. Every process must call this for every tensor in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def spread(source: torch.Tensor | None, target: torch.Tensor) -> None:
    """
    Put a tensor of the main process, in one piece, into a tensor or the shards of it in every process.

    Args:
        source: of `target`'s whole shape; None in the other processes.
    """
    device = target.device
    if source is None:
        source = torch.empty(target.shape, dtype=target.dtype, device=device)
    source = source.to(device, target.dtype)
    if isinstance(target, DTensor):
        target.copy_(distribute_tensor(source, target.device_mesh, target.placements))
    else:
        target.copy_(broadcast(source))
