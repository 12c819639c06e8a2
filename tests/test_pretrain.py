"""The training loop: what it leaves, that it learns, and that a run is the same run however it is computed."""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import MODEL_FILES, SMALL, write_books
from safetensors.torch import load_file
from transformers import AutoTokenizer

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.tokenization import prepare
from d2l_bert.tokenization.wordpiece import make_tokenizer
from d2l_bert.training import checkpoint, data, trials
from d2l_bert.training.batching import make_phases, stage_changes
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.device import faster_attention, processes_that_load
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.optim import make_adamw
from d2l_bert.training.pretrain import expectation, pretrain
from d2l_bert.training.run_folder import start_folder
from d2l_bert.training.step import train_step
from d2l_bert.training.trials import steps_in


def run(books, folder, *options):
    """Train through the command line; returns the weights file's bytes."""
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *SMALL, *options]) == 0
    return (folder / "model.safetensors").read_bytes()


def log_rows(folder):
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def test_a_run_leaves_the_documented_files_and_no_others(trained):
    beside = {"training_log.jsonl", "checkpoint-20", "checkpoint-40"}
    assert {path.name for path in trained.iterdir()} == MODEL_FILES | beside


def test_a_run_leaves_no_pickle(trained):
    suffixes = {path.suffix for path in trained.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".py", ".md", ".png", ".txt"}


@pytest.mark.slow
def test_training_lowers_the_held_out_loss_below_that_of_unigrams(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=700", "--learning_rate=3e-3", "--attention_init=neighbours")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    counts = Counter(token for book in books.iterdir() for token in tokenizer.tokenize(book.read_text()))
    unigrams = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["eval_mlm_loss"] < unigrams - 0.5


def test_spans_on_a_schedule_train_and_the_card_says_so(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=10", "--masking=span", "--mlm_probability=0.30->0.15")
    written = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    assert (written["masking"], written["mlm_probability"]) == ("span", "0.30->0.15")
    assert "0.30->0.15 of the tokens, spans of whole words" in (tmp_path / "out" / "README.md").read_text()


def test_a_table_trains_as_the_files_it_was_made_of_do(books, tmp_path):
    rows = [{"body": book.read_text()} for book in sorted(books.iterdir())]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(books, tmp_path / "files", "--max_steps=3")
    run(tmp_path / "books.jsonl", tmp_path / "table", "--max_steps=3", "--text_column=body")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("files", "table")]
    assert weights[0] == weights[1]


def test_a_batch_can_be_learnt_by_heart(books):
    """Both losses of one step's pairs go to nothing when it is repeated: every gradient arrives where it should."""
    config = PretrainConfig(corpus=[str(books)], vocab_size=400, max_seq_length=48, global_batch_size=8, max_steps=1)
    accelerator = make_accelerator("no")
    text = prepare.prepare(config)
    micro_batches = data.PretrainingSteps(make_phases(replace(config, micro_batch_size=3), text, 1))[0]
    torch.manual_seed(0)
    numbers = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05}
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=len(text.tokenizer), hidden_size=64, **numbers))
    optimizer = make_adamw(model, 3e-3, 0.0, (0.9, 0.98), 1e-6)
    for _ in range(150):
        mlm_loss, nsp_loss, *_ = train_step(accelerator, model, [optimizer], micro_batches, 3e-3, 1.0)
    assert mlm_loss < 0.05 and nsp_loss < 0.05


def test_the_figures_of_metrics_are_those_of_the_saved_model(books, trained):
    check_figures(books, trained)


def check_figures(books, trained):
    """Compute them again with the loaded model and a loop of its own over the run's held-out pairs."""
    record = json.loads((trained / "run_config.json").read_text())
    config = PretrainConfig(**{**record["run"], "corpus": [str(books)]})
    text = prepare.prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    make_batch = data.BatchMaker(text.tokens, tokenizer, config.mlm_probability, config.max_seq_length)
    pairing = {"pairing": "segments", "max_seq_length": config.max_seq_length, "short_seq_prob": 0.1}
    held_out = data.HeldOutPairs(text.tokens, text.held_out_documents, pairing, make_batch, 1)
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


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(books, tmp_path):
    first, second, other = (run(books, tmp_path / f"{n}", "--max_steps=4", f"--seed={n // 2}") for n in range(3))
    assert first == second != other


