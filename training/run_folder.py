"""The output folder of a run: locked and checked at the start, `run_config.json`, the finished model at the end."""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from d2l_bert import folders
from d2l_bert.folders import locked_folder
from d2l_bert.messages import GO_ON, UserError, writing
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RELEASE_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.pictures import plot_curves
from d2l_bert.model_cards.push import STAGED
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import save_with_code
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, dataset_and_config
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.tokenization.sources import PYTHON_DOCS
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training import checkpoint
from d2l_bert.training.checkpoint import WEIGHTS_FILE, Checkpoint, check_output_folder
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.held_out import example_sentences, fill_mask, report
from d2l_bert.training.initialize import hash_of_model
from d2l_bert.training.recipes import command_line


logger = logging.getLogger(__name__)

# Variables that set the number of OpenMP's threads, their cores, and how long they spin at a barrier.
OPENMP_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),
    *("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_AFFINITY"),
)

CPUINFO = Path("/proc/cpuinfo")


@contextlib.contextmanager
def output_folder(run: PretrainConfig, folder: Path):
    """
    Make the run's output folder and lock it for the block, so that no other run writes there.

    If the folder is new and still empty after the block, it is deleted.

    Raises:
        UserError: the folder cannot be written, is locked by another run, or is refused by `check_output_folder`.
    """
    with locked_folder(folder):
        check_output_folder(run, folder, run.init_from)
        yield


def default_output_dir(run: PretrainConfig) -> str:
    """The output folder without `output_dir`: `d2l-bert-<recipe>-<corpus>` in the working directory."""
    names = run.text_paths() + [dataset_and_config(dataset)[0] for dataset in run.dataset]
    return f"d2l-bert-{run.recipe}-{Path(names[0]).resolve().stem if len(names) == 1 else 'texts'}"


def repository(run: PretrainConfig, folder: Path) -> str:
    """The id of the Hub repository that the model is pushed to: `hub_model_id`, or the name of the output folder."""
    return run.hub_model_id or folder.resolve().name


def make_record(
    run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, accelerator: Accelerator
) -> dict:
    """The content of `run_config.json`: resolved options, corpus, machine and library versions."""
    resolved = dataclasses.replace(run, corpus=run.text_paths(), license=run.known_license())
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sentencex")
    record = {
        "run": dataclasses.asdict(resolved),
        "architecture": architecture_numbers(architecture),
        "corpus_is_prepared": corpus_is_prepared(run),
        "data": text.counts(),
        "local_paths": local_paths(resolved, text),
        "machine": describe_machine(accelerator),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }
    return {**record, "command": command_line(record), "decay_ratio": run.decay_share()}


