"""The steps of a run: which micro-batches each process computes, made ahead of the training.

The content of a step is a pure function of (corpus, tokenizer, options of the run, seed, step). It does not depend on
the number of processes, the micro-batch size, the number of loader workers, or the step that a run was resumed from.
"""

import contextlib
import functools
import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from d2l_bert.messages import GO_ON, UserError
from d2l_bert.tokenization.processes import errors_of_workers, start_worker
from d2l_bert.training.data import batches
from d2l_bert.training.data.batches import ALONE, BatchMaker, Ranks
from d2l_bert.training.data.order import MOST_EMPTY_WINDOWS, START, EpochPairs
from d2l_bert.training.data.unpadded import VARLEN, without_padding


# Steps that are made ahead of the training, seconds between two looks for a signal while waiting for one, and the most
# seconds for which a run that ends waits for the step in the making.
STEPS_AHEAD, WAIT_SECONDS, JOIN_SECONDS = 2, 0.2, 10


class Step(NamedTuple):
    """
    What one process computes in a step.

    Args:
        micro_batches: dicts of the model's arguments.
        counts: of all micro-batches, as `batches.counts_of` has them.
        cursor: where the pairs of the next step are.
        words: the words of the text in the step, over all processes (`words_in`).
    """

    micro_batches: list[dict[str, torch.Tensor]]
    counts: torch.Tensor
    cursor: tuple[int, int, int]
    words: float


class Stage(NamedTuple):
    """
    Consecutive steps with the same sequence length and the same number of pairs.

    Args:
        first_step, end_step: the first of these steps, counted from 0, and the one after the last.
        pairs: the pairs of all epochs with this sequence length.
        pairs_a_step: the number of pairs in a step.
    """

    first_step: int
    end_step: int
    pairs: EpochPairs
    make_batch: BatchMaker
    pairs_a_step: int


