"""What the model computes in another way on a GPU, here on a CPU: the same losses, gradients and outputs."""

import copy

import pytest
import torch
from fast_models import assert_same, loss_and_gradients, make_batch, make_model
from small_models import every_attention, make_config, make_sequences, packed
from small_models import make_model as make_small_model
from test_loss_without_logits import losses_and_gradients_of_scores, plain_loss, scores_of_labels_at
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.modeling import modeling_d2l_bert as modeling


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A function; from its call on the model takes the ways of a GPU."""
    return lambda: monkeypatch.setattr(modeling, "is_on_cpu", lambda tensor: False)


@every_attention
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_losses_and_gradients_are_those_of_a_cpu(model_class, tied, everywhere, attention, as_on_a_gpu, monkeypatch):
    model = make_model(model_class, tie_word_embeddings=tied).double()
    model.set_attn_implementation(attention)
    batch = make_batch(model, everywhere)
    expected = loss_and_gradients(model, **batch)
    assert_same(loss_and_gradients(model, **batch, skip_logits=False), expected, rtol=1e-5, atol=1e-7)
    as_on_a_gpu()
    for rows_at_once in (3, 10**6):
        monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", rows_at_once * 64)  # the vocabulary of 40, padded
        assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-5, atol=1e-7)


def test_a_batch_without_labels_has_no_gradient(as_on_a_gpu):
    model = make_model(D2lBertForMaskedLM)
    batch = make_batch(model, everywhere=True)
    batch["labels"][:] = -100
    as_on_a_gpu()
    outputs, gradients = loss_and_gradients(model, **batch, num_items_in_batch=7)
    assert outputs.loss == 0 and not any(gradient.any() for gradient in gradients.values())


def test_in_bf16_the_step_is_as_exact_as_on_a_cpu(as_on_a_gpu):
    model = make_model(vocab_size=3000)
    batch = make_batch(model, everywhere=True)
    truth = loss_and_gradients(copy.deepcopy(model).double(), **batch, skip_logits=False)

    def error():
        with torch.autocast("cpu", torch.bfloat16):
            outputs, gradients = loss_and_gradients(model, **batch)
        off = [(gradients[name] - truth[1][name]).norm() / truth[1][name].norm() for name in gradients]
        return float((outputs.loss - truth[0].loss).detach().abs()), float(torch.stack(off).median())

    usual_loss, usual_gradient = error()
    as_on_a_gpu()
    loss, gradient = error()
    assert loss < max(2 * usual_loss, 5e-3)
    assert gradient < 2 * usual_gradient  # the residual, too, is rounded to bf16


@pytest.mark.parametrize("peak", [False, True])
@pytest.mark.parametrize("probability", [0.02, 0.5, 0.95, 0.998, 0.9997])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_is_as_exact_as_cross_entropy_in_float32(dtype, probability, peak, as_on_a_gpu):
    scores, labels = scores_of_labels_at(probability, peak, dtype)
    truth = losses_and_gradients_of_scores(plain_loss, scores.double(), labels)
    usual = losses_and_gradients_of_scores(plain_loss, scores, labels)
    as_on_a_gpu()
    found = losses_and_gradients_of_scores(modeling.linear_cross_entropy, scores, labels)
    error, usual_error = ((gradient - truth[1]).norm() / truth[1].norm() for gradient in (found[1], usual[1]))
    assert error < max(1.5 * usual_error, 1e-6)
    assert found[0] == pytest.approx(truth[0], rel=5e-3)


@pytest.mark.slow
def test_with_the_gradient_of_a_slice_compiled_the_loss_is_the_same(as_on_a_gpu, monkeypatch):
    model = make_model(vocab_size=100)
    batch = make_batch(model, everywhere=True)
    as_on_a_gpu()
    expected = loss_and_gradients(model, **batch)
    compiled = torch.compile(modeling.gradient_in_float32, dynamic=True, fullgraph=True)
    monkeypatch.setattr(modeling, "gradient_in_float32", compiled)
    monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", 7 * 128)
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------------------------
# The blocks


def products_of(model, batch):
    """The shape (outputs, inputs) of the weight of each product that the layers of the encoder compute."""
    shapes, linear = [], F.linear

    def watched(states, weight, bias=None):
        shapes.append(tuple(weight.shape))
        return linear(states, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", watched)
        model(**batch)
    return shapes


def test_query_key_and_value_are_one_product_and_in_the_last_block_key_and_value(as_on_a_gpu):
    model = make_model(D2lBertForMaskedLM, num_hidden_layers=2)
    batch, hidden = make_batch(model), model.config.hidden_size
    assert not {(2 * hidden, hidden), (3 * hidden, hidden)} & set(products_of(model, batch))
    as_on_a_gpu()
    shapes = products_of(model, batch)
    assert shapes[0] == (3 * hidden, hidden) and shapes.count((3 * hidden, hidden)) == 1
    assert shapes.count((2 * hidden, hidden)) == 1


class Adapter(nn.Linear):
    """A layer with something added to its output, as an adapter does."""

    def forward(self, states):
        return super().forward(states) + 1


@pytest.mark.parametrize("change", ["class", "hook", "forward", "weight"])
def test_layers_that_do_more_than_a_product_are_called(change, as_on_a_gpu):
    layers = [nn.Linear(3, 4) for _ in range(3)]
    states = torch.randn(2, 5, 3)
    if change == "class":
        layers[1].__class__ = Adapter
    elif change == "hook":
        layers[1].register_forward_hook(lambda layer, given, output: output + 1)
    elif change == "forward":
        layers[1].forward = lambda states: F.linear(states, 2 * layers[1].weight)
    else:
        layers[1].weight = nn.Parameter(torch.zeros(4, 3).as_subclass(type("Quantized", (torch.Tensor,), {})))
    expected = [layer(states) for layer in layers]
    as_on_a_gpu()
    for output, other in zip(modeling.linear_together(layers, states), expected, strict=True):
        torch.testing.assert_close(output, other)
    assert not modeling.is_plain(layers[1]) and modeling.is_plain(layers[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_have_the_dtype_of_the_products(dtype, as_on_a_gpu):
    """Half the memory of float32. On a CPU they stay float32, which is more exact."""
    model = make_model(num_hidden_layers=2)
    batch = make_batch(model)

    def dtypes():
        with torch.autocast("cpu", dtype):
            outputs = model(**batch, output_hidden_states=True)
        outputs.loss.backward()
        return [states.dtype for states in outputs.hidden_states]

    assert dtypes() == [torch.float32] * 3
    as_on_a_gpu()
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
    model = make_model(num_hidden_layers=2)
    batch = make_batch(model)
    batch["attention_mask"][:] = 1
    model.set_attn_implementation("sdpa")
    expected = loss_and_gradients(model, **batch)
    masks.clear()
    del batch["attention_mask"]
    assert_same(loss_and_gradients(model, **batch), expected, rtol=0, atol=0)
    assert masks == [None, None]


PACKED_ROWS = [[1, 4, 6], [0, 3], [7, 2, 5]]  # 24, 20 and 27 tokens


def test_in_packed_rows_every_query_has_a_key(masks):
    """Rounding included, losses and gradients are those of rows whose padding has none."""
    model = make_small_model(D2lBertForPreTraining, make_config("bert", "sdpa"))
    batch = packed(make_sequences(), PACKED_ROWS)
    found = loss_and_gradients(model, **batch)
    with_mask = loss_and_gradients(model, **batch, attention_mask=(batch["sequence_ids"] != 0).long())
    assert_same(with_mask, found, rtol=0, atol=0)
    assert len(masks) == 4 and all(mask.any(-1).all() for mask in masks)
    numbers = batch.pop("sequence_ids")
    real = (numbers[:, :, None] == numbers[:, None]) & (numbers != 0)[:, None]
    assert not real.any(-1).all()
    assert_same(loss_and_gradients(model, **batch, attention_mask=real[:, None]), found, rtol=0, atol=0)
