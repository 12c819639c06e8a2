"""`pretrain`: from options and text to a model folder; the training loop; the dry run."""

import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from accelerate.tracking import get_available_trackers
from transformers.utils import logging as transformers_logging

from d2l_bert.errors import writing
from d2l_bert.model_cards.card import count_parameters
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.push import Pusher, check_push
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.progress import report
from d2l_bert.tokenization.prepared_folder import corpus_is_prepared
from d2l_bert.training import distributed, interruption
from d2l_bert.training.batch_loader import load
from d2l_bert.training.batching import (
    RunSchedule,
    check_architecture,
    check_source_weights,
    full_length_pairs,
    make_held_out,
    make_passes,
    make_sharding,
    make_steps,
    with_objective,
)
from d2l_bert.training.checkpoint import WordSaver, check_output_folder, find_checkpoint, step_of
from d2l_bert.training.config import HUB_OPTIONS, LENGTH_OPTIONS, PretrainConfig, folder_name, word_marks
from d2l_bert.training.data import HeldOutPairs
from d2l_bert.training.distributed import on_main, report_errors_once, restore_host_settings, shut_down
from d2l_bert.training.existing_tokenizers import prepare_with_tokenizer
from d2l_bert.training.initialize import make_model, model_class_of, start_from
from d2l_bert.training.interruption import StopSignals, signal_name
from d2l_bert.training.job import Job
from d2l_bert.training.learner import Learner
from d2l_bert.training.machine import compiled_blocks, find_max_steps, find_micro_batch, with_defaults
from d2l_bert.training.openmp import short_waits
from d2l_bert.training.run_folder import (
    LOG_FILE,
    RUN_FILE,
    check_identity,
    default_output_dir,
    finish_folder,
    make_identity,
    make_record,
    output_folder,
    repository,
    start_folder,
)
from d2l_bert.training.tracking import RunMonitor, check_trackers, start_trackers


logger = logging.getLogger(__name__)


@restore_host_settings()
def pretrain(architecture: D2lBertConfig, run: PretrainConfig) -> Path | None:
    """
    Pretrain a BERT from text.

    The settings of the allocator, which the command makes for its whole process (`commands.keep_freed_memory`), are
    left to the calling program.

    Args:
        architecture: the model's configuration; `vocab_size` is replaced by the size of the tokenizer. With
            `init_from` it must be `D2lBertConfig.from_pretrained(run.init_from)`, with any dropout.
        run: all other options.

    Returns:
        The output folder, with the model, its tokenizer, code and card, `run_config.json`, `metrics.json`, the log,
        the curves and the checkpoints. `from_pretrained` loads the folder. None after a dry run.

    Raises:
        UserError: something that the user can fix, in one line.
        SystemExit: a signal stopped the run; a checkpoint is saved if the run had done a step. Or, in a run of several
            processes, the main process has raised an error, and shows it.
    """
    with distributed.report_errors_once():
        run.check()
        if run.license is not None:
            check_license(run.license)
    if run.dry_run:
        return dry_run(architecture, run)
    transformers_logging.disable_progress_bar()  # Transformers shows a bar for each file that it saves
    architecture = copy.deepcopy(architecture)
    with distributed.report_errors_once():
        check_architecture(architecture, run)
        if not corpus_is_prepared(run):  # the number of sources in a prepared folder is known after reading
            check_source_weights(run, len(run.text_paths()) + len(run.dataset))
        trackers = check_trackers(run.report_to, [str(tracker) for tracker in get_available_trackers()])
        folder = run.output_dir or default_output_dir(run)
        accelerator = distributed.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
        run = with_defaults(run, architecture, accelerator)
    with interruption.explain_failures(), contextlib.ExitStack() as stack:
        folder = on_main(accelerator, stack.enter_context, output_folder(run))
        resumed = on_main(accelerator, find_checkpoint, run.resume_from_checkpoint, folder)
        if run.init_from is not None and not resumed:
            start = (model_class_of(run), run.init_from, architecture, None, run.tokenizer)
            on_main(accelerator, start_from, *start, share_result=False)  # what cannot be loaded is refused here
        if run.push_to_hub:
            hub = (repository(run, folder), run.known_license(), run.hub_private_repo)
            on_main(accelerator, check_push, *hub, False)
        # The main process prepares the text first. The other processes then find the prepared text in the cache; on
        # another machine, which may have another cache, they prepare the text again.
        text = on_main(accelerator, prepare_with_tokenizer, run, share_result=False)
        if text is None:
            text = prepare_with_tokenizer(run)
        run = dataclasses.replace(run, **text.token_options)
        with distributed.report_errors_once():
            make_passes(run, text)  # checks source_weights against the text, before anything is written
            run = with_objective(run, text)
        architecture.vocab_size, architecture.pad_token_id = len(text.tokenizer), text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        sharding = make_sharding(architecture, run, accelerator.num_processes, accelerator.process_index)
        with short_waits():
            train(Job(run, architecture, text, accelerator, folder, resumed, sharding))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The training loop


