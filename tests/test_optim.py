"""Optimizers as their papers write them, decay where BERT has it, a rate that rises and falls, averaged weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.training.optim import (
    MovingAverage,
    learning_rate_share,
    make_adamw,
    make_optimizers,
    parameter_groups,
)


SIZES = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
SWITCHES = [{}, {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True}]


def make_model(**switches):
    torch.manual_seed(0)
    return D2lBertForPreTraining(D2lBertConfig(**SIZES, **switches))


def is_decayed(name):
    """BERT's rule (appendix A.2 and its AdamWeightDecayOptimizer): neither biases nor LayerNorms."""
    return not name.endswith(".bias") and "LayerNorm" not in name


class PaperAdamW:
    """Algorithm 2 of Loshchilov and Hutter (2017), for one tensor; the schedule multiplier is the learning rate."""

    def __init__(self, tensor, decay, betas, epsilon):
        self.theta, self.decay, self.betas, self.epsilon = tensor.double(), decay, betas, epsilon
        self.m, self.v, self.t = torch.zeros_like(self.theta), torch.zeros_like(self.theta), 0

    def step(self, gradient, rate):
        beta1, beta2 = self.betas
        gradient, self.t = gradient.double(), self.t + 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        self.theta = self.theta - rate * (m_hat / (v_hat.sqrt() + self.epsilon) + self.decay * self.theta)


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_biases_and_layer_norms_are_not_decayed_and_all_else_is(switches):
    model = make_model(**switches)
    decayed, others = parameter_groups(model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {name for name in names.values() if is_decayed(name)}
    assert {names[id(parameter)] for parameter in decayed} == expected
    assert {names[id(parameter)] for parameter in others} == set(names.values()) - expected
    assert len(decayed) + len(others) == len(names), "each parameter once, a tied one too"
    assert "mlm.decoder.bias" not in expected and "bert.embeddings.position_embeddings.weight" in expected


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_make_adamw_steps_as_the_paper_writes_it(switches):
    model = make_model(**switches)
    rate, decay, betas, epsilon = 0.01, 0.3, (0.8, 0.95), 1e-3
    optimizer = make_adamw(model, rate, decay, betas, epsilon)
    paper = {
        name: PaperAdamW(parameter.detach(), decay if is_decayed(name) else 0.0, betas, epsilon)
        for name, parameter in model.named_parameters()
    }
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.01
            paper[name].step(parameter.grad, rate)
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.detach().double(), paper[name].theta, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


class PaperMuon:
    """Jordan et al. (2024) with the size and the decay of Liu et al. (2025, equation 4), for one matrix."""

    def __init__(self, matrix, decay, momentum=0.95):
        self.theta, self.decay, self.momentum, self.average = matrix.clone(), decay, momentum, torch.zeros_like(matrix)

    def step(self, gradient, rate):
        self.average = self.momentum * self.average + (1 - self.momentum) * gradient
        update = self.momentum * self.average + (1 - self.momentum) * gradient
        u, _, v = torch.linalg.svd(update, full_matrices=False)
        self.theta = self.theta - rate * (0.2 * max(update.shape) ** 0.5 * u @ v + self.decay * self.theta)


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_muon_has_the_matrices_of_the_blocks_and_adamw_each_parameter_else(model_class, switches):
    model = model_class(D2lBertConfig(**SIZES, **switches))
    muon, adamw = make_optimizers(model, "muon", 0.02, 0.1, (0.8, 0.95), 1e-3)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in (muon, adamw)]
    assert sorted(taken[0] + taken[1]) == sorted(names.values())
    pieces = ("attention.query", "attention.key", "attention.value", "attention.output", "ffn.dense1", "ffn.dense2")
    assert set(taken[0]) == {f"bert.encoder.layer.{n}.{piece}.weight" for n in range(2) for piece in pieces}
    assert [group["weight_decay"] for group in muon.param_groups] == [0.1]
    for group in adamw.param_groups:
        assert all((group["weight_decay"] == 0.1) == is_decayed(names[id(p)]) for p in group["params"])
        assert group["betas"] == (0.8, 0.95) and group["eps"] == 1e-3
    assert {group["lr"] for o in (muon, adamw) for group in o.param_groups} == {0.02}


def test_muon_steps_as_its_papers_write_it():
    """Its five Newton-Schulz iterations are inexact by design: singular values between 0.7 and 1.2, not 1."""
    model = make_model()
    muon, _ = make_optimizers(model, "muon", 0.02, 0.3, (0.9, 0.98), 1e-6)
    matrices = muon.param_groups[0]["params"]
    papers = [PaperMuon(matrix.detach(), 0.3) for matrix in matrices]
    before = [matrix.detach().clone() for matrix in matrices]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for matrix, paper in zip(matrices, papers, strict=True):
            matrix.grad = torch.randn(matrix.shape, generator=generator)
            paper.step(matrix.grad, 0.02)
        muon.step()
    for matrix, paper, start in zip(matrices, papers, before, strict=True):
        moved, expected = matrix.detach() - start, paper.theta - start
        assert (moved * expected).sum() / (moved.norm() * expected.norm()) > 0.95
        assert 0.8 < moved.norm() / expected.norm() < 1.2


def test_adamw_alone_is_one_optimizer_of_the_same_groups():
    model = make_model()
    (adamw,) = make_optimizers(model, "adamw", 0.01, 0.3, (0.8, 0.95), 1e-3)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.state_dict() == make_adamw(model, 0.01, 0.3, (0.8, 0.95), 1e-3).state_dict()


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate

KINDS = ["linear", "cosine", "warmup_stable_decay"]


