"""What `d2l-bert finetune` makes of right rows: columns, labels, classes, comments, held-out rows."""

import itertools
import json
from collections import Counter

import datasets
import numpy as np
import pytest
from finetuning import load, saved, write_csv
from small_tasks import answer_rows, tag_rows, write_rows

from d2l_bert.training.finetuning.output import write_table


def read(split):
    return [(row.texts, row.label) for row in split.rows]


def labels_of(split):
    return [label for _, label in read(split)]


ANSWERED = answer_rows(3, 0)


def labelled(*labels):
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@pytest.mark.parametrize(
    "labels, classes",
    [
        ([10, 2, 1], ["1", "2", "10"]),
        (["no", "yes", "maybe"], ["maybe", "no", "yes"]),
        ([True, False], ["False", "True"]),
        ([0, "1", 1, "0"], ["0", "1"]),  # numbers and strings
    ],
)
def test_classes_are_in_the_order_of_their_numbers_or_names(labels, classes, tmp_path):
    for name in ("rows.jsonl", "rows.json"):
        path = write_rows(tmp_path / name, labelled(*labels, *labels))
        if name == "rows.json":
            path.write_text(json.dumps(labelled(*labels, *labels)))
        task, splits = load(path, "text-classification")
        assert task.classes == classes
        assert labels_of(splits["train"]) == [str(label) for label in labels * 2]


def chosen(label, names, place):
    """Rows in which the choice of a place and the first one are right, and their texts and labels."""
    labels = (label, "0" if isinstance(label, str) else 0)
    rows = [{"context": "a", "choices": list(names), "label": one} for one in labels]
    return "multiple-choice", write_rows, rows, [(("a", *names), place), (("a", *names), 0)]


@pytest.mark.parametrize(
    "task, write, rows, expected",
    [
        # Spellings that look alike are one class.
        (
            "text-classification",
            write_rows,
            labelled("gr\u00fcn", "gru\u0308n", "blau"),
            [(("text 0",), "gr\u00fcn"), (("text 1",), "gr\u00fcn"), (("text 2",), "blau")],
        ),
        # The right choice by its number or its letter; pandas writes 1.0.
        *(chosen("2", "231", 2), chosen("A", "bAc", 0), chosen("C", "bcd", 2), chosen("1.0", "ab", 1)),
        chosen(2, "201", 2),
        # COPA's columns are found, and numbered columns in the order of their numbers.
        (
            "multiple-choice",
            write_csv,
            [{"premise": "p", "choice1": f"c{n}", "choice2": "d", "question": "cause", "label": n} for n in (0, 1)],
            [(("p", "cause", f"c{n}", "d"), n) for n in (0, 1)],
        ),
        (
            "multiple-choice",
            write_csv,
            [{"sent1": "a", **{f"ending{n}": n for n in (10, *range(10))}, "label": 10 * n} for n in (0, 1)],
            [(("a", *map(str, range(11))), 10 * n) for n in (0, 1)],
        ),
        # SQuAD's impossible questions have no answer.
        (
            "question-answering",
            write_rows,
            [{**row, "is_impossible": n == 1} for n, row in enumerate(ANSWERED)],
            [
                (
                    (row["question"], row["context"]),
                    [(row["answers"]["text"][0], row["answers"]["answer_start"][0])][n == 1 :],
                )
                for n, row in enumerate(ANSWERED)
            ],
        ),
    ],
)
def test_texts_and_labels_of_rows(task, write, rows, expected, tmp_path):
    task, splits = load(write(tmp_path / f"rows.{'csv' if write == write_csv else 'jsonl'}", rows), task)
    assert read(splits["train"]) == expected and task.has_unanswerable == ([] in labels_of(splits["train"]))


