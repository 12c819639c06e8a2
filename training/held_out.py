"""Held-out figures: the pairs to evaluate on, losses and accuracies."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.pair_tasks import PairTask, unit
from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training.data.batches import BatchMaker, batches, count_examples, first_with_target, to_device
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.data.pairs import NO_LABEL, one_segment_accuracy
from d2l_bert.training.data.rows import ALONE, Ranks


# A fixed seed: all runs on a corpus have the same held-out pairs and masks.
HELD_OUT_SEED = 20_181_011

MAX_LOSS = 700  # nats; the perplexity of a higher loss overflows a float, and the log of a run refuses infinity

# What is summed over held-out batches, in the order of the tensor that processes add up; the last one if it is wanted.
SUMS = ("mlm_loss", "mlm_correct", "masked_tokens", "pair_loss", "pair_correct", "examples")
TOP_5 = "mlm_in_top_5"
LABELS = ("labels", "next_sentence_label")  # the arguments of the model that are labels


class HeldOutPairs:
    """
    The pairs to evaluate on. Iterating gives the micro-batches that this process computes in an evaluation; each pair
    is evaluated by one process only.

    The pairs and their masks are the same in every evaluation of every run on a corpus with the same options of rows.

    Args:
        corpus: the corpus to evaluate on.
        run: the options of the rows: their length is `max_seq_length`, and there are `max_eval_pairs` at most.
        most_tokens: the most tokens in a micro-batch, padding included; fewer if their logits would be too many.
        name: the name of the text, for error messages.
    """

    def __init__(self, corpus: TokenizedCorpus, tokenizer, run, most_tokens: int, name: str, ranks: Ranks = ALONE):
        # An evaluation holds all logits of a micro-batch in memory, training does not.
        most_predicted_tokens = LOGITS_AT_ONCE / len(tokenizer)
        _, share_to_predict = run.mlm_probabilities()
        self.run = run
        self.most_tokens = min(most_tokens, int(most_predicted_tokens / share_to_predict))
        self.name = name
        self.ranks = ranks
        once = dataclasses.replace(run, seed=HELD_OUT_SEED, source_weights=[])  # each document once
        self.epoch_pairs = EpochPairs(corpus, once, run.max_seq_length, name)
        self.make_batch = BatchMaker(corpus, tokenizer, run, run.max_seq_length)

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the pairs, one window at a time."""
        return self.epoch_pairs.parts(0, self.run.max_eval_pairs)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for pairs in self.parts():
            yield from batches(self.make_batch, pairs, self.most_tokens, self.ranks)

    def has_pairs(self) -> bool:
        """Whether there is a pair to evaluate on; with a second loss, one with a label."""
        return any(map(len, self._labelled_parts()))

    def first_with_target(self) -> dict[str, torch.Tensor]:
        """
        As `data.batches.first_with_target`, of the pairs to evaluate on; with a second loss, of those with a label.

        Raises:
            UserError: the text has no pair of segments, or no token to predict.
        """
        return first_with_target(self.make_batch, self._labelled_parts(), self.name)

    def one_segment_accuracy(self) -> dict[str, float]:
        """`pairs.one_segment_accuracy`, by its name in metrics.json, to read a model's accuracy beside it."""
        if not self.make_batch.has_labels:
            return {}
        first_window = self.epoch_pairs.window(0, 0)
        accuracy = one_segment_accuracy(self.epoch_pairs.corpus, first_window, self.make_batch.vocab_size)
        return {f"eval_{self.run.objective}_one_segment_accuracy": accuracy}

    def _labelled_parts(self):
        for pairs in self.parts():
            yield pairs[pairs["next_sentence_label"] != NO_LABEL] if self.make_batch.has_labels else pairs


