"""One model of a fine-tuning run, for one rate and one seed: trains or resumes it, measures it, keeps its result."""

import json
import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import EarlyStoppingCallback, set_seed

from d2l_bert import folders
from d2l_bert.messages import UserError
from d2l_bert.modeling.conversion import save_model
from d2l_bert.training.devices import on_main
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import Data
from d2l_bert.training.finetuning.kind import LOWER_IS_BETTER, Features, Kind
from d2l_bert.training.finetuning.start import Start, make_model
from d2l_bert.training.finetuning.trainer import (
    Bar,
    FinetuneTrainer,
    Lines,
    MarkComplete,
    last_checkpoint,
    make_arguments,
    seconds_before,
)


logger = logging.getLogger(__name__)


RESULT_FILE = "result.json"
MODEL_FOLDER = "model"

DIVERGED = "{name}: the training diverged (weights are not finite)"
LOWER_RATE = "give a lower learning_rate than {rate:g}, or more warm-up, and --overwrite_output_dir"


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
        metrics by split, and `log`, the rows of Trainer's log. If the training diverged, `diverged` is true, and
        there are no metrics and no model.
    """
    folder = work.folder / attempt_name(rate, seed)
    if (result := folders.read_json(folder / RESULT_FILE)) != {}:
        logger.info(f"{folder.name}: finished before")
        return result
    trainer, fresh = _make_trainer(work, folder, rate, seed)
    if fresh:
        logger.info(f"{folder.name}: fresh weights in {', '.join(fresh)}")
    resumed = on_main(last_checkpoint, folder)
    seconds = 0.0
    if resumed is not None:
        seconds = seconds_before(resumed)
        logger.info(f"{folder.name}: goes on from {resumed.name}")
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    state = trainer.state
    result = {
        "learning_rate": rate,
        "seed": seed,
        "steps": state.global_step,
        "best_step": state.best_global_step or state.global_step,
        "seconds": seconds + time.monotonic() - began,
        "log": [row for row in state.log_history if "loss" in row or "eval_loss" in row],
    }
    # Measured in float32 after a training in bf16 or fp16, too, as users of the finished model load it.
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if all(parameter.isfinite().all() for parameter in trained.parameters()):
        trainer.compute_metrics, outputs = None, {}
        for split in work.data.splits().keys() - {"train"}:
            output = trainer.predict(work.features[split].rows)
            outputs[split] = work.kind.rescaled(output.predictions)
            if split in work.data.measured():
                result[split] = {"loss": output.metrics["test_loss"], **measure(work, split, outputs[split])}
        work.kind.finish(trained)
    else:
        trained, outputs, result["diverged"] = None, {}, True
    on_main(_keep, folder, trained, outputs, result, share_result=False)
    return json.loads(json.dumps(result))


def _make_trainer(work, folder, rate, seed):
    """The trainer of one model, and the names of the model's modules with fresh weights."""
    config, kind = work.config, work.kind
    arguments = make_arguments(
        config,
        folder,
        rate,
        seed,
        work.state.num_processes,
        work.metric,
        kind.label_names,
    )
    set_seed(seed)
    model, fresh = make_model(work.start, kind, config.from_scratch)
    callbacks = [MarkComplete(config.save_total_limit), Lines(folder.name, work.metric)]
    if sys.stderr.isatty():
        callbacks.append(Bar())
    if config.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold))
    trainer = FinetuneTrainer(
        model,
        arguments,
        data_collator=kind.collator(work.start.tokenizer),
        train_dataset=work.features["train"].rows,
        eval_dataset=work.features["validation"].rows if work.data.validation is not None else None,
        compute_metrics=lambda output: measure(work, "validation", kind.rescaled(output.predictions)),
        callbacks=callbacks,
        layerwise_decay=config.layerwise_decay,
    )
    return trainer, fresh


def _keep(folder, trained, outputs, result):
    """Write a trained model (None if the training diverged), its outputs and result; then delete the checkpoints."""
    shutil.rmtree(folder / MODEL_FOLDER, ignore_errors=True)
    if trained is not None:
        save_model(trained, folder / MODEL_FOLDER)
        for split, arrays in outputs.items():
            arrays = arrays if isinstance(arrays, tuple) else (arrays,)
            np.savez(folder / MODEL_FOLDER / f"{split}.npz", *arrays)
        folders.sync(folder / MODEL_FOLDER / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    folders.write_json(folder / RESULT_FILE, result)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    if (folder / "runs").exists():  # TensorBoard's files stay when the models in training are deleted
        (folder.parent.parent / "runs").mkdir(exist_ok=True)
        (folder / "runs").rename(folder.parent.parent / "runs" / folder.name)


def saved_outputs(folder: Path, split: str):
    """The outputs of a kept model for a split, in the units of the labels, as `Trainer.predict` gives them."""
    with np.load(folder / f"{split}.npz") as file:
        arrays = tuple(file.values())
    return arrays if len(arrays) > 1 else arrays[0]


def measure(work: Work, split: str, outputs) -> dict[str, float]:
    """The metrics of a model's outputs for a split."""
    return work.kind.metrics(work.data.splits()[split], work.features[split], outputs)


def best(results: list[dict], metric: str) -> int:
    """The number of the best result by the validation rows; of equal ones that of the lower loss, then the first."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    found = [result.get("validation", {metric: 0.0, "loss": 0.0}) for result in results]
    return max(range(len(found)), key=lambda n: (sign * found[n][metric], -found[n]["loss"]))


def run_all(work: Work, rates: list[float]) -> tuple[list[dict], list[dict], int]:
    """
    Train all models of a run: each rate with the first seed, then the best rate with the further seeds.

    A rate whose training diverges is left out, if there are others.

    Returns:
        The results of the rates with the first seed (one for a single rate), the results of the seeds with the best
        rate, and the number of the best seed in the latter.

    Raises:
        UserError: the training diverged with every rate, or with a further seed.
    """
    tried = []
    for rate in rates:
        result = run_attempt(work, rate, work.config.seed)
        if result.get("diverged"):
            diverged = DIVERGED.format(name=attempt_name(rate, work.config.seed))
            if len(rates) > 1:
                logger.warning(f"{diverged}; rate {rate:g} is left out")
            continue
        tried.append(result)
    if not tried:
        raise UserError(f"{diverged}; {LOWER_RATE.format(rate=min(rates))}")
    seeds = [tried[best(tried, work.metric)]]
    rate = seeds[0]["learning_rate"]
    if len(tried) > 1:
        logger.info(f"rate {rate:g} is best on validation rows ({work.metric})")
    for seed in range(work.config.seed + 1, work.config.seed + work.config.num_seeds):
        result = run_attempt(work, rate, seed)
        if result.get("diverged"):
            raise UserError(f"{DIVERGED.format(name=attempt_name(rate, seed))}; {LOWER_RATE.format(rate=rate)}")
        seeds.append(result)
    return tried, seeds, best(seeds, work.metric)