def test_minus_one_is_a_class_unless_it_says_that_there_is_no_label(tmp_path):
    options = {"dataset": saved(tmp_path / "a", train=labelled(-1, 0, 1, 1), test=labelled(-1, -1))}
    task, splits = load(None, "text-classification", **options)
    assert task.classes == ["-1", "0", "1"] and labels_of(splits["train"]) == ["-1", "0", "1", "1"]
    assert not splits["test"].is_labelled
    options = {"dataset": saved(tmp_path / "b", train=labelled(-1, 0, 1, 1))}
    task, splits = load(None, "sst2", **options, text_column="text")
    assert task.classes == ["negative", "positive"] and len(splits["train"].rows) == 3
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    options = {"dataset": saved(tmp_path / "c", kinds, train=labelled(-1, 0, 1, 1))}
    _, splits = load(None, "text-classification", **options)
    assert labels_of(splits["train"]) == ["no", "yes", "yes"]


def test_words_that_pandas_reads_as_empty_are_classes_in_a_folder_of_csv(tmp_path):
    write_csv(tmp_path / "train.csv", labelled("None", "NA", "null", "yes", "None"))
    task, splits = load(None, "text-classification", dataset=str(tmp_path))
    assert sorted(task.classes) == ["NA", "None", "null", "yes"] and len(splits["train"].rows) == 5


def test_each_of_several_label_columns_is_a_label_also_without_a_one(tmp_path):
    rows = [{"text": f"t{n}", "toxic": n % 2, "insult": n % 3 % 2, "threat": 0} for n in range(6)]
    task, splits = load(
        write_csv(tmp_path / "rows.csv", rows), "multilabel", label_column=["toxic", "insult", "threat"]
    )
    assert task.settings["id2label"] == {0: "toxic", 1: "insult", 2: "threat"}
    assert task.targets(splits["train"])[1].tolist() == [1, 1, 0]


def test_labels_with_the_separator_are_read_back_from_the_table_of_predictions(tmp_path):
    rows = [{"text": "one", "label": ["a, b", "c"]}, {"text": "two", "label": ["c"]}]
    task, splits = load(write_rows(tmp_path / "rows.jsonl", rows), "multilabel")
    outputs = 2 * task.targets(splits["train"]) - 1
    predicted = {"label": task.predictions(splits["train"], outputs)["prediction"]}
    splits["train"].columns.remove("label")
    write_table(tmp_path / "predictions.csv", splits["train"], predicted)
    _, again = load(tmp_path / "predictions.csv", "multilabel")
    assert labels_of(again["train"]) == [row["label"] for row in rows]


def test_lists_as_json_in_cells_of_csv_are_those_of_json_lines(tmp_path):
    rows = tag_rows(6, 0)
    _, splits = load(write_rows(tmp_path / "rows.jsonl", rows), "token-classification")
    write_table(tmp_path / "rows.csv", splits["train"], {})
    _, again = load(tmp_path / "rows.csv", "token-classification")
    assert read(again["train"]) == read(splits["train"]) == [(tuple(r["tokens"]), r["ner_tags"]) for r in rows]


def test_labels_of_choices_from_one_on_are_read_and_predicted_as_such(tmp_path):
    """As WinoGrande has them."""
    rows = [{"sentence": f"{n} _", "option1": "a", "option2": f"b{n}", "answer": str(n % 2 + 1)} for n in range(4)]
    options = {"context_column": "sentence", "label_column": ["answer"]}
    task, splits = load(write_csv(tmp_path / "rows.csv", rows), "multiple-choice", **options)
    assert labels_of(splits["train"]) == [0, 1, 0, 1]
    predicted = task.predictions(splits["train"], np.eye(2)[[0, 1, 1, 0]])
    assert predicted["prediction"] == [1, 2, 2, 1] and predicted["predicted_choice"] == ["a", "b1", "b2", "a"]


