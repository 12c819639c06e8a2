"""`finetune`: trains a model for each rate, then for each seed with the best rate; keeps the best model."""

import contextlib
import dataclasses
import logging
import math
import sys
from pathlib import Path

import transformers

from d2l_bert import folders, messages
from d2l_bert.messages import UserError
from d2l_bert.model_cards import publish
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.modeling import conversion
from d2l_bert.records import read_record
from d2l_bert.tokenization.model_files import without_log_messages
from d2l_bert.training import processes, run_folder
from d2l_bert.training.checkpoint import WEIGHTS_FILE, check_hashes, checkpoints, delete_old, hashes_of, versions
from d2l_bert.training.finetuning import account, models, scoring, trainer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.folder import MODEL_FOLDER, write_folder
from d2l_bert.training.finetuning.outputs import Outputs, figures_of, outputs_of
from d2l_bert.training.finetuning.plan import Attempt, Outcome, Plan, Result, attempt_of, make_plan, repository_of
from d2l_bert.training.finetuning.record import make_record


logger = logging.getLogger(__name__)

# In the folder of one model: its figures.
RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True)
class FinetuneResult:
    """
    What a fine-tuning has left.

    Args:
        output_dir: the output folder, which `from_pretrained` and `predict` load.
        metrics: the content of metrics.json there: `test_accuracy` and the like, the figures of each seed, and what
            knowing nothing scores (`folder.make_metrics`).
        predictions_file: the file with the predictions for the test rows; None without test rows.
    """

    output_dir: Path
    metrics: dict = dataclasses.field(repr=False)
    predictions_file: Path | None

    def __repr__(self) -> str:
        split = "test_" if "test_loss" in self.metrics else "validation_"
        figures = {name: value for name, value in self.metrics.items() if name.startswith(split)}
        return messages.result_in_words(self, figures)


@processes.restore_host_settings()
def finetune(config: FinetuneConfig) -> FinetuneResult:
    """
    Fine-tune a model on a table, by Transformers' `Trainer`, on all launched processes.

    Data and options are checked before anything is written. One model is trained for each rate, with the first seed;
    then one for each further seed, with the best rate. The folder holds the model of the best seed.

    Args:
        config: the options of the run.

    Raises:
        UserError: an option, the data, the model or the output folder is wrong, or a file cannot be written.
    """
    scoring.check_libraries("finetune")
    state = processes.start_processes()
    with without_log_messages():
        with processes.together():
            plan = make_plan(config, state.num_processes)
            record = make_record(plan)
        with contextlib.ExitStack() as stack:
            processes.on_main(run_folder.enter_finetuning, config, plan.folder, record, stack)
            processes.on_main(account.write_account, plan.folder, plan.task, plan.splits)
            logger.info(f"{account.ACCOUNT_FILE} in the output folder has more of what was read")
            outcome = train(plan)
            messages.report.info(finish(plan, record, outcome))  # `report` is the logger of what goes to stdout
        if config.push_to_hub:
            settings = PublishConfig(public=not config.hub_private_repo)
            sent = processes.on_main(publish.publish, plan.folder, repository_of(config), settings)
            messages.report.info(sent.report)
        metrics = processes.on_main(run_folder.read_metrics, plan.folder)
    predictions_file = plan.folder / run_folder.PREDICTIONS_FILE if "test" in plan.splits else None
    return FinetuneResult(output_dir=plan.folder, metrics=metrics, predictions_file=predictions_file)


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(plan: Plan) -> Outcome:
    """
    Train all models: each rate with the first seed, then the best rate with the further seeds.

    A rate or a seed whose training diverges is left out, if there are others.

    Raises:
        UserError: the training diverged with every seed.
    """
    of_rates = train_stable(plan, [Attempt(rate, plan.config.seed) for rate in plan.rates])
    rate = best_of(plan, of_rates)["learning_rate"] if of_rates else min(plan.rates)
    # The model of the first seed with this rate is finished: its result is read back.
    of_seeds = train_stable(plan, [Attempt(rate, seed) for seed in plan.seeds])
    if not of_seeds:
        raise UserError(
            f"the training diverged (weights are not finite); give a lower learning_rate than {rate:g}, or more "
            f"warm-up, and --overwrite_output_dir"
        )
    return Outcome(of_rates, of_seeds, best_of(plan, of_seeds))


def train_stable(plan: Plan, attempts: list[Attempt]) -> list[Result]:
    """The results of models; those that diverge are left out."""
    results = []
    for attempt in attempts:
        result = result_of(plan, attempt)
        if not result.get("diverged"):
            results.append(result)
    return results


def best_of(plan: Plan, results: list[Result]) -> Result:
    """The best result by the validation rows; of equal ones that of the lower loss, then the first."""
    if "validation" not in plan.splits:
        return results[0]

    def rank(result):
        figures = result["validation"]
        return scoring.goodness(plan.metric, figures[plan.metric]), -figures["loss"]

    return max(results, key=rank)


def result_of(plan: Plan, attempt: Attempt) -> Result:
    """Train one model, or go on with it, or take its result from the folder if it is finished."""
    folder = plan.folder_of(attempt)
    if (folder / RESULT_FILE).exists():
        return read_result(plan, attempt)
    checkpoint, seconds = processes.on_main(trainer.last_checkpoint, folder)
    checkpoint_callback = trainer.Checkpoints(seconds)
    training = make_trainer(plan, attempt, checkpoint_callback)
    if checkpoint is not None:
        logger.info(f"{folder.name}: goes on from {Path(checkpoint).name}")
    training.train(resume_from_checkpoint=checkpoint)
    state = training.state
    result = {
        "learning_rate": attempt.rate,
        "seed": attempt.seed,
        "steps": state.global_step,
        "best_step": state.best_global_step or state.global_step,
        "seconds": checkpoint_callback.seconds(),
        "versions": versions(),
        "log": [row for row in state.log_history if "loss" in row or "eval_loss" in row],
    }
    model = training.accelerator.unwrap_model(training.model, keep_fp32_wrapper=False)
    if all(parameter.isfinite().all() for parameter in model.parameters()):
        for name in plan.measured():
            result[name] = measure(plan, name, predict(plan, model, name))
    else:
        model = None
        result["diverged"] = True
        logger.warning(f"{folder.name}: the training diverged (weights are not finite); it is left out")
    return processes.on_main(_keep, folder, model, result)


