"""A program that uses the public names with their types; `make types` checks it, and nothing runs it."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from d2l_bert import (
    RECIPES,
    D2lBertConfig,
    D2lBertForMaskedLM,
    D2lBertForPreTraining,
    D2lBertModel,
    PretrainConfig,
    pretrain,
    train_wordpiece,
)


def train(text: str) -> Path | None:
    architecture, run = RECIPES["tiny"]()
    changed: PretrainConfig = replace(run, corpus=[text], max_steps=10)
    return pretrain(architecture, changed).output_dir


def tokenizer_of(lines: list[str]) -> PreTrainedTokenizerBase:
    return train_wordpiece(lines, vocab_size=1000)


def models() -> tuple[D2lBertModel, D2lBertForMaskedLM]:
    config: D2lBertConfig = D2lBertConfig(hidden_size=64, num_attention_heads=2)
    net: D2lBertForPreTraining = D2lBertForPreTraining(config)
    outputs = net(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long))
    print(outputs.loss)
    return D2lBertModel(config), D2lBertForMaskedLM(config)
