"""The main job: text in, a model folder out."""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel
from transformers.utils import logging

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.model_cards.metadata import check_license
from d2l_bert.model_cards.push import Pusher, check_push
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.progress import say
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS
from d2l_bert.tokenization.prepare import PreparedText, is_prepared, prepare, split_fingerprint
from d2l_bert.training import checkpoint, data, distributed, evaluate, interruption
from d2l_bert.training.arithmetic import encoder_weights, peak_of, training_arithmetic
from d2l_bert.training.batching import (
    check_source_weights,
    how_to_cut,
    make_held_out,
    make_passes,
    make_steps,
    pairs_of,
    stage_changes,
    warn_of_labels,
)
from d2l_bert.training.config import HUB_OPTIONS, LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.energy import train_energy
from d2l_bert.training.host_settings import host_settings_kept
from d2l_bert.training.initialize import check_start, check_weights, look_at_neighbours, start_from
from d2l_bert.training.loader import load
from d2l_bert.training.meter import Meter, SpikeWatch, StepFigures
from d2l_bert.training.optim import MovingAverage, learning_rate_share, make_optimizers
from d2l_bert.training.run_folder import (
    RUN_FILE,
    architecture_numbers,
    default_output_dir,
    finish_folder,
    make_record,
    output_folder,
    refuse_what_is_there,
    start_folder,
)
from d2l_bert.training.step import step_seed, train_step
from d2l_bert.training.tracking import Progress, check_trackers, report, start_trackers
from d2l_bert.training.trials import decide_steps, intervals, settle_compiling, settle_micro_batch


@host_settings_kept()
def pretrain(architecture: D2lBertConfig, run: PretrainConfig) -> Path | None:
    """
    Pretrain a BERT from text.

    Args:
        architecture: the model's numbers; its vocabulary follows the tokenizer. With `init_from` they are that
            model's, `D2lBertConfig.from_pretrained(run.init_from)`, dropout apart.
        run: everything else.

    Returns:
        The output folder: a model that `from_pretrained` loads, its tokenizer, its code, its card, `run_config.json`,
        `metrics.json`, the log, the curves, and checkpoints. None after a dry run.

    Raises:
        UserError: for whatever the user can mend, in one line.
    """
    with distributed.said_once():
        run.check()
        if run.license is not None:
            check_license(run.license)
    if run.dry_run:
        return rehearse(architecture, run)
    logging.disable_progress_bar()  # Transformers would draw one for every file it saves
    architecture = copy.deepcopy(architecture)
    with distributed.said_once():
        check_architecture(architecture, run)
        if not is_prepared(run):  # what a prepared folder holds shows when it is read
            check_source_weights(run, len(run.text_paths()) + len(run.named_datasets()))
        trackers, folder = check_trackers(run.report_to), run.output_dir or default_output_dir(run)
        accelerator = distributed.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
        device = accelerator.device.type
        run = dataclasses.replace(
            run,
            mixed_precision=accelerator.mixed_precision,
            attn_implementation=run.attn_implementation or faster_attention(architecture, run, device),
            dataloader_num_workers=processes_that_load(run, device),
        )
        check_device(architecture, run, accelerator)
    with interruption.failures_explained(run), contextlib.ExitStack() as held:
        if run.init_from is not None:
            distributed.on_main(accelerator, check_start, run.init_from, architecture, run.tokenizer)
        folder = distributed.on_main(accelerator, lambda: held.enter_context(output_folder(run)))
        resumed = distributed.on_main(accelerator, find_start, run, folder)
        if run.init_from is not None and not resumed:
            distributed.on_main(accelerator, check_weights, model_class_of(run), run.init_from, architecture)
        if run.push_to_hub:
            hub = (repository(run, folder), run.known_license(), run.hub_private_repo)
            distributed.on_main(accelerator, check_push, *hub, False)
        # The first process reads and tokenizes, the others find what it left; on another machine, perhaps, which may
        # not see what the first one sees.
        text = distributed.on_main(accelerator, prepare, run, shared=False) or prepare(run)
        run = dataclasses.replace(run, **text.settled)
        with distributed.said_once():
            make_passes(run, text)  # refuses weights that do not fit the text, before anything is written
        architecture.vocab_size, architecture.pad_token_id = len(text.tokenizer), text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        train(architecture, run, text, accelerator, folder, resumed)
    return folder


