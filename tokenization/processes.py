"""`in_order`: `map` on several processes, which keeps the order of the items."""

import contextlib
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from d2l_bert.messages import UserError


# What PyTorch says of a process that was killed, and Python of a system that cannot start one.
_ENDED = r"DataLoader worker \(pid.* (exited unexpectedly|is killed by signal)|can't start new (thread|process)"


def in_order(function: Callable, items: Sequence, processes: int) -> Iterator:
    """
    `map(function, items)` on the worker processes of a `DataLoader`, which compute a few items ahead of the caller.

    The processes ignore Ctrl-C, and end when the calling process ends, even if the calling process is killed. An
    exception in `function` is raised in the calling process, with the original traceback in its message.

    Args:
        processes: how many processes to start; with 1 or less, the calling process computes.

    Raises:
        UserError: a process was killed, or could not be started.
    """
    import torch.utils.data  # here, as it takes a second: the modules that read text import this one without PyTorch

    # A generator of its own: a seed for the processes is drawn from it, not from the run's random numbers.
    loader = torch.utils.data.DataLoader(
        items,
        batch_size=None,
        collate_fn=function,
        num_workers=processes if processes > 1 else 0,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
    )
    try:
        with errors_of_workers():
            yield from loader
    except (RuntimeError, BlockingIOError) as error:
        # A BlockingIOError means that the system has no room for another process. A RuntimeError means that a worker
        # has ended, or is an error of `function`, which is raised again.
        if isinstance(error, RuntimeError) and not re.search(_ENDED, str(error)):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"one of {processes} processes was killed or cannot be started ({reason:.300}); perhaps memory ran out: "
            f"lower --preprocessing_num_workers"
        ) from None


@contextlib.contextmanager
def errors_of_workers() -> Iterator[None]:
    """
    Give a `UserError` that a worker process of a `DataLoader` raises as it was raised there, in one line: PyTorch
    raises it again with the traceback of the process in its message. Others keep that traceback.
    """
    try:
        yield
    except UserError as error:
        # The message of a worker's error ends with its traceback, whose last line is of this form.
        begins_last_line = "\nd2l_bert.messages.UserError: "
        if begins_last_line not in str(error):
            raise
        line = str(error).rpartition(begins_last_line)[2]
        raise UserError(line.strip()) from None


def start_worker(_, ignored: Sequence[int] = (signal.SIGINT,)) -> None:
    """
    Set up a worker process of a `DataLoader`: it ignores some signals, and ends when its parent process has ended.

    A terminal sends Ctrl-C to all processes, and a scheduler may send SIGTERM to all: the parent process handles them.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent():
    """
    End this process when its parent process has ended.

    A worker of a `DataLoader` notices that by itself while it waits for work, but not while it hands a result over.
    """
    # With forkserver, `getppid` is the id of the server. The sentinel then shows that the parent process has ended.
    first_parent_id = os.getppid()
    parent = multiprocessing.parent_process()
    while os.getppid() == first_parent_id and not multiprocessing.connection.wait([parent.sentinel], 1):
        pass
    os._exit(1)
