"""Optimizers agree with their papers, averages with their formula; a step that is not finite is left out."""

import contextlib
import itertools
import math

import pytest
import torch
from small_models import every_setting, in_training, make_batch, make_config, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.training import optimizers
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.data.order import START
from d2l_bert.training.data.steps import Step
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.learner import Learner
from d2l_bert.training.optimizers import MovingAverage, Muon, make_adamw, make_optimizers, orthogonal


def is_decayed(name):
    """BERT's rule (appendix A.2 and AdamWeightDecayOptimizer): every parameter but biases and LayerNorms."""
    return not name.endswith(".bias") and "LayerNorm" not in name


@every_setting
def test_adamw_steps_as_in_its_paper(setting):
    """Algorithm 2 of Loshchilov and Hutter (2017), in float64; its schedule multiplier is our learning rate."""
    model = make_model(D2lBertForPreTraining, make_config(setting))
    rate = 0.01
    decay = 0.3
    beta1 = 0.8
    beta2 = 0.95
    epsilon = 1e-3
    optimizer = make_adamw(model.parameters(), rate, decay, (beta1, beta2), epsilon)
    decays = []
    for name, parameter in model.named_parameters():
        decays.append(torch.full((parameter.numel(),), decay * is_decayed(name)))
    decays = torch.cat(decays)
    theta = parameters_to_vector(model.parameters()).double()
    m = torch.zeros_like(theta)
    v = torch.zeros_like(theta)
    for t in (1, 2, 3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape) * 0.01
        optimizer.step()
        gradient = parameters_to_vector(parameter.grad for parameter in model.parameters()).double()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        update = m_hat / (v_hat.sqrt() + epsilon)
        theta = theta - rate * (update + decays * theta)
        weights = parameters_to_vector(model.parameters()).double()
        torch.testing.assert_close(weights, theta, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
@every_setting
def test_muon_trains_the_matrices_of_the_blocks_and_adamw_all_other_parameters(model_class, setting):
    model = make_model(model_class, make_config(setting))
    muon, adamw = make_optimizers(model, "muon", 0.02, 0.1, (0.8, 0.95), 1e-3)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def names_in(group):
        return [names[id(parameter)] for parameter in group["params"]]

    (of_muon,) = muon.param_groups
    of_adamw = list(itertools.chain.from_iterable(map(names_in, adamw.param_groups)))
    assert sorted(names_in(of_muon) + of_adamw) == sorted(names.values())
    matrices = set()
    for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        matrices |= {f"{layer}.attention.{piece}.weight" for piece in ("query", "key", "value", "output")}
        matrices |= {f"{layer}.ffn.dense1.weight", f"{layer}.ffn.dense2.weight"}
    assert set(names_in(of_muon)) == matrices
    assert of_muon["weight_decay"] == 0.1 and of_muon["lr"] == 0.02
    for group in adamw.param_groups:
        for name in names_in(group):
            assert (group["weight_decay"] == 0.1) == is_decayed(name)
        assert group["betas"] == (0.8, 0.95) and group["eps"] == 1e-3 and group["lr"] == 0.02


def test_muon_steps_as_in_its_papers():
    """
    Jordan et al. (2024), with the update size and weight decay of Liu et al. (2025, equation 4).

    The five Newton-Schulz iterations are approximate: they give singular values between 0.7 and 1.2 instead of 1.
    """
    muon, _ = make_optimizers(make_model(D2lBertForPreTraining, make_config()), "muon", 0.02, 0.3, (0.9, 0.98), 1e-6)
    matrices = muon.param_groups[0]["params"]
    before = [matrix.detach().clone() for matrix in matrices]
    expected = [theta.clone() for theta in before]
    averages = [torch.zeros_like(theta) for theta in before]
    for _ in range(3):
        for theta, average, matrix in zip(expected, averages, matrices, strict=True):
            matrix.grad = torch.randn(matrix.shape)
            average.mul_(0.95).add_(0.05 * matrix.grad)
            momentum = 0.95 * average + 0.05 * matrix.grad
            u, _, v = torch.linalg.svd(momentum, full_matrices=False)
            size = 0.2 * max(matrix.shape) ** 0.5
            theta -= 0.02 * (size * u @ v + 0.3 * theta)
        muon.step()
    for matrix, theta, start in zip(matrices, expected, before, strict=True):
        moved = matrix.detach() - start
        should_move = theta - start
        assert (moved * should_move).sum() / (moved.norm() * should_move.norm()) > 0.95
        assert 0.8 < moved.norm() / should_move.norm() < 1.2


def test_momentum_of_a_unit_that_gets_no_gradient_any_more_ends_at_zero():
    """Numbers below 1e-38 (denormals) would make each step slow on many CPUs; all other momentum is the papers'."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    muon = Muon([weight], lr=1e-3)
    expected = torch.zeros(6, 4, dtype=torch.float64)
    for step in range(2000):
        weight.grad = torch.rand(6, 4)  # no negative numbers: a mean near 0 would have a large relative rounding error
        if step >= 20:
            weight.grad[2] = 0
        muon.step()
        expected = 0.95 * expected + 0.05 * weight.grad.double()
    momentum = muon.state[weight]["momentum_buffer"]
    torch.testing.assert_close(momentum.double(), expected, rtol=1e-5, atol=1e-10)
    assert (momentum[2] == 0).all()
    assert (expected[2] != 0).all()
    assert weight.isfinite().all()


@pytest.mark.parametrize("has_bf16", [False, True])
def test_muon_computes_in_float32_on_a_gpu_that_only_emulates_bf16(has_bf16, monkeypatch):
    """Tensors without numbers are on the GPU."""
    in_float32 = []

    def watched(matrix, *settings):
        in_float32.append(matrix)
        return orthogonal(matrix, *settings)

    monkeypatch.setattr(optimizers, "orthogonal", watched)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_bf16)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.zeros(6, 4, device="cuda"))
        weight.grad = torch.zeros(6, 4, device="cuda")
        Muon([weight], lr=1e-3).step()
    assert [matrix.device.type for matrix in in_float32] == ([] if has_bf16 else ["cuda"])


# ---------------------------------------------------------------------------------------------------------------------
# The moving average of the weights


def wander(model):
    """Change every weight at random, as a step would; returns all weights, in float64."""
    weights = parameters_to_vector(model.parameters()).detach()
    weights += torch.randn(len(weights))
    vector_to_parameters(weights, model.parameters())
    return weights.double()


@every_setting
def test_the_moving_average_equals_its_formula(setting):
    """The formula as a sum in float64: each step's weights, times the decays of all later steps."""
    model = make_model(D2lBertForPreTraining, make_config(setting))
    average = MovingAverage(model, 0.5)
    history = [parameters_to_vector(model.parameters()).detach().double()]
    for step in range(1, 13):
        history.append(wander(model))
        average.update(step)
    kept = [min(0.5, (1 + step) / (10 + step)) for step in range(1, 13)]
    assert kept[0] == 2 / 11
    assert kept[7:] == [0.5] * 5
    shares = [math.prod(kept)]
    for number, decay in enumerate(kept, 1):
        shares.append((1 - decay) * math.prod(kept[number:]))
    expected = sum(share * weights for share, weights in zip(shares, history, strict=True))
    found = parameters_to_vector(average.averages.values()).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_setting
@pytest.mark.parametrize("error", [contextlib.nullcontext(), pytest.raises(KeyError)], ids=["", "fails"])
def test_the_model_has_the_averages_inside_the_context_and_its_own_weights_afterwards(setting, error):
    model = make_model(D2lBertForPreTraining, make_config(setting))
    average = MovingAverage(model, 0.9)
    wander(model)
    average.update(1)
    with torch.no_grad():
        model.nsp.output.bias.copy_(torch.tensor([-0.0, float("nan")]))

    def bits():
        return parameters_to_vector(model.parameters()).detach().view(torch.int32)

    before = bits()
    averages = parameters_to_vector(average.averages.values())
    with error, average.in_place():
        assert torch.equal(parameters_to_vector(model.parameters()), averages)
        if setting == "bert":
            assert torch.equal(model.mlm.decoder.weight, model.bert.embeddings.word_embeddings.weight)
        assert all(parameter.requires_grad for parameter in model.parameters())
        if not isinstance(error, contextlib.nullcontext):
            raise KeyError
    assert torch.equal(bits(), before) and torch.equal(parameters_to_vector(average.averages.values()), averages)


# ---------------------------------------------------------------------------------------------------------------------
# A step whose loss or gradient is not finite is left out, also with the scaler of fp16, by a stand-in on the CPU


def give_scaler(accelerator):
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    # So that gradients are unscaled.
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"


def make_learner(optim="adamw"):
    """A learner that computes in fp16."""
    accelerator = make_accelerator("no")
    give_scaler(accelerator)
    return Learner(accelerator, in_training(), PretrainConfig(learning_rate=1e-3, ema_decay=0.5, optim=optim))


def step_of(learner):
    """A step of one micro-batch."""
    batch = make_batch(learner.model)
    return Step([batch], counts_of([batch]), START, words=0.0)


def test_a_trial_leaves_the_scale_as_it_was():
    learner = make_learner()
    for _ in range(5):
        learner.update(*step_of(learner)[:2], learning_rate=0.0)
    assert learner.accelerator.scaler.get_scale() > 1024
    learner.reset_optimizers()
    assert learner.accelerator.scaler.get_scale() == 1024
    assert learner.accelerator.scaler.state_dict()["_growth_tracker"] == 0


def spoil_the_loss(model, inputs, outputs):
    outputs.mlm_loss = outputs.mlm_loss.detach() * math.nan  # the gradient stays that of the finite loss


def spoil_the_gradient(gradient):
    return gradient * math.nan


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped_and_the_next_is_taken(spoilt):
    learner = make_learner()
    parameters = list(learner.model.parameters())

    def step(number):
        """Whether the step is skipped; the weights and their moving averages after it."""
        skipped = learner.train_on(step_of(learner), number, 1e-3).skipped
        averages = learner.average.averages.values()
        return skipped, parameters_to_vector([*parameters, *averages]).detach().clone()

    _, first = step(1)
    if spoilt == "loss":
        hook = learner.model.register_forward_hook(spoil_the_loss)
    else:
        hook = parameters[0].register_hook(spoil_the_gradient)
    skipped, second = step(2)
    hook.remove()
    assert skipped and torch.equal(first, second)
    skipped, third = step(3)
    assert not skipped and not torch.equal(second, third)


def everything_in(learner):
    """Copies of the weights, of their averages and of the optimizers' tensors, by their names."""
    tensors = {**learner.parameters, **learner._moments()}
    tensors |= {f"average of {name}": tensor for name, tensor in learner.average.averages.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "overflow", ["bert.encoder.layer.0.ffn.dense1.weight", "bert.embeddings.word_embeddings.weight"]
)
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_an_overflow_in_the_gradient_of_one_optimizer_moves_neither_and_halves_the_scale_once(overflow, number):
    """In Muon's part, a matrix of a block, or in AdamW's."""
    learner = make_learner("muon")
    scaler = learner.accelerator.scaler
    muon, _ = learner.optimizers
    ids_of_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    assert (id(learner.parameters[overflow]) in ids_of_muon) == ("encoder" in overflow)
    learner.train_on(step_of(learner), 1, 1e-3)
    before = everything_in(learner)
    scale = scaler.get_scale()
    hook = learner.parameters[overflow].register_hook(lambda gradient: torch.full_like(gradient, number))
    assert learner.train_on(step_of(learner), 2, 1e-3).skipped
    hook.remove()
    after = everything_in(learner)
    assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == []
    assert scaler.get_scale() == scale / 2
    assert not learner.train_on(step_of(learner), 3, 1e-3).skipped
    moved = everything_in(learner)
    assert [name for name, tensor in moved.items() if torch.equal(tensor, before[name])] == []


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_with_the_scaler_of_fp16_weights_and_moments_are_those_without(optim):
    """The scale is a power of two, and changes no bit; after two good steps it is twice as large."""
    found = []
    for has_scaler in (False, True):
        accelerator = make_accelerator("no")
        learner = Learner(accelerator, in_training(), PretrainConfig(ema_decay=0.5, optim=optim))
        if has_scaler:
            give_scaler(accelerator)
            accelerator.autocast = contextlib.nullcontext  # in float32
        for number in (1, 2):
            learner.train_on(step_of(learner), number, 1e-3)
        found.append(everything_in(learner))
    assert accelerator.scaler.get_scale() == 2048
    without, with_scaler = found
    for name, tensor in with_scaler.items():
        torch.testing.assert_close(tensor, without[name], rtol=0, atol=0)
