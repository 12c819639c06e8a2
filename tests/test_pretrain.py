"""Whole runs: ways to start, averages, dry runs, their length, no pair task, collapse, unfinished runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL, write_books
from huggingface_hub import ModelCard
from promises.driving import command, end, error_lines, read_json, start, watched
from runs import log_rows, run, steps_counted
from safetensors.torch import load_file
from small_models import make_config, make_model, make_sequences, packed, padded
from torch.nn import functional as F

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.held_out import held_out_counts, held_out_metrics
from d2l_bert.training.learner import Learner
from d2l_bert.training.recipes import RECIPES
from d2l_bert.training.report import advice, variety


RUN = [*SMALL, "--mixed_precision=no", "--license=mit"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", pytest.param("mini", marks=pytest.mark.slow)])
def test_a_dry_run_times_steps_of_each_length_and_leaves_no_file(books, tmp_path, monkeypatch, capsys, recipe):
    update = Learner.update
    taken = []

    def watched(learner, micro_batches, counts, learning_rate):
        rows, widths = zip(*(batch["input_ids"].shape for batch in micro_batches), strict=True)
        taken.append((sum(rows), max(widths)))
        assert learning_rate == 0
        return update(learner, micro_batches, counts, learning_rate)

    monkeypatch.setattr(Learner, "update", watched)
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
    architecture.vocab_size = len(prepare(TextConfig(corpus=[str(books)], vocab_size=400)).tokenizer)
    model = D2lBertForPreTraining(architecture)
    assert parameters == model.num_parameters() and memory > 100 and kept == config.save_total_limit
    assert minutes == pytest.approx(seconds * 20 / 60, rel=0.02)
    # Beside the weights a checkpoint has one moment of each matrix of the blocks (Muon), two of all else (AdamW).
    in_blocks = sum(weight.numel() for weight in model.bert.encoder.parameters() if weight.ndim == 2)
    numbers = 3 * parameters - (in_blocks if config.optim == "muon" else 0)
    assert disk == round(4 * numbers / 1e6)


@pytest.mark.slow
def test_a_run_from_a_trained_model_first_logs_the_figures_of_that_model(books, trained, tmp_path):
    """The held-out pairs and their masks are the same: so are the figures that the model was saved with."""
    options = "--max_seq_length=48 --length_schedule=none --max_steps=2 --eval_steps=1 --mixed_precision=no".split()
    words = ["pretrain", f"--init_from={trained}", f"--corpus={books}", f"--output_dir={tmp_path}", *options]
    assert main(words) == 0
    first, *others = [row for row in log_rows(tmp_path) if "eval_mlm_loss" in row]
    assert first.pop("step") == 0
    assert [row["step"] for row in others] == [1, 2]
    metrics = read_json(trained / "metrics.json")
    assert first == pytest.approx({name: metrics[name] for name in first}, rel=1e-5)
    assert {"eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy", "eval_pairs"} <= first.keys()


@pytest.mark.slow
def test_max_minutes_becomes_a_number_of_steps_and_timing_them_changes_nothing(books, tmp_path):
    timed = run(books, tmp_path / "timed", "--max_minutes=0.02")
    steps = read_json(tmp_path / "timed" / "run_config.json")["run"]["max_steps"]
    assert run(books, tmp_path / "counted", f"--max_steps={steps}") == timed


# ---------------------------------------------------------------------------------------------------------------------
# What a dry run says of a run is what the run then does: its steps, and its passes over the text


CLS, SEP = 2, 3  # as in every vocabulary that a run trains
FEW_LINES = [*RUN, "--logging_steps=1000", "--max_eval_pairs=50"]


@pytest.fixture(scope="module")
def few_books(tmp_path_factory):
    return write_books(tmp_path_factory.mktemp("few") / "books", count=6)


@pytest.mark.parametrize(
    "options",
    [
        "--num_train_epochs=2 --objective=none --pairing=sentences --packing --global_batch_size=32",
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                # some pairs have fewer tokens than a row
                "--num_train_epochs=2 --pairing=sentences --length_schedule none",
                "--num_train_epochs=2 --length_schedule 16:0.5 --pairing=sentences",
                "--num_train_epochs=2 --batch_size_schedule 2:0.4 4:0.3 --length_schedule none",
                "--max_steps=30 --batch_size_schedule 4:0.5 --length_schedule none",
                "--max_steps=30 --length_schedule 16:0.5 --batch_size_schedule 4:0.7",
            )
        ),
    ],
)
def test_a_dry_run_says_the_number_of_steps_that_the_run_takes(few_books, tmp_path, capsys, options):
    """
    And its passes over the text: the tokens in the batches of the run itself without [CLS] and [SEP], which begin and
    end the segments, over those of the text.
    """
    words = ["pretrain", "--corpus", few_books, "--output_dir", tmp_path / "out", *FEW_LINES, *options.split()]
    assert command(*words, "--dry_run") == 0
    said = re.search(r"dry run: ([\d,]+) steps of .*, ([\d,.]+) passes over the text", capsys.readouterr().out)
    model_class = D2lBertForMaskedLM if "--objective=none" in options else D2lBertForPreTraining
    with watched(model_class) as (trained, _):
        assert command(*words) == 0
    record = read_json(tmp_path / "out" / "run_config.json")
    tokens = 0
    assert int(said[1].replace(",", "")) == record["run"]["max_steps"]
    for batch in trained:
        begins_or_ends = torch.isin(batch["input_ids"], torch.tensor([CLS, SEP]))
        tokens += int((batch["attention_mask"].bool() & ~begins_or_ends).sum())
    # Segments of pairs that exchange their Bs are cut to one length: many of 16 tokens, some of 48.
    if "16:0.5" not in options:
        passes = tokens / record["data"]["train_tokens"]
        assert float(said[2].replace(",", "")) == pytest.approx(passes, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["segments", "sentences"])
def test_a_run_of_twenty_epochs_that_takes_a_step_more_ends_without_advice_against_so_many(
    few_books, tmp_path, capsys, pairing
):
    words = ["pretrain", "--corpus", few_books, "--output_dir", tmp_path / "out", *FEW_LINES, f"--pairing={pairing}"]
    words += ["--num_train_epochs=20", "--global_batch_size=64", "--length_schedule=none", "--eval_steps=1000"]
    assert command(*words) == 0
    assert "Note: 20 passes" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# A run without a pair task has no head for it and no word of it; packed pairs are counted as unpacked ones


@pytest.mark.slow
def test_without_a_pair_objective_there_is_no_head_for_it_and_no_mention_of_it(books, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("single")  # the name of this test has words that may not stand in what is said
    run(books, folder, "--objective=none", "--max_steps=6", "--save_steps=3", "--mixed_precision=no")
    assert read_json(folder / "config.json")["architectures"] == ["D2lBertForMaskedLM"]
    for weights in ("model.safetensors", "checkpoint-3/model.safetensors"):
        for name in load_file(folder / weights):
            assert "nsp" not in name and "pooler" not in name
    captured = capsys.readouterr()
    told = [(folder / name).read_text() for name in ("metrics.json", "training_log.jsonl", "README.md")]
    for text in (captured.out, captured.err, *told):
        assert not re.search("(?i)nsp|next.?sentence|isnext|sop|sentence order|pair", text), text
    metrics = read_json(folder / "metrics.json")
    assert metrics["eval_sequences"] > 0 and metrics["train_sequences_per_second"] > 0
    assert "A held-out sequence" in captured.out
    assert captured.out.count("[CLS]") == captured.out.count("[SEP]") == 1
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert [result.metric_name for result in results] == ["MLM loss", "MLM perplexity", "MLM accuracy"]


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[3, 1], [0, 5, 2], [7, 4, 6]]])
def test_held_out_counts_of_packed_pairs_equal_those_of_unpacked_pairs(rows):
    config = make_config(max_position_embeddings=128)
    model = make_model(D2lBertForPreTraining, config)
    sequences = make_sequences()
    batches = padded(sequences), packed(sequences, rows)
    single, together = (held_out_counts(model, [batch], "cpu") for batch in batches)
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-4)
    assert held_out_metrics(together, PAIR_TASKS["sop"])["eval_pairs"] == len(sequences)


# ---------------------------------------------------------------------------------------------------------------------
# An encoder that gives every token the same vector is found, and said at the run's end and on the card


@pytest.mark.parametrize("rows", [padded(make_sequences()), packed(make_sequences(), [[0, 1], [2, 3, 4], [5, 6, 7]])])
def test_the_mean_cosine_and_the_distinct_predictions_equal_a_direct_count(rows):
    model = make_model(D2lBertForPreTraining, make_config())
    with torch.no_grad():
        outputs = model(**rows, output_hidden_states=True)
    vectors = outputs.hidden_states[-1]
    cosines = []
    tokens = rows["attention_mask" if "attention_mask" in rows else "sequence_ids"].nonzero().tolist()
    for row, column in tokens:
        for other_row, other in tokens:
            if rows["input_ids"][row, column] != rows["input_ids"][other_row, other]:
                cosines.append(float(F.cosine_similarity(vectors[row, column], vectors[other_row, other], dim=0)))
    guesses = outputs.prediction_logits[rows["labels"] != -100].argmax(-1).tolist()
    found = variety(model, rows)
    assert found["token_cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
    assert found["distinct_predictions"] == len(set(guesses)) > 1


@pytest.mark.parametrize("loss, said", [(7.0, "learnt less"), (5.9, "learnt little more"), (5.0, "")])
def test_a_loss_is_told_from_that_of_frequencies(loss, said):
    line = advice({"train_words_seen": 1, "eval_mlm_loss": loss, "eval_token_entropy": 6.0}, 1)
    assert said in line and bool(said) == bool(line)


@pytest.mark.slow
@pytest.mark.parametrize("rate, has_collapsed", [("1e-3", False), ("1", True)])
def test_a_run_whose_encoder_has_collapsed_says_so_at_its_end_and_on_its_card(
    rate, has_collapsed, books, tmp_path, capsys
):
    folder = tmp_path / "model"
    run(books, folder, "--recipe=d2l", "--max_steps=20", f"--learning_rate={rate}")
    metrics = json.loads((folder / "metrics.json").read_text())
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (metrics["token_cosine"] > 0.95) == has_collapsed
    assert ("collapsed" in capsys.readouterr().out) == ("collapsed" in card) == has_collapsed
    assert ("AutoModelForSequenceClassification" in card) != has_collapsed


# ---------------------------------------------------------------------------------------------------------------------
# Ways to start a run


ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_accelerate_launch_trains_and_refuses(books, tmp_path):
    launch = "-m accelerate.commands.launch --cpu --num_processes=1 --num_machines=1 --dynamo_backend=no "
    launch += (
        f"--mixed_precision=no training/pretrain.py --corpus={books} --output_dir={tmp_path / 'out'} --max_steps=2"
    )
    launched = [sys.executable, *launch.split(), *RUN]
    done = subprocess.run(launched, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").exists(), done.stderr
    done = subprocess.run([*launched, "--no_such_option"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0  # the launcher has an exit code of its own
    (line,) = [line for line in error_lines(done.stderr) if "no_such_option" in line]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations


@pytest.mark.slow
def test_a_text_that_pairs_would_cut_to_less_than_half_has_no_second_loss(tmp_path, capsys):
    """Documents of 600 tokens, in two "sentences", as a thousand characters are the most."""
    file = tmp_path / "a.txt"
    file.write_text("\n".join(f"{a} {b} " * 300 for a in "abcdefghij" for b in "klmnopqrst"))
    words = ["pretrain", f"--corpus={file}", f"--output_dir={tmp_path / 'out'}"]
    words += ["--dry_run", "--vocab_size=60", "--global_batch_size=4"]
    for objective, said in ("auto", "objective none"), ("nsp", f"rows of 128 hold {125 / 600:.0%} of the tokens"):
        assert main([*words, f"--objective={objective}"]) == 0 and said in capsys.readouterr().err


@pytest.mark.slow
def test_the_rows_of_an_objective_are_said_and_evaluate_has_the_same_for_all(books, trained, tmp_path, capsys):
    """All start from one model and stay there: their MLM losses are the same where the rows and their masks are."""
    words = [f"--init_from={trained}", "--max_steps=1", "--learning_rate=1e-12", "--max_seq_length=48"]
    folders = [tmp_path / objective for objective in ("nsp", "sop", "none")]
    for folder in folders:
        options = ["--output_dir", folder, f"--objective={folder.name}"]
        assert command("pretrain", "--corpus", books, *words, *options) == 0
        assert "evaluate --objective none" in capsys.readouterr().out
        assert (folder.name != "none") == ("--objective none`" in (folder / "README.md").read_text())
    output = tmp_path / "figures.json"
    words = ["--corpus", books, "--held_out", "--objective=none", "--pppl_sentences=0", "--output", output]
    assert command("evaluate", *folders, *words) == 0
    figures = [of["text"] for of in read_json(output)["models"]]
    for of in figures:
        assert of["masked_tokens"] == figures[0]["masked_tokens"] > 50
        assert of["mlm_loss"] == pytest.approx(figures[0]["mlm_loss"], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals that name the way out


@pytest.fixture(scope="module")
def unfinished(books, tmp_path_factory):
    """The folder of a run that SIGTERM stopped at step 3, with a checkpoint there."""
    folder = tmp_path_factory.mktemp("unfinished") / "out"
    with steps_counted(sigterm_at=3):
        assert command("pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--max_steps=9") == 128 + 15
    assert (folder / "checkpoint-3").is_dir() and not (folder / "config.json").exists()
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "fill-mask RUN [MASK]",
        "next-sentence RUN a b",
        "evaluate RUN --corpus BOOKS",
        "finetune RUN --task=classification --train_file=FILE --output_dir=OUT",
        "embed RUN FILE --nearest a",
        "pretrain --init_from=RUN --corpus BOOKS --max_steps=2 --output_dir=OUT",
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_the_folder_of_an_unfinished_run_is_refused_with_its_last_checkpoint(
    books, unfinished, tmp_path, fails, words
):
    file = tmp_path / "table.csv"
    file.write_text("text,label\n" + "Anna walked to the garden.,yes\nBoris lost the drum.,no\n" * 20)
    places = {"RUN": unfinished, "BOOKS": books, "FILE": file, "OUT": tmp_path / "out"}
    given = words.split()
    for name, place in places.items():
        given = [word.replace(name, str(place)) for word in given]
    line = fails(*given)
    assert "model_type" not in line and str(unfinished) in line
    assert "checkpoint-3" in line or "--resume_from_checkpoint" in line


# ---------------------------------------------------------------------------------------------------------------------
# Weights of sources


@pytest.mark.slow
def test_a_weight_on_a_document_that_nothing_can_be_learnt_from_ends_in_time(trained, tmp_path):
    """
    Nearly all the weight is on one document of two signs that the tokenizer does not know, beside 500,000 tokens.

    In an epoch that document is read as often as its weight says. A run, or a refusal in one line, must not need all
    of these readings.
    """
    write_books(tmp_path / "books", count=2000)
    (tmp_path / "signs.txt").write_text("☃ ☃\n")
    tokenizer = shutil.copytree(trained, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["pretrain", "--corpus", tmp_path / "books", tmp_path / "signs.txt", "--documents=file", "--max_steps=2"]
    words += ["--source_weights", "0.000000001", "1", "--tokenizer", tokenizer, "--max_eval_pairs=50"]
    words += [option for option in RUN if not option.startswith("--vocab_size")]
    (code,) = end(start([*words, "--output_dir", tmp_path / "out"], said=tmp_path / "said.txt"), 90)
    said = (tmp_path / "said.txt").read_text()
    assert (code, len(error_lines(said))) in ((0, 0), (2, 1)), said
