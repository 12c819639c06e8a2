"""The steps of a run: which micro-batches each process computes, made ahead of the training.

The content of a step is a pure function of (corpus, tokenizer, options of the run, seed, step). It does not depend on
the number of processes, the micro-batch size, the number of loader workers, or the step that a run was resumed from.
"""

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
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from d2l_bert.messages import GO_ON, UserError
from d2l_bert.tokenization.processes import errors_of_workers, start_worker
from d2l_bert.training.data.batches import BatchMaker, Counts, batches, counts_of, first_with_target, words_in
from d2l_bert.training.data.order import MOST_EMPTY_WINDOWS, START, Cursor, EpochPairs
from d2l_bert.training.data.rows import ALONE, Ranks
from d2l_bert.training.data.unpadded import VARLEN, without_padding


STEPS_AHEAD = 2  # that are made ahead of the training
WAIT_SECONDS = 0.2  # between two looks for a signal, while waiting for a step
JOIN_SECONDS = 10  # for which a run that ends waits at most for the step in the making


class Step(NamedTuple):
    """
    What one process computes in a step.

    Args:
        micro_batches: dicts of the model's arguments.
        counts: of all micro-batches.
        cursor: where the pairs of the next step begin.
        words: the words of the text in the step, over all processes (`words_in`).
    """

    micro_batches: list[dict[str, torch.Tensor]]
    counts: Counts
    cursor: Cursor
    words: float


class DrawnPairs(NamedTuple):
    """
    What a step is made of.

    Args:
        step: its number, counted from 0.
        stage: the number of its stage, counted from 0.
        pairs: an array of `pairs.PAIR`, over all processes.
        cursor: where the pairs of the next step begin.
    """

    step: int
    stage: int
    pairs: np.ndarray
    cursor: Cursor


