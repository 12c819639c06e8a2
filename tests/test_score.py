"""`d2l-bert evaluate --test_file`: a fine-tuned model on labelled rows; the last lines of `finetune`."""

import csv
import io
import json
import random
import re
import shlex
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from finetuning import ROWS, file_options, finetune, read_csv, saved
from sklearn import metrics
from test_recorded_folders import RECORD, predictions
from text_sources import write_table

import d2l_bert
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.training.finetuning import intervals, scoring
from d2l_bert.training.finetuning.config import FinetuneConfig, ScoreConfig
from d2l_bert.training.finetuning.folder import advice_on_length
from d2l_bert.training.finetuning.score import confusion_table, lines_of_confusion, score


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """For each task a fine-tuned model with recorded options, and weights that follow from their names."""
    recorded = json.loads(RECORD.read_text())["finetune"]
    made = {}

    def model_of(task):
        if task not in made:
            folder = tmp_path_factory.mktemp("recorded")
            predictions(task, folder, recorded[task]["files"])
            made[task] = folder / "model"
        return made[task]

    return model_of


def scored(model, rows, folder, **options):
    """The score on some rows, and the predictions of `predict` for them."""
    folder.mkdir()
    file = write_table(folder / "check.jsonl", rows)
    found = score(str(model), file, ScoreConfig(output_dir=folder / "score", **options))
    assert main(["predict", str(model), str(file), f"--output={folder / 'new.jsonl'}"]) == 0
    return found, [json.loads(line) for line in (folder / "new.jsonl").read_text().splitlines()]


