"""What learns: model, optimizers and the average of the weights, on one process or on many."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import nn

from d2l_bert.errors import UserError
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.training import checkpoint, distributed
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluate import held_out_counts, held_out_figures
from d2l_bert.training.meter import StepFigures
from d2l_bert.training.optim import MovingAverage, make_optimizers
from d2l_bert.training.step import step_seed, train_step


class Learner:
    """
    Model, optimizers, the moving average of the weights, and Accelerate's engine, which trains them.

    All processes must call its methods, at the same point.

    Args:
        model: a `D2lBertForPreTraining`, or a `D2lBertForMaskedLM` where there is no loss of pairs; on FSDP2 its
            parameters become shards.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, run: PretrainConfig):
        self.accelerator, self.model, self.run = accelerator, model, run
        betas = (run.adam_beta1, run.adam_beta2)
        self.optimizers = make_optimizers(
            model, run.optim, run.learning_rate, run.weight_decay, betas, run.adam_epsilon
        )
        # The model and the optimizers as the engine wraps them.
        self.engine_model, *self.engine_optimizers = accelerator.prepare(model, *self.optimizers)
        self.average = MovingAverage(model, run.ema_decay) if run.ema_decay else None
        # Once and for all: in the middle of things FSDP shows others under these names.
        self.parameters = dict(model.named_parameters())

    # -----------------------------------------------------------------------------------------------------------------
    # Learn

    def step(self, number: int, micro_batches: Iterable[dict], learning_rate: float) -> StepFigures:
        """Optimizer step `number`, counted from 1."""
        torch.manual_seed(step_seed(self.run.seed, number, self.accelerator.process_index))
        figures = self._step(micro_batches, learning_rate)
        if self.average and not figures.skipped:
            self.average.update(number)
        return figures

    def try_step(self, micro_batches: Iterable[dict]) -> None:
        """An optimizer step at a rate of 0, which leaves the weights as they are; `forget_moments` undoes the rest."""
        self._step(micro_batches, 0.0)

    def _step(self, micro_batches, learning_rate):
        engine = (self.accelerator, self.engine_model, self.engine_optimizers)
        return train_step(*engine, micro_batches, learning_rate, self.run.max_grad_norm)

    def try_gradient(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """
        The gradient of one micro-batch in this process alone, added to what is there; returns the loss ().

        Without FSDP2 no other process takes part, so that one may fail here alone.
        """
        micro_batch = {name: tensor.to(self.accelerator.device) for name, tensor in micro_batch.items()}
        model = self.engine_model
        with distributed.summed_later(self.accelerator, model, is_last=False):
            with self.accelerator.autocast():
                loss = model(**micro_batch, skip_logits=not distributed.is_sharded(model)).loss
            self.accelerator.backward(loss)
        return loss

    def forget_gradient(self) -> None:
        """Leave no trace of `try_gradient`."""
        self.engine_model.zero_grad()

    def forget_moments(self) -> None:
        """Leave no trace of `try_step`."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    # -----------------------------------------------------------------------------------------------------------------
    # Evaluate

    def evaluate(self, batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, float] | None:
        """The held-out figures, with the moving average of the weights if there is one; None without a batch.

        Args:
            batches: this process's; each process has as many.
        """
        with self.accelerator.autocast(), self.average.in_place() if self.average else contextlib.nullcontext():
            counts = held_out_counts(self.engine_model, batches, self.accelerator.device)
            distributed.reshard(self.engine_model)
        counts = self.accelerator.reduce(counts, "sum")
        return held_out_figures(counts, PAIR_TASKS.get(self.run.objective)) if counts.any() else None

    # -----------------------------------------------------------------------------------------------------------------
    # Save and load

    def save(self, folder: Path, step: int, tokenizer, state: dict) -> Path:
        """
        Write `folder/checkpoint-<step>`, and drop all but the last `save_total_limit`; returns it. The main process
        writes.

        Args:
            tokenizer: saved with the model.
            state: what else to keep, as JSON.

        Raises:
            UserError: it cannot be written, the disk is full perhaps. What was saved before is still there.
        """
        scaler = self.accelerator.scaler
        state = {**state, "step": step, "scaler": scaler.state_dict() if scaler else None}
        tensors = {checkpoint.OPTIMIZER_FILE: self.moments(), checkpoint.AVERAGE_FILE: self.averages()}
        model, path = self.plain(), folder / f"checkpoint-{step}"
        what = (path, model, tokenizer, tensors, state, self.run.save_total_limit)
        return distributed.on_main(self.accelerator, checkpoint.write_checkpoint, *what)

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """
        Take over what a checkpoint holds. The main process reads it, for all.

        Raises:
            UserError: it is of another model.
        """
        self._fill(saved.path / checkpoint.WEIGHTS_FILE, self.parameters)
        self.model.tie_weights()
        moments = {}
        self.forget_moments()
        for full_name, shape in self._shapes(saved.path / checkpoint.OPTIMIZER_FILE).items():
            name, _, key = full_name.rpartition("|")
            if name in self.parameters:
                # Adam's count of steps is a number beside its moments, which have the parameter's shape.
                like = self.parameters[name]
                has_its_shape = shape == list(like.shape)
                moment = torch.zeros_like(like) if has_its_shape else torch.zeros(shape, device=like.device)
                moments[full_name] = self._state_of(like)[key] = moment.detach()
        self._fill(saved.path / checkpoint.OPTIMIZER_FILE, moments)
        if self.average:
            self._fill(saved.path / checkpoint.AVERAGE_FILE, self.average.tensors())
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(saved.state["scaler"])

    def plain(self, averaged: bool = False) -> nn.Module | None:
        """The model in one piece, on the CPU, in the main process; None in others.

        Args:
            averaged: with the moving average of the weights, if there is one.
        """
        weights = self.averages() if averaged and self.average else self._gather(self.parameters.items())
        return distributed.plain_model(self.model, weights) if self.accelerator.is_main_process else None

    def averages(self) -> dict[str, torch.Tensor]:
        """The moving average of every parameter, whole, in the main process; as `plain`."""
        return self._gather(self.average.tensors().items() if self.average else ())

    def moments(self) -> dict[str, torch.Tensor]:
        """What the optimizers know of each parameter, as `<parameter>|<key>`; as `plain`."""
        return self._gather(
            (f"{name}|{key}", tensor)
            for name, parameter in self.parameters.items()
            for key, tensor in self._state_of(parameter).items()
        )

    def _state_of(self, parameter):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(parameter is other for other in group["params"]):
                    return optimizer.state[parameter]
        raise AssertionError("a parameter without an optimizer")

    def _gather(self, named: Iterable[tuple[str, torch.Tensor]]):
        gathered = {}
        for name, tensor in named:
            tensor = distributed.whole(tensor)
            if self.accelerator.is_main_process:
                gathered[name] = tensor.cpu().contiguous()
        return gathered

    def _shapes(self, path):
        return distributed.on_main(self.accelerator, _read_shapes, path)

    def _fill(self, path, targets):
        found = self._shapes(path)
        other = found.keys() ^ targets.keys() or {n for n in found if found[n] != list(targets[n].shape)}
        if other:
            raise UserError(f"{path}: not of this model ({min(other)}); give a checkpoint of this run")
        reads = self.accelerator.is_main_process
        with safe_open(path, "pt") if reads else contextlib.nullcontext() as file:
            for name, target in targets.items():
                distributed.spread(file.get_tensor(name) if reads else None, target)


def _read_shapes(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}
