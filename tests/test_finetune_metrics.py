"""Metrics of fine-tuned models, against cases worked out by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from d2l_bert.training.finetuning.metrics import (
    answer_scores,
    class_metrics,
    entities,
    multilabel_metrics,
    normalised_answer,
    number_metrics,
    report_by_class,
    tag_metrics,
    types_at_spans,
)
from d2l_bert.training.finetuning.output import results_text


def test_class_metrics_are_those_of_their_definitions():
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
    true, said = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    found = class_metrics(true, said, 2)
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    assert found["matthews_correlation"] == pytest.approx((3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6))
    assert found["accuracy_f1_mean"] == pytest.approx((0.7 + 6 / 9) / 2)
    assert class_metrics([0, 1], [0, 0], 2)["matthews_correlation"] == 0
    # Three classes: the mean of F1 = 1, 2/3 and 0.
    macro = class_metrics([0, 0, 1, 2], [0, 0, 1, 1], 3)["f1"]
    assert macro == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_multilabel_metrics_are_those_of_their_definitions():
    true, said = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]]), np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]])
    found = multilabel_metrics(true, said)
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_number_metrics_are_those_of_their_definitions():
    true, said = np.array([1.0, 2.0, 3.0, 10.0]), np.array([2.0, 1.0, 4.0, 5.0])  # their means are 4 and 3
    found = number_metrics(true, said)
    covariance, spread = ((true - 4) * (said - 3)).sum(), math.sqrt(((true - 4) ** 2).sum() * ((said - 3) ** 2).sum())
    assert found["pearson"] == pytest.approx(covariance / spread)
    assert found["spearman"] == pytest.approx(1 - 6 * (1 + 1) / (4 * 15))  # the ranks are 1 2 3 4 and 2 1 3 4
    assert found["mse"] == pytest.approx((1 + 1 + 1 + 25) / 4) and found["mae"] == pytest.approx(8 / 4)
    assert number_metrics(true, [1.0] * 4)["pearson"] == 0


@pytest.mark.parametrize(
    "tags, lenient, strict",
    [
        ("O O", [], []),
        ("B-PER I-PER O", [("PER", 0, 2)], [("PER", 0, 2)]),
        ("O B-PER", [("PER", 1, 2)], [("PER", 1, 2)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)], [("PER", 0, 1), ("PER", 1, 2)]),
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)], [("PER", 0, 1)]),
        ("B-PER I-LOC I-PER", [("PER", 0, 1), ("LOC", 1, 2), ("PER", 2, 3)], [("PER", 0, 1)]),
        ("O I-PER I-PER O", [("PER", 1, 3)], []),
        ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)], [("PER", 1, 3)]),
        ("B-A-B I-A-B", [("A-B", 0, 2)], [("A-B", 0, 2)]),
        ("B I O B", [("", 0, 2), ("", 3, 4)], [("", 0, 2), ("", 3, 4)]),
        ("B-X I-X E-X S-X O", [("X", 0, 3), ("X", 3, 4)], [("X", 0, 3), ("X", 3, 4)]),  # BIOES
        ("U-X B-X L-X L-X", [("X", 0, 1), ("X", 1, 3), ("X", 3, 4)], [("X", 0, 1), ("X", 1, 3)]),  # BILOU
        ("E-X I-X S-Y I-Y", [("X", 0, 1), ("X", 1, 2), ("Y", 2, 3), ("Y", 3, 4)], [("Y", 2, 3)]),
    ],
)
def test_entities_are_those_that_the_tags_mark(tags, lenient, strict):
    assert entities(tags.split()) == lenient
    assert entities(tags.split(), strict=True) == strict


def test_precision_recall_and_f1_count_whole_entities():
    gold = ["B-PER I-PER O B-LOC", "O B-PER O", "B-LOC I-LOC"]
    said = ["B-PER I-PER O B-PER", "O B-PER I-PER", "B-LOC I-LOC"]
    gold, said = ([row.split() for row in rows] for rows in (gold, said))
    # Four true entities, four predicted. Right: PER of the first text, LOC of the third.
    found = tag_metrics(gold, said, has_entities=True)
    assert found["precision"] == found["recall"] == found["f1"] == found["strict_f1"] == pytest.approx(2 / 4)
    assert found["accuracy"] == pytest.approx(7 / 9)
    true, predicted, types = types_at_spans(gold, said)
    report = report_by_class(true, predicted, types)
    assert {name: tuple(report[name].values()) for name in ("PER", "LOC")} == {
        "PER": (pytest.approx(1 / 3), 1 / 2, pytest.approx(2 * 1 / (3 + 2)), 2),
        "LOC": (1, 1 / 2, pytest.approx(2 * 1 / (1 + 2)), 2),
    }


def test_a_lone_inside_tag_counts_for_conll_and_not_for_iob2():
    found = tag_metrics([["B-PER", "O", "B-PER"]], [["I-PER", "O", "B-PER"]], has_entities=True)
    assert (found["precision"], found["recall"], found["f1"]) == (1, 1, 1)
    assert found["strict_f1"] == pytest.approx(2 * 1 / (1 + 2))


def test_without_predicted_or_true_entities_the_figures_are_zero():
    nothing = tag_metrics([["O"]], [["O"]], has_entities=True)
    assert types_at_spans([["O"]], [["O"]]) == (["O"], ["O"], ["entity"])
    assert nothing == {"accuracy": 1, "precision": 0, "recall": 0, "f1": 0, "strict_f1": 0}
    assert tag_metrics([["DET", "NOUN"]], [["DET", "DET"]], has_entities=False) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    "text, normalised",
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a an the", ""),
        ("Theatre of An Ant", "theatre of ant"),
        ("the U.S.A.", "usa"),
        ("state-of-the-art", "stateoftheart"),  # punctuation goes first, so the article is within a word
        ("The-end", "theend"),
        (" 1,000\tmiles ", "1000 miles"),
        ("“the end”", "“ end”"),  # only ASCII punctuation is removed
    ],
)
def test_answers_are_compared_without_articles_punctuation_and_case(text, normalised):
    assert normalised_answer(text) == normalised


@pytest.mark.parametrize(
    "prediction, gold, exact, f1",
    [
        ("Eiffel Tower", ["the Eiffel tower."], 1, 1),
        ("tower", ["the Eiffel tower"], 0, 2 / 3),
        ("tower tower", ["Eiffel tower"], 0, 1 / 2),  # one word in common: a repeated word counts once
        ("red red wine", ["red red"], 0, 4 / 5),
        ("Rome", ["Paris", "in Rome"], 0, 2 / 3),  # the best of the true answers counts
        ("Rome", ["Paris"], 0, 0),
        ("", [], 1, 1),
        ("Rome", [], 0, 0),
        ("", ["Rome"], 0, 0),
        ("the", [], 1, 1),  # nothing is left of it
        ("x", ["the"], 0, 0),
        ("", ["the"], 1, 1),
        ("Rome", ["the", "Rome"], 1, 1),
    ],
)
def test_exact_match_and_f1_are_those_of_squad(prediction, gold, exact, f1):
    assert answer_scores(prediction, gold) == (exact, pytest.approx(f1))


def test_large_figures_stand_apart_in_the_table():
    rows = SimpleNamespace(rows=[{}], name="rows.csv")
    run = SimpleNamespace(measured=lambda: ["test"], splits={"test": rows}, folder=Path("out"))
    figures = {"pearson": 0.5, "mse": 1234567890.25, "mae": 456.1174}
    metrics = {
        "metrics_shown": list(figures),
        "seeds": [{"seed": 42, "test": figures}],
        "unknown_share": {"test": 0.0},
        "f1_of": None,
        "kept_seed": 42,
        "learning_rate": 1e-3,
        "train_seconds": 1.0,
    }
    line = next(line for line in results_text(run, metrics).splitlines() if "seed 42  " in line)
    assert [float(cell) for cell in line.split()[2:]] == pytest.approx(list(figures.values()))
