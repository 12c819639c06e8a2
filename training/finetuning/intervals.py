"""How far chance may have moved a figure: standard errors, Wilson's interval, and a bootstrap over texts.

A bootstrap draws as many rows as there are, with replacement, and computes the figures of what it drew (Efron and
Tibshirani, 1993). The functions below whose first argument is `counts` are these figures: `counts` (N,) says how often
each row was drawn. For rows drawn once each they are the metrics.

The order of the draws is fixed by `SEED`, so that the same predictions give the same intervals.
"""

import dataclasses
import statistics
from collections.abc import Callable

import numpy as np

from d2l_bert.training.finetuning import scoring


SEED = 0
DRAWS = 1_000

# The most rows or groups of rows that are left out in turn, for the acceleration of the bootstrap.
MOST_GROUPS = 200

# The quantile of the normal distribution beyond which 2.5 % lie.
Z = statistics.NormalDist().inv_cdf(0.975)

WILSON = "Wilson"
BOOTSTRAP = "bootstrap"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """
    A figure with its standard error and its 95 % interval.

    Args:
        value: the figure.
        standard_error: None if these rows do not show it: all are right, or wrong, or every draw gives the same.
        low, high: the ends of the interval; None where no draw differs from another.
        interval: how it was computed, `WILSON` or `BOOTSTRAP`.
    """

    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    interval: str


def estimates(
    metrics: dict[str, float], shares: tuple[str, ...], rows: int, figures_of: Callable
) -> dict[str, Estimate]:
    """
    The metrics with their standard errors and intervals.

    Args:
        metrics: by name, of `rows` rows.
        shares: the metrics that are the share of rows for which something holds; they get Wilson's interval.
        figures_of: the metrics of rows that are drawn, by their `counts` (N,).
    """
    others = [name for name in metrics if name not in shares]
    by_draws = bootstrap({name: metrics[name] for name in others}, rows, figures_of) if others else {}
    found = {}
    for name, value in metrics.items():
        found[name] = of_share(value, rows) if name in shares else by_draws[name]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Shares of rows


def of_share(share: float, rows: int) -> Estimate:
    """A share of rows with Wilson's interval (1927), which holds at small numbers and near 0 and 1, too."""
    # Not for the commands that measure nothing, which scipy would delay.
    import scipy.stats

    interval = scipy.stats.binomtest(round(share * rows), rows).proportion_ci(method="wilson")
    standard_error = float(np.sqrt(share * (1 - share) / rows))
    return Estimate(share, standard_error or None, float(interval.low), float(interval.high), WILSON)


# ---------------------------------------------------------------------------------------------------------------------
# The bootstrap


def bootstrap(values: dict[str, float], rows: int, figures_of: Callable) -> dict[str, Estimate]:
    """
    Figures with the standard deviation of `DRAWS` draws, and their BCa interval (Efron, 1987).

    BCa is the interval of percentiles, corrected for bias and skewness. Of simulated samples of 100 rows, 90 and 97 %
    of them right, it holds the true F1 or Matthews correlation in 93 to 95 %, plain percentiles in 90 to 95 %; where
    no row is wrong, as in 5 % of the samples at 97 %, no interval counts as one that misses.

    Args:
        values: of all rows.
        figures_of: as in `estimates`.
    """
    generator = np.random.default_rng(SEED)
    drawn = []
    for _ in range(DRAWS):
        counts = np.bincount(generator.integers(rows, size=rows), minlength=rows)
        drawn.append(figures_of(counts))
    left_out = []
    groups = np.array_split(generator.permutation(rows), min(rows, MOST_GROUPS)) if rows > 1 else []
    for group in groups:
        counts = np.ones(rows, dtype=int)
        counts[group] = 0
        left_out.append(figures_of(counts))
    of_all = figures_of(np.ones(rows, dtype=int))
    found = {}
    for name, value in values.items():
        of_draws = np.array([figures[name] for figures in drawn])
        without = np.array([figures[name] for figures in left_out])
        found[name] = _of_draws(value, of_all[name], of_draws, without)
    return found


def _of_draws(value, of_all, drawn, left_out) -> Estimate:
    """
    The estimate of a figure.

    Args:
        value: the figure of all rows as `scoring` gives it.
        of_all: the same as `figures_of` gives it, which may differ in the last bit.
        drawn: the figure of each draw.
        left_out: the figure without each row, or group of rows.
    """
    spread = float(drawn.std(ddof=1))
    if np.ptp(drawn) <= 1e-12 * max(1.0, abs(value)):
        return Estimate(value, None, None, None, BOOTSTRAP)
    below = np.mean(drawn < of_all) + np.mean(drawn == of_all) / 2
    normal = statistics.NormalDist()
    bias = normal.inv_cdf(float(np.clip(below, 1 / DRAWS, 1 - 1 / DRAWS)))
    differences = left_out.mean() - left_out
    squares = np.sum(differences**2)
    acceleration = np.sum(differences**3) / (6 * squares**1.5) if squares > 0 else 0.0
    ends = []
    for quantile in (-Z, Z):
        moved = bias + (bias + quantile) / (1 - acceleration * (bias + quantile))
        ends.append(float(np.quantile(drawn, normal.cdf(float(moved)))))
    return Estimate(value, spread, ends[0], ends[1], BOOTSTRAP)


# ---------------------------------------------------------------------------------------------------------------------
# Figures of rows that are drawn


