"""The training loop: what it leaves, that it learns, and that a run is the same run however it is computed."""

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file
from transformers import AutoTokenizer

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.training import data, prepare
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.optim import make_adamw
from d2l_bert.training.pretrain import make_accelerator, make_phases, train_step
from d2l_bert.training.run_folder import start_folder


LEFT_BEHIND = {
    "README.md",
    "checkpoint-20",
    "checkpoint-40",
    "config.json",
    "configuration_d2l_bert.py",
    "metrics.json",
    "model.safetensors",
    "modeling_d2l_bert.py",
    "run_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_curves.png",
    "training_log.jsonl",
    "vocab.txt",
}


def run(books, folder, *options):
    """Train through the command line; returns the weights file's bytes."""
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *SMALL, *options]) == 0
    return (folder / "model.safetensors").read_bytes()


def log_rows(folder):
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def test_a_run_leaves_the_documented_files_and_no_others(trained):
    assert {path.name for path in trained.iterdir()} == LEFT_BEHIND


def test_a_run_leaves_no_pickle(trained):
    suffixes = {path.suffix for path in trained.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".py", ".md", ".png", ".txt"}


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
    accelerator = make_accelerator(replace(config, mixed_precision="no"))
    text = prepare.prepare(config)
    micro_batches = data.PretrainingSteps(make_phases(replace(config, micro_batch_size=3), text, 1))[0]
    torch.manual_seed(0)
    numbers = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05}
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=len(text.tokenizer), hidden_size=64, **numbers))
    optimizer = make_adamw(model, 3e-3, 0.0, (0.9, 0.98), 1e-6)
    for _ in range(150):
        mlm_loss, nsp_loss, *_ = train_step(accelerator, model, optimizer, micro_batches, 3e-3, 1.0).tolist()
    assert mlm_loss < 0.05 and nsp_loss < 0.05


def test_the_figures_of_metrics_are_those_of_the_saved_model(books, trained):
    """Recomputed with the loaded model and a loop of its own over the run's held-out pairs."""
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
    assert run(books, tmp_path / "third", "--max_steps=6", "--seed=7") != first


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
    for changes in ({"pairing": "sentence"}, {"max_steps": 1.5}, {"corpus": "books"}, {"learning_rate": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            PretrainConfig(**{"max_steps": 1, **changes}).check()


def test_epochs_become_steps(books, tmp_path):
    run(books, tmp_path / "out", "--num_train_epochs=0.5")
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())["run"]
    run(books, tmp_path / "twice", "--num_train_epochs=1")
    twice = json.loads((tmp_path / "twice" / "run_config.json").read_text())["run"]
    assert abs(2 * record["max_steps"] - twice["max_steps"]) <= 1
    assert record["num_train_epochs"] is None


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
