"""A run's options as batches: the pairs of each step, how long and how many, and how they are cut."""

import dataclasses
import functools
import itertools
import logging
from types import SimpleNamespace

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.tokenization.cache import cache_folder
from d2l_bert.tokenization.prepare import PreparedText
from d2l_bert.training import data, masking
from d2l_bert.training.arithmetic import micro_batch_cost
from d2l_bert.training.config import PretrainConfig


logger = logging.getLogger(__name__)


# Steps among which trials look for the largest micro-batches.
TRIED_STEPS = 8

# Most pairs computed at once by default: enough to keep a CPU busy, few enough for its memory.
DEFAULT_MICRO_BATCH = 64


def make_steps(run: PretrainConfig, text: PreparedText, max_steps: int, **cutting) -> data.PretrainingSteps:
    """What every step of the run holds."""
    first, last = run.mlm_probabilities()
    share_at = functools.partial(masking.share_at, first=first, last=last, max_steps=max_steps)
    return data.PretrainingSteps(make_phases(run, text, max_steps), share_at, **cutting)


def trial_micro_batches(run: PretrainConfig, text: PreparedText, pairs: int, **cutting) -> list[dict]:
    """
    The largest micro-batches that the run has where `pairs` of full length are computed at once: the one of most
    tokens, and the one of the longest rows if that is another. Memory and time of trials are then the run's own.

    They are those of the first steps of its last stage, with the largest share to predict.
    """
    changes = {"length_schedule": [], "batch_size_schedule": [], "mlm_probability": max(run.mlm_probabilities())}
    steps = make_steps(dataclasses.replace(run, micro_batch_size=pairs, **changes), text, TRIED_STEPS, **cutting)
    made = [micro_batch for step in range(TRIED_STEPS) for micro_batch in steps[step]]
    shapes = [micro_batch["input_ids"].shape for micro_batch in made]
    largest = max(range(len(made)), key=lambda number: shapes[number].numel())
    longest = max(range(len(made)), key=lambda number: shapes[number].numel() * shapes[number][1])
    return [made[number] for number in dict.fromkeys((largest, longest))]


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
            folder, how = cache_folder(), pairing(run, length)
            plans = data.EpochPlans(text.tokens, text.train_documents, how, run.seed, folder, sources, passes)
            first_pair, make_batch = 0, make_batch_maker(run, text, length)
            if not len(plans.epoch(0)):
                raise UserError(f"{text.corpus_name}: no pair of segments in the text to train on; give more text")
        pairs = batch_size * (run.max_seq_length // length)
        phases.append(data.Phase(first_step, first_pair, plans, make_batch, pairs, most_tokens(run), run.packing))
    return phases


def stage_changes(run: PretrainConfig, max_steps: int) -> dict[int, dict]:
    """
    The log's event for each change of length or batch size, by the first step, counted from 1, that has it.

    `length` and `batch` are as in `run.stages`, tokens and pairs of full length; `length_before` and `batch_before`
    are those of the steps before.
    """
    changes = {}
    for (_, length_before, batch_before), (first_step, length, batch) in itertools.pairwise(run.stages(max_steps)):
        step, examples = first_step + 1, unit(PAIR_TASKS.get(run.objective))
        a_step = batch * (run.max_seq_length // length)
        reason = f"step {step}: from here on {a_step:,} {examples} of {length} tokens a step"
        if length != length_before:
            reason += f"; held-out figures are always at {run.max_seq_length}"
        changes[step] = {
            "step": step,
            "event": "stage",
            "reason": reason,
            "length_before": length_before,
            "length": length,
            "batch_before": batch_before,
            "batch": batch,
        }
    return changes


def check_source_weights(run: PretrainConfig, sources: int) -> None:
    """Refuse more or fewer weights than sources."""
    if run.source_weights and len(run.source_weights) != sources:
        raise UserError(
            f"source_weights: {len(run.source_weights)} of them for {sources} source{'s' * (sources != 1)}; give one "
            f"for each"
        )


def make_passes(run: PretrainConfig, text: PreparedText):
    """How often an epoch visits the documents of each source; None if every one once."""
    if not run.source_weights:
        return None
    count = int(text.document_sources.max()) + 1
    check_source_weights(run, count)
    sources = text.document_sources[text.train_documents]
    sizes = np.bincount(sources, text.tokens.sizes()[text.train_documents], minlength=count)
    return data.source_passes(sizes, [float(weight) for weight in run.source_weights])


def make_batch_maker(run: PretrainConfig, text: PreparedText, length: int) -> data.BatchMaker:
    """What makes batches of one length, with the share to predict that the run ends with."""
    return data.BatchMaker(text.tokens, text.tokenizer, run.mlm_probabilities()[1], length, run.masking, run.objective)


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
        raise UserError(f"{text.corpus_name}: no pair of segments in the held-out text; give more text")
    return held_out


def pairing(run: PretrainConfig, length: int) -> dict:
    """The arguments of `data.plan_pairs` for one length."""
    arguments = {"pairing": run.pairing, "max_seq_length": length, "objective": run.objective}
    return {**arguments, "short_seq_prob": run.short_seq_prob} if run.pairing == "segments" else arguments


def warn_of_labels(steps: data.PretrainingSteps) -> None:
    """Say so if the pairs have labels, and one is much more frequent than the other."""
    if not steps.phases[-1].make_batch.has_labels:
        return
    labels = steps.phases[-1].plans.epoch(0)["next_sentence_label"]
    share = labels.mean()
    if abs(share - 0.5) > 0.1 and len(labels) > 100:
        logger.warning(
            f"{share:.0%} of the pairs have label 1: the text has too few sentences that follow one another"
        )


def how_to_cut(architecture: D2lBertConfig, run: PretrainConfig, world_size: int = 1, rank: int = 0) -> dict[str, int]:
    """How this process's share of a step becomes micro-batches: arguments of `packing.micro_batches`."""
    cost = micro_batch_cost(architecture, counts_of_full_pairs(run, 1), run.objective in PAIR_TASKS)
    return {"world_size": world_size, "rank": rank, "cost": cost}


def counts_of_full_pairs(run: PretrainConfig, pairs: int) -> SimpleNamespace:
    """What `training_arithmetic` asks of so many pairs of full length."""
    tokens = pairs * run.max_seq_length
    counts = {"tokens": tokens, "squared_lengths": tokens * run.max_seq_length, "examples": pairs}
    return SimpleNamespace(**counts, masked_tokens=max(run.mlm_probabilities()) * tokens)


def micro_batch_pairs(run: PretrainConfig) -> int:
    """Most pairs of full length computed at once."""
    return run.micro_batch_size or DEFAULT_MICRO_BATCH


def most_tokens(run: PretrainConfig) -> int:
    """Most tokens in a micro-batch, padding included."""
    return micro_batch_pairs(run) * run.max_seq_length


def pairs_of(run: PretrainConfig, max_steps: int) -> int:
    """Pairs of full length in `max_steps` steps; shorter ones count as what they take the place of."""
    stages = run.stages(max_steps)
    ends = [*(first_step for first_step, *_ in stages[1:]), max_steps]
    return sum((end - first_step) * batch for (first_step, _, batch), end in zip(stages, ends, strict=True))
