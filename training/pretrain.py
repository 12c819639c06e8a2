"""`pretrain`: from options and text to a model folder; the training loop; the dry run."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from d2l_bert import folders, messages
from d2l_bert.messages import GO_ON, UserError, explained, is_out_of_memory, report
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.publish import check_push, publish_run
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.tokenization.account import write_account
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.training import checkpoint, compiling, devices, initialize, processes, run_folder, schedule
from d2l_bert.training.bigram_start import start_from_bigrams
from d2l_bert.training.checkpoint import Checkpoint, CheckpointSaver, Progress
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.objective import with_objective
from d2l_bert.training.data.rows import Ranks
from d2l_bert.training.data.steps import Step, TrainingSteps, steps_ahead
from d2l_bert.training.held_out import HeldOutPairs
from d2l_bert.training.learner import Learner
from d2l_bert.training.log import RunLog, check_trackers, start_trackers, used_memory
from d2l_bert.training.processes import main_first, on_main, together
from d2l_bert.training.report import token_entropy
from d2l_bert.training.signals import StopSignals, signal_name
from d2l_bert.training.words_seen import WordSaver, word_marks


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PretrainResult:
    """
    What a run has left.

    Args:
        output_dir: the output folder, with the model, its tokenizer, code and card, `run_config.json`, `metrics.json`,
            the log, the curves and the checkpoints. `from_pretrained` loads it. None after a dry run.
        metrics: the content of metrics.json: `eval_mlm_loss` and the like. Of a dry run `max_steps`, `train_seconds`,
            `train_memory_mb`, `checkpoint_mb` and `parameters`.
        log: the rows of the training log; [] after a dry run.
    """

    output_dir: Path | None
    metrics: dict = dataclasses.field(repr=False)
    log: list[dict] = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        ends = ("_loss", "_accuracy", "_seconds", "max_steps")
        figures = {name: value for name, value in self.metrics.items() if name.endswith(ends)}
        return messages.result_in_words(self, figures)


@processes.restore_host_settings()
def pretrain(
    architecture: D2lBertConfig, run: PretrainConfig, callbacks: Sequence[Callable[[dict], object]] = ()
) -> PretrainResult:
    """
    Pretrain a BERT from text, with all options decided: `functions.pretrain` says what each argument is, what is
    raised, and what stays as it is when the run ends.
    """
    processes.start_processes()
    with lost_processes_explained(), contextlib.ExitStack() as stack:
        with together():
            trackers = check_options(architecture, run)
            folder = run_folder.folder_of(run)
            # From here on `run` is filled in: by the device, the text, and at last with the number of steps.
            accelerator = devices.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
            run = devices.with_defaults(run, architecture, accelerator)
            run.check()  # the launcher's precision, too, must go with the other options
        devices.use_flash_attention_3(run, accelerator)
        if accelerator.device.type == "cuda" and accelerator.mixed_precision == "no":
            torch.set_float32_matmul_precision("high")  # TF32, with 10 bits of mantissa
        if not run.dry_run:  # a dry run writes nothing
            on_main(stack.enter_context, folders.locked_folder(folder))  # the main process alone holds the lock
        on_main(run_folder.check_output_folder, run, folder, run.init_from)
        resumed = None if run.dry_run else on_main(checkpoint.find_checkpoint, run.resume_from_checkpoint, folder)
        if run.init_from is not None and not resumed:
            # Loaded once to see that it can be: what cannot is refused before the text is read.
            on_main(initialize.start_from, run, architecture, share_result=False)
        if run.push_to_hub:
            run = dataclasses.replace(run, hub_model_id=run.hub_model_id or folders.real(folder).name)
            on_main(check_push, run.hub_model_id, run.known_license(), run.dry_run)
        text = main_first(initialize.prepare_with_tokenizer, run)
        with together():
            run = dataclasses.replace(run, **text.token_options)  # a prepared text has decided some options
            run = with_objective(run, text)
        architecture = copy.deepcopy(architecture)
        architecture.vocab_size = len(text.tokenizer)
        architecture.pad_token_id = text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        with lack_of_memory_explained():
            return train(run, architecture, text, accelerator, folder, resumed, callbacks)


def check_options(architecture: D2lBertConfig, run: PretrainConfig) -> list[str] | None:
    """
    Check the options before any text is read.

    Returns:
        The trackers to report to.

    Raises:
        UserError: an option is wrong, or does not fit the model.
    """
    run.check()
    word_marks(run.save_words)
    if run.license is not None:
        check_license(run.license)
    if not isinstance(architecture, D2lBertConfig):
        raise UserError(
            f"the architecture is a {type(architecture).__name__}, not a D2lBertConfig; give a text as data=, and a "
            "model to go on from as init_from="
        )
    if architecture.type_vocab_size < 2 and run.objective != "none":
        raise UserError("type_vocab_size must be at least 2: a pair has two segments")
    positions = architecture.max_position_embeddings
    if run.max_seq_length > positions:
        raise UserError(
            f"max_seq_length ({run.max_seq_length}) is beyond the model's positions ({positions}); lower it, or raise "
            f"max_position_embeddings of a fresh model"
        )
    folder = run_folder.folder_of(run)
    for path in run.text_paths():
        if Path(path).is_dir() and folders.real(folder).is_relative_to(folders.real(path)):
            raise UserError(
                f"output_dir {folder} lies in the text {path}, and would be read as text; name one outside"
            )
    sources = len(run.text_paths()) + len(run.dataset)
    # The number of sources in a prepared folder is known after reading.
    if run.source_weights and len(run.source_weights) != sources and not corpus_is_prepared(run):
        raise UserError(f"source_weights: {len(run.source_weights)} weights for {sources} sources; give one for each")
    return check_trackers(run.report_to, [str(name) for name in get_available_trackers()])


# ---------------------------------------------------------------------------------------------------------------------
# The training loop


def train(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: Checkpoint | None,
    callbacks: Sequence[Callable[[dict], object]],
) -> PretrainResult:
    """
    Build the model, train it to its last step, and write everything that the run leaves to its folder.

    The run starts from step 0, or goes on from a checkpoint. A dry run ends before the first step.

    Raises:
        KeyboardInterrupt, SystemExit: as in `functions.pretrain`.
        UserError: for example the text has no pair, memory ran out, training diverged, or the disk is full.
    """
    ranks = Ranks(accelerator.num_processes, accelerator.process_index)
    with together():
        held_out = HeldOutPairs(text.held_out, text.tokenizer, run, run.most_tokens(), text.held_out_name(), ranks)
        held_out.first_with_target()  # a text without a pair is refused before the first step
        one_segment_figures = held_out.one_segment_accuracy()
        identity = run_folder.make_identity(run, architecture, text)
    on_main(run_folder.check_same_identity, processes.gathered([identity]))
    model = build_model(run, architecture, text, accelerator, is_resumed=resumed is not None)
    learner = Learner(accelerator, model, run)
    with compiling.compiled_blocks(learner.model, run.torch_compile):
        progress = Progress()
        if resumed:
            on_main(check_same_run, resumed, identity)
            learner.load(resumed)
            progress = resumed.progress()
            logger.info(f"going on from {resumed.path}")
        run = with_max_steps(run, text, learner, held_out, ranks, resumed)
        with together():
            steps = TrainingSteps(run, text, run.max_steps, ranks, on_gpu=accelerator.device.type == "cuda")
            if resumed:
                check_place(steps, resumed)
        if run.dry_run:
            return report_dry_run(run, learner, steps, int(text.train.words_before[-1]))
        record = run_folder.make_record(run, architecture, text, accelerator)
        on_main(run_folder.start_folder, folder, record, progress.step)
        on_main(write_account, folder, text.account)
        marks = word_marks(run.save_words)
        word_saver = WordSaver(learner, folder, record, text.tokenizer, marks, progress)
        on_main(word_saver.delete_outdated)
        on_main(start_trackers, accelerator, folder, record, progress.step)
        rows_of_checkpoint = resumed.state["rows"] if resumed else 0
        log = RunLog(accelerator, folder, run, architecture, progress, rows_of_checkpoint, callbacks)
        checkpoint_saver = CheckpointSaver(learner, folder, text.tokenizer, run, identity, progress, resumed)
        stop = StopSignals(accelerator)
        loop = Loop(
            run=run,
            learner=learner,
            held_out=held_out,
            one_segment_figures=one_segment_figures,
            progress=progress,
            log=log,
            word_saver=word_saver,
            checkpoint_saver=checkpoint_saver,
            stop=stop,
        )
        # Within the block a signal ends the run after its step; before and after it, the process at once.
        with stop, contextlib.closing(log.bar), contextlib.closing(loop.made_ahead(steps)) as upcoming:
            loop.run_steps(upcoming)
            if stop.should_stop():  # a signal has come, perhaps in the last step
                loop.end_early()
    word_saver.report_missing()
    model = learner.full_model(averaged=True)
    metrics = {
        **log.evaluation_of_this_step(),  # the run is over: of its last step
        **log.initial_metrics(),
        **on_main(log.speed),
        "train_words_seen": progress.words_seen,
        "eval_token_entropy": token_entropy(text),
    }
    report.info(on_main(run_folder.finish_folder, folder, text, record, model, metrics, log.rows, held_out))
    if run.push_to_hub:
        report.info(on_main(publish_run, folder, run.hub_model_id, run.known_license(), not run.hub_private_repo))
    metrics = on_main(run_folder.read_metrics, folder)
    processes.shut_down(accelerator)
    return PretrainResult(output_dir=folder, metrics=metrics, log=log.rows)


@dataclasses.dataclass
class Loop:
    """
    The training loop of a run, with everything that it works on.

    Every process must call each method at the same point of the run.

    Args:
        held_out: gives the micro-batches of an evaluation.
        one_segment_figures: what one segment alone tells (`HeldOutPairs.one_segment_accuracy`); the figures of each
            evaluation are logged together with these.
        progress: how far the run has come. The loop moves it on, and everything else here reads it.
    """

    run: PretrainConfig
    learner: Learner
    held_out: HeldOutPairs
    one_segment_figures: dict[str, float]
    progress: Progress
    log: RunLog
    word_saver: WordSaver
    checkpoint_saver: CheckpointSaver
    stop: StopSignals

    def made_ahead(self, steps: TrainingSteps) -> Iterator[Step]:
        """The steps after those of `progress`, made ahead. They end early when a signal has come to this process."""
        return steps_ahead(
            steps,
            self.progress.step,
            self.progress.cursor,
            self.run.dataloader_num_workers,
            lambda: bool(self.stop.received_signal),
        )

    def run_steps(self, upcoming: Iterator[Step]) -> None:
        """
        Take the steps, and do after each what is due: log, evaluate, save.

        Returns after the last step, or when a signal stops the run: in all processes after the same step.
        """
        progress = self.progress
        log = self.log
        if self.must_evaluate_first():
            self.evaluate()
        log.start_clock()
        while progress.step < self.run.max_steps:
            with log.waiting():
                step = next(upcoming, None)  # None if this process has received a signal
            if self.stop.should_stop():  # if any process has
                return
            number = progress.step + 1
            rate = schedule.learning_rate(self.run, number)
            stats = self.learner.train_on(step, number, rate)
            is_skipped = bool(stats.skipped)
            is_last = number == self.run.max_steps
            progress.add(step.cursor, step.words, is_skipped)
            log.add_step(stats, rate)
            due = schedule.due_after(self.run, number)
            if "log" in due:
                log.write_row()
            with log.pausing():  # what follows does not count as training
                if "evaluate" in due:
                    self.evaluate()
                # After a skipped step the weights may be bad, and each new checkpoint deletes an old one. The last
                # step is saved all the same: the run publishes its weights.
                if not is_skipped:
                    self.word_saver.save_due()
                if "save" in due and (is_last or not is_skipped):
                    self.checkpoint_saver.save(len(log.rows))
                if due:
                    devices.free_unused_memory(self.learner.accelerator.device)

    def must_evaluate_first(self) -> bool:
        """Whether the model is to be evaluated as it is now, before the next step."""
        if self.log.evaluation_of_this_step():
            return False
        is_resumed = self.progress.step > 0
        if is_resumed:
            # True if the run before was stopped by a signal after this step, and before the evaluation that was due.
            return "evaluate" in schedule.due_after(self.run, self.progress.step)
        # A new run begins with an evaluation if its weights know something: those of a saved model, or the bigrams.
        return self.run.init_from is not None or self.run.attention_init == "bigrams"

    def evaluate(self) -> None:
        """Evaluate on the held-out pairs, and log the figures; nothing if a signal comes."""
        # Before each batch the processes vote whether to stop. If they stop, the figures are of a part of the batches,
        # and are dropped.
        batches = itertools.takewhile(lambda _: not self.stop.should_stop(), self.held_out)
        metrics = self.learner.evaluate(batches)
        if metrics and not self.stop.should_stop():
            self.log.record({"step": self.progress.step, **metrics, **self.one_segment_figures})

    def end_early(self) -> None:
        """
        Save a checkpoint after a signal, and say how to go on. None is saved after a skipped step, as in `take`; nor a
        second one of the same step.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM, with 128 plus the number of the signal, 143.
        """
        self.log.write_row()
        saver = self.checkpoint_saver
        saved_step = saver.last.state["step"] if saver.last else 0
        if self.progress.step > saved_step and not self.progress.skipped_in_a_row:
            saver.save(len(self.log.rows))
        saved = saver.last
        name = signal_name(self.stop.agreed_signal)
        if saved:
            which = "latest" if saver.is_latest(saved) else saved.path
            logger.warning(
                f"{name}: stopped; {saved.path} is saved; go on with the same command and --resume_from_checkpoint "
                f"{which}"
            )
        else:
            logger.warning(
                f"{name}: stopped; nothing is lost; start with the same command and --resume_from_checkpoint latest"
            )
        processes.shut_down(self.learner.accelerator)
        if self.stop.agreed_signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.stop.agreed_signal)


def build_model(
    run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, accelerator: Accelerator, is_resumed: bool
) -> torch.nn.Module:
    """The model of a run, in every process, with its initial weights; those of a checkpoint may replace them later."""
    torch.manual_seed(run.seed)
    with together():
        model = initialize.make_model(architecture, run, text.tokenizer, is_resumed)
    if run.attention_init == "bigrams" and not is_resumed:
        on_main(start_from_bigrams, model, run, text, share_result=False)
        processes.share_weights(model, accelerator)
    return model


def with_max_steps(
    run: PretrainConfig,
    text: PreparedText,
    learner: Learner,
    held_out: HeldOutPairs,
    ranks: Ranks,
    resumed: Checkpoint | None,
) -> PretrainConfig:
    """
    The options with the number of steps, which is fixed here for the whole run, also where the user gave minutes.

    Raises:
        UserError: the checkpoint is of a run of another length; or as `schedule.find_max_steps`.
    """
    if resumed is None:
        max_steps = schedule.find_max_steps(run, text, learner, held_out, ranks)
    else:
        max_steps = resumed.state["max_steps"]
        # `check_same_run` has found the option `max_steps` unchanged: a difference here is an edited checkpoint.
        if run.max_steps not in (None, max_steps):
            raise UserError(f"{resumed.path}: is of a run of {max_steps:,} steps; give --max_steps that")
    return dataclasses.replace(run, max_steps=max_steps, num_train_epochs=None, max_minutes=None)


def check_same_run(resumed: Checkpoint, identity: dict) -> None:
    """Raise `UserError` if a checkpoint is of a run with another identity (`run_folder.make_identity`)."""
    run_folder.check_identity(resumed.state["identity"], identity, place=f"{resumed.path}", weights=resumed.path)


def check_place(steps: TrainingSteps, resumed: Checkpoint) -> None:
    """Raise `UserError` if a run on this text cannot have come where a checkpoint says that it is."""
    what = f"{resumed.path / checkpoint.STATE_FILE}: is of no run on this text"
    progress = resumed.progress()
    with explained(what, "give another checkpoint-<step> folder", ValueError):
        steps.check_place(progress.step, progress.cursor, progress.words_seen)


def report_dry_run(run: PretrainConfig, learner: Learner, steps: TrainingSteps, text_words: int) -> PretrainResult:
    """Time some steps of each stage, and say how long the run takes, and how much memory and disk; keep nothing."""
    seconds, words = schedule.time_steps(learner, steps)
    memory = used_memory(learner.accelerator.device)
    megabytes = learner.bytes_in_checkpoint() / 1e6
    parameters = sum(parameter.numel() for parameter in learner.parameters.values())
    report.info(
        f"dry run: {run.max_steps:,} steps of {run.global_batch_size:,} {unit(PAIR_TASKS.get(run.objective))} of at "
        f"most {run.max_seq_length} tokens, {words / text_words:.1f} passes over the text, about {seconds / 60:,.3g} "
        f"minutes without evaluations, if the machine stays as busy as now\n"
        f"dry run: a model of {parameters:,} parameters; a step takes {seconds / run.max_steps:.3g} s, and a "
        f"process {memory:,.0f} MB\n"
        f"dry run: a checkpoint takes {megabytes:,.0f} MB, and {run.save_total_limit} are kept\n"
        f"dry run: text and steps went well; nothing is kept"
    )
    metrics = {
        "max_steps": run.max_steps,
        "train_seconds": seconds,
        "train_memory_mb": memory,
        "checkpoint_mb": megabytes,
        "parameters": parameters,
    }
    return PretrainResult(output_dir=None, metrics=metrics, log=[])


@contextlib.contextmanager
def lost_processes_explained() -> Iterator[None]:
    """Turn errors of a broken connection between processes into a `UserError` with a way out."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        is_broken = re.search("gloo|NCCL|Connection .* by peer|Operation timed out", reason) or isinstance(
            error, torch.distributed.DistError
        )
        if is_broken and torch.distributed.is_initialized():
            raise UserError(
                f"another process of this run is gone, or cannot be reached ({reason:.120}): read the messages of "
                f"that process; {GO_ON}"
            ) from None
        raise


@contextlib.contextmanager
def lack_of_memory_explained() -> Iterator[None]:
    """Turn errors of too little memory, as a run trains, into a `UserError` that says how a step takes less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"out of memory; lower --micro_batch_size, or give --gradient_checkpointing: the steps stay the same; "
                f"{GO_ON}"
            ) from None
        raise


if __name__ == "__main__":  # so that `accelerate launch training/pretrain.py` works, too
    sys.argv.insert(1, "pretrain")
    runpy.run_module("d2l_bert", run_name="__main__")
