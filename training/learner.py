"""The model of a run with its optimizers: takes a step, is evaluated, saved and loaded."""

import contextlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from d2l_bert.folders import short_hash
from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training import checkpoint, processes, shards
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import Counts, to_device
from d2l_bert.training.data.steps import Step, on_each
from d2l_bert.training.data.unpadded import VARLEN
from d2l_bert.training.held_out import SUMS, held_out_counts, held_out_metrics
from d2l_bert.training.optimizers import NEVER_NEGATIVE, MovingAverage, keys_of, make_optimizers


class StepStats(NamedTuple):
    """
    The losses and counts of one optimizer step, over all processes.

    Args:
        mlm_loss: nats per masked token.
        pair_loss: nats per pair; 0 if there is no pair task.
        grad_norm: the norm of the gradient before clipping to `max_grad_norm`.
        masked_tokens: tokens to predict.
        examples: pairs, or sequences if there is no pair task.
        tokens: tokens without padding.
        padded_tokens: tokens including padding.
        squared_lengths: the sum of the squared lengths of the sequences; the cost of attention grows with this sum.
        skipped: 1 if the step was skipped because the loss or the gradient was not finite, else 0.
    """

    mlm_loss: float
    pair_loss: float
    grad_norm: float
    masked_tokens: float
    examples: float
    tokens: float
    padded_tokens: float
    squared_lengths: float
    skipped: float


