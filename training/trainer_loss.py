"""The loss of both pretraining heads under Transformers' own `Trainer`."""

import torch

from d2l_bert.errors import UserError
from d2l_bert.modeling.modeling_d2l_bert import cross_entropy


class PretrainingLoss:
    """
    `compute_loss_func` that makes `Trainer` train `D2lBertForPreTraining` with one gradient, however a step is split:

        trainer = Trainer(model=model, args=args, train_dataset=pairs, data_collator=collator)
        trainer.compute_loss_func = PretrainingLoss(trainer)

    A step's loss is the sum of its token losses divided by its predicted tokens, plus the sum of its pair losses
    divided by its pairs. `Trainer` counts the tokens (`labels`). It does not count the pairs, and hands a loss
    function one micro-batch at a time, so this one counts them where `Trainer` fetches the micro-batches of a step.

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

    def __call__(self, outputs, labels, num_items_in_batch=None):
        """The loss of one micro-batch, a share of the step's."""
        return cross_entropy(outputs.prediction_logits, labels, num_items_in_batch) + outputs.nsp_loss
