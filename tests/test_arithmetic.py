"""The operations of a training step agree with PyTorch's own count, and the measured peak is plausible."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SIZES
from torch.utils.flop_counter import FlopCounterMode

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.modeling.arithmetic import training_arithmetic
from d2l_bert.training.devices import matmul_peak


ROWS, LENGTH, PREDICTED = 5, 17, 3
COUNTS = SimpleNamespace(
    tokens=ROWS * LENGTH, squared_lengths=ROWS * LENGTH**2, masked_tokens=ROWS * PREDICTED, examples=ROWS
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_pairs", [True, False])
def test_the_arithmetic_of_a_step_without_padding_is_what_pytorch_counts(with_pairs, tied):
    """With attention written out in matrix products: PyTorch's counter sees those, but not its attention kernel."""
    model_class = D2lBertForPreTraining if with_pairs else D2lBertForMaskedLM
    config = D2lBertConfig(**SIZES, tie_word_embeddings=tied)
    model = model_class._from_config(config, attn_implementation="eager")
    ids = torch.randint(1, config.vocab_size, (ROWS, LENGTH))
    batch = {"input_ids": ids, "masked_positions": torch.arange(PREDICTED).repeat(ROWS, 1)}
    batch["labels"] = ids[:, :PREDICTED]
    if with_pairs:
        batch["next_sentence_label"] = torch.zeros(ROWS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(**batch, skip_logits=False).loss.backward()
    assert training_arithmetic(config, COUNTS, pair_task=with_pairs) == counter.get_total_flops()


def test_without_attention_and_heads_bert_base_takes_six_operations_per_weight_and_token():
    """Kaplan et al. (2020), equation 2.2: 6 N operations per token, where N excludes the embeddings.

    No output is read here, so the last block computes only keys and values: 2 of its 12 H^2 weights.
    """
    config = D2lBertConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    nothing = SimpleNamespace(tokens=1, squared_lengths=0, masked_tokens=0, examples=0)
    assert training_arithmetic(config, nothing, pair_task=True) == 6 * (11 * 12 + 2) * 768**2


def test_the_measured_peak_is_plausible_and_leaves_the_random_number_generators_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    state = np.random.get_state()[1].copy()
    peak = matmul_peak(torch.device("cpu"), torch.float32, seconds=0.03)
    assert torch.equal(torch.rand(4), expected) and (np.random.get_state()[1] == state).all()
    assert 1e8 < peak < 1e15  # any CPU reaches ten times the lower limit, and no CPU the upper