def rehearse(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """A dry run: all that `pretrain` does, with a pair or two of each length, in a folder that goes again."""
    wanted = Path(run.output_dir or default_output_dir(run)).absolute()
    if wanted.exists():
        refuse_what_is_there(run, wanted)
    if run.push_to_hub and not distributed.launched_rank():
        check_push(repository(run, wanted), run.known_license(), run.hub_private_repo, dry_run=True)
    lengths = list(dict.fromkeys(length for _, length, _ in run.stages(1_000_000)))
    beside = next(parent for parent in wanted.parents if parent.exists())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".d2l-bert-dry-run-", dir=beside)
    except OSError as error:
        raise UserError(f"output_dir {wanted}: cannot be written ({error.strerror}); name another folder") from None
    with folder as folder:
        short = dataclasses.replace(
            run,
            dry_run=False,
            **{name: getattr(PretrainConfig, name) for name in HUB_OPTIONS},
            output_dir=f"{folder}/{wanted.name}",
            overwrite_output_dir=False,
            report_to=[],
            length_schedule=[f"{length}:{0.99 / len(lengths):.3f}" for length in lengths[:-1]],
            batch_size_schedule=[],
            global_batch_size=2,
            micro_batch_size=None,
            max_eval_pairs=2,
            **{**dict.fromkeys(LENGTH_OPTIONS), "max_steps": max(2, len(lengths))},
            **dict.fromkeys(("save_steps", "eval_steps"), max(2, len(lengths))),
        )
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # what it has learnt is nothing
                made = pretrain(architecture, short)
        except UserError as error:  # there is nothing to go on with
            raise UserError(re.sub(f"(;|, and) {GO_ON}", "", str(error))) from None
        if distributed.launched_rank():
            return
        record = json.loads((made / RUN_FILE).read_text())
        size = sum(path.stat().st_size for path in made.glob("checkpoint-*/*"))
    print(f"dry run: {expectation(run, record['data']['train_tokens'])}")
    print(f"dry run: a checkpoint takes {size / 1e6:,.0f} MB, and {run.save_total_limit} are kept")
    print("dry run: text, steps, evaluation, checkpoint and model folder went well; nothing is kept")


def repository(run: PretrainConfig, folder: Path) -> str:
    """The repository on the Hub that the run is sent to."""
    return run.hub_model_id or folder.resolve().name


def expectation(run: PretrainConfig, train_tokens: int) -> str:
    """How long a run is, in words."""
    if run.max_minutes is not None:
        return f"steps are timed and counted when the run begins, for {run.max_minutes:g} minutes"
    if run.num_train_epochs is not None:
        return f"{run.num_train_epochs:g} passes over {train_tokens:,} tokens"
    tokens = pairs_of(run, run.max_steps) * run.max_seq_length
    return f"{run.max_steps:,} steps of {tokens:,} tokens at most, {tokens / train_tokens:.1f} passes over the text"


