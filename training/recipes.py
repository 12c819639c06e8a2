"""Named runs: each a function that returns an architecture and a run, to be changed in a few fields."""

import dataclasses
import shlex

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.saving import FREE_FIELDS
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.training.config import LENGTH_OPTIONS, PretrainConfig


# Each shortens a recipe's steps, and ends with the option beside it.
SCHEDULES = {"length_schedule": "max_seq_length", "batch_size_schedule": "global_batch_size"}

# Where the text and its tokenizer lie: options that say how a run is computed, without which there is no such run.
PLACES = ("corpus", "dataset", "dataset_config", "dataset_split", "text_column", "tokenizer")


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
        micro_batch_size=512,
    )
    return D2lBertConfig(), run


def tiny() -> tuple[D2lBertConfig, PretrainConfig]:
    """Minutes on a laptop's CPU: 2 layers of 128."""
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


def changed(run: PretrainConfig, changes: dict) -> PretrainConfig:
    """
    A recipe's run with other options; its own length, schedules and start make way for them.

    Args:
        changes: options and their values; a schedule of `["none"]` is an empty one.
    """
    changes = dict(changes)
    if any(name in changes for name in LENGTH_OPTIONS):
        changes = {**dict.fromkeys(LENGTH_OPTIONS), **changes}
    for schedule, last in SCHEDULES.items():
        if changes.get(schedule) == ["none"]:
            changes[schedule] = []
        elif schedule not in changes:  # the recipe's own must fit
            most = changes.get(last, getattr(run, last))
            changes[schedule] = [e for e in getattr(run, schedule) if int(e.partition(":")[0]) < most]
    if changes.get("init_from") is not None:
        changes.setdefault("attention_init", "normal")
    return dataclasses.replace(run, **changes)


def architecture_options() -> list[str]:
    """The fields of `D2lBertConfig` that are options; vocabulary and padding follow the tokenizer."""
    return [name for name in D2lBertConfig.__annotations__ if name not in ("vocab_size", "pad_token_id")]


def command_line(record: dict) -> str:
    """
    The command that makes a run again, for a shell: its recipe, and what differs from that.

    Options that only say how a run is computed, watched or kept are left out, and folders and files go by their last
    name, wherever they lay. What a model to start from, an existing tokenizer or a prepared folder settles is left to
    them; dropout is said beside such a model, which may have been made with another.

    Args:
        record: what run_config.json holds.
    """
    run, numbers = PretrainConfig(**record["run"]), record["architecture"]
    recipe = run.recipe if run.recipe in RECIPES else "tiny"  # one made in Python may have a name of its own
    architecture, own = RECIPES[recipe]()
    # The command makes the recipe fit these options; all others are compared with what it makes of it.
    decisive = ("dataset", "init_from", *SCHEDULES.values())
    fitted = changed(own, {name: getattr(run, name) for name in decisive})
    plain = dataclasses.replace(fitted, corpus=fitted.text_paths(), **{name: getattr(own, name) for name in decisive})
    if record["corpus_is_prepared"]:
        settled = {field.name for field in dataclasses.fields(TextConfig)} - {"corpus"}
    elif run.existing_tokenizer() is not None:
        settled = set(TOKENIZER_TRAINING_OPTIONS) - ({"min_frequency"} if run.extend_vocab else set())
    else:
        settled = set()
    words = ["d2l-bert", "pretrain", "--recipe", recipe]
    for field in dataclasses.fields(run):
        name, is_told = field.name, field.name in PLACES or field.metadata["identity"]
        if is_told and name not in {"recipe", *settled} and getattr(run, name) != getattr(plain, name):
            words += _flag(name, _portable(getattr(run, name), record.get("local_paths", {})))
    if run.init_from is not None:
        told = FREE_FIELDS
    else:
        told = [name for name in architecture_options() if numbers[name] != getattr(architecture, name)]
    for name in told:
        words += _flag(name, numbers[name])
    return shlex.join(words)


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


def _portable(value, local_paths):
    """The value of an option, with the last names of paths, which tell nothing of the machine."""
    if isinstance(value, list):
        return [_portable(each, local_paths) for each in value]
    return local_paths[value]["name"] if value in local_paths else value


def _flag(name, value):
    """An option as the command line takes it; nothing for None, which is the default wherever it may be."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *(value or ["none"])]
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
