"""One optimizer step; model, optimizers and moving average of a run: train, evaluate, save and load, on all ranks."""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import nn

from d2l_bert.errors import UserError
from d2l_bert.folders import short_hash
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training import checkpoint, distributed
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.held_out import SUMS, count_examples, held_out_counts, held_out_metrics
from d2l_bert.training.meter import StepStats
from d2l_bert.training.optim import MovingAverage, make_optimizers


class Learner:
    """
    Model, optimizers and the moving average of the weights of a run.

    Every process must call each method at the same point of the run, `try_gradient` and `clear_gradients` excepted.

    `model` is the model as it was built; `wrapped_model` and `wrapped_optimizers` are what Accelerate made of it and
    of the optimizers, for DDP, FSDP2 and fp16; `full_model()` is a copy on the CPU, with full tensors, for saving.

    Args:
        model: a `D2lBertForPreTraining`, or, with `objective` none, a `D2lBertForMaskedLM`. FSDP2 replaces the model's
            parameters by shards.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, run: PretrainConfig):
        self.accelerator, self.model, self.run = accelerator, model, run
        betas = (run.adam_beta1, run.adam_beta2)
        self.optimizers = make_optimizers(
            model, run.optim, run.learning_rate, run.weight_decay, betas, run.adam_epsilon
        )
        self.wrapped_model, *self.wrapped_optimizers = accelerator.prepare(model, *self.optimizers)
        self.average = MovingAverage(model, run.ema_decay) if run.ema_decay else None
        self.fresh_scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
        # Captured here, by name: FSDP2 swaps parameter objects between forward and backward.
        self.parameters = dict(model.named_parameters())
        self.optimizer_of = {
            name: optimizer
            for name, parameter in self.parameters.items()
            for optimizer in self.optimizers
            if any(parameter is other for group in optimizer.param_groups for other in group["params"])
        }

    # -----------------------------------------------------------------------------------------------------------------
    # Train

    def step(self, number: int, micro_batches: Iterable[dict], learning_rate: float) -> StepStats:
        """
        Train on one batch.

        Args:
            number: the step, counted from 1.
            micro_batches: this process's share of the batch.

        Returns:
            The losses, the gradient norm and the counts of the whole batch, summed over all processes.
        """
        # The seed of dropout follows from the step, so that a checkpoint needs no state of the generator.
        torch.manual_seed(int(short_hash(self.run.seed, number, self.accelerator.process_index), 16) % 2**63)
        step_stats = self.take_step(micro_batches, learning_rate)
        if self.average and not step_stats.skipped:
            self.average.update(number)
        return step_stats

    def take_step(self, micro_batches: Iterable[dict], learning_rate: float = 0.0) -> StepStats:
        """Take an optimizer step; at a rate of 0 only optimizer state changes, which `reset_optimizers` undoes."""
        wrapped = (self.accelerator, self.wrapped_model, self.wrapped_optimizers)
        return train_step(*wrapped, micro_batches, learning_rate, self.run.max_grad_norm)

    def try_gradient(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        Run one micro-batch forward and backward, and add its gradient to the parameters' `.grad` in this process.

        Without FSDP2 there is no communication: one process may call this method, or fail in it, alone.

        Returns:
            The loss, of shape ().
        """
        micro_batch = {name: tensor.to(self.accelerator.device) for name, tensor in micro_batch.items()}
        model = self.wrapped_model
        with distributed.defer_gradient_sync(self.accelerator, model, is_last=False):
            with self.accelerator.autocast():
                # FSDP2 gathers a shard of the decoder only in its forward pass, which skipped logits leave out.
                loss = model(**micro_batch, skip_logits=not self.accelerator.is_fsdp2).loss
            self.accelerator.backward(loss)
        return loss

    def reset_optimizers(self) -> None:
        """Optimizer state and fp16's scaler as they were before the first `take_step` or `try_gradient`."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(self.fresh_scaler)

    # -----------------------------------------------------------------------------------------------------------------
    # Evaluate

    def evaluate(self, batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, float] | None:
        """
        Losses and accuracies on held-out batches, with the moving average of the weights if the run keeps one.

        Args:
            batches: this process's held-out batches; every process must have the same number.

        Returns:
            Results over the batches of all processes, by their names in `metrics.json`; None without a token to
            predict, as where a signal has stopped the run.
        """
        with self.accelerator.autocast(), self.average.in_place() if self.average else contextlib.nullcontext():
            counts = held_out_counts(self.wrapped_model, batches, self.accelerator.device)
            distributed.reshard(self.wrapped_model)
        counts = self.accelerator.reduce(counts, "sum")
        is_measured = counts[SUMS.index("masked_tokens")] > 0
        return held_out_metrics(counts, PAIR_TASKS.get(self.run.objective)) if is_measured else None

    # -----------------------------------------------------------------------------------------------------------------
    # Save and load

    def save(self, folder: Path, step: int, tokenizer, state: dict) -> Path:
        """
        Write `folder/checkpoint-<step>` in the main process, and delete all but the last `save_total_limit` of them.

        Args:
            tokenizer: saved in the checkpoint.
            state: further entries of the checkpoint's JSON file.

        Returns:
            The path of the new checkpoint.

        Raises:
            UserError: the checkpoint cannot be written, for example because the disk is full. Earlier checkpoints
                are unchanged.
        """
        scaler = self.accelerator.scaler
        state = {**state, "step": step, "scaler": scaler.state_dict() if scaler else None}
        moments = self._gather(
            (f"{name}|{key}", tensor)
            for name, parameter in self.parameters.items()
            for key, tensor in self.optimizer_of[name].state[parameter].items()
        )
        averages = self._gather(self.average.averages.items() if self.average else ())
        tensors = {checkpoint.OPTIMIZER_FILE: moments, checkpoint.AVERAGE_FILE: averages}
        model, path = self.full_model(), folder / f"checkpoint-{step}"
        arguments = (path, model, tokenizer, tensors, state, self.run.save_total_limit)
        return distributed.on_main(self.accelerator, checkpoint.write_checkpoint, *arguments)

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """
        Load weights, optimizer state and the moving average from a checkpoint.

        The main process reads the files and sends the tensors to the other processes.

        Raises:
            UserError: the checkpoint's tensors have other names or shapes than this model's.
        """
        self._read_into(saved.path / checkpoint.WEIGHTS_FILE, self.parameters)
        self.model.tie_weights()
        moments = {}
        self.reset_optimizers()
        for full_name, shape in self._shapes(saved.path / checkpoint.OPTIMIZER_FILE).items():
            name, _, key = full_name.rpartition("|")
            if name in self.parameters:
                # Moments have the shape of their parameter, and its shards. Adam's step count has the shape ().
                parameter = self.parameters[name]
                is_moment = shape == list(parameter.shape)
                moment = torch.zeros_like(parameter) if is_moment else torch.zeros(shape, device=parameter.device)
                moments[full_name] = self.optimizer_of[name].state[parameter][key] = moment.detach()
        self._read_into(saved.path / checkpoint.OPTIMIZER_FILE, moments)
        if self.average:
            self._read_into(saved.path / checkpoint.AVERAGE_FILE, self.average.averages)
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(saved.state["scaler"])

    def full_model(self, averaged: bool = False) -> nn.Module | None:
        """
        A copy of the model on the CPU, with full tensors, in the main process; None in the other processes.

        Args:
            averaged: take the moving average of the weights instead of the weights, if the run keeps one.
        """
        weights = self._gather((self.average.averages if averaged and self.average else self.parameters).items())
        return distributed.unsharded_model(self.model, weights) if self.accelerator.is_main_process else None

    def _gather(self, named: Iterable[tuple[str, torch.Tensor]]):
        """Each tensor as a full one on the CPU, by its name; empty outside the main process."""
        gathered = {}
        for name, tensor in named:
            tensor = distributed.full_tensor(tensor)
            if self.accelerator.is_main_process:
                gathered[name] = tensor.cpu().contiguous()
        return gathered

    def _shapes(self, path):
        """The shape of each tensor in a file, by its name, in every process."""

        def read():
            with safe_open(path, "pt") as file:
                return {name: file.get_slice(name).get_shape() for name in file.keys()}

        return distributed.on_main(self.accelerator, read)

    def _read_into(self, path, targets):
        """Copy the tensors of a file into the targets of the same names, in every process."""
        shapes = self._shapes(path)
        different = shapes.keys() ^ targets.keys() or {n for n in shapes if shapes[n] != list(targets[n].shape)}
        if different:
            raise UserError(f"{path}: not of this model ({min(different)}); give a checkpoint of this run")
        is_main = self.accelerator.is_main_process
        with safe_open(path, "pt") if is_main else contextlib.nullcontext() as file:
            for name, target in targets.items():
                distributed.scatter(file.get_tensor(name) if is_main else None, target)


# ---------------------------------------------------------------------------------------------------------------------


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
    # A step of nothing but `[UNK]` has no token to predict, and one without a pair has no label: a loss of 0 / 1.
    divisors = {"num_items_in_batch": masked_tokens.clamp(min=1)}
    if "next_sentence_label" in micro_batches[0]:
        divisors["num_pairs_in_batch"] = examples.clamp(min=1)
    losses = torch.zeros(2, device=device)
    for number, batch in enumerate(micro_batches, 1):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        with distributed.defer_gradient_sync(accelerator, model, number == len(micro_batches)):
            with accelerator.autocast():
                outputs = model(**batch, **divisors, skip_logits=not accelerator.is_fsdp2)
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
