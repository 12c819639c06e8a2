"""`d2l-bert finetune` from end to end: what it learns, what it leaves, seeds, resuming, publishing."""

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import MODEL_FILES
from finetuning import FAST, NAMES, finetune, read_csv, rows_of, write_csv, write_jsonl, write_splits
from huggingface_hub import ModelCard
from local_hub import TOKEN, environment
from publishing import published
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, pipeline

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.cli import main
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.trainer import FinetuneTrainer, MarkComplete


pytestmark = pytest.mark.usefixtures("one_thread")

LEFT = MODEL_FILES | {"predictions.csv", "confusion_matrix.png"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The options with files of two classes: training, validation and test rows."""
    return write_splits(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def tuned(trained, files, tmp_path_factory):
    """A folder of a finished fine-tuning with two seeds."""
    folder = tmp_path_factory.mktemp("tuned") / "heroes"
    finetune(trained, folder, "--task=classification", *files, *FAST, "--num_seeds=2", "--license=mit")
    return folder


def test_a_run_leaves_a_model_for_the_pipeline_with_its_tables(tuned):
    assert {path.name for path in tuned.iterdir()} == LEFT
    rows = read_csv(tuned / "predictions.csv")
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    metrics = json.loads((tuned / "metrics.json").read_text())
    assert len(rows) == 40 and metrics["test_accuracy"] == pytest.approx(right) and right > 0.9
    answers = pipeline("text-classification", model=str(tuned))([row["text"] for row in rows])
    assert [answer["label"] for answer in answers] == [row["prediction"] for row in rows]
    for answer, row in zip(answers, rows, strict=True):
        assert answer["score"] == pytest.approx(float(row["probability"]), abs=1e-4)


def test_the_model_left_is_that_of_the_seed_that_is_best_on_validation_rows(tuned):
    metrics = json.loads((tuned / "metrics.json").read_text())
    seeds = metrics["seeds"]
    assert [result["seed"] for result in seeds] == [42, 43]
    values = [result["validation"]["accuracy"] for result in seeds]
    assert metrics["kept_seed"] == seeds[values.index(max(values))]["seed"]
    for split in ("validation", "test"):
        for name in ("accuracy", "f1", "matthews_correlation", "loss"):
            figures = [result[split][name] for result in seeds]
            assert metrics["mean"][split][name] == pytest.approx(statistics.fmean(figures))
            assert metrics["sd"][split][name] == pytest.approx(statistics.stdev(figures))
    kept = next(result for result in seeds if result["seed"] == metrics["kept_seed"])
    # The loss of the folder's model on the validation rows, by PyTorch.
    model = D2lBertForSequenceClassification.from_pretrained(tuned).eval()
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    rows = list(rows_of(40, 1))
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(**batch).logits, labels)
    assert kept["validation"]["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_the_card_names_the_base_model_the_data_and_the_command(tuned, trained):
    card, record = (tuned / "README.md").read_text(), json.loads((tuned / "run_config.json").read_text())
    metrics = json.loads((tuned / "metrics.json").read_text())
    assert f"fingerprint `{record['base_model']['fingerprint']}`" in card and "base_model" not in card.split("---")[1]
    for split in ("train", "validation", "test"):
        assert record["data"]["splits"][split]["fingerprint"] in card
    assert f"| test accuracy | {100 * metrics['test_accuracy']:.1f} % |" in card
    assert "d2l-bert finetune model --task classification --train_file train.csv" in card
    assert str(trained) not in card and "confusion_matrix.png" in card


def test_publish_takes_a_fine_tuned_folder_and_keeps_it_private(tuned, here, tmp_path, capsys):
    folder = shutil.copytree(tuned, tmp_path / "heroes")
    assert main(["publish", str(folder), "heroes"]) == 0
    files = published(here, "someone/heroes")
    assert set(files) == LEFT - {"predictions.csv"}
    assert here.is_private("someone/heroes")
    assert "AutoModelForSequenceClassification" in capsys.readouterr().out
    record = json.loads(files["run_config.json"])
    assert record["finetune"]["train_file"] == "train.csv" and "local_paths" not in record


def test_push_to_hub_publishes_at_the_end_without_a_pickle(trained, files, here, tmp_path):
    push = ["--push_to_hub", "--hub_model_id=someone/pushed", "--license=mit", "--max_steps=2"]
    finetune(trained, tmp_path / "out", "--task=classification", *files, *push)
    assert set(published(here, "someone/pushed")) == LEFT - {"predictions.csv"}


@pytest.mark.slow  # a process of its own: the libraries ask the Hub whose address they read when they are imported
def test_a_model_of_the_hub_is_recorded_with_its_commit(trained, files, here, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    options = ["--task=classification", *map(str, files), "--max_steps=1", "--license=mit", "--output_dir=out"]
    command = [sys.executable, "-m", "d2l_bert", "finetune", "someone/bert", *options]
    done = subprocess.run(
        command, env=environment(here, tmp_path, TOKEN), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record, (commit, *_) = json.loads((tmp_path / "out" / "run_config.json").read_text()), here.commits("someone/bert")
    assert record["base_model"]["name"] == "someone/bert" and record["base_model"]["revision"] == commit
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("someone/bert", "finetune")
    assert f"someone/bert, revision `{commit}`" in (tmp_path / "out" / "README.md").read_text()


def test_a_card_with_another_figure_is_refused(tuned, tmp_path, fails):
    folder = shutil.copytree(tuned, tmp_path / "heroes")
    card = folder / "README.md"
    value = json.loads((folder / "metrics.json").read_text())["test_accuracy"]
    card.write_text(card.read_text().replace(f"| test accuracy | {100 * value:.1f} % |", "| test accuracy | 12.3 % |"))
    assert "says test accuracy 12.3 %" in fails("publish", folder, "me/x", "--dry_run")


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds and inputs


def test_rows_without_labels_are_predicted(trained, tmp_path):
    train = write_csv(tmp_path / "train.tsv", rows_of(64, 0))
    train.write_text(train.read_text().replace('"', "").replace(", ", "; ").replace(",", "\t"))
    test = write_csv(tmp_path / "test.csv", rows_of(10, 1), ["text"])
    out = tmp_path / "out"
    metrics = finetune(
        trained, out, "--task=classification", f"--train_file={train}", f"--test_file={test}", "--max_steps=2"
    )
    rows = read_csv(out / "predictions.csv")
    assert [row["text"] for row in rows] == [row["text"] for row in rows_of(10, 1)]
    assert {row["prediction"] for row in rows} <= set(NAMES) and "test" not in metrics["mean"]
    assert "confusion_matrix.png" in metrics["pictures"], "of the validation rows, which have labels"


def test_several_labels_at_once_are_learnt(trained, tmp_path):
    def rows(count, seed):
        for row in rows_of(count, seed):
            labels = [row["label"]] + [thing for thing in ("apple", "drum") if thing in row["text"]]
            yield {"text": row["text"], "label": labels}

    train, test = write_jsonl(tmp_path / "a.jsonl", rows(240, 0)), write_jsonl(tmp_path / "b.jsonl", rows(40, 1))
    metrics = finetune(
        trained, tmp_path / "out", "--task=multilabel", f"--train_file={train}", f"--test_file={test}",
        "--validation_share=0", *FAST, "--num_train_epochs=14",
    )  # fmt: skip
    assert metrics["test_f1"] > 0.9
    predicted = [set(row["prediction"].split(",")) for row in read_csv(tmp_path / "out" / "predictions.csv")]
    true = [set(row["label"]) for row in rows(40, 1)]
    hits = sum(len(one & other) for one, other in zip(predicted, true, strict=True))
    f1 = 2 * hits / (sum(map(len, predicted)) + sum(map(len, true)))
    assert metrics["test_f1"] == pytest.approx(f1)
    assert metrics["test_exact_match"] == sum(map(set.__eq__, predicted, true)) / 40
    first = pipeline("text-classification", model=str(tmp_path / "out"), top_k=None)([next(rows(1, 1))["text"]])[0]
    assert {answer["label"] for answer in first if answer["score"] > 0.5} == predicted[0]


def test_numbers_are_learnt_in_their_own_units(trained, tmp_path):
    """The labels are far from 0 and have a large scale, which the model could not reach at this rate by itself."""

    def rows(count, seed):
        for row in rows_of(count, seed, classes=4):
            yield {"text": row["text"], "price": 5000 + 1000 * NAMES.index(row["label"])}

    train, test = write_csv(tmp_path / "a.csv", rows(240, 0)), write_csv(tmp_path / "b.csv", rows(40, 1))
    metrics = finetune(
        trained, tmp_path / "out", "--task=regression", "--label_column=price", f"--train_file={train}",
        f"--test_file={test}", *FAST, "--num_train_epochs=12",
    )  # fmt: skip
    rows_left = read_csv(tmp_path / "out" / "predictions.csv")
    predicted, true = ([float(row[name]) for row in rows_left] for name in ("prediction", "price"))
    assert statistics.correlation(predicted, true) > 0.95
    assert metrics["test_pearson"] == pytest.approx(statistics.correlation(predicted, true), abs=1e-4)
    spearman = statistics.correlation(ranks(predicted), ranks(true))
    assert metrics["test_spearman"] == pytest.approx(spearman, abs=5e-3)  # near-equal numbers change places
    squares = statistics.fmean((one - other) ** 2 for one, other in zip(predicted, true, strict=True))
    assert metrics["test_mse"] == pytest.approx(squares, rel=1e-2)
    answer = pipeline("text-classification", model=str(tmp_path / "out"), function_to_apply="none")(
        rows_left[0]["text"]
    )
    assert answer[0]["score"] == pytest.approx(predicted[0], rel=1e-3)


def ranks(values):
    """The rank of each value; equal values get the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def test_pairs_of_texts_have_segments(trained, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        FinetuneTrainer, "train", lambda self, **options: seen.extend(self.train_dataset) or self.save_model()
    )
    rows = [{"text": "anna sold", "text_pair": f"the drum {n}", "label": n % 2} for n in range(8)]
    path = write_csv(tmp_path / "a.csv", rows)
    finetune(trained, tmp_path / "out", "--task=classification", f"--train_file={path}", "--validation_share=0")
    tokenizer = AutoTokenizer.from_pretrained(trained)
    expected = tokenizer("anna sold", "the drum 0")
    assert seen[0]["input_ids"] == expected["input_ids"]
    assert seen[0]["token_type_ids"] == expected["token_type_ids"] and 1 in seen[0]["token_type_ids"]


def test_stock_bert_is_fine_tuned_and_published(trained, files, tmp_path, here):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "bert")
    save_tokenizer(tokenizer, tmp_path / "bert")
    metrics = finetune(tmp_path / "bert", tmp_path / "out", "--task=classification", *files, *FAST)
    assert metrics["test_accuracy"] > 0.9
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")).__module__.startswith("transf")
    assert pipeline("text-classification", model=str(tmp_path / "out"))("Then Anna sold.")[0]["label"] in NAMES
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())
    assert record["dropout"]["hidden_dropout_prob"] == 0
    assert main(["publish", str(tmp_path / "out"), "someone/stock", "--license=mit"]) == 0
    files = published(here, "someone/stock")
    assert set(files) == LEFT - {"predictions.csv", "configuration_d2l_bert.py", "modeling_d2l_bert.py"}
    assert b"trust_remote_code" not in files["README.md"] and "auto_map" not in json.loads(files["config.json"])