def test_a_resumed_run_ends_with_the_bytes_of_one_that_was_never_stopped(books, tmp_path):
    options = ("--max_steps=8", "--save_steps=3", "--save_total_limit=9", "--hidden_dropout_prob=0.2")
    whole = run(books, tmp_path / "whole", *options)
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", stopped)
    for name in ("checkpoint-6", "checkpoint-8", "model.safetensors", "metrics.json"):
        path = stopped / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (stopped / ".checkpoint-6.part").mkdir()  # killed in the middle of a save
    assert run(books, stopped, *options, "--resume_from_checkpoint=latest") == whole
    steps = [row["step"] for row in log_rows(stopped) if "loss" in row]
    assert steps == list(range(1, 9))


def test_only_the_last_checkpoints_are_kept(books, tmp_path):
    run(books, tmp_path / "out", "--max_steps=7", "--save_steps=2", "--save_total_limit=3")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out")] == [f"checkpoint-{n}" for n in (4, 6, 7)]


def test_a_checkpoint_is_never_half_deleted_under_its_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path: None)  # killed before it began
    checkpoint.drop(tmp_path / "checkpoint-3")
    assert not checkpoint.checkpoints(tmp_path) and checkpoint.checkpoints(tmp_path, unfinished=True)


def test_a_checkpoint_that_is_a_link_is_unlinked_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "elsewhere")
    checkpoint.drop(tmp_path / "checkpoint-3")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_held_out_loss_too_large_for_a_perplexity_ends_the_run_in_one_line(books, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=30"]
    assert main([*command, "--learning_rate=1e5", "--mixed_precision=no"]) == 2
    assert "training has diverged" in capsys.readouterr().err.splitlines()[-1]


def test_going_back_to_a_checkpoint_clears_away_those_after_it(tmp_path):
    """Left there, they would count as the latest, and push out what the resumed run saves."""
    for name in ("checkpoint-3", "checkpoint-6", "checkpoint-12", ".checkpoint-3.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-notes.txt").write_text("not one of ours")
    start_folder(tmp_path, {}, 6)
    left = {path.name for path in tmp_path.iterdir()} - {"run_config.json", "training_log.jsonl"}
    assert left == {"checkpoint-3", "checkpoint-6", "checkpoint-notes.txt"}


def test_resuming_another_run_names_the_first_difference(books, trained, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=40", *SMALL]
    command += ["--mixed_precision=no", f"--resume_from_checkpoint={trained / 'checkpoint-20'}"]
    assert main([*command, "--learning_rate=0.5"]) == 2
    assert "learning_rate was" in capsys.readouterr().err
    assert main([*command, "--num_hidden_layers=2"]) == 2
    assert "num_hidden_layers was 1" in capsys.readouterr().err


def test_micro_batches_do_not_change_what_is_learnt(books, tmp_path):
    options = ("--max_steps=5", "--mixed_precision=no", "--learning_rate=1e-4", "--warmup_ratio=0")
    run(books, tmp_path / "whole", *options, "--micro_batch_size=8")
    run(books, tmp_path / "split", *options, "--micro_batch_size=3")
    whole, split = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == split.keys()
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], atol=1e-5, rtol=0)


def test_packing_does_not_change_what_is_learnt(books, tmp_path):
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
    assert found[1]["train_padding_share"] != found[0]["train_padding_share"]  # it was done
    rows = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert all(0 <= row["padding_share"] < 1 and 0 < row["data_wait_share"] < 1 for row in rows if "loss" in row)


