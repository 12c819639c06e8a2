"""Encodes sentences to token ids, each distinct word once, on several processes; writes a token store."""

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from d2l_bert.tokenization.cache import cached
from d2l_bert.tokenization.processes import in_order
from d2l_bert.tokenization.rules import NO_CONTROLS, ZERO_WIDTH_SPACE, WordUnit
from d2l_bert.tokenization.text_store import Blocks, TextPart
from d2l_bert.tokenization.token_store import STORE_FORMAT, Section, write_store
from d2l_bert.tokenization.wordpiece import CONTINUATION, literal_json, literal_tokenizer


# Raise ENCODING_FORMAT by 1 when the same sentences with the same tokenizer would give other ids: token stores that
# older versions cached are then written again. `tests/test_formats.py` fails until it is raised.
ENCODING_FORMAT = 2

TOKENIZED_AT_ONCE = 400_000  # about the characters that a process encodes in one call

# About the most words whose ids a process keeps: the first words in its blocks, which are mostly common words.
MOST_KNOWN_WORDS = 200_000


def prepare_tokens(
    part: TextPart, tokenizer, folder: Path, processes: int = 1, word_unit: WordUnit = "white space"
) -> Path:
    """
    Write a token store, unless `folder` already has a store of the same text and tokenizer.

    Sentences and documents without tokens, because the tokenizer drops all their characters, are left out.

    Args:
        part: whole documents of a text.
        folder: the cache.
        processes: how many processes encode.
        word_unit: what the store counts as words.

    Returns:
        The store's path in `folder`, for `TokenizedCorpus`.

    Raises:
        UserError: the text store is damaged, the cache cannot be written, or a process was killed or could not be
            started.
    """
    json_of_tokenizer = literal_json(tokenizer)

    def write(partial):
        spans = _spans_of(part)
        tokenize = functools.partial(_tokenize, part.store.folder, json_of_tokenizer, word_unit)
        sections = in_order(tokenize, spans, min(processes, len(spans)))
        write_store(partial, len(tokenizer), part.store.source_count, sections, documents=part.document_count())
        _opened.cache_clear()  # if no other processes were started, this one has opened the text, and closes it

    identity = [ENCODING_FORMAT, STORE_FORMAT, part.identity(), json_of_tokenizer, word_unit]
    return cached(folder, "tokens", identity, write)


@dataclass(frozen=True)
class Span:
    """
    Consecutive blocks that a process encodes in one call.

    Args:
        blocks: their numbers (n,).
        last_blocks: those that end a document, counted from the first block of the span (d,).
        hashes, sources: the hash, and the number of the source, of each of these documents (d,).
    """

    blocks: np.ndarray
    last_blocks: np.ndarray
    hashes: np.ndarray
    sources: np.ndarray


