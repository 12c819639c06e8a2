"""Runs that start from a trained model, and words added to its vocabulary."""

import json

import pytest
import torch
from runs import run
from safetensors.torch import load_file

from d2l_bert.cli import main


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
