"""The fast variants compute the same: a last block and losses at the positions read, a loss without its logits."""

import copy
import math

import conftest
import pytest
import torch
from small_models import (
    LENGTH,
    ROWS,
    assert_same,
    compute_as_on,
    every_device,
    in_training,
    loss_and_gradients,
    make_batch,
    make_sequences,
    packed,
    padded,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.modeling import modeling_d2l_bert as modeling


# ---------------------------------------------------------------------------------------------------------------------
# The last block, computed only at the positions that are read


def rows_through(module):
    """A list that grows by the shape (rows, positions) of each input of a module. A hook would see all positions."""
    shapes = []
    usual = module.forward

    def forward(states):
        shapes.append(tuple(states.shape[:2]))
        return usual(states)

    module.forward = forward
    return shapes


SEQUENCES = make_sequences()
PADDED = padded(SEQUENCES)
MASK = torch.zeros(ROWS, 1, 1, LENGTH, dtype=torch.double)
BATCHES = {
    "padded": PADDED,
    "packed": packed(SEQUENCES, [[1, 4, 6], [0, 3], [7, 2, 5]]),
    "a sequence a row, as packing makes it": packed(SEQUENCES, [[number] for number in range(ROWS)]),
    "without a mask": {name: tensor for name, tensor in PADDED.items() if name != "attention_mask"},
    # Of four dimensions: Transformers passes it on unchanged.
    "a mask for all queries": {
        **PADDED,
        "attention_mask": MASK.masked_fill(PADDED["attention_mask"][:, None, None] == 0, -1e9),
    },
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_last_block_at_the_positions_read_gives_the_same_losses_and_gradients(attention, kind):
    model = in_training(num_hidden_layers=2).double()
    model.set_attn_implementation(attention)
    batch = dict(BATCHES[kind])
    expected = loss_and_gradients(model, **batch, output_hidden_states=True)
    through = [rows_through(block.ffn) for block in model.bert.encoder.layer]
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)
    sequences = 3 if kind == "packed" else 1
    rows, slots = batch["labels"].shape
    assert through == [[batch["input_ids"].shape], [(rows, slots + sequences)]]
    batch["masked_positions"] = batch["masked_positions"].int()
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_requested_hidden_states_and_attentions_are_of_all_positions(attention):
    model = in_training(num_hidden_layers=2)
    model.set_attn_implementation(attention)
    batch = make_batch(model)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    expected = model.bert(**inputs, output_hidden_states=True)
    outputs = model(**batch, output_hidden_states=True, output_attentions=attention == "eager")
    for states, other in zip(outputs.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(states, other)
    assert torch.equal(expected.hidden_states[-1], expected.last_hidden_state)
    if attention == "eager":
        assert [tensor.shape[2:] for tensor in outputs.attentions] == [(LENGTH, LENGTH)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Labels of every position


def assert_close_to_dense(model, batch, **tolerance):
    dense = loss_and_gradients(model, **batch, skip_logits=False)
    found = loss_and_gradients(model, **batch)
    name = "prediction_logits" if isinstance(model, D2lBertForPreTraining) else "logits"
    assert getattr(found[0], name) is None
    assert getattr(dense[0], name).shape[1] == LENGTH
    assert_same(found, dense, **tolerance)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
@pytest.mark.parametrize("labelled", [0.0, 0.15, 1.0])
def test_training_with_labels_of_every_position_computes_the_labelled_positions_only(model_class, attention, labelled):
    model = in_training(model_class, num_hidden_layers=2)
    model.set_attn_implementation(attention)
    batch = make_batch(model, everywhere=True)
    batch["labels"] = batch["input_ids"].masked_fill(torch.rand(ROWS, LENGTH) >= labelled, -100)
    counts = {"num_items_in_batch": (batch["labels"] != -100).sum().clamp(min=1)}
    assert_close_to_dense(model, batch | counts, rtol=1e-5, atol=1e-6)
    if labelled:
        assert_close_to_dense(model, batch, rtol=1e-5, atol=1e-6)
    most = int((batch["labels"] != -100).sum(1).max())
    through = rows_through(model.bert.encoder.layer[-1].ffn)
    model(**batch)
    has_cls = model_class is D2lBertForPreTraining
    multiple_of_4 = 4 * math.ceil(max(1, most) / 4)
    assert through == [(ROWS, min(LENGTH, multiple_of_4) + has_cls)]


@every_device
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_a_batch_without_labels_has_stock_berts_nan_loss_and_with_a_count_no_gradient(
    model_class, device, monkeypatch
):
    compute_as_on(device, monkeypatch)
    model = in_training(model_class)
    batch = make_batch(model, everywhere=True)
    batch.pop("next_sentence_label", None)
    batch["labels"][:] = -100
    assert model(**batch).loss.isnan() and model(**batch, skip_logits=False).loss.isnan()
    outputs = model(**batch, num_items_in_batch=7)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("shape", [(ROWS, LENGTH - 1), (ROWS, LENGTH + 1), (ROWS - 1, LENGTH), (ROWS * LENGTH,)])
def test_labels_of_another_shape_than_the_tokens_are_refused_in_training(shape):
    model = in_training(D2lBertForMaskedLM)
    with pytest.raises(ValueError, match=r"labels of shape \(.* do not fit tokens of shape \(8, 14\)"):
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long), labels=torch.zeros(shape, dtype=torch.long))


# ---------------------------------------------------------------------------------------------------------------------
# The MLM loss that is computed without its logits equals the usual one, and is as exact, also as on a GPU


@every_device
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_the_loss_without_logits_has_the_same_value_and_gradients(
    model_class, tied, everywhere, attention, device, monkeypatch
):
    model = in_training(model_class, tie_word_embeddings=tied).double()
    model.set_attn_implementation(attention)
    batch = make_batch(model, everywhere)
    expected = loss_and_gradients(model, **batch, skip_logits=False)
    compute_as_on(device, monkeypatch)
    for rows_at_once in (3, 7, 10**6):
        monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", rows_at_once * 64)  # the vocabulary of 40, padded on a GPU
        found = loss_and_gradients(model, **batch, skip_logits=True)
        assert found[0].get("prediction_logits", found[0].get("logits")) is None
        assert_same(found, expected, rtol=1e-5, atol=1e-7)


@every_device
def test_in_bf16_the_loss_without_logits_is_as_exact_as_the_usual_one(device, monkeypatch):
    model = in_training(vocab_size=3000)
    batch = make_batch(model, everywhere=True)
    exact, exact_gradients = loss_and_gradients(copy.deepcopy(model).double(), **batch, skip_logits=False)

    def error(**how):
        with torch.autocast("cpu", torch.bfloat16):
            outputs, gradients = loss_and_gradients(model, **batch, **how)
        off_loss = (outputs.loss - exact.loss).detach().abs()
        off = []
        for name, gradient in exact_gradients.items():
            off.append((gradients[name] - gradient).norm() / gradient.norm())
        return float(off_loss), float(torch.stack(off).median())

    usual_loss, usual_gradient = error(skip_logits=False)
    compute_as_on(device, monkeypatch)
    loss, gradient = error(skip_logits=True)
    assert loss < max(2 * usual_loss, 2e-3 if device == "cpu" else 5e-3)
    assert gradient < (1.2 if device == "cpu" else 2) * usual_gradient  # there the residual, too, is rounded to bf16


def test_the_logits_of_all_rows_never_exist_at_once(monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    model = in_training(vocab_size=5000)
    batch = make_batch(model, everywhere=True)
    predicted = int((batch["labels"] != -100).sum())
    monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", 8 * 5000)
    found = []
    for skip_logits in (True, False):
        with Largest() as largest:
            model(**batch, skip_logits=skip_logits).loss.backward()
        found.append(largest.elements)
    assert found[0] == max(8, conftest.SIZES["hidden_size"]) * 5000, "the weight's gradient, or eight rows"
    assert found[1] >= predicted * 5000


def scores_of_labels_at(probability, peak, dtype, rows=200, vocab_size=1000):
    """Scores (R, V), and labels (R,) that all have the same probability, up to the rounding of the scores.

    The scores of other tokens are random. With `peak`, one other token has 99.5 % of the remaining probability.
    """
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, vocab_size, generator=generator, dtype=torch.double)
    labels = torch.randint(1, vocab_size, (rows,), generator=generator)
    places = torch.arange(rows)
    scores[places, labels] = -torch.inf
    if peak:
        scores[:, 0] = scores[:, 1:].logsumexp(1) + math.log(0.995 / 0.005)
    scores[places, labels] = scores.logsumexp(1) + math.log(probability / (1 - probability))
    return scores.to(dtype), labels


def losses_and_gradients_of_scores(loss_of, scores, labels):
    """The sum of the losses and its gradient by the scores. The states are one-hot, so the weight is the scores."""
    states = torch.eye(len(scores), dtype=scores.dtype)
    bias = torch.zeros(scores.shape[1])
    weight = scores.T.to(torch.promote_types(scores.dtype, torch.float32)).requires_grad_()
    loss = loss_of(states, weight, bias.to(weight.dtype), labels)
    return loss.item(), torch.autograd.grad(loss, weight)[0].T.double()


def plain_loss(states, weight, bias, labels):
    """Cross-entropy in float32 or better, of scores computed in the dtype of the states."""
    scores = nn.functional.linear(states, weight.to(states.dtype), bias.to(states.dtype))
    return nn.functional.cross_entropy(scores.to(weight.dtype), labels, reduction="sum")


def loss_without_logits(states, weight, bias, labels):
    """The same as the model computes it."""
    loss, *_ = modeling.loss_and_gradients(states, weight, bias, labels, compiles_gradient=False)
    return loss


@every_device
@pytest.mark.parametrize("peak", [False, True])
@pytest.mark.parametrize("probability", [0.02, 0.5, 0.75, 0.95, 0.99, 0.998, 0.9997])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_likely_label_has_the_loss_and_gradient_of_float32(dtype, probability, peak, device, monkeypatch):
    scores, labels = scores_of_labels_at(probability, peak, dtype)
    truth = losses_and_gradients_of_scores(plain_loss, scores.double(), labels)
    usual = losses_and_gradients_of_scores(plain_loss, scores, labels)
    compute_as_on(device, monkeypatch)
    found = losses_and_gradients_of_scores(loss_without_logits, scores, labels)
    places = (torch.arange(len(labels)), labels)

    def errors(gradients):
        relative = gradients[places] / truth[1][places] - 1
        of_all = (gradients - truth[1]).norm() / truth[1].norm()
        return [of_all, relative.square().mean().sqrt()] if device == "cpu" else [of_all]

    for error, usual_error in zip(errors(found[1]), errors(usual[1]), strict=True):
        assert error < max(1.5 * usual_error, 1e-6)  # 16 units in the last place of float32
    assert found[0] == pytest.approx(truth[0], rel=5e-3)


def test_a_gradient_of_the_gradient_is_right_without_the_fused_loss_and_refused_with_it():
    """A Hessian-vector product, against that of PyTorch's own loss of the scores."""
    model = in_training().double()
    batch = make_batch(model)
    weights = [model.mlm.dense.weight, model.bert.encoder.layer[0].ffn.dense1.weight]
    vectors = [torch.randn_like(weight) for weight in weights]

    def product(loss):
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(first, weights, vectors, retain_graph=True)

    outputs = model(**batch, skip_logits=False)
    masked = nn.functional.cross_entropy(outputs.prediction_logits.flatten(0, 1), batch["labels"].flatten())
    pairs = nn.functional.cross_entropy(outputs.seq_relationship_logits, batch["next_sentence_label"])
    for ours, plain in zip(product(outputs.loss), product(masked + pairs), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="second derivatives.*skip_logits=False"):
        product(model(**batch).loss)
