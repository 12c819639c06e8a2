"""Metrics of entities and answers, against cases worked out by hand."""

import pytest

from d2l_bert.training.finetuning.metrics import (
    answer_metrics,
    answer_scores,
    entities,
    entity_counts,
    normalised_answer,
    tag_metrics,
)


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
    counts = entity_counts(gold, said)
    assert {name: dict(counter) for name, counter in counts.items()} == {
        "right": {"PER": 1, "LOC": 1},
        "predicted": {"PER": 3, "LOC": 1},
        "gold": {"PER": 2, "LOC": 2},
    }


def test_a_lone_inside_tag_counts_for_conll_and_not_for_iob2():
    found = tag_metrics([["B-PER", "O", "B-PER"]], [["I-PER", "O", "B-PER"]], has_entities=True)
    assert (found["precision"], found["recall"], found["f1"]) == (1, 1, 1)
    assert found["strict_f1"] == pytest.approx(2 * 1 / (1 + 2))


def test_without_predicted_or_true_entities_the_figures_are_zero():
    nothing = tag_metrics([["O"]], [["O"]], has_entities=True)
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


def test_answer_metrics_are_means_over_questions():
    assert answer_metrics(["tower", ""], [["the Eiffel tower"], []]) == {
        "exact_match": 0.5,
        "f1": pytest.approx((2 / 3 + 1) / 2),
    }
