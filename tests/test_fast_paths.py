"""The fast variants compute the same: a last block and labels of every position, at the positions read."""

import math

import pytest
import torch
from fast_models import (
    LENGTH,
    ROWS,
    SLOTS,
    assert_same,
    compute_as_on,
    every_device,
    loss_and_gradients,
    make_batch,
    make_model,
)

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining


pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------------------------
# The last block, computed only at the positions that are read


def rows_through(module):
    """A list that grows by the shape (rows, positions) of each input of a module."""
    shapes = []
    module.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    return shapes


def packed(batch):
    """The batch with two sequences of unequal length in each row, and a pair label for each sequence."""
    first = torch.arange(ROWS)[:, None] % 3 + 5
    place = torch.arange(LENGTH)[None]
    batch["sequence_ids"] = torch.where(place < first, 1, 2) * batch.pop("attention_mask")
    batch["position_ids"] = torch.where(place < first, place, place - first)
    batch["cls_positions"] = torch.cat([torch.zeros_like(first), first], 1)
    return batch | {"next_sentence_label": torch.stack([batch["next_sentence_label"]] * 2, 1)}


def one_sequence_a_row(batch):
    """The batch as packing makes it if each sequence fills its row."""
    batch["sequence_ids"] = batch.pop("attention_mask")
    batch["cls_positions"] = torch.zeros((ROWS, 1), dtype=torch.long)
    return batch | {"next_sentence_label": batch["next_sentence_label"][:, None]}


def without_padding(batch):
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


def mask_for_all_queries(batch):
    """The batch with a mask of four dimensions, which Transformers passes on unchanged."""
    mask = torch.zeros(ROWS, 1, 1, LENGTH, dtype=torch.double)
    return batch | {"attention_mask": mask.masked_fill(batch["attention_mask"][:, None, None] == 0, -1e9)}


@pytest.mark.parametrize(
    ("change", "sequences"),
    [(dict, 1), (packed, 2), (one_sequence_a_row, 1), (without_padding, 1), (mask_for_all_queries, 1)],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_last_block_at_the_positions_read_gives_the_same_losses_and_gradients(attention, change, sequences):
    model = make_model(num_hidden_layers=2).double()
    model.set_attn_implementation(attention)
    batch = change(make_batch(model))
    expected = loss_and_gradients(model, **batch, output_hidden_states=True)
    through = [rows_through(block.ffn) for block in model.bert.encoder.layer]
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)
    assert through == [[(ROWS, LENGTH)], [(ROWS, SLOTS + sequences)]]
    batch["masked_positions"] = batch["masked_positions"].int()
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_requested_hidden_states_and_attentions_are_of_all_positions(attention):
    model = make_model(num_hidden_layers=2)
    model.set_attn_implementation(attention)
    batch = make_batch(model)
    expected = model.bert(batch["input_ids"], batch["attention_mask"], output_hidden_states=True)
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
    assert getattr(found[0], name) is None and getattr(dense[0], name).shape[1] == LENGTH
    assert_same(found, dense, **tolerance)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
@pytest.mark.parametrize("labelled", [0.0, 0.15, 1.0])
def test_training_with_labels_of_every_position_computes_the_labelled_positions_only(model_class, attention, labelled):
    model = make_model(model_class, num_hidden_layers=2)
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
    assert through == [(ROWS, min(LENGTH, 4 * math.ceil(max(1, most) / 4)) + has_cls)]


@every_device
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_a_batch_without_labels_has_stock_berts_nan_loss_and_with_a_count_no_gradient(
    model_class, device, monkeypatch
):
    compute_as_on(device, monkeypatch)
    model = make_model(model_class)
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
    model = make_model(D2lBertForMaskedLM)
    with pytest.raises(ValueError, match=r"labels of shape \(.* do not fit tokens of shape \(6, 16\)"):
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long), labels=torch.zeros(shape, dtype=torch.long))
