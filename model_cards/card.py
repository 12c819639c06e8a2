"""The model card: each figure in it is from a file of the model's own folder, and what no file says is left out."""

import json
import math
import re
import shlex
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump
from jinja2 import UndefinedError
from safetensors import safe_open

from d2l_bert import model_cards
from d2l_bert.errors import UserError
from d2l_bert.folders import read_json
from d2l_bert.model_cards.metadata import read_metadata, split_card
from d2l_bert.pair_tasks import PAIR_TASKS, pair_task, unit


CARD_FILE = "README.md"
RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
CURVES_FILE = "training_curves.png"

# What a model is for, by its head: the Hub's tasks.
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
    The card of a model folder: metadata for the Hub and a text for people.

    Args:
        folder: with `config.json` and `model.safetensors`; what `run_config.json`, `metrics.json` and
            `training_curves.png` say is told where they are there.
        name: of the model; the folder's by default.
    """
    config = read_json(folder / "config.json")
    record, metrics = read_json(folder / RUN_FILE), read_json(folder / METRICS_FILE)
    return card_of(
        name or folder.resolve().name,
        config,
        count_parameters(folder),
        record,
        metrics,
        (folder / CURVES_FILE).exists(),
    )


def card_of(name: str, config: dict, parameters: int, record: dict, metrics: dict, has_curves: bool) -> str:
    """`render_card` of what the files say; `record` is that of run_config.json, empty where there is none."""
    run, data = record.get("run", {}), record.get("data", {})
    task = PAIR_TASKS.get(run.get("objective"))
    start, language = run.get("init_from"), run.get("language")
    base_model = start
    if start in (local := record.get("local_paths", {})):
        start, base_model = local[start]["name"], None
    elif start in (path["name"] for path in record.get("fingerprints", [])):  # of a published folder
        base_model = None
    pipeline_tag = PIPELINE_TAGS[_head(config)]
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
        eval_results=_eval_results(metrics, data) or None,
        widget=metrics.get("predictions") or None,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(Path(model_cards.__file__).parent / "TEMPLATE.md"),
        name=name,
        quoted_name=quoted(name),
        shell_name=shlex.quote(name),
        prompt=quoted(prompts[0] if prompts else "Paris is the [MASK] of France."),
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
        # Nobody makes one step of a run alone. Old records have no command.
        command=record.get("command") if "checkpoint_step" not in record else None,
        is_prepared=record.get("corpus_is_prepared"),
        checkpoint_step=record.get("checkpoint_step"),
        data_rows=_data_rows(run, data) if data else [],
        procedure_rows=_procedure_rows(record, metrics, config, task, start) if run else [],
        evaluation_rows=[(row, shown(metrics[key], measured_in)) for row, key, measured_in, *_ in figures(metrics)],
        machine_rows=_machine_rows(record, metrics, task),
        examples=[
            (cell(example["text"]), ", ".join(_guess(**guess) for guess in example["output"]))
            for example in metrics.get("predictions", [])
        ],
    )
    return card.content


def read_card(folder: Path, license: str | None = None) -> tuple[str, dict]:
    """
    The card, made from the folder's other files if there is none, and its metadata.

    Args:
        license: takes the place of the card's.
    """
    path = folder / CARD_FILE
    try:
        card = path.read_text(encoding="utf-8") if path.is_file() else render_card(folder)
        metadata = read_metadata(card)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); write it anew in UTF-8, or delete it") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, AttributeError, LookupError, TypeError, UndefinedError) as error:
        raise UserError(
            f"{path}: cannot be written from {RUN_FILE} and {METRICS_FILE} ({type(error).__name__}: {error}); put "
            f"back what the run wrote, or take them out"
        ) from None
    if license is not None:
        metadata = {**metadata, "license": license}
        card = f"---\n{yaml_dump(metadata, sort_keys=False)}---\n{split_card(card)[1]}"
    return card, metadata


def auto_class(config: dict) -> str:
    """The class of Transformers' that loads a model for what it is mostly used for."""
    head = _head(config)
    return "AutoModelForMaskedLM" if head == "ForPreTraining" else f"Auto{head.replace('For', 'ModelFor')}"


