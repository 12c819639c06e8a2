"""Small models of every setting, and batches for them, padded or packed."""

import conftest
import pytest
import torch

from d2l_bert import (
    D2lBertConfig,
)


SWITCHES = {
    "d2l": {"hidden_act": "relu", "embedding_layer_norm": False, "tie_word_embeddings": False},
    "bert": {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True},
}
SIZES = {
    **conftest.SIZES,
    "layer_norm_eps": 0.03,  # large enough to make a difference in these tests
}
SEQUENCE_LENGTHS = (9, 14, 5, 11, 3, 12, 7, 10)

every_setting = pytest.mark.parametrize("setting", SWITCHES)


def make_config(setting="d2l", attention="sdpa", **changes):
    return D2lBertConfig(**{**SIZES, **SWITCHES[setting], "attn_implementation": attention, **changes})


def make_model(model_class, config, seed=0):
    """A model whose parameters all affect the outputs noticeably, biases and LayerNorms included."""
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.4, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1)
    return model


def make_sequences(seed=0):
    """Sequences of different lengths, each with segments, predicted positions, labels and an NSP label."""
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
