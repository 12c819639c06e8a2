"""Whole runs: what a model learns, its moving average, dry runs, and the length of a run."""

import json
import math
import re
from collections import Counter

import pytest
import torch
from runs import log_rows, run
from safetensors.torch import load_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.tokenization import prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.held_out import HeldOutPairs
from d2l_bert.training.optimizer import Learner
from d2l_bert.training.recipes import RECIPES
from d2l_bert.training.run_folder import check_same_identity


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
    held_out = HeldOutPairs(text.held_out, tokenizer, config, 1, "the books")  # one pair in a micro-batch
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
def test_a_dry_run_times_steps_of_each_length_and_leaves_no_file(books, tmp_path, monkeypatch, capsys, recipe):
    take_step, taken = Learner.take_step, []

    def watched(learner, micro_batches, counts, *rate):
        rows, widths = zip(*(batch["input_ids"].shape for batch in micro_batches), strict=True)
        taken.append((sum(rows), max(widths)))
        assert not any(rate)
        return take_step(learner, micro_batches, counts, *rate)

    monkeypatch.setattr(Learner, "take_step", watched)
    options = [f"--recipe={recipe}", "--vocab_size=400", "--dataloader_num_workers=0", "--dry_run"]
    options += ["--global_batch_size=8", "--batch_size_schedule=none", "--length_schedule=32:0.5", "--max_steps=20"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options]) == 0
    said = capsys.readouterr()
    assert "passes over the text" in said.out and "nothing is kept" in said.out and "What it learnt" not in said.out
    architecture, config = RECIPES[recipe]()
    # Ten steps of as many tokens in pairs of 32, ten of 8 pairs of full length; the first of each twice.
    many = 8 * config.max_seq_length // 32
    assert [rows for rows, _ in taken] == [many] * 11 + [8] * 11
    assert all(width <= (32 if rows == many else config.max_seq_length) for rows, width in taken)
    figures = r"a model of ([\d,]+) parameters; a step takes ([\d.e-]+) s, and a process ([\d,]+) MB"
    parameters, seconds, megabytes = (number.replace(",", "") for number in re.search(figures, said.out).groups())
    minutes = float(re.search(r"about ([\d.,e+-]+) minutes", said.out)[1].replace(",", ""))
    architecture.vocab_size = int(re.search(r"vocabulary (\d+)", said.err)[1])
    model = D2lBertForPreTraining(architecture)
    assert int(parameters) == model.num_parameters() and int(megabytes) > 100
    assert minutes == pytest.approx(float(seconds) * 20 / 60, rel=0.02)
    # Beside the weights a checkpoint has one moment of each matrix of the blocks (Muon), two of all else (AdamW).
    moments = {"muon": 1, "adamw": 2}[config.optim]
    in_blocks = sum(weight.numel() for weight in model.bert.encoder.parameters() if weight.ndim == 2)
    numbers = model.num_parameters() + moments * in_blocks + 2 * (model.num_parameters() - in_blocks)
    assert f"a checkpoint takes {4 * numbers / 1e6:,.0f} MB, and {config.save_total_limit} are kept" in said.out
    assert not list(tmp_path.iterdir())


def test_a_run_from_a_trained_model_first_logs_the_figures_of_that_model(books, trained, tmp_path):
    """The held-out pairs and their masks are the same: so are the figures that the model was saved with."""
    options = "--max_seq_length=48 --length_schedule=none --max_steps=2 --eval_steps=1 --mixed_precision=no".split()
    words = ["pretrain", f"--init_from={trained}", f"--corpus={books}", f"--output_dir={tmp_path}", *options]
    assert main(words) == 0
    first, *others = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    assert all(row["step"] for row in log_rows(trained)), "a run from random weights says nothing of them"
    assert first.pop("step") == 0 and [row["step"] for row in others] == [1, 2]
    metrics = json.loads((trained / "metrics.json").read_text())
    assert first == pytest.approx({name: metrics[name] for name in first}, rel=1e-5)
    assert {"eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy", "eval_pairs"} <= first.keys()


def test_processes_that_have_read_other_texts_are_refused_by_the_first_difference():
    identity = {"seed": 1, "corpus (fingerprint)": "ab", "tokenizer (fingerprint)": "cd"}
    check_same_identity([identity, {**identity}])
    other = {**identity, "corpus (fingerprint)": "ef", "tokenizer (fingerprint)": "gh"}
    with pytest.raises(
        UserError, match=r"process 2 has another corpus \(fingerprint\) \('ef'\) than process 0 \('ab'\)"
    ):
        check_same_identity([identity, {**identity}, other])


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