def test_an_evaluation_that_an_interruption_left_out_is_made_on_resuming(books, tmp_path):
    options = ("--max_steps=8", "--save_steps=3", "--eval_steps=3", "--save_total_limit=9")
    run(books, tmp_path, *options)
    whole = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    log = tmp_path / "training_log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"step": 3, "eval' not in line))
    shutil.rmtree(tmp_path / "checkpoint-8")
    shutil.rmtree(tmp_path / "checkpoint-6")
    run(books, tmp_path, *options, "--resume_from_checkpoint=latest")
    again = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    assert [row["step"] for row in again] == [6, 8, 3], "the log only grows"
    assert sorted(again, key=lambda row: row["step"]) == whole


LONG_OPTIONS = ("--optim=muon", "--ema_decay=0.7", "--lr_scheduler_type=warmup_stable_decay", "--save_steps=4")
LONG_OPTIONS += ("--max_steps=10", "--batch_size_schedule", "2:0.3", "4:0.2", "--length_schedule", "16:0.5")


def test_a_resumed_run_with_everything_that_changes_over_the_steps_ends_with_the_same_bytes(books, tmp_path):
    """Two moments, one of Muon's, an average, a schedule of the rate, the batch and the length."""
    whole = run(books, tmp_path / "whole", *LONG_OPTIONS)
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", stopped)
    shutil.rmtree(stopped / "checkpoint-10")
    (stopped / "model.safetensors").unlink()
    assert run(books, stopped, *LONG_OPTIONS, "--resume_from_checkpoint=latest") == whole
    states = [
        json.loads((tmp_path / n / "checkpoint-10" / "training_state.json").read_text()) for n in ("whole", "stopped")
    ]
    assert states[0]["spikes"] == states[1]["spikes"] and states[0]["spikes"]["mean"] is not None
    rates = [row["learning_rate"] for row in log_rows(stopped) if "loss" in row]
    assert rates[:8] == [rates[0]] * 8 and rates[8] > rates[9], "flat, then a fall over the last fifth"


def test_changes_of_length_and_batch_size_are_said_once_in_the_log_and_on_resuming_again(books, tmp_path, capsys):
    out = tmp_path / "out"
    # Batches of 2 and 4 pairs of 48 tokens, and of 8 from step 6 on; until then as many tokens in pairs of 16.
    run(books, out, *LONG_OPTIONS, "--save_total_limit=9")
    first = "step 4: from here on 12 pairs of 16 tokens a step"
    second = "step 6: from here on 8 pairs of 48 tokens a step; held-out figures are always at 48"
    said = [line for line in capsys.readouterr().err.splitlines() if "from here on" in line]
    events = [row for row in log_rows(out) if "event" in row]
    assert said == [first, second] == [row.pop("reason") for row in events]
    assert events == [
        {"step": 4, "event": "stage", "length_before": 16, "length": 16, "batch_before": 2, "batch": 4},
        {"step": 6, "event": "stage", "length_before": 16, "length": 48, "batch_before": 4, "batch": 8},
    ]
    for name in ("checkpoint-8", "checkpoint-10"):
        shutil.rmtree(out / name)
    run(books, out, *LONG_OPTIONS, "--resume_from_checkpoint=latest")
    assert [line for line in capsys.readouterr().err.splitlines() if "from here on" in line] == [second]
    assert [row["step"] for row in log_rows(out) if "event" in row] == [4, 6]


def test_sequences_without_a_task_of_pairs_are_called_so():
    run = PretrainConfig(objective="none", max_seq_length=48, length_schedule=["16:0.5"], max_steps=10)
    (change,) = stage_changes(run, 10).values()
    assert change["reason"].startswith(f"step 6: from here on {run.global_batch_size} sequences of 48 tokens a step;")
    assert stage_changes(replace(run, length_schedule=[]), 10) == {}


