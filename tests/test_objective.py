"""The objective of a run (next sentence, sentence order or none): its head, its losses, its metrics, its card."""

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import SMALL
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization import prepare
from d2l_bert.training import data
from d2l_bert.training import held_out as held_out_figures
from d2l_bert.training.batching import make_phases
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.initialize import look_at_neighbours
from d2l_bert.training.learner import count_examples, train_step
from d2l_bert.training.optim import make_adamw


OPTIONS = ("--max_steps=6", "--save_steps=3", "--save_total_limit=9", "--mixed_precision=no")
NAMES = ("nsp", "next sentence", "next-sentence", "nextsentence", "isnext", "sop", "sentence order", "pair")


@pytest.fixture(scope="module")
def pretrained(books, tmp_path_factory):
    """A function of the objective; returns the folder of a finished run and everything that the run printed."""

    @functools.cache
    def run(objective):
        folder, said = tmp_path_factory.mktemp(objective) / "model", io.StringIO()
        command = ["pretrain", f"--corpus={books}", f"--output_dir={folder}", f"--objective={objective}"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main([*command, *OPTIONS, *SMALL]) == 0
        return folder, said.getvalue()

    return run


def figures_of(folder):
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return {name for row in [*rows, json.loads((folder / "metrics.json").read_text())] for name in row}


def test_without_a_pair_objective_there_is_no_head_for_it_and_no_mention_of_it(pretrained):
    folder, said = pretrained("none")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["D2lBertForMaskedLM"]
    for weights in ("model.safetensors", "checkpoint-3/model.safetensors"):
        assert not any("nsp" in name or "pooler" in name for name in load_file(folder / weights))
    card = (folder / "README.md").read_text()
    told = [said, (folder / "metrics.json").read_text(), (folder / "training_log.jsonl").read_text(), card]
    for text in told:
        assert not [name for name in NAMES if name in text.lower()], text
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["eval_sequences"] > 0 and metrics["train_sequences_per_second"] > 0
    assert "A held-out sequence" in said and "\n  A: " in said and "\n  B: " not in said
    results = ModelCard.load(folder / "README.md").data.eval_results
    assert [result.metric_name for result in results] == ["MLM loss", "MLM perplexity", "MLM accuracy"]


def test_a_model_without_the_pair_head_loads_in_every_class_that_does_not_need_it(pretrained, capsys):
    folder, _ = pretrained("none")
    model, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    for auto in (AutoModel, AutoModelForSequenceClassification):
        loaded = auto.from_pretrained(folder)
        assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    capsys.readouterr()
    assert main(["next-sentence", str(folder), "Anna walked.", "The drum was red."]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "without weights for bert.pooler" in line


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_metrics_and_card_are_named_after_the_objective(pretrained, objective):
    folder, said = pretrained(objective)
    (other,) = {"nsp", "sop"} - {objective}
    wanted = {f"{objective}_loss", f"eval_{objective}_loss", f"eval_{objective}_accuracy", "eval_pairs"}
    figures = figures_of(folder)
    assert wanted <= figures and not any(other in name for name in figures)
    task, card = PAIR_TASKS[objective], (folder / "README.md").read_text()
    assert f"a {task.name} ({task.short}) head" in card and f"Chance is an {task.short} loss of 0.693" in card
    assert f"`AutoModelForNextSentencePrediction` ({task.meaning})" in card
    assert f"  {task.short} loss" in said and f"  {task.claim}: " in said and f"P({task.labels[0]})" in said
    for text in (card, said):
        assert other.upper() not in text and PAIR_TASKS[other].name not in text
    metrics, data_of_card = (
        json.loads((folder / "metrics.json").read_text()),
        ModelCard.load(folder / "README.md").data,
    )
    assert task.name.replace(" ", "-") in data_of_card.tags
    values = {result.metric_name: result.metric_value for result in data_of_card.eval_results}
    for name in ("loss", "accuracy"):
        assert values[f"{task.short} {name}"] == pytest.approx(metrics[f"eval_{objective}_{name}"], abs=1e-4)
    assert main(["next-sentence", str(folder), "Anna walked.", "The drum was red."]) == 0


@pytest.mark.parametrize("objective, panels", [("nsp", 3), ("sop", 3), ("none", 2)])
def test_curves_have_a_panel_for_each_loss_and_one_for_accuracy(pretrained, monkeypatch, objective, panels):
    from matplotlib.figure import Figure

    from d2l_bert.training.pictures import plot_curves
    from d2l_bert.training.tracking import TrainingLog

    drawn = []
    folder, _ = pretrained(objective)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.extend(figure.axes))
    plot_curves(TrainingLog(folder / "training_log.jsonl").rows(), folder / "unused.png")
    names = ["masked language model", *([PAIR_TASKS[objective].name] if objective in PAIR_TASKS else [])]
    titles = [*(f"{name}: loss (nats)" for name in names), "held-out accuracy (%)"]
    assert len(drawn) == panels and [panel.get_title() for panel in drawn] == titles
    with_coin = [panel for panel in drawn if any(set(line.get_ydata()) == {0.6931} for line in panel.lines)]
    assert with_coin == drawn[1:-1]


def test_a_resumed_run_without_a_pair_objective_ends_with_the_same_bytes(books, pretrained, capsys, tmp_path):
    folder, _ = pretrained("none")
    stopped = tmp_path / "stopped"
    shutil.copytree(folder, stopped)
    shutil.rmtree(stopped / "checkpoint-6")
    for name in ("model.safetensors", "metrics.json"):
        (stopped / name).unlink()
    command = ["pretrain", f"--corpus={books}", f"--output_dir={stopped}", "--resume_from_checkpoint=latest"]
    assert main([*command, "--objective=sop", *OPTIONS, *SMALL]) == 2
    assert "objective was 'none', and is 'sop' now" in capsys.readouterr().err
    assert main([*command, "--objective=none", *OPTIONS, *SMALL]) == 0
    assert (stopped / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_train_the_same_weights_as_one(books, pretrained, tmp_path):
    """Eight rows in micro-batches of three: in the last round, one process has an empty micro-batch."""
    folder, _ = pretrained("none")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "d2l_bert", "pretrain", f"--corpus={books}"]
    command += [f"--output_dir={tmp_path / 'two'}", "--objective=none", "--micro_batch_size=3", *OPTIONS, *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "two" / "run_config.json").read_text())["machine"]["processes"] == 2
    one, two = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "two"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=0)
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (folder, tmp_path / "two")]
    assert metrics[0]["eval_sequences"] == metrics[1]["eval_sequences"]
    assert metrics[0]["eval_mlm_loss"] == pytest.approx(metrics[1]["eval_mlm_loss"], abs=1e-4)


