"""The model that a fine-tuning starts from, and what a new run deletes."""

import json
import shutil

import pytest
import torch
from finetuning import finetune, load, rows_of, write_csv
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.output import start_folder
from d2l_bert.training.finetuning.trainer import make_model, read_start


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rows_file(tmp_path):
    return f"--train_file={write_csv(tmp_path / 'train.csv', rows_of(20, 0))}"


def made(model, rows_file):
    """The model that a run starts with, and the names of its modules with fresh weights."""
    task, _ = load(rows_file.partition("=")[2], "classification", model=str(model))
    torch.manual_seed(0)
    return make_model(read_start(task.config, task), task)


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


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """A folder of a finished run with a constant rate, on files."""
    folder = tmp_path_factory.mktemp("finished")
    train, validation = (write_csv(folder / f"{name}.csv", rows_of(20, n)) for n, name in enumerate(("a", "b")))
    finetune(
        trained, folder / "out", "--task=classification", f"--train_file={train}", f"--validation_file={validation}",
        "--max_steps=1", "--lr_scheduler_type=constant",
    )  # fmt: skip
    return folder / "out"


def test_a_new_run_deletes_only_what_a_run_writes(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    pictures = json.loads((folder / "metrics.json").read_text())["pictures"]
    notes = [folder / "notes.txt", folder / "plots" / "mine.png", folder / "runs" / "mine" / "log"]
    for note in notes:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("precious")
    (folder / "attempts" / "rate-1-seed-1").mkdir()
    start_folder(FinetuneConfig(model="m", overwrite_output_dir=True), folder, {"finetune": {}})
    assert all(note.read_text() == "precious" for note in notes) and "confusion_matrix.png" in pictures
    kept = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "plots", "runs", "run_config.json"} <= kept
    assert not kept & {"model.safetensors", "metrics.json", "predictions.csv", "attempts", *pictures}


def test_a_finished_run_is_replaced_or_gets_further_seeds(finished, trained, fails, tmp_path):
    folder, rows = shutil.copytree(finished, tmp_path / "out"), finished.parent
    command = [
        "--task=classification", f"--train_file={rows / 'a.csv'}", f"--validation_file={rows / 'b.csv'}",
        "--max_steps=1", "--lr_scheduler_type=constant",
    ]  # fmt: skip
    line = fails("finetune", trained, *command, f"--output_dir={folder}")
    assert "--resume_from_checkpoint latest" in line and "replace it with --overwrite_output_dir" in line
    before, weights = json.loads((folder / "metrics.json").read_text()), (folder / "model.safetensors").read_bytes()
    metrics = finetune(trained, folder, *command, "--num_seeds=3", "--resume_from_checkpoint=latest")
    assert metrics["seeds"][0] == before["seeds"][0] and len(metrics["seeds"]) == 3
    best = max(metrics["seeds"], key=lambda seed: (seed["validation"]["accuracy"], -seed["validation"]["loss"]))
    assert metrics["kept_seed"] == best["seed"]
    assert (weights == (folder / "model.safetensors").read_bytes()) == (best["seed"] == 42)
    whole = finetune(trained, tmp_path / "whole", *command, "--num_seeds=3")
    assert whole["mean"] == metrics["mean"] and whole["kept_seed"] == metrics["kept_seed"]
    line = fails("finetune", trained, *command, f"--output_dir={folder}", "--resume_from_checkpoint=latest")
    assert "num_seeds was 3" in line
