"""Writes and reads the model card. All numbers in a new card come from the files in the model's folder."""

import json
import math
import re
import shlex
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from d2l_bert import model_cards
from d2l_bert.errors import UserError
from d2l_bert.folders import read_json
from d2l_bert.model_cards.figures import (
    BLIMP,
    DEVIATIONS,
    deviations,
    evaluation_section,
    finite_metrics,
    formatted,
    reported_metrics,
)
from d2l_bert.model_cards.finetuned import cell, finetuned_card
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.progress import counted


CARD_FILE = "README.md"
RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
CURVES_FILE = "training_curves.png"
RELEASE_FILE = "release.json"

# The Hub's task (`pipeline_tag`) of each model class, without the prefix D2lBert.
PIPELINE_TAGS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForNextSentencePrediction": "text-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}

CLEANING = ("unicode_normalization", "min_paragraph_characters", "drop_duplicate_paragraphs")
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
    if "finetune" in record:
        tag = PIPELINE_TAGS[record["auto_class"].removeprefix("AutoModel")]
        return finetuned_card(name, config, parameters, record, metrics, record["auto_class"], tag, formatted)
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
        prompt=quoted(min(prompts, key=len) if prompts else "Paris is the [MASK] of France."),
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
        glance_rows=_glance_rows(run, data, metrics, config, parameters, bool(release)),
        data_rows=_data_rows(run, data) if data else [],
        procedure_rows=_procedure_rows(record, metrics, config, task, start) if run else [],
        evaluation_rows=[
            (metric.name, formatted(metrics[metric.key], metric.unit))
            for metric in reported_metrics(metrics)
            if metric.text is None
        ],
        further_evaluation=evaluation_section(metrics),
        machine_rows=_machine_rows(record, metrics, task),
        release=release,
        machine=record.get("machine", {}),
        deviations_apart=DEVIATIONS,
        deviation_rows=[
            (metric.name, *(formatted(value, metric.unit) for value in (metrics[metric.key], sd, DEVIATIONS * sd)))
            for metric in reported_metrics(metrics)
            if (sd := stated.get(metric.key)) is not None
        ],
        examples=[
            (cell(example["text"]), ", ".join(_guess(**guess) for guess in example["output"]))
            for example in metrics.get("predictions", [])
        ],
    )
    return card.content


def read_card(folder: Path, license: str | None = None) -> ModelCard:
    """
    A folder's card. If the folder has none, one is written from the other files.

    Args:
        license: replaces the licence in the card.

    Raises:
        UserError: the card cannot be read, or its metadata is not valid.
    """
    path = folder / CARD_FILE
    try:
        card = ModelCard(path.read_text(encoding="utf-8-sig") if path.is_file() else render_card(folder))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read ({reason}); mend it, or delete it, and it is written again") from None
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


def quoted(text: str) -> str:
    """Text as a string literal of Python and JSON."""
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the card's tables: name and text


def _glance_rows(run, data, metrics, config, parameters, is_release):
    """
    What a visitor wants to know first; without the rows that nothing is known of.

    BLiMP is here for a release alone: `d2l-bert evaluate --update_card` changes the section of its figures, not this.
    """
    if not data:
        return []
    by_name = {metric.key: formatted(metrics[metric.key], metric.unit) for metric in reported_metrics(metrics)}
    pair = [value for key, value in by_name.items() if re.fullmatch(r"eval_(nsp|sop)_accuracy", key)]
    seen, words = metrics.get("train_words_seen"), data["train_words"]
    size = f"{parameters:,} parameters: {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}"
    rows = [
        ("size", size),
        ("text", f"{words:,} words ({data['corpus_name']})"),
        ("words seen in training", f"{seen:,.0f}: {seen / words:.1f} passes over the text" if seen else None),
        ("masked tokens predicted, on held-out text", by_name.get("eval_mlm_accuracy")),
        ("order of two segments predicted (chance: 50 %)", ", ".join(pair)),
        ("BLiMP, grammar in minimal pairs (chance: 50 %)", by_name.get(BLIMP) if is_release else None),
        ("licence", run.get("license")),
    ]
    return [(name, cell(text)) for name, text in rows if text]


