"""Batches made ahead of the optimizer step that needs them, by a thread of this process or by worker processes."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.progress import are_messages_shown, messages_shown


# Seconds from one look at a signal to the next, while a step is waited for.
WAIT_SECONDS = 0.2


def load(
    steps, first: int, end: int, num_workers: int, told_to_stop: Callable[[], bool] = lambda: False
) -> Iterator[list]:
    """
    Steps `first` to `end` in their order.

    Args:
        steps: `data.PretrainingSteps`, or anything with lists of dictionaries of tensors at these numbers.
        num_workers: processes that make them; with 0 threads of this process do.
        told_to_stop: asked while a step is waited for. If it says so, the iterator ends: a step may take minutes, and
            whoever was told to stop should not wait for it.

    Raises:
        Exception: what went wrong in a worker, with the worker's traceback as a note.
        UserError: a worker was killed.
    """
    make = _from_processes if num_workers else _from_threads
    with contextlib.closing(make(steps, range(first, end), num_workers, told_to_stop)) as made:
        yield from made


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def _from_threads(steps, numbers, _, told_to_stop):
    """One step ahead. Whoever leaves does not wait for it: it may have an epoch to lay out."""
    coming = (_Making(steps, number) for number in numbers)
    following = next(coming, None)
    while following:
        while not following.is_done.wait(WAIT_SECONDS):
            if told_to_stop():
                return
        micro_batches, following = following.result(), next(coming, None)
        yield micro_batches


class _Making:
    """A step in the making."""

    def __init__(self, steps, number):
        self.is_done, self.made, self.error = threading.Event(), None, None
        threading.Thread(target=self._make, args=(steps, number), daemon=True).start()

    def _make(self, steps, number):
        try:
            self.made = steps[number]
        except BaseException as error:
            self.error = error
        self.is_done.set()

    def result(self):
        if self.error is not None:
            raise self.error
        return self.made


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def _from_processes(steps, numbers, num_workers, told_to_stop):
    """Each of the workers makes every `num_workers`-th step, and waits with it until it is taken."""
    workers = []
    try:
        for number in range(min(num_workers, len(numbers))):
            workers.append(_Worker(steps, numbers[number::num_workers]))
        for place in range(len(numbers)):
            worker = workers[place % num_workers]
            while not worker.has_step(WAIT_SECONDS):
                if told_to_stop():
                    return
            yield worker.step()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that makes steps, one after the other."""

    def __init__(self, steps, numbers):
        self.steps, theirs = multiprocessing.Pipe(duplex=False)
        # A daemon: multiprocessing would else wait for it when this process ends by an error of its own.
        work = (theirs, steps, numbers, are_messages_shown())
        self.process = multiprocessing.Process(target=_work, args=work, daemon=True)
        self.process.start()
        theirs.close()  # then there is an end of the pipe when the worker has ended

    def has_step(self, seconds):
        return bool(wait([self.steps], seconds))

    def step(self):
        try:
            arrays, error = self.steps.recv()
        except (EOFError, OSError):  # the latter in the middle of a step
            self.process.join()
            raise UserError(
                f"a process that makes batches has ended ({_how_it_ended(self.process.exitcode)}), perhaps for want "
                f"of memory; --dataloader_num_workers 0 does without; {GO_ON}"
            ) from None
        if error is not None:
            raise error
        return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays]

    def end(self):
        self.process.kill()  # it has nothing to lose, and leaves other signals to this process
        self.process.join()
        self.steps.close()


def _how_it_ended(code):
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _work(connection: Connection, steps, numbers, shows_messages: bool) -> None:
    """
    Make steps and send them, as arrays: tensors would each go through shared memory with a file descriptor of its own,
    which took twice as long as making them.
    """
    # A terminal's Ctrl-C and a scheduler's SIGTERM go to all processes of a group, and the parent may yet need this
    # one for the step it is in.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)
    # A forked process has what its parent shows messages with.
    if shows_messages and not are_messages_shown():
        messages_shown().__enter__()
    try:
        for number in numbers:
            arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in steps[number]]
            connection.send((arrays, None))
    except BrokenPipeError:  # the run has closed its end of the pipe
        return
    except Exception as error:
        error.add_note(f"In a process that makes batches:\n{traceback.format_exc()}")
        connection.send((None, _as_it_arrives(error)))


def _as_it_arrives(error):
    """An exception that can go to another process: itself, or, if it cannot be pickled, what it says."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}\n{error.__notes__[-1]}")


def _end_with_the_parent():
    """Leave when the process that started this one is gone, whatever this one is doing."""
    started_by, parent = os.getppid(), multiprocessing.parent_process()
    # Under forkserver the system's parent is the server: there the sentinel tells that the run itself is gone.
    while os.getppid() == started_by and not wait([parent.sentinel], 1):
        pass
    os._exit(1)
