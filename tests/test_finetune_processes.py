"""`d2l-bert finetune` in two processes agrees with one."""

import json
import os
import subprocess
import sys

import pytest
from finetuning import ROWS, assert_same_predictions, file_options, read_csv

from d2l_bert.__main__ import main


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("task", ROWS)
def test_two_processes_train_and_measure_what_one_does(task, trained, tmp_path):
    """Rows that two processes cannot share evenly; interpreters of their own, which order sets differently."""
    options = [trained, f"--task={task}", "--num_train_epochs=3", "--max_seq_length=32", "--learning_rate=1e-4"]
    options += ["--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0", "--per_device_eval_batch_size=4"]
    rows = ROWS[task]
    options += file_options(tmp_path, train=rows(45, 0), validation=rows(13, 1), test=rows(19, 2))
    assert main(["finetune", *map(str, options), f"--output_dir={tmp_path / '1'}"]) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "d2l_bert"]
    command = [*launcher, "finetune", *map(str, options), f"--output_dir={tmp_path / '2'}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0 and done.stdout.count("predictions for the test rows") == 1, done.stderr
    one, two = (read_csv(tmp_path / name / "predictions.csv") for name in "12")
    assert len(one) == 19
    assert_same_predictions(one, two, task, abs=1e-5)
    first, second = (json.loads((tmp_path / name / "metrics.json").read_text())["seeds"][0] for name in "12")
    assert (second["steps"], second["best_step"]) == (first["steps"], first["best_step"])
    for split in ("validation", "test"):
        assert second[split]["loss"] == pytest.approx(first[split]["loss"], rel=1e-5)
        assert second[split] == pytest.approx(first[split], rel=1e-3, abs=2e-2)  # correlations of near equal numbers
    logs = [json.loads(next((tmp_path / name).glob("attempts/*/result.json")).read_text())["log"] for name in "12"]
    for row, other in zip(*logs, strict=True):
        names = row.keys() & {"loss", "eval_loss", "step"}
        assert {name: row[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-4)
