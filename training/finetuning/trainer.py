"""The encoder that a fine-tuning starts from, with a fresh head; Transformers' `Trainer`, and its checkpoints."""

import copy
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from d2l_bert import folders
from d2l_bert.messages import UserError, reading_model
from d2l_bert.model_cards.figures import shown_metric
from d2l_bert.modeling import configuration_d2l_bert, conversion, loading
from d2l_bert.training.checkpoint import checkpoints
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.metrics import LOWER_IS_BETTER
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)

# Dropout for fine-tuning if the model was pretrained without: BERT's (Devlin et al., 2018, appendix A.2).
DROPOUT = 0.1

# The names of the dropout rates in the configurations of Transformers' encoders, the usual name first.
DROPOUT_FIELDS = {
    "hidden_dropout_prob": ("hidden_dropout_prob", "dropout"),
    "attention_probs_dropout_prob": ("attention_probs_dropout_prob", "attention_dropout"),
}

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
    "dataloader_num_workers",
    "report_to",
    "eval_steps",
)

# Written into a checkpoint after all its other files; holds the seconds of training so far. A checkpoint without this
# file is never resumed from.
COMPLETE_FILE = "complete"


@dataclass
class Start:
    """
    The model that a run starts from.

    Args:
        name: the folder or the id on the Hub.
        config: the configuration, with the dropout of the run.
        revision: the commit of a model on the Hub; None for a folder.
        fingerprint: a hash of the files of a folder; None for a model on the Hub.
        max_seq_length: most tokens of a row.
        dropout: the dropout rates of the run, by the names of `DROPOUT_FIELDS`.
    """

    name: str
    config: object
    tokenizer: transformers.PreTrainedTokenizerBase
    revision: str | None
    fingerprint: str | None
    max_seq_length: int
    dropout: dict[str, float]


def read_start(config: FinetuneConfig, task: Task) -> Start:
    """
    Read the configuration and the tokenizer of the model, and set the dropout.

    Raises:
        UserError: there is no such model, the model has no tokenizer, its class has no head for the task, or an option
            does not fit the model.
    """
    name, auto_class = config.model, getattr(transformers, task.auto_class)
    with reading_model(name):
        model_config, tokenizer = loading.read_parts(auto_class, name)
    model_config, dropout = copy.deepcopy(model_config), {}
    for option, names in DROPOUT_FIELDS.items():
        field, given = next((name for name in names if hasattr(model_config, name)), None), getattr(config, option)
        if field is None and given is not None:
            raise UserError(f"{option}: a {model_config.model_type} model has no such dropout; leave {option} out")
        if field is not None:
            dropout[option] = (getattr(model_config, field) or DROPOUT) if given is None else given
            setattr(model_config, field, dropout[option])
    with reading_model(name), torch.device("meta"):  # no memory is taken for the weights
        model = auto_class.from_config(copy.deepcopy(model_config))
    wanted, most = config.max_seq_length or task.default_length, conversion.longest_input(model, tokenizer)
    if config.max_seq_length and most is not None and wanted > most:
        raise UserError(f"max_seq_length ({wanted}) is beyond the model's positions ({most}); lower it")
    is_folder = Path(name).exists()
    return Start(
        name=name,
        tokenizer=tokenizer,
        revision=None if is_folder else extract_commit_hash(cached_file(name, "config.json"), None),
        fingerprint=loading.hash_of_model(name) if is_folder else None,
        dropout=dropout,
        max_seq_length=wanted if most is None else min(wanted, most),
        config=model_config,
    )


@torch.no_grad()
def make_model(start: Start, task: Task, from_scratch: bool = False) -> tuple[transformers.PreTrainedModel, list[str]]:
    """
    The model with a fresh head for the labels that `task` has learnt, in float32, in training mode.

    PyTorch's global generator draws the fresh weights.

    Args:
        from_scratch: draw all weights.

    Returns:
        The model, and the names of the modules with fresh weights; [] with `from_scratch`.

    Raises:
        UserError: the weights cannot be loaded, or the encoder's weights are not complete or not finite.
    """
    auto_class = getattr(transformers, task.auto_class)
    config = copy.deepcopy(start.config)
    config.update(task.settings)
    if from_scratch:
        return auto_class.from_config(config, dtype=torch.float32).train(), []
    with reading_model(start.name), conversion.without_log_messages():
        model, report = auto_class.from_pretrained(
            start.name,
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # of a saved head; those of the encoder are refused below
            output_loading_info=True,
            **({"revision": start.revision} if start.revision else {}),  # the commit that the card names
        )
        missing, mismatched = set(report["missing_keys"]), {name for name, *_ in report["mismatched_keys"]}
        encoder = f"{model.base_model_prefix}."
        needed = mismatched | {name for name in missing if "pooler." not in name}
        if unfit := {name for name in needed if name.startswith(encoder)}:
            raise UserError(
                f"it has no weights for {min(unfit)}, or not in the shape that config.json gives; give a pretrained "
                f"encoder with its config.json"
            )
        head = {name for name, _ in model.named_parameters() if not name.startswith(encoder)}
        if not head <= missing | mismatched:  # the saved model has a head of another task: it is drawn anew
            for name, module in model.named_modules():
                if name and name.partition(".")[0] != model.base_model_prefix:
                    for parameter in module.parameters(recurse=False):
                        parameter._is_hf_initialized = False  # Transformers leaves weights with this mark as they are
                    model._init_weights(module)
        conversion.check_finite(model)
    return model.train(), sorted({name.rpartition(".")[0] for name in missing | head})


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


