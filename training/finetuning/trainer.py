"""`Trainer`, its arguments, and its checkpoints."""

import datetime
import logging
import time
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import transformers

from d2l_bert import folders
from d2l_bert.messages import UserError
from d2l_bert.model_cards.figures import shown_metric
from d2l_bert.records import read_record
from d2l_bert.training.checkpoint import WEIGHTS_FILE, check_hashes, checkpoints, delete, hashes_of, versions
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.outputs import make_collator
from d2l_bert.training.finetuning.scoring import LOWER_IS_BETTER
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)


# The options that go to Trainer as they are.
AS_GIVEN = (
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "weight_decay",
    "lr_scheduler_type",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
    "report_to",
    "eval_steps",
)


# Written into a checkpoint after all its other files. A checkpoint without this file is never resumed from.
COMPLETE_FILE = "complete"


# Of a checkpoint: Trainer's own record.
STATE_FILE = "trainer_state.json"


class Complete(TypedDict):
    """The content of `complete`: the seconds of training so far, and the SHA-256 of each file, by its name."""

    seconds: float
    sha256: dict[str, str]


class Best(TypedDict):
    """Of Trainer's state what is read here: the step with the best evaluation so far."""

    best_global_step: NotRequired[int | None]


def default_rate(hidden_size: int) -> float:
    """
    The rate if `learning_rate` is not given.

    BERT's authors tried 2e-5 to 5e-5 for BERT-base and larger (Devlin et al., 2018, appendix A.3), and 3e-5 to 3e-4
    for the miniatures (https://github.com/google-research/bert); Mosbach et al. (2021) advise 2e-5 with warm-up.
    """
    for size, rate in ((256, 3e-4), (512, 1e-4), (768, 5e-5)):
        if hidden_size < size:
            return rate
    return 2e-5


def warmup_steps(config: FinetuneConfig) -> float:
    """The steps of the warm-up; below 1 a share of all steps."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return 0.1 if config.warmup_ratio is None else config.warmup_ratio


def make_arguments(
    task: Task, folder: Path, rate: float, seed: int, process_count: int
) -> transformers.TrainingArguments:
    """
    Trainer's arguments for one model of a run.

    Args:
        folder: for the checkpoints of this model.
        rate, seed: of this model.
        process_count: how many processes train.
    """
    config = task.config
    metric = task.metric()
    strategy = "steps" if config.eval_steps else "epoch"
    arguments = transformers.TrainingArguments(
        **{name: getattr(config, name) for name in AS_GIVEN},
        output_dir=str(folder),
        run_name=folder.name,
        per_device_train_batch_size=config.per_device_train_batch_size or max(1, 32 // process_count),
        num_train_epochs=config.num_train_epochs or 4.0,
        max_steps=config.max_steps or -1,
        learning_rate=rate,
        warmup_steps=warmup_steps(config),
        seed=seed,
        data_seed=seed,
        use_cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        logging_steps=1 / 50,  # of the run: points of the curves
        # Saved wherever it is evaluated: Trainer may name a best step that has no checkpoint otherwise.
        eval_strategy=strategy if config.validates() else "no",
        save_strategy=strategy,
        save_steps=config.eval_steps or 1,
        save_total_limit=3,  # the best, the last one, and the one before, which is complete
        load_best_model_at_end=config.validates(),
        metric_for_best_model=f"eval_{metric}",
        greater_is_better=metric not in LOWER_IS_BETTER,
        disable_tqdm=True,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=True,  # how many evaluations early stopping has waited
    )
    # On a machine with several GPUs one process uses one; DataParallel would change what a batch is.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class TaskTrainer(transformers.Trainer):
    """
    A `Trainer` whose loss is the mean over the labels of a step, however batches and processes share the step's rows.

    Args:
        task: computes the loss.
        options: further arguments of `Trainer`.
    """

    # Trainer reads this: it then leaves out its own division by `gradient_accumulation_steps`.
    loss_is_scaled_for_ga = True

    def __init__(self, task: Task, model, arguments: transformers.TrainingArguments, tokenizer, **options):
        super().__init__(model, arguments, data_collator=make_collator(task, model, tokenizer), **options)
        self.task = task
        self.remove_callback(transformers.PrinterCallback)  # Trainer adds it where it has no progress bar

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """
        The batches of a step, and how many labels all processes have in it.

        Accelerate fills the last batches of an epoch with rows of the epoch's beginning. These do not count: they get
        the label -100. For example, 2 processes with batches of 4 rows share 10 rows: 2 rows are left for the last
        batches. The first 2 rows of process 0 are these, and its other 2 and all 4 of process 1 were filled in.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.accelerator.gradient_state.end_of_dataloader:
            of_process = self.args.train_batch_size  # 4 in the example
            of_all = of_process * self.args.world_size  # 8
            left = len(self.train_dataset) % of_all or of_all  # 2
            own = max(0, left - of_process * self.args.process_index)  # 2 in process 0, 0 in process 1
            batches[-1]["labels"][own:] = -100
        count = sum((batch["labels"] != -100).sum() for batch in batches)
        return batches, self.accelerator.reduce(count.to(device))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of a batch. In an evaluation, the loss that `compute_metrics` gives replaces it."""
        labels = inputs.pop("labels")
        logits = self.task.logits(model(**inputs), inputs["attention_mask"])
        # DDP averages the gradients of the processes; times their number, it is the sum.
        loss = self.task.loss(logits, labels) * self.args.world_size / (num_items_in_batch or 1)
        return (loss, {"logits": logits}) if return_outputs else loss


class Bar(transformers.ProgressCallback):
    """Transformers' progress bar, with the loss beside it instead of lines."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


