"""The model equals the book's equations, which are written out below in plain tensor arithmetic."""

import math

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
    padded,
)

from d2l_bert import (
    D2lBertForMaskedLM,
    D2lBertForNextSentencePrediction,
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
@every_attention
def test_masked_lm_equals_the_books_equations(setting, attention):
    config = make_config(setting, attention)
    weights = make_model(D2lBertForPreTraining, config).state_dict()
    model = D2lBertForMaskedLM(config).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    batch = padded(make_sequences())
    _, everywhere, _, mlm_loss, _ = book_bert(weights, config, batch)
    names = ("input_ids", "token_type_ids", "attention_mask")
    logits = model(**{name: batch[name] for name in names}).logits
    assert logits.shape == (*batch["input_ids"].shape, config.vocab_size)
    for row, expected in enumerate(everywhere):
        assert_close(logits[row, : len(expected)], expected)
    batch.pop("next_sentence_label")
    assert_close(model(**batch).loss, mlm_loss)


@every_setting
@every_attention
def test_next_sentence_prediction_equals_the_books_equations(setting, attention):
    config = make_config(setting, attention)
    weights = make_model(D2lBertForPreTraining, config).state_dict()
    model = D2lBertForNextSentencePrediction(config).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    batch = padded(make_sequences())
    _, _, nsp_logits, _, nsp_loss = book_bert(weights, config, batch)
    outputs = model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        token_type_ids=batch["token_type_ids"],
        labels=batch["next_sentence_label"],
    )
    assert_close(outputs.logits, nsp_logits)
    assert_close(outputs.loss, nsp_loss)


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


def test_hidden_states_and_attentions_are_not_returned_unless_requested():
    outputs = make_model(D2lBertForPreTraining, make_config())(torch.tensor([[5, 6, 7]]))
    assert outputs.hidden_states is None and outputs.attentions is None and outputs.loss is None


def test_attention_probabilities_sum_to_one_and_are_zero_at_padding():
    config = make_config("bert", "eager")
    batch = padded(make_sequences())
    attentions = make_model(D2lBertForPreTraining, config)(**batch, output_attentions=True).attentions
    rows, width = batch["input_ids"].shape
    assert len(attentions) == config.num_hidden_layers
    for probabilities in attentions:
        assert probabilities.shape == (rows, config.num_attention_heads, width, width)
        assert_close(probabilities.sum(dim=-1), torch.ones(rows, config.num_attention_heads, width))
        on_padding = probabilities * (batch["attention_mask"] == 0)[:, None, None, :]
        assert on_padding.max() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Padding, predicted positions, losses


@every_setting
@every_attention
def test_padding_on_the_right_changes_no_real_tokens_output(setting, attention):
    model = make_model(D2lBertForPreTraining, make_config(setting, attention))
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    alone = model(ids)
    junk = torch.tensor([[30, 0, 31]])
    mask = torch.tensor([[1] * 5 + [0] * 3])
    beside_padding = model(torch.cat((ids, junk), dim=1), attention_mask=mask)
    assert_close(beside_padding.prediction_logits[:, :5], alone.prediction_logits)
    assert_close(beside_padding.seq_relationship_logits, alone.seq_relationship_logits)
    unmasked = model(torch.cat((ids, junk), dim=1))  # without the mask the outputs differ, so the test can fail
    assert (unmasked.prediction_logits[:, :5] - alone.prediction_logits).abs().max() > 0.1


@every_setting
@every_attention
def test_padding_on_the_left_with_position_ids_changes_no_real_tokens_output(setting, attention):
    model = make_model(D2lBertForPreTraining, make_config(setting, attention))
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    alone = model(ids)
    shifted = {
        "input_ids": torch.tensor([[30, 0, 31, 7, 8, 9, 10, 11]]),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 5]),
        "cls_positions": torch.tensor([[3]]),
    }
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
    beside_padding = model(**shifted, position_ids=positions)
    assert_close(beside_padding.prediction_logits[:, 3:], alone.prediction_logits)
    assert_close(beside_padding.seq_relationship_logits[:, 0], alone.seq_relationship_logits)
    assert (model(**shifted).prediction_logits[:, 3:] - alone.prediction_logits).abs().max() > 0.1


