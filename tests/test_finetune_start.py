"""The model that a fine-tuning starts from, and what a new run deletes."""

import json
import shutil

import pytest
import torch
from finetuning import finetune, rows_of, write_csv
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.folder import start_folder
from d2l_bert.training.finetuning.run import CLASSES
from d2l_bert.training.finetuning.start import make_model, read_start


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rows_file(tmp_path):
    return f"--train_file={write_csv(tmp_path / 'train.csv', rows_of(20, 0))}"


def made(model, rows_file, **options):
    """The model that a run starts with, and the names of its modules with fresh weights."""
    file = rows_file.partition("=")[2]
    config = FinetuneConfig(model=str(model), task="classification", train_file=file, **options)
    kind = CLASSES[config.kind](config)
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
    (folder / "models_in_training" / "rate-1-seed-1").mkdir(parents=True)
    start_folder(FinetuneConfig(model="m", overwrite_output_dir=True), folder, {"finetune": {}})
    assert all(note.read_text() == "precious" for note in notes) and "confusion_matrix.png" in pictures
    kept = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "plots", "runs", "run_config.json"} <= kept
    assert not kept & {"model.safetensors", "metrics.json", "predictions.csv", "models_in_training", *pictures}


def test_a_finished_run_is_replaced_and_not_resumed(finished, trained, rows_file, fails):
    for option in ([], ["--resume_from_checkpoint=latest"]):
        line = fails("finetune", trained, "--task=classification", rows_file, f"--output_dir={finished}", *option)
        assert "holds a finished run" in line and "replace it with --overwrite_output_dir" in line
