"""Encodes sentences to token ids, each distinct word once, on several processes; writes a token store."""

import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from d2l_bert.progress import with_progress
from d2l_bert.tokenization.cache import fingerprint, write_once
from d2l_bert.tokenization.processes import in_order
from d2l_bert.tokenization.rules import NO_CONTROLS, ZERO_WIDTH_SPACE
from d2l_bert.tokenization.text_store import TextStore
from d2l_bert.tokenization.token_store import STORE_FORMAT, write_store
from d2l_bert.tokenization.wordpiece import CONTINUATION


# Raise ENCODING_FORMAT by 1 when the same sentences with the same tokenizer would give other ids: token stores that
# older versions cached are then written again. `tests/test_formats.py` fails until it is raised.
ENCODING_FORMAT = 2

TOKENIZED_AT_ONCE = 400_000  # about the characters that a process encodes in one call

WordUnit = Literal["white space", "tokenizer"]

# About the most words whose ids a process keeps: the first words in its blocks, which are mostly common words.
MOST_KNOWN_WORDS = 200_000


def prepare_tokens(
    text: TextStore, tokenizer, folder: Path, processes: int = 1, word_unit: WordUnit = "white space"
) -> Path:
    """
    Write a token store, unless `folder` already has a store of the same text and tokenizer.

    A sentence without tokens, because the tokenizer drops all its characters, is left out of the store.

    Args:
        folder: the cache.
        processes: how many processes encode.
        word_unit: what the store counts as words.

    Returns:
        The store's path in `folder`, for `TokenizedCorpus`.

    Raises:
        UserError: the text store is damaged, the cache cannot be written, or a process was killed or could not be
            started.
    """
    backend, versions = text_backend(tokenizer), [importlib.metadata.version("tokenizers")]
    identity = [ENCODING_FORMAT, STORE_FORMAT, versions, text.folder.name, backend, word_unit]
    path = folder / f"tokens-{fingerprint(identity)}"
    if not path.exists():
        blocks = len(text.rows())
        at_once = max(1, blocks * TOKENIZED_AT_ONCE // max(int(text.document_characters[-1:].sum()), 1))
        firsts = range(0, blocks, at_once)
        spans = ((first, min(first + at_once, blocks)) for first in firsts)
        arguments = (text.folder, backend, word_unit)
        sections = in_order(_tokenize, spans, min(processes, len(firsts)), _open_text, arguments)
        sections = with_progress(sections, "tokenizing", len(text), lambda section: len(section[3]))
        write_once(path, "tokenizing", lambda partial: write_store(partial, len(tokenizer), sections))
    return path


def text_backend(tokenizer) -> str:
    """
    The JSON of a tokenizer for `SentenceEncoder`: only the tokens with a role, such as [MASK], are special.

    A special token is text there. Others, such as [E1] of `add_special_tokens`, stay tokens, as in use.
    """
    backend = tokenizer.backend_tokenizer.to_str()
    parts, roles = json.loads(backend), set(map(str, tokenizer.special_tokens_map.values()))
    others = [token for token in parts["added_tokens"] if token["special"] and token["content"] not in roles]
    for token in others:
        token["special"] = False
    return json.dumps(parts) if others else backend


def _open_text(folder, backend, word_unit):
    """Set up a process for `_tokenize`."""
    global _text, _rows, _encode
    _text, _encode = TextStore(folder), SentenceEncoder(backend, word_unit)
    _rows = _text.rows()


def _tokenize(span):
    """A section of `write_store`: the blocks from the first up to the second number of `span`."""
    first, end = span
    rows = _rows[first:end]
    ids, lengths, words = _encode(list(itertools.chain(*rows["sentences"])))
    block_ends = np.cumsum([len(sentences) for sentences in rows["sentences"]])
    starts = np.append(0, block_ends[:-1])
    paragraph_ends = np.concatenate(
        [start + np.array(ends, dtype=np.int64) for start, ends in zip(starts, rows["paragraph_ends"], strict=True)]
    )
    ended_documents = slice(*np.searchsorted(_text.document_ends, (first, end), side="right"))
    document_ends = block_ends[_text.document_ends[ended_documents] - first - 1]
    kept_before = np.append(0, np.cumsum(lengths > 0))  # the number of sentences with tokens before each sentence
    words_before = np.append(0, np.cumsum(words))
    document_words = words_before[np.append(document_ends, len(lengths))]
    sentence_ends = np.cumsum(lengths)[lengths > 0]
    return ids, sentence_ends, kept_before[paragraph_ends], kept_before[document_ends], document_words


class SentenceEncoder:
    """
    Encodes sentences to token ids, each distinct word once: twice as fast as encoding whole sentences.

    BERT's normalizer and pre-tokenizer treat each word between spaces separately, and so do our rules beside them, so
    that a word has the same ids in every sentence. With any other normalizer or pre-tokenizer, or with an added token
    of several words, whole sentences are encoded.

    Args:
        backend: the JSON of a `tokenizers.Tokenizer`.
        word_unit: what to count as words: what stands between `white space`, or what the `tokenizer` splits into
            pieces, each piece but those that go on a word.
    """

    def __init__(self, backend: str, word_unit: WordUnit = "white space"):
        self.backend = Tokenizer.from_str(backend)
        self.backend.encode_special_tokens = True  # a "[MASK]" in the text is text, not a mask
        self.backend.no_truncation()
        self.backend.no_padding()
        parts = json.loads(backend)
        added = self.backend.get_added_tokens_decoder().values()
        self.by_word = _is_word_by_word(parts["normalizer"] or {}, parts["pre_tokenizer"] or {}) and not any(
            len(token.content.split()) > 1 for token in added
        )
        self.begins_word = None
        if word_unit == "tokenizer":
            vocabulary = self.backend.get_vocab()
            self.begins_word = np.ones(max(vocabulary.values()) + 1, dtype=np.int64)
            self.begins_word[[index for piece, index in vocabulary.items() if piece.startswith(CONTINUATION)]] = 0
        self.known = {}

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Returns:
            The ids of all sentences, concatenated (tokens,); the number of ids of each sentence (sentences,); the
            number of words of each sentence (sentences,).
        """
        words = [sentence.split() for sentence in sentences]
        units = words if self.by_word else [[sentence] for sentence in sentences]
        new = list(set(itertools.chain.from_iterable(units)).difference(self.known))
        for unit, encoding in zip(new, self.backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self.known[unit] = encoding.ids
        ids, ends = [], []
        for units_of_sentence in units:
            for unit in units_of_sentence:
                ids += self.known[unit]
            ends.append(len(ids))
        if len(self.known) > MOST_KNOWN_WORDS:
            for unit in new:
                del self.known[unit]
        ids = np.array(ids, dtype=np.int32)
        lengths = np.diff(np.array(ends, dtype=np.int64), prepend=0)
        if self.begins_word is None:
            return ids, lengths, np.array(list(map(len, words)), dtype=np.int64)
        words_before = np.append(0, np.cumsum(self.begins_word[ids]))
        return ids, lengths, np.diff(words_before[[0, *ends]])


def _is_word_by_word(normalizer, pre_tokenizer):
    """Whether a tokenizer, in its JSON, treats each word between spaces by itself: as BERT's do, and as `Rules` do."""
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    replaced = {step["pattern"].get("Regex") for step in steps if step.get("type") == "Replace"}
    splits = [step.get("type") for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])]
    return (
        kinds[-1] == "BertNormalizer"
        and {*kinds[:-1]} <= {"NFC", "NFKC", "Replace"}
        and replaced <= {ZERO_WIDTH_SPACE, NO_CONTROLS}
        and splits[0] == "BertPreTokenizer"
        and {*splits[1:]} <= {"Split"}
    )
