"""Recipes can run, are what they say, and make way for what the command line asks for."""

import json
import os
import re
import shlex
import typing
from dataclasses import asdict, replace
from types import NoneType

import pytest
import torch
from conftest import write_books
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForPreTraining

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.commands import resolve_pretrain
from d2l_bert.flags import make_parser
from d2l_bert.folders import base_name
from d2l_bert.tokenization import prepare
from d2l_bert.training import batching, pretrain
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.recipes import PLACES, RECIPES, command_line
from d2l_bert.training.run_folder import architecture_numbers


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


def test_phases_are_the_stages_of_the_run(books):
    architecture, run = RECIPES["mini"]()
    run.corpus, run.vocab_size = [str(books)], 400
    phases = batching.make_phases(run, prepare.prepare(run), run.max_steps)
    assert [(phase.first_step, phase.first_pair, phase.global_batch_size) for phase in phases] == [
        (0, 0, 64),
        (2000, 2000 * 64, 128),
        (4000, 2000 * (64 + 128), 256),
        (9000, 0, 64),
    ]
    assert [phase.make_batch.max_seq_length for phase in phases] == [128, 128, 128, 512]
    assert phases[0].plans is phases[1].plans is phases[2].plans is not phases[3].plans


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10_000))
def test_warm_up_and_fall_are_shares_of_the_steps(warm_up, decay, max_steps):
    run = PretrainConfig(warmup_ratio=warm_up / 100, decay_ratio=decay / 100, lr_scheduler_type="warmup_stable_decay")
    found = run.schedule_steps(max_steps)
    assert found == pytest.approx((max_steps * warm_up / 100, max_steps * decay / 100), abs=1)
    assert PretrainConfig(lr_scheduler_type="warmup_stable_decay").schedule_steps(1000) == (100, 200)


# ---------------------------------------------------------------------------------------------------------------------
# The command that makes a run again


def resolved(words):
    """The architecture and the run that a command asks for, by way of the real parser."""
    assert words[:2] == ["d2l-bert", "pretrain"]
    return resolve_pretrain(make_parser(words[1:]).parse_args(words[1:]))


def recorded(architecture, run):
    """What run_config.json would hold of a run: its steps are known then, its precision and its vocabulary."""
    known = {"max_steps": run.max_steps or 7, "mixed_precision": run.mixed_precision or "bf16"}
    run = replace(run, corpus=run.text_paths(), **{**dict.fromkeys(LENGTH_OPTIONS), **known})
    numbers = architecture_numbers(architecture) | {"vocab_size": 123, "pad_token_id": 1}
    return json.loads(json.dumps({"run": asdict(run), "architecture": numbers, "corpus_is_prepared": False}))


def check_command(record):
    """That the command asks for the very run and architecture of the record; returns the command."""
    command = command_line(record)
    architecture, run = resolved(shlex.split(command))
    assert run.identity() == PretrainConfig(**record["run"]).identity()
    found = architecture_numbers(architecture)
    assert found == record["architecture"] | {name: found[name] for name in ("vocab_size", "pad_token_id")}
    return command


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_recipe_as_it_is_names_it_and_the_precision_alone(name):
    command = check_command(recorded(*RECIPES[name]()))
    assert command == f"d2l-bert pretrain --recipe {name} --mixed_precision bf16"


BF16 = "--mixed_precision bf16"


@pytest.mark.parametrize(
    "options, told",
    [
        ("--recipe mini --max_steps 10000", f"mini {BF16}"),
        ("--max_steps 9 --packing --save_steps 3 --license mit --report_to none", f"tiny --max_steps 9 {BF16}"),
        ("--micro_batch_size auto --gradient_checkpointing --output_dir out", f"tiny {BF16}"),
        ("--num_train_epochs 2", f"tiny --max_steps 7 {BF16}"),
        ("--max_minutes 5 --seed 3", f"tiny --max_steps 7 --seed 3 {BF16}"),
        ("--length_schedule none --lowercase false", f"tiny --lowercase false --length_schedule none {BF16}"),
        ("--length_schedule 16:0.5 64:.25", f"tiny --length_schedule 16:0.5 64:.25 {BF16}"),
        ("--recipe base --batch_size_schedule none", f"base --batch_size_schedule none {BF16}"),
        ("--recipe mini --max_seq_length 128", f"mini --max_seq_length 128 {BF16}"),
        ("--recipe mini --global_batch_size 32", f"mini --global_batch_size 32 {BF16}"),
        ("--recipe mini --global_batch_size 64 --batch_size_schedule 16:0.2 32:0.2", f"mini {BF16}"),
        ("--recipe base --mlm_probability 0.4->.2", f"base --mlm_probability '0.4->.2' {BF16}"),
        (
            "--strip_accents --objective sop --ema_decay 1e-5",
            f"tiny --strip_accents true --objective sop --ema_decay 1e-05 {BF16}",
        ),
        ("--recipe d2l --vocab_size 400 --hidden_size 64", f"d2l --vocab_size 400 {BF16} --hidden_size 64"),
        (
            "--embedding_layer_norm false --classifier_dropout 0.5",
            f"tiny {BF16} --embedding_layer_norm false --classifier_dropout 0.5",
        ),
        ("--corpus python-docs", f"tiny {BF16}"),
        (
            "--corpus python-docs --dataset Some/body:first",
            f"tiny --corpus python-docs --dataset Some/body:first {BF16}",
        ),
        ("--dataset Some/body --dataset_config first", f"tiny --dataset Some/body --dataset_config first {BF16}"),
        (
            "--tokenizer Some/body --extend_vocab 5 --min_frequency 9",
            f"tiny --tokenizer Some/body --min_frequency 9 --extend_vocab 5 {BF16}",
        ),
    ],
)
def test_a_command_says_what_differs_from_its_recipe_and_no_more(options, told):
    record = recorded(*resolved(["d2l-bert", "pretrain", *options.split()]))
    assert check_command(record) == f"d2l-bert pretrain --recipe {told}"