class TrainingSteps:
    """
    The steps of a run, as `Step`s.

    Each sequence length has its own pairs. A stage that only changes the batch size goes on in the pairs of the stage
    before: no pair is repeated and no pair is skipped.

    Args:
        text: the `PreparedText`.
        max_steps: the steps of the run.
        on_gpu: whether a GPU computes the steps. Micro-batches then come without an `attention_mask` that masks
            nothing, which to find out later would synchronize the GPU. With the attention `VARLEN`, which only GPUs
            have, they come without padding.

    Raises:
        UserError: the training text has no pair of segments, or no token to predict, or the weights of its sources
            are not right.
    """

    def __init__(self, run, text, max_steps: int, ranks: Ranks = ALONE, on_gpu: bool = False):
        self.run, self.max_steps, self.ranks, self.on_gpu = run, max_steps, ranks, on_gpu
        self.stages, of_length = [], {}
        stages = itertools.pairwise([*run.stages(max_steps), (max_steps,)])
        for (first_step, length, batch_size), (end_step, *_) in stages:
            if length not in of_length:
                pairs = EpochPairs(text.train, run, length, text.corpus_name)
                make_batch = BatchMaker(text.train, text.tokenizer, run, length)
                parts = pairs.parts(pairs.take(START, 1)[1][0])
                batches.first_with_target(make_batch, itertools.islice(parts, MOST_EMPTY_WINDOWS), pairs.name)
                of_length[length] = pairs, make_batch
            size = run.pairs_a_step(batch_size, length)
            self.stages.append(Stage(first_step, end_step, *of_length[length], size))

    def check_place(self, done: int, cursor: tuple[int, int, int], words: float) -> None:
        """
        Check where a run stands that goes on, which its checkpoint says and anybody could have changed there.

        Args:
            done: the steps that are done, at least one.
            cursor: the `Step.cursor` of the last of them.
            words: the words of the text in all of them.

        Raises:
            ValueError: no run can have come there in so many steps.
        """
        began = [stage for stage in self.stages if stage.first_step < done]
        taken = [(min(done, stage.end_step) - stage.first_step) * stage.pairs_a_step for stage in began]
        if not began[-1].pairs.has(cursor, sum(taken)):
            raise ValueError(f"the text has no pairs at the place {list(cursor)}")
        tokens = sum(pairs * stage.pairs.length for pairs, stage in zip(taken, began, strict=True))
        corpus = began[-1].make_batch.tokens
        most_a_token = (np.diff(corpus.words_before) / np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))).max()
        if words > tokens * most_a_token + 1:  # sums of floats may differ from those of other machines
            raise ValueError(f"{done:,} steps do not have {words:,.3g} words")

    def draw(self, start: int = 0, cursor: tuple[int, int, int] = START) -> Iterator[tuple]:
        """
        Yield what the steps from `start` on are made of (`self[drawn]`).

        Args:
            start: the first of these steps, counted from 0.
            cursor: the `Step.cursor` of the step before.

        Returns:
            For each step its number, the number of its stage, its pairs, and the cursor behind them.
        """
        for number, stage in enumerate(self.stages):
            for step in range(max(start, stage.first_step), stage.end_step):
                if step == stage.first_step and stage.pairs is not self.stages[number - 1].pairs:
                    cursor = START  # of the pairs of another length
                pairs, cursor = stage.pairs.take(cursor, stage.pairs_a_step)
                yield step, number, pairs, cursor

    def __getitem__(self, drawn: tuple[int, int, np.ndarray, tuple[int, int, int]]) -> Step:
        """The step that is made of what `draw` yields; a `DataLoader` calls this in its worker processes."""
        number, stage_number, pairs, cursor = drawn
        make_batch = self.stages[stage_number].make_batch
        first_share, last_share = self.run.mlm_probabilities()
        share = first_share + (last_share - first_share) * number / max(self.max_steps - 1, 1)
        micro_batches = list(
            batches.batches(make_batch, pairs, self.run.most_tokens(), self.ranks, self.run.packing, share)
        )
        counts = torch.stack([batches.counts_of(batch) for batch in micro_batches]).sum(0)
        if self.run.attn_implementation == VARLEN:
            micro_batches = [without_padding(batch, self.run.max_seq_length) for batch in micro_batches]
            counts[3] = counts[2]  # no padding is computed
        elif self.on_gpu:
            for batch in micro_batches:
                if "sequence_ids" in batch or bool(batch["attention_mask"].all()):
                    del batch["attention_mask"]
        return Step(micro_batches, counts, cursor, batches.words_in(make_batch.tokens, pairs))

    def walk(self, start: int = 0, cursor: tuple[int, int, int] = START) -> Iterator[Step]:
        """Yield the steps from `start` on, as `draw` has them."""
        return map(self.__getitem__, self.draw(start, cursor))

    def epochs(self) -> float:
        """How often the steps of the run go through the text: 1 for one epoch."""
        return sum(
            (stage.end_step - stage.first_step) * stage.pairs_a_step / stage.pairs.pairs_in_an_epoch()
            for stage in self.stages
        )


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of the training