def train(
    architecture: D2lBertConfig,
    run: PretrainConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: checkpoint.Checkpoint | None,
) -> None:
    """Build the model, go through the steps, and leave everything in `folder`."""
    torch.manual_seed(run.seed)
    task = PAIR_TASKS.get(run.objective)
    model = make_model(architecture, run, text.tokenizer, resumed)
    betas = (run.adam_beta1, run.adam_beta2)
    optimizers = make_optimizers(model, run.optim, run.learning_rate, run.weight_decay, betas, run.adam_epsilon)
    step_model, *step_optimizers = accelerator.prepare(model, *optimizers)
    average = MovingAverage(model, run.ema_decay) if run.ema_decay else None
    learner = checkpoint.Learner(accelerator, model, optimizers, average)
    cutting = how_to_cut(architecture, run, accelerator.num_processes, accelerator.process_index)
    stop = interruption.StopSignals(accelerator)

    def train_on(micro_batches, rate):
        return train_step(accelerator, step_model, step_optimizers, micro_batches, rate, run.max_grad_norm)

    is_auto = run.micro_batch_size == "auto"
    run = settle_micro_batch(run, learner, step_model, text, cutting, resumed, train_on)
    run = settle_compiling(run, architecture, learner, step_model, text, cutting, resumed, train_on)
    with distributed.said_once():
        held_out = make_held_out(run, text, **cutting)
    identity = make_identity(run, architecture, text)
    if resumed:
        distributed.on_main(accelerator, check_identity, resumed, identity)

    def evaluate_now():
        """The held-out figures; None if the run is told to stop meanwhile."""
        batches = itertools.takewhile(lambda _: not stop.wanted(), held_out)
        with accelerator.autocast(), average.in_place() if average else contextlib.nullcontext():
            sums = evaluate.held_out_counts(step_model, batches, accelerator.device)
            distributed.reshard(step_model)
        sums = accelerator.reduce(sums, "sum")
        return None if stop.wanted() else evaluate.held_out_figures(sums, task)

    if resumed:
        learner.load(resumed.path, resumed.state["scaler"])
        if accelerator.is_main_process:
            say(f"going on from {resumed.path}")
        state = resumed.state
    else:
        state = {"step": 0, "max_steps": decide_steps(run, text, cutting, learner, train_on, evaluate_now)}
    start, max_steps = state["step"], state["max_steps"]
    record = make_record(run, max_steps, architecture, text, accelerator)
    log = distributed.on_main(accelerator, start_folder, folder, record, start)
    distributed.on_main(accelerator, start_trackers, accelerator, folder, record, start, shared=False)
    pusher = Pusher(run, folder, record) if run.push_to_hub and accelerator.is_main_process else None
    meter = make_meter(run, architecture, accelerator, state)
    guard, spikes = interruption.NonFiniteGuard(folder, state), SpikeWatch(state.get("spikes"))
    warmup_steps, decay_steps = run.schedule_steps(max_steps)
    log_every, eval_every, save_every = intervals(run, max_steps)
    with distributed.said_once():
        steps, changes = make_steps(run, text, max_steps, **cutting), stage_changes(run, max_steps)
    if task and accelerator.is_main_process:
        warn_of_labels(steps)
    progress = Progress(start, max_steps, visible=accelerator.is_main_process)

    def note(row, show):
        """Write a row to the log and to the trackers, and show it on stderr."""
        distributed.on_main(accelerator, log.write, row)
        report(accelerator, row)
        show(row)

    def save():
        """A checkpoint of the steps so far, with what was decided by measuring, so that a resumed run obeys it."""
        decided = {"micro_batch_size": run.micro_batch_size, "torch_compile": run.torch_compile}
        decided |= {"max_steps": max_steps, "identity": identity}
        state = {**meter.totals, **guard.state(), "spikes": spikes.state(), **decided}
        return checkpoint.save_checkpoint(folder, step, learner, text.tokenizer, state, run.save_total_limit)

    step = saved_step = start
    saved, figures, rate = resumed and resumed.path, None, 0.0
    # Until here a signal ends the process at once; from here on it waits for the end of a step.
    explained = interruption.failures_explained(run, micro_batch_was_found=is_auto)
    with stop, explained, contextlib.closing(progress), contextlib.ExitStack() as opened:
        loaded = load(steps, start, max_steps, run.dataloader_num_workers, lambda: stop.received or stop.agreed)
        opened.enter_context(contextlib.closing(loaded))  # its workers end before this process does
        batches = meter.waiting(loaded)
        if start and is_due(start, eval_every, max_steps) and (figures := evaluate_now()):
            note({"step": start, **figures}, progress.show_held_out)  # a run may be stopped before it has come to that
        meter.resume_clock()
        while True:
            micro_batches = next(batches, None)  # none after the last step, and where a signal came meanwhile
            if stop.wanted():
                if meter.steps:
                    note({"step": step, **meter.row(rate, max_steps - step)}, progress.show)
                leave(accelerator, stop, save() if step > saved_step else saved)
            if step == max_steps:
                break
            step += 1
            torch.manual_seed(step_seed(run.seed, step, accelerator.process_index))
            share = learning_rate_share(run.lr_scheduler_type, step - 1, warmup_steps, max_steps, decay_steps)
            done = train_on(micro_batches, rate := run.learning_rate * share)
            if average and not done.skipped:
                average.update(step)
            meter.add(done)
            progress.step()
            if step in changes:
                spikes.rest()  # other lengths, other losses
                note(changes[step], progress.show_event)
            for event, reason in what_happened(step, done, spikes):
                note({"step": step, "event": event, "reason": reason}, progress.show_event)
            with distributed.said_once():
                guard.check(step, done)
            evaluates, saves = is_due(step, eval_every, max_steps), is_due(step, save_every, max_steps)
            if evaluates or saves or is_due(step, log_every, max_steps):
                note({"step": step, **meter.row(rate, max_steps - step)}, progress.show)
            if evaluates and (figures := evaluate_now()):
                note({"step": step, **figures}, progress.show_held_out)
            # While steps are being skipped the weights may be bad; what was saved before is not pushed out by them.
            if (saves and not guard.in_a_row) or step == max_steps:
                saved, saved_step = save(), step
                if pusher and step < max_steps and not stop.agreed:  # who was told to stop waits for nothing
                    pusher.saved(saved, step)
            if evaluates or saves:
                meter.resume_clock()
    published, metrics = learner.plain(averaged=True), {**figures, **meter.speed()}
    if accelerator.is_main_process:
        metrics |= train_energy(record["machine"], metrics)
    learnt = distributed.on_main(
        accelerator, lambda: finish_folder(folder, published, text, record, metrics, log, held_out.one(0))
    )
    if accelerator.is_main_process:
        print(learnt)
    if run.push_to_hub:
        page = distributed.on_main(accelerator, lambda: pusher.finish())
        if accelerator.is_main_process:
            print(page)
    distributed.part(accelerator)