class Stage(NamedTuple):
    """
    Consecutive steps with the same sequence length and the same number of pairs.

    Args:
        first_step, end_step: the first of these steps, counted from 0, and the one after the last.
        epoch_pairs: the pairs of this sequence length, of all epochs.
        make_batch: makes micro-batches of them.
        pairs_a_step: the number of pairs in a step.
    """

    first_step: int
    end_step: int
    epoch_pairs: EpochPairs
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
        self.run = run
        self.max_steps = max_steps
        self.ranks = ranks
        self.on_gpu = on_gpu
        self.stages = []
        planned_stages = run.stages(max_steps)
        ends = [planned.first_step for planned in planned_stages[1:]] + [max_steps]
        of_length = {}  # the pairs and the `BatchMaker` of each sequence length; several stages may share them
        for planned, end_step in zip(planned_stages, ends, strict=True):
            if planned.length not in of_length:
                of_length[planned.length] = _pairs_of_length(run, text, planned.length)
            epoch_pairs, make_batch = of_length[planned.length]
            pairs_a_step = run.pairs_a_step(planned.batch_size, planned.length)
            self.stages.append(Stage(planned.first_step, end_step, epoch_pairs, make_batch, pairs_a_step))

    def check_place(self, done: int, cursor: Cursor, words: float) -> None:
        """
        Check where a resumed run stands: its checkpoint says so, and anybody could have changed that file.

        Args:
            done: the steps that are done, at least one.
            cursor: the `Step.cursor` of the last of them.
            words: the words of the text in all of them.

        Raises:
            ValueError: no run can have come there in `done` steps.
        """
        begun = [stage for stage in self.stages if stage.first_step < done]
        most_taken = 0  # of the pairs from `START` on: fewer if a stage with a new length began there anew
        most_tokens = 0
        for stage in begun:
            pairs_of_stage = (min(done, stage.end_step) - stage.first_step) * stage.pairs_a_step
            most_taken += pairs_of_stage
            most_tokens += pairs_of_stage * stage.epoch_pairs.length
        stage_of_cursor = begun[-1]
        if not stage_of_cursor.epoch_pairs.has(cursor, most_taken):
            raise ValueError(f"the text has no pairs at the place {list(cursor)}")
        corpus = stage_of_cursor.make_batch.corpus
        words_of_documents = np.diff(corpus.words_before)
        tokens_of_documents = np.diff(corpus.first_tokens(np.arange(len(corpus) + 1)))
        most_words = most_tokens * (words_of_documents / tokens_of_documents).max()
        if words > most_words + 1:  # sums of floats may differ from those of other machines
            raise ValueError(f"{done:,} steps do not have {words:,.3g} words")

    def draw(self, start: int = 0, cursor: Cursor = START) -> Iterator[DrawnPairs]:
        """
        Yield what the steps from `start` on are made of.

        Args:
            start: the first of these steps, counted from 0.
            cursor: the `Step.cursor` of the step before.
        """
        for number, stage in enumerate(self.stages):
            has_new_length = number > 0 and stage.epoch_pairs is not self.stages[number - 1].epoch_pairs
            for step in range(max(start, stage.first_step), stage.end_step):
                if has_new_length and step == stage.first_step:
                    cursor = START
                pairs, cursor = stage.epoch_pairs.take(cursor, stage.pairs_a_step)
                yield DrawnPairs(step, number, pairs, cursor)

    def make(self, drawn: DrawnPairs) -> Step:
        """The step that is made of what `draw` yields; worker processes call this."""
        run = self.run
        make_batch = self.stages[drawn.stage].make_batch
        first_share, last_share = run.mlm_probabilities()  # of tokens to predict, in the first and in the last step
        share = first_share + (last_share - first_share) * drawn.step / max(self.max_steps - 1, 1)
        is_varlen = run.attn_implementation == VARLEN
        micro_batches = list(
            batches(
                make_batch,
                drawn.pairs,
                run.most_tokens(),
                self.ranks,
                packed=run.packing,
                mlm_probability=share,
                drops_padding=is_varlen,
            )
        )
        counts = counts_of(micro_batches)
        if is_varlen:
            micro_batches = [without_padding(batch, run.max_seq_length) for batch in micro_batches]
            counts = counts._replace(padded_tokens=counts.tokens)  # no padding is computed
        elif self.on_gpu:
            for batch in micro_batches:
                is_packed = "sequence_ids" in batch  # sequence ids mask padding, too
                if is_packed or bool(batch["attention_mask"].all()):
                    del batch["attention_mask"]
        return Step(micro_batches, counts, drawn.cursor, words_in(make_batch.corpus, drawn.pairs))

    def walk(self, start: int = 0, cursor: Cursor = START) -> Iterator[Step]:
        """Yield the steps from `start` on, as `draw` has them."""
        for drawn in self.draw(start, cursor):
            yield self.make(drawn)

    def epochs(self) -> float:
        """How often the steps of the run go through the text: 1 for one epoch."""
        epochs = 0.0
        for stage in self.stages:
            pairs_of_stage = (stage.end_step - stage.first_step) * stage.pairs_a_step
            epochs += pairs_of_stage / stage.epoch_pairs.pairs_in_an_epoch()
        return epochs


def _pairs_of_length(run, text, length):
    """The `EpochPairs` of a sequence length, one of which has a token to predict, and the `BatchMaker` for them."""
    epoch_pairs = EpochPairs(text.train, run, length, text.corpus_name)
    make_batch = BatchMaker(text.train, text.tokenizer, run, length)
    _check_has_target(epoch_pairs, make_batch)
    return epoch_pairs, make_batch


def _check_has_target(epoch_pairs, make_batch):
    """Raise `UserError` if no pair can be made, or the first windows with pairs have no token to predict."""
    # `take` raises if there is no pair; its cursor is in the first epoch that has one.
    _, behind_first = epoch_pairs.take(START, 1)
    windows = itertools.islice(epoch_pairs.parts(behind_first.epoch), MOST_EMPTY_WINDOWS)
    first_with_target(make_batch, windows, epoch_pairs.name)  # raises if there is no token to predict


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of the training


