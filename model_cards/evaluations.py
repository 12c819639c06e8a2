"""Writes the figures of `d2l-bert evaluate` into a model's folder: into metrics.json and the card."""

import json
import os
import re
from pathlib import Path

from d2l_bert import folders
from d2l_bert.messages import UserError, explained, writing
from d2l_bert.model_cards import blimp as blimp_pairs
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.figures import (
    BLIMP,
    BLIMP_NAME,
    BLIMP_ONE_OF_EACH,
    BLIMP_PHENOMENON,
    MINIMAL_PAIRS_KEY,
    evaluated_figures,
)
from d2l_bert.model_cards.markdown import shown
from d2l_bert.model_cards.metadata import eval_results
from d2l_bert.modeling.records import Metrics, RunRecord
from d2l_bert.records import read_record


# What EVALUATION.md renders, and where a card that has no such section gets it: before its limits, or at its end.
SECTION = re.compile(
    r"^<!-- figures of d2l-bert evaluate -->$.*?^<!-- end of the figures -->$\s*", re.DOTALL | re.MULTILINE
)
PLACE = re.compile(r"^(?=## Limits)|\Z", re.MULTILINE)


def check_updatable(name: str) -> None:
    """
    Refuse a model whose metrics.json and card cannot be updated, before it is evaluated.

    Args:
        name: the folder of a model; an id on the Hub is refused.

    Raises:
        UserError: there is no such folder, it cannot be written, its metrics.json or card cannot be read, or it has no
            card and is of another kind of model than those that d2l-bert has a card for.
    """
    folder = Path(name)
    kind = read_record(folder / "config.json").get("model_type")
    if not folder.is_dir():
        raise UserError(f"update_card: {name} is no folder here; leave update_card out, or give a model's folder")
    if not os.access(folder, os.W_OK):
        raise UserError(f"update_card: {name} cannot be written; leave update_card out, or allow writing there")
    if not (folder / cards.CARD_FILE).exists() and kind not in ("d2l-bert", "bert"):
        raise UserError(
            f"update_card: {name} has no {cards.CARD_FILE}, and a {kind} model gets none; write one, or leave "
            f"update_card out"
        )
    _refuse_links(folder)
    metrics = read_record(folder / cards.METRICS_FILE, Metrics, allow_nan=True)
    way_out = f"put back the {cards.METRICS_FILE} that was written there, or take it out"
    with explained(f"{folder / cards.METRICS_FILE}: cannot be shown on a card", way_out, *cards.CARD_ERRORS):
        section_of(metrics)
        eval_results(metrics, read_record(folder / cards.RUN_FILE, RunRecord), None)
    cards.read_card(folder)


def _refuse_links(folder):
    """Raise `UserError` if one of the files to replace is a link: a file of its own would take its place."""
    for name in (cards.METRICS_FILE, cards.CARD_FILE):
        if (folder / name).is_symlink():
            raise UserError(
                f"update_card: {folder / name} is a link, and would be replaced; put the file itself there, or leave "
                f"update_card out"
            )


def section_of(metrics: dict) -> str:
    """The section of a card with the figures of `d2l-bert evaluate` in the content of metrics.json."""
    return cards.TEMPLATES.get_template("EVALUATION.md").render(metrics=metrics)


def update_folder(folder: Path, text: str | None, figures: dict | None, blimp: dict | None) -> None:
    """
    Write figures into metrics.json and README.md. They replace earlier ones on the same text, or on the same pairs.

    Of an existing card, only the section of these figures and the metadata's `model-index` change. The folder of a
    d2l-bert model or a stock BERT without a card gets one.

    Args:
        text: the name of the text; None without one.
        figures: the figures on the text, by their names; None without one.
        blimp: the results on minimal pairs (`blimp_results` of `d2l-bert evaluate`, with `score`, `name` and `title`);
            None without them.

    Raises:
        UserError: the card cannot be read, or the folder cannot be written, or another process writes there for long.
    """
    in_use = f"{folder}: another process is writing there; wait, and give the same command again"
    _refuse_links(folder)
    with writing(folder), folders.locked(folder / folders.LOCK_FILE, in_use, folders.PATIENCE):
        _update(folder, text, figures, blimp)


