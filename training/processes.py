"""The processes of a run: one protocol for errors, how they start and end, the settings of their host."""

import contextlib
import ctypes
import datetime
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast, parse_flag_from_env
from torch.distributed import distributed_c10d
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from d2l_bert.messages import ErrorElsewhere, UserError, explained
from d2l_bert.tokenization.model_files import without_bars


logger = logging.getLogger(__name__)


# Variables that `accelerate launch` sets for engines that this package does not train with.
UNSUPPORTED_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}

# How long a process waits for the others: in a sum over all devices and in a vote, to which they come at about the
# same time, as each takes its share of a step; where they agree on something else (`hosts`), for example while the
# main process reads and tokenizes the text, which may take an hour; and for their connection by gloo, which is there
# at once or never. A process that listens for it waits five times as long.
STEP_TIMEOUT = datetime.timedelta(minutes=10)
HOSTS_TIMEOUT = datetime.timedelta(hours=3)
CONNECT_TIMEOUT = datetime.timedelta(minutes=1)


# Held while Accelerate fills in the state that its objects share, of which another thread would see a part.
_CONNECTING = threading.Lock()


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
    with _CONNECTING:
        state = PartialState(cpu=on_cpu, timeout=STEP_TIMEOUT)
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != state.num_processes:
        raise UserError(
            f"{launched} processes were launched, but Accelerate sees {state.num_processes}; set "
            f"ACCELERATE_USE_CPU=true or fix the launcher's configuration"
        )
    if launched > 1:
        hosts()  # here, as they have just come together; later one may read text while the others connect
    return state


def hosts() -> "torch.distributed.ProcessGroup":
    """
    The group in which the processes agree: over gloo, from CPU to CPU, so that no GPU waits and none is waited for.

    Every process must call this for the first time at the same point of the run, which is in `start_processes`.

    Raises:
        UserError: the processes cannot be connected.
    """
    return _hosts_of(torch.distributed.group.WORLD)


@functools.cache
def _hosts_of(world):
    way_out = "set GLOO_SOCKET_IFNAME to the network interface that joins them, such as eth0"
    with explained("the processes cannot be connected by gloo", way_out, RuntimeError):
        group = torch.distributed.new_group(backend="gloo", timeout=CONNECT_TIMEOUT)
    distributed_c10d._set_pg_timeout(HOSTS_TIMEOUT, group)
    # References that are never given back, so that Python does not free the process groups: the thread that frees one
    # would hold the GIL while it waits for gloo's threads, and these need the GIL to free their last tensors.
    for connected in (world, group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))
    return group


def gathered(items: list) -> list:
    """The lists of all processes, one behind the other, in every process. They are pickled."""
    count = PartialState().num_processes
    if count == 1:
        return items
    lists = [None] * count
    torch.distributed.all_gather_object(lists, items, group=hosts())
    return [item for of_process in lists for item in of_process]


def largest(number: int) -> int:
    """
    A vote: the largest of the numbers that the processes have, in every process.

    Raises:
        RuntimeError: a process has not come to it within the time of a step.
    """
    if PartialState().num_processes == 1:
        return number
    found = torch.tensor(number)
    vote = torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=hosts(), async_op=True)
    vote.wait(STEP_TIMEOUT)
    return int(found)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """
    A block that every process runs; all go on after it, or none.

    In a block within a block, the inner one tells all processes of the error; the mark `is_agreed` on the error then
    lets it pass through the outer one.

    Raises:
        Exception: in the first process in which the block fails, its error.
        ErrorElsewhere: in the other processes after a `UserError`, which they do not show.
        SystemExit: in the other processes after another error, with exit code 2 and no message.
    """
    state = PartialState()
    error = None
    try:
        yield
    except Exception as raised:
        if getattr(raised, "is_agreed", False):
            raise
        error = raised
    # Of each process: None if the block has not failed, the message of a `UserError`, "" for another error.
    said = None
    if error is not None:
        said = error.message if isinstance(error, UserError) else ""
    all_said = gathered([said])
    failed = [process for process, line in enumerate(all_said) if line is not None]
    if not failed:
        return
    if failed[0] != state.process_index:
        message = all_said[failed[0]]
        if not message:
            raise SystemExit(2)
        error = ErrorElsewhere(message)
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
    if share_result and state.num_processes > 1:
        shared = [result]
        torch.distributed.broadcast_object_list(shared, src=0, group=hosts())
        return shared[0]
    return result


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
    """
    End the run: end the trackers, and wait for all processes, so that none exits while another still needs it, or
    while SLURM would end the others with it.
    """
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:
            logger.warning(f"{tracker.name} did not end ({error!r:.300}); training_log.jsonl has all metrics")
    if accelerator.num_processes > 1:
        torch.distributed.barrier(group=hosts())
        time.sleep(0.2)  # time for gloo's threads to free their last tensors


# Held while a run goes on in this process.
_RUN = threading.Lock()


@contextlib.contextmanager
def restore_host_settings() -> Iterator[None]:
    """
    Restore, when the block ends or fails, the settings of the whole process that a run changes. One run at a time can
    change them.

    These are the state that all `Accelerator` objects share, such as mixed precision and gradient accumulation, and
    the kernels that PyTorch may choose (`devices.make_accelerator`, `devices.use_flash_attention_3`). Within the block
    Transformers shows no bars.
    PyTorch's global RNG is not restored: a run seeds it.

    Raises:
        UserError: another thread is in such a block, or this one is, as in a callback of a run.
    """
    if not _RUN.acquire(blocking=False):
        raise UserError("another run goes on in this process; wait for its end, or start a process for each run")
    try:
        with _settings_restored():
            yield
    finally:
        _RUN.release()


@contextlib.contextmanager
def _settings_restored():
    """The block of `restore_host_settings`, without its lock."""
    shared = [AcceleratorState._shared_state, GradientState._shared_state]  # dicts
    before = [dict(state) for state in shared]
    precision = torch.get_float32_matmul_precision()
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    flash_attention = current_flash_attention_impl()
    try:
        with without_bars():
            yield
    finally:
        for state, content in zip(shared, before, strict=True):
            state.clear()
            state.update(content)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        if current_flash_attention_impl() != flash_attention:
            restore_flash_attention_impl()  # PyTorch's own
            if flash_attention is not None:
                activate_flash_attention_impl(flash_attention)
