"""Recipes: they have the sizes of stock BERT, follow the command line, and can be repeated by a command."""

import json
import shlex
import typing
from dataclasses import asdict, fields, replace
from types import NoneType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForPreTraining

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main, make_parser
from d2l_bert.commands import resolve_pretrain
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


@pytest.mark.parametrize("name", LITERATURE)
def test_recipes_have_as_many_parameters_as_stock_bert_and_20_tokens_per_parameter(name):
    architecture, run = RECIPES[name]()
    architecture.vocab_size = run.vocab_size
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    stock = BertConfig(**{size: getattr(architecture, size) for size in sizes})
    with torch.device("meta"):
        parameters = D2lBertForPreTraining(architecture).num_parameters()
        assert parameters == BertForPreTraining(stock).num_parameters()
    assert sum(steps * tokens for steps, tokens in tokens_of_stages(run)) > 20 * parameters


def resolved(*options):
    """The architecture and the run of `pretrain` with some options, read by the real parser."""
    return resolve_pretrain(make_parser(["pretrain", *options]).parse_args(["pretrain", *options]))


def test_options_of_the_command_line_replace_or_shorten_a_recipes_schedules():
    def schedules(*options):
        _, run = resolved("--recipe=mini", *options)
        run.check()
        return run.batch_size_schedule, run.length_schedule

    assert asdict(resolved("--recipe=mini")[1]) == asdict(RECIPES["mini"]()[1])
    assert schedules() == (["16:0.2", "32:0.2"], ["128:0.9"])
    assert schedules("--global_batch_size=32") == (["16:0.2"], ["128:0.9"])
    assert schedules("--max_seq_length=128") == (["16:0.2", "32:0.2"], [])
    assert schedules("--batch_size_schedule", "none", "--length_schedule", "none") == ([], [])
    assert schedules("--batch_size_schedule", "8:0.5", "16:0.1") == (["8:0.5", "16:0.1"], ["128:0.9"])


@pytest.mark.parametrize("recipe", ["tiny", "small"])
def test_a_run_that_starts_from_a_model_has_a_lower_rate_unless_one_is_given(trained, recipe):
    words, usual = [f"--recipe={recipe}", f"--init_from={trained}"], RECIPES[recipe]()[1].learning_rate
    assert 0 < resolved(*words)[1].learning_rate < usual
    assert resolved(*words, f"--learning_rate={2 * usual}")[1].learning_rate == 2 * usual


# ---------------------------------------------------------------------------------------------------------------------
# The command that makes a run again


def recorded(architecture, run):
    """The record that run_config.json would hold, in which steps, precision and vocabulary are known numbers."""
    known = {"max_steps": run.max_steps or 7, "mixed_precision": run.mixed_precision or "bf16"}
    run = replace(run, corpus=run.text_paths(), **{**dict.fromkeys(LENGTH_OPTIONS), **known})
    numbers = architecture_numbers(architecture) | {"vocab_size": 123, "pad_token_id": 1}
    return json.loads(json.dumps({"run": asdict(run), "architecture": numbers, "corpus_is_prepared": False}))


def check_command(record):
    """Assert that the record's command gives the record's run and architecture; returns the command."""
    command = command_line(record)
    name, subcommand, *words = shlex.split(command)
    assert (name, subcommand) == ("d2l-bert", "pretrain")
    architecture, run = resolved(*words)
    assert run.identity() == PretrainConfig(**record["run"]).identity()
    found = architecture_numbers(architecture)
    assert found == record["architecture"] | {name: found[name] for name in ("vocab_size", "pad_token_id")}
    return command


BF16 = "--mixed_precision bf16"


@pytest.mark.parametrize(
    "options, told",
    [
        ("--recipe mini --max_steps 10000", f"mini {BF16}"),
        ("--max_steps 9 --packing --save_steps 3 --license mit --report_to none", f"tiny --max_steps 9 {BF16}"),
        ("--micro_batch_size 4 --gradient_checkpointing --output_dir out", f"tiny {BF16}"),
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
        (
            "--tokenizer Some/body --extend_vocab 5 --min_frequency 9",
            f"tiny --tokenizer Some/body --min_frequency 9 --extend_vocab 5 {BF16}",
        ),
    ],
)
def test_a_command_names_exactly_the_differences_from_its_recipe(options, told):
    record = recorded(*resolved(*options.split()))
    assert check_command(record) == f"d2l-bert pretrain --recipe {told}"


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


@pytest.mark.slow
def test_the_command_of_a_run_trains_the_same_bytes_again(trained, books, tmp_path, monkeypatch):
    record = json.loads((trained / "run_config.json").read_text())
    assert "--corpus books " in check_command(record)
    monkeypatch.chdir(books.parent)
    assert main([*shlex.split(command_line(record))[1:], f"--output_dir={tmp_path / 'again'}"]) == 0
    assert (trained / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
