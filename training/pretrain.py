"""The main job: text in, a model folder out."""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import io
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils import logging

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE, D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.training import arrow, checkpoint, compiling, data, distributed, evaluate, interruption, masking
from d2l_bert.training.arithmetic import MATMUL_DTYPES, matmul_peak, micro_batch_cost, training_arithmetic
from d2l_bert.training.card_rules import check_license
from d2l_bert.training.config import HUB_OPTIONS, LENGTH_OPTIONS, TOKENIZER_TRAINING_OPTIONS, PretrainConfig
from d2l_bert.training.energy import train_energy
from d2l_bert.training.initialize import check_start, look_at_neighbours, start_from
from d2l_bert.training.micro_batch import find_micro_batch, full_batch
from d2l_bert.training.optim import MovingAverage, learning_rate_share, make_optimizers
from d2l_bert.training.pair_tasks import PAIR_TASKS, count_examples
from d2l_bert.training.prepare import PreparedText, prepare
from d2l_bert.training.push import Pusher, check_push
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
from d2l_bert.training.tracking import (
    Meter,
    Progress,
    SpikeWatch,
    StepFigures,
    check_trackers,
    report,
    say,
    start_trackers,
)


# Most pairs computed at once by default: enough to keep a processor busy, few enough for its memory.
DEFAULT_MICRO_BATCH = 64

EVALUATIONS = 10  # of a run that does not say how many

# Steps of each length that `max_minutes` is worked out from.
TIMED_STEPS = 20

# Steps that tell whether compiling pays, and the fewest operations a second that any device might have.
TIMED_TO_COMPILE, SLOWEST_PEAK = 3, 2e10


