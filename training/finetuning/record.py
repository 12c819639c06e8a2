"""`run_config.json` of a fine-tuning: options, rows, the base model, versions, the command that repeats the run."""

import dataclasses
import importlib.metadata
import platform
import shlex
from pathlib import Path

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

from d2l_bert import options
from d2l_bert.model_cards import card
from d2l_bert.modeling import loading
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.plan import Attempt, Plan
from d2l_bert.training.finetuning.tasks import Task


# The packages whose versions decide what a run computes.
LIBRARIES = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")

# The options in the command beside those that decide what a run computes.
IN_COMMAND = ("train_file", "validation_file", "test_file", "dataset", "license", "num_seeds")


def make_record(plan: Plan) -> dict:
    """The content of `run_config.json`."""
    config = plan.config
    arguments = plan.arguments(Attempt(plan.rates[0], config.seed))
    base = base_model(plan)
    content = {
        "kind": config.task_type,
        "auto_class": plan.task.auto_class,
        "pipeline_task": pipeline_task(plan.task),
        "rows_per_step": arguments.per_device_train_batch_size
        * plan.process_count
        * config.gradient_accumulation_steps,
        "warmup": warmup_of(arguments),
        "finetune": dataclasses.asdict(config),
        "identity": identity_of(plan, base),
        "learning_rates": plan.rates,
        "max_seq_length": plan.start.max_seq_length,
        "learnt": plan.task.learnt(),
        "dropout": plan.start.dropout,
        "base_model": {
            **base,
            "model_type": plan.start.config.model_type,
            "language": language_of(plan, base),
        },
        "data": data_of(plan),
        "local_paths": local_paths(plan, base),
        "versions": library_versions(),
    }
    record = card.portable(content)
    return {**record, "command": command_of(record["finetune"])}


def pipeline_task(task: Task) -> str | None:
    """The pipeline of Transformers that a model of the task works in; None without one."""
    tag = card.PIPELINE_TAGS[task.auto_class.removeprefix("AutoModel")]
    return tag if tag in PIPELINE_REGISTRY.get_supported_tasks() else None


def warmup_of(arguments: transformers.TrainingArguments) -> str:
    """The length of the warm-up, in words; Trainer takes less than 1 for a share of the steps."""
    length = arguments.warmup_steps
    return f"{length:,} steps" if length >= 1 else f"{100 * length:.3g} % of the steps"


def base_model(plan: Plan) -> dict:
    """The model that the run starts from: its name, and its commit on the Hub or a hash of its folder."""
    name = plan.config.model
    fingerprint = loading.hash_of_model(name) if Path(name).exists() else None
    return {"name": card.local_name(name), "revision": plan.start.revision, "fingerprint": fingerprint}


def language_of(plan: Plan, base: dict) -> str | None:
    """The language of a base model in a folder, as its own run recorded it; None for others."""
    if base["fingerprint"] is None:
        return None
    return loading.read_run_record(plan.config.model).get("run", {}).get("language")


def identity_of(plan: Plan, base: dict) -> dict:
    """What must be the same in a run that goes on with this one."""
    identity = {**plan.config.identity(), "learning_rates": plan.rates, "processes": plan.process_count}
    for name, split in plan.splits.items():
        identity[f"the fingerprint of the {name} rows"] = split.fingerprint
    identity["the model"] = base
    return identity


def data_of(plan: Plan) -> dict:
    """What the run reads: its splits, and where they are from."""
    options_read = [option for option in plan.task.columns if option != "label_column"]
    splits = {}
    shared = {}
    for name, split in plan.splits.items():
        splits[name] = {"name": split.name, "rows": len(split.rows), "fingerprint": split.fingerprint}
        if name != "train":
            shared[name] = split.shared
    return {
        "splits": splits,
        "held_out": plan.splits["validation"].held_out if "validation" in splits else 0.0,
        "test_is_labelled": "test" in plan.measured(),
        "shared_with_training": shared,
        "hub_datasets": hub_datasets(plan),
        "has_pairs": len(options_read) > 1,
        "has_unanswerable": plan.task.has_unanswerable,
    }


def hub_datasets(plan: Plan) -> list[str]:
    """The dataset on the Hub with the training rows; [] if they are from a file or a folder."""
    if not plan.splits["train"].is_dataset:
        return []
    place = dataset_and_config(plan.config.dataset_name())[0]
    return [] if Path(place).exists() else [place]


def local_paths(plan: Plan, base: dict) -> dict[str, dict]:
    """What the run has read on this machine, by path, as `card.portable` takes it."""
    fingerprints = {plan.config.model: base["fingerprint"]}
    for name, split in plan.splits.items():
        path = getattr(plan.config, f"{name}_file")
        if path:
            fingerprints[path] = split.fingerprint
    paths = {}
    for path, fingerprint in fingerprints.items():
        paths[path] = {"name": card.local_name(path), "fingerprint": fingerprint}
    return paths


def library_versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        versions[name] = importlib.metadata.version(name)
    return versions


def command_of(given: dict) -> str:
    """
    The command that repeats a run.

    Args:
        given: the options by name, without the paths of this machine.
    """
    words = options.flags(FinetuneConfig, given, dataclasses.asdict(FinetuneConfig()), IN_COMMAND)
    return shlex.join(["d2l-bert", "finetune", given["model"], *words])
