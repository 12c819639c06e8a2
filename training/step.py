"""One optimizer step, with the same gradient for any number of processes and any micro-batch size."""

import math

import torch
from accelerate import Accelerator

from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.training import distributed
from d2l_bert.training.meter import StepStats


def train_step(
    accelerator: Accelerator, model, optimizers, micro_batches, learning_rate: float, max_grad_norm: float
) -> StepStats:
    """
    Train on one batch; skip the update of the weights if the loss or the gradient is not finite.

    Each loss is a sum over the whole batch of all processes, divided once by the batch's count, so that the gradient
    does not depend on how the batch is split.

    Args:
        model: a `D2lBertForPreTraining`, or, for micro-batches without `next_sentence_label`, a `D2lBertForMaskedLM`;
            as `Accelerator.prepare` returned it.
        optimizers: as `Accelerator.prepare` returned them.
        micro_batches: this process's share of the batch, as dicts of the model's arguments.

    Returns:
        The losses, the gradient norm and the counts of the whole batch, summed over all processes.
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
        with distributed.defer_gradient_sync(accelerator, model, number == len(micro_batches)):
            with accelerator.autocast():
                outputs = model(**batch, **divisors, skip_logits=not distributed.is_sharded(model))
            # DDP and FSDP2 average gradients over the processes; the factor turns the average into the sum.
            accelerator.backward(outputs.loss * accelerator.num_processes)
        pair_loss = outputs.get("nsp_loss", torch.zeros_like(outputs.loss))
        losses += torch.stack([outputs.get("mlm_loss", outputs.loss), pair_loss]).detach()
    norm = distributed.full_tensor(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm))
    # Reduced over all processes, so that every process skips the same steps.
    step_stats = torch.cat([accelerator.reduce(losses, "sum"), norm[None].to(device), counts]).tolist()
    is_finite = all(map(math.isfinite, step_stats[:3]))
    for optimizer in optimizers:
        # The scaler of fp16 skips a gradient that is not finite by itself, and must see it to lower its scale.
        if is_finite or (accelerator.scaler and not math.isfinite(step_stats[2])):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        elif accelerator.scaler:  # a loss alone is not finite: the scaler would take the step
            accelerator.scaler.update()
        optimizer.zero_grad()
    return StepStats(*step_stats, skipped=float(not is_finite))


def counts_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Counts of a batch, as `StepStats` has them, of shape (5,): masked tokens to squared lengths."""
    real = batch["attention_mask"]
    if "sequence_ids" in batch:
        ids = batch["sequence_ids"]
        lengths = torch.stack([(ids == number).sum(1) for number in range(1, int(ids.max()) + 1)])
    else:
        lengths = real.sum(1)
    masked_tokens, computed = (batch["labels"] != -100).sum(), torch.tensor(real.numel())
    counts = [masked_tokens, count_examples(batch), real.sum(), computed, (lengths**2).sum()]
    return torch.stack([count.float() for count in counts])


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a step's dropout masks. The seed follows from the step, so that a checkpoint needs no RNG state."""
    return int(fingerprint(seed, step, rank), 16) % 2**63


def count_examples(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    The number of pairs in a batch; of sequences if the batch has no `next_sentence_label`; padding rows do not count.

    Args:
        batch: the model's arguments; its rows (B, T) may be packed.
    """
    if "next_sentence_label" in batch:
        return (batch["next_sentence_label"] != -100).sum()
    in_row = batch["sequence_ids"].amax(1) if "sequence_ids" in batch else 1  # (B,)
    return (in_row * (batch["labels"] != -100).any(1)).sum()
