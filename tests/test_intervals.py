"""Standard errors and 95 % intervals of a fine-tuned model's figures: against simulations and scikit-learn."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics

from d2l_bert.training.finetuning import intervals


DRAWS = 1_000


def repeated(array, counts):
    """The rows of an array, each as often as it is drawn."""
    return np.repeat(array, counts, axis=0)


@pytest.fixture
def drawn():
    """Forty rows, and how often each is drawn."""
    generator = np.random.default_rng(1)
    return generator, generator.multinomial(40, np.full(40, 1 / 40))


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_figures_of_drawn_rows_are_scikit_learns_of_the_same_rows_repeated(drawn, classes):
    generator, counts = drawn
    true = generator.integers(classes, size=40)
    predicted = np.where(generator.random(40) < 0.6, true, generator.integers(classes, size=40))
    found = intervals.class_figures(counts, true, predicted, classes)
    sides = (repeated(true, counts), repeated(predicted, counts))
    average = "binary" if classes == 2 else "macro"
    f1 = metrics.f1_score(*sides, average=average)
    accuracy = metrics.accuracy_score(*sides)
    expected = {
        "accuracy": accuracy,
        "f1": f1,
        "accuracy_f1_mean": (accuracy + f1) / 2,
        "matthews_correlation": metrics.matthews_corrcoef(*sides),
    }
    assert found == pytest.approx(expected)


def test_figures_of_several_labels_are_scikit_learns(drawn):
    generator, counts = drawn
    true = generator.integers(2, size=(40, 4))
    predicted = np.where(generator.random((40, 4)) < 0.7, true, 1 - true)
    places = [np.array(np.nonzero(table)) for table in (true, predicted, true & predicted)]
    sides = (repeated(true, counts), repeated(predicted, counts))
    expected = {average: metrics.f1_score(*sides, average=average) for average in ("micro", "macro")}
    found = intervals.multilabel_figures(counts, *places, labels=4)
    assert found == pytest.approx({"f1": expected["micro"], "macro_f1": expected["macro"]})


def test_figures_of_numbers_are_scipys_with_equal_numbers_among_them(drawn):
    generator, counts = drawn
    true = generator.integers(6, size=40).astype(float)
    predicted = np.round(true + generator.normal(size=40), 1)
    places = [np.unique(side, return_inverse=True)[1] for side in (true, predicted)]
    found = intervals.number_figures(counts, true, predicted, *places)
    sides = (repeated(true, counts), repeated(predicted, counts))
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(*sides).statistic)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(*sides).statistic)
    assert found["mse"] == pytest.approx(metrics.mean_squared_error(*sides))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(*sides))


def test_figures_of_tags_are_those_of_the_same_texts_repeated(drawn):
    generator, counts = drawn
    tags = np.array(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    gold = [tags[generator.integers(5, size=7)].tolist() for _ in range(40)]
    said = [np.where(generator.random(7) < 0.8, row, "O").tolist() for row in gold]
    of_counts = functools.partial(intervals.tag_figures, tallies=intervals.tag_tallies(gold, said, True))
    texts = np.repeat(np.arange(40), counts)
    repeated_texts = intervals.tag_tallies([gold[text] for text in texts], [said[text] for text in texts], True)
    assert of_counts(counts) == pytest.approx(intervals.tag_figures(np.ones(40), repeated_texts))


# ---------------------------------------------------------------------------------------------------------------------
# Coverage: how often the interval of a sample holds the value of what the sample is drawn from


@pytest.mark.parametrize("rows, share", [(100, 0.97), (100, 0.9), (500, 0.662), (30, 0.5)])
def test_wilsons_interval_holds_the_true_share_in_95_of_100_samples(rows, share):
    generator = np.random.default_rng(0)
    held = 0
    for right in generator.binomial(rows, share, size=DRAWS):
        found = intervals.of_share(right / rows, rows)
        held += found.low <= share <= found.high
    assert 0.93 <= held / DRAWS <= 0.98


def test_wilsons_interval_is_that_of_its_formula():
    """(p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n), with z = 1.96."""
    found = intervals.of_share(331 / 500, 500)
    p = 331 / 500
    z = 1.959964
    half = z * math.sqrt(p * (1 - p) / 500 + z**2 / (4 * 500**2))
    middle = p + z**2 / (2 * 500)
    scale = 1 + z**2 / 500
    assert (found.low, found.high) == pytest.approx(((middle - half) / scale, (middle + half) / scale))
    assert found.standard_error == pytest.approx(0.0212, abs=5e-5)
    assert intervals.of_share(1.0, 100).standard_error is None
    assert intervals.of_share(1.0, 100).low == pytest.approx(0.963, abs=5e-4)


def classes_of(generator, rows, share):
    """Rows of two classes, of which a share is predicted rightly."""
    true = generator.integers(2, size=rows)
    predicted = np.where(generator.random(rows) < share, true, 1 - true)
    return functools.partial(intervals.class_figures, true=true, predicted=predicted, classes=2)


def numbers_of(generator, rows, correlation):
    """Numbers that correlate."""
    true = generator.normal(size=rows)
    predicted = correlation * true + np.sqrt(1 - correlation**2) * generator.normal(size=rows)
    places = [np.unique(side, return_inverse=True)[1] for side in (true, predicted)]
    return functools.partial(
        intervals.number_figures,
        true=true,
        predicted=predicted,
        place_of_true=places[0],
        place_of_predicted=places[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "population, rows, parameter, true",
    [
        (classes_of, 100, 0.97, {"f1": 0.97, "matthews_correlation": 0.94}),
        (classes_of, 500, 0.662, {"f1": 0.662, "matthews_correlation": 0.324}),
        (numbers_of, 100, 0.6, {"pearson": 0.6, "spearman": 6 / np.pi * np.arcsin(0.3)}),
    ],
)
def test_the_bootstraps_interval_holds_the_true_figure_in_95_of_100_samples(
    population, rows, parameter, true, monkeypatch
):
    """Samples without a mistake have no interval: what cannot be drawn does not vary."""
    monkeypatch.setattr(intervals, "DRAWS", 500)  # half, for the time
    generator = np.random.default_rng(0)
    held = dict.fromkeys(true, 0)
    given = dict.fromkeys(true, 0)
    for _ in range(DRAWS):
        figures_of = population(generator, rows, parameter)
        values = figures_of(np.ones(rows, dtype=int))
        for name, found in intervals.bootstrap({name: values[name] for name in true}, rows, figures_of).items():
            if found.low is not None:
                given[name] += 1
                held[name] += found.low <= true[name] <= found.high
    for name in true:
        assert given[name] > 0.9 * DRAWS
        print(f"{name} of {rows} rows: {held[name]} of {given[name]} intervals hold {true[name]:.3f}")
        assert 0.93 <= held[name] / given[name] and held[name] / DRAWS <= 0.98


def test_the_standard_error_of_a_bootstrap_is_that_of_a_mean():
    values = np.random.default_rng(0).exponential(size=400)
    figures_of = functools.partial(intervals.mean_figures, scores={"mean": values})
    found = intervals.bootstrap({"mean": values.mean()}, 400, figures_of)["mean"]
    assert found.standard_error == pytest.approx(values.std() / 20, rel=0.1)
    assert found.low < values.mean() < found.high
    assert intervals.bootstrap({"mean": values.mean()}, 400, figures_of)["mean"] == found


def test_rows_that_are_all_alike_have_a_figure_and_no_interval():
    for rows in (1, 50):
        figures_of = functools.partial(intervals.mean_figures, scores={"f1": np.ones(rows)})
        found = intervals.bootstrap({"f1": 1.0}, rows, figures_of)["f1"]
        assert (found.standard_error, found.low, found.high) == (None, None, None)
