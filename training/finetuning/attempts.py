"""One model of a fine-tuning run, for one rate and one seed: trains or resumes it, measures it, keeps its result."""

import contextlib
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import EarlyStoppingCallback, set_seed

from d2l_bert import folders
from d2l_bert.errors import UserError
from d2l_bert.modeling.saving import save_model
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import Data
from d2l_bert.training.finetuning.kind import LOWER_IS_BETTER, Features, Kind
from d2l_bert.training.finetuning.start import Start, make_model
from d2l_bert.training.finetuning.trainer import (
    FinetuneTrainer,
    MarkComplete,
    Progress,
    last_checkpoint,
    make_arguments,
)


logger = logging.getLogger(__name__)


RESULT_FILE = "result.json"
MODEL_FOLDER = "model"


@dataclass
class Work:
    """What all models of a run share."""

    config: FinetuneConfig
    kind: Kind
    data: Data
    start: Start
    features: dict[str, Features]
    metric: str
    folder: Path
    state: object  # accelerate's PartialState


def attempt_name(rate: float, seed: int) -> str:
    """The name of one model's folder and of its lines on the terminal."""
    return f"rate-{rate:g}-seed-{seed}"


def run_attempt(work: Work, rate: float, seed: int) -> dict:
    """
    Train one model, or go on with it, or take its result from the folder if it is finished.

    Returns:
        The content of the attempt's `result.json`: `learning_rate`, `seed`, `steps`, `best_step`, `seconds`, the
        metrics by split, and `log`, the rows of Trainer's log.
    """
    folder = work.folder / attempt_name(rate, seed)
    if (result := folders.read_json(folder / RESULT_FILE)) != {}:
        if work.state.is_main_process:
            logger.info(f"{folder.name}: finished before")
        return result
    config, kind = work.config, work.kind
    arguments = make_arguments(
        config,
        folder,
        rate,
        seed,
        work.state.num_processes,
        work.metric,
        len(work.features["train"].rows),
        kind.label_names,
    )
    set_seed(seed)
    model, fresh = make_model(work.start, kind, config.from_scratch)
    if fresh and work.state.is_main_process:
        logger.info(f"{folder.name}: fresh weights in {', '.join(fresh)}")
    callbacks = [MarkComplete(), Progress(folder.name, work.metric)]
    if config.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold))
    with _tensorboard_folder(work.folder.parent / "runs" / folder.name):
        trainer = FinetuneTrainer(
            model,
            arguments,
            data_collator=kind.collator(work.start.tokenizer),
            train_dataset=work.features["train"].rows,
            eval_dataset=work.features["validation"].rows if work.data.validation is not None else None,
            compute_metrics=lambda output: measure(work, "validation", output.predictions),
            callbacks=callbacks,
            layerwise_decay=config.layerwise_decay,
        )
    resumed = last_checkpoint(folder)
    if resumed is not None and work.state.is_main_process:
        logger.info(f"{folder.name}: goes on from {resumed.name}")
    began = time.monotonic()
    trainer.train() if resumed is None else trainer.go_on(resumed)
    seconds = time.monotonic() - began
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise UserError(
            f"{folder.name}: the training diverged (weights are not finite); give a lower learning_rate than "
            f"{rate:g}, or more warm-up, and --overwrite_output_dir"
        )
    state = trainer.state
    result = {
        "learning_rate": rate,
        "seed": seed,
        "steps": state.global_step,
        "best_step": state.best_global_step or state.global_step,
        "seconds": seconds,
        "log": [row for row in state.log_history if "loss" in row or "eval_loss" in row],
    }
    trainer.compute_metrics = None
    for split in work.data.measured():
        output = trainer.predict(work.features[split].rows)
        result[split] = {"loss": output.metrics["test_loss"], **measure(work, split, output.predictions)}
    if work.state.is_main_process:
        trained = trainer.accelerator.unwrap_model(trainer.model)
        kind.finish(trained)
        shutil.rmtree(folder / MODEL_FOLDER, ignore_errors=True)
        save_model(trained, folder / MODEL_FOLDER)
        folders.sync(folder / MODEL_FOLDER / "model.safetensors")
        folders.write_json(folder / RESULT_FILE, result)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    work.state.wait_for_everyone()
    return json.loads(json.dumps(result))


@contextlib.contextmanager
def _tensorboard_folder(folder):
    """Let a `Trainer` that is made in the block write TensorBoard's files there; by default they would be deleted."""
    name = "TENSORBOARD_LOGGING_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        del os.environ[name]


def measure(work: Work, split: str, outputs) -> dict[str, float]:
    """The metrics of the outputs of a model in training for a split."""
    return work.kind.metrics(work.data.splits()[split], work.features[split], work.kind.rescaled(outputs))


def score(result: dict, metric: str) -> float:
    """A result's metric on the validation rows, with the sign that makes more better; 0 without validation rows."""
    if "validation" not in result:
        return 0.0
    return -result["validation"][metric] if metric in LOWER_IS_BETTER else result["validation"][metric]


def best(results: list[dict], metric: str) -> int:
    """The number of the best result by the validation rows; the first of equal ones."""
    return max(range(len(results)), key=lambda number: (score(results[number], metric), -number))


def forget_models(work: Work, results: list[dict], kept: int) -> None:
    """Delete the weights of the models that are not the best so far."""
    if work.state.is_main_process:
        for number, result in enumerate(results):
            if number != kept:
                name = attempt_name(result["learning_rate"], result["seed"])
                shutil.rmtree(work.folder / name / MODEL_FOLDER, ignore_errors=True)


def run_all(work: Work, rates: list[float]) -> tuple[list[dict], list[dict], int]:
    """
    Train all models of a run: each rate with the first seed, then the best rate with the further seeds.

    Returns:
        The results of the rates with the first seed (one for a single rate), the results of the seeds with the best
        rate, and the number of the best seed in the latter.
    """
    tried = []
    for rate in rates:
        tried.append(run_attempt(work, rate, work.config.seed))
        forget_models(work, tried, best(tried, work.metric))
    seeds = [tried[best(tried, work.metric)]]
    if len(rates) > 1 and work.state.is_main_process:
        logger.info(f"rate {seeds[0]['learning_rate']:g} is best on validation rows ({work.metric})")
    for number in range(1, work.config.num_seeds):
        seeds.append(run_attempt(work, seeds[0]["learning_rate"], work.config.seed + number))
        forget_models(work, seeds, best(seeds, work.metric))
    return tried, seeds, best(seeds, work.metric)
