"""The model that a fine-tuning starts from, and what a new run deletes."""

import shutil

import pytest
import torch
from finetuning import file_options, finetune, load, rows_of, write_csv
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.folders import read_json
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.output import start_folder
from d2l_bert.training.finetuning.trainer import make_model, read_start


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("labels", [2, 5])
def test_the_head_of_another_task_is_drawn_anew(labels, trained, tmp_path):
    saved = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=labels)
    with torch.no_grad():
        saved.classifier.weight.fill_(7.0)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    path = write_csv(tmp_path / "train.csv", rows_of(20, 0))
    task, _ = load(path, "classification", model=str(tmp_path / "base"))
    torch.manual_seed(0)
    model, fresh = make_model(read_start(task.config, task), task)
    assert "classifier" in fresh and model.classifier.weight.shape[0] == 2
    assert 0 < model.classifier.weight.std() < 1 and (model.classifier.bias == 0).all()
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The options of a short run with a constant rate, on files."""
    folder = tmp_path_factory.mktemp("rows")
    options = file_options(folder, train=rows_of(20, 0), validation=rows_of(20, 1))
    return ["--task=classification", *options, "--max_steps=1", "--lr_scheduler_type=constant"]


@pytest.fixture(scope="module")
def finished(trained, command, tmp_path_factory):
    """A folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    finetune(trained, folder, *command)
    return folder


def test_a_new_run_deletes_only_what_a_run_writes(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    pictures = read_json(folder / "metrics.json")["pictures"]
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


def test_a_finished_run_is_replaced_or_gets_further_seeds(finished, command, trained, fails, tmp_path):
    folder, go_on = shutil.copytree(finished, tmp_path / "out"), "--resume_from_checkpoint=latest"
    line = fails("finetune", trained, *command, f"--output_dir={folder}")
    assert "--resume_from_checkpoint latest" in line and "replace it with --overwrite_output_dir" in line
    before, weights = read_json(folder / "metrics.json"), (folder / "model.safetensors").read_bytes()
    metrics = finetune(trained, folder, *command, "--num_seeds=3", go_on)
    assert metrics["seeds"][0] == before["seeds"][0] and len(metrics["seeds"]) == 3
    best = max(metrics["seeds"], key=lambda seed: (seed["validation"]["accuracy"], -seed["validation"]["loss"]))
    assert metrics["kept_seed"] == best["seed"]
    assert (weights == (folder / "model.safetensors").read_bytes()) == (best["seed"] == 42)
    whole = finetune(trained, tmp_path / "whole", *command, "--num_seeds=3")
    assert whole["mean"] == metrics["mean"] and whole["kept_seed"] == metrics["kept_seed"]
    other = f"--validation_file={write_csv(tmp_path / 'other.csv', rows_of(20, 7))}"
    for options, said in (
        ([], "num_seeds was 3"),
        ([other, "--num_seeds=4"], "the fingerprint of the validation rows was"),
    ):
        assert said in fails("finetune", trained, *command, *options, f"--output_dir={folder}", go_on)
