"""What a run starts from: fresh weights, or a saved model; reads any encoder of Transformers, and tokenizers."""

import copy
import itertools
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from d2l_bert.folders import content_hash, short_hash
from d2l_bert.messages import UserError, explained, reading_model, refuse_first
from d2l_bert.modeling import bert_checkpoints, conversion
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.modeling.modeling_d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.tokenization.wordpiece import (
    CONTINUATION,
    SPECIAL_TOKENS,
    general_tokenizer,
    give_bert_inputs,
    pieces,
    rules_of,
    stock_tokenizer,
)
from d2l_bert.training.config import PretrainConfig


logger = logging.getLogger(__name__)


# The sinusoids of the position embeddings have wavelengths from 2 pi to 2 pi times this number. A fresh model has to
# tell neighbouring positions apart; with the Transformer's 10,000 most columns would be nearly constant.
LONGEST_WAVE = 100

# Modules that a saved model may lack, with their names in messages.
HEADS = {"mlm": "MLM head", "nsp": "NSP head", "bert.pooler": "pooler"}


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
    if run.attention_init == "neighbours":
        look_at_neighbours(model)
    if run.gradient_checkpointing:
        # `activation_checkpointing_enable` exists from Transformers 5.23 on; the old name is removed in version 6.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def _class_of(run):
    # Without a pair task the class has no pair head and no pooler, so that no untrained weights are published.
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
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if isinstance(config, BertConfig):
            return D2lBertConfig(**bert_checkpoints.shared_fields(config), embedding_layer_norm=True)
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
            model's; the architecture is not the model's; weights are missing, and not just those of whole heads
            (`HEADS`); or the vocabulary of the run does not begin with the model's.
    """
    label, saved = f"init_from {run.init_from}", read_architecture(run.init_from)
    values = {field: (getattr(saved, field), getattr(architecture, field)) for field in D2lBertConfig.__annotations__}
    cases = {
        f"{field} is {of_model!r} there, and {of_run!r} here; take the model's value": (
            of_model != of_run and field not in (*conversion.FREE_FIELDS, "vocab_size", "pad_token_id")
        )
        for field, (of_model, of_run) in values.items()
    }
    refuse_first(cases, f"{label}: ")
    with reading_model(run.init_from, "init_from "):
        has_own = has_tokenizer(run.init_from)
    if not has_own and run.tokenizer is None:
        raise UserError(
            f"{label}: the model has no tokenizer; give --tokenizer, or put the model's tokenizer.json beside its "
            f"config.json"
        )
    known = load_tokenizer(run.init_from if has_own else run.tokenizer)
    if len(known) != saved.vocab_size:
        raise UserError(
            f"{label}: the model's vocabulary has {saved.vocab_size} entries, and tokenizer "
            f"{run.init_from if has_own else run.tokenizer} has {len(known)}; give the tokenizer that the model was "
            f"trained with"
        )
    of_run = tokenizer or (load_tokenizer(run.tokenizer) if run.tokenizer else known)
    with explained(
        f"{label}: another vocabulary", "use the model's tokenizer, unchanged or with --extend_vocab", UserError
    ):
        added_entries(known, of_run)
    config = copy.deepcopy(architecture)
    config.vocab_size = len(known)
    with reading_model(run.init_from, "init_from "):
        model_class, options = _class_of(run), {"config": config, "attn_implementation": run.attn_implementation}
        if isinstance(AutoConfig.from_pretrained(run.init_from, trust_remote_code=False), BertConfig):
            options["state_dict"] = bert_checkpoints.from_bert(
                bert_checkpoints.read_bert(run.init_from)[0]
            ).state_dict()
        place = None if "state_dict" in options else run.init_from
        model, missing, _ = conversion.load_and_compare(model_class, place, dtype=torch.float32, **options)
        fresh = [head for head in HEADS if conversion.lacks(model, missing, head)]
        others = sorted(key for key in missing if not key.startswith(tuple(f"{head}." for head in fresh)))
        if others:
            raise UserError(f"the model has no weights for {others[0]}; save the model again with save_pretrained")
    if tokenizer is not None:
        extend_embeddings(model, known, tokenizer)
        if fresh:
            heads = " and no ".join(HEADS[head] for head in fresh)
            logger.warning(f"{label}: the model has no {heads}; training starts with fresh weights there")
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


# ---------------------------------------------------------------------------------------------------------------------
# Any encoder of Transformers, ours or a stock one, with a head or without, and its tokenizer


def read_parts(auto_class, name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """
    The configuration and the tokenizer of a model, for use in a block of `reading_model`. No code beside it is run.

    Args:
        auto_class: an Auto class of Transformers, such as `AutoModelForMaskedLM`.
        name: a folder or an id on the Hub.

    Raises:
        UserError: the model is a decoder, its type has no such head, or it has no tokenizer that pads.
        Exception: one of Transformers or the Hub's client, if there is no such model.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    cases = {
        f"it is a {config.model_type} model with a decoder; give an encoder, such as a BERT": (
            config.is_encoder_decoder or getattr(config, "is_decoder", False)
        ),
        f"{auto_class.__name__} has no {config.model_type} model; give one of d2l-bert, or a stock BERT": (
            type(config) not in auto_class._model_mapping.keys()
        ),
    }
    refuse_first(cases)
    tokenizer = read_tokenizer(name, config)
    if tokenizer is None or not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise UserError("it has no tokenizer.json, or its tokenizer has no padding token; give another model")
    return config, tokenizer


