"""Processes and devices: refused settings, a run's defaults, and settings of the calling program, which are kept."""

import contextlib
import copy
import gc
import itertools
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from conftest import SMALL
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch.nn.attention import _registry, current_flash_attention_impl
from transformers.utils import logging as transformers_logging

from d2l_bert import RECIPES, D2lBertConfig, pretrain
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.training import devices, processes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import to_device
from d2l_bert.training.signals import StopSignals


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = [2, 1]
    monkeypatch.setattr(processes, "PartialState", lambda **_: SimpleNamespace(num_processes=seen.pop(0)))
    monkeypatch.setattr(processes, "hosts", lambda: None)
    processes.start_processes()
    with pytest.raises(ValueError, match="2 processes were launched, but Accelerate sees 1; set ACCELERATE_USE_CPU"):
        processes.start_processes()


@pytest.mark.parametrize(
    ("asked", "has_gpu", "on_cpu"), [("true", True, True), ("no", True, False), ("no", False, True)]
)
def test_a_run_keeps_off_a_gpu_where_the_launcher_says_so(monkeypatch, asked, has_gpu, on_cpu):
    given = []
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        processes, "PartialState", lambda **o: given.append(o["cpu"]) or SimpleNamespace(num_processes=1)
    )
    processes.start_processes()
    assert given == [on_cpu]


@pytest.mark.parametrize(
    ("kind", "version_2", "asked", "refusal"),
    [
        (DistributedType.FSDP, "checkpoints", "true", "give gradient_checkpointing"),
        (DistributedType.FSDP, True, "false", None),
        (DistributedType.FSDP, True, "true", None),
        (DistributedType.FSDP, False, "false", "first version is not supported; set fsdp_version: 2"),
        (DistributedType.MULTI_CPU, False, "true", "FSDP was asked for, but Accelerate has none on"),
    ],
)
def test_a_request_for_fsdp_that_accelerate_did_not_follow_is_refused(monkeypatch, kind, version_2, asked, refusal):
    made = SimpleNamespace(num_processes=1, distributed_type=kind, is_fsdp2=version_2, device=torch.device("cpu"))
    made.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(activation_checkpointing=version_2 == "checkpoints"))
    monkeypatch.setattr(devices, "Accelerator", lambda **_: made)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)
    with pytest.raises(UserError, match=refusal) if refusal else contextlib.nullcontext():
        devices.make_accelerator("no")


def test_a_second_run_with_fsdp_in_a_process_finds_the_processes_as_the_first_one_did(monkeypatch):
    """Accelerate notes FSDP at the processes, and sets it up where these have several GPUs."""
    found = []
    processes.start_processes()
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.FSDP)
    made = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    monkeypatch.setattr(devices, "Accelerator", lambda **_: found.append(PartialState().distributed_type) or made)
    devices.make_accelerator("no")
    assert found == [DistributedType.MULTI_GPU]


