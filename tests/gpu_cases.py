"""What the package does on a GPU, on the one of gpu_in_python.py; test_gpu_in_python.py runs this in a process."""

import contextlib
import json

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from conftest import HEADS, SMALL
from gpu_in_python import GPU, WrongDevice, a_gpu
from runs import log_rows
from safetensors.torch import load_file
from small_models import assert_same, loss_and_gradients, make_rows, of_head, stacked
from torch import nn

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import devices, log, shards
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Counts
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.held_out import HeldOutPairs, held_out_counts
from d2l_bert.training.learner import Learner
from d2l_bert.training.optimizers import MovingAverage


log.matmul_peak = lambda *_, **__: 1e9  # PyTorch's timer waits for the device in a way that this one does not have

# Each step reads its figures, and waits for nothing else.
ONE_WAIT = {"learner.py:update": 1}
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
NO_DROPOUT = ["--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0"]  # its masks differ between devices


@contextlib.contextmanager
def on_gpu():
    """In this block, the processes of the package have a GPU."""
    PartialState(cpu=True)
    AcceleratorState._reset_state()
    with pytest.MonkeyPatch.context() as patch, a_gpu() as gpu:
        patch.setitem(PartialState._shared_state, "device", GPU)
        # On a GPU a parameter is an `nn.Parameter`; here it is a tensor of `OnGpu`.
        patch.setattr(modeling, "is_plain", lambda layer: type(layer) is nn.Linear)
        yield gpu
    AcceleratorState._reset_state()


# ---------------------------------------------------------------------------------------------------------------------
# Steps


KINDS = {
    "full": {"objective": "none", "packing": False},
    "padded": {"packing": False},
    "packed": {"packing": True},
    "varlen": {"packing": True, "attn_implementation": "varlen"},
    "Muon": {"optim": "muon"},
    "averaged": {"ema_decay": 0.9},
}


@pytest.fixture(scope="module")
def text(books):
    return prepare(PretrainConfig(corpus=[str(books)], vocab_size=200, max_steps=1))


def take_steps(text, gpu=None, **options):
    """The figures of three steps and, on a GPU, for what each has waited."""
    sizes = {"vocab_size": 200, "max_seq_length": 16, "global_batch_size": 24, "micro_batch_size": 8, "max_steps": 3}
    of_run = {"corpus": ["books"], "objective": "nsp", "attn_implementation": "sdpa", **sizes, **options}
    run = PretrainConfig(**of_run)
    config = D2lBertConfig(
        vocab_size=len(text.tokenizer),
        hidden_size=16,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model_class = D2lBertForMaskedLM if run.objective == "none" else D2lBertForPreTraining
    model = model_class._from_config(config, attn_implementation=run.attn_implementation).train()
    learner = Learner(devices.make_accelerator("no"), model, run)
    figures = []
    waits = []
    for number, step in enumerate(TrainingSteps(run, text, run.max_steps, on_gpu=True).walk(), 1):
        if gpu:
            gpu.waits.clear()
        figures.append(learner.train_on(step, number, 0.01))
        if gpu:
            waits.append({place: count for place, count in gpu.waits.items() if count})
    return figures, waits


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_as_on_a_cpu_and_each_waits_once(text, kind):
    expected, _ = take_steps(text, **KINDS[kind])
    with on_gpu() as gpu:
        figures, waits = take_steps(text, gpu, **KINDS[kind])
    torch.testing.assert_close(torch.tensor(figures), torch.tensor(expected), **CLOSE)
    assert waits == [ONE_WAIT] * 3


def positions_on_cpu(patch):
    """Embeddings whose positions are made without a device."""
    make = torch.arange
    patch.setattr(modeling.torch, "arange", lambda *given, device=None, **named: make(*given, **named))


def norm_is_read(patch):
    """A step that reads the norm of its gradient by itself."""
    full_tensor = shards.full_tensor
    patch.setattr(shards, "full_tensor", lambda tensor: full_tensor(tensor) * float(tensor > 0))


def counts_are_copied(patch):
    """Counts whose copy to the device is waited for."""
    patch.setattr(Counts, "to_tensor", lambda counts, device: torch.tensor(counts, device=device).float())


def average_on_cpu(patch):
    """An average of the weights that is kept on the CPU."""

    def update(average, step):
        for name, kept in average.averages.items():
            kept.cpu().lerp_(average._parameters[name], 0.5)

    patch.setattr(MovingAverage, "update", update)


@pytest.mark.parametrize("fault", [positions_on_cpu, average_on_cpu, norm_is_read, counts_are_copied])
def test_faults_are_found(text, fault, monkeypatch):
    fault(monkeypatch)
    is_wrong_device = fault in (positions_on_cpu, average_on_cpu)
    with on_gpu() as gpu, pytest.raises(WrongDevice) if is_wrong_device else contextlib.nullcontext():
        _, waits = take_steps(text, gpu, ema_decay=0.9)
    assert is_wrong_device or all(sum(of_step.values()) == 2 for of_step in waits)


# ---------------------------------------------------------------------------------------------------------------------
# Whole commands


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_run_is_as_on_a_cpu_waits_once_a_step_and_is_resumed(books, tmp_path, monkeypatch, attention):
    """It evaluates, saves, loads a checkpoint, and writes the folder of a model."""
    options = [*SMALL, *NO_DROPOUT, "--mixed_precision=no", "--micro_batch_size=4", f"--corpus={books}"]
    options += ["--ema_decay=0.9", "--max_steps=6", "--save_steps=3", "--eval_steps=3"]
    on_cpu = ["pretrain", f"--output_dir={tmp_path / 'cpu'}", "--attn_implementation=sdpa", *options]
    assert main([*on_cpu, "--logging_steps=1"]) == 0
    # As a GPU has it: the default.
    monkeypatch.setattr(devices, "has_varlen", lambda architecture, accelerator: attention == "varlen")
    monkeypatch.setattr(devices, "use_flash_attention_3", lambda run, accelerator: None)
    between = []  # what was waited for before each step, after the one before
    within = []

    def watched(learner, *given):
        between.append(dict(gpu.waits))
        gpu.waits.clear()
        stats = train_on(learner, *given)
        within.append(sum(gpu.waits.values()))
        gpu.waits.clear()
        return stats

    train_on = Learner.train_on
    monkeypatch.setattr(Learner, "train_on", watched)
    command = ["pretrain", f"--output_dir={tmp_path / 'gpu'}", *options, "--logging_steps=1"]
    with on_gpu() as gpu:
        assert main(command) == 0
        is_quiet = [not any(waits.values()) for waits in between]
        assert is_quiet == [False, True, True, False, True, True], between  # before the first, and after step 3
        for name in ("checkpoint-6", "model.safetensors", "metrics.json"):
            (tmp_path / "gpu" / name).rename(tmp_path / name)
        assert main([*command, "--resume_from_checkpoint=latest"]) == 0
    assert f'"attn_implementation": "{attention}"' in (tmp_path / "gpu" / "run_config.json").read_text()
    rows = log_rows(tmp_path / "gpu")
    for row, expected in zip(rows, log_rows(tmp_path / "cpu"), strict=True):
        for name in {"loss", "nsp_loss", "grad_norm", "eval_mlm_loss", "eval_nsp_loss"} & {*expected}:
            assert row[name] == pytest.approx(expected[name], rel=1e-3), name
    for name, tensor in load_file(tmp_path / "gpu" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "model.safetensors")[name]), (
            "resumed, the weights are the same"
        )


