"""Tokenizers that exist already, read from a folder or the Hub; never the code that they may bring."""

import transformers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from d2l_bert.errors import UserError, why_unreadable


def load_tokenizer(name: str) -> BertTokenizer:
    """
    An existing WordPiece tokenizer from a folder or the Hub.

    Raises:
        UserError: none there, or one that is not BERT's.
    """
    try:
        tokenizer = stock_tokenizer(name)
    except Exception as error:  # the library has another class of exception for every way to miss
        raise UserError(f"tokenizer {name}: cannot be loaded: {why_unreadable(name, error, 'tokenizer')}") from None
    missing = [
        token for token in ("pad", "unk", "cls", "sep", "mask") if getattr(tokenizer, f"{token}_token_id") is None
    ]
    if not isinstance(tokenizer, BertTokenizer) or missing:
        what = f"no {missing[0]} token" if missing else type(tokenizer).__name__
        raise UserError(f"tokenizer {name}: {what}; it must be a BertTokenizer with BERT's five special tokens")
    if 2 * max(tokenizer.all_special_ids) > len(tokenizer):  # random tokens are drawn from those after them
        raise UserError(f"tokenizer {name}: its special tokens stand among the last; they must come first, as in BERT")
    return tokenizer


TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")


def has_tokenizer(name: str) -> bool:
    """Whether a tokenizer lies beside a model, in a folder or on the Hub."""
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in TOKENIZER_FILES)


def stock_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    A tokenizer of one of Transformers' own classes. Code that lies beside it is never run.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        ValueError: its class is not one of Transformers', but is defined by that code.
        Exception: whatever `AutoTokenizer` raises for what it cannot load.
    """
    settings = get_tokenizer_config(name)
    # Transformers would load such a tokenizer in a class of its own choice wherever it knows the model beside it.
    if settings.get("auto_map") and not hasattr(transformers, settings.get("tokenizer_class") or ""):
        raise ValueError(
            "auto_map in its tokenizer_config.json asks for code of its own, which is never run; give a stock "
            "BertTokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise ValueError(
            f"model_max_length in its tokenizer_config.json is {tokenizer.model_max_length!r:.50}, not a number; put "
            f"back the file that was saved with it"
        )
    tokenizer.init_kwargs.pop("auto_map", None)  # it would be saved again, without the code that it names
    return tokenizer


def read_tokenizer(name: str, config):
    """
    The tokenizer beside a model, or None if there is none.

    Raises:
        ValueError: it has tokens that the model does not have.
    """
    if not has_tokenizer(name):
        return None
    try:
        tokenizer = stock_tokenizer(name)
    except Exception as error:  # each kind of damage has a class of its own
        raise ValueError(
            f"its tokenizer cannot be read ({str(error):.150}); put back the model's own, or take it out"
        ) from None
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the model's own, "
            f"or take it out"
        )
    return tokenizer
