"""A program that goes all the ways in one process; a test runs it, and `make types` checks it."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pandas as pd  # type: ignore[import-untyped]

import d2l_bert


def train(texts: list[str], rows: datasets.DatasetDict) -> tuple[Path, Path]:
    prepared: d2l_bert.PrepareResult = d2l_bert.prepare(texts, output_dir=Path("tokens"), vocab_size=np.int64(300))
    assert prepared.counts["train_documents"] > 0
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    seen: list[float] = []
    pretrained: d2l_bert.PretrainResult = d2l_bert.pretrain(
        corpus=[prepared.output_dir],
        output_dir="model",
        license="mit",
        max_steps=4,
        max_seq_length=32,
        global_batch_size=8,
        callbacks=[lambda row: seen.append(row["step"])],
        num_attention_heads=2,
        **sizes,
    )
    assert pretrained.output_dir is not None and seen == [row["step"] for row in pretrained.log]
    tuned: d2l_bert.FinetuneResult = d2l_bert.finetune(
        pretrained.output_dir, rows, task="text-classification", output_dir="tuned", max_steps=4
    )
    figures = {"pretrain": pretrained.metrics, "finetune": tuned.metrics}
    Path("figures.json").write_text(json.dumps(figures))
    return pretrained.output_dir, tuned.output_dir


def use(model: Path, classifier: Path, texts: list[str], letters: pd.DataFrame) -> None:
    evaluated: d2l_bert.EvaluateResult = d2l_bert.evaluate(model, texts, pppl_sentences=3)
    predicted: d2l_bert.PredictResult = d2l_bert.predict(classifier, letters)
    vectors = d2l_bert.embed(model, texts).vectors
    assert vectors is not None and vectors.shape == (len(texts), 32)
    np.save("vectors.npy", vectors)
    nearest = d2l_bert.embed(model, texts, d2l_bert.EmbedConfig(nearest=["the old garden"], top_k=3)).nearest
    exported: d2l_bert.ExportResult = d2l_bert.export(model, "stock", onnx_only=False)
    sent: d2l_bert.PublishResult = d2l_bert.publish(exported.output_dir, "me/model", dry_run=True, license="mit")
    figures = {
        "evaluate": evaluated.models,
        "predict": predicted.predictions,
        "nearest": [line.text for line in nearest[0]],
        "publish": sent.files,
    }
    Path("uses.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    lines = Path("texts.txt").read_text().splitlines()
    train_rows, test_rows = (datasets.Dataset.from_json(f"{name}.jsonl") for name in ("train", "test"))
    try:
        folders = train(lines, datasets.DatasetDict(train=train_rows, test=test_rows))
        use(*folders, lines, pd.read_json("test.jsonl", lines=True)[["text"]])
    except d2l_bert.UserError as error:
        sys.exit(str(error))
    assert logging.getLogger().handlers == [], "a library has set up logging for the whole program"
