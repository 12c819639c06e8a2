"""The folder that a run leaves: claimed at the start, its record kept from then on, filled at the end."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from d2l_bert import folders
from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.push import STAGED
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM
from d2l_bert.modeling.saving import save_with_code
from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.tokenization.prepare import is_prepared
from d2l_bert.tokenization.sources import PYTHON_DOCS, content_hash
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training import checkpoint, evaluate
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.curves import plot_curves
from d2l_bert.training.energy import describe_machine
from d2l_bert.training.recipes import command_line
from d2l_bert.training.tracking import TrainingLog


LOG_FILE = "training_log.jsonl"
LOCK_FILE = ".lock"
WEIGHTS_FILE = "model.safetensors"
FINISH_FOLDER = ".model.part"


@contextlib.contextmanager
def output_folder(run: PretrainConfig):
    """
    Hold the run's folder for as long as the block lasts; no second run can have it meanwhile. If the block fails and
    nothing was written, a folder that was made for it goes again.

    Raises:
        UserError: it cannot be written, is in use, holds other things, or holds a run that was not asked to be
            resumed or replaced.
    """
    folder = Path(run.output_dir or default_output_dir(run))
    folders.check_name(folder)
    existed, lock = folder.exists(), FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"output_dir {folder}: another run is writing there; wait, or name another folder") from None
    except OSError as error:
        raise UserError(f"output_dir {folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        refuse_what_is_there(run, folder)
        yield folder
    finally:
        # Deleted while it is held: after the release another run may hold this very file, and a third would make and
        # lock one of its own. A run that has opened the file before sees, once it has the lock, that its name is gone.
        try:
            with contextlib.suppress(PermissionError):  # Windows keeps an open file, and filelock deletes it there
                (folder / LOCK_FILE).unlink(missing_ok=True)
        finally:
            lock.release()
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def refuse_what_is_there(run: PretrainConfig, folder: Path) -> None:
    """Refuse a file, or a folder that holds other things or a run that was not asked to be resumed or replaced."""
    if not folder.is_dir():
        raise UserError(f"output_dir {folder}: a file; name a folder")
    entries = {path.name for path in folder.iterdir()} - {
        LOCK_FILE,
        f".{RUN_FILE}.part",
    }  # which a killed run may leave
    start = Path(run.init_from or "").resolve()
    if run.init_from is not None and start.exists() and folder.resolve() in (start, *start.parents):
        raise UserError(f"output_dir {folder}: holds the model to start from (init_from); name another folder")
    if RUN_FILE not in entries:
        if saved := checkpoint.checkpoints(folder):
            raise UserError(
                f"output_dir {folder}: holds checkpoints and no {RUN_FILE}; go on from one in another folder: "
                f"--resume_from_checkpoint {saved[-1]} --output_dir NEW"
            )
        if entries:
            raise UserError(
                f"output_dir {folder}: holds other things ({sorted(entries)[0]}) and no run; "
                f"name a new or empty folder"
            )
    elif run.overwrite_output_dir:
        if run.resume_from_checkpoint:
            raise UserError("resume_from_checkpoint goes on with a run and overwrite_output_dir replaces it; give one")
    elif not run.resume_from_checkpoint:
        raise UserError(
            f"output_dir {folder}: holds a run; go on with --resume_from_checkpoint latest, replace it with "
            f"--overwrite_output_dir, or name another folder"
        )
    elif run.resume_from_checkpoint != "latest":
        if Path(run.resume_from_checkpoint).resolve().parent != folder.resolve():
            raise UserError(
                f"output_dir {folder}: holds another run than the checkpoint {run.resume_from_checkpoint}; "
                f"name a new folder"
            )
    elif WEIGHTS_FILE in entries and not checkpoint.checkpoints(folder):
        raise UserError(
            f"output_dir {folder}: holds a finished run and no checkpoint to go on from; replace it with "
            f"--overwrite_output_dir, or name another folder"
        )


def default_output_dir(run: PretrainConfig) -> str:
    """`d2l-bert-<recipe>-<corpus>`, here."""
    names = run.text_paths() + [name for name, _ in run.named_datasets()]
    return f"d2l-bert-{run.recipe}-{Path(names[0]).resolve().stem if len(names) == 1 else 'texts'}"


def repository(run: PretrainConfig, folder: Path) -> str:
    """The repository on the Hub that the run is sent to."""
    return run.hub_model_id or folder.resolve().name


def make_record(run: PretrainConfig, max_steps: int, architecture, text, accelerator) -> dict:
    """Everything that run_config.json says: resolved options, library versions, the corpus, the machine."""
    resolved = dataclasses.replace(
        run,
        corpus=run.text_paths(),
        max_steps=max_steps,
        num_train_epochs=None,
        max_minutes=None,
        license=run.known_license(),
    )
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sentencex")
    record = {
        "run": dataclasses.asdict(resolved),
        "architecture": architecture_numbers(architecture),
        "corpus_is_prepared": is_prepared(run),
        "data": text.counts(),
        "local_paths": local_paths(resolved, text),
        "machine": describe_machine(accelerator),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }
    return {**record, "command": command_line(record), "decay_ratio": run.decay_share()}


def local_paths(run: PretrainConfig, text) -> dict[str, dict]:
    """The options that are paths here, no names on the Hub: the last name of each, and a fingerprint of what was read
    there; None for what was written."""
    names = [*run.text_paths(), *(name for name, _ in run.named_datasets())]
    given = zip(names, [*run.text_paths(), *run.dataset], text.source_fingerprints, strict=True)
    paths = {path: found for name, path, found in given if name not in (PYTHON_DOCS, *text.hub_datasets)}
    for path in filter(None, (run.tokenizer, run.init_from)):
        if Path(path).exists():
            there = [Path(path, name) for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt")]
            paths[path] = fingerprint([(file.name, content_hash(file)) for file in there if file.is_file()])
    paths = {**dict.fromkeys(filter(None, (run.output_dir, run.resume_from_checkpoint))), **paths}
    return {path: {"name": folders.base_name(path), "fingerprint": found} for path, found in paths.items()}


def architecture_numbers(architecture: D2lBertConfig) -> dict:
    """The fields that D2lBertConfig adds to Transformers' own."""
    return {name: getattr(architecture, name) for name in D2lBertConfig.__annotations__}


