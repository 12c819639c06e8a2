"""`d2l-bert finetune` in two processes agrees with one."""

import json
import statistics

import pytest
from finetuning import write_splits
from processes import launch


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TASK = ["--task=classification", "--num_train_epochs=4", "--learning_rate=1e-3"]


def figures(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    return [
        {name: result[name] for name in ("seed", "steps", "best_step", "validation", "test")}
        for result in metrics["seeds"]
    ]


def test_two_processes_agree_with_one(trained, tmp_path):
    """Without dropout both make the same steps, up to rounding; with dropout their masks differ, not their means."""
    files = write_splits(tmp_path / "rows", classes=4, sizes=(160, 40, 120))
    results = {}
    for processes in (1, 2):
        for dropout in (0, 0.1):
            folder = tmp_path / f"{processes}-{dropout}"
            rates = [f"--{name}_dropout_prob={dropout}" for name in ("hidden", "attention_probs")]
            seeds = f"--num_seeds={1 if dropout == 0 else 5}"
            arguments = ["finetune", str(trained), *TASK, *files, *rates, seeds, f"--output_dir={folder}"]
            launched = launch(arguments, tmp_path / f"said-{processes}-{dropout}.txt", processes)
            for process in launched:
                process.join()
            said = (tmp_path / f"said-{processes}-{dropout}.txt").read_text()
            assert [process.exitcode for process in launched] == [0] * processes, said
            results[processes, dropout] = figures(folder)
            if processes == 2:
                assert (tmp_path / f"said-2-{dropout}.1.txt").read_text() == ""
                assert said.count("predictions for the test rows") == 1
    (one,), (two,) = results[1, 0], results[2, 0]
    assert two["steps"] == one["steps"]
    assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], rel=1e-3)
    ones, twos = ([result["test"]["accuracy"] for result in results[processes, 0.1]] for processes in (1, 2))
    error = ((statistics.variance(ones) + statistics.variance(twos)) / 5) ** 0.5
    assert abs(statistics.fmean(ones) - statistics.fmean(twos)) <= max(2 * error, 0.02)
