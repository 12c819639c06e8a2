"""A program that calls `pretrain` finds its settings unchanged afterwards: of its libraries and of its process."""

import copy
import gc
import logging
import os
import random
import signal
import warnings
from dataclasses import replace

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

from d2l_bert import RECIPES, D2lBertConfig, pretrain


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
    numbers |= {"torch_compile": True, "mixed_precision": "bf16"}
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


def test_a_run_leaves_the_settings_of_its_host_unchanged(job, host):
    before = copy.copy(host())
    pretrain(*job)
    assert host() == before
    Accelerator(cpu=ON_CPU, mixed_precision="no")  # the host may still use a precision other than the run's
