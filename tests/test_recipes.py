"""Recipes: they can run, have the promised sizes, follow the command line, and can be repeated by a command."""

import json
import os
import re
import shlex
import typing
from dataclasses import asdict, fields, replace
from types import NoneType

import pytest
import torch
from conftest import write_books
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForPreTraining

from d2l_bert import D2lBertConfig, D2lBertForPreTraining, commands
from d2l_bert.cli import main, make_parser
from d2l_bert.commands import resolve_pretrain
from d2l_bert.folders import base_name
from d2l_bert.tokenization import prepare
from d2l_bert.training import batching, pretrain
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.recipes import INPUT_OPTIONS, RECIPES, command_line
from d2l_bert.training.run_folder import architecture_numbers


LITERATURE = ["mini", "small", "medium", "base", "large"]


def tokens_of_stages(run):
    """For each stage, its number of steps and the largest number of tokens in a step."""
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
def test_recipes_have_the_steps_and_tokens_of_their_docstrings(name):
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
def test_recipes_have_as_many_parameters_as_stock_bert_and_20_tokens_per_parameter(name):
    architecture, run = RECIPES[name]()
    architecture.vocab_size = run.vocab_size
    with torch.device("meta"):
        parameters = D2lBertForPreTraining(architecture).num_parameters()
    assert parameters == stock_bert(architecture, run.vocab_size).num_parameters()
    assert sum(steps * tokens for steps, tokens in tokens_of_stages(run)) > 20 * parameters


def test_the_recipe_large_has_the_parameters_of_bert_large():
    architecture, run = RECIPES["large"]()
    architecture.vocab_size = run.vocab_size
    with torch.device("meta"):
        encoder = D2lBertForPreTraining(architecture).bert.num_parameters()
    assert encoder == 335_141_888, "google-bert/bert-large-uncased without heads"


@pytest.fixture
def chosen(monkeypatch):
    """The run that a command line would start."""

    def choose(*options):
        runs = []
        monkeypatch.setattr(commands, "pretrain", lambda architecture, run: runs.append(run))
        assert main(["pretrain", *options]) == 0
        runs[0].check()
        return runs[0]

    return choose


def test_options_of_the_command_line_replace_or_shorten_a_recipes_schedules(chosen):
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


def test_a_small_run_of_the_recipe_mini_trains_and_its_card_describes_the_schedules(books, tmp_path):
    """Through every stage of the schedules, at sizes for tests."""
    sizes = "--num_hidden_layers=1 --hidden_size=32 --num_attention_heads=2 --intermediate_size=64 --vocab_size=400"
    options = [f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=10", "--global_batch_size=4"]
    options += ["--max_seq_length=64", "--length_schedule", "16:0.9", "--batch_size_schedule", "1:0.2", "2:0.2"]
    assert main(["pretrain", "--recipe=mini", *sizes.split(), *options, "--dataloader_num_workers=0"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 10 of 4 pairs; first 1 for 20 % of the steps, then 2 for 20 % |" in card
    assert "AdamW for all else, peak rate 0.004, betas 0.9 and 0.98, weight decay 0.01; 5 % warm-up, then a " in card


def test_lengths_and_batch_sizes_change_independently_and_the_last_stage_is_full():
    run = PretrainConfig(max_seq_length=128, length_schedule=["32:0.25", "64:0.5"], max_steps=1)
    assert run.stages(1000) == [(0, 32, 32), (250, 64, 32), (750, 128, 32)]
    schedules = {"length_schedule": ["32:0.5"], "batch_size_schedule": ["8:0.1", "16:0.4", "24:0.2"]}
    run = PretrainConfig(max_seq_length=128, global_batch_size=32, **schedules)
    assert run.stages(100) == [(0, 32, 8), (10, 32, 16), (50, 128, 24), (70, 128, 32)]
    assert run.stages(2) == [(0, 32, 16), (1, 128, 32)], "a stage without a step is none"


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(1, 99), st.floats(0.01, 0.3)), max_size=3, unique_by=lambda entry: entry[0]),
    st.lists(st.tuples(st.integers(8, 99), st.floats(0.01, 0.3)), max_size=3, unique_by=lambda entry: entry[0]),
)
def test_stages_cover_a_run_of_any_length(max_steps, batch_sizes, lengths):
    schedules = [[f"{value}:{share:.3f}" for value, share in sorted(entries)] for entries in (batch_sizes, lengths)]
    run = PretrainConfig(
        max_seq_length=100,
        global_batch_size=100,
        batch_size_schedule=schedules[0],
        length_schedule=schedules[1],
        max_steps=1,
    )
    run.check()
    starts, found_lengths, found_sizes = zip(*run.stages(max_steps), strict=True)
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] <= max_steps
    assert list(found_lengths) == sorted(found_lengths) and list(found_sizes) == sorted(found_sizes)
    assert found_lengths[-1] == found_sizes[-1] == 100