@pytest.mark.parametrize(
    "variable, what",
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed is not supported"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "tensor or context parallelism is not supported"),
    ],
)
def test_unsupported_engines_are_refused_in_one_line(monkeypatch, fails, tmp_path, variable, what):
    monkeypatch.setenv(variable, "true")
    assert what in fails("pretrain", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_hosts_that_cannot_be_connected_are_told_what_to_set(monkeypatch):
    def fail(**options):
        raise RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error")

    monkeypatch.setattr(processes, "PartialState", lambda: SimpleNamespace(num_processes=2, process_index=0))
    monkeypatch.setattr(torch.distributed, "new_group", fail)
    with pytest.raises(UserError, match="connectFullMesh failed.*; set GLOO_SOCKET_IFNAME to"), processes.together():
        pass


def test_a_vote_to_stop_does_not_wait_for_the_device():
    """Nothing can be read from the device "meta"."""
    stop = StopSignals(SimpleNamespace(device=torch.device("meta"), num_processes=1))
    assert not stop.should_stop()
    stop.received_signal = signal.SIGTERM
    assert stop.should_stop() and stop.agreed_signal == signal.SIGTERM


def test_gradient_accumulation_set_by_the_launcher_does_not_divide_the_loss(monkeypatch):
    """With this variable, `Accelerator.backward` would divide the loss once more."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = devices.make_accelerator("no")
    weight = torch.tensor(1.0, requires_grad=True)
    accelerator.backward(3 * weight)
    assert weight.grad == 3


# ---------------------------------------------------------------------------------------------------------------------
# Memory


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


# ---------------------------------------------------------------------------------------------------------------------
# Defaults


GPU_MEMORY = 80 * 10**9


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU, with this memory."""
    memory = SimpleNamespace(total_memory=GPU_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    return memory


def chosen(device, run=None, architecture=None, precision="no"):
    accelerator = SimpleNamespace(device=torch.device(device), mixed_precision=precision)
    return devices.with_defaults(run or PretrainConfig(), architecture or D2lBertConfig(), accelerator)


def test_eager_attention_is_chosen_on_a_cpu_except_for_long_rows_without_dropout(gpu):
    for device, length, dropout in itertools.product(("cpu", "cuda"), (256, 257), (0.0, 0.1)):
        run = PretrainConfig(max_seq_length=length)
        architecture = D2lBertConfig(attention_probs_dropout_prob=dropout)
        is_sdpa = device == "cuda" or (length, dropout) == (257, 0.0)
        assert chosen(device, run, architecture).attn_implementation == ("sdpa" if is_sdpa else "eager")


@pytest.mark.parametrize(
    ("option", "on_cpu", "on_gpu", "asked"),
    [
        ("torch_compile", False, True, True),
        ("micro_batch_size", 128, 512, 3),
        ("dataloader_num_workers", 0, 1, 0),
        ("dataloader_num_workers", 0, 1, 2),
    ],
)
def test_defaults_depend_on_the_device_and_give_way_to_options(gpu, option, on_cpu, on_gpu, asked):
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert getattr(chosen(device), option) == expected
        run = PretrainConfig(**{option: asked})
        assert getattr(chosen(device, run), option) == asked


def test_the_default_micro_batch_has_fewer_pairs_where_they_are_longer_and_takes_at_most_half_of_a_gpu(gpu):
    for device, length, pairs in (("cpu", 64, 256), ("cpu", 512, 32), ("cpu", 10**5, 1), ("cuda", 512, 128)):
        assert chosen(device, PretrainConfig(max_seq_length=length)).micro_batch_size == pairs
    large = D2lBertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
    # The bytes for a token, a block and a hidden unit; the next power of two of tokens would be too many.
    for memory, (precision, unit) in itertools.product(
        (GPU_MEMORY, 16 * 10**9), {"bf16": 122, "fp16": 122, "no": 244}.items()
    ):
        gpu.total_memory = memory
        tokens = chosen("cuda", architecture=large, precision=precision).micro_batch_size * 128
        assert tokens * unit * 24 * 1024 <= memory / 2 < 2 * tokens * unit * 24 * 1024


@pytest.mark.parametrize(
    ("capability", "precision", "changes", "has_varlen"),
    [
        ((7, 5), "fp16", {}, False),
        ((8, 0), "fp16", {}, True),
        ((9, 0), "bf16", {}, True),
        ((9, 0), "no", {}, False),
        ((9, 0), "bf16", {"attention_probs_dropout_prob": 0.1}, False),
        ((9, 0), "bf16", {"hidden_size": 100, "num_attention_heads": 5}, False),  # heads of 20
    ],
)
def test_varlen_is_the_default_where_a_gpu_has_flash_attention_and_else_refused(
    gpu, monkeypatch, capability, precision, changes, has_varlen
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    architecture = D2lBertConfig(**{"attention_probs_dropout_prob": 0.0, **changes})
    default = chosen("cuda", None, architecture, precision).attn_implementation
    assert default == ("varlen" if has_varlen else "sdpa")
    message = "needs an NVIDIA GPU from Ampere on .*; give sdpa"
    with contextlib.nullcontext() if has_varlen else pytest.raises(UserError, match=message):
        chosen("cuda", PretrainConfig(attn_implementation="varlen"), architecture, precision)
    sdpa = PretrainConfig(attn_implementation="sdpa")
    assert chosen("cuda", sdpa, architecture, precision).attn_implementation == "sdpa"


def test_flash_attention_3_is_used_where_it_is_installed_and_given_back(monkeypatch, caplog):
    hopper = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    run = PretrainConfig(attn_implementation="varlen")

    def fail_with(error):
        def load():
            raise error

        return load

    absent = ModuleNotFoundError("flash_attn_interface")
    for_another_pytorch = ImportError("undefined symbol: _ZN3c104cuda")
    for error in (absent, for_another_pytorch):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", fail_with(error))
        devices.use_flash_attention_3(run, hopper)
        assert current_flash_attention_impl() is None
        assert ("undefined symbol" in caplog.text) == (error is for_another_pytorch)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: SimpleNamespace(remove=lambda: None))
    with processes.restore_host_settings():
        devices.use_flash_attention_3(PretrainConfig(attn_implementation="sdpa"), hopper)
        assert current_flash_attention_impl() is None
        devices.use_flash_attention_3(run, hopper)
        assert current_flash_attention_impl() == "FA3"
    assert current_flash_attention_impl() is None


def test_unused_memory_is_freed_on_apples_gpus_alone(monkeypatch):
    freed = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: freed.append(True))
    devices.free_unused_memory(torch.device("cpu"))
    assert not freed
    devices.free_unused_memory(torch.device("mps"))
    assert freed


def test_a_run_frees_unused_memory_with_each_row_of_its_log(books, tmp_path, monkeypatch):
    freed = []
    monkeypatch.setattr(devices, "free_unused_memory", freed.append)
    options = ["--max_steps=6", "--logging_steps=2", "--eval_steps=6", "--save_steps=6", "--mixed_precision=no"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, *options]) == 0
    assert freed == [torch.device("cpu")] * 3