def assert_same_figures(found, expected):
    """Entries of two JSON files, of which numbers may differ in rounding, and what depends on time is left out."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same_figures(found[name], value)
        elif isinstance(value, float) and "second" not in name:
            assert found[name] == pytest.approx(value, rel=1e-3), name


def test_an_evaluation_has_the_figures_of_a_cpu(trained, books, tmp_path):
    files = {}
    for name, device in (("cpu", contextlib.nullcontext()), ("gpu", on_gpu())):
        files[name] = tmp_path / f"{name}.json"
        with device:
            assert main(["evaluate", str(trained), f"--corpus={books}", f"--output={files[name]}"]) == 0
    found, expected = (json.loads(files[name].read_text()) for name in ("gpu", "cpu"))
    assert_same_figures(found, expected)


@pytest.mark.parametrize("objective", ["nsp", "none"])
def test_an_evaluation_waits_at_most_once_a_batch(text, objective):
    """For whether a mask masks nothing."""
    run = PretrainConfig(corpus=["books"], vocab_size=200, max_seq_length=16, max_steps=1, objective=objective)
    batches = list(HeldOutPairs(text.held_out, text.tokenizer, run, 64, "books"))
    assert len(batches) > 3
    torch.manual_seed(0)
    model_class = D2lBertForMaskedLM if objective == "none" else D2lBertForPreTraining
    model = model_class(D2lBertConfig(vocab_size=len(text.tokenizer), hidden_size=16, intermediate_size=32))
    expected = held_out_counts(model, batches, "cpu", top_5=True)
    with on_gpu() as gpu:
        model.to(GPU)
        gpu.waits.clear()
        found = held_out_counts(model, batches, GPU, top_5=True)
        assert sum(gpu.waits.values()) <= len(batches), gpu.waits
        torch.testing.assert_close(found.cpu(), expected, **CLOSE)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_a_cpu(trained, books, tmp_path, pooling, monkeypatch):
    def vectors(name):
        file = tmp_path / f"{name}.npy"
        assert (
            main(["embed", str(trained), str(books / "book-00.txt"), f"--output={file}", f"--pooling={pooling}"]) == 0
        )
        return np.load(file)

    with on_gpu() as gpu:
        found = vectors("gpu")
    assert gpu.waits["embed.py:vectors_of"]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    np.testing.assert_allclose(found, vectors("cpu"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", HEADS[1:])  # the first has no loss
def test_heads_have_the_losses_and_gradients_of_a_cpu(head):
    """As fine-tuning calls them."""
    batch = stacked(make_rows(head, num_labels=2))
    expected = loss_and_gradients(of_head(head).train(), **batch)
    with on_gpu():
        model = of_head(head).train().to(GPU)
        outputs, gradients = loss_and_gradients(model, **{name: tensor.to(GPU) for name, tensor in batch.items()})
        outputs.loss = outputs.loss.cpu()
        gradients = {name: gradient.cpu() for name, gradient in gradients.items()}
    assert_same((outputs, gradients), expected, **CLOSE)
