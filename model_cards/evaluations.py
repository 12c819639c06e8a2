"""Writes the figures of `d2l-bert evaluate` into a model's folder: into metrics.json and the card."""

import os
import re
from pathlib import Path

from d2l_bert import folders
from d2l_bert.messages import refuse_first, writing
from d2l_bert.model_cards import card as cards
from d2l_bert.model_cards.figures import BLIMP, BLIMP_PHENOMENON, evaluated_metrics
from d2l_bert.records import read_record


# What EVALUATION.md renders, and where a card that has no such section gets it: before its limits, or at its end.
SECTION = r"<!-- figures of d2l-bert evaluate -->.*?<!-- end of the figures -->\s*"
PLACE = r"^(?=## Limits)|\Z"


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
    kind, has_card = read_record(folder / "config.json").get("model_type"), (folder / cards.CARD_FILE).exists()
    refuse_first(
        {
            "is no folder here; leave update_card out, or give a model's folder": not folder.is_dir(),
            "cannot be written; leave update_card out, or allow writing there": not os.access(folder, os.W_OK),
            f"has no {cards.CARD_FILE}, and a {kind} model gets none; write one, or leave update_card out": (
                not has_card and kind not in ("d2l-bert", "bert")
            ),
        },
        f"update_card: {name} ",
    )
    read_record(folder / cards.METRICS_FILE)
    cards.read_card(folder)


def update_folder(folder: Path, text: str | None, figures: dict | None, blimp: dict | None) -> None:
    """
    Write figures into metrics.json and README.md. They replace earlier ones on the same text, or of BLiMP.

    Of an existing card, only the section of these figures and the metadata's `model-index` change. The folder of a
    d2l-bert model or a stock BERT without a card gets one.

    Args:
        text: the name of the text; None without one.
        figures: the figures on the text, by their names; None without one.
        blimp: the results on BLiMP (`blimp_results` of `d2l-bert evaluate`, with `score`); None without them.

    Raises:
        UserError: the card cannot be read, or the folder cannot be written, or another process writes there for long.
    """
    in_use = f"{folder}: another process is writing there; wait, and give the same command again"
    with writing(folder), folders.locked(folder / folders.LOCK_FILE, in_use, folders.PATIENCE):
        _update(folder, text, figures, blimp)


def _update(folder, text, figures, blimp):
    before = read_record(folder / cards.METRICS_FILE)
    earlier = rf"eval/{re.escape(text or '')}/\w+" + (r"|eval_blimp_.*" if blimp is not None else "")
    metrics = {key: value for key, value in before.items() if not re.fullmatch(earlier, key, re.DOTALL)}
    metrics |= {f"eval/{text}/{name}": value for name, value in (figures or {}).items() if value is not None}
    if blimp is not None:
        metrics |= {
            BLIMP: blimp["accuracy"],
            "eval_blimp_standard_error": blimp["standard_error"],
            "eval_blimp_paradigms": blimp["paradigm_count"],
            "eval_blimp_pairs": blimp["pairs"],
            "eval_blimp_score": blimp["score"],
            **{f"{BLIMP_PHENOMENON}{name}": figure["accuracy"] for name, figure in blimp["phenomena"].items()},
        }
    names = {metric.name for metric in (*evaluated_metrics(before), *evaluated_metrics(metrics))}
    section = cards.TEMPLATES.get_template("EVALUATION.md").render(metrics=metrics)
    with writing(folder):
        folders.write_json(folder / cards.METRICS_FILE, metrics)
        card = cards.read_card(folder)
        kept = [result for result in card.data.eval_results or [] if result.metric_name not in names]
        found = cards.eval_results(metrics, read_record(folder / cards.RUN_FILE), None)
        card.data.eval_results = kept + [result for result in found if result.metric_name in names]
        card.data.model_name = card.data.model_name or folder.resolve().name
        place = SECTION if re.search(SECTION, card.text, re.DOTALL) else PLACE
        card.text = re.sub(place, lambda _: section, card.text, count=1, flags=re.DOTALL | re.MULTILINE)
        with folders.atomic_file(folder / cards.CARD_FILE) as partial:
            partial.write_text(card.content, encoding="utf-8")