def test_copies_to_an_apple_gpu_are_waited_for_and_those_to_another_are_not():
    class Watched(torch.Tensor):
        def to(self, device, non_blocking):
            return non_blocking

    tensor = torch.zeros(2).as_subclass(Watched)
    assert to_device(tensor, torch.device("cuda")) is True
    assert to_device(tensor, torch.device("mps")) is False


# ---------------------------------------------------------------------------------------------------------------------
# Precision


@pytest.mark.parametrize(
    ("asked", "launchers", "precision"),
    [("no", "bf16", "no"), (None, "bf16", "bf16"), ("bf16", "no", "bf16"), (None, "no", None)],
)
@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_launchers_precision_is_taken_where_no_other_is_asked_for_or_a_line_says_which(
    monkeypatch, caplog, asked, launchers, precision, has_bf16
):
    """`accelerate launch` also sets `no` if its user has not chosen: then it is bf16 if the hardware has that."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    expected = precision or ("bf16" if has_bf16 else "no")
    with caplog.at_level("INFO", "d2l_bert"):
        accelerator = devices.make_accelerator(asked)
    assert accelerator.mixed_precision == expected
    assert (f"not the launcher's {launchers}" in caplog.text) == (expected != launchers and asked is None)
    run = devices.with_defaults(PretrainConfig(mixed_precision=asked), D2lBertConfig(), accelerator)
    assert run.mixed_precision == expected, "so stands in the run's record"


@pytest.mark.parametrize(
    ("device", "capability", "precision"),
    [
        ("cuda", (6, 1), "no"),  # Pascal
        ("cuda", (7, 0), "fp16"),  # V100
        ("cuda", (7, 5), "fp16"),  # T4
        ("cuda", (8, 0), "bf16"),  # A100
        ("mps", None, "no"),
    ],
)
def test_a_gpu_computes_in_bf16_or_else_in_fp16_if_it_is_fast_at_that(monkeypatch, device, capability, precision):
    def has_bf16(including_emulation):
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.default_precision(torch.device(device)) == precision


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="on a CPU alone")
@pytest.mark.parametrize("options", [["--mixed_precision=fp16"], ["--mixed_precision=fp16", "--dry_run"], []])
def test_fp16_is_refused_on_a_cpu_with_what_a_cpu_has(tmp_path, fails, monkeypatch, options):
    """Accelerate alone would train in float32 without a message. Without an option the launcher asks for fp16."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no" if options else "fp16")
    line = fails("pretrain", "--optim=adamw", "--output_dir", tmp_path / "out", *options)
    assert "mixed_precision fp16 needs a GPU; give bf16 or no" in line and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A program that calls `pretrain` finds its settings unchanged afterwards: of its libraries and of its process


