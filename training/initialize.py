"""What a run starts from: fresh weights, or a saved model, and its text with an existing tokenizer."""

import copy
import dataclasses
import itertools
import logging
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from transformers import (
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from d2l_bert.folders import new_folder
from d2l_bert.messages import UserError, explained, reading_model, result_in_words, shortened
from d2l_bert.modeling import conversion
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing_tokenizers import has_tokenizer, load_tokenizer
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import (
    PreparedText,
    corpus_is_prepared,
    fixed_options,
    write_prepared_folder,
)
from d2l_bert.tokenization.wordpiece import (
    pieces,
)
from d2l_bert.training.config import FREE_FIELDS, PretrainConfig


logger = logging.getLogger(__name__)


# The sinusoids of the position embeddings have wavelengths from 2 pi to 2 pi times this number. A fresh model has to
# tell neighbouring positions apart; with the Transformer's 10,000 most columns would be nearly constant.
LONGEST_WAVE = 100


def make_model(architecture: D2lBertConfig, run: PretrainConfig, tokenizer, is_resumed: bool) -> PreTrainedModel:
    """
    The model of a run with its initial weights, in training mode.

    Args:
        tokenizer: the run's.
        is_resumed: whether the caller loads the weights of a checkpoint into the model; `init_from` is then not read.
    """
    if run.init_from is not None and not is_resumed:
        model = start_from(run, architecture, tokenizer)
    else:
        model = _class_of(run)._from_config(architecture, attn_implementation=run.attn_implementation)
    if run.attention_init != "normal":  # bigrams, too: `start_from_bigrams` leaves this where it finds too few
        look_at_neighbours(model)
    if run.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def _class_of(run):
    """The class of a run's model: without a pair task it has no head for pairs, whose weights would stay untrained."""
    return D2lBertForMaskedLM if run.objective == "none" else D2lBertForPreTraining


@torch.no_grad()
def look_at_neighbours(model, generator: torch.Generator | None = None) -> None:
    """
    Let the attention heads of the first block attend to the token before (even heads) or the token after (odd heads).

    A fresh BERT attends to all tokens alike. For a good part of a short run the model then predicts masked tokens from
    token frequencies alone, until a head has learnt to attend to neighbouring tokens. Here the position embeddings
    start as sinusoids (Vaswani et al., 2017; d2l, section 11.6), in which a shift by one position is a rotation. The
    key matrix of a head starts as the query matrix, rotated by one position. The value and output matrices of every
    block start larger than usual, so that the attended token has an effect on the output. All weights are trained.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM` with fresh weights, changed in place.
        generator: source of randomness; PyTorch's global generator by default.

    Raises:
        UserError: `hidden_size` is odd, but sines and cosines come in pairs.
    """
    config = model.config
    if config.hidden_size % 2:
        raise UserError(
            f"attention_init neighbours needs an even hidden_size, got {config.hidden_size}; give an even one, or "
            f"attention_init normal"
        )
    bert = model.bert
    hidden_size = config.hidden_size
    positions = bert.embeddings.position_embeddings.weight
    waves = LONGEST_WAVE ** (-torch.arange(0, hidden_size, 2) / hidden_size)  # (H / 2,)
    angles = torch.arange(len(positions))[:, None] * waves
    # A sine has a standard deviation of 1 / sqrt(2). Position embeddings get twice that of the other embeddings.
    waves_of_positions = interleave(angles.sin(), angles.cos())
    positions.copy_(waves_of_positions * 2 * config.initializer_range * 2**0.5)

    first = bert.encoder.layer[0].attention
    for head, rows in enumerate(torch.arange(hidden_size).split(first.head_size)):
        query = torch.empty(len(rows), hidden_size)
        nn.init.normal_(query, std=hidden_size**-0.5, generator=generator)
        first.query.weight[rows] = query
        first.key.weight[rows] = rotated(query, waves if head % 2 else -waves)
    for block in bert.encoder.layer:
        for linear in (block.attention.value, block.attention.output):
            nn.init.normal_(linear.weight, std=0.7 * hidden_size**-0.5, generator=generator)


def rotated(query: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """
    The key matrix (R, 2C) with which a query matrix (R, 2C) finds the position whose sinusoids have turned on by these
    angles (C,).
    """
    sines = query[:, 0::2]
    cosines = query[:, 1::2]
    rotated_sines = sines * angles.cos() + cosines * angles.sin()
    rotated_cosines = cosines * angles.cos() - sines * angles.sin()
    return interleave(rotated_sines, rotated_cosines)


def interleave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """A matrix (R, 2C) with the columns of `even` (R, C) and of `odd` (R, C) in turn."""
    return torch.stack((even, odd), dim=-1).flatten(1)


# ---------------------------------------------------------------------------------------------------------------------
# A saved model to start from


def read_architecture(name: str) -> D2lBertConfig:
    """
    The architecture of a saved d2l-bert model, or of a stock BERT as one.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: there is no model, its `config.json` cannot be read, or it is a model of another kind.
    """
    with reading_model(name, "init_from "):
        config = conversion.read_config(name)
        if isinstance(config, BertConfig):
            config = conversion.our_config(config)
        if not isinstance(config, D2lBertConfig):
            raise UserError(f"it is a {config.model_type} model, not a d2l-bert one or a stock BERT; give another")
    return D2lBertConfig(**{field: getattr(config, field) for field in D2lBertConfig.__annotations__})


def start_from(
    run: PretrainConfig, architecture: D2lBertConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """
    The model of `init_from` in float32, in training mode. Heads that it lacks get fresh weights, with a warning.

    Args:
        architecture: the saved model's, except dropout, which the run may choose.
        tokenizer: the run's; entries that the model's tokenizer lacks get embeddings from `extend_embeddings`. None
            to find out, before any text is read, whether the model can be loaded.

    Raises:
        UserError: the model or its tokenizer cannot be read, there is no tokenizer, or its vocabulary size is not the
            model's; the architecture is not the model's; weights are missing, and not just those of whole heads; or
            the vocabulary of the run does not begin with the model's.
    """
    label = f"init_from {run.init_from}"
    saved = read_architecture(run.init_from)
    with reading_model(run.init_from, "init_from "):
        place = run.init_from if has_tokenizer(run.init_from) or not run.tokenizer else run.tokenizer
    known = load_tokenizer(place)
    for field in D2lBertConfig.__annotations__:
        of_model = getattr(saved, field)
        of_run = getattr(architecture, field)
        if of_model != of_run and field not in (*FREE_FIELDS, "vocab_size", "pad_token_id"):
            raise UserError(f"{label}: {field} is {of_model!r} there, and {of_run!r} here; take the model's value")
    if len(known) != saved.vocab_size:
        raise UserError(
            f"{label}: the model's vocabulary has {saved.vocab_size} entries, and tokenizer {place} has {len(known)}; "
            f"give the tokenizer that the model was trained with"
        )
    tokenizer_of_run = tokenizer or (load_tokenizer(run.tokenizer) if run.tokenizer else known)
    with explained(
        f"{label}: another vocabulary", "use the model's tokenizer, unchanged or with --extend_vocab", UserError
    ):
        added_entries(known, tokenizer_of_run)
    config = copy.deepcopy(architecture)
    config.vocab_size = len(known)
    with reading_model(run.init_from, "init_from "):
        saved_model, _ = conversion.read_model(run.init_from)
        model, missing, _ = conversion.load_and_compare(
            _class_of(run),
            None,
            state_dict=saved_model.state_dict(),
            config=config,
            attn_implementation=run.attn_implementation,
            dtype=torch.float32,
        )
    if tokenizer is not None:
        extend_embeddings(model, known, tokenizer)
        if missing:
            names = shortened(", ".join(sorted(missing)), 300)
            logger.warning(f"{label}: the model lacks weights of heads, which start fresh: {names}")
    return model.train()


@torch.no_grad()
def extend_embeddings(
    model: PreTrainedModel, old_tokenizer: PreTrainedTokenizerBase, new_tokenizer: PreTrainedTokenizerBase
) -> None:
    """
    Add embeddings to a model for words that were added to its vocabulary. All other weights stay unchanged.

    The new rows of the word embeddings, the decoder and the decoder's bias are means over the pieces into which the
    old tokenizer splits the word, as in Fast Vocabulary Transfer (Gee et al., 2022). For a word that was unknown they
    are the rows of [UNK].

    Raises:
        UserError: `new_tokenizer` does not begin with the vocabulary of `old_tokenizer`.
    """
    words = added_entries(old_tokenizer, new_tokenizer)
    model.resize_token_embeddings(len(new_tokenizer), mean_resizing=False)
    decoder = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight, decoder.weight, decoder.bias]  # (V, H), (V, H), (V,)
    for row, word in enumerate(words, len(old_tokenizer)):
        parts = [piece.id for piece in old_tokenizer.backend_tokenizer.model.tokenize(word)]
        for table in tables:
            table[row] = table[parts].mean(0)


def added_entries(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[str]:
    """
    The entries that the vocabulary of `new` has after those of `old`, in the order of ids.

    Raises:
        UserError: the vocabulary of `new` does not begin with all entries of `old`.
    """
    before = pieces(old)
    after = pieces(new)
    for entry, at_its_id in itertools.zip_longest(before, after[: len(before)]):
        if entry != at_its_id:
            raise UserError(f"the tokenizer must begin with the model's vocabulary, and lacks {entry!r} in its place")
    return after[len(before) :]


def refuse_what_is_fixed(run: TextConfig, given: Collection[str], fixed_by_model: Collection[str]) -> None:
    """
    Refuse an option whose value follows from the model, the tokenizer or the prepared folder that the run names.

    Args:
        given: the names of the options that were given.
        fixed_by_model: the fields of an architecture that a model in `init_from` decides.

    Raises:
        UserError: such an option was given.
    """
    fixed = fixed_options(run)
    if run.init_from is not None:
        for name in fixed_by_model:
            fixed[name] = f"the model in init_from ({run.init_from})"
    for name, by in fixed.items():
        if name in given:
            raise UserError(f"{name} is fixed by {by}; leave {name} out")


@dataclasses.dataclass(frozen=True)
class PrepareResult:
    """
    A text that was prepared for training.

    Args:
        output_dir: the folder with the tokenizer and the token ids, which `pretrain` takes as a corpus.
        counts: what was read: `train_documents`, `train_tokens`, `train_words`, `held_out_documents`,
            `held_out_tokens`, the tokenizer's figures and so on, as in prepared.json.
        account: what was found in the text, in lines for a person.
    """

    output_dir: Path
    counts: dict = dataclasses.field(repr=False)
    account: list[str] = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        names = ("train_documents", "train_tokens", "held_out_documents", "held_out_tokens")
        return result_in_words(self, {name: self.counts[name] for name in names})

    @property
    def report(self) -> str:
        """What the command prints."""
        return f"train on it: d2l-bert pretrain --corpus {self.output_dir}"


def prepare_folder(run: TextConfig, output_dir: str, given: Collection[str]) -> PrepareResult:
    """
    Read a text, train its tokenizer or take the given one, and write a prepared folder.

    Args:
        output_dir: a new folder.
        given: the names of the options that were given.

    Raises:
        UserError: an option, the text or the folder cannot be used; no folder is left.
    """
    run.check()
    refuse_what_is_fixed(run, given, fixed_by_model=())
    if corpus_is_prepared(run):
        raise UserError(f"corpus {run.text_paths()}: is prepared already; give its text")
    with new_folder(Path(output_dir)) as folder:
        text = prepare_with_tokenizer(run)
        write_prepared_folder(text, folder)
    return PrepareResult(output_dir=Path(output_dir), counts=text.counts(), account=[*text.account])


def prepare_with_tokenizer(run: TextConfig) -> PreparedText:
    """The text of a run (`prepare`), with the existing tokenizer that the run names, if it does."""
    name = None if corpus_is_prepared(run) else run.existing_tokenizer()
    return prepare(run, None if name is None else load_tokenizer(name))
