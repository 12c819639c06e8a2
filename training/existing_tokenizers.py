"""Loads existing tokenizers: of a folder or the Hub, or a bare vocab.txt or tokenizer.json; those of models."""

import logging
import re
import unicodedata
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from d2l_bert.errors import UserError, reading_model, refuse_first
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import PreparedText, corpus_is_prepared
from d2l_bert.tokenization.wordpiece import (
    CONTINUATION,
    SPECIAL_TOKENS,
    general_tokenizer,
    give_bert_inputs,
    rules_of,
    stock_tokenizer,
)


logger = logging.getLogger(__name__)


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


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer of a model


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


# ---------------------------------------------------------------------------------------------------------------------
# One file alone


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
