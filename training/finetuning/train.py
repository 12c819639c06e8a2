"""`finetune`: checks options and rows, trains one model for each rate and seed, leaves the best with its figures."""

import contextlib
import logging
import math
import sys
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import transformers
from accelerate.utils import parse_flag_from_env

from d2l_bert import folders, messages
from d2l_bert.model_cards import publish
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.figures import METRICS
from d2l_bert.modeling import conversion
from d2l_bert.records import read_record
from d2l_bert.tokenization.model_files import without_log_messages
from d2l_bert.training import devices, log, run_folder
from d2l_bert.training.checkpoint import WEIGHTS_FILE, check_hashes, checkpoints, delete_old, hashes_of, versions
from d2l_bert.training.finetuning import metrics, models, splits, trainer
from d2l_bert.training.finetuning.all_tasks import CLASSES
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.folder import MODEL_FOLDER, write_folder
from d2l_bert.training.finetuning.record import make_record
from d2l_bert.training.finetuning.rows import check_writable


logger = logging.getLogger(__name__)

# In the folder of one model: its figures.
RESULT_FILE = "result.json"


class Result(TypedDict):
    """The content of result.json, of `Run.attempt`."""

    learning_rate: float
    seed: int
    steps: int
    best_step: int
    seconds: float
    log: list[dict]
    validation: NotRequired[dict[str, float]]
    test: NotRequired[dict[str, float]]
    diverged: NotRequired[bool]
    sha256: NotRequired[dict[str, str]]


def finetune(config: FinetuneConfig) -> Path:
    """
    Fine-tune a model on a table, by Transformers' `Trainer`, on all launched processes.

    Data and options are checked before anything is written. One model is trained for each rate, with the first seed;
    then one for each further seed, with the best rate. The folder holds the model of the best seed.

    Args:
        config: the options of the run.

    Returns:
        The output folder.

    Raises:
        UserError: an option, the data, the model or the output folder is wrong, or a file cannot be written.
    """
    state = devices.start_processes()
    with devices.restore_host_settings(), without_log_messages():
        with devices.together():
            run = Run(config, state.num_processes)
        with contextlib.ExitStack() as stack:
            devices.on_main(run_folder.enter_finetuning, config, run.folder, run.record, stack)
            messages.report.info(run.finish(*run.train()))
        if config.push_to_hub:
            settings = PublishConfig(public=not config.hub_private_repo)
            messages.report.info(devices.on_main(publish.publish, run.folder, run.repository, settings))
    return run.folder