def values_of(found):
    return {name: estimate.value for name, estimate in found.figures.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Figures, against scikit-learn, scipy, and values of seqeval and of SQuAD's script


def test_classes_are_scored_as_by_scikit_learn(models, tmp_path):
    rows = ROWS["text-classification"](25, 7)
    found, predicted = scored(models("text-classification"), rows, tmp_path / "x")
    sides = ([row["label"] for row in rows], [row["prediction"] for row in predicted])
    accuracy = metrics.accuracy_score(*sides)
    f1 = metrics.f1_score(*sides, pos_label="boris")
    assert values_of(found) == pytest.approx(
        {
            "accuracy": accuracy,
            "f1": f1,
            "accuracy_f1_mean": (accuracy + f1) / 2,
            "matthews_correlation": metrics.matthews_corrcoef(*sides),
        }
    )
    assert found.class_of_f1 == "boris"
    counts = metrics.confusion_matrix(*sides, labels=["anna", "boris"]).tolist()
    assert [row[1:] for row in found.confusion[1:]] == counts
    assert found.wrong == sum(true != said for true, said in zip(*sides, strict=True))

    # The rows that are wrong, and no others, the surest first.
    wrong = read_csv(tmp_path / "x" / "score" / "wrong.csv")
    expected = [row for row in predicted if row["prediction"] != row["label"]]
    assert sorted(row["text"] for row in wrong) == sorted(row["text"] for row in expected)
    sureness = [float(row["confidence in the mistake"]) for row in wrong]
    assert sureness == sorted(sureness, reverse=True) == [float(row["probability"]) for row in wrong]
    written = json.loads((tmp_path / "x" / "score" / "figures.json").read_text())
    assert written["figures"]["accuracy"]["value"] == found.figures["accuracy"].value

    # What the most frequent class of these rows scores alone.
    usual = max(sides[0], key=sides[0].count)
    share = sides[0].count(usual) / len(rows)
    assert found.baseline["figures"]["accuracy"] == pytest.approx(share)
    assert found.baseline["figures"]["f1"] == metrics.f1_score(sides[0], [usual] * len(rows), pos_label="boris")
    assert found.baseline["is_beaten"] == (accuracy > share)
    assert written["baseline"] == found.baseline and found.baseline["prediction"] in found.report
    assert f"accuracy={accuracy:.4g}" in repr(found) and "confusion" not in repr(found)
    assert (tmp_path / "x" / "score" / "confusion_matrix.png").stat().st_size > 1_000


def test_several_labels_are_scored_as_by_scikit_learn(models, tmp_path):
    rows = ROWS["multi_label_classification"](25, 7)
    found, predicted = scored(models("multi_label_classification"), rows, tmp_path / "x")
    true = np.array([[int(name in row["label"]) for name in "ab"] for row in rows])
    said = np.array([[int(name in row["prediction"]) for name in "ab"] for row in predicted])
    expected = {
        "f1": metrics.f1_score(true, said, average="micro"),
        "macro_f1": metrics.f1_score(true, said, average="macro", zero_division=0),
        "exact_match": metrics.accuracy_score(true, said),
    }
    assert values_of(found) == pytest.approx(expected)
    for (_, *counts), (_, missed_or_not) in zip(
        found.confusion[1:], enumerate(metrics.multilabel_confusion_matrix(true, said)), strict=True
    ):
        (_, wrong), (missed, right) = missed_or_not.tolist()
        assert counts == [right, missed, wrong]


def test_numbers_are_scored_as_by_scipy_and_the_largest_error_comes_first(models, tmp_path):
    rows = ROWS["regression"](25, 7)
    found, predicted = scored(models("regression"), rows, tmp_path / "x")
    sides = ([row["label"] for row in rows], [row["prediction"] for row in predicted])
    pearson = scipy.stats.pearsonr(*sides).statistic
    spearman = scipy.stats.spearmanr(*sides).statistic
    expected = {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman_mean": (pearson + spearman) / 2,
        "mse": metrics.mean_squared_error(*sides),
        "mae": metrics.mean_absolute_error(*sides),
    }
    assert values_of(found) == pytest.approx(expected, rel=1e-5)
    errors = [float(row["error"]) for row in read_csv(tmp_path / "x" / "score" / "wrong.csv")]
    assert len(errors) == 25 and errors == sorted(errors, reverse=True)
    assert np.mean(errors) == pytest.approx(expected["mae"], rel=1e-5)


def test_tags_are_scored_as_by_predictions_counted_by_hand(models, tmp_path):
    rows = ROWS["token-classification"](25, 7)
    found, predicted = scored(models("token-classification"), rows, tmp_path / "x")
    pairs = []
    for row, said in zip(rows, predicted, strict=True):
        pairs += zip(row["ner_tags"], said["prediction"], strict=True)
    assert values_of(found)["accuracy"] == pytest.approx(np.mean([true == said for true, said in pairs]))
    assert found.wrong == sum(row["ner_tags"] != said["prediction"] for row, said in zip(rows, predicted, strict=True))
    sureness = [float(row["confidence in the mistake"]) for row in read_csv(tmp_path / "x" / "score" / "wrong.csv")]
    assert sureness == sorted(sureness, reverse=True) and 0 < sureness[-1] <= 1


def test_entities_are_counted_as_seqeval_counts_them():
    """What seqeval 1.2.2 gives for these tags, in its default mode, and with mode="strict" and the scheme IOB2."""
    generator = np.random.default_rng(3)
    tags = np.array(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    gold = [tags[generator.integers(5, size=9)].tolist() for _ in range(60)]
    said = [np.where(generator.random(9) < 0.8, row, tags[generator.integers(5, size=9)]).tolist() for row in gold]
    expected = {
        "accuracy": 0.8444444444444444,
        "precision": 0.7780898876404494,
        "recall": 0.8195266272189349,
        "f1": 0.7982708933717578,
        "strict_f1": 0.7822222222222223,
    }
    tallies = intervals.tag_tallies(gold, said, True)
    assert intervals.tag_figures(np.ones(60), tallies) == pytest.approx(expected)


def words_of(answer):
    return re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", answer.lower())).split()


def test_answers_are_scored_by_exact_match_and_the_f1_of_words(models, tmp_path):
    rows = ROWS["question-answering"](25, 7)
    found, predicted = scored(models("question-answering"), rows, tmp_path / "x")
    exact = []
    f1 = []
    for row in predicted:
        said = words_of(row["prediction"] or "")
        (gold,) = [words_of(text) for text in row["answers"]["text"]] or [[]]
        left = list(gold)
        both = sum(1 for word in said if word in left and not left.remove(word))
        exact.append(said == gold)
        f1.append(2 * both / (len(said) + len(gold)) if said and gold else float(said == gold))
    assert values_of(found) == pytest.approx({"f1": np.mean(f1), "exact_match": np.mean(exact)})
    assert found.wrong == len(rows) - sum(exact)


def test_answers_are_scored_as_by_squads_script():
    """What the evaluation script of SQuAD 2 gives for these answers."""
    rng = random.Random(5)
    words = ["the", "red", "red", "Wine,", "tower", "of", "a", "York."]
    scores = []
    for _ in range(80):
        gold = [" ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        said = " ".join(rng.choices(words, k=rng.randint(0, 3)))
        scores.append(scoring.answer_scores(said, gold))
    assert 100 * np.mean(scores, axis=0) == pytest.approx([18.75, 31.000000000000007])


def test_choices_are_scored_by_the_share_of_right_ones(models, tmp_path):
    rows = ROWS["multiple-choice"](25, 7)
    found, predicted = scored(models("multiple-choice"), rows, tmp_path / "x")
    is_right = [row["label"] == row["prediction"] for row in predicted]
    assert values_of(found) == {"accuracy": pytest.approx(np.mean(is_right))}
    expected = scipy.stats.binomtest(sum(is_right), 25).proportion_ci(0.95, method="wilson")
    accuracy = found.figures["accuracy"]
    assert (accuracy.low, accuracy.high) == pytest.approx((expected.low, expected.high))


# ---------------------------------------------------------------------------------------------------------------------
# The confusion of classes


def test_of_many_classes_the_most_frequent_mistakes_are_shown():
    names = [f"class {number}" for number in range(12)]
    true = [*names, *["class 3"] * 5, *["class 4"] * 2]
    said = [*names, *["class 7"] * 5, *["class 1"] * 2]
    lines = lines_of_confusion(confusion_table(scoring.Sides(true, said, names)))
    assert [line.split() for line in lines[1:]] == [
        ["class", "3", "class", "7", "5"],
        ["class", "4", "class", "1", "2"],
    ]


def test_the_confusion_of_entities_has_what_was_missed_and_what_is_none():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    said = [["B-PER", "I-PER", "B-LOC", "B-PER"], ["O", "O"]]
    table = confusion_table(scoring.types_at_spans(gold, said))
    assert table[0][1:] == ["LOC", "PER", "no entity"]
    assert [row[1:] for row in table[1:]] == [[0, 1, 1], [0, 1, 0], [1, 0, 0]]


# ---------------------------------------------------------------------------------------------------------------------
# Rows that show little, and what is refused


def test_one_row_and_one_class_are_said(models, tmp_path):
    rows = [row for row in ROWS["text-classification"](25, 7) if row["label"] == "anna"]
    model = str(models("text-classification"))
    for count, word in ((1, "one row"), (len(rows), "'anna'")):
        file = write_table(tmp_path / "check.jsonl", rows[:count])
        found = score(model, file, ScoreConfig())
        said = found.report
        assert len(found.notes) == 1 and word in found.notes[0] and word in said
        assert found.figures["accuracy"].low < found.figures["accuracy"].high
        assert found.folder is None


@pytest.mark.parametrize(
    "task, change, options, words",
    [
        ("text-classification", {"label": "clara"}, [], ["line 2", "'clara'", "'anna', 'boris'"]),
        ("text-classification", {"label": ""}, [], ["line 2", "'label'", "empty"]),
        ("text-classification", {"text": " "}, [], ["line 2", "'text'"]),
        ("multi_label_classification", {"label": ["c"]}, [], ["line 2", "'c'"]),
        ("regression", {"label": "much"}, [], ["line 2", "'much'"]),
        ("token-classification", {"ner_tags": ["O"]}, [], ["line 2", "1 tag"]),
        ("multiple-choice", {"label": 3}, [], ["line 2", "'3'"]),
        ("text-classification", {}, ["--label_column=hero"], ["no column 'hero'", "--label_column"]),
        ("text-classification", {}, ["--label_column", "label", "text"], ["label_column"]),
        ("text-classification", {}, ["--label_separator=;"], ["label_separator"]),
        ("text-classification", {}, ["--text_pair_column=b"], ["text_pair_column"]),
        ("text-classification", {}, ["--corpus=books"], ["corpus"]),
        ("text-classification", {}, ["--output=x.json"], ["output"]),
        ("text-classification", {}, ["--excel"], ["excel", "output_dir"]),
    ],
)
def test_rows_and_options_that_cannot_be_used_are_refused_in_a_line(
    models, tmp_path, fails, task, change, options, words
):
    rows = ROWS[task](4, 7)
    rows[1] |= change
    file = write_table(tmp_path / "check.jsonl", rows)
    line = fails("evaluate", models(task), f"--test_file={file}", *options)
    assert all(word in line for word in words), line


def test_a_table_without_labels_and_an_output_that_stands_there_are_refused(models, tmp_path, fails):
    model = models("text-classification")
    rows = ROWS["text-classification"](4, 7)
    empty = write_table(tmp_path / "empty.jsonl", [{**row, "label": ""} for row in rows])
    assert "need labels" in fails("evaluate", model, f"--test_file={empty}")
    bare = write_table(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in rows])
    assert "no column 'label'" in fails("evaluate", model, f"--test_file={bare}")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    file = write_table(tmp_path / "check.jsonl", rows)
    assert "taken" in fails("evaluate", model, f"--test_file={file}", f"--output_dir={tmp_path / 'taken'}")
    assert "one model" in fails("evaluate", model, model, f"--test_file={file}")
    assert "--test_file" in fails("evaluate", model, f"--corpus={file}", "--label_column=label")
    with pytest.raises(UserError, match="test_file"):
        d2l_bert.score(model)


def test_a_program_scores_rows_in_memory_as_a_file_of_them(models, tmp_path):
    model = models("text-classification")
    rows = ROWS["text-classification"](12, 7)
    file = write_table(tmp_path / "check.jsonl", rows)
    of_file = d2l_bert.score(model, file)
    of_memory = d2l_bert.score(model, pd.DataFrame(rows))
    assert of_memory.figures == of_file.figures
    assert of_memory.confusion == of_file.confusion
    for label in (None, "nobody"):
        with pytest.raises(UserError, match="row 13"):
            d2l_bert.score(model, [*rows, {**rows[0], "label": label}])


def test_csv_for_excel_holds_no_formula(models, tmp_path):
    rows = ROWS["text-classification"](25, 7)
    for row in rows:
        row["text"] = f"=1+1 {row['text']}"
    found, _ = scored(models("text-classification"), rows, tmp_path / "x", excel=True)
    with (found.folder / "wrong.csv").open(encoding="utf-8-sig", newline="") as file:
        wrong = list(csv.DictReader(file, delimiter=";"))
    assert len(wrong) == found.wrong > 0
    assert all(row["text"].startswith("'=1+1") for row in wrong)


# ---------------------------------------------------------------------------------------------------------------------
# Without scikit-learn; the end of `finetune`


def test_predict_needs_no_scikit_learn_and_what_measures_says_so(models, tmp_path, monkeypatch, fails):
    for library in ("sklearn", "sklearn.metrics", "scipy", "scipy.stats", "scipy.special"):
        monkeypatch.setitem(sys.modules, library, None)
    for task in ROWS:
        file = write_table(tmp_path / f"{task}.jsonl", ROWS[task](3, 7))
        assert main(["predict", str(models(task)), str(file), f"--output={tmp_path / task}-new.jsonl"]) == 0
    assert "d2l-bert[finetune]" in fails("evaluate", models(task), f"--test_file={file}")
    options = [f"--task={task}", f"--train_file={file}", f"--output_dir={tmp_path / 'out'}"]
    assert "d2l-bert[finetune]" in fails("finetune", models(task), *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_finetune_ends_with_standard_errors_and_a_command_that_works(trained, tmp_path, monkeypatch, capsys, task):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with space").mkdir()
    (tmp_path / "predicted.csv").touch()
    files = file_options(tmp_path / "with space", train=ROWS[task](40, 0), test=ROWS[task](30, 1))
    options = [f"--task={task}", "--max_steps=4", "--validation_share=0"]
    written = finetune(trained, tmp_path / "tuned", *options, *files)
    said = capsys.readouterr().out
    assert main(["evaluate", "tuned", f"--test_file={tmp_path / 'with space' / 'test.jsonl'}", "--output_dir=s"]) == 0
    figures = json.loads((tmp_path / "s" / "figures.json").read_text())["figures"]
    assert list(written["standard_errors"]) == ["test"]
    for name, error in written["standard_errors"]["test"].items():
        assert figures[name]["standard_error"] == (error if error is None else pytest.approx(error, rel=1e-4))
        assert figures[name]["value"] == pytest.approx(written[f"test_{name}"])
    assert (
        "standard error" in said and "Standard errors over the test rows" in (tmp_path / "tuned/README.md").read_text()
    )
    words = shlex.split(re.search(r"^next: d2l-bert (.*)$", said, re.MULTILINE)[1])
    assert main(words) == 0
    assert len(read_csv(tmp_path / words[-1])) == 30


@pytest.mark.slow
def test_of_a_data_set_without_test_rows_the_command_predicts_a_row_that_it_brings(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = ROWS["multiple-choice"](20, 0)
    options = ["--task=multiple-choice", "--max_steps=2", f"--dataset={saved(tmp_path / 'set', train=rows)}"]
    finetune(trained, tmp_path / "it's tuned", *options)
    command = re.search(r"^next: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    echo, row, pipe, _, *words = shlex.split(command)
    assert (echo, pipe) == ("echo", "|")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(row.encode())))
    assert main(words) == 0
    (predicted,) = read_csv(tmp_path / words[-1])
    assert json.loads(predicted["choices"]) == json.loads(row)["choices"]


@pytest.mark.parametrize(
    "options, steps, is_told",
    [
        ({}, 199, True),
        ({}, 200, False),
        ({"num_train_epochs": 4.0}, 120, True),
        ({"num_train_epochs": 20.0}, 120, False),
        ({"max_steps": 120}, 120, False),
    ],
)
def test_a_run_of_few_steps_is_told_so_unless_it_was_asked_for_them(options, steps, is_told):
    assert bool(advice_on_length(FinetuneConfig(**options), steps)) == is_told
