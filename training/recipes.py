"""Recipes: functions that return an architecture and a run's options; and the command that repeats a run."""

import dataclasses
import shlex
from collections.abc import Callable

from d2l_bert.messages import UserError, explained
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.options import check_names, flag, flags, plain
from d2l_bert.training.config import FREE_FIELDS, LENGTH_OPTIONS, PretrainConfig


# Each schedule of a recipe, and the option whose value follows after the schedule.
SCHEDULES = {"length_schedule": "max_seq_length", "batch_size_schedule": "global_batch_size"}

# Where the text and the tokenizer are read from. Not part of a run's identity, but needed to repeat the run.
INPUT_OPTIONS = (
    "corpus",
    "dataset",
    "dataset_split",
    "text_column",
    "separator",
    "max_unknown_share",
    "tokenizer",
    "validation_corpus",
    "validation_dataset",
    "validation_split",
)

# What a search found best for small models in minutes to an hour on two CPU cores (benchmarks/LOG.md).
SEARCHED = {"optim": "muon", "attention_init": "bigrams", "mlm_probability": "0.50->0.15", "warmup_ratio": 0.05}

# The share of a recipe's learning rate with which a run goes on from a model. At the whole rate, a tiny model of
# Python's documentation got worse on it by 0.15 nats in 30 steps; at this share it got better (benchmarks/LOG.md).
GO_ON_SHARE = 0.3

# Single sentences without a second loss, several in a row of a batch. BabyBERTa (Huebner et al., 2021) trains so.
SENTENCES = {
    "objective": "none",
    "pairing": "sentences",
    "packing": True,
    "max_seq_length": 128,
    "length_schedule": [],
    "batch_size_schedule": [],
}


def d2l() -> tuple[D2lBertConfig, PretrainConfig]:
    """The book's small BERT on pairs of sentences of 64 tokens (section 15.10), with settings under which it learns.

    Architecture and losses are the book's; docs/d2l.md has what differs in pairs, masks and run, edition by edition.
    """
    run = PretrainConfig(
        recipe="d2l",
        vocab_size=20256,
        max_seq_length=64,
        pairing="sentences",
        max_steps=5000,
        global_batch_size=128,
        optim="muon",
        learning_rate=5e-3,
        warmup_ratio=0.05,
        attention_init="neighbours",
    )
    return D2lBertConfig(initializer_range=0.05), run


def d2l_50_steps() -> tuple[D2lBertConfig, PretrainConfig]:
    """The 50 steps that the book's code takes (d2l 1.0.3, section 15.10), at its rate: a test of the code.

    The rate of 0.01 is too high for this model: its encoder collapses (docs/d2l.md).
    """
    return D2lBertConfig(), dataclasses.replace(
        d2l()[1],
        recipe="d2l-50-steps",
        max_steps=50,
        global_batch_size=512,
        optim="adamw",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        attention_init="normal",
        weight_decay=0.0,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )


def tiny() -> tuple[D2lBertConfig, PretrainConfig]:
    """Minutes on a laptop's CPU: 2 layers with hidden size 128."""
    run = PretrainConfig(
        recipe="tiny",
        max_steps=1100,
        global_batch_size=64,
        length_schedule=["64:0.7"],
        learning_rate=6e-3,
        **SEARCHED,
    )
    return _miniature(2, 128, num_attention_heads=4, initializer_range=0.05), run


def tiny_sentences() -> tuple[D2lBertConfig, PretrainConfig]:
    """The model of tiny on single sentences, without NSP: for prose, as in books.

    It takes about as long as `tiny`.
    """
    run = PretrainConfig(
        recipe="tiny-sentences",
        max_steps=1500,
        global_batch_size=128,
        learning_rate=5e-3,
        **SEARCHED,
        **SENTENCES,
    )
    return tiny()[0], run


