"""Loads the tokenizers that exist: of a model's folder, of the Hub, a bare `vocab.txt` or `tokenizer.json`."""

import functools
import logging
import re
import unicodedata
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from d2l_bert.messages import UserError, reading_model
from d2l_bert.tokenization.cache import cache_folder, write_once
from d2l_bert.tokenization.long_texts import without_limits
from d2l_bert.tokenization.model_files import check_within, find_file
from d2l_bert.tokenization.tokenizer_files import (
    BERT_ROLES,
    check_tokenizer_rules,
    panics_explained,
    read_vocabulary,
)
from d2l_bert.tokenization.wordpiece import (
    CONTINUATION,
    SPECIAL_TOKENS,
    general_tokenizer,
    give_bert_inputs,
    has_capitals,
    rules_of,
    save_tokenizer,
    stock_tokenizer,
    tokenizer_fingerprint,
)


logger = logging.getLogger(__name__)

# The files of a tokenizer's vocabulary, of which each model has one or the other.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tokenizer.model",
)


def has_tokenizer(name: str) -> bool:
    """
    Whether a model's folder or repository on the Hub also holds a tokenizer.

    For a model without one, Transformers may silently make a tokenizer that knows special tokens alone.
    """
    return any(find_file(name, file) for file in VOCABULARY_FILES)


def tokenizer_folder(tokenizer: object) -> str:
    """
    Write a tokenizer that a program has in memory to the cache, under the hash of what it does; returns the folder.

    Raises:
        UserError: it is no fast tokenizer of Transformers, or the cache cannot be written.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer is a {type(tokenizer).__name__}; give a folder, an id on the Hub or a fast tokenizer of "
            f"Transformers"
        )
    path = cache_folder() / f"tokenizer-in-memory-{tokenizer_fingerprint(tokenizer)}"
    write_once(path, functools.partial(save_tokenizer, tokenizer))
    return str(path)


def read_tokenizer(name: str, config) -> PreTrainedTokenizerBase:
    """
    The tokenizer in a model's folder or repository.

    Args:
        name: a folder or an id on the Hub.
        config: the model's configuration.

    Raises:
        UserError: there is no tokenizer, it cannot be loaded, or it has more tokens than the model.
    """
    if not has_tokenizer(name):
        raise UserError("it has no tokenizer; put its tokenizer.json beside it")
    tokenizer = stock_tokenizer(name, config.vocab_size)
    tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    if tokens > config.vocab_size:
        raise UserError(
            f"its tokenizer has {tokens} tokens and the model {config.vocab_size}; put back the model's own"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        make_plain(tokenizer, backend)
        check_inputs(tokenizer, getattr(config, "type_vocab_size", None) or 0)
    if getattr(config, "type_vocab_size", 2) == 1:
        # A model with one segment, such as AlephBERT, has no second number for a second text.
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    return tokenizer


# Special tokens around a text or a pair: BERT puts 3 around a pair, RoBERTa 4.
MOST_AROUND = 16

PUT_BACK = "put back the model's own tokenizer"


def check_inputs(tokenizer: PreTrainedTokenizerBase, segments: int) -> None:
    """
    Refuse a tokenizer that makes other inputs of a text and of a pair than their tokens in order, in known segments,
    with a few special tokens around them.

    Args:
        segments: how many the model knows; less than two if it has none, and is given none.

    Raises:
        UserError: the tokenizer does, or the mask is no token of its own.
    """
    others = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id in others:
        raise UserError(f"its mask, {tokenizer.mask_token!r:.50}, is another special token, too; {PUT_BACK}")
    unlimited = without_limits(tokenizer.backend_tokenizer)
    _check_input(unlimited, tokenizer.mask_token_id, segments, "a text", ["a word"])
    _check_input(unlimited, tokenizer.mask_token_id, segments, "a pair of texts", ["a word", "and another"])


def _check_input(backend, mask, segments, what, texts):
    """As `check_inputs`, of these texts, which are called `what`; `mask` is the number of the mask."""
    encoding = backend.encode(*texts)
    expected = []
    for text in texts:
        expected += backend.encode(text, add_special_tokens=False).ids
    numbers = []  # of the text that each token is from
    found = []
    around = []
    for token, number in zip(encoding.ids, encoding.sequence_ids, strict=True):
        if number is None:
            around.append(token)
        else:
            numbers.append(number)
            found.append(token)
    if numbers != sorted(numbers) or found != expected:
        raise UserError(f"its tokenizer leaves out or moves tokens of {what} (post_processor); {PUT_BACK}")
    if not 1 <= len(around) <= MOST_AROUND:
        raise UserError(
            f"its tokenizer puts {len(around)} special tokens around {what} (post_processor), and may put 1 to "
            f"{MOST_AROUND}; {PUT_BACK}"
        )
    if mask in around:
        raise UserError(f"its tokenizer puts a mask around {what} (post_processor); {PUT_BACK}")
    if segments > 1 and max(encoding.type_ids) >= segments:
        raise UserError(f"its tokenizer gives {what} segments beyond the model's {segments}; {PUT_BACK}")


def make_plain(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer) -> None:
    """
    Set what would make a model compute something else than it was trained on, or something else each time: padding on
    the left, which shifts positions; merges that are left out at random; an unknown token without a name, which would
    be scored as a word.
    """
    tokenizer.padding_side = "right"
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    unknown = getattr(backend.model, "unk_token", None)
    if tokenizer.unk_token is None and unknown is not None and unknown in tokenizer.get_vocab():
        tokenizer.unk_token = unknown


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
        tokenizer = _read_any(name)
        _check_class(tokenizer)
        _check_special_tokens(tokenizer)
        _check_word_pieces(tokenizer)
    if not isinstance(tokenizer, BertTokenizer):
        give_bert_inputs(tokenizer)
    return tokenizer


def _read_any(name):
    """The tokenizer of a bare file, or of a model's folder or repository; raises `UserError` if there is none."""
    file = _bare_file(Path(name))
    if file is None:
        if not has_tokenizer(name):
            raise UserError("it holds no tokenizer, such as a tokenizer.json or a vocab.txt; give one")
        return stock_tokenizer(name)
    if Path(name).is_dir():
        check_within(file, Path(name))
    return _read_tokenizer_json(file) if file.suffix == ".json" else _read_vocab_txt(file)


