"""The weights that a run starts from: fresh, with heads that attend to neighbours, or those of a saved model."""

import copy
import itertools
import logging
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, BertConfig, PreTrainedModel, PreTrainedTokenizerBase

from d2l_bert.errors import UserError, explained, reading_model, refuse_first
from d2l_bert.modeling import bert_checkpoints, conversion
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.conversion import FREE_FIELDS
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization.wordpiece import pieces
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.existing_tokenizers import has_tokenizer, load_tokenizer


logger = logging.getLogger(__name__)


# The sinusoids of the position embeddings have wavelengths from 2 pi to 2 pi times this number. A fresh model has to
# tell neighbouring positions apart; with the Transformer's 10,000 most columns would be nearly constant.
LONGEST_WAVE = 100

# Modules that a saved model may lack, with their names in messages.
HEADS = {"mlm": "MLM head", "nsp": "NSP head", "bert.pooler": "pooler"}


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
    config, bert = model.config, model.bert
    if config.hidden_size % 2:
        raise UserError(
            f"attention_init neighbours needs an even hidden_size, got {config.hidden_size}; give an even one, or "
            f"attention_init normal"
        )
    hidden_size, positions = config.hidden_size, bert.embeddings.position_embeddings.weight
    waves = LONGEST_WAVE ** (-torch.arange(0, hidden_size, 2) / hidden_size)  # (H / 2,)
    angles = torch.arange(len(positions))[:, None] * waves
    # A sine has a standard deviation of 1 / sqrt(2). Position embeddings get twice that of the other embeddings.
    positions.copy_(interleave(angles.sin(), angles.cos()) * 2 * config.initializer_range * 2**0.5)

    first = bert.encoder.layer[0].attention
    for head, rows in enumerate(torch.arange(hidden_size).split(first.head_size)):
        nn.init.normal_(query := torch.empty(len(rows), hidden_size), std=hidden_size**-0.5, generator=generator)
        shift = waves if head % 2 else -waves
        sines, cosines = query[:, 0::2], query[:, 1::2]
        first.query.weight[rows] = query
        first.key.weight[rows] = interleave(
            sines * shift.cos() + cosines * shift.sin(), cosines * shift.cos() - sines * shift.sin()
        )
    for block in bert.encoder.layer:
        for linear in (block.attention.value, block.attention.output):
            nn.init.normal_(linear.weight, std=0.7 * hidden_size**-0.5, generator=generator)


def interleave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """A matrix (R, 2C) with the columns of `even` (R, C) and of `odd` (R, C) in turn."""
    return torch.stack((even, odd), dim=-1).flatten(1)


def read_architecture(name: str) -> D2lBertConfig:
    """
    The architecture of a saved d2l-bert model, or of a stock BERT as one.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: there is no model, its `config.json` cannot be read, or it is a model of another kind.
    """
    with reading_model(name, "init_from "):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if isinstance(config, BertConfig):
            return D2lBertConfig(**bert_checkpoints.shared_fields(config), embedding_layer_norm=True)
        if not isinstance(config, D2lBertConfig):
            raise UserError(f"it is a {config.model_type} model, not a d2l-bert one or a stock BERT; give another")
    return D2lBertConfig(**{field: getattr(config, field) for field in D2lBertConfig.__annotations__})


def read_start_tokenizer(name: str, given: str | None = None) -> PreTrainedTokenizerBase:
    """
    The tokenizer whose ids the embeddings of a saved model have.

    Args:
        name: the model, a folder or an id on the Hub.
        given: the tokenizer of the run's options. If the model was saved without a tokenizer, `given` is returned;
            otherwise `given` must be the model's tokenizer or an extension.

    Raises:
        UserError: the model or the tokenizer cannot be read, there is no tokenizer, its vocabulary size is not the
            model's, or `given` is another tokenizer.
    """
    model_label, vocab_size = f"init_from {name}", read_architecture(name).vocab_size
    with reading_model(name, "init_from "):
        has_own = has_tokenizer(name)
    if not has_own and given is None:
        raise UserError(
            f"{model_label}: the model has no tokenizer; give --tokenizer, or put the model's tokenizer.json beside "
            f"its config.json"
        )
    tokenizer = load_tokenizer(name if has_own else given)
    if len(tokenizer) != vocab_size:
        raise UserError(
            f"{model_label}: the model's vocabulary has {vocab_size} entries, and tokenizer "
            f"{name if has_own else given} has {len(tokenizer)}; give the tokenizer that the model was trained with"
        )
    if has_own and given is not None:
        _refuse_another_vocabulary(model_label, tokenizer, load_tokenizer(given))
    return tokenizer


