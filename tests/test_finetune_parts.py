"""Parts of `d2l-bert finetune` against independent results: metrics, and rates by layer."""

import math

import numpy as np
import pytest
import torch
from conftest import SIZES

from d2l_bert import D2lBertConfig, D2lBertForSequenceClassification
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.metrics import class_metrics, multilabel_metrics, number_metrics
from d2l_bert.training.finetuning.trainer import FinetuneTrainer, depths, make_arguments


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
