"""Checkpoints of d2l's model and of stock BERT, for the tests that convert them."""

import torch
import transformers
from transformers import BertConfig


WORDS = ["a", "came", "crane", "driver", "flying", "he", "is", "just", "left", "the", ".", "@-@", "'s"]
VOCABULARY = sorted([*WORDS, "<pad>", "<unk>", "<cls>", "<sep>", "<mask>"])


def book_state(vocab_size=18, hidden=12, ffn=20, blocks=2, max_len=32, seed=0):
    """Random weights with the names and shapes of d2l 1.0.3's BERTModel."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "encoder.pos_embedding": (1, max_len, hidden),
        "encoder.token_embedding.weight": (vocab_size, hidden),
        "encoder.segment_embedding.weight": (2, hidden),
    }
    for n in range(blocks):
        block = f"encoder.blks.{n}"
        for name in ("W_q", "W_k", "W_v", "W_o"):
            shapes |= {
                f"{block}.attention.{name}.weight": (hidden, hidden),
                f"{block}.attention.{name}.bias": (hidden,),
            }
        for name, size in (("addnorm1.ln", ()), ("ffn.dense1", (ffn, hidden)), ("ffn.dense2", (hidden, ffn))):
            shapes |= {f"{block}.{name}.weight": size or (hidden,), f"{block}.{name}.bias": (size or (hidden,))[:1]}
        shapes |= {f"{block}.addnorm2.ln.weight": (hidden,), f"{block}.addnorm2.ln.bias": (hidden,)}
    shapes |= {"hidden.0.weight": (hidden, hidden), "hidden.0.bias": (hidden,)}
    shapes |= {"mlm.mlp.0.weight": (hidden, hidden), "mlm.mlp.0.bias": (hidden,)}
    shapes |= {"mlm.mlp.2.weight": (hidden,), "mlm.mlp.2.bias": (hidden,)}
    shapes |= {"mlm.mlp.3.weight": (vocab_size, hidden), "mlm.mlp.3.bias": (vocab_size,)}
    shapes |= {"nsp.output.weight": (2, hidden), "nsp.output.bias": (2,)}
    return {name: 0.4 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def stock(head, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": 32}
    model = getattr(transformers, f"Bert{head}")(BertConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
