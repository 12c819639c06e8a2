"""The options of a pretraining run (`PretrainConfig`), apart from the architecture (`D2lBertConfig`); their checks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from d2l_bert.messages import UserError
from d2l_bert.options import BATCHES, HUB, LENGTH, MACHINE, OPTIMIZER, OUTPUT, TEXT, option
from d2l_bert.tokenization.config import TextConfig


# The default micro-batch in tokens: enough to keep a CPU busy, few enough for its memory.
MICRO_BATCH_TOKENS = 2**14

# Fields of `D2lBertConfig` that a run with --init_from may change.
FREE_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")


class PlannedStage(NamedTuple):
    """
    The size of consecutive steps.

    Args:
        first_step: the first of these steps, counted from 0. They end where the next stage begins.
        length: the sequence length.
        batch_size: of a step, in pairs of `max_seq_length`.
    """

    first_step: int
    length: int
    batch_size: int


@dataclass(kw_only=True)
class PretrainConfig(TextConfig):
    """
    The options of one run. Every field is an option of `d2l-bert pretrain`. Recipes change some of the defaults.

    The options are written to `run_config.json`; the architecture is in the model's `config.json`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    recipe: str = option("tiny", "named set of defaults for the options below", OUTPUT)

    validation_corpus: list[str] = option(
        [],
        "files and folders of text to evaluate on, read whole; nothing of the training text is then held out",
        TEXT,
        identity=False,
        metavar="PATH",
    )
    validation_dataset: list[str] = option(
        [],
        "datasets to evaluate on, as in dataset; nothing of the training text is then held out",
        TEXT,
        identity=False,
        metavar="ID[:CONFIG]",
    )
    validation_split: str = option(
        "validation",
        "the split of each validation_dataset",
        TEXT,
        identity=False,
        metavar="NAME",
        needs="validation_dataset",
    )
    max_eval_pairs: int = option(2000, "most held-out pairs to evaluate on", TEXT, within="[1, inf)")

    max_seq_length: int = option(128, "most tokens in a pair", BATCHES, within="[8, inf)")
    length_schedule: list[str] = option(
        [],
        "train on shorter pairs first, with proportionally more pairs in a step: 32:0.4 is 32 tokens in the first "
        "40 % of the steps; or none",
        BATCHES,
        metavar="LENGTH:SHARE",
    )
    objective: Literal["auto", "nsp", "sop", "none"] = option(
        "auto",
        "second loss: next sentence prediction (BERT), sentence order prediction (ALBERT), or none (RoBERTa); auto is "
        "nsp, and none for a text whose documents mostly have one sentence",
        BATCHES,
    )
    pairing: Literal["segments", "sentences"] = option(
        "segments", "a segment is several sentences (original BERT), or one sentence (the d2l book)", BATCHES
    )
    short_seq_prob: float = option(
        0.1,
        "share of pairs with a random shorter length (only for --pairing segments)",
        BATCHES,
        within="[0, 1]",
        needs="pairing",
        needs_value="segments",
    )
    packing: bool = option(
        False, "put as many pairs into a row as fit; attention does not cross pairs", BATCHES, identity=False
    )
    source_weights: list[str] = option(
        [],
        "weights of the sources in an epoch's tokens, in the order of --corpus and --dataset; the default takes every "
        "document once",
        BATCHES,
        metavar="WEIGHT",
    )
    mlm_probability: float | str = option(
        0.15, "share of tokens to predict; 0.30->0.15 changes from 0.30 to 0.15 over the run", BATCHES
    )
    masking: Literal["token", "whole_word", "span"] = option(
        "token", "predict single tokens, whole words, or spans of words as SpanBERT does", BATCHES
    )
    mask_replace_prob: float = option(
        0.8, "share of the tokens to predict that become [MASK]", BATCHES, within="[0, 1]"
    )
    random_replace_prob: float = option(
        0.1,
        "share of the tokens to predict that become a random token; the others stay",
        BATCHES,
        within="[0, 1]",
    )

    init_from: str | None = option(
        None,
        "model to start from, a d2l-bert model or stock BERT: its weights, architecture and tokenizer",
        OPTIMIZER,
        metavar="MODEL",
        common=True,
    )
    attention_init: Literal["normal", "neighbours", "bigrams"] = option(
        "normal",
        "start of the attention: random as in BERT, or heads that look at the tokens before and after; bigrams: with "
        "embeddings and heads that know from the text which tokens stand side by side",
        OPTIMIZER,
    )
    max_steps: int | None = option(None, "optimizer steps", LENGTH, within="[1, 2147483647]", common=True)
    num_train_epochs: float | None = option(None, "passes over the training text", LENGTH, within="(0, 1e6]")
    max_minutes: float | None = option(
        None,
        "minutes of training; the run times some steps first, then fixes the number of steps",
        LENGTH,
        within="(0, 1e7]",
        common=True,
    )

    global_batch_size: int = option(
        32,
        "pairs in an optimizer step, over all processes and micro-batches",
        OPTIMIZER,
        within="[1, 16777216]",
        common=True,
    )
    batch_size_schedule: list[str] = option(
        [],
        "smaller batches first: 64:0.1 is 64 pairs a step in the first 10 % of the steps; or none",
        OPTIMIZER,
        metavar="BATCH:SHARE",
    )
    optim: Literal["adamw", "muon"] = option(
        "adamw", "AdamW; or Muon for the matrices of the encoder blocks, and AdamW for all other parameters", OPTIMIZER
    )
    learning_rate: float = option(1e-3, "peak learning rate", OPTIMIZER, within="(0, 100]", common=True)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay"] = option(
        "linear",
        "how the learning rate falls after warm-up: linearly, along half a cosine, not at all, or only in the last "
        "steps; constant has no warm-up either",
        OPTIMIZER,
    )
    warmup_ratio: float = option(
        0.1, "share of the steps in which the learning rate rises", OPTIMIZER, within="[0, 1]"
    )
    # A decay over 20 % of the steps reaches the same loss as a cosine schedule (Hägele et al., 2024, section 3).
    decay_ratio: float = option(
        0.2,
        "share of the steps in which the rate of warmup_stable_decay falls",
        OPTIMIZER,
        within="(0, 1]",
        needs="lr_scheduler_type",
        needs_value="warmup_stable_decay",
    )
    weight_decay: float = option(0.01, "weight decay; none for biases and LayerNorms", OPTIMIZER, within="[0, 1000]")
    adam_beta1: float = option(0.9, "AdamW's first beta", OPTIMIZER, within="[0, 1)")
    adam_beta2: float = option(0.98, "AdamW's second beta", OPTIMIZER, within="[0, 1)")
    adam_epsilon: float = option(1e-6, "AdamW's epsilon", OPTIMIZER, within="(0, 1]")
    max_grad_norm: float = option(
        1.0, "largest gradient norm; larger gradients are scaled down to this norm", OPTIMIZER, within="(0, 1e9]"
    )
    ema_decay: float | None = option(
        None,
        "evaluate and publish an exponential moving average of the weights with this decay: 0.999 averages about "
        "1,000 steps",
        OPTIMIZER,
        within="(0, 1)",
    )
    seed: int = option(42, "seed of all random numbers", OPTIMIZER, within="[0, 9223372036854775808)")

    micro_batch_size: int | None = option(
        None,
        "most pairs of full length in a micro-batch, and proportionally more shorter pairs; the default is 16,384 "
        "tokens on a CPU, and up to 65,536 on a GPU, by its memory",
        MACHINE,
        identity=False,
        within="[1, 16777216]",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None,
        "precision of matrix products; the default is bf16 if the CPU or GPU has bf16, else fp16 on an NVIDIA GPU",
        MACHINE,
    )
    torch_compile: bool | None = option(
        None,
        "compile the encoder blocks; the default is true on CUDA, false on a CPU, where it seldom pays",
        MACHINE,
        identity=False,
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass to save memory", MACHINE, identity=False
    )
    attn_implementation: Literal["eager", "sdpa", "flex_attention", "varlen"] | None = option(
        None,
        "implementation of attention; the default is the fastest one on this device; varlen computes no padding "
        "(NVIDIA GPUs from Ampere on, in half precision, no dropout of attention)",
        MACHINE,
        identity=False,
    )
    dataloader_num_workers: int | None = option(
        None,
        "worker processes that make batches, beside each process of the run; with 0 a thread of that process makes "
        "them; the default is 1 on an NVIDIA GPU, else 0",
        MACHINE,
        identity=False,
        within="[0, 1024]",
    )

    output_dir: str | None = option(
        None,
        "folder for the model; the default is d2l-bert-<recipe>-<corpus> in the working directory",
        OUTPUT,
        identity=False,
        metavar="DIR",
        common=True,
    )
    overwrite_output_dir: bool = option(False, "replace the run in the output folder", OUTPUT, identity=False)
    resume_from_checkpoint: str | None = option(
        None,
        "checkpoint folder to resume from, or latest, which starts a run where there is no checkpoint yet",
        OUTPUT,
        identity=False,
        metavar="PATH",
        common=True,
    )
    save_steps: int | None = option(
        None, "steps between checkpoints; the default saves ten in the run", OUTPUT, identity=False, within="[1, inf)"
    )
    save_total_limit: int = option(2, "checkpoints to keep", OUTPUT, identity=False, within="[1, inf)")
    save_words: list[str] = option(
        [],
        "also save the model, as chck_1M and so on, when the run has seen so many words of text: 1M 10M 100M (as "
        "BabyLM asks for); with push_to_hub each goes to a branch of its name",
        OUTPUT,
        identity=False,
        metavar="WORDS",
    )
    eval_steps: int | None = option(
        None, "steps between evaluations; the default is ten in the run", OUTPUT, identity=False, within="[1, inf)"
    )
    logging_steps: int | None = option(
        None,
        "steps between rows of the log; the default is a hundred rows in the run",
        OUTPUT,
        identity=False,
        within="[1, inf)",
    )
    dry_run: bool = option(
        False,
        "only time some steps, and say how many steps the run has, how long it takes, and how much memory; keeps "
        "nothing",
        OUTPUT,
        identity=False,
    )
    report_to: list[str] = option(
        [],
        "trackers to report to: tensorboard, wandb, trackio, mlflow, comet_ml, ...; or none",
        OUTPUT,
        identity=False,
        metavar="NAME",
    )

    license: str | None = option(
        None,
        "licence of the model, for its card (a Hub identifier); the default is apache-2.0 for a model trained on "
        "python-docs alone",
        HUB,
        identity=False,
        metavar="ID",
    )
    push_to_hub: bool = option(
        False, "publish the model when the run ends, as d2l-bert publish does", HUB, identity=False, common=True
    )
    hub_model_id: str | None = option(
        None,
        "owner/name of the repository; the default is the output folder's name",
        HUB,
        identity=False,
        metavar="REPO_ID",
        needs="push_to_hub",
    )
    hub_private_repo: bool = option(
        True,
        "keep the repository private; false makes it public when the finished model is sent",
        HUB,
        identity=False,
        needs="push_to_hub",
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`. Raises `UserError` itself for options that are written in no known form."""
        first_share, last_share = self.mlm_probabilities()
        self.stages(max_steps=1)  # raises if a schedule is no schedule
        yield from super().contradictions(given)
        lengths = [name for name in LENGTH_OPTIONS if getattr(self, name) is not None]
        if len(lengths) != 1:
            yield (
                f"the length of the run needs exactly one of {', '.join(LENGTH_OPTIONS)}; got "
                f"{' and '.join(lengths) or 'none'}"
            )
        if self.validation_corpus or self.validation_dataset:
            for name in ("validation_fraction", "max_validation_characters"):
                if name in given:
                    yield (
                        f"{name} is for a held-out part of the corpus, and a validation text is given; leave {name} "
                        f"out"
                    )
        if not (0 < first_share <= 1 and 0 < last_share <= 1):
            yield f"mlm_probability must be above 0 and at most 1, got {self.mlm_probability}"
        if self.mask_replace_prob + self.random_replace_prob > 1:
            yield (
                f"mask_replace_prob ({self.mask_replace_prob}) and random_replace_prob ({self.random_replace_prob}) "
                f"are more than all tokens to predict; lower one"
            )
        if self.lr_scheduler_type == "warmup_stable_decay" and self.warmup_ratio + self.decay_ratio > 1:
            yield (
                f"warmup_ratio ({self.warmup_ratio}) and decay_ratio ({self.decay_ratio}) are more than all steps; "
                f"lower one"
            )
        if self.lr_scheduler_type == "constant" and self.warmup_ratio:
            yield "lr_scheduler_type constant has no warm-up; give constant_with_warmup, or leave warmup_ratio out"
        if not all(re.fullmatch(r"\d{0,9}\.?\d{1,9}", weight) for weight in self.source_weights):
            yield f"source_weights are numbers such as 2 or 0.5, got {' '.join(self.source_weights)}"
        elif self.source_weights and not any(float(weight) for weight in self.source_weights):
            yield "source_weights are all 0; give one source at least some weight"
        if self.init_from is not None and self.attention_init != "normal":
            yield (
                f"attention_init {self.attention_init} is for a fresh model, and init_from gives a trained one; leave "
                f"it out"
            )

    def stages(self, max_steps: int) -> list[PlannedStage]:
        """
        The stages of a run of `max_steps`. The last one has `max_seq_length` and `global_batch_size`.

        A stage begins wherever a schedule changes. If the length changes at the steps 30 and 50, and the batch size at
        step 20, there are four: from the steps 0, 20, 30 and 50.
        """
        lengths = self._changes("length_schedule", "LENGTH", "max_seq_length", 8, max_steps)
        batch_sizes = self._changes("batch_size_schedule", "BATCH", "global_batch_size", 1, max_steps)
        first_steps = sorted({step for step, _ in (*lengths, *batch_sizes)})
        return [PlannedStage(step, _value_at(step, lengths), _value_at(step, batch_sizes)) for step in first_steps]

    def _changes(self, schedule, metavar, last, least, max_steps):
        """
        The values of a schedule, and of the option that follows it, each with its first step.

        Of `16:0.3 32:0.2` before 48, in 100 steps: (0, 16), (30, 32), (50, 48). The last one has a step at least.

        Args:
            schedule: the name of the schedule's option.
            metavar: the word for the value of an entry, for messages.
            last: the name of the option whose value follows the schedule.
            least: the smallest value that an entry may have.
        """
        most = getattr(self, last)
        changes = []
        share = 0.0  # of the run, in the entries so far
        for entry in getattr(self, schedule):
            value, _, entry_share = entry.partition(":")
            smallest = max(least, changes[-1][1] + 1) if changes else least
            is_entry = value.isdecimal() and re.fullmatch(r"0?\.\d+", entry_share) and 0 < float(entry_share) < 1
            if not is_entry or not smallest <= int(value) < most:
                raise UserError(
                    f"{schedule} takes {metavar}:SHARE such as {least + 8}:0.4, rising, each at least {least} and "
                    f"below {last} ({most}), got {entry!r}"
                )
            changes.append((round(share * max_steps), int(value)))
            share += float(entry_share)
        if share >= 1:
            raise UserError(f"{schedule}: its shares must leave some steps for {last}")
        first_of_last = min(round(share * max_steps), max_steps - 1)
        return [*changes, (first_of_last, most)]

    def pairs_a_step(self, batch_size: int, length: int) -> int:
        """Pairs of `length` tokens in a step: as many tokens as `batch_size` pairs of `max_seq_length` have."""
        return round(batch_size * self.max_seq_length / length)

    def most_tokens(self) -> int:
        """The largest number of tokens in a micro-batch, padding included."""
        return self.micro_batch_size * self.max_seq_length if self.micro_batch_size else MICRO_BATCH_TOKENS

    def mlm_probabilities(self) -> tuple[float, float]:
        """The share of tokens to predict in the first step, and in the last step and in evaluations."""
        first, _, last = str(self.mlm_probability).partition("->")
        try:
            return float(first), float(last or first)
        except ValueError:
            raise UserError(f"mlm_probability takes 0.15, or 0.30->0.15, got {self.mlm_probability!r}") from None

    def known_license(self) -> str | None:
        """The licence of the model: `license`, or apache-2.0 if everything comes from python-docs, or None."""
        if self.license:
            return self.license
        # The tokenizer may be that of a model to start from.
        has_more = bool(self.dataset or self.existing_tokenizer())
        return "apache-2.0" if self.text_paths() == ["python-docs"] and not has_more else None


def _value_at(step, changes):
    """The value that a schedule has at a step, from what `_changes` gives."""
    return next(value for first_step, value in reversed(changes) if first_step <= step)


LENGTH_OPTIONS = ("max_steps", "num_train_epochs", "max_minutes")
