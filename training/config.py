"""The numbers of one pretraining run. They stay in `run_config.json`; the architecture's travel in `config.json`."""

import contextlib
import dataclasses
import math
import os
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from d2l_bert.errors import UserError
from d2l_bert.training.masking import Masking
from d2l_bert.training.optim import Optim, Schedule


TEXT, TOKENIZER, BATCHES, LENGTH, OPTIMIZER, MACHINE, OUTPUT, HUB = (
    "text",
    "tokenizer",
    "pairs and masks",
    "length of the run (one of them)",
    "optimizer",
    "machine",
    "output",
    "the Hugging Face Hub",
)

# Where a fall over 20 % of the steps ends, a cosine ends too (Hägele et al., 2024, section 3).
DECAY_RATIO = 0.2

# Whole numbers are stored in 64 bits. A vocabulary's trainer reserves memory for each entry, a step plans every pair,
# and steps are counted one by one: beyond these limits a run would hang or run out of memory before its first step.
LARGEST_WHOLE = 2**63 - 1
LARGEST = {
    "vocab_size": 2**24,
    "extend_vocab": 2**24,
    "max_steps": 2**31 - 1,
    "num_train_epochs": 1_000_000,
    "max_minutes": 10_000_000,  # 19 years
    "global_batch_size": 2**24,  # LAMB (You et al., 2020) trains BERT with 2**16
}

# Entries that a trained vocabulary has at least: the five special tokens and one character.
LEAST_VOCABULARY = 6