def make_trainer(plan: Plan, attempt: Attempt, checkpoint_callback: trainer.Checkpoints) -> trainer.TaskTrainer:
    """Trainer for one model, with its fresh head."""
    arguments = plan.arguments(attempt)
    transformers.set_seed(attempt.seed)
    model = models.make_model(plan.start.config, plan.start.revision, plan.task)
    validation = plan.features["validation"].inputs if "validation" in plan.features else None

    def compute_metrics(evaluation):
        return measure(plan, "validation", Outputs(evaluation.predictions, evaluation.label_ids))

    return trainer.TaskTrainer(
        plan.task,
        model,
        arguments,
        plan.start.tokenizer,
        train_dataset=plan.features["train"].inputs,
        eval_dataset=validation,
        compute_metrics=compute_metrics,
        callbacks=callbacks_of(plan.config, checkpoint_callback),
    )


def callbacks_of(
    config: FinetuneConfig, checkpoint_callback: trainer.Checkpoints
) -> list[transformers.TrainerCallback]:
    """The callbacks of a training: early stopping, the given one, and a progress bar where there is a terminal."""
    callbacks = []
    if config.early_stopping_patience is not None:
        callbacks.append(transformers.EarlyStoppingCallback(config.early_stopping_patience))
    callbacks.append(checkpoint_callback)
    if messages.shows_bars():
        callbacks.append(trainer.Bar())
    return callbacks


def predict(plan: Plan, model, split: str) -> Outputs:
    """The outputs of a model for the rows of a split, in float32 also after a training in bf16 or fp16."""
    inputs = plan.features[split].inputs
    return outputs_of(plan.task, model, plan.start.tokenizer, inputs, plan.config.per_device_eval_batch_size)


def measure(plan: Plan, split: str, outputs: Outputs) -> dict[str, float]:
    """The loss and the metrics of a split."""
    return figures_of(plan.task, plan.splits[split], plan.features[split], outputs)


def _keep(folder, model, result) -> Result:
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


# ---------------------------------------------------------------------------------------------------------------------
# The result of an earlier run


def read_result(plan: Plan, attempt: Attempt) -> Result:
    """
    The result of a model that an earlier run has finished.

    Raises:
        UserError: the file is not one that `result_of` writes for this rate and seed, or the model beside it has
            changed.
    """
    file = plan.folder_of(attempt) / RESULT_FILE
    result = read_record(file, Result, allow_nan=True)
    way_out = f"delete {file.parent}, and it is trained again"
    if attempt_of(result) != attempt:
        raise UserError(f"{file}: is of another rate or seed; {way_out}")
    for count in (result["steps"], result["best_step"], result["seconds"]):
        if not 0 <= count < math.inf:
            raise UserError(f"{file}: has an impossible number of steps or seconds; {way_out}")
    for row in result["log"]:
        is_of_numbers = all(_is_number(value) for value in row.values())
        if type(row.get("step")) is not int or not is_of_numbers:
            raise UserError(f"{file}: its log has a row that is not one of numbers; {way_out}")
    if result.get("diverged"):
        return result
    saved = file.parent / MODEL_FOLDER
    if saved.exists():  # of a finished run, only the best attempt still has its model
        with messages.explained(f"{saved}: is not as it was trained", way_out, UserError):
            check_hashes(saved, result.get("sha256", {}), (WEIGHTS_FILE, "config.json"))
    for split in plan.measured():
        figures = result.get(split, {})
        for name in (*plan.task.metrics_shown, "loss"):
            if not _is_possible(name, figures.get(name)):
                raise UserError(f"{file}: has no {name} of the {split} rows that can be; {way_out}")
    return result


def _is_possible(metric: str, value) -> bool:
    """Whether a value of JSON can be that of a metric."""
    if not _is_number(value):
        return False
    return not scoring.is_share(metric) or 0 <= value <= 1


def _is_number(value) -> bool:
    """Whether a value of JSON is a number that a float holds, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


# ---------------------------------------------------------------------------------------------------------------------
# The end


def finish(plan: Plan, record: dict, outcome: Outcome) -> str:
    """
    Write the finished folder, whose model is that of the best seed.

    Args:
        record: the content of run_config.json.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    best = attempt_of(outcome.best)
    saved = plan.folder_of(best) / MODEL_FOLDER
    with messages.reading_model(str(saved)):
        model = getattr(transformers, plan.task.auto_class).from_pretrained(saved, trust_remote_code=False)
    row_results = {}
    for name, split in plan.splits.items():
        is_predicted = name == "test"  # its predictions are written to a table
        if is_predicted or name == plan.reported_by_class():
            logits = predict(plan, model, name).logits
            row_results[name] = plan.task.row_results(split, plan.features[name], logits)
    if row_results:
        # For the model's config.json: a run with predictions writes "use_cache": false there, as in the releases in
        # which Trainer predicted and set it.
        model.config.use_cache = False
    return processes.on_main(write_folder, plan, record, model, row_results, outcome)