def steps_ahead(
    steps: TrainingSteps,
    start: int = 0,
    cursor: tuple[int, int, int] = START,
    num_workers: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """
    Yield the steps from `start` on; a thread makes them ahead, or receives them from worker processes.

    Args:
        start, cursor: as in `TrainingSteps.draw`.
        num_workers: worker processes that make steps; with 0, the thread does.
        should_stop: called while waiting for a step. The iterator ends when it returns True.

    Raises:
        Exception: an error in the thread, or in a worker process, with the worker's traceback in its message.
        UserError: a worker process was killed, or has ended; or as in the worker.
    """
    ahead, workers, is_closed = queue.Queue(STEPS_AHEAD), [], threading.Event()

    def work():
        try:
            with errors_of_workers():
                for step in _made(steps, start, cursor, num_workers, workers):
                    ahead.put(step)
                    if is_closed.is_set():
                        return
            ahead.put(None)
        except BaseException as error:
            ahead.put(error)

    thread = threading.Thread(target=work, daemon=True)
    handler = _take_pytorchs_handler()
    thread.start()
    try:
        while not should_stop():
            with contextlib.suppress(queue.Empty):
                item = ahead.get(timeout=WAIT_SECONDS)
                if item is None:
                    return
                if isinstance(item, Step):
                    yield item
                elif not any(worker.exitcode for worker in workers):
                    raise _in_one_line(item)
            # A worker that was killed while it sent a step leaves the thread waiting for the rest of the step.
            for code in filter(None, [worker.exitcode for worker in workers]):
                how = "it was killed, perhaps because memory ran out"
                if code > 0:
                    how = f"exit code {code}; read what it has said above"
                raise UserError(
                    f"a process that makes batches has ended: {how}; --dataloader_num_workers 0 uses no such process; "
                    f"{GO_ON}"
                )
    finally:
        is_closed.set()
        for worker in workers:
            worker.kill()  # SIGKILL: a worker has nothing to save, and ignores SIGTERM
        while not ahead.empty():  # the thread may wait for a free place
            ahead.get()
        thread.join(JOIN_SECONDS)
        for worker in workers:
            worker.join(JOIN_SECONDS)
        if handler:
            signal.signal(signal.SIGCHLD, handler)


def _take_pytorchs_handler():
    """
    Take away PyTorch's handler of SIGCHLD, and return it, if there is one.

    A program that has used a `DataLoader` in its main thread has this handler. It raises an error wherever the program
    is when a worker ends, also when `steps_ahead` ends it; but `steps_ahead` looks after its workers itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if in_main_thread and hasattr(signal, "SIGCHLD") else None
    if getattr(handler, "__module__", None) != signal_handling.__name__:
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return handler


def _in_one_line(error):
    """An error of a worker: PyTorch puts the worker's traceback into its message, which a `UserError` has not."""
    if not isinstance(error, UserError):
        return error
    return UserError(str(error).rsplit("UserError: ", 1)[-1].strip())


def _made(steps, start, cursor, num_workers, workers):
    """
    The steps, for a thread: it makes them itself, or receives them from worker processes, with which it fills
    `workers`.

    The thread draws the pairs of each step and sends them to a worker. Steps come back as NumPy arrays: PyTorch would
    send each tensor through shared memory with a file descriptor of its own, which took twice as long as making the
    batch.
    """
    others = active_children()
    loader = DataLoader(
        steps,
        batch_size=None,
        sampler=steps.draw(start, cursor),
        num_workers=num_workers,
        collate_fn=_with_arrays,
        # The parent process finishes its step before it stops, and may still need a batch of this worker.
        worker_init_fn=functools.partial(start_worker, ignored=(signal.SIGTERM, signal.SIGINT)),
        # A seed for the workers is drawn from a generator of its own, not from the run's random numbers.
        generator=torch.Generator(),
    )
    made = iter(loader)
    workers += [process for process in active_children() if process not in others]
    for step in made:
        micro_batches = [on_each(torch.from_numpy, batch) for batch in step.micro_batches]
        if steps.on_gpu:  # a GPU reads pinned memory while it computes
            micro_batches = [on_each(torch.Tensor.pin_memory, batch) for batch in micro_batches]
        yield step._replace(micro_batches=micro_batches, counts=torch.from_numpy(step.counts))


def on_each(function: Callable, batch: dict) -> dict:
    """A micro-batch with the function applied to each of its tensors or arrays; a number stays as it is."""
    return {name: value if isinstance(value, int) else function(value) for name, value in batch.items()}


def _with_arrays(step):
    arrays = [on_each(torch.Tensor.numpy, batch) for batch in step.micro_batches]
    return step._replace(micro_batches=arrays, counts=step.counts.numpy())
