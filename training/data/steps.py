"""The steps of a run: which micro-batches each process computes; made ahead of the training; rows without padding.

The content of a step is a pure function of (corpus, tokenizer, options of the run, seed, step). It does not depend on
the number of processes, the micro-batch size, the number of loader workers, or the step that a run was resumed from.
"""

import contextlib
import copy
import itertools
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from d2l_bert.messages import GO_ON, UserError
from d2l_bert.tokenization.processes import exit_with_parent
from d2l_bert.training.data import masking
from d2l_bert.training.data.batches import (
    ALONE,
    BatchMaker,
    Ranks,
    batches,
    counts_of,
    epoch_pairs,
    first_with_target,
    words_in,
)
from d2l_bert.training.data.order import MOST_EMPTY_WINDOWS, START, Cursor, EpochPairs


# Steps that are made ahead of the training, and seconds between two looks for a signal while waiting for one.
STEPS_AHEAD, WAIT_SECONDS = 2, 0.2

# The name of `varlen_attention` as an `attn_implementation`. Transformers does not know it, and so makes no mask.
VARLEN = "varlen"


class Step(NamedTuple):
    """
    What one process computes in a step.

    Args:
        micro_batches: dicts of the model's arguments.
        counts: of all micro-batches, as `counts_of` has them.
        cursor: where the pairs of the next step are.
        words: the words of the text in the step, over all processes (`words_in`).
    """

    micro_batches: list[dict[str, torch.Tensor]]
    counts: torch.Tensor
    cursor: Cursor
    words: float


class Stage(NamedTuple):
    """
    Consecutive steps with the same sequence length and the same number of pairs.

    Args:
        first_step, end_step: the first of these steps, counted from 0, and the one after the last.
        pairs: the pairs of all epochs with this sequence length.
        pairs_a_step: the number of pairs in a step.
        begins_anew: whether the pairs start from their first; else they go on where those of the stage before end.
    """

    first_step: int
    end_step: int
    pairs: EpochPairs
    make_batch: BatchMaker
    pairs_a_step: int
    begins_anew: bool


class TrainingSteps:
    """
    The steps of a run, as `Step`s.

    Each sequence length has its own pairs. A stage that only changes the batch size goes on in the pairs of the stage
    before: no pair is repeated and no pair is skipped.

    Args:
        text: the `PreparedText`.
        max_steps: the steps of the run.
        on_gpu: whether a GPU computes the steps. Micro-batches then come without an `attention_mask` that masks
            nothing, which to find out later would synchronize the GPU; with the attention `VARLEN`, without padding.

    Raises:
        UserError: the training text has no pair of segments, or no token to predict, or the weights of its sources
            are not right.
    """

    def __init__(self, run, text, max_steps: int, ranks: Ranks = ALONE, on_gpu: bool = False):
        self.run, self.max_steps, self.ranks, self.on_gpu = run, max_steps, ranks, on_gpu
        self.stages, stages = [], run.stages(max_steps)
        ends = [*(first for first, *_ in stages[1:]), max_steps]
        for (first_step, length, batch_size), end in zip(stages, ends, strict=True):
            before = self.stages[-1] if self.stages else None
            if begins_anew := not before or before.make_batch.max_seq_length != length:
                pairs = epoch_pairs(run, text.train, length, text.corpus_name)
                make_batch = BatchMaker(text.train, text.tokenizer, run, length)
                parts = pairs.parts(pairs.take(START, 1)[2].epoch)
                first_with_target(make_batch, itertools.islice(parts, MOST_EMPTY_WINDOWS), pairs.name)
            else:
                pairs, make_batch = before.pairs, before.make_batch
            size = run.pairs_a_step(batch_size, length)
            self.stages.append(Stage(first_step, end, pairs, make_batch, size, begins_anew))

    def walk(self, start: int = 0, cursor: Cursor = START, worker: int = 0, workers: int = 1) -> Iterator[Step]:
        """
        Yield the steps from `start` on, counted from 0.

        Args:
            cursor: the `Step.cursor` of the step before.
            worker, workers: one of several workers yields the steps `start` + `worker`, `start` + `worker` +
                `workers`, and so on.
        """
        first, last = self.run.mlm_probabilities()
        for stage in self.stages:
            for step in range(max(start, stage.first_step), stage.end_step):
                if step == stage.first_step and stage.begins_anew:
                    cursor = START
                pairs, keys, cursor = stage.pairs.take(cursor, stage.pairs_a_step)
                if (step - start) % workers != worker:
                    continue
                share = masking.share_at(step, first, last, self.max_steps)
                options = (self.run.most_tokens(), self.ranks, self.run.packing, share)
                micro_batches = list(batches(stage.make_batch, pairs, keys, *options))
                counts = torch.stack([counts_of(batch) for batch in micro_batches]).sum(0)
                if self.on_gpu:
                    micro_batches = list(map(self._for_gpu, micro_batches))
                if self.run.attn_implementation == VARLEN:
                    counts[3] = counts[2]  # no padding is computed
                yield Step(micro_batches, counts, cursor, words_in(stage.make_batch.tokens, pairs))

    def _for_gpu(self, batch):
        if self.run.attn_implementation == VARLEN:
            return without_padding(batch, self.run.max_seq_length)
        if "sequence_ids" in batch or bool(batch["attention_mask"].all()):
            batch = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        return batch

    def epochs(self) -> float:
        """How often the steps of the run go through the text: 1 for one epoch."""
        return sum(
            (stage.end_step - stage.first_step) * stage.pairs_a_step / stage.pairs.pairs_in_an_epoch()
            for stage in self.stages
        )


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of the training


