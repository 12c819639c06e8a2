"""Documents to batches: what a step holds depends on the run alone, and a batch is what one would build by hand."""

import functools
import pickle

import numpy as np
import pytest
import torch

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.training import corpus, data, masking, prepare
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


def make_steps(text, folder, seed=1, global_batch=16, micro_batch=16, **ranks):
    phases = []
    for first_step, length in ((0, 24), (50, 48)):
        make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.15, length)
        pairing = {"pairing": "segments", "max_seq_length": length}
        plans = data.EpochPlans(text.tokens, text.train_documents, pairing, seed, folder)
        phases.append(data.Phase(first_step, plans, make_batch, global_batch, micro_batch))
    return data.PretrainingSteps(phases, **ranks)


def rows_of(micro_batches):
    """The sequences of a step as a set: real tokens, labels with their positions, and the pair's label."""
    rows = set()
    for batch in micro_batches:
        for row in range(len(batch["input_ids"])):
            real = batch["attention_mask"][row] == 1
            known = batch["labels"][row] != -100
            if not known.any():
                continue
            rows.add(
                (
                    tuple(batch["input_ids"][row][real].tolist()),
                    tuple(batch["token_type_ids"][row][real].tolist()),
                    tuple(batch["masked_positions"][row][known].tolist()),
                    tuple(batch["labels"][row][known].tolist()),
                    int(batch["next_sentence_label"][row]),
                )
            )
    return rows


@pytest.mark.parametrize("world_size", [1, 2, 4, 40])
@pytest.mark.parametrize("micro_batch", [16, 5, 1])
def test_a_step_holds_the_same_however_it_is_split(text, tmp_path, world_size, micro_batch):
    whole = make_steps(text, tmp_path)
    for step in (0, 49, 50, 60):
        parts = [
            make_steps(text, tmp_path, micro_batch=micro_batch, world_size=world_size, rank=rank)[step]
            for rank in range(world_size)
        ]
        assert len({len(part) for part in parts}) == 1, "every process must run equally many micro-batches"
        assert rows_of([batch for part in parts for batch in part]) == rows_of(whole[step])
        assert len(rows_of(whole[step])) == 16


def test_a_step_does_not_depend_on_the_steps_before_it_or_on_what_is_cached(text, tmp_path):
    in_order = [rows_of(steps) for steps, _ in zip(make_steps(text, tmp_path / "a"), range(50), strict=False)]
    alone = make_steps(text, tmp_path / "b")
    assert rows_of(alone[49]) == in_order[49] and rows_of(alone[7]) == in_order[7]
    assert rows_of(pickle.loads(pickle.dumps(alone))[7]) == in_order[7]
    assert rows_of(make_steps(text, tmp_path / "b", seed=2)[7]) != in_order[7]


def test_pairs_grow_with_the_length_schedule(text, tmp_path):
    steps = make_steps(text, tmp_path)
    lengths = [int(steps[step][0]["attention_mask"].sum(-1).max()) for step in (0, 49, 50, 99)]
    assert lengths[0] <= 24 and lengths[1] <= 24 and lengths[2] > 24 and lengths[3] > 24
    run = PretrainConfig(max_seq_length=128, length_schedule=["32:0.25", "64:0.5"], max_steps=1)
    assert run.lengths(1000) == [(0, 32), (250, 64), (750, 128)]


def test_each_length_uses_its_plan_from_the_first_pair_on(text, tmp_path):
    steps = make_steps(text, tmp_path)
    for phase in steps.phases:
        first, second = phase.plans.slice(0, 16), phase.plans.slice(16, 32)
        assert rows_of(steps[phase.first_step]) == rows_of([phase.make_batch(*first)])
        assert rows_of(steps[phase.first_step + 1]) == rows_of([phase.make_batch(*second)])


def test_each_epoch_visits_every_document_in_another_order_with_other_pairs(text, tmp_path):
    plans = make_steps(text, tmp_path).phases[1].plans
    first, second = plans.epoch(0), plans.epoch(1)
    assert set(first["a_document"]) == set(second["a_document"]) == set(text.train_documents)
    assert not np.array_equal(first[: len(second)], second[: len(first)])
    rows, keys = plans.slice(len(first) - 2, len(first) + 3)
    assert np.array_equal(rows, np.concatenate((first[-2:], second[:3])))
    assert len(set(keys)) == 5