def test_the_average_is_what_is_evaluated_and_published(books, tmp_path):
    """The checkpoint holds the weights themselves and, beside them, what AveragedModel makes of them."""
    out = tmp_path / "out"
    options = ("--ema_decay=0.5", "--max_steps=6", "--save_steps=1", "--save_total_limit=9", "--mixed_precision=no")
    run(books, out, *options)
    average = None
    for step in range(1, 7):
        weights = load_file(out / f"checkpoint-{step}" / "model.safetensors")
        # The start is not saved; after a step its share is min(0.5, 2 / 11).
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


def test_resuming_with_another_text_or_tokenizer_names_it(books, trained, tmp_path, capsys):
    other = write_books(tmp_path / "books", seed=1)
    prepared = ["--max_steps=40", "--mixed_precision=no", *SMALL, f"--output_dir={tmp_path / 'out'}"]
    prepared.append(f"--resume_from_checkpoint={trained / 'checkpoint-20'}")
    assert main(["pretrain", f"--corpus={other}", *prepared]) == 2
    assert "another run: corpus (fingerprint) was" in capsys.readouterr().err
    vocabulary = [option for option in prepared if not option.startswith("--vocab_size")]
    shutil.copytree(trained, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("checkpoint-*"))
    pieces = AutoTokenizer.from_pretrained(trained).get_vocab()
    swapped = sorted(pieces, key=pieces.get)
    swapped[-2:] = swapped[-1], swapped[-2]
    make_tokenizer(swapped, lowercase=True).save_pretrained(tmp_path / "tokenizer")
    assert main(["pretrain", f"--corpus={books}", f"--tokenizer={tmp_path / 'tokenizer'}", *vocabulary]) == 2
    assert "another run: tokenizer (fingerprint) was" in capsys.readouterr().err.splitlines()[-1]