def _head(config):
    return config["architectures"][0].removeprefix("D2lBert")


def count_parameters(folder: Path) -> int:
    """How many numbers the weights hold; what is tied is there once."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return count


def quoted(text: str) -> str:
    """Text as Python and JSON write it."""
    return json.dumps(text, ensure_ascii=False)


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------------------------------------------------------------
# Rows of its tables: what, and how much


def _data_rows(run, data):
    rows = [
        ("corpus", f"{data['corpus_name']}, fingerprint `{data['corpus_fingerprint']}`"),
        ("training text", f"{data['train_documents']:,} documents, {data['train_tokens']:,} tokens"),
        ("held out", f"{data['held_out_documents']:,} documents, {data['held_out_tokens']:,} tokens"),
        ("language", run.get("language")),
        *_choices(run, data),
    ]
    if report := data.get("tokenizer"):
        added = f"; up to {run['extend_vocab']:,} words of the corpus were added" if run.get("extend_vocab") else ""
        pieces = " ".join(f"`{piece}`" for piece in report["longest_pieces"])
        rows += [
            (
                "tokenizer",
                f"WordPiece; on {report['words']:,} held-out words {report['pieces_per_word']:.2f} pieces a word, "
                f"{100 * report['unknown_share']:.2f} % `[UNK]`{added}",
            ),
            ("its longest pieces", pieces),
        ]
    return [(name, cell(text)) for name, text in rows if text]


def _choices(run, data):
    """What was taken of the text, where that is not all of it, as it is."""
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
    left_out = f"; {skipped:,} of them left out, their loss or gradient not being finite" if skipped else ""
    share = run["mlm_probability"]
    decay_ratio = run["decay_ratio"] or record.get("decay_ratio")
    falls = f"in the last {_percent(decay_ratio)} of the steps" if decay_ratio else "at the end"
    fall = {
        "linear": "a straight line",
        "cosine": "half a cosine",
        "warmup_stable_decay": f"flat, then 1 - sqrt {falls}",
    }[run["lr_scheduler_type"]]
    step = record.get("checkpoint_step")
    average = ""
    if run["ema_decay"] and not step:
        average = f"; the weights are a moving average with decay {run['ema_decay']}"
    rows = [
        ("objective", f"masked language model (MLM){f' and {task.name} ({task.short})' if task else ' alone'}"),
        (units, f"{'`' + run['pairing'] + '`' if task else 'one segment each'}, at most {length} tokens{lengths}"),
        (
            "masking",
            f"{share if isinstance(share, str) else _percent(share)} of the {MASKED[run['masking']]}: "
            f"80 % `[MASK]`, 10 % random, 10 % kept",
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
            f"{left_out}",
        ),
        (
            "optimizer",
            f"{OPTIMIZERS[run['optim']]}, peak rate {run['learning_rate']:g}, betas {run['adam_beta1']} and "
            f"{run['adam_beta2']}, weight decay {run['weight_decay']}; {_percent(run['warmup_ratio'])} warm-up, "
            f"then {fall}{average}",
        ),
        ("gradient norm", f"at most {run['max_grad_norm']:g}; a longer gradient is scaled down"),
        ("dropout", f"{config['hidden_dropout_prob']:g}, in attention {config['attention_probs_dropout_prob']:g}"),
        ("rows", "several to a row, which cannot see each other" if run["packing"] else ""),
        ("precision", {"no": "float32"}.get(run["mixed_precision"], run["mixed_precision"])),
        ("seed", run["seed"]),
    ]
    return [(name, text) for name, text in rows if text != ""]


def _machine_rows(record, metrics, task):
    machine, versions = record.get("machine", {}), record.get("versions", {})
    processes, threads = machine.get("processes", 1), machine.get("threads")
    on = machine.get("accelerator") or machine.get("processor") or machine.get("device")
    if on and not machine.get("accelerator") and threads:
        on += f", {threads} {'thread' if threads == 1 else 'threads'}"
    if on and processes > 1:
        on = f"{processes} processes, each on {on}"
    speeds = [
        f"{metrics[key]:,.0f} {what}/s"
        for what in (unit(task), "tokens")
        if (key := f"train_{what}_per_second") in metrics
    ]
    mfu, padding, wait = (metrics.get(f"train_{name}") for name in ("mfu", "padding_share", "data_wait_share"))
    seconds, memory, energy = (metrics.get(f"train_{name}") for name in ("seconds", "memory_mb", "energy_kwh"))
    rows = [
        ("machine", on),
        ("time", None if seconds is None else _time(seconds)),
        ("speed", ", ".join(speeds)),
        (
            "share of the peak (MFU)",
            None if mfu is None else f"{100 * mfu:.1f} % of the measured peak of matrix products",
        ),
        ("padding", None if padding is None else f"{100 * padding:.1f} % of the tokens computed"),
        ("waiting for data", None if wait is None else f"{100 * wait:.1f} % of the time"),
        ("memory of a process" if processes > 1 else "memory", None if memory is None else f"{memory:,.0f} MB"),
        (
            "energy",
            None
            if None in (energy, seconds)
            else f"about {_energy(energy)}: E = P x t = {metrics['train_power_watts']:,.1f} W x {seconds:,.0f} s; "
            f"{metrics['train_power_source']}; cooling is not in it",
        ),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(name, cell(text)) for name, text in rows if text]


def figures(metrics: dict) -> list[tuple[str, str, str, str, str, str]]:
    """Of each figure in metrics.json: its name, its key there, its unit, the Hub's task and its name, and its type."""
    task = pair_task(metrics)
    mlm = ("fill-mask", "Masked language modeling")
    known = [
        ("MLM loss", "eval_mlm_loss", "nats", *mlm, "loss"),
        ("MLM perplexity", "eval_perplexity", "", *mlm, "perplexity"),
        ("MLM accuracy", "eval_mlm_accuracy", "%", *mlm, "accuracy"),
    ]
    if task:
        pair = ("text-classification", task.name.capitalize())
        known += [
            (f"{task.short} loss", f"eval_{task.key}_loss", "nats", *pair, "loss"),
            (f"{task.short} accuracy", f"eval_{task.key}_accuracy", "%", *pair, "accuracy"),
        ]
    known.append(("BLiMP accuracy", "eval_blimp_accuracy", "%", "text-classification", "Minimal pairs", "accuracy"))
    return [figure for figure in known if figure[1] in metrics]