def class_figures(counts: np.ndarray, true: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """
    Figures of one class of several.

    Args:
        true, predicted: numbers of classes (N,).
        classes: how many classes there are (C).

    Returns:
        `accuracy`; `f1`, of class 1 if there are two classes, else the unweighted mean over the classes that are true
        or predicted (macro F1); `accuracy_f1_mean`; and `matthews_correlation` (Matthews, 1975), 0 if one side is
        constant.
    """
    is_right = true == predicted
    right = np.bincount(true[is_right], counts[is_right], classes)  # (C,)
    of_true = np.bincount(true, counts, classes)  # (C,)
    of_predicted = np.bincount(predicted, counts, classes)  # (C,)
    total = counts.sum()
    accuracy = right.sum() / total
    f1_of_classes = _f1(right, of_true, of_predicted)
    f1 = f1_of_classes[1] if classes == 2 else f1_of_classes[of_true + of_predicted > 0].mean()
    # Matthews correlation of several classes (Gorodkin, 2004).
    together = right.sum() * total - of_true @ of_predicted
    apart = (total**2 - of_true @ of_true) * (total**2 - of_predicted @ of_predicted)
    return {
        "accuracy": accuracy,
        "f1": f1,
        "accuracy_f1_mean": (accuracy + f1) / 2,
        "matthews_correlation": together / np.sqrt(apart) if apart > 0 else 0.0,
    }


def multilabel_figures(
    counts: np.ndarray, true: np.ndarray, predicted: np.ndarray, both: np.ndarray, labels: int
) -> dict[str, float]:
    """
    Figures of several labels at once, without `exact_match`, a share of rows.

    Args:
        true, predicted, both: the row and the label (2, K) of each label that a row has, gets, or has and gets; the
            table of all rows and labels is mostly empty.
        labels: how many labels there are.

    Returns:
        `f1` over all cells (micro F1), and `macro_f1`, the mean of the labels' F1 (0 for a label that no row has or
        gets).
    """
    of_true = np.bincount(true[1], counts[true[0]], labels)
    of_predicted = np.bincount(predicted[1], counts[predicted[0]], labels)
    right = np.bincount(both[1], counts[both[0]], labels)
    return {
        "f1": float(_f1(right.sum(), of_true.sum(), of_predicted.sum())),
        "macro_f1": float(_f1(right, of_true, of_predicted).mean()),
    }


def _f1(right, of_true, of_predicted):
    """F1 by how many are right, true and predicted; 0 where none is true or predicted."""
    return 2 * right / np.maximum(of_true + of_predicted, 1)


def number_figures(
    counts: np.ndarray, true: np.ndarray, predicted: np.ndarray, place_of_true: np.ndarray, place_of_predicted
) -> dict[str, float]:
    """
    As `scoring.number_metrics`.

    Args:
        true, predicted: numbers (N,).
        place_of_true, place_of_predicted: of each number its place among the different ones in their order (N,).
    """
    pearson = _correlation(counts, true, predicted)
    spearman = _correlation(counts, _ranks(counts, place_of_true), _ranks(counts, place_of_predicted))
    total = counts.sum()
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman_mean": (pearson + spearman) / 2,
        "mse": counts @ (true - predicted) ** 2 / total,
        "mae": counts @ np.abs(true - predicted) / total,
    }


def _correlation(counts, one, other) -> float:
    """Pearson's correlation of rows that are drawn; 0 if one side is constant."""
    total = counts.sum()
    one = one - counts @ one / total
    other = other - counts @ other / total
    spread = np.sqrt((counts @ one**2) * (counts @ other**2))
    return float(counts @ (one * other) / spread) if spread > 0 else 0.0


def _ranks(counts, place) -> np.ndarray:
    """The ranks of the numbers among those drawn; of equal ones their mean rank (N,)."""
    at_place = np.bincount(place, counts)
    return (np.cumsum(at_place) - at_place / 2)[place]


def tag_figures(counts: np.ndarray, tallies: np.ndarray) -> dict[str, float]:
    """
    Figures of the tags of texts.

    Args:
        tallies: of `tag_tallies` (N, 2 or 8).

    Returns:
        `accuracy` over words. With entities also `precision`, `recall` and `f1` over all entities of all texts (micro
        averages), and `strict_f1`, which reads both sides by IOB2.
    """
    right, words, *of_entities = counts @ tallies
    found = {"accuracy": right / max(words, 1)}
    if of_entities:
        right, true, predicted, strictly_right, strictly_true, strictly_predicted = of_entities
        found["precision"] = right / max(predicted, 1)
        found["recall"] = right / max(true, 1)
        found["f1"] = _f1(right, true, predicted)
        found["strict_f1"] = _f1(strictly_right, strictly_true, strictly_predicted)
    return found


def tag_tallies(gold: list[list[str]], predicted: list[list[str]], has_entities: bool) -> np.ndarray:
    """
    What `tag_figures` adds up, for each text (N, 2 or 8).

    Returns:
        Words with the right tag, and words; with entities also those that are right, true and predicted, as CoNLL
        counts them and by IOB2.
    """
    tallies = []
    for true, said in zip(gold, predicted, strict=True):
        tally = [sum(one == other for one, other in zip(true, said, strict=True)), len(true)]
        for strict in (False, True) if has_entities else ():
            of_true = set(scoring.entities(true, strict))
            of_said = set(scoring.entities(said, strict))
            tally += [len(of_true & of_said), len(of_true), len(of_said)]
        tallies.append(tally)
    return np.array(tallies)


def mean_figures(counts: np.ndarray, scores: dict[str, np.ndarray]) -> dict[str, float]:
    """The means of the scores of rows that are drawn; `scores` has those of each row (N,), by their name."""
    return {name: counts @ of_rows / counts.sum() for name, of_rows in scores.items()}
