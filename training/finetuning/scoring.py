"""Numbers' metrics and the report by class, by scipy and scikit-learn (`d2l-bert[finetune]`); entities; answers.

A metric has the name that metrics.json gives it; those of classes, labels and tags are in `intervals`. `f1` is, of
- text classification with two classes: F1 of class 1; with more: the mean over the classes (macro F1);
- several labels: F1 over all yes and no (micro F1);
- tags of entities: F1 over all entities of all texts (micro F1), lenient as CoNLL's; `strict_f1` reads IOB2;
- answers: the mean over the questions of the F1 of words.
"""

import re
import string
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from d2l_bert.messages import explained
from d2l_bert.model_cards.figures import ON_ROWS


# Metrics that are best when they are small.
LOWER_IS_BETTER = ("loss", "mse", "mae")

# The letters before the type of an entity, by the name of the scheme: begin, inside, end or last, single or unit.
SCHEMES = {"BIO": "BI", "BIOES": "BIES", "BILOU": "BILU"}

# With more classes than this, the table of predictions has no column of probabilities for each.
PROBABILITY_COLUMNS = 20


class Sides(NamedTuple):
    """
    What is true and what a model predicts.

    Args:
        true, predicted: names of classes (N,), or 0 or 1 for each row and class (N, C).
        names: the classes to report on.
    """

    true: list[str] | np.ndarray
    predicted: list[str] | np.ndarray
    names: list[str]


def check_libraries(command: str) -> None:
    """
    Refuse a command that measures without the libraries of metrics, before it reads and trains. `predict` needs none.

    Raises:
        UserError: scikit-learn or scipy is not installed.
    """
    with explained(
        f"{command} needs scikit-learn and scipy for its metrics",
        "install them with pip install 'd2l-bert[finetune]'",
        ImportError,
    ):
        import scipy.stats  # noqa: F401
        import sklearn.metrics  # noqa: F401


# ---------------------------------------------------------------------------------------------------------------------
# A metric by its name


def goodness(name: str, value: float) -> float:
    """The value of a metric, or its negative, so that the larger of two is the better one."""
    return -value if name in LOWER_IS_BETTER else value


def is_share(name: str) -> bool:
    """Whether a metric is a share, from 0 to 1, which is shown in percent."""
    return name in ON_ROWS and ON_ROWS[name].unit == "%"


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def number_metrics(labels, predicted) -> dict[str, float]:
    """
    Metrics of numbers.

    Args:
        labels, predicted: numbers (N,).

    Returns:
        The correlations `pearson` and `spearman` and their mean, 0 if one side is constant or N is 1; `mse` and `mae`,
        the means of the squared and the absolute errors.
    """
    import scipy.stats

    labels = np.asarray(labels, dtype=float)
    predicted = np.asarray(predicted, dtype=float)
    pearson = 0.0
    spearman = 0.0
    if len(labels) > 1 and np.ptp(labels) > 0 and np.ptp(predicted) > 0:
        pearson = float(scipy.stats.pearsonr(labels, predicted).statistic)
        spearman = float(scipy.stats.spearmanr(labels, predicted).statistic)
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman_mean": (pearson + spearman) / 2,
        "mse": float(np.mean((labels - predicted) ** 2)),
        "mae": float(np.mean(np.abs(labels - predicted))),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tags and entities


def scheme_of(tags: list[str]) -> str | None:
    """The name of the scheme of entities that the tags belong to, such as BIO; None for other tags."""
    for name, letters in SCHEMES.items():
        are_all = all(re.fullmatch(f"O|[{letters}](-.*)?", tag) for tag in tags)
        if are_all and any(re.match("[BI]|.-", tag) for tag in tags):  # L and U alone may be any two classes
            return name
    return None


