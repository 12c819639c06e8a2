"""Documents to batches: what a step holds depends on the run alone, and a batch is what one would build by hand."""

import errno
import functools
import itertools
import math
import os
import pickle
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.errors import UserError
from d2l_bert.tokenization import arrow, prepare, wordpiece
from d2l_bert.tokenization.cache import SILENT_SECONDS, cache_folder, written_whole
from d2l_bert.tokenization.documents import Document
from d2l_bert.tokenization.sentences import Cleaning
from d2l_bert.tokenization.sources import Source, file_source
from d2l_bert.tokenization.split import split_documents
from d2l_bert.training import batching, data, masking, packing, pairs
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.loader import load


@pytest.fixture(scope="module")
def text(books):
    return prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))


WHOLE = 16 * 48  # tokens


def make_steps(
    text,
    folder,
    seed=1,
    global_batch=16,
    most_tokens=WHOLE,
    packed=False,
    objective="nsp",
    pairing="segments",
    **ranks,
):
    phases = []
    for first_step, length in ((0, 24), (50, 48)):
        make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.15, length, objective=objective)
        options = {"pairing": pairing, "max_seq_length": length, "objective": objective}
        plans = data.EpochPlans(text.tokens, text.train_documents, options, seed, folder)
        phases.append(data.Phase(first_step, 0, plans, make_batch, global_batch, most_tokens, packed))
    return data.PretrainingSteps(phases, **ranks)


def sequences_of(micro_batches):
    """The sequences of a step, packed or not, sorted: real tokens, positions and labels of masks, the pair's label."""
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
                if not mine.any():  # a micro-batch that counts for nothing
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "world_size, most_tokens", [(1, 5 * 48), (1, 48), (2, WHOLE), (4, 5 * 48), (4, 48), (40, WHOLE)]
)
def test_a_step_holds_the_same_however_it_is_split(text, tmp_path, world_size, most_tokens, packed):
    whole = make_steps(text, tmp_path)
    for step in (0, 49, 50, 60):
        parts = [
            make_steps(text, tmp_path, most_tokens=most_tokens, packed=packed, world_size=world_size, rank=rank)[step]
            for rank in range(world_size)
        ]
        assert len({len(part) for part in parts}) == 1, "every process must run equally many micro-batches"
        for part in parts:
            assert all(batch["input_ids"].numel() <= most_tokens for batch in part)
        assert sequences_of([batch for part in parts for batch in part]) == sequences_of(whole[step])
        assert len(sequences_of(whole[step])) == 16


