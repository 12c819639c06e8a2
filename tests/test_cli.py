"""The command line: every mistake gives one clear line and exit code 2, and destroys nothing."""

import dataclasses
import json
import os
import shutil

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main, make_parser
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.recipes import architecture_options
from d2l_bert.training.run_folder import output_folder


def test_an_output_folder_in_use_by_another_run_is_refused(fails, books, tmp_path):
    with output_folder(PretrainConfig(), tmp_path / "out"):
        line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=2", *SMALL)
    assert "another run is writing there" in line and not (tmp_path / "out").exists()


def test_a_failed_resume_overwrites_nothing(fails, books, trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    options = (f"--corpus={books}", f"--output_dir={other}", "--max_steps=40", "--mixed_precision=no", *SMALL)
    line = fails("pretrain", *options, f"--resume_from_checkpoint={trained / 'checkpoint-20'}")
    assert "holds another run than that of" in line
    for checkpoint in other.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for option in ([], ["--resume_from_checkpoint=latest"]):
        line = fails("pretrain", *options, *option)
        assert "no checkpoint to go on from" in line and "go on with" not in line
    assert (other / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_options_may_be_written_with_dashes_instead_of_underscores(books, tmp_path):
    options = ["--max-steps=1", f"--output-dir={tmp_path / 'out'}", *(option.replace("_", "-") for option in SMALL)]
    assert main(["pretrain", f"--corpus={books}", *options]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("shows_all", ["--help-all", "--help_all", None])
def test_help_names_the_common_options_and_help_all_every_one(capsys, shows_all):
    names = {*architecture_options(), *(field.name for field in dataclasses.fields(PretrainConfig))}
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--recipe=d2l", shows_all or "--help"])
    said = capsys.readouterr().out
    found = {name for name in names if f"--{name} " in said}
    assert stop.value.code == 0 and (found == names if shows_all else 10 <= len(found) <= 15)
    assert not shows_all or all(
        text in said for text in ("--hidden_dropout_prob X", "(0.2)", "(20256)", "(sentences)")
    )


@pytest.mark.parametrize(
    ("before", "option"),
    [
        ("pretrain", "corpus"),
        ("prepare --output_dir=o", "dataset"),
        ("prepare", "check"),
        ("evaluate m", "corpus"),
        ("export m d", "corpus"),
        ("finetune m", "label_column"),
    ],
)
def test_an_option_that_takes_a_list_may_be_given_several_times(before, option):
    argv = [*before.split(), f"--{option}", "a", "b", f"--{option}=c", f"--{option}", "d"]
    for _ in range(2):  # the values of one call do not stay for the next
        assert getattr(make_parser(argv).parse_args(argv), option) == ["a", "b", "c", "d"]


def test_a_text_whose_name_is_not_utf_8_is_prepared(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text(" ".join(f"A line of {n % 9} words." for n in range(300)))
    assert main(["prepare", f"--corpus={path}", f"--output_dir={tmp_path / 'out'}", "--vocab_size=60"]) == 0
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["counts"]["corpus_name"] == "caf\ufffd.txt"
