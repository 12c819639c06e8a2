"""FSDP2 trains the same weights as one process, and each resumes from the other's checkpoints."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file

from d2l_bert.__main__ import main


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
OPTIONS = ["--max_steps=4", "--save_steps=2", "--micro_batch_size=3", "--mixed_precision=no"]
FILES = ("model.safetensors", "checkpoint-4/*.safetensors")


def on_fsdp(*arguments):
    """Run the command with FSDP2 on two processes, launched as docs/distributed.md describes."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0", "--num_processes=2"]
    command += [f"--config_file={ROOT / 'docs/accelerate/fsdp2.yaml'}", ROOT / "tests" / "on_fsdp.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr


def assert_the_same(one, two):
    names = [path.relative_to(one) for pattern in FILES for path in one.glob(pattern)]
    assert len(names) >= 3
    for name in names:
        one_file, two_file = load_file(one / name), load_file(two / name)
        assert one_file.keys() == two_file.keys()
        for key in one_file:
            torch.testing.assert_close(one_file[key], two_file[key], atol=1e-4, rtol=0)


def without_the_end(folder, copy):
    """A copy of the folder without the files that a run writes after its second step."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoint-4")
    for name in ("model.safetensors", "metrics.json"):
        (copy / name).unlink()
    return copy


@pytest.mark.parametrize(
    "options",
    [["--tie_word_embeddings=true"], ["--ema_decay=0.9"], ["--optim=muon"]],
    ids=["tied", "averaged", "muon"],
)
def test_fsdp2_and_one_process_train_the_same_weights_and_resume_each_others_checkpoints(books, tmp_path, options):
    """
    Each evaluation comes right before a checkpoint, when FSDP2 holds some parameters unsharded, as other objects.
    """
    command = ["pretrain", f"--corpus={books}", "--tie_word_embeddings=false", *options, *OPTIONS, *SMALL]
    assert main([*command, f"--output_dir={tmp_path / 'one'}"]) == 0
    on_fsdp(*command, f"--output_dir={tmp_path / 'two'}")
    assert_the_same(tmp_path / "one", tmp_path / "two")
    back = without_the_end(tmp_path / "two", tmp_path / "back")
    assert main([*command, f"--output_dir={back}", "--resume_from_checkpoint=latest"]) == 0
    assert_the_same(tmp_path / "one", back)
    there = without_the_end(tmp_path / "one", tmp_path / "there")
    on_fsdp(*command, f"--output_dir={there}", "--resume_from_checkpoint=latest")
    assert_the_same(tmp_path / "one", there)