def test_a_step_does_not_depend_on_the_steps_before_it_or_on_what_is_cached(text, tmp_path):
    in_order = [sequences_of(steps) for steps, _ in zip(make_steps(text, tmp_path / "a"), range(50), strict=False)]
    alone = make_steps(text, tmp_path / "b")
    assert sequences_of(alone[49]) == in_order[49] and sequences_of(alone[7]) == in_order[7]
    assert sequences_of(pickle.loads(pickle.dumps(alone))[7]) == in_order[7]
    assert sequences_of(make_steps(text, tmp_path / "b", seed=2)[7]) != in_order[7]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_resumed_runs_give_the_same_steps_of_several_epochs(text, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(data, "SMALL_PLAN", 0)  # every plan goes through the disk
    steps = make_steps(text, tmp_path / "here")
    expected = [sequences_of(steps[step]) for step in range(70)]
    assert len(steps.phases[1].plans._ends) == 3, "the second epoch is reached"
    for start in (0, 1, 49, 50, 69):
        again = make_steps(text, tmp_path / f"there-{start}")
        assert [sequences_of(step) for step in load(again, start, 70, workers)] == expected[start:]


def test_without_workers_the_next_step_is_made_while_this_one_is_taken():
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


def test_who_leaves_does_not_wait_for_the_step_in_the_making():
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
    assert maker.is_alive() and maker.daemon  # neither does the process, when it ends
    go_on.set()
    maker.join(60)
    assert not maker.is_alive()


def test_two_plans_stay_open(text, tmp_path):
    plans = make_steps(text, tmp_path).phases[0].plans
    for number in range(4):
        plans.epoch(number)
    assert list(plans._open) == [2, 3]


def test_a_worker_opens_an_epochs_plan_itself(text, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SMALL_PLAN", 0)
    plans = make_steps(text, tmp_path).phases[1].plans
    empty = len(pickle.dumps(plans))
    rows = plans.epoch(0)
    assert plans.epoch(0) is rows and len(pickle.dumps(plans)) == empty
    assert np.array_equal(pickle.loads(pickle.dumps(plans)).epoch(0), rows)


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_an_epoch_holds_each_pair_of_its_plan_once(text, tmp_path, objective, pairing):
    steps = make_steps(text, tmp_path, packed=True, objective=objective, pairing=pairing)
    phase = steps.phases[0]
    whole_steps = -(-len(phase.plans.epoch(0)) // 16)
    held = [sequence for step in range(whole_steps) for sequence in sequences_of(steps[step])]
    expected = [phase.make_batch(*phase.plans.slice(pair, pair + 1)) for pair in range(16 * whole_steps)]
    assert sorted(held, key=str) == sequences_of(expected) and whole_steps < 50
    assert ("next_sentence_label" in expected[0]) == (objective != "none")


def test_pairs_grow_with_the_length_schedule(text, tmp_path):
    steps = make_steps(text, tmp_path)
    lengths = [int(steps[step][0]["attention_mask"].sum(-1).max()) for step in (0, 49, 50, 99)]
    assert lengths[0] <= 24 and lengths[1] <= 24 and lengths[2] > 24 and lengths[3] > 24
    run = PretrainConfig(max_seq_length=128, length_schedule=["32:0.25", "64:0.5"], max_steps=1)
    assert run.stages(1000) == [(0, 32, 32), (250, 64, 32), (750, 128, 32)]


def test_lengths_and_batch_sizes_change_independently_and_the_last_stage_is_full():
    schedules = {"length_schedule": ["32:0.5"], "batch_size_schedule": ["8:0.1", "16:0.4", "24:0.2"]}
    run = PretrainConfig(max_seq_length=128, global_batch_size=32, **schedules)
    assert run.stages(100) == [(0, 32, 8), (10, 32, 16), (50, 128, 24), (70, 128, 32)]
    assert run.stages(2) == [(0, 32, 16), (1, 128, 32)], "a stage without a step is none"


def test_held_out_pairs_come_in_micro_batches_whose_scores_are_bounded(books, monkeypatch):
    """The same pairs and masks, and no more scores at once, whatever `micro_batch_size` is for training."""
    run = PretrainConfig(corpus=[str(books)], vocab_size=400, max_seq_length=48, micro_batch_size=1000)
    prepared = prepare.prepare(run)
    whole = list(batching.make_held_out(run, prepared))
    monkeypatch.setattr(batching, "LOGITS_AT_ONCE", 10 * 48 * 0.15 * len(prepared.tokenizer))
    parts = list(batching.make_held_out(run, prepared))
    assert max(batch["input_ids"].numel() for batch in parts) <= 10 * 48 < whole[0]["input_ids"].numel()
    assert sorted(sequences_of(parts)) == sorted(sequences_of(whole))
    counts = [len(list(batching.make_held_out(run, prepared, cost=cost))) for cost in (0, 10**6)]
    assert counts[0] > counts[1], "they are cut by what a micro-batch costs"


RAMPED = {
    "vocab_size": 400,
    "max_seq_length": 48,
    "length_schedule": ["24:0.6"],
    "global_batch_size": 7,
    "batch_size_schedule": ["2:0.2", "5:0.6"],
    "max_steps": 20,
}


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_pairs_of_a_ramped_run_are_those_of_the_plans_in_their_order_each_once(books, world_size):
    """Steps 0 to 11 have twice as many pairs of 24 tokens, 12 to 15 still 5 pairs of 48, the rest 7."""
    run = PretrainConfig(corpus=[str(books)], **RAMPED)
    prepared = prepare.prepare(run)
    sizes = [2 * 2] * 4 + [2 * 5] * 8 + [5] * 4 + [7] * 4
    ranks = [
        data.PretrainingSteps(batching.make_phases(run, prepared, 20), world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    found = [sequences_of([batch for steps in ranks for batch in steps[step]]) for step in range(20)]
    assert [len(step) for step in found] == sizes
    for length, steps in ((24, range(12)), (48, range(12, 20))):
        plain = replace(run, length_schedule=[], batch_size_schedule=[], max_seq_length=length)
        (phase,) = batching.make_phases(plain, prepared, 20)
        start = 0
        for step in steps:
            pairs = phase.plans.slice(start, start + sizes[step])
            assert found[step] == sequences_of([phase.make_batch(*pairs)]), step
            start += sizes[step]
        assert start < len(phase.plans.epoch(0)), "so that none may come twice"


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(1, 99), st.floats(0.01, 0.3)), max_size=3, unique_by=lambda entry: entry[0]),
    st.lists(st.tuples(st.integers(8, 99), st.floats(0.01, 0.3)), max_size=3, unique_by=lambda entry: entry[0]),
)
def test_stages_cover_a_run_of_any_length(max_steps, batch_sizes, lengths):
    schedules = [[f"{value}:{share:.3f}" for value, share in sorted(entries)] for entries in (batch_sizes, lengths)]
    run = PretrainConfig(
        max_seq_length=100,
        global_batch_size=100,
        batch_size_schedule=schedules[0],
        length_schedule=schedules[1],
        max_steps=1,
    )
    run.check()
    starts, found_lengths, found_sizes = zip(*run.stages(max_steps), strict=True)
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] <= max_steps
    assert list(found_lengths) == sorted(found_lengths) and list(found_sizes) == sorted(found_sizes)
    assert found_lengths[-1] == found_sizes[-1] == 100


def test_each_length_uses_its_plan_from_the_first_pair_on(text, tmp_path):
    steps = make_steps(text, tmp_path)
    for phase in steps.phases:
        first, second = phase.plans.slice(0, 16), phase.plans.slice(16, 32)
        assert sequences_of(steps[phase.first_step]) == sequences_of([phase.make_batch(*first)])
        assert sequences_of(steps[phase.first_step + 1]) == sequences_of([phase.make_batch(*second)])


def test_every_pair_of_every_epoch_has_masks_of_its_own(text, tmp_path):
    plans = make_steps(text, tmp_path).phases[1].plans
    pairs = len(plans.epoch(0)) + len(plans.epoch(1))
    _, keys = plans.slice(0, pairs)
    assert len(set(keys.tolist())) == pairs


@pytest.mark.parametrize("objective", ["nsp", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_special_token_is_to_be_predicted(text, tmp_path, packed, objective):
    steps = make_steps(text, tmp_path, packed=packed, objective=objective)
    special = set(text.tokenizer.all_special_ids) - {text.tokenizer.unk_token_id}
    for step in range(20):
        for batch in steps[step]:
            assert special.isdisjoint(batch["labels"].unique().tolist())


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


def test_pairs_come_in_random_order(text, tmp_path):
    documents = make_steps(text, tmp_path).phases[0].plans.epoch(0)["a_document"]
    assert (documents[1:] == documents[:-1]).mean() < 0.2  # document by document it would be above 0.9


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
@pytest.mark.parametrize("objective", ["nsp", "none"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_batch_has_the_loss_and_the_gradient_of_the_same_pairs_unpacked(
    text, tmp_path, attention, objective, pairing
):
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
        steps = make_steps(text, tmp_path, packed=packed, objective=objective, pairing=pairing)
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


def test_tokens_on_disk_are_the_tokenizers(text, books, tmp_path):
    path = arrow.prepare_text([file_source(books)], "en", Cleaning(), cache_folder())
    rows, ends = arrow.read_arrow(path), np.load(path / "document_ends.npy")
    several = arrow.TokenizedCorpus(arrow.prepare_tokens(path, text.tokenizer, tmp_path, processes=2))
    for document in (0, 5, len(text.tokens) - 1):
        blocks = rows[int(ends[document - 1]) if document else 0 : int(ends[document])]
        assert len(set(blocks["name"])) == 1
        sentences = [sentence for block in blocks["sentences"] for sentence in block]
        expected = [text.tokenizer(s, add_special_tokens=False)["input_ids"] for s in sentences]
        flat = [token for ids in expected for token in ids]
        for tokens in (text.tokens, several):
            assert tokens.tokens(document).tolist() == flat and tokens.sizes()[document] == len(flat)
            assert tokens.tokens(document, 5, 12).tolist() == flat[5:12]
            assert tokens.sentence_ends(document).tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
            assert tokens.paragraph_ends(document).tolist() == [3 * paragraph for paragraph in range(1, 11)]


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_words_are_tokenized_as_their_sentence_is(sentences, lowercase):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc[]é你.,0", *(f"##{piece}" for piece in "abcé0")]
    tokenizer = wordpiece.make_tokenizer(pieces, lowercase)
    sentences = [" ".join(text.split()) for text in (*sentences, "Abc, b\u0301 [MASK] caab.", "你a你 \u0301b\x07c")]
    encode = arrow.SentenceEncoder(tokenizer.backend_tokenizer.to_str())
    assert encode.by_word
    encode.by_word = False
    whole = encode(sentences)
    encode.by_word, encode.known = True, {}
    for _ in range(2):  # once the words are new, once they are known
        for found, expected in zip(encode(sentences), whole, strict=True):
            assert found.tolist() == expected.tolist()
    special = tokenizer.convert_tokens_to_ids("[MASK]")
    assert special not in whole[0]


def test_only_so_many_words_are_remembered(monkeypatch):
    monkeypatch.setattr(arrow, "MOST_KNOWN_WORDS", 3)
    tokenizer = wordpiece.make_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"], True)
    encode = arrow.SentenceEncoder(tokenizer.backend_tokenizer.to_str())
    assert [ids.tolist() for ids in encode(["a b", "", "c a"])] == [[5, 6, 7, 5], [2, 0, 2]]
    assert encode(["a d b e"])[0].tolist() == [5, 8, 6, 9] and set(encode.known) == {"a", "b", "c"}
    assert encode(["f d"])[0].tolist() == [10, 8] and set(encode.known) == {"a", "b", "c"}


def test_the_blocks_of_a_lone_book_count_as_documents(text, tmp_path):
    paragraphs = [f"Anna has {number} apples. Boris has none. Nobody sold the {number}." for number in range(1000)]
    source = Source("book", ["z"], iter([Document("book", paragraphs)]), Counter())
    path = arrow.prepare_text([source], "en", Cleaning(), tmp_path)
    tokens = arrow.TokenizedCorpus(arrow.prepare_tokens(path, text.tokenizer, tmp_path))
    assert len(tokens) == len(arrow.read_arrow(path)) == 46  # 22 paragraphs are the first that reach 64 sentences
    assert np.load(path / "document_characters.npy").sum() == sum(len(text.replace(". ", ".")) for text in paragraphs)
    assert np.load(path / "document_sources.npy").tolist() == [0] * 46


def test_documents_reach_over_blocks_and_batches_of_them(tmp_path, monkeypatch, text):
    monkeypatch.setattr(arrow, "TOKENIZED_AT_ONCE", 2)
    sentences = [f"Anna walked to the garden with {number} apples." for number in range(1000)]
    # 25 documents: a zero-width space, which leaves no token, then paragraphs of 3 sentences, some with another.
    documents = [sentences[40 * number : 40 * number + 40 * (1 + 3 * (number % 2))] for number in range(25)]
    paragraphs = [
        ["\u200b"]
        + [
            " ".join(document[start : start + 3]) + ("\u200b." if start % 2 else "")
            for start in range(0, len(document), 3)
        ]
        for document in documents
    ]
    documents = (Document(f"d{n}", iter(found)) for n, found in enumerate(paragraphs))
    source = Source("x", ["x"], documents, Counter())
    path = arrow.prepare_text([source], "en", Cleaning(), tmp_path)
    assert len(arrow.read_arrow(path)) > 40
    tokens = arrow.TokenizedCorpus(arrow.prepare_tokens(path, text.tokenizer, tmp_path))
    assert len(tokens) == 25 and tokens.sizes().sum() == len(np.concatenate([tokens.tokens(d) for d in range(25)]))
    for number, found in enumerate(paragraphs):
        expected = [text.tokenizer(paragraph, add_special_tokens=False)["input_ids"] for paragraph in found[1:]]
        assert tokens.tokens(number).tolist() == [token for ids in expected for token in ids]
        ends = np.append(0, tokens.sentence_ends(number))[tokens.paragraph_ends(number)]
        assert ends.tolist() == np.cumsum([len(ids) for ids in expected]).tolist()


@pytest.mark.parametrize("bare", [[0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_parts_of_a_text_that_leave_no_token(tmp_path, monkeypatch, text, bare):
    monkeypatch.setattr(arrow, "TOKENIZED_AT_ONCE", 1)
    found = [["\ue000\ue001"] if number in bare else [f"Anna has {number} apples."] for number in range(3)]
    documents = (Document(f"d{number}", paragraphs) for number, paragraphs in enumerate(found))
    source = Source("x", ["y"], documents, Counter())
    path = arrow.prepare_text([source], "en", Cleaning(), tmp_path)
    tokens = arrow.TokenizedCorpus(arrow.prepare_tokens(path, text.tokenizer, tmp_path))
    ids = [text.tokenizer(paragraph, add_special_tokens=False)["input_ids"] for (paragraph,) in found]
    assert [tokens.tokens(number).tolist() for number in range(3)] == ids and [] in ids
    everything = [token for document in ids for token in document]
    assert tokens.at(np.arange(len(everything))).tolist() == everything


def test_a_text_without_a_token_is_refused(tmp_path, text):
    documents = iter([Document("d", ["\ue000\ue001"])] * 4)
    path = arrow.prepare_text([Source("x", ["y"], documents, Counter())], "en", Cleaning(), tmp_path)
    tokens = arrow.prepare_tokens(path, text.tokenizer, tmp_path)
    with pytest.raises(ValueError, match="no token in the text"):
        arrow.TokenizedCorpus(tokens)


def test_special_tokens_in_the_text_are_text_and_sentences_without_tokens_are_none(text, tmp_path):
    paragraphs = ["The [MASK] was [SEP] red.", "\u200b", "Yes."]
    source = Source("x", ["y"], iter([Document("d", paragraphs)] * 25), Counter())
    path = arrow.prepare_text([source], "en", Cleaning(), tmp_path)
    tokens = arrow.TokenizedCorpus(arrow.prepare_tokens(path, text.tokenizer, tmp_path))
    for document in (0, 24):
        assert not set(tokens.tokens(document).tolist()) & {0, 2, 3, 4}
        # The sentence of a zero-width space leaves no token and is no sentence.
        assert len(tokens.sentence_ends(document)) == 2 and tokens.paragraph_ends(document).tolist() == [1, 2]


def test_a_sample_of_sentences_is_even_bounded_and_can_be_gone_through_again(books, text):
    path = arrow.prepare_text([file_source(books)], "en", Cleaning(), cache_folder())
    everything = arrow.SentenceSample(path, np.arange(24))
    assert list(everything) == list(everything) and len(list(everything)) == 24 * 30
    half = arrow.SentenceSample(path, np.arange(24), sum(map(len, everything)) // 2)
    assert sum(map(len, half)) == pytest.approx(sum(map(len, everything)) / 2, rel=0.1)
    assert len(half.blocks) in (11, 12, 13) and half.blocks[0] < 3 and half.blocks[-1] > 19
    some = list(arrow.SentenceSample(path, np.array([3, 7])))
    assert len(some) == 60 and set(some) <= set(everything)


@pytest.mark.parametrize("often", [0.4, 1, 2.5])
def test_an_epoch_visits_the_documents_of_a_source_as_often_as_it_says(often):
    documents = np.array([3, 5, 8, 9, 11, 20, 21, 22, 30, 31])
    sources = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    visits = [data.epoch_documents(documents, sources, np.array([1, often]), 7, epoch) for epoch in range(5)]
    for visited in visits:
        assert sorted(visited[np.isin(visited, (3, 5))]) == [3, 5]
        assert len(visited) == 2 + 8 * often or abs(len(visited) - 2 - 8 * often) < 1
    counts = np.array([sum((visited == document).sum() for visited in visits) for document in documents[2:]])
    assert counts.sum() == round(5 * often * 8) and counts.max() - counts.min() <= 1
    assert visits[0].tolist() != visits[1].tolist()


def test_weights_are_shares_of_the_tokens_of_an_epoch():
    passes = data.source_passes(np.array([1000, 3000, 500]), [1, 1, 0])
    assert (passes * [1000, 3000, 500]).tolist() == [2250, 2250, 0]
    with pytest.raises(ValueError, match="source 2 is empty"):
        data.source_passes(np.array([1000, 0]), [1, 1])


# ---------------------------------------------------------------------------------------------------------------------
# Rows and micro-batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_rows_are_packed_full_and_hold_each_sequence_once(lengths):
    rows = packing.pack(lengths, 50)
    assert sorted(sequence for row in rows for sequence in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[sequence] for sequence in row) for row in rows)
    assert filled[-1] <= 50
    assert len(filled) == 1 or filled[0] + filled[1] > 50, "two rows would fit into one"


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 2000), st.sampled_from([1, 2, 3, 8, 1024])
)
def test_micro_batches_of_all_processes_hold_each_row_once_and_are_equally_many(lengths, most_tokens, world_size):
    ranks = range(min(world_size, len(lengths) + 2))
    found = [packing.micro_batches(lengths, most_tokens, world_size, rank) for rank in ranks]
    assert sorted(row for part in found for micro_batch in part for row in micro_batch) == list(range(len(lengths)))
    assert len({len(part) for part in found}) == 1
    for micro_batch in (micro_batch for part in found for micro_batch in part if len(micro_batch) > 1):
        assert len(micro_batch) * packing.padded(max(lengths[row] for row in micro_batch)) <= most_tokens


@pytest.mark.parametrize(("rows", "bunch"), [(15, 1), (32, 2), (512, 32), (700, 32)])
def test_micro_batches_come_in_few_sizes(rows, bunch):
    """A CPU prepares its products for each: bunches of a 16th of the rows at most, a power of two."""
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        found = packing.micro_batches(rng.integers(5, 64, rows), 64 * rows, cost=100)
        assert [len(micro_batch) % bunch for micro_batch in found[:-1]] == [0] * (len(found) - 1)
        sizes += map(len, found[:-1])
    assert math.gcd(*sizes) == bunch


def test_micro_batches_of_a_large_step_are_full():
    found = packing.micro_batches([128] + [72] * 4095, 64 * 128)
    assert min(map(len, found[1:])) * 72 > 64 * 128 * 7 / 8


@pytest.mark.parametrize("micro_batch_cost", [10, packing.MICRO_BATCH_COST, 1000])
@pytest.mark.parametrize("most_tokens", [600, 10**6])
def test_cuts_are_where_padding_and_overhead_together_are_least(most_tokens, micro_batch_cost):
    """Against every way to cut 12 rows between lengths."""
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
        found = packing.micro_batches(lengths, most_tokens, cost=micro_batch_cost)
        found = [[packing.padded(lengths[row]) for row in micro_batch] for micro_batch in found]
        # The parts of a group are as many micro-batches of one width.
        assert sum(group[0] * len(group) + micro_batch_cost for group in found) <= least


def test_held_out_documents_are_no_training_documents_and_the_same_for_every_seed():
    sizes = np.random.default_rng(0).integers(50, 500, 300)
    train, held_out = split_documents(sizes, 0.1, 10**9)
    assert sorted([*train, *held_out]) == list(range(300))
    assert 0.1 * sizes.sum() <= sizes[held_out].sum() < 0.1 * sizes.sum() + 500
    assert sizes[split_documents(sizes, 0.1, 2000)[1]].sum() < 2500
    train, held_out = split_documents(np.array([5, 5, 5, 5]), 0.9, 10**9)
    assert len(train) == len(held_out) == 2
    with pytest.raises(ValueError, match="too little text"):
        split_documents(np.array([5, 5, 5]), 0.1, 10**9)


def test_a_document_that_is_more_than_the_held_out_part_is_not_held_out():
    sizes = np.array([100] * 40 + [90_000])
    for fraction, most in ((0.05, 10**9), (0.9, 300)):
        train, held_out = split_documents(sizes, fraction, most)
        assert 40 in train and len(held_out) >= 2
    train, held_out = split_documents(np.array([900, 1000, 800, 700]), 0.05, 10**9)
    assert held_out.tolist() == [2, 3]  # there are no others: the smallest


def test_a_small_plan_is_laid_out_once_for_all_steps_of_its_epoch(text, tmp_path, monkeypatch):
    laid_out = []
    lay_out = data.EpochPlans._lay_out
    monkeypatch.setattr(
        data.EpochPlans, "_lay_out", lambda self, n, path: (laid_out.append(n), lay_out(self, n, path))[1]
    )
    steps = make_steps(text, tmp_path)
    for step in range(40):
        steps[step]
    assert laid_out == sorted(set(laid_out)) and len(laid_out) > 2


def test_a_micro_batch_that_counts_for_nothing_has_no_loss_and_no_gradient(text, tmp_path):
    empty = make_steps(text, tmp_path).phases[0].make_batch.empty()
    config = D2lBertConfig(vocab_size=400, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    model = D2lBertForPreTraining(config)
    loss = model(**empty, num_items_in_batch=torch.tensor(7.0), num_pairs_in_batch=torch.tensor(3.0)).loss
    loss.backward()
    assert loss == 0 and all(not parameter.grad.any() for parameter in model.parameters())


def test_preparing_twice_writes_once(books, text):
    before = {path: path.stat().st_mtime_ns for path in cache_folder().rglob("data.arrow")}
    again = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1))
    assert again.tokens.path == text.tokens.path
    assert {path: path.stat().st_mtime_ns for path in cache_folder().rglob("data.arrow")} == before


@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_epoch_of_more_pairs_than_any_buffer_holds_is_laid_out_whole(tmp_path, monkeypatch, capsys, on_terminal):
    """Pairs for more than three buffers, with a bar and without; each sentence is in one of them."""
    monkeypatch.setattr(data, "PAIRS_AT_ONCE", 5_000)
    lengths = np.random.default_rng(0).integers(1, 20, (1_250, 31))
    ends = np.cumsum(lengths, axis=1)
    tokens = SimpleNamespace(path=tmp_path, sentence_ends=ends.__getitem__)
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal, raising=False)
    options = {"max_seq_length": 20, "objective": "nsp", "short_seq_prob": 0.1}
    plans = data.EpochPlans(tokens, np.arange(1_250), {"pairing": "segments", **options}, 1, tmp_path)
    rows = plans.epoch(0)
    expected = sum(1 for _ in pairs.segment_pairs(np.arange(1_250), ends.__getitem__, rng=plans.rng(0), **options))
    assert len(rows) == expected > 3 * data.PAIRS_AT_ONCE
    is_covered = np.zeros((1_250, ends.max() + 1), dtype=np.int64)
    for side in ("a", "b"):
        np.add.at(is_covered, (rows[f"{side}_document"], rows[f"{side}_start"]), 1)
        np.add.at(is_covered, (rows[f"{side}_document"], rows[f"{side}_end"]), -1)
    before = np.cumsum(np.cumsum(is_covered, axis=1) > 0, axis=1)  # tokens in some pair, up to and with this one
    before = np.pad(before, ((0, 0), (1, 0)))
    found = np.take_along_axis(before, ends, 1) - np.take_along_axis(before, ends - lengths, 1)
    assert (found > 0).all()


def test_writing_that_fails_leaves_nothing(tmp_path):
    def write(folder):
        (folder / "half").write_text("a")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        written_whole(tmp_path / "x", "writing", write)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "(No space left on device); free some space, or set HF_HOME to another folder"),
        (errno.EROFS, "(Read-only file system); make it writable, or set HF_HOME to another folder"),
        (errno.EACCES, "(Permission denied); make it writable, or set HF_HOME to another folder"),
    ],
)
def test_a_cache_that_cannot_be_written_is_said_with_the_mend_that_fits(text, tmp_path, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError) as refusal:
        written_whole(tmp_path / "x", "writing", fail)
    assert str(refusal.value) == f"cache {tmp_path}: cannot be written {words}"
    plans = make_steps(text, tmp_path).phases[0].plans
    monkeypatch.setattr(data.EpochPlans, "_lay_out", fail)
    with pytest.raises(UserError) as refusal:
        plans.epoch(0)
    assert str(refusal.value) == f"cache {plans.folder}: cannot be written {words}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_says_which_process_it_waits_for_to_lay_out_an_epoch(
    text, tmp_path, monkeypatch, capsys, shown, rank
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    plans = make_steps(text, tmp_path).phases[0].plans
    plans.folder.mkdir(parents=True)
    with FileLock(plans.folder / ".lock"):
        waiting = threading.Thread(target=plans.epoch, args=(3,))
        waiting.start()
        waiting.join(SILENT_SECONDS + 1)
        assert waiting.is_alive()
    waiting.join(60)
    assert 3 in plans._open
    line = f"waiting for another process that is laying out epoch 4 (cache {plans.folder})"
    assert capsys.readouterr().err.splitlines().count(line) == (rank == "0")


def test_what_a_killed_process_left_half_written_goes_when_it_is_written_again(tmp_path):
    (tmp_path / ".x.part").mkdir()
    (tmp_path / ".x.part" / "half").touch()
    written_whole(tmp_path / "x", "writing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["whole"]
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".x.lock"}


def test_the_share_to_predict_follows_the_step_and_the_words_stay_whole(books, tmp_path):
    text = prepare.prepare(PretrainConfig(corpus=[str(books)], vocab_size=100, max_steps=1))  # words of many pieces
    make_batch = data.BatchMaker(text.tokens, text.tokenizer, 0.1, 48, "whole_word")
    plans = data.EpochPlans(
        text.tokens, text.train_documents, {"pairing": "segments", "max_seq_length": 48}, 1, tmp_path
    )
    share_at = functools.partial(masking.share_at, first=0.6, last=0.1, max_steps=11)
    steps = data.PretrainingSteps([data.Phase(0, 0, plans, make_batch, 32, 32 * 48)], share_at)
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