# ---------------------------------------------------------------------------------------------------------------------
# Set up


def check_architecture(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """Refuse a model that the run's pairs do not fit into."""
    if architecture.type_vocab_size < 2:
        raise UserError("type_vocab_size must be at least 2: a pair has two segments")
    if run.max_seq_length > architecture.max_position_embeddings:
        raise UserError(
            f"max_seq_length ({run.max_seq_length}) is beyond the model's positions "
            f"({architecture.max_position_embeddings}); lower it"
            + (", or raise max_position_embeddings" if run.init_from is None else "")
        )


def check_device(architecture: D2lBertConfig, run: PretrainConfig, accelerator: Accelerator) -> None:
    """Refuse what the device cannot do, and a model that it cannot hold."""
    device = accelerator.device
    if run.attn_implementation == "flex_attention" and device.type == "cpu":
        raise UserError("attn_implementation flex_attention cannot train on a processor; give eager or sdpa")
    # Weights, gradients and a moment at least, in float32; FSDP shares them out. Built all the same, the model would
    # fill the memory block by block before it fails.
    needed = 12 * encoder_weights(architecture) // (accelerator.num_processes if accelerator.is_fsdp2 else 1)
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    if needed > there:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "type_vocab_size")
        sizes = ", ".join(f"{name} ({getattr(architecture, name):,})" for name in names)
        raise UserError(
            f"out of memory: the encoder's weights, gradients and optimizer state take {needed / 1e9:,.0f} GB at "
            f"least, and this machine has {there / 1e9:,.0f} GB; lower one of {sizes}"
        )


