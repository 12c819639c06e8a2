"""Packed rows, and micro-batches without padding, have the losses and gradients of their sequences alone."""

from dataclasses import replace

import pytest
import torch
from fast_models import assert_same, loss_and_gradients
from small_models import every_setting, make_config, make_model, make_sequences, packed, padded
from torch._dynamo.testing import CompileCounterWithBackend

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, PretrainConfig
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.modeling.fast_paths import VARLEN, without_padding
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.data.steps import TrainingSteps


pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PACKED_ROWS = [[1, 4, 6], [0, 3], [7, 2, 5]]  # so there is padding and an unused slot for [CLS]
BATCHES = {
    "padded": padded(make_sequences()),
    "packed": packed(make_sequences(), PACKED_ROWS),
    "one": packed(make_sequences(), [[0]]),
}


def of_a_run(name, has_labels):
    """A batch as `BatchMaker` makes it: where no pair is labelled, [CLS] is not read."""
    batch = dict(BATCHES[name])
    if "sequence_ids" in batch:
        batch["attention_mask"] = (batch["sequence_ids"] != 0).long()
    dropped = () if has_labels else ("next_sentence_label", "cls_positions")
    return {name: tensor for name, tensor in batch.items() if name not in dropped}


@every_setting
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_losses_and_gradients_are_those_of_padded_or_packed_rows(model_class, name, setting):
    model, has_labels = make_model(model_class, make_config(setting)).train(), model_class is D2lBertForPreTraining
    batch = of_a_run(name, has_labels)
    expected = loss_and_gradients(model, **of_a_run("padded", has_labels) if name == "packed" else batch)
    assert_same(loss_and_gradients(model, **batch), expected, **CLOSE)
    model.set_attn_implementation(VARLEN)
    row = without_padding(batch, max_length=32)
    assert row["input_ids"].shape == (1, int(batch["attention_mask"].sum()))
    assert_same(loss_and_gradients(model, **row), expected, **CLOSE)
    if name != "one":
        row["cu_seq_lens_k"][1] += 1  # the first sequence now has the second one's [CLS]
        assert abs(loss_and_gradients(model, **row)[0].loss - expected[0].loss) > 1e-3


def test_a_batch_without_padding_needs_no_mask():
    sequences = [make_sequences()[number] for number in (0, 0, 0)]
    batch = padded(sequences)
    expected = without_padding(batch, 32)
    del batch["attention_mask"]
    found = without_padding(batch, 32)
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_a_batch_without_a_token_to_predict_has_the_loss_of_its_pairs(model_class):
    model = make_model(model_class, make_config()).train()
    batch = of_a_run("packed", model_class is D2lBertForPreTraining)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    expected = loss_and_gradients(model, **batch, num_items_in_batch=1)
    model.set_attn_implementation(VARLEN)
    assert_same(loss_and_gradients(model, **without_padding(batch, 32), num_items_in_batch=1), expected, **CLOSE)


def test_requested_hidden_states_are_of_all_tokens():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = of_a_run("packed", True)
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
        model.set_attn_implementation(VARLEN)
        found = model(**without_padding(batch, 32), output_hidden_states=True)
    real = batch["attention_mask"].bool()
    for states, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(states[0], other[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)


def test_dropout_of_attention_is_refused():
    model = make_model(D2lBertForPreTraining, make_config(attention_probs_dropout_prob=0.1)).train()
    model.set_attn_implementation(VARLEN)
    with pytest.raises(ValueError, match="dropout"):
        model(**without_padding(of_a_run("padded", True), 32))
    model.eval()(**without_padding(of_a_run("padded", True), 32))


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_as_on_a_gpu(monkeypatch):
    """With one product for query, key and value; at most a program each for the blocks and the last one."""
    model = make_model(D2lBertForPreTraining, make_config(num_hidden_layers=3)).train()
    batches = [without_padding(of_a_run(name, True), 32) for name in ("padded", "packed", "padded", "packed")]
    model.set_attn_implementation(VARLEN)
    monkeypatch.setattr(modeling, "is_on_cpu", lambda tensor: False)
    expected = [loss_and_gradients(model, **batch) for batch in batches]
    programs = CompileCounterWithBackend("aot_eager")
    for block in model.bert.encoder.layer:
        block.compute = torch.compile(
            type(block).compute.__get__(block), dynamic=True, fullgraph=True, backend=programs
        )
    for batch, known in zip(batches, expected, strict=True):
        assert_same(loss_and_gradients(model, **batch), known, **CLOSE)
    assert programs.frame_count <= 3
    torch.compiler.reset()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
def test_the_steps_of_a_gpu_have_the_losses_of_a_cpus(books, packing, attention):
    """There micro-batches come without a mask that masks nothing, or without padding."""
    run = PretrainConfig(corpus=[str(books)], vocab_size=200, max_seq_length=48, max_steps=2, objective="nsp")
    run = replace(run, packing=packing, micro_batch_size=4, global_batch_size=24)
    text = prepare(run)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = D2lBertConfig(vocab_size=len(text.tokenizer), initializer_range=0.5, **sizes)
    losses = {}
    for kernel, on_gpu in (("sdpa", False), (attention, True)):
        torch.manual_seed(0)
        model = D2lBertForPreTraining._from_config(config, attn_implementation=kernel).eval()
        steps = TrainingSteps(replace(run, attn_implementation=kernel), text, 2, on_gpu=on_gpu)
        losses[on_gpu] = []
        for step in steps.walk():
            masks = [batch.get("attention_mask") for batch in step.micro_batches]
            assert all(mask is None or (on_gpu <= (not mask.all())) for mask in masks)
            assert not on_gpu or (not packing and kernel == "sdpa") or masks == [None] * len(masks)
            divisors = {"num_items_in_batch": step.counts[0], "num_pairs_in_batch": step.counts[1]}
            outputs = [model(**batch, **divisors, skip_logits=True) for batch in step.micro_batches]
            losses[on_gpu].append(
                [sum(float(output[name]) for output in outputs) for name in ("mlm_loss", "nsp_loss")]
            )
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-5, atol=1e-6)
