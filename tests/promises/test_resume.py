"""A run can be killed at any instant: it goes on from its last whole checkpoint and ends with the same bytes."""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import d2l_bert

from .driving import SMALL, command, end, error_lines, read_json, seconds_since_fault, start, wait_for, weights_of


LATEST = "--resume_from_checkpoint=latest"
# With dropout, schedules of length and batch, an average, and a checkpoint every third step.
RUN = [*SMALL, "--max_steps=14", "--save_steps=3", "--save_total_limit=9", "--hidden_dropout_prob=0.2"]
RUN += ["--ema_decay=0.9", "--batch_size_schedule", "4:0.3", "--length_schedule", "16:0.5", "--license=mit"]


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    assert command("pretrain", "--corpus", texts, "--output_dir", folder, *RUN) == 0
    return folder


def cut_back(whole, folder, step):
    """A copy of a run's folder as it was after its checkpoint at a step."""
    shutil.copytree(whole, folder)
    (folder / "model.safetensors").unlink()
    (folder / "metrics.json").unlink()
    for path in folder.glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    return folder


def losses(folder):
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.mark.parametrize("step", [3, 9])
def test_a_resumed_run_ends_with_the_same_bytes(texts, whole, tmp_path, step):
    """At step 3 the pairs are short; at step 9 they are long, and the batch has grown."""
    folder = cut_back(whole, tmp_path / "out", step)
    (folder / f".checkpoint-{step + 3}.part").mkdir()  # as if it was killed while it saved
    assert command("pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST) == 0
    assert weights_of(folder) == weights_of(whole)
    assert losses(folder) == losses(whole)
    figures = [read_json(path / "metrics.json") for path in (folder, whole)]
    for name in ("eval_mlm_loss", "eval_nsp_accuracy", "train_skipped_steps"):
        assert figures[0][name] == figures[1][name]


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_each_optimizer_goes_on_as_if_never_stopped(texts, tmp_path, optim):
    options = [*SMALL, f"--optim={optim}", "--max_steps=6", "--save_steps=2", "--save_total_limit=9"]
    assert command("pretrain", "--corpus", texts, "--output_dir", tmp_path / "a", *options) == 0
    folder = cut_back(tmp_path / "a", tmp_path / "b", 4)
    assert command("pretrain", "--corpus", texts, "--output_dir", folder, *options, LATEST) == 0
    assert weights_of(folder) == weights_of(tmp_path / "a")


def test_how_a_run_is_computed_may_change_on_resuming(texts, whole, tmp_path):
    """Micro-batches, workers and logging, and an option that changes steps is refused."""
    folder = cut_back(whole, tmp_path / "out", 9)
    words = ["pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST, "--micro_batch_size=3"]
    assert command(*words, "--dataloader_num_workers=1", "--logging_steps=1") == 0
    ends = [load_file(path / "model.safetensors") for path in (folder, whole)]
    for name, tensor in ends[1].items():  # other micro-batches, other rounding, other dropout masks
        torch.testing.assert_close(ends[0][name], tensor, rtol=0, atol=0.1)
    assert [step for step, _ in losses(folder)] == list(range(1, 15))


@pytest.mark.parametrize(
    "option, named", [("--learning_rate=1e-4", "learning_rate"), ("--seed=1", "seed"), ("--masking=span", "masking")]
)
def test_resuming_another_run_is_refused_by_its_first_difference(texts, whole, tmp_path, capsys, option, named):
    folder = cut_back(whole, tmp_path / "out", 9)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert command("pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST, option) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert named in line
    assert {path: path.read_bytes() for path in before} == before


def test_a_damaged_checkpoint_is_named_and_passed_over(texts, whole, tmp_path, capsys):
    """One changed byte in the last checkpoint: the one before serves, and the end is the same."""
    folder = cut_back(whole, tmp_path / "out", 9)
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = folder / "checkpoint-9" / name
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        assert command("pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST) == 0
        assert "checkpoint-9" in capsys.readouterr().err
        assert weights_of(folder) == weights_of(whole)
        shutil.rmtree(folder)
        folder = cut_back(whole, tmp_path / "out", 9)


def test_no_checkpoint_holds_a_pickle_and_each_loads_as_a_model(whole):
    for checkpoint in whole.glob("checkpoint-*"):
        for file in checkpoint.iterdir():
            assert file.suffix in (".safetensors", ".json", ".py", ".txt"), file.name
        d2l_bert.D2lBertForPreTraining.from_pretrained(checkpoint)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(texts, whole, tmp_path):
    """Killed at random instants, while it reads, trains and saves."""
    folder, rng, kills = tmp_path / "out", random.Random(0), 0
    words = ["pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST]
    slow = {"PROMISES_STEP_SECONDS": "0.15"}
    for _ in range(6):
        (run,) = start(words, script="faulty.py", environment=slow, said=tmp_path / "said.txt")
        steps = len(list(folder.glob("checkpoint-*")))
        limit = time.monotonic() + 60
        while run.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
            if len(list(folder.glob("checkpoint-*"))) > steps or rng.random() < 0.004:
                time.sleep(rng.random() * 0.4)
                break
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            kills += 1
        run.wait()
        if (folder / "model.safetensors").exists():
            break
    assert kills >= 3
    assert command(*words) == 0 if not (folder / "model.safetensors").exists() else True
    assert weights_of(folder) == weights_of(whole) and losses(folder) == losses(whole)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_one(texts, tmp_path):
    """Without dropout, whose masks follow the ranks: up to rounding, both ways end alike."""
    options = [*SMALL, "--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0", "--learning_rate=1e-4"]
    options += ["--max_steps=8", "--save_steps=4", "--save_total_limit=9", "--license=mit"]
    words = ["pretrain", "--corpus", texts, *options]
    assert command(*words, "--output_dir", tmp_path / "one") == 0
    assert end(start([*words, "--output_dir", tmp_path / "two"], processes=2)) == [0, 0]
    for source, processes in (("one", 2), ("two", 1)):
        folder = cut_back(tmp_path / source, tmp_path / f"{source}-then-{processes}", 4)
        assert end(start([*words, "--output_dir", folder, LATEST], processes=processes)) == [0] * processes
        ends = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "one")]
        for name, tensor in ends[1].items():
            torch.testing.assert_close(ends[0][name], tensor, rtol=0, atol=1e-4, msg=name)


def copy_of_the_package(folder):
    """The installed package as one folder of files."""
    for name in ("", "modeling", "tokenization", "training", "model_cards"):
        module = importlib.import_module(".".join(filter(None, ["d2l_bert", name])))
        shutil.copytree(Path(module.__file__).parent, folder / "d2l_bert" / name, dirs_exist_ok=True)
    return folder


@pytest.mark.slow
def test_a_run_goes_on_after_a_comment_in_the_source_and_an_upgrade_of_libraries(texts, whole, tmp_path):
    package = copy_of_the_package(tmp_path / "copy")
    for file in package.rglob("*.py"):
        file.write_text(file.read_text() + "\n# A comment more.\n")
    folder = cut_back(whole, tmp_path / "out", 9)
    code = (
        "import importlib.metadata, runpy, sys; real = importlib.metadata.version; "
        "newer = {'sentencex': '99.0', 'tokenizers': '0.23.99'}; "
        "importlib.metadata.version = lambda name: newer.get(name) or real(name); "
        "runpy.run_module('d2l_bert', run_name='__main__')"
    )
    words = ["pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST]
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert weights_of(folder) == weights_of(whole)


@pytest.mark.slow
def test_a_stopped_run_says_so_saves_and_goes_on(texts, whole, tmp_path):
    """SIGTERM after the first step, and Ctrl-C later: 143 and 130, a checkpoint, the same bytes in the end."""
    folder = tmp_path / "out"
    words = ["pretrain", "--corpus", texts, "--output_dir", folder, *RUN, LATEST]
    for number, step, code in ((signal.SIGTERM, 1, 143), (signal.SIGINT, 4, 130)):
        fault = {"PROMISES_SIGNAL": str(int(number)), "PROMISES_AT_STEP": str(step)}
        (run,) = start(words, script="faulty.py", environment=fault, said=tmp_path / "said.txt")
        assert end([run], 60) == [code], (tmp_path / "said.txt").read_text()
        assert seconds_since_fault((tmp_path / "said.txt").read_text()) < 10
        assert "--resume_from_checkpoint latest" in (tmp_path / "said.txt").read_text()
    assert {path.name for path in folder.glob("checkpoint-*")} >= {"checkpoint-1", "checkpoint-5"}
    assert command(*words) == 0
    assert weights_of(folder) == weights_of(whole) and losses(folder) == losses(whole)


@pytest.mark.slow
def test_two_processes_stop_together(texts, tmp_path):
    """Rank 1 alone gets the signal: both ranks finish the step, and rank 0 saves."""
    fault = {"PROMISES_SIGNAL": str(int(signal.SIGTERM)), "PROMISES_AT_STEP": "2", "PROMISES_RANK": "1"}
    words = ["pretrain", "--corpus", texts, "--output_dir", tmp_path / "out", *RUN]
    runs = start(words, script="faulty.py", environment=fault, processes=2, said=tmp_path / "said.txt")
    assert end(runs, 60) == [143, 143], (tmp_path / "said.txt").read_text()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(texts, tmp_path, capsys):
    words = ["pretrain", "--corpus", texts, "--output_dir", tmp_path / "out", *RUN]
    (run,) = start(words, script="faulty.py", environment={"PROMISES_STEP_SECONDS": "1"}, said=tmp_path / "said.txt")
    wait_for(lambda: "/14 " in (tmp_path / "said.txt").read_text(), [run])
    assert command(*words, "--overwrite_output_dir") == 2
    assert str(tmp_path / "out") in error_lines(capsys.readouterr().err)[0]
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