class Run:
    """
    A fine-tuning run: its models for each rate and seed, and what they share.

    Args:
        config: the options.
        processes: how many processes train.

    Raises:
        UserError: options, rows, model or output folder cannot be used; nothing has been written.
    """

    def __init__(self, config: FinetuneConfig, processes: int):
        config.check()
        messages.refuse_first(
            {
                "finetune trains with DDP, not FSDP; launch it without FSDP": parse_flag_from_env(
                    "ACCELERATE_USE_FSDP"
                ),
                "fp16 needs an NVIDIA GPU, and this machine shows none; leave fp16 out, or give bf16": (
                    config.fp16 and not torch.cuda.is_available()
                ),
            }
        )
        self.config, self.processes = config, processes
        self.folder = Path(config.output_dir or f"{folders.base_name(config.model)}-{config.task}")
        self.task = task = CLASSES[config.task_type](config)
        self.seeds = range(config.seed, config.seed + config.num_seeds)
        self.repository = config.hub_model_id or folders.real(self.folder).name
        log.check_trackers(config.report_to, transformers.integrations.get_available_reporting_integrations())
        # What can be refused without the rows, which may be many, is refused before the rows are read.
        task.metric()
        run_folder.check_output_folder(config, self.folder, config.model, is_finetuning=True)
        start = models.read_start(config, task)
        self.model_config, self.revision, self.tokenizer, self.dropout, self.max_seq_length = start
        self.splits = splits.load_splits(config, task)
        if "test" in self.splits:
            check_writable(Path(run_folder.PREDICTIONS_FILE), self.splits["test"])
        self.metric = task.metric()  # of token classification, the rows decide
        messages.refuse_first(
            {
                f"push_to_hub: d2l-bert publish takes d2l-bert models and stock BERT, and {config.model} is a "
                f"{self.model_config.model_type} model; leave push_to_hub out": (
                    config.push_to_hub and self.model_config.model_type not in ("d2l-bert", "bert")
                )
            }
        )
        for name, split in self.splits.items():
            task.features(split, self.tokenizer, self.max_seq_length)
            logger.info(
                f"{name}: {messages.counted(len(split.rows), 'row')} of {split.name}"
                f"{'' if split.is_labelled else ', without labels'}; "
                f"{split.note or f'none is longer than {self.max_seq_length} tokens'}"
            )
        if config.push_to_hub:
            devices.on_main(publish.check_push, self.repository, config.license, False)
        self.rates = config.learning_rates() or [trainer.default_rate(getattr(self.model_config, "hidden_size", 768))]
        self.record = make_record(self)

    def folder_of(self, rate: float, seed: int) -> Path:
        """The folder of one model."""
        return self.folder / run_folder.ATTEMPTS / f"rate-{rate:g}-seed-{seed}"

    def arguments(self, rate: float, seed: int) -> transformers.TrainingArguments:
        """Trainer's arguments for one model."""
        return trainer.make_arguments(self.task, self.folder_of(rate, seed), rate, seed, self.processes)

    def measured(self) -> list[str]:
        """The splits to measure on, the one to report last: `validation`, `test`, as far as they have labels."""
        return [name for name, split in self.splits.items() if name != "train" and split.is_labelled]

    # -----------------------------------------------------------------------------------------------------------------
    # Training

    def train(self) -> tuple[list[dict], list[dict], dict]:
        """
        Train all models: each rate with the first seed, then the best rate with the further seeds.

        A rate or a seed whose training diverges is left out, if there are others.

        Returns:
            The results of the rates with the first seed, those of the seeds with the best rate, and the best of these.

        Raises:
            UserError: the training diverged with every seed.
        """
        tried = self.stable([(rate, self.config.seed) for rate in self.rates])
        rate = self.best(tried)["learning_rate"] if tried else min(self.rates)
        seeds = self.stable([(rate, seed) for seed in self.seeds])
        messages.refuse_first(
            {
                f"the training diverged (weights are not finite); give a lower learning_rate than {rate:g}, or more "
                f"warm-up, and --overwrite_output_dir": not seeds
            }
        )
        return tried, seeds, self.best(seeds)

    def stable(self, places: list[tuple[float, int]]) -> list[dict]:
        """The results of models, given by their rates and seeds; those that diverge are left out."""
        return [result for result in (self.attempt(*place) for place in places) if not result.get("diverged")]

    def best(self, results: list[dict]) -> dict:
        """The best result by the validation rows; of equal ones that of the lower loss, then the first."""
        if "validation" not in self.splits:
            return results[0]
        sign = -1 if self.metric in metrics.LOWER_IS_BETTER else 1
        return max(results, key=lambda r: (sign * r["validation"][self.metric], -r["validation"]["loss"]))

    def attempt(self, rate: float, seed: int) -> dict:
        """
        Train one model, or go on with it, or take its result from the folder if it is finished.

        Returns:
            The content of the model's `result.json`: `learning_rate`, `seed`, `steps`, `best_step`, `seconds`, the
            metrics by split, `log`, the rows of Trainer's log, and `sha256` of each file of the model, by its name. If
            the training diverged, `diverged` is true, and there are no metrics and no model.
        """
        folder, config, task = self.folder_of(rate, seed), self.config, self.task
        if (folder / RESULT_FILE).exists():
            return self.finished(folder / RESULT_FILE, rate, seed)
        checkpoint, before = devices.on_main(trainer.last_checkpoint, folder)
        arguments = self.arguments(rate, seed)
        callback, patience = trainer.Checkpoints(before), config.early_stopping_patience
        transformers.set_seed(seed)
        model = models.make_model(self.model_config, self.revision, task)
        trained = trainer.TaskTrainer(
            task,
            model,
            arguments,
            self.tokenizer,
            train_dataset=self.splits["train"].features,
            eval_dataset=self.splits["validation"].features if "validation" in self.splits else None,
            compute_metrics=lambda output: trainer.figures(task, self.splits["validation"], output),
            callbacks=[
                *([transformers.EarlyStoppingCallback(patience)] if patience is not None else []),
                callback,
                *([trainer.Bar()] if sys.stderr.isatty() else []),
            ],
        )
        if checkpoint is not None:
            logger.info(f"{folder.name}: goes on from {Path(checkpoint).name}")
        trained.train(resume_from_checkpoint=checkpoint)
        result = {
            "learning_rate": rate,
            "seed": seed,
            "steps": trained.state.global_step,
            "best_step": trained.state.best_global_step or trained.state.global_step,
            "seconds": callback.seconds(),
            "versions": versions(),
            "log": [row for row in trained.state.log_history if "loss" in row or "eval_loss" in row],
        }
        model = trained.accelerator.unwrap_model(trained.model, keep_fp32_wrapper=False)
        if all(parameter.isfinite().all() for parameter in model.parameters()):
            for name in self.measured():
                predicted = trainer.predict(task, model, arguments, self.tokenizer, self.splits[name])
                result[name] = trainer.figures(task, self.splits[name], predicted)
        else:
            model, result["diverged"] = None, True
            logger.warning(f"{folder.name}: the training diverged (weights are not finite); it is left out")
        return devices.on_main(_keep, folder, model, result)

    def finished(self, file: Path, rate: float, seed: int) -> dict:
        """
        The result of a model that an earlier run has finished.

        Raises:
            UserError: the file is not one that `attempt` writes for this rate and seed, or the model beside it has
                changed.
        """
        result, way_out = read_record(file, Result, allow_nan=True), f"delete {file.parent}, and it is trained again"
        if (result["learning_rate"], result["seed"]) != (rate, seed):
            raise messages.UserError(f"{file}: is of another rate or seed; {way_out}")
        for count in (result["steps"], result["best_step"], result["seconds"]):
            if not 0 <= count < math.inf:
                raise messages.UserError(f"{file}: has an impossible number of steps or seconds; {way_out}")
        for row in result["log"]:
            if type(row.get("step")) is not int or not all(map(_is_number, row.values())):
                raise messages.UserError(f"{file}: its log has a row that is not one of numbers; {way_out}")
        if result.get("diverged"):
            return result
        saved = file.parent / MODEL_FOLDER
        if saved.exists():  # of a finished run, only the best attempt still has its model
            with messages.explained(f"{saved}: is not as it was trained", way_out, messages.UserError):
                check_hashes(saved, result.get("sha256", {}), (WEIGHTS_FILE, "config.json"))
        for split in self.measured():
            measured = result.get(split, {})
            for name in (*self.task.metrics_shown, "loss"):
                is_share = name in METRICS and METRICS[name][1] == "%"
                if not _is_number(measured.get(name)) or (is_share and not 0 <= measured[name] <= 1):
                    raise messages.UserError(f"{file}: has no {name} of the {split} rows that can be; {way_out}")
        return result

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    def finish(self, tried: list[dict], seeds: list[dict], kept: dict) -> str:
        """
        Write the finished folder, whose model is that of the best seed.

        Returns:
            The report for the user: the table of figures, and what the folder holds.
        """
        task, place, outputs = self.task, (kept["learning_rate"], kept["seed"]), {}
        saved = self.folder_of(*place) / MODEL_FOLDER
        with messages.reading_model(str(saved)):
            model = getattr(transformers, task.auto_class).from_pretrained(saved, trust_remote_code=False)
        # For the table of predictions, and for the report by class.
        for name in sorted({*self.measured()[-1:], *({"test"} & {*self.splits})}):
            found = trainer.predict(task, model, self.arguments(*place), self.tokenizer, self.splits[name])
            outputs[name] = task.rescaled(found.predictions)
        return devices.on_main(write_folder, self, model, outputs, tried, seeds, kept)


def _keep(folder, model, result):
    """
    Write a trained model (None if the training diverged) and its result; then delete the checkpoints.

    Returns:
        The result as the file has it.
    """
    if model is not None:
        conversion.save_model(model, folder / MODEL_FOLDER)
        folders.sync(folder / MODEL_FOLDER / WEIGHTS_FILE)
        result["sha256"] = hashes_of(folder / MODEL_FOLDER)
    folders.write_json(folder / RESULT_FILE, result)
    delete_old(checkpoints(folder))
    return read_record(folder / RESULT_FILE, Result, allow_nan=True)


def _is_number(value) -> bool:
    """Whether a value of JSON is a number that a float holds, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max
