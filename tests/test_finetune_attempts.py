"""The models of a fine-tuning run: which are kept, which checkpoints, in which order rows are seen and predicted."""

import numpy as np
import pytest
from finetuning import finetune, write_splits

from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.training.finetuning.trainer import FinetuneTrainer, MarkComplete


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
