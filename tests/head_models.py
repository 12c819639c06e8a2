"""A small model of each head, and rows of inputs and labels for it."""

import pytest
import torch
from conftest import HEADS, SIZES

import d2l_bert
from d2l_bert import D2lBertConfig


every_head = pytest.mark.parametrize("head", HEADS)


def ours(head, **options):
    torch.manual_seed(0)
    model = getattr(d2l_bert, f"D2lBert{head}")(D2lBertConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorms too: a lost one must change the outputs
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


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
        tags = torch.randint(0, 40 if head in ("ForPreTraining", "ForMaskedLM") else num_labels, (12,), generator=draw)
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
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
