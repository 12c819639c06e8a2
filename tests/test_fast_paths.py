"""What was made fast computes the same: the last block, loss without scores, dropout's masks, compiled blocks."""

import copy
import functools
import itertools
import json
import math
import shutil

import conftest
import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertModel
from d2l_bert.cli import main
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.training import trials
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.trials import (
    compile_blocks,
    compile_now,
    is_long,
    leave_as_written,
    micro_batches_of_every_kind,
    pays,
    time,
)


pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, LENGTH, SLOTS = 6, 16, 5


def make_model(model_class=D2lBertForPreTraining, dropout=0.0, **changes):
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = D2lBertConfig(**{**conftest.SIZES, **dropouts, **changes})
    model = model_class._from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():  # none of them at a value that hides a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(model, everywhere=False):
    generator = torch.Generator().manual_seed(1)
    vocab_size = model.config.vocab_size
    ids = torch.randint(5, vocab_size, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(vocab_size, (ROWS, LENGTH if everywhere else SLOTS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    mask = torch.arange(LENGTH) < torch.arange(LENGTH - ROWS, LENGTH)[:, None]
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    if not everywhere:
        batch["masked_positions"] = torch.randint(LENGTH - ROWS, labels.shape, generator=generator)
    if isinstance(model, D2lBertForPreTraining):
        batch["next_sentence_label"] = ids[:, 0] % 2
    return batch


def loss_and_gradients(model, **batch):
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(found, expected, **tolerance):
    (outputs, gradients), (expected_outputs, expected_gradients) = found, expected
    torch.testing.assert_close(outputs.loss, expected_outputs.loss, check_dtype=False, **tolerance)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, **tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023


# ---------------------------------------------------------------------------------------------------------------------
# The last block, where it is read


def rows_through(module):
    """Shapes (rows, positions) of what a module is given, as a list that grows."""
    shapes = []
    module.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    return shapes


def packed(batch):
    """The same batch with two sequences in each row, of unequal length, and a pair of labels for them."""
    first = torch.arange(ROWS)[:, None] % 3 + 5
    place = torch.arange(LENGTH)[None]
    batch["sequence_ids"] = torch.where(place < first, 1, 2) * batch.pop("attention_mask")
    batch["position_ids"] = torch.where(place < first, place, place - first)
    batch["cls_positions"] = torch.cat([torch.zeros_like(first), first], 1)
    return batch | {"next_sentence_label": torch.stack([batch["next_sentence_label"]] * 2, 1)}


def one_sequence_a_row(batch):
    """As packing makes it of sequences that fill their rows."""
    batch["sequence_ids"] = batch.pop("attention_mask")
    batch["cls_positions"] = torch.zeros((ROWS, 1), dtype=torch.long)
    return batch | {"next_sentence_label": batch["next_sentence_label"][:, None]}


def without_padding(batch):
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


def mask_for_all_queries(batch):
    """Transformers passes on masks with four dimensions as they are."""
    mask = torch.zeros(ROWS, 1, 1, LENGTH, dtype=torch.double)
    return batch | {"attention_mask": mask.masked_fill(batch["attention_mask"][:, None, None] == 0, -1e9)}


@pytest.mark.parametrize(
    ("change", "sequences"),
    [(dict, 1), (packed, 2), (one_sequence_a_row, 1), (without_padding, 1), (mask_for_all_queries, 1)],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_last_block_that_computes_what_is_read_gives_the_same_losses_and_gradients(attention, change, sequences):
    model = make_model(num_hidden_layers=2).double()
    model.set_attn_implementation(attention)
    batch = change(make_batch(model))
    expected = loss_and_gradients(model, **batch, output_hidden_states=True)
    through = [rows_through(block.ffn) for block in model.bert.encoder.layer]
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)
    assert through == [[(ROWS, LENGTH)], [(ROWS, SLOTS + sequences)]]
    batch["masked_positions"] = batch["masked_positions"].int()
    assert_same(loss_and_gradients(model, **batch), expected, rtol=1e-9, atol=1e-12)


def test_without_pairs_cls_is_not_computed():
    model = make_model(D2lBertForMaskedLM)
    batch = make_batch(model)
    expected = loss_and_gradients(model, **batch, output_hidden_states=True)
    through = rows_through(model.bert.encoder.layer[-1].ffn)
    assert_same(loss_and_gradients(model, **batch), expected)
    assert through == [(ROWS, SLOTS)]


def test_positions_are_those_of_the_rows_and_may_be_none_at_all():
    model = make_model(D2lBertForMaskedLM)
    batch = make_batch(model)
    del batch["labels"]
    for positions in (batch["masked_positions"][:1], batch["masked_positions"][0]):
        with pytest.raises(ValueError, match=r"positions are \(B, P\), here \(6, P\); got the shape"):
            model(**batch | {"masked_positions": positions})
    assert model(**batch | {"masked_positions": batch["masked_positions"][:, :0]}).logits.shape[:2] == (ROWS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_an_exported_last_block_takes_other_sizes(model_class, attention):
    model = make_model(model_class).eval()
    model.set_attn_implementation(attention)
    inputs = {name: make_batch(model)[name] for name in ("input_ids", "attention_mask", "masked_positions")}
    sizes = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()
    smaller = {name: tensor[:4, :width] for (name, tensor), width in zip(inputs.items(), (12, 12, 3), strict=True)}
    smaller["masked_positions"] = smaller["masked_positions"].clamp(max=11)
    torch.testing.assert_close(exported(**smaller)[0], model(**smaller)[0])


def test_who_asks_for_hidden_states_or_attentions_has_them_all():
    model = make_model().eval()
    batch = make_batch(model)
    outputs = model(**batch, output_attentions=True)
    assert {tuple(attention.shape[-2:]) for attention in outputs.attentions} == {(LENGTH, LENGTH)}
    model.config.output_hidden_states = True
    outputs = model(**batch)
    assert outputs.hidden_states[-1].shape[1] == LENGTH and outputs.prediction_logits.shape[1] == SLOTS


# ---------------------------------------------------------------------------------------------------------------------
# The loss without its scores


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_the_loss_without_scores_is_the_loss_and_so_are_its_gradients(model_class, tied, everywhere, monkeypatch):
    model = make_model(model_class, tie_word_embeddings=tied).double()
    batch = make_batch(model, everywhere)
    expected = loss_and_gradients(model, **batch, skip_logits=False)
    for rows_at_once in (3, 7, 10**6):
        monkeypatch.setattr(modeling, "LOGITS_AT_ONCE", rows_at_once * model.config.vocab_size)
        found = loss_and_gradients(model, **batch, skip_logits=True)
        assert found[0].get("prediction_logits", found[0].get("logits")) is None
        assert_same(found, expected, rtol=1e-5, atol=1e-7)


def test_the_loss_without_scores_adds_up_over_micro_batches_given_the_steps_counts():
    model = make_model().double()
    batch = make_batch(model)
    expected = loss_and_gradients(model, **batch, skip_logits=False)
    counts = {"num_items_in_batch": (batch["labels"] != -100).sum(), "num_pairs_in_batch": ROWS}
    model.zero_grad()
    for part in (slice(0, 1), slice(1, 4), slice(4, ROWS)):
        model(**{name: tensor[part] for name, tensor in batch.items()}, **counts, skip_logits=True).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[1][name], rtol=1e-5, atol=1e-7)


def test_rows_without_a_label_weigh_nothing_where_they_stay():
    """On a GPU no row is left out: unused ones must add nothing to the loss or to any gradient."""
    torch.manual_seed(0)
    states, weight, bias = (torch.randn(*shape, dtype=torch.double) for shape in ((9, 4), (11, 4), (11,)))
    labels = torch.tensor([3, -100, 10, -100, -100, 0, 3, 7, -100])
    found, expected = [], []
    for gradients, loss_of in (
        (found, modeling.linear_cross_entropy),
        (expected, lambda x, w, b, y: nn.functional.cross_entropy(x @ w.T + b, y, reduction="sum")),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (states, weight, bias)]
        loss = 3 * loss_of(*leaves, labels)
        gradients.extend([loss.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (found[1][labels == -100] == 0).all()


def test_rows_to_predict_come_in_few_numbers():
    numbers = set()
    for known in range(1, 5000):
        labels = torch.full((2 * known,), -100)
        labels[::2] = torch.arange(known)
        states, left = modeling.rows_to_predict(torch.arange(2.0 * known).unsqueeze(1), labels)
        assert torch.equal(left[:known], labels[::2])
        assert torch.equal(states[:known, 0], torch.arange(0.0, 2 * known, 2))
        assert len(states) == len(left) < known + max(32, known / 31)
        assert (left[known:] == -100).all()
        numbers.add(len(left))
    assert len(numbers) == 2048 / 32 + 2048 / 64 + math.ceil((4999 - 4096) / 128)


def test_in_bf16_the_loss_without_scores_is_no_further_from_the_truth():
    model = make_model(vocab_size=3000)
    batch = make_batch(model, everywhere=True)
    truth = loss_and_gradients(copy.deepcopy(model).double(), **batch, skip_logits=False)

    def error(**how):
        with torch.autocast("cpu", torch.bfloat16):
            outputs, gradients = loss_and_gradients(model, **batch, **how)
        off = [(gradients[name] - truth[1][name]).norm() / truth[1][name].norm() for name in gradients]
        return float((outputs.loss - truth[0].loss).detach().abs()), float(torch.stack(off).median())

    (loss, gradient), (usual_loss, usual_gradient) = error(skip_logits=True), error(skip_logits=False)
    assert loss < max(2 * usual_loss, 2e-3)
    assert gradient < 1.2 * usual_gradient


def test_scores_are_never_there_as_a_whole(monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    model = make_model(vocab_size=5000)
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


def test_a_score_far_below_the_highest_keeps_its_loss():
    """Its probability is 0 in float32; the loss is still the distance."""
    states, labels = torch.tensor([[1.0]]), torch.tensor([1])
    loss = modeling.linear_cross_entropy(states, torch.tensor([[300.0], [0.0]]), torch.zeros(2), labels)
    assert loss == 300


def scores_of_labels_at(probability, peak, dtype, rows=1000, vocab_size=2000):
    """
    Scores (R, V), and labels (R,) that have this probability but for the rounding of their scores.

    The others' scores are random; with `peak` one other token has 99.5 % of what the label leaves.
    """
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, vocab_size, generator=generator, dtype=torch.double)
    labels, places = torch.randint(1, vocab_size, (rows,), generator=generator), torch.arange(rows)
    scores[places, labels] = -torch.inf
    if peak:
        scores[:, 0] = scores[:, 1:].logsumexp(1) + math.log(0.995 / 0.005)
    scores[places, labels] = scores.logsumexp(1) + math.log(probability / (1 - probability))
    return scores.to(dtype), labels


def losses_and_gradients_of_scores(loss_of, scores, labels):
    """The sum of losses, and the gradients of scores that are the weight itself, since each state is one-hot."""
    states, bias = torch.eye(len(scores), dtype=scores.dtype), torch.zeros(scores.shape[1])
    weight = scores.T.to(torch.promote_types(scores.dtype, torch.float32)).requires_grad_()
    loss = loss_of(states, weight, bias.to(weight.dtype), labels)
    return loss.item(), torch.autograd.grad(loss, weight)[0].T.double()


def plain_loss(states, weight, bias, labels):
    """Cross-entropy in float32 at least, of scores in the dtype of the states."""
    scores = nn.functional.linear(states, weight.to(states.dtype), bias.to(states.dtype))
    return nn.functional.cross_entropy(scores.to(weight.dtype), labels, reduction="sum")


@pytest.mark.parametrize("peak", [False, True])
@pytest.mark.parametrize("probability", [0.02, 0.5, 0.75, 0.95, 0.99, 0.998, 0.9997])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_likely_label_has_the_gradient_and_loss_that_float32_gives_it(dtype, probability, peak):
    scores, labels = scores_of_labels_at(probability, peak, dtype)
    truth = losses_and_gradients_of_scores(plain_loss, scores.double(), labels)
    usual = losses_and_gradients_of_scores(plain_loss, scores, labels)
    found = losses_and_gradients_of_scores(modeling.linear_cross_entropy, scores, labels)
    places = (torch.arange(len(labels)), labels)

    def errors(gradients):
        relative = gradients[places] / truth[1][places] - 1
        return relative.square().mean().sqrt(), (gradients - truth[1]).norm() / truth[1].norm()

    for error, usual_error in zip(errors(found[1]), errors(usual[1]), strict=True):
        assert error < max(1.5 * usual_error, 1e-6)  # 16 units of float32's last place
    assert found[0] == pytest.approx(truth[0], rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_token_far_above_all_others_leaves_the_loss_and_gradient_right(dtype):
    """The probabilities of the others are rounded to 0 then."""
    scores, labels = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)), torch.arange(8) + 480
    scores[:, 490] = 300
    scores[torch.arange(4), labels[:4]] = 301
    scores = scores.to(dtype)
    truth = losses_and_gradients_of_scores(plain_loss, scores.double(), labels)
    found = losses_and_gradients_of_scores(modeling.linear_cross_entropy, scores, labels)
    torch.testing.assert_close(found, truth, rtol=1e-2, atol=1e-6)


def test_a_score_that_is_no_number_shows_in_the_loss():
    """The loop leaves such a step out, and so must see it."""
    weight = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    weight[400] = math.nan
    assert modeling.linear_cross_entropy(torch.ones(2, 3), weight, torch.zeros(500), torch.tensor([1, 2])).isnan()


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
def test_training_with_labels_of_every_position_computes_what_is_labelled(model_class, attention, labelled):
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


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_a_batch_without_a_label_has_the_loss_of_stock_bert_and_given_a_count_no_gradient(model_class):
    model = make_model(model_class)
    batch = make_batch(model, everywhere=True)
    batch.pop("next_sentence_label", None)
    batch["labels"][:] = -100
    assert model(**batch).loss.isnan() and model(**batch, skip_logits=False).loss.isnan()
    outputs = model(**batch, num_items_in_batch=7)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_logits_are_there_in_evaluation_and_where_they_are_asked_for():
    model = make_model(D2lBertForMaskedLM)
    batch = make_batch(model, everywhere=True)
    in_training = model(**batch)
    assert in_training.logits is None and len(in_training.to_tuple()) == 1
    assert model(**batch, skip_logits=False).logits.shape[:2] == (ROWS, LENGTH)
    assert model(batch["input_ids"]).logits.shape[:2] == (ROWS, LENGTH)
    outputs = model.eval()(**batch)
    assert outputs.logits.shape[:2] == (ROWS, LENGTH)
    torch.testing.assert_close(outputs.loss, in_training.loss)


@pytest.mark.parametrize("shape", [(ROWS, LENGTH - 1), (ROWS, LENGTH + 1), (ROWS - 1, LENGTH), (ROWS * LENGTH,)])
def test_labels_that_do_not_fit_the_tokens_are_refused_in_training(shape):
    model = make_model(D2lBertForMaskedLM)
    with pytest.raises(ValueError, match=r"labels of shape \(.* do not fit tokens of shape \(6, 16\)"):
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long), labels=torch.zeros(shape, dtype=torch.long))


class Adapted(nn.Module):
    """A decoder with something beside it, as adapters are."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder, self.beside = decoder, nn.Linear(decoder.in_features, decoder.out_features)
        self.weight, self.bias = decoder.weight, decoder.bias

    def forward(self, states):
        return self.decoder(states) + self.beside(states)


def test_a_decoder_with_an_adapter_is_called():
    model = make_model(D2lBertForMaskedLM)
    model.mlm.decoder = Adapted(model.mlm.decoder)
    assert_close_to_dense(model, make_batch(model, everywhere=True), rtol=1e-5, atol=1e-6)


def test_a_decoder_with_a_hook_is_called():
    model = make_model(D2lBertForMaskedLM)
    model.mlm.decoder.register_forward_hook(lambda _, inputs, scores: 2 * scores)
    assert_close_to_dense(model, make_batch(model, everywhere=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model_class", "backend"),
    [
        (D2lBertForMaskedLM, "eager"),
        pytest.param(D2lBertForMaskedLM, "inductor", marks=pytest.mark.slow),
        pytest.param(D2lBertForPreTraining, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_trains_on_labels_of_every_position(model_class, backend, compiled_anew):
    """The number of labelled positions is read between two graphs."""
    model = make_model(model_class)
    batches = [make_batch(model, everywhere=True) for _ in range(3)]
    batches[1]["labels"][:, 5:] = -100
    batches[2]["labels"][:, 9:] = -100
    expected = [loss_and_gradients(model, **batch) for batch in batches]
    model.compile(backend=backend)
    for batch, as_written in zip(batches, expected, strict=True):
        assert_same(loss_and_gradients(model, **batch), as_written, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout


def draw(p, *shapes, seed=0):
    """What dropout keeps of tensors of these shapes, one after the other: ones and zeros."""
    torch.manual_seed(seed)
    dropout = modeling.Dropout(p).train()
    return [(dropout(torch.ones(shape)) > 0).float() for shape in shapes]


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9, 1e-3])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    count = 1_000_000
    values = modeling.Dropout(p).train()(torch.ones(count))
    deviation = math.sqrt(p * (1 - p) / count)
    assert abs(float((values == 0).float().mean()) - p) < 4 * deviation + 2**-17
    assert abs(float(values.double().mean()) - 1) < 4 * deviation / (1 - p)
    assert len(values.unique()) == 2


def test_masks_are_independent_of_place_and_of_one_another():
    """No correlation between neighbours, rows, masks of one draw and draws of neighbouring seeds."""
    rows, width = 1000, 1000
    first, second = draw(0.3, (rows, width), (rows, width))
    (other,) = draw(0.3, (rows, width), seed=1)
    pairs = [(first, second), (first, other)]
    pairs += [(first[:, :-shift], first[:, shift:]) for shift in (1, 2, 3, 4, 8)]
    pairs += [(first[:-shift], first[shift:]) for shift in (1, 4)]
    for one, another in pairs:
        correlation = np.corrcoef(one.flatten().numpy(), another.flatten().numpy())[0, 1]
        assert abs(correlation) < 5e-3


def test_masks_follow_from_the_seed():
    assert torch.equal(draw(0.5, (100,))[0], draw(0.5, (100,))[0])
    assert not torch.equal(draw(0.5, (100,))[0], draw(0.5, (100,), seed=1)[0])
    assert [tuple(mask.shape) for mask in draw(0.5, (3, 5), (7,))] == [(3, 5), (7,)]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_everything_can_be_dropped(p):
    assert torch.equal(modeling.Dropout(p).train()(torch.ones(5)), torch.full((5,), 1 - p))
    assert torch.equal(modeling.Dropout(p).eval()(torch.ones(5)), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_is_that_of_the_mask_that_was_used(dtype):
    values = torch.randn(50, 40, dtype=dtype).abs().add(0.1).requires_grad_()
    dropped = modeling.Dropout(0.3).train()(values)
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    assert dropped.dtype == gradient.dtype == dtype
    assert (gradient == 0).any()
    assert_close(gradient * values, dropped)


def test_dropout_passes_autograds_own_check():
    dropout = modeling.Dropout(0.4).train()

    def seeded(values):
        torch.manual_seed(2)
        return dropout(values).sin()

    values = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, values) and torch.autograd.gradgradcheck(seeded, values)


def test_the_operator_keeps_to_what_it_declares():
    operator, arguments = modeling.dropout_mask, (torch.ones(3, 5), 2**14)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_other_devices_and_evaluation_use_pytorchs_dropout(monkeypatch):
    def fail(*_):
        raise AssertionError("a mask for the CPU was drawn")

    monkeypatch.setattr(modeling, "dropout_mask", fail)
    assert modeling.Dropout(0.5).train()(torch.ones(3, device="meta")).is_meta
    assert torch.equal(modeling.Dropout(0.5).eval()(torch.ones(3)), torch.ones(3))
    with pytest.raises(AssertionError, match="a mask for the CPU"):
        modeling.Dropout(0.5).train()(torch.ones(3))


def test_copies_of_the_model_file_train_beside_one_another(tmp_path):
    """The package's and that of a model folder, which Transformers imports under another name, and again."""
    make_model(D2lBertForMaskedLM, dropout=0.3).save_pretrained(tmp_path)
    name = "modeling_d2l_bert.D2lBertForMaskedLM"
    copies = [get_class_from_dynamic_module(name, str(tmp_path), force_download=True) for _ in range(2)]
    models = [make_model(model_class, dropout=0.3) for model_class in (D2lBertForMaskedLM, *copies)]
    found = []
    for model in models:
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, **make_batch(model)))
    assert type(models[1]).__module__ != D2lBertForMaskedLM.__module__
    operators = getattr(torch.ops, type(models[1]).__module__.replace(".", "_"))
    assert hasattr(operators, "dropout_mask") and hasattr(operators, "dropout_mask_2"), "no copy takes another's name"
    for copied in found[1:]:
        assert_same(copied, found[0], rtol=0, atol=0)