def entities(tags: list[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """
    The entities that the tags of a text mark in one of `SCHEMES`.

    Without `strict`, as CoNLL's shared tasks count (Tjong Kim Sang and De Meulder, 2003): an entity begins at `B-X`,
    and at an `I-X` that follows `O` or a tag of another type; so tags of the older IOB1 scheme are read too. With
    `strict`, it begins at `B-X` only, and an `I-X` without its beginning belongs to no entity (IOB2). E and L are read
    as the last I of an entity, S and U as a B that is also the last tag.

    Returns:
        For each entity its type, the number of its first word, and the number after that of its last word.
    """
    found = []
    goes_on = None  # the type of the last entity, if the next tag may belong to it
    for number, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        is_inside = prefix in ("I", "E", "L")
        if is_inside and kind == goes_on:
            found[-1] = (kind, found[-1][1], number + 1)
        elif prefix in ("B", "S", "U") or (is_inside and not strict):
            found.append((kind, number, number + 1))
        else:
            kind = None
        goes_on = kind if prefix in ("B", "I") else None
    return found


def types_at_spans(gold: list[list[str]], predicted: list[list[str]]) -> Sides:
    """
    The types of the true and of the predicted entities at each span of words that is an entity on either side.

    An entity is right if its type, first and last word are right, so metrics of classes over the spans, with "O" for
    no entity, are those of entities. The classes to report on are the types, without "O".
    """
    true = ["O"]  # scikit-learn takes no empty lists
    said = ["O"]
    for true_tags, tags in zip(gold, predicted, strict=True):
        type_of_true = _types_by_span(true_tags)
        type_of_said = _types_by_span(tags)
        for span in type_of_true | type_of_said:
            true.append(type_of_true.get(span, "O"))
            said.append(type_of_said.get(span, "O"))
    types = sorted({*true, *said} - {"O"})
    return Sides(true, said, types or ["entity"])


def _types_by_span(tags) -> dict[tuple[int, int], str]:
    """The types of the entities that tags mark, by their first word and the one after the last."""
    return {(begin, end): kind or "entity" for kind, begin, end in entities(tags)}


# ---------------------------------------------------------------------------------------------------------------------
# Probabilities and the report by class


def probabilities(logits: np.ndarray, of_each: bool = False) -> np.ndarray:
    """
    The probabilities of logits (..., C), in float64.

    Args:
        of_each: as in `probability_columns`.
    """
    exact = torch.from_numpy(logits.astype(np.float64))
    shares = exact.sigmoid() if of_each else exact.softmax(-1)
    return shares.numpy()


def probability_columns(names: list, logits: np.ndarray, of_each: bool = False) -> dict[str, list[float]]:
    """
    Columns of the table of predictions: `probability`, that of the likeliest, and for few classes that of each.

    Args:
        names: of the classes or choices; more than `PROBABILITY_COLUMNS` have no columns.
        logits: (N, C).
        of_each: each name has a probability of its own (the sigmoid), and none is the likeliest; else the
            probabilities of a row add up to 1 (the softmax).
    """
    shares = np.round(probabilities(logits, of_each), 6)
    columns = {}
    if not of_each:
        columns["probability"] = shares.max(-1).tolist()
    if len(names) <= PROBABILITY_COLUMNS:
        for name, column in zip(names, shares.T.tolist(), strict=True):
            columns[f"probability of {name}"] = column
    return columns


def report_by_class(true, predicted, names: list[str]) -> dict:
    """
    scikit-learn's `classification_report`: `precision`, `recall`, `f1-score`, `support` of each class; averages.

    Args:
        true, predicted, names: as in `Sides`.
    """
    import sklearn.metrics

    # scikit-learn reads one column as classes 0 and 1.
    columns = range(len(names)) if len(names) > 1 else [1]
    # scikit-learn has averages in the same dict: a class of the name of one, or of that with "(class)", gets another.
    targets = [re.sub(r"^(accuracy|.* avg)((?: \(class\))*)$", r"\1\2 (class)", name) for name in names]
    return sklearn.metrics.classification_report(
        true,
        predicted,
        labels=columns if np.ndim(true) == 2 else names,
        target_names=targets,
        output_dict=True,
        zero_division=0.0,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def normalised_answer(text: str) -> str:
    """
    An answer as SQuAD compares it: in lower case, without ASCII punctuation, without the words a, an and the, with one
    space between words (Rajpurkar et al., 2016, section 6.1).
    """
    letters = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def answer_scores(prediction: str, gold: list[str]) -> tuple[float, float]:
    """
    Exact match and F1 of one predicted answer, as the evaluation script of SQuAD 2 computes them.

    F1 is that of the words which both answers have, repeated words counted. If one of the two answers has no words
    after normalisation, both scores are 1 if the other has none either, else 0.

    Args:
        prediction: the predicted answer; "" says that the question has none.
        gold: the true answers, of which the best counts; [] if the question has none.
    """
    said = normalised_answer(prediction)
    answers = [answer for answer in map(normalised_answer, gold) if answer] or [""]
    exact = float(said in answers)
    if not said or answers == [""]:
        return exact, exact
    return exact, max(f1_of_words(said.split(), answer.split()) for answer in answers)


def f1_of_words(one: list[str], other: list[str]) -> float:
    """F1 of the words that two answers share, repeated words counted; neither answer is empty."""
    both = (Counter(one) & Counter(other)).total()
    return 2 * both / (len(one) + len(other))
