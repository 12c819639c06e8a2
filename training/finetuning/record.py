"""`run_config.json` of a fine-tuning: options, rows, the base model, versions, the command."""

import dataclasses
import importlib.metadata
import platform
import shlex
from pathlib import Path

from transformers.pipelines import PIPELINE_REGISTRY

from d2l_bert import options
from d2l_bert.model_cards import card
from d2l_bert.modeling import loading
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.tasks import LEARNT


def make_record(run) -> dict:
    """The content of `run_config.json`: options, rows, base model, versions, and the command that repeats the run."""
    config, splits, task = run.config, run.splits, run.task
    arguments, dataset = run.arguments(run.rates[0], config.seed), config.dataset_name()
    warmup, tag = arguments.warmup_steps, card.PIPELINE_TAGS[task.auto_class.removeprefix("AutoModel")]
    hub_dataset = dataset_and_config(dataset)[0] if splits["train"].is_dataset else None
    is_on_hub = hub_dataset is not None and not Path(hub_dataset).exists()
    libraries = ("d2l-bert", "torch", "transformers", "tokenizers", "datasets", "accelerate", "scikit-learn", "scipy")
    fingerprint = loading.hash_of_model(config.model) if Path(config.model).exists() else None
    read = {
        config.model: fingerprint,
        **{getattr(config, f"{name}_file"): split.fingerprint for name, split in splits.items()},
    }
    base = {
        "name": card.local_name(config.model),
        "revision": run.revision,
        "fingerprint": fingerprint,
    }
    record = card.portable(
        {
            "kind": config.task_type,
            "auto_class": task.auto_class,
            "pipeline_task": tag if tag in PIPELINE_REGISTRY.get_supported_tasks() else None,
            "rows_per_step": arguments.per_device_train_batch_size
            * run.processes
            * config.gradient_accumulation_steps,
            "warmup": f"{warmup:,} steps" if warmup >= 1 else f"{100 * warmup:.3g} % of the steps",
            "finetune": dataclasses.asdict(config),
            "identity": {
                **{**config.identity(), "learning_rates": run.rates, "processes": run.processes},
                **{f"the fingerprint of the {name} rows": split.fingerprint for name, split in splits.items()},
                "the model": base,
            },
            "learning_rates": run.rates,
            "max_seq_length": run.max_seq_length,
            "learnt": {name: vars(task)[name] for name in LEARNT if name in vars(task)},
            "dropout": run.dropout,
            "base_model": {
                **base,
                "model_type": run.model_config.model_type,
                "language": loading.read_run_record(config.model).get("run", {}).get("language")
                if fingerprint
                else None,
            },
            "data": {
                "splits": {
                    name: {"name": split.name, "rows": len(split.rows), "fingerprint": split.fingerprint}
                    for name, split in splits.items()
                },
                "held_out": splits["validation"].held_out if "validation" in splits else 0.0,
                "test_is_labelled": "test" in run.measured(),
                "shared_with_training": {name: split.shared for name, split in splits.items() if name != "train"},
                "hub_datasets": [hub_dataset] if is_on_hub else [],
                "has_pairs": len(task.columns) > 2,  # beside the column of labels, several
                "has_unanswerable": task.has_unanswerable,
            },
            "local_paths": {
                path: {"name": card.local_name(path), "fingerprint": fingerprint}
                for path, fingerprint in read.items()
                if path
            },
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in libraries},
            },
        }
    )
    given, others = (
        record["finetune"],
        ("train_file", "validation_file", "test_file", "dataset", "license", "num_seeds"),
    )
    words = options.flags(FinetuneConfig, given, dataclasses.asdict(FinetuneConfig()), others)
    return {**record, "command": shlex.join(["d2l-bert", "finetune", given["model"], *words])}
