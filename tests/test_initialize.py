"""The start that looks at neighbours does, and is a start like any other: seeded, and nothing but weights."""

import pytest
import torch

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.training.initialize import look_at_neighbours


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = D2lBertConfig(vocab_size=200, embedding_layer_norm=True, initializer_range=0.05)
    model = D2lBertForPreTraining._from_config(config, attn_implementation="eager").eval()
    look_at_neighbours(model, torch.Generator().manual_seed(1))
    return model


def attention_at(model, offset):
    """Mean probability with which each head of the first block attends `offset` positions away, on random tokens."""
    ids = torch.randint(5, 200, (16, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        probabilities = model.bert(ids, output_attentions=True).attentions[0]
    return probabilities.diagonal(offset, dim1=-2, dim2=-1).mean((0, 2)).tolist()


def test_even_heads_look_back_and_odd_heads_ahead(model):
    (even_back, odd_back), (even_ahead, odd_ahead) = attention_at(model, -1), attention_at(model, 1)
    assert even_back > 3 / 32 and odd_ahead > 3 / 32  # a fresh model gives every token 1 / 32
    assert even_back > 2 * even_ahead and odd_ahead > 2 * odd_back
    for far in (-8, 8):
        assert max(attention_at(model, far)) < 1.5 / 32


def test_one_position_further_is_a_rotation_of_the_table(model):
    table = model.bert.embeddings.position_embeddings.weight.detach()
    norms, steps = table.norm(dim=1), (table[1:] * table[:-1]).sum(1)
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert table.std() == pytest.approx(2 * 0.05, rel=0.05)


def test_it_follows_its_seed_and_leaves_the_rest_alone(model):
    torch.manual_seed(0)
    plain = D2lBertForPreTraining(model.config)
    again = D2lBertForPreTraining(model.config)
    again.load_state_dict(plain.state_dict())
    look_at_neighbours(again, torch.Generator().manual_seed(1))
    touched = {
        name
        for (name, before), after in zip(plain.named_parameters(), again.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    first = {f"bert.encoder.layer.0.attention.{part}.weight" for part in ("query", "key", "value", "output")}
    later = {f"bert.encoder.layer.1.attention.{part}.weight" for part in ("value", "output")}
    assert touched == first | later | {"bert.embeddings.position_embeddings.weight"}
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_an_odd_width_has_no_sines_and_cosines_in_pairs():
    config = D2lBertConfig(vocab_size=20, hidden_size=9, num_attention_heads=1)
    with pytest.raises(ValueError, match="even hidden_size"):
        look_at_neighbours(D2lBertForPreTraining(config))
