"""The folder that a run leaves: model, tokenizer, the code that runs it, and the card."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from d2l_bert import model_cards
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import DECAY_RATIO
from d2l_bert.training.pair_tasks import pair_task, unit


# What `trust_remote_code=True` finds in config.json where d2l_bert is not installed.
AUTO_MAP = {
    "AutoConfig": "configuration_d2l_bert.D2lBertConfig",
    "AutoModel": "modeling_d2l_bert.D2lBertModel",
    "AutoModelForPreTraining": "modeling_d2l_bert.D2lBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_d2l_bert.D2lBertForMaskedLM",
    "AutoModelForNextSentencePrediction": "modeling_d2l_bert.D2lBertForNextSentencePrediction",
    "AutoModelForSequenceClassification": "modeling_d2l_bert.D2lBertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_d2l_bert.D2lBertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_d2l_bert.D2lBertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_d2l_bert.D2lBertForMultipleChoice",
}


def export_model(model, tokenizer, folder: Path) -> None:
    """Write weights, configuration, tokenizer and the two files of code: the very files that were trained."""
    model.config.auto_map = dict(AUTO_MAP)
    save_model(model, tokenizer, folder)


def save_model(model, tokenizer, folder: Path) -> None:
    """Write weights, configuration and, unless it is None, the tokenizer of any model, for everybody to read."""
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors lets only the owner read it
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


@contextlib.contextmanager
def new_folder(folder: Path):
    """
    A folder to write into, which takes the name `folder` when the block is done; if the block fails it goes again.

    Raises:
        ValueError: `folder` holds something already, or cannot be made.
    """
    folder = folder.absolute()
    check_name(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{folder}: there is something already; name a new or empty folder")
    try:
        beside = next(parent for parent in folder.parents if parent.exists())
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=beside))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        with os_errors():
            yield partial
        partial.chmod(0o777 & ~_umask())  # mkdtemp lets only the owner in
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(folder)  # an empty folder of this name makes way
        except OSError as error:
            raise ValueError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    except OSError as error:
        reason = error.strerror or error.args[0][0][-1]  # shutil's own has a list of them
        raise ValueError(f"{folder}: cannot be written ({reason}); free some space, or name another folder") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def os_errors():
    """Raise what goes wrong with a disk as `OSError`; the libraries written in Rust have exceptions of their own."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def check_name(folder: Path) -> None:
    """Refuse a name that no JSON and no card could hold, before there is anything to lose."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ValueError(f"output_dir {ascii(str(folder))}: its name is not UTF-8; name another folder") from None


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    """Write `content` so that a reader finds the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def render_card(
    folder: Path, model, record: dict, metrics: dict, predictions: list[tuple[str, list[tuple[str, float]]]]
) -> ModelCard:
    """
    The model card of a run, every figure from its own files.

    Args:
        folder: the run's folder; its name is the model's.
        record: what run_config.json holds.
        metrics: what metrics.json holds.
        predictions: texts with one mask, and for each its likeliest tokens with their probabilities.
    """
    run, data = record["run"], record["data"]
    corpus, start = data["corpus_name"], run["init_from"]
    starts_on_hub = start is not None and not Path(start).exists()
    task = pair_task(metrics)
    card_data = ModelCardData(
        language=run["language"],
        license=run["license"],
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["d2l-bert", "bert", "fill-mask", *([task.name.replace(" ", "-")] if task else [])],
        datasets=data["hub_datasets"] or None,
        model_name=folder.name,
        base_model=start if starts_on_hub else None,
        eval_results=_eval_results(metrics, corpus),
        widget=[
            {"text": text, "output": [{"label": token, "score": round(score, 4)} for token, score in best]}
            for text, best in predictions
        ],
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(Path(model_cards.__file__).parent / "TEMPLATE.md"),
        name=folder.name,
        model_id=folder.name,
        parameters=model.num_parameters(),
        config=model.config,
        corpus=corpus,
        start=start if starts_on_hub or start is None else Path(start).resolve().name,
        run=run,
        decay_ratio=DECAY_RATIO,
        versions=record["versions"],
        data=data,
        metrics=metrics,
        task=task,
        unit=unit(task),
        examples=[
            {"text": text, "shown": ", ".join(f"{token} ({score:.2f})" for token, score in best)}
            for text, best in predictions
        ],
    )


def _eval_results(metrics, corpus):
    figures = [
        ("fill-mask", "Masked language modeling", "loss", "MLM loss", metrics["eval_mlm_loss"]),
        ("fill-mask", "Masked language modeling", "perplexity", "MLM perplexity", metrics["eval_perplexity"]),
        ("fill-mask", "Masked language modeling", "accuracy", "MLM accuracy", metrics["eval_mlm_accuracy"]),
    ]
    if task := pair_task(metrics):
        for figure in ("loss", "accuracy"):
            value = metrics[f"eval_{task.key}_{figure}"]
            figures.append(("text-classification", task.name.capitalize(), figure, f"{task.short} {figure}", value))
    return [
        EvalResult(
            task_type=task_type,
            task_name=task_name,
            dataset_type=corpus,
            dataset_name=f"{corpus}, held-out documents",
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=round(value, 4),
        )
        for task_type, task_name, metric_type, metric_name, value in figures
    ]
