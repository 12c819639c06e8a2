"""Pairs to batches: a step's content depends on the run alone, and a batch equals one built by hand."""

import functools
import itertools
import math
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization import prepare
from d2l_bert.training import batching, data, epochs, masking, packing
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
    phases, selection = [], Selection(text.tokens, text.train_documents(), text.source_ends)
    for first_step, length in ((0, 24), (50, 48)):
        make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.15, length, objective=objective)
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "world_size, most_tokens", [(1, 5 * 48), (1, 48), (2, WHOLE), (4, 5 * 48), (4, 48), (40, WHOLE)]
)
def test_a_step_holds_the_same_sequences_however_it_is_split(text, world_size, most_tokens, packed):
    whole, phases = make_steps(text), make_steps(text, most_tokens=most_tokens, packed=packed).phases
    ranks = [data.PretrainingSteps(phases, sharding=packing.Sharding(world_size, rank)) for rank in range(world_size)]
    for step in (0, 49, 50, 60):
        parts = [steps[step] for steps in ranks]
        assert len({len(part) for part in parts}) == 1, "every process must run equally many micro-batches"
        for part in parts:
            assert all(batch["input_ids"].numel() <= most_tokens for batch in part)
        assert sequences_of([batch for part in parts for batch in part]) == sequences_of(whole[step])
        assert len(sequences_of(whole[step])) == 16


def test_a_step_does_not_depend_on_earlier_steps(text):
    in_order = [sequences_of(steps) for steps, _ in zip(make_steps(text), range(50), strict=False)]
    alone = make_steps(text)
    assert sequences_of(alone[49]) == in_order[49] and sequences_of(alone[7]) == in_order[7]
    assert sequences_of(pickle.loads(pickle.dumps(alone))[7]) == in_order[7]
    assert sequences_of(make_steps(text, seed=2)[7]) != in_order[7]


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


def test_pairs_become_longer_with_the_length_schedule(text):
    steps = make_steps(text)
    lengths = [int(steps[step][0]["attention_mask"].sum(-1).max()) for step in (0, 49, 50, 99)]
    assert lengths[0] <= 24 and lengths[1] <= 24 and lengths[2] > 24 and lengths[3] > 24


RAMPED = {
    "vocab_size": 400,
    "max_seq_length": 48,
    "length_schedule": ["24:0.6"],
    "global_batch_size": 7,
    "batch_size_schedule": ["2:0.2", "5:0.6"],
    "max_steps": 20,
}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_with_schedules_takes_its_pairs_in_order_and_each_once(books, world_size):
    """Pairs per step: 4 then 10 of 24 tokens in steps 0 to 11, 5 of 48 tokens in steps 12 to 15, then 7."""
    run = PretrainConfig(corpus=[str(books)], **RAMPED)
    prepared = prepare.prepare(run)
    sizes = [2 * 2] * 4 + [2 * 5] * 8 + [5] * 4 + [7] * 4
    ranks = [
        data.PretrainingSteps(batching.make_phases(run, prepared, 20), sharding=packing.Sharding(world_size, rank))
        for rank in range(world_size)
    ]
    found = [sequences_of([batch for steps in ranks for batch in steps[step]]) for step in range(20)]
    assert [len(step) for step in found] == sizes
    for length, steps in ((24, range(12)), (48, range(12, 20))):
        plain = replace(run, length_schedule=[], batch_size_schedule=[], max_seq_length=length)
        (phase,) = batching.make_phases(plain, prepared, 20)
        start = 0
        for step in steps:
            pairs = phase.pairs.slice(start, start + sizes[step])
            assert found[step] == sequences_of([phase.make_batch(*pairs)]), step
            start += sizes[step]
        assert phase.pairs.position(start)["epoch"] == 0, "so that none may come twice"


# ---------------------------------------------------------------------------------------------------------------------
# Loader


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_resumed_runs_give_the_same_steps_of_several_epochs(text, workers):
    steps = make_steps(text)
    expected = [sequences_of(steps[step]) for step in range(70)]
    assert steps[69].place["epoch"] == 1, "the second epoch is reached"
    for start in (0, 49, 69):
        again = make_steps(text)
        assert [sequences_of(step) for step in load(again, start, 70, workers)] == expected[start:]


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


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_loader_hands_on_where_the_next_steps_pairs_are(text, workers):
    steps = make_steps(text)
    expected = [steps[step].place for step in range(40, 60)]
    assert [step.place for step in load(make_steps(text), 40, 60, workers)] == expected
    assert all(isinstance(place, dict) for place in expected) and len({str(place) for place in expected}) >= 5


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


