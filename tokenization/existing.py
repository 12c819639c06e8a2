"""Load an existing tokenizer from a folder or the Hub, without running code that lies beside it."""

import transformers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from d2l_bert.errors import UserError, why_unreadable


def load_tokenizer(name: str) -> BertTokenizer:
    """
    Load an existing WordPiece tokenizer to train with.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: there is no tokenizer, it cannot be loaded, it is not a BertTokenizer with BERT's special tokens, or
            these have ids near the end of the vocabulary.
    """
    try:
        tokenizer = stock_tokenizer(name)
    except Exception as error:  # Transformers and the Hub's client raise many classes of exceptions
        raise UserError(f"tokenizer {name}: cannot be loaded: {why_unreadable(name, error, 'tokenizer')}") from None
    missing = [
        token for token in ("pad", "unk", "cls", "sep", "mask") if getattr(tokenizer, f"{token}_token_id") is None
    ]
    if not isinstance(tokenizer, BertTokenizer) or missing:
        fault = f"it has no {missing[0]} token" if missing else f"it is a {type(tokenizer).__name__}"
        raise UserError(f"tokenizer {name}: {fault}; it must be a BertTokenizer with BERT's five special tokens")
    if 2 * max(tokenizer.all_special_ids) > len(tokenizer):  # masking draws random tokens after the special ones
        raise UserError(
            f"tokenizer {name}: its special tokens have ids near the end of the vocabulary; they must come first, as "
            f"in BERT"
        )
    return tokenizer


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


def stock_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Load a tokenizer of one of Transformers' own classes. Code in its folder or repository is never run.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: the tokenizer's class is defined by such code, or its `model_max_length` is not a number.
        Exception: any exception of `AutoTokenizer`, for a tokenizer that cannot be loaded.
    """
    settings = get_tokenizer_config(name)
    # Refused here: if Transformers knows the model type, it would silently load the tokenizer in another class.
    if settings.get("auto_map") and not hasattr(transformers, settings.get("tokenizer_class") or ""):
        raise UserError(
            "auto_map in its tokenizer_config.json asks for code of its own, which is never run; give a stock "
            "BertTokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise UserError(
            f"model_max_length in its tokenizer_config.json is {tokenizer.model_max_length!r:.50}, not a number; put "
            f"back the file that was saved with it"
        )
    tokenizer.init_kwargs.pop("auto_map", None)  # `save_pretrained` would write auto_map, but not the code it names
    return tokenizer


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
    try:
        tokenizer = stock_tokenizer(name)
    except Exception as error:  # Transformers raises many classes of exceptions
        raise UserError(
            f"its tokenizer cannot be read ({str(error):.150}); put back the model's own, or take it out"
        ) from None
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the model's own, "
            f"or take it out"
        )
    return tokenizer
