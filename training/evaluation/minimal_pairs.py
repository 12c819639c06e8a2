"""BLiMP (Warstadt et al., 2020): does a model prefer the grammatical sentence of a minimal pair?"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from d2l_bert import folders
from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.model_cards.blimp import BLIMP, PHENOMENON_OF
from d2l_bert.tokenization import hub_datasets, tables


HUB_DATASET = "nyu-mll/blimp"

# `--blimp hub` reads the data set from the Hub instead of a folder.
FROM_HUB = "hub"

PAIRS_OF_A_PARADIGM = 1000


class MinimalPair(NamedTuple):
    """
    Two sentences that differ in one contrast of grammar.

    Args:
        paradigm: the name of the contrast, in BLiMP `UID`, such as `adjunct_island`; of pairs without one the name
            of their file.
        phenomenon: what the paradigm belongs to, in BLiMP `linguistics_term`, such as `island_effects`; of pairs
            without one that of BLiMP's paradigm by their `UID`, or the paradigm itself.
        good, bad: the grammatical and the ungrammatical sentence.
        has_uid: whether their row names the paradigm. Else its file does, which may have any name.
    """

    paradigm: str
    phenomenon: str
    good: str
    bad: str
    has_uid: bool = True


class PairRow(NamedTuple):
    """
    A row that should hold a minimal pair.

    Args:
        place: where it stands, for messages.
        cells: its values, by the names of the columns.
        paradigm: the name of its paradigm, if the cells name none.
    """

    place: str
    cells: dict
    paradigm: str


def read_blimp(place: str) -> list[MinimalPair]:
    """
    The pairs of BLiMP, in the order of the names of their paradigms.

    Args:
        place: a folder with BLiMP's JSONL files, also packed; or `hub` for `nyu-mll/blimp`.

    Raises:
        UserError: there is no such folder or it has no JSONL file; a line lacks a sentence, or has a paradigm under
            another phenomenon than before; or the Hub gave no data.
    """
    is_on_hub = place == FROM_HUB and not Path(place).exists()
    pairs = []
    phenomena = {}  # by the paradigm
    for row in _hub_rows() if is_on_hub else _folder_rows(place):
        pair = _pair_of(row)
        before = phenomena.setdefault(pair.paradigm, pair.phenomenon)
        if pair.phenomenon != before:
            raise UserError(
                f"{row.place}: {pair.paradigm!r:.100} belongs to {pair.phenomenon!r:.100} here, and to "
                f"{before!r:.100} before; write one linguistics_term for each UID"
            )
        pairs.append(pair)
    if not pairs:
        raise UserError(
            f"blimp {place}: no folder with a .jsonl file of minimal pairs; give one with BLiMP's files, or {FROM_HUB}"
        )
    return sorted(pairs, key=lambda pair: pair.paradigm)


def _pair_of(row: PairRow) -> MinimalPair:
    """The pair in a row."""
    good = row.cells.get("sentence_good")
    bad = row.cells.get("sentence_bad")
    for sentence in (good, bad):
        if not isinstance(sentence, str) or not sentence.strip():
            raise UserError(f"{row.place}: no sentence_good, or no sentence_bad; each line of BLiMP has both")
    has_uid = bool(row.cells.get("UID"))
    paradigm = str(row.cells["UID"]) if has_uid else row.paradigm
    known = PHENOMENON_OF.get(paradigm) if has_uid else None
    phenomenon = str(row.cells.get("linguistics_term") or known or paradigm)
    return MinimalPair(paradigm, phenomenon, good, bad, has_uid)


def name_of_pairs(pairs: Sequence[MinimalPair], place: str) -> str:
    """
    What the pairs are called in tables and files: `BLiMP` if each names one of its 67 paradigms, which have 1,000
    pairs each, by its `UID`, under the phenomenon that it has there; for all others "minimal pairs of" and the
    folder's name.

    Args:
        place: as in `read_blimp`.
    """
    counts = Counter(pair.paradigm for pair in pairs)
    are_known = all(pair.has_uid and PHENOMENON_OF.get(pair.paradigm) == pair.phenomenon for pair in pairs)
    if are_known and max(counts.values()) <= PAIRS_OF_A_PARADIGM:
        return BLIMP
    return f"minimal pairs of {folders.base_name(place)}"


def _folder_rows(place: str) -> Iterator[PairRow]:
    """The rows of a folder's files; a paradigm without a name has that of its file."""
    memory = tables.Memory()
    for file in sorted(Path(place).glob("[!.]*")):
        if tables.suffix_unpacked(file) == ".jsonl":
            if not file.is_file():
                raise UserError(f"{file}: is no regular file; take it out")
            with explained(file, "", *READ_ERRORS):
                rows = memory.hold(tables.table_rows(file))
            for line, cells in rows:
                yield PairRow(f"{file}, {line}", cells, file.name.partition(".")[0])


def _hub_rows() -> Iterator[PairRow]:
    """The rows of the data set on the Hub, which has a configuration for each paradigm."""
    import datasets

    with hub_datasets.dataset_errors(
        HUB_DATASET, f"give --blimp a folder with BLiMP's JSONL files instead of {FROM_HUB}"
    ):
        for config in datasets.get_dataset_config_names(HUB_DATASET):
            for number, cells in enumerate(datasets.load_dataset(HUB_DATASET, config, split="train"), 1):
                yield PairRow(f"{HUB_DATASET} {config}, row {number}", cells, config)


def sentences_of(pairs: Sequence[MinimalPair]) -> list[str]:
    """The sentences of all pairs: of each pair first the good one, then the bad one (2 * pairs)."""
    return [sentence for pair in pairs for sentence in (pair.good, pair.bad)]


def blimp_results(pairs: Sequence[MinimalPair], scores: np.ndarray) -> dict:
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
    good, bad = scores.reshape(-1, 2).T
    of_pairs = {}  # by the paradigm, the numbers of its pairs
    for number, pair in enumerate(pairs):
        of_pairs.setdefault(pair.paradigm, []).append(number)
    paradigms = {}
    for name, numbers in sorted(of_pairs.items()):
        ties = int((good[numbers] == bad[numbers]).sum())
        count = len(numbers)
        accuracy = float((good[numbers] > bad[numbers]).sum() + ties / 2) / count
        paradigms[name] = {
            "phenomenon": pairs[numbers[0]].phenomenon,
            "accuracy": accuracy,
            "standard_error": math.sqrt(accuracy * (1 - accuracy) / count),
            "pairs": count,
            "ties": ties,
        }
    of_phenomena = {}  # by the phenomenon, the figures of its paradigms
    for figures in paradigms.values():
        of_phenomena.setdefault(figures["phenomenon"], []).append(figures)
    phenomena = {name: _mean(figures) for name, figures in sorted(of_phenomena.items())}
    return {**_mean(paradigms.values()), "phenomena": phenomena, "paradigms": paradigms}


def _mean(paradigms):
    """The figures of several paradigms together."""
    count = len(paradigms)
    return {
        "accuracy": sum(figures["accuracy"] for figures in paradigms) / count,
        "standard_error": math.sqrt(sum(figures["standard_error"] ** 2 for figures in paradigms)) / count,
        "paradigm_count": count,
        "pairs": sum(figures["pairs"] for figures in paradigms),
        "ties": sum(figures["ties"] for figures in paradigms),
    }
