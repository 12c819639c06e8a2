"""AdamW as its paper writes it, decay where BERT has it, and a rate that rises and falls."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.training.optim import linear_schedule, make_adamw, parameter_groups


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
    decayed, others = parameter_groups(model)
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


def test_the_rate_rises_in_equal_steps_to_its_peak_and_falls_in_equal_steps():
    rates = [linear_schedule(step, warmup_steps=4, max_steps=10) for step in range(10)]
    assert rates == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_without_warm_up_the_first_step_has_the_peak_rate():
    rates = [linear_schedule(step, warmup_steps=0, max_steps=5) for step in range(5)]
    assert rates == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_a_run_of_one_step_moves():
    assert linear_schedule(0, 0, 1) == linear_schedule(0, 1, 1) == 1


@settings(deadline=None)
@given(max_steps=st.integers(1, 300), share=st.floats(0, 1))
def test_every_step_moves_and_the_peak_comes_exactly_when_warm_up_ends(max_steps, share):
    warmup = math.floor(share * max_steps)
    rates = [linear_schedule(step, warmup, max_steps) for step in range(max_steps)]
    assert min(rates) > 0 and max(rates) == 1
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(set(rising))
    assert falling == sorted(set(falling), reverse=True)
    assert rates.index(1) == max(warmup - 1, 0)
    if falling:
        assert falling[0] == 1