def describe_machine(accelerator: Accelerator) -> dict:
    """
    The entry `machine` of run_config.json, as this process sees the machine. It has no host or user name.

    `threads` is the number of threads of each process, `openmp` the environment variables of OpenMP, `memory_gb` the
    machine's memory in 10^9 bytes, and `accelerator` the name of the GPU, or None on a CPU.
    """
    device, processor = accelerator.device, platform.processor() or platform.machine()
    if CPUINFO.exists() and (match := re.search(r"^model name\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)):
        processor = " ".join(match[1].split())
    name_of = {"cuda": torch.cuda.get_device_name, "mps": lambda _: torch.backends.mps.get_name()}
    return {
        "device": str(device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in OPENMP_VARIABLES if name in os.environ},
        "processor": processor,
        "accelerator": name_of[device.type](device) if device.type in name_of else None,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def local_paths(run: PretrainConfig, text) -> dict[str, dict]:
    """
    The options that are local paths, not names on the Hub.

    Returns:
        By path, a dict: `name`, the last part of the path, and `fingerprint`, a hash of what the run read there (for a
        validation text, of all its tokens). `fingerprint` is None for `output_dir` and `resume_from_checkpoint`.
    """
    names = [*run.text_paths(), *(dataset_and_config(dataset)[0] for dataset in run.dataset)]
    sources = zip(names, [*run.text_paths(), *run.dataset], text.source_fingerprints, strict=True)
    fingerprints = {
        path: source_print for name, path, source_print in sources if name not in (PYTHON_DOCS, *text.hub_datasets)
    }
    if text.validation is not None:
        evaluated = [*run.validation_corpus, *(dataset_and_config(dataset)[0] for dataset in run.validation_dataset)]
        given = [*run.validation_corpus, *run.validation_dataset]
        for name, path in zip(evaluated, given, strict=True):
            if Path(name).exists():
                fingerprints[path] = text.held_out.fingerprint
    for path in filter(None, (run.tokenizer, run.init_from)):
        if Path(path).exists():
            fingerprints[path] = hash_of_model(path)
    written = dict.fromkeys(filter(None, (run.output_dir, run.resume_from_checkpoint)))
    return {
        path: {"name": folders.base_name(path), "fingerprint": path_fingerprint}
        for path, path_fingerprint in {**written, **fingerprints}.items()
    }


def architecture_numbers(architecture: D2lBertConfig) -> dict:
    """The fields that `D2lBertConfig` adds to those of Transformers' `PreTrainedConfig`."""
    return {name: getattr(architecture, name) for name in D2lBertConfig.__annotations__}


def start_folder(folder: Path, record: dict, start: int) -> None:
    """
    Write `run_config.json`, and delete the checkpoints of an earlier run after step `start`.

    Unfinished checkpoints and copies of checkpoints for upload, which a killed run left, are deleted, too. A run that
    starts from step 0 also deletes an earlier run's weights, metrics, curves and card. A resumed run keeps a finished
    model and its `run_config.json` until `finish_folder` replaces both.

    Args:
        record: the content of `run_config.json`.
        start: the steps done before: the step of the checkpoint to resume from, or 0.

    Raises:
        UserError: `run_config.json` cannot be written.
    """
    for upload_copy in folder.glob(f"{STAGED}*"):
        shutil.rmtree(upload_copy)
    later = [path for path in checkpoint.checkpoints(folder) if checkpoint.step_of(path) > start]
    if start and later:
        names = ", ".join(path.name for path in later)
        logger.warning(f"{folder}: {names} deleted, as the run goes on from step {start}")
    for old in checkpoint.checkpoints(folder, unfinished=True):
        if old in later or old.name.startswith("."):
            checkpoint.delete(old)
    if start == 0:
        folders.delete_synced(folder / WEIGHTS_FILE)
        for name in (METRICS_FILE, CURVES_FILE, CARD_FILE, RELEASE_FILE):
            (folder / name).unlink(missing_ok=True)
    if not (folder / WEIGHTS_FILE).exists():
        # Before the log, because `check_output_folder` refuses a folder with a log and no run_config.json.
        with writing(folder / RUN_FILE, ", and give the same command again"):
            folders.write_json(folder / RUN_FILE, record)


def finish_folder(
    folder: Path, text: PreparedText, record: dict, model, metrics: dict, rows: list[dict], held_out: dict
) -> str:
    """
    Write the finished model, its tokenizer, code, `metrics.json`, curves and card to the output folder.

    All files are first written to a hidden folder. Then an earlier model's weights are deleted, the other files are
    moved into the output folder, and the weights last. So even if the process is killed, weights in the output folder
    always stand beside their own `run_config.json`, `metrics.json`, tokenizer and code.

    Args:
        record: the content of `run_config.json`.
        model: an unsharded model on the CPU.
        metrics: the content of `metrics.json`, without the example predictions.
        rows: of the training log, for the curves.
        held_out: a held-out batch of one pair, shown as an example.

    Returns:
        A text for the user: the results, and examples of predictions.

    Raises:
        UserError: a file cannot be written. The checkpoints are unchanged.
    """
    with (
        writing(folder, f", and {GO_ON}; the checkpoints are unchanged"),
        folders.replacing_files(folder, last=WEIGHTS_FILE) as partial,
    ):
        save_with_code(model, partial)
        save_tokenizer(text.tokenizer, partial)
        plot_curves(rows, partial / CURVES_FILE)
        # Loaded from the files, as a user of the model loads them.
        published = type(model).from_pretrained(partial)
        sentences = example_sentences(text, model.config.max_position_embeddings)
        filled = fill_mask(D2lBertForMaskedLM.from_pretrained(partial), text.tokenizer, sentences)
        predictions = [(sentence, best[0]) for sentence, best in zip(sentences, filled, strict=True)]
        folders.write_json(partial / RUN_FILE, record)
        examples = [  # in the format of the Hub's widget
            {"text": text, "output": [{"label": token, "score": round(score, 4)} for token, score in best]}
            for text, best in predictions
        ]
        folders.write_json(partial / METRICS_FILE, {**metrics, "predictions": examples})
        (partial / CARD_FILE).write_text(render_card(partial, folder.resolve().name), encoding="utf-8")
    return report(folder, published, text.tokenizer, metrics, held_out, predictions, record["data"])


# ---------------------------------------------------------------------------------------------------------------------


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """
    What all processes of a run, its checkpoints, and the runs that resume from these must share, by the names in error
    messages.
    """
    # The tokenizer's fingerprint covers these. With an existing tokenizer the training options have no effect.
    has_tokenizer = run.existing_tokenizer() or corpus_is_prepared(run)
    redundant = {"pad_token_id", *(TOKENIZER_TRAINING_OPTIONS if has_tokenizer else ())}
    # `check_identity` names the first difference, so the cause comes before its effect: a tokenizer trained by this
    # run follows from the corpus; with an existing tokenizer, the corpus's tokens follow from the tokenizer.
    fingerprints = {
        "corpus (fingerprint)": text.train.fingerprint,
        "tokenizer (fingerprint)": wordpiece.tokenizer_fingerprint(text.tokenizer),
    }
    values = {
        "data order (version)": order.DATA_ORDER,
        **architecture_numbers(architecture),
        **run.identity(),
        # A run that holds nothing out trains its tokenizer on the whole text: this is the cause of other fingerprints.
        "validation text": "none" if text.validation is None else "given",
        **(fingerprints if run.existing_tokenizer() is None else dict(reversed(fingerprints.items()))),
        "held-out text (fingerprint)": text.held_out.fingerprint,
    }
    return {name: value for name, value in values.items() if name not in redundant}


def check_identity(checkpoint: Checkpoint, identity: dict) -> None:
    """
    Refuse to resume from a checkpoint of another run.

    Args:
        identity: what `make_identity` returned for the run that resumes.

    Raises:
        UserError: the checkpoint has another identity; the message names the first difference.
    """
    saved = checkpoint.state["identity"]
    for name, value in json.loads(json.dumps(identity)).items():
        if saved.get(name) != value:
            way_out = "or start a new run in another output_dir"
            if name in LENGTH_OPTIONS:  # the schedule of the learning rate depends on the length
                way_out += f", from these weights by --init_from {checkpoint.path}"
            raise UserError(
                f"{checkpoint.path}: a checkpoint of another run: {name} was {saved.get(name)!r}, and is {value!r} "
                f"now; go on with what it was, {way_out}"
            )