@torch.no_grad()
def held_out_counts(model, batches, device, top_5: bool = False) -> torch.Tensor:
    """
    Losses, correct predictions and counts, summed over the batches of this process.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM`, or a wrapper of one.
        batches: dicts of the model's arguments, with `masked_positions`, `labels` and, for `D2lBertForPreTraining`,
            `next_sentence_label`.
        top_5: whether to count the masked tokens that are among the model's five likeliest, too.

    Returns:
        The sums in the order of `SUMS` (6,), float64, to be added up over all processes. If the batches have no
        `next_sentence_label`, `pair_loss` and `pair_correct` are 0. With `top_5` one more, `TOP_5` (7,).
    """
    was_training = model.training
    model.eval()
    place = "cpu" if torch.device(device).type == "mps" else device  # Apple's GPUs have no float64
    names = [*SUMS, TOP_5] if top_5 else SUMS
    sums = torch.zeros(len(names), dtype=torch.float64, device=place)
    for batch in batches:
        places = {name: _places_of_labels(batch[name]) for name in LABELS if name in batch}
        batch = {name: to_device(tensor, device) for name, tensor in batch.items()}
        places = {name: to_device(tensor, device) for name, tensor in places.items()}
        of_batch = _sums_of(batch, places, model(**batch), top_5)
        sums += torch.stack([of_batch[name].to(place).double() for name in names])
    model.train(was_training)
    return sums


def _places_of_labels(labels):
    """
    The places of the labels that are not -100, of labels (B, P) or (B,) on the CPU: (n,), in the flattened labels.

    Looked for on the CPU: as their number is needed, the CPU would wait for a GPU.
    """
    return (labels.flatten() != -100).nonzero().squeeze(1)


def _sums_of(batch, places, outputs, top_5):
    """
    The entries of `SUMS` of one batch, by their names.

    Args:
        places: `_places_of_labels`, by the names of the labels.
    """
    logits = mlm_logits(outputs)
    found = {}
    found["mlm_loss"], found["mlm_correct"], found["masked_tokens"] = _loss_correct_count(
        logits, batch["labels"], places["labels"]
    )
    if "next_sentence_label" in batch:
        found["pair_loss"], found["pair_correct"], found["examples"] = _loss_correct_count(
            outputs.seq_relationship_logits, batch["next_sentence_label"], places["next_sentence_label"]
        )
    else:
        nothing = torch.zeros_like(found["mlm_loss"])
        found |= {"pair_loss": nothing, "pair_correct": nothing, "examples": count_examples(batch)}
    if top_5:
        scores = logits.flatten(0, -2)[places["labels"]]
        labels = batch["labels"].flatten()[places["labels"]]
        score_of_label = scores.gather(1, labels[:, None])
        found[TOP_5] = ((scores > score_of_label).sum(1) < 5).sum()  # fewer than five tokens have a higher score
    return found


def mlm_logits(outputs):
    """The logits of the MLM head: a model with a second head calls them `prediction_logits`."""
    return outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits


def _loss_correct_count(logits, labels, places):
    """The summed loss, the number of correct predictions, and the number of labels, of the labels at these places."""
    logits = logits.flatten(0, -2)[places].float()
    labels = labels.flatten()[places]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(-1) == labels).sum()
    return loss, correct, torch.ones_like(labels).sum()


def held_out_metrics(sums: torch.Tensor, task: PairTask | None) -> dict[str, float]:
    """
    The held-out metrics, by their names in metrics.json.

    Args:
        sums: `held_out_counts`, added up over all processes.
        task: the pair task of the run, if there is one.

    Returns:
        `eval_mlm_loss` (nats per masked token), `eval_perplexity`, `eval_mlm_accuracy` and `eval_masked_tokens`. With
        the pair task NSP also `eval_nsp_loss` (nats per pair), `eval_nsp_accuracy` and `eval_pairs`, with SOP
        accordingly; without a pair task `eval_sequences`. With seven sums `eval_mlm_top_5_accuracy`, the share of
        masked tokens that are among the five likeliest.
    """
    named = dict(zip([*SUMS, TOP_5], sums.tolist(), strict=False))
    tokens = named["masked_tokens"]
    examples = named["examples"]
    mlm_loss = named["mlm_loss"] / tokens
    metrics = {
        "eval_mlm_loss": mlm_loss,
        "eval_perplexity": math.exp(mlm_loss) if mlm_loss < MAX_LOSS else math.inf,
        "eval_mlm_accuracy": named["mlm_correct"] / tokens,
    }
    if TOP_5 in named:
        metrics["eval_mlm_top_5_accuracy"] = named[TOP_5] / tokens
    if task:
        metrics[f"eval_{task.key}_loss"] = named["pair_loss"] / examples
        metrics[f"eval_{task.key}_accuracy"] = named["pair_correct"] / examples
    return {**metrics, "eval_masked_tokens": int(tokens), f"eval_{unit(task)}": int(examples)}