def packed(batch):
    """The rows of a batch as sequences of one packed row (1, B x T)."""
    rows, width = batch["input_ids"].shape
    real = batch["attention_mask"]
    fields = {
        "sequence_ids": real * (torch.arange(rows) + 1)[:, None],
        "position_ids": torch.arange(width).expand(rows, width) * real,
        "masked_positions": batch["masked_positions"] + (torch.arange(rows) * width)[:, None],
    }
    return {name: tensor.reshape(1, -1) for name, tensor in {**batch, **fields}.items()}


def test_each_objective_has_its_own_pairs(books):
    for objective in ("nsp", "sop", "none"):
        run = PretrainConfig(corpus=[str(books)], objective=objective, vocab_size=400, max_seq_length=48, max_steps=1)
        (phase,) = make_phases(run, prepare.prepare(run), 1)
        pairs, ends = phase.pairs.window(0, 0), phase.pairs.selection.corpus.document_ends
        sentence_ends = phase.pairs.selection.corpus.sentence_ends
        a, b = (ends.find(sentence_ends.find(pairs[side])) for side in ("a_start", "b_start"))
        is_pair = pairs["b_end"] > pairs["b_start"]
        assert (a != b)[is_pair].any() == (objective == "nsp")
        assert (pairs["b_end"] == pairs["b_start"]).all() == (objective == "none")