def test_a_command_names_folders_by_their_last_name_and_what_is_on_the_hub_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = replace(
        RECIPES["tiny"]()[1],
        corpus=["/somebody/my books/", "notes.txt", ".", os.fsdecode(b"/somebody/caf\xe9s")],
        dataset=["Salesforce/wikitext:wikitext-2-raw-v1", "/data/rows:first", "kept/words", "~/a/b"],
        tokenizer="/somebody/tokens",
        text_column="body",
    )
    here = [*run.corpus, *run.dataset[1:], run.tokenizer]
    paths = {path: {"name": base_name(path), "fingerprint": "..."} for path in here}
    assert command_line({**recorded(D2lBertConfig(), run), "local_paths": paths}).startswith(
        f"d2l-bert pretrain --recipe tiny --corpus 'my books' notes.txt {tmp_path.name} 'caf\ufffds' "
        "--dataset Salesforce/wikitext:wikitext-2-raw-v1 rows:first words b --text_column body --tokenizer tokens "
    )


def test_a_run_made_in_python_is_told_by_what_it_trains():
    """Its recipe may be none of ours, and beside a tokenizer that exists options for training one do nothing."""
    architecture, run = RECIPES["mini"]()
    run = replace(run, recipe="mine", tokenizer="google-bert/bert-base-uncased", vocab_size=7, min_frequency=9)
    again = resolved(shlex.split(command_line(recorded(architecture, run))))
    assert architecture_numbers(again[0]) == architecture_numbers(architecture)
    same = {name: getattr(run, name) for name in ("recipe", "vocab_size", "min_frequency")}
    assert replace(again[1], **same).identity() == replace(run, mixed_precision="bf16").identity()


def of_kind(kind):
    """Values of a field; any that the parser takes will do."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_args(kind) and typing.get_origin(kind) is not list:
        return st.one_of(*(of_kind(part) for part in typing.get_args(kind) if part is not NoneType))
    entries = st.lists(st.builds("{}:0.{}".format, st.integers(1, 600), st.integers(1, 9)), min_size=1, max_size=3)
    texts = st.text("ab 'ü$->.1:", min_size=1).filter(lambda text: text[0] in "abü")
    values = {int: st.integers(0, 2**62), float: st.floats(0, 1e9), bool: st.booleans(), str: texts}
    return values.get(kind, entries)


KINDS = {
    name: kind for name, kind in typing.get_type_hints(PretrainConfig).items() if name not in ("recipe", "init_from")
}
CHANGES = {name: of_kind(kind) for name, kind in KINDS.items() if name not in (*PLACES, *LENGTH_OPTIONS)}
NUMBERS = {
    "hidden_act": st.sampled_from(["relu", "gelu"]),
    "tie_word_embeddings": st.booleans(),
    "num_hidden_layers": st.integers(1, 99),
    "initializer_range": st.floats(0.001, 1),
    "classifier_dropout": st.floats(0, 0.9),
}


@given(
    st.sampled_from(list(RECIPES)),
    st.fixed_dictionaries({}, optional={**CHANGES, "max_steps": st.integers(1, 10**9)}),
    st.fixed_dictionaries({}, optional=NUMBERS),
)
def test_whatever_was_trained_its_command_asks_for_it(recipe, changes, numbers):
    architecture, run = RECIPES[recipe]()
    for name, number in numbers.items():
        setattr(architecture, name, number)
    check_command(recorded(architecture, replace(run, **changes)))


def test_the_command_of_a_run_makes_its_weights_again_byte_for_byte(trained, books, tmp_path, monkeypatch):
    record = json.loads((trained / "run_config.json").read_text())
    assert "--corpus books " in check_command(record)
    monkeypatch.chdir(books.parent)
    assert main([*shlex.split(command_line(record))[1:], f"--output_dir={tmp_path / 'again'}"]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (trained, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_what_a_model_to_start_from_and_a_prepared_folder_settle_is_not_in_the_command(trained, tmp_path, monkeypatch):
    """Either would refuse it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start").symlink_to(trained)
    books = write_books(tmp_path / "books")
    prepared = ["prepare", f"--corpus={books}", "--output_dir=deep/tokens", f"--tokenizer={trained}", "--language=de"]
    assert main([*prepared, "--validation_fraction=0.2", "--extend_vocab=3", "--min_frequency=5"]) == 0
    options = ["--max_steps=2", "--max_seq_length=48", "--dataloader_num_workers=0", "--hidden_dropout_prob=0.3"]
    start = [f"--init_from={tmp_path / 'start'}", "--corpus=deep/tokens", "--output_dir=out"]
    assert main(["pretrain", *start, *options]) == 0
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())
    precision = record["run"]["mixed_precision"]
    assert command_line(record) == (
        "d2l-bert pretrain --recipe tiny --corpus tokens --max_seq_length 48 --init_from start --max_steps 2 "
        f"--mixed_precision {precision} --hidden_dropout_prob 0.3 --attention_probs_dropout_prob 0.0"
    )
    (tmp_path / "deep" / "tokens").rename(tmp_path / "tokens")
    architecture, run = resolved(shlex.split(command_line(record)))
    settled = json.loads((tmp_path / "tokens" / "prepared.json").read_text())["settled"]
    assert (
        replace(run, init_from=str(tmp_path / "start"), **settled).identity()
        == PretrainConfig(**record["run"]).identity()
    )
    assert architecture_numbers(architecture) == record["architecture"] | {"vocab_size": architecture.vocab_size}
