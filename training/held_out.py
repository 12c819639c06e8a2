"""Evaluates a model on held-out pairs: losses and accuracies."""

import math

import torch
from torch.nn import functional as F

from d2l_bert.pair_tasks import PairTask, unit


MAX_LOSS = 700  # nats; the perplexity of a higher loss overflows a float

SUMS = ("mlm_loss", "mlm_correct", "masked_tokens", "pair_loss", "pair_correct", "examples")


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
        `next_sentence_label`, `pair_loss` and `pair_correct` are 0. With `top_5` one more, the count of those masked
        tokens (7,).
    """
    was_training = model.training
    model.eval()
    place = "cpu" if torch.device(device).type == "mps" else device  # Apple's GPUs have no float64
    sums = torch.zeros(len(SUMS) + top_5, dtype=torch.float64, device=place)
    for batch in batches:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        outputs = model(**batch)
        logits = outputs.get("prediction_logits", outputs.get("logits"))
        batch_sums = [*_loss_correct_count(logits, batch["labels"])]
        if "next_sentence_label" in batch:
            batch_sums += _loss_correct_count(outputs.seq_relationship_logits, batch["next_sentence_label"])
        else:
            batch_sums += [*sums.new_zeros(2), count_examples(batch)]
        if top_5:
            is_labelled = batch["labels"] != -100
            scores, labels = logits[is_labelled], batch["labels"][is_labelled]
            better = (scores > scores.gather(1, labels[:, None])).sum(1)  # tokens with a higher score than the label's
            batch_sums.append((better < 5).sum())
        sums += torch.stack([value.to(place).double() for value in batch_sums])
    model.train(was_training)
    return sums


def _loss_correct_count(logits, labels):
    """The summed loss, the number of correct predictions, and the number of labels that are not -100."""
    is_labelled = labels != -100
    logits, labels = logits[is_labelled].float(), labels[is_labelled]
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(-1) == labels).sum(), is_labelled.sum()


def count_examples(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    The number of pairs in a batch; of sequences if the batch has no `next_sentence_label`.

    Padding rows do not count, nor do rows of sequences without a token to predict.

    Args:
        batch: the model's arguments; its rows (B, T) may be packed.
    """
    if "next_sentence_label" in batch:
        return (batch["next_sentence_label"] != -100).sum()
    in_row = batch["sequence_ids"].amax(1) if "sequence_ids" in batch else 1  # (B,)
    return (in_row * (batch["labels"] != -100).any(1)).sum()


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
    mlm_loss, mlm_correct, tokens, pair_loss, pair_correct, examples, *in_top_5 = sums.tolist()
    metrics = {
        "eval_mlm_loss": mlm_loss / tokens,
        "eval_perplexity": math.exp(loss) if (loss := mlm_loss / tokens) < MAX_LOSS else math.inf,
        "eval_mlm_accuracy": mlm_correct / tokens,
    }
    if in_top_5:
        metrics["eval_mlm_top_5_accuracy"] = in_top_5[0] / tokens
    if task:
        metrics[f"eval_{task.key}_loss"] = pair_loss / examples
        metrics[f"eval_{task.key}_accuracy"] = pair_correct / examples
    return {**metrics, "eval_masked_tokens": int(tokens), f"eval_{unit(task)}": int(examples)}
