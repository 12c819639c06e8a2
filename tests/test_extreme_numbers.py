"""Every numeric option is refused in one line where a number makes no sense, and what is taken works."""

import dataclasses
import math
import typing

import pytest
from conftest import SMALL
from finetuning import rows_of
from text_sources import write_table

from d2l_bert.__main__ import main, make_parser
from d2l_bert.commands import config_of
from d2l_bert.inference.config import AttentionConfig, EmbedConfig
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.modeling.config import ExportConfig
from d2l_bert.options import members_of, what_is_wrong
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig


CONFIGS = (
    *(PretrainConfig, TextConfig, EvaluateConfig, FinetuneConfig, PredictConfig),
    *(EmbedConfig, AttentionConfig, ExportConfig, PublishConfig),
)

EXTREMES = (1e30, 10**30, 2**63, 2**53 + 1, 1e300, -1, -1.0, 0, 0.0, math.nan, math.inf, -math.inf, 5e-324)


def numbers(config):
    """The numeric options of a dataclass: the name, the type and the interval of each."""
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if {int, float} & {*members_of(kinds[field.name])}:
            yield field.name, kinds[field.name], field.metadata["within"]


def largest(kind, within):
    """The largest of some numbers that the option takes."""
    tried = (2**62, 2**53, 4 * 10**9, 2**31 - 1, 2**24, 10**6, 1024, 1000, 100, 1.0, 0.999)
    return next(number for number in tried if not what_is_wrong(number, kind, within))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_numeric_option_refuses_what_is_no_sane_number(config):
    for name, kind, within in numbers(config):
        for value in EXTREMES:
            wrong = what_is_wrong(value, kind, within)
            most = 2**63 - 1 if name == "seed" else 2**53
            assert wrong.startswith("must be") or (wrong == "" and abs(value) <= most), (name, value)
            assert "\n" not in wrong
        assert what_is_wrong(10**30, kind, within) and what_is_wrong(math.inf, kind, within), name


def test_the_command_line_refuses_such_numbers_by_the_name_of_the_option(fails, trained, tmp_path):
    for words in (
        "pretrain --max_documents 1e30",
        f"prepare --output_dir x --min_frequency {10**30}",
        "pretrain --learning_rate 1e300",
        "pretrain --learning_rate 101",
        f"evaluate {trained} --corpus x --pppl_sentences {2**63}",
        f"evaluate {trained} --corpus x --batch_tokens {10**30}",
        f"embed {trained} x --output y.npy --batch_tokens {2**60}",
        f"finetune {trained} --task text-classification --train_file x --per_device_train_batch_size {10**30}",
        f"predict {trained} x --output y.csv --per_device_eval_batch_size {2**40}",
        f"fill-mask {trained} [MASK] --top_k {10**30}",
        "pretrain --dataloader_num_workers 100000",
        "prepare --output_dir x --preprocessing_num_workers 100000",
    ):
        command = words.split()
        said = fails(*command)
        assert command[-2].lstrip("-") in said and "must be a number in" in said or "1e30" in said, words


def test_a_seed_of_63_bits_is_taken_from_the_command_line():
    arguments = make_parser(["pretrain"]).parse_args(["pretrain", f"--seed={2**63 - 1}"])
    assert config_of(arguments).seed == 2**63 - 1


# Options whose largest number would only take long, use up the memory by its meaning, or start a thousand processes.
LONG = {
    *("num_train_epochs", "max_steps", "max_minutes", "global_batch_size", "dataloader_num_workers", "num_seeds"),
    *("preprocessing_num_workers", "gradient_accumulation_steps", "extend_vocab"),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", [PretrainConfig, TextConfig, EvaluateConfig, FinetuneConfig, EmbedConfig])
def test_the_largest_number_that_an_option_takes_works_or_is_one_line(config, books, trained, tmp_path, capsys):
    table = write_table(tmp_path / "rows.csv", rows_of(24, 0))
    commands = {
        PretrainConfig: ["pretrain", f"--corpus={books}", *SMALL, "--max_steps=2", "--mixed_precision=no"],
        TextConfig: ["prepare", f"--corpus={books}"],
        EvaluateConfig: ["evaluate", str(trained), f"--corpus={books}", "--max_eval_pairs=8"],
        FinetuneConfig: ["finetune", str(trained), "--task=text-classification", f"--train_file={table}"],
        EmbedConfig: ["embed", str(trained), str(books / "book-00.txt")],
    }
    failed = []
    for name, kind, within in numbers(config):
        if name in LONG:
            continue
        command = [*commands[config], f"--{name}={largest(kind, within)}"]
        if config is FinetuneConfig:
            command += ["--max_steps=2"]
        if config is EmbedConfig:
            command += ["--nearest", "a text"]
        elif config is not EvaluateConfig:
            command += [f"--output_dir={tmp_path / name}"]
        try:
            code = main(command)
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr().err
        if code not in (0, 2):
            failed.append((name, said[-300:]))
    assert not failed, "\n".join(f"{name}: {said}" for name, said in failed)