def default_rate(hidden_size: int) -> float:
    """
    The rate if `learning_rate` is not given.

    BERT's authors tried 2e-5 to 5e-5 for BERT-base and larger (Devlin et al., 2018, appendix A.3), and 3e-5 to 3e-4
    for the miniatures (https://github.com/google-research/bert); Mosbach et al. (2021) advise 2e-5 with warm-up.
    """
    return next((rate for size, rate in ((256, 3e-4), (512, 1e-4), (768, 5e-5)) if hidden_size < size), 2e-5)


def make_arguments(
    config: FinetuneConfig, task: Task, folder: Path, rate: float, seed: int, processes: int
) -> transformers.TrainingArguments:
    """
    Trainer's arguments for one model of a run.

    Args:
        folder: for the checkpoints of this model.
        rate, seed: of this model.
        processes: how many processes train.
    """
    metric = task.metric()
    ratio = 0.1 if config.warmup_ratio is None else config.warmup_ratio
    arguments = transformers.TrainingArguments(
        **{name: getattr(config, name) for name in AS_GIVEN},
        output_dir=str(folder),
        run_name=folder.name,
        per_device_train_batch_size=config.per_device_train_batch_size or max(1, 32 // processes),
        num_train_epochs=config.num_train_epochs or 4.0,
        max_steps=config.max_steps or -1,
        learning_rate=rate,
        warmup_steps=ratio if config.warmup_steps is None else config.warmup_steps,  # below 1 a share of the steps
        seed=seed,
        data_seed=seed,
        use_cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        logging_steps=config.logging_steps or 1 / 50,
        # Saved wherever it is evaluated: Trainer may name a best step that has no checkpoint otherwise.
        eval_strategy=config.eval_strategy if config.validates() else "no",
        save_strategy=config.eval_strategy,
        save_steps=config.eval_steps or 1,
        load_best_model_at_end=config.validates(),
        metric_for_best_model=f"eval_{metric}",
        greater_is_better=metric not in LOWER_IS_BETTER,
        disable_tqdm=True,
        label_names=list(task.label_names),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        restore_callback_states_from_checkpoint=True,  # how many evaluations early stopping has waited
    )
    # On a machine with several GPUs one process uses one; DataParallel would change what a batch is.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def make_trainer(
    model, arguments: transformers.TrainingArguments, tokenizer, task: Task, **options
) -> transformers.Trainer:
    """A `Trainer` without messages of its own, and with one mean loss for any gradient accumulation."""
    trainer = transformers.Trainer(model, arguments, data_collator=task.collator(tokenizer), **options)
    trainer.remove_callback(transformers.PrinterCallback)  # which Trainer adds where it has no bar
    # Stock BERT takes `num_items_in_batch` and ignores it: with gradient accumulation, loss and gradient would be too
    # large by the number of batches in a step. Without it, Trainer averages the batches' losses.
    if not isinstance(model.config, configuration_d2l_bert.D2lBertConfig):
        trainer.model_accepts_loss_kwargs = False
    return trainer


class Bar(transformers.ProgressCallback):
    """Transformers' progress bar, with the loss beside it instead of lines."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}")


class Lines(transformers.TrainerCallback):
    """Logs a line for each evaluation."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            shown, chooses = f"validation loss {metrics['eval_loss']:.4f}", args.metric_for_best_model
            if chooses != "eval_loss":
                name = chooses.removeprefix("eval_")
                shown += f", {name} {shown_metric(name, metrics[chooses])}"
            step = f"step {state.global_step}/{state.max_steps}"
            logger.info(f"{args.run_name}: epoch {state.epoch:.3g}, {step}: {shown}")


class MarkComplete(transformers.TrainerCallback):
    """
    Marks each checkpoint as complete after Trainer has written all of its files; then deletes all but it and the best.

    Trainer itself would delete an older checkpoint before the new one is marked; a run killed in between would then
    have no checkpoint to resume from.

    Args:
        before: the seconds of training before the checkpoint that training goes on from.
    """

    def __init__(self, before: float):
        self.began = time.monotonic() - before

    def seconds(self) -> float:
        """The seconds of training so far."""
        return round(time.monotonic() - self.began, 2)

    def on_train_begin(self, args, state, control, **kwargs):
        if state.best_global_step:  # the folder may have been moved since the state was saved
            state.best_model_checkpoint = str(Path(args.output_dir, f"checkpoint-{state.best_global_step}"))

    def on_save(self, args, state, control, **kwargs):
        if control.should_training_stop:  # Trainer, resumed at the last step, would train on: go back one checkpoint
            return
        args.distributed_state.wait_for_everyone()  # each process writes the state of its random numbers
        last = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and last.is_dir():
            folders.write_json(last / COMPLETE_FILE, {"seconds": self.seconds()})
            for path in checkpoints(last.parent):
                if path.name not in (last.name, Path(state.best_model_checkpoint or "").name):
                    shutil.rmtree(path)


def last_checkpoint(folder: Path) -> tuple[str | None, float]:
    """The complete checkpoint of most steps in the folder of one model, and the seconds to it; None and 0 without."""
    complete = [path for path in checkpoints(folder) if (path / COMPLETE_FILE).is_file()]
    return (str(complete[-1]), folders.read_json(complete[-1] / COMPLETE_FILE)["seconds"]) if complete else (None, 0.0)