def test_numbers_far_from_zero_keep_their_digits(tmp_path):
    numbers = np.random.default_rng(0).normal(1e6, 5, 40)
    task, splits = load(write_rows(tmp_path / "rows.jsonl", labelled(*numbers)), "regression")
    outputs = task.targets(splits["train"])[:, None].astype(np.float32)  # as a perfect model gives them
    found = task.metrics(splits["train"], task.rescaled(outputs))
    assert found["pearson"] == pytest.approx(1, abs=1e-9) and found["mae"] < 1e-5
    predicted = task.predictions(splits["train"], task.rescaled(outputs))["prediction"]
    assert predicted == pytest.approx(numbers, abs=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def test_a_split_that_chooses_is_not_the_test_split_too(tmp_path):
    folder = saved(tmp_path / "data", train=labelled(*"abab"), test=labelled(*"ab"))
    _, splits = load(None, "text-classification", dataset=folder, validation_split="test", validation_share=None)
    assert list(splits) == ["train", "validation"]


def test_held_out_rows_are_drawn_by_the_seed(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", labelled(*range(100)))
    one, again, other = (
        load(path, "regression", validation_share=0.2, seed=seed)[1]["validation"].rows for seed in (42, 42, 7)
    )
    assert one == again != other and len(one) == 20


@pytest.mark.parametrize("task", ["text-classification", "multilabel", "token-classification"])
def test_rows_are_held_out_by_class_and_no_class_loses_all_of_its_rows(task, tmp_path):
    counts = {"common": 100, "rare": 3, "one": 1, "another": 1}
    rows = labelled(*itertools.chain(*([name] * count for name, count in counts.items())))
    if task == "multilabel":
        rows = [{**row, "label": ["common", row["label"]][row["label"] == "common" :]} for row in rows]
    if task == "token-classification":
        rows = [{"tokens": row["text"].split(), "tags": ["common", row["label"]]} for row in rows]
    for seed in range(5):
        options = {"validation_share": 0.1, "seed": seed}
        _, splits = load(write_rows(tmp_path / "rows.jsonl", rows), task, **options)
        labels = labels_of(splits["validation"])
        held_out = Counter(label if isinstance(label, str) else label[-1] for label in labels)
        assert held_out == {"common": 10, "rare": 1}


def test_a_small_share_of_many_classes_is_held_out_as_it_was_asked_for(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", labelled(*(str(number % 100) for number in range(300))))
    _, splits = load(path, "text-classification", validation_share=0.1)
    assert len(splits["validation"].rows) == 30
    assert max(Counter(labels_of(splits["validation"])).values()) == 1


# ---------------------------------------------------------------------------------------------------------------------
# CoNLL's files

COMMENTS = """# sent_id = 1\tO
#\ttext = Ada left
Ada _ B-PER
left _ O
# _ O

# id 7f3a-0001
# _ domain=en
Bo _ B-PER
# _ B-PER
"""


def test_comments_in_a_conll_file_are_left_out_and_counted(tmp_path, shown, capsys):
    (tmp_path / "rows.conll").write_text(COMMENTS)
    task, splits = load(tmp_path / "rows.conll", "token-classification")
    assert read(splits["train"]) == [
        (("Ada", "left", "#"), ["B-PER", "O", "O"]),
        (("Bo", "#"), ["B-PER", "B-PER"]),
    ]
    assert [row.place for row in splits["train"].rows] == ["line 3", "line 9"]
    said = capsys.readouterr().err
    assert "4 lines" in said and "BIO" in said


@pytest.mark.parametrize(
    "tags, scheme",
    [
        ("B-X I-X O", "BIO"),
        ("I-X O", "BIO"),
        ("S-X B-X E-X O", "BIOES"),
        ("B I E S", "BIOES"),
        ("U-X B-X I-X L-X O", "BILOU"),
        ("U L", None),
        ("B-X NOUN", None),
        ("NOUN VERB", None),
    ],
)
def test_the_scheme_of_tags_is_found_and_said(tags, scheme, tmp_path, shown, capsys):
    rows = [{"tokens": tags.split(), "tags": tags.split()}]
    task, _ = load(write_rows(tmp_path / "rows.jsonl", rows), "token-classification")
    assert task.scheme == scheme and (task.main_metric == "f1") == (scheme is not None)
    assert (scheme or "accuracy over words") in capsys.readouterr().err
