"""`pretrain --save_words`: words counted, models saved once each, in resumed runs too, and sent to their branches."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL
from publishing import published
from runs import run
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from d2l_bert import RECIPES, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import checkpoint
from d2l_bert.training.checkpoint import WordSaver
from d2l_bert.training.config import folder_name, word_marks
from d2l_bert.training.data import words_in
from d2l_bert.training.epochs import EpochPairs, Selection


def words_of(name):
    """The number of words in the name of a folder."""
    return word_marks([name.removeprefix("chck_")])[0]


OPTIONS = ("--max_steps=12", "--save_steps=5", "--save_total_limit=1", "--mixed_precision=no")
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"}
MODEL |= {"configuration_d2l_bert.py", "modeling_d2l_bert.py", "words_seen.json"}


def saved(folder):
    return {path.name: path for path in folder.glob("chck_*")}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_numbers_of_words_are_read_and_named_as_babylm_names_them():
    assert word_marks(["500", "10k", "1M", "1_500_000", "2m", "1000M"]) == [
        500,
        10**4,
        10**6,
        1_500_000,
        2 * 10**6,
        10**9,
    ]
    names = {500: "chck_500", 10**4: "chck_10k", 10**6: "chck_1M", 1_500_000: "chck_1500k", 10**9: "chck_1000M"}
    for words, name in names.items():
        assert folder_name(words) == name and words_of(name) == words


@pytest.mark.parametrize("entry", ["", "0", "-1", "1.5M", "1e6", "1G", "M", "9" * 30, "_1", "１M"])
def test_what_is_no_number_of_words_is_refused(entry):
    with pytest.raises(UserError, match="save_words takes numbers of words such as 10k, 1M or 1_000_000, got"):
        word_marks([entry])


@pytest.mark.parametrize("entries", [["2M", "1M"], ["1M", "1_000_000"], ["1k", "1K"]])
def test_numbers_that_do_not_increase_are_refused(entries):
    with pytest.raises(UserError, match=f"save_words: {entries[1]} must be more than the {entries[0]} before it"):
        word_marks(entries)


def test_words_are_counted_by_each_documents_words_a_token(books, tmp_path):
    """Ten texts, of which each has words of another length, so that tokens a word differ."""
    (tmp_path / "text").mkdir()
    for number in range(10):
        words = " ".join("abcdefghij"[number] * (1 + number) + " of the book." for _ in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    text = prepare(TextConfig(corpus=[str(tmp_path / "text")], vocab_size=60, preprocessing_num_workers=1))
    corpus = text.tokens
    pairs = EpochPairs(Selection(corpus, text.train_documents(), text.source_ends), PAIRING, seed=1).window(0, 0)
    expected = 0.0
    starts = corpus.first_tokens(np.arange(len(corpus) + 1))
    words = [4 * 40] * 10  # in each text
    assert (np.diff([0, *corpus.document_words.at(np.arange(10))]) == words).all()
    for pair in pairs:
        for side in "ab":
            for token in range(pair[f"{side}_start"], pair[f"{side}_end"]):
                document = np.searchsorted(starts, token, side="right") - 1
                expected += words[document] / (starts[document + 1] - starts[document])
    assert words_in(corpus, pairs) == pytest.approx(expected, rel=1e-9) and expected > 500
    whole = corpus.words(starts[:-1], starts[1:])
    assert whole == pytest.approx(sum(words))


PAIRING = {"pairing": "segments", "max_seq_length": 32, "objective": "nsp", "short_seq_prob": 0.1}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def whole(books, tmp_path_factory):
    """A run that saves after 600, 1,000 and 1,001 words; 99M are more than it sees."""
    folder = tmp_path_factory.mktemp("words") / "whole"
    run(books, folder, *OPTIONS, "--save_words", "600", "1k", "1_001", "99M")
    return folder


def test_models_are_saved_when_the_words_are_reached_and_no_limit_deletes_them(whole):
    assert saved(whole).keys() == {"chck_600", "chck_1k", "chck_1001"}
    assert [path.name for path in whole.glob("checkpoint-*")] == ["checkpoint-12"]
    steps = []
    for name, path in saved(whole).items():
        assert contents(path).keys() == MODEL
        record = json.loads((path / "words_seen.json").read_text())
        assert record["words"] == words_of(name) <= record["words_seen"]
        steps.append(record["step"])
        model, tokenizer = AutoModelForMaskedLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        assert model.config.vocab_size == len(tokenizer)
    assert 1 <= min(steps) < max(steps) < 12
    seen = json.loads((whole / "checkpoint-12" / "training_state.json").read_text())["words_seen"]
    # 12 steps of 8 pairs, of at most 45 tokens of text each.
    assert 1001 < seen < 12 * 8 * 45
    assert json.loads((whole / "run_config.json").read_text())["run"]["save_words"] == ["600", "1k", "1_001", "99M"]


def test_the_weights_are_those_of_the_step_that_reached_the_words(books, whole, tmp_path):
    step = json.loads((whole / "chck_600" / "words_seen.json").read_text())["step"]
    run(books, tmp_path / "run", *OPTIONS, f"--save_steps={step}", "--save_total_limit=99")
    weights = (tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").read_bytes()
    assert (whole / "chck_600" / "model.safetensors").read_bytes() == weights
    assert not saved(tmp_path / "run")
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "lost",
    [
        ("chck_600",),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("chck_1k", "chck_1001"), marks=pytest.mark.slow),
        pytest.param(("chck_600", "chck_1k", "chck_1001"), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_saves_each_model_once_with_the_same_bytes(books, whole, tmp_path, capsys, lost):
    """Killed before its first checkpoint, with some of the models saved: the run starts again from step 0."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoint-12")
    (folder / "model.safetensors").unlink()
    for name in lost:
        (folder / name).rename(folder / f".{name}.part")  # as if killed while it was written
    marks = ("--save_words", "600", "1k", "1_001", "99M")
    run(books, folder, *OPTIONS, *marks, "--resume_from_checkpoint=latest")
    assert saved(folder).keys() == saved(whole).keys() and not list(folder.glob(".chck*"))
    for name, path in saved(folder).items():
        assert contents(path) == contents(whole / name)
    said = capsys.readouterr().err
    assert all(said.count(f"{name}: saved after") == 1 for name in saved(whole))
    assert "save_words: the run has seen" in said and "so it has not saved chck_99M" in said


