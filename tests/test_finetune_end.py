"""The end of a fine-tuning: its figures, its card for any encoder, and a model that no later error can lose."""

import resource

import pytest
from finetuning import write_splits
from transformers import (
    AutoModelForSequenceClassification,
)

from d2l_bert.cli import main
from d2l_bert.training.finetuning import run as finetuning_run
from d2l_bert.training.finetuning.trainer import FinetuneTrainer


pytestmark = pytest.mark.usefixtures("one_thread")


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
