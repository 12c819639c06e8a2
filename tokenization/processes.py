"""`in_order`: `map` on several processes, which keeps the order of the items."""

import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from d2l_bert.messages import explained


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
    import torch.utils.data

    with explained(
        f"one of {processes} processes was killed or cannot be started",
        "perhaps memory ran out: lower --preprocessing_num_workers",
        RuntimeError,
        BlockingIOError,
    ):
        # A generator of its own: a seed for the processes is drawn from it, not from the run's random numbers.
        yield from torch.utils.data.DataLoader(
            items,
            batch_size=None,
            collate_fn=function,
            num_workers=processes if processes > 1 else 0,
            worker_init_fn=start_worker,
            generator=torch.Generator(),
        )


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
    first_parent_id, parent = os.getppid(), multiprocessing.parent_process()
    while os.getppid() == first_parent_id and not multiprocessing.connection.wait([parent.sentinel], 1):
        pass
    os._exit(1)