@distributed.said_once()
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
        ValueError: for whatever the user can mend, in one line.
    """
    run.check()
    if run.license is not None:
        check_license(run.license)
    if run.dry_run:
        return rehearse(architecture, run)
    logging.disable_progress_bar()  # Transformers would draw one for every file it saves
    architecture = copy.deepcopy(architecture)
    check_architecture(architecture, run)
    trackers, folder = check_trackers(run.report_to), run.output_dir or default_output_dir(run)
    accelerator = distributed.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
    run = dataclasses.replace(
        run,
        mixed_precision=accelerator.mixed_precision,
        attn_implementation=run.attn_implementation or faster_attention(accelerator.device.type, run.max_seq_length),
        dataloader_num_workers=processes_that_load(run, accelerator.device.type),
    )
    check_device(run, accelerator.device.type)
    if run.init_from is not None:
        distributed.on_main(accelerator, check_start, run.init_from, architecture, run.tokenizer)
    with contextlib.ExitStack() as held:
        folder = distributed.on_main(accelerator, lambda: held.enter_context(output_folder(run)))
        resumed = distributed.on_main(accelerator, find_start, run, folder)
        if run.push_to_hub:
            distributed.on_main(accelerator, check_push, run, folder)
        # The first process reads and tokenizes, the others find what it left.
        text = distributed.on_main(accelerator, prepare, run, shared=False)
        if text is None:
            with distributed.here_only():  # on another machine, perhaps, which may not see what the first one sees
                text = prepare(run)
        run = dataclasses.replace(run, **text.settled)
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
        check_push(run, wanted)
    lengths = list(dict.fromkeys(length for _, length, _ in run.stages(1_000_000)))
    beside = next(parent for parent in wanted.parents if parent.exists())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".d2l-bert-dry-run-", dir=beside)
    except OSError as error:
        raise ValueError(f"output_dir {wanted}: cannot be written ({error.strerror}); name another folder") from None
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
        with contextlib.redirect_stdout(io.StringIO()):  # what it has learnt is nothing
            made = pretrain(architecture, short)
        if distributed.launched_rank():
            return
        record = json.loads((made / RUN_FILE).read_text())
        size = sum(path.stat().st_size for path in made.glob("checkpoint-*/*"))
    print(f"dry run: {expectation(run, record['data']['train_tokens'])}")
    print(f"dry run: a checkpoint takes {size / 1e6:,.0f} MB, and {run.save_total_limit} are kept")
    print("dry run: text, steps, evaluation, checkpoint and model folder went well; nothing is kept")


def expectation(run: PretrainConfig, train_tokens: int) -> str:
    """How long a run is, in words."""
    if run.max_minutes is not None:
        return f"steps are timed and counted when the run begins, for {run.max_minutes:g} minutes"
    if run.num_train_epochs is not None:
        return f"{run.num_train_epochs:g} passes over {train_tokens:,} tokens"
    tokens = pairs_of(run, run.max_steps) * run.max_seq_length
    return f"{run.max_steps:,} steps of {tokens:,} tokens at most, {tokens / train_tokens:.1f} passes over the text"


def pairs_of(run: PretrainConfig, max_steps: int) -> int:
    """Pairs of full length in so many steps; shorter ones count as what they take the place of."""
    stages = run.stages(max_steps)
    ends = [*(first_step for first_step, *_ in stages[1:]), max_steps]
    return sum((end - first_step) * batch for (first_step, _, batch), end in zip(stages, ends, strict=True))


def train(
    architecture: D2lBertConfig,
    run: PretrainConfig,
    text: PreparedText,
    accelerator: Accelerator,
    folder: Path,
    resumed: checkpoint.Checkpoint | None,
) -> None:
    """Build the model, go through the steps, and leave everything in `folder`."""
    keep_freed_memory()
    torch.manual_seed(run.seed)
    task = PAIR_TASKS.get(run.objective)
    model = make_model(architecture, run, text.tokenizer, resumed)
    betas = (run.adam_beta1, run.adam_beta2)
    optimizers = make_optimizers(model, run.optim, run.learning_rate, run.weight_decay, betas, run.adam_epsilon)
    step_model, *step_optimizers = accelerator.prepare(model, *optimizers)
    average = MovingAverage(model, run.ema_decay) if run.ema_decay else None
    learner = checkpoint.Learner(accelerator, model, optimizers, average)
    cutting = how_to_cut(architecture, run, accelerator.num_processes, accelerator.process_index)

    def train_on(micro_batches, rate):
        return train_step(accelerator, step_model, step_optimizers, micro_batches, rate, run.max_grad_norm)

    run = settle_micro_batch(run, learner, step_model, text, resumed, train_on)
    run = settle_compiling(run, architecture, learner, text, cutting, resumed, train_on)
    held_out = make_held_out(run, text, **cutting)
    identity = make_identity(run, architecture, text)
    if resumed:
        distributed.on_main(accelerator, check_identity, resumed, identity)
    stop, explained = interruption.StopSignals(accelerator), interruption.failures_explained(micro_batch_pairs(run))
    with stop, explained, contextlib.ExitStack() as opened:

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
            if stop.wanted():
                leave(accelerator, stop, None)
        start, max_steps = state["step"], state["max_steps"]
        record = make_record(run, max_steps, architecture, text, accelerator)
        log = distributed.on_main(accelerator, start_folder, folder, record, start)
        start_trackers(accelerator, folder, record, start)
        pusher = Pusher(run, folder) if run.push_to_hub and accelerator.is_main_process else None
        progress = Progress(start, max_steps, visible=accelerator.is_main_process)
        opened.callback(progress.close)
        meter = make_meter(run, architecture, accelerator, state)
        guard, spikes = interruption.NonFiniteGuard(folder, state), SpikeWatch(state.get("spikes"))

        def note(row, show):
            """A row for the log, the trackers and whoever watches."""
            distributed.on_main(accelerator, log.write, row)
            report(accelerator, row)
            show(row)

        warmup_steps, decay_steps = run.schedule_steps(max_steps)
        log_every, eval_every, save_every = intervals(run, max_steps)
        steps = make_steps(run, text, max_steps, **cutting)
        if task and accelerator.is_main_process:
            warn_of_labels(steps)
        loaded = data.load(steps, start, max_steps, run.dataloader_num_workers)
        opened.enter_context(contextlib.closing(loaded))  # its workers end before this process does
        if start and is_due(start, eval_every, max_steps) and (figures := evaluate_now()):
            note({"step": start, **figures}, progress.show_held_out)  # a run may be stopped before it has come to that
        if stop.wanted():
            leave(accelerator, stop, resumed and resumed.path)
        meter.resume_clock()
        for step, micro_batches in enumerate(meter.waiting(loaded), start + 1):
            torch.manual_seed(step_seed(run.seed, step, accelerator.process_index))
            share = learning_rate_share(run.lr_scheduler_type, step - 1, warmup_steps, max_steps, decay_steps)
            done = train_on(micro_batches, rate := run.learning_rate * share)
            if average and not done.skipped:
                average.update(step)
            meter.add(done)
            progress.step()
            if step - 1 in (phase.first_step for phase in steps.phases):
                spikes.rest()  # other lengths, other losses
            for event, reason in what_happened(step, done, spikes):
                note({"step": step, "event": event, "reason": reason}, progress.show_event)
            guard.check(step, done)
            evaluates, saves = is_due(step, eval_every, max_steps), is_due(step, save_every, max_steps)
            stopping = stop.wanted()  # asked once: a signal that comes between saving and leaving waits for a step
            if evaluates or saves or stopping or is_due(step, log_every, max_steps):
                note({"step": step, **meter.row(rate, max_steps - step)}, progress.show)
            if evaluates:
                if figures := evaluate_now():
                    note({"step": step, **figures}, progress.show_held_out)
                stopping = stop.wanted()
            # While steps are being skipped the weights may be bad; what was saved before is not pushed out by them.
            if stopping or (saves and not guard.in_a_row) or step == max_steps:
                # What was decided by measuring is kept, so that a resumed run obeys it.
                decided = {"micro_batch_size": run.micro_batch_size, "torch_compile": run.torch_compile}
                decided |= {"max_steps": max_steps, "identity": identity}
                state = {**meter.totals, **guard.state(), "spikes": spikes.state(), **decided}
                saved = checkpoint.save_checkpoint(folder, step, learner, text.tokenizer, state, run.save_total_limit)
                if pusher and step < max_steps and not stopping:  # who was told to stop waits for nothing
                    pusher.saved(saved)
            if stopping:
                leave(accelerator, stop, saved)
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
        raise ValueError("type_vocab_size must be at least 2: a pair has two segments")
    if run.max_seq_length > architecture.max_position_embeddings:
        raise ValueError(
            f"max_seq_length ({run.max_seq_length}) is beyond the model's positions "
            f"({architecture.max_position_embeddings}); lower it"
            + (", or raise max_position_embeddings" if run.init_from is None else "")
        )


def check_device(run: PretrainConfig, device: str) -> None:
    """Refuse what the device cannot do."""
    if run.attn_implementation == "flex_attention" and device == "cpu":
        raise ValueError("attn_implementation flex_attention cannot train on a processor; give eager or sdpa")


def find_start(run: PretrainConfig, folder: Path) -> checkpoint.Checkpoint | None:
    """The checkpoint to go on from, if one was asked for and is there."""
    return run.resume_from_checkpoint and checkpoint.find_checkpoint(run.resume_from_checkpoint, folder)


def make_model(architecture: D2lBertConfig, run: PretrainConfig, tokenizer, resumed: checkpoint.Checkpoint | None):
    """The model at its start; on resuming, any of its shape, as the checkpoint has the weights."""
    # Without a task of pairs there is no head and no pooler: an untrained one would be published with the rest.
    model_class = D2lBertForPreTraining if run.objective in PAIR_TASKS else D2lBertForMaskedLM
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


def keep_freed_memory() -> None:
    """
    Have glibc keep what a step frees for the next one.

    It would give every large tensor back to the system, which clears each page of it before it comes again: on two
    cores that is a tenth of a step. What is kept is memory that the next step takes anyway.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(parameter, 2**30)


