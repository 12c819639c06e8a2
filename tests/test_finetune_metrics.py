"""Metrics of fine-tuned models, against cases worked out by hand."""

import math

import numpy as np
import pytest

from d2l_bert.model_cards.figures import results_table
from d2l_bert.training.finetuning import intervals
from d2l_bert.training.finetuning.scoring import (
    answer_scores,
    entities,
    normalised_answer,
    number_metrics,
    report_by_class,
    types_at_spans,
)


def metrics_of_classes(classes):
    """The metrics of true and predicted numbers of classes."""
    return lambda true, said: intervals.class_figures(np.ones(len(true)), np.array(true), np.array(said), classes)


def metrics_of_labels(true, said):
    """The metrics of tables with a 1 for each label that a row has, or gets."""
    places = [np.array(np.nonzero(table)) for table in (true, said, true & said)]
    return intervals.multilabel_figures(np.ones(len(true)), *places, labels=true.shape[1])


@pytest.mark.parametrize(
    "metrics, true, said, expected",
    [
        (  # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
            metrics_of_classes(2),
            [1, 1, 1, 0, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
            {
                "accuracy": 0.7,
                "f1": 2 * 3 / (2 * 3 + 1 + 2),
                "matthews_correlation": (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6),
                "accuracy_f1_mean": (0.7 + 6 / 9) / 2,
            },
        ),
        (metrics_of_classes(2), [0, 1], [0, 0], {"matthews_correlation": 0}),
        # Three classes: the mean of F1 = 1, 2/3 and 0.
        (metrics_of_classes(3), [0, 0, 1, 2], [0, 0, 1, 1], {"f1": (1 + 2 / 3 + 0) / 3}),
        (
            metrics_of_labels,
            np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]]),
            np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]]),
            {"f1": 2 * 2 / (3 + 3), "macro_f1": (2 / 3 + 1 + 0) / 3},
        ),
        (  # their means are 4 and 3; their ranks 1 2 3 4 and 2 1 3 4
            number_metrics,
            [1.0, 2.0, 3.0, 10.0],
            [2.0, 1.0, 4.0, 5.0],
            {
                "pearson": (-3 * -1 + -2 * -2 + -1 * 1 + 6 * 2) / math.sqrt((9 + 4 + 1 + 36) * (1 + 4 + 1 + 4)),
                "spearman": 1 - 6 * (1 + 1) / (4 * 15),
                "mse": (1 + 1 + 1 + 25) / 4,
                "mae": 8 / 4,
            },
        ),
        (number_metrics, [1.0, 2.0], [1.0, 1.0], {"pearson": 0}),
    ],
)
def test_metrics_are_those_of_their_definitions(metrics, true, said, expected):
    found = metrics(true, said)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


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


@pytest.mark.parametrize(
    "gold, said, expected",
    [
        (  # Four true entities, four predicted. Right: PER of the first text, LOC of the third.
            ["B-PER I-PER O B-LOC", "O B-PER O", "B-LOC I-LOC"],
            ["B-PER I-PER O B-PER", "O B-PER I-PER", "B-LOC I-LOC"],
            {"accuracy": 7 / 9, "precision": 2 / 4, "recall": 2 / 4, "f1": 2 / 4, "strict_f1": 2 / 4},
        ),
        (  # A lone inside tag counts for CoNLL, and not for IOB2.
            ["B-PER O B-PER"],
            ["I-PER O B-PER"],
            {"accuracy": 2 / 3, "precision": 1, "recall": 1, "f1": 1, "strict_f1": 2 * 1 / (1 + 2)},
        ),
        (["O"], ["O"], {"accuracy": 1, "precision": 0, "recall": 0, "f1": 0, "strict_f1": 0}),
        (["DET NOUN"], ["DET DET"], {"accuracy": 0.5}),
    ],
)
def test_precision_recall_and_f1_count_whole_entities(gold, said, expected):
    gold_tags = list(map(str.split, gold))
    said_tags = list(map(str.split, said))
    tallies = intervals.tag_tallies(gold_tags, said_tags, has_entities=len(expected) > 1)
    assert intervals.tag_figures(np.ones(len(gold)), tallies) == pytest.approx(expected)


def test_the_report_has_each_type_of_entities():
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-PER", "O"], ["B-LOC", "I-LOC"]]
    said = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-PER", "I-PER"], ["B-LOC", "I-LOC"]]
    report = report_by_class(*types_at_spans(gold, said))
    f1_of_persons = pytest.approx(2 * 1 / (3 + 2))
    f1_of_places = pytest.approx(2 * 1 / (1 + 2))
    assert list(report["PER"].values()) == [pytest.approx(1 / 3), 1 / 2, f1_of_persons, 2]
    assert list(report["LOC"].values()) == [1, 1 / 2, f1_of_places, 2]
    assert types_at_spans([["O"]], [["O"]]) == (["O"], ["O"], ["entity"])


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
    found = {"pearson": 0.5, "mse": 1234567890.25, "mae": 456.1174}
    metrics = {
        "metrics_shown": list(found),
        "seeds": [{"seed": 42, "test": found}],
        "mean": {"test": found},
        "unknown_share": {"test": 0.0},
        "f1_of": None,
        "kept_seed": 42,
    }
    said = results_table(metrics, {"test": {"name": "rows.csv", "rows": 1}})
    line = next(line for line in said.splitlines() if "seed 42  " in line)
    assert [float(cell) for cell in line.split()[2:]] == pytest.approx(list(found.values()))
