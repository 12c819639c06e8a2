"""Named runs: each a function that returns an architecture and a run, to be changed in a few fields."""

from dataclasses import replace

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.training.config import PretrainConfig


def d2l() -> tuple[D2lBertConfig, PretrainConfig]:
    """The book's own run (section 15.10): its small BERT, pairs of sentences at 64 tokens, 50 steps of 512.

    The rate falls to nothing; the book's stays at 0.01.
    """
    run = PretrainConfig(
        recipe="d2l",
        vocab_size=20256,
        max_seq_length=64,
        pairing="sentences",
        max_steps=50,
        global_batch_size=512,
        learning_rate=1e-2,
        warmup_ratio=0.0,
        weight_decay=0.0,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )
    return D2lBertConfig(), run


def tiny() -> tuple[D2lBertConfig, PretrainConfig]:
    """Minutes on a laptop's processor: 2 layers of 128."""
    run = PretrainConfig(
        recipe="tiny",
        max_steps=3000,
        global_batch_size=32,
        length_schedule=["32:0.4"],
        learning_rate=3e-3,
        warmup_ratio=0.05,
        attention_init="neighbours",
    )
    model = _miniature(2, 128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.05)
    return model, run


def mini() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers of 256."""
    return _miniature(4, 256), _longer("mini", 20_000, 64, 1e-3)


def small() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers of 512."""
    return _miniature(4, 512), _longer("small", 50_000, 128, 7e-4)


def medium() -> tuple[D2lBertConfig, PretrainConfig]:
    """8 layers of 512."""
    return _miniature(8, 512), _longer("medium", 100_000, 256, 5e-4)


def base() -> tuple[D2lBertConfig, PretrainConfig]:
    """12 layers of 768, the size of BERT-base."""
    return _miniature(12, 768), _longer("base", 100_000, 256, 2e-4)


def large() -> tuple[D2lBertConfig, PretrainConfig]:
    """24 layers of 1,024, the size of BERT-large."""
    return _miniature(24, 1024), _longer("large", 100_000, 256, 1e-4)


RECIPES = {recipe.__name__: recipe for recipe in (d2l, tiny, mini, small, medium, base, large)}


def _miniature(layers, hidden_size, **changes):
    """A size of Google's BERT miniatures (Turc et al., 2019): heads of 64, feed-forward four times as wide."""
    sizes = {
        "vocab_size": 8192,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "tie_word_embeddings": True,
        "embedding_layer_norm": True,
    }
    return D2lBertConfig(**{**sizes, **changes})


def _longer(name, steps, batch, rate):
    run = PretrainConfig(recipe=name, vocab_size=30522, max_steps=steps, global_batch_size=batch, learning_rate=rate)
    return replace(run, micro_batch_size=32, save_steps=1000)