@pytest.fixture
def learn(books):
    """A function that takes one step with a new model.

    Returns the step's losses, gradient norm and counts as a tensor, the gradient (flat), and the model's forward pass
    on the first micro-batch.
    """

    def step(objective, micro_batch_size, change=lambda batches: batches):
        run = PretrainConfig(
            corpus=[str(books)],
            objective=objective,
            vocab_size=400,
            max_seq_length=48,
            global_batch_size=8,
            micro_batch_size=micro_batch_size,
            max_steps=1,
            mixed_precision="no",
        )
        text = prepare.prepare(run)
        batches = change(data.PretrainingSteps(make_phases(run, text, 1))[0])
        torch.manual_seed(0)
        model_class = D2lBertForMaskedLM if objective == "none" else D2lBertForPreTraining
        model = model_class(
            D2lBertConfig(
                vocab_size=len(text.tokenizer),
                hidden_size=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        look_at_neighbours(model)
        gradients = []
        optimizer = make_adamw(model.parameters(), 0.0, 0.0, (0.9, 0.98), 1e-6)
        optimizer.register_step_pre_hook(
            lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
        done = train_step(make_accelerator("no"), model, [optimizer], batches, 0.0, 1e9)
        # The padded tokens are left out: their number depends on the split.
        values = torch.tensor([done.mlm_loss, done.pair_loss, done.grad_norm, done.tokens, done.examples])
        return values, gradients[0], functools.partial(model, **batches[0])

    return step


def nothing_beside(batches):
    """Add an empty micro-batch, as a process without rows of its own gets one."""
    empty = {name: tensor[:1].clone() for name, tensor in batches[0].items()}
    for name in {"labels", "next_sentence_label"} & empty.keys():
        empty[name].fill_(-100)
    empty["attention_mask"][:] = 0
    return [*batches, empty]


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_a_step_has_one_gradient_and_one_count_however_it_is_split(learn, objective):
    values, gradient, forward = learn(objective, 8)
    assert values[4] == 8 and (values[1] > 0) == (objective != "none")
    # With one micro-batch, the step's means are those of the micro-batch.
    torch.testing.assert_close(values[0] + values[1], forward().loss)
    for size, change in ((3, list), (3, nothing_beside)):
        other_values, other_gradient, _ = learn(objective, size, change)
        torch.testing.assert_close(other_values, values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-4)


def test_packed_rows_without_a_pair_objective_give_the_same_gradient_as_unpacked_ones(learn):
    values, gradient, _ = learn("none", 8)
    for size in (8, 3):
        other_values, other_gradient, _ = learn("none", size, lambda batches: [packed(batch) for batch in batches])
        torch.testing.assert_close(other_values, values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-4)


def test_sequences_without_a_label_are_not_counted():
    batch = {"labels": torch.tensor([[7, -100], [-100, -100]]), "sequence_ids": torch.tensor([[1, 1, 2], [1, 2, 3]])}
    assert count_examples(batch) == 2
    del batch["sequence_ids"]
    assert count_examples(batch) == 1


def test_held_out_counts_of_packed_pairs_equal_those_of_unpacked_pairs():
    torch.manual_seed(0)
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=20, hidden_size=32, max_position_embeddings=16)).eval()
    ids, ones = torch.randint(5, 20, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    batch = {
        "input_ids": ids,
        "attention_mask": ones,
        "masked_positions": torch.tensor([[1, 4], [2, 3]]),
        "labels": torch.tensor([[7, 8], [9, -100]]),
    }
    row = {**packed(batch), "cls_positions": torch.tensor([[0, 6]])}
    batch["next_sentence_label"], row["next_sentence_label"] = torch.tensor([0, 1]), torch.tensor([[0, 1]])
    single, together = (held_out_figures.held_out_counts(model, [part], "cpu") for part in (batch, row))
    torch.testing.assert_close(single, together, atol=1e-4, rtol=0)
    assert held_out_figures.held_out_metrics(together, PAIR_TASKS["sop"])["eval_pairs"] == 2