def run_elsewhere(package, arguments):
    """The command of a package that lies in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    code = (
        "import sys, d2l_bert.cli; assert d2l_bert.__file__.startswith(sys.argv.pop(1)); sys.exit(d2l_bert.cli.main())"
    )
    command = [sys.executable, "-c", code, str(package), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_checkpoint_goes_on_after_an_upgrade_that_changes_no_token(books, trained, tmp_path, monkeypatch, capsys):
    """Comments were added to every file, and the sentence splitter has another version; then a sentence is split
    elsewhere."""
    package = tmp_path / "upgraded"
    for name in ("", "modeling", "tokenization", "training", "model_cards"):
        folder = (
            Path(d2l_bert.__file__).parent if not name else Path(import_module(f"d2l_bert.{name}").__file__).parent
        )
        shutil.copytree(folder, package / "d2l_bert" / name, dirs_exist_ok=True)
    for file in package.rglob("*.py"):
        file.write_text(file.read_text() + "\n# A comment.\n")
    file = package / "d2l_bert" / "tokenization" / "sentences.py"
    start = package / "d2l_bert" / "__init__.py"
    start.write_text(
        start.read_text() + "import importlib.metadata\n_version = importlib.metadata.version\n"
        "importlib.metadata.version = lambda name: '99.0' if name == 'sentencex' else _version(name)\n"
    )
    arguments = ["pretrain", f"--corpus={books}", "--max_steps=40", "--save_steps=20", "--mixed_precision=no", *SMALL]
    arguments += ["--license=apache-2.0", f"--resume_from_checkpoint={trained / 'checkpoint-20'}"]
    done = run_elsewhere(package, [*arguments, f"--output_dir={tmp_path / 'resumed'}"])
    assert done.returncode == 0, done.stderr
    assert "reading books" in done.stderr, "the text is another one for the cache"
    assert (tmp_path / "resumed" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    file.write_text(file.read_text().replace("in sentencex.segment(language, paragraph):", "in [paragraph]:"))
    done = run_elsewhere(package, [*arguments, f"--output_dir={tmp_path / 'refused'}"])
    assert done.returncode == 2 and "another run: corpus (fingerprint) was" in done.stderr.splitlines()[-1]


def test_a_checkpoint_goes_on_with_another_sentence_splitter_if_that_splits_alike(
    books, trained, tmp_path, monkeypatch, capsys
):
    arguments = ["pretrain", f"--corpus={books}", "--max_steps=40", "--save_steps=20", "--mixed_precision=no", *SMALL]
    arguments += ["--license=apache-2.0", f"--resume_from_checkpoint={trained / 'checkpoint-20'}"]
    version = importlib.metadata.version
    new = {"sentencex": "99.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: new.get(name) or version(name))
    assert main([*arguments, f"--output_dir={tmp_path / 'resumed'}"]) == 0
    assert "reading books" in capsys.readouterr().err, "the text is another one for the cache"
    assert (tmp_path / "resumed" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    new["sentencex"] = "100.0"
    monkeypatch.setattr("sentencex.segment", lambda language, paragraph: [paragraph])
    assert main([*arguments, f"--output_dir={tmp_path / 'refused'}"]) == 2
    assert "another run: corpus (fingerprint) was" in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_of_before_the_data_order_had_a_version_is_refused_by_name(books, trained, tmp_path, capsys):
    shutil.copytree(trained / "checkpoint-20", tmp_path / "checkpoint-20")
    state, manifest = (tmp_path / "checkpoint-20" / name for name in ("training_state.json", "manifest.json"))
    content = json.loads(state.read_text())
    del content["identity"]["data order (version)"]
    state.write_text(json.dumps(content))
    hashes = json.loads(manifest.read_text())
    hashes["sha256"][state.name] = hashlib.sha256(state.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(hashes, indent=2) + "\n")
    arguments = [f"--output_dir={tmp_path / 'out'}", f"--resume_from_checkpoint={tmp_path / 'checkpoint-20'}"]
    assert main(["pretrain", f"--corpus={books}", "--max_steps=40", "--mixed_precision=no", *SMALL, *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint-20: a checkpoint of an earlier version" in line and "data order (version)" in line


@pytest.mark.parametrize("recipe", ["tiny", "mini"])
def test_a_dry_run_goes_through_everything_and_leaves_nothing(books, tmp_path, capsys, recipe):
    options = [f"--recipe={recipe}", "--vocab_size=400", "--dataloader_num_workers=0", "--dry_run"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options]) == 0
    said = capsys.readouterr()
    assert "passes over the text" in said.out and "nothing is kept" in said.out and "What it learnt" not in said.out
    steps = [line for line in said.err.splitlines() if re.match(r"step \d/2 ", line)]
    assert len(steps) == 2 and "step 2: from here on 2 pairs of" in said.err  # one of each length
    assert not list(tmp_path.iterdir())


def test_a_dry_run_refuses_what_the_run_would_be_refused(books, trained, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", "--dry_run", *SMALL, "--max_steps=9"]
    (tmp_path / "file").touch()
    for option, what in (
        (f"--output_dir={trained}", "holds a run"),
        (f"--output_dir={tmp_path / 'file' / 'out'}", "cannot be written"),
        ("--resume_from_checkpoint=latest", "dry_run begins a run of its own"),
        ("--adam_beta2=1", "adam_beta2 must be at least 0 and below 1"),
    ):
        assert main([*command, option]) == 2
        assert what in capsys.readouterr().err.splitlines()[-1]


def test_how_long_a_run_is_in_words():
    run = PretrainConfig(max_seq_length=10, global_batch_size=8, batch_size_schedule=["4:0.5"], max_steps=100)
    assert expectation(run, 3000) == "100 steps of 6,000 tokens at most, 2.0 passes over the text"
    assert expectation(replace(run, max_steps=None, num_train_epochs=3.0), 3000) == "3 passes over 3,000 tokens"
    assert "2.5 minutes" in expectation(replace(run, max_steps=None, max_minutes=2.5), 3000)


def test_evaluations_are_part_of_the_minutes():
    run = PretrainConfig(max_minutes=2)
    assert steps_in(run, 1.0, 2.0) == 100
    assert steps_in(replace(run, eval_steps=2), 1.0, 2.0) == 60
    assert steps_in(replace(run, eval_steps=2), 1.0, 1e6) == 1


def test_a_micro_batch_is_found_once_and_kept(books, tmp_path, monkeypatch):
    tried = []

    def fastest(speed, most):
        tried.append((most, speed(2) > 0))
        return 2

    monkeypatch.setattr(trials, "fastest", fastest)
    options = ("--max_steps=4", "--save_steps=2", "--mixed_precision=no")
    found = run(books, tmp_path / "found", *options, "--micro_batch_size=auto")
    assert tried == [(8, True)]
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2
    assert run(books, tmp_path / "given", *options, "--micro_batch_size=2") == found, "trying left no trace"
    shutil.rmtree(tmp_path / "found" / "checkpoint-4")
    again = run(books, tmp_path / "found", *options, "--micro_batch_size=auto", "--resume_from_checkpoint=latest")
    assert len(tried) == 1 and again == found, "a resumed run obeys what was found"
    assert json.loads((tmp_path / "found" / "run_config.json").read_text())["run"]["micro_batch_size"] == 2


def test_a_micro_batch_grows_as_long_as_that_pays():
    assert trials.fastest(lambda size: min(size, 8), 100) == 8
    assert trials.fastest(lambda size: size, 24) == 24
    assert trials.fastest(lambda size: size if size < 5 else 0, 24) == 4, "memory ran out"
    with pytest.raises(ValueError, match="out of memory with a single pair"):
        trials.fastest(lambda size: 0, 24)


def test_out_of_memory_names_the_options_that_help(books, tmp_path, capsys, monkeypatch):
    def forward(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(D2lBertForPreTraining, "forward", forward)
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=2"]
    assert main([*command, "--micro_batch_size=4"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory with micro-batches of 4 pairs; lower --micro_batch_size" in line


def test_what_the_machine_decides_is_in_the_record(books, tmp_path):
    options = [option for option in SMALL if "dataloader_num_workers" not in option]
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *options, "--max_steps=1"]
    longer = ["--max_seq_length=320", "--max_position_embeddings=320", "--attention_probs_dropout_prob=0.1"]
    assert main([*command, *longer]) == 0
    run = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    assert (run["dataloader_num_workers"], run["attn_implementation"]) == (0, "eager")


KEEP_AND_FREE = """
import pathlib, re, sys
import numpy as np
from d2l_bert.commands import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
arrays = [np.ones(2**21) for _ in range(80)]
del arrays
print(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text()).group(1))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="another allocator may be in force"
)
def test_glibc_keeps_what_is_freed_however_much_it_is():
    held = {
        how: int(subprocess.run([sys.executable, "-c", KEEP_AND_FREE, how], capture_output=True, check=True).stdout)
        for how in ("kept", "as it is")
    }
    assert held["kept"] - held["as it is"] > 1.2 * 2**20  # KiB, of 1.25 GiB