@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_the_mlm_head_at_masked_positions_equals_the_full_head_there(model_class):
    model = make_model(model_class, make_config("bert"))
    batch = padded(make_sequences())
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    logits_name = "prediction_logits" if model_class is D2lBertForPreTraining else "logits"
    everywhere = model(**inputs)[logits_name]
    at_positions = model(**inputs, masked_positions=batch["masked_positions"])[logits_name]
    for row, positions in enumerate(batch["masked_positions"].tolist()):
        for slot, position in enumerate(positions):
            assert_close(at_positions[row, slot], everywhere[row, position])


@every_setting
def test_labels_at_masked_positions_and_labels_of_every_position_give_one_loss_and_gradient(setting):
    model = make_model(D2lBertForPreTraining, make_config(setting))
    by_position = padded(make_sequences())
    everywhere = {name: value for name, value in by_position.items() if name != "masked_positions"}
    everywhere["labels"] = torch.full_like(by_position["input_ids"], -100)
    for row in range(len(SEQUENCE_LENGTHS)):
        for position, label in zip(by_position["masked_positions"][row], by_position["labels"][row], strict=True):
            if label != -100:
                everywhere["labels"][row, position] = label
    assert_same_gradients(gradients(model, by_position), gradients(model, everywhere))


def test_slots_without_a_label_do_not_count():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = padded(make_sequences())
    expected = gradients(model, batch)
    rows = len(SEQUENCE_LENGTHS)
    more = dict(batch)
    more["labels"] = torch.cat((batch["labels"], torch.full((rows, 3), -100)), dim=1)
    more["masked_positions"] = torch.cat((batch["masked_positions"], torch.full((rows, 3), 2)), dim=1)
    assert_same_gradients(gradients(model, more), expected)


def test_pairs_without_a_label_do_not_count():
    model = make_model(D2lBertForPreTraining, make_config())
    sequences = make_sequences()
    batch = padded(sequences)
    batch["next_sentence_label"][4:] = -100
    assert_close(model(**batch).nsp_loss, model(**padded(sequences[:4])).nsp_loss)


def test_the_loss_is_that_of_the_labels_given():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = padded(make_sequences())
    both = model(**batch)
    only_mlm = model(**{**batch, "next_sentence_label": None})
    only_nsp = model(**{**batch, "labels": None})
    assert only_mlm.nsp_loss is None and only_nsp.mlm_loss is None
    assert_close(only_mlm.loss, both.mlm_loss)
    assert_close(only_nsp.loss, both.nsp_loss)


@every_setting
def test_with_the_steps_counts_every_split_into_micro_batches_gives_one_loss_and_gradient(setting):
    model = make_model(D2lBertForPreTraining, make_config(setting))
    sequences = make_sequences()
    whole = padded(sequences)
    expected = gradients(model, whole)  # the mean over all labels of the step
    counts = {
        "num_items_in_batch": int((whole["labels"] != -100).sum()),
        "num_pairs_in_batch": len(sequences),
    }
    for size in (8, 4, 2):
        micro_batches = [padded(sequences[start : start + size]) for start in range(0, 8, size)]
        assert_same_gradients(gradients(model, *micro_batches, **counts), expected)


def test_models_with_one_head_divide_by_num_items_in_batch_too():
    sequences = make_sequences()
    halves = [padded(sequences[:3]), padded(sequences[3:])]
    for model_class in (D2lBertForMaskedLM, D2lBertForNextSentencePrediction):
        model = make_model(model_class, make_config("bert"))
        names = ["input_ids", "token_type_ids", "attention_mask", "labels"]
        if model_class is D2lBertForMaskedLM:
            names.append("masked_positions")

        def arguments(batch, names=names, model_class=model_class):
            if model_class is D2lBertForNextSentencePrediction:
                batch = {**batch, "labels": batch["next_sentence_label"]}
            return {name: batch[name] for name in names}

        whole = arguments(padded(sequences))
        count = torch.tensor(int((whole["labels"] != -100).sum()))
        split = gradients(model, *map(arguments, halves), num_items_in_batch=count)
        assert_same_gradients(split, gradients(model, whole))


def test_a_batch_with_nothing_to_predict_adds_nothing_to_a_step():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = padded(make_sequences())
    batch["labels"][:], batch["next_sentence_label"][:] = -100, -100
    loss, grads = gradients(model, batch, num_items_in_batch=7, num_pairs_in_batch=3)
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in grads.values())
