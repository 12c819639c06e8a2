"""Pairs to batches and steps: a step's content depends on the run alone, and a batch equals one built by hand."""

import itertools
import math
import os
import signal
import threading

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from d2l_bert.messages import UserError
from d2l_bert.tokenization import prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.data.batches import Counts
from d2l_bert.training.data.order import START, Cursor, EpochPairs
from d2l_bert.training.data.rows import ALONE, Ranks
from d2l_bert.training.data.steps import Step, TrainingSteps, steps_ahead


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


@pytest.fixture(autouse=True)
def several_windows(monkeypatch):
    """Stretches and windows so small that an epoch of the books has several windows."""
    monkeypatch.setattr(order, "STRETCH_TOKENS", 500)
    monkeypatch.setattr(order, "WINDOW_STRETCHES", 4)


def make_steps(text, ranks=ALONE, on_gpu=False, **options):
    """100 steps: 50 of 32 pairs of 24 tokens, then 50 of 16 pairs of 48."""
    sizes = {"max_seq_length": 48, "length_schedule": ["24:0.5"], "global_batch_size": 16, "micro_batch_size": 16}
    run = PretrainConfig(**{"corpus": ["books"], "seed": 1, "objective": "nsp", **sizes, **options})
    return TrainingSteps(run, text, 100, ranks, on_gpu)


def step_at(steps, number):
    """A step, without a cursor of the step before."""
    return next(step for place, step in enumerate(steps.walk()) if place == number)


def sequences_of(micro_batches):
    """
    The sequences of a step, packed or not, sorted. Each: token ids, segments, masked positions, labels, pair label.
    """
    found = []
    for batch in micro_batches:
        for row, numbers in enumerate(batch.get("sequence_ids", batch["attention_mask"])):
            for number in range(1, int(numbers.max()) + 1):
                (where,) = torch.nonzero(numbers == number, as_tuple=True)
                places = torch.arange(len(where))
                assert torch.equal(where, where[0] + places), "a sequence stands in one piece"
                masked = batch["masked_positions"][row] - where[0]
                is_inside = (masked >= 0) & (masked < len(where))
                mine = is_inside & (batch["labels"][row] != -100)
                if not mine.any():  # an empty micro-batch, made so that all ranks run equally many
                    continue
                label = batch["next_sentence_label"][row] if "next_sentence_label" in batch else None
                if "cls_positions" in batch:
                    assert batch["cls_positions"][row, number - 1] == where[0]
                    label = label[number - 1]
                if "position_ids" in batch:
                    assert torch.equal(batch["position_ids"][row, where], places)
                parts = [batch["input_ids"][row, where], batch["token_type_ids"][row, where]]
                parts += [masked[mine], batch["labels"][row][mine]]
                found.append((*(part.tolist() for part in parts), None if label is None else int(label)))
    return sorted(found, key=str)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_an_epoch_holds_each_pair_once(text, objective, pairing):
    steps = make_steps(text, packing=True, objective=objective, pairing=pairing)
    stage = steps.stages[0]
    assert stage.pairs_a_step == 32
    count = sum(map(len, stage.epoch_pairs.parts(0)))
    whole_steps = math.ceil(count / 32)
    held = []
    for step in itertools.islice(steps.walk(), whole_steps):
        held += sequences_of(step.micro_batches)
    pairs, _ = stage.epoch_pairs.take(START, 32 * whole_steps)
    expected = sequences_of(stage.make_batch(pairs[pair : pair + 1]) for pair in range(len(pairs)))
    assert sorted(held, key=str) == expected and whole_steps < 50
    assert all((label is None) == (objective == "none") for *_, label in expected)


@pytest.mark.slow
@pytest.mark.parametrize("step, pairing", [(3, "segments"), (50, "sentences")])
def test_a_step_has_the_same_sequences_whatever_its_micro_batches_and_ranks_are(text, step, pairing):
    """Of the pairs of two sentences, several are packed into a row."""
    expected = step_at(make_steps(text, micro_batch_size=100, pairing=pairing), step)
    for micro_batch_size, packing, count in ((1, False, 1), (4, False, 3), (4, True, 2), (100, True, 1)):
        options = {"micro_batch_size": micro_batch_size, "packing": packing, "pairing": pairing}
        parts = [step_at(make_steps(text, Ranks(count, own), **options), step) for own in range(count)]
        micro_batches = list(itertools.chain.from_iterable(part.micro_batches for part in parts))
        assert sequences_of(micro_batches) == sequences_of(expected.micro_batches)
        assert len({len(part.micro_batches) for part in parts}) == 1
        in_a_row = max(int(batch.get("sequence_ids", batch["attention_mask"]).max()) for batch in micro_batches)
        assert (in_a_row > 1) == (packing and pairing == "sentences")
        for part in parts:
            assert (part.cursor, part.words) == (expected.cursor, expected.words)


@pytest.mark.parametrize("packing", [False, True])
def test_the_counts_of_a_step_are_those_of_its_sequences(text, packing):
    step = step_at(make_steps(text, micro_batch_size=2, packing=packing), 0)
    sequences = sequences_of(step.micro_batches)
    lengths = [len(ids) for ids, *_ in sequences]
    masked_tokens = sum(len(masked) for _, _, masked, *_ in sequences)
    padded_tokens = sum(batch["input_ids"].numel() for batch in step.micro_batches)
    squares = sum(length**2 for length in lengths)
    assert step.counts == Counts(
        masked_tokens=masked_tokens,
        examples=32,
        tokens=sum(lengths),
        padded_tokens=padded_tokens,
        squared_lengths=squares,
    )
    assert step.counts.to_tensor("cpu").tolist() == list(step.counts)