def test_closing_the_loader_does_not_wait_for_the_step_in_preparation():
    begun, go_on, makers = threading.Event(), threading.Event(), []

    class Steps:
        def __getitem__(self, step):
            if step:
                makers.append(threading.current_thread())
                begun.set()
                assert go_on.wait(60)
            return step

    loaded = load(Steps(), 0, 9, 0)
    assert next(loaded) == 0 and begun.wait(60)
    loaded.close()
    (maker,) = makers
    assert maker.is_alive() and maker.daemon  # a daemon thread: the process does not wait for it at its end either
    go_on.set()
    maker.join(60)
    assert not maker.is_alive()


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_a_batch_equals_one_built_by_hand(text):
    tokenizer = text.tokenizer
    phase = make_steps(text).phases[1]
    rows, keys = phase.pairs.slice(0, 8)
    batch = phase.make_batch(rows, keys)
    for number, pair in enumerate(rows):
        a = text.tokens.ids.at(np.arange(pair["a_start"], pair["a_end"])).tolist()
        b = text.tokens.ids.at(np.arange(pair["b_start"], pair["b_end"])).tolist()
        expected = [tokenizer.cls_token_id, *a, tokenizer.sep_token_id, *b, tokenizer.sep_token_id]
        ids = batch["input_ids"][number].clone()
        known = batch["labels"][number] != -100
        ids[batch["masked_positions"][number][known]] = batch["labels"][number][known]
        padding = len(ids) - len(expected)
        assert ids.tolist() == expected + [tokenizer.pad_token_id] * padding
        assert batch["token_type_ids"][number].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert batch["attention_mask"][number].tolist() == [1] * len(expected) + [0] * padding
        assert batch["next_sentence_label"][number] == pair["next_sentence_label"]


@pytest.mark.parametrize("objective", ["nsp", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_special_tokens_are_never_predicted(text, packed, objective):
    steps = make_steps(text, packed=packed, objective=objective)
    special = set(text.tokenizer.all_special_ids) - {text.tokenizer.unk_token_id}
    for step in range(20):
        for batch in steps[step]:
            assert special.isdisjoint(batch["labels"].unique().tolist())


def test_the_masked_share_follows_its_schedule_and_whole_words_stay_whole(books):
    # A small vocabulary: most words have many pieces.
    text = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=100, max_steps=1))
    make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.1, 48, "whole_word")
    selection = Selection(text.tokens, text.train_documents(), text.source_ends)
    pairs = EpochPairs(selection, {"pairing": "segments", "max_seq_length": 48}, 1)
    share_at = functools.partial(masking.share_at, first=0.6, last=0.1, max_steps=11)
    steps = data.PretrainingSteps([data.Phase(0, 0, pairs, make_batch, 32, 32 * 48)], share_at)
    shares, words_of_pieces = [], 0
    for step in (0, 5, 10):
        (batch,) = steps[step]
        shares.append(((batch["labels"] != -100).sum() / (batch["attention_mask"].sum() - 3 * 32)).item())
        for ids, positions, labels in zip(batch["input_ids"], batch["masked_positions"], batch["labels"], strict=True):
            known = labels != -100
            ids[positions[known]] = labels[known]
            chosen = set(positions[known].tolist())
            goes_on = [piece.startswith("##") for piece in text.tokenizer.convert_ids_to_tokens(ids)]
            for position in range(1, len(ids)):
                if goes_on[position] and ids[position - 1] > text.tokenizer.mask_token_id:
                    assert (position in chosen) is (position - 1 in chosen)
                    words_of_pieces += position in chosen
    assert words_of_pieces > 100
    assert shares == pytest.approx([0.6, 0.35, 0.1], abs=0.05)


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


