"""Weights that are NaN or infinite are refused wherever a model is loaded, in the same words."""

import pytest
import torch
from conftest import SIZES
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


def test_stock_and_d2l_weights_with_nan_are_not_converted(tmp_path, fails):
    bert = BertForPreTraining(BertConfig(**SIZES))
    bert.bert.embeddings.word_embeddings.weight.data[7, 0] = torch.nan
    bert.save_pretrained(tmp_path / "bert")
    assert "not finite" in fails("convert", tmp_path / "bert", tmp_path / "out", "--from", "bert")
    assert main(["fill-mask", str(tmp_path / "bert"), "a [MASK]"]) == 2
    assert not (tmp_path / "out").exists()
