"""Checkpoints of d2l's model and of stock BERT, for the tests that convert them."""

import torch
import transformers
from transformers import BertConfig


WORDS = ["a", "came", "crane", "driver", "flying", "he", "is", "just", "left", "the", ".", "@-@", "'s"]
VOCABULARY = sorted([*WORDS, "<pad>", "<unk>", "<cls>", "<sep>", "<mask>"])


def stock(head, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": 32}
    model = getattr(transformers, f"Bert{head}")(BertConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
