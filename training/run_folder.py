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
from transformers import pipeline

from d2l_bert import folders
from d2l_bert.messages import GO_ON, UserError, writing
from d2l_bert.model_cards import card, pictures
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import save_model
from d2l_bert.modeling.loading import hash_of_model
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM
from d2l_bert.modeling.records import RunRecord
from d2l_bert.pair_tasks import pair_task
from d2l_bert.records import read_record
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, dataset_and_config
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.tokenization.python_docs import PYTHON_DOCS
from d2l_bert.training import checkpoint, held_out, report
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.data import order
from d2l_bert.training.recipes import command_line


logger = logging.getLogger(__name__)

# Variables that set the number of OpenMP's threads, their cores, and how long they spin at a barrier.
OPENMP_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),
    *("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_AFFINITY"),
)

CPUINFO = Path("/proc/cpuinfo")


# Of a fine-tuning: the folder with a folder for each rate and seed, and the table of predictions.
ATTEMPTS = "attempts"
PREDICTIONS_FILE = "predictions.csv"


def check_output_folder(run, folder: Path, start_model: str | None, is_finetuning: bool = False) -> None:
    """
    Check that a run may write to a folder, which need not exist.

    Args:
        run: the options, with `overwrite_output_dir` and `resume_from_checkpoint`.
        start_model: the folder or id of the model to start from, if there is one.
        is_finetuning: whether the command is `finetune`.

    Raises:
        UserError: the path is a file; the folder holds the model to start from, other files without a run, or a run
            of another command; or a run that the options neither resume nor replace, or both, or that is finished and
            has no checkpoint to resume from.
    """
    if folder.is_file():
        raise UserError(f"output_dir {folder}: is a file; name a folder")
    if not folder.is_dir():
        return
    refuse_foreign_entries(folder)
    place = f"output_dir {folder}"
    if start_model and folders.real(start_model).exists():
        if folders.real(start_model).is_relative_to(folders.real(folder)):
            raise UserError(f"{place}: holds the model to start from; name another folder")
    entries = _entries_of_runs(folder)
    if not entries:
        return
    if card.RUN_FILE not in entries:
        raise UserError(f"{place}: holds other files ({min(entries)}) and no run; name a new or empty folder")
    is_of_finetuning = "finetune" in read_record(folder / card.RUN_FILE)
    if is_of_finetuning != is_finetuning:
        raise UserError(f"{place}: holds a run of another command; name a new or empty folder")
    ways_out = "replace it with overwrite_output_dir, or name another folder"
    wanted = run.resume_from_checkpoint  # None, "latest" or a checkpoint
    if run.overwrite_output_dir:
        if wanted:
            raise UserError(
                f"{place}: resume_from_checkpoint continues a run and overwrite_output_dir replaces the run; give one"
            )
        return  # the run is replaced
    if wanted not in (None, "latest"):
        if folders.real(wanted).parent != folders.real(folder):
            raise UserError(f"{place}: holds another run than that of {wanted}; name a new folder")
        return  # the run goes on from `wanted`
    # A finished fine-tuning may get further seeds. A pretraining goes on from a checkpoint alone.
    if not is_finetuning and _is_finished_without_checkpoint(folder, entries):
        raise UserError(f"{place}: holds a finished run and no checkpoint to go on from; {ways_out}")
    if wanted is None:
        raise UserError(f"{place}: holds a run; go on with resume_from_checkpoint latest, {ways_out}")
    # "latest": the run goes on.


def _entries_of_runs(folder):
    """The names in a folder, without what a killed run left of its lock and of the file that it was writing."""
    record = folder / card.RUN_FILE
    of_killed_runs = {folders.LOCK_FILE, folders.hidden(record).name, folders.lock_of(record).name}
    return {path.name for path in folder.iterdir()} - of_killed_runs


def _is_finished_without_checkpoint(folder, entries):
    """Whether a folder has a finished model, which is all that can be read of its run."""
    return checkpoint.WEIGHTS_FILE in entries and not checkpoint.checkpoints(folder)


