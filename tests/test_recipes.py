"""Recipes can run, are what they say, and make way for what the command line asks for."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForPreTraining

from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.training import prepare, pretrain, publish
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.recipes import RECIPES


LITERATURE = ["mini", "small", "medium", "base", "large"]


def tokens_of_stages(run):
    """Steps and most tokens a step of each stage."""
    stages = run.stages(run.max_steps)
    ends = [start for start, _, _ in stages[1:]] + [run.max_steps]
    return [
        (end - start, batch_size * (run.max_seq_length // length) * length)
        for (start, length, batch_size), end in zip(stages, ends, strict=True)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_its_checks_and_has_steps_in_every_stage(name):
    architecture, run = RECIPES[name]()
    run.check()
    architecture.check()
    pretrain.check_architecture(architecture, run)
    assert run.recipe == name
    assert [start for start, _, _ in run.stages(run.max_steps)][0] == 0
    assert all(steps > 0 for steps, _ in tokens_of_stages(run))
    assert sum(steps for steps, _ in tokens_of_stages(run)) == run.max_steps


@pytest.mark.parametrize("name", LITERATURE)
def test_steps_hold_the_tokens_that_the_docstring_says_at_either_length(name):
    _, run = RECIPES[name]()
    steps, tokens = re.search(r"([\d,]+) steps of ([\d,]+) tokens", RECIPES[name].__doc__).groups()
    whole = int(tokens.replace(",", ""))
    assert run.max_steps == int(steps.replace(",", ""))
    per_stage = tokens_of_stages(run)
    assert [tokens for _, tokens in per_stage] == [whole // 4, whole // 2, whole, whole]
    assert sum(steps * tokens for steps, tokens in per_stage) == 0.75 * run.max_steps * whole
    assert run.stages(run.max_steps)[-1] == (0.9 * run.max_steps, 512, run.global_batch_size)


def stock_bert(architecture, vocab_size):
    with torch.device("meta"):
        return BertForPreTraining(
            BertConfig(
                vocab_size=vocab_size,
                hidden_size=architecture.hidden_size,
                num_hidden_layers=architecture.num_hidden_layers,
                num_attention_heads=architecture.num_attention_heads,
                intermediate_size=architecture.intermediate_size,
            )
        )


@pytest.mark.parametrize("name", LITERATURE)
def test_recipes_have_the_parameters_of_stock_berts_of_their_size_and_20_tokens_for_each(name):
    architecture, run = RECIPES[name]()
    architecture.vocab_size = run.vocab_size
    with torch.device("meta"):
        parameters = D2lBertForPreTraining(architecture).num_parameters()
    assert parameters == stock_bert(architecture, run.vocab_size).num_parameters()
    assert sum(steps * tokens for steps, tokens in tokens_of_stages(run)) > 20 * parameters


def test_large_is_bert_large():
    architecture, run = RECIPES["large"]()
    architecture.vocab_size = run.vocab_size
    with torch.device("meta"):
        encoder = D2lBertForPreTraining(architecture).bert.num_parameters()
    assert encoder == 335_141_888, "google-bert/bert-large-uncased without heads"


@pytest.fixture
def chosen(monkeypatch):
    """The run that the command line would start."""

    def choose(*options):
        runs = []
        monkeypatch.setattr(pretrain, "pretrain", lambda architecture, run: runs.append(run))
        assert main(["pretrain", *options]) == 0
        runs[0].check()
        return runs[0]

    return choose


def test_a_recipes_schedules_make_way_for_what_the_command_line_asks_for(chosen):
    mini = RECIPES["mini"]()[1]
    assert asdict(chosen("--recipe=mini")) == asdict(mini)
    assert mini.batch_size_schedule == ["16:0.2", "32:0.2"] and mini.length_schedule == ["128:0.9"]
    smaller = chosen("--recipe=mini", "--global_batch_size=32")
    assert smaller.batch_size_schedule == ["16:0.2"] and smaller.length_schedule == ["128:0.9"]
    shorter = chosen("--recipe=mini", "--max_seq_length=128")
    assert shorter.length_schedule == [] and shorter.batch_size_schedule == mini.batch_size_schedule
    none = chosen("--recipe=mini", "--batch_size_schedule", "none", "--length_schedule", "none")
    assert none.batch_size_schedule == none.length_schedule == []
    own = chosen("--recipe=mini", "--batch_size_schedule", "8:0.5", "16:0.1")
    assert own.batch_size_schedule == ["8:0.5", "16:0.1"]


def test_a_run_of_the_literatures_recipe_trains_and_its_card_says_how(books, tmp_path):
    """At a size for tests, through every stage."""
    sizes = "--num_hidden_layers=1 --hidden_size=32 --num_attention_heads=2 --intermediate_size=64 --vocab_size=400"
    options = [f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=10", "--global_batch_size=4"]
    options += ["--max_seq_length=64", "--length_schedule", "16:0.9", "--batch_size_schedule", "1:0.2", "2:0.2"]
    assert main(["pretrain", "--recipe=mini", *sizes.split(), *options, "--dataloader_num_workers=0"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 10 of 4 pairs; first 1 for 20 % of the steps, then 2 for 20 % |" in card
    assert "AdamW, peak rate 0.001, betas 0.9 and 0.98, weight decay 0.01; 6 % warm-up, then a straight line" in card


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "| AdamW, peak rate 0.003, betas 0.9 and 0.98, weight decay 0.01; 5 % warm-up, then a straight line |"),
        ({"lr_scheduler_type": "cosine"}, "5 % warm-up, then half a cosine |"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "flat, then 1 - sqrt in the last 20 % of the steps |"),
        ({"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.125}, "in the last 12.5 % of the steps |"),
        ({"optim": "muon"}, "| Muon for the matrices of the encoder's blocks, AdamW for all else, peak rate 0.003, "),
        ({"ema_decay": 0.999}, "a straight line; the weights are a moving average with decay 0.999 |"),
    ],
)
def test_the_card_says_how_the_optimizer_went(trained, options, said):
    record, metrics = (json.loads((trained / name).read_text()) for name in ("run_config.json", "metrics.json"))
    record["run"].update(options)
    card = publish.render_card(trained, D2lBertForPreTraining.from_pretrained(trained), record, metrics, [])
    assert said in card.text
    assert "40 of 8 pairs |" in card.text


def test_phases_are_the_stages_of_the_run(books):
    architecture, run = RECIPES["mini"]()
    run.corpus, run.vocab_size = [str(books)], 400
    phases = pretrain.make_phases(run, prepare.prepare(run), run.max_steps)
    assert [(phase.first_step, phase.first_pair, phase.global_batch_size) for phase in phases] == [
        (0, 0, 64),
        (2000, 2000 * 64, 128),
        (4000, 2000 * (64 + 128), 256),
        (9000, 0, 64),
    ]
    assert [phase.make_batch.max_seq_length for phase in phases] == [128, 128, 128, 512]
    assert phases[0].plans is phases[1].plans is phases[2].plans is not phases[3].plans


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10_000))
def test_warm_up_and_fall_are_shares_of_the_steps(warm_up, decay, max_steps):
    run = PretrainConfig(warmup_ratio=warm_up / 100, decay_ratio=decay / 100, lr_scheduler_type="warmup_stable_decay")
    found = run.schedule_steps(max_steps)
    assert found == pytest.approx((max_steps * warm_up / 100, max_steps * decay / 100), abs=1)
    assert PretrainConfig(lr_scheduler_type="warmup_stable_decay").schedule_steps(1000) == (100, 200)