def option(default, help, group, *, how=False, metavar=None):
    """
    A field of `PretrainConfig`.

    Args:
        help: one line for `--help`.
        group: heading in `--help`.
        how: the option says how the run is computed, watched or kept, or where its text lies, not what it trains: it
            may change on resuming.
    """
    metadata = {"help": help, "group": group, "how": how, "metavar": metavar}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class TextConfig:
    """
    What text, and what tokenizer. Every field is an option of `d2l-bert prepare` and of `d2l-bert pretrain`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    corpus: list[str] | None = option(
        None,
        "files and folders of text (.txt, .md, .jsonl, .csv, .tsv, .parquet, packed as .gz or .zst or not), or "
        "python-docs, the documentation installed with Python; without a dataset the default is python-docs",
        TEXT,
        how=True,
        metavar="PATH",
    )
    dataset: list[str] = option(
        [],
        "datasets, Hub ids or folders (of save_to_disk too), each with its configuration behind a colon if it has "
        "several: Salesforce/wikitext:wikitext-2-raw-v1",
        TEXT,
        how=True,
        metavar="ID[:CONFIG]",
    )
    dataset_config: str | None = option(None, "the configuration of a single one", TEXT, how=True, metavar="NAME")
    dataset_split: str = option("train", "the split of each", TEXT, how=True, metavar="NAME")
    streaming: bool = option(False, "read datasets row by row, without downloading them whole", TEXT, how=True)
    text_column: str = option("text", "column of text in datasets and tables", TEXT, how=True, metavar="NAME")
    max_documents: int | None = option(None, "most text files and rows to read from each path and each dataset", TEXT)
    language: str = option(
        "en",
        "language of the text (ISO 639, lower case), for splitting sentences; languages that sentencex has no rules "
        "for are split as their nearest relative that it knows, or as English",
        TEXT,
        metavar="CODE",
    )
    unicode_normalization: Literal["none", "NFC", "NFKC"] = option(
        "none", "normal form to bring paragraphs into", TEXT
    )
    min_paragraph_characters: int = option(0, "drop shorter paragraphs", TEXT)
    drop_duplicate_paragraphs: bool = option(False, "keep the first of equal paragraphs only", TEXT)
    validation_fraction: float = option(0.05, "share of the text, by document, held out for evaluation", TEXT)
    max_validation_characters: int = option(1_000_000, "most text to hold out", TEXT)

    preprocessing_num_workers: int | None = option(
        None, "processes that tokenize; the default is one for each core, at most 8", TEXT, how=True
    )

    tokenizer: str | None = option(
        None, "folder or Hub id of a tokenizer to use instead of training one", TOKENIZER, how=True
    )
    vocab_size: int = option(8192, "most entries of the WordPiece vocabulary", TOKENIZER)
    lowercase: bool = option(True, "fold case", TOKENIZER)
    strip_accents: bool | None = option(None, "drop accents; the default is as lowercase", TOKENIZER)
    min_frequency: int = option(2, "how often what is merged, or added as a word, must occur", TOKENIZER)
    limit_alphabet: int = option(1000, "most characters to know; rarer ones become [UNK]", TOKENIZER)
    extend_vocab: int = option(
        0, "most whole words of the text to add to an existing tokenizer's vocabulary", TOKENIZER
    )

    def check(self) -> None:
        """Refuse what cannot be read, before anything is."""
        check_texts(self)
        self._check_types()
        if not self.text_paths() and not self.dataset:
            raise UserError("corpus names no text; give files, folders or python-docs")
        if self.streaming and not self.dataset:
            raise UserError(
                "streaming is for datasets, and none is given; leave it out, files are read in pieces anyway"
            )
        if self.dataset_config is not None and len(self.dataset) != 1:
            raise UserError("dataset_config is for a single dataset; of several, write each as ID:CONFIG")
        for name, config in self.named_datasets():
            if not name or config == "" or (config is not None and self.dataset_config not in (None, config)):
                raise UserError(f"dataset takes ID or ID:CONFIG, and one configuration for each, got {name}:{config}")
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", self.language):
            raise UserError(f"language must be an ISO 639 code such as en, zh or pt-br, got {self.language!r}")
        self._check_range("vocab_size", LEAST_VOCABULARY)
        self._check_range("limit_alphabet", 2)  # a text of one character holds nothing to learn
        for name in ("min_frequency", "max_validation_characters", "max_documents"):
            self._check_range(name, 1)
        self._check_processes("preprocessing_num_workers", 1)
        for name in ("min_paragraph_characters", "extend_vocab"):
            self._check_range(name, 0)
        self._check_range("validation_fraction", 0, above=True, below=1)
        if self.extend_vocab and self.existing_tokenizer() is None:
            raise UserError(
                "extend_vocab adds to a tokenizer that exists; give one, or raise vocab_size for one that is trained"
            )

    def existing_tokenizer(self) -> str | None:
        """Folder or Hub id of the tokenizer to use instead of training one."""
        return self.tokenizer

    def text_paths(self) -> list[str]:
        """The files and folders to read; `python-docs` if neither they nor datasets are named."""
        if self.corpus is None:
            return [] if self.dataset else ["python-docs"]
        return self.corpus

    def named_datasets(self) -> list[tuple[str, str | None]]:
        """Id and configuration of each dataset; a folder may have a colon in its name."""
        named = []
        for dataset in self.dataset:
            name, colon, config = dataset.rpartition(":")
            if not colon or Path(dataset).exists():
                name, config = dataset, self.dataset_config
            named.append((name, config))
        return named

    def settled(self) -> dict:
        """The options that the tokens on disk follow from."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(TextConfig) if not f.metadata["how"]}

    def _check_types(self):
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
            if not any(_is_a(value, kind) for kind in kinds):
                wanted = " or ".join(_in_words(kind) for kind in kinds if kind is not types.NoneType)
                raise UserError(f"{name} must be {wanted}, got {value!r}")

    def _check_range(self, name, least, most=None, above=False, below=None):
        value = getattr(self, name)
        if value is None:
            return
        # What is trained is computed in float32, where a very small number is 0 and a very large one infinite.
        rounded = _in_float32(value) if isinstance(value, float) else value

        def fits(number):
            within = number > least if above else number >= least
            return within and (most is None or number <= most) and (below is None or number < below)

        if not math.isfinite(rounded):
            raise UserError(f"{name} must be finite in float32 (at most 3.4e38), got {value}")
        if not (fits(value) and fits(rounded)):
            limits = [f"{'above' if above else 'at least'} {least}"]
            limits += [f"at most {most}"] * (most is not None) + [f"below {below}"] * (below is not None)
            shown = f"{value}, which is {rounded:g} in float32" if fits(value) else value
            raise UserError(f"{name} must be {' and '.join(limits)}, got {shown}")
        largest = LARGEST.get(name, LARGEST_WHOLE if isinstance(value, int) else math.inf)
        if value > largest:
            raise UserError(f"{name} must be at most {largest}, got {value}")

    def _check_processes(self, name, least):
        """Refuse more processes than four a core, or 16 where that is more: they would take turns, and memory each."""
        self._check_range(name, least)
        value, most = getattr(self, name), max(16, 4 * cores())
        if value is not None and value > most:
            raise UserError(
                f"{name}: this machine has {cores()} cores, so give at most {most} processes, got {value:,}"
            )