def test_a_run_that_resumes_behind_a_number_keeps_its_model_and_says_what_is_missing(books, whole, tmp_path, capsys):
    # The words of the first five steps, from a run that is the same but for its numbers.
    short = tmp_path / "short"
    run(books, short, *OPTIONS, "--save_total_limit=9", "--save_words", "900")
    seen = json.loads((short / "checkpoint-5" / "training_state.json").read_text())["words_seen"]
    for path in (short / "checkpoint-10", short / "checkpoint-12"):
        shutil.rmtree(path)
    (short / "model.safetensors").unlink()
    before = (short / "chck_900" / "words_seen.json").stat().st_mtime_ns
    later = int(seen) + 200
    capsys.readouterr()
    run(books, short, *OPTIONS, "--save_words", "500", "900", str(later), "--resume_from_checkpoint=latest")
    assert seen > 900 and saved(short).keys() == {"chck_900", folder_name(later)}
    assert (short / "chck_900" / "words_seen.json").stat().st_mtime_ns == before, "kept, not saved again"
    assert (short / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_new_run_in_the_folder_deletes_the_models_of_the_run_before(books, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    run(books, folder, *OPTIONS, "--overwrite_output_dir", "--max_steps=2")
    assert not saved(folder)


def test_a_folder_that_no_run_has_made_is_kept(tmp_path):
    for name in ("chck_9", "chck_5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("precious")
    learner = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=True, num_processes=1))
    WordSaver(learner, tmp_path, None, [7], {"step": 0}).start()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["chck_5", "chck_9", "mine.txt", "mine.txt"]


def test_a_number_reached_in_a_skipped_step_is_saved_after_the_next_step_even_if_the_run_resumes(monkeypatch):
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    learner = SimpleNamespace(accelerator=accelerator, full_model=lambda averaged: None)
    monkeypatch.setattr(checkpoint, "write_models", lambda folder, model, tokenizer, marks, reached: marks)
    words = WordSaver(learner, None, None, [100, 200], {"step": 0})
    words.seen += 150  # the step is skipped: `save_due` is not called
    resumed = WordSaver(
        learner, None, None, [100, 200], {"step": 1, "words_seen": 150, "words_settled": words.settled}
    )
    resumed.seen += 10
    assert resumed.save_due(2) == [100] and resumed.save_due(2) == [] and resumed.settled == 160


@pytest.mark.slow
def test_a_moving_average_is_what_is_saved(books, tmp_path):
    run(
        books,
        tmp_path / "run",
        *OPTIONS,
        "--ema_decay=0.9",
        "--save_words",
        "600",
        "--save_steps=1",
        "--save_total_limit=99",
    )
    path = tmp_path / "run" / "chck_600"
    step = json.loads((path / "words_seen.json").read_text())["step"]
    average = load_file(tmp_path / "run" / f"checkpoint-{step}" / "average.safetensors")
    weights = load_file(path / "model.safetensors")
    assert all((weights[name] == average[name]).all() for name in weights if name in average)
    assert average.keys() >= weights.keys()


@pytest.mark.slow
def test_a_dry_run_saves_and_warns_of_nothing(books, tmp_path, capsys):
    arguments = [f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, *OPTIONS, "--dry_run"]
    assert main(["pretrain", *arguments, "--save_words", "1", "99M"]) == 0
    assert "save_words" not in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_save_at_the_same_steps_with_the_same_words(books, whole, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "d2l_bert", "pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'two'}"]
    command += [*SMALL, *OPTIONS, "--save_words", "600", "1k", "1_001", "99M", "--dataloader_num_workers=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("chck_600: saved after") == 1, "one process saves and says it"
    assert saved(tmp_path / "two").keys() == saved(whole).keys()
    for name, path in saved(whole).items():
        one, two = contents(path), contents(tmp_path / "two" / name)
        first, second = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "two" / name))
        assert one.pop("model.safetensors") and two.pop("model.safetensors")
        assert one == two, "the same step, words, code and tokenizer"
        for weight in first:  # sums over two processes round in another order
            torch.testing.assert_close(first[weight], second[weight], atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# The Hub


def test_publish_leaves_the_models_out(whole, here, books, capsys):
    assert main(["publish", str(whole), "someone/bert", "--license=mit", "--dry_run"]) == 0
    listed = capsys.readouterr().out
    assert "chck" not in listed.partition("stays here:")[0] and "chck_1k" in listed.partition("stays here:")[2]


@pytest.mark.parametrize("strategy", ["end", pytest.param("every_save", marks=pytest.mark.slow)])
def test_each_model_is_sent_to_a_branch_of_its_name(here, books, whole, tmp_path, strategy):
    out = tmp_path / "bert"
    push = ["--push_to_hub", "--license=mit", f"--hub_strategy={strategy}", "--save_words", "600", "1_001"]
    run(books, out, *OPTIONS, *push)
    assert list(here.branches("someone/bert")) == ["main", "chck_600", "chck_1001"]
    for name in ("chck_600", "chck_1001"):
        files = published(here, revision=name)
        assert files["model.safetensors"] == (whole / name / "model.safetensors").read_bytes()
        assert "words_seen.json" not in files
        card = " ".join(files["README.md"].decode().split())
        step = json.loads((out / name / "words_seen.json").read_text())["step"]
        assert f"taken after {words_of(name):,} words of text, which is {step} steps of a run of 12" in card
        assert json.loads(files["run_config.json"])["checkpoint_words"] == words_of(name)
    model = D2lBertForPreTraining.from_pretrained("someone/bert", revision="chck_600", cache_dir=tmp_path / "cache")
    assert model.config.vocab_size


@pytest.mark.slow
def test_a_resumed_run_sends_what_was_saved_and_not_sent(here, books, tmp_path):
    out = tmp_path / "bert"
    marks, push = ["--save_words", "600", "1_001"], ["--push_to_hub", "--license=mit"]
    run(books, out, *OPTIONS, *marks)  # as if killed before anything was sent
    (out / "model.safetensors").unlink()
    run(books, out, *OPTIONS, *marks, *push, "--resume_from_checkpoint=latest")
    assert list(here.branches("someone/bert")) == ["main", "chck_600", "chck_1001"]
    commits = [len(here.repositories["model", "someone/bert"].history(name)) for name in ("chck_600", "chck_1001")]
    (out / "model.safetensors").unlink()
    run(books, out, *OPTIONS, *marks, *push, "--resume_from_checkpoint=latest")
    again = [len(here.repositories["model", "someone/bert"].history(name)) for name in ("chck_600", "chck_1001")]
    assert commits == again, "what is there already makes no new commit"


def test_the_options_of_all_recipes_save_no_words_by_default():
    assert all(recipe()[1].save_words == [] for recipe in RECIPES.values())
