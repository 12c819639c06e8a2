"""Compiled models compute the same, and a run compiles only where that is faster."""

import functools
import itertools
import json
import shutil

import conftest
import pytest
import torch
from fast_models import LENGTH, assert_same, loss_and_gradients, make_batch, make_model

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertModel
from d2l_bert.cli import main
from d2l_bert.modeling import modeling_d2l_bert as modeling
from d2l_bert.training import trials
from d2l_bert.training.compilation import (
    compile_blocks,
    compile_now,
    compiling_pays,
    micro_batches_of_every_kind,
    time,
    undo_compile_blocks,
)
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.trials import is_long_enough_to_compile


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "backend"),
    [(D2lBertForMaskedLM, "eager"), (D2lBertForMaskedLM, "inductor"), (D2lBertForPreTraining, "inductor")],
)
def test_a_compiled_model_trains_on_labels_of_every_position(model_class, backend, compiled_anew):
    """In one program, though how many positions are labelled differs from batch to batch."""
    model = make_model(model_class)
    batches = [make_batch(model, everywhere=True) for _ in range(3)]
    batches[1]["labels"][:, 5:] = -100
    batches[2]["labels"][:, 9:] = -100
    expected = [loss_and_gradients(model, **batch) for batch in batches]
    torch._dynamo.utils.counters.clear()
    model.compile(backend=backend)
    for batch, as_written in zip(batches, expected, strict=True):
        assert_same(loss_and_gradients(model, **batch), as_written, rtol=1e-4, atol=1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.fixture
def compiled_anew():
    yield
    torch.compiler.reset()


def compile_by(backend, monkeypatch):
    """Make `torch.compile` use a backend; "eager" captures the same graphs but needs no C++ compiler to run them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden_act", "dropout", "backend"),
    [
        ("gelu", 0.3, "eager"),
        *((hidden_act, dropout, "inductor") for hidden_act in ("relu", "gelu") for dropout in (0.0, 0.3)),
    ],
)
def test_compiled_blocks_compute_the_same_losses_gradients_and_masks(
    hidden_act, dropout, backend, compiled_anew, monkeypatch
):
    compile_by(backend, monkeypatch)
    model = make_model(dropout=dropout, hidden_act=hidden_act)
    batches = [make_batch(model), {name: tensor[:3] for name, tensor in make_batch(model).items()}]

    def steps():
        torch.manual_seed(5)
        return [loss_and_gradients(model, **batch, skip_logits=True) for batch in batches]

    as_written, names = steps(), list(model.state_dict())
    compile_blocks(model)
    for found, expected in zip(steps(), as_written, strict=True):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == names
    undo_compile_blocks(model)
    for found, expected in zip(steps(), as_written, strict=True):
        assert_same(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_dropout_layers_draw_different_masks_and_each_only_once(recomputed, compiled_anew, monkeypatch):
    """The compiler may merge two equal calls, or repeat a call of the forward pass in the backward pass."""
    if recomputed:
        compile_blocks(make_model())
    first, second = modeling.Dropout(0.5).train(), modeling.Dropout(0.5).train()

    def dropped_twice(values, matrix):
        branch = first((values @ matrix).softmax(-1))
        return second(branch.relu() @ matrix.T) + second(values)

    values, matrix = torch.randn(16, 12, requires_grad=True), torch.randn(12, 12, requires_grad=True)
    found, compiled = [], torch.compile(dropped_twice, dynamic=True)
    for function in (dropped_twice, compiled, compiled):
        torch.manual_seed(7 if len(found) < 2 else 8)
        result = function(values, matrix)
        found.append([result, *torch.autograd.grad(result.square().sum(), (values, matrix))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[2][0], found[1][0])


@pytest.mark.slow
def test_compiled_blocks_with_gradient_checkpointing_draw_the_same_masks(compiled_anew):
    model = make_model(dropout=0.3, num_hidden_layers=2)
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            compile_blocks(model)
        torch.manual_seed(5)
        found.append(loss_and_gradients(model, **make_batch(model)))
    assert_same(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_all_blocks_share_one_compiled_program(compiled_anew, monkeypatch):
    compile_by("eager", monkeypatch)
    model = make_model(D2lBertModel, num_hidden_layers=6)
    compile_blocks(model)
    torch._dynamo.utils.counters.clear()
    for rows in (4, 7, 5):
        model(torch.arange(rows * 12).view(rows, 12) % 40).last_hidden_state.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "objective"), [(D2lBertForPreTraining, "nsp"), (D2lBertForMaskedLM, "none")])
def test_every_kind_of_micro_batch_runs_compiled(model_class, objective, compiled_anew, monkeypatch):
    """In training and evaluation, with padding and without, down to one row and one position."""
    compiled, compile_as_is = [], torch.compile

    def backend(graph, _):
        return lambda *arguments: (compiled.append(1), graph(*arguments))[1]

    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_as_is(function, backend=backend, **how))
    model = make_model(model_class, num_hidden_layers=2, dropout=0.1)
    kinds = micro_batches_of_every_kind(full_batch(objective))
    assert compile_now(model, lambda: [model(**kind) for kind in kinds]) is None
    calls = len(compiled)
    for rows, slots, padding, training in itertools.product((8, 3, 1), (5, 1), (0, 4), (True, False)):
        ids = torch.arange(rows * 12).view(rows, 12) % 40
        mask = (torch.arange(12) < 12 - padding).long().expand(rows, 12)
        batch = {"input_ids": ids, "attention_mask": mask, "masked_positions": ids[:, :slots] % 8}
        batch["labels"] = ids[:, :slots]
        model.train(training)
        with torch.set_grad_enabled(training):
            model(**batch, skip_logits=True)
        calls += 2
        assert len(compiled) == calls, (rows, slots, padding, training)


class Clock:
    """
    A fake clock: only steps take time, one duration uncompiled and another compiled.

    A neighbour is a function of the number of steps taken before: other programs make the step so many times as long.
    """

    def __init__(self, monkeypatch, model, as_written, compiled, neighbour=lambda steps, is_compiled: 1.0):
        self.now, self.model, self.costs = 0.0, model, {False: as_written, True: compiled}
        self.neighbour, self.ways = neighbour, []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def step(self):
        is_compiled = "compute" in vars(self.model.base_model.encoder.layer[0])
        self.now += self.costs[is_compiled] * self.neighbour(len(self.ways), is_compiled)
        self.ways.append(is_compiled)


def nothing():
    """A step that takes no time, to compile with."""


@pytest.mark.parametrize(("compiled", "kept"), [(0.5, True), (1.5, False)])
def test_blocks_stay_compiled_only_if_that_is_faster(compiled, kept, monkeypatch, capsys, shown):
    model, accelerator = make_model(), make_accelerator("no")
    clock = Clock(monkeypatch, model, 1.0, compiled)
    assert compiling_pays(accelerator, model, nothing, clock.step) is kept
    assert ["compute" in vars(block) for block in model.bert.encoder.layer] == [kept] * 2
    said = capsys.readouterr().err
    assert f"a step takes {compiled} s instead of 1" in said and ("without compiling" in said) is not kept


@pytest.mark.parametrize(("compiled", "kept"), [(0.5, True), (1.5, False)])
@pytest.mark.parametrize("first_turn", [0, 1])
def test_a_neighbour_in_half_of_the_turns_does_not_decide_about_compiling(compiled, kept, first_turn, monkeypatch):
    """The neighbour hurts the way more that is faster without it. A turn is two steps; the first two are not timed."""

    def neighbour(steps, is_compiled):
        is_there = (steps // 2 + first_turn) % 2
        return 1.0 if not is_there else 20.0 if is_compiled is kept else 2.0

    model = make_model()
    clock = Clock(monkeypatch, model, 1.0, compiled, neighbour)
    assert compiling_pays(make_accelerator("no"), model, nothing, clock.step) is kept
    assert ["compute" in vars(block) for block in model.bert.encoder.layer] == [kept] * 2


@pytest.mark.parametrize(("seconds", "turns"), [(0.1, 51), (100.0, 5)])
def test_the_trial_of_compiling_has_five_turns_and_ten_seconds(seconds, turns, monkeypatch):
    model = make_model()
    clock = Clock(monkeypatch, model, seconds, seconds * 0.99)
    assert compiling_pays(make_accelerator("no"), model, nothing, clock.step) is True
    assert clock.ways[:6] == [False, True, True, False, False, True]
    assert clock.ways.count(True) == clock.ways.count(False) == turns + 1


def test_every_process_decides_about_compiling_by_the_mean_over_all(monkeypatch):
    """Compiled steps are faster in this process, but not in the mean."""
    model = make_model()
    clock = Clock(monkeypatch, model, 1.0, 0.5)
    accelerator = make_accelerator("no")
    others = torch.tensor([2.0, 4.0])
    monkeypatch.setattr(accelerator, "reduce", lambda mine, how: (mine + others) / 2 if len(mine.shape) else mine)
    assert compiling_pays(accelerator, model, nothing, clock.step) is False


def test_without_a_working_compiler_the_run_goes_on_uncompiled(monkeypatch, capsys, shown):
    def fail():
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand more")

    model, accelerator = make_model(), make_accelerator("no")
    assert compiling_pays(accelerator, model, fail, nothing) is False
    assert "not compiled: InvalidCxxCompiler: No working C++ compiler found\n" in capsys.readouterr().err
    assert "compute" not in vars(model.bert.encoder.layer[0])
    assert compile_now(model, fail) == "InvalidCxxCompiler: No working C++ compiler found"


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_compiled_run_ends_with_the_same_bytes(
    books, tmp_path, capsys, is_compiled, compiled_anew, monkeypatch
):
    """The checkpoint records that the run was compiled, and `auto` follows the record."""
    if not is_compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    out = tmp_path / "out"
    command = ["pretrain", f"--corpus={books}", f"--output_dir={out}", *conftest.SMALL, "--max_steps=6"]
    command += ["--save_steps=3", "--hidden_dropout_prob=0.2", "--attention_probs_dropout_prob=0.2"]
    assert main([*command, "--torch_compile=true"]) == 0
    whole = (out / "model.safetensors").read_bytes()
    torch.compiler.reset()  # a new process would not have the compiled programs of the first run
    shutil.rmtree(out / "checkpoint-6")
    assert main([*command, "--resume_from_checkpoint=latest"]) == 0
    assert (out / "model.safetensors").read_bytes() == whole
    assert json.loads((out / "run_config.json").read_text())["run"]["torch_compile"] == "true"
    assert json.loads((out / "checkpoint-6" / "training_state.json").read_text())["torch_compile"] == "true"


def test_torch_compile_true_without_a_working_compiler_is_refused_in_one_line(books, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trials, "compile_now", lambda *_: "No working C++ compiler found")
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *conftest.SMALL, "--max_steps=2"]
    assert main([*command, "--torch_compile=true"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "torch_compile: No working C++ compiler found; give --torch_compile false" in line


def full_batch(objective="nsp", rows=8):
    """A micro-batch without padding."""
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % 40
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    batch |= {"masked_positions": torch.arange(3).expand(rows, 3), "labels": ids[:, :3]}
    return batch if objective == "none" else {**batch, "next_sentence_label": ids[:, 0] % 2}


def test_programs_are_compiled_for_large_and_small_micro_batches_with_and_without_padding():
    kinds = micro_batches_of_every_kind(full_batch())
    assert [len(kind["input_ids"]) for kind in kinds] == [8, 8, 2, 2, 1, 1]
    assert [bool(kind["attention_mask"].all()) for kind in kinds] == [True, False] * 3
    kinds = micro_batches_of_every_kind(full_batch("none", rows=1))
    assert [kind["labels"].shape for kind in kinds] == [
        (rows, slots) for slots in (3, 1) for rows in (1, 1, 2, 2, 1, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_steps": 50}, False),
        ({"max_minutes": 12.0}, False),
        ({"max_minutes": 30.0}, True),
        ({"max_steps": 10**9}, True),
    ],
)
def test_a_run_counts_as_long_by_its_minutes_or_its_arithmetic(changes, expected):
    run = PretrainConfig(**changes)
    accelerator = make_accelerator("no")
    run.mixed_precision = "no"
    assert is_long_enough_to_compile(run, D2lBertConfig(), None, {}, accelerator) is expected
