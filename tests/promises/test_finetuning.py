"""Each task of `finetune` learns, goes on after a kill, predicts what its figures say, and takes any encoder."""

import csv
import json
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

from .driving import PEOPLE, PLACES, THINGS, command, read_json, start, wait_for, weights_of


def rows_of(task, count, seed):
    """Rows that a small model can learn: who stands in a text, how many things, which word is a place, ..."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        who, what, where = rng.choice(PEOPLE[:2]), rng.choice(THINGS), rng.choice(PLACES)
        text = f"{who} walked to the {where} with the {what}."
        if task == "classification":
            rows.append({"text": text, "label": who})
        elif task == "multilabel":
            labels = [name for name in PEOPLE[:2] if rng.random() < 0.5]
            rows.append({"text": f"There {' met '.join(labels or ['nobody'])} saw the {what}.", "label": labels})
        elif task == "regression":
            rows.append({"text": text, "label": (5.0 if who == PEOPLE[0] else -3.0) + rng.random()})
        elif task == "tags":
            tokens = text.rstrip(".").split()
            tags = ["B-PER" if word in PEOPLE else "B-LOC" if word in PLACES else "O" for word in tokens]
            rows.append({"tokens": tokens, "ner_tags": tags})
        elif task == "answers":
            asked, answer = rng.choice([("who", who), ("where", where)])
            context = f"{who} walked to the {where}"
            answers = {"text": [answer], "answer_start": [context.index(answer)]}
            rows.append({"context": context, "question": f"{asked} was it?", "answers": answers, "id": str(number)})
        else:
            choices = [rng.choice(PLACES), rng.choice(THINGS)]
            right = rng.randrange(2)
            choices = choices if right == 0 else choices[::-1]
            rows.append({"context": "they walked to the", "choices": choices, "label": right})
    return rows


TASKS = {
    "classification": ("accuracy", 0.95),
    "multilabel": ("f1", 0.9),
    "regression": ("pearson", 0.9),
    "tags": ("f1", 0.9),
    "answers": ("exact_match", 0.7),
    "multiple_choice": ("accuracy", 0.85),
}
FAST = ["--learning_rate=5e-3", "--hidden_dropout_prob=0", "--attention_probs_dropout_prob=0", "--max_seq_length=40"]
AUTO = {
    "classification": "SequenceClassification",
    "multilabel": "SequenceClassification",
    "regression": "SequenceClassification",
    "tags": "TokenClassification",
    "answers": "QuestionAnswering",
    "multiple_choice": "MultipleChoice",
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_for(task, folder, sizes=(240, 40, 40)):
    folder.mkdir(exist_ok=True)
    return [
        f"--{split}_file={write(folder / f'{split}.jsonl', rows_of(task, size, seed))}"
        for seed, (split, size) in enumerate(zip(("train", "validation", "test"), sizes, strict=True))
    ]


def predictions(folder):
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def figures_of(task, table):
    """The figures on the test rows, from the table of predictions alone."""
    if task in ("classification", "multiple_choice"):
        right = [row["prediction"] == row["label"] for row in table]
        return {"accuracy": np.mean(right)}
    if task == "regression":
        true, said = (np.array([float(row[name]) for row in table]) for name in ("label", "prediction"))
        return {"pearson": np.corrcoef(true, said)[0, 1], "mse": np.mean((true - said) ** 2)}
    if task == "answers":
        return {"exact_match": np.mean([row["prediction"] == json.loads(row["answers"])["text"][0] for row in table])}
    if task == "multilabel":
        pairs = [(set(json.loads(row["label"])), set(filter(None, row["prediction"].split(",")))) for row in table]
    else:
        pairs = []
        for row in table:
            true, said = json.loads(row["ner_tags"]), json.loads(row["prediction"])
            pairs.append(tuple({(n, tag) for n, tag in enumerate(tags) if tag != "O"} for tags in (true, said)))
    both, said, true = (sum(map(len, sets)) for sets in zip(*((t & s, s, t) for t, s in pairs), strict=True))
    return {"f1": 2 * both / (said + true)}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learnt_and_its_predictions_are_those_of_its_figures(model, tmp_path, task):
    options = [f"--task={task}", *files_for(task, tmp_path / "rows"), *FAST, "--num_train_epochs=16"]
    assert command("finetune", model, "--output_dir", tmp_path / "out", *options) == 0
    metrics, table = read_json(tmp_path / "out" / "metrics.json"), predictions(tmp_path / "out")
    metric, least = TASKS[task]
    assert metrics[f"test_{metric}"] >= least and len(table) == 40
    for name, value in figures_of(task, table).items():
        assert metrics[f"test_{name}"] == pytest.approx(value, abs=1e-4), name
    loaded = getattr(transformers, f"AutoModelFor{AUTO[task]}").from_pretrained(tmp_path / "out")
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())
    assert (tmp_path / "out" / "README.md").exists()


TEXTS = {"classification": ["text"], "tags": ["tokens"], "answers": ["question", "context"]}
TEXTS["multiple_choice"] = ["context", "choices"]


@pytest.mark.parametrize("task", TEXTS)
def test_the_share_of_characters_that_the_tokenizer_does_not_know_stands_beside_the_figures(
    model, tmp_path, task, capsys
):
    options, expected = files_for(task, tmp_path / "rows", (24, 8, 8)), {}
    for split in ("validation", "test"):
        path = tmp_path / "rows" / f"{split}.jsonl"
        rows = [json.loads(row) for row in path.read_text().replace("walked", "πηγαιν").splitlines()]
        write(path, rows)
        cells = [row[column] for row in rows for column in TEXTS[task]]
        letters = "".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells).replace(" ", "")
        expected[split] = sum(letter in "πηγαιν?" for letter in letters) / len(letters)
    options += [f"--task={task}", "--max_steps=1", "--max_seq_length=40"]
    assert command("finetune", model, "--output_dir", tmp_path / "out", *options) == 0
    assert read_json(tmp_path / "out" / "metrics.json")["unknown_share"] == pytest.approx(expected)
    assert f"{expected['test']:.1%}" in capsys.readouterr().out


def test_the_folder_of_a_classifier_predicts_as_a_pipeline(model, tmp_path):
    options = ["--task=classification", *files_for("classification", tmp_path / "rows"), *FAST, "--num_train_epochs=2"]
    assert command("finetune", model, "--output_dir", tmp_path / "out", *options) == 0
    table = predictions(tmp_path / "out")
    answers = transformers.pipeline("text-classification", model=str(tmp_path / "out"))([row["text"] for row in table])
    assert [answer["label"] for answer in answers] == [row["prediction"] for row in table]
    assert [answer["score"] for answer in answers] == pytest.approx(
        [float(row["probability"]) for row in table], abs=1e-4
    )


@pytest.mark.parametrize("task", ["classification", "tags"])
def test_a_run_that_broke_off_goes_on_and_ends_with_the_same_figures(model, tmp_path, task):
    """An error at a step of the second seed; with dropout, so that random numbers count."""
    options = [f"--task={task}", *files_for(task, tmp_path / "rows", (64, 16, 16)), "--learning_rate=1e-3"]
    options += ["--max_seq_length=40", "--num_train_epochs=3", "--num_seeds=2"]
    assert command("finetune", model, "--output_dir", tmp_path / "whole", *options) == 0
    steps = []

    def fail(*_):
        steps.append(None)
        if len(steps) == 11:
            raise RuntimeError("the rope broke")

    hook = register_optimizer_step_pre_hook(fail)
    try:
        assert command("finetune", model, "--output_dir", tmp_path / "cut", *options) == 1
    finally:
        hook.remove()
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert (
        command("finetune", model, "--output_dir", tmp_path / "cut", *options, "--resume_from_checkpoint=latest") == 0
    )
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    whole, cut = (read_json(tmp_path / name / "metrics.json") for name in ("whole", "cut"))
    for name in ("mean", "sd", "kept_seed"):
        assert cut[name] == whole[name]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(model, tmp_path):
    options = ["--task=classification", *files_for("classification", tmp_path / "rows", (96, 16, 16)), "--num_seeds=2"]
    words = ["finetune", model, *options, "--learning_rate=1e-3", "--num_train_epochs=4", "--max_seq_length=40"]
    assert command(*words, "--output_dir", tmp_path / "whole") == 0
    folder = tmp_path / "cut"
    (run,) = start([*words, "--output_dir", folder], script="faulty.py", environment={"PROMISES_STEP_SECONDS": "0.2"})
    wait_for(lambda: len(list(folder.rglob("checkpoint-*"))) > 0 and list(folder.rglob("checkpoint-6")), [run])
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert command(*words, "--output_dir", folder, "--resume_from_checkpoint=latest") == 0
    assert weights_of(folder) == weights_of(tmp_path / "whole")


def test_the_best_checkpoint_rate_and_seed_by_validation_are_kept(model, tmp_path):
    """What is kept has the best validation figure of all that were tried."""
    options = ["--task=classification", *files_for("classification", tmp_path / "rows")]
    rates = [*FAST[1:], "--learning_rate", "1e-6", "5e-3", "--num_seeds=2", "--num_train_epochs=6"]
    assert command("finetune", model, "--output_dir", tmp_path / "out", *options, *rates) == 0
    metrics = read_json(tmp_path / "out" / "metrics.json")
    tried = {result["learning_rate"]: result["validation"]["accuracy"] for result in metrics["rates"]}
    assert metrics["learning_rate"] == 5e-3 and tried[5e-3] > tried[1e-6]
    by_seed = {result["seed"]: result["validation"]["accuracy"] for result in metrics["seeds"]}
    assert by_seed[metrics["kept_seed"]] == max(by_seed.values()) == metrics["validation_accuracy"]
    for name in ("accuracy", "loss"):
        values = [result["test"][name] for result in metrics["seeds"]]
        assert metrics["mean"]["test"][name] == pytest.approx(np.mean(values))
        assert metrics["sd"]["test"][name] == pytest.approx(np.std(values, ddof=1))


def test_of_a_training_that_gets_worse_the_best_checkpoint_is_kept(model, tmp_path, capsys):
    """Labels at random: the loss on validation rows rises while the training rows are learnt by heart."""
    rng, options = random.Random(0), ["--task=classification", "--metric_for_best_model=loss"]
    for split, size in (("train", 48), ("validation", 48)):
        rows = [{**row, "label": rng.choice("ab")} for row in rows_of("classification", size, len(split))]
        options.append(f"--{split}_file={write(tmp_path / f'{split}.jsonl', rows)}")
    words = ["finetune", model, *options, *FAST, "--num_train_epochs=12", "--lr_scheduler_type=constant"]
    assert command(*words, "--output_dir", tmp_path / "out") == 0
    said = capsys.readouterr().err
    losses = [float(line.split("validation loss ")[1][:6]) for line in said.splitlines() if "validation loss" in line]
    metrics = read_json(tmp_path / "out" / "metrics.json")
    assert losses[-1] > min(losses) + 0.05
    assert metrics["validation_loss"] == pytest.approx(min(losses), abs=1e-3)


def test_held_out_rows_share_no_text_with_training_rows(model, tmp_path):
    """Without validation rows some are held out; equal texts stay together, and are counted where they are not."""
    rows = [{"text": f"anna met boris {n // 3} times.", "label": str(n // 3 % 2)} for n in range(90)]
    train = write(tmp_path / "train.jsonl", rows)
    test = write(tmp_path / "test.jsonl", rows[:6])
    words = [
        "finetune",
        model,
        "--task=classification",
        f"--train_file={train}",
        f"--test_file={test}",
        "--max_steps=1",
    ]
    assert command(*words, "--output_dir", tmp_path / "out") == 0
    data = read_json(tmp_path / "out" / "run_config.json")["data"]
    assert data["splits"]["train"]["rows"] + data["splits"]["validation"]["rows"] == 90
    assert data["splits"]["validation"]["rows"] % 3 == 0 and data["shared_with_training"]["validation"] == 0
    assert data["shared_with_training"]["test"] in (3, 6)


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
@pytest.mark.parametrize("task", TASKS)
def test_each_task_takes_an_encoder_that_is_not_ours(model, tmp_path, task, kind):
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 70, "pad_token_id": tokenizer.pad_token_id}
    if kind == "roberta":
        sizes |= {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        encoder = RobertaModel(RobertaConfig(**sizes))
    else:
        encoder = DistilBertModel(DistilBertConfig(**sizes, dim=24, n_layers=1, n_heads=2, hidden_dim=24))
    encoder.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    options = [
        f"--task={task}",
        *files_for(task, tmp_path / "rows", (24, 8, 8)),
        "--max_steps=2",
        "--max_seq_length=40",
    ]
    assert command("finetune", tmp_path / "base", "--output_dir", tmp_path / "out", *options) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"AutoModelFor{AUTO[task]}" in card or "pipeline(" in card
    assert "AutoRoberta" not in card and "AutoDistil" not in card
    getattr(transformers, f"AutoModelFor{AUTO[task]}").from_pretrained(tmp_path / "out")


def test_long_contexts_are_read_in_windows(model, tmp_path):
    """The answer stands behind what a row can hold; it is found all the same."""
    rows = rows_of("answers", 200, 0)
    for row in rows:
        filler = "they left the apple and the candle there . " * 4
        row["answers"]["answer_start"] = [row["answers"]["answer_start"][0] + len(filler)]
        row["context"] = filler + row["context"]
    train, test = write(tmp_path / "train.jsonl", rows[:170]), write(tmp_path / "test.jsonl", rows[170:])
    words = [
        "finetune",
        model,
        "--task=answers",
        f"--train_file={train}",
        f"--test_file={test}",
        "--validation_share=0",
    ]
    assert command(*words, *FAST, "--doc_stride=12", "--num_train_epochs=4", "--output_dir", tmp_path / "out") == 0
    table, metrics = predictions(tmp_path / "out"), read_json(tmp_path / "out" / "metrics.json")
    assert metrics["test_exact_match"] == pytest.approx(figures_of("answers", table)["exact_match"])
    assert metrics["test_exact_match"] > 0.4
    for row in table:
        if row["prediction"]:
            begin = int(row["prediction_start"])
            assert row["context"][begin : begin + len(row["prediction"])] == row["prediction"]


def test_a_fresh_start_draws_all_weights_and_a_pretrained_one_only_the_head(model, tmp_path):
    options = ["--task=classification", *files_for("classification", tmp_path / "rows", (24, 8, 8)), "--max_steps=1"]
    options += ["--learning_rate=1e-9", "--max_seq_length=40"]
    before = transformers.AutoModel.from_pretrained(model).state_dict()
    for name, extra in (("kept", []), ("fresh", ["--from_scratch"])):
        assert command("finetune", model, "--output_dir", tmp_path / name, *options, *extra) == 0
    ends = [transformers.AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("kept", "fresh")]
    table = "embeddings.word_embeddings.weight"
    torch.testing.assert_close(ends[0][table], before[table], rtol=0, atol=1e-5)
    assert not torch.allclose(ends[1][table], before[table], atol=1e-2)
    shutil.rmtree(tmp_path / "kept")
