"""Our dropout masks on a CPU: share, mean, seed, gradient."""

import math
import sys

import pytest
import torch
from fast_models import assert_same, loss_and_gradients, make_batch, make_model
from torch.testing import assert_close
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from d2l_bert import D2lBertForMaskedLM
from d2l_bert.modeling import modeling_d2l_bert as modeling


pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_the_dropout_operator_matches_its_declaration():
    operator, arguments = modeling.dropout_mask, (torch.empty(0), (3, 5), 2**14)
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_program_draws_a_mask_for_each_dropout():
    """The compiler merges calls with equal arguments."""
    dropout = modeling.Dropout(0.5).train()
    twice = torch.compile(lambda values: (dropout(values), dropout(values)), backend="aot_eager_decomp_partition")
    one, other = twice(torch.ones(100, requires_grad=True))
    assert not torch.equal(one, other)


def test_several_copies_of_the_model_file_train_in_one_process(tmp_path):
    """The package's own file and a model folder's copy, which Transformers imports twice under another name."""
    make_model(D2lBertForMaskedLM, dropout=0.3).save_pretrained(tmp_path)
    name = "modeling_d2l_bert.D2lBertForMaskedLM"
    copies = [get_class_from_dynamic_module(name, str(tmp_path), force_download=True) for _ in range(2)]
    models = [make_model(model_class, dropout=0.3) for model_class in (D2lBertForMaskedLM, *copies)]
    found = []
    for model in models:
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, **make_batch(model)))
    assert type(models[1]).__module__ != D2lBertForMaskedLM.__module__
    names = {sys.modules[type(model).__module__].dropout_mask._qualname for model in models}
    assert len(names) == 2 and modeling.dropout_mask._qualname in names, "no copy takes another's name"
    for copied in found[1:]:
        assert_same(copied, found[0], rtol=0, atol=0)