def mini() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers, hidden size 256: 10,000 steps of 32,768 tokens.

    `SEARCHED` was tried at this size for 12 minutes.
    """
    run = _from_papers("mini", 10_000, 64, 4e-3)
    return _miniature(4, 256, initializer_range=0.05), dataclasses.replace(run, **SEARCHED)


def mini_sentences() -> tuple[D2lBertConfig, PretrainConfig]:
    """The model of mini on single sentences, without NSP: for prose, as in books.

    10,000 steps of 256 sentences, some 8,000 tokens. The vocabulary has 8,192 entries: twice as many made a step of a
    smaller model a third longer, and gained nothing on ten million words (benchmarks/LOG.md).
    """
    run = PretrainConfig(
        recipe="mini-sentences",
        max_steps=10_000,
        global_batch_size=256,
        learning_rate=4e-3,
        save_steps=1000,
        **SEARCHED,
        **SENTENCES,
    )
    return mini()[0], run


def small() -> tuple[D2lBertConfig, PretrainConfig]:
    """4 layers, hidden size 512: 20,000 steps of 65,536 tokens."""
    return _miniature(4, 512), _from_papers("small", 20_000, 128, 7e-4)


def medium() -> tuple[D2lBertConfig, PretrainConfig]:
    """8 layers, hidden size 512: 20,000 steps of 131,072 tokens."""
    return _miniature(8, 512), _from_papers("medium", 20_000, 256, 7e-4)


def base() -> tuple[D2lBertConfig, PretrainConfig]:
    """12 layers, hidden size 768, as BERT-base: 20,000 steps of 524,288 tokens."""
    return _miniature(12, 768), _from_papers("base", 20_000, 1024, 5e-4)


def large() -> tuple[D2lBertConfig, PretrainConfig]:
    """24 layers, hidden size 1,024, as BERT-large: 20,000 steps of 524,288 tokens."""
    return _miniature(24, 1024), _from_papers("large", 20_000, 1024, 2e-4)


def override_options(run: PretrainConfig, changes: dict) -> PretrainConfig:
    """
    A recipe's options with some of them changed.

    Options of the recipe that contradict a change are dropped: another length of the run, schedule entries that are
    too large, `attention_init` beside `init_from`. Beside that, `GO_ON_SHARE` of the learning rate stays.

    Args:
        changes: the changed options by name; `none` in a schedule empties what stands before it.
    """
    changes = dict(changes)
    if any(name in changes for name in LENGTH_OPTIONS):
        changes = {**dict.fromkeys(LENGTH_OPTIONS), **changes}
    for schedule, last in SCHEDULES.items():
        if schedule in changes:
            changes[schedule] = _after_last_none(changes[schedule])
        else:  # keep the recipe's entries that still fit
            most = changes.get(last, getattr(run, last))
            changes[schedule] = [entry for entry in getattr(run, schedule) if int(entry.partition(":")[0]) < most]
    if changes.get("lr_scheduler_type") == "constant":
        changes.setdefault("warmup_ratio", 0.0)
    if changes.get("init_from") is not None:
        changes.setdefault("attention_init", "normal")
        changes.setdefault("learning_rate", GO_ON_SHARE * run.learning_rate)
    return dataclasses.replace(run, **changes)


def resolve(recipe: str, given: dict) -> tuple[D2lBertConfig, PretrainConfig]:
    """
    The architecture and the options of a run that follow from a recipe and the options beside it.

    Args:
        recipe: a name in `RECIPES`.
        given: options of `PretrainConfig` and fields of the architecture, by name.

    Raises:
        UserError: there is no such recipe; or an option contradicts the prepared folder, the tokenizer or the model
            that another option gives.
    """
    # Not for the command's help, which this would delay.
    from d2l_bert.training.initialize import read_architecture, refuse_what_is_fixed

    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r:.100}: there is none of this name; give one of {', '.join(RECIPES)}")
    architecture, run = RECIPES[recipe]()
    of_architecture = {name: plain(given[name]) for name in architecture_options() if name in given}
    of_run = {name: value for name, value in given.items() if name not in of_architecture}
    check_names(PretrainConfig, of_run)
    run = override_options(run, of_run)
    run.check_values()  # an empty path would be looked up as the working directory
    fixed_by_model = [name for name in architecture_options() if name not in FREE_FIELDS]
    refuse_what_is_fixed(run, given, fixed_by_model)
    if run.init_from is not None:
        architecture = read_architecture(run.init_from)
    with explained("the architecture", "", ValueError):
        return type(architecture)(**{**architecture.to_dict(), **of_architecture}), run


def _after_last_none(entries):
    """The entries of a schedule behind the last `none`, or all: what stands before one has no effect."""
    for place in reversed(range(len(entries))):
        if entries[place] == "none":
            return entries[place + 1 :]
    return entries


def architecture_options() -> list[str]:
    """The fields of `D2lBertConfig` that are command-line options: all but those that follow from the tokenizer."""
    return [name for name in D2lBertConfig.__annotations__ if name not in ("vocab_size", "pad_token_id")]


def command_line(record: dict) -> str:
    """
    The shell command that repeats a run: its recipe, and the options that differ from the recipe.

    The command has no options that only affect speed, logging or saving, and no options that follow from the
    `init_from` model, the existing tokenizer or the prepared folder. With `init_from` the command always gives the
    dropout rates, because the saved model may have been trained with others. Local paths are shortened to their last
    part.

    Args:
        record: the content of `run_config.json`.
    """
    # Not for the command's help, which these would delay.
    from d2l_bert.model_cards.card import portable
    from d2l_bert.tokenization.prepared_folder import fixed_options

    run, architecture = PretrainConfig(**record["run"]), record["architecture"]
    recipe = run.recipe if run.recipe in RECIPES else "tiny"  # a run from Python may have another name
    recipe_architecture, recipe_run = RECIPES[recipe]()
    # Giving one of these options changes other options of the recipe (see `override_options`). So the other options
    # are compared with the changed recipe, and these options with the recipe itself.
    decisive = ("dataset", "init_from", "lr_scheduler_type", *SCHEDULES.values())
    defaults = override_options(recipe_run, {name: getattr(run, name) for name in decisive})
    known = dict.fromkeys(("recipe", *fixed_options(run)))  # what the model, tokenizer or prepared folder decides
    defaults = dataclasses.asdict(defaults) | {"corpus": defaults.text_paths()}
    defaults |= {name: getattr(recipe_run, name) for name in decisive}
    shown = portable({"local_paths": {}, **record})["run"] | known
    differing = flags(PretrainConfig, shown, defaults | known, INPUT_OPTIONS)
    words = ["d2l-bert", "pretrain", "--recipe", recipe, *differing]
    if run.init_from is not None:
        fields = FREE_FIELDS
    else:
        fields = [name for name in architecture_options() if architecture[name] != getattr(recipe_architecture, name)]
    for name in fields:
        words += flag(name, architecture[name])
    return shlex.join(words)


RECIPES: dict[str, Callable[[], tuple[D2lBertConfig, PretrainConfig]]] = {
    recipe.__name__.replace("_", "-"): recipe
    for recipe in (d2l, d2l_50_steps, tiny, tiny_sentences, mini, mini_sentences, small, medium, base, large)
}


def _miniature(layers, hidden_size, **changes):
    """
    The architecture of Google's BERT miniatures (Turc et al., 2019).

    Attention heads have size 64 (in `tiny` 32), and the feed-forward layer is four times as wide as the hidden size.

    There is no dropout: a BERT that sees its text only once gets worse with dropout (Liu, Bauer and Manning, 2025),
    and Cramming (Geiping and Goldstein, 2022) has none either. A run of many epochs may need dropout.
    """
    sizes = {
        "vocab_size": 8192,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
        "hidden_act": "gelu",  # as in BERT; behind a start from bigrams ReLU shuts most units of the first block
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
        "embedding_layer_norm": True,
    }
    return D2lBertConfig(**{**sizes, **changes})


def _from_papers(name, steps, batch, rate):
    """
    Options that papers found best for a small budget; not searched again here.

    Tokens per step: base and large take those of MosaicBERT (Portes et al., 2023) and Izsak et al. (2021), 4,096
    sequences of 128; smaller models need fewer. Steps: more than 20 tokens per parameter, the compute-optimal number
    (Hoffmann et al., 2022).

    Learning rates: all found with AdamW for post-LayerNorm models, like this one. Base has the rate of MosaicBERT.
    Large has that of ELECTRA-large (Clark et al., 2020), with twice the tokens per step. Small and medium have that of
    RoBERTa for 2,048 sequences (Liu et al., 2019, table 3).
    """
    return PretrainConfig(
        recipe=name,
        vocab_size=30522,
        max_seq_length=512,
        length_schedule=["128:0.9"],  # BERT, appendix A.2
        mlm_probability="0.30->0.15",  # Ankner et al. (2023): better than either share throughout
        max_steps=steps,
        global_batch_size=batch,
        # In Cramming the batch size grows linearly; here in two jumps, which save a quarter of the tokens.
        batch_size_schedule=[f"{batch // 4}:0.2", f"{batch // 2}:0.2"],
        learning_rate=rate,
        warmup_ratio=0.06,  # Izsak et al. and MosaicBERT; their rates fall linearly, as in Cramming
        weight_decay=0.01,  # BERT, Izsak et al., Cramming
        max_grad_norm=0.5,  # Cramming
        save_steps=1000,
    )