def start_from(
    model_class: type[PreTrainedModel],
    name: str,
    architecture: D2lBertConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    given: str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """
    A saved model in float32, in training mode. Heads that the saved model lacks get fresh weights, with a warning.

    Args:
        model_class: the class to load, with both pretraining heads or with the MLM head alone.
        name: the model, a folder or an id on the Hub.
        architecture: the saved model's, except dropout, which the run may choose.
        tokenizer: the run's; entries that the model's tokenizer lacks get embeddings from `extend_embeddings`. None
            to find out, before any text is read, whether the model can be loaded.
        given: as in `read_start_tokenizer`.
        attn_implementation: Transformers' name of the attention kernel.

    Raises:
        UserError: as in `read_start_tokenizer`; the architecture is not the model's (dropout may differ); weights are
            missing, and not just those of whole heads (`HEADS`); or the run's vocabulary does not begin with the
            model's.
    """
    saved, known = read_architecture(name), read_start_tokenizer(name, given)
    values = {field: (getattr(saved, field), getattr(architecture, field)) for field in D2lBertConfig.__annotations__}
    cases = {
        f"{field} is {of_model!r} there, and {of_run!r} here; take the model's value": (
            of_model != of_run and field not in (*FREE_FIELDS, "vocab_size", "pad_token_id")
        )
        for field, (of_model, of_run) in values.items()
    }
    refuse_first(cases, f"init_from {name}: ")
    config = copy.deepcopy(architecture)
    config.vocab_size = len(known)
    with reading_model(name, "init_from "), tempfile.TemporaryDirectory() as converted:
        is_stock = isinstance(AutoConfig.from_pretrained(name, trust_remote_code=False), BertConfig)
        if is_stock:
            conversion.save_model(bert_checkpoints.from_bert(bert_checkpoints.read_bert(name)[0]), Path(converted))
        place = converted if is_stock else name
        model, missing, _ = conversion.load_and_compare(
            model_class, place, config=config, dtype=torch.float32, attn_implementation=attn_implementation
        )
        fresh = [head for head in HEADS if conversion.lacks(model, missing, head)]
        others = sorted(key for key in missing if not key.startswith(tuple(f"{head}." for head in fresh)))
        if others:
            raise UserError(f"the model has no weights for {others[0]}; save the model again with save_pretrained")
    if tokenizer is not None:
        _refuse_another_vocabulary(f"init_from {name}", known, tokenizer)
        extend_embeddings(model, known, tokenizer)
        if fresh:
            heads = " and no ".join(HEADS[head] for head in fresh)
            logger.warning(f"init_from {name}: the model has no {heads}; training starts with fresh weights there")
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
    if not words:
        return
    model.resize_token_embeddings(len(new_tokenizer), mean_resizing=False)
    decoder = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight, decoder.weight, decoder.bias]  # (V, H), (V, H), (V,)
    for row, word in enumerate(words, len(old_tokenizer)):
        pieces = [piece.id for piece in old_tokenizer.backend_tokenizer.model.tokenize(word)]
        for table in tables:
            table[row] = table[pieces].mean(0)


def _refuse_another_vocabulary(model_label, known, tokenizer):
    """Raise `UserError` unless the vocabulary of `tokenizer` begins with that of `known`, the model's tokenizer."""
    with explained(
        f"{model_label}: another vocabulary", "use the model's tokenizer, unchanged or with --extend_vocab", UserError
    ):
        added_entries(known, tokenizer)


def model_class_of(run: PretrainConfig) -> type[PreTrainedModel]:
    """The class with the heads that the run trains."""
    # Without a pair task the class has no pair head and no pooler, so that no untrained weights are published.
    return D2lBertForMaskedLM if run.objective == "none" else D2lBertForPreTraining


def make_model(architecture: D2lBertConfig, run: PretrainConfig, tokenizer, resumed: Checkpoint | None):
    """
    The model of a run, with its initial weights.

    Args:
        tokenizer: the run's.
        resumed: the checkpoint to resume from. `init_from` is then not read, as the caller loads the checkpoint's
            weights into the model.
    """
    model_class = model_class_of(run)
    if run.init_from is not None and not resumed:
        model = start_from(model_class, run.init_from, architecture, tokenizer, run.tokenizer, run.attn_implementation)
    else:
        model = model_class._from_config(architecture, attn_implementation=run.attn_implementation)
    if run.attention_init == "neighbours":
        look_at_neighbours(model)
    if run.gradient_checkpointing:
        # `activation_checkpointing_enable` exists from Transformers 5.23 on; the old name is removed in version 6.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def added_entries(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[str]:
    """
    The entries that the vocabulary of `new` has after those of `old`, in the order of ids.

    Raises:
        UserError: the vocabulary of `new` does not begin with all entries of `old`.
    """
    before, after = pieces(old), pieces(new)
    for index, (was, piece) in enumerate(itertools.zip_longest(before, after[: len(before)])):
        if was != piece:
            has = "none" if piece is None else repr(piece)
            raise UserError(
                f"the tokenizer must begin with the model's vocabulary, and has {has} for {was!r} ({index})"
            )
    return after[len(before) :]
