"""What blocks and masks compute in another way on a GPU, here on a CPU (test_loss_without_logits has the loss)."""

import pytest
import torch
from fast_models import assert_same, compute_as_on, loss_and_gradients, make_batch, make_model
from small_models import make_config, make_sequences, packed
from small_models import make_model as make_small_model
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.modeling import modeling_d2l_bert as modeling


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A function; from its call on the model takes the ways of a GPU."""
    return lambda: compute_as_on("gpu", monkeypatch)


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
