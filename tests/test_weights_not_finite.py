"""Weights that are NaN or infinite are refused wherever a model is loaded, in the same words."""

import shutil

import pytest
import torch
from conftest import SIZES, SMALL
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining

from d2l_bert.cli import main


pytestmark = pytest.mark.usefixtures("one_thread")

COMMANDS = (
    "fill-mask MODEL 'anna [MASK] to the garden'",
    "next-sentence MODEL a b",
    "embed MODEL TEXT --output OUT.npy",
    "attention MODEL anna --output OUT.png",
    "evaluate MODEL --corpus TEXT",
    "convert MODEL OUT --to d2l",
    "pretrain --init_from MODEL --corpus TEXT --output_dir OUT --max_seq_length 48 --attention_init normal",
    "finetune MODEL --task classification --train_file TABLE --output_dir OUT",
    "publish MODEL me/bert --license mit --dry_run",
)


@pytest.fixture
def spoilt(trained, tmp_path):
    """A trained model with a single NaN in a query."""
    folder = shutil.copytree(trained, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["bert.encoder.layer.0.attention.query.weight"][3, 5] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_one_nan_in_a_query_is_refused_by_every_command(spoilt, books, tmp_path, fails, command):
    (tmp_path / "table.csv").write_text("text,label\n" + "".join(f"anna left {n},{n % 2}\n" for n in range(40)))
    places = {"MODEL": spoilt, "TEXT": books / "book-00.txt", "OUT": tmp_path / "out", "TABLE": tmp_path / "table.csv"}
    words = command.replace("'", "").split() if "'" not in command else [*command.split("'")[0].split(), "anna [MASK]"]
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    said = fails(*words)
    assert "not finite" in said
    assert not list(tmp_path.glob("out*"))


def test_stock_and_d2l_weights_with_nan_are_not_converted(tmp_path, fails):
    bert = BertForPreTraining(BertConfig(**SIZES))
    bert.bert.embeddings.word_embeddings.weight.data[7, 0] = torch.nan
    bert.save_pretrained(tmp_path / "bert")
    assert "not finite" in fails("convert", tmp_path / "bert", tmp_path / "out", "--from", "bert")
    assert main(["fill-mask", str(tmp_path / "bert"), "a [MASK]"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_finite_model_still_trains_from_there(trained, books, tmp_path):
    options = [option for option in SMALL if option.startswith(("--global", "--data", "--max_seq"))]
    command = ["pretrain", f"--init_from={trained}", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options]
    assert main([*command, "--max_steps=1", "--attention_init=normal", "--length_schedule=none"]) == 0
