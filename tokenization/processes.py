"""`in_order`: `map` on several processes, which keeps the order of the items."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait

from d2l_bert.errors import explained


def in_order(
    function: Callable,
    items: Iterable,
    processes: int,
    initializer: Callable[..., object] | None = None,
    arguments: tuple = (),
) -> Iterator:
    """
    `map(function, items)` on several processes, which compute a few items ahead of the caller.

    The processes ignore Ctrl-C, and end when the calling process ends, even if the calling process is killed. An
    exception in `function` is raised in the calling process, with the original traceback.

    Args:
        processes: how many processes to start; with 1 or less, the calling process computes.
        initializer, arguments: each process calls `initializer(*arguments)` once before the first item.

    Raises:
        UserError: a process was killed, or could not be started.
    """
    if processes <= 1:
        if initializer is not None:
            initializer(*arguments)
        yield from map(function, items)
        return
    with ProcessPoolExecutor(processes, initializer=_set_up_process, initargs=(initializer, arguments)) as pool:
        items, results = iter(items), deque()
        try:
            with explained(
                f"one of {processes} processes was killed or cannot be started",
                "perhaps memory ran out: lower --preprocessing_num_workers",
                BrokenProcessPool,
                BlockingIOError,
            ):
                for item in items:
                    results.append(pool.submit(function, item))  # the first item starts the processes
                    if len(results) > 2 * processes:
                        yield results.popleft().result()
                while results:
                    yield results.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _set_up_process(initializer, arguments):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A terminal sends Ctrl-C to all processes: the parent process handles Ctrl-C, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)


def exit_with_parent() -> None:
    """End this process when its parent process has ended; for a thread of a pool's process, which would else wait for
    work forever."""
    # With forkserver, `getppid` is the id of the server. The sentinel then shows that the parent process has ended.
    first_parent_id, parent = os.getppid(), multiprocessing.parent_process()
    while os.getppid() == first_parent_id and not wait([parent.sentinel], 1):
        pass
    os._exit(1)
