"""`d2l-bert finetune` from end to end: its card, other models and data, errors at the end, several rates."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MODEL_FILES
from finetuning import FAST, NAMES, finetune, read_csv, rows_of, write_splits
from huggingface_hub import ModelCard
from local_hub import TOKEN, environment
from publishing import published
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, pipeline

from d2l_bert.__main__ import main
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning import run as finetuning_run
from d2l_bert.training.finetuning.trainer import FinetuneTrainer


pytestmark = pytest.mark.usefixtures("one_thread")


LEFT = MODEL_FILES | {"predictions.csv", "confusion_matrix.png"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The options with files of two classes: training, validation and test rows."""
    return write_splits(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def tuned(trained, files, tmp_path_factory):
    """A folder of a finished fine-tuning with two seeds."""
    folder = tmp_path_factory.mktemp("tuned") / "heroes"
    finetune(trained, folder, "--task=text-classification", *files, *FAST, "--num_seeds=2", "--license=mit")
    return folder


def test_the_card_names_the_base_model_the_data_and_the_command(tuned, trained):
    card, record = (tuned / "README.md").read_text(), json.loads((tuned / "run_config.json").read_text())
    metrics = json.loads((tuned / "metrics.json").read_text())
    assert f"fingerprint `{record['base_model']['fingerprint']}`" in card and "base_model" not in card.split("---")[1]
    for split in ("train", "validation", "test"):
        assert record["data"]["splits"][split]["fingerprint"] in card
    assert f"| test accuracy | {100 * metrics['test_accuracy']:.1f} % |" in card
    assert "d2l-bert finetune model --task text-classification --train_file train.csv" in card
    assert str(trained) not in card and "confusion_matrix.png" in card


@pytest.mark.slow  # a process of its own: the libraries ask the Hub whose address they read when they are imported
def test_a_model_of_the_hub_is_recorded_with_its_commit(trained, files, here, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    options = ["--task=classification", *map(str, files), "--max_steps=1", "--license=mit", "--output_dir=out"]
    command = [sys.executable, "-m", "d2l_bert", "finetune", "someone/bert", *options]
    done = subprocess.run(
        command, env=environment(here, tmp_path, TOKEN), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record, (commit, *_) = json.loads((tmp_path / "out" / "run_config.json").read_text()), here.commits("someone/bert")
    assert record["base_model"]["name"] == "someone/bert" and record["base_model"]["revision"] == commit
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("someone/bert", "finetune")
    assert f"someone/bert, revision `{commit}`" in (tmp_path / "out" / "README.md").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds and inputs


def test_stock_bert_is_fine_tuned_and_published(trained, files, tmp_path, here):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "bert")
    save_tokenizer(tokenizer, tmp_path / "bert")
    metrics = finetune(
        tmp_path / "bert", tmp_path / "out", "--task=classification", *files, *FAST, "--num_train_epochs=12"
    )
    assert metrics["test_accuracy"] > 0.9
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")).__module__.startswith("transf")
    assert pipeline("text-classification", model=str(tmp_path / "out"))("Then Anna sold.")[0]["label"] in NAMES
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())
    assert record["dropout"]["hidden_dropout_prob"] == 0
    assert main(["publish", str(tmp_path / "out"), "someone/stock", "--license=mit"]) == 0
    files = published(here, "someone/stock")
    assert set(files) == LEFT - {"predictions.csv", "configuration_d2l_bert.py", "modeling_d2l_bert.py"}
    assert b"trust_remote_code" not in files["README.md"] and "auto_map" not in json.loads(files["config.json"])


def test_a_saved_dataset_is_read_by_the_columns_of_a_named_task(trained, tmp_path, capsys):
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )

    def split(rows, labels):
        content = {"sentence": [row["text"] for row in rows], "label": labels}
        return datasets.Dataset.from_dict(content, features=features)

    rows = list(rows_of(40, 0))
    labels = [NAMES.index(row["label"]) for row in rows]
    labels[3] = -1
    splits = {
        "train": split(rows, labels),
        "validation": split(list(rows_of(12, 1)), [n % 2 for n in range(12)]),
        "test": split(list(rows_of(8, 2)), [-1] * 8),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    metrics = finetune(trained, tmp_path / "out", "--task=sst2", f"--dataset={tmp_path / 'saved'}", "--max_steps=2")
    shown = capsys.readouterr().err
    assert "1 row is left out: no label" in shown and "test: 8 rows of saved, split test, without labels" in shown
    assert "validation_accuracy" in metrics and "test_accuracy" not in metrics
    assert {row["prediction"] for row in read_csv(tmp_path / "out" / "predictions.csv")} <= {"negative", "positive"}


# ---------------------------------------------------------------------------------------------------------------------
# The end: a model that no later error can lose


@pytest.mark.slow
def test_an_error_in_the_card_or_a_picture_cannot_lose_the_model(trained, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyError("type")

    options = write_splits(tmp_path / "rows")
    for name in ("render_card", "draw_curves"):
        monkeypatch.setattr(finetuning_run, name, fail)
        output = tmp_path / name
        command = ["finetune", str(trained), f"--output_dir={output}", "--task=classification", "--max_steps=2"]
        assert main([*command, *options]) == 1
        monkeypatch.undo()
        monkeypatch.setattr(FinetuneTrainer, "train", fail)  # the model is there, and is not trained again
        assert main([*command, *options, "--resume_from_checkpoint=latest"]) == 0
        AutoModelForSequenceClassification.from_pretrained(output)
        assert (output / "predictions.csv").exists()
        monkeypatch.undo()


def test_a_full_disk_ends_a_fine_tuning_in_one_line_that_says_how_to_go_on(trained, tmp_path, fails):
    options = ["--task=classification", *write_splits(tmp_path / "rows"), "--max_steps=4", "--eval_strategy=steps"]
    command = ["finetune", str(trained), f"--output_dir={tmp_path / 'out'}", *options, "--eval_steps=2"]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest in (20_000, 80_000):  # for the weights, and for the optimizer
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
        try:
            said = fails(*command, "--resume_from_checkpoint=latest")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert "cannot be written" in said and "--resume_from_checkpoint latest" in said
    assert main([*command, "--resume_from_checkpoint=latest"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Several rates and seeds


def test_of_several_rates_one_that_diverges_is_left_out(trained, tmp_path, monkeypatch, capsys):
    train = FinetuneTrainer.train

    def diverge_at_the_first_rate(self, resume_from_checkpoint):
        train(self)
        if self.args.learning_rate == 1e-2:
            for parameter in self.model.parameters():
                parameter.data.fill_(np.nan)

    monkeypatch.setattr(FinetuneTrainer, "train", diverge_at_the_first_rate)
    options = [
        "--task=classification",
        *write_splits(tmp_path),
        "--max_steps=2",
        "--num_seeds=2",
        "--learning_rate",
        "1e-2",
        "1e-3",
    ]
    metrics = finetune(trained, tmp_path / "out", *options)
    assert metrics["diverged_rates"] == [1e-2] and [tried["learning_rate"] for tried in metrics["rates"]] == [1e-3]
    assert {result["learning_rate"] for result in metrics["seeds"]} == {1e-3} and len(metrics["seeds"]) == 2
    said = capsys.readouterr().err
    assert "rate-0.01-seed-42: the training diverged" in said and "rate 0.01 is left out" in said
