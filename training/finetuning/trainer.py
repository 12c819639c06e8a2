"""Transformers' `Trainer` for fine-tuning: its arguments, rates by layer, progress, checkpoints marked as complete."""

import logging
import re
import shutil
import time
from pathlib import Path

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from d2l_bert.folders import read_json, write_json
from d2l_bert.messages import UserError
from d2l_bert.model_cards.figures import shown_metric
from d2l_bert.training.checkpoint import checkpoints
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.kind import LOWER_IS_BETTER
from d2l_bert.training.finetuning.start import is_ours


logger = logging.getLogger(__name__)


# Defaults of options whose default is None, because another option may replace them.
EPOCHS = 4.0
WARMUP_RATIO = 0.1
BATCH_SIZE = 32
LOGGED_ROWS = 50

# Written into a checkpoint after all its other files; holds the seconds of training so far. A checkpoint without this
# file is never resumed from.
# The options that go to Trainer as they are.
AS_GIVEN = (
    *("per_device_eval_batch_size", "gradient_accumulation_steps", "train_sampling_strategy", "weight_decay"),
    *("lr_scheduler_type", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16"),
    *("dataloader_num_workers", "report_to", "eval_steps"),
)

COMPLETE_FILE = "complete"


def default_rate(hidden_size: int) -> float:
    """
    The rate if `learning_rate` is not given.

    BERT's authors tried 2e-5 to 5e-5 for BERT-base and larger (Devlin et al., 2018, appendix A.3), and 3e-5 to 3e-4
    for the miniatures (https://github.com/google-research/bert); Mosbach et al. (2021) advise 2e-5 with warm-up.
    """
    return next((rate for size, rate in ((256, 3e-4), (512, 1e-4), (768, 5e-5)) if hidden_size < size), 2e-5)


def batch_size(config: FinetuneConfig, processes: int) -> int:
    """The rows of a process at once: `per_device_train_batch_size`, or `BATCH_SIZE` divided by the processes."""
    return config.per_device_train_batch_size or max(1, BATCH_SIZE // processes)


def rows_per_step(config: FinetuneConfig, processes: int) -> int:
    """The rows in an optimizer step of all processes."""
    return batch_size(config, processes) * processes * config.gradient_accumulation_steps


def warmup(config: FinetuneConfig) -> float:
    """Steps of the warm-up, or, below 1, their share of all steps: Trainer's `warmup_steps`."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return WARMUP_RATIO if config.warmup_ratio is None else config.warmup_ratio


def make_arguments(
    config: FinetuneConfig, folder: Path, rate: float, seed: int, processes: int, metric: str, labels
) -> TrainingArguments:
    """
    Trainer's arguments for one model of a run.

    Args:
        folder: for the checkpoints of this model.
        rate, seed: of this model.
        processes: how many processes train.
        metric: the metric that chooses the best checkpoint.
        labels: the names of labels in a batch.
    """
    arguments = TrainingArguments(
        **{name: getattr(config, name) for name in AS_GIVEN},
        output_dir=str(folder),
        run_name=folder.name,
        per_device_train_batch_size=batch_size(config, processes),
        num_train_epochs=EPOCHS if config.num_train_epochs is None else config.num_train_epochs,
        max_steps=config.max_steps or -1,
        learning_rate=rate,
        warmup_steps=warmup(config),
        seed=seed,
        data_seed=seed,
        use_cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        logging_steps=config.logging_steps or 1 / LOGGED_ROWS,
        # Saved wherever it is evaluated: Trainer may name a best step that has no checkpoint otherwise.
        eval_strategy=config.eval_strategy if config.validates() else "no",
        save_strategy=config.eval_strategy,
        save_steps=config.eval_steps or 1,
        load_best_model_at_end=config.validates(),
        metric_for_best_model=f"eval_{metric}",
        greater_is_better=metric not in LOWER_IS_BETTER,
        disable_tqdm=True,
        label_names=list(labels),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=True,  # how many evaluations early stopping has waited
    )
    # On a machine with several GPUs one process uses one; DataParallel would change what a batch is.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class FinetuneTrainer(Trainer):
    """`Trainer` with rates by layer (`layerwise_decay`), and one mean loss for any gradient accumulation."""

    def __init__(self, *arguments, layerwise_decay: float | None = None, **options):
        super().__init__(*arguments, **options)
        self.layerwise_decay = layerwise_decay
        self.remove_callback(PrinterCallback)  # which Trainer adds where it has no bar
        # Stock BERT takes `num_items_in_batch` and ignores it: with gradient accumulation, loss and gradient would be
        # too large by the number of batches in a step. Without it, Trainer averages the batches' losses.
        if not is_ours(self.accelerator.unwrap_model(self.model).config):
            self.model_accepts_loss_kwargs = False

    def _get_eval_sampler(self, eval_dataset):
        """The rows in their order, as the metrics need them; Trainer would group them by length as in training."""
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def create_optimizer(self, model=None):
        """As Trainer's; with `layerwise_decay`, the rate falls by this factor from each layer to the layer below."""
        if self.optimizer is not None or self.layerwise_decay in (None, 1.0):
            return super().create_optimizer(model)
        model = self.model if model is None else model
        optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, model)
        depth_of = depths([name for name, _ in model.named_parameters()])
        decayed, top, groups = self.get_decay_parameter_names(model), max(depth_of.values()), {}
        if top < 2:  # the embeddings have depth 0 and the head has depth 1
            kind = self.accelerator.unwrap_model(model).config.model_type
            raise UserError(f"layerwise_decay: no layers are found in a {kind} model; leave layerwise_decay out")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups.setdefault((depth_of[name], name in decayed), []).append(parameter)
        self.optimizer = optimizer(
            [
                {
                    "params": parameters,
                    "lr": self.args.learning_rate * self.layerwise_decay ** (top - depth),
                    "weight_decay": self.args.weight_decay if is_decayed else 0.0,
                }
                for (depth, is_decayed), parameters in groups.items()
            ],
            **options,
        )
        return self.optimizer


def depths(names: list[str]) -> dict[str, int]:
    """The depth of each parameter of an encoder: 0 for embeddings, 1 for the first layer, ..., the head at the top."""
    layer = {name: re.search(r"\.layers?\.(\d+)\.", name) for name in names}
    layers = 1 + max((int(found[1]) for found in layer.values() if found), default=-1)
    return {
        name: int(found[1]) + 1 if found else 0 if "embeddings." in name else layers + 1
        for name, found in layer.items()
    }


class Bar(ProgressCallback):
    """Transformers' progress bar, with the loss beside it instead of lines."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


class Lines(TrainerCallback):
    """Logs a line for each evaluation."""

    def __init__(self, name: str, metric: str):
        self.name, self.metric = name, metric

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero and metrics and state.epoch is not None:
            parts = [f"validation loss {metrics['eval_loss']:.4f}"]
            if self.metric != "loss":
                parts.append(f"{self.metric} {shown_metric(self.metric, metrics[f'eval_{self.metric}'])}")
            logger.info(
                f"{self.name}: epoch {state.epoch:.3g}, step {state.global_step}/{state.max_steps}: {', '.join(parts)}"
            )


class MarkComplete(TrainerCallback):
    """
    Marks each checkpoint as complete after Trainer has written all of its files; then deletes older checkpoints.

    Trainer itself would delete an older checkpoint before the new one is marked; a run killed in between would then
    have no checkpoint to resume from.

    Args:
        limit: the checkpoints to keep in all; the best and the last are always kept.
    """

    def __init__(self, limit: int):
        self.limit, self.before, self.began = limit, 0.0, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.monotonic()
        if state.best_global_step:  # the folder may have been moved since the state was saved
            state.best_model_checkpoint = str(Path(args.output_dir, f"checkpoint-{state.best_global_step}"))
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.before = seconds_before(folder) if state.global_step else 0.0

    def on_save(self, args, state, control, **kwargs):
        if control.should_training_stop:  # Trainer, resumed at the last step, would train on: go back one checkpoint
            return
        args.distributed_state.wait_for_everyone()  # each process writes the state of its random numbers
        last = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if not state.is_world_process_zero or not last.is_dir():
            return
        write_json(last / COMPLETE_FILE, {"seconds": round(self.before + time.monotonic() - self.began, 2)})
        by_steps = checkpoints(last.parent)[::-1]
        best = [path for path in by_steps if path.name == Path(state.best_model_checkpoint or "").name]
        kept = list(dict.fromkeys([last, *best, *by_steps]))[: max(self.limit, len({last, *best}))]
        for path in by_steps:
            if path not in kept:
                shutil.rmtree(path)


def seconds_before(checkpoint: Path) -> float:
    """The seconds of training before a complete checkpoint."""
    return read_json(checkpoint / COMPLETE_FILE)["seconds"]


def last_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of most steps in the folder of one model; None without one."""
    complete = [path for path in checkpoints(folder) if (path / COMPLETE_FILE).is_file()]
    return complete[-1] if complete else None
