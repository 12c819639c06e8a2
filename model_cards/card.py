"""Writes and reads the model card. All numbers in a new card come from the files in the model's folder."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers.utils import cached_file

from d2l_bert import model_cards
from d2l_bert.folders import read_json, write_json
from d2l_bert.messages import counted, explained
from d2l_bert.model_cards.figures import (
    DEVIATIONS,
    cell,
    deviations,
    evaluation_section,
    finetuned_metrics,
    formatted,
    no_better,
    onnx_section,
    quoted,
    reported_metrics,
    shown_metric,
)
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.tokenization.account import account_line


CARD_FILE = "README.md"
RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
CURVES_FILE = "training_curves.png"
RELEASE_FILE = "release.json"
STAGED = ".hub-"  # prefix of temporary folders in a run's folder: copies of checkpoints that wait to be sent

# The Hub's task (`pipeline_tag`) of each model class, without the prefix D2lBert.
PIPELINE_TAGS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForNextSentencePrediction": None,  # the Hub has no task for it
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}

MASKED = {"token": "tokens", "whole_word": "tokens, whole words", "span": "tokens, spans of whole words"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices of the encoder's blocks, AdamW for all else"}


def render_card(folder: Path, name: str | None = None) -> str:
    """
    The card of a model folder: metadata for the Hub, and a text for people.

    Args:
        folder: has `config.json` and `model.safetensors`. The card also shows the contents of `run_config.json`,
            `metrics.json`, `training_curves.png` and `release.json`, if the folder has these files.
        name: the name of the model, by default the name of the folder.
    """
    config = read_json(folder / "config.json")
    record, metrics = read_json(folder / RUN_FILE), read_json(folder / METRICS_FILE)
    if "pictures" in metrics:
        there = {file: caption for file, caption in metrics["pictures"].items() if (folder / file).is_file()}
        metrics = {**metrics, "pictures": there}
    return card_of(
        name or folder.resolve().name,
        config,
        count_parameters(folder),
        record,
        metrics,
        (folder / CURVES_FILE).exists(),
        read_json(folder / RELEASE_FILE),
    )


def card_of(
    name: str,
    config: dict,
    parameters: int,
    record: dict,
    metrics: dict,
    has_curves: bool,
    release: dict | None = None,
) -> str:
    """
    As `render_card`, from the contents of the files.

    Args:
        config: the content of config.json.
        parameters: the number of weights.
        record: the content of run_config.json; empty if there is no such file.
        metrics: the content of metrics.json; empty if there is no such file.
        has_curves: whether there is a training_curves.png.
        release: the content of release.json of a released model; None or empty if there is no such file.
    """
    has_kept_head = config["architectures"][0].endswith(record.get("auto_class", "").removeprefix("AutoModel"))
    if "finetune" in record and has_kept_head:
        return finetuned_card(name, config, parameters, record, metrics)
    run, data = record.get("run", {}), record.get("data", {})
    task = PAIR_TASKS.get(run.get("objective"))
    start, language = run.get("init_from"), run.get("language")
    base_model = start
    if start in (local := record.get("local_paths", {})):
        start, base_model = local[start]["name"], None
    elif start in (path["name"] for path in record.get("fingerprints", [])):  # a published run_config.json
        base_model = None
    pipeline_tag = PIPELINE_TAGS[head_of(config["architectures"][0])]
    stated = deviations(release, metrics) if release else {}
    prompts = [example["text"] for example in metrics.get("predictions", [])]
    prompt = quoted(min(prompts, key=len) if prompts else "Paris is the [MASK] of France.")
    card_data = ModelCardData(
        language=language and language.partition("-")[0],
        language_bcp47=[language] if language and "-" in language else None,
        license=run.get("license"),
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=list(filter(None, ["d2l-bert", "bert", pipeline_tag, task and task.name.replace(" ", "-")])),
        datasets=data.get("hub_datasets") or None,
        model_name=name,
        base_model=base_model,
        eval_results=eval_results(metrics, data) or None,
        widget=metrics.get("predictions") or None,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(Path(model_cards.__file__).parent / "TEMPLATE.md"),
        name=name,
        quoted_name=quoted(name),
        shell_name=shlex.quote(name),
        is_ours=config["model_type"] == "d2l-bert",
        prompt=prompt,
        onnx=onnx_section(metrics, quoted(name), prompt),
        auto_class=auto_class(config),
        pipeline_tag=pipeline_tag,
        parameters=parameters,
        config=config,
        run=run,
        data=data,
        metrics=metrics,
        versions=record.get("versions", {}),
        task=task,
        unit=unit(task),
        start=start,
        has_curves=has_curves,
        # A checkpoint has no command of its own, and old records have no command at all.
        command=record.get("command") if "checkpoint_step" not in record else None,
        is_prepared=record.get("corpus_is_prepared"),
        checkpoint_step=record.get("checkpoint_step"),
        checkpoint_words=record.get("checkpoint_words"),
        about=(release or {}).get("recipe", {}).get("about", "").strip(),
        cell=cell,
        counted=counted,
        account=account_line(data["account"]) if "account" in data else None,
        shown={metric.key: formatted(metrics[metric.key], metric.unit) for metric in reported_metrics(metrics)},
        masked_units=MASKED,
        optimizers=OPTIMIZERS,
        decay_ratio=run.get("decay_ratio"),
        software=", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        evaluation_rows=[
            (metric.name, formatted(metrics[metric.key], metric.unit))
            for metric in reported_metrics(metrics)
            if metric.text is None
        ],
        further_evaluation=evaluation_section(metrics),
        release=release,
        machine=record.get("machine", {}),
        deviations_apart=DEVIATIONS,
        deviation_rows=[
            (metric.name, *(formatted(value, metric.unit) for value in (metrics[metric.key], sd, DEVIATIONS * sd)))
            for metric in reported_metrics(metrics)
            if (sd := stated.get(metric.key)) is not None
        ],
        examples=metrics.get("predictions", []),
    )
    return card.content


# The tasks of fine-tuning, in a sentence.
KINDS = {
    "classification": "the classification of {texts} into {classes} classes",
    "multilabel": "the choice of any of {classes} labels for {texts}",
    "regression": "the prediction of a number for {texts}",
    "tags": "the choice of one of {classes} tags for each word of a text",
    "answers": "answers to questions, as spans of a context",
    "multiple_choice": "the choice of the right one of several texts",
}


def finetuned_card(
    name: str,
    config: dict,
    parameters: int,
    record: dict,
    metrics: dict,
) -> str:
    """
    The card of a fine-tuned model: metadata for the Hub, and a text for people.

    Args:
        name: the name of the model.
        config: the content of config.json.
        parameters: the number of weights.
        record: the content of run_config.json, with an entry `finetune`.
        metrics: the content of metrics.json.
    """
    run, base, data = record["finetune"], record["base_model"], record["data"]
    kind, pipeline_tag = record["kind"], PIPELINE_TAGS[record["auto_class"].removeprefix("AutoModel")]
    is_ours = config.get("model_type") == "d2l-bert"
    is_derived = base["revision"] is not None and not run.get("from_scratch")  # a model on the Hub, and its weights
    hub_dataset = next(iter(data["hub_datasets"]), None)
    card_data = ModelCardData(
        license=run.get("license"),
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=[*(["d2l-bert"] if is_ours else []), "bert", "fine-tuned", kind.replace("_", "-")],
        datasets=data["hub_datasets"] or None,
        model_name=name,
        base_model=base["name"] if is_derived else None,
        eval_results=_eval_results(metrics, data, run, hub_dataset, pipeline_tag) or None,
    )
    if is_derived:
        card_data.base_model_relation = "finetune"
    pair = data.get("has_pairs")
    pair_example = {"text": "A text pair's first text.", "text_pair": "Its second text."}
    example = json.dumps(pair_example if pair else "A text of your own.")
    base_sentence = f"{base['name']} ({parameters:,} parameters)"
    if run.get("from_scratch"):
        base_sentence = f"The architecture of {base_sentence} with fresh weights, without pretraining"
    card = ModelCard.from_template(
        card_data,
        template_path=str(Path(model_cards.__file__).parent / "FINETUNED.md"),
        name=name,
        quoted_name=quoted(name),
        is_ours=is_ours,
        onnx=onnx_section(metrics, quoted(name), ""),
        kind=kind,
        base_sentence=base_sentence,
        task_sentence=KINDS[kind].format(
            texts="pairs of texts" if pair else "texts", classes=len(config.get("id2label") or {})
        ),
        pipeline_task=record["pipeline_task"],
        auto_class=record["auto_class"],
        example=record.get("example") or example,
        null_threshold=run["null_score_diff_threshold"] if data.get("has_unanswerable") else None,
        versions=record.get("versions", {}),
        figures=[(shown, formatted(metrics[key], unit)) for shown, key, unit, _ in finetuned_metrics(metrics)],
        record=record,
        run=run,
        base=base,
        data=data,
        metrics=metrics,
        cell=cell,
        counted=counted,
        no_better=no_better,
        shown_metric=shown_metric,
        pictures=list(metrics.get("pictures", {}).items()),
        dropout=", ".join(f"`{name}={rate}`" for name, rate in record["dropout"].items() if rate is not None),
        software=", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        length=record["max_seq_length"],
        command=record["command"],
    )
    return card.content


def _eval_results(metrics, data, run, hub_dataset, pipeline_tag):
    results = []
    for shown, key, _, metric_type in finetuned_metrics(metrics):
        split = key.partition("_")[0]
        table = data["splits"][split]["name"]
        is_of_hub = hub_dataset and not run.get(f"{split}_file")
        invented = re.sub(r"[^\w.-]+", "-", table, flags=re.ASCII).strip("-") or "table"
        if math.isfinite(metrics[key]):
            results.append(
                EvalResult(
                    task_type=pipeline_tag,
                    dataset_type=hub_dataset if is_of_hub else invented,
                    dataset_name=table,
                    dataset_split=split,
                    metric_type=metric_type,
                    metric_name=shown,
                    metric_value=round(metrics[key], 4),
                )
            )
    return results


def carry_card(source: str, folder: Path, name: str, has_figures: bool = True, export: dict | None = None) -> None:
    """
    Give a converted model what its source has: the record of the run, figures, pictures and a card with its licence.

    The card is rendered anew, as a stock BERT is loaded in another way. A release's record stays behind: it tells how
    to make other bytes.

    Args:
        source: the model that was converted, a folder or an id on the Hub.
        folder: the converted model.
        name: its name in the card.
        has_figures: whether the figures are those of the converted model, too, which may have lost a head.
        export: what `d2l-bert export` has measured.
    """

    def copy(file):
        if found := cached_file(source, file, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(found, folder / file)
        return found

    for file in (RUN_FILE, CURVES_FILE, *([METRICS_FILE] if has_figures else [])):
        copy(file)
    metrics = read_json(folder / METRICS_FILE)
    for picture in metrics.get("pictures", {}):
        copy(picture)
    if export:
        write_json(folder / METRICS_FILE, {**metrics, "export": export})
    license = read_card(folder).data.license if copy(CARD_FILE) else None
    card = ModelCard(render_card(folder, name))
    card.data.license = license or card.data.license
    (folder / CARD_FILE).write_text(card.content, encoding="utf-8")


def read_card(folder: Path, license: str | None = None) -> ModelCard:
    """
    A folder's card. If the folder has none, one is written from the other files.

    Args:
        license: replaces the licence in the card.

    Raises:
        UserError: the card cannot be read, or its metadata is not valid.
    """
    path = folder / CARD_FILE
    with explained(
        f"{path}: cannot be read",
        "fix it, or delete it, and it is written again",
        OSError,
        ValueError,
        TypeError,
        yaml.YAMLError,
    ):
        card = ModelCard(path.read_text(encoding="utf-8-sig") if path.is_file() else render_card(folder))
    if license is not None:
        card.data.license = license
    return card


def auto_class(config: dict) -> str:
    """The name of the Auto class that loads the model for its usual task, such as `AutoModelForMaskedLM`."""
    head = head_of(config["architectures"][0])
    return "AutoModelForMaskedLM" if head == "ForPreTraining" else f"Auto{head.replace('For', 'ModelFor')}"


def head_of(model_class: str) -> str:
    """The name of a model class without the prefix D2lBert or Bert, such as `ForMaskedLM`."""
    return re.sub("^(D2lBert|Bert)", "", model_class)


def count_parameters(folder: Path) -> int:
    """The number of weights in the safetensors files; a tied matrix counts once."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return count