def train(job: Job) -> None:
    """
    Build the model, train it to its last step, and write everything that the run leaves to its folder.

    The run starts from step 0, or goes on from a checkpoint.

    Raises:
        SystemExit: a signal stopped the run, and a checkpoint is saved; or the main process has shown an error.
        UserError: for example the text has no pair, memory ran out, training diverged, or the disk is full.
    """
    torch.manual_seed(job.run.seed)
    model = make_model(job.architecture, job.run, job.text.tokenizer, job.resumed)
    learner = Learner(job.accelerator, model, job.run)
    with compiled_blocks(learner.model, job.run.torch_compile):
        train_learner(job, learner)


def train_learner(job: Job, learner: Learner) -> None:
    """As `train`, with a model and optimizers that are built."""
    accelerator = job.accelerator
    held_out, state = plan(job, learner)
    run, folder, tokenizer, start, max_steps = job.run, job.folder, job.text.tokenizer, state["step"], job.max_steps
    schedule = RunSchedule(run, max_steps)
    with report_errors_once():
        words = WordSaver(learner, folder, tokenizer, word_marks(run.save_words), state)
        steps = make_steps(run, job.text, max_steps, job.sharding)
        place = state.get("data_position")  # where the pairs of the next step are
        steps.go_on_from(start, place)
    log = on_main(accelerator, start_folder, folder, job.record, start)
    saved_before = words.start()
    on_main(accelerator, start_trackers, accelerator, folder, job.record, start, share_result=False)
    monitor = RunMonitor(job, log, state)
    pusher = on_main(accelerator, start_pusher, job, saved_before, share_result=False)
    saved = job.resumed and job.resumed.path  # the last checkpoint
    # Inside the block a signal ends the run after the current step; before the block it ends the process at once.
    stop = StopSignals(accelerator)
    with stop, closing(monitor.bar):
        loaded = load(steps, start, max_steps, run.dataloader_num_workers, lambda: bool(stop.received_signal))
        with closing(loaded):
            # If a signal stopped the earlier run at this step, the evaluation of the step is still missing.
            if start and "evaluate" in schedule.due_at(start):
                write_evaluation(learner, held_out, stop, monitor)
            monitor.meter.start_clock()
            for step in range(start + 1, max_steps + 1):
                with monitor.meter.waiting():
                    micro_batches = next(loaded, None)  # None if a signal has stopped the run
                if stop.should_stop():
                    break
                rate, place = schedule.learning_rate(step), micro_batches.place
                words.seen += micro_batches.words
                monitor.add_step(step, learner.step(step, micro_batches, rate), rate)
                due = schedule.due_at(step)
                if "log" in due:
                    monitor.write_row()
                with monitor.meter.clock_stopped():
                    if "evaluate" in due:
                        write_evaluation(learner, held_out, stop, monitor)
                    saved_by_words = words.save_due(step) if not monitor.skipped_in_a_row else []
                    if pusher and not stop.agreed_signal:
                        pusher.saved_by_words(saved_by_words)
                    # After a skipped step the weights may be bad, and each new checkpoint deletes an old one.
                    if ("save" in due and not monitor.skipped_in_a_row) or step == max_steps:
                        saved = learner.save(folder, step, tokenizer, state_of(job, monitor, words, place))
                        if pusher and step < max_steps and not stop.agreed_signal:  # start no upload while stopping
                            pusher.saved(saved, step)
        if stop.should_stop():
            monitor.write_row()
            if monitor.step > (step_of(saved) if saved else 0):
                saved = learner.save(folder, monitor.step, tokenizer, state_of(job, monitor, words, place))
            how_to_resume = f"{saved} is saved; go on" if saved else "nothing is lost; start"
            logger.warning(
                f"{signal_name(stop.agreed_signal)}: stopped; {how_to_resume} with the same command and "
                f"--resume_from_checkpoint latest"
            )
            shut_down(accelerator)
            raise SystemExit(128 + stop.agreed_signal)  # 143 after SIGTERM, 130 after Ctrl-C
    if words.waiting:
        missing = ", ".join(map(folder_name, words.waiting))
        logger.warning(f"save_words: the run has seen {words.seen:,.0f} words, so it has not saved {missing}")
    model = learner.full_model(averaged=True)
    metrics = {**monitor.held_out_metrics, **monitor.meter.speed(), "train_words_seen": words.seen}
    report.info(on_main(accelerator, finish_folder, job, model, metrics, log, held_out.one()))
    if run.push_to_hub:
        report.info(on_main(accelerator, Pusher.finish, pusher))
    shut_down(accelerator)


