"""The numbers of one pretraining run. They stay in `run_config.json`; the architecture's travel in `config.json`."""

import contextlib
import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

from d2l_bert.errors import UserError
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.options import BATCHES, HUB, LENGTH, MACHINE, OPTIMIZER, OUTPUT, TEXT, option
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.training.masking import Masking
from d2l_bert.training.optim import Optim, Schedule


# Where a fall over 20 % of the steps ends, a cosine ends too (Hägele et al., 2024, section 3).
DECAY_RATIO = 0.2


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
    packing: bool = option(
        False, "fill rows with as many pairs as fit; they cannot see each other", BATCHES, identity=False
    )
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
    max_steps: int | None = option(None, "optimizer steps", LENGTH, largest=2**31 - 1)
    num_train_epochs: float | None = option(None, "passes over the training text", LENGTH, largest=1_000_000)
    max_minutes: float | None = option(
        None,
        "minutes of training; steps are timed first, then fixed",
        LENGTH,
        largest=10_000_000,  # 19 years
    )

    global_batch_size: int = option(
        32,
        "pairs in an optimizer step, whatever the machine",
        OPTIMIZER,
        largest=2**24,  # LAMB (You et al., 2020) trains BERT with 2**16
    )
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
        identity=False,
        metavar="N|auto",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None, "the default is bf16 where CPU or GPU has it", MACHINE
    )
    torch_compile: Literal["auto", "true", "false"] = option(
        "auto",
        "compile the encoder; auto does where the run is long enough to earn the time back, and says so",
        MACHINE,
        identity=False,
    )
    gradient_checkpointing: bool = option(False, "compute activations twice to save memory", MACHINE, identity=False)
    attn_implementation: Literal["eager", "sdpa", "flex_attention"] | None = option(
        None,
        "kernel that computes attention; the default is the faster one here, eager or sdpa",
        MACHINE,
        identity=False,
    )
    dataloader_num_workers: int | None = option(
        None,
        "processes that make batches; the default is 1 beside a GPU and 0, a thread of this process, on a CPU",
        MACHINE,
        identity=False,
    )

    output_dir: str | None = option(
        None,
        "folder for the model; the default is d2l-bert-<recipe>-<corpus> here",
        OUTPUT,
        identity=False,
        metavar="DIR",
    )
    overwrite_output_dir: bool = option(False, "replace the run that is there", OUTPUT, identity=False)
    resume_from_checkpoint: str | None = option(
        None, "'latest', or a checkpoint folder, to go on from", OUTPUT, identity=False, metavar="PATH"
    )
    save_steps: int | None = option(None, "steps between checkpoints; the default makes ten", OUTPUT, identity=False)
    save_total_limit: int = option(2, "checkpoints to keep", OUTPUT, identity=False)
    eval_steps: int | None = option(None, "steps between evaluations; the default makes ten", OUTPUT, identity=False)
    logging_steps: int | None = option(
        None, "steps between lines of the log; the default writes a hundred", OUTPUT, identity=False
    )
    dry_run: bool = option(
        False,
        "only try everything out, on a pair or two of each length, and say what the run would take; nothing is kept",
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
        "licence of the model, for its card (a Hub identifier); a model of python-docs alone has apache-2.0",
        HUB,
        identity=False,
        metavar="ID",
    )
    push_to_hub: bool = option(
        False, "publish the model when the run ends, as d2l-bert publish does", HUB, identity=False
    )
    hub_model_id: str | None = option(
        None,
        "owner/name of the repository; the default is the output folder's name",
        HUB,
        identity=False,
        metavar="REPO_ID",
    )
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = option(
        "end",
        "what is sent before the end: nothing; every model saved, to main; the same to the branch last-checkpoint "
        "(both pass over those saved while one is being sent); all of them, each to a branch of its name",
        HUB,
        identity=False,
    )
    hub_private_repo: bool = option(
        True, "keep the repository private; false makes it public when the finished model is sent", HUB, identity=False
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
        if self.warmup_ratio + self.decay_share() > 1:
            raise UserError(
                f"warmup_ratio ({self.warmup_ratio}) and decay_ratio ({self.decay_share()}) are more than all steps; "
                f"lower one"
            )

    def decay_share(self) -> float:
        """The share of the steps in which `warmup_stable_decay` falls."""
        return DECAY_RATIO if self.decay_ratio is None else self.decay_ratio

    def schedule_steps(self, max_steps: int) -> tuple[int, int]:
        """Steps in which the rate rises, and those in which `warmup_stable_decay` falls."""
        return math.ceil(self.warmup_ratio * max_steps), math.floor(self.decay_share() * max_steps)

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
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["identity"]}


def _value_at(step, stages):
    return next(value for start, value in reversed(stages) if start <= step)


HUB_OPTIONS = ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo")

LENGTH_OPTIONS = ("max_steps", "num_train_epochs", "max_minutes")


def check_architecture(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """Refuse a model that the run's pairs do not fit into."""
    if architecture.type_vocab_size < 2:
        raise UserError("type_vocab_size must be at least 2: a pair has two segments")
    if run.max_seq_length > architecture.max_position_embeddings:
        raise UserError(
            f"max_seq_length ({run.max_seq_length}) is beyond the model's positions "
            f"({architecture.max_position_embeddings}); lower it"
            + (", or raise max_position_embeddings" if run.init_from is None else "")
        )
