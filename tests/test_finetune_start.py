"""The model that a fine-tuning starts from, its options against each other, and what a new run deletes."""

import shutil

import pytest
import torch
from finetuning import finetune, rows_of, write_csv
from transformers import AutoConfig, AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.kinds import make_kind
from d2l_bert.training.finetuning.start import make_model, read_start


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rows_file(tmp_path):
    return f"--train_file={write_csv(tmp_path / 'train.csv', rows_of(20, 0))}"


def made(model, rows_file, **options):
    """The model that a run starts with, and the names of its modules with fresh weights."""
    file = rows_file.partition("=")[2]
    config = FinetuneConfig(model=str(model), task="classification", train_file=file, **options)
    kind = make_kind(config)
    load_data(config, kind)
    torch.manual_seed(0)
    return make_model(read_start(config, kind), kind, config.from_scratch)


@pytest.mark.parametrize("labels", [2, 5])
def test_the_head_of_another_task_is_drawn_anew(labels, trained, rows_file, tmp_path):
    saved = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=labels)
    with torch.no_grad():
        saved.classifier.weight.fill_(7.0)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    model, fresh = made(tmp_path / "base", rows_file)
    assert "classifier" in fresh and model.classifier.weight.shape[0] == 2
    assert 0 < model.classifier.weight.std() < 1 and (model.classifier.bias == 0).all()
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


def test_an_encoder_that_does_not_fit_its_configuration_is_refused(trained, rows_file, tmp_path, fails):
    saved = D2lBertForSequenceClassification.from_pretrained(trained)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    config.intermediate_size += 8
    config.save_pretrained(tmp_path / "base")
    line = fails("finetune", tmp_path / "base", "--task=classification", rows_file, f"--output_dir={tmp_path / 'out'}")
    assert "bert.encoder.layer.0." in line and "does not have the shape that config.json gives" in line


def test_from_scratch_needs_no_weights(trained, rows_file, tmp_path):
    shutil.copytree(trained, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    finetune(
        tmp_path / "base", tmp_path / "out", "--task=classification", rows_file, "--max_steps=1", "--from_scratch"
    )
