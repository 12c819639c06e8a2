"""Initial weights: attention heads that look at neighbours, or the weights and words of a trained model."""

import shutil

import pytest
import small_models
import torch
from conftest import SIZES
from promises.driving import read_json
from safetensors.torch import load_file

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.tokenization.rules import count_words
from d2l_bert.tokenization.wordpiece import extend_wordpiece, train_wordpiece
from d2l_bert.training.initialize import extend_embeddings, look_at_neighbours


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = D2lBertConfig(vocab_size=200, embedding_layer_norm=True, initializer_range=0.05)
    model = D2lBertForPreTraining._from_config(config, attn_implementation="eager").eval()
    look_at_neighbours(model, torch.Generator().manual_seed(1))
    return model


def attention_at(model, offset):
    """
    For each head of the first block, the mean probability of attending `offset` positions away, on random tokens.
    """
    ids = torch.randint(5, 200, (16, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        probabilities = model.bert(ids, output_attentions=True).attentions[0]
    return probabilities.diagonal(offset, dim1=-2, dim2=-1).mean((0, 2)).tolist()


def test_even_heads_look_back_and_odd_heads_look_ahead(model):
    (even_back, odd_back), (even_ahead, odd_ahead) = attention_at(model, -1), attention_at(model, 1)
    assert even_back > 3 / 32 and odd_ahead > 3 / 32  # other initial weights attend to each token with 1 / 32
    assert even_back > 2 * even_ahead and odd_ahead > 2 * odd_back
    for far in (-8, 8):
        assert max(attention_at(model, far)) < 1.5 / 32


def test_the_next_position_is_a_rotation_of_the_position_table(model):
    table = model.bert.embeddings.position_embeddings.weight.detach()
    norms = table.norm(dim=1)
    steps = (table[1:] * table[:-1]).sum(1)
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert table.std() == pytest.approx(2 * 0.05, rel=0.05)


def test_the_initialisation_follows_its_seed_and_changes_no_other_weights(model):
    torch.manual_seed(0)
    plain = D2lBertForPreTraining(model.config)
    again = D2lBertForPreTraining(model.config)
    again.load_state_dict(plain.state_dict())
    look_at_neighbours(again, torch.Generator().manual_seed(1))
    before = dict(plain.named_parameters())
    after = dict(again.named_parameters())
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    first = {f"bert.encoder.layer.0.attention.{part}.weight" for part in ("query", "key", "value", "output")}
    later = {f"bert.encoder.layer.1.attention.{part}.weight" for part in ("value", "output")}
    assert touched == first | later | {"bert.embeddings.position_embeddings.weight"}
    assert all(torch.equal(mine, after[name]) for name, mine in model.named_parameters())


# ---------------------------------------------------------------------------------------------------------------------
# From a trained model


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_added_words_are_the_means_of_their_pieces(tied):
    old = train_wordpiece(["abc abd abe acd ace ade bcd bce bde cde"] * 5, vocab_size=40)
    new = extend_wordpiece(old, count_words(["abcde abcde abcde edcb edcb bec bec"]), 3)
    config = D2lBertConfig(**{**SIZES, "vocab_size": len(old), "tie_word_embeddings": tied})
    model = small_models.make_model(D2lBertForPreTraining, config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extend_embeddings(model, old, new)
    assert model.config.vocab_size == len(new) == len(old) + 3
    after = model.state_dict()
    for name in ("bert.embeddings.word_embeddings.weight", "mlm.decoder.weight", "mlm.decoder.bias"):
        words = new.convert_ids_to_tokens(range(len(old), len(new)))
        pieces = old(words, add_special_tokens=False)["input_ids"]
        assert min(map(len, pieces)) > 1
        means = torch.stack([before[name][parts].mean(0) for parts in pieces])
        torch.testing.assert_close(after.pop(name), torch.cat([before.pop(name), means]))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    shared = model.mlm.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert shared == tied and model.bert.embeddings.word_embeddings.padding_idx == old.pad_token_id


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["d2l-bert", pytest.param("stock BERT", marks=pytest.mark.slow)])
def test_a_run_can_start_from_a_models_weights_architecture_and_tokenizer(books, trained, tmp_path, kind):
    """One step at a learning rate of almost 0 leaves the weights unchanged."""
    source = shutil.copytree(trained, tmp_path / "start")
    out = tmp_path / "out"
    if kind == "stock BERT":
        source = tmp_path / "stock"
        assert main(["convert", str(trained), str(source), "--to", "bert"]) == 0
    words = ["pretrain", f"--init_from={source}", f"--corpus={books}", f"--output_dir={out}", "--max_seq_length=48"]
    assert main([*words, "--max_steps=1", "--learning_rate=1e-12", "--hidden_dropout_prob=0.3"]) == 0
    weights, before = (load_file(folder / "model.safetensors") for folder in (out, trained))
    assert weights.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-9, rtol=0)
    for name in ("tokenizer.json", "vocab.txt"):
        assert (out / name).read_bytes() == (trained / name).read_bytes()
    config, was = (read_json(folder / "config.json") for folder in (out, trained))
    assert {name for name in was if config[name] != was[name]} == {"hidden_dropout_prob"}
    card = (out / "README.md").read_text()
    assert "pretrained further from" in card and "base_model" not in card
    assert f"the weights, architecture and vocabulary of {source.name} |" in card and str(source) not in card
