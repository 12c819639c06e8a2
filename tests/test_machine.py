"""What a run chooses for its machine: micro-batch size, memory, attention, loader workers."""

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys

import pytest
from conftest import SMALL
from runs import run

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.tokenization import prepare
from d2l_bert.training import data, trials
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.device import faster_attention, resolve_num_workers


def test_the_automatic_micro_batch_size_is_found_once_and_kept_on_resuming(books, tmp_path, monkeypatch):
    tried = []

    def fastest(speed, most):
        tried.append((most, speed(2) > 0))
        return 2

    monkeypatch.setattr(trials, "fastest", fastest)
    options = ("--max_steps=4", "--save_steps=2", "--mixed_precision=no")
    found = run(books, tmp_path / "found", *options, "--micro_batch_size=auto")
    assert tried == [(8, True)]
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2
    assert run(books, tmp_path / "given", *options, "--micro_batch_size=2") == found, "trying left no trace"
    shutil.rmtree(tmp_path / "found" / "checkpoint-4")
    again = run(books, tmp_path / "found", *options, "--micro_batch_size=auto", "--resume_from_checkpoint=latest")
    assert len(tried) == 1 and again == found, "a resumed run obeys what was found"
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2


def test_the_micro_batch_size_grows_while_that_makes_steps_faster():
    assert trials.fastest(lambda size: min(size, 8), 100) == 8
    assert trials.fastest(lambda size: size, 24) == 24
    assert trials.fastest(lambda size: size if size < 5 else 0, 24) == 4, "memory ran out"
    with pytest.raises(ValueError, match="out of memory with a single pair"):
        trials.fastest(lambda size: 0, 24)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_neighbour_in_half_of_the_turns_does_not_decide_about_the_micro_batch_size(first):
    """Other programs halve the speed in every second pair of calls, and a size is tried in a pair of calls."""
    calls = itertools.count(first)
    assert trials.fastest(lambda size: min(size, 8) / (1 + next(calls) // 2 % 2), 100) == 8


def test_out_of_memory_names_the_helpful_options(books, tmp_path, capsys, monkeypatch):
    def forward(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(D2lBertForPreTraining, "forward", forward)
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=2"]
    assert main([*command, "--micro_batch_size=4"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory with micro-batches of 4 pairs; lower --micro_batch_size" in line


def test_settings_chosen_for_the_machine_are_recorded(books, tmp_path):
    options = [option for option in SMALL if "dataloader_num_workers" not in option]
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options, "--max_steps=1"]
    longer = ["--max_seq_length=320", "--max_position_embeddings=320", "--attention_probs_dropout_prob=0.1"]
    assert main([*command, *longer]) == 0
    run = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    assert (run["dataloader_num_workers"], run["attn_implementation"]) == (0, "eager")


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


def test_freed_memory_is_kept_already_while_the_text_is_read(books, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("d2l_bert.commands.keep_freed_memory", lambda: done.append("kept"))
    monkeypatch.setattr("d2l_bert.training.pretrain.prepare", lambda run: done.append("read") or prepare.prepare(run))
    run(books, tmp_path / "model", "--max_steps=1")
    assert done == ["kept", "read"]


def test_eager_attention_is_chosen_on_a_cpu_except_for_long_rows_without_dropout():
    chosen = {
        (device, length, dropout): faster_attention(
            D2lBertConfig(attention_probs_dropout_prob=dropout), PretrainConfig(max_seq_length=length), device
        )
        for device in ("cpu", "cuda")
        for length in (256, 257)
        for dropout in (0.0, 0.1)
    }
    assert {case for case, kernel in chosen.items() if kernel == "sdpa"} == {
        ("cpu", 257, 0.0),
        *(case for case in chosen if case[0] == "cuda"),
    }
    assert set(chosen.values()) == {"eager", "sdpa"}


def test_a_cpu_has_no_loader_worker_unless_requested():
    chosen = [
        resolve_num_workers(PretrainConfig(dataloader_num_workers=asked), device)
        for device in ("cpu", "cuda", "mps")
        for asked in (None, 0, 2)
    ]
    assert chosen == [0, 0, 2, 1, 0, 2, 1, 0, 2]


def test_a_killed_loader_worker_is_reported(books, tmp_path, capsys, monkeypatch):
    def kill(*_):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(data.PretrainingSteps, "__getitem__", kill)
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=2"]
    assert main([*command, "--dataloader_num_workers=1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "a process that makes batches has ended" in line and "--dataloader_num_workers 0" in line