def steps_ahead(
    steps: TrainingSteps,
    start: int = 0,
    cursor: Cursor = START,
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
    ahead = _StepsAhead(steps, start, cursor, num_workers)
    handler = _take_pytorchs_handler()
    ahead.thread.start()
    try:
        while not should_stop():
            item = ahead.next_item()
            if item is END:
                return
            if isinstance(item, Step):
                yield item
            # Before the thread's error is raised: PyTorch's, of a worker that was killed, says less than this one.
            ahead.check_workers()
            if isinstance(item, BaseException):
                raise item
    finally:
        ahead.close()
        if handler:
            signal.signal(signal.SIGCHLD, handler)


# What `_StepsAhead.next_item` returns after the last step, and where no step has come in `WAIT_SECONDS`.
END = "end"
NOTHING_YET = "nothing yet"


class _StepsAhead:
    """
    A thread that makes steps, or receives them from worker processes, which it starts; and a queue of these steps.

    Args:
        steps, start, cursor, num_workers: as in `steps_ahead`.
    """

    def __init__(self, steps, start, cursor, num_workers):
        self._steps = steps
        self._start = start
        self._cursor = cursor
        self._num_workers = num_workers
        # It gets each `Step`, and then `END`, or the error that has ended the thread.
        self._queue = queue.Queue(STEPS_AHEAD)
        self._workers = []  # empty until the thread has started them
        self._is_closed = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def next_item(self) -> Step | BaseException | str:
        """The next step, the error in its place, `END`, or `NOTHING_YET`."""
        try:
            return self._queue.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            return NOTHING_YET

    def check_workers(self) -> None:
        """
        Raise `UserError` if a worker has ended early.

        A worker that was killed while it sent a step leaves the thread waiting for the rest of the step.
        """
        for worker in self._workers:
            if not worker.exitcode:  # None while it runs, 0 if it has ended by itself
                continue
            how = "it was killed, perhaps because memory ran out"
            if worker.exitcode > 0:  # negative after a signal
                how = f"exit code {worker.exitcode}; read what it has said above"
            raise UserError(
                f"a process that makes batches has ended: {how}; --dataloader_num_workers 0 uses no such process; "
                f"{GO_ON}"
            )

    def close(self) -> None:
        """End the workers and the thread; steps that are made are lost."""
        self._is_closed.set()
        for worker in self._workers:
            worker.kill()  # SIGKILL: a worker has nothing to save, and ignores SIGTERM
        while not self._queue.empty():  # the thread may wait for a free place
            self._queue.get()
        self.thread.join(JOIN_SECONDS)
        for worker in self._workers:
            worker.join(JOIN_SECONDS)

    def _work(self):
        try:
            with errors_of_workers():
                for step in self._made():
                    self._queue.put(step)
                    if self._is_closed.is_set():
                        return
            self._queue.put(END)
        except BaseException as error:
            self._queue.put(error)

    def _made(self):
        """
        The steps: the thread draws the pairs of each step, and makes it or sends the pairs to a worker.

        The workers of a `DataLoader` call `dataset[item]` for each item of its sampler. Here the items are what `draw`
        yields, and `dataset[item]` makes the step.

        Steps come back as NumPy arrays: PyTorch would send each tensor through shared memory with a file descriptor of
        its own, which took twice as long as making the batch.
        """
        other_processes = active_children()
        loader = DataLoader(
            _MadeOnDemand(self._steps),
            batch_size=None,
            sampler=self._steps.draw(self._start, self._cursor),
            num_workers=self._num_workers,
            collate_fn=_with_arrays,
            # The parent process finishes its step before it stops, and may still need a batch of this worker.
            worker_init_fn=functools.partial(start_worker, ignored=(signal.SIGTERM, signal.SIGINT)),
            # A seed for the workers is drawn from a generator of its own, not from the run's random numbers.
            generator=torch.Generator(),
        )
        made = iter(loader)
        # `DataLoader` has no public list of the workers that it has started.
        self._workers += [process for process in active_children() if process not in other_processes]
        for step in made:
            micro_batches = [on_each(torch.from_numpy, batch) for batch in step.micro_batches]
            if self._steps.on_gpu:  # a GPU reads pinned memory while it computes
                micro_batches = [on_each(torch.Tensor.pin_memory, batch) for batch in micro_batches]
            yield step._replace(micro_batches=micro_batches)


class _MadeOnDemand(Dataset):
    """A dataset whose items are steps: `self[drawn]` makes the step of what `TrainingSteps.draw` has yielded."""

    def __init__(self, steps):
        self.steps = steps

    def __getitem__(self, drawn):
        return self.steps.make(drawn)


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


def on_each(function: Callable, batch: dict) -> dict:
    """A micro-batch with the function applied to each of its tensors or arrays; a number stays as it is."""
    return {name: value if isinstance(value, int) else function(value) for name, value in batch.items()}


def _with_arrays(step):
    """A step with NumPy arrays in place of tensors."""
    arrays = [on_each(torch.Tensor.numpy, batch) for batch in step.micro_batches]
    return step._replace(micro_batches=arrays)
