"""Metrics of predictions against labels, by scikit-learn and scipy (the extra `d2l-bert[finetune]`), and of spans."""

import re
import string
from collections import Counter

import numpy as np

from d2l_bert.messages import explained


def check_extra() -> None:
    """
    Check that the packages for the metrics are installed.

    Raises:
        UserError: names the command that installs them.
    """
    with explained(
        "finetune needs scikit-learn and scipy for its metrics",
        "install them with pip install 'd2l-bert[finetune]'",
        ImportError,
    ):
        import scipy.stats  # noqa: F401
        import sklearn.metrics  # noqa: F401


def class_metrics(labels, predicted, classes: int) -> dict[str, float]:
    """
    Metrics of one class of several.

    Args:
        labels, predicted: numbers of classes (N,).
        classes: how many classes there are.

    Returns:
        `accuracy`; `f1`, of class 1 if there are two classes, else the unweighted mean over the classes that stand in
        `labels` or `predicted` (macro F1); `accuracy_f1_mean`; and `matthews_correlation` (Matthews, 1975), 0 if
        `labels` or `predicted` are all equal.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    average = {"average": "binary", "pos_label": 1} if classes == 2 else {"average": "macro"}
    accuracy = float(accuracy_score(labels, predicted))
    f1 = float(f1_score(labels, predicted, zero_division=0.0, **average))
    # Of one class alone, scikit-learn warns and gives 0.
    has_two = np.ptp(labels) > 0 and np.ptp(predicted) > 0
    return {
        "accuracy": accuracy,
        "f1": f1,
        "accuracy_f1_mean": (accuracy + f1) / 2,
        "matthews_correlation": float(matthews_corrcoef(labels, predicted)) if has_two else 0.0,
    }


def multilabel_metrics(labels, predicted) -> dict[str, float]:
    """
    Metrics of several labels at once.

    Args:
        labels, predicted: 0 or 1 for each row and label (N, C).

    Returns:
        `f1` over all cells (micro F1), `macro_f1`, the mean of the labels' F1 (0 for a label without a cell of 1), and
        `exact_match`, the share of rows with all labels right.
    """
    from sklearn.metrics import accuracy_score, f1_score

    # scikit-learn reads one column as classes 0 and 1, whose F1 would count the cells of 0 too.
    counted = {"labels": [1]} if np.shape(labels)[1] == 1 else {}
    return {
        "f1": float(f1_score(labels, predicted, average="micro", zero_division=0.0, **counted)),
        "macro_f1": float(f1_score(labels, predicted, average="macro", zero_division=0.0, **counted)),
        "exact_match": float(accuracy_score(labels, predicted)),
    }


def number_metrics(labels, predicted) -> dict[str, float]:
    """
    Metrics of numbers.

    Args:
        labels, predicted: numbers (N,).

    Returns:
        The correlations `pearson` and `spearman` and their mean, 0 if one side is constant or N is 1; `mse` and `mae`,
        the means of the squared and the absolute errors.
    """
    from scipy.stats import pearsonr, spearmanr

    labels, predicted = np.asarray(labels, dtype=float), np.asarray(predicted, dtype=float)
    pearson = spearman = 0.0
    if len(labels) > 1 and np.ptp(labels) > 0 and np.ptp(predicted) > 0:
        pearson, spearman = float(pearsonr(labels, predicted).statistic), float(spearmanr(labels, predicted).statistic)
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman_mean": (pearson + spearman) / 2,
        "mse": float(np.mean((labels - predicted) ** 2)),
        "mae": float(np.mean(np.abs(labels - predicted))),
    }


# ---------------------------------------------------------------------------------------------------------------------


def entities(tags: list[str], strict: bool = False) -> list[tuple[str, int, int]]:
    """
    The entities that the BIO tags of a text mark.

    Without `strict`, as CoNLL's shared tasks count (Tjong Kim Sang and De Meulder, 2003): an entity begins at `B-X`,
    and at an `I-X` that follows `O` or a tag of another type; so tags of the older IOB1 scheme are read too. With
    `strict`, it begins at `B-X` only, and an `I-X` without its beginning belongs to no entity (IOB2).

    Returns:
        For each entity its type, the number of its first word, and the number after that of its last word.
    """
    found, kind, begin = [], None, 0
    for number, tag in enumerate([*tags, "O"]):
        prefix, _, named = tag.partition("-")
        if kind is not None and (prefix != "I" or named != kind):
            found.append((kind, begin, number))
            kind = None
        if prefix == "B" or (prefix == "I" and kind is None and not strict):
            kind, begin = named, number
    return found


def entity_counts(gold: list[list[str]], predicted: list[list[str]], strict: bool = False) -> dict[str, Counter]:
    """
    Counts of entities by their type, over texts. An entity is right if its type, first and last word are right.

    Returns:
        Three counters: `right`, `predicted` and `gold`.
    """
    counts = {"right": Counter(), "predicted": Counter(), "gold": Counter()}
    for true_tags, tags in zip(gold, predicted, strict=True):
        true, said = entities(true_tags, strict), entities(tags, strict)
        counts["gold"].update(kind for kind, _, _ in true)
        counts["predicted"].update(kind for kind, _, _ in said)
        counts["right"].update(kind for kind, _, _ in set(true) & set(said))
    return counts


def precision_recall_f1(right: int, predicted: int, gold: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of counts; 0 where they have no denominator."""
    precision = right / predicted if predicted else 0.0
    recall = right / gold if gold else 0.0
    return precision, recall, 2 * right / (predicted + gold) if predicted + gold else 0.0


