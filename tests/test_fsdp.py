"""FSDP2 trains the same weights as one process, and each resumes from the other's checkpoints."""

import shutil

import pytest
import torch
from conftest import SMALL
from promises.driving import end, start
from safetensors.torch import load_file

from d2l_bert.__main__ import main


pytestmark = pytest.mark.slow

OPTIONS = ["--max_steps=4", "--save_steps=2", "--micro_batch_size=3", "--mixed_precision=no"]
FILES = ("model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.safetensors")


def assert_the_same(one, two, *files):
    for name in (*FILES, *files):
        tensors, expected = load_file(two / name), load_file(one / name)
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(tensors[key], tensor, atol=1e-4, rtol=0)


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

    def train(folder, *more, with_fsdp):
        words = ["pretrain", f"--corpus={books}", "--tie_word_embeddings=false", *options, *OPTIONS, *SMALL, *more]
        if with_fsdp:
            said = tmp_path / "said.txt"
            ranks = start([*words, f"--output_dir={folder}"], script="on_fsdp.py", processes=2, said=said)
            assert end(ranks, 300) == [0, 0], said.read_text()
        else:
            assert main([*words, f"--output_dir={folder}"]) == 0

    averages = ["checkpoint-4/average.safetensors"] if "--ema_decay=0.9" in options else []
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, with_fsdp=False)
    train(two, with_fsdp=True)
    assert_the_same(one, two, *averages)
    for source, with_fsdp in ((two, False), (one, True)):
        resumed = without_the_end(source, tmp_path / f"from-{source.name}")
        train(resumed, "--resume_from_checkpoint=latest", with_fsdp=with_fsdp)
        assert_the_same(one, resumed, *averages)