def faster_attention(device: str, length: int) -> str:
    """On a processor, short rows are faster spelt out: 32 rows of 128 take 5 ms against 17 ms, backward included."""
    return "eager" if device == "cpu" and length <= 256 else "sdpa"


def processes_that_load(run: PretrainConfig, device: str) -> int:
    """A process of its own keeps a GPU busy; on a processor it takes the step's cores, and copies what it writes to."""
    return int(device != "cpu") if run.dataloader_num_workers is None else run.dataloader_num_workers


def settle_micro_batch(
    run: PretrainConfig, learner: checkpoint.Learner, step_model, text, resumed, train_on
) -> PretrainConfig:
    """The run with its micro-batch as a number: `auto` is what its checkpoint was made with, or what is found."""
    if run.micro_batch_size != "auto":
        return run
    if resumed:
        found = resumed.state["micro_batch_size"]
    else:
        try_step = functools.partial(train_on, rate=0.0)
        found = find_micro_batch(run, len(text.tokenizer), learner.accelerator, step_model, try_step)
        learner.forget_moments()
    return dataclasses.replace(run, micro_batch_size=found)


def settle_compiling(
    run: PretrainConfig, architecture: D2lBertConfig, learner: checkpoint.Learner, text, cutting, resumed, train_on
) -> PretrainConfig:
    """The run with `torch_compile` as true or false, and the model compiled: as its checkpoint says, or if it pays."""
    accelerator, model = learner.accelerator, learner.model
    wanted = resumed.state.get("torch_compile", "false") if resumed and run.torch_compile == "auto" else None
    wanted = wanted or run.torch_compile

    def try_step():
        train_on(micro_batches_of_every_kind(run, len(text.tokenizer)), 0.0)

    if wanted == "auto":
        wanted = "false"
        # FSDP2 gathers a block's weights around it, which a program made beforehand does not know of.
        if not distributed.is_sharded(model) and is_long(run, architecture, text, cutting, accelerator):
            steps = make_steps(run, text, 1000, **cutting)
            timed = [functools.partial(train_on, steps[step], 0.0) for step in range(1000 - TIMED_TO_COMPILE, 1000)]
            wanted = str(compiling.pays(accelerator, model, try_step, timed)).lower()
            learner.forget_moments()
    elif wanted == "true":
        if error := compiling.compile_now(model, try_step):
            raise ValueError(
                f"torch_compile: {error}; give --torch_compile false, or PyTorch's compiler what it needs"
            )
        learner.forget_moments()
    return dataclasses.replace(run, torch_compile=wanted)