def load_pretrained(
    auto_class, name: str, may_lack: Callable[[str], bool] = lambda weight: False, **options
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]:
    """
    A model with all of its weights, in float32 and in evaluation mode, and its tokenizer.

    Args:
        auto_class, name: as in `read_parts`.
        may_lack: whether the checkpoint may lack a weight of this name.
        options: further arguments of `from_pretrained`.

    Returns:
        The model, the tokenizer, and the names of the weights that the checkpoint lacks.

    Raises:
        UserError: the model or its tokenizer cannot be loaded, weights are missing or not finite, or the tokenizer has
            more tokens than the model.
    """
    transformers_logging.disable_progress_bar()
    with reading_model(name):
        config, tokenizer = read_parts(auto_class, name)
        model, missing, _ = conversion.load_and_compare(
            auto_class, name, dtype=torch.float32, trust_remote_code=False, **options
        )
        if lacking := sorted(weight for weight in missing if not may_lack(weight)):
            raise UserError(
                f"it was saved as {(config.architectures or ['a model without a head'])[0]}, without weights for "
                f"{lacking[0]}; give a model that was trained with this head, or save it there again with "
                f"save_pretrained"
            )
    return model.eval(), tokenizer, missing


def load_encoder(name: str, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The encoder of a model, without heads, and its tokenizer, as in `load_pretrained`; the pooler is not used."""
    model, tokenizer, _ = load_pretrained(AutoModel, name, lambda weight: "pooler" in weight, **options)
    return model, tokenizer


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model's or a tokenizer's folder that decide what it computes, or of one such file."""
    patterns = ("model*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json", "vocab.txt")
    of_folder = (file for pattern in patterns for file in Path(folder).glob(pattern))
    files = [Path(folder)] if Path(folder).is_file() else sorted(of_folder)
    return short_hash([(file.name, content_hash(file)) for file in files])


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

# The files of a tokenizer's vocabulary, of which each model has one or the other.
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json"),
    *("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model"),
)


def has_tokenizer(name: str) -> bool:
    """
    Whether a model's folder or repository on the Hub also holds a tokenizer.

    For a model without one, Transformers may silently make a tokenizer that knows special tokens alone.
    """
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in VOCABULARY_FILES)


def read_tokenizer(name: str, config):
    """
    The tokenizer in a model's folder or repository; None if there is none.

    Args:
        name: a folder or an id on the Hub.
        config: the model's configuration.

    Raises:
        UserError: the tokenizer cannot be loaded, or has more tokens than the model.
    """
    if not has_tokenizer(name):
        return None
    tokenizer = stock_tokenizer(name)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the model's own, "
            f"or take it out"
        )
    return tokenizer