def test_gradient_checkpointing_draws_the_same_masks_again():
    model = make_model(dropout=0.3)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, **make_batch(model)))
    assert_same(*found)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.fixture
def compiled_anew():
    yield
    torch.compiler.reset()


def compile_by(backend, monkeypatch):
    """Have `torch.compile` use a backend; "eager" captures the same graphs, and runs them without a C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


@pytest.mark.parametrize(
    ("hidden_act", "dropout", "backend"),
    [
        ("gelu", 0.3, "eager"),
        *(
            pytest.param(hidden_act, dropout, "inductor", marks=pytest.mark.slow)
            for hidden_act in ("relu", "gelu")
            for dropout in (0.0, 0.3)
        ),
    ],
)
def test_compiled_blocks_compute_the_same_masks_and_all(hidden_act, dropout, backend, compiled_anew, monkeypatch):
    compile_by(backend, monkeypatch)
    model = make_model(dropout=dropout, hidden_act=hidden_act)
    batches = [make_batch(model), {name: tensor[:3] for name, tensor in make_batch(model).items()}]

    def steps():
        torch.manual_seed(5)
        return [loss_and_gradients(model, **batch, skip_logits=True) for batch in batches]

    as_written, names = steps(), list(model.state_dict())
    compile_blocks(model)
    for found, expected in zip(steps(), as_written, strict=True):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == names
    leave_as_written(model)
    for found, expected in zip(steps(), as_written, strict=True):
        assert_same(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_masks_differ_from_place_to_place_and_are_drawn_once(recomputed, compiled_anew, monkeypatch):
    """The compiler may merge two calls that look alike, and make again in the backward pass what it did forward."""
    if recomputed:
        trials.compile_blocks(make_model())
    first, second = modeling.Dropout(0.5).train(), modeling.Dropout(0.5).train()

    def dropped_twice(values, matrix):
        branch = first((values @ matrix).softmax(-1))
        return second(branch.relu() @ matrix.T) + second(values)

    values, matrix = torch.randn(16, 12, requires_grad=True), torch.randn(12, 12, requires_grad=True)
    found, compiled = [], torch.compile(dropped_twice, dynamic=True)
    for function in (dropped_twice, compiled, compiled):
        torch.manual_seed(7 if len(found) < 2 else 8)
        result = function(values, matrix)
        found.append([result, *torch.autograd.grad(result.square().sum(), (values, matrix))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[2][0], found[1][0])


@pytest.mark.slow
def test_compiled_blocks_with_gradient_checkpointing_draw_the_same_masks(compiled_anew):
    model = make_model(dropout=0.3, num_hidden_layers=2)
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            trials.compile_blocks(model)
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, **make_batch(model)))
    assert_same(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_all_blocks_share_a_program(compiled_anew, monkeypatch):
    compile_by("eager", monkeypatch)
    model = make_model(D2lBertModel, num_hidden_layers=6)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    for rows in (4, 7, 5):
        model(torch.arange(rows * 12).view(rows, 12) % 40).last_hidden_state.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "objective"), [(D2lBertForPreTraining, "nsp"), (D2lBertForMaskedLM, "none")])
def test_no_kind_of_micro_batch_is_left_as_written(model_class, objective, compiled_anew, monkeypatch):
    """In training and evaluation, with padding and without, down to single rows and positions."""
    compiled, compile_as_is = [], torch.compile

    def backend(graph, _):
        return lambda *arguments: (compiled.append(1), graph(*arguments))[1]

    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_as_is(function, backend=backend, **how))
    model = make_model(model_class, num_hidden_layers=2, dropout=0.1)
    kinds = micro_batches_of_every_kind(full_batch(objective))
    assert compile_now(model, lambda: [model(**kind) for kind in kinds]) is None
    calls = len(compiled)
    for rows, slots, padding, training in itertools.product((8, 3, 1), (5, 1), (0, 4), (True, False)):
        ids = torch.arange(rows * 12).view(rows, 12) % 40
        mask = (torch.arange(12) < 12 - padding).long().expand(rows, 12)
        batch = {"input_ids": ids, "attention_mask": mask, "masked_positions": ids[:, :slots] % 8}
        batch["labels"] = ids[:, :slots]
        model.train(training)
        with torch.set_grad_enabled(training):
            model(**batch, skip_logits=True)
        calls += 2
        assert len(compiled) == calls, (rows, slots, padding, training)


class Clock:
    """Time that passes only in steps: so much as written, so much compiled."""

    def __init__(self, monkeypatch, model, as_written, compiled):
        self.now, self.model, self.costs = 0.0, model, {False: as_written, True: compiled}
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def step(self):
        self.now += self.costs["compute" in vars(self.model.base_model.encoder.layer[0])]


@pytest.mark.parametrize(("compiled", "kept"), [(0.5, True), (1.5, False)])
def test_what_is_compiled_stays_so_if_it_is_faster(compiled, kept, monkeypatch, capsys, shown):
    model, accelerator = make_model(), make_accelerator("no")
    clock = Clock(monkeypatch, model, 1.0, compiled)
    assert pays(accelerator, model, clock.step, [clock.step] * 3) is kept
    assert ("compute" in vars(model.bert.encoder.layer[0])) is kept
    said = capsys.readouterr().err
    assert f"a step takes {compiled} s instead of 1" in said and ("left as written" in said) is not kept


def test_without_a_compiler_a_run_goes_on_as_written(monkeypatch, capsys, shown):
    def fail():
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand more")

    model, accelerator = make_model(), make_accelerator("no")
    assert pays(accelerator, model, fail, [lambda: None]) is False
    assert "not compiled: InvalidCxxCompiler: No working C++ compiler found\n" in capsys.readouterr().err
    assert "compute" not in vars(model.bert.encoder.layer[0])
    assert compile_now(model, fail) == "InvalidCxxCompiler: No working C++ compiler found"


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_run_goes_on_bit_for_bit(books, tmp_path, capsys, is_compiled, compiled_anew, monkeypatch):
    """And its checkpoint says that it was compiled, which `auto` obeys."""
    if not is_compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    out = tmp_path / "out"
    command = ["pretrain", f"--corpus={books}", f"--output_dir={out}", *conftest.SMALL, "--max_steps=6"]
    command += ["--save_steps=3", "--hidden_dropout_prob=0.2", "--attention_probs_dropout_prob=0.2"]
    assert main([*command, "--torch_compile=true"]) == 0
    whole = (out / "model.safetensors").read_bytes()
    torch.compiler.reset()  # what the first run compiled is not there in a process of its own
    shutil.rmtree(out / "checkpoint-6")
    assert main([*command, "--resume_from_checkpoint=latest"]) == 0
    assert (out / "model.safetensors").read_bytes() == whole
    assert json.loads((out / "run_config.json").read_text())["run"]["torch_compile"] == "true"
    assert json.loads((out / "checkpoint-6" / "training_state.json").read_text())["torch_compile"] == "true"


def test_a_compiler_that_was_asked_for_and_fails_is_one_line(books, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trials, "compile_now", lambda *_: "No working C++ compiler found")
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *conftest.SMALL, "--max_steps=2"]
    assert main([*command, "--torch_compile=true"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "torch_compile: No working C++ compiler found; give --torch_compile false" in line


def full_batch(objective="nsp", rows=8):
    """A micro-batch without padding."""
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % 40
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    batch |= {"masked_positions": torch.arange(3).expand(rows, 3), "labels": ids[:, :3]}
    return batch if objective == "none" else {**batch, "next_sentence_label": ids[:, 0] % 2}


def test_programs_are_made_of_large_and_small_micro_batches_with_padding_and_without():
    kinds = micro_batches_of_every_kind(full_batch())
    assert [len(kind["input_ids"]) for kind in kinds] == [8, 8, 2, 2, 1, 1]
    assert [bool(kind["attention_mask"].all()) for kind in kinds] == [True, False] * 3
    kinds = micro_batches_of_every_kind(full_batch("none", rows=1))
    assert [kind["labels"].shape for kind in kinds] == [
        (rows, slots) for slots in (3, 1) for rows in (1, 1, 2, 2, 1, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_steps": 50}, False),
        ({"max_minutes": 5.0}, False),
        ({"max_minutes": 30.0}, True),
        ({"max_steps": 10**9}, True),
    ],
)
def test_a_run_is_long_by_its_minutes_or_by_its_arithmetic(changes, expected):
    run = PretrainConfig(**changes)
    accelerator = make_accelerator("no")
    run.mixed_precision = "no"
    assert is_long(run, D2lBertConfig(), None, {}, accelerator) is expected