class Learner:
    """
    Model, optimizers and the moving average of the weights of a run.

    Every process must call each method at the same point of the run.

    `model` is as it was built; `wrapped_model` is what Accelerate made of it for DDP and FSDP2, and is what a step
    calls; `full_model()` is a copy on the CPU, with full tensors, for saving.

    Args:
        model: a `D2lBertForPreTraining`, or, with `objective` none, a `D2lBertForMaskedLM`. FSDP2 replaces the model's
            parameters by shards.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, run: PretrainConfig):
        self.accelerator = accelerator
        self.model = model
        self.run = run
        if accelerator.is_fsdp2:
            processes.share_weights(model, accelerator)  # only the main process may have read them
            shards.shard(model, accelerator.state.fsdp_plugin)
            self.wrapped_model = model
        else:
            self.wrapped_model = accelerator.prepare(model)
        # After FSDP2 has replaced the parameters. Without Accelerate's wrappers: see `_update_weights`.
        self.optimizers = make_optimizers(
            model, run.optim, run.learning_rate, run.weight_decay, (run.adam_beta1, run.adam_beta2), run.adam_epsilon
        )
        self.average = MovingAverage(model, run.ema_decay) if run.ema_decay else None
        self.fresh_scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
        # Captured here, by name: FSDP2 swaps parameter objects between forward and backward.
        self.parameters = dict(model.named_parameters())

    # -----------------------------------------------------------------------------------------------------------------
    # Train

    def train_on(self, step: Step, number: int, learning_rate: float) -> StepStats:
        """
        Take a step of the run: draw its dropout, train on its batch, and add the weights to their average.

        Args:
            step: this process's share of the batch.
            number: of the step, counted from 1.

        Returns:
            The losses, the gradient norm and the counts of the whole batch, summed over all processes.
        """
        # The seed of dropout follows from the step, so that a checkpoint needs no state of the generator.
        seed = short_hash(self.run.seed, number, self.accelerator.process_index)
        torch.manual_seed(int(seed, 16) % 2**63)
        stats = self.update(step.micro_batches, step.counts, learning_rate)
        if self.average and not stats.skipped:
            self.average.update(number)
        return stats

    def update(self, micro_batches: list[dict], counts: Counts, learning_rate: float) -> StepStats:
        """
        Compute loss and gradient of a batch, and update the weights; not if the loss or the gradient is not finite.

        Each loss is a sum over the whole batch of all processes, divided once by the batch's count, so that the
        gradient does not depend on how the batch is split.

        Args:
            micro_batches: this process's share of the batch, as dicts of the model's arguments.
            counts: of these micro-batches (`Step.counts`).
            learning_rate: with 0, for a step that is only timed, no weight changes: the optimizers' state does, which
                `reset_optimizers` undoes.
        """
        accelerator = self.accelerator
        model = self.wrapped_model
        device = accelerator.device
        total_counts = Counts(*accelerator.reduce(counts.to_tensor(device), "sum"))
        # A step of nothing but `[UNK]` has no token to predict, and one without a labelled pair no label: its loss is
        # then 0 / 1, not 0 / 0.
        divisors = {"num_items_in_batch": total_counts.masked_tokens.clamp(min=1)}
        if "next_sentence_label" in micro_batches[0]:
            divisors["num_pairs_in_batch"] = total_counts.examples.clamp(min=1)
        losses = torch.zeros(2, device=device)
        for number, batch in enumerate(micro_batches, 1):
            batch = on_each(lambda tensor: to_device(tensor, device), batch)
            # On DDP, gradients are summed over the processes after the last micro-batch only. Not on FSDP2, where
            # every process would then hold the gradients of the whole model.
            is_synced = number == len(micro_batches) or accelerator.is_fsdp2
            with contextlib.nullcontext() if is_synced else accelerator.no_sync(model):
                with accelerator.autocast():
                    outputs = model(**batch, **divisors, skip_logits=True)
                # DDP and FSDP2 average gradients over the processes; the factor turns the average into the sum.
                accelerator.backward(outputs.loss * accelerator.num_processes)
            # A model with the MLM head alone has only `loss`. With a second head, `nsp_loss` is that of NSP or SOP.
            mlm_loss = outputs.get("mlm_loss", outputs.loss)
            pair_loss = outputs.get("nsp_loss", torch.zeros_like(outputs.loss))
            losses += torch.stack([mlm_loss, pair_loss]).detach()
        accelerator.unscale_gradients(self.optimizers)  # with fp16's scaler
        norm = shards.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), self.run.max_grad_norm))
        # Reduced over all processes, so that every process skips the same steps.
        mlm_loss, pair_loss = accelerator.reduce(losses, "sum")
        # In the order of `StepStats`. All at once, as each number that is read from a GPU makes the CPU wait for it.
        figures = torch.stack([mlm_loss, pair_loss, norm.to(device), *total_counts]).tolist()
        losses_and_norm = figures[:3]
        is_finite = all(math.isfinite(figure) for figure in losses_and_norm)
        self._update_weights(learning_rate, is_finite)
        return StepStats(*figures, skipped=float(not is_finite))

    def _update_weights(self, learning_rate, is_finite):
        """
        Let all optimizers take a step if loss and gradient are finite, or else none; then clear the gradients.

        The scaler of fp16 has unscaled the gradients of all optimizers before they were clipped. Its own `step`, which
        Accelerate's optimizers call, would decide for each optimizer alone, and wait for the GPU to do so; and
        Accelerate would update the scale after each. Here it is updated once: it falls if any gradient is infinite.
        """
        if is_finite:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        if self.accelerator.scaler:
            self.accelerator.scaler.update()
        # DDP's gradients lie in its buckets, where the next step adds to zeros. If they were None, the next step would
        # keep its gradients beside the buckets until its last micro-batch.
        is_ddp = isinstance(self.wrapped_model, nn.parallel.DistributedDataParallel)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not is_ddp)

    def reset_optimizers(self) -> None:
        """Optimizer state and fp16's scaler as they were before the first `update`."""
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
        if self.run.attn_implementation == VARLEN:  # held-out rows have padding
            self.model.set_attn_implementation("sdpa")
        averaged_weights = self.average.in_place() if self.average else contextlib.nullcontext()
        with self.accelerator.autocast(), averaged_weights:
            sums = held_out_counts(self.wrapped_model, batches, self.accelerator.device)
            shards.reshard(self.wrapped_model)
        if self.run.attn_implementation == VARLEN:
            self.model.set_attn_implementation(VARLEN)
        sums = self.accelerator.reduce(sums, "sum")
        masked_tokens = sums[SUMS.index("masked_tokens")]
        if masked_tokens == 0:
            return None
        return held_out_metrics(sums, PAIR_TASKS.get(self.run.objective))

    # -----------------------------------------------------------------------------------------------------------------
    # Save and load

    def full_model(self, averaged: bool = False) -> nn.Module | None:
        """
        A copy of the model on the CPU, with full tensors, in the main process; None in the other processes.

        Args:
            averaged: take the moving average of the weights instead of the weights, if the run keeps one.
        """
        chosen = self.average.averages if averaged and self.average else self.parameters
        weights = self._gather(chosen)
        return shards.unsharded_model(self.model, weights) if self.accelerator.is_main_process else None

    def tensors_beside_model(self) -> dict[str, dict[str, torch.Tensor]]:
        """
        What a checkpoint keeps beside the model: for the name of each file, its tensors by their names.

        These are the tensors of the optimizers, by `moment_name`, and the average of the weights, by the names of the
        parameters, if there is one: full tensors on the CPU in the main process, no tensors in the others.
        """
        averages = self.average.averages if self.average else {}
        return {
            checkpoint.OPTIMIZER_FILE: self._gather(self._moments()),
            checkpoint.AVERAGE_FILE: self._gather(averages),
        }

    def bytes_in_checkpoint(self) -> int:
        """The size of a checkpoint's tensors: the weights, and those of `tensors_beside_model`."""
        tensors = [*self.parameters.values(), *self._moments().values()]
        if self.average:
            tensors += self.average.averages.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Load weights, optimizer state and the moving average from a checkpoint, whose identity is this run's."""
        parameter_names = {*self.parameters}
        for name, tensor in self._read(saved.path / checkpoint.WEIGHTS_FILE, parameter_names):
            self.parameters[name].copy_(tensor)
        self.model.tie_weights()
        optimizer_of = self._optimizer_of_parameters()
        moment_names = set()
        for name, parameter in self.parameters.items():
            moment_names |= {moment_name(name, key) for key in keys_of(optimizer_of[parameter])}
        for name_of_moment, tensor in self._read(saved.path / checkpoint.OPTIMIZER_FILE, moment_names):
            name, key = parts_of_moment_name(name_of_moment)
            parameter = self.parameters[name]
            optimizer_of[parameter].state[parameter][key] = tensor.to(parameter.device)  # the CPU if FSDP2 offloads
        if self.average is not None:
            for name, tensor in self._read(saved.path / checkpoint.AVERAGE_FILE, parameter_names):
                self.average.averages[name].copy_(tensor)
        if self.accelerator.scaler:
            what = f"{saved.path / checkpoint.STATE_FILE}: the scaler of fp16 cannot be read"
            with explained(what, "give another checkpoint-<step> folder", *READ_ERRORS, TypeError, RuntimeError):
                self.accelerator.scaler.load_state_dict(saved.state["scaler"])

    def _optimizer_of_parameters(self):
        """The optimizer of each parameter."""
        found = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[parameter] = optimizer
        return found

    def _moments(self):
        """The tensors of the optimizers, by `moment_name`; none before the first step."""
        optimizer_of = self._optimizer_of_parameters()
        found = {}
        for name, parameter in self.parameters.items():
            state = optimizer_of[parameter].state.get(parameter, {})  # `get`, as `[]` would make an entry
            for key, tensor in state.items():
                found[moment_name(name, key)] = tensor
        return found

    def _gather(self, named):
        """Each tensor as a full one on the CPU, by its name; empty outside the main process."""
        gathered = {}
        for name, tensor in named.items():
            tensor = shards.full_tensor(tensor)
            if self.accelerator.is_main_process:
                gathered[name] = tensor.cpu().contiguous()
        return gathered

    def _read_whole(self, path, names):
        """
        The full tensors in a file of a checkpoint, by their names.

        Args:
            names: of the tensors that the file must have, no more and no fewer: names of parameters, or of moments.

        Raises:
            UserError: the file is damaged; or a tensor is not one of this run by its name, shape or numbers, or is
                missing.
        """
        way_out = "give another checkpoint-<step> folder"
        if not path.exists():
            raise UserError(f"{path}: is missing; {way_out}")
        with explained(f"{path}: cannot be read", way_out, *READ_ERRORS, SafetensorError):
            tensors = load_file(path)
        for name, tensor in tensors.items():
            place = f"{path}: {name!r:.100}"
            if name not in names:
                raise UserError(f"{place} is no tensor of this model; {way_out}")
            parameter_name, key = parts_of_moment_name(name)
            shape = () if key == "step" else tuple(self.parameters[parameter_name].shape)
            if tensor.shape != shape:
                raise UserError(f"{place} has the shape {tuple(tensor.shape)}, and this run's has {shape}; {way_out}")
            if tensor.dtype != torch.float32:
                raise UserError(f"{place} has numbers of {tensor.dtype}, and a run writes torch.float32; {way_out}")
            if not tensor.isfinite().all():
                raise UserError(f"{place} has numbers that are not finite (NaN or infinity); {way_out}")
            if key in NEVER_NEGATIVE and tensor.numel() and tensor.min() < 0:
                raise UserError(f"{place} has negative numbers, which no run writes there; {way_out}")
        missing = sorted(names - {*tensors})
        if missing:
            raise UserError(f"{path}: {missing[0]} is missing; {way_out}")
        return tensors

    def _read(self, path, names):
        """
        Yield the name of each tensor in a file of a checkpoint, and the tensor, in every process.

        The main process reads the file (`_read_whole`), and sends the tensors to the other processes. A tensor with
        the shape of its parameter is sharded as the parameter is; Adam's step count has the shape ().
        """
        is_main = self.accelerator.is_main_process
        device = self.accelerator.device
        whole = processes.on_main(self._read_whole, path, names, share_result=False) or {}
        # Every process learns what is coming; the tensors themselves follow one at a time.
        shapes = processes.on_main(lambda: {name: (tensor.shape, tensor.dtype) for name, tensor in whole.items()})
        for name, (shape, dtype) in shapes.items():
            parameter_name, _ = parts_of_moment_name(name)
            parameter = self.parameters[parameter_name]
            tensor = whole[name].to(device) if is_main else torch.empty(shape, dtype=dtype, device=device)
            if isinstance(parameter, DTensor) and parameter.shape == shape:
                yield name, distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            else:
                yield name, broadcast(tensor)


def moment_name(parameter_name: str, key: str) -> str:
    """
    The name in a checkpoint of a tensor that an optimizer keeps of a parameter: `pooler.weight|exp_avg`.

    Args:
        key: the optimizer's name for the tensor, one of `keys_of`.
    """
    return f"{parameter_name}|{key}"


def parts_of_moment_name(name: str) -> tuple[str, str]:
    """
    The name of the parameter, and the key: (`pooler.weight`, `exp_avg`) of `pooler.weight|exp_avg`.

    A weight or an average has the name of its parameter alone, and no key: (`pooler.weight`, "") of `pooler.weight`.
    """
    parameter_name, _, key = name.partition("|")
    return parameter_name, key