def shown(value: float, measured_in: str) -> str:
    """A figure as the card's text says it."""
    return {"nats": f"{value:.3f} nats", "%": f"{100 * value:.1f} %"}.get(measured_in, f"{value:.1f}")


def _guess(label, score):
    return f"{cell(label) if '`' in label else f'`{cell(label)}`'} ({score:.2f})"


def _energy(kwh):
    return f"{kwh:,.1f} kWh" if kwh >= 1 else f"{1000 * kwh:,.2f} Wh"


def _times(factor):
    return f"{factor} times " if factor > 1 else ""


def _time(seconds):
    return f"{seconds:,.0f} s" if seconds < 3600 else f"{seconds:,.0f} s, {seconds / 3600:,.1f} hours"


def _percent(share):
    return f"{100 * float(share):.3g} %"


def _eval_results(metrics, data):
    corpus = data.get("corpus_name")
    # The Hub takes a name of a data set as a type, no list of them.
    if (corpus_type := corpus) not in data.get("hub_datasets", []):
        corpus_type = re.sub(r"[^\w.-]+", "-", corpus or "", flags=re.ASCII).strip("-") or "text"
    datasets = {"BLiMP accuracy": ("nyu-mll/blimp", "BLiMP")}
    return [
        EvalResult(
            task_type=task_type,
            task_name=task_name,
            dataset_type=datasets.get(name, (corpus_type,))[0],
            dataset_name=datasets.get(name, (None, f"{corpus}, held-out documents"))[1],
            metric_type=metric_type,
            metric_name=name,
            metric_value=round(metrics[key], 4),
        )
        for name, key, _, task_type, task_name, metric_type in figures(metrics)
        if corpus and math.isfinite(metrics[key])
    ]
