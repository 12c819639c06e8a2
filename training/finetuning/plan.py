"""What a fine-tuning trains, checked before anything is written; what its models reach."""

import dataclasses
import logging
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import torch
import transformers
from accelerate.utils import parse_flag_from_env

from d2l_bert import folders
from d2l_bert.messages import UserError
from d2l_bert.model_cards import publish
from d2l_bert.training import log, processes, run_folder
from d2l_bert.training.finetuning import account, models, trainer
from d2l_bert.training.finetuning.all_tasks import CLASSES
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.features import Features
from d2l_bert.training.finetuning.rows import Split, check_writable
from d2l_bert.training.finetuning.splits import load_splits
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A model of a run: its rate and its seed."""

    rate: float
    seed: int


class Result(TypedDict):
    """
    The content of result.json: the figures of one model.

    `validation` and `test` are the metrics of a split, as far as it has labels; `log` the rows of Trainer's log;
    `sha256` that of each file of the model, by its name. If the training diverged, `diverged` is true, and there are
    no metrics and no model.
    """

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


def attempt_of(result: Result) -> Attempt:
    """The model that a result is of."""
    return Attempt(result["learning_rate"], result["seed"])


class Outcome(NamedTuple):
    """
    The results of a run's models, without those that diverged.

    Args:
        of_rates: of each rate with the first seed.
        of_seeds: of each seed with the best rate.
        best: the best one of `of_seeds`, whose model is kept.
    """

    of_rates: list[Result]
    of_seeds: list[Result]
    best: Result


@dataclasses.dataclass(frozen=True)
class Plan:
    """
    What a run trains: all checked, nothing written.

    Args:
        config: the options.
        process_count: how many processes train.
        task: has learnt the labels of the training rows.
        start: the model to start from.
        splits: the rows, by `train`, `validation` and `test`.
        features: their features.
        metric: chooses checkpoint, rate and seed.
        rates: the learning rates to try.
    """

    config: FinetuneConfig
    process_count: int
    task: Task
    start: models.Start
    splits: dict[str, Split]
    features: dict[str, Features]
    metric: str
    rates: list[float]

    @property
    def folder(self) -> Path:
        """The output folder."""
        return output_folder(self.config)

    @property
    def seeds(self) -> range:
        """The seeds to train with."""
        return range(self.config.seed, self.config.seed + self.config.num_seeds)

    def folder_of(self, attempt: Attempt) -> Path:
        """The folder of one model."""
        return self.folder / run_folder.ATTEMPTS / f"rate-{attempt.rate:g}-seed-{attempt.seed}"

    def arguments(self, attempt: Attempt) -> transformers.TrainingArguments:
        """Trainer's arguments for one model."""
        return trainer.make_arguments(
            self.task, self.folder_of(attempt), attempt.rate, attempt.seed, self.process_count
        )

    def measured(self) -> list[str]:
        """The splits to measure on: `validation`, `test`, as far as they have labels."""
        return [name for name, split in self.splits.items() if name != "train" and split.is_labelled]

    def reported_by_class(self) -> str | None:
        """The split to report on by class: `test`, or `validation` if the test rows have no labels; None without."""
        measured = self.measured()
        return measured[-1] if measured else None


def output_folder(config: FinetuneConfig) -> Path:
    """The output folder of a run."""
    return Path(config.output_dir or f"{folders.base_name(config.model)}-{config.task}")


def repository_of(config: FinetuneConfig) -> str:
    """The repository on the Hub to which the model is pushed."""
    return config.hub_model_id or folders.real(output_folder(config)).name


def make_plan(config: FinetuneConfig, process_count: int) -> Plan:
    """
    Check the options, read the rows and the model to start from, and make features.

    What can be refused without the rows, which may be many, is refused before the rows are read.

    Args:
        process_count: how many processes train.

    Raises:
        UserError: options, rows, model or output folder cannot be used; nothing has been written.
    """
    config.check()
    check_machine(config)
    task = CLASSES[config.task_type](config)
    log.check_trackers(config.report_to, transformers.integrations.get_available_reporting_integrations())
    task.metric()  # refuses a wrong metric_for_best_model
    run_folder.check_output_folder(config, output_folder(config), config.model, is_finetuning=True)
    start = models.read_start(config, task)
    splits = load_splits(config, task)
    for line in account.lines_about_rows(task, splits):
        logger.info(line)
    if "test" in splits:
        check_writable(Path(run_folder.PREDICTIONS_FILE).suffix, splits["test"])
    metric = task.metric()  # again: the tags of the training rows decide which metrics token classification has
    if config.push_to_hub and start.config.model_type not in ("d2l-bert", "bert"):
        raise UserError(
            f"push_to_hub: d2l-bert publish takes d2l-bert models and stock BERT, and {config.model} is a "
            f"{start.config.model_type} model; leave push_to_hub out"
        )
    features = {}
    for name, split in splits.items():
        features[name] = task.features(split, start.tokenizer, start.max_seq_length)
        logger.info(account.line_of_split(task, name, split, features[name], start.max_seq_length))
    if config.push_to_hub:
        processes.on_main(publish.check_push, repository_of(config), config.license, False)
    rates = config.learning_rates() or [trainer.default_rate(getattr(start.config, "hidden_size", 768))]
    return Plan(config, process_count, task, start, splits, features, metric, rates)


def check_machine(config: FinetuneConfig) -> None:
    """
    Refuse what the launcher or this machine cannot do.

    Raises:
        UserError: the launcher asks for FSDP, or `fp16` is given without a GPU.
    """
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise UserError("finetune trains with DDP, not FSDP; launch it without FSDP")
    if config.fp16 and not torch.cuda.is_available():
        raise UserError("fp16 needs an NVIDIA GPU, and this machine shows none; leave fp16 out, or give bf16")
