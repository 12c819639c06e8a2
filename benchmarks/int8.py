"""
What int8 costs a model that `d2l-bert export` has written for fill-mask: MLM loss and speed beside float32.

    python -m benchmarks.int8 DIR [DIR ...] --corpus PATH [PATH ...]

The sentences are a sample of the text, each a row, with 15 % of their tokens masked; both files read the same rows, in
turns, so that other programs slow both alike.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling

from d2l_bert.modeling import conversion, export
from d2l_bert.tokenization import existing_tokenizers, prepare, sources
from d2l_bert.tokenization.account import Account
from d2l_bert.tokenization.config import TextConfig


CHARACTERS = 100_000  # of the text
LENGTH = 128  # most tokens of a sentence
ROWS = 32  # sentences at once


def cost_of_int8(folder: str, sentences: list[str]) -> dict[str, dict[str, float]]:
    """For each of the two files the `loss`, in nats a masked token, and the `seconds`."""
    model, _ = conversion.read_model(folder)
    tokenizer = existing_tokenizers.read_tokenizer(folder, model.config)
    collate = DataCollatorForLanguageModeling(tokenizer, seed=0)
    length = min(LENGTH, model.config.max_position_embeddings)
    files = {name: export.OnnxModel(Path(folder, name), model.config) for name in (export.FLOAT, export.INT8)}
    total = {name: {"loss": 0.0, "seconds": 0.0} for name in files}
    tokens = 0
    for first in range(0, len(sentences), ROWS):
        rows = [tokenizer(text, truncation=True, max_length=length) for text in sentences[first : first + ROWS]]
        batch = collate(rows)
        is_masked = batch["labels"] != -100
        tokens += int(is_masked.sum())
        for name, file in files.items():
            start = time.perf_counter()
            logits = file(**batch).logits
            total[name]["seconds"] += time.perf_counter() - start
            loss = F.cross_entropy(logits[is_masked], batch["labels"][is_masked], reduction="sum")
            total[name]["loss"] += float(loss)
    return {name: {**of_file, "loss": of_file["loss"] / tokens} for name, of_file in total.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--corpus", nargs="+", required=True, metavar="PATH")
    arguments = parser.parse_args()
    what = sources.WhatToRead(paths=arguments.corpus)
    text = prepare.read_sources(sources.open_sources(what, sources.HowToRead.of(TextConfig())), None, Account())
    sentences = list(text.store.part().sample(CHARACTERS))
    print(f"{len(sentences):,} sentences of {text.name}, {torch.get_num_threads()} threads")
    for folder in arguments.folders:
        in_float, in_int8 = cost_of_int8(folder, sentences).values()
        print(
            f"{folder}: MLM loss {in_int8['loss']:.4f} in int8, {in_float['loss']:.4f} in float32; int8 is "
            f"{in_float['seconds'] / in_int8['seconds']:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
