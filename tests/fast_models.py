"""A small model with a batch, losses and gradients, and the ways of a GPU: for tests that compare fast variants."""

import conftest
import pytest
import torch

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.modeling import modeling_d2l_bert as modeling


ROWS, LENGTH, SLOTS = 6, 16, 5


every_device = pytest.mark.parametrize("device", ["cpu", "gpu"])


def compute_as_on(device, monkeypatch):
    """From now on the model takes the ways of a device, here on a CPU."""
    monkeypatch.setattr(modeling, "is_on_cpu", lambda tensor: device == "cpu")


def make_model(model_class=D2lBertForPreTraining, dropout=0.0, **changes):
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = D2lBertConfig(**{**conftest.SIZES, **dropouts, **changes})
    model = model_class._from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():  # random values: a zero could hide a mistake
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