def micro_batches_of_every_kind(run: PretrainConfig, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """A large and a small micro-batch, without padding and with some: what gets programs of its own."""
    kinds = []
    for pairs in (micro_batch_pairs(run), 2):
        for padding in (0, 1):
            batch = full_batch(run, vocab_size, pairs)
            batch["attention_mask"][:, batch["attention_mask"].shape[1] - padding :] = 0
            kinds.append(batch)
    return kinds


def is_long(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText, cutting, accelerator) -> bool:
    """Whether the run is so long that compiling may pay, going by its arithmetic; all processes agree."""
    if run.max_minutes is not None:
        return 60 * run.max_minutes > 2 * compiling.LEAST_SECONDS
    max_steps = decide_steps(run, text, cutting, None, None, None)
    counts = counts_of_full_pairs(run, pairs_of(run, max_steps))
    arithmetic = training_arithmetic(architecture, counts, run.objective in PAIR_TASKS)
    if arithmetic < compiling.LEAST_SECONDS * SLOWEST_PEAK:
        return False  # nowhere, and all that measuring takes is spared
    peak = accelerator.reduce(torch.tensor(peak_of(run, accelerator), device=accelerator.device), "sum")
    return arithmetic / float(peak) > compiling.LEAST_SECONDS


def make_meter(run: PretrainConfig, architecture: D2lBertConfig, accelerator: Accelerator, state: dict) -> Meter:
    """The meter, with the peak of all processes together measured now."""
    task = PAIR_TASKS.get(run.objective)
    arithmetic = functools.partial(training_arithmetic, architecture, pair_task=task is not None)
    peaks = accelerator.gather(torch.tensor(peak_of(run, accelerator), device=accelerator.device))
    return Meter(state, task, arithmetic, float(peaks.sum()), accelerator.device)


def peak_of(run: PretrainConfig, accelerator: Accelerator) -> float:
    """Operations a second of this process's device, at most."""
    return matmul_peak(accelerator.device, MATMUL_DTYPES[run.mixed_precision])


def intervals(run: PretrainConfig, max_steps: int) -> tuple[int, int, int]:
    """Steps from one row of the log to the next, from evaluation to evaluation, and from checkpoint to checkpoint."""
    return (
        run.logging_steps or math.ceil(max_steps / 100),
        run.eval_steps or math.ceil(max_steps / EVALUATIONS),
        run.save_steps or math.ceil(max_steps / 10),
    )


def make_phases(run: PretrainConfig, text: PreparedText, max_steps: int) -> list[data.Phase]:
    """The stages of the run, one after the other; a step of shorter pairs holds as many more of them.

    Each length has a plan of its own. More pairs a step of the same length go on in it: none comes twice, none is left
    out.
    """
    passes = make_passes(run, text)
    sources = None if passes is None else text.document_sources[text.train_documents]
    phases = []
    for first_step, length, batch_size in run.stages(max_steps):
        before = phases[-1] if phases else None
        if before and before.make_batch.max_seq_length == length:
            first_pair, plans, make_batch = before.pairs_before(first_step), before.plans, before.make_batch
        else:
            folder, how = arrow.cache_folder(), pairing(run, length)
            plans = data.EpochPlans(text.tokens, text.train_documents, how, run.seed, folder, sources, passes)
            first_pair, make_batch = 0, make_batch_maker(run, text, length)
            if not len(plans.epoch(0)):
                raise ValueError(f"{text.corpus_name}: no pair of segments in the text to train on; give more text")
        pairs = batch_size * (run.max_seq_length // length)
        phases.append(data.Phase(first_step, first_pair, plans, make_batch, pairs, most_tokens(run), run.packing))
    return phases


def make_passes(run: PretrainConfig, text: PreparedText):
    """How often an epoch visits the documents of each source; None if every one once."""
    if not run.source_weights:
        return None
    count = int(text.document_sources.max()) + 1
    if count != len(run.source_weights):
        raise ValueError(f"source_weights: {len(run.source_weights)} of them for {count} sources; give one for each")
    sources = text.document_sources[text.train_documents]
    sizes = np.bincount(sources, text.tokens.sizes()[text.train_documents], minlength=count)
    return data.source_passes(sizes, [float(weight) for weight in run.source_weights])


def micro_batch_pairs(run: PretrainConfig) -> int:
    """Most pairs of full length computed at once."""
    return run.micro_batch_size or DEFAULT_MICRO_BATCH


def most_tokens(run: PretrainConfig) -> int:
    """Most tokens in a micro-batch, padding included."""
    return micro_batch_pairs(run) * run.max_seq_length


def how_to_cut(architecture: D2lBertConfig, run: PretrainConfig, world_size: int = 1, rank: int = 0) -> dict[str, int]:
    """How this process's share of a step becomes micro-batches: arguments of `packing.micro_batches`."""
    cost = micro_batch_cost(architecture, counts_of_full_pairs(run, 1), run.objective in PAIR_TASKS)
    return {"world_size": world_size, "rank": rank, "cost": cost}


def counts_of_full_pairs(run: PretrainConfig, pairs: int) -> SimpleNamespace:
    """What `training_arithmetic` asks of so many pairs of full length."""
    tokens = pairs * run.max_seq_length
    counts = {"tokens": tokens, "squared_lengths": tokens * run.max_seq_length, "examples": pairs}
    return SimpleNamespace(**counts, masked_tokens=max(run.mlm_probabilities()) * tokens)


def make_batch_maker(run: PretrainConfig, text: PreparedText, length: int) -> data.BatchMaker:
    """What makes batches of one length, with the share to predict that the run ends with."""
    return data.BatchMaker(text.tokens, text.tokenizer, run.mlm_probabilities()[1], length, run.masking, run.objective)


def make_steps(run: PretrainConfig, text: PreparedText, max_steps: int, **cutting) -> data.PretrainingSteps:
    """What every step of the run holds."""
    first, last = run.mlm_probabilities()
    share_at = functools.partial(masking.share_at, first=first, last=last, max_steps=max_steps)
    return data.PretrainingSteps(make_phases(run, text, max_steps), share_at, **cutting)


def make_held_out(run: PretrainConfig, text: PreparedText, **cutting) -> data.HeldOutPairs:
    """The held-out pairs, at the run's full length."""
    make_batch = make_batch_maker(run, text, run.max_seq_length)
    length_pairing = pairing(run, run.max_seq_length)
    # Training has no need of scores as a whole, and evaluation has: micro-batches may be smaller here.
    most = min(most_tokens(run), int(LOGITS_AT_ONCE / len(text.tokenizer) / make_batch.mlm_probability))
    held_out = data.HeldOutPairs(
        text.tokens,
        text.held_out_documents,
        length_pairing,
        make_batch,
        most,
        run.max_eval_pairs,
        **cutting,
    )
    if not len(held_out.rows):
        raise ValueError(f"{text.corpus_name}: no pair of segments in the held-out text; give more text")
    return held_out


def warn_of_labels(steps: data.PretrainingSteps) -> None:
    """Say so if one label of the pairs is much more frequent than the other."""
    labels = steps.phases[-1].plans.epoch(0)["next_sentence_label"]
    share = labels.mean()
    if abs(share - 0.5) > 0.1 and len(labels) > 100:
        say(f"{share:.0%} of the pairs have label 1: the text has too few sentences that follow one another")


def pairing(run: PretrainConfig, length: int) -> dict:
    """The arguments of `data.plan_pairs` for one length."""
    arguments = {"pairing": run.pairing, "max_seq_length": length, "objective": run.objective}
    return {**arguments, "short_seq_prob": run.short_seq_prob} if run.pairing == "segments" else arguments


def decide_steps(run, text, cutting, learner: checkpoint.Learner, train_on, evaluate_now) -> int:
    """
    The number of optimizer steps, from whichever option gives the length of the run.

    For `max_minutes` some steps of every length and one evaluation are timed, at a rate of 0, which leaves the weights
    as they are, and averaged over the processes. What was decided is kept in run_config.json and in every checkpoint,
    so that a resumed run keeps its schedule.
    """
    if run.max_steps is not None:
        return run.max_steps
    whole = 1000  # steps that stand for the run while its length is not known
    steps = make_steps(run, text, whole, **cutting)
    phases = steps.phases
    ends = [*(later.first_step for later in phases[1:]), whole]
    if run.num_train_epochs is not None:
        # Each length has a plan of its own, of which a step is some part.
        passes = sum(
            (end - phase.first_step) / whole * phase.global_batch_size / len(phase.plans.epoch(0))
            for phase, end in zip(phases, ends, strict=True)
        )
        return math.ceil(run.num_train_epochs / passes)
    return steps_in(run, *time_steps(steps, ends, learner, train_on, evaluate_now))


def time_steps(steps, ends, learner: checkpoint.Learner, train_on, evaluate_now) -> tuple[float, float]:
    """Seconds of an average step and of an evaluation, averaged over the processes; nothing is learnt meanwhile."""
    step_seconds, whole = 0.0, ends[-1]
    for phase, end in zip(steps.phases, ends, strict=True):
        train_on(steps[phase.first_step], 0.0)  # the first step allocates, and is slow
        start = time.monotonic()
        timed = range(phase.first_step, end)[1 : TIMED_STEPS + 1] or [phase.first_step]
        for step in timed:
            train_on(steps[step], 0.0)
        step_seconds += (end - phase.first_step) / whole * (time.monotonic() - start) / len(timed)
    start = time.monotonic()
    evaluate_now()
    evaluation_seconds = time.monotonic() - start
    learner.forget_moments()
    timings = torch.tensor([step_seconds, evaluation_seconds], device=learner.accelerator.device)
    return tuple(learner.accelerator.reduce(timings, "mean").tolist())


def steps_in(run: PretrainConfig, step_seconds: float, evaluation_seconds: float) -> int:
    """Steps that `max_minutes` have room for, evaluations included."""
    seconds = 60 * run.max_minutes
    if run.eval_steps:
        return max(1, int(seconds / (step_seconds + evaluation_seconds / run.eval_steps)))
    return max(1, int((seconds - EVALUATIONS * evaluation_seconds) / step_seconds))


def make_identity(run: PretrainConfig, architecture: D2lBertConfig, text: PreparedText) -> dict:
    """What a checkpoint must have in common with the run that goes on from it."""
    # What the tokenizer settles is compared with it: all but how it was trained, if that was here.
    of_tokenizer = {"pad_token_id", *(TOKENIZER_TRAINING_OPTIONS if run.existing_tokenizer() else ())}
    numbers = {
        **architecture_numbers(architecture),
        **run.identity(),
        "corpus (fingerprint)": text.fingerprint,
        "tokenizer (fingerprint)": arrow.fingerprint(text.tokenizer.backend_tokenizer.to_str()),
    }
    return {name: number for name, number in numbers.items() if name not in of_tokenizer}


def check_identity(found: checkpoint.Checkpoint, identity: dict) -> None:
    """
    Refuse a checkpoint of another run.

    Raises:
        ValueError: names the first difference.
    """
    for name, value in json.loads(json.dumps(identity)).items():
        was = found.state["identity"].get(name)
        if was != value:
            raise ValueError(
                f"{found.path}: a checkpoint of another run: {name} was {was!r}, and is {value!r} now; go on with "
                f"what it was, or start a run of its own in another output_dir"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Train


def train_step(
    accelerator: Accelerator, model, optimizers, micro_batches, learning_rate: float, max_grad_norm: float
) -> StepFigures:
    """
    One optimizer step, left out if its loss or gradient is not finite.

    Losses are sums divided once, by the counts of the whole step over all processes, so that the gradient does not
    depend on how the step is split.

    Args:
        model: a `D2lBertForPreTraining`, or a `D2lBertForMaskedLM` where `micro_batches` have no label of pairs; as
            Accelerate prepared it.
        optimizers: as Accelerate prepared them.
    """
    device = accelerator.device
    counts = accelerator.reduce(torch.stack([count(batch) for batch in micro_batches]).sum(0).to(device), "sum")
    masked_tokens, examples = counts[:2]
    divisors = {"num_items_in_batch": masked_tokens}
    if "next_sentence_label" in micro_batches[0]:
        divisors["num_pairs_in_batch"] = examples
    losses = torch.zeros(2, device=device)
    for number, batch in enumerate(micro_batches, 1):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with distributed.summed_later(accelerator, model, number == len(micro_batches)):
            with accelerator.autocast():
                outputs = model(**batch, **divisors, skip_logits=not distributed.is_sharded(model))
            # Gradients are averaged over the processes, and their losses are shares of one sum.
            accelerator.backward(outputs.loss * accelerator.num_processes)
        pair_loss = outputs.get("nsp_loss", torch.zeros_like(outputs.loss))
        losses += torch.stack([outputs.get("mlm_loss", outputs.loss), pair_loss]).detach()
    norm = distributed.whole(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm))
    # Every process sees the same numbers, and so leaves out the same steps.
    figures = torch.cat([accelerator.reduce(losses, "sum"), norm[None].to(device), counts]).tolist()
    is_finite = all(map(math.isfinite, figures[:3]))
    for optimizer in optimizers:
        if is_finite or accelerator.scaler:  # which leaves out such steps itself, and scales less from then on
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        optimizer.zero_grad()
    return StepFigures(*figures, skipped=float(not is_finite))


def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Masked tokens, pairs (or sequences), real tokens, tokens with padding, and squared lengths of a batch: (5,)."""
    real = batch["attention_mask"]
    if "sequence_ids" in batch:
        ids = batch["sequence_ids"]
        lengths = torch.stack([(ids == number).sum(1) for number in range(1, int(ids.max()) + 1)])
    else:
        lengths = real.sum(1)
    masked_tokens, computed = (batch["labels"] != -100).sum(), torch.tensor(real.numel())
    found = [masked_tokens, count_examples(batch), real.sum(), computed, (lengths**2).sum()]
    return torch.stack([number.float() for number in found])


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


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a step's dropout masks: with it nothing random needs to be kept in a checkpoint."""
    return int(arrow.fingerprint(seed, step, rank), 16) % 2**63


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return step % every == 0 or step == last
