"""Pairs to batches and steps: a step's content depends on the run alone, and a batch equals one built by hand."""

import itertools
import threading

import pytest
import torch

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization import prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.data.batches import ALONE, Ranks
from d2l_bert.training.data.order import START, EpochPairs
from d2l_bert.training.data.steps import Step, TrainingSteps, load


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


@pytest.fixture(autouse=True)
def several_windows(monkeypatch):
    """Stretches and windows so small that an epoch of the books has several windows."""
    monkeypatch.setattr(order, "STRETCH_TOKENS", 500)
    monkeypatch.setattr(order, "WINDOW_STRETCHES", 4)


def make_run(micro_batch_size=16, packing=False, objective="nsp", pairing="segments"):
    """100 steps: 50 of 32 pairs of 24 tokens, then 50 of 16 pairs of 48."""
    return PretrainConfig(
        corpus=["books"],
        max_steps=100,
        max_seq_length=48,
        length_schedule=["24:0.5"],
        global_batch_size=16,
        seed=1,
        micro_batch_size=micro_batch_size,
        packing=packing,
        objective=objective,
        pairing=pairing,
    )


def make_steps(text, ranks=ALONE, on_gpu=False, **options):
    return TrainingSteps(make_run(**options), text, 100, ranks, on_gpu)


def step_at(steps, number):
    """A step, without a cursor of the step before."""
    return next(step for place, step in enumerate(steps.walk()) if place == number)


