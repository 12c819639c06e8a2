"""Parts of `d2l-bert finetune` against independent results: metrics, rates by layer, steps, pictures, the card."""

import math

import numpy as np
import pytest
import torch
from conftest import SIZES
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.finetune import difference
from d2l_bert import D2lBertConfig, D2lBertForSequenceClassification
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.metrics import class_metrics, multilabel_metrics, number_metrics
from d2l_bert.training.finetuning.pictures import draw_confusion, draw_counts, draw_curves
from d2l_bert.training.finetuning.trainer import FinetuneTrainer, default_rate, depths, make_arguments


def test_class_metrics_are_those_of_their_definitions():
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
    true, said = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    found = class_metrics(true, said, 2)
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    assert found["matthews_correlation"] == pytest.approx((3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6))
    assert found["accuracy_f1_mean"] == pytest.approx((0.7 + 6 / 9) / 2)
    assert class_metrics([0, 1], [0, 0], 2)["matthews_correlation"] == 0
    # Three classes: the mean of F1 = 1, 2/3 and 0.
    macro = class_metrics([0, 0, 1, 2], [0, 0, 1, 1], 3)["f1"]
    assert macro == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_multilabel_metrics_are_those_of_their_definitions():
    true, said = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]]), np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]])
    found = multilabel_metrics(true, said)
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_the_metrics_of_a_single_label_count_its_cells_of_one_alone():
    true, nothing, half = np.array([[0], [0], [1], [1]]), np.zeros((4, 1), dtype=int), np.array([[0], [1], [0], [1]])
    assert multilabel_metrics(true, nothing) == {"f1": 0, "macro_f1": 0, "exact_match": 0.5}
    found = multilabel_metrics(true, half)
    assert found["f1"] == found["macro_f1"] == pytest.approx(2 * 1 / (2 + 2))


def test_number_metrics_are_those_of_their_definitions():
    true, said = [1.0, 2.0, 3.0, 10.0], [2.0, 1.0, 4.0, 5.0]
    found = number_metrics(true, said)
    mean_true, mean_said = 4.0, 3.0
    covariance = sum((a - mean_true) * (b - mean_said) for a, b in zip(true, said, strict=True))
    spread = math.sqrt(sum((a - mean_true) ** 2 for a in true) * sum((b - mean_said) ** 2 for b in said))
    assert found["pearson"] == pytest.approx(covariance / spread)
    assert found["spearman"] == pytest.approx(1 - 6 * (1 + 1) / (4 * 15))  # the ranks are 1 2 3 4 and 2 1 3 4
    assert found["mse"] == pytest.approx((1 + 1 + 1 + 25) / 4) and found["mae"] == pytest.approx(8 / 4)
    assert number_metrics(true, [1.0] * 4)["pearson"] == 0


def test_every_parameter_has_the_depth_of_its_layer():
    model = D2lBertForSequenceClassification(D2lBertConfig(**SIZES))
    found = depths([name for name, _ in model.named_parameters()])
    assert {depth for name, depth in found.items() if "embeddings" in name} == {0}
    assert {depth for name, depth in found.items() if "layer.1." in name} == {2}
    assert {depth for name, depth in found.items() if name.startswith(("bert.pooler", "classifier"))} == {3}


def rows_for(model, count=12):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(5, model.config.vocab_size, (7,), generator=generator),
            "attention_mask": torch.ones(7, dtype=torch.long),
            "labels": torch.tensor(number % 2),
        }
        for number in range(count)
    ]


def trainer_for(model, folder, layerwise_decay=None, **options):
    config = FinetuneConfig(model="m", task="classification", validation_share=0, save_total_limit=1, **options)
    arguments = make_arguments(config, folder, 0.01, 1, 1, "loss", ["labels"])
    return FinetuneTrainer(model, arguments, train_dataset=rows_for(model), layerwise_decay=layerwise_decay)


