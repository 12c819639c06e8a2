"""Our heads under Transformers' Trainer: micro-batches, PretrainingLoss, evaluation."""

import pytest
import torch
from head_models import make_rows, ours, stacked
from transformers import Trainer, TrainerCallback, TrainingArguments

from d2l_bert import PretrainingLoss


pytestmark = pytest.mark.usefixtures("one_thread")


def trained_once(head, rows, batch_size, accumulation, folder, **options):
    """Loss and gradients of one optimizer step on `rows` under Transformers' Trainer."""
    model, gradient = ours(head, **options), {}

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradient.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Catch()])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    if head == "ForPreTraining":
        trainer.compute_loss_func = PretrainingLoss(trainer)
    return trainer.train().training_loss, gradient


@pytest.mark.parametrize(
    ("head", "options", "to_labels"),
    [
        ("ForPreTraining", {}, None),
        ("ForMaskedLM", {}, None),
        ("ForNextSentencePrediction", {}, None),
        ("ForTokenClassification", {"num_labels": 3}, None),
        ("ForQuestionAnswering", {}, None),
        ("ForMultipleChoice", {}, None),
        ("ForSequenceClassification", {"num_labels": 3}, None),
        ("ForSequenceClassification", {"num_labels": 1}, lambda label: label * 1.7),
        (
            "ForSequenceClassification",
            {"num_labels": 3},
            lambda label: torch.nn.functional.one_hot(label, 3).float(),
        ),
    ],
)
def test_under_trainer_every_split_into_micro_batches_gives_one_gradient(head, options, to_labels, tmp_path):
    rows = make_rows(head)
    if to_labels is not None:
        rows = [{**row, "labels": to_labels(row["labels"])} for row in rows]
    # Trainer counts `labels`. Question answering has none, so its micro-batches must be equally large.
    splits = [(4, 2), (1, 8)] if head == "ForQuestionAnswering" else [(3, 3), (1, 8)]
    whole_loss, whole = trained_once(head, rows, 8, 1, tmp_path, **options)
    direct = ours(head, **options).train()
    direct(**stacked(rows)).loss.backward()
    assert whole.keys() == {name for name, p in direct.named_parameters() if p.grad is not None}
    for name, parameter in direct.named_parameters():
        if name in whole:
            torch.testing.assert_close(whole[name], parameter.grad, atol=1e-6, rtol=1e-4)
    for batch_size, accumulation in splits:
        loss, gradient = trained_once(head, rows, batch_size, accumulation, tmp_path, **options)
        assert loss == pytest.approx(whole_loss, rel=1e-5)
        for name, value in whole.items():
            torch.testing.assert_close(gradient[name], value, atol=1e-6, rtol=1e-4)


def test_a_step_without_pair_labels_trains_on_its_masked_tokens(tmp_path):
    rows = [{**row, "next_sentence_label": torch.tensor(-100)} for row in make_rows("ForPreTraining")]
    loss, gradient = trained_once("ForPreTraining", rows, 2, 4, tmp_path)
    batch = {name: value for name, value in stacked(rows).items() if name != "next_sentence_label"}
    assert loss == pytest.approx(ours("ForPreTraining")(**batch).loss.item(), rel=1e-5)
    assert all(value.isfinite().all() for value in gradient.values())
