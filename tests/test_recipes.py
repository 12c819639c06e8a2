"""Recipes: sizes of stock BERT, commands that repeat a run; learning rates, what is due, the number of steps."""

import itertools
import json
import math
import shlex
import typing
from dataclasses import asdict, fields, replace
from types import NoneType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForPreTraining, get_scheduler, get_wsd_schedule

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main, make_parser
from d2l_bert.commands import options_of_pretrain
from d2l_bert.messages import UserError
from d2l_bert.training import recipes, schedule
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.data.steps import Stage
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.recipes import INPUT_OPTIONS, RECIPES, command_line, resolve
from d2l_bert.training.run_folder import architecture_numbers
from d2l_bert.training.schedule import due_after, learning_rate, steps_for_minutes, time_steps


LITERATURE = ["mini", "small", "medium", "base", "large"]


def tokens_of_stages(run):
    """For each stage, its number of steps and the largest number of tokens in a step."""
    stages = run.stages(run.max_steps)
    ends = [start for start, _, _ in stages[1:]] + [run.max_steps]
    found = []
    for (start, length, batch_size), end in zip(stages, ends, strict=True):
        rows = batch_size * (run.max_seq_length // length)
        found.append((end - start, rows * length))
    return found


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
    given = options_of_pretrain(make_parser(["pretrain", *options]).parse_args(["pretrain", *options]))
    return resolve(given.pop("recipe"), given)


def test_options_of_the_command_line_replace_or_shorten_a_recipes_schedules():
    def schedules(*options):
        (run := resolved("--recipe=mini", *options)[1]).check()
        return run.batch_size_schedule, run.length_schedule

    assert asdict(resolved("--recipe=mini")[1]) == asdict(RECIPES["mini"]()[1])
    assert schedules() == (["16:0.2", "32:0.2"], ["128:0.9"])
    assert schedules("--global_batch_size=32") == (["16:0.2"], ["128:0.9"])
    assert schedules("--max_seq_length=128") == (["16:0.2", "32:0.2"], [])
    assert schedules("--batch_size_schedule", "none", "--length_schedule", "none") == ([], [])
    assert schedules("--batch_size_schedule", "8:0.5", "16:0.1") == (["8:0.5", "16:0.1"], ["128:0.9"])


@pytest.mark.parametrize("recipe", ["tiny", "small"])
def test_a_run_that_starts_from_a_model_has_a_lower_rate_unless_one_is_given(trained, recipe):
    words = [f"--recipe={recipe}", f"--init_from={trained}"]
    usual = RECIPES[recipe]()[1].learning_rate
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
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text("ab 'ü$->.1:", min_size=1).filter(lambda text: text[0] in "abü")
    if kind not in (int, float):
        entry = st.builds("{}:0.{}".format, st.integers(1, 600), st.integers(1, 9))
        return st.lists(entry, min_size=1, max_size=3)
    within = within or "[0,1e9]"
    least, most = map(float, within[1:-1].split(","))
    if kind is int:
        return st.integers(int(least), 2**62 if most > 2**62 else int(most))
    excludes_most = within[-1] == ")" and most < 1e9
    return st.floats(least, min(most, 1e9), exclude_min=within[0] == "(", exclude_max=excludes_most)


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


@pytest.mark.slow
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


# ---------------------------------------------------------------------------------------------------------------------
# The learning rate

RATES = ["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]


def transformers_shares(kind, warmup_steps, max_steps, decay_steps):
    """The factors by which Transformers' scheduler multiplies the learning rate, for each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    if kind == "warmup_stable_decay":
        scheduler = get_wsd_schedule(optimizer, warmup_steps, decay_steps, max_steps, decay_type="1-sqrt")
    else:
        scheduler = get_scheduler(kind, optimizer, warmup_steps, max_steps)
    return [scheduler.lr_lambdas[0](step) for step in range(max_steps + 1)]


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("warmup_steps, decay_steps", [(0, 20), (7, 20), (30, 70), (99, 1)])
def test_learning_rates_equal_transformers_except_that_the_first_step_is_not_zero(kind, warmup_steps, decay_steps):
    """Transformers starts at 0, so during warm-up our rate is that of its next step. Afterwards both are equal."""
    theirs = transformers_shares(kind, warmup_steps, 100, decay_steps)
    expected = theirs[1 : warmup_steps + 1] + theirs[warmup_steps:100]
    warmup_ratio = max(0, warmup_steps - 0.5) / 100
    ratios = {"warmup_ratio": warmup_ratio, "decay_ratio": (decay_steps + 0.5) / 100}
    run = PretrainConfig(max_steps=100, lr_scheduler_type=kind, learning_rate=0.5, **ratios)
    ours = [learning_rate(run, step) / 0.5 for step in range(1, 101)]
    assert ours == pytest.approx(expected, abs=1e-12)


def test_a_constant_rate_has_no_warm_up():
    _, run = recipes.RECIPES["tiny"]()
    run = recipes.override_options(run, {"lr_scheduler_type": "constant"})
    run.check()
    rates = {learning_rate(run, step) for step in range(1, run.max_steps + 1)}
    assert rates == {run.learning_rate}


# ---------------------------------------------------------------------------------------------------------------------
# What is due


def steps_due(run):
    """The steps after which something is to be done, by its name."""
    found = {"log": [], "evaluate": [], "save": []}
    for step in range(1, run.max_steps + 1):
        for name in due_after(run, step):
            found[name].append(step)
    return found


def test_what_is_due_after_each_step():
    due = steps_due(PretrainConfig(max_steps=20, logging_steps=3, eval_steps=5, save_steps=7))
    assert due["evaluate"] == [5, 10, 15, 20]
    assert due["save"] == [7, 14, 20]
    assert due["log"] == sorted({3, 6, 9, 12, 15, 18, *due["evaluate"], *due["save"]})
    due_by_default = steps_due(PretrainConfig(max_steps=5000))
    assert len(due_by_default["log"]) == 100
    assert len(due_by_default["evaluate"]) == 10
    assert len(due_by_default["save"]) == 10


@pytest.mark.parametrize("max_steps, schedule", [(10, ["16:0.96"]), (3, ["16:0.5", "32:0.4"]), (1, ["16:0.5"])])
def test_a_schedule_of_lengths_leaves_a_step_of_full_length(max_steps, schedule):
    run = PretrainConfig(max_seq_length=48, length_schedule=schedule, batch_size_schedule=[])
    first, length, _ = run.stages(max_steps)[-1]
    assert length == 48 and first < max_steps


# ---------------------------------------------------------------------------------------------------------------------
# The number of steps


def take_time(monkeypatch):
    """Replace the clock of the estimate by one that stands still, and return a function that moves it on."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def take(seconds):
        clock.now += seconds

    return take


def timed(take, stages, *, making=0.0, workers=0, compiling=None, most_seconds=math.inf):
    """
    The result of `time_steps` on a run of 100 steps, and how long each step takes, in their order.

    Args:
        stages: the seconds of a step, by the first step of each stage; the first step of all takes 9 s.
        making: the seconds that it takes to make the batch of a step.
        compiling: the seconds that the fifth step of each stage takes; as the others, if None.
        most_seconds: as in `time_steps`.
    """
    taken = [None]

    def update(micro_batches, counts, learning_rate):
        assert learning_rate == 0
        (seconds,) = micro_batches
        is_first = seconds != taken[-1]
        is_fifth = taken[-5:] == [seconds] * 5 and taken[-6] != seconds
        take(9.0 if is_first else (compiling or seconds) if is_fifth else seconds)
        taken.append(seconds)

    def walk(start):
        seconds = next(seconds for first, seconds in reversed(stages.items()) if first <= start)
        while True:
            take(making)
            yield SimpleNamespace(micro_batches=[seconds], counts=None, words=100 * seconds)

    borders = itertools.pairwise([*stages, 100])
    made = [Stage(first, end, None, None, 0) for first, end in borders]
    learner = SimpleNamespace(update=update)
    run = PretrainConfig(dataloader_num_workers=workers)
    return time_steps(learner, SimpleNamespace(run=run, stages=made, walk=walk), most_seconds), taken[1:]


STAGES = {0: 1.0, 40: 0.25, 90: 3.0, 99: 2.0}  # the last one is a single step
ALL_STEPS = 40 * 1.0 + 50 * 0.25 + 9 * 3.0 + 2.0


def test_the_time_of_a_run_is_that_of_all_steps_of_each_stage(monkeypatch):
    (total, words), taken = timed(take_time(monkeypatch), STAGES)
    assert total == pytest.approx(ALL_STEPS)
    assert words == pytest.approx(100 * total)
    assert taken == [1.0] * 21 + [0.25] * 21 + [3.0] * 10 + [2.0] * 2


def test_a_step_that_compiles_does_not_count_for_all(monkeypatch):
    (total, _), _ = timed(take_time(monkeypatch), STAGES, compiling=30.0)
    assert total == pytest.approx(ALL_STEPS)


@pytest.mark.parametrize(("workers", "seconds_a_step"), [(0, 0.8), (1, 0.8), (2, 0.4), (8, 0.25)])
def test_a_step_takes_as_long_as_the_loader_where_that_is_slower(monkeypatch, workers, seconds_a_step):
    """A batch is made in 0.8 s, by one thread or process, and computed in 0.25 s."""
    (total, _), _ = timed(take_time(monkeypatch), {0: 0.25}, making=0.8, workers=workers)
    assert total == pytest.approx(100 * seconds_a_step)


def test_the_first_batch_of_an_evaluation_is_not_timed(monkeypatch):
    """It compiles, in 15 s; an evaluation of five batches then takes 2 s, ten of them 20 s of 120."""
    take = take_time(monkeypatch)
    evaluated = []

    def evaluate(batches):
        for batch in batches:
            take(0.4 if evaluated else 15.0)
            evaluated.append(batch)

    learner = SimpleNamespace(evaluate=evaluate, accelerator=make_accelerator("no"), reset_optimizers=lambda: None)
    monkeypatch.setattr(schedule, "TrainingSteps", lambda *_: None)
    monkeypatch.setattr(schedule, "time_steps", lambda *_: (0.5 * schedule.PROVISIONAL_STEPS, 1.0))
    steps = schedule.find_max_steps(PretrainConfig(max_minutes=2), None, learner, [1, 2, 3, 4, 5], None)
    assert steps == 200
    assert evaluated == [1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("most_seconds, count", [(2.0, 3), (9.0, 5), (1000.0, 20)])
def test_slow_steps_are_timed_for_their_share_of_the_seconds_alone_but_three_of_each_stage(
    monkeypatch, most_seconds, count
):
    """A stage has half of the seconds. Its first step takes 9 s, which do not count, as it may compile; others 1 s."""
    (total, _), taken = timed(take_time(monkeypatch), {0: 1.0, 50: 1.0001}, most_seconds=most_seconds)
    assert total == pytest.approx(100, rel=1e-3)
    assert taken.count(1.0) == taken.count(1.0001) == 1 + count


@pytest.mark.parametrize("most_seconds, computed", [(3.0, 2), (1000.0, 5)])
def test_of_a_long_evaluation_a_part_is_timed(monkeypatch, most_seconds, computed):
    """Five batches of 2 s each are 10 s, however many of them are computed."""
    take = take_time(monkeypatch)
    evaluated = []

    def evaluate(batches):
        for batch in batches:
            take(2.0)
            evaluated.append(batch)

    seconds = schedule.time_evaluation(SimpleNamespace(evaluate=evaluate), [1, 2, 3, 4, 5], most_seconds)
    assert seconds == pytest.approx(10)
    assert evaluated == [1, *range(1, computed + 1)]


def test_minutes_say_that_they_time_steps_and_so_does_ctrl_c(monkeypatch, caplog):
    def interrupted(*_):
        raise KeyboardInterrupt

    caplog.set_level("INFO", "d2l_bert")
    learner = SimpleNamespace(accelerator=make_accelerator("no"))
    monkeypatch.setattr(schedule, "TrainingSteps", lambda *_: None)
    monkeypatch.setattr(schedule, "time_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        schedule.find_max_steps(PretrainConfig(max_minutes=2), None, learner, [1], None)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_minutes_hold_the_steps_and_their_evaluations(caplog):
    run = PretrainConfig(max_minutes=10)
    # Ten evaluations of 12 s take 120 of 600 s.
    assert steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12) == 960
    assert not caplog.records
    # An evaluation each 100 steps: 100 steps and an evaluation take 62 s.
    run.eval_steps = 100
    assert steps_for_minutes(run, step_seconds=0.5, evaluation_seconds=12) == int(600 / 62 * 100)


def test_evaluations_that_take_most_of_the_minutes_are_told_and_all_of_them_refused(caplog):
    run = PretrainConfig(max_minutes=1)
    assert steps_for_minutes(run, step_seconds=1, evaluation_seconds=4.5) == 15
    assert "evaluations take 75% of them" in caplog.text and "lower --max_eval_pairs" in caplog.text
    with pytest.raises(UserError, match="evaluations take 100% of them, .* 0 steps of 1 s; lower max_eval_pairs"):
        steps_for_minutes(run, step_seconds=1, evaluation_seconds=6.1)
