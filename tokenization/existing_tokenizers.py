"""Loads the tokenizers that exist: of a model's folder, of the Hub, a bare `vocab.txt` or `tokenizer.json`."""

import logging
import re
import unicodedata
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from d2l_bert.messages import UserError, reading_model, refuse_first
from d2l_bert.tokenization.model_files import (
    BERT_ROLES,
    check_tokenizer_rules,
    check_within,
    find_file,
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
    stock_tokenizer,
)


logger = logging.getLogger(__name__)

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
    return any(find_file(name, file) for file in VOCABULARY_FILES)


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
        names = [each for each in tokenizer.model_input_names if each != "token_type_ids"]
        tokenizer.model_input_names = names
    return tokenizer


# Special tokens around a text or a pair: BERT puts 3 around a pair, RoBERTa 4.
MOST_AROUND = 16


def check_inputs(tokenizer: PreTrainedTokenizerBase, segments: int) -> None:
    """
    Refuse a tokenizer that makes other inputs of a text and of a pair than their tokens in order, in known segments,
    with a few special tokens around them.

    Args:
        segments: how many the model knows; less than two if it has none, and is given none.

    Raises:
        UserError: the tokenizer does, or the mask is no token of its own.
    """
    way_out = "put back the model's own tokenizer"
    others = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id in others:
        raise UserError(f"its mask, {tokenizer.mask_token!r:.50}, is another special token, too; {way_out}")
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    for texts in (("a word",), ("a word", "and another")):
        what = "a pair of texts" if len(texts) > 1 else "a text"
        encoding = backend.encode(*texts)
        expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        numbers = [number for number in encoding.sequence_ids if number is not None]
        found = [
            token for token, number in zip(encoding.ids, encoding.sequence_ids, strict=True) if number is not None
        ]
        around = [token for token, number in zip(encoding.ids, encoding.sequence_ids, strict=True) if number is None]
        if numbers != sorted(numbers) or found != sum(expected, []):
            raise UserError(f"its tokenizer leaves out or moves tokens of {what} (post_processor); {way_out}")
        if not 1 <= len(around) <= MOST_AROUND:
            raise UserError(
                f"its tokenizer puts {len(around)} special tokens around {what} (post_processor), and may put 1 to "
                f"{MOST_AROUND}; {way_out}"
            )
        if tokenizer.mask_token_id in around:
            raise UserError(f"its tokenizer puts a mask around {what} (post_processor); {way_out}")
        if segments > 1 and max(encoding.type_ids) >= segments:
            raise UserError(f"its tokenizer gives {what} segments beyond the model's {segments}; {way_out}")
    if truncation:
        backend.enable_truncation(**truncation)
    if padding:
        backend.enable_padding(**padding)


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
        file = _bare_file(Path(name))
        if file is not None and Path(name).is_dir():
            check_within(file, Path(name))
        has_one = file is not None or has_tokenizer(name)
        refuse_first({"it holds no tokenizer, such as a tokenizer.json or a vocab.txt; give one": not has_one})
        tokenizer = stock_tokenizer(name) if file is None else _read_file(file)
        is_bert = isinstance(tokenizer, BertTokenizer)
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        refuse_first(
            {
                f"it is a {type(tokenizer).__name__} of {type(model).__name__}, and must be a BertTokenizer, or a "
                f"PreTrainedTokenizerFast of WordPiece; give another": (
                    type(model).__name__ != "WordPiece" or not (is_bert or type(tokenizer) is PreTrainedTokenizerFast)
                )
            }
        )
        missing = [role.removesuffix("_token") for role in BERT_ROLES if getattr(tokenizer, f"{role}_id") is None]
        tokens = [token for role in BERT_ROLES if (token := getattr(tokenizer, role)) is not None]
        # One that is between brackets or the like, as all special tokens of stock models are, is no word of a text.
        words = [token for token in tokens if not re.fullmatch(r"[^\w\s#].+[^\w\s]", token)]
        refuse_first(
            {
                f"it has no {', '.join(missing)} token, and must have BERT's five; give another": missing,
                f"two of its special tokens are one ({', '.join(map(repr, tokens))}); give another": (
                    len({tokenizer.convert_tokens_to_ids(token) for token in tokens}) < len(tokens)
                ),
                f"its special token {min(words, default='')!r:.50} is a word or a piece of one; give another": words,
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
    if any((path / file).exists() for file in ("tokenizer_config.json", "config.json")):
        return None
    return next((file for file in (path, path / "tokenizer.json", path / "vocab.txt") if file.is_file()), None)


def _read_file(file):
    """
    The tokenizer of BERT's vocab.txt, in lower case if no entry has a capital letter; or of a tokenizer.json, a
    `BertTokenizer` if that has the same rules.
    """
    is_text = file.suffix != ".json"
    if not is_text:
        check_tokenizer_rules(file)
    with panics_explained():
        backend = None if is_text else Tokenizer.from_file(str(file))
    entries = read_vocabulary(file) if is_text else [*backend.get_vocab()]
    missing = [token for token in SPECIAL_TOKENS if token not in entries]
    (most, times), *_ = Counter(entries).most_common(1)
    refuse_first(
        {
            f"it has no {', '.join(missing)}, and must have BERT's five special tokens; give another": missing,
            f"the entry {most!r} stands there twice; give each entry once": times > 1,
        }
    )
    if is_text:
        is_cased = has_capitals(entries)
        logger.info(f"{file}: read as BERT's vocabulary, {'with capital letters' if is_cased else 'in lower case'}")
        has_marks = any(unicodedata.category(each) == "Mn" for each in unicodedata.normalize("NFD", "".join(entries)))
        return BertTokenizer(
            vocab={entry: index for index, entry in enumerate(entries)},
            do_lower_case=not is_cased,
            strip_accents=False if has_marks else None,
        )
    bert = BertTokenizer(
        vocab=backend.get_vocab(with_added_tokens=False),
        do_lower_case=getattr(backend.normalizer, "lowercase", False),
        strip_accents=getattr(backend.normalizer, "strip_accents", None),
        tokenize_chinese_chars=getattr(backend.normalizer, "handle_chinese_chars", True),
    )
    has_others = backend.get_vocab_size() > backend.get_vocab_size(with_added_tokens=False)
    is_bert = not has_others and rules_of(bert.backend_tokenizer) == rules_of(backend)
    return bert if is_bert else general_tokenizer(backend)
