"""`pretrain`: from options and text to a model folder; the training loop; the dry run; signals."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import gather_object
from transformers.utils import logging as transformers_logging

from d2l_bert import folders
from d2l_bert.messages import GO_ON, UserError, explained, is_out_of_memory, refuse_first, report
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.publish import check_push, publish_run
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.training import checkpoint, devices, initialize, run_folder, schedule
from d2l_bert.training.bigram_start import start_from_bigrams
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Ranks, with_objective
from d2l_bert.training.data.order import START
from d2l_bert.training.data.steps import TrainingSteps, load
from d2l_bert.training.devices import main_first, on_main, together
from d2l_bert.training.held_out import HeldOutPairs, token_entropy
from d2l_bert.training.log import RunLog, check_trackers, start_trackers, used_memory
from d2l_bert.training.optimizer import Learner


logger = logging.getLogger(__name__)


@devices.restore_host_settings()
def pretrain(architecture: D2lBertConfig, run: PretrainConfig) -> Path | None:
    """
    Pretrain a BERT from text.

    The settings of the allocator, which the command makes for its whole process (`commands.keep_freed_memory`), are
    left to the calling program. Processes of a launched program stay connected when the run ends.

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
            processes, another process has raised an error, and shows it.
    """
    devices.start_processes()
    transformers_logging.disable_progress_bar()  # Transformers shows a bar for each file that it saves
    with explain_failures(), contextlib.ExitStack() as stack:
        with together():
            trackers, folder = check_options(architecture, run), run_folder.folder_of(run)
            accelerator = devices.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
            run = devices.with_defaults(run, architecture, accelerator)
            run.check()  # the launcher's precision, too, must go with the other options
        if accelerator.device.type == "cuda" and accelerator.mixed_precision == "no":
            torch.set_float32_matmul_precision("high")  # TF32, with 10 bits of mantissa
        if not run.dry_run:  # a dry run writes nothing
            on_main(stack.enter_context, folders.locked_folder(folder))
        on_main(run_folder.check_output_folder, run, folder, run.init_from)
        resumed = None if run.dry_run else on_main(checkpoint.find_checkpoint, run.resume_from_checkpoint, folder)
        if run.init_from is not None and not resumed:  # what cannot be loaded is refused before the text is read
            on_main(initialize.start_from, run, architecture, share_result=False)
        if run.push_to_hub:
            run = dataclasses.replace(run, hub_model_id=run.hub_model_id or folders.real(folder).name)
            on_main(check_push, run.hub_model_id, run.known_license(), run.dry_run)
        text = main_first(initialize.prepare_with_tokenizer, run)
        with together():
            run = with_objective(dataclasses.replace(run, **text.token_options), text)
        architecture = copy.deepcopy(architecture)
        architecture.vocab_size, architecture.pad_token_id = len(text.tokenizer), text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        with explain_failures(is_training=True):
            train(run, architecture, text, accelerator, folder, resumed)
    return None if run.dry_run else folder


def check_options(architecture: D2lBertConfig, run: PretrainConfig) -> list[str] | None:
    """
    Check the options before any text is read.

    Returns:
        The trackers to report to.

    Raises:
        UserError: an option is wrong, or does not fit the model.
    """
    run.check()
    checkpoint.word_marks(run.save_words)
    if run.license is not None:
        check_license(run.license)
    positions = architecture.max_position_embeddings
    sources = len(run.text_paths()) + len(run.dataset)
    refuse_first(
        {
            "type_vocab_size must be at least 2: a pair has two segments": (
                architecture.type_vocab_size < 2 and run.objective != "none"
            ),
            f"max_seq_length ({run.max_seq_length}) is beyond the model's positions ({positions}); lower it, or raise "
            f"max_position_embeddings of a fresh model": (run.max_seq_length > positions),
            **{
                f"output_dir {folder} lies in the text {path}, and would be read as text; name one outside": (
                    Path(path).is_dir() and folders.real(folder).is_relative_to(folders.real(path))
                )
                for folder in [run_folder.folder_of(run)]
                for path in run.text_paths()
            },
            # The number of sources in a prepared folder is known after reading.
            f"source_weights: {len(run.source_weights)} weights for {sources} sources; give one for each": (
                run.source_weights and len(run.source_weights) != sources and not corpus_is_prepared(run)
            ),
        }
    )
    return check_trackers(run.report_to, [str(name) for name in get_available_trackers()])


# ---------------------------------------------------------------------------------------------------------------------
# The training loop


def train(
    run: PretrainConfig,
    architecture: D2lBertConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: checkpoint.Checkpoint | None,
) -> None:
    """
    Build the model, train it to its last step, and write everything that the run leaves to its folder.

    The run starts from step 0, or goes on from a checkpoint. A dry run ends before the first step.

    Raises:
        SystemExit: a signal stopped the run, and a checkpoint is saved if it had done a step; or another process has
            shown an error.
        UserError: for example the text has no pair, memory ran out, training diverged, or the disk is full.
    """
    ranks, tokenizer = Ranks(accelerator.num_processes, accelerator.process_index), text.tokenizer
    with together():
        held_out = HeldOutPairs(text.held_out, tokenizer, run, run.most_tokens(), text.held_out_name(), ranks)
        held_out.one()  # a text without a pair is refused before the first step
        one_segment = held_out.beside()
        identity = run_folder.make_identity(run, architecture, text)
    on_main(run_folder.check_same_identity, gather_object([identity]))
    torch.manual_seed(run.seed)
    with together():
        model = initialize.make_model(architecture, run, tokenizer, resumed is not None)
    if run.attention_init == "bigrams" and not resumed:
        on_main(start_from_bigrams, model, run, text, share_result=False)
        devices.share_weights(model, accelerator)
    learner = Learner(accelerator, model, run)
    with devices.compiled_blocks(learner.model, run.torch_compile), contextlib.ExitStack() as stack:
        state = {"step": 0, "cursor": START}
        if resumed:
            on_main(run_folder.check_identity, resumed.state["identity"], identity, f"{resumed.path}", resumed.path)
            learner.load(resumed)
            state = resumed.state
            logger.info(f"going on from {resumed.path}")
        if resumed and run.max_steps not in (None, state["max_steps"]):
            raise UserError(f"{resumed.path}: is of a run of {state['max_steps']:,} steps; give --max_steps that")
        max_steps = state["max_steps"] if resumed else schedule.find_max_steps(run, text, learner, held_out, ranks)
        run = dataclasses.replace(run, max_steps=max_steps, num_train_epochs=None, max_minutes=None)
        with together():
            steps = TrainingSteps(run, text, max_steps, ranks, on_gpu=accelerator.device.type == "cuda")
            if resumed:
                what = f"{resumed.path / checkpoint.STATE_FILE}: is of no run on this text"
                with explained(what, "give another checkpoint-<step> folder", ValueError):
                    steps.check_place(state["step"], tuple(state["cursor"]), state.get("words_seen", 0.0))
        if run.dry_run:
            report_dry_run(run, learner, steps, int(text.train.words_before[-1]))
            return
        start, cursor = state["step"], state["cursor"]
        record = run_folder.make_record(run, architecture, text, accelerator)
        on_main(run_folder.start_folder, folder, record, start)
        words = checkpoint.WordSaver(learner, folder, record, tokenizer, checkpoint.word_marks(run.save_words), state)
        on_main(words.keep_earlier)
        on_main(start_trackers, accelerator, folder, record, start)
        log = RunLog(accelerator, folder, run, architecture, state)
        saved = resumed  # the last checkpoint
        # Inside the block a signal ends the run after the current step; before the block it ends the process at once.
        stop = stack.enter_context(StopSignals(accelerator))
        stack.enter_context(contextlib.closing(log.bar))

        def evaluate():
            """Evaluate on the held-out batches; log nothing if a signal stops the run meanwhile."""
            metrics = learner.evaluate(itertools.takewhile(lambda _: not stop.should_stop(), held_out))
            if metrics and not stop.should_stop():
                log.record({"step": log.step, **metrics, **one_segment})

        def save(step):
            content = {
                "step": step,
                "cursor": cursor,
                "skipped_in_a_row": log.skipped_in_a_row,
                "rows": len(log.rows),
                "words_seen": words.seen,
                "max_steps": max_steps,
                "identity": identity,
                "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
            }
            model, tensors, path = learner.full_model(), learner.tensors(), folder / f"checkpoint-{step}"
            on_main(checkpoint.write_checkpoint, path, model, tokenizer, tensors, content, run.save_total_limit)
            return checkpoint.Checkpoint(path, content)

        made = load(steps, start, cursor, run.dataloader_num_workers, lambda: bool(stop.received_signal))
        loaded = stack.enter_context(contextlib.closing(made))
        # The figures of the model that the run starts from; or those that a signal has kept an earlier run from.
        knows_already = run.init_from is not None or run.attention_init == "bigrams"
        is_due = "evaluate" in schedule.due_after(run, start) if start else knows_already
        if is_due and not log.held_out_metrics():
            evaluate()
        log.clock_start = time.monotonic()
        for number in range(start + 1, max_steps + 1):
            waiting_since = time.monotonic()
            step = next(loaded, None)  # None if a signal has stopped the run
            log.waited += time.monotonic() - waiting_since
            if stop.should_stop():
                break
            rate, cursor = schedule.learning_rate(run, number), step.cursor
            words.seen += step.words
            log.add_step(number, learner.step(number, step, rate), rate)
            due = schedule.due_after(run, number)
            if "log" in due:
                log.write_row()
            trained_until = time.monotonic()
            if "evaluate" in due:
                evaluate()
            # After a skipped step the weights may be bad, and each new checkpoint deletes an old one.
            if not log.skipped_in_a_row:
                words.save_due(number)
            if ("save" in due and not log.skipped_in_a_row) or number == max_steps:
                saved = save(number)
            log.clock_start += time.monotonic() - trained_until  # evaluations and saves do not count
        if stop.should_stop():
            log.write_row()
            if log.step > (saved.state["step"] if saved else 0) and not log.skipped_in_a_row:
                saved = save(log.step)
            how_to_resume = f"{saved.path} is saved; go on" if saved else "nothing is lost; start"
            is_latest = not saved or saved.path in checkpoint.checkpoints(saved.path.parent)[-1:]
            logger.warning(
                f"{signal_name(stop.agreed_signal)}: stopped; {how_to_resume} with the same command and "
                f"--resume_from_checkpoint {'latest' if is_latest else saved.path}"
            )
            devices.shut_down(accelerator)
            raise SystemExit(128 + stop.agreed_signal)  # 143 after SIGTERM, 130 after Ctrl-C
    named = map(checkpoint.folder_name, checkpoint.word_marks(run.save_words))
    if missing := ", ".join(name for name in named if not (folder / name).exists()):
        logger.warning(
            f"save_words: {missing} not saved: the run was beyond that when it was given, or has ended before, after "
            f"{words.seen:,.0f} words"
        )
    model = learner.full_model(averaged=True)
    metrics = {
        **log.held_out_metrics(),
        **log.initial_metrics(),
        **on_main(log.speed),
        "train_words_seen": words.seen,
        "eval_token_entropy": token_entropy(text),
    }
    report.info(on_main(run_folder.finish_folder, folder, text, record, model, metrics, log.rows, held_out))
    if run.push_to_hub:
        report.info(on_main(publish_run, folder, run.hub_model_id, run.known_license(), not run.hub_private_repo))
    devices.shut_down(accelerator)


def report_dry_run(run: PretrainConfig, learner: Learner, steps: TrainingSteps, text_words: int) -> None:
    """Time some steps of each stage, and say how long the run takes, and how much memory and disk; keep nothing."""
    seconds, words = schedule.time_steps(learner, steps)
    memory, megabytes = used_memory(learner.accelerator.device), learner.bytes_in_checkpoint() / 1e6
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


# ---------------------------------------------------------------------------------------------------------------------
# Early ends


class StopSignals:
    """
    A context manager that catches SIGTERM and Ctrl-C, so that the training loop can finish its step, save a
    checkpoint and exit.

    A second Ctrl-C ends the process at once. A signal that the process ignored before the block stays ignored: a shell
    without job control starts background commands with SIGINT ignored, so that Ctrl-C ends the foreground command
    only.

    Attributes:
        received_signal: the number of the last signal that this process received; 0 if there was none.
        agreed_signal: the signal on which all processes have agreed to stop; 0 while the run goes on.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.received_signal, self.agreed_signal = accelerator, 0, 0

    def __enter__(self):
        # Python allows signal handlers in the main thread only. In another thread no signal is caught.
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.previous = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
        for number in self.previous:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def should_stop(self) -> bool:
        """
        Whether any process has received a signal.

        Every process must call this at the same point of the run; all get the same answer.
        """
        if not self.agreed_signal:
            vote = torch.tensor(float(self.received_signal), device=self.accelerator.device)
            # The maximum is the number of a signal; a sum over several processes is not.
            votes = self.accelerator.gather(vote) if self.accelerator.num_processes > 1 else vote
            self.agreed_signal = int(votes.max())
        return bool(self.agreed_signal)

    def _receive(self, number, frame):
        is_ctrl_c = number == signal.SIGINT
        if self.accelerator.is_main_process and not self.received_signal:
            hint = "; a second Ctrl-C ends the run at once, without saving" if is_ctrl_c else ""
            # Not by logging: a handler may run inside another write to stderr, which cannot be entered twice.
            os.write(2, f"{signal_name(number)}: finishing the step and saving{hint}\n".encode())
        self.received_signal = number
        if is_ctrl_c:  # the next Ctrl-C ends the process
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """The name of a signal in messages: `Ctrl-C` for SIGINT, else the signal's own name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextlib.contextmanager
def explain_failures(is_training: bool = False) -> Iterator[None]:
    """
    Turn errors of a broken connection between processes into a `UserError` with a hint.

    Args:
        is_training: whether also those of too little memory, as the run trains: the hint says how a step takes less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        is_broken = re.search("gloo|NCCL|Connection .* by peer", reason)
        refuse_first(
            {
                f"out of memory; lower --micro_batch_size, or give --gradient_checkpointing: the steps stay the same; "
                f"{GO_ON}": is_training and is_out_of_memory(error),
                f"another process of this run is gone, or cannot be reached ({reason:.120}): read the messages of "
                f"that process; {GO_ON}": (
                    (is_broken or isinstance(error, torch.distributed.DistError))
                    and torch.distributed.is_initialized()
                ),
            }
        )
        raise


if __name__ == "__main__":  # so that `accelerate launch training/pretrain.py` works, too
    sys.argv.insert(1, "pretrain")
    runpy.run_module("d2l_bert", run_name="__main__")
