"""The model equals the book's equations, written out below in plain tensor arithmetic, and keeps its contract."""

import json
import math

import conftest
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
)

from d2l_bert import (
    D2lBertConfig,
    D2lBertForMaskedLM,
    D2lBertForNextSentencePrediction,
    D2lBertForPreTraining,
    D2lBertModel,
)


SWITCHES = {
    "d2l": {"hidden_act": "relu", "embedding_layer_norm": False, "tie_word_embeddings": False},
    "bert": {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True},
}
SIZES = {
    **conftest.SIZES,
    "layer_norm_eps": 0.03,  # large enough for these tests to see it
}
SEQUENCE_LENGTHS = (9, 14, 5, 11, 3, 12, 7, 10)

pytestmark = pytest.mark.usefixtures("one_thread")
every_setting = pytest.mark.parametrize("setting", SWITCHES)
every_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


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
    """Head by head: the output (T, H) and each head's probabilities (N, T, T)."""
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
    """Every layer's hidden states (T, H), h0 first, and every layer's attention probabilities (N, T, T)."""
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
    """
    What the book computes for a padded batch, one real sequence at a time.

    Returns MLM logits at the predicted positions (list of (P, V), unused slots left out), at all positions (list of
    (T, V)), NSP logits (B, 2) and the two losses.
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
# Models and batches


def make_config(setting="d2l", attention="sdpa", **changes):
    return D2lBertConfig(**{**SIZES, **SWITCHES[setting], "attn_implementation": attention, **changes})


def make_model(model_class, config, seed=0):
    """A model whose every parameter is large enough to matter, biases and LayerNorms too."""
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.4, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1)
    return model


def make_sequences(seed=0):
    """[CLS]-like sequences of different lengths, each with its segments, predicted positions, labels and NSP label."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    sequences = []
    for index, length in enumerate(SEQUENCE_LENGTHS):
        positions = torch.randperm(length - 1, generator=generator)[: 1 + index % 4].sort().values + 1
        sequences.append(
            {
                "input_ids": draw(5, SIZES["vocab_size"], length),
                "token_type_ids": (torch.arange(length) >= length // 2).long(),
                "masked_positions": positions,
                "labels": draw(5, SIZES["vocab_size"], len(positions)),
                "next_sentence_label": int(draw(0, 2)),
            }
        )
    return sequences


def pad(rows, filler):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)


def padded(sequences):
    """One sequence a row, padded on the right: what the collator makes."""
    fillers = {"input_ids": 0, "token_type_ids": 0, "masked_positions": 0, "labels": -100}
    batch = {name: pad([sequence[name] for sequence in sequences], filler) for name, filler in fillers.items()}
    batch["attention_mask"] = pad([torch.ones_like(sequence["input_ids"]) for sequence in sequences], 0)
    batch["next_sentence_label"] = torch.tensor([sequence["next_sentence_label"] for sequence in sequences])
    return batch


def packed(sequences, rows):
    """Several sequences a row; `rows` says which, and what is not named stays out."""
    made = []
    for row in rows:
        parts = [sequences[index] for index in row]
        lengths = [len(part["input_ids"]) for part in parts]
        offsets = [sum(lengths[:number]) for number in range(len(parts))]
        joined = ("input_ids", "token_type_ids", "labels")
        fields = {name: torch.cat([part[name] for part in parts]) for name in joined}
        fields["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        numbers = [torch.full((length,), number) for number, length in enumerate(lengths, start=1)]
        fields["sequence_ids"] = torch.cat(numbers)
        shifted = [part["masked_positions"] + offset for part, offset in zip(parts, offsets, strict=True)]
        fields["masked_positions"] = torch.cat(shifted)
        fields["cls_positions"] = torch.tensor(offsets)
        fields["next_sentence_label"] = torch.tensor([part["next_sentence_label"] for part in parts])
        made.append(fields)
    fillers = {"labels": -100, "next_sentence_label": -100}
    return {name: pad([fields[name] for fields in made], fillers.get(name, 0)) for name in made[0]}


def gradients(model, *batches, **counts):
    """Loss and gradients, added up over the batches."""
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        part = model(**batch, **counts).loss
        part.backward()
        loss += part.item()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_close(got, expected):
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-5, atol=1e-5)


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
def test_hidden_states_and_attentions_on_request_are_the_books(setting):
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


