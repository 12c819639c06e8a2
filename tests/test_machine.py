"""What a run chooses for its machine: micro-batch size, memory, attention, loader workers."""

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from runs import run

from d2l_bert import D2lBertConfig
from d2l_bert.training import machine
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator


@pytest.mark.slow
def test_the_automatic_micro_batch_size_is_found_once_and_kept_on_resuming(books, tmp_path, monkeypatch):
    tried, find = [], machine.find_micro_batch

    def watched(*arguments):
        tried.append(find(*arguments))
        return 2  # whatever is fastest here

    monkeypatch.setattr("d2l_bert.training.pretrain.find_micro_batch", watched)
    options = ("--max_steps=4", "--save_steps=2", "--mixed_precision=no")
    found = run(books, tmp_path / "found", *options, "--micro_batch_size=auto")
    assert len(tried) == 1 and tried[0] in (1, 2, 4, 8)
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2
    assert run(books, tmp_path / "given", *options, "--micro_batch_size=2") == found, "trying left no trace"
    shutil.rmtree(tmp_path / "found" / "checkpoint-4")
    again = run(books, tmp_path / "found", *options, "--micro_batch_size=auto", "--resume_from_checkpoint=latest")
    assert len(tried) == 1 and again == found, "a resumed run obeys what was found"
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2


def job_of(run):
    return SimpleNamespace(run=run, text=None, sharding=None)


class Timed:
    """A learner on a clock of its own: a micro-batch of n pairs takes `seconds(n)`, or has no memory beyond `fits`."""

    def __init__(self, monkeypatch, seconds, fits=10**6):
        self.now, self.seconds, self.fits, self.reset = 0.0, seconds, fits, 0
        self.accelerator = make_accelerator("no")
        monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(machine, "trial_micro_batches", lambda run, text, size, sharding: [self.batch(size)])

    def batch(self, size):
        return {"attention_mask": torch.ones((size, 10))}

    def try_gradient(self, batch):
        size = len(batch["attention_mask"])
        if size > self.fits:
            raise RuntimeError("CUDA out of memory.")
        self.now += self.seconds(size)
        return torch.zeros(())

    def take_step(self, micro_batches):
        self.try_gradient(*micro_batches)

    wrapped_model = SimpleNamespace(zero_grad=lambda: None)

    def reset_optimizers(self):
        self.reset += 1


@pytest.mark.parametrize(
    ("seconds", "fits", "pairs", "expected"),
    [
        (lambda size: max(size, 8), 10**6, 100, 8),  # beyond 8 pairs nothing is gained
        (lambda size: 1.0, 10**6, 24, 24),  # the whole batch
        (lambda size: 1.0, 5, 24, 4),  # memory ran out
    ],
)
def test_the_micro_batch_size_grows_while_that_makes_steps_faster(monkeypatch, seconds, fits, pairs, expected):
    learner = Timed(monkeypatch, seconds, fits)
    assert machine.find_micro_batch(job_of(PretrainConfig(global_batch_size=pairs)), learner) == expected
    assert learner.reset == 1


KEEP_AND_FREE = """
import pathlib, re, sys
import numpy as np
from d2l_bert.commands import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
arrays = [np.ones(2**21) for _ in range(80)]
del arrays
print(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="another allocator may be in force"
)
@pytest.mark.slow
def test_glibc_keeps_all_freed_memory():
    held = {
        how: int(subprocess.run([sys.executable, "-c", KEEP_AND_FREE, how], capture_output=True, check=True).stdout)
        for how in ("kept", "as it is")
    }
    assert held["kept"] - held["as it is"] > 1.2 * 2**20  # in KiB: most of the 1.25 GiB freed


def on(device):
    return SimpleNamespace(device=torch.device(device), is_fsdp2=False, mixed_precision="no")


def test_eager_attention_is_chosen_on_a_cpu_except_for_long_rows_without_dropout():
    cases = list(itertools.product(("cpu", "cuda"), (256, 257), (0.0, 0.1)))
    chosen = {
        (device, length, dropout): machine.with_defaults(
            PretrainConfig(max_seq_length=length), D2lBertConfig(attention_probs_dropout_prob=dropout), on(device)
        ).attn_implementation
        for device, length, dropout in cases
    }
    on_gpu = {case for case in cases if case[0] == "cuda"}
    assert {case for case in cases if chosen[case] == "sdpa"} == {("cpu", 257, 0.0), *on_gpu}
    assert set(chosen.values()) == {"eager", "sdpa"}


@pytest.mark.parametrize(
    ("option", "on_cpu", "on_gpu", "asked"),
    [
        ("dataloader_num_workers", 0, 1, 2),
        ("torch_compile", False, True, True),
    ],
)
def test_defaults_depend_on_the_device_and_give_way_to_options(option, on_cpu, on_gpu, asked):
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert getattr(machine.with_defaults(PretrainConfig(), D2lBertConfig(), on(device)), option) == expected
        run = PretrainConfig(**{option: asked})
        assert getattr(machine.with_defaults(run, D2lBertConfig(), on(device)), option) == asked
