"""`d2l-bert finetune` from end to end: its card, other models and data, errors at the end, several rates."""

import json
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MODEL_FILES
from finetuning import FAST, answer_rows, file_options, finetune, read_csv, rows_of, saved, tag_rows, write_splits
from huggingface_hub import ModelCard
from local_hub import TOKEN, environment
from matplotlib.figure import Figure
from promises.driving import PEOPLE
from publishing import published
from text_sources import write_table
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, Trainer, pipeline

from d2l_bert.__main__ import main
from d2l_bert.model_cards import card, pictures
from d2l_bert.model_cards.figures import shown_metric
from d2l_bert.records import read_record
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning import scoring


LEFT = MODEL_FILES | {"predictions.csv", "confusion_matrix.png"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The options with files of two classes: training, validation and test rows."""
    return write_splits(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def tuned(trained, files, tmp_path_factory):
    """A folder of a finished fine-tuning with two seeds."""
    folder = tmp_path_factory.mktemp("tuned") / "heroes"
    finetune(trained, folder, "--task=text-classification", *files, *FAST, "--num_seeds=2", "--license=mit")
    return folder


def test_the_card_names_the_base_model_the_data_and_the_command(tuned, trained):
    card = (tuned / "README.md").read_text()
    record = read_record(tuned / "run_config.json")
    assert "base_model" not in card.split("---")[1]
    assert str(trained) not in card
    assert "confusion_matrix.png" in card
    for made_of in (record["base_model"], *record["data"]["splits"].values()):
        assert f"fingerprint `{made_of['fingerprint']}`" in card
    assert f"| test accuracy | {100 * read_record(tuned / 'metrics.json')['test_accuracy']:.1f} % |" in card
    assert "d2l-bert finetune model --task text-classification --train_file train.csv" in card


@pytest.mark.slow  # a process of its own: the libraries ask the Hub whose address they read when they are imported
def test_a_model_of_the_hub_is_recorded_with_its_commit(trained, files, here, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    options = ["--task=classification", *map(str, files), "--max_steps=1", "--license=mit", "--output_dir=out"]
    command = [sys.executable, "-m", "d2l_bert", "finetune", "someone/bert", *options]
    done = subprocess.run(
        command, env=environment(here, tmp_path, TOKEN), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    commit = here.commits("someone/bert")[0]
    base = read_record(tmp_path / "out" / "run_config.json")["base_model"]
    assert base["name"] == "someone/bert" and base["revision"] == commit
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/bert", "finetune")
    assert f"someone/bert), revision `{commit}`" in card.text


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds and inputs


@pytest.mark.slow
def test_stock_bert_is_fine_tuned_and_published(trained, files, tmp_path, here):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "bert")
    save_tokenizer(tokenizer, tmp_path / "bert")
    options = ["--task=classification", *files, *FAST, "--num_train_epochs=12"]
    assert finetune(tmp_path / "bert", tmp_path / "out", *options)["test_accuracy"] > 0.9
    assert pipeline("text-classification", model=str(tmp_path / "out"))("Then Anna sold.")[0]["label"] in PEOPLE
    assert read_record(tmp_path / "out" / "run_config.json")["dropout"]["hidden_dropout_prob"] == 0
    assert main(["publish", str(tmp_path / "out"), "someone/stock", "--license=mit"]) == 0
    files = published(here, "someone/stock")
    assert set(files) == LEFT - {"predictions.csv", "configuration_d2l_bert.py", "modeling_d2l_bert.py"}
    assert b"trust_remote_code" not in files["README.md"] and "auto_map" not in json.loads(files["config.json"])


@pytest.mark.slow
def test_a_saved_dataset_is_read_by_the_columns_of_a_named_task(trained, tmp_path, capsys):
    def split(labels):
        rows = zip(rows_of(len(labels), 0), labels, strict=True)
        return [{"sentence": row["text"], "label": label} for row, label in rows]

    train = split([0, 1] * 19 + [0]) + split([-1])
    data = saved(tmp_path / "saved", train=train, validation=split([0, 1] * 6), test=split([-1] * 8))
    metrics = finetune(trained, tmp_path / "out", "--task=sst2", f"--dataset={data}", "--max_steps=2")
    shown = capsys.readouterr().err
    assert "1 row is left out: row 40: column 'label' is empty" in shown
    assert "test: 8 rows of saved, split test, without labels" in shown
    assert "validation_accuracy" in metrics and "test_accuracy" not in metrics
    predictions = {row["prediction"] for row in read_csv(tmp_path / "out" / "predictions.csv")}
    assert predictions <= {"negative", "positive"}


@pytest.mark.slow
def test_a_model_trained_in_bf16_is_measured_in_float32(trained, files, tmp_path):
    metrics = finetune(trained, tmp_path / "out", "--task=classification", *files, "--max_steps=2", "--bf16")
    table = read_csv(tmp_path / "out" / "predictions.csv")
    is_right = [row["prediction"] == row["label"] for row in table]
    assert metrics["test_accuracy"] == np.mean(is_right)
    answers = pipeline("text-classification", model=str(tmp_path / "out"))([row["text"] for row in table])
    scores = [float(row["probability"]) for row in table]
    assert [answer["score"] for answer in answers] == pytest.approx(scores, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["{}/rows:default", "../secret-project/rows/"])
def test_no_folder_above_a_data_set_is_in_any_file_of_a_run(trained, tmp_path, monkeypatch, place):
    secret = tmp_path / "secret-project"
    out = tmp_path / "out"
    (secret / "rows").mkdir(parents=True)
    for split, count in (("train", 12), ("test", 6)):
        write_table(secret / "rows" / f"{split}.csv", rows_of(count, 0))
    monkeypatch.chdir(secret)
    options = ["--task=classification", f"--dataset={place.format(secret)}", "--max_steps=1", "--license=mit"]
    finetune(trained, out, *options)
    record = read_record(out / "run_config.json")
    shown = place.rstrip("/").rpartition("/")[2]
    assert record["finetune"]["dataset"] == shown and record["data"]["hub_datasets"] == []
    assert record["data"]["splits"]["test"]["name"] == f"{shown}, split test"
    assert "secret-project" not in "".join(path.read_text() for path in out.glob("*.[jm][sd]*"))
    assert main(["publish", str(out), "someone/bert", "--dry_run"]) == 0


@pytest.mark.slow
def test_an_edited_card_keeps_its_words_when_seeds_are_added(trained, files, tmp_path, capsys):
    command = ["--task=classification", *files, "--max_steps=2", "--license=mit"]
    finetune(trained, tmp_path, *command)
    path = tmp_path / "README.md"
    again = ["--resume_from_checkpoint=latest"]
    path.write_text(path.read_text().replace("Bias: not measured.", "Bias: see below.") + "\nMy own words.\n")
    capsys.readouterr()
    metrics = finetune(trained, tmp_path, *command, "--num_seeds=2", *again)
    text = path.read_text()
    said = capsys.readouterr().err
    assert "My own words." in text and "Bias: see below." in text and "Bias: not measured." not in text
    assert "was edited" in said and "edited lines" not in said
    assert "rows, by seed" in text and f"| mean | {100 * metrics['mean']['test']['accuracy']:.1f} % |" in text
    assert "--num_seeds 2" in text and main(["publish", str(tmp_path), "someone/bert", "--dry_run"]) == 0
    # A figure that was edited is not touched, and that is said.
    path.write_text(text.replace("| mean |", "| my mean |"))
    finetune(trained, tmp_path, *command, "--num_seeds=3", *again)
    assert "| my mean |" in path.read_text() and "edited lines" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The end: a model that no later error can lose


@pytest.mark.slow
def test_an_error_in_the_card_or_a_picture_cannot_lose_the_model(trained, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyError("type")

    options = write_splits(tmp_path)
    for name, module in (("render_card", card), ("plot_finetuning", pictures)):
        monkeypatch.setattr(module, name, fail)
        command = [
            "finetune",
            str(trained),
            f"--output_dir={tmp_path / name}",
            "--task=classification",
            "--max_steps=2",
        ]
        assert main([*command, *options]) == 1
        monkeypatch.undo()
        monkeypatch.setattr(Trainer, "train", fail)  # the model is there, and is not trained again
        assert main([*command, *options, "--resume_from_checkpoint=latest"]) == 0
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        assert (tmp_path / name / "predictions.csv").exists()
        monkeypatch.undo()


@pytest.mark.slow
def test_a_full_disk_ends_a_fine_tuning_in_one_line_that_says_how_to_go_on(trained, tmp_path, fails):
    options = ["--task=classification", *write_splits(tmp_path), "--max_steps=4"]
    command = ["finetune", str(trained), f"--output_dir={tmp_path / 'out'}", *options, "--eval_steps=2"]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest in (20_000, 80_000):  # for the weights, and for the optimizer
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
        try:
            said = fails(*command, "--resume_from_checkpoint=latest")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert "cannot be written" in said and "--resume_from_checkpoint latest" in said
    assert main([*command, "--resume_from_checkpoint=latest"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Several rates and seeds


@pytest.fixture
def diverging(monkeypatch):
    """A function: the trainings with these rates or seeds diverge."""
    train = Trainer.train

    def set_up(*values):
        def diverge(self, resume_from_checkpoint):
            train(self)
            if {self.args.learning_rate, self.args.seed} & set(values):
                for parameter in self.model.parameters():
                    parameter.data.fill_(np.nan)

        monkeypatch.setattr(Trainer, "train", diverge)

    return set_up


@pytest.mark.slow
def test_rates_and_seeds_that_diverge_are_left_out(trained, tmp_path, diverging, fails, capsys):
    diverging(1e-2, 43)
    options = ["--task=classification", *write_splits(tmp_path), "--max_steps=2", "--num_seeds=3"]
    metrics = finetune(trained, tmp_path / "out", *options, "--learning_rate", "1e-2", "1e-3")
    assert metrics["diverged_rates"] == [1e-2]
    assert [tried["learning_rate"] for tried in metrics["rates"]] == [1e-3]
    assert metrics["diverged_seeds"] == [43]
    assert [result["seed"] for result in metrics["seeds"]] == [42, 44]
    said = capsys.readouterr().err
    assert "rate-0.01-seed-42: the training diverged" in said and "rate-0.001-seed-43: the training diverged" in said
    diverging(42, 43, 44)
    line = fails("finetune", trained, f"--output_dir={tmp_path / 'none'}", *options, "--learning_rate=1e-3")
    assert "the training diverged" in line and "give a lower learning_rate than 0.001" in line


# ---------------------------------------------------------------------------------------------------------------------
# The report by class


@pytest.mark.slow
def test_the_class_that_f1_is_of_is_named_and_the_report_has_each_class(tuned, trained, files, capsys):
    metrics = read_record(tuned / "metrics.json")
    card = (tuned / "README.md").read_text()
    assert metrics["f1_of"] == "boris" and metrics["best_metric"] == "accuracy"
    rows = read_csv(tuned / "predictions.csv")
    report = metrics["classification_report"]["test"]
    for name in ("anna", "boris"):
        right = sum(row["label"] == row["prediction"] == name for row in rows)
        labelled = sum(row["label"] == name for row in rows)
        predicted = sum(row["prediction"] == name for row in rows)
        assert report[name]["f1-score"] == pytest.approx(2 * right / (labelled + predicted))
    assert report["boris"]["f1-score"] == pytest.approx(metrics["test_f1"])
    assert "| `anna` | " in card and "macro avg" not in card
    finetune(trained, tuned.parent / "short", "--task=classification", *files, "--max_steps=1")
    assert "f1 is that of the class 'boris'" in capsys.readouterr().out


def test_of_equal_checkpoints_that_of_the_lower_loss_is_kept(tuned):
    is_later = []
    for path in (tuned / "attempts").glob("*/result.json"):
        rows = [row for row in read_record(path)["log"] if "eval_loss" in row]
        best = max(rows, key=lambda row: (row["eval_accuracy"], -row["eval_loss"]))
        assert read_record(path)["best_step"] == best["step"]
        equally_right = [row["step"] for row in rows if row["eval_accuracy"] == best["eval_accuracy"]]
        is_later.append(best["step"] > min(equally_right))
    assert any(is_later)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "multi_label_classification"])
def test_what_a_prediction_without_the_text_reaches_stands_beside_the_figures(task, trained, tmp_path, capsys):
    if task == "regression":
        train = [1, 2, 6]
        validation = [2, 5]
        test = [3, 4, 8]
        # Always 3.
        expected = {"mse": (0 + 1 + 25) / 3, "mae": (0 + 1 + 5) / 3}
    else:
        train = [["a", "b"], ["a"], ["c"]]
        validation = [["a"], ["b"]]
        test = [["a", "b"], ["b"], ["a"]]
        # Always a.
        macro_f1 = (4 / 5 + 0 + 0) / 3
        expected = {"f1": 2 * 2 / (3 + 4), "macro_f1": macro_f1, "exact_match": 1 / 3}

    def labelled(labels):
        return [{"text": str(number), "label": label} for number, label in enumerate(labels)]

    files = {"train": labelled(train), "validation": labelled(validation), "test": labelled(test)}
    options = file_options(tmp_path, **files)
    known = finetune(trained, tmp_path / "out", f"--task={task}", *options, "--max_steps=1")["know_nothing"]["test"]
    assert known["figures"] == pytest.approx(expected)
    metric = list(expected)[0]
    assert f"{known['prediction']}: {metric} " in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'"By frequency alone" is {known["prediction"]}.' in card
    guessed = shown_metric(metric, expected[metric])
    assert re.search(rf"^\| test {metric} \| .* \| {re.escape(guessed)} \|$", card, re.MULTILINE)


@pytest.mark.slow
def test_conllu_is_read_and_the_usual_tag_of_each_word_stands_beside_the_figures(trained, tmp_path, capsys):
    """Of "left", VERB twice and NOUN once; "zoo", which is new, is the most frequent tag: DET."""
    texts = {
        "train": ["a DET left VERB", "the DET left NOUN", "the DET left VERB"],
        "validation": ["a DET left VERB"],
        "test": ["left VERB the DET zoo NOUN"],
    }
    options = []
    for split, of_split in texts.items():
        lines = []
        for text in of_split:
            words = text.split()
            pairs = enumerate(zip(words[::2], words[1::2], strict=True), 1)
            rows = [f"{number}\t{word}\tlemma\t{tag}" for number, (word, tag) in pairs]
            of_two = ["1-2\tboth\t_\t_", *rows, "2.1\tnone\t_\tX"]
            lines += ["# text = of two words", *(row + "\t_" * 6 for row in of_two), ""]
        (tmp_path / f"{split}.conllu").write_text("\n".join(lines))
        options.append(f"--{split}_file={tmp_path / split}.conllu")
    out = tmp_path / "out"
    metrics = finetune(trained, out, "--task=token-classification", *options, "--max_steps=1")
    assert read_record(out / "run_config.json")["learnt"]["classes"] == ["DET", "NOUN", "VERB"]
    known = metrics["know_nothing"]
    assert known["test"]["figures"] == pytest.approx({"accuracy": 2 / 3})
    assert known["validation"]["figures"] == {"accuracy": 1.0}
    assert f"{known['test']['prediction']}: accuracy 66.7 %; the model does no better" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("task, rows", [("tags", tag_rows), ("answers", answer_rows)])
def test_losses_are_means_over_labels_however_rows_are_batched(task, rows, trained, tmp_path):
    options = [f"--task={task}", *FAST[2:], "--max_seq_length=40", "--learning_rate=1e-3", "--num_train_epochs=2"]
    options += file_options(tmp_path, train=rows(21, 0), validation=rows(21, 1))
    logs = []
    for size, batches in ((8, 1), (2, 4)):
        way = [f"--per_device_train_batch_size={size}", f"--per_device_eval_batch_size={size}"]
        way += [f"--gradient_accumulation_steps={batches}"]
        out = tmp_path / str(batches)
        finetune(trained, out, *options, *way)
        (result,) = out.glob("attempts/*/result.json")
        logs.append(read_record(result)["log"])
    for one, other in zip(*logs, strict=True):
        for key in one.keys() & {"loss", "eval_loss"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4)


@pytest.mark.parametrize(
    "classes, labels",
    [(["$5_$10", "accuracy"], ["$5_$10", "accuracy"]), (["不良", "a"], ["0", "1"]), (list(map(str, range(31))), None)],
)
@pytest.mark.filterwarnings("error")
def test_any_name_of_a_class_can_be_drawn_and_many_classes_are_not(classes, labels, tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig

    def noted(figure, *rest, **more):
        figures.append(figure)
        savefig(figure, *rest, **more)

    monkeypatch.setattr(Figure, "savefig", noted)
    report = scoring.report_by_class(classes[:2], [classes[1]] * 2, classes)
    of_classes = [name for name, row in report.items() if isinstance(row, dict) and "avg" not in name]
    assert len(of_classes) == len(classes)
    path = tmp_path / "confusion_matrix.png"
    shown = pictures.plot_confusion(classes[:2], [classes[1]] * 2, classes, "rows of $1 or $2", path)
    if labels is None:
        assert shown == "" and not figures
    else:
        assert [label.get_text() for label in figures[0].axes[0].get_xticklabels()] == labels
        assert ("numbers" in shown) == (labels != classes)