@pytest.mark.parametrize("length", [8, 20, 31, 47])
def test_a_step_of_shorter_pairs_has_as_many_tokens_also_where_lengths_do_not_divide(text, length):
    steps = make_steps(text, length_schedule=[f"{length}:0.5"])
    shorter, whole = steps.stages
    assert whole.pairs_a_step == 16
    assert abs(shorter.pairs_a_step * length - 16 * 48) <= length / 2
    assert shorter.pairs_a_step == len(sequences_of(step_at(steps, 0).micro_batches))


# ---------------------------------------------------------------------------------------------------------------------
# Loader


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, 50, 69])
def test_a_resumed_run_goes_on_from_the_cursor_of_the_step_before_and_lays_out_nothing_before_it(
    text, monkeypatch, step
):
    whole = make_steps(text)
    cursor = step_at(whole, step - 1).cursor
    expected = sequences_of(step_at(whole, step).micro_batches)
    again = make_steps(text)
    laid_out = []
    pieces = EpochPairs.pieces
    for stage in again.stages:
        stage.epoch_pairs._open_window = None  # a new process has laid out nothing

    def recorded(pairs, epoch, window):
        laid_out.append((pairs.length, epoch, window))
        return pieces(pairs, epoch, window)

    monkeypatch.setattr(EpochPairs, "pieces", recorded)
    assert sequences_of(next(again.walk(step, cursor)).micro_batches) == expected
    if step == 50:  # the first of another length
        first = (48, 0, 0)
    else:
        first = (24 if step < 50 else 48, *cursor[:2])
    assert min(laid_out) == first
    assert step == 50 or cursor > (0, 0, 32)


def test_without_workers_a_thread_makes_two_steps_ahead_while_this_one_is_taken():
    """And an error of this thread is raised where its step is taken."""
    made = [threading.Event() for _ in range(6)]
    threads = set()

    class Steps:
        on_gpu = False

        def draw(self, start, cursor):
            return iter(range(start, 6))

        def make(self, number):
            threads.add(threading.current_thread())
            made[number].set()
            if number == 4:
                raise ValueError("cache: cannot be written")
            return Step([], Counts(0, 0, 0, 0, 0), Cursor(0, 0, number), words=0.0)

    loaded = steps_ahead(Steps())
    assert next(loaded).cursor.first == 0 and made[3].wait(60)  # two beside the one that follows
    assert not made[4].is_set() and threading.current_thread() not in threads
    assert [next(loaded).cursor.first for _ in range(3)] == [1, 2, 3]
    assert made[4].wait(60)
    with pytest.raises(ValueError, match="cannot be written"):
        next(loaded)
    assert list(steps_ahead(Steps(), 6)) == []


class FailingSteps:
    """Steps whose first one, made in a worker process, fails as `fail` does."""

    on_gpu = False

    def __init__(self, fail):
        self.fail = fail

    def draw(self, start, cursor):
        return iter(range(start, 6))

    def make(self, number):
        self.fail()


def _refuse():
    raise UserError("tokens: are damaged; prepare them again")


def _break():
    raise RuntimeError("a bug in a batch")


def _exit():
    os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "kind", "words"),
    [
        (_refuse, UserError, "^tokens: are damaged; prepare them again$"),
        (_break, RuntimeError, "(?s)in _break.*a bug in a batch"),  # with the worker's traceback
        (_exit, UserError, "exit code 3"),
    ],
)
def test_an_error_in_a_worker_is_not_called_too_little_memory(fail, kind, words, monkeypatch):
    """Another `DataLoader` of the program has set PyTorch's signal handler, which raises when any worker ends."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # PyTorch sets its handler once
    for numbers in DataLoader(range(2), num_workers=1):
        assert numbers.tolist() in ([0], [1])
    assert (handler := signal.getsignal(signal.SIGCHLD)) != signal.SIG_DFL
    loaded = steps_ahead(FailingSteps(fail), num_workers=1)
    with pytest.raises(kind, match=words):
        next(loaded)
    assert signal.getsignal(signal.SIGCHLD) is handler
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("packing", [False, True])
def test_a_gpu_gets_no_attention_mask_where_no_token_is_padding_or_rows_are_packed(text, packing, monkeypatch):
    """A model reads the packed rows from `sequence_ids`. What a GPU gets lies in pinned memory."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    steps, for_gpu = (make_steps(text, micro_batch_size=1, packing=packing, on_gpu=on_gpu) for on_gpu in (False, True))
    for _, made, loaded in zip(range(3), steps.walk(), steps_ahead(for_gpu), strict=False):
        assert loaded.counts == made.counts
        for batch, found in zip(made.micro_batches, loaded.micro_batches, strict=True):
            for tensor in found.values():
                assert any(tensor is other for other in pinned)
            if packing or (batch["attention_mask"] == 1).all():
                del batch["attention_mask"]
            assert found.keys() == batch.keys()
            assert all(torch.equal(found[name], batch[name]) for name in found)


# ---------------------------------------------------------------------------------------------------------------------
# Batches
