"""Where the weights of a run start, beyond the normal distribution that the model itself draws (BERT's)."""

import copy
import logging

import torch
from torch import nn
from transformers import AutoConfig, BertTokenizer, PreTrainedModel

from d2l_bert.errors import UserError, another_kind, reading_model
from d2l_bert.modeling import conversion
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.modeling.saving import FREE_FIELDS
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.existing import has_tokenizer, load_tokenizer
from d2l_bert.tokenization.wordpiece import added_entries
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import PretrainConfig


logger = logging.getLogger(__name__)


# Wavelengths of the position table run from 2 pi to 2 pi times this. Neighbours, not distant positions, are what a
# fresh model has to tell apart; 10,000, the Transformer's own, would leave most of the table's columns constant.
LONGEST_WAVE = 100

# Parts that a saved model may do without, under a person's names for them.
HEADS = {"mlm": "MLM head", "nsp": "NSP head", "bert.pooler": "pooler"}


@torch.no_grad()
def look_at_neighbours(model, generator: torch.Generator | None = None) -> None:
    """
    Let the heads of the first block look at the token before (even heads) and the token after (odd heads).

    A fresh BERT attends to every token alike, and predicts a masked token from its frequency alone for a good part of
    a short run, until some head has found out what stands beside it. Here positions start as sinusoids (Vaswani et
    al., 2017; d2l, section 11.6), for which "one further" is a rotation, and a head's keys as its queries, rotated by
    one position. Values and outputs of every block start large enough for what is found to be heard. All of it is only
    a start: every weight is trained.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM` just initialised.
        generator: source of randomness; the global one by default.

    Raises:
        UserError: an odd `hidden_size`, which has no room for sines and cosines in pairs.
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
    # A sine's standard deviation is 1 / sqrt(2); the table gets twice that of the other embeddings.
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
    """Two matrices (R, C) as the even and odd columns of one (R, 2C)."""
    return torch.stack((even, odd), dim=-1).flatten(1)


def read_architecture(name: str) -> D2lBertConfig:
    """
    The numbers of a saved model.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: nothing there, or a model that is not ours.
    """
    with reading_model(name, "init_from "):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if not isinstance(config, D2lBertConfig):
            raise UserError(another_kind(name, config.model_type))
    return D2lBertConfig(**{field: getattr(config, field) for field in D2lBertConfig.__annotations__})


def read_start_tokenizer(name: str, given: str | None = None) -> BertTokenizer:
    """
    The tokenizer that the embeddings of a saved model belong to.

    Args:
        name: the model, a folder or an id on the Hub.
        given: another tokenizer, which stands in where the model brings none, and must extend it where it does.

    Raises:
        UserError: there is none, or one that does not fit.
    """
    what, vocab_size = f"init_from {name}", read_architecture(name).vocab_size
    with reading_model(name, "init_from "):
        has_own = has_tokenizer(name)
    if not has_own and given is None:
        raise UserError(f"{what}: it brings no tokenizer; give --tokenizer, or put its tokenizer.json beside it")
    tokenizer = load_tokenizer(name if has_own else given)
    if len(tokenizer) != vocab_size:
        raise UserError(
            f"{what}: its vocabulary has {vocab_size} entries, and tokenizer {name if has_own else given} has "
            f"{len(tokenizer)}; give the model with the tokenizer that it was trained with"
        )
    if has_own and given is not None:
        _refuse_another_vocabulary(what, tokenizer, load_tokenizer(given))
    return tokenizer


def check_start(name: str, architecture: D2lBertConfig, given: str | None = None) -> None:
    """
    Refuse, before any text is read, a saved model that a run cannot start from.

    Args:
        name: the model, a folder or an id on the Hub.
        architecture: what the run asks for; the vocabulary is not compared.
        given: as in `read_start_tokenizer`.

    Raises:
        UserError: another architecture than the model's, dropout apart; or a tokenizer that does not fit.
    """
    own = read_architecture(name)
    for field in D2lBertConfig.__annotations__:
        there, here = getattr(own, field), getattr(architecture, field)
        if there != here and field not in (*FREE_FIELDS, "vocab_size", "pad_token_id"):
            raise UserError(f"init_from {name}: {field} is {there!r} there, and {here!r} here; take the model's")
    read_start_tokenizer(name, given)


def check_weights(model_class: type[PreTrainedModel], name: str, architecture: D2lBertConfig) -> None:
    """
    Refuse, before any text is read, a saved model whose weights `start_from` could not load. They are loaded for that,
    and let go.

    Args:
        model_class, name, architecture: as in `start_from`.

    Raises:
        UserError: weights that are damaged, of another shape, or not there.
    """
    config = copy.deepcopy(architecture)
    config.vocab_size = read_architecture(name).vocab_size
    _load(model_class, name, config)


def _load(model_class, name, config, attn_implementation=None):
    """A saved model, and the names of the heads that it lacks."""
    with reading_model(name, "init_from "):
        model, missing, _ = conversion.load_and_compare(
            model_class, name, config=config, dtype=torch.float32, attn_implementation=attn_implementation
        )
        fresh = [part for part in HEADS if conversion.lacks(model, missing, part)]
        others = sorted(key for key in missing if not key.startswith(tuple(f"{part}." for part in fresh)))
        if others:
            raise UserError(f"it has no weights for {others[0]}; save the model there again with save_pretrained")
    return model, fresh


def start_from(
    model_class: type[PreTrainedModel],
    name: str,
    architecture: D2lBertConfig,
    tokenizer: BertTokenizer,
    given: str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """
    A saved model with its weights, in float32 and ready to train. Heads that it lacks start anew, which is said.

    Args:
        model_class: what to make of it, with both pretraining heads or the MLM head alone.
        name: the model, a folder or an id on the Hub.
        architecture: its own but for dropout.
        tokenizer: the run's; entries that the model's own lacks get embeddings from `extend_embeddings`.
        given: as in `read_start_tokenizer`.
        attn_implementation: the kernel that computes attention.

    Raises:
        UserError: weights that are not there, or a tokenizer that does not begin with the model's vocabulary.
    """
    known = read_start_tokenizer(name, given)
    _refuse_another_vocabulary(f"init_from {name}", known, tokenizer)
    config = copy.deepcopy(architecture)
    config.vocab_size = len(known)
    model, fresh = _load(model_class, name, config, attn_implementation)
    if fresh:
        logger.warning(
            f"init_from {name}: it has no {' and no '.join(HEADS[part] for part in fresh)}; fresh ones are made"
        )
    extend_embeddings(model, known, tokenizer)
    return model.train()


@torch.no_grad()
def extend_embeddings(model: PreTrainedModel, old_tokenizer: BertTokenizer, new_tokenizer: BertTokenizer) -> None:
    """
    Give a model embeddings (V, H) for words that were added to its vocabulary, its other numbers unchanged.

    Each new row of the word embeddings, of the decoder and of its bias is the mean of the rows of the pieces that the
    word was split into before, as in Fast Vocabulary Transfer (Gee et al., 2022).

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


def _refuse_another_vocabulary(what, known, tokenizer):
    try:
        added_entries(known, tokenizer)
    except UserError as error:
        raise UserError(f"{what}: {error}; its own tokenizer serves, as it is or with --extend_vocab") from None


def model_class_of(run: PretrainConfig) -> type[PreTrainedModel]:
    """The class with the heads that the run trains."""
    # Without a task of pairs there is no head and no pooler: an untrained one would be published with the rest.
    return D2lBertForPreTraining if run.objective in PAIR_TASKS else D2lBertForMaskedLM


def make_model(architecture: D2lBertConfig, run: PretrainConfig, tokenizer, resumed: Checkpoint | None):
    """The model at its start; on resuming, any of its shape, as the checkpoint has the weights."""
    model_class = model_class_of(run)
    if run.init_from is not None and not resumed:
        model = start_from(model_class, run.init_from, architecture, tokenizer, run.tokenizer, run.attn_implementation)
    else:
        model = model_class._from_config(architecture, attn_implementation=run.attn_implementation)
    if run.attention_init == "neighbours":
        look_at_neighbours(model)
    if run.gradient_checkpointing:
        # The old name goes in Transformers 6, and the new one came with 5.23.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model