def eval_results(metrics: dict, data: dict) -> list[EvalResult]:
    """
    The figures of a model for the card's metadata.

    Args:
        metrics: the content of metrics.json.
        data: the entry `data` of run_config.json; without it, a run's own figures are left out.
    """
    validation = data.get("validation")
    corpus = (validation or data).get("corpus_name")
    part = "validation text" if validation else "held-out documents"
    return [
        EvalResult(
            task_type=metric.task_type,
            task_name=metric.task_name,
            dataset_type=_dataset_type(metric.text or corpus, data.get("hub_datasets", [])),
            dataset_name=metric.text or f"{corpus}, {part}",
            # Keeps the figures of `d2l-bert evaluate` apart from the run's own on a corpus of the same name.
            dataset_split="evaluation" if metric.text else None,
            metric_type=metric.metric_type,
            metric_name=metric.name,
            metric_value=round(metrics[metric.key], 4),
        )
        for metric in reported_metrics(metrics)
        if metric.in_metadata and math.isfinite(metrics[metric.key]) and (metric.text or corpus)
    ]


def _dataset_type(text, hub_datasets):
    """The id of a text in the card's metadata: that of one data set on the Hub, or an invented name."""
    if text.startswith("BLiMP"):
        return "nyu-mll/blimp"
    if text in hub_datasets:
        return text
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-") or "text"