def _data_rows(run, data):
    rows = [
        ("corpus", f"{data['corpus_name']}, fingerprint `{data['corpus_fingerprint']}`"),
        ("training text", f"{counted(data['train_documents'], 'document')}, {data['train_tokens']:,} tokens"),
        *_evaluation_text(data),
        ("language", run.get("language")),
        *_choices(run, data),
    ]
    if report := data.get("tokenizer"):
        added = f"; up to {run['extend_vocab']:,} words of the corpus were added" if run.get("extend_vocab") else ""
        pieces = " ".join(f"`{piece}`" for piece in report["longest_pieces"])
        words = "words" if data.get("validation") else "held-out words"
        rows += [
            (
                "tokenizer",
                f"WordPiece; on {report['words']:,} {words} {report['pieces_per_word']:.2f} pieces a word, "
                f"{100 * report['unknown_share']:.2f} % `[UNK]`{added}",
            ),
            ("its longest pieces", pieces),
        ]
    return [(name, cell(text)) for name, text in rows if text]


def _evaluation_text(data):
    """What the model was evaluated on: a part held out of the corpus, or a text that the user gave."""
    size = f"{counted(data['held_out_documents'], 'document')}, {data['held_out_tokens']:,} tokens"
    if not (validation := data.get("validation")):
        return [("held out", size)]
    name, texts, shared = (validation[key] for key in ("corpus_name", "texts", "texts_in_training"))
    of_training = f"{shared:,} of its {texts:,}" if shared else f"none of its {texts:,}"
    return [
        ("validation text", f"{name}, fingerprint `{validation['corpus_fingerprint']}`: {size}"),
        ("held out", "nothing; the validation text is a text of its own, not a part of the corpus"),
        ("validation text in the training text", f"{of_training} files and rows"),
    ]


def _choices(run, data):
    """Rows for the options that select or clean text. The text of a row is empty if its option is not used."""
    are_all_on_hub = 0 < len(run["dataset"]) == len(data["hub_datasets"])
    cleaning = [f"`{name}={run[name]}`" for name in CLEANING if run[name] not in ("none", 0, False)]
    return [
        ("data sets", f"{', '.join(run['dataset'])}; split {run['dataset_split']}" if are_all_on_hub else ""),
        ("shares of the sources", " : ".join(run["source_weights"])),
        ("at most", f"{run['max_documents']:,} documents of each source" if run["max_documents"] else ""),
        ("cleaning", ", ".join(cleaning)),
    ]