def test_a_saved_dataset_is_read_by_the_columns_of_a_named_task(trained, tmp_path, capsys):
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )

    def split(rows, labels):
        content = {"sentence": [row["text"] for row in rows], "label": labels}
        return datasets.Dataset.from_dict(content, features=features)

    rows = list(rows_of(40, 0))
    labels = [NAMES.index(row["label"]) for row in rows]
    labels[3] = -1
    splits = {
        "train": split(rows, labels),
        "validation": split(list(rows_of(12, 1)), [n % 2 for n in range(12)]),
        "test": split(list(rows_of(8, 2)), [-1] * 8),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    metrics = finetune(trained, tmp_path / "out", "--task=sst2", f"--dataset={tmp_path / 'saved'}", "--max_steps=2")
    shown = capsys.readouterr().err
    assert "1 row is left out: no label" in shown and "test: 8 rows of saved, split test, without labels" in shown
    assert "validation_accuracy" in metrics and "test_accuracy" not in metrics
    assert {row["prediction"] for row in read_csv(tmp_path / "out" / "predictions.csv")} <= {"negative", "positive"}


# ---------------------------------------------------------------------------------------------------------------------
# What is said, chosen and resumed


def test_truncated_and_shared_texts_are_counted_and_said(trained, tmp_path, capsys):
    rows = list(rows_of(40, 0))
    long = {"text": " ".join(["apple"] * 60), "label": "anna"}
    train = write_csv(tmp_path / "train.csv", [*rows, long])
    validation = write_csv(tmp_path / "validation.csv", [*rows_of(6, 1), rows[0]])
    test = write_csv(tmp_path / "test.csv", [*rows_of(10, 2), *rows[:3]])
    metrics = finetune(
        trained, tmp_path / "out", "--task=classification", f"--train_file={train}", f"--test_file={test}",
        f"--validation_file={validation}", "--max_steps=1", "--max_seq_length=48",
    )  # fmt: skip
    shown = capsys.readouterr().err
    assert "train: 41 rows of train.csv; 1 are truncated to 48 tokens" in shown
    assert "3 of the 13 test rows have the same texts as a training row" in shown
    assert "1 of the 7 validation rows have the same texts as a training row" in shown
    assert (
        metrics["shared_with_training"] == {"validation": 1, "test": 3}
        and metrics["lost_to_length"]["train"] == "1 are truncated to 48 tokens"
    )
    assert "**3 of the 13 test rows have the same texts" in (tmp_path / "out" / "README.md").read_text()


def test_the_rate_is_chosen_on_validation_rows(trained, files, tmp_path):
    metrics = finetune(
        trained, tmp_path / "out", "--task=classification", *files, *FAST[1:], "--learning_rate", "1e-7", "3e-3",
        "--num_seeds=2",
    )  # fmt: skip
    assert [result["learning_rate"] for result in metrics["rates"]] == [1e-7, 3e-3]
    assert metrics["learning_rate"] == 3e-3 and [result["seed"] for result in metrics["seeds"]] == [42, 43]
    assert {result["learning_rate"] for result in metrics["seeds"]} == {3e-3}


def test_early_stopping_keeps_the_best_checkpoint(trained, files, tmp_path):
    stop = ["--early_stopping_patience=1", "--early_stopping_threshold=2"]  # no accuracy is better by 2
    metrics = finetune(trained, tmp_path / "out", "--task=classification", *files, *FAST, *stop)
    (result,) = metrics["seeds"]
    assert result["steps"] == 2 * math.ceil(160 / 32) and result["best_step"] in (5, 10)


def test_from_scratch_does_not_read_the_weights(trained, files, tmp_path):
    damaged = shutil.copytree(trained, tmp_path / "model")
    few = ["--task=classification", *files, "--max_steps=1", "--from_scratch"]
    one = finetune(damaged, tmp_path / "one", *few)
    model = D2lBertForSequenceClassification.from_pretrained(trained)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(damaged)
    assert finetune(damaged, tmp_path / "two", *few)["validation_loss"] == one["validation_loss"]
    assert "fresh weights, without pretraining" in (tmp_path / "one" / "README.md").read_text()


class Stopped(BaseException):
    """Ends a run as a kill does: no handler of the run expects it."""


# The options, the step of the second seed at which the run is stopped, and the step from which that seed goes on.
STOPS = {
    "in the middle of an epoch": (["--eval_strategy=steps", "--eval_steps=4"], 8, 8),
    "where early stopping ends it": (["--early_stopping_patience=1", "--early_stopping_threshold=2"], 10, 5),
    "at the last step, in an epoch": (["--eval_strategy=steps", "--eval_steps=4", "--max_steps=8"], 8, 4),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_run_that_was_killed_and_resumed_ends_with_the_same_metrics(case, trained, files, tmp_path, monkeypatch):
    more, step, goes_on_from = STOPS[case]
    options = ["--task=classification", *files, "--num_seeds=2", "--learning_rate=1e-3", *more]
    options += [] if "--max_steps=8" in more else ["--num_train_epochs=3"]
    whole = finetune(trained, tmp_path / "whole", *options)
    saved, mark, train = [], MarkComplete.on_save, FinetuneTrainer.train

    def stop_in_the_second_seed(self, args, state, control, **kwargs):
        mark(self, args, state, control, **kwargs)
        saved.append((args.seed, state.global_step))
        if saved[-1] == (43, step):
            raise Stopped

    monkeypatch.setattr(MarkComplete, "on_save", stop_in_the_second_seed)
    with pytest.raises(Stopped):
        main(["finetune", str(trained), f"--output_dir={tmp_path / 'cut'}", *options])
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    monkeypatch.setattr(MarkComplete, "on_save", mark)
    trained_again = []

    def watched(self, resume_from_checkpoint=None):
        trained_again.append((self.args.seed, resume_from_checkpoint))
        return train(self, resume_from_checkpoint=resume_from_checkpoint)

    monkeypatch.setattr(FinetuneTrainer, "train", watched)
    (tmp_path / "cut").rename(tmp_path / "moved")
    resumed = finetune(trained, tmp_path / "moved", *options, "--resume_from_checkpoint=latest")
    last = tmp_path / "moved" / "models_in_training" / "rate-0.001-seed-43" / f"checkpoint-{goes_on_from}"
    assert trained_again == [(43, str(last))]
    assert without_seconds(resumed) == without_seconds(whole)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "moved")]
    assert weights[0] == weights[1]


def without_seconds(entry):
    if isinstance(entry, list):
        return [without_seconds(each) for each in entry]
    if isinstance(entry, dict):
        return {name: without_seconds(value) for name, value in entry.items() if "seconds" not in name}
    return entry


def test_the_order_of_kept_rows_is_that_of_the_file(tuned):
    counts = Counter(row["text"] for row in read_csv(tuned / "predictions.csv"))
    assert list(counts) == [row["text"] for row in rows_of(40, 2)]
