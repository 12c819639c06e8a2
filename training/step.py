"""One optimizer step: the same, however many processes and micro-batches it is split over."""

import math

import torch
from accelerate import Accelerator

from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.training import distributed
from d2l_bert.training.meter import StepFigures


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
    counts = accelerator.reduce(torch.stack([counts_of(batch) for batch in micro_batches]).sum(0).to(device), "sum")
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


def counts_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
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


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a step's dropout masks: with it nothing random needs to be kept in a checkpoint."""
    return int(fingerprint(seed, step, rank), 16) % 2**63


def count_examples(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    Pairs in a batch, or, where there is no label of pairs, sequences; 0 for a batch that counts for nothing.

    Args:
        batch: the model's arguments; its rows (B, T) may be packed.
    """
    if "next_sentence_label" in batch:
        return (batch["next_sentence_label"] != -100).sum()
    in_row = batch["sequence_ids"].amax(1) if "sequence_ids" in batch else 1  # (B,)
    return (in_row * (batch["labels"] != -100).any(1)).sum()
