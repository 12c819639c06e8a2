"""The folder that a run leaves: claimed at the start, its record kept from then on, filled at the end."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import shutil
from pathlib import Path

import torch

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM
from d2l_bert.training import evaluate, publish
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.tracking import TrainingLog, plot_curves


RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
LOG_FILE = "training_log.jsonl"
CURVES_FILE = "training_curves.png"


@contextlib.contextmanager
def output_folder(run: PretrainConfig):
    """
    Claim the run's folder; if the block fails and nothing was written, take it away again.

    Raises:
        ValueError: it cannot be written, holds other things, or a run that was not asked to be resumed or replaced.
    """
    folder = Path(run.output_dir or default_output_dir(run))
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
        entries = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ValueError(f"output_dir {folder}: cannot be written ({error.strerror}); name another folder") from None
    if RUN_FILE in entries:
        if not (run.resume_from_checkpoint or run.overwrite_output_dir):
            raise ValueError(
                f"output_dir {folder}: holds a run; go on with --resume_from_checkpoint latest, replace it with "
                f"--overwrite_output_dir, or name another folder"
            )
    elif entries:
        raise ValueError(
            f"output_dir {folder}: holds other things ({sorted(entries)[0]}) and no run; name a new or empty folder"
        )
    try:
        yield folder
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def default_output_dir(run: PretrainConfig) -> str:
    """`d2l-bert-<recipe>-<corpus>`, here."""
    name = run.dataset or (run.corpus[0] if len(run.corpus) == 1 else "texts")
    return f"d2l-bert-{run.recipe}-{Path(name).resolve().stem}"


def make_record(run: PretrainConfig, max_steps: int, architecture, text, accelerator) -> dict:
    """Everything that run_config.json says: resolved options, library versions, the corpus, the machine."""
    resolved = dataclasses.replace(run, max_steps=max_steps, num_train_epochs=None, max_minutes=None)
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sentencex")
    return {
        "run": dataclasses.asdict(resolved),
        "architecture": architecture_numbers(architecture),
        "data": text.counts(),
        "machine": {
            "device": str(accelerator.device),
            "processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }


def architecture_numbers(architecture: D2lBertConfig) -> dict:
    """The fields that D2lBertConfig adds to Transformers' own."""
    return {name: getattr(architecture, name) for name in D2lBertConfig.__annotations__}


def start_folder(folder: Path, record: dict, start: int) -> TrainingLog:
    """Write the record and open the log; clear away what an earlier run left beyond the step this one starts from."""
    if start == 0:
        for old in folder.glob("*checkpoint-*"):
            shutil.rmtree(old)
        for name in (METRICS_FILE, CURVES_FILE, "README.md", "model.safetensors"):
            (folder / name).unlink(missing_ok=True)
    log = TrainingLog(folder / LOG_FILE)
    log.start_at(start)
    publish.write_json(folder / RUN_FILE, record)
    return log


def finish_folder(folder: Path, model, text, record: dict, metrics: dict, log: TrainingLog, held_out) -> str:
    """Write model, tokenizer, code, figures, curves and card; return what there is to say about them."""
    publish.export_model(model, text.tokenizer, folder)
    publish.write_json(folder / METRICS_FILE, metrics)
    plot_curves(log.rows(), folder / CURVES_FILE)
    sentences = evaluate.example_sentences(text)
    # Out of the folder, as a reader will load it.
    filled = evaluate.fill_mask(D2lBertForMaskedLM.from_pretrained(folder), text.tokenizer, sentences)
    predictions = [(sentence, best[0]) for sentence, best in zip(sentences, filled, strict=True)]
    card = publish.render_card(folder, model, record, metrics, predictions)
    card.save(folder / "README.md")
    return evaluate.report(folder, model, text.tokenizer, metrics, held_out.one(0), predictions)
