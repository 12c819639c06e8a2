"""What a GPU computes in another way, here on a CPU: rows without padding, blocks, masks. (The loss: fast_paths.)"""

import functools
from dataclasses import replace

import pytest
import torch
from small_models import (
    assert_same,
    compute_as_on,
    every_setting,
    in_training,
    loss_and_gradients,
    make_batch,
    make_config,
    make_model,
    make_sequences,
    packed,
    padded,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, PretrainConfig
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import devices
from d2l_bert.training.compiling import compiled_blocks
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.data.unpadded import VARLEN, without_padding
from d2l_bert.training.learner import Learner


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
    model = make_model(model_class, make_config(setting)).train()
    has_labels = model_class is D2lBertForPreTraining
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
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


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


def test_queries_lie_in_memory_as_flash_attention_3_gives_its_output(monkeypatch):
    """As (tokens, heads, numbers of a head), also in the last block, which has fewer. Compiled programs check that."""
    layouts = []
    attend = F.scaled_dot_product_attention

    def watched(query, key, *given, **named):
        tokens_first = query.squeeze(0).transpose(0, 1)
        layouts.append((query.shape[2] == key.shape[2], tokens_first.is_contiguous()))
        return attend(query, key, *given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = make_model(D2lBertForPreTraining, make_config())
    model.set_attn_implementation(VARLEN)
    model(**without_padding(of_a_run("packed", True), 32))
    assert layouts == [(True, True), (False, True)]


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
    compute_as_on("gpu", monkeypatch)
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


def kind_of(batch):
    """What a program of a micro-batch depends on: its arguments, and which of their sizes are 1."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return tuple((name, tuple(size == 1 for size in tensor.shape)) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "attention", "objective"), [(False, "sdpa", "nsp"), (True, "sdpa", "none"), (True, VARLEN, "nsp")]
)
def test_programs_are_compiled_for_new_kinds_of_micro_batches_alone_and_none_is_cut(
    books, packing, attention, objective, monkeypatch
):
    """In 50 steps, of rows of 24 tokens and then of 48. The block and the last block have a program for each kind."""
    run = PretrainConfig(corpus=[str(books)], vocab_size=200, max_seq_length=48, max_steps=50, objective=objective)
    sizes = {"micro_batch_size": 4, "global_batch_size": 12, "length_schedule": ["24:0.5"]}
    run = replace(run, packing=packing, attn_implementation=attention, mixed_precision="no", **sizes)
    text = prepare(run)
    model_class = D2lBertForMaskedLM if objective == "none" else D2lBertForPreTraining
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "attention_probs_dropout_prob": 0.0}
    config = D2lBertConfig(vocab_size=len(text.tokenizer), **sizes)
    model = model_class._from_config(config, attn_implementation=attention).train()
    compute_as_on("gpu", monkeypatch)
    programs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=programs))
    gradient = functools.cache(lambda: torch.compile(modeling.gradient_in_float32, dynamic=True))
    monkeypatch.setattr(modeling, "compiled_gradient_in_float32", gradient)
    torch.compiler.reset()
    counters.clear()
    kinds = set()
    with compiled_blocks(model, is_compiled=True):
        learner = Learner(devices.make_accelerator("no"), model, run)
        for number, step in enumerate(TrainingSteps(run, text, 50, on_gpu=True).walk(), 1):
            before = programs.frame_count
            kinds_before = len(kinds)
            kinds |= set(map(kind_of, step.micro_batches))
            learner.train_on(step, number, 1e-3)
            assert programs.frame_count == before or len(kinds) > kinds_before, (number, before, programs.frame_count)
    torch.compiler.reset()
    assert not counters["graph_break"]
    assert 3 <= programs.frame_count <= 2 + 2 * len(kinds), "two of the loss, and two of each kind"


@pytest.mark.slow
def test_ddp_cuts_no_program(monkeypatch):
    """Its optimizer would, where the gradients of a block do not fit into the first of its buckets of 1 MiB."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    programs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=programs))
    sizes = {"num_hidden_layers": 3, "hidden_size": 240, "intermediate_size": 1024}
    counts = []
    for wrapped in (lambda model: model, nn.parallel.DistributedDataParallel):
        torch.compiler.reset()
        programs.clear()
        model = make_model(D2lBertForPreTraining, make_config(**sizes)).train()
        with compiled_blocks(model, is_compiled=True):
            wrapped(model)(**make_batch(model)).loss.backward()
        counts.append(programs.frame_count)
    torch.distributed.destroy_process_group()
    torch.compiler.reset()
    assert counts[0] == counts[1] >= 2, counts


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
            masks = [mask for mask in masks if mask is not None]
            if on_gpu:
                assert not any(mask.all() for mask in masks)
                may_have_masks = not packing and kernel == "sdpa"
                assert may_have_masks or not masks
            divisors = {
                "num_items_in_batch": step.counts.masked_tokens,
                "num_pairs_in_batch": step.counts.examples,
            }
            outputs = [model(**batch, **divisors, skip_logits=True) for batch in step.micro_batches]
            mlm_loss = sum(float(output["mlm_loss"]) for output in outputs)
            nsp_loss = sum(float(output["nsp_loss"]) for output in outputs)
            losses[on_gpu].append([mlm_loss, nsp_loss])
    of_gpu = torch.tensor(losses[True])
    torch.testing.assert_close(of_gpu, torch.tensor(losses[False]), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# What blocks and masks compute in another way on a GPU, here on a CPU


@pytest.mark.slow
def test_with_the_gradient_of_a_slice_compiled_the_loss_is_the_same(monkeypatch):
    model = in_training(vocab_size=100)
    batch = make_batch(model, everywhere=True)
    compute_as_on("gpu", monkeypatch)
    expected = loss_and_gradients(model, **batch)
    compiled = torch.compile(modeling.gradient_in_float32, dynamic=True, fullgraph=True)
    monkeypatch.setattr(modeling, "compiled_gradient_in_float32", lambda: compiled)
    model.mlm.compiles_gradient = True
    monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", 7 * 128)
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------------------------
# The blocks


def products_of(model, batch):
    """The shape (outputs, inputs) of the weight of each product that the layers of the encoder compute."""
    shapes = []
    linear = F.linear

    def watched(states, weight, bias=None):
        shapes.append(tuple(weight.shape))
        return linear(states, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", watched)
        model(**batch)
    return shapes


def test_query_key_and_value_are_one_product_and_in_the_last_block_key_and_value(monkeypatch):
    model = in_training(D2lBertForMaskedLM, num_hidden_layers=2)
    batch = make_batch(model)
    hidden = model.config.hidden_size
    together = {(2 * hidden, hidden), (3 * hidden, hidden)}
    assert not together & set(products_of(model, batch))
    compute_as_on("gpu", monkeypatch)
    shapes = products_of(model, batch)
    assert shapes[0] == (3 * hidden, hidden)
    assert shapes.count((3 * hidden, hidden)) == 1
    assert shapes.count((2 * hidden, hidden)) == 1


class Adapter(nn.Linear):
    """A layer with something added to its output, as an adapter does."""

    def forward(self, states):
        return super().forward(states) + 1


@pytest.mark.parametrize("change", ["class", "hook", "forward", "weight"])
def test_layers_that_do_more_than_a_product_are_called(change, monkeypatch):
    layers = [nn.Linear(3, 4) for _ in range(3)]
    states = torch.randn(2, 5, 3)
    if change == "class":
        layers[1].__class__ = Adapter
    elif change == "hook":
        layers[1].register_forward_hook(lambda layer, given, output: output + 1)
    elif change == "forward":
        layers[1].forward = lambda states: F.linear(states, 2 * layers[1].weight)
    else:
        quantized = type("Quantized", (torch.Tensor,), {})
        layers[1].weight = nn.Parameter(torch.zeros(4, 3).as_subclass(quantized))
    expected = [layer(states) for layer in layers]
    compute_as_on("gpu", monkeypatch)
    for output, other in zip(modeling.linear_together(layers, states), expected, strict=True):
        torch.testing.assert_close(output, other)
    assert not modeling.is_plain(layers[1]) and modeling.is_plain(layers[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_have_the_dtype_of_the_products(dtype, monkeypatch):
    """Half the memory of float32. On a CPU they stay float32, which is more exact."""
    model = in_training(num_hidden_layers=2)
    batch = make_batch(model)

    def dtypes():
        with torch.autocast("cpu", dtype):
            outputs = model(**batch, output_hidden_states=True)
        outputs.loss.backward()
        return [states.dtype for states in outputs.hidden_states]

    assert dtypes() == [torch.float32] * 3
    compute_as_on("gpu", monkeypatch)
    assert dtypes() == [torch.float32, dtype, dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Masks


@pytest.fixture
def masks(monkeypatch):
    """A list that grows by the mask that each attention gets."""
    seen = []

    def watched(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return sdpa(module, query, key, value, attention_mask, **kwargs)

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    return seen


def test_without_padding_and_without_a_mask_none_is_made(masks):
    model = in_training(num_hidden_layers=2)
    batch = make_batch(model)
    batch["attention_mask"][:] = 1
    model.set_attn_implementation("sdpa")
    expected = loss_and_gradients(model, **batch)
    masks.clear()
    del batch["attention_mask"]
    assert_same(loss_and_gradients(model, **batch), expected, rtol=0, atol=0)
    assert masks == [None, None]


def test_in_packed_rows_every_query_has_a_key(masks):
    """Rounding included, losses and gradients are those of rows whose padding has none."""
    model = make_model(D2lBertForPreTraining, make_config("bert", "sdpa"))
    batch = packed(make_sequences(), PACKED_ROWS)
    found = loss_and_gradients(model, **batch)
    with_mask = loss_and_gradients(model, **batch, attention_mask=(batch["sequence_ids"] != 0).long())
    assert_same(with_mask, found, rtol=0, atol=0)
    assert len(masks) == 4
    assert all(mask.any(-1).all() for mask in masks)
    numbers = batch.pop("sequence_ids")
    is_same_sequence = numbers[:, :, None] == numbers[:, None]
    real = is_same_sequence & (numbers != 0)[:, None]
    assert not real.any(-1).all()
    assert_same(loss_and_gradients(model, **batch, attention_mask=real[:, None]), found, rtol=0, atol=0)