def plan(job: Job, learner: Learner) -> tuple[HeldOutPairs, dict]:
    """
    Decide by trying what the options leave open, and load the checkpoint to resume from; fills in `job`.

    Returns:
        The held-out batches, and the state to start from.
    """
    if job.run.micro_batch_size == "auto":
        size = job.resumed.state["micro_batch_size"] if job.resumed else find_micro_batch(job, learner)
        job.run = dataclasses.replace(job.run, micro_batch_size=size)
    with report_errors_once():
        held_out = make_held_out(job.run, job.text, job.sharding)
    job.identity, state = make_identity(job), {"step": 0}
    if job.resumed:
        on_main(job.accelerator, check_identity, job.resumed, job.identity)
        learner.load(job.resumed)
        state = job.resumed.state
        logger.info(f"going on from {job.resumed.path}")
    job.max_steps = state["max_steps"] if job.resumed else find_max_steps(job, learner, held_out)
    job.record = make_record(job)
    return held_out, state


def start_pusher(job: Job, saved_before: list) -> Pusher | None:
    """
    The object that uploads the run's checkpoints and model to the Hub; None without `push_to_hub`.

    Args:
        saved_before: models saved by words seen, which a run that was killed may not have uploaded.
    """
    if not job.run.push_to_hub:
        return None
    is_public, to = not job.run.hub_private_repo, repository(job.run, job.folder)
    pusher = Pusher(job.folder, job.record, to, job.run.hub_strategy, public=is_public)
    pusher.saved_by_words(saved_before)
    return pusher


def state_of(job: Job, monitor: RunMonitor, words: WordSaver, place: dict | None) -> dict:
    """What a checkpoint keeps, beside model and optimizer: totals, words seen, and where the next pairs are."""
    return {
        **monitor.meter.totals,
        "skipped_in_a_row": monitor.skipped_in_a_row,
        "words_seen": words.seen,
        "words_settled": words.settled,
        "data_position": place,
        "micro_batch_size": job.run.micro_batch_size,
        "max_steps": job.max_steps,
        "identity": job.identity,
    }


