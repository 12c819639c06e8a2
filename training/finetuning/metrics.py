"""Metrics of predictions against labels, computed by scikit-learn and scipy (the extra `d2l-bert[finetune]`)."""

import numpy as np

from d2l_bert.errors import UserError


def check_extra() -> None:
    """
    Check that the packages for the metrics are installed.

    Raises:
        UserError: names the command that installs them.
    """
    try:
        import scipy.stats  # noqa: F401
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"finetune needs scikit-learn and scipy for its metrics ({error}); install them with "
            f"pip install 'd2l-bert[finetune]'"
        ) from None


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
