"""The trials before a run match the run: memory of the largest step, and every compiled program."""

import functools
from dataclasses import replace

import pytest
import torch
from conftest import SMALL
from torch.profiler import ProfilerActivity, profile

from d2l_bert import D2lBertConfig
from d2l_bert.cli import main
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching, trials
from d2l_bert.training import learner as learner_module
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.initialize import make_model
from d2l_bert.training.learner import Learner
from d2l_bert.training.step import train_step
from d2l_bert.training.trials import find_micro_batch


pytestmark = pytest.mark.usefixtures("one_thread")


def most_allocated(function):
    """The peak of the bytes that PyTorch's allocator held while the function ran, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"packing": True}, 12),
        *(
            pytest.param(options, 50, marks=pytest.mark.slow)
            for options in ({"packing": True}, {"packing": True, "objective": "none"}, {"packing": False})
        ),
    ],
)
def test_the_trial_takes_as_much_memory_as_the_largest_step(books, options, count, monkeypatch):
    run = PretrainConfig(
        corpus=[str(books)], vocab_size=400, max_seq_length=128, max_steps=50, global_batch_size=64, **options
    )
    run = replace(run, mixed_precision="no", attn_implementation="eager")
    text = prepare(run)
    architecture = D2lBertConfig(vocab_size=len(text.tokenizer), hidden_size=32, num_hidden_layers=2)
    torch.manual_seed(0)
    model = make_model(architecture, run, text.tokenizer, None)
    learner, cutting = Learner(make_accelerator("no"), model, run), batching.how_to_cut(architecture, run)
    tried = []

    def fastest(speed, most):
        tried.append(most_allocated(lambda: speed(8)) if most == 64 else None)
        return 8

    monkeypatch.setattr(trials, "fastest", fastest)
    micro_batches = functools.partial(batching.trial_micro_batches, run, text, **cutting)
    find_micro_batch(learner, micro_batches, 64)
    steps = batching.make_steps(replace(run, micro_batch_size=8), text, 50, **cutting)
    made = [steps[number] for number in range(count)]
    largest = max(most_allocated(functools.partial(learner.try_step, micro_batches)) for micro_batches in made)
    assert tried == [pytest.approx(largest, rel=0.1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--max_seq_length=32", "--length_schedule", "16:0.5"],
        ["--max_seq_length=32", "--length_schedule", "16:0.5", "--packing=true"],
        ["--objective=none", "--packing=true", "--gradient_checkpointing"],
        ["--objective=none", "--micro_batch_size=2", "--hidden_dropout_prob=0.1"],
        ["--objective=sop", "--attn_implementation=sdpa", "--batch_size_schedule", "3:0.5"],
    ],
    ids=" ".join,
)
def test_no_program_is_compiled_during_the_steps_of_a_run(books, tmp_path, monkeypatch, options):
    """A sequence length of 32 equals the hidden size here, which must not tie the compiled program to that length."""
    compile_as_is, graphs, compiled_in_steps = torch.compile, [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def step(*arguments):
        before, rate = len(graphs), arguments[4]
        figures = train_step(*arguments)
        if rate:
            compiled_in_steps.append(len(graphs) - before)
        return figures

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_as_is(function, backend=backend, **how))
    monkeypatch.setattr(learner_module, "train_step", step)
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=20"]
    assert main([*command, "--warmup_ratio=0", "--torch_compile=true", *options]) == 0
    torch.compiler.reset()
    assert len(graphs) >= 2 and compiled_in_steps == [0] * 20


def test_the_batches_of_a_size_are_made_once(books, tmp_path, monkeypatch):
    made = []
    make = trials.trial_micro_batches

    def counted(run, text, pairs, **cutting):
        made.append(pairs)
        return make(run, text, pairs, **cutting)

    monkeypatch.setattr(trials, "trial_micro_batches", counted)
    monkeypatch.setattr(trials, "MIN_GAIN", 0.0)  # every size is tried, whatever its speed
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=1"]
    assert main([*command, "--micro_batch_size=auto"]) == 0
    assert sorted(made) == [1, 2, 4, 8]
