"""Packed rows, gradient checkpointing, embeddings as input and dropout."""

import pytest
import torch
from small_models import (
    SEQUENCE_LENGTHS,
    SIZES,
    SWITCHES,
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
    D2lBertModel,
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
def test_packed_rows_may_have_an_attention_mask_as_well(attention):
    model = make_model(D2lBertForPreTraining, make_config("d2l", attention))
    batch = packed(make_sequences(), PACKED_ROWS)
    with_mask = model(**batch, attention_mask=(batch["sequence_ids"] != 0).long())
    assert_close(with_mask.loss, model(**batch).loss)


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


@every_setting
def test_inputs_embeds_of_the_tokens_equal_their_input_ids(setting):
    model = make_model(D2lBertForPreTraining, make_config(setting))
    batch = padded(make_sequences())
    expected = model(**batch)
    ids = batch.pop("input_ids")
    outputs = model(**batch, inputs_embeds=model.get_input_embeddings().weight[ids])
    assert_close(outputs.prediction_logits, expected.prediction_logits)
    assert_close(outputs.seq_relationship_logits, expected.seq_relationship_logits)


def assert_dropped_out(got, whole, probability=0.5):
    """Each entry is either 0 or scaled up by 1 / (1 - probability), and both occur."""
    dropped = got == 0
    assert 0.2 < dropped.float().mean() < 0.8
    assert_close(got, torch.where(dropped, 0.0, whole / (1 - probability)))


def test_embeddings_get_dropout_before_and_after_normalisation():
    ids = torch.arange(5, 20)[None]
    for setting in SWITCHES:
        model = make_model(D2lBertModel, make_config(setting, hidden_dropout_prob=0.5))
        whole = model(ids, output_hidden_states=True).hidden_states[0]
        in_training = model.train()(ids, output_hidden_states=True).hidden_states[0]
        if setting == "bert":
            assert_dropped_out(in_training, whole)
        else:
            assert torch.equal(in_training, whole)


def test_dropout_acts_on_the_residual_branch_and_not_on_the_sum():
    model = make_model(D2lBertModel, make_config(hidden_dropout_prob=0.5)).train()
    seen = []
    for module in model.modules():
        if hasattr(module, "LayerNorm") and module is not model.embeddings:
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
            module.LayerNorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model(torch.arange(5, 20)[None])
    assert len(seen) == 2 * 2 * SIZES["num_hidden_layers"]
    for (residual, branch), (normalised,) in zip(seen[::2], seen[1::2], strict=True):
        rest = normalised - residual
        assert_dropped_out(torch.where(rest.abs() < 1e-6, 0.0, rest), branch)


@every_attention
@pytest.mark.parametrize("field", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_each_dropout_acts_in_training_only(field, attention):
    model = make_model(D2lBertModel, make_config("d2l", attention, **{field: 0.5}))
    ids = torch.arange(5, 20)[None]
    assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)
    model.train()
    assert not torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)
