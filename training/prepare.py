"""Text to tokenizer and tokens, once for many runs: what has to be there before the first step."""

from dataclasses import dataclass

import numpy as np
from transformers import AutoTokenizer, BertTokenizer

from d2l_bert.tokenization.wordpiece import train_wordpiece
from d2l_bert.training import corpus, data
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.tracking import say


@dataclass
class PreparedText:
    """A tokenized corpus, split by document."""

    corpus_name: str
    dataset_is_on_hub: bool
    tokenizer: BertTokenizer
    tokens: data.TokenizedCorpus
    train_documents: np.ndarray
    held_out_documents: np.ndarray

    def counts(self) -> dict:
        """What the run's record says of it."""
        sizes = self.tokens.sizes()
        return {
            "corpus_name": self.corpus_name,
            "corpus_fingerprint": self.tokens.path.name.removeprefix("tokens-"),
            "dataset_is_on_hub": self.dataset_is_on_hub,
            "train_documents": len(self.train_documents),
            "train_tokens": int(sizes[self.train_documents].sum()),
            "held_out_documents": len(self.held_out_documents),
            "held_out_tokens": int(sizes[self.held_out_documents].sum()),
        }


def prepare(run: PretrainConfig) -> PreparedText:
    """
    Read the text, hold out a part, train or load the tokenizer, and tokenize; what was done before is found again.

    Raises:
        ValueError: text that cannot be read, too little of it, or a tokenizer that cannot serve.
    """
    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer is not None else None
    if run.dataset is not None:
        source = corpus.dataset_source(run.dataset, run.dataset_config, run.dataset_split, run.text_column)
    else:
        source = corpus.file_source(run.corpus, run.text_column)
    folder = data.cache_folder()
    text = data.prepare_text(source, run.language, folder)
    sizes = data.document_characters(text)
    try:
        train, held_out = data.split_documents(sizes, run.validation_fraction, run.max_validation_characters)
        if tokenizer is None:
            say(f"training a tokenizer of at most {run.vocab_size:,} pieces")
            sample = data.sentence_sample(text, train, sizes)
            tokenizer = train_wordpiece(sample, vocab_size=run.vocab_size, lowercase=run.lowercase)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from None
    tokens = data.TokenizedCorpus(data.prepare_tokens(text, tokenizer, folder))
    has_tokens = tokens.sizes() > 0
    train, held_out = train[has_tokens[train]], held_out[has_tokens[held_out]]
    if min(len(train), len(held_out)) < 2:
        raise ValueError(f"{source.name}: its text holds no token that the tokenizer knows; give more text")
    say(
        f"{source.name}: {len(train):,} documents, {int(tokens.sizes()[train].sum()):,} tokens to train on; "
        f"{len(held_out):,} documents, {int(tokens.sizes()[held_out].sum()):,} tokens held out; "
        f"vocabulary {len(tokenizer):,}"
    )
    return PreparedText(source.name, source.is_on_hub, tokenizer, tokens, train, held_out)


def load_tokenizer(name: str) -> BertTokenizer:
    """
    An existing WordPiece tokenizer from a folder or the Hub.

    Raises:
        ValueError: none there, or one that is not BERT's.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the library has another class of exception for every way to miss
        raise ValueError(f"tokenizer {name}: cannot be loaded ({' '.join(str(error).split())})") from None
    missing = [
        token for token in ("pad", "unk", "cls", "sep", "mask") if getattr(tokenizer, f"{token}_token_id") is None
    ]
    if not isinstance(tokenizer, BertTokenizer) or missing:
        what = f"no {missing[0]} token" if missing else type(tokenizer).__name__
        raise ValueError(f"tokenizer {name}: {what}; it must be a BertTokenizer with BERT's five special tokens")
    if 2 * max(tokenizer.all_special_ids) > len(tokenizer):  # random tokens are drawn from those after them
        raise ValueError(
            f"tokenizer {name}: its special tokens stand among the last; they must come first, as in BERT"
        )
    return tokenizer