def test_nothing_is_recorded_unless_asked_for():
    outputs = make_model(D2lBertForPreTraining, make_config())(torch.tensor([[5, 6, 7]]))
    assert outputs.hidden_states is None and outputs.attentions is None and outputs.loss is None


def test_attention_rows_sum_to_one_and_give_padding_nothing():
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
    unmasked = model(torch.cat((ids, junk), dim=1))  # the same without a mask: the test can see a difference
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
def test_the_head_at_masked_positions_is_the_full_head_gathered(model_class):
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
def test_labels_at_masked_positions_and_labels_everywhere_give_one_loss_and_gradient(setting):
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


def test_the_loss_is_of_those_labels_that_are_given():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = padded(make_sequences())
    both = model(**batch)
    only_mlm = model(**{**batch, "next_sentence_label": None})
    only_nsp = model(**{**batch, "labels": None})
    assert only_mlm.nsp_loss is None and only_nsp.mlm_loss is None
    assert_close(only_mlm.loss, both.mlm_loss)
    assert_close(only_nsp.loss, both.nsp_loss)


@every_setting
def test_given_the_steps_counts_no_split_into_micro_batches_changes_loss_or_gradient(setting):
    model = make_model(D2lBertForPreTraining, make_config(setting))
    sequences = make_sequences()
    whole = padded(sequences)
    expected = gradients(model, whole)  # the mean over the whole step
    counts = {
        "num_items_in_batch": int((whole["labels"] != -100).sum()),
        "num_pairs_in_batch": len(sequences),
    }
    for size in (8, 4, 2):
        micro_batches = [padded(sequences[start : start + size]) for start in range(0, 8, size)]
        assert_same_gradients(gradients(model, *micro_batches, **counts), expected)


def test_single_headed_models_divide_by_num_items_in_batch_too():
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


# ---------------------------------------------------------------------------------------------------------------------
# Packed rows, checkpointing, embeddings as input, dropout


PACKED_ROWS = [[1, 4, 6], [0, 3], [7, 2, 5]]  # of 24, 20 and 27 tokens: padding, and an unused slot for [CLS]


@every_setting
@every_attention
def test_packed_rows_have_the_losses_and_gradients_of_their_sequences_alone(setting, attention):
    model = make_model(D2lBertForPreTraining, make_config(setting, attention))
    sequences = make_sequences()
    expected = gradients(model, padded(sequences))
    assert_same_gradients(gradients(model, packed(sequences, PACKED_ROWS)), expected)
    leaking = packed(sequences, PACKED_ROWS)
    leaking["sequence_ids"] = (leaking["sequence_ids"] != 0).long()  # all sequences see each other
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
def test_packed_rows_may_bring_an_attention_mask_as_well(attention):
    model = make_model(D2lBertForPreTraining, make_config("d2l", attention))
    batch = packed(make_sequences(), PACKED_ROWS)
    with_mask = model(**batch, attention_mask=(batch["sequence_ids"] != 0).long())
    assert_close(with_mask.loss, model(**batch).loss)


@every_attention
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")  # 5.17 knows no other name
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
    """Each entry is zero or scaled up, some of either kind."""
    dropped = got == 0
    assert 0.2 < dropped.float().mean() < 0.8
    assert_close(got, torch.where(dropped, 0.0, whole / (1 - probability)))


def test_embeddings_are_dropped_out_where_they_are_normalised_and_after_it():
    ids = torch.arange(5, 20)[None]
    for setting in SWITCHES:
        model = make_model(D2lBertModel, make_config(setting, hidden_dropout_prob=0.5))
        whole = model(ids, output_hidden_states=True).hidden_states[0]
        in_training = model.train()(ids, output_hidden_states=True).hidden_states[0]
        if setting == "bert":
            assert_dropped_out(in_training, whole)
        else:
            assert torch.equal(in_training, whole)


def test_dropout_acts_on_the_branch_and_not_on_the_residual():
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
def test_each_dropout_acts_in_training_and_only_there(field, attention):
    model = make_model(D2lBertModel, make_config("d2l", attention, **{field: 0.5}))
    ids = torch.arange(5, 20)[None]
    assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)
    model.train()
    assert not torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights, files, Auto classes