def tag_metrics(gold: list[list[str]], predicted: list[list[str]], has_entities: bool) -> dict[str, float]:
    """
    Metrics of the tags of texts.

    Args:
        has_entities: whether the tags are BIO.

    Returns:
        `accuracy` over words. With entities also `precision`, `recall` and `f1` over all entities of all texts (micro
        averages), and `strict_f1`, which reads both sides by IOB2.
    """
    pairs = [pair for true, said in zip(gold, predicted, strict=True) for pair in zip(true, said, strict=True)]
    found = {"accuracy": sum(true == said for true, said in pairs) / len(pairs)}
    if has_entities:
        totals = [counter.total() for counter in entity_counts(gold, predicted).values()]
        strict = [counter.total() for counter in entity_counts(gold, predicted, strict=True).values()]
        precision, recall, f1 = precision_recall_f1(*totals)
        strict_f1 = precision_recall_f1(*strict)[2]
        found |= {"precision": precision, "recall": recall, "f1": f1, "strict_f1": strict_f1}
    return found


ARTICLE = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_answer(text: str) -> str:
    """
    An answer as SQuAD compares it: in lower case, without ASCII punctuation, without the words a, an and the, with one
    space between words (Rajpurkar et al., 2016, section 6.1).
    """
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_scores(prediction: str, gold: list[str]) -> tuple[float, float]:
    """
    Exact match and F1 of one predicted answer, as the evaluation script of SQuAD 2 computes them.

    F1 is that of the words which both answers have, repeated words counted. If one of the two answers has no words
    after normalisation, both scores are 1 if the other has none either, else 0.

    Args:
        prediction: the predicted answer; "" says that the question has none.
        gold: the true answers, of which the best counts; [] if the question has none.
    """
    exact, f1, said = [], [], normalised_answer(prediction)
    for answer in [normalised for normalised in map(normalised_answer, gold) if normalised] or [""]:
        exact.append(float(said == answer))
        both = (Counter(said.split()) & Counter(answer.split())).total()
        f1.append(2 * both / (len(said.split()) + len(answer.split())) if said and answer else exact[-1])
    return max(exact), max(f1)


def answer_metrics(predictions: list[str], gold: list[list[str]]) -> dict[str, float]:
    """
    Means of exact match and F1 over questions.

    Args:
        predictions: an answer for each question; "" for none.
        gold: the true answers of each question; [] for a question without an answer.
    """
    scores = [answer_scores(said, true) for said, true in zip(predictions, gold, strict=True)]
    exact, f1 = (sum(values) / len(scores) for values in zip(*scores, strict=True))
    return {"exact_match": exact, "f1": f1}