@dataclass(kw_only=True)
class PretrainConfig(TextConfig):
    """
    What one run does. Every field is an option of `d2l-bert pretrain`; recipes start from here.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    recipe: str = option("tiny", "named starting point for everything below", OUTPUT)

    max_eval_pairs: int = option(2000, "most held-out pairs to evaluate on", TEXT)

    max_seq_length: int = option(128, "most tokens in a pair", BATCHES)
    length_schedule: list[str] = option(
        [],
        "shorter pairs first, as many more in a step: 32:0.4 has 32 tokens in 40 % of the steps; or none",
        BATCHES,
        metavar="LENGTH:SHARE",
    )
    objective: Literal["nsp", "sop", "none"] = option(
        "nsp", "second loss: next sentence (BERT), sentence order (ALBERT), or none (RoBERTa)", BATCHES
    )
    pairing: Literal["segments", "sentences"] = option(
        "segments", "several sentences a segment, as the original BERT; or one and the next, as the book", BATCHES
    )
    short_seq_prob: float = option(0.1, "share of pairs cut shorter at random (segments)", BATCHES)
    packing: bool = option(False, "fill rows with as many pairs as fit; they cannot see each other", BATCHES, how=True)
    source_weights: list[str] = option(
        [],
        "share of an epoch's tokens for each source, in the order of --corpus and --dataset; the default is all of "
        "each, once",
        BATCHES,
        metavar="WEIGHT",
    )
    mlm_probability: float | str = option(
        0.15, "share of tokens to predict; 0.30->0.15 goes from one to the other over the run", BATCHES
    )
    masking: Masking = option(
        "token", "predict single tokens, whole words, or spans of words as SpanBERT does", BATCHES
    )

    init_from: str | None = option(
        None,
        "d2l-bert model to start from, a folder or Hub id: its weights, architecture and tokenizer",
        OPTIMIZER,
        metavar="MODEL",
    )
    attention_init: Literal["normal", "neighbours"] = option(
        "normal", "BERT's random start, or heads that look at the tokens before and after", OPTIMIZER
    )
    max_steps: int | None = option(None, "optimizer steps", LENGTH)
    num_train_epochs: float | None = option(None, "passes over the training text", LENGTH)
    max_minutes: float | None = option(None, "minutes of training; steps are timed first, then fixed", LENGTH)

    global_batch_size: int = option(32, "pairs in an optimizer step, whatever the machine", OPTIMIZER)
    batch_size_schedule: list[str] = option(
        [],
        "smaller steps first: 64:0.1 has 64 pairs a step in the first 10 % of the steps; or none",
        OPTIMIZER,
        metavar="BATCH:SHARE",
    )
    optim: Optim = option(
        "adamw", "AdamW; or Muon for the matrices of the encoder's blocks, and AdamW for all else", OPTIMIZER
    )
    learning_rate: float = option(1e-3, "peak rate", OPTIMIZER)
    lr_scheduler_type: Schedule = option(
        "linear",
        "how the rate falls after warm-up: on a straight line, along half a cosine, or not before the end",
        OPTIMIZER,
    )
    warmup_ratio: float = option(0.1, "share of the steps in which the rate rises", OPTIMIZER)
    decay_ratio: float | None = option(
        None, f"share of the steps in which warmup_stable_decay falls; the default is {DECAY_RATIO}", OPTIMIZER
    )
    weight_decay: float = option(0.01, "decay of weights; biases and LayerNorms have none", OPTIMIZER)
    adam_beta1: float = option(0.9, "AdamW's first beta", OPTIMIZER)
    adam_beta2: float = option(0.98, "AdamW's second beta", OPTIMIZER)
    adam_epsilon: float = option(1e-6, "AdamW's epsilon", OPTIMIZER)
    max_grad_norm: float = option(1.0, "longest gradient; a longer one is scaled down", OPTIMIZER)
    ema_decay: float | None = option(
        None,
        "evaluate and publish a moving average of the weights, of which a step keeps so much: 0.999 averages about "
        "1,000 steps",
        OPTIMIZER,
    )
    seed: int = option(42, "everything random follows from it", OPTIMIZER)

    micro_batch_size: int | Literal["auto"] | None = option(
        None,
        "most pairs of full length computed at once (64), or as many tokens of shorter ones; auto finds the fastest "
        "that the memory holds",
        MACHINE,
        how=True,
        metavar="N|auto",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None, "the default is bf16 where the processor has it", MACHINE
    )
    torch_compile: Literal["auto", "true", "false"] = option(
        "auto",
        "compile the encoder; auto does where the run is long enough to earn the time back, and says so",
        MACHINE,
        how=True,
    )
    gradient_checkpointing: bool = option(False, "compute activations twice to save memory", MACHINE, how=True)
    attn_implementation: Literal["eager", "sdpa", "flex_attention"] | None = option(
        None, "kernel that computes attention; the default is the faster one here, eager or sdpa", MACHINE, how=True
    )
    dataloader_num_workers: int | None = option(
        None,
        "processes that make batches; the default is 1 beside a GPU and 0, a thread of this process, on a processor",
        MACHINE,
        how=True,
    )

    output_dir: str | None = option(
        None, "folder for the model; the default is d2l-bert-<recipe>-<corpus> here", OUTPUT, how=True, metavar="DIR"
    )
    overwrite_output_dir: bool = option(False, "replace the run that is there", OUTPUT, how=True)
    resume_from_checkpoint: str | None = option(
        None, "'latest', or a checkpoint folder, to go on from", OUTPUT, how=True, metavar="PATH"
    )
    save_steps: int | None = option(None, "steps between checkpoints; the default makes ten", OUTPUT, how=True)
    save_total_limit: int = option(2, "checkpoints to keep", OUTPUT, how=True)
    eval_steps: int | None = option(None, "steps between evaluations; the default makes ten", OUTPUT, how=True)
    logging_steps: int | None = option(
        None, "steps between lines of the log; the default writes a hundred", OUTPUT, how=True
    )
    dry_run: bool = option(
        False,
        "only try everything out, on a pair or two of each length, and say what the run would take; nothing is kept",
        OUTPUT,
        how=True,
    )
    report_to: list[str] = option(
        [],
        "trackers to report to: tensorboard, wandb, trackio, mlflow, comet_ml, ...; or none",
        OUTPUT,
        how=True,
        metavar="NAME",
    )

    license: str | None = option(
        None,
        "licence of the model, for its card (a Hub identifier); a model of python-docs alone has apache-2.0",
        HUB,
        how=True,
        metavar="ID",
    )
    push_to_hub: bool = option(False, "publish the model when the run ends, as d2l-bert publish does", HUB, how=True)
    hub_model_id: str | None = option(
        None, "owner/name of the repository; the default is the output folder's name", HUB, how=True, metavar="REPO_ID"
    )
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = option(
        "end",
        "what is sent before the end: nothing; every model saved, to main; the same to the branch last-checkpoint "
        "(both pass over those saved while one is being sent); all of them, each to a branch of its name",
        HUB,
        how=True,
    )
    hub_private_repo: bool = option(
        True, "keep the repository private; false makes it public when the finished model is sent", HUB, how=True
    )

    def __post_init__(self):
        """Take a number written as text, and Python's True and False, as what they say."""
        if isinstance(self.torch_compile, bool):
            self.torch_compile = str(self.torch_compile).lower()
        if isinstance(self.mlm_probability, str):
            with contextlib.suppress(ValueError):  # 0.30->0.15 stays a text
                self.mlm_probability = float(self.mlm_probability)

    def check(self) -> None:
        """Refuse what cannot be run, before anything is read or written."""
        super().check()
        length = [name for name in LENGTH_OPTIONS if getattr(self, name) is not None]
        if len(length) != 1:
            given = " and ".join(length) or "none"
            raise UserError(f"the length of the run needs exactly one of {', '.join(LENGTH_OPTIONS)}; got {given}")
        if not self.push_to_hub:
            for name in HUB_OPTIONS:
                if getattr(self, name) != getattr(PretrainConfig, name):
                    raise UserError(f"{name} is for push_to_hub; give that too, or leave it out")
        if self.dry_run and self.resume_from_checkpoint:
            raise UserError("dry_run begins a run of its own; leave resume_from_checkpoint out")
        if self.micro_batch_size != "auto":
            self._check_range("micro_batch_size", 1)
        whole = ["max_eval_pairs", "max_steps", "global_batch_size"]
        for name in (*whole, "save_steps", "save_total_limit", "eval_steps", "logging_steps"):
            self._check_range(name, 1)
        for name in ("num_train_epochs", "max_minutes", "learning_rate", "adam_epsilon", "max_grad_norm"):
            self._check_range(name, 0, above=True)
        self._check_range("weight_decay", 0)
        self._check_processes("dataloader_num_workers", 0)
        self._check_range("seed", 0, 2**63 - 1)
        for name in ("adam_beta1", "adam_beta2"):
            self._check_range(name, 0, below=1)
        self._check_range("ema_decay", 0, above=True, below=1)
        for share in self.mlm_probabilities():
            if not 0 < share <= 1:
                raise UserError(f"mlm_probability must be above 0 and at most 1, got {self.mlm_probability}")
        for name in ("short_seq_prob", "warmup_ratio"):
            self._check_range(name, 0, 1)
        self._check_decay()
        self._check_range("max_seq_length", 8)
        if self.pairing == "sentences" and self.short_seq_prob != type(self).short_seq_prob:
            raise UserError("short_seq_prob is for segments, and pairing is sentences; leave it out")
        for weight in self.source_weights:
            if not re.fullmatch(r"\d*\.?\d+", weight):
                raise UserError(f"source_weights are numbers such as 2 or 0.5, got {weight!r}")
            if not math.isfinite(float(weight)):
                raise UserError(
                    f"source_weights: {weight:.20}... is too large; give smaller numbers, such as 2 or 0.5"
                )
        if self.source_weights and not any(float(weight) for weight in self.source_weights):
            raise UserError("source_weights are all 0; give one source at least some weight")
        self.stages(1)
        if self.optim == "muon" and self.mixed_precision == "fp16":  # Accelerate's scaler serves one optimizer
            raise UserError("optim muon does not go with mixed_precision fp16; give bf16, or adamw")
        if self.init_from is not None and self.attention_init != "normal":
            raise UserError(
                f"attention_init {self.attention_init} is for a fresh model, and init_from gives a trained one; "
                f"leave it out"
            )

    def existing_tokenizer(self) -> str | None:
        """Folder or Hub id of the tokenizer to use instead of training one."""
        return self.init_from if self.tokenizer is None else self.tokenizer

    def _check_decay(self):
        if self.lr_scheduler_type != "warmup_stable_decay":
            if self.decay_ratio is not None:
                schedule = self.lr_scheduler_type
                raise UserError(
                    f"decay_ratio is for warmup_stable_decay, and lr_scheduler_type is {schedule}; leave it out"
                )
            return
        self._check_range("decay_ratio", 0, 1, above=True)
        if self.warmup_ratio + self._decay() > 1:
            raise UserError(
                f"warmup_ratio ({self.warmup_ratio}) and decay_ratio ({self._decay()}) are more than all steps; "
                f"lower one"
            )

    def _decay(self):
        return DECAY_RATIO if self.decay_ratio is None else self.decay_ratio

    def schedule_steps(self, max_steps: int) -> tuple[int, int]:
        """Steps in which the rate rises, and those in which `warmup_stable_decay` falls."""
        return math.ceil(self.warmup_ratio * max_steps), math.floor(self._decay() * max_steps)

    def stages(self, max_steps: int) -> list[tuple[int, int, int]]:
        """
        The stretches of equal steps: first step, counted from 0, length of pairs, and pairs of full length in a step.

        The last has `max_seq_length` and `global_batch_size`.
        """
        lengths = self._stages("length_schedule", "LENGTH", "max_seq_length", 8, max_steps)
        batch_sizes = self._stages("batch_size_schedule", "BATCH", "global_batch_size", 1, max_steps)
        starts = sorted({start for start, _ in (*lengths, *batch_sizes)})
        return [(start, _value_at(start, lengths), _value_at(start, batch_sizes)) for start in starts]

    def _stages(self, schedule, what, last, least, max_steps):
        """First step and value of each entry WHAT:SHARE of a schedule, and of the option `last`, which ends it."""
        stages, share, most = [], 0.0, getattr(self, last)
        for entry in getattr(self, schedule):
            value, _, part = entry.partition(":")
            if not value.isdecimal() or not re.fullmatch(r"0?\.\d+", part) or not 0 < float(part) < 1:
                raise UserError(f"{schedule} takes {what}:SHARE such as {least + 8}:0.4, got {entry!r}")
            if not least <= int(value) < most:
                raise UserError(f"{schedule}: {value} must be at least {least} and below {last} ({most})")
            if stages and int(value) <= stages[-1][1]:
                raise UserError(f"{schedule}: {value} must be more than the {stages[-1][1]} before it")
            stages.append((round(share * max_steps), int(value)))
            share += float(part)
        if share >= 1:
            raise UserError(f"{schedule}: its shares must leave some steps for {last}")
        return [*stages, (round(share * max_steps), most)]

    def mlm_probabilities(self) -> tuple[float, float]:
        """The share to predict in the first step and in the last; evaluation takes the last."""
        if not isinstance(self.mlm_probability, str):
            return self.mlm_probability, self.mlm_probability
        number = r"(\d*\.?\d+)"
        found = re.fullmatch(f"{number}->{number}", self.mlm_probability)
        if not found:
            raise UserError(f"mlm_probability takes 0.15, or 0.30->0.15, got {self.mlm_probability!r}")
        return float(found[1]), float(found[2])

    def known_license(self) -> str | None:
        """The licence that was given, or that of models of the embedded corpus alone."""
        is_ours = self.text_paths() == ["python-docs"] and not self.dataset
        is_ours &= self.existing_tokenizer() is None  # nor a model that it starts from
        return self.license or ("apache-2.0" if is_ours else None)

    def identity(self) -> dict:
        """The options that say what is trained: on resuming they must be the same."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata["how"]}


@dataclass(kw_only=True)
class PublishConfig:
    """
    How a model folder is sent to the Hub. Every field is an option of `d2l-bert publish`.

    Raises:
        UserError: from `check`, for a text that is empty, or a branch that git does not allow.
    """

    public: bool = option(
        False,
        "let everybody see the repository with all its commits, once all is sent; a new one is private without it",
        HUB,
    )
    license: str | None = option(
        None, "licence of the model (a Hub identifier), if its card has none or another", HUB, metavar="ID"
    )
    revision: str | None = option(
        None, "branch to send it to, made if need be, or to propose it to; main without it", HUB, metavar="BRANCH"
    )
    create_pr: bool = option(False, "propose it as a pull request; not together with public", HUB)
    commit_message: str | None = option(None, "summary of the commit", HUB, metavar="TEXT")
    collection: str | None = option(
        None, "collection to put the model into: its slug, or its title under the same owner", HUB, metavar="TITLE"
    )
    changed_code: bool = option(False, "the folder's code differs from the installed package's, and is meant to", HUB)
    dry_run: bool = option(False, "check everything and list what would be sent, with sizes; nothing is", HUB)

    def check(self) -> None:
        """Refuse what the Hub would refuse, before anything is read or sent."""
        check_texts(self)
        if self.revision is not None and NO_BRANCH.search(self.revision):
            raise UserError(
                f"revision {self.revision!r}: git allows no branch of this name; take letters, digits, '-' and '_'"
            )


# The names that `git check-ref-format --branch` refuses, and @, which git reads as HEAD.
NO_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/]|/\Z|(^|/)\.|\.\Z|\.lock(/|\Z)|^@\Z|^HEAD\Z")


def check_texts(config) -> None:
    """
    Refuse an option whose text is empty, as an unset shell variable leaves it, or holds a NUL character.

    Args:
        config: a dataclass of options.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.strip():
                raise UserError(f"{field.name} is empty (got {text!r}); give a value, or leave it out")
            if isinstance(text, str) and "\0" in text:
                raise UserError(f"{field.name} {text!r}: holds a NUL character, which no name has; take it out")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_float32(value):
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def _value_at(step, stages):
    return next(value for start, value in reversed(stages) if start <= step)


def _in_words(kind):
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "a list of texts"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]


def _is_a(value, kind):
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


HUB_OPTIONS = ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo")

LENGTH_OPTIONS = ("max_steps", "num_train_epochs", "max_minutes")

# What an existing tokenizer settles.
TOKENIZER_TRAINING_OPTIONS = ("vocab_size", "lowercase", "strip_accents", "min_frequency", "limit_alphabet")

# What a run may change in the architecture of the model that it starts from.
FREE_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
