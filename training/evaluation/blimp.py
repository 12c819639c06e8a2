"""BLiMP (Warstadt et al., 2020): does a model prefer the grammatical sentence of a minimal pair?"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.tokenization.sources import dataset_errors
from d2l_bert.tokenization.tables import suffix_unpacked, table_rows


logger = logging.getLogger(__name__)

HUB_DATASET = "nyu-mll/blimp"

# `--blimp hub` reads the data set from the Hub instead of a folder.
FROM_HUB = "hub"


@dataclass
class Paradigm:
    """
    The minimal pairs of one contrast in grammar.

    Args:
        name: the name, in BLiMP `UID`, such as `adjunct_island`.
        phenomenon: the phenomenon, in BLiMP `linguistics_term`, such as `island_effects`.
        good, bad: the grammatical and the ungrammatical sentences, pair by pair.
    """

    name: str
    phenomenon: str
    good: list[str]
    bad: list[str]


def read_blimp(place: str) -> list[Paradigm]:
    """
    The paradigms of BLiMP in the order of their names.

    Args:
        place: a folder with BLiMP's JSONL files, also packed; or `hub` for `nyu-mll/blimp`.

    Raises:
        UserError: there is no such folder or it has no JSONL file; a line lacks a sentence; or the Hub gave no data.
    """
    paradigms = {}
    for where, row, default in _hub_rows() if place == FROM_HUB and not Path(place).exists() else _folder_rows(place):
        for key in ("sentence_good", "sentence_bad"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise UserError(f"{where}: no {key}; each line of BLiMP has sentence_good and sentence_bad")
        name = str(row.get("UID") or default)
        paradigm = paradigms.setdefault(name, Paradigm(name, str(row.get("linguistics_term") or default), [], []))
        paradigm.good.append(row["sentence_good"])
        paradigm.bad.append(row["sentence_bad"])
    if not paradigms:
        raise UserError(f"blimp {place}: no .jsonl file with a minimal pair in this folder; copy BLiMP's files there")
    return [paradigms[name] for name in sorted(paradigms)]


def _folder_rows(place):
    """Yield for each row of a folder's files its place, the row, and a name for a paradigm or phenomenon without."""
    folder = Path(place)
    if not folder.is_dir():
        raise UserError(f"blimp {place}: no such folder; give a folder with BLiMP's JSONL files, or {FROM_HUB}")
    for file in sorted(folder.iterdir()):
        if suffix_unpacked(file) != ".jsonl" or file.name.startswith("."):
            continue
        with explained(file, "", *READ_ERRORS):
            rows = list(table_rows(file))
        for line, row in rows:
            yield f"{file}, {line}", row, file.name.partition(".")[0]


def _hub_rows():
    """As `_folder_rows`, of the data set on the Hub."""
    import datasets

    with dataset_errors(HUB_DATASET, f"give --blimp a folder with BLiMP's JSONL files instead of {FROM_HUB}"):
        for config in datasets.get_dataset_config_names(HUB_DATASET):
            for number, row in enumerate(datasets.load_dataset(HUB_DATASET, config, split="train"), 1):
                yield f"{HUB_DATASET} {config}, row {number}", row, config


def sentences_of(paradigms: Iterable[Paradigm]) -> list[str]:
    """The sentences of all paradigms: of each pair first the good one, then the bad one."""
    return [
        sentence
        for paradigm in paradigms
        for pair in zip(paradigm.good, paradigm.bad, strict=True)
        for sentence in pair
    ]


def blimp_results(paradigms: Sequence[Paradigm], scores: np.ndarray) -> dict:
    """
    Accuracies with standard errors.

    A pair counts 1 if the good sentence has the higher score, 1/2 if both scores are equal, and else 0. The accuracy
    a of a paradigm is the mean over its n pairs, with the binomial standard error sqrt(a (1 - a) / n). The accuracy of
    a phenomenon, and the overall one, is the mean over P paradigms, each with the same weight as in BLiMP; its
    standard error is sqrt(sum of the paradigms' squared standard errors) / P.

    Args:
        scores: the score of each sentence of `sentences_of` (2 * pairs,).

    Returns:
        `accuracy`, `standard_error`, `paradigm_count`, `pairs`, `ties`, and by their names `phenomena` and
        `paradigms`, with such figures of each.
    """
    of_paradigms, first = {}, 0
    for paradigm in paradigms:
        pairs = len(paradigm.good)
        good, bad = scores[first : first + 2 * pairs].reshape(pairs, 2).T
        ties = int((good == bad).sum())
        accuracy = float((good > bad).sum() + ties / 2) / pairs
        of_paradigms[paradigm.name] = {
            "phenomenon": paradigm.phenomenon,
            "accuracy": accuracy,
            "standard_error": math.sqrt(accuracy * (1 - accuracy) / pairs),
            "pairs": pairs,
            "ties": ties,
        }
        first += 2 * pairs
    groups = {}
    for figures in of_paradigms.values():
        groups.setdefault(figures["phenomenon"], []).append(figures)
    return {
        **_mean(list(of_paradigms.values())),
        "phenomena": {name: _mean(groups[name]) for name in sorted(groups)},
        "paradigms": of_paradigms,
    }


def _mean(paradigms):
    count = len(paradigms)
    return {
        "accuracy": sum(figures["accuracy"] for figures in paradigms) / count,
        "standard_error": math.sqrt(sum(figures["standard_error"] ** 2 for figures in paradigms)) / count,
        "paradigm_count": count,
        "pairs": sum(figures["pairs"] for figures in paradigms),
        "ties": sum(figures["ties"] for figures in paradigms),
    }