def prepare_with_tokenizer(run: TextConfig) -> PreparedText:
    """The text of a run (`prepare`), with the existing tokenizer that the run names, if it does."""
    name = None if corpus_is_prepared(run) else run.existing_tokenizer()
    return prepare(run, None if name is None else load_tokenizer(name))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Load an existing WordPiece tokenizer to train with.

    It may have tokens behind its vocabulary (`add_tokens`, `add_special_tokens`); in a text to train on they are
    tokens, as in use.

    Args:
        name: a folder, an id on the Hub, a `vocab.txt` or a `tokenizer.json`.

    Returns:
        A `BertTokenizer`, or a `PreTrainedTokenizerFast`, which has the rules of its tokenizer.json. Either puts the
        special tokens and segments around texts as BERT does.

    Raises:
        UserError: there is no tokenizer, it cannot be loaded, or it is no WordPiece tokenizer of these two classes
            with BERT's special tokens.
    """
    with reading_model(name, "tokenizer "):
        file = _bare_file(Path(name))
        if file is None and not has_tokenizer(name):
            raise UserError("it holds no tokenizer, such as a tokenizer.json or a vocab.txt; give one that does")
        tokenizer = stock_tokenizer(name) if file is None else _read_file(file)
        is_bert = isinstance(tokenizer, BertTokenizer)
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if not (is_bert or type(tokenizer) is PreTrainedTokenizerFast) or type(model).__name__ != "WordPiece":
            kind = f"{type(tokenizer).__name__} of {type(model).__name__}" if model else type(tokenizer).__name__
            raise UserError(
                f"it is a {kind}, and must be a BertTokenizer, or a PreTrainedTokenizerFast of WordPiece; give another"
            )
        missing = [
            role for role in ("pad", "unk", "cls", "sep", "mask") if getattr(tokenizer, f"{role}_token_id") is None
        ]
        refuse_first(
            {
                f"it has no {', '.join(missing)} token, and must have BERT's five; give another": missing,
                f"its pieces inside of words begin with {model.continuing_subword_prefix!r}, not {CONTINUATION!r}; "
                f"give another": model.continuing_subword_prefix != CONTINUATION,
                f"an unknown word is {model.unk_token}, and its unk token {tokenizer.unk_token}; make them one": (
                    model.unk_token != tokenizer.unk_token
                ),
                "its ids are not the numbers from 0 on, each once; give another": (
                    sorted(tokenizer.get_vocab().values()) != list(range(len(tokenizer)))
                ),
            }
        )
    if not is_bert:
        give_bert_inputs(tokenizer)
    return tokenizer


def _bare_file(path):
    """The one file of a tokenizer, if `path` is it, or a folder with it and no settings of a tokenizer or a model."""
    if path.is_file():
        return path
    if any((path / file).exists() for file in ("tokenizer_config.json", "config.json")):
        return None
    return next((path / file for file in ("tokenizer.json", "vocab.txt") if (path / file).is_file()), None)


def _read_file(file):
    return _read_rules(file) if file.suffix == ".json" else _read_vocabulary(file)


def _read_vocabulary(file):
    """A `BertTokenizer` with the entries of BERT's vocab.txt; in lower case if no entry has a capital letter."""
    pieces = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    twice = next((piece for piece, count in Counter(pieces).items() if count > 1), None)
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    refuse_first(
        {
            f"it has no {', '.join(missing)}: it is not BERT's vocabulary, an entry a line; give another": missing,
            f"the entry {twice!r} stands there twice; give each entry once": twice is not None,
        }
    )
    has_capitals = any(piece != piece.lower() for piece in pieces if not re.fullmatch(r"\[.+\]", piece))
    logger.info(f"{file}: read as BERT's vocabulary, {'with capital letters' if has_capitals else 'in lower case'}")
    has_marks = any(unicodedata.category(letter) == "Mn" for letter in unicodedata.normalize("NFD", "".join(pieces)))
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        do_lower_case=not has_capitals,
        strip_accents=False if has_marks else None,
    )


def _read_rules(file):
    """The tokenizer of a tokenizer.json: a `BertTokenizer` if that has the same rules."""
    backend = Tokenizer.from_file(str(file))
    if missing := [token for token in SPECIAL_TOKENS if backend.token_to_id(token) is None]:
        raise UserError(f"it has no {', '.join(missing)}, and must have BERT's five special tokens; give another")
    bert = BertTokenizer(
        vocab=backend.get_vocab(with_added_tokens=False),
        do_lower_case=getattr(backend.normalizer, "lowercase", False),
        strip_accents=getattr(backend.normalizer, "strip_accents", None),
        tokenize_chinese_chars=getattr(backend.normalizer, "handle_chinese_chars", True),
    )
    has_others = backend.get_vocab_size() > backend.get_vocab_size(with_added_tokens=False)
    is_bert = not has_others and rules_of(bert.backend_tokenizer) == rules_of(backend)
    return bert if is_bert else general_tokenizer(backend)