def _update(folder, text, figures, blimp):
    before = read_record(folder / cards.METRICS_FILE, allow_nan=True)
    metrics = with_figures(before, text, figures, blimp)
    section = section_of(metrics)
    card = cards.read_card(folder)
    card.data.eval_results = _new_results(card, before, metrics, read_record(folder / cards.RUN_FILE))
    card.data.model_name = card.data.model_name or shown(folder.resolve().name)
    place = SECTION if SECTION.search(card.text) else PLACE
    # A function gives the section, as `sub` would read backslashes in a text as references to groups.
    card.text = place.sub(lambda _: section, card.text, count=1)
    # Both are written before either is moved to its place: on a full disk both stay as they were.
    with (
        folders.atomic_file(folder / cards.METRICS_FILE) as new_metrics,
        folders.atomic_file(folder / cards.CARD_FILE) as new_card,
    ):
        new_metrics.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        new_card.write_text(card.content, encoding="utf-8")


def with_figures(metrics: dict, text: str | None, figures: dict | None, blimp: dict | None) -> dict:
    """The content of metrics.json with new figures, as in `update_folder`, in place of those of the same kind."""
    if figures is not None:
        of_text = {f"eval/{text}/{name}": value for name, value in figures.items() if value is not None}
        metrics = _replaced(metrics, rf"eval/{re.escape(text)}/(?!minimal_pairs_)\w+", of_text)
    if blimp is None:
        return metrics
    if blimp["title"] == blimp_pairs.BLIMP:
        return _replaced(metrics, "eval_blimp_.*", _blimp_figures(blimp))
    name = blimp.get("name") or "own pairs"
    return _replaced(metrics, rf"eval/{re.escape(name)}/minimal_pairs_\w+", _pair_figures(name, blimp))


def _new_results(card, before, metrics, record):
    """The results in the card's metadata: those of others stay, those of `d2l-bert evaluate` are of `metrics`."""
    # An earlier version has given BLiMP's name to figures on any pairs.
    names = {BLIMP_NAME}
    for figure in (*evaluated_figures(before), *evaluated_figures(metrics)):
        names.add(figure.name)
    of_others = [result for result in card.data.eval_results or [] if result.metric_name not in names]
    ours = [result for result in eval_results(metrics, record, None) if result.metric_name in names]
    return of_others + ours


def _replaced(metrics, earlier, new):
    """Figures, of which those with keys like `earlier` are replaced."""
    return {key: value for key, value in metrics.items() if not re.fullmatch(earlier, key, re.DOTALL)} | new


def _blimp_figures(blimp):
    """The entries of metrics.json for results on BLiMP."""
    entries = {
        BLIMP: blimp["accuracy"],
        "eval_blimp_standard_error": blimp["standard_error"],
        "eval_blimp_paradigms": blimp["paradigm_count"],
        "eval_blimp_pairs": blimp["pairs"],
        "eval_blimp_score": blimp["score"],
    }
    paradigms = blimp["paradigms"]
    if paradigms.keys() == blimp_pairs.PHENOMENON_OF.keys():
        accuracies = [paradigms[name]["accuracy"] for name in blimp_pairs.ONE_OF_EACH]
        entries[BLIMP_ONE_OF_EACH] = sum(accuracies) / len(accuracies)
    for name, figure in blimp["phenomena"].items():
        entries[f"{BLIMP_PHENOMENON}{name}"] = figure["accuracy"]
    return entries


def _pair_figures(name, results):
    """The entries of metrics.json for results on other minimal pairs."""
    return {
        f"eval/{name}/{MINIMAL_PAIRS_KEY}": results["accuracy"],
        f"eval/{name}/minimal_pairs_standard_error": results["standard_error"],
        f"eval/{name}/minimal_pairs_count": results["pairs"],
        f"eval/{name}/minimal_pairs_score": results["score"],
    }