def find_start(run: PretrainConfig, folder: Path) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, if one was asked for and is there."""
    return run.resume_from_checkpoint and checkpoint.find_checkpoint(run.resume_from_checkpoint, folder)


def model_class_of(run: PretrainConfig) -> type[PreTrainedModel]:
    """The class with the heads that the run trains."""
    # Without a task of pairs there is no head and no pooler: an untrained one would be published with the rest.
    return D2lBertForPreTraining if run.objective in PAIR_TASKS else D2lBertForMaskedLM


def make_model(architecture: D2lBertConfig, run: PretrainConfig, tokenizer, resumed: checkpoint.Checkpoint | None):
    """The model at its start; on resuming, any of its shape, as the checkpoint has the weights."""
    model_class = model_class_of(run)
    if run.init_from is not None and not resumed:
        model = start_from(model_class, run.init_from, architecture, tokenizer, run.tokenizer, run.attn_implementation)
    else:
        model = model_class._from_config(architecture, attn_implementation=run.attn_implementation)
    if run.attention_init == "neighbours":
        look_at_neighbours(model)
    if run.gradient_checkpointing:
        # The old name goes in Transformers 6, and the new one came with 5.23.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def faster_attention(architecture: D2lBertConfig, run: PretrainConfig, device: str) -> str:
    """
    The kernel that computes attention sooner.

    On a processor PyTorch's own has no dropout, and falls back on more steps than attention spelt out: a step of
    BERT-base at 512 takes 5.9 s with it and 4.5 without. Without dropout it is a tenth slower, and saves memory where
    rows are long.
    """
    spelt_out = run.max_seq_length <= 256 or architecture.attention_probs_dropout_prob > 0
    return "eager" if device == "cpu" and spelt_out else "sdpa"


def processes_that_load(run: PretrainConfig, device: str) -> int:
    """A process of its own keeps a GPU busy; on a processor it would take the step's cores."""
    return int(device != "cpu") if run.dataloader_num_workers is None else run.dataloader_num_workers


def make_meter(run: PretrainConfig, architecture: D2lBertConfig, accelerator: Accelerator, state: dict) -> Meter:
    """The meter, with the peak of all processes together measured now."""
    task = PAIR_TASKS.get(run.objective)
    arithmetic = functools.partial(training_arithmetic, architecture, pair_task=task is not None)
    peaks = accelerator.gather(torch.tensor(peak_of(accelerator), device=accelerator.device))
    return Meter(state, task, arithmetic, float(peaks.sum()), accelerator.device)


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """What a checkpoint must have in common with the run that goes on from it."""
    # What the tokenizer settles is compared with it: all but how it was trained, if that was here.
    of_tokenizer = {"pad_token_id", *(TOKENIZER_TRAINING_OPTIONS if run.existing_tokenizer() else ())}
    # The cause is named first: another text makes another tokenizer if it is trained here, and any other makes other
    # tokens.
    of_text = {
        "corpus (fingerprint)": text.tokens.fingerprint(),
        "tokenizer (fingerprint)": wordpiece.fingerprint(text.tokenizer),
    }
    numbers = {
        "data order (version)": data.DATA_ORDER,
        **architecture_numbers(architecture),
        **run.identity(),
        **(of_text if run.existing_tokenizer() is None else dict(reversed(of_text.items()))),
        "held-out documents (fingerprint)": split_fingerprint(text),
    }
    return {name: number for name, number in numbers.items() if name not in of_tokenizer}


def check_identity(found: checkpoint.Checkpoint, identity: dict) -> None:
    """
    Refuse a checkpoint of another run.

    Raises:
        UserError: names the first difference.
    """
    saved = found.state["identity"]
    for name, value in json.loads(json.dumps(identity)).items():
        if name not in saved:
            raise UserError(
                f"{found.path}: a checkpoint of an earlier version of d2l-bert, which has no {name}: it would go on "
                f"with other pairs; go on with that version, or start a run of its own in another output_dir"
            )
        if saved[name] != value:
            raise UserError(
                f"{found.path}: a checkpoint of another run: {name} was {saved[name]!r}, and is {value!r} now; go on "
                f"with what it was, or start a run of its own in another output_dir"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Train


def what_happened(step: int, figures: StepFigures, spikes: SpikeWatch) -> Iterator[tuple[str, str]]:
    """What a person should know of a step: the name of each event, and a line about it."""
    if figures.skipped:
        yield "skipped", f"step {step} is left out, as it is not finite: {interruption.non_finite(figures)}"
    elif line := spikes.see(step, figures.mlm_loss + figures.pair_loss):
        yield "loss_spike", line


def leave(accelerator: Accelerator, stop: interruption.StopSignals, saved: Path | None) -> None:
    """End a run that was told to stop, with the exit code of whatever told it."""
    if accelerator.is_main_process:
        what, there = (
            interruption.name_of(stop.agreed),
            f"{saved} is saved; go on" if saved else "nothing is lost; start",
        )
        say(f"{what}: stopped; {there} with the same command and --resume_from_checkpoint latest")
    distributed.part(accelerator)
    raise stop.exit()


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return step % every == 0 or step == last