def test_memory_is_kept_from_before_the_text_is_read(books, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("d2l_bert.commands.keep_freed_memory", lambda: done.append("kept"))
    monkeypatch.setattr("d2l_bert.training.pretrain.prepare", lambda run: done.append("read") or prepare.prepare(run))
    run(books, tmp_path / "model", "--max_steps=1")
    assert done == ["kept", "read"]


def test_a_cpu_spells_attention_out_unless_rows_are_long_and_without_dropout():
    chosen = {
        (device, length, dropout): faster_attention(
            D2lBertConfig(attention_probs_dropout_prob=dropout), PretrainConfig(max_seq_length=length), device
        )
        for device in ("cpu", "cuda")
        for length in (256, 257)
        for dropout in (0.0, 0.1)
    }
    assert {case for case, kernel in chosen.items() if kernel == "sdpa"} == {
        ("cpu", 257, 0.0),
        *(case for case in chosen if case[0] == "cuda"),
    }
    assert set(chosen.values()) == {"eager", "sdpa"}


def test_a_cpu_has_no_process_beside_it_that_makes_batches_unless_it_is_asked_for():
    chosen = [
        processes_that_load(PretrainConfig(dataloader_num_workers=asked), device)
        for device in ("cpu", "cuda", "mps")
        for asked in (None, 0, 2)
    ]
    assert chosen == [0, 0, 2, 1, 0, 2, 1, 0, 2]


def test_a_loaders_worker_that_is_killed_is_named(books, tmp_path, capsys, monkeypatch):
    def kill(*_):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(data.PretrainingSteps, "__getitem__", kill)
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, "--max_steps=2"]
    assert main([*command, "--dataloader_num_workers=1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "a process that makes batches has ended" in line and "--dataloader_num_workers 0" in line


def test_gradient_checkpointing_does_not_change_what_is_learnt(books, tmp_path):
    options = ("--max_steps=4", "--mixed_precision=no")
    assert run(books, tmp_path / "a", *options) == run(books, tmp_path / "b", *options, "--gradient_checkpointing")


def test_minutes_become_steps_and_timing_leaves_no_trace(books, tmp_path):
    timed = run(books, tmp_path / "timed", "--max_minutes=0.02")
    steps = json.loads((tmp_path / "timed" / "run_config.json").read_text())["run"]["max_steps"]
    assert run(books, tmp_path / "counted", f"--max_steps={steps}") == timed


def test_text_without_long_words_still_gets_its_card(tmp_path):
    """Chinese has no words of four letters, and a model may have few positions: the card's examples must cope."""
    sentences = [f"我在{place}看见了{n}个人。" for n, place in enumerate("山河海湖城村路桥" * 20)]
    blocks = [" ".join(sentences[i : i + 8]) for i in range(0, len(sentences), 8)]
    (tmp_path / "text.txt").write_text("\n\n".join(blocks))
    options = ["--language=zh", "--max_steps=2", "--max_seq_length=16", "--max_position_embeddings=16"]
    run(tmp_path / "text.txt", tmp_path / "out", *options)
    assert "[MASK]" in (tmp_path / "out" / "README.md").read_text()


def test_values_from_python_are_checked():
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


def test_epochs_become_steps(books, tmp_path):
    run(books, tmp_path / "out", "--num_train_epochs=0.5")
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    run(books, tmp_path / "twice", "--num_train_epochs=1")
    twice = json.loads((tmp_path / "twice" / "run_config.json").read_text())["run"]
    assert abs(2 * record["max_steps"] - twice["max_steps"]) <= 1
    assert record["num_train_epochs"] is None


def test_an_epoch_counts_the_pairs_of_every_length(books, tmp_path):
    """Steps of both lengths, each a part of the pairs that its own plan has, are one pass together."""
    out, schedule = tmp_path / "out", ["16:0.5"]
    run(books, out, "--num_train_epochs=1", "--length_schedule", *schedule)
    steps = json.loads((out / "run_config.json").read_text())["run"]["max_steps"]
    numbers = {"corpus": [str(books)], "vocab_size": 400, "max_seq_length": 48, "global_batch_size": 8}
    config = PretrainConfig(**numbers, max_steps=steps, length_schedule=schedule)
    short, full = make_phases(config, prepare.prepare(config), steps)
    passes = full.first_step * 24 / len(short.plans.epoch(0)) + (steps - full.first_step) * 8 / len(
        full.plans.epoch(0)
    )
    assert passes == pytest.approx(1, abs=0.1)


def test_the_books_recipe_runs_its_pairs_of_sentences(books, tmp_path):
    sizes = ["--vocab_size=400", "--max_steps=2", "--global_batch_size=16", "--dataloader_num_workers=0"]
    assert main(["pretrain", "--recipe=d2l", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *sizes]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    book = {"hidden_act": "relu", "embedding_layer_norm": False, "tie_word_embeddings": False, "hidden_size": 128}
    assert {name: config[name] for name in book} == book
    assert json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]["pairing"] == "sentences"


def test_a_loaders_worker_changes_nothing(books, tmp_path):
    alone = run(books, tmp_path / "alone", "--max_steps=4")
    assert run(books, tmp_path / "helped", "--max_steps=4", "--dataloader_num_workers=2") == alone


# ---------------------------------------------------------------------------------------------------------------------
# From a trained model

SHORT = ["--max_seq_length=48", "--global_batch_size=8", "--dataloader_num_workers=0", "--mixed_precision=no"]


@pytest.fixture(scope="module")
def spelling(books, tmp_path_factory):
    """The folder of a model with a vocabulary of 60 entries, so that most words are split."""
    folder = tmp_path_factory.mktemp("spelling") / "model"
    run(books, folder, "--max_steps=2", "--vocab_size=60", "--mixed_precision=no")
    return folder


def run_from(model, corpus, folder, *options):
    """Train on from a model; returns the weights."""
    assert (
        main(["pretrain", f"--init_from={model}", f"--corpus={corpus}", f"--output_dir={folder}", *SHORT, *options])
        == 0
    )
    return load_file(folder / "model.safetensors")


def test_a_run_starts_from_a_models_weights_architecture_and_tokenizer(books, spelling, tmp_path):
    """A step at a rate of next to nothing leaves everything where it was."""
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


def test_the_architecture_from_python_must_be_the_models(books, trained, tmp_path):
    options = PretrainConfig(corpus=[str(books)], output_dir=str(tmp_path / "out"), max_steps=1, max_seq_length=48)
    with pytest.raises(ValueError, match="hidden_size is 32 there, and 128 here"):
        pretrain(D2lBertConfig(), replace(options, init_from=str(trained)))
    assert not (tmp_path / "out").exists()


def test_on_resuming_the_checkpoint_wins_over_the_model_started_from(books, spelling, tmp_path, capsys):
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


def test_words_are_added_in_the_run_or_in_what_was_prepared_for_it(books, spelling, tmp_path, capsys):
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


def test_more_words_than_there_are_is_said_and_rare_ones_are_not_added(books, spelling, tmp_path, capsys):
    words = Counter(re.findall("[a-z]+", " ".join(book.read_text() for book in books.iterdir()).lower()))
    rare = {word for word in words if words[word] < 60}
    sizes = []
    for least in (2, 60):
        tokens = tmp_path / f"tokens-{least}"
        out = [f"--output_dir={tokens}", f"--tokenizer={spelling}", "--extend_vocab=5000", f"--min_frequency={least}"]
        assert main(["prepare", f"--corpus={books}", *out]) == 0
        assert f"not 5,000: no others are split and occur {least} times" in capsys.readouterr().err
        vocabulary = AutoTokenizer.from_pretrained(tokens).get_vocab()
        assert least == 2 or not rare & set(vocabulary)
        sizes.append(len(vocabulary))
    assert rare and sizes[0] > sizes[1] > 60


def test_the_options_of_the_tokenizer_reach_it(books, tmp_path):
    shutil.copytree(books, tmp_path / "books")
    for book in (tmp_path / "books").iterdir():
        book.write_text(book.read_text() + "café " * 100 + "anan.\n")
    out = [f"--output_dir={tmp_path / 'tokens'}", "--strip_accents=false", "--min_frequency=50", "--limit_alphabet=20"]
    assert main(["prepare", f"--corpus={tmp_path / 'books'}", *out]) == 0
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "tokens").get_vocab()
    assert len([piece for piece in vocabulary if len(piece) == 1]) == 20
    assert "café" in vocabulary and "anna" in vocabulary and "anan" not in vocabulary
    settled = json.loads((tmp_path / "tokens" / "prepared.json").read_text())["settled"]
    options = ("strip_accents", "min_frequency", "limit_alphabet", "extend_vocab")
    assert [settled[name] for name in options] == [False, 50, 20, 0]
