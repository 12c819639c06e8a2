"""Whole runs: what a model learns, its moving average, dry runs, and the length of a run."""

import json
import math
import re
from collections import Counter

import pytest
import torch
from runs import run
from safetensors.torch import load_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.tokenization import prepare
from d2l_bert.training import data
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.epochs import Selection
from d2l_bert.training.recipes import RECIPES


@pytest.mark.slow
def test_training_lowers_the_held_out_loss_below_that_of_token_frequencies(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=700", "--learning_rate=3e-3", "--attention_init=neighbours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    counts = Counter(token for book in books.iterdir() for token in tokenizer.tokenize(book.read_text()))
    unigrams = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["eval_mlm_loss"] < unigrams - 0.5


def check_figures(books, trained):
    """Compute the held-out losses and accuracies again, with the loaded model and a separate loop."""
    record = json.loads((trained / "run_config.json").read_text())
    config = PretrainConfig(**{**record["run"], "corpus": [str(books)]})
    text = prepare.prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    make_batch = data.BatchMaker(text.held_out, tokenizer, config.mlm_probabilities()[1], config.max_seq_length)
    pairing = {"pairing": "segments", "max_seq_length": config.max_seq_length, "short_seq_prob": 0.1}
    selection = Selection(text.held_out)
    held_out = data.HeldOutPairs(selection, pairing, make_batch, 1)
    model = D2lBertForPreTraining.from_pretrained(trained).eval()
    losses, right, followed = [], [], []
    with torch.no_grad():
        for batch in held_out:
            logits = model(
                batch["input_ids"], token_type_ids=batch["token_type_ids"], attention_mask=batch["attention_mask"]
            )
            for place, label in zip(batch["masked_positions"][0], batch["labels"][0], strict=True):
                scores = logits.prediction_logits[0, place].log_softmax(-1)
                losses.append(-float(scores[label]))
                right.append(int(scores.argmax()) == int(label))
            if (label := int(batch["next_sentence_label"][0])) != -100:
                followed.append(int(logits.seq_relationship_logits[0].argmax()) == label)
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["eval_masked_tokens"] == len(losses) and metrics["eval_pairs"] == len(followed)
    assert metrics["eval_mlm_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert metrics["eval_mlm_accuracy"] == pytest.approx(sum(right) / len(right))
    assert metrics["eval_nsp_accuracy"] == pytest.approx(sum(followed) / len(followed))


def test_the_moving_average_is_evaluated_and_published(books, tmp_path):
    """A checkpoint holds the weights and, beside them, their moving average."""
    out = tmp_path / "out"
    options = ("--ema_decay=0.5", "--max_steps=6", "--save_steps=1", "--save_total_limit=9", "--mixed_precision=no")
    run(books, out, *options)
    average = None
    for step in range(1, 7):
        weights = load_file(out / f"checkpoint-{step}" / "model.safetensors")
        # The initial weights are not saved; after step 1 their share in the average is min(0.5, 2 / 11).
        decay = min(0.5, (1 + step) / (10 + step))
        saved = load_file(out / f"checkpoint-{step}" / "average.safetensors")
        if average is not None:
            for name in weights:
                torch.testing.assert_close(saved[name], decay * average[name] + (1 - decay) * weights[name])
        average = saved
    check_figures(books, out)
    published = load_file(out / "model.safetensors")
    assert all(torch.equal(published[name], average[name]) for name in average)
    assert any(not torch.equal(published[name], weights[name]) for name in weights)


@pytest.mark.parametrize("recipe", ["tiny", pytest.param("mini", marks=pytest.mark.slow)])
def test_a_dry_run_goes_through_all_parts_of_a_run_and_leaves_no_file(books, tmp_path, capsys, recipe):
    options = [f"--recipe={recipe}", "--vocab_size=400", "--dataloader_num_workers=0", "--dry_run"]
    options += ["--global_batch_size=8", "--batch_size_schedule=none"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options]) == 0
    said = capsys.readouterr()
    assert "passes over the text" in said.out and "nothing is kept" in said.out and "What it learnt" not in said.out
    steps = [line for line in said.err.splitlines() if re.match(r"step \d/3 ", line)]
    assert len(steps) == 3 and "step 2: from here on, a step has" in said.err
    parameters, seconds, megabytes = re.search(
        r"a model of ([\d,]+) parameters; a step takes ([\d.]+) s, and a process ([\d,]+) MB", said.out
    ).groups()
    minutes = float(re.search(r"about ([\d.,e+]+) minutes", said.out)[1].replace(",", ""))
    architecture, config = RECIPES[recipe]()
    architecture.vocab_size = int(re.search(r"vocabulary (\d+)", said.err)[1])
    expected = D2lBertForPreTraining(architecture).num_parameters()
    assert int(parameters.replace(",", "")) == expected and int(megabytes.replace(",", "")) > 100
    assert minutes == pytest.approx(float(seconds) * config.max_steps / 60, rel=0.02)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_max_minutes_becomes_a_number_of_steps_and_timing_them_changes_nothing(books, tmp_path):
    timed = run(books, tmp_path / "timed", "--max_minutes=0.02")
    steps = json.loads((tmp_path / "timed" / "run_config.json").read_text())["run"]["max_steps"]
    assert run(books, tmp_path / "counted", f"--max_steps={steps}") == timed


@pytest.mark.slow
def test_epochs_become_a_number_of_steps(books, tmp_path):
    run(books, tmp_path / "out", "--num_train_epochs=0.5")
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    run(books, tmp_path / "twice", "--num_train_epochs=1")
    twice = json.loads((tmp_path / "twice" / "run_config.json").read_text())["run"]
    assert abs(2 * record["max_steps"] - twice["max_steps"]) <= 1
    assert record["num_train_epochs"] is None