def load(
    steps: TrainingSteps,
    start: int = 0,
    cursor: Cursor = START,
    num_workers: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """
    Yield the steps from `start` on; a thread makes them ahead, or receives them from worker processes.

    Args:
        start, cursor: as in `TrainingSteps.walk`.
        num_workers: worker processes that make steps; with 0, the thread does.
        should_stop: called while waiting for a step. The iterator ends when it returns True.

    Raises:
        Exception: an error in the thread, or in a worker process, with the worker's traceback in its message.
        UserError: a worker process was killed.
    """
    made, is_closed, workers = queue.Queue(STEPS_AHEAD), threading.Event(), []

    def make():
        try:
            for step in _from_workers(steps, start, cursor, num_workers, workers) if num_workers else walk:
                if steps.on_gpu:  # a GPU reads pinned memory while it computes
                    step = step._replace(
                        micro_batches=[on_each(torch.Tensor.pin_memory, batch) for batch in step.micro_batches]
                    )
                if not put(step):
                    return
            put(None)
        except BaseException as error:
            put(error)

    def put(item):
        """Wait for a free place in the queue; returns whether there was one before the iterator was closed."""
        while not is_closed.is_set():
            with contextlib.suppress(queue.Full):
                made.put(item, timeout=WAIT_SECONDS)
                return True
        return False

    walk = steps.walk(start, cursor)
    threading.Thread(target=make, daemon=True).start()
    try:
        while not should_stop():
            try:
                item = made.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_closed.set()
        for worker in workers:
            worker.kill()  # SIGKILL: a worker has nothing to save, and ignores SIGTERM


def on_each(function: Callable, batch: dict) -> dict:
    """A micro-batch with the function applied to each of its tensors or arrays; a number stays as it is."""
    return {name: value if isinstance(value, int) else function(value) for name, value in batch.items()}


def _from_workers(steps, start, cursor, num_workers, workers):
    """The steps of worker processes; fills the list `workers` with them."""
    others = active_children()
    items = iter(
        DataLoader(
            _Arrays(steps, start, cursor),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=copy.copy,  # returns the NumPy arrays unchanged; PyTorch's default would make tensors of them
            worker_init_fn=_start_worker,
        )
    )
    workers += [process for process in active_children() if process not in others]
    try:
        for arrays, counts, *rest in items:
            if isinstance(arrays, Exception):
                raise arrays
            yield Step([on_each(torch.from_numpy, batch) for batch in arrays], torch.from_numpy(counts), *rest)
    except RuntimeError as error:
        if all(worker.is_alive() for worker in workers):
            raise
        raise UserError(
            f"a process that makes batches has ended ({' '.join(str(error).split()):.150}), perhaps because memory "
            f"ran out; --dataloader_num_workers 0 uses no such process; {GO_ON}"
        ) from None


class _Arrays(IterableDataset):
    """
    The steps of a worker process as NumPy arrays: PyTorch would send each tensor through shared memory with a file
    descriptor of its own, which took twice as long as making the batch. A `UserError` is an item, too, so that it
    stays one; any other error comes from PyTorch, as one of the same class with the worker's traceback.
    """

    def __init__(self, steps, start, cursor):
        self.steps, self.start, self.cursor = steps, start, cursor

    def __iter__(self):
        worker = get_worker_info()
        try:
            for step in self.steps.walk(self.start, self.cursor, worker.id, worker.num_workers):
                arrays = [on_each(torch.Tensor.numpy, batch) for batch in step.micro_batches]
                yield (arrays, step.counts.numpy(), *step[2:])
        except UserError as error:
            yield error, None


def _start_worker(_):
    threading.Thread(target=exit_with_parent, daemon=True).start()
    # A terminal's Ctrl-C and a scheduler's SIGTERM reach all processes of the group. The parent process finishes its
    # step first, and may still need a batch of this worker.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


# ---------------------------------------------------------------------------------------------------------------------
# Rows without padding, for GPUs


def without_padding(batch: dict[str, torch.Tensor], max_length: int) -> dict:
    """
    A micro-batch as one row with all its sequences, for a model whose attention is `VARLEN`.

    Args:
        batch: the model's arguments for padded or packed rows (B, T), as `BatchMaker` makes them, on the CPU.
            `attention_mask` may be left out where there is no padding.
        max_length: the most tokens of a sequence in the run: a constant, for which nothing is compiled anew.

    Returns:
        The model's arguments for the one row (1, T'), and the keyword arguments of `varlen_attention`.
    """
    ids = batch["input_ids"]
    numbers = batch.get("sequence_ids", batch.get("attention_mask", torch.ones_like(ids)))
    is_real = numbers != 0
    places = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))[is_real]
    starts = (places == 0).nonzero().squeeze(1)  # (S,), the place of each sequence's [CLS] in the one row
    is_slot = batch["labels"] != -100
    is_slot[0, 0] |= not is_slot.any()  # attention fails without a query
    place_of = is_real.flatten().cumsum(0).view_as(ids) - 1
    masked = place_of.gather(1, batch["masked_positions"])[is_slot]
    row = {name: batch[name][is_real][None] for name in ("input_ids", "token_type_ids")}
    row |= {"position_ids": places[None], "masked_positions": masked[None], "labels": batch["labels"][is_slot][None]}
    read = masked
    if "next_sentence_label" in batch:
        read, labels = torch.cat([starts, masked]), batch["next_sentence_label"]
        if "sequence_ids" in batch:  # a row has fewer sequences than slots
            labels = labels[torch.arange(labels.shape[1]) < numbers.max(dim=1, keepdim=True).values]
        row |= {"cls_positions": starts[None], "next_sentence_label": labels[None]}
    reads = torch.bucketize(read, starts, right=True).bincount(minlength=len(starts) + 1)  # of no sequence: 0
    order = read.argsort()
    return {
        **row,
        "cu_seq_lens_k": F.pad(starts, (0, 1), value=len(places)).int(),  # (S + 1,)
        "cu_seq_lens_q": reads.cumsum(0).int(),  # (S + 1,)
        "max_length": max_length,
        "query_order": order,
        "query_places": order.argsort(),
    }


def varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    cu_seq_lens_k,
    cu_seq_lens_q,
    max_length,
    query_order,
    query_places,
    **kwargs,
):
    """
    Attention within each sequence of one row: PyTorch's kernel on an NVIDIA GPU, else SDPA with a mask, which is slow.

    Args:
        query: (1, N, Q, D), of all tokens, or in the last block of the tokens that a head reads.
        key, value: (1, N, T, D).
        cu_seq_lens_k: where each sequence begins, and the end of the last one, int32 (S + 1,).
        cu_seq_lens_q: the same among the tokens that a head reads, in the order of the text.
        query_order, query_places: that order (Q,), and its inverse.

    Returns:
        The output (1, Q, N, D), and None for the attention probabilities.

    Raises:
        ValueError: attention has dropout, which the kernel does not have.
    """
    if kwargs.get("dropout"):
        raise ValueError("attention without padding has no dropout; set attention_probs_dropout_prob to 0")
    is_of_all = query.shape[2] == key.shape[2]  # heads read fewer tokens: none reads a [SEP]
    ends = cu_seq_lens_k if is_of_all else cu_seq_lens_q
    query = query if is_of_all else query[:, :, query_order]
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        states = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (tokens, N, D)
        output = varlen_attn(*states, ends, cu_seq_lens_k, max_length, max_length).unsqueeze(0)
    else:
        of_query, of_key = (
            torch.bucketize(torch.arange(tensor.shape[2], device=ends.device), starts[1:], right=True)
            for tensor, starts in ((query, ends), (key, cu_seq_lens_k))
        )
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=of_query[:, None] == of_key)
        output = output.transpose(1, 2)
    return output if is_of_all else output[:, query_places], None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
