"""Batches prepared ahead of the training step, in a thread of this process or in worker processes."""

import contextlib
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

import torch

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.progress import are_messages_shown, messages_shown
from d2l_bert.tokenization.processes import exit_with_parent
from d2l_bert.training.data import Step


# Seconds between two calls of `should_stop` while waiting for a batch.
WAIT_SECONDS = 0.2


def load(
    steps, start: int, end: int, num_workers: int, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[list]:
    """
    Yield `steps[number]` for each number in `range(start, end)`, in order.

    Args:
        steps: a `data.PretrainingSteps`, or another object whose `steps[number]` is a list of dicts of tensors.
        start: the first number, counted from 0: a run that has done `start` steps continues here.
        end: the number after the last.
        num_workers: worker processes that prepare batches; with 0, a thread of this process does.
        should_stop: called while waiting for a batch. The iterator ends when it returns True.

    Raises:
        Exception: an error in a worker process, with the worker's traceback as a note.
        UserError: a worker process was killed.
    """
    prepare = _from_processes if num_workers else _from_threads
    with contextlib.closing(prepare(steps, range(start, end), num_workers, should_stop)) as batches:
        yield from batches


# ---------------------------------------------------------------------------------------------------------------------
# Threads


def _from_threads(steps, numbers, _, should_stop):
    """Prepare each batch in a thread of its own, one batch ahead. A caller that stops does not wait for the thread."""
    threads = (_BatchThread(steps, number) for number in numbers)  # a thread starts when the generator yields it
    thread = next(threads, None)
    while thread:
        while not thread.is_done.wait(WAIT_SECONDS):
            if should_stop():
                return
        micro_batches, thread = thread.result(), next(threads, None)
        yield micro_batches


class _BatchThread:
    """A thread that prepares one batch."""

    def __init__(self, steps, number):
        self.is_done, self.micro_batches, self.error = threading.Event(), None, None
        threading.Thread(target=self._prepare, args=(steps, number), daemon=True).start()

    def _prepare(self, steps, number):
        try:
            self.micro_batches = steps[number]
        except BaseException as error:
            self.error = error
        self.is_done.set()

    def result(self):
        if self.error is not None:
            raise self.error
        return self.micro_batches


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def _from_processes(steps, numbers, num_workers, should_stop):
    """Prepare batches in worker processes: worker w of n prepares batches w, w + n, w + 2n, ... and sends each."""
    workers = []
    try:
        for number in range(min(num_workers, len(numbers))):
            workers.append(_Worker(steps, numbers[number::num_workers]))
        for index in range(len(numbers)):
            worker = workers[index % num_workers]
            while not worker.has_batch(WAIT_SECONDS):
                if should_stop():
                    return
            yield worker.receive()
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """A worker process, and the pipe that receives its batches."""

    def __init__(self, steps, numbers):
        self.pipe, sending_end = multiprocessing.Pipe(duplex=False)
        # A daemon, because multiprocessing waits for other processes when this process exits with an error.
        arguments = (sending_end, steps, numbers, are_messages_shown())
        self.process = multiprocessing.Process(target=_run_worker, args=arguments, daemon=True)
        self.process.start()
        sending_end.close()  # the worker then holds the only sending end: `recv` raises EOFError if the worker dies

    def has_batch(self, seconds):
        """Whether a batch, or the end of the worker, arrives within some seconds."""
        return bool(wait([self.pipe], seconds))

    def receive(self):
        """Wait for the worker's next batch, a `Step`. Raises the worker's error, or a `UserError` if it died."""
        try:
            arrays, place, words, error = self.pipe.recv()
        except (EOFError, OSError):  # OSError: the worker died while sending
            self.process.join()
            raise UserError(
                f"a process that makes batches has ended ({_describe_exit(self.process.exitcode)}), perhaps because "
                f"memory ran out; --dataloader_num_workers 0 uses no such process; {GO_ON}"
            ) from None
        if error is not None:
            raise error
        return Step(
            ({name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays), place, words
        )

    def kill(self):
        self.process.kill()  # SIGKILL: the worker has nothing to save, and ignores SIGTERM
        self.process.join()
        self.pipe.close()


def _describe_exit(code):
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _run_worker(connection: Connection, steps, numbers, shows_messages: bool) -> None:
    """
    Prepare batches in a worker process and send them to the parent process.

    Batches are sent as NumPy arrays: PyTorch would send each tensor through shared memory with a file descriptor of
    its own, which took twice as long as preparing the batch.
    """
    # A terminal's Ctrl-C and a scheduler's SIGTERM reach all processes of the group. The parent process finishes its
    # step first, and may still need a batch of this worker.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent()
    torch.set_num_threads(1)
    # A forked worker inherits the parent's logging handlers; a spawned worker needs its own.
    if shows_messages and not are_messages_shown():
        messages_shown().__enter__()
    try:
        for number in numbers:
            step = steps[number]
            arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in step]
            connection.send((arrays, getattr(step, "place", None), getattr(step, "words", 0.0), None))
    except BrokenPipeError:  # the parent process has closed the pipe
        return
    except Exception as error:
        error.add_note(f"In a process that makes batches:\n{traceback.format_exc()}")
        connection.send((None, None, None, _as_picklable(error)))


def _as_picklable(error):
    """The exception if it can be pickled; else a `RuntimeError` with its type, message and traceback."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}\n{error.__notes__[-1]}")