def test_layerwise_decay_lowers_the_rate_from_layer_to_layer(tmp_path):
    model = D2lBertForSequenceClassification(D2lBertConfig(**SIZES))
    optimizer = trainer_for(model, tmp_path, 0.5, weight_decay=0.1).create_optimizer()
    by_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(by_parameter) == len(list(model.parameters()))
    for part, power in (
        ("classifier.weight", 0),
        ("layer.1.attention.query.weight", 1),
        ("layer.0.", 2),
        ("word_", 3),
    ):
        for name, parameter in model.named_parameters():
            if part in name:
                group = by_parameter[id(parameter)]
                assert group["lr"] == pytest.approx(0.01 * 0.5**power), name
                assert group["weight_decay"] == (0 if name.endswith("bias") or "LayerNorm" in name else 0.1), name


def make_stock():
    sizes = {name: SIZES[name] for name in SIZES if name not in ("max_position_embeddings",)}
    return BertForSequenceClassification(BertConfig(**sizes))


@pytest.mark.parametrize("make", [lambda: D2lBertForSequenceClassification(D2lBertConfig(**SIZES)), make_stock])
def test_gradient_accumulation_does_not_change_the_step(make, tmp_path, one_thread):
    norms = {}
    for batch, accumulated in ((12, 1), (4, 3)):
        torch.manual_seed(0)
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        trainer = trainer_for(make(), tmp_path / str(batch), max_steps=1, logging_steps=1, **options)
        trainer.train()
        (row,) = [row for row in trainer.state.log_history if "grad_norm" in row]
        norms[batch] = (row["loss"], row["grad_norm"])
    assert norms[4] == pytest.approx(norms[12], rel=1e-4)


def test_the_default_rate_falls_with_the_size_of_the_model():
    assert [default_rate(size) for size in (128, 256, 512, 768, 1024)] == [3e-4, 1e-4, 5e-5, 2e-5, 2e-5]


@pytest.mark.parametrize("classes", [2, 20])
def test_the_confusion_matrix_shows_the_shares_of_each_row(classes, tmp_path):
    true, said = np.random.default_rng(0).integers(classes, size=(2, 500))
    names = [f"class number {number}" for number in range(classes)]
    panel = draw_confusion(true, said, names, "rows.csv", tmp_path / "matrix.png").axes[0]
    shares = [[np.mean(said[true == row] == column) for column in range(classes)] for row in range(classes)]
    np.testing.assert_allclose(panel.images[0].get_array(), shares)
    assert [label.get_text() for label in panel.get_xticklabels()] == names
    assert (tmp_path / "matrix.png").stat().st_size > 5000


def test_bars_show_all_and_the_most_frequent_classes(tmp_path):
    counts = {
        f"label_{number:04}_{'x' * 40}": np.array([number < 600, 1, 1 + (number == 7)]) for number in range(1200)
    }
    counts["all"] = np.array([0, 0, 1])  # a class may have this name
    figure = draw_counts(counts, "title", tmp_path / "labels.png")
    panel = figure.axes[0]
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert len(names) == 22 and names[0] == "all (1,202)" and names[-1].startswith("1,181 others")
    assert names[1].startswith("label_0007_xxx") and names[1].endswith("... (2)")
    assert [bar.get_width() for bar in panel.containers[1]][:2] == pytest.approx([600 / 1202, 0.5])
    assert figure.get_size_inches()[1] < 30


def test_the_benchmark_gives_the_difference_and_its_standard_error():
    sides = [{"mean": {"test": {"f1": mean}}, "sd": {"test": {"f1": sd}}} for mean, sd in ((0.8, 0.03), (0.7, 0.04))]
    ahead, error = difference(*sides, "f1", 25)
    assert ahead == pytest.approx(0.1) and error == pytest.approx(0.01)  # sqrt(0.0009 + 0.0016) / 5


@pytest.mark.parametrize("steps", [0, 1, 200])
def test_curves_are_those_of_the_log(steps, tmp_path):
    log = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    log += [{"step": steps, "eval_loss": 0.5, "eval_accuracy": 0.9}]
    logs = dict.fromkeys(("a", "b", "c"), log)
    losses, metric = draw_curves(logs, "b", "accuracy", "title", tmp_path / "curves.png").axes
    assert len(losses.lines) == 6 and len(metric.lines) == 3
    assert losses.lines[-2].get_ydata() == pytest.approx([row["loss"] for row in log if "loss" in row])
    assert metric.lines[-1].get_ydata() == pytest.approx([90])
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["training", "validation"]