def sequences_of(micro_batches):
    """
    The sequences of a step, packed or not, sorted. Each: token ids, segments, masked positions, labels, pair label.
    """
    found = []
    for batch in micro_batches:
        of_sequence = batch.get("sequence_ids", batch["attention_mask"])
        for row, numbers in enumerate(of_sequence):
            known = batch["labels"][row] != -100
            for number in range(1, int(numbers.max()) + 1):
                (where,) = torch.nonzero(numbers == number, as_tuple=True)
                assert torch.equal(where, torch.arange(where[0], where[-1] + 1)), "a sequence stands in one piece"
                masked = batch["masked_positions"][row][known]
                mine = (masked >= where[0]) & (masked <= where[-1])
                if not mine.any():  # an empty micro-batch, made so that all ranks run equally many
                    continue
                label = None
                if "cls_positions" in batch:
                    assert batch["cls_positions"][row, number - 1] == where[0]
                    label = int(batch["next_sentence_label"][row, number - 1])
                elif "next_sentence_label" in batch:
                    label = int(batch["next_sentence_label"][row])
                if "position_ids" in batch:
                    assert torch.equal(batch["position_ids"][row, where], torch.arange(len(where)))
                found.append(
                    (
                        tuple(batch["input_ids"][row, where].tolist()),
                        tuple(batch["token_type_ids"][row, where].tolist()),
                        tuple((masked[mine] - where[0]).tolist()),
                        tuple(batch["labels"][row][known][mine].tolist()),
                        label,
                    )
                )
    return sorted(found, key=str)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_an_epoch_holds_each_pair_once(text, objective, pairing):
    steps = make_steps(text, packing=True, objective=objective, pairing=pairing)
    stage = steps.stages[0]
    assert stage.pairs_a_step == 32
    whole_steps = -(-sum(len(stage.pairs.window(0, number)) for number in range(stage.pairs.windows(0))) // 32)
    held = [
        sequence
        for step in itertools.islice(steps.walk(), whole_steps)
        for sequence in sequences_of(step.micro_batches)
    ]
    pairs, _ = stage.pairs.take(START, 32 * whole_steps)
    expected = [stage.make_batch(pairs[pair : pair + 1]) for pair in range(len(pairs))]
    assert sorted(held, key=str) == sequences_of(expected) and whole_steps < 50
    assert ("next_sentence_label" in expected[0]) == (objective != "none")


@pytest.mark.parametrize("step", [3, 50])
def test_a_step_has_the_same_sequences_whatever_its_micro_batches_and_ranks_are(text, step):
    expected = step_at(make_steps(text, micro_batch_size=100), step)
    for micro_batch_size, packing, count in ((1, False, 1), (4, False, 3), (4, True, 2), (100, True, 1)):
        options = {"micro_batch_size": micro_batch_size, "packing": packing}
        parts = [step_at(make_steps(text, Ranks(count, own), **options), step) for own in range(count)]
        micro_batches = [batch for part in parts for batch in part.micro_batches]
        assert sequences_of(micro_batches) == sequences_of(expected.micro_batches)
        assert len({len(part.micro_batches) for part in parts}) == 1
        for part in parts:
            assert (part.cursor, part.words) == (expected.cursor, expected.words)


def test_the_counts_of_a_step_are_those_of_its_sequences(text):
    for packing in (False, True):
        step = step_at(make_steps(text, micro_batch_size=2, packing=packing), 0)
        sequences = sequences_of(step.micro_batches)
        lengths = [len(ids) for ids, *_ in sequences]
        masked_tokens, examples, tokens, padded_tokens, squared_lengths = step.counts.tolist()
        assert (masked_tokens, examples) == (sum(len(masked) for _, _, masked, *_ in sequences), 32)
        assert (tokens, squared_lengths) == (sum(lengths), sum(length**2 for length in lengths))
        assert padded_tokens == sum(batch["input_ids"].numel() for batch in step.micro_batches)


@pytest.mark.parametrize("length", [8, 20, 31, 47])
def test_a_step_of_shorter_pairs_has_as_many_tokens_also_where_lengths_do_not_divide(text, length):
    run = make_run()
    run.length_schedule = [f"{length}:0.5"]
    shorter, whole = TrainingSteps(run, text, 100).stages
    assert whole.pairs_a_step == 16 and abs(shorter.pairs_a_step * length - 16 * 48) <= length / 2
    assert shorter.pairs_a_step == len(sequences_of(step_at(TrainingSteps(run, text, 100), 0).micro_batches))


# ---------------------------------------------------------------------------------------------------------------------
# Loader


@pytest.mark.parametrize("step", [20, 50, 69])
def test_a_resumed_run_goes_on_from_the_cursor_of_the_step_before_and_lays_out_nothing_before_it(
    text, monkeypatch, step
):
    whole = make_steps(text)
    cursor, expected = step_at(whole, step - 1).cursor, sequences_of(step_at(whole, step).micro_batches)
    again, laid_out, pieces = make_steps(text), [], EpochPairs.pieces
    for stage in again.stages:
        stage.pairs._open = None, None  # a new process has laid out nothing

    def recorded(pairs, epoch, window):
        laid_out.append((pairs.length, epoch, window))
        return pieces(pairs, epoch, window)

    monkeypatch.setattr(EpochPairs, "pieces", recorded)
    assert sequences_of(next(again.walk(step, cursor)).micro_batches) == expected
    if step == 50:  # the first step of another length
        assert laid_out == [(48, 0, 0)]
    else:
        assert min(laid_out) == (24 if step < 50 else 48, *cursor[:2])
        assert cursor > (0, 0, 32)


def test_without_workers_a_thread_makes_two_steps_ahead_while_this_one_is_taken():
    made, threads = {step: threading.Event() for step in range(6)}, []

    class Steps:
        on_gpu = False

        def draw(self, start, cursor):
            return iter(range(start, 6))

        def __getitem__(self, number):
            threads.append(threading.current_thread())
            made[number].set()
            if number == 4:
                raise ValueError("cache: cannot be written")
            return Step([], torch.zeros(5), cursor=(0, 0, number), words=0.0)

    loaded = load(Steps())
    assert next(loaded).cursor[2] == 0 and made[3].wait(60)  # two beside the one that follows
    assert not made[4].is_set()
    assert [next(loaded).cursor[2] for _ in range(3)] == [1, 2, 3] and made[4].wait(60)
    with pytest.raises(ValueError, match="cannot be written"):
        next(loaded)
    assert threading.current_thread() not in threads
    assert list(load(Steps(), 6)) == []


@pytest.mark.parametrize("packing", [False, True])
def test_a_gpu_gets_no_attention_mask_where_no_token_is_padding_or_rows_are_packed(text, packing, monkeypatch):
    """A model reads the packed rows from `sequence_ids`. What a GPU gets lies in pinned memory."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    steps = make_steps(text, micro_batch_size=1, packing=packing)
    for_gpu = make_steps(text, micro_batch_size=1, packing=packing, on_gpu=True)
    for _, made, loaded in zip(range(3), steps.walk(), load(for_gpu), strict=False):
        assert loaded.counts.tolist() == made.counts.tolist()
        for batch, found in zip(made.micro_batches, loaded.micro_batches, strict=True):
            assert all(any(tensor is other for other in pinned) for tensor in found.values())
            is_needed = not packing and bool((batch["attention_mask"] == 0).any())
            assert ("attention_mask" in found) == is_needed
            for name in found:
                torch.testing.assert_close(found[name], batch[name], rtol=0, atol=0)
            assert batch.keys() - found.keys() <= {"attention_mask"}


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_a_batch_equals_one_built_by_hand(text):
    tokenizer = text.tokenizer
    stage = make_steps(text).stages[1]
    rows, _ = stage.pairs.take(START, 8)
    batch = stage.make_batch(rows)
    for number, pair in enumerate(rows):
        a = text.train.ids[pair["a_start"] : pair["a_end"]].tolist()
        b = text.train.ids[pair["b_start"] : pair["b_end"]].tolist()
        expected = [tokenizer.cls_token_id, *a, tokenizer.sep_token_id, *b, tokenizer.sep_token_id]
        ids = batch["input_ids"][number].clone()
        known = batch["labels"][number] != -100
        ids[batch["masked_positions"][number][known]] = batch["labels"][number][known]
        padding = len(ids) - len(expected)
        assert ids.tolist() == expected + [tokenizer.pad_token_id] * padding
        assert batch["token_type_ids"][number].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert batch["attention_mask"][number].tolist() == [1] * len(expected) + [0] * padding
        assert batch["next_sentence_label"][number] == pair["next_sentence_label"]


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("objective", ["nsp", "none"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_same_pairs_unpacked(text, attention, objective, pairing):
    torch.manual_seed(0)
    config = D2lBertConfig(
        vocab_size=len(text.tokenizer),
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model_class = D2lBertForPreTraining if objective == "nsp" else D2lBertForMaskedLM
    model = model_class._from_config(config, attn_implementation=attention)
    found = []
    for packed in (False, True):
        steps = make_steps(text, packing=packed, objective=objective, pairing=pairing)
        micro_batches = step_at(steps, 50).micro_batches
        counts = {"num_items_in_batch": sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)}
        if objective == "nsp":
            counts["num_pairs_in_batch"] = 16
        model.zero_grad()
        loss = sum(model(**batch, **counts).loss for batch in micro_batches)
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found.append((loss.detach(), gradient, sum(batch["input_ids"].numel() for batch in micro_batches)))
    (loss, gradient, tokens), (packed_loss, packed_gradient, packed_tokens) = found
    torch.testing.assert_close(loss, packed_loss, rtol=1e-5, atol=1e-5)
    assert (gradient - packed_gradient).norm() <= 1e-5 * gradient.norm()
    assert packed_tokens <= tokens
