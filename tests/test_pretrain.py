"""Whole runs: the files that a run leaves, what the model learns, and the same result in every kind of computation."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import MODEL_FILES, SMALL
from runs import run
from safetensors.torch import load_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.tokenization import prepare
from d2l_bert.tokenization.token_store import Only
from d2l_bert.training import data, machine
from d2l_bert.training.batching import make_phases, stage_changes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.epochs import Selection
from d2l_bert.training.learner import train_step
from d2l_bert.training.machine import steps_for_minutes
from d2l_bert.training.optim import make_adamw
from d2l_bert.training.recipes import RECIPES


def test_a_run_leaves_exactly_the_documented_files(trained):
    beside = {"training_log.jsonl", "checkpoint-20", "checkpoint-40"}
    assert {path.name for path in trained.iterdir()} == MODEL_FILES | beside


def test_a_run_leaves_no_pickle(trained):
    suffixes = {path.suffix for path in trained.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".py", ".md", ".png", ".txt"}


@pytest.mark.slow
def test_training_lowers_the_held_out_loss_below_that_of_token_frequencies(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=700", "--learning_rate=3e-3", "--attention_init=neighbours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    counts = Counter(token for book in books.iterdir() for token in tokenizer.tokenize(book.read_text()))
    unigrams = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["eval_mlm_loss"] < unigrams - 0.5


def test_span_masking_with_a_schedule_trains_and_is_on_the_card(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=10", "--masking=span", "--mlm_probability=0.30->0.15")
    written = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    assert (written["masking"], written["mlm_probability"]) == ("span", "0.30->0.15")
    assert "0.30->0.15 of the tokens, spans of whole words" in (tmp_path / "out" / "README.md").read_text()


def test_a_table_trains_the_same_weights_as_the_files_with_its_texts(books, tmp_path):
    rows = [{"body": book.read_text()} for book in sorted(books.iterdir())]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(books, tmp_path / "files", "--max_steps=3")
    run(tmp_path / "books.jsonl", tmp_path / "table", "--max_steps=3", "--text_column=body")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("files", "table")]
    assert weights[0] == weights[1]


def test_a_batch_can_be_learnt_by_heart(books):
    """Both losses go to nearly 0 when one step is repeated, so every gradient reaches its parameter."""
    config = PretrainConfig(corpus=[str(books)], vocab_size=400, max_seq_length=48, global_batch_size=8, max_steps=1)
    accelerator = make_accelerator("no")
    text = prepare.prepare(config)
    micro_batches = data.PretrainingSteps(make_phases(replace(config, micro_batch_size=3), text, 1))[0]
    torch.manual_seed(0)
    numbers = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05}
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=len(text.tokenizer), hidden_size=64, **numbers))
    optimizer = make_adamw(model.parameters(), 3e-3, 0.0, (0.9, 0.98), 1e-6)
    for _ in range(150):
        mlm_loss, nsp_loss, *_ = train_step(accelerator, model, [optimizer], micro_batches, 3e-3, 1.0)
    assert mlm_loss < 0.05 and nsp_loss < 0.05


def test_the_losses_in_metrics_json_are_those_of_the_saved_model(books, trained):
    check_figures(books, trained)


def check_figures(books, trained):
    """Compute the held-out losses and accuracies again, with the loaded model and a separate loop."""
    record = json.loads((trained / "run_config.json").read_text())
    config = PretrainConfig(**{**record["run"], "corpus": [str(books)]})
    text = prepare.prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    make_batch = data.BatchMaker(text.tokens, tokenizer, config.mlm_probabilities()[1], config.max_seq_length)
    pairing = {"pairing": "segments", "max_seq_length": config.max_seq_length, "short_seq_prob": 0.1}
    selection = Selection(text.tokens, Only(text.held_out), [len(text.tokens)], is_one_stretch=True)
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
            followed.append(int(logits.seq_relationship_logits[0].argmax()) == int(batch["next_sentence_label"][0]))
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["eval_masked_tokens"] == len(losses) and metrics["eval_pairs"] == len(followed)
    assert metrics["eval_mlm_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert metrics["eval_mlm_accuracy"] == pytest.approx(sum(right) / len(right))
    assert metrics["eval_nsp_accuracy"] == pytest.approx(sum(followed) / len(followed))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_another_process(books, tmp_path):
    first = run(books, tmp_path / "first", "--max_steps=6")
    command = [
        sys.executable,
        "-m",
        "d2l_bert",
        "pretrain",
        f"--corpus={books}",
        f"--output_dir={tmp_path / 'second'}",
    ]
    subprocess.run([*command, *SMALL, "--max_steps=6"], check=True, capture_output=True)
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == first


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(books, tmp_path):
    first, second, other = (run(books, tmp_path / f"{n}", "--max_steps=4", f"--seed={n // 2}") for n in range(3))
    assert first == second != other


def test_a_run_with_an_infinite_perplexity_ends_in_one_line(books, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=30"]
    assert main([*command, "--learning_rate=1e5", "--mixed_precision=no"]) == 2
    assert "training has diverged" in capsys.readouterr().err.splitlines()[-1]


def test_micro_batches_do_not_change_the_trained_weights(books, tmp_path):
    options = ("--max_steps=5", "--mixed_precision=no", "--learning_rate=1e-4", "--warmup_ratio=0")
    run(books, tmp_path / "whole", *options, "--micro_batch_size=8")
    run(books, tmp_path / "split", *options, "--micro_batch_size=3")
    whole, split = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == split.keys()
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], atol=1e-5, rtol=0)


def test_packing_does_not_change_the_held_out_losses(books, tmp_path):
    found = []
    for packing in ("false", "true"):
        out = tmp_path / packing
        how = [
            "--pairing=sentences",
            "--max_seq_length=64",
            "--mixed_precision=no",
            "--max_steps=5",
            f"--packing={packing}",
        ]
        assert (
            main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *SMALL, *how, "--learning_rate=1e-4"]) == 0
        )
        found.append(json.loads((out / "metrics.json").read_text()))
    for name in ("eval_mlm_loss", "eval_nsp_loss"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-4)
    assert found[1]["train_padding_share"] != found[0]["train_padding_share"]  # the rows really were packed
    rows = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert all(0 <= row["padding_share"] < 1 and 0 < row["data_wait_share"] < 1 for row in rows if "loss" in row)


def test_without_a_pair_objective_messages_say_sequences_instead_of_pairs():
    run = PretrainConfig(objective="none", max_seq_length=48, length_schedule=["16:0.5"], max_steps=10)
    (change,) = stage_changes(run, 10).values()
    assert change["reason"].startswith(
        f"step 6: from here on, a step has {run.global_batch_size} sequences of 48 tokens;"
    )
    assert stage_changes(replace(run, length_schedule=[]), 10) == {}


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


@pytest.mark.parametrize("recipe", ["tiny", "mini"])
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


def test_a_dry_run_refuses_what_the_run_would_refuse(books, trained, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", "--dry_run", *SMALL, "--max_steps=9"]
    (tmp_path / "file").touch()
    for option, what in (
        (f"--output_dir={trained}", "holds a run"),
        (f"--output_dir={tmp_path / 'file' / 'out'}", "cannot be written"),
        ("--adam_beta2=1", "adam_beta2"),
    ):
        assert main([*command, option]) == 2
        assert what in capsys.readouterr().err.splitlines()[-1]


def test_max_minutes_includes_the_evaluations():
    run = PretrainConfig(max_minutes=2)
    assert steps_for_minutes(run, 1.0, 2.0) == 100
    assert steps_for_minutes(replace(run, eval_steps=2), 1.0, 2.0) == 60
    with pytest.raises(UserError, match="max_minutes"):
        steps_for_minutes(replace(run, eval_steps=2), 1.0, 1e6)


def test_max_minutes_that_evaluations_take_is_said(books, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "time_steps", lambda *_: (6.0, 4.0))
    options = [option for option in SMALL if "max_steps" not in option]
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options, "--max_minutes=1"]
    assert main(command) == 0
    assert "evaluations take 67% of them, which leaves time for 3 steps" in capsys.readouterr().err


def test_gradient_checkpointing_does_not_change_the_trained_weights(books, tmp_path):
    options = ("--max_steps=4", "--mixed_precision=no")
    assert run(books, tmp_path / "a", *options) == run(books, tmp_path / "b", *options, "--gradient_checkpointing")


def test_max_minutes_becomes_a_number_of_steps_and_timing_them_changes_nothing(books, tmp_path):
    timed = run(books, tmp_path / "timed", "--max_minutes=0.02")
    steps = json.loads((tmp_path / "timed" / "run_config.json").read_text())["run"]["max_steps"]
    assert run(books, tmp_path / "counted", f"--max_steps={steps}") == timed


def test_a_text_without_long_words_gets_a_card_too(tmp_path):
    """
    Chinese has no words of four letters, and this model has few positions: the card's examples must allow for both.
    """
    sentences = [f"我在{place}看见了{n}个人。" for n, place in enumerate("山河海湖城村路桥" * 20)]
    blocks = [" ".join(sentences[i : i + 8]) for i in range(0, len(sentences), 8)]
    (tmp_path / "text.txt").write_text("\n\n".join(blocks))
    options = ["--language=zh", "--max_steps=2", "--max_seq_length=16", "--max_position_embeddings=16"]
    run(tmp_path / "text.txt", tmp_path / "out", *options)
    assert "[MASK]" in (tmp_path / "out" / "README.md").read_text()


def test_wrong_values_from_python_are_refused():
    two_optimizers = {"optim": "muon", "mixed_precision": "fp16"}
    for changes in (
        two_optimizers,
        {"micro_batch_size": "some"},
        {"pairing": "sentence"},
        {"max_steps": 1.5},
        {"corpus": "books"},
        {"learning_rate": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            PretrainConfig(**{"max_steps": 1, **changes}).check()


def test_epochs_become_a_number_of_steps(books, tmp_path):
    run(books, tmp_path / "out", "--num_train_epochs=0.5")
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    run(books, tmp_path / "twice", "--num_train_epochs=1")
    twice = json.loads((tmp_path / "twice" / "run_config.json").read_text())["run"]
    assert abs(2 * record["max_steps"] - twice["max_steps"]) <= 1
    assert record["num_train_epochs"] is None


def test_an_epoch_is_shared_by_the_sequence_lengths_of_the_schedule(books, tmp_path):
    """Each length uses part of the pairs of its own plan; the parts of all lengths add up to one epoch."""
    out, schedule = tmp_path / "out", ["16:0.5"]
    run(books, out, "--num_train_epochs=1", "--length_schedule", *schedule)
    steps = json.loads((out / "run_config.json").read_text())["run"]["max_steps"]
    numbers = {"corpus": [str(books)], "vocab_size": 400, "max_seq_length": 48, "global_batch_size": 8}
    config = PretrainConfig(**numbers, max_steps=steps, length_schedule=schedule)
    short, full = make_phases(config, prepare.prepare(config), steps)
    passes = full.first_step * 24 / len(short.pairs.window(0, 0))
    passes += (steps - full.first_step) * 8 / len(full.pairs.window(0, 0))
    assert passes == pytest.approx(1, abs=0.1)


def test_the_recipe_d2l_trains_on_pairs_of_sentences(books, tmp_path):
    sizes = ["--vocab_size=400", "--max_steps=2", "--global_batch_size=16", "--dataloader_num_workers=0"]
    assert main(["pretrain", "--recipe=d2l", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *sizes]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    book = {"hidden_act": "relu", "embedding_layer_norm": False, "tie_word_embeddings": False, "hidden_size": 128}
    assert {name: config[name] for name in book} == book
    assert json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]["pairing"] == "sentences"


def test_loader_workers_do_not_change_the_trained_weights(books, tmp_path):
    alone = run(books, tmp_path / "alone", "--max_steps=4")
    assert run(books, tmp_path / "helped", "--max_steps=4", "--dataloader_num_workers=2") == alone


def test_the_tokenizer_options_reach_the_tokenizer(books, tmp_path):
    shutil.copytree(books, tmp_path / "books")
    for book in (tmp_path / "books").iterdir():
        book.write_text(book.read_text() + "café " * 100 + "anan.\n")
    out = [f"--output_dir={tmp_path / 'tokens'}", "--strip_accents=false", "--min_frequency=50", "--limit_alphabet=20"]
    assert main(["prepare", f"--corpus={tmp_path / 'books'}", *out]) == 0
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "tokens").get_vocab()
    assert len([piece for piece in vocabulary if len(piece) == 1]) == 20
    assert "café" in vocabulary and "anna" in vocabulary and "anan" not in vocabulary
    record = json.loads((tmp_path / "tokens" / "prepared.json").read_text())["token_options"]
    options = ("strip_accents", "min_frequency", "limit_alphabet", "extend_vocab")
    assert [record[name] for name in options] == [False, 50, 20, 0]
