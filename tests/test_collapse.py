"""Collapse: an encoder that gives every token the same vector is found, and said at the run's end and on the card."""

import json

import pytest
import torch
from runs import run
from small_models import make_config, make_model, make_sequences, packed, padded
from torch.nn import functional as F

from d2l_bert import D2lBertForPreTraining
from d2l_bert.training.held_out import variety


@pytest.mark.parametrize("rows", [padded(make_sequences()), packed(make_sequences(), [[0, 1], [2, 3, 4], [5, 6, 7]])])
def test_the_mean_cosine_and_the_distinct_predictions_equal_a_direct_count(rows):
    model = make_model(D2lBertForPreTraining, make_config())
    with torch.no_grad():
        outputs = model(**rows, output_hidden_states=True)
    vectors, cosines = outputs.hidden_states[-1], []
    tokens = rows["attention_mask" if "attention_mask" in rows else "sequence_ids"].nonzero().tolist()
    for row, column in tokens:
        for other_row, other in tokens:
            if rows["input_ids"][row, column] != rows["input_ids"][other_row, other]:
                cosines.append(float(F.cosine_similarity(vectors[row, column], vectors[other_row, other], dim=0)))
    guesses = outputs.prediction_logits[rows["labels"] != -100].argmax(-1).tolist()
    found = variety(model, rows)
    assert found["token_cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert found["distinct_predictions"] == len(set(guesses)) > 1


@pytest.mark.parametrize("rate, has_collapsed", [("1e-3", False), ("1", True)])
def test_a_run_whose_encoder_has_collapsed_says_so_at_its_end_and_on_its_card(
    rate, has_collapsed, books, tmp_path, capsys
):
    folder = tmp_path / "model"
    run(books, folder, "--recipe=d2l", "--max_steps=20", f"--learning_rate={rate}")
    metrics = json.loads((folder / "metrics.json").read_text())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (metrics["token_cosine"] > 0.95) == has_collapsed
    assert ("collapsed" in capsys.readouterr().out) == ("collapsed" in card) == has_collapsed
    assert ("AutoModelForSequenceClassification" in card) != has_collapsed