def test_a_batch_is_what_one_builds_by_hand(text, tmp_path):
    tokenizer = text.tokenizer
    phase = make_steps(text, tmp_path).phases[1]
    rows, keys = phase.plans.slice(0, 8)
    batch = phase.make_batch(rows, keys)
    for number, pair in enumerate(rows):
        a = text.tokens.tokens(pair["a_document"])[pair["a_start"] : pair["a_end"]].tolist()
        b = text.tokens.tokens(pair["b_document"])[pair["b_start"] : pair["b_end"]].tolist()
        expected = [tokenizer.cls_token_id, *a, tokenizer.sep_token_id, *b, tokenizer.sep_token_id]
        ids = batch["input_ids"][number].clone()
        known = batch["labels"][number] != -100
        ids[batch["masked_positions"][number][known]] = batch["labels"][number][known]
        padding = len(ids) - len(expected)
        assert ids.tolist() == expected + [tokenizer.pad_token_id] * padding
        assert batch["token_type_ids"][number].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert batch["attention_mask"][number].tolist() == [1] * len(expected) + [0] * padding
        assert batch["next_sentence_label"][number] == pair["next_sentence_label"]


def test_tokens_on_disk_are_the_tokenizers(text, books):
    rows = data.read_arrow(
        data.prepare_text(corpus.file_source([books]), "en", corpus.Cleaning(), data.cache_folder())
    )
    by_name = {row["name"]: row for row in rows}
    for document in (0, 5, len(text.tokens) - 1):
        name = text.tokens.rows[document]["name"]
        expected = [text.tokenizer(s, add_special_tokens=False)["input_ids"] for s in by_name[name]["sentences"]]
        assert text.tokens.tokens(document).tolist() == [token for ids in expected for token in ids]
        assert text.tokens.sentence_ends(document).tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
        assert text.tokens.paragraph_ends(document).tolist() == by_name[name]["paragraph_ends"]


def test_special_tokens_in_the_text_are_text(text):
    row = {"name": "x", "sentences": ["The [MASK] was [SEP] red.", "\u200b", "Yes."], "paragraph_ends": [2, 3]}
    backend = type(text.tokenizer.backend_tokenizer).from_str(text.tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    tokens = data._tokenize(row, backend)
    assert not set(tokens["input_ids"].tolist()) & {0, 2, 3, 4}
    # The sentence of a zero-width space leaves no token and is no sentence.
    assert len(tokens["sentence_ends"]) == 2 and tokens["paragraph_ends"].tolist() == [1, 2]


def test_held_out_documents_are_no_training_documents_and_the_same_for_every_seed():
    sizes = np.random.default_rng(0).integers(50, 500, 300)
    train, held_out = data.split_documents(sizes, 0.1, 10**9)
    assert sorted([*train, *held_out]) == list(range(300))
    assert 0.1 * sizes.sum() <= sizes[held_out].sum() < 0.1 * sizes.sum() + 500
    assert sizes[data.split_documents(sizes, 0.1, 2000)[1]].sum() < 2500
    train, held_out = data.split_documents(np.array([5, 5, 5, 5]), 0.9, 10**9)
    assert len(train) == len(held_out) == 2
    with pytest.raises(ValueError, match="too little text"):
        data.split_documents(np.array([5, 5, 5]), 0.1, 10**9)


def test_a_micro_batch_that_counts_for_nothing_has_no_loss_and_no_gradient(text, tmp_path):
    empty = make_steps(text, tmp_path).phases[0].make_batch.empty()
    config = D2lBertConfig(vocab_size=400, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    model = D2lBertForPreTraining(config)
    loss = model(**empty, num_items_in_batch=torch.tensor(7.0), num_pairs_in_batch=torch.tensor(3.0)).loss
    loss.backward()
    assert loss == 0 and all(not parameter.grad.any() for parameter in model.parameters())


def test_preparing_twice_writes_once(books, text):
    before = {path: path.stat().st_mtime_ns for path in data.cache_folder().rglob("data.arrow")}
    again = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))
    assert again.tokens.path == text.tokens.path
    assert {path: path.stat().st_mtime_ns for path in data.cache_folder().rglob("data.arrow")} == before


def test_writing_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), data.written_whole(tmp_path / "x") as folder:
        (folder / "half").write_text("a")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_share_to_predict_follows_the_step_and_the_words_stay_whole(books, tmp_path):
    text = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=100, max_steps=1))  # words of many pieces
    make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.1, 48, "whole_word")
    plans = data.EpochPlans(
        text.tokens, text.train_documents, {"pairing": "segments", "max_seq_length": 48}, 1, tmp_path
    )
    share_at = functools.partial(masking.share_at, first=0.6, last=0.1, max_steps=11)
    steps = data.PretrainingSteps([data.Phase(0, plans, make_batch, 32, 32)], share_at)
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
