"""Writes the figures of `d2l-bert evaluate` into a model's folder: into metrics.json and the card."""

import os
import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from d2l_bert.folders import read_json, write_json
from d2l_bert.messages import refuse_first, writing
from d2l_bert.model_cards.card import CARD_FILE, METRICS_FILE, RUN_FILE, eval_results, read_card, render_card
from d2l_bert.model_cards.figures import (
    evaluated_metrics,
    evaluation_section,
    replaced,
)
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig


# The section of `figures.evaluation_section` in a card.
SECTION = r"<!-- figures of d2l-bert evaluate -->.*?<!-- end of the figures of d2l-bert evaluate -->"

# In a card that has no figures of an evaluation yet, their section goes before the first of these headings.
HEADINGS_AFTER = (
    *("## Machine and speed", "## Bias, risks and limitations"),
    *("## Make it again", "## Reproduce it", "## Citation"),
)


def check_updatable(name: str) -> None:
    """
    Refuse a model whose metrics.json and card cannot be updated, before it is evaluated.

    Args:
        name: the folder of a model; an id on the Hub is refused.

    Raises:
        UserError: there is no such folder, it cannot be written, or its metrics.json or card cannot be read.
    """
    folder = Path(name)
    cases = {
        "is no folder here; leave update_card out, or give a model's folder": not folder.is_dir(),
        "cannot be written; leave update_card out, or allow writing there": not os.access(folder, os.W_OK),
    }
    refuse_first(cases, f"update_card: {name} ")
    read_json(folder / METRICS_FILE)
    if (folder / CARD_FILE).exists():
        read_card(folder)


def update_folder(folder: Path, text: str | None, figures: dict | None, blimp: dict | None) -> None:
    """
    Write figures into metrics.json and README.md. They replace earlier ones on the same text, or of BLiMP.

    Of an existing card, only the section of these figures and the metadata's `model-index` change. A folder without a
    card gets one: a d2l-bert model's from its own files, any other model's with these figures alone.

    Args:
        text, figures, blimp: as in `figures.replaced`.

    Raises:
        UserError: the card cannot be read, or the folder cannot be written.
    """
    before, path = read_json(folder / METRICS_FILE), folder / CARD_FILE
    metrics = replaced(before, text, figures, blimp)
    is_ours = read_json(folder / "config.json").get("model_type") == D2lBertConfig.model_type
    with writing(folder):
        write_json(folder / METRICS_FILE, metrics)
        if path.is_file() or not is_ours:
            metadata = ModelCardData(library_name="transformers", pipeline_tag="fill-mask")
            new = f"---\n{metadata}\n---\n# {folder.resolve().name}\n"
            card = read_card(folder) if path.is_file() else ModelCard(new)
            names = {metric.name for metric in (*evaluated_metrics(before), *evaluated_metrics(metrics))}
            found = eval_results(metrics, read_json(folder / RUN_FILE).get("data", {}))
            kept = [result for result in card.data.eval_results or [] if result.metric_name not in names]
            card.data.eval_results = kept + [result for result in found if result.metric_name in names]
            card.data.model_name = card.data.model_name or folder.resolve().name
            section = evaluation_section(metrics)
            body, replaced_one = re.subn(SECTION, lambda _: section, card.text, count=1, flags=re.DOTALL)
            if not replaced_one:
                headings = [f"\n{heading}\n" for heading in HEADINGS_AFTER]
                place = min([body.index(heading) for heading in headings if heading in body], default=len(body))
                body = f"{body[:place].rstrip()}\n\n{section}\n{body[place:]}"
            card.text = body
            content = card.content
        else:
            content = render_card(folder)
        partial = path.with_name(f".{path.name}.part")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
