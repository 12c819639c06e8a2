"""Several processes as one run: refused settings, messages of rank 0 alone, and tensors gathered whole."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType

from d2l_bert.cli import main
from d2l_bert.training import distributed


def engine(processes=1, kind=DistributedType.MULTI_CPU, fsdp2=False):
    device = torch.device("cpu")
    return SimpleNamespace(num_processes=processes, distributed_type=kind, is_fsdp2=fsdp2, device=device)


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.check_engine(engine(2))
    with pytest.raises(ValueError, match="2 processes were launched, but Accelerate sees 1; set ACCELERATE_USE_CPU"):
        distributed.check_engine(engine(1))


def test_a_request_for_fsdp_that_accelerate_did_not_follow_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    distributed.check_engine(engine(kind=DistributedType.FSDP, fsdp2=True))
    with pytest.raises(ValueError, match="first version is not supported; set fsdp_version: 2"):
        distributed.check_engine(engine(kind=DistributedType.FSDP))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    distributed.check_engine(engine(kind=DistributedType.FSDP, fsdp2=True))
    with pytest.raises(ValueError, match="FSDP was asked for, but Accelerate has none on"):
        distributed.check_engine(engine())


@pytest.mark.parametrize(
    "variable, what",
    [
        ("ACCELERATE_USE_FSDP", "FSDP was asked for, but Accelerate has none on"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed is not supported"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "tensor or context parallelism is not supported"),
    ],
)
def test_unsupported_engines_are_refused_in_one_line(monkeypatch, capsys, tmp_path, variable, what):
    monkeypatch.setenv(variable, "true")
    assert main(["pretrain", f"--output_dir={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line and not (tmp_path / "out").exists()


def test_gradient_accumulation_set_by_the_launcher_does_not_divide_the_loss(monkeypatch):
    """With this variable, `Accelerator.backward` would divide the loss once more."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = distributed.make_accelerator("no")
    weight = torch.tensor(1.0, requires_grad=True)
    accelerator.backward(3 * weight)
    assert weight.grad == 3


@pytest.mark.slow
def test_a_mistake_seen_by_all_ranks_is_reported_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "d2l_bert"]
    command += ["pretrain", f"--corpus={tmp_path / 'nowhere'}", f"--output_dir={tmp_path / 'out'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    (line,) = [line for line in process.stderr.splitlines() if "d2l-bert pretrain: error:" in line]
    assert "nowhere" in line and not (tmp_path / "out").exists()
    assert "Traceback" not in process.stderr.partition("ChildFailedError")[0].partition("torch/distributed")[0]
