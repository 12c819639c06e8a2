"""The processes of a run: one protocol for errors, how they start and end, the settings of their host."""

import contextlib
import ctypes
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)
from huggingface_hub.utils.tqdm import progress_bar_states
from transformers.utils import logging as transformers_logging

from d2l_bert.messages import UserError


logger = logging.getLogger(__name__)


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

    In a block within a block, the inner one tells all processes of the error; the mark `is_agreed` on the error then
    lets it pass through the outer one.

    Raises:
        Exception: in the first process in which the block fails, its error.
        SystemExit: in the other processes after such an error, with exit code 2 and no message.
    """
    state = PartialState()
    error = None
    try:
        yield
    except Exception as raised:
        if getattr(raised, "is_agreed", False):
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
