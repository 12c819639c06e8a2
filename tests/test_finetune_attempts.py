"""The models of a fine-tuning run: which are kept, which checkpoints, in which order rows are seen and predicted."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from finetuning import FAST, NAMES, finetune, read_csv, write_csv, write_splits
from transformers import TrainerControl, TrainerState

from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.training.finetuning.attempts import best
from d2l_bert.training.finetuning.trainer import FinetuneTrainer, MarkComplete, last_checkpoint, seconds_before


def test_a_training_that_diverged_is_said(trained, tmp_path, fails, monkeypatch):
    def diverge(self, resume_from_checkpoint):
        for parameter in self.model.parameters():
            parameter.data.fill_(np.nan)

    monkeypatch.setattr(FinetuneTrainer, "train", diverge)
    command = [
        "finetune",
        trained,
        "--task=classification",
        *write_splits(tmp_path),
        f"--output_dir={tmp_path / 'out'}",
    ]
    assert "rate-0.0003-seed-42: the training diverged" in fails(*command)
    assert not (tmp_path / "out" / "model.safetensors").exists()


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


@pytest.mark.parametrize(
    "limit, best, kept",
    [(1, 4, [4, 12]), (1, 12, [12]), (2, 4, [4, 12]), (3, 4, [4, 8, 12]), (2, None, [8, 12]), (9, 4, [4, 8, 12])],
)
def test_older_checkpoints_are_deleted_after_the_new_one_is_marked(limit, best, kept, tmp_path):
    for step in (4, 8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    mark = MarkComplete(limit)
    arguments = SimpleNamespace(output_dir=tmp_path, distributed_state=SimpleNamespace(wait_for_everyone=lambda: None))
    state = TrainerState(global_step=0)
    mark.on_train_begin(arguments, state, None)
    mark.before = 100.0
    state.global_step, state.best_model_checkpoint = 12, best and str(tmp_path / f"checkpoint-{best}")
    state.save_to_json(str(tmp_path / "checkpoint-12" / "trainer_state.json"))
    mark.on_save(arguments, state, TrainerControl())
    assert sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir()) == kept
    assert last_checkpoint(tmp_path).name == "checkpoint-12"
    assert 100 <= seconds_before(tmp_path / "checkpoint-12") < 160


@pytest.fixture(scope="module")
def cut(trained, tmp_path_factory):
    """A run that was stopped after three checkpoints, of steps 2, 4 and 6; and the command that goes on with it."""
    folder = tmp_path_factory.mktemp("cut")
    options = ["--task=classification", *write_splits(folder / "rows"), "--eval_strategy=steps", "--eval_steps=2"]
    options += ["--max_steps=8", "--save_total_limit=3", "--metric_for_best_model=loss", "--learning_rate=1e-3"]
    save = MarkComplete.on_save

    def stop_at_six(self, args, state, control, **kwargs):
        save(self, args, state, control, **kwargs)
        if state.global_step == 6:
            raise UserError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MarkComplete, "on_save", stop_at_six)
        assert main(["finetune", str(trained), f"--output_dir={folder / 'run'}", *options]) == 2
    return folder / "run", ["finetune", str(trained), *options, "--resume_from_checkpoint=latest"]


def test_a_run_goes_on_from_the_last_checkpoint_that_is_complete(cut, tmp_path, capsys):
    folder, command = cut
    shutil.copytree(folder, tmp_path / "run")
    (last,) = (tmp_path / "run").rglob("checkpoint-6")
    (last / "complete").unlink()
    assert main([*command, f"--output_dir={tmp_path / 'run'}"]) == 0
    assert "goes on from checkpoint-4" in capsys.readouterr().err


def test_rows_of_about_the_same_length_may_share_a_batch(trained, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    heroes = [NAMES[number] for number in rng.integers(2, size=240)]
    rows = [{"text": f"Then {hero} sold it. " * int(rng.integers(1, 12)), "label": hero} for hero in heroes]
    write_csv(tmp_path / "train.csv", rows)
    sizes, step = {}, FinetuneTrainer.training_step

    def watched(self, model, inputs, *arguments):
        sizes.setdefault(self.args.train_sampling_strategy, []).append(inputs["input_ids"].numel())
        return step(self, model, inputs, *arguments)

    monkeypatch.setattr(FinetuneTrainer, "training_step", watched)
    options = ["--task=classification", f"--train_file={tmp_path / 'train.csv'}", "--validation_share=0"]
    options += [f"--test_file={tmp_path / 'train.csv'}", "--per_device_train_batch_size=4", *FAST]
    for strategy in ("random", "group_by_length"):
        metrics = finetune(trained, tmp_path / strategy, *options, f"--train_sampling_strategy={strategy}")
        assert metrics["test_accuracy"] > 0.95  # the metrics take outputs and labels in the same order
    assert len(sizes["random"]) == len(sizes["group_by_length"]) == 6 * 60
    assert sum(sizes["group_by_length"]) < 0.85 * sum(sizes["random"])


def test_after_a_training_in_bf16_the_metrics_are_those_of_the_predictions_in_float32(trained, tmp_path):
    rows = [{"text": f"Then {NAMES[n % 4].title()} sold it, {n}.", "label": 10 * (n % 4) + n / 7} for n in range(80)]
    write_csv(tmp_path / "rows.csv", rows)
    options = [f"--train_file={tmp_path / 'rows.csv'}", f"--test_file={tmp_path / 'rows.csv'}", "--validation_share=0"]
    metrics = finetune(trained, tmp_path / "out", "--task=regression", *options, "--max_steps=8", "--bf16=true")
    table = read_csv(tmp_path / "out" / "predictions.csv")
    errors = [(float(row["prediction"]) - float(row["label"])) ** 2 for row in table]
    assert metrics["test_mse"] == pytest.approx(np.mean(errors), rel=1e-5)


def test_of_equal_metrics_the_lower_loss_is_better():
    figures = ((1, 3), (1, 2), (1, 2), (0, 1))
    results = [{"validation": {"accuracy": accuracy, "loss": loss}} for accuracy, loss in figures]
    assert best(results, "accuracy") == 1 and best(results, "loss") == 3 and best([{}, {}], "accuracy") == 0
