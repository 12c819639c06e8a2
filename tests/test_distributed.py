"""Several processes as one run: refused settings, messages of rank 0 alone, and tensors gathered whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from conftest import SMALL

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.errors import UserError, launched_rank
from d2l_bert.training import distributed


ROOT = Path(__file__).parent.parent


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


def test_only_rank_0_reports_a_user_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, raised in (("0", UserError), ("1", SystemExit)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(raised), distributed.report_errors_once():
            raise UserError("too little text")
        with pytest.raises(KeyError), distributed.report_errors_once():
            raise KeyError("a bug is shown by whoever meets it")


def test_a_rank_left_over_in_the_environment_silences_no_error(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    for command, said in (
        (["pretrain", f"--corpus={tmp_path / 'nowhere'}", f"--output_dir={tmp_path / 'out'}"], "nowhere"),
        (["fill-mask", str(tmp_path / "nowhere"), "a [MASK]"], "nowhere"),
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    with pytest.raises(SystemExit):
        main(["pretrain", "--nothing"])
    assert "--nothing" in capsys.readouterr().err


LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


ONE_PROCESS = pytest.mark.parametrize(
    "given", [{"RANK": "1"}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=str
)


@ONE_PROCESS
def test_a_rank_alone_or_a_world_size_of_1_counts_as_rank_0_of_one_process(monkeypatch, given):
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert launched_rank() == 0
    distributed.check_engine(engine(1))


@ONE_PROCESS
@pytest.mark.slow
def test_a_rank_alone_or_a_world_size_of_1_gives_an_ordinary_run_of_one_process(books, tmp_path, given):
    """In a process of its own, because Accelerate reads the environment only once."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    command = [sys.executable, "-m", "d2l_bert", "pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}"]
    process = subprocess.run(
        [*command, *SMALL, "--max_steps=2", "--mixed_precision=no"],
        capture_output=True,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1", **given},
        timeout=120,
    )
    assert process.returncode == 0 and "step 2/2" in process.stderr, process.stderr
    assert json.loads((tmp_path / "out" / "run_config.json").read_text())["machine"]["processes"] == 1


def test_a_plain_model_has_the_same_class_weights_and_ties():
    config = D2lBertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, tie_word_embeddings=True)
    model = D2lBertForPreTraining(config)
    plain = distributed.unsharded_model(model, {name: p.detach() for name, p in model.named_parameters()})
    assert type(plain) is D2lBertForPreTraining and plain is not model
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert plain.mlm.decoder.weight is plain.bert.embeddings.word_embeddings.weight