def _bare_file(path):
    """The one file of a tokenizer, if `path` is it, or a folder with it and no settings of a tokenizer or a model."""
    if (path / "tokenizer_config.json").exists() or (path / "config.json").exists():
        return None
    for file in (path, path / "tokenizer.json", path / "vocab.txt"):
        if file.is_file():
            return file
    return None


def _read_vocab_txt(file):
    """The tokenizer of BERT's vocab.txt: in lower case if no entry has a capital letter."""
    entries = read_vocabulary(file)
    _check_five_special_tokens(entries)
    [(entry, times)] = Counter(entries).most_common(1)
    if times > 1:
        raise UserError(f"the entry {entry!r} stands there twice; give each entry once")
    is_cased = has_capitals(entries)
    logger.info(f"{file}: read as BERT's vocabulary, {'with capital letters' if is_cased else 'in lower case'}")
    decomposed = unicodedata.normalize("NFD", "".join(entries))
    has_marks = any(unicodedata.category(character) == "Mn" for character in decomposed)
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    strip_accents = False if has_marks else None
    return BertTokenizer(vocab=vocabulary, do_lower_case=not is_cased, strip_accents=strip_accents)


def _read_tokenizer_json(file):
    """The tokenizer of a tokenizer.json: a `BertTokenizer` if that has the same rules."""
    check_tokenizer_rules(file)
    with panics_explained():
        backend = Tokenizer.from_file(str(file))
    _check_five_special_tokens(backend.get_vocab())
    normalizer = backend.normalizer
    bert = BertTokenizer(
        vocab=backend.get_vocab(with_added_tokens=False),
        do_lower_case=getattr(normalizer, "lowercase", False),
        strip_accents=getattr(normalizer, "strip_accents", None),
        tokenize_chinese_chars=getattr(normalizer, "handle_chinese_chars", True),
    )
    has_added_tokens = backend.get_vocab_size() > backend.get_vocab_size(with_added_tokens=False)
    is_bert = not has_added_tokens and rules_of(bert.backend_tokenizer) == rules_of(backend)
    return bert if is_bert else general_tokenizer(backend)


def _check_five_special_tokens(entries):
    """Refuse a vocabulary without one of BERT's special tokens."""
    missing = [token for token in SPECIAL_TOKENS if token not in entries]
    if missing:
        raise UserError(f"it has no {', '.join(missing)}, and must have BERT's five special tokens; give another")


def _check_class(tokenizer):
    """Refuse a tokenizer of another class, or of another model than WordPiece."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = type(getattr(backend, "model", None)).__name__
    is_known = isinstance(tokenizer, BertTokenizer) or type(tokenizer) is PreTrainedTokenizerFast
    if model != "WordPiece" or not is_known:
        raise UserError(
            f"it is a {type(tokenizer).__name__} of {model}, and must be a BertTokenizer, or a "
            f"PreTrainedTokenizerFast of WordPiece; give another"
        )


def _check_special_tokens(tokenizer):
    """Refuse a tokenizer whose five special tokens are not there, are not five, or are words of a text."""
    missing = [role.removesuffix("_token") for role in BERT_ROLES if getattr(tokenizer, f"{role}_id") is None]
    if missing:
        raise UserError(f"it has no {', '.join(missing)} token, and must have BERT's five; give another")
    tokens = [getattr(tokenizer, role) for role in BERT_ROLES]
    if len(set(tokenizer.convert_tokens_to_ids(tokens))) < len(tokens):
        raise UserError(f"two of its special tokens are one ({', '.join(map(repr, tokens))}); give another")
    # A token between brackets or the like, as all special tokens of stock models are, is no word of a text.
    words = [token for token in tokens if not re.fullmatch(r"[^\w\s#].+[^\w\s]", token)]
    if words:
        raise UserError(f"its special token {min(words)!r:.50} is a word or a piece of one; give another")


def _check_word_pieces(tokenizer):
    """Refuse another mark of pieces inside of words, two unknown tokens, and ids with gaps."""
    model = tokenizer.backend_tokenizer.model
    if model.continuing_subword_prefix != CONTINUATION:
        raise UserError(
            f"its pieces inside of words begin with {model.continuing_subword_prefix!r}, not {CONTINUATION!r}; "
            f"give another"
        )
    if model.unk_token != tokenizer.unk_token:
        raise UserError(
            f"an unknown word is {model.unk_token}, and its unk token {tokenizer.unk_token}; make them one"
        )
    if sorted(tokenizer.get_vocab().values()) != list(range(len(tokenizer))):
        raise UserError("its ids are not the numbers from 0 on, each once; give another")
