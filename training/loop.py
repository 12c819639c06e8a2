"""The loop, told as a story: from token ids to a finished model folder."""

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
from d2l_bert.training.batching import how_to_cut, make_held_out, make_steps, warn_of_labels
from d2l_bert.training.checkpoint import Checkpoint, Saver
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import on_main, part, said_once
from d2l_bert.training.energy import train_energy
from d2l_bert.training.identity import check_identity, make_identity
from d2l_bert.training.initialize import make_model
from d2l_bert.training.interruption import StopSignals, failures_explained, name_of
from d2l_bert.training.learner import Learner
from d2l_bert.training.loader import load
from d2l_bert.training.run_folder import finish_folder, make_record, repository, start_folder
from d2l_bert.training.schedule import RunSchedule
from d2l_bert.training.tracking import start_trackers
from d2l_bert.training.trials import decide_steps, settle_compiling, settle_micro_batch
from d2l_bert.training.watch import RunWatch


logger = logging.getLogger(__name__)


def train(
    architecture: D2lBertConfig,
    run: PretrainConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: Checkpoint | None,
) -> None:
    """Build the model, go through the steps, and leave everything in `folder`."""
    torch.manual_seed(run.seed)
    learner = Learner(accelerator, make_model(architecture, run, text.tokenizer, resumed), run)
    cutting = how_to_cut(architecture, run, accelerator.num_processes, accelerator.process_index)
    is_auto = run.micro_batch_size == "auto"
    run = settle_micro_batch(run, learner, text, cutting, resumed)
    run = settle_compiling(run, architecture, learner, text, cutting, resumed)
    with said_once():
        held_out = make_held_out(run, text, **cutting)
    identity = make_identity(run, architecture, text)
    if resumed:
        on_main(accelerator, check_identity, resumed, identity)
        learner.load(resumed)
        if accelerator.is_main_process:
            logger.info(f"going on from {resumed.path}")
        state = resumed.state
    else:
        state = {"step": 0, "max_steps": decide_steps(run, learner, text, cutting, held_out)}
    start, max_steps = state["step"], state["max_steps"]
    schedule = RunSchedule(run, max_steps)
    record = make_record(run, max_steps, architecture, text, accelerator)
    log = on_main(accelerator, start_folder, folder, record, start)
    on_main(accelerator, start_trackers, accelerator, folder, record, start, shared=False)
    watch = RunWatch(run, architecture, accelerator, folder, log, state, max_steps)
    with said_once():
        steps = make_steps(run, text, max_steps, **cutting)
    on_main(accelerator, warn_of_labels, steps)
    pusher = on_main(accelerator, make_pusher, run, folder, record, shared=False)
    decided = {"micro_batch_size": run.micro_batch_size, "torch_compile": run.torch_compile, "max_steps": max_steps}
    saver = Saver(learner, folder, text.tokenizer, {**decided, "identity": identity}, resumed)
    # Until here a signal ends the process at once; from here on it waits for the end of a step.
    stop = StopSignals(accelerator)
    with stop, failures_explained(run, is_auto), closing(watch):
        with closing(load(steps, start, max_steps, run.dataloader_num_workers, stop.is_told)) as loaded:
            batches = watch.waiting(loaded)
            if start and schedule.evaluates(start):  # a run may be stopped before it has come to that
                write_evaluation(learner, held_out, stop, watch)
            watch.resume_clock()
            for step in range(start + 1, max_steps + 1):
                micro_batches = next(batches, None)  # None where a signal came meanwhile
                if stop.wanted():
                    break
                rate = schedule.learning_rate(step)
                watch.see(step, learner.step(step, micro_batches, rate), rate)
                if schedule.logs(step):
                    watch.write_row()
                if schedule.evaluates(step):
                    write_evaluation(learner, held_out, stop, watch)
                # While steps are being skipped the weights may be bad: they do not push out what was saved before.
                if (schedule.saves(step) and watch.is_sound()) or step == max_steps:
                    saver.save(step, watch.state())
                    if pusher and step < max_steps and not stop.agreed:  # a run told to stop waits for nothing
                        pusher.saved(saver.path, step)
                if schedule.evaluates(step) or schedule.saves(step):
                    watch.resume_clock()
        if stop.wanted():
            watch.write_row()
            saver.save(watch.step, watch.state())
            leave(accelerator, stop, saver.path)
    published, metrics = learner.plain(averaged=True), watch.figures()
    if accelerator.is_main_process:
        metrics |= train_energy(record["machine"], metrics)
    report_on_main(accelerator, finish_folder, folder, published, text, record, metrics, log, held_out.one(0))
    if run.push_to_hub:
        report_on_main(accelerator, Pusher.finish, pusher)
    part(accelerator)


def make_pusher(run: PretrainConfig, folder: Path, record: dict) -> Pusher | None:
    """What sends the run's models to the Hub, if it is asked for."""
    if not run.push_to_hub:
        return None
    return Pusher(folder, record, repository(run, folder), run.hub_strategy, public=not run.hub_private_repo)


def write_evaluation(learner: Learner, held_out, stop: StopSignals, watch: RunWatch) -> None:
    """Write the held-out figures, unless the run is told to stop meanwhile."""
    figures = learner.evaluate(stop.until_wanted(held_out))
    if figures and not stop.wanted():
        watch.write_held_out(figures)


def report_on_main(accelerator: Accelerator, function: Callable[..., str], *arguments) -> None:
    """Call a function in the main process alone, and report the text that it returns."""
    text = on_main(accelerator, function, *arguments, shared=False)
    if accelerator.is_main_process:
        report.info(text)


def leave(accelerator: Accelerator, stop: StopSignals, saved: Path | None) -> None:
    """End a run that was told to stop, with the exit code of whatever told it."""
    if accelerator.is_main_process:
        what, there = (
            name_of(stop.agreed),
            f"{saved} is saved; go on" if saved else "nothing is lost; start",
        )
        logger.warning(f"{what}: stopped; {there} with the same command and --resume_from_checkpoint latest")
    part(accelerator)
    raise stop.exit()
