"""Initial weights: attention heads that look at neighbours, or the weights and words of a trained model."""

import json

import pytest
import torch
from conftest import SIZES
from runs import run
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
    norms, steps = table.norm(dim=1), (table[1:] * table[:-1]).sum(1)
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert table.std() == pytest.approx(2 * 0.05, rel=0.05)


def test_the_initialisation_follows_its_seed_and_changes_no_other_weights(model):
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


# ---------------------------------------------------------------------------------------------------------------------
# From a trained model


@pytest.fixture(scope="module")
def tokenizers():
    """A tokenizer with a vocabulary of 40 entries, and one with three words of a text added."""
    old = train_wordpiece(["abc abd abe acd ace ade bcd bce bde cde"] * 5, vocab_size=40)
    return old, extend_wordpiece(old, count_words(["abcde abcde abcde edcb edcb bec bec"]), 3)


def make_model(tokenizer, model_class=D2lBertForPreTraining, **changes):
    torch.manual_seed(0)
    model = model_class(D2lBertConfig(**{**SIZES, "vocab_size": len(tokenizer), **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # biases, too, must differ from each other
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_added_words_are_the_means_of_their_pieces(tokenizers, tied):
    old, new = tokenizers
    model, before = (make_model(old, tie_word_embeddings=tied) for _ in range(2))
    extend_embeddings(model, old, new)
    assert model.config.vocab_size == len(new) == len(old) + 3
    tables = ("bert.embeddings.word_embeddings.weight", "mlm.decoder.weight", "mlm.decoder.bias")
    after = model.state_dict()
    for name, was in before.state_dict().items():
        now = after.pop(name)
        if name not in tables:
            assert torch.equal(now, was), name
            continue
        assert torch.equal(now[: len(old)], was), name
        for row in range(len(old), len(new)):
            pieces = old(new.convert_ids_to_tokens(row), add_special_tokens=False)["input_ids"]
            assert len(pieces) > 1
            torch.testing.assert_close(now[row], sum(was[piece] for piece in pieces) / len(pieces))
    assert not after
    shared = model.mlm.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert shared == tied and model.bert.embeddings.word_embeddings.padding_idx == old.pad_token_id


# ---------------------------------------------------------------------------------------------------------------------
# A run that starts from a model


SHORT = ["--max_seq_length=48", "--global_batch_size=8", "--dataloader_num_workers=0", "--mixed_precision=no"]


@pytest.fixture(scope="module")
def spelling(books, tmp_path_factory):
    """The folder of a model with a vocabulary of 60 entries, which splits most words."""
    folder = tmp_path_factory.mktemp("spelling") / "model"
    run(books, folder, "--max_steps=2", "--vocab_size=60", "--mixed_precision=no")
    return folder


def run_from(model, corpus, folder, *options):
    """Train from the weights of `model`; returns the new weights."""
    assert (
        main(["pretrain", f"--init_from={model}", f"--corpus={corpus}", f"--output_dir={folder}", *SHORT, *options])
        == 0
    )
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_a_run_starts_from_stock_bert_as_from_the_model_that_it_becomes(books, trained, tmp_path):
    assert main(["convert", str(trained), str(tmp_path / "stock"), "--to", "bert"]) == 0
    options = [
        "--max_steps=1",
        "--learning_rate=1e-12",
        "--hidden_dropout_prob=0.0",
        "--attention_probs_dropout_prob=0.0",
    ]
    weights = run_from(tmp_path / "stock", books, tmp_path / "out", *options)
    before = load_file(trained / "model.safetensors")
    assert weights.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-9, rtol=0)


@pytest.mark.slow
def test_a_run_can_start_from_a_models_weights_architecture_and_tokenizer(books, spelling, tmp_path):
    """One step at a learning rate of almost 0 leaves the weights unchanged."""
    out = tmp_path / "out"
    weights = run_from(spelling, books, out, "--max_steps=1", "--learning_rate=1e-12", "--hidden_dropout_prob=0.3")
    before = load_file(spelling / "model.safetensors")
    assert weights.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-9, rtol=0)
    for name in ("tokenizer.json", "vocab.txt"):
        assert (out / name).read_bytes() == (spelling / name).read_bytes()
    config, was = (json.loads((folder / "config.json").read_text()) for folder in (out, spelling))
    assert {name for name in was if config[name] != was[name]} == {"hidden_dropout_prob"}
    card = (out / "README.md").read_text()
    assert "pretrained further on books" in card and "base_model" not in card
    assert f"the weights, architecture and vocabulary of {spelling.name} |" in card and str(spelling) not in card
