"""Whole runs: the average of the weights, a start from a model, dry runs, and the length of a run."""

import re

import pytest
import torch
from promises.driving import read_json
from runs import log_rows, run
from safetensors.torch import load_file

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.training.optimizer import Learner
from d2l_bert.training.recipes import RECIPES
from d2l_bert.training.run_folder import check_same_identity


def test_the_moving_average_is_published_and_a_checkpoint_has_it_beside_the_weights(books, tmp_path):
    run(books, tmp_path, "--ema_decay=0.5", "--max_steps=3", "--mixed_precision=no")
    names = ("model.safetensors", "checkpoint-3/average.safetensors", "checkpoint-3/model.safetensors")
    published, average, weights = (load_file(tmp_path / name) for name in names)
    assert published.keys() == average.keys() == weights.keys()
    assert all(torch.equal(published[name], average[name]) for name in average)
    assert not any(torch.equal(published[name], weights[name]) for name in weights)


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
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr()
    architecture, config = RECIPES[recipe]()
    # Ten steps of as many tokens in pairs of 32, ten of 8 pairs of full length; the first of each twice.
    many = 8 * config.max_seq_length // 32
    assert [rows for rows, _ in taken] == [many] * 11 + [8] * 11
    assert all(width <= (32 if rows == many else config.max_seq_length) for rows, width in taken)
    figures = r"about ([\d.,e+-]+) minutes .*\n.*a model of ([\d,]+) parameters; a step takes ([\d.e-]+) s, and a "
    figures = re.search(figures + r"process ([\d,]+) MB\n.*a checkpoint takes ([\d,]+) MB, and (\d+) are", said.out)
    minutes, parameters, seconds, memory, disk, kept = (float(text.replace(",", "")) for text in figures.groups())
    architecture.vocab_size = int(re.search(r"vocabulary (\d+)", said.err)[1])
    model = D2lBertForPreTraining(architecture)
    assert parameters == model.num_parameters() and memory > 100 and kept == config.save_total_limit
    assert minutes == pytest.approx(seconds * 20 / 60, rel=0.02)
    # Beside the weights a checkpoint has one moment of each matrix of the blocks (Muon), two of all else (AdamW).
    in_blocks = sum(weight.numel() for weight in model.bert.encoder.parameters() if weight.ndim == 2)
    numbers = 3 * parameters - (in_blocks if config.optim == "muon" else 0)
    assert disk == round(4 * numbers / 1e6)


def test_a_run_from_a_trained_model_first_logs_the_figures_of_that_model(books, trained, tmp_path):
    """The held-out pairs and their masks are the same: so are the figures that the model was saved with."""
    options = "--max_seq_length=48 --length_schedule=none --max_steps=2 --eval_steps=1 --mixed_precision=no".split()
    words = ["pretrain", f"--init_from={trained}", f"--corpus={books}", f"--output_dir={tmp_path}", *options]
    assert main(words) == 0
    first, *others = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    assert all(row["step"] for row in log_rows(trained)), "a run from random weights says nothing of them"
    assert first.pop("step") == 0 and [row["step"] for row in others] == [1, 2]
    metrics = read_json(trained / "metrics.json")
    assert first == pytest.approx({name: metrics[name] for name in first}, rel=1e-5)
    assert {"eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy", "eval_pairs"} <= first.keys()


def test_processes_that_have_read_other_texts_are_refused_by_the_first_difference():
    identity = {"seed": 1, "corpus (fingerprint)": "ab", "tokenizer (fingerprint)": "cd"}
    check_same_identity([identity, {**identity}])
    other = {**identity, "corpus (fingerprint)": "ef", "tokenizer (fingerprint)": "gh"}
    refusal = r"process 2 has another corpus \(fingerprint\) \('ef'\) than process 0 \('ab'\)"
    with pytest.raises(UserError, match=refusal):
        check_same_identity([identity, {**identity}, other])


@pytest.mark.slow
def test_max_minutes_becomes_a_number_of_steps_and_timing_them_changes_nothing(books, tmp_path):
    timed = run(books, tmp_path / "timed", "--max_minutes=0.02")
    steps = read_json(tmp_path / "timed" / "run_config.json")["run"]["max_steps"]
    assert run(books, tmp_path / "counted", f"--max_steps={steps}") == timed
