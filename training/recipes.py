"""Named runs: each a function that returns an architecture and a run, to be changed in a few fields."""

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
    return _miniature(2, 128, initializer_range=0.05), run


def mini() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers of 256: 10,000 steps of 32,768 tokens."""
    return _miniature(4, 256), _from_the_literature("mini", 10_000, 64, 1e-3)


def small() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers of 512: 20,000 steps of 65,536 tokens."""
    return _miniature(4, 512), _from_the_literature("small", 20_000, 128, 7e-4)


def medium() -> tuple[D2lBertConfig, PretrainConfig]:
    """8 layers of 512: 20,000 steps of 131,072 tokens."""
    return _miniature(8, 512), _from_the_literature("medium", 20_000, 256, 7e-4)


def base() -> tuple[D2lBertConfig, PretrainConfig]:
    """12 layers of 768, the size of BERT-base: 20,000 steps of 524,288 tokens."""
    return _miniature(12, 768), _from_the_literature("base", 20_000, 1024, 5e-4)


def large() -> tuple[D2lBertConfig, PretrainConfig]:
    """24 layers of 1,024, the size of BERT-large: 20,000 steps of 524,288 tokens."""
    return _miniature(24, 1024), _from_the_literature("large", 20_000, 1024, 2e-4)


RECIPES = {recipe.__name__: recipe for recipe in (d2l, tiny, mini, small, medium, base, large)}


def _miniature(layers, hidden_size, **changes):
    """A size of Google's BERT miniatures (Turc et al., 2019): heads of 64, feed-forward four times as wide.

    Without dropout: a BERT that sees its text once is the worse for it (Liu, Bauer and Manning, 2025), and Cramming
    (Geiping and Goldstein, 2022) leaves it out too. A text that is gone through many times may want it back.
    """
    sizes = {
        "vocab_size": 8192,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
        "embedding_layer_norm": True,
    }
    return D2lBertConfig(**{**sizes, **changes})


def _from_the_literature(name, steps, batch, rate):
    """
    What others found best for a small budget, put together; not searched anew.

    Tokens a step: for base and large those of MosaicBERT (Portes et al., 2023) and Izsak et al. (2021), 4,096
    sequences of 128; smaller models get by with fewer. Steps: above the 20 tokens a parameter that use arithmetic
    best (Hoffmann et al., 2022).

    Rates: all found for models that normalise after the sum, as ours. Base has MosaicBERT's; large has that of
    ELECTRA-large (Clark et al., 2020), with twice as many tokens a step; small and medium have RoBERTa's for 2,048
    sequences (Liu et al., 2019, table 3); mini's lies between those and tiny's (benchmarks/LOG.md).
    """
    return PretrainConfig(
        recipe=name,
        vocab_size=30522,
        max_seq_length=512,
        length_schedule=["128:0.9"],  # BERT, appendix A.2
        mlm_probability="0.30->0.15",  # Ankner et al. (2023): better than either share throughout
        max_steps=steps,
        global_batch_size=batch,
        # Cramming's batch grows on a straight line; here in two leaps, which together spare a quarter of the tokens.
        batch_size_schedule=[f"{batch // 4}:0.2", f"{batch // 2}:0.2"],
        learning_rate=rate,
        warmup_ratio=0.06,  # Izsak et al. and MosaicBERT; both fall on a straight line, as Cramming does
        weight_decay=0.01,  # BERT, Izsak et al., Cramming
        max_grad_norm=0.5,  # Cramming
        micro_batch_size=32,
        save_steps=1000,
    )
