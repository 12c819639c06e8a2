"""Batches prepared ahead of the training step, in a thread of this process or in worker processes."""

import copy
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from multiprocessing import active_children

import torch
from torch.utils.data import DataLoader, Dataset

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.tokenization.processes import exit_with_parent
from d2l_bert.training.data import Step


# Seconds between two calls of `should_stop` while waiting for a batch.
WAIT_SECONDS = 0.2


def load(
    steps, start: int, end: int, num_workers: int, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[list]:
    """
    Yield `steps[number]` for each number in `range(start, end)`, in order.

    A thread is one batch ahead: it prepares the batch itself, or receives it from worker processes.

    Args:
        steps: a `data.PretrainingSteps`, or another object whose `steps[number]` is a list of dicts of tensors.
        start: the first number, counted from 0: a run that has done `start` steps continues here.
        end: the number after the last.
        num_workers: worker processes that prepare batches; with 0, the thread does.
        should_stop: called while waiting for a batch. The iterator ends when it returns True.

    Raises:
        Exception: an error in a worker process, with the worker's traceback as a note.
        UserError: a worker process was killed.
    """
    numbers, workers = range(start, end), []
    batches = _from_workers(steps, numbers, num_workers, workers) if num_workers else map(steps.__getitem__, numbers)
    try:
        ahead = _next_in_thread(batches)
        for number in numbers:
            while not wait([ahead], WAIT_SECONDS).done:
                if should_stop():
                    return
            batch = ahead.result()
            if number + 1 < end:
                ahead = _next_in_thread(batches)
            yield batch
    finally:
        for worker in workers:
            worker.kill()  # SIGKILL: a worker has nothing to save, and ignores SIGTERM


def _next_in_thread(batches):
    """The future result of `next(batches)`, from a daemon thread: a caller that ends does not wait for it."""
    future = Future()

    def run():
        try:
            future.set_result(next(batches))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _from_workers(steps, numbers, num_workers, workers):
    """The batches of worker processes; fills the list `workers` with them."""
    loader = DataLoader(
        _Arrays(steps),
        batch_size=None,
        sampler=numbers,
        num_workers=num_workers,
        collate_fn=copy.copy,  # returns the NumPy arrays unchanged; PyTorch's default would turn them into tensors
        worker_init_fn=_start_worker,
    )
    others = active_children()
    items = iter(loader)
    workers += [process for process in active_children() if process not in others]
    try:
        for arrays, place, words, error in items:
            if error is not None:
                raise error
            yield Step(
                ({name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays), place, words
            )
    except RuntimeError as error:
        if all(worker.is_alive() for worker in workers):
            raise
        raise UserError(
            f"a process that makes batches has ended ({' '.join(str(error).split()):.150}), perhaps because memory "
            f"ran out; --dataloader_num_workers 0 uses no such process; {GO_ON}"
        ) from None


class _Arrays(Dataset):
    """
    The steps as NumPy arrays: PyTorch would send each tensor through shared memory with a file descriptor of its own,
    which took twice as long as preparing the batch. An error is an item, too, so that it keeps its class.
    """

    def __init__(self, steps):
        self.steps = steps

    def __getitem__(self, number):
        try:
            step = self.steps[number]
            arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in step]
            return arrays, getattr(step, "place", None), getattr(step, "words", 0.0), None
        except Exception as error:
            error.add_note(f"In a process that makes batches:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # an exception that cannot be pickled
                error = RuntimeError(f"{type(error).__name__}: {error}\n{error.__notes__[-1]}")
            return None, None, None, error


def _start_worker(_):
    threading.Thread(target=exit_with_parent, daemon=True).start()
    # A terminal's Ctrl-C and a scheduler's SIGTERM reach all processes of the group. The parent process finishes its
    # step first, and may still need a batch of this worker.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