class Checkpoints(transformers.TrainerCallback):
    """
    Logs each evaluation, takes the lower loss for the better of equal checkpoints, and marks complete checkpoints.

    A checkpoint is marked after Trainer has written all of its files, and has deleted older ones but the best and the
    one before (`save_total_limit`): a run that is killed in between resumes from that one.

    Args:
        seconds_before: the seconds of training before the checkpoint that training goes on from.
    """

    def __init__(self, seconds_before: float):
        self.began = time.monotonic() - seconds_before

    def seconds(self) -> float:
        """The seconds of training so far."""
        return round(time.monotonic() - self.began, 2)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.best_global_step:  # the folder may have been moved since the state was saved
            state.best_model_checkpoint = str(Path(args.output_dir, f"checkpoint-{state.best_global_step}"))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        name = args.metric_for_best_model.removeprefix("eval_")
        value = metrics[f"eval_{name}"]
        loss = metrics["eval_loss"]
        losses = {row["step"]: row.get("eval_loss") for row in state.log_history}
        if value == state.best_metric and loss < losses[state.best_global_step]:
            # Of equal values, that of the lower loss is the best: Trainer compares after this callback, and without a
            # best value takes the present one.
            state.best_metric = None
        chooses = f", {name} {shown_metric(name, value)}" if name != "loss" else ""
        left = self.seconds() * (state.max_steps / state.global_step - 1)
        logger.info(
            f"{args.run_name}: epoch {state.epoch:.3g}, step {state.global_step}/{state.max_steps}: "
            f"validation loss {loss:.4f}{chooses}; {datetime.timedelta(seconds=round(left))} left"
        )

    def on_save(self, args, state, control, **kwargs):
        if control.should_training_stop:
            # The last checkpoint is not marked. Resumed from it, Trainer would go on behind the last step; resumed
            # from the one before, it ends as an uninterrupted run does.
            return
        args.distributed_state.wait_for_everyone()  # each process writes the state of its random numbers
        last = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and last.is_dir():
            (last / COMPLETE_FILE).unlink(missing_ok=True)  # of an earlier start, which had a damaged one here
            record = {"seconds": self.seconds(), "sha256": hashes_of(last), "versions": versions()}
            folders.write_json(last / COMPLETE_FILE, record)


def last_checkpoint(folder: Path) -> tuple[str | None, float]:
    """
    The undamaged checkpoint of most steps in the folder of one model, and the seconds to it; None and 0 without.

    Later ones, which the training makes again, are deleted. Of damaged ones a warning is logged.
    """
    paths = checkpoints(folder)
    damaged = False
    while paths:
        path = paths[-1]
        try:
            if (path / COMPLETE_FILE).exists():  # else it was not finished when the run was killed
                return str(path), _read_complete(path)["seconds"]
        except UserError as error:
            damaged = True
            logger.warning(f"{path}: damaged ({error}); the training goes on from an earlier one")
        delete(paths.pop())
    if damaged:
        logger.warning(f"{folder}: no checkpoint is left to go on from; the training of this model starts anew")
    return None, 0.0


def _read_complete(path):
    """The record of a complete checkpoint, whose files are whole, and those of the best one, which Trainer loads."""
    record = read_record(path / COMPLETE_FILE, Complete, allow_nan=True)
    check_hashes(path, record["sha256"], (STATE_FILE, WEIGHTS_FILE))
    best = read_record(path / STATE_FILE, Best, allow_nan=True).get("best_global_step")
    best_folder = path.with_name(f"checkpoint-{best}")
    if best and best_folder != path:
        of_best = read_record(best_folder / COMPLETE_FILE, Complete, allow_nan=True)
        if not of_best:
            raise UserError(f"the best one before it, {best_folder.name}, is gone")
        check_hashes(best_folder, of_best["sha256"], (WEIGHTS_FILE,))
    return record