def transformers_shares(kind, warmup_steps, max_steps, decay_steps):
    """What Transformers' scheduler multiplies the rate with at each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    if kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps)
    elif kind == "cosine":
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, max_steps)
    else:
        scheduler = get_wsd_schedule(optimizer, warmup_steps, decay_steps, max_steps, decay_type="1-sqrt")
    return [scheduler.lr_lambdas[0](step) for step in range(max_steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup_steps, decay_steps", [(0, 20), (7, 20), (30, 70), (99, 1)])
def test_the_rates_are_those_of_transformers_but_for_the_first_step_which_moves(kind, warmup_steps, decay_steps):
    """Theirs begins at nothing, so ours is one step ahead while it rises, and the same afterwards."""
    theirs = transformers_shares(kind, warmup_steps, 100, decay_steps)
    expected = theirs[1 : warmup_steps + 1] + theirs[warmup_steps:100]
    ours = [learning_rate_share(kind, step, warmup_steps, 100, decay_steps) for step in range(100)]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_the_rate_rises_in_equal_steps_to_its_peak_and_falls_in_equal_steps():
    rates = [learning_rate_share("linear", step, warmup_steps=4, max_steps=10) for step in range(10)]
    assert rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_without_warm_up_the_first_step_has_the_peak_rate():
    rates = [learning_rate_share("linear", step, warmup_steps=0, max_steps=5) for step in range(5)]
    assert rates == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_the_stable_rate_falls_by_the_root_of_the_way():
    rates = [learning_rate_share("warmup_stable_decay", step, 2, 10, decay_steps=4) for step in range(10)]
    falling = [1 - math.sqrt(step / 4) for step in range(4)]
    assert rates == pytest.approx([1 / 2, 1, 1, 1, 1, 1, *falling])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_step_moves(kind):
    assert learning_rate_share(kind, 0, 0, 1, 1) == learning_rate_share(kind, 0, 1, 1, 0) == 1


@given(
    kind=st.sampled_from(KINDS),
    max_steps=st.integers(1, 300),
    warm_up=st.floats(0, 1),
    decay_steps=st.integers(0, 300),
)
def test_every_step_moves_and_the_rate_rises_is_at_its_peak_and_falls(kind, max_steps, warm_up, decay_steps):
    warmup = math.floor(warm_up * max_steps)
    rates = [learning_rate_share(kind, step, warmup, max_steps, decay_steps) for step in range(max_steps)]
    assert min(rates) > 0 and max(rates) == 1
    rising, rest = rates[:warmup], rates[warmup:]
    assert rising == sorted(set(rising))
    assert rates.index(1) == max(warmup - 1, 0)
    if rest:
        assert rest[0] == 1
    flat = 1
    if kind == "warmup_stable_decay":
        flat = len(rest) - min(decay_steps, len(rest))
        assert set(rest[:flat]) <= {1}
    assert rest[flat:] == sorted(set(rest[flat:]), reverse=True)


# ---------------------------------------------------------------------------------------------------------------------
# The average of the weights


def wander(model, generator):
    """Move every weight, as a step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_the_average_is_the_sum_that_its_formula_says(switches):
    """Written out: each step's weights times what every later step keeps of them, in float64."""
    model, generator = make_model(**switches), torch.Generator().manual_seed(0)
    average = MovingAverage(model, 0.5)
    history = [{name: tensor.detach().double().clone() for name, tensor in model.named_parameters()}]
    for step in range(1, 13):
        wander(model, generator)
        average.update(step)
        history.append({name: tensor.detach().double().clone() for name, tensor in model.named_parameters()})
    kept = [min(0.5, (1 + step) / (10 + step)) for step in range(1, 13)]
    assert kept[0] == 2 / 11 and kept[7:] == [0.5] * 5
    shares = [math.prod(kept)] + [(1 - kept[n]) * math.prod(kept[n + 1 :]) for n in range(12)]
    assert sum(shares) == pytest.approx(1)
    assert average.tensors().keys() == history[0].keys()
    for name, found in average.tensors().items():
        expected = sum(share * weights[name] for share, weights in zip(shares, history, strict=True))
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def bits(model):
    return {name: tensor.detach().view(torch.int32).clone() for name, tensor in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_holds_the_averages_for_a_while_and_then_its_own_weights_bit_for_bit(switches, fails):
    model = make_model(**switches)
    average = MovingAverage(model, 0.9)
    wander(model, torch.Generator().manual_seed(0))
    average.update(1)
    with torch.no_grad():
        model.nsp.output.bias.copy_(torch.tensor([-0.0, float("nan")]))
    before, averages = bits(model), {name: tensor.clone() for name, tensor in average.tensors().items()}
    with pytest.raises(KeyError) if fails else torch.no_grad(), average.in_place():
        assert same(dict(model.named_parameters()), averages) and not same(bits(model), before)
        if switches:
            assert torch.equal(model.mlm.decoder.weight, averages["bert.embeddings.word_embeddings.weight"])
        assert all(parameter.requires_grad for parameter in model.parameters())
        if fails:
            raise KeyError
    assert same(bits(model), before) and same(average.tensors(), averages)


def test_sharded_weights_are_averaged_as_whole_ones_are(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.nn.Linear(4, 6)
        sharded = torch.nn.Linear(4, 6)
        for name, parameter in whole.named_parameters():
            shards = distribute_tensor(parameter.detach().clone(), mesh, [Shard(0)])
            setattr(sharded, name, torch.nn.Parameter(shards))
        averages = [MovingAverage(model, 0.9) for model in (whole, sharded)]
        for model, average in zip((whole, sharded), averages, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            average.update(1)
        for name, tensor in averages[1].tensors().items():
            assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), averages[0].tensors()[name])
        with averages[0].in_place(), averages[1].in_place():
            assert torch.equal(sharded.weight.full_tensor(), whole.weight)
    finally:
        torch.distributed.destroy_process_group()