def _spans_of(part):
    """
    The spans of a part of a text, of about `TOKENIZED_AT_ONCE` characters each.

    Seven blocks of the documents 3, 4 and 6, in spans of four blocks:

        blocks          10 11 12 13     14 20 21
        documents        3  3  4  4      4  6  6      the document of each block
        last_blocks         1            0     2      the places of 11, 14 and 21 in their spans
        ended               3            4     6      the documents that end here, which hashes and sources are of
    """
    store = part.store
    blocks = part.blocks
    # Of 700 blocks with 1,400,000 characters, 200 have about 400,000.
    blocks_at_once = max(1, len(blocks) * TOKENIZED_AT_ONCE // max(part.characters(), 1))
    documents = store.document_of_block[blocks]
    ends_document = np.diff(documents, append=-1) != 0
    spans = []
    for first in range(0, len(blocks), blocks_at_once):
        places = slice(first, first + blocks_at_once)
        last_blocks = np.flatnonzero(ends_document[places])
        ended = documents[places][last_blocks]
        spans.append(Span(blocks[places], last_blocks, store.hashes[ended], store.sources[ended]))
    return spans


@functools.lru_cache(maxsize=1)
def _opened(folder, json_of_tokenizer, word_unit):
    """The blocks of a text, and what encodes them: opened once in a process."""
    return Blocks(folder), SentenceEncoder(json_of_tokenizer, word_unit)


def _tokenize(folder, json_of_tokenizer, word_unit, span):
    """
    The `Section` of a span of the text.

    Sentences without a token are left out, and the ends of documents are counted without them. In this span, three
    blocks have two sentences, one and one; the first document ends with the second block, the next with the third; and
    the second sentence has no token:

        token_counts           5 0 | 4 | 6
        block_ends               2   3   4      the number of sentences up to the end of each block
        span.last_blocks             1   2
        sentence_ends                3   4      the number of sentences up to the end of each document
        kept_up_to           0 1 1   2   3      of the first 0, 1, 2, 3 and 4 sentences, those with tokens
        document_ends                2   3      kept_up_to[3] and kept_up_to[4]
    """
    blocks, encode = _opened(folder, json_of_tokenizer, word_unit)
    rows = pa.Table.from_batches(blocks.read(span.blocks))
    block_ends = np.cumsum(pc.list_value_length(rows["sentences"]).to_numpy())
    sentence_ends = block_ends[span.last_blocks]
    ids, token_counts, word_counts = encode(pc.list_flatten(rows["sentences"]).to_pylist())
    has_tokens = token_counts > 0
    kept_up_to = np.append(0, np.cumsum(has_tokens))
    return Section(
        ids=ids,
        token_counts=token_counts[has_tokens],
        word_counts=word_counts[has_tokens],
        document_ends=kept_up_to[sentence_ends],
        hashes=span.hashes,
        sources=span.sources,
    )


class SentenceEncoder:
    """
    Encodes sentences to token ids, each distinct word once: twice as fast as encoding whole sentences.

    BERT's normalizer and pre-tokenizer treat each word between spaces separately, and so do our rules beside them, so
    that a word has the same ids in every sentence. With any other normalizer or pre-tokenizer, or with an added token
    of several words, whole sentences are encoded.

    Args:
        json_of_tokenizer: of `literal_json`.
        word_unit: what to count as words. With `white space` "don't stop" has two words, what stands between white
            space. With `tokenizer` it has four, "don", "'", "t" and "stop": the tokens that do not begin with ##.
    """

    def __init__(self, json_of_tokenizer: str, word_unit: WordUnit = "white space"):
        self.tokenizer = literal_tokenizer(json_of_tokenizer)
        parts = json.loads(json_of_tokenizer)
        added = self.tokenizer.get_added_tokens_decoder().values()
        has_long_token = any(len(token.content.split()) > 1 for token in added)
        is_word_by_word = _is_word_by_word(parts["normalizer"] or {}, parts["pre_tokenizer"] or {})
        self.encodes_words = is_word_by_word and not has_long_token  # else whole sentences
        self.begins_word = None  # words are what stands between white space
        if word_unit == "tokenizer":
            self.begins_word = _which_begin_words(self.tokenizer.get_vocab())
        self.known_ids = {}  # of the words, or sentences, that were encoded

    def __call__(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Returns:
            The ids of all sentences, one after the other (tokens,); how many each sentence has (sentences,); how many
            words each sentence has (sentences,).
        """
        words = [sentence.split() for sentence in sentences]
        encoded_as = words if self.encodes_words else [[sentence] for sentence in sentences]
        new = list(set(itertools.chain.from_iterable(encoded_as)).difference(self.known_ids))
        for text, encoding in zip(new, self.tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self.known_ids[text] = encoding.ids
        ids = []
        ends = []
        for texts_of_sentence in encoded_as:
            for text in texts_of_sentence:
                ids += self.known_ids[text]
            ends.append(len(ids))
        if len(self.known_ids) > MOST_KNOWN_WORDS:  # it is full: the new words are forgotten, as they are mostly rare
            for text in new:
                del self.known_ids[text]
        ids = np.array(ids, dtype=np.int32)
        borders = np.array([0, *ends], dtype=np.int64)  # a sentence has the ids from one border to the next
        if self.begins_word is None:
            word_counts = np.array(list(map(len, words)), dtype=np.int64)
        else:
            # The first 0, 1, 2, 3 and 4 of the tokens "a ##b | c d" have 0, 1, 1, 2 and 3 words; the borders are 0, 2
            # and 4, up to which there are 0, 1 and 3 words; so the sentences have 1 and 2.
            words_up_to = np.append(0, np.cumsum(self.begins_word[ids]))
            word_counts = np.diff(words_up_to[borders])
        return ids, np.diff(borders), word_counts


def _which_begin_words(vocabulary):
    """For each id, 1 if its token begins a word, 0 if it goes on one (ids,)."""
    begins_word = np.ones(max(vocabulary.values()) + 1, dtype=np.int64)
    for piece, index in vocabulary.items():
        if piece.startswith(CONTINUATION):
            begins_word[index] = 0
    return begins_word


def _is_word_by_word(normalizer, pre_tokenizer):
    """Whether a tokenizer, in its JSON, treats each word between spaces by itself: as BERT's do, and as `Rules` do."""
    normalizers = normalizer.get("normalizers", [normalizer])
    pre_tokenizers = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not normalizers or not pre_tokenizers:  # a sequence of nothing
        return False
    if normalizers[-1].get("type") != "BertNormalizer" or pre_tokenizers[0].get("type") != "BertPreTokenizer":
        return False
    for step in normalizers[:-1]:
        kind = step.get("type")
        is_ours = kind == "Replace" and step["pattern"].get("Regex") in (ZERO_WIDTH_SPACE, NO_CONTROLS)
        if kind not in ("NFC", "NFKC") and not is_ours:
            return False
    return all(step.get("type") == "Split" for step in pre_tokenizers[1:])
