"""Optimizers agree with their papers, averaged weights with their formula."""

import math

import pytest
import torch

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.training.optimizer import MovingAverage, make_adamw, make_optimizers


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
    """BERT's rule (appendix A.2 and AdamWeightDecayOptimizer): every parameter but biases and LayerNorms."""
    return not name.endswith(".bias") and "LayerNorm" not in name


class PaperAdamW:
    """Algorithm 2 of Loshchilov and Hutter (2017) for one tensor. Its schedule multiplier is our learning rate."""

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
def test_adamw_steps_as_in_its_paper(switches):
    model = make_model(**switches)
    rate, decay, betas, epsilon = 0.01, 0.3, (0.8, 0.95), 1e-3
    optimizer = make_adamw(model.parameters(), rate, decay, betas, epsilon)
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
    """Jordan et al. (2024), with the update size and weight decay of Liu et al. (2025, equation 4), for one matrix."""

    def __init__(self, matrix, decay, momentum=0.95):
        self.theta, self.decay, self.momentum, self.average = matrix.clone(), decay, momentum, torch.zeros_like(matrix)

    def step(self, gradient, rate):
        self.average = self.momentum * self.average + (1 - self.momentum) * gradient
        update = self.momentum * self.average + (1 - self.momentum) * gradient
        u, _, v = torch.linalg.svd(update, full_matrices=False)
        self.theta = self.theta - rate * (0.2 * max(update.shape) ** 0.5 * u @ v + self.decay * self.theta)


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_muon_trains_the_matrices_of_the_blocks_and_adamw_all_other_parameters(model_class, switches):
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


def test_muon_steps_as_in_its_papers():
    """
    Its five Newton-Schulz iterations are approximate: they give singular values between 0.7 and 1.2 instead of 1.
    """
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


# ---------------------------------------------------------------------------------------------------------------------
# The moving average of the weights


def wander(model, generator):
    """Change every weight at random, as a step would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
def test_the_moving_average_equals_its_formula(switches):
    """The formula as a sum in float64: each step's weights, times the decays of all later steps."""
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
    assert average.averages.keys() == history[0].keys()
    for name, found in average.averages.items():
        expected = sum(share * weights[name] for share, weights in zip(shares, history, strict=True))
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def bits(model):
    return {name: tensor.detach().view(torch.int32).clone() for name, tensor in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("switches", SWITCHES, ids=["d2l", "bert"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_has_the_averages_inside_the_context_and_its_own_weights_afterwards(switches, fails):
    model = make_model(**switches)
    average = MovingAverage(model, 0.9)
    wander(model, torch.Generator().manual_seed(0))
    average.update(1)
    with torch.no_grad():
        model.nsp.output.bias.copy_(torch.tensor([-0.0, float("nan")]))
    before, averages = bits(model), {name: tensor.clone() for name, tensor in average.averages.items()}
    with pytest.raises(KeyError) if fails else torch.no_grad(), average.in_place():
        assert same(dict(model.named_parameters()), averages) and not same(bits(model), before)
        if switches:
            assert torch.equal(model.mlm.decoder.weight, averages["bert.embeddings.word_embeddings.weight"])
        assert all(parameter.requires_grad for parameter in model.parameters())
        if fails:
            raise KeyError
    assert same(bits(model), before) and same(average.averages, averages)
