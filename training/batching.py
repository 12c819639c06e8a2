"""From a run's options: its stages, training steps, held-out batches, sizes of micro-batches, and schedule."""

import dataclasses
import functools
import itertools
import logging
import math
from types import SimpleNamespace

import numpy as np

from d2l_bert.errors import UserError, refuse_first
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training import data, masking
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.epochs import EpochPairs, Selection, source_passes
from d2l_bert.training.meter import micro_batch_cost
from d2l_bert.training.optim import learning_rate_share
from d2l_bert.training.packing import ALONE, Sharding
from d2l_bert.training.pairs import NO_LABEL, PAIR


logger = logging.getLogger(__name__)


# `trial_micro_batches` picks the largest micro-batches of this many steps.
TRIED_STEPS = 8

# Where a smaller share of the rows would be pairs, a run has no second loss.
FEWEST_PAIRS = 0.5

# The default micro-batch, in pairs of full length: enough to keep a CPU busy, few enough for the memory of a CPU.
DEFAULT_MICRO_BATCH = 64


def check_architecture(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """
    Check that the run's pairs fit into the model.

    Raises:
        UserError: the model has fewer than 2 segment types, or fewer positions than `max_seq_length`.
    """
    positions = architecture.max_position_embeddings
    way_out = "lower it, or raise max_position_embeddings" if run.init_from is None else "lower it"
    cases = {
        "type_vocab_size must be at least 2: a pair has two segments": architecture.type_vocab_size < 2,
        f"max_seq_length ({run.max_seq_length}) is beyond the model's positions ({positions}); {way_out}": (
            run.max_seq_length > positions
        ),
    }
    refuse_first(cases)


def make_steps(
    run: PretrainConfig, text: PreparedText, max_steps: int, sharding: Sharding = ALONE
) -> data.PretrainingSteps:
    """
    A dataset with the micro-batches of every step of the run.

    Args:
        sharding: the process.
    """
    first, last = run.mlm_probabilities()
    share_at = functools.partial(masking.share_at, first=first, last=last, max_steps=max_steps)
    return data.PretrainingSteps(make_phases(run, text, max_steps), share_at, sharding)


def trial_micro_batches(run: PretrainConfig, text: PreparedText, pairs: int, sharding: Sharding) -> list[dict]:
    """
    The largest micro-batches of the run, for measuring the memory and time that the run will need.

    They are taken from `TRIED_STEPS` steps at the run's full length and batch size, with the run's largest
    `mlm_probability`.

    Args:
        pairs: the size of a micro-batch to try, in pairs of full length.
        sharding: the process.

    Returns:
        The micro-batch with the most tokens, and the micro-batch with the most attention scores if that is another.
    """
    changes = {"length_schedule": [], "batch_size_schedule": [], "mlm_probability": max(run.mlm_probabilities())}
    steps = make_steps(dataclasses.replace(run, micro_batch_size=pairs, **changes), text, TRIED_STEPS, sharding)
    micro_batches = [micro_batch for step in range(TRIED_STEPS) for micro_batch in steps[step]]
    shapes = [micro_batch["input_ids"].shape for micro_batch in micro_batches]  # (B, T) of each
    most_tokens_at = max(range(len(shapes)), key=lambda index: shapes[index].numel())
    most_scores_at = max(range(len(shapes)), key=lambda index: shapes[index].numel() * shapes[index][1])
    return [micro_batches[index] for index in dict.fromkeys((most_tokens_at, most_scores_at))]


def make_phases(run: PretrainConfig, text: PreparedText, max_steps: int) -> list[data.Phase]:
    """
    One `data.Phase` for each stage of the run, in order.

    A stage with half the sequence length has twice as many pairs a step, so that a step keeps its number of tokens.
    Each sequence length has its own pairs. A stage that only changes the batch size continues in the pairs of the
    stage before: no pair is repeated and no pair is skipped.

    Raises:
        UserError: the training text has no pair of segments, or no token to predict.
    """
    selection = Selection(text.train, make_passes(run, text))
    phases = []
    for first_step, length, batch_size in run.stages(max_steps):
        before = phases[-1] if phases else None
        if before and before.make_batch.max_seq_length == length:
            first_pair, pairs, make_batch = before.pairs_before(first_step), before.pairs, before.make_batch
        else:
            pairs = EpochPairs(selection, pairing_arguments(run, length), run.seed, text.corpus_name)
            first_pair, make_batch = 0, make_batch_maker(run, text.train, text.tokenizer, length)
            epoch = pairs.place_of(0).epoch  # raises if the text has no pair
            data.first_with_target(make_batch, pairs.parts(epoch), pairs.name)  # raises if there is none
        pairs_a_step = batch_size * (run.max_seq_length // length)
        phases.append(
            data.Phase(first_step, first_pair, pairs, make_batch, pairs_a_step, most_tokens(run), run.packing)
        )
    return phases


def stage_changes(run: PretrainConfig, max_steps: int) -> dict[int, dict]:
    """
    For each change of sequence length or batch size, the event to write to the training log.

    Returns:
        Events by the first step of the new stage, counted from 1. The `label` is for the curves: tokens a row, and
        pairs of full length a step.
    """
    changes = {}
    for (_, length_before, batch_before), (first_step, length, batch) in itertools.pairwise(run.stages(max_steps)):
        step, examples = first_step + 1, unit(PAIR_TASKS.get(run.objective))
        step_examples = batch * (run.max_seq_length // length)
        reason = f"step {step}: from here on, a step has {step_examples:,} {examples} of {length} tokens"
        label = [f"batch {batch_before} → {batch}"] if batch != batch_before else []
        if length != length_before:
            label.insert(0, f"{length_before} → {length} tokens")
            reason += f"; the evaluation always uses {run.max_seq_length} tokens"
        changes[step] = {
            "step": step,
            "event": "stage",
            "reason": reason,
            "label": ", ".join(label),
        }
    return changes


def check_source_weights(run: PretrainConfig, sources: int) -> None:
    """Raise `UserError` if `source_weights` has more or fewer entries than the text has sources."""
    if run.source_weights and len(run.source_weights) != sources:
        raise UserError(f"source_weights: {len(run.source_weights)} weights for {sources} sources; give one for each")


def make_passes(run: PretrainConfig, text: PreparedText):
    """How often an epoch visits the documents of each source (sources,); None if all documents are visited once."""
    if not run.source_weights:
        return None
    check_source_weights(run, len(text.train.source_ends))
    tokens = np.diff(text.train.first_tokens(np.append(0, text.train.source_ends)))
    return source_passes(tokens, [float(weight) for weight in run.source_weights])


def make_batch_maker(run: PretrainConfig, tokens: TokenizedCorpus, tokenizer, length: int) -> data.BatchMaker:
    """Turns pairs into batches of at most `length` tokens a row, with the `mlm_probability` of the run's last step."""
    masks = {"masking_kind": run.masking, "objective": run.objective}
    replaced = {"mask_replace_prob": run.mask_replace_prob, "random_replace_prob": run.random_replace_prob}
    return data.BatchMaker(tokens, tokenizer, run.mlm_probabilities()[1], length, **masks, **replaced)


def make_held_out(run: PretrainConfig, text: PreparedText, sharding: Sharding = ALONE) -> data.HeldOutPairs:
    """
    The held-out pairs at the run's full length, as micro-batches.

    Raises:
        UserError: the held-out text has no pair of segments, or no token to predict.
    """
    name = text.held_out_name()
    make_batch = make_batch_maker(run, text.held_out, text.tokenizer, run.max_seq_length)
    # Evaluation holds all logits of a micro-batch in memory, training does not: evaluation may need smaller ones.
    token_limit = min(most_tokens(run), int(LOGITS_AT_ONCE / len(text.tokenizer) / make_batch.mlm_probability))
    held_out = data.HeldOutPairs(
        Selection(text.held_out),
        pairing_arguments(run, run.max_seq_length),
        make_batch,
        token_limit,
        run.max_eval_pairs,
        sharding,
        name,
    )
    if next(held_out.parts(), None) is None or (make_batch.has_labels and not len(held_out.labelled())):
        raise UserError(f"{name}: no pair of segments in this text; give more text, or --objective none")
    held_out.one()  # raises if there is no token to predict
    return held_out


def with_objective(run: PretrainConfig, text: PreparedText) -> PretrainConfig:
    """
    The run with an objective: `auto` becomes `nsp`, or `none` where few rows of the text would have a label.

    A document of one sentence is a row without a label. Says how many rows have one, measured on the first window.

    Raises:
        UserError: few rows would have a label of the objective that the user asked for.
    """
    if run.objective == "none":
        return run
    of_pairs = dataclasses.replace(run, objective="nsp" if run.objective == "auto" else run.objective)
    pairs = EpochPairs(
        Selection(text.train, make_passes(run, text)), pairing_arguments(of_pairs, run.max_seq_length), run.seed
    )
    rows, _ = next(pairs.parts(0), (np.zeros(0, dtype=PAIR), None))
    has_label, short = rows["next_sentence_label"] != NO_LABEL, PAIR_TASKS[of_pairs.objective].short
    share = (rows["b_end"] > rows["b_start"]).mean() if len(rows) else 1.0
    if not len(rows) or (share >= FEWEST_PAIRS and has_label.any()):
        logger.info(f"{has_label.sum() / max(len(rows), 1):.1%} of the rows are pairs with a label for {short}")
        return of_pairs
    reason = (
        f"only {share:.1%} of the rows would be pairs for {short}: most documents have one sentence"
        if share < FEWEST_PAIRS
        else f"no pair for {short} would have a label: all second segments are alike"
    )
    if run.objective != "auto":
        raise UserError(
            f"objective {run.objective}: {reason}; give objective none, or documents of several sentences (see "
            f"documents)"
        )
    logger.warning(f"{text.corpus_name}: {reason}. The second loss is left out (objective none)")
    return dataclasses.replace(run, objective="none")


def pairing_arguments(run: PretrainConfig, length: int) -> dict:
    """The arguments of `pairs.lay_out` for pairs of at most `length` tokens."""
    arguments = {"pairing": run.pairing, "max_seq_length": length, "objective": run.objective}
    return {**arguments, "short_seq_prob": run.short_seq_prob} if run.pairing == "segments" else arguments


def make_sharding(architecture: D2lBertConfig, run: PretrainConfig, world_size: int = 1, rank: int = 0) -> Sharding:
    """This process's share of each step, and the fixed cost of a micro-batch for the model."""
    tokens = run.max_seq_length
    counts = SimpleNamespace(  # of a pair of full length, masked at the run's highest share
        tokens=tokens, squared_lengths=tokens**2, examples=1, masked_tokens=max(run.mlm_probabilities()) * tokens
    )
    return Sharding(world_size, rank, micro_batch_cost(architecture, counts, run.objective in PAIR_TASKS))


def most_tokens(run: PretrainConfig) -> int:
    """The largest number of tokens in a micro-batch, padding included."""
    return (run.micro_batch_size or DEFAULT_MICRO_BATCH) * run.max_seq_length


def full_length_pairs(run: PretrainConfig, max_steps: int) -> int:
    """Pairs in `max_steps` steps, in pairs of full length: two pairs of half the length count as one."""
    stages = run.stages(max_steps)
    ends = [*(first_step for first_step, *_ in stages[1:]), max_steps]
    return sum((end - first_step) * batch for (first_step, _, batch), end in zip(stages, ends, strict=True))


# ---------------------------------------------------------------------------------------------------------------------

# Numbers in a whole run without --logging_steps, --eval_steps, --save_steps.
DEFAULT_ROWS, DEFAULT_EVALUATIONS, DEFAULT_CHECKPOINTS = 100, 10, 10


class RunSchedule:
    """
    Answers for each step, counted from 1. The last step is always logged, evaluated and saved.

    Args:
        max_steps: the number of steps in the run.
    """

    def __init__(self, run: PretrainConfig, max_steps: int):
        self.run, self.max_steps = run, max_steps
        self.every = {
            "log": run.logging_steps or math.ceil(max_steps / DEFAULT_ROWS),
            "evaluate": run.eval_steps or math.ceil(max_steps / DEFAULT_EVALUATIONS),
            "save": run.save_steps or math.ceil(max_steps / DEFAULT_CHECKPOINTS),
        }

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        warmup_steps, decay_steps = self.run.schedule_steps(self.max_steps)
        kind = self.run.lr_scheduler_type
        return self.run.learning_rate * learning_rate_share(kind, step - 1, warmup_steps, self.max_steps, decay_steps)

    def due_at(self, step: int) -> set[str]:
        """What is to be done after a step: `log`, `evaluate`, `save`. Every evaluation and checkpoint is logged."""
        due = {name for name, every in self.every.items() if step % every == 0 or step == self.max_steps}
        return {*due, "log"} if due else due