RECOMPUTATION_LIMITS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
ON_CPU = not torch.cuda.is_available()


@pytest.fixture
def job(books, tmp_path, monkeypatch):
    """The arguments of `pretrain`: a small model, 2 steps, blocks compiled by a fake compiler that changes nothing."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    architecture = D2lBertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, max_position_embeddings=48
    )
    _, run = RECIPES["tiny"]()
    numbers = {"vocab_size": 400, "max_seq_length": 48, "global_batch_size": 8, "max_steps": 2}
    numbers |= {"length_schedule": ["32:0.7"], "torch_compile": True, "mixed_precision": "bf16"}
    return architecture, replace(run, corpus=[str(books)], output_dir=str(tmp_path / "out"), **numbers)


@pytest.fixture
def host():
    """A program with settings of its own. Returns a function that gives their present values."""
    bars = (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled())
    transformers_logging.enable_progress_bar()
    disable_progress_bars("host.downloads")
    AcceleratorState._reset_state()  # earlier tests may have left a state
    torch.backends.cuda.enable_cudnn_sdp(True)
    accelerator = Accelerator(cpu=ON_CPU, mixed_precision="no", gradient_accumulation_steps=4)

    def settings():
        return {
            "recomputation": [getattr(torch._functorch.config, name) for name in RECOMPUTATION_LIMITS],
            "programs": torch._dynamo.config.recompile_limit,
            "bars": (transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()),
            "bars of the Hub": (are_progress_bars_disabled(), are_progress_bars_disabled("host.downloads")),
            "accelerator": (accelerator.mixed_precision, accelerator.gradient_accumulation_steps),
            "environment": dict(os.environ),
            "signals": [signal.getsignal(number) for number in SIGNALS],
            "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
            "gradients": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
            "products": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
            "kernels": torch.backends.cuda.cudnn_sdp_enabled(),
            "warnings": list(warnings.filters),
            "logging": [logging.getLogger(name).level for name in ("", "transformers", "datasets", "accelerate")],
            "random numbers of Python": random.getstate(),
            "folder": os.getcwd(),
            "garbage": (gc.isenabled(), gc.get_threshold()),
        }

    with (
        torch._functorch.config.patch(dict.fromkeys(RECOMPUTATION_LIMITS, True)),
        torch._dynamo.config.patch(recompile_limit=5),
    ):
        yield settings
    enable_progress_bars() if not bars[1] else disable_progress_bars()
    if not bars[0]:
        transformers_logging.disable_progress_bar()


@pytest.mark.slow
def test_a_run_leaves_the_settings_of_its_host_unchanged(job, host):
    before = copy.copy(host())
    pretrain(*job)
    assert host() == before
    Accelerator(cpu=ON_CPU, mixed_precision="no")  # the host may still use a precision other than the run's