def test_the_phases_of_a_run_follow_its_stages(books):
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
    assert phases[0].pairs is phases[1].pairs is phases[2].pairs is not phases[3].pairs


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10_000))
def test_warm_up_and_decay_are_shares_of_the_steps(warm_up, decay, max_steps):
    run = PretrainConfig(warmup_ratio=warm_up / 100, decay_ratio=decay / 100, lr_scheduler_type="warmup_stable_decay")
    found = run.schedule_steps(max_steps)
    assert found == pytest.approx((max_steps * warm_up / 100, max_steps * decay / 100), abs=1)
    assert PretrainConfig(lr_scheduler_type="warmup_stable_decay").schedule_steps(1000) == (100, 200)


# ---------------------------------------------------------------------------------------------------------------------
# The command that makes a run again


def resolved(words):
    """The architecture and the run of a command, read by the real parser."""
    assert words[:2] == ["d2l-bert", "pretrain"]
    return resolve_pretrain(make_parser(words[1:]).parse_args(words[1:]))


def recorded(architecture, run):
    """The record that run_config.json would hold, in which steps, precision and vocabulary are known numbers."""
    known = {"max_steps": run.max_steps or 7, "mixed_precision": run.mixed_precision or "bf16"}
    run = replace(run, corpus=run.text_paths(), **{**dict.fromkeys(LENGTH_OPTIONS), **known})
    numbers = architecture_numbers(architecture) | {"vocab_size": 123, "pad_token_id": 1}
    return json.loads(json.dumps({"run": asdict(run), "architecture": numbers, "corpus_is_prepared": False}))


def check_command(record):
    """Assert that the record's command gives the record's run and architecture; returns the command."""
    command = command_line(record)
    architecture, run = resolved(shlex.split(command))
    assert run.identity() == PretrainConfig(**record["run"]).identity()
    found = architecture_numbers(architecture)
    assert found == record["architecture"] | {name: found[name] for name in ("vocab_size", "pad_token_id")}
    return command


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_an_unchanged_recipe_names_only_recipe_and_precision(name):
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
def test_a_command_names_exactly_the_differences_from_its_recipe(options, told):
    record = recorded(*resolved(["d2l-bert", "pretrain", *options.split()]))
    assert check_command(record) == f"d2l-bert pretrain --recipe {told}"


def test_a_command_names_folders_by_their_last_name_and_hub_datasets_in_full(tmp_path, monkeypatch):
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


def test_the_command_of_a_run_from_python_names_every_option_that_changes_training():
    """Its recipe may have any name, and options for training a tokenizer are left out beside an existing one."""
    architecture, run = RECIPES["mini"]()
    run = replace(run, recipe="mine", tokenizer="google-bert/bert-base-uncased", vocab_size=7, min_frequency=9)
    again = resolved(shlex.split(command_line(recorded(architecture, run))))
    assert architecture_numbers(again[0]) == architecture_numbers(architecture)
    same = {name: getattr(run, name) for name in ("recipe", "vocab_size", "min_frequency")}
    assert replace(again[1], **same).identity() == replace(run, mixed_precision="bf16").identity()


def of_kind(kind, within):
    """A strategy for any value of a field that the parser accepts, of a type and in an interval such as `[0, 1)`."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_args(kind) and typing.get_origin(kind) is not list:
        return st.one_of(*(of_kind(part, within) for part in typing.get_args(kind) if part is not NoneType))
    entries = st.lists(st.builds("{}:0.{}".format, st.integers(1, 600), st.integers(1, 9)), min_size=1, max_size=3)
    texts = st.text("ab 'ü$->.1:", min_size=1).filter(lambda text: text[0] in "abü")
    least, most = map(float, within[1:-1].split(",")) if within else (0, 1e9)
    ends = {"exclude_min": within[0] == "(", "exclude_max": within[-1] == ")" and most < 1e9} if within else {}
    values = {float: st.floats(least, min(most, 1e9), **ends), bool: st.booleans(), str: texts}
    values[int] = st.integers(int(least), 2**62 if most > 2**62 else int(most))
    return values.get(kind, entries)


KINDS = typing.get_type_hints(PretrainConfig)
CHANGES = {
    field.name: of_kind(KINDS[field.name], field.metadata.get("within"))
    for field in fields(PretrainConfig)
    if field.name not in ("recipe", "init_from", *INPUT_OPTIONS, *LENGTH_OPTIONS)
}
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
def test_the_command_of_any_run_gives_that_run(recipe, changes, numbers):
    architecture, run = RECIPES[recipe]()
    for name, number in numbers.items():
        setattr(architecture, name, number)
    check_command(recorded(architecture, replace(run, **changes)))


def test_the_command_of_a_run_trains_the_same_bytes_again(trained, books, tmp_path, monkeypatch):
    record = json.loads((trained / "run_config.json").read_text())
    assert "--corpus books " in check_command(record)
    monkeypatch.chdir(books.parent)
    assert main([*shlex.split(command_line(record))[1:], f"--output_dir={tmp_path / 'again'}"]) == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (trained, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_options_fixed_by_a_start_model_or_a_prepared_folder_are_not_in_the_command(trained, tmp_path, monkeypatch):
    """Both would refuse such options."""
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
    options = json.loads((tmp_path / "tokens" / "prepared.json").read_text())["token_options"]
    assert (
        replace(run, init_from=str(tmp_path / "start"), **options).identity()
        == PretrainConfig(**record["run"]).identity()
    )
    assert architecture_numbers(architecture) == record["architecture"] | {"vocab_size": architecture.vocab_size}