def seeded_weights(setting, seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    return D2lBertForPreTraining(make_config(setting, **sizes, initializer_range=0.05)).state_dict()


@every_setting
def test_initial_weights_follow_from_the_seed(setting):
    first, again, other = (seeded_weights(setting, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


@every_setting
def test_initial_weights_have_the_standard_deviation_initializer_range(setting):
    for name, tensor in seeded_weights(setting, 1).items():
        if name.endswith("LayerNorm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif tensor.ndim == 1:
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        else:
            if name.endswith("word_embeddings.weight") or (setting == "bert" and name == "mlm.decoder.weight"):
                assert tensor[0].abs().max() == 0, "the padding token's embedding starts at zero"
                tensor = tensor[1:]
            # Of n normal numbers, the standard deviation has a standard error of sigma / sqrt(2n), the mean one of
            # sigma / sqrt(n).
            n = tensor.numel()
            assert abs(tensor.std().item() - 0.05) < 4 * 0.05 / math.sqrt(2 * n), name
            assert abs(tensor.mean().item()) < 4 * 0.05 / math.sqrt(n), name


@every_setting
def test_a_saved_pretraining_model_loads_whole_into_every_head(setting, tmp_path):
    config = make_config(setting)
    model = make_model(D2lBertForPreTraining, config)
    model.save_pretrained(tmp_path)
    assert ("mlm.decoder.weight" in load_file(tmp_path / "model.safetensors")) is not config.tie_word_embeddings
    batch = padded(make_sequences())
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    expected = model(**inputs)
    for model_class, names in (
        (D2lBertForPreTraining, {"prediction_logits": "prediction_logits"}),
        (D2lBertForMaskedLM, {"logits": "prediction_logits"}),
        (D2lBertForNextSentencePrediction, {"logits": "seq_relationship_logits"}),
    ):
        loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), (model_class, info)
        assert not loaded.training
        outputs = loaded(**inputs)
        for name, wanted in names.items():
            assert torch.equal(outputs[name], expected[wanted]), model_class
        if hasattr(loaded, "mlm"):
            shared = loaded.mlm.decoder.weight is loaded.get_input_embeddings().weight
            assert shared is config.tie_word_embeddings


def test_what_a_checkpoint_lacks_is_reported_as_missing(tmp_path):
    make_model(D2lBertForMaskedLM, make_config()).save_pretrained(tmp_path)
    _, info = D2lBertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    layers = ("bert.pooler.dense", "nsp.output")
    assert set(info["missing_keys"]) == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}


def test_auto_classes_resolve_to_ours(tmp_path):
    make_model(D2lBertForPreTraining, make_config()).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is D2lBertConfig
    assert type(AutoConfig.for_model("d2l-bert")) is D2lBertConfig
    for auto_class, ours in (
        (AutoModel, D2lBertModel),
        (AutoModelForPreTraining, D2lBertForPreTraining),
        (AutoModelForMaskedLM, D2lBertForMaskedLM),
        (AutoModelForNextSentencePrediction, D2lBertForNextSentencePrediction),
    ):
        assert type(auto_class.from_pretrained(tmp_path)) is ours


# ---------------------------------------------------------------------------------------------------------------------
# The configuration, and wrong uses


def test_the_default_configuration_is_the_books_small_bert():
    config = D2lBertConfig()
    sizes = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    assert [getattr(config, name) for name in sizes] == [20256, 2, 128, 2, 256]
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.2, 0.2)
    assert (config.max_position_embeddings, config.type_vocab_size) == (512, 2)
    assert (config.hidden_act, config.embedding_layer_norm, config.tie_word_embeddings) == ("relu", False, False)
    assert (config.layer_norm_eps, config.initializer_range, config.pad_token_id) == (1e-5, 0.02, 0)


@every_setting
def test_a_configuration_survives_its_file(setting, tmp_path):
    config = make_config(setting, initializer_range=0.3, type_vocab_size=3)
    config.save_pretrained(tmp_path)
    loaded = D2lBertConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert loaded.initializer_range == 0.3 and loaded.type_vocab_size == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -8),
        ("hidden_size", True),
        ("hidden_size", 12.5),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("intermediate_size", "64"),
        ("max_position_embeddings", 0),
        ("type_vocab_size", 0),
        ("hidden_dropout_prob", 1.0),
        ("hidden_dropout_prob", -0.1),
        ("attention_probs_dropout_prob", 1.5),
        ("initializer_range", 0.0),
        ("initializer_range", 101),
        ("layer_norm_eps", -1e-5),
        ("layer_norm_eps", 1e-45),
        ("embedding_layer_norm", "yes"),
        ("tie_word_embeddings", 1),
        ("pad_token_id", 20256),
        ("pad_token_id", -1),
        ("hidden_act", "gelu_new"),
        ("hidden_act", "swish"),
        ("classifier_dropout", 1.2),
        ("num_labels", 0),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        D2lBertConfig(**{field: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps"])
def test_a_number_that_is_not_finite_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be a finite number above 0, got {value}$"):
        D2lBertConfig(**{field: value})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"])
def test_a_dropout_that_is_not_finite_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be a probability of at least 0 and below 1, got {value}$"):
        D2lBertConfig(**{field: value})


@pytest.mark.parametrize("value", [1e300, 10**400, 1e-300])
@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps"])
def test_what_float32_cannot_compute_with_is_refused(field, value):
    with pytest.raises(ValueError) as caught:
        D2lBertConfig(**{field: value})
    assert str(caught.value) == f"{field} must be between 1.2e-38 and 100, got {value}"


@every_setting
@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps"])
@pytest.mark.parametrize("value", [2.0**-126, 100])
def test_a_model_with_the_smallest_and_the_largest_numbers_has_finite_gradients(field, value, setting):
    torch.manual_seed(0)
    model = D2lBertForPreTraining(make_config(setting, **{field: value}))
    loss, found = gradients(model, padded(make_sequences()))
    assert math.isfinite(loss) and all(gradient.isfinite().all() for gradient in found.values())


def test_an_unknown_problem_type_is_refused():
    with pytest.raises((ValueError, StrictDataclassError), match="problem_type"):  # some versions check it themselves
        D2lBertConfig(problem_type="ranking")


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"hidden_size \(128\) must be a multiple of num_attention_heads \(3\)"):
        D2lBertConfig(num_attention_heads=3)


def test_a_misspelt_field_is_refused_with_a_suggestion():
    for wrong, right in (("hiden_size", "hidden_size"), ("num_layers_hidden", None), ("dropout_prob", None)):
        with pytest.raises(ValueError, match=f"'{wrong}'") as caught:
            D2lBertConfig(**{wrong: 64})
        if right:
            assert f"did you mean '{right}'?" in str(caught.value)


def test_common_transformers_arguments_are_taken():
    config = D2lBertConfig(num_labels=3, output_hidden_states=True, architectures=["D2lBertForMaskedLM"])
    assert config.num_labels == 3 and config.output_hidden_states


def test_a_saved_configuration_may_carry_unknown_entries(tmp_path):
    make_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "written_by_a_later_version": 1}))
    assert D2lBertConfig.from_pretrained(tmp_path).hidden_size == SIZES["hidden_size"]
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == SIZES["hidden_size"]


def test_exactly_one_of_input_ids_and_inputs_embeds_is_wanted():
    model = make_model(D2lBertForPreTraining, make_config())
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(torch.tensor([[5, 6]]), inputs_embeds=torch.zeros(1, 2, SIZES["hidden_size"]))


def test_a_sequence_longer_than_the_positions_is_refused_and_the_longest_is_taken():
    model = make_model(D2lBertForPreTraining, make_config())
    model(torch.full((1, 32), 7))
    with pytest.raises(ValueError, match=r"33 tokens is longer than max_position_embeddings \(32\)"):
        model(torch.full((1, 33), 7))


def test_labels_that_do_not_fit_the_logits_are_refused():
    model = make_model(D2lBertForPreTraining, make_config())
    batch = padded(make_sequences())
    for wrong in ({"labels": batch["input_ids"]}, {"masked_positions": None}):
        with pytest.raises(ValueError, match="labels of shape"):
            model(**{**batch, **wrong})