def write_evaluation(learner: Learner, held_out, stop: StopSignals, monitor: RunMonitor) -> None:
    """Evaluate on the held-out batches and log the result; log nothing if a signal stops the run meanwhile."""
    metrics = learner.evaluate(itertools.takewhile(lambda _: not stop.should_stop(), held_out))
    if metrics and not stop.should_stop():
        monitor.write_evaluation({**metrics, **held_out.beside()})


# ---------------------------------------------------------------------------------------------------------------------


def dry_run(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """
    Try a run out with a step of each sequence length, and say how long it takes, and how much memory.

    The steps, a checkpoint and the model folder are written to a temporary folder, which is deleted.

    Raises:
        UserError: what `pretrain` would raise.
    """
    output_dir = Path(run.output_dir or default_output_dir(run)).absolute()
    check_output_folder(run, output_dir, run.init_from)
    if run.push_to_hub and not distributed.launched_rank():
        check_push(repository(run, output_dir), run.known_license(), run.hub_private_repo, dry_run=True)
    lengths = list(dict.fromkeys(length for _, length, _ in run.stages(1_000_000)))
    # The temporary folder goes into the nearest existing parent of the output folder, so that both are on one disk.
    parent = next(parent for parent in output_dir.parents if parent.exists())
    with writing(f"output_dir {output_dir}", ", or name another folder"):
        temporary = tempfile.TemporaryDirectory(prefix=".d2l-bert-dry-run-", dir=parent)
    # At least two steps of full length: the second has the first one's optimizer state, and its memory. The time of
    # the last but one is what its log row says is left.
    steps = max(3, len(lengths) + 1)
    with temporary as folder:
        short_run = dataclasses.replace(
            run,
            dry_run=False,
            **{name: getattr(PretrainConfig, name) for name in HUB_OPTIONS},
            output_dir=f"{folder}/{output_dir.name}",
            overwrite_output_dir=False,
            resume_from_checkpoint=None,
            save_words=[],
            report_to=[],
            length_schedule=[f"{length}:{1 / steps:.3f}" for length in lengths[:-1]],  # one step each
            batch_size_schedule=[],
            micro_batch_size=None if run.micro_batch_size == "auto" else run.micro_batch_size,
            max_eval_pairs=2,
            logging_steps=1,
            **{**dict.fromkeys(LENGTH_OPTIONS), "max_steps": steps, "save_steps": steps, "eval_steps": steps},
        )
        report.disabled = True  # the report of so short a run means nothing, and is not printed
        try:
            model_folder = pretrain(architecture, short_run)
        finally:
            report.disabled = False
        if distributed.launched_rank():
            return
        record = json.loads((model_folder / RUN_FILE).read_text())
        rows = [json.loads(line) for line in (model_folder / LOG_FILE).read_text().splitlines()]
        rows = [row for row in rows if "seconds_left" in row]  # the others are evaluations and events
        size = sum(path.stat().st_size for path in model_folder.glob("checkpoint-*/*"))
        parameters = count_parameters(model_folder)
    seconds, memory = rows[-2]["seconds_left"], max(row["memory_mb"] for row in rows)
    full, train_tokens = run.global_batch_size * run.max_seq_length, record["data"]["train_tokens"]
    if run.max_minutes is not None:
        tokens = 60 * run.max_minutes / seconds * full
    elif run.num_train_epochs is not None:
        tokens = run.num_train_epochs * train_tokens
    else:
        tokens = full_length_pairs(run, run.max_steps) * run.max_seq_length
    report.info(
        f"dry run: {tokens / full:,.0f} steps of {full:,} tokens, {tokens / train_tokens:.1f} passes over the text, "
        f"about {tokens / full * seconds / 60:,.3g} minutes without evaluations"
    )
    report.info(
        f"dry run: a model of {parameters:,} parameters; a step takes {seconds:.3g} s, and a process {memory:,.0f} MB"
    )
    report.info(f"dry run: a checkpoint takes {size / 1e6:,.0f} MB, and {run.save_total_limit} are kept")
    report.info("dry run: text, steps, evaluation, checkpoint and model folder went well; nothing is kept")
