"""`PretrainingLoss`: the loss of both pretraining heads under Transformers' `Trainer`."""

import functools

import torch

from d2l_bert.errors import UserError


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
