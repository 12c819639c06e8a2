"""Our dropout masks on a CPU: share, mean, seed, gradient; the same again where activations are recomputed."""

import math

import pytest
import torch
from small_models import assert_same, in_training, loss_and_gradients, make_batch
from torch.testing import assert_close

from d2l_bert import PretrainConfig
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.data.order import START
from d2l_bert.training.data.steps import Step
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.learner import Learner


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9, 1e-3])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    count = 1_000_000
    values = modeling.Dropout(p).train()(torch.ones(count))
    deviation = math.sqrt(p * (1 - p) / count)
    assert abs(float((values == 0).float().mean()) - p) < 4 * deviation + 2**-17
    assert abs(float(values.double().mean()) - 1) < 4 * deviation / (1 - p)
    assert len(values.unique()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_uses_the_same_mask_as_the_forward_pass(dtype):
    values = torch.randn(50, 40, dtype=dtype).abs().add(0.1).requires_grad_()
    dropped = modeling.Dropout(0.3).train()(values)
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    assert dropped.dtype == gradient.dtype == dtype and (gradient == 0).any()
    assert_close(gradient * values, dropped)


def test_each_step_of_a_run_has_masks_of_its_own_and_the_same_step_the_same():
    model = in_training(dropout=0.5)
    learner = Learner(make_accelerator("no"), model, PretrainConfig())
    batch = make_batch(model)
    step = Step([batch], counts_of([batch]), START, words=0.0)
    first, second, again = (learner.train_on(step, number, learning_rate=0.0).mlm_loss for number in (1, 2, 1))
    assert first == again != second


def test_the_dropout_operator_matches_its_declaration():
    operator = modeling.dropout_mask
    arguments = (torch.empty(0), (3, 5), 2**14)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_a_compiled_program_draws_a_mask_for_each_dropout():
    """The compiler merges calls with equal arguments."""
    dropout = modeling.Dropout(0.5).train()
    twice = torch.compile(lambda values: (dropout(values), dropout(values)), backend="aot_eager_decomp_partition")
    one, other = twice(torch.ones(100, requires_grad=True))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
# Transformers 5.17 has no newer name for this method.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_computes_blocks_twice_and_changes_nothing(attention):
    model = in_training(dropout=0.1)
    calls = []
    found = []
    model.set_attn_implementation(attention)
    for block in model.bert.encoder.layer:
        block.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    for times in (1, 3):  # once, and then twice more
        torch.manual_seed(1)
        found.append(loss_and_gradients(model, **make_batch(model)))
        assert len(calls) == 2 * times
        model.gradient_checkpointing_enable()
    assert_same(found[1], found[0], rtol=1e-5, atol=1e-6)