def refuse_foreign_entries(folder: Path) -> None:
    """
    Refuse a run's folder with links, pipes or devices in it: a run that goes on there, or replaces it, would read,
    write or delete what they lead to. No run makes any.

    Raises:
        UserError: the folder, or one in it, holds such an entry.
    """
    for place, folders_in_it, files in os.walk(folder):
        for name in (*folders_in_it, *files):
            path = Path(place, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise UserError(f"output_dir {folder}: {path} is a link, a pipe or a device; take it out")


def folder_of(run: PretrainConfig) -> Path:
    """The output folder: `output_dir`, or `d2l-bert-<recipe>-<corpus>` in the working directory."""
    names = run.text_paths() + [dataset_and_config(dataset)[0] for dataset in run.dataset]
    text = Path(names[0]).resolve().stem if len(names) == 1 else "texts"
    return Path(run.output_dir or f"d2l-bert-{run.recipe}-{text}")


def make_record(
    run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, accelerator: Accelerator
) -> dict:
    """The content of `run_config.json`: resolved options, corpus, machine and library versions; no full path."""
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
    return card.portable({**record, "command": command_line(record)})


def describe_machine(accelerator: Accelerator) -> dict:
    """
    The entry `machine` of run_config.json, as this process sees the machine. It has no host or user name.

    `threads` is the number of threads of each process, `openmp` the environment variables of OpenMP, `memory_gb` the
    machine's memory in 10^9 bytes, and `accelerator` the name of the GPU, or None on a CPU.
    """
    device = accelerator.device
    processor = platform.processor() or platform.machine()
    if CPUINFO.exists() and (match := re.search(r"^model name\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)):
        processor = " ".join(match[1].split())
    gpu = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
    elif device.type == "mps":
        gpu = torch.backends.mps.get_name()
    return {
        "device": str(device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in OPENMP_VARIABLES if name in os.environ},
        "processor": processor,
        "accelerator": gpu,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def local_paths(run: PretrainConfig, text) -> dict[str, dict]:
    """
    The options that are local paths, not names on the Hub.

    Returns:
        For each path a dict: `name`, the last part of the path, and `fingerprint`, a hash of what the run read there
        (for a validation text, of all its tokens). `fingerprint` is None for `output_dir` and
        `resume_from_checkpoint`.
    """
    fingerprints = {}
    for path in (run.output_dir, run.resume_from_checkpoint):
        if path:
            fingerprints[path] = None
    names = [*run.text_paths(), *run.dataset]
    for name, fingerprint in zip(names, text.source_fingerprints, strict=True):
        if dataset_and_config(name)[0] not in (PYTHON_DOCS, *text.hub_datasets):
            fingerprints[name] = fingerprint
    for name in (*run.validation_corpus, *run.validation_dataset):
        if Path(dataset_and_config(name)[0]).exists():
            fingerprints[name] = text.held_out.fingerprint
    for name in (run.tokenizer, run.init_from):
        if name and Path(name).exists():
            fingerprints[name] = hash_of_model(name)
    return {
        path: {"name": card.local_name(path), "fingerprint": fingerprint} for path, fingerprint in fingerprints.items()
    }


def architecture_numbers(architecture: D2lBertConfig) -> dict:
    """The fields that `D2lBertConfig` adds to those of Transformers' `PreTrainedConfig`."""
    return {name: getattr(architecture, name) for name in D2lBertConfig.__annotations__}


def start_folder(folder: Path, record: dict, start_step: int) -> None:
    """
    Make the folder of a run ready for its next step: delete what no longer holds, and write `run_config.json`.

    - Every run deletes the checkpoints after step `start_step`, and unfinished ones, which a killed run left.
    - A run from step 0 deletes an earlier run's weights, metrics, curves and card, too.
    - A run that resumes a finished one keeps the finished model and its `run_config.json` until `finish_folder`
      replaces both.

    Args:
        record: the content of `run_config.json`.
        start_step: the steps done before: the step of the checkpoint to resume from, or 0.

    Raises:
        UserError: `run_config.json` cannot be written.
    """
    later = [path for path in checkpoint.checkpoints(folder) if checkpoint.step_of(path) > start_step]
    if start_step and later:
        names = ", ".join(path.name for path in later)
        logger.warning(f"{folder}: {names} deleted, as the run goes on from step {start_step}")
    for old in checkpoint.checkpoints(folder, unfinished=True):
        if old in later or old.name.startswith("."):
            checkpoint.delete(old)
    with writing(folder, ", and give the same command again"):
        for lock in folder.glob(".*.part.lock"):  # as `folders.lock_of` names them; a killed run left them
            lock.unlink()
        if start_step == 0:
            # The weights first, so that a run that is killed here leaves none without the files that describe them.
            others = (card.METRICS_FILE, card.CURVES_FILE, card.CARD_FILE, card.RELEASE_FILE)
            for name in (checkpoint.WEIGHTS_FILE, *others):
                (folder / name).unlink(missing_ok=True)
                folders.sync(folder)
        is_finished = (folder / checkpoint.WEIGHTS_FILE).exists()  # the run to resume; a new one has no weights here
        if not is_finished:
            # Before the log, because `check_output_folder` refuses a folder with a log and no run_config.json.
            folders.write_json(folder / card.RUN_FILE, record)


def enter_finetuning(config, folder: Path, record: dict, stack: contextlib.ExitStack) -> None:
    """
    Make the folder of a fine-tuning and lock it until `stack` ends, so that no other run writes there; write
    `run_config.json`. Only the main process calls this.

    When resuming, that of the run is compared first; when replacing, the run is deleted. A new folder that stays empty
    is deleted.

    Args:
        config: the options, a `FinetuneConfig`.
        record: the content of `run_config.json`.

    Raises:
        UserError: the folder cannot be written, is locked by another run, or is refused by `check_output_folder`; or
            the run to resume had other options, rows or another model, or more seeds.
    """
    stack.enter_context(folders.locked_folder(folder))
    stack.enter_context(writing(folder, f", and {GO_ON}"))
    check_output_folder(config, folder, config.model, is_finetuning=True)
    before = read_record(folder / card.RUN_FILE, RunRecord) if config.resume_from_checkpoint else {}
    if before:
        if "identity" not in before or "num_seeds" not in before.get("finetune", {}):
            raise UserError(
                f"{folder / card.RUN_FILE}: is not as finetune wrote it; start with --overwrite_output_dir"
            )
        # Rows that are not given now have no fingerprint.
        now = {**dict.fromkeys(before["identity"]), **record["identity"]}
        check_identity(before["identity"], now, f"output_dir {folder}")
        seeds = before["finetune"]["num_seeds"]
        if config.num_seeds < seeds:
            raise UserError(f"output_dir {folder}: num_seeds was {seeds}; give as many or more")
    else:
        # What this run may not replace of an earlier one, the weights first; all other files stay.
        others = (PREDICTIONS_FILE, card.METRICS_FILE, card.CURVES_FILE, pictures.CONFUSION_FILE)
        for name in (checkpoint.WEIGHTS_FILE, *others):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)
        folders.write_json(folder / card.RUN_FILE, record)


def finish_folder(
    folder: Path,
    text: PreparedText,
    record: dict,
    model,
    metrics: dict,
    rows: list[dict],
    pairs: held_out.HeldOutPairs,
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
        pairs: the held-out pairs; one is shown as an example.

    Returns:
        A text for the user: the results, and examples of predictions.

    Raises:
        UserError: a file cannot be written. The checkpoints are unchanged.
    """
    with (
        writing(folder, f", and {GO_ON}; the checkpoints are unchanged"),
        folders.replacing_files(folder, last=checkpoint.WEIGHTS_FILE) as partial,
    ):
        save_model(model, partial)
        wordpiece.save_tokenizer(text.tokenizer, partial)
        pictures.plot_curves(rows, partial / card.CURVES_FILE)
        # Loaded from the files, as a user of the model loads them.
        published = type(model).from_pretrained(partial)
        example = report.show_example(published, text.tokenizer, pairs.first_with_target(), pair_task(metrics))
        variety = report.variety(published, next(iter(pairs)))
        metrics = {**metrics, **variety, "predictions": _filled_masks(partial, text, model.config)}
        folders.write_json(partial / card.RUN_FILE, record)
        folders.write_json(partial / card.METRICS_FILE, metrics)
        new_card = card.render_card(partial, folder.resolve().name)
        text_of_card = card.updated_card(folder, new_card)
        (partial / card.CARD_FILE).write_text(text_of_card, encoding="utf-8")
    return report.closing_text(folder, metrics, example, record)


def _filled_masks(folder, text, config):
    """The answers of a model's folder to some held-out sentences with a mask, in the format of the Hub's widget."""
    fill = pipeline("fill-mask", model=D2lBertForMaskedLM.from_pretrained(folder), tokenizer=text.tokenizer)
    predictions = []
    for sentence in report.example_sentences(text, config.max_position_embeddings):
        best = fill(sentence, top_k=min(5, len(text.tokenizer)))
        output = [{"label": guess["token_str"], "score": round(guess["score"], 4)} for guess in best]
        predictions.append({"text": sentence, "output": output})
    return predictions


def read_metrics(folder: Path) -> dict:
    """The content of `metrics.json` in a finished folder. A figure may be NaN."""
    return read_record(folder / card.METRICS_FILE, allow_nan=True)


# ---------------------------------------------------------------------------------------------------------------------


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """
    What all processes of a run, its checkpoints, and the runs that resume from these must share, by the names in error
    messages.

    The order matters: `check_identity` names the first difference, so a cause comes before its effect.
    """
    identity = {"data order (version)": order.DATA_ORDER, **architecture_numbers(architecture), **run.identity()}
    # A run that holds nothing out trains its tokenizer on the whole text: this is the cause of other fingerprints.
    identity["validation text"] = "none" if text.validation is None else "given"
    of_corpus = {"corpus (fingerprint)": text.train.fingerprint}
    of_tokenizer = {"tokenizer (fingerprint)": wordpiece.tokenizer_fingerprint(text.tokenizer)}
    if run.existing_tokenizer() is None:
        identity |= {**of_corpus, **of_tokenizer}  # the tokenizer is trained on the corpus
    else:
        identity |= {**of_tokenizer, **of_corpus}  # the corpus' tokens follow from the tokenizer
    identity["held-out text (fingerprint)"] = text.held_out.fingerprint
    # Left out: what the tokenizer's fingerprint covers.
    del identity["pad_token_id"]
    if run.existing_tokenizer() or corpus_is_prepared(run):
        for name in TOKENIZER_TRAINING_OPTIONS:  # they have no effect
            identity.pop(name, None)
    return identity


def check_identity(then: dict, now: dict, place: str, weights: Path | None = None) -> None:
    """
    Refuse to go on with another run.

    Args:
        then, now: what the run was made of when it was started, as a JSON file has it, and now; by the names in error
            messages (`make_identity`).
        place: the folder of the run or checkpoint, for the message.
        weights: a checkpoint that a run of another length may start from.

    Raises:
        UserError: they differ; the message names the first difference.
    """
    now = json.loads(json.dumps(now))  # as `then`, with lists for tuples
    for name, value in now.items():
        if then.get(name) == value:
            continue
        way_out = "go on with what it was, or start a new run in another output_dir"
        if weights and name in LENGTH_OPTIONS:  # the schedule of the learning rate depends on the length
            way_out += f", from these weights by --init_from {weights}"
        raise UserError(f"{place} holds another run: {name} was {then.get(name)!r}, and is {value!r} now; {way_out}")


def check_same_identity(identities: list[dict]) -> None:
    """
    Refuse to train in processes that have not all read the same.

    Args:
        identities: what `make_identity` returned in each process.

    Raises:
        UserError: a process has another identity than the first; the message names the first difference.
    """
    first = identities[0]
    for process, identity in enumerate(identities):
        for name, value in first.items():
            if identity[name] != value:
                raise UserError(
                    f"process {process} has another {name} ({identity[name]!r}) than process 0 ({value!r}); give all "
                    f"machines the same files, or one prepared folder"
                )
