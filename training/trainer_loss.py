"""The loss of both pretraining heads under Transformers' own `Trainer`."""

import functools

import torch

from d2l_bert.errors import UserError


class PretrainingLoss:
    """
    `compute_loss_func` that makes `Trainer` train `D2lBertForPreTraining` with one gradient, however a step is split:

        trainer = Trainer(model=model, args=args, train_dataset=pairs, data_collator=collator)
        trainer.compute_loss_func = PretrainingLoss(trainer)

    A step's loss is the sum of its token losses divided by its predicted tokens, plus the sum of its pair losses
    divided by its pairs. `Trainer` counts the tokens (`labels`). It does not count the pairs, and hands a loss
    function one micro-batch at a time, so this one counts them where `Trainer` fetches the micro-batches of a step.

    The model computes both losses, in training at the labelled tokens alone. `Trainer` takes `labels` out of a batch
    that has a loss function, so this one wraps `Trainer.compute_loss` to give them to the model all the same.

    Args:
        trainer: its batches hold `labels` and `next_sentence_label`.

    Raises:
        UserError: `trainer` spreads one process over several GPUs (`DataParallel`), which splits a batch unseen.
    """

    def __init__(self, trainer):
        if trainer.args.n_gpu > 1:
            raise UserError(
                "one process uses several GPUs (DataParallel); start one each: torchrun, accelerate launch"
            )
        self.trainer = trainer
        self.fetch = trainer.get_batch_samples
        trainer.get_batch_samples = self.fetch_and_count
        self.compute = trainer.compute_loss
        trainer.compute_loss = self.compute_with_labels

    def fetch_and_count(self, epoch_iterator, num_batches, device):
        """`Trainer.get_batch_samples`, with the step's number of pairs in each batch as the model's argument."""
        batches, num_items = self.fetch(epoch_iterator, num_batches, device)
        for batch in batches:
            for name in ("labels", "next_sentence_label"):
                if name not in batch:
                    raise UserError(f"PretrainingLoss needs {name} in every batch, which has {', '.join(batch)}")
        pairs = sum((batch["next_sentence_label"] != -100).sum() for batch in batches)
        if self.trainer.args.average_tokens_across_devices and self.trainer.args.world_size > 1:
            pairs = self.trainer.accelerator.gather(torch.as_tensor(pairs, device=device)).sum()
        pairs = torch.as_tensor(pairs).clamp(min=1)  # a step without a pair adds nothing
        return [{**batch, "num_pairs_in_batch": pairs} for batch in batches], num_items

    def compute_with_labels(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """`Trainer.compute_loss`, of a model that is given the labels and their number."""
        model = functools.partial(model, labels=inputs["labels"], num_items_in_batch=num_items_in_batch)
        return self.compute(model, inputs, return_outputs, num_items_in_batch)

    def __call__(self, outputs, labels, num_items_in_batch=None):
        """The loss of one micro-batch, a share of the step's."""
        return outputs.loss
