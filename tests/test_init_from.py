"""Runs that start from a trained model, and words added to its vocabulary."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from runs import run
from safetensors.torch import load_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertConfig
from d2l_bert.cli import main
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.pretrain import pretrain


SHORT = ["--max_seq_length=48", "--global_batch_size=8", "--dataloader_num_workers=0", "--mixed_precision=no"]


@pytest.fixture(scope="module")
def spelling(books, tmp_path_factory):
    """The folder of a model with a vocabulary of 60 entries, which splits most words."""
    folder = tmp_path_factory.mktemp("spelling") / "model"
    run(books, folder, "--max_steps=2", "--vocab_size=60", "--mixed_precision=no")
    return folder


def run_from(model, corpus, folder, *options):
    """Train from the weights of `model`; returns the new weights."""
    assert (
        main(["pretrain", f"--init_from={model}", f"--corpus={corpus}", f"--output_dir={folder}", *SHORT, *options])
        == 0
    )
    return load_file(folder / "model.safetensors")


def test_a_run_can_start_from_a_models_weights_architecture_and_tokenizer(books, spelling, tmp_path):
    """One step at a learning rate of almost 0 leaves the weights unchanged."""
    out = tmp_path / "out"
    weights = run_from(spelling, books, out, "--max_steps=1", "--learning_rate=1e-12", "--hidden_dropout_prob=0.3")
    before = load_file(spelling / "model.safetensors")
    assert weights.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-9, rtol=0)
    for name in ("tokenizer.json", "vocab.txt"):
        assert (out / name).read_bytes() == (spelling / name).read_bytes()
    config, was = (json.loads((folder / "config.json").read_text()) for folder in (out, spelling))
    assert {name for name in was if config[name] != was[name]} == {"hidden_dropout_prob"}
    card = (out / "README.md").read_text()
    assert "pretrained further on books" in card and "base_model" not in card
    assert f"the weights, architecture and vocabulary of {spelling.name} |" in card and str(spelling) not in card


def test_an_architecture_given_in_python_must_be_that_of_the_start_model(books, trained, tmp_path):
    options = PretrainConfig(corpus=[str(books)], output_dir=str(tmp_path / "out"), max_steps=1, max_seq_length=48)
    with pytest.raises(ValueError, match="hidden_size is 32 there, and 128 here"):
        pretrain(D2lBertConfig(), replace(options, init_from=str(trained)))
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_takes_the_weights_of_its_checkpoint_and_not_of_the_start_model(
    books, spelling, tmp_path, capsys
):
    options = ["--max_steps=4", "--save_steps=2", "--extend_vocab=10"]
    whole = run_from(spelling, books, tmp_path / "out", *options)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    resumed = run_from(spelling, books, tmp_path / "out", *options, "--resume_from_checkpoint=latest")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    other = tmp_path / "other"
    shutil.copytree(spelling, other)
    command = ["pretrain", f"--init_from={other}", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SHORT]
    assert main([*command, *options, "--resume_from_checkpoint=latest"]) == 2
    assert "another run: init_from was" in capsys.readouterr().err


def test_words_may_be_added_by_pretrain_or_by_prepare(books, spelling, tmp_path, capsys):
    tokens = tmp_path / "tokens"
    out = [f"--output_dir={tokens}", f"--tokenizer={spelling}"]
    assert main(["prepare", f"--corpus={books}", *out, "--extend_vocab=12", "--min_frequency=3"]) == 0
    assert "added 12 words to the vocabulary" in (said := capsys.readouterr().err)
    assert "pieces a word" in said and "[UNK]" in said
    options = ["--max_steps=1", "--learning_rate=1e-12"]
    run_from(spelling, tokens, tmp_path / "a", *options)
    run_from(spelling, books, tmp_path / "b", *options, "--extend_vocab=12", "--min_frequency=3")
    for name in ("model.safetensors", "vocab.txt", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    old, new = AutoTokenizer.from_pretrained(spelling), AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(new) == len(old) + 12
    name = "bert.embeddings.word_embeddings.weight"
    was, now = (load_file(folder / "model.safetensors")[name] for folder in (spelling, tmp_path / "a"))
    torch.testing.assert_close(now[: len(old)], was, atol=1e-9, rtol=0)
    for row in range(len(old), len(new)):
        pieces = old(new.convert_ids_to_tokens(row), add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(now[row], was[pieces].mean(0), atol=1e-7, rtol=1e-5)
    assert "up to 12 words of the corpus were added" in (tmp_path / "a" / "README.md").read_text()


def test_asking_for_too_many_added_words_is_reported_and_rare_words_are_not_added(books, spelling, tmp_path, capsys):
    words = Counter(re.findall("[a-z]+", " ".join(book.read_text() for book in books.iterdir()).lower()))
    rare = {word for word in words if words[word] < 60}
    sizes = []
    for least in (2, 60):
        tokens = tmp_path / f"tokens-{least}"
        out = [f"--output_dir={tokens}", f"--tokenizer={spelling}", "--extend_vocab=5000", f"--min_frequency={least}"]
        assert main(["prepare", f"--corpus={books}", *out]) == 0
        assert f"not 5,000: no other words are split and occur {least} times" in capsys.readouterr().err
        vocabulary = AutoTokenizer.from_pretrained(tokens).get_vocab()
        assert least == 2 or not rare & set(vocabulary)
        sizes.append(len(vocabulary))
    assert rare and sizes[0] > sizes[1] > 60