def _procedure_rows(record, metrics, config, task, start):
    run = record["run"]
    units, length = unit(task), run["max_seq_length"]
    lengths = "".join(
        f"; {entry.split(':')[0]}, and {_times(length // int(entry.split(':')[0]))}as many {units} a step, in the "
        f"{'next' if number else 'first'} {_percent(entry.split(':')[1])} of the steps"
        for number, entry in enumerate(run["length_schedule"])
    )
    batches = "".join(
        f"{', then' if number else '; first'} {int(entry.split(':')[0]):,} for {_percent(entry.split(':')[1])}"
        f"{'' if number else ' of the steps'}"
        for number, entry in enumerate(run["batch_size_schedule"])
    )
    skipped = metrics.get("train_skipped_steps")
    skipped_text = f"; {skipped:,} steps skipped because their loss or gradient was not finite" if skipped else ""
    share, alone = run["mlm_probability"], "one sentence each" if run["pairing"] == "sentences" else "one segment each"
    masked, random = run.get("mask_replace_prob", 0.8), run.get("random_replace_prob", 0.1)
    decay_ratio = run["decay_ratio"] or record.get("decay_ratio")
    falls = f"in the last {_percent(decay_ratio)} of the steps" if decay_ratio else "at the end"
    fall = {
        "linear": "a straight line",
        "cosine": "half a cosine",
        "warmup_stable_decay": f"flat, then 1 - sqrt {falls}",
    }[run["lr_scheduler_type"]]
    step = record.get("checkpoint_step")
    average = ""
    if run["ema_decay"] and (not step or "checkpoint_words" in record):
        average = f"; the weights are a moving average with decay {run['ema_decay']}"
    rows = [
        ("objective", f"masked language model (MLM){f' and {task.name} ({task.short})' if task else ' alone'}"),
        (units, f"{'`' + run['pairing'] + '`' if task else alone}, at most {length} tokens{lengths}"),
        (
            "masking",
            f"{share if isinstance(share, str) else _percent(share)} of the {MASKED[run['masking']]}: "
            f"{_percent(masked)} `[MASK]`, {_percent(random)} random, {_percent(1 - masked - random)} kept",
        ),
        (
            "start",
            f"the weights, architecture and vocabulary of {start}"
            if start
            else f"`attention_init={run['attention_init']}`, `initializer_range={config['initializer_range']}`",
        ),
        (
            "steps",
            f"{f'{step:,} of ' if step else ''}{run['max_steps']:,} of {run['global_batch_size']:,} {units}{batches}"
            f"{skipped_text}",
        ),
        (
            "optimizer",
            f"{OPTIMIZERS[run['optim']]}, peak rate {run['learning_rate']:g}, betas {run['adam_beta1']} and "
            f"{run['adam_beta2']}, weight decay {run['weight_decay']}; {_percent(run['warmup_ratio'])} warm-up, "
            f"then {fall}{average}",
        ),
        ("gradient norm", f"at most {run['max_grad_norm']:g}; a longer gradient is scaled down"),
        ("dropout", f"{config['hidden_dropout_prob']:g}, in attention {config['attention_probs_dropout_prob']:g}"),
        ("rows", f"several {units} in a row, without attention between them" if run["packing"] else ""),
        ("precision", {"no": "float32"}.get(run["mixed_precision"], run["mixed_precision"])),
        ("seed", run["seed"]),
    ]
    return [(name, text) for name, text in rows if text != ""]


def _machine_rows(record, metrics, task):
    machine, versions = record.get("machine", {}), record.get("versions", {})
    processes, threads = machine.get("processes", 1), machine.get("threads")
    device = machine.get("accelerator") or machine.get("processor") or machine.get("device")
    if device and not machine.get("accelerator") and threads:
        device += f", {threads} {'thread' if threads == 1 else 'threads'}"
    if device and processes > 1:
        device = f"{processes} processes, each on {device}"
    speeds = [
        f"{metrics[key]:,.0f} {counted}/s"
        for counted in (unit(task), "tokens")
        if (key := f"train_{counted}_per_second") in metrics
    ]
    mfu, padding, wait = (metrics.get(f"train_{name}") for name in ("mfu", "padding_share", "data_wait_share"))
    seconds, memory = (metrics.get(f"train_{name}") for name in ("seconds", "memory_mb"))
    rows = [
        ("machine", device),
        ("time", None if seconds is None else _time(seconds)),
        ("speed", ", ".join(speeds)),
        (
            "share of the peak (MFU)",
            None if mfu is None else f"{100 * mfu:.1f} % of the measured peak of matrix products",
        ),
        ("padding", None if padding is None else f"{100 * padding:.1f} % of the tokens computed"),
        ("waiting for data", None if wait is None else f"{100 * wait:.1f} % of the time"),
        ("memory of a process" if processes > 1 else "memory", None if memory is None else f"{memory:,.0f} MB"),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(name, cell(text)) for name, text in rows if text]


def _guess(label, score):
    return f"{cell(label) if '`' in label else f'`{cell(label)}`'} ({score:.2f})"


def _times(factor):
    return f"{factor} times " if factor > 1 else ""


def _time(seconds):
    return f"{seconds:,.0f} s" if seconds < 3600 else f"{seconds:,.0f} s, {seconds / 3600:,.1f} hours"


def _percent(share):
    return f"{100 * float(share):.3g} %"


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
        for metric in finite_metrics(metrics)
        if metric.text or corpus
    ]


def _dataset_type(text, hub_datasets):
    """The id of a text in the card's metadata: that of one data set on the Hub, or an invented name."""
    if text.startswith("BLiMP"):
        return "nyu-mll/blimp"
    if text in hub_datasets:
        return text
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip("-") or "text"
