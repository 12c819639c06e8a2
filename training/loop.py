"""The training loop: from token ids to a finished model folder."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from accelerate import Accelerator

from d2l_bert.model_cards.push import Pusher
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.progress import report
from d2l_bert.tokenization.prepare import PreparedText
from d2l_bert.training.batching import (
    RunSchedule,
    make_held_out,
    make_sharding,
    make_steps,
    most_words,
    warn_of_unbalanced_labels,
)
from d2l_bert.training.checkpoint import Checkpoint, Saver
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import on_main, report_errors_once, shut_down
from d2l_bert.training.initialize import make_model
from d2l_bert.training.interruption import StopSignals, explain_failures, signal_name
from d2l_bert.training.learner import Learner
from d2l_bert.training.loader import load
from d2l_bert.training.machine import compiled_blocks, find_max_steps, find_micro_batch
from d2l_bert.training.packing import Sharding
from d2l_bert.training.run_folder import (
    check_identity,
    finish_folder,
    make_identity,
    make_record,
    repository,
    start_folder,
)
from d2l_bert.training.tracking import RunMonitor, start_trackers
from d2l_bert.training.word_marks import word_marks
from d2l_bert.training.word_saves import WordSaver


logger = logging.getLogger(__name__)


def train(
    architecture: D2lBertConfig,
    run: PretrainConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: Checkpoint | None,
) -> None:
    """
    Build the model, train it to its last step, and write everything that the run leaves to `folder`.

    The run starts from step 0, or goes on from the checkpoint `resumed`.

    Raises:
        SystemExit: a signal stopped the run, and a checkpoint is saved; or the main process has shown an error.
        UserError: for example the text has no pair, memory ran out, training diverged, or the disk is full.
    """
    torch.manual_seed(run.seed)
    learner = Learner(accelerator, make_model(architecture, run, text.tokenizer, resumed), run)
    with compiled_blocks(learner.model, run.torch_compile):
        train_learner(learner, architecture, run, text, folder, resumed)


def train_learner(
    learner: Learner,
    architecture: D2lBertConfig,
    run: PretrainConfig,
    text: PreparedText,
    folder: Path,
    resumed: Checkpoint | None,
) -> None:
    """As `train`, with a model and optimizers that are built."""
    accelerator, is_auto = learner.accelerator, run.micro_batch_size == "auto"
    sharding = make_sharding(architecture, run, accelerator.num_processes, accelerator.process_index)
    run, held_out, identity, state = plan(run, architecture, learner, text, sharding, resumed)
    start, max_steps = state["step"], state["max_steps"]
    schedule = RunSchedule(run, max_steps)
    record = make_record(run, max_steps, architecture, text, accelerator)
    with report_errors_once():
        words = WordSaver(learner, folder, text.tokenizer, word_marks(run.save_words), state)
        steps = make_steps(run, text, max_steps, sharding)
        place = state.get("data_position")  # where the pairs of the next step are
        steps.go_on_from(start, place)
    log = on_main(accelerator, start_folder, folder, record, start)
    saved_before = words.start(most_words(run, record["data"], max_steps))
    on_main(accelerator, start_trackers, accelerator, folder, record, start, share_result=False)
    monitor = RunMonitor(run, architecture, accelerator, folder, log, state, max_steps)
    on_main(accelerator, warn_of_unbalanced_labels, steps)
    pusher = on_main(accelerator, start_pusher, run, folder, record, saved_before, share_result=False)
    chosen = {"micro_batch_size": run.micro_batch_size, "max_steps": max_steps}
    saver = Saver(learner, folder, text.tokenizer, {**chosen, "identity": identity}, resumed)
    # Inside the block a signal ends the run after the current step; before the block it ends the process at once.
    stop = StopSignals(accelerator)
    with stop, explain_failures(run, is_auto), closing(monitor):
        with closing(load(steps, start, max_steps, run.dataloader_num_workers, stop.is_stopping)) as loaded:
            batches = monitor.meter.waiting(loaded)
            # If a signal stopped the earlier run at this step, the evaluation of the step is still missing.
            if start and schedule.should_evaluate(start):
                write_evaluation(learner, held_out, stop, monitor)
            monitor.meter.start_clock()
            for step in range(start + 1, max_steps + 1):
                micro_batches = next(batches, None)  # None if a signal has stopped the run
                if stop.should_stop():
                    break
                rate, place = schedule.learning_rate(step), micro_batches.place
                words.add(micro_batches.words)
                monitor.add_step(step, learner.step(step, micro_batches, rate), rate)
                if schedule.should_log(step):
                    monitor.write_row()
                with monitor.meter.clock_stopped():
                    if schedule.should_evaluate(step):
                        write_evaluation(learner, held_out, stop, monitor)
                    saved_by_words = words.save_due(step) if monitor.last_step_was_taken() else []
                    if pusher and not stop.agreed_signal:
                        pusher.saved_by_words(saved_by_words)
                    # After a skipped step the weights may be bad, and each new checkpoint deletes an old one.
                    if (schedule.should_save(step) and monitor.last_step_was_taken()) or step == max_steps:
                        saver.save(step, state_of(monitor, words, place))
                        if pusher and step < max_steps and not stop.agreed_signal:  # start no upload while stopping
                            pusher.saved(saver.path, step)
        if stop.should_stop():
            monitor.write_row()
            saver.save(monitor.step, state_of(monitor, words, place))
            exit_after_signal(accelerator, stop, saver.path)
    words.report_missing()
    model, metrics = learner.full_model(averaged=True), {**monitor.run_metrics(), "train_words_seen": words.seen}
    report_on_main(accelerator, finish_folder, folder, model, text, record, metrics, log, held_out.one())
    if run.push_to_hub:
        report_on_main(accelerator, Pusher.finish, pusher)
    shut_down(accelerator)


def plan(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    learner: Learner,
    text: PreparedText,
    sharding: Sharding,
    resumed: Checkpoint | None,
) -> tuple:
    """
    Decide by trying what the options leave open, and load the checkpoint to resume from.

    Args:
        sharding: this process.

    Returns:
        The options with what was decided, the held-out batches, the run's identity, and the state to start from.
    """
    if run.micro_batch_size == "auto":
        size = resumed.state["micro_batch_size"] if resumed else find_micro_batch(run, learner, text, sharding)
        run = dataclasses.replace(run, micro_batch_size=size)
    with report_errors_once():
        held_out = make_held_out(run, text, sharding)
    identity = make_identity(run, architecture, text)
    if resumed:
        return run, held_out, identity, resume(learner, resumed, identity)
    max_steps = find_max_steps(run, learner, text, sharding, held_out)
    return run, held_out, identity, {"step": 0, "max_steps": max_steps}


def resume(learner: Learner, checkpoint: Checkpoint, identity: dict) -> dict:
    """Load a checkpoint into the learner, if it is of the same run; the state that the checkpoint keeps."""
    on_main(learner.accelerator, check_identity, checkpoint, identity)
    learner.load(checkpoint)
    if learner.accelerator.is_main_process:
        logger.info(f"going on from {checkpoint.path}")
    return checkpoint.state


def start_pusher(run: PretrainConfig, folder: Path, record: dict, saved_before: list) -> Pusher | None:
    """
    The object that uploads the run's checkpoints and model to the Hub; None without `push_to_hub`.

    Args:
        saved_before: models saved by words seen, which a run that was killed may not have uploaded.
    """
    if not run.push_to_hub:
        return None
    pusher = Pusher(folder, record, repository(run, folder), run.hub_strategy, public=not run.hub_private_repo)
    pusher.saved_by_words(saved_before)
    return pusher


def state_of(monitor: RunMonitor, words: WordSaver, place: dict | None) -> dict:
    """What a checkpoint keeps, beside model and optimizer: totals, words seen, and where the next pairs are."""
    return {**monitor.state(), "words_seen": words.seen, "words_settled": words.settled, "data_position": place}


def write_evaluation(learner: Learner, held_out, stop: StopSignals, monitor: RunMonitor) -> None:
    """Evaluate on the held-out batches and log the result; log nothing if a signal stops the run meanwhile."""
    metrics = learner.evaluate(stop.until_stop(held_out))
    if metrics and not stop.should_stop():
        monitor.write_evaluation(metrics)


def report_on_main(accelerator: Accelerator, function: Callable[..., str], *arguments) -> None:
    """Call a function in the main process only, and show the text that the function returns."""
    text = on_main(accelerator, function, *arguments, share_result=False)
    if accelerator.is_main_process:
        report.info(text)


def exit_after_signal(accelerator: Accelerator, stop: StopSignals, saved: Path | None) -> None:
    """
    Say how to resume, and end this process.

    Args:
        saved: the last checkpoint; None if the run was stopped before its first step.

    Raises:
        SystemExit: always, with the exit code of the signal.
    """
    if accelerator.is_main_process:
        how_to_resume = f"{saved} is saved; go on" if saved else "nothing is lost; start"
        logger.warning(
            f"{signal_name(stop.agreed_signal)}: stopped; {how_to_resume} with the same command and "
            f"--resume_from_checkpoint latest"
        )
    shut_down(accelerator)
    raise stop.exit()
