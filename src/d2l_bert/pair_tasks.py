"""The second losses NSP and SOP: names of metrics and labels, the next-sentence pipeline, and the loss for `Trainer`.

Training names metrics after the task (`nsp_loss`); the log, the curves and the model card find the task by the names.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import TextClassificationPipeline

from d2l_bert.messages import UserError


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """
    A classification of pairs of segments A and B into two classes.

    Args:
        key: the task's part in the names of metrics: `nsp` in `nsp_loss` and `eval_nsp_accuracy`.
        short: the task's abbreviation.
        name: the task's full name.
        claim: the statement about A and B that is true for label 0.
        labels: the names of label 0 and label 1.
        question: what the task asks of a pair.
    """

    key: str
    short: str
    name: str
    claim: str
    labels: tuple[str, str]
    question: str


# Keys are values of the option `objective`. Its value `none` has no task, as in RoBERTa (Liu et al., 2019).
PAIR_TASKS = {
    "nsp": PairTask(  # BERT (Devlin et al., 2018)
        key="nsp",
        short="NSP",
        name="next sentence prediction",
        claim="B follows A",
        labels=("IsNext", "NotNext"),
        question="is B what followed A in the text, or the B of another pair?",
    ),
    "sop": PairTask(  # ALBERT (Lan et al., 2020)
        key="sop",
        short="SOP",
        name="sentence order prediction",
        claim="A comes before B",
        labels=("InOrder", "Swapped"),
        question="does A come before B in the text, or are the two swapped?",
    ),
}


def pair_task(metrics: Iterable[str]) -> PairTask | None:
    """The task whose loss or accuracy is among the names of metrics, such as `eval_nsp_loss`; None without one."""
    names = {name.removeprefix("eval_") for name in metrics}
    for task in PAIR_TASKS.values():
        if f"{task.key}_loss" in names or f"{task.key}_accuracy" in names:
            return task
    return None


def unit(task: PairTask | None) -> str:
    """
    What a training example is called, in names of metrics (`eval_pairs`) and in messages.

    Returns:
        "pairs" (of segments) with a second loss, "sequences" (of one segment) without.
    """
    return "pairs" if task else "sequences"


class NextSentencePredictionPipeline(TextClassificationPipeline):
    """
    Next sentence prediction (section 15.8.5.2), registered with Transformers by `import d2l_bert`.

        follows = pipeline("next-sentence-prediction", model="my-bert")
        follows({"text": "A crane is flying.", "text_pair": "It spreads its wings."})

    The pipeline returns `{"label": ..., "score": ...}`: the more probable label, `IsNext` or `NotNext`, and its
    probability. It returns a list for a list of pairs, and an iterator for a generator of pairs. To use two columns of
    a dataset, wrap them in `transformers.pipelines.pt_utils.KeyPairDataset(dataset, "first", "second")`.

    Args:
        kwargs: those of the tokenizer, such as `truncation=True` to cut a pair that is too long, and those of
            `TextClassificationPipeline`.

    Raises:
        UserError: the model is not a `ForNextSentencePrediction` or gives its two labels one name, a pair lacks one of
            its two texts, or a pair has more tokens than the model has positions.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        labels = self.model.config.id2label
        if set(labels) != {0, 1} or labels[0] == "LABEL_0":  # a stock BERT has no names for its two labels
            self.model.config.id2label = dict(enumerate(PAIR_TASKS["nsp"].labels))
        elif labels[0] == labels[1]:
            raise UserError(f"config.json: id2label has {labels[0]!r:.100} twice; give the two labels two names")

    def check_model_type(self, supported_models):
        """Refuse a model without the head; the `supported_models` are those of text classification."""
        name = type(self.model).__name__
        if not name.endswith("ForNextSentencePrediction"):
            raise UserError(f"next-sentence-prediction needs a ForNextSentencePrediction model, got {name}")

    def preprocess(self, inputs, **tokenizer_kwargs):
        pair = inputs if isinstance(inputs, dict) else {}
        first = pair.get("text")
        second = pair.get("text_pair")
        if not isinstance(first, str) or not isinstance(second, str):
            raise UserError(f'a pair is {{"text": first, "text_pair": second}}, two strings; got {inputs!r:.80}')
        encoded = self.tokenizer(first, second, return_tensors="pt", **tokenizer_kwargs)
        length = encoded["input_ids"].shape[1]
        limit = self.model.config.max_position_embeddings
        if length > limit:
            raise UserError(
                f"{first[:40]!r}...: {length} tokens, and the model has {limit} positions; shorten it, or give "
                f"truncation=True, max_length={limit}"
            )
        return encoded


class PretrainingLoss:
    """
    The `compute_loss_func` with which `Trainer` trains `D2lBertForPreTraining`.

    The gradient of a step does not depend on how the step is split into micro-batches:

        trainer = Trainer(model=model, args=args, train_dataset=pairs, data_collator=collator)
        trainer.compute_loss_func = PretrainingLoss(trainer)

    The loss of a step is the sum of the token losses divided by the number of predicted tokens, plus the sum of the
    pair losses divided by the number of pairs. `Trainer` counts the predicted tokens of a step (`labels`) but not the
    pairs, and calls a loss function with one micro-batch at a time. So this class wraps `Trainer.get_batch_samples`,
    which fetches all micro-batches of a step, and counts the pairs there.

    The model computes both losses; in training mode, the MLM loss at the labelled tokens only. But `Trainer` removes
    `labels` from the batch if a loss function is set. So this class also wraps `Trainer.compute_loss`, to pass the
    labels to the model.

    Args:
        trainer: a `Trainer` whose batches have `labels` and `next_sentence_label`.

    Raises:
        UserError: `trainer` uses several GPUs in one process (`DataParallel`), which splits batches after the count.
    """

    def __init__(self, trainer):
        if trainer.args.n_gpu > 1:
            raise UserError(
                "this process uses several GPUs (DataParallel); start one process for each GPU, with torchrun or "
                "accelerate launch"
            )
        self.trainer = trainer
        self.original_get_batch_samples = trainer.get_batch_samples
        trainer.get_batch_samples = self.get_batch_samples
        self.original_compute_loss = trainer.compute_loss
        trainer.compute_loss = self.compute_loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """
        As `Trainer.get_batch_samples`; adds the number of pairs in the step to each batch (`num_pairs_in_batch`).

        Raises:
            UserError: a batch has no `labels` or no `next_sentence_label`.
        """
        batches, num_items = self.original_get_batch_samples(epoch_iterator, num_batches, device)
        for batch in batches:
            for name in ("labels", "next_sentence_label"):
                if name not in batch:
                    raise UserError(
                        f"PretrainingLoss needs {name} in every batch, and a batch has only {', '.join(batch)}; add "
                        f"{name} in the data collator"
                    )
        pairs = sum((batch["next_sentence_label"] != -100).sum() for batch in batches)
        if self.trainer.args.average_tokens_across_devices and self.trainer.args.world_size > 1:
            pairs = self.trainer.accelerator.gather(torch.as_tensor(pairs, device=device)).sum()
        pairs = torch.as_tensor(pairs).clamp(min=1)  # in a step without pairs, the pair loss is 0 / 1
        return [{**batch, "num_pairs_in_batch": pairs} for batch in batches], num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As `Trainer.compute_loss`; the model gets the labels and the number of predicted tokens in the step."""
        model = functools.partial(model, labels=inputs["labels"], num_items_in_batch=num_items_in_batch)
        return self.original_compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def __call__(self, outputs, labels, num_items_in_batch=None):
        """The loss of one micro-batch: its part of the sum that is the step's loss. `Trainer` calls this."""
        return outputs.loss