def test_an_empty_micro_batch_has_no_loss_and_no_gradient(text):
    empty = make_steps(text).phases[0].make_batch.empty()
    config = D2lBertConfig(vocab_size=400, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    model = D2lBertForPreTraining(config)
    loss = model(**empty, num_items_in_batch=torch.tensor(7.0), num_pairs_in_batch=torch.tensor(3.0)).loss
    loss.backward()
    assert loss == 0 and all(not parameter.grad.any() for parameter in model.parameters())


def test_held_out_pairs_are_those_of_their_windows_up_to_the_most_and_the_same_however_they_are_split(text):
    tokens, documents = text.evaluation()
    selection = Selection(tokens, documents, [len(tokens)])
    make_batch = data.BatchMaker(tokens, text.tokenizer, 0.15, 24)

    def made(most=None, sharding=packing.ALONE):
        options = {"pairing": "segments", "max_seq_length": 24}
        return data.HeldOutPairs(selection, options, make_batch, 5 * 24, most, sharding)

    everything = list(made().parts())
    keys = np.concatenate([keys for _, keys in everything])
    assert len(everything) > 1 and len(np.unique(keys)) == len(keys), "several windows, masks of its own for each pair"
    whole = sequences_of([make_batch(*part) for part in everything])
    assert sequences_of(made()) == sequences_of(made()) == whole
    split = [batch for rank in range(3) for batch in made(sharding=packing.Sharding(3, rank))]
    assert sequences_of(split) == whole
    first = len(everything[0][0])
    for most in (1, first, first + 1):
        pairs, keys = (np.concatenate(columns)[:most] for columns in zip(*everything, strict=True))
        assert sequences_of(made(most)) == sequences_of([make_batch(pairs, keys)])


def test_held_out_micro_batches_are_small_enough_for_their_logits(books, monkeypatch):
    """The pairs and masks stay the same, and the number of logits is limited, whatever `micro_batch_size` is."""
    run = PretrainConfig(corpus=[str(books)], vocab_size=400, max_seq_length=48, micro_batch_size=1000)
    prepared = prepare.prepare(run)
    whole = list(batching.make_held_out(run, prepared, packing.ALONE))
    monkeypatch.setattr(batching, "LOGITS_AT_ONCE", 10 * 48 * 0.15 * len(prepared.tokenizer))
    parts = list(batching.make_held_out(run, prepared, packing.ALONE))
    assert max(batch["input_ids"].numel() for batch in parts) <= 10 * 48 < whole[0]["input_ids"].numel()
    assert sorted(sequences_of(parts)) == sorted(sequences_of(whole))
    counts = [len(list(batching.make_held_out(run, prepared, packing.Sharding(cost=cost)))) for cost in (0, 10**6)]
    assert counts[0] > counts[1], "they are cut by what a micro-batch costs"


@pytest.mark.parametrize(("masked", "random"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_a_run_decides_what_becomes_of_the_tokens_to_predict(books, masked, random):
    shares = {"mask_replace_prob": masked, "random_replace_prob": random}
    run = PretrainConfig(corpus=[str(books)], vocab_size=400, max_seq_length=48, **shares)
    prepared = prepare.prepare(run)
    for batch in batching.make_held_out(run, prepared, packing.ALONE):
        is_real = batch["labels"] != -100
        seen, label = batch["input_ids"].gather(1, batch["masked_positions"])[is_real], batch["labels"][is_real]
        assert (seen == prepared.tokenizer.mask_token_id).float().mean() == masked
        assert (seen == label).float().mean() < 0.2 if masked or random else (seen == label).all()


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


@pytest.mark.parametrize(("rows", "bunch"), [(15, 1), (32, 2), (512, 32), (700, 32)])
def test_micro_batches_have_few_different_sizes(rows, bunch):
    """A CPU prepares its matrix products anew for each size. A group is a power of two, at most a 16th of the rows."""
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        found = packing.micro_batches(rng.integers(5, 64, rows), 64 * rows, packing.Sharding(cost=100))
        assert [len(micro_batch) % bunch for micro_batch in found[:-1]] == [0] * (len(found) - 1)
        sizes += map(len, found[:-1])
    assert math.gcd(*sizes) == bunch


def test_micro_batches_of_a_large_step_are_full():
    found = packing.micro_batches([128] + [72] * 4095, 64 * 128)
    assert min(map(len, found[1:])) * 72 > 64 * 128 * 7 / 8


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
