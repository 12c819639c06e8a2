"""The end of a fine-tuning: its figures, its card for any encoder, and a model that no later error can lose."""

import json
import os
import resource

import pytest
from finetuning import finetune, rows_of, write_csv, write_splits
from processes import launch
from small_tasks import answer_rows, choice_rows, make_base, write_rows
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from d2l_bert import train_wordpiece
from d2l_bert.cli import main
from d2l_bert.training.finetuning import run as finetuning_run
from d2l_bert.training.finetuning.trainer import FinetuneTrainer


pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = {
    "answers": (answer_rows, AutoModelForQuestionAnswering, "question-answering"),
    "multiple_choice": (choice_rows, AutoModelForMultipleChoice, "multiple-choice"),
}


@pytest.fixture(scope="module")
def tokenizer():
    words = [row["context"] + row["question"] for row in answer_rows(200, 1)]
    return train_wordpiece([*words, "then nobody was there, the who where what ?"], min_frequency=1)


def test_contexts_in_windows_are_not_called_truncated(tmp_path, tokenizer):
    base = make_base(tmp_path / "base", tokenizer)
    rows = [{**row, "context": row["context"] + " and the apple" * 9} for row in answer_rows(12, 3)]
    train = write_rows(tmp_path / "a.jsonl", rows)
    finetune(base, tmp_path / "out", "--task=answers", f"--train_file={train}", "--max_steps=1", "--max_seq_length=28")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "contexts are longer than 28 tokens" in card and "are truncated" not in card


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


@pytest.mark.slow
def test_a_stopped_fine_tuning_says_how_to_go_on_and_latest_says_that_there_is_nothing_yet(trained, tmp_path):
    options = write_splits(tmp_path / "rows")
    said, output = tmp_path / "said.txt", tmp_path / "out"
    arguments = ["finetune", str(trained), f"--output_dir={output}", "--task=classification", *options]
    (process,) = launch([*arguments, "--resume_from_checkpoint=latest"], said, dawdle=(3, 60.0))
    while "epoch" not in said.read_text() and process.is_alive() and not list(output.glob("*/*/checkpoint-*")):
        process.join(0.2)
        if list(output.glob("models_in_training/*")):
            process.join(1.0)
            break
    os.kill(process.pid, 2)
    process.join(20)
    text = said.read_text()
    assert "no run yet, starting from the beginning" in text
    assert process.exitcode == 130 and "go on with --resume_from_checkpoint latest" in text


def test_resuming_with_another_rate_says_that_none_was_given(trained, tmp_path, fails):
    options = ["--task=classification", *write_splits(tmp_path / "rows"), "--max_steps=2"]
    output = tmp_path / "out"
    finetune(trained, output, *options)
    (output / "model.safetensors").unlink()
    said = fails("finetune", trained, f"--output_dir={output}", *options, "--learning_rate=1e-3",
                 "--resume_from_checkpoint=latest")  # fmt: skip
    assert "learning_rate was [] when the run was started, and is ['1e-3'] now" in said


def test_the_share_of_the_most_frequent_class_stands_beside_the_accuracy(trained, tmp_path, capsys):
    """A model that is not trained to speak of does no better than always the most frequent class."""
    rows = [*rows_of(30, 1, classes=1), *list(rows_of(60, 2))[:10]]
    for number, row in enumerate(rows):
        row["label"] = "0" if number < 24 else "1"
    train, test = write_csv(tmp_path / "train.csv", rows), write_csv(tmp_path / "test.csv", rows)
    options = ["--task=sst2", f"--train_file={train}", f"--test_file={test}", "--text_column=text", "--max_steps=1"]
    metrics = finetune(trained, tmp_path / "out", *options, "--validation_share=0", "--learning_rate=1e-9",
                       "--warmup_ratio=0")  # fmt: skip
    assert metrics["most_frequent_class"] == {"test": 24 / 40}
    told = "always the most frequent class: accuracy 60.0 %"
    assert told in capsys.readouterr().out and told in (tmp_path / "out" / "README.md").read_text()
    assert ("does no better" in (tmp_path / "out" / "README.md").read_text()) == (metrics["test_accuracy"] <= 0.6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}


def test_the_curve_of_a_share_is_drawn_over_the_whole_range(tmp_path):
    log = [{"step": 1, "eval_loss": 1.0, "eval_accuracy": 0.287}, {"step": 2, "eval_loss": 0.9, "eval_accuracy": 0.3}]
    figure = finetuning_run.draw_curves({"a": log}, "a", "accuracy", "t", tmp_path / "curves.png")
    panel = figure.axes[1]
    assert panel.get_ylim() == (0, 100) and list(panel.lines[0].get_ydata()) == pytest.approx([28.7, 30.0])
