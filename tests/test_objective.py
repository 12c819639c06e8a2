"""A run without a pair task has no head for it and no word of it; packed pairs are counted as unpacked ones."""

import contextlib
import functools
import io
import json

import pytest
import torch
from conftest import SMALL
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training import held_out as held_out_figures


OPTIONS = ("--max_steps=6", "--save_steps=3", "--save_total_limit=9", "--mixed_precision=no")
NAMES = ("nsp", "next sentence", "next-sentence", "nextsentence", "isnext", "sop", "sentence order", "pair")


@pytest.fixture(scope="module")
def pretrained(books, tmp_path_factory):
    """A function of the objective; returns the folder of a finished run and everything that the run printed."""

    @functools.cache
    def run(objective):
        folder, said = tmp_path_factory.mktemp(objective) / "model", io.StringIO()
        command = ["pretrain", f"--corpus={books}", f"--output_dir={folder}", f"--objective={objective}"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main([*command, *OPTIONS, *SMALL]) == 0
        return folder, said.getvalue()

    return run


def test_without_a_pair_objective_there_is_no_head_for_it_and_no_mention_of_it(pretrained):
    folder, said = pretrained("none")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["D2lBertForMaskedLM"]
    for weights in ("model.safetensors", "checkpoint-3/model.safetensors"):
        assert not any("nsp" in name or "pooler" in name for name in load_file(folder / weights))
    card = (folder / "README.md").read_text()
    told = [said, (folder / "metrics.json").read_text(), (folder / "training_log.jsonl").read_text(), card]
    for text in told:
        assert not [name for name in NAMES if name in text.lower()], text
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["eval_sequences"] > 0 and metrics["train_sequences_per_second"] > 0
    assert "A held-out sequence" in said and said.count("[CLS]") == said.count("[SEP]") == 1
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert [result.metric_name for result in results] == ["MLM loss", "MLM perplexity", "MLM accuracy"]


def packed(batch):
    """The rows of a batch as sequences of one packed row (1, B x T)."""
    rows, width = batch["input_ids"].shape
    real = batch["attention_mask"]
    fields = {
        "sequence_ids": real * (torch.arange(rows) + 1)[:, None],
        "position_ids": torch.arange(width).expand(rows, width) * real,
        "masked_positions": batch["masked_positions"] + (torch.arange(rows) * width)[:, None],
    }
    return {name: tensor.reshape(1, -1) for name, tensor in {**batch, **fields}.items()}


def test_held_out_counts_of_packed_pairs_equal_those_of_unpacked_pairs():
    torch.manual_seed(0)
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=20, hidden_size=32, max_position_embeddings=16)).eval()
    ids, ones = torch.randint(5, 20, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    batch = {
        "input_ids": ids,
        "attention_mask": ones,
        "masked_positions": torch.tensor([[1, 4], [2, 3]]),
        "labels": torch.tensor([[7, 8], [9, -100]]),
    }
    row = {**packed(batch), "cls_positions": torch.tensor([[0, 6]])}
    batch["next_sentence_label"], row["next_sentence_label"] = torch.tensor([0, 1]), torch.tensor([[0, 1]])
    single, together = (held_out_figures.held_out_counts(model, [part], "cpu") for part in (batch, row))
    torch.testing.assert_close(single, together, atol=1e-4, rtol=0)
    assert held_out_figures.held_out_metrics(together, PAIR_TASKS["sop"])["eval_pairs"] == 2
