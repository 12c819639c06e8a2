"""Pairs to batches: a step's content depends on the run alone, and a batch equals one built by hand."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization import prepare
from d2l_bert.training import data, epochs, packing
from d2l_bert.training.batch_loader import load
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.epochs import EpochPairs, Selection


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


@pytest.fixture(autouse=True)
def several_windows(monkeypatch):
    """Stretches and windows so small that an epoch of the books has several windows."""
    monkeypatch.setattr(epochs, "STRETCH_TOKENS", 500)
    monkeypatch.setattr(epochs, "WINDOW_STRETCHES", 4)


WHOLE = 16 * 48  # tokens


def make_steps(text, seed=1, most_tokens=WHOLE, packed=False, objective="nsp", pairing="segments"):
    phases, selection = [], Selection(text.train)
    for first_step, length in ((0, 24), (50, 48)):
        make_batch = data.BatchMaker(text.train, text.tokenizer, 0.15, length, objective=objective)
        pairs = EpochPairs(selection, {"pairing": pairing, "max_seq_length": length, "objective": objective}, seed)
        phases.append(data.Phase(first_step, 0, pairs, make_batch, 16, most_tokens, packed))
    return data.PretrainingSteps(phases)


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
    steps = make_steps(text, packed=True, objective=objective, pairing=pairing)
    phase = steps.phases[0]
    whole_steps = -(-sum(len(phase.pairs.window(0, number)) for number in range(phase.pairs.windows(0))) // 16)
    held = [sequence for step in range(whole_steps) for sequence in sequences_of(steps[step])]
    expected = [phase.make_batch(*phase.pairs.slice(pair, pair + 1)) for pair in range(16 * whole_steps)]
    assert sorted(held, key=str) == sequences_of(expected) and whole_steps < 50
    assert ("next_sentence_label" in expected[0]) == (objective != "none")


# ---------------------------------------------------------------------------------------------------------------------
# Loader


@pytest.mark.parametrize("step", [20, 50, 69])
def test_a_resumed_run_goes_on_from_the_place_of_the_step_before_and_lays_out_nothing_before_it(
    text, monkeypatch, step
):
    whole = make_steps(text)
    place, expected = whole[step - 1].place, sequences_of(whole[step])
    again, laid_out, pieces = make_steps(text), [], EpochPairs.pieces
    again.go_on_from(step, place)

    def recorded(pairs, epoch, window):
        laid_out.append((pairs.pairing["max_seq_length"], epoch, window))
        return pieces(pairs, epoch, window)

    monkeypatch.setattr(EpochPairs, "pieces", recorded)
    assert sequences_of(again[step]) == expected
    if step == 50:  # the first step of another length
        assert place["max_seq_length"] == 24 and laid_out == [(48, 0, 0)]
    else:
        assert min(laid_out) == tuple(place[name] for name in ("max_seq_length", "epoch", "window"))
        assert place["first_pair"] > 0


def test_without_workers_a_thread_makes_the_next_step_while_this_one_is_taken():
    made, threads = {step: threading.Event() for step in range(4)}, []

    class Steps:
        def __getitem__(self, step):
            threads.append(threading.current_thread())
            made[step].set()
            if step == 2:
                raise ValueError("cache: cannot be written")
            return step

    loaded = load(Steps(), 0, 4, 0)
    assert next(loaded) == 0 and made[1].wait(60) and not made[2].is_set()
    assert next(loaded) == 1 and made[2].wait(60)
    with pytest.raises(ValueError, match="cannot be written"):
        next(loaded)
    assert threading.current_thread() not in threads
    assert list(load(Steps(), 2, 2, 0)) == []


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_a_batch_equals_one_built_by_hand(text):
    tokenizer = text.tokenizer
    phase = make_steps(text).phases[1]
    rows, keys = phase.pairs.slice(0, 8)
    batch = phase.make_batch(rows, keys)
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
        steps = make_steps(text, packed=packed, objective=objective, pairing=pairing)
        micro_batches = steps[50]
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


# ---------------------------------------------------------------------------------------------------------------------
# Rows and micro-batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packed_rows_are_full_and_hold_each_sequence_once(lengths):
    rows = packing.pack(lengths, 50)
    assert sorted(sequence for row in rows for sequence in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[sequence] for sequence in row) for row in rows)
    assert filled[-1] <= 50
    assert len(filled) == 1 or filled[0] + filled[1] > 50, "two rows would fit into one"


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 2000), st.sampled_from([1, 2, 3, 8, 1024])
)
def test_the_micro_batches_of_all_ranks_hold_each_row_once_and_are_equally_many(lengths, most_tokens, world_size):
    ranks = range(min(world_size, len(lengths) + 2))
    found = [packing.micro_batches(lengths, most_tokens, packing.Sharding(world_size, rank)) for rank in ranks]
    assert sorted(row for part in found for micro_batch in part for row in micro_batch) == list(range(len(lengths)))
    assert len({len(part) for part in found}) == 1
    for micro_batch in (micro_batch for part in found for micro_batch in part if len(micro_batch) > 1):
        assert len(micro_batch) * packing.padded(max(lengths[row] for row in micro_batch)) <= most_tokens


@pytest.mark.parametrize("micro_batch_cost", [10, packing.MICRO_BATCH_COST, 1000])
@pytest.mark.parametrize("most_tokens", [600, 10**6])
def test_micro_batches_are_cut_where_padding_and_overhead_together_are_least(most_tokens, micro_batch_cost):
    """Compared with every way to cut 12 rows between lengths."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.choice([8, 40, 64, 200, 256], 12)
        widths = sorted((packing.padded(length) for length in lengths), reverse=True)

        def cost(groups):
            parts = sum(-(-len(group) // max(1, most_tokens // group[0])) for group in groups)
            return sum(group[0] * len(group) for group in groups) + parts * micro_batch_cost

        cuts = [place for place in range(1, 12) if widths[place] != widths[place - 1]]
        least = min(
            cost([widths[start:end] for start, end in itertools.pairwise([0, *chosen, 12])])
            for count in range(len(cuts) + 1)
            for chosen in itertools.combinations(cuts, count)
        )
        found = packing.micro_batches(lengths, most_tokens, packing.Sharding(cost=micro_batch_cost))
        found = [[packing.padded(lengths[row]) for row in micro_batch] for micro_batch in found]
        # A group that exceeds the limit of tokens becomes several micro-batches of the same width.
        assert sum(group[0] * len(group) + micro_batch_cost for group in found) <= least
