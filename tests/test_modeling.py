"""The model equals the book's equations, which are written out below in plain tensor arithmetic."""

import math

import pytest
import torch
from small_models import (
    assert_close,
    every_attention,
    every_setting,
    make_config,
    make_model,
    make_sequences,
    padded,
)

from d2l_bert import (
    D2lBertForPreTraining,
)


pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------------------------
# The book's equations, for one sequence without padding


def book_linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def book_layer_norm(x, weights, name, config):
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    normalised = centred / (variance + config.layer_norm_eps).sqrt()
    return normalised * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]


def book_activation(x, config):
    if config.hidden_act == "relu":
        return x * (x > 0)
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def book_attention(h, weights, name, config):
    """Head by head. Returns the output (T, H) and each head's probabilities (N, T, T)."""
    query, key, value = (book_linear(h, weights, f"{name}.{part}") for part in ("query", "key", "value"))
    width = config.hidden_size // config.num_attention_heads
    outputs, probabilities = [], []
    for head in range(config.num_attention_heads):
        mine = slice(head * width, (head + 1) * width)
        exponentials = torch.exp(query[:, mine] @ key[:, mine].T / math.sqrt(width))
        probabilities.append(exponentials / exponentials.sum(dim=1, keepdim=True))
        outputs.append(probabilities[-1] @ value[:, mine])
    return book_linear(torch.cat(outputs, dim=1), weights, f"{name}.output"), torch.stack(probabilities)


def book_encoder(weights, config, tokens, segments):
    """The hidden states of every layer (T, H), the embeddings first, and the attention probabilities (N, T, T)."""
    table = "bert.embeddings"
    h = weights[f"{table}.word_embeddings.weight"][tokens]
    h = h + weights[f"{table}.token_type_embeddings.weight"][segments]
    h = h + weights[f"{table}.position_embeddings.weight"][torch.arange(len(tokens))]
    if config.embedding_layer_norm:
        h = book_layer_norm(h, weights, table, config)
    states, attentions = [h], []
    for index in range(config.num_hidden_layers):
        block = f"bert.encoder.layer.{index}"
        a, probabilities = book_attention(h, weights, f"{block}.attention", config)
        h = book_layer_norm(h + a, weights, f"{block}.addnorm1", config)
        inner = book_activation(book_linear(h, weights, f"{block}.ffn.dense1"), config)
        outer = book_linear(inner, weights, f"{block}.ffn.dense2")
        h = book_layer_norm(h + outer, weights, f"{block}.addnorm2", config)
        states.append(h)
        attentions.append(probabilities)
    return states, attentions


def book_mlm_logits(weights, config, h):
    hidden = book_layer_norm(book_activation(book_linear(h, weights, "mlm.dense"), config), weights, "mlm", config)
    matrix = "bert.embeddings.word_embeddings.weight" if config.tie_word_embeddings else "mlm.decoder.weight"
    return hidden @ weights[matrix].T + weights["mlm.decoder.bias"]


def book_nsp_logits(weights, h):
    return book_linear(torch.tanh(book_linear(h[0], weights, "bert.pooler.dense")), weights, "nsp.output")


def book_cross_entropy(logits, label):
    return -torch.log(torch.exp(logits[label]) / torch.exp(logits).sum())


def book_bert(weights, config, batch):
    """The book's outputs for a padded batch, computed one real sequence at a time.

    Returns the MLM logits at the predicted positions (list of (P, V), unused slots left out), those at all positions
    (list of (T, V)), the NSP logits (B, 2) and the two losses.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    predicted, everywhere, nsp_logits, mlm_terms, nsp_terms = [], [], [], [], []
    for row, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
        tokens, segments = batch["input_ids"][row, :length], batch["token_type_ids"][row, :length]
        h = book_encoder(weights, config, tokens, segments)[0][-1]
        everywhere.append(book_mlm_logits(weights, config, h))
        used = batch["labels"][row] != -100
        predicted.append(everywhere[-1][batch["masked_positions"][row, used]])
        for logits, label in zip(predicted[-1], batch["labels"][row, used], strict=True):
            mlm_terms.append(book_cross_entropy(logits, label))
        nsp_logits.append(book_nsp_logits(weights, h))
        nsp_terms.append(book_cross_entropy(nsp_logits[-1], batch["next_sentence_label"][row]))
    mlm_loss, nsp_loss = sum(mlm_terms) / len(mlm_terms), sum(nsp_terms) / len(nsp_terms)
    return predicted, everywhere, torch.stack(nsp_logits), mlm_loss, nsp_loss


# ---------------------------------------------------------------------------------------------------------------------
# The equations


@every_setting
@every_attention
def test_pretraining_model_equals_the_books_equations(setting, attention):
    config = make_config(setting, attention)
    model = make_model(D2lBertForPreTraining, config)
    assert model.config._attn_implementation == attention
    batch = padded(make_sequences())
    outputs = model(**batch)
    predicted, _, nsp_logits, mlm_loss, nsp_loss = book_bert(model.state_dict(), config, batch)
    for row, logits in enumerate(predicted):
        assert_close(outputs.prediction_logits[row, batch["labels"][row] != -100], logits)
    assert outputs.prediction_logits.shape == (*batch["labels"].shape, config.vocab_size)
    assert_close(outputs.seq_relationship_logits, nsp_logits)
    assert_close(outputs.mlm_loss, mlm_loss)
    assert_close(outputs.nsp_loss, nsp_loss)
    assert_close(outputs.loss, mlm_loss + nsp_loss)


@every_setting
def test_hidden_states_and_attentions_equal_the_books_equations(setting):
    config = make_config(setting, "eager", num_hidden_layers=3)
    model = make_model(D2lBertForPreTraining, config)
    sequence = make_sequences()[1]
    tokens, segments = sequence["input_ids"], sequence["token_type_ids"]
    asked = {"output_hidden_states": True, "output_attentions": True}
    outputs = model(tokens[None], token_type_ids=segments[None], **asked)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    states, attentions = book_encoder(weights, config, tokens, segments)
    assert len(outputs.hidden_states) == 4 and len(outputs.attentions) == 3
    for got, expected in zip(outputs.hidden_states, states, strict=True):
        assert_close(got, expected[None])
    for got, expected in zip(outputs.attentions, attentions, strict=True):
        assert_close(got, expected[None])