def start_folder(folder: Path, record: dict, start: int) -> TrainingLog:
    """
    Write the record and open the log; clear away what an earlier run left beyond the step this one starts from.

    A finished model of this run stays, and its record with it, until `finish_folder` puts another in its place.
    """
    for left in folder.glob(f"{STAGED}*"):
        shutil.rmtree(left)
    for old in checkpoint.checkpoints(folder, unfinished=True):
        if checkpoint.step_of(old) > start or old.name.startswith("."):
            checkpoint.drop(old)
    if start == 0:
        drop_weights(folder)
        for name in (METRICS_FILE, CURVES_FILE, CARD_FILE):
            (folder / name).unlink(missing_ok=True)
    if not (folder / WEIGHTS_FILE).exists():
        try:  # before the log: without it the folder is no run's
            folders.write_json(folder / RUN_FILE, record)
        except OSError as error:
            mend = ", and give the same command again"
            raise UserError(f"{folder / RUN_FILE}: {why_unwritable(error, mend)}") from None
    log = TrainingLog(folder / LOG_FILE)
    log.start_at(start)
    return log


def drop_weights(folder: Path) -> None:
    """Delete a finished model's weights, on the disk too, before any other file of that model changes."""
    if (folder / WEIGHTS_FILE).exists():
        (folder / WEIGHTS_FILE).unlink()
        folders.sync(folder)


def finish_folder(folder: Path, model, text, record: dict, metrics: dict, log: TrainingLog, held_out) -> str:
    """
    Write model, tokenizer, code, figures, curves and card; return what there is to say of them.

    All is written beside first. Then an earlier model's weights are deleted, all other files are renamed into the
    folder, and the weights come last: wherever the process is killed, weights in the folder have their own record,
    figures, tokenizer and code beside them.

    Args:
        model: to publish, in one piece.
        held_out: a batch of one pair to show.
    """
    partial = folder / FINISH_FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        with folders.os_errors():
            save_with_code(model, partial)
            save_tokenizer(text.tokenizer, partial)
        plot_curves(log.rows(), partial / CURVES_FILE)
        # As a reader will load it.
        published = type(model).from_pretrained(partial)
        sentences = evaluate.example_sentences(text, model.config.max_position_embeddings)
        filled = evaluate.fill_mask(D2lBertForMaskedLM.from_pretrained(partial), text.tokenizer, sentences)
        predictions = [(sentence, best[0]) for sentence, best in zip(sentences, filled, strict=True)]
        folders.write_json(partial / RUN_FILE, record)
        folders.write_json(partial / METRICS_FILE, {**metrics, "predictions": as_widget(predictions)})
        (partial / CARD_FILE).write_text(render_card(partial, folder.resolve().name), encoding="utf-8")
        for path in partial.iterdir():
            folders.sync(path)
        drop_weights(folder)
        for path in partial.iterdir():
            if path.name != WEIGHTS_FILE:
                path.replace(folder / path.name)
        folders.sync(folder)
        (partial / WEIGHTS_FILE).replace(folder / WEIGHTS_FILE)
        folders.sync(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: the model {why_unwritable(error, f', and {GO_ON}')}; the checkpoints are as they were"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return evaluate.report(folder, published, text.tokenizer, metrics, held_out, predictions)


def as_widget(predictions: list[tuple[str, list[tuple[str, float]]]]) -> list[dict]:
    """Texts with one mask and their likeliest tokens, as the Hub's widget shows examples."""
    return [
        {"text": text, "output": [{"label": token, "score": round(score, 4)} for token, score in best]}
        for text, best in predictions
    ]
