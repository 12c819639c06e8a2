"""Packed rows have the losses, gradients and outputs of their sequences alone; gradient checkpointing, too."""

import pytest
import torch
from small_models import (
    SEQUENCE_LENGTHS,
    assert_close,
    assert_same_gradients,
    every_attention,
    every_setting,
    gradients,
    make_config,
    make_model,
    make_sequences,
    packed,
    padded,
)

from d2l_bert import (
    D2lBertForPreTraining,
)


pytestmark = pytest.mark.usefixtures("one_thread")

PACKED_ROWS = [[1, 4, 6], [0, 3], [7, 2, 5]]  # 24, 20 and 27 tokens, so there is padding and an unused slot for [CLS]


@every_setting
@every_attention
def test_packed_rows_have_the_losses_and_gradients_of_their_sequences_alone(setting, attention):
    model = make_model(D2lBertForPreTraining, make_config(setting, attention))
    sequences = make_sequences()
    expected = gradients(model, padded(sequences))
    assert_same_gradients(gradients(model, packed(sequences, PACKED_ROWS)), expected)
    leaking = packed(sequences, PACKED_ROWS)
    leaking["sequence_ids"] = (leaking["sequence_ids"] != 0).long()  # lets all sequences of a row attend to each other
    assert abs(gradients(model, leaking)[0] - expected[0]) > 1e-3


@every_setting
@every_attention
def test_packed_rows_have_the_outputs_of_their_sequences_alone(setting, attention):
    model = make_model(D2lBertForPreTraining, make_config(setting, attention))
    sequences = make_sequences()
    names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "cls_positions")
    batch = {name: tensor for name, tensor in packed(sequences, PACKED_ROWS).items() if name in names}
    outputs = model(**batch)
    assert outputs.seq_relationship_logits.shape == (3, 3, 2)
    for row, members in enumerate(PACKED_ROWS):
        for slot, member in enumerate(members):
            sequence = sequences[member]
            alone = model(sequence["input_ids"][None], token_type_ids=sequence["token_type_ids"][None])
            start = int(batch["cls_positions"][row, slot])
            stop = start + SEQUENCE_LENGTHS[member]
            assert_close(outputs.prediction_logits[row, start:stop], alone.prediction_logits[0])
            assert_close(outputs.seq_relationship_logits[row, slot], alone.seq_relationship_logits[0])


@every_attention
# Transformers 5.17 has no newer name for this method.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_computes_blocks_twice_and_changes_nothing(attention):
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = make_model(D2lBertForPreTraining, make_config("bert", attention, **dropout)).train()
    calls = []
    for block in model.bert.encoder.layer:
        block.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = padded(make_sequences())
    torch.manual_seed(1)
    expected = gradients(model, batch)
    assert len(calls) == 2
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    assert_same_gradients(gradients(model, batch), expected)
    assert len(calls) == 2 + 4
