"""A run without a pair task has no head for it and no word of it; packed pairs are counted as unpacked ones."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from promises.driving import read_json
from runs import run
from safetensors.torch import load_file
from small_models import make_config, make_model, make_sequences, packed, padded

from d2l_bert import D2lBertForPreTraining
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training.held_out import held_out_counts, held_out_metrics


def test_without_a_pair_objective_there_is_no_head_for_it_and_no_mention_of_it(books, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("single")  # the name of this test has words that may not stand in what is said
    run(books, folder, "--objective=none", "--max_steps=6", "--save_steps=3", "--mixed_precision=no")
    assert read_json(folder / "config.json")["architectures"] == ["D2lBertForMaskedLM"]
    for weights in ("model.safetensors", "checkpoint-3/model.safetensors"):
        assert not any("nsp" in name or "pooler" in name for name in load_file(folder / weights))
    captured = capsys.readouterr()
    told = [(folder / name).read_text() for name in ("metrics.json", "training_log.jsonl", "README.md")]
    for text in (captured.out, captured.err, *told):
        assert not re.search("(?i)nsp|next.?sentence|isnext|sop|sentence order|pair", text), text
    metrics = read_json(folder / "metrics.json")
    assert metrics["eval_sequences"] > 0 and metrics["train_sequences_per_second"] > 0
    assert "A held-out sequence" in captured.out and captured.out.count("[CLS]") == captured.out.count("[SEP]") == 1
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert [result.metric_name for result in results] == ["MLM loss", "MLM perplexity", "MLM accuracy"]


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[3, 1], [0, 5, 2], [7, 4, 6]]])
def test_held_out_counts_of_packed_pairs_equal_those_of_unpacked_pairs(rows):
    config = make_config(max_position_embeddings=128)
    model, sequences = make_model(D2lBertForPreTraining, config), make_sequences()
    batches = padded(sequences), packed(sequences, rows)
    single, together = (held_out_counts(model, [batch], "cpu") for batch in batches)
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-4)
    assert held_out_metrics(together, PAIR_TASKS["sop"])["eval_pairs"] == len(sequences)
