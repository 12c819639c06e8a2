"""The metadata of a model's card, as the Hub reads them: language, task, data sets, figures."""

import math
import re

from huggingface_hub import EvalResult, ModelCardData

from d2l_bert.model_cards import figures
from d2l_bert.model_cards.facts import HUB_ID, Records
from d2l_bert.model_cards.figures import Origin
from d2l_bert.model_cards.markdown import HIDDEN, shown


# The Hub's task (`pipeline_tag`) of each head; it has none for others.
PIPELINE_TAGS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}


def card_data(records: Records, examples: list[dict]) -> ModelCardData:
    """
    The metadata of a card.

    Args:
        examples: the predictions that the card shows.
    """
    run = records.run
    languages = records.languages
    codes = [tag.partition("-")[0] for tag in languages]
    pipeline_tag = PIPELINE_TAGS.get(records.head)
    base_model = records.start if records.start_is_on_hub and not run.get("from_scratch") else None
    tags = ["d2l-bert", records.config["model_type"].removeprefix("d2l-"), pipeline_tag]
    if records.is_tuned:
        tags.append("fine-tuned")
    if records.pair_task:
        tags.append(records.pair_task.name.replace(" ", "-"))
    return ModelCardData(
        language=codes if len(codes) > 1 else next(iter(codes), None),
        language_bcp47=[tag for tag in languages if "-" in tag] or None,
        license=run.get("license") and shown(run["license"]),
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=[shown(tag) for tag in tags if tag],
        datasets=[each for each in records.data.get("hub_datasets", []) if HUB_ID.fullmatch(each)] or None,
        model_name=records.name,
        base_model=base_model,
        base_model_relation="finetune" if records.is_tuned and base_model else None,
        eval_results=eval_results(records.metrics, records.run_record, pipeline_tag) or None,
        # Texts stand in the metadata unescaped: those with invisible characters are left out.
        widget=[{"text": each["text"]} for each in examples if not HIDDEN.search(each["text"])] or None,
    )


def eval_results(metrics: dict, record: dict, pipeline_tag: str | None) -> list[EvalResult]:
    """
    The figures of a model for the card's metadata.

    Args:
        metrics: the content of metrics.json.
        record: the content of run_config.json; without it, a run's own figures are left out.
        pipeline_tag: the Hub's task of the model.
    """
    data = record.get("data", {})
    measured_on = _measured_on(record)
    results = []
    for figure in figures.reported_figures(metrics):
        name = figure.text or measured_on.get(figure.split)
        if figure.task is None or not name or not math.isfinite(metrics[figure.key]):
            continue
        on_hub = _id_on_hub(figure, name, data.get("hub_datasets", []))
        results.append(
            EvalResult(
                task_type=figure.task.type or pipeline_tag,
                task_name=figure.task.name,
                dataset_type=on_hub or invented_id(name),
                dataset_name=shown(name),
                dataset_split=_dataset_split(figure, data, on_hub),
                metric_type=shown(figure.metric_type),
                metric_name=shown(figure.name),
                metric_value=round(metrics[figure.key], 4),
            )
        )
    return results


def _dataset_split(figure, data, on_hub):
    """The split of the data set that a figure is of, for the metadata; None for held-out text."""
    if figure.origin == Origin.EVALUATION:
        # Keeps the figures of `d2l-bert evaluate` apart from those of a run on a corpus of the same name.
        return "evaluation"
    if "splits" not in data:
        return None
    if not on_hub:
        return shown(figure.split)
    # As the Hub calls the split: the rows of a data set have a name such as "owner/name, split test".
    name_of_rows = data["splits"][figure.split]["name"]
    return shown(name_of_rows.rpartition(", split ")[2])


def _measured_on(record):
    """The names of the text or the rows that a run's own figures are of, by a figure's `split`."""
    data = record.get("data", {})
    validation = data.get("validation")
    corpus = (validation or data).get("corpus_name")
    part = "validation text" if validation else "held-out documents"
    names = {"eval": f"{corpus}, {part}" if corpus else None}
    hub_datasets = data.get("hub_datasets", [])
    for split, table in data.get("splits", {}).items():
        is_of_dataset = hub_datasets and not record["finetune"].get(f"{split}_file")
        names[split] = hub_datasets[0] if is_of_dataset else table["name"]
    return names


def _id_on_hub(figure, name, hub_datasets):
    """The id on the Hub of the data set that a figure is of; None if it is not there."""
    if figure.key == figures.BLIMP:
        return "nyu-mll/blimp"
    return name if name in hub_datasets and HUB_ID.fullmatch(name) else None


def invented_id(name: str) -> str:
    """A name as the metadata want it of a data set that is not on the Hub: it follows the rules of the Hub's ids."""
    words = re.sub(r"[^A-Za-z0-9]*[^\w.-][^A-Za-z0-9]*|[-.]{2,}", "-", name[:200], flags=re.ASCII)
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", words[:96]).removesuffix(".git") or "text"
