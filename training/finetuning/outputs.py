"""A model's outputs for the features of a split, in batches of rows of similar length; the figures of outputs."""

from typing import NamedTuple

import numpy as np
import torch
import transformers
from accelerate import PartialState

from d2l_bert.modeling import conversion
from d2l_bert.training.finetuning.features import Features
from d2l_bert.training.finetuning.rows import Split
from d2l_bert.training.finetuning.tasks import Task
from d2l_bert.training.processes import gathered


class Outputs(NamedTuple):
    """
    What a model gives for N features, in their order.

    Args:
        logits: float32 (N, C) or, with tokens, (N, T, C), where T is that of the longest feature; -100 behind the end
            of a shorter one.
        labels: of the features (N,), (N, C) or (N, T); -100 behind the end, too.
    """

    logits: np.ndarray
    labels: np.ndarray


def make_collator(task: Task, model: transformers.PreTrainedModel, tokenizer):
    """
    The function that makes a padded batch of features.

    Features are padded to a multiple of 8, as GPUs want them, unless the last one is beyond the model's positions.
    """
    multiple = 8 if conversion.longest_input(model, tokenizer) % 8 == 0 else None  # without a limit, too
    return task.collator(tokenizer, pad_to_multiple_of=multiple)


@torch.no_grad()
def outputs_of(
    task: Task, model: transformers.PreTrainedModel, tokenizer, inputs: list[dict], rows_at_once: int
) -> Outputs:
    """
    The outputs of a model, computed in float32 by all processes, which take the batches in turn.

    Rows of similar length make a batch, so that little of it is padding.

    Args:
        inputs: as of `Features`.
        rows_at_once: of a process.

    Returns:
        The outputs for all inputs, in every process.
    """
    state = PartialState()
    collate = make_collator(task, model, tokenizer)
    lengths = np.array([length_of(of_row) for of_row in inputs])
    order = np.argsort(-lengths, kind="stable")  # the longest first: out of memory shows at once
    begins = range(0, len(order), rows_at_once)
    batches = [order[begin : begin + rows_at_once] for begin in begins]
    model = model.to(state.device).eval()
    logits = []
    labels = []
    own_batches = batches[state.process_index :: state.num_processes]
    for numbers in own_batches:
        batch = collate([inputs[number] for number in numbers])
        labels.append(batch.pop("labels").numpy())
        batch = {name: tensor.to(state.device) for name, tensor in batch.items()}
        logits.append(task.logits(model(**batch), batch["attention_mask"]).float().cpu().numpy())
    every_batch = gathered(own_batches)
    return Outputs(_in_order(every_batch, gathered(logits)), _in_order(every_batch, gathered(labels)))


def figures_of(task: Task, split: Split, features: Features, outputs: Outputs) -> dict[str, float]:
    """The mean loss over the labels of a split, in float64, and the task's metrics, of a model in training."""
    logits = torch.from_numpy(outputs.logits).double()
    labels = torch.from_numpy(outputs.labels)
    loss = task.loss(logits, labels) / (labels != -100).sum()
    row_results = task.row_results(split, features, outputs.logits)
    return {"loss": loss.item(), **task.metrics(split, row_results)}


def length_of(inputs: dict) -> int:
    """How many tokens a feature has; of several choices, the longest."""
    ids = inputs["input_ids"]
    if isinstance(ids[0], list):
        return max(len(of_choice) for of_choice in ids)
    return len(ids)


def _in_order(places: list[np.ndarray], batches: list[np.ndarray]) -> np.ndarray:
    """
    The rows of all batches in one array, padded by -100 to the longest.

    Args:
        places: of each batch the numbers of its rows in that array.
    """
    # In the comments: the logits of tokens, whose batches are (B, T of the batch, C).
    longest = np.max([batch.shape[1:] for batch in batches], axis=0).astype(int)  # T of all batches, C
    count = sum(len(batch) for batch in batches)  # N
    rows = np.full((count, *longest), -100, dtype=batches[0].dtype)  # (N, T, C)
    for numbers, batch in zip(places, batches, strict=True):
        filled = tuple(slice(size) for size in batch.shape[1:])  # :T of the batch, :C
        rows[(numbers, *filled)] = batch
    return rows
