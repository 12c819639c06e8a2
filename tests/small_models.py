"""Small models of every setting and head, batches for them, padded or packed, and their losses and gradients."""

import conftest
import pytest
import torch

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.modeling import modeling_d2l_bert as modeling


SWITCHES = {
    "d2l": {"hidden_act": "relu", "embedding_layer_norm": False, "tie_word_embeddings": False},
    "bert": {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True},
}
SIZES = {
    **conftest.SIZES,
    "layer_norm_eps": 0.03,  # large enough to make a difference in these tests
}
SEQUENCE_LENGTHS = (9, 14, 5, 11, 3, 12, 7, 10)
ROWS, LENGTH = len(SEQUENCE_LENGTHS), max(SEQUENCE_LENGTHS)  # of all sequences, padded

every_setting = pytest.mark.parametrize("setting", SWITCHES)
every_head = pytest.mark.parametrize("head", conftest.HEADS)
every_device = pytest.mark.parametrize("device", ["cpu", "gpu"])


def compute_as_on(device, monkeypatch):
    """From now on the model takes the ways of a device, here on a CPU."""
    monkeypatch.setattr(modeling, "is_on_cpu", lambda tensor: device == "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Models


def make_config(setting="d2l", attention="sdpa", **changes):
    return D2lBertConfig(**{**SIZES, **SWITCHES[setting], "attn_implementation": attention, **changes})


def make_model(model_class, config, seed=0):
    """A model whose parameters all affect the outputs noticeably, biases and LayerNorms included."""
    return spread(model_class(config).eval(), seed)


def spread(model, seed=0):
    """Give all parameters random values that matter: fresh ones make nearly equal scores. Returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.3, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1)
    return model


def in_training(model_class=D2lBertForPreTraining, dropout=0.0, **changes):
    """Such a model of the book's setting with eager attention, to train."""
    torch.manual_seed(0)  # of the masks of dropout, and of what a test draws
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return make_model(model_class, make_config(attention="eager", **dropouts, **changes)).train()


def of_head(head, **changes):
    """Such a model of a head, to predict."""
    return in_training(getattr(d2l_bert, f"D2lBert{head}"), **changes).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def make_sequences(seed=0):
    """Sequences of different lengths, each with segments, predicted positions, labels and an NSP label."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    sequences = []
    for index, length in enumerate(SEQUENCE_LENGTHS):
        drawn = torch.randperm(length - 1, generator=generator)[: 1 + index % 4]
        positions = drawn.sort().values + 1
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
    """A batch with one sequence per row, padded on the right, as in training."""
    fillers = {"input_ids": 0, "token_type_ids": 0, "masked_positions": 0, "labels": -100}
    batch = {name: pad([sequence[name] for sequence in sequences], filler) for name, filler in fillers.items()}
    batch["attention_mask"] = pad([torch.ones_like(sequence["input_ids"]) for sequence in sequences], 0)
    batch["next_sentence_label"] = torch.tensor([sequence["next_sentence_label"] for sequence in sequences])
    return batch


def packed(sequences, rows):
    """A batch with several sequences per row. `rows` lists the sequences of each row; other sequences are left out."""
    made = []
    for row in rows:
        parts = [sequences[index] for index in row]
        lengths = [len(part["input_ids"]) for part in parts]
        offsets = [sum(lengths[:number]) for number in range(len(parts))]
        joined = ("input_ids", "token_type_ids", "labels")
        fields = {}
        for name in joined:
            fields[name] = torch.cat([part[name] for part in parts])
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


def make_batch(model, everywhere=False):
    """All sequences, padded, with the labels of a model; `everywhere`: a label of nearly every position."""
    batch = padded(make_sequences())
    if everywhere:
        del batch["masked_positions"]
        generator = torch.Generator().manual_seed(1)
        batch["labels"] = torch.randint(model.config.vocab_size, (ROWS, LENGTH), generator=generator)
        batch["labels"][torch.rand(ROWS, LENGTH, generator=generator) < 0.4] = -100
    if not isinstance(model, D2lBertForPreTraining):
        del batch["next_sentence_label"]
    return batch


def make_rows(head, count=8, num_labels=3):
    """Examples of 12 tokens, of which 4 to 11 are real; the number of labels differs from example to example."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        row = {
            "input_ids": torch.randint(5, 40, (12,), generator=draw),
            "token_type_ids": torch.tensor([0] * 5 + [1] * 7),
            "attention_mask": (torch.arange(12) < 4 + number % 8).long(),
        }
        kinds = 40 if head in ("ForPreTraining", "ForMaskedLM") else num_labels
        tags = torch.randint(0, kinds, (12,), generator=draw)
        tags[1 + number % 5 :] = -100
        if head in ("ForPreTraining", "ForMaskedLM", "ForTokenClassification"):
            row["labels"] = tags
        if head == "ForPreTraining":
            row["next_sentence_label"] = torch.tensor(-100 if number == 3 else number % 2)
        if head == "ForMultipleChoice":
            row = {name: torch.stack([value, value.flip(0), value.roll(3)]) for name, value in row.items()}
        if head in ("ForNextSentencePrediction", "ForMultipleChoice"):
            row["labels"] = torch.tensor(number % 2)
        if head == "ForSequenceClassification":
            row["labels"] = torch.tensor(number % num_labels)
        if head == "ForQuestionAnswering":
            row |= {"start_positions": torch.tensor(number % 4), "end_positions": torch.tensor(2 + number % 7)}
        rows.append(row)
    return rows


def stacked(rows):
    """Rows as one batch."""
    batch = {}
    for name in rows[0]:
        batch[name] = torch.stack([row[name] for row in rows])
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# Losses and gradients


def loss_and_gradients(model, **batch):
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(found, expected, **tolerance):
    outputs, gradients = found
    expected_outputs, expected_gradients = expected
    torch.testing.assert_close(outputs.loss, expected_outputs.loss, check_dtype=False, **tolerance)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, **tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023
