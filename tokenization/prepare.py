"""From text to a `PreparedText` (tokenizer, tokens, held-out documents): calls the other files of this folder."""

import hashlib
import importlib.metadata
import itertools
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import BertTokenizer

from d2l_bert.errors import UserError, explained
from d2l_bert.options import cores
from d2l_bert.tokenization import prepared_folder, wordpiece
from d2l_bert.tokenization.cache import cache_folder, fingerprint, reading_cache, write_once
from d2l_bert.tokenization.config import TextConfig, dataset_and_config
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.prepared_folder import PreparedText, ValidationText
from d2l_bert.tokenization.sentences import LONGEST_SENTENCE, Cleaning
from d2l_bert.tokenization.sources import READ_AS, Source, dataset_source, file_source
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus, held_out_documents
from d2l_bert.tokenization.wordpiece import load_tokenizer


logger = logging.getLogger(__name__)


# The tokenizer's statistics (`describe_tokenizer`) are computed on at most this many held-out sentences.
DESCRIBED_SENTENCES = 20_000

# Raise TOKENIZER_FORMAT by 1 when the same text with the same options would give another vocabulary: cached tokenizers
# are then trained again. `tests/test_formats.py` fails until it is raised.
TOKENIZER_FORMAT = 1


def prepare(run: TextConfig) -> PreparedText:
    """
    Prepare the text, tokenizer and tokens of a run.

    Reads the text, splits it into training and held-out documents, trains or loads the tokenizer, and tokenizes. Each
    result is cached: a later call with the same text and options reads it from the cache. A corpus of prepared folders
    is read from the folders instead, without the cache.

    Raises:
        UserError: the text or the validation text cannot be read or is too short; the tokenizer cannot be used,
            trained or extended; a prepared folder is damaged or contradicts other options; the cache cannot be read or
            written; or a process was killed or could not be started.
    """
    validation = open_sources(
        run.validation_corpus,
        [dataset_and_config(dataset) for dataset in run.validation_dataset],
        run.validation_split,
        run,
        None,
        ("--validation_corpus", "--validation_split"),
    )
    if prepared_folder.corpus_is_prepared(run):
        prepared = prepared_folder.read_prepared_folders([Path(path) for path in run.text_paths()])
        prepared.held_out = prepared.held_out[: 0 if validation else None]
    else:
        prepared = _from_text(run, bool(validation))
    if validation:
        _add_validation(prepared, validation, run)
    logger.info(prepared.summary())
    return prepared


def _from_text(run, has_validation):
    """The `PreparedText` of files and datasets, without the validation text."""
    existing = run.existing_tokenizer()
    tokenizer = None if existing is None else load_tokenizer(existing)
    sources = open_sources(run.text_paths(), run.named_datasets(), run.dataset_split, run, run.max_documents)
    corpus_name, text = read_sources(sources, run.language, Cleaning.of(run.token_options()))
    cache = cache_folder()
    with explained(corpus_name, "", UserError):
        held_out = np.zeros(0, dtype=np.int64)
        if not has_validation:
            fraction, most = run.validation_fraction, run.max_validation_characters
            held_out = held_out_documents(text.document_characters, fraction, most)
        sample = SentenceSample(text, held_out, leave_out=True)
        if tokenizer is None:
            tokenizer = train_or_load_tokenizer(run, sample, cache)
        elif run.extend_vocab:
            tokenizer = extend_tokenizer(tokenizer, sample, run)
    folder = prepare_tokens(text, tokenizer, cache, run.preprocessing_num_workers or default_processes())
    tokens = TokenizedCorpus(folder)
    report = describe_tokenizer(tokenizer, SentenceSample(text, held_out)) if not has_validation else {}
    held_out = documents_with_tokens(held_out, tokens)
    source_ends = np.array(text.source_ends) - np.searchsorted(tokens.stores[0].empty_documents, text.source_ends)
    if len(tokens) - len(held_out) < 2 or (len(held_out) < 2 and not has_validation):
        raise UserError(f"{corpus_name}: too few documents hold a token that the tokenizer knows; give more text")
    return PreparedText(
        token_options=run.token_options(),
        corpus_name=corpus_name,
        hub_datasets=list(dict.fromkeys(source.name for source in sources if source.is_on_hub)),
        source_fingerprints=[fingerprint(source.identity) for source in sources],
        reading=text.reading,
        tokenizer=tokenizer,
        tokenizer_report=report,
        tokens=tokens,
        source_ends=source_ends.tolist(),
        held_out=held_out,
        text_hashes=[text.text_hashes],
    )


def documents_with_tokens(documents: np.ndarray, tokens: TokenizedCorpus) -> np.ndarray:
    """
    The numbers that documents of a text store have in the token store that was written from it.

    The token store leaves out documents without tokens, so that later documents have smaller numbers there.

    Args:
        documents: numbers in the text store, ascending (n,). Those without tokens are left out.
    """
    empty = tokens.stores[0].empty_documents
    documents = documents[~np.isin(documents, empty)]
    return documents - np.searchsorted(empty, documents)


def _add_validation(prepared, sources, run):
    """Read and tokenize the validation text like the training text, and count the texts that are in both."""
    options, cache = prepared.token_options, cache_folder()
    name, text = read_sources(sources, options["language"], Cleaning.of(options))
    processes = run.preprocessing_num_workers or default_processes()
    with explained(f"validation text {name}", "", UserError):
        tokens = TokenizedCorpus(prepare_tokens(text, prepared.tokenizer, cache, processes))
    if len(tokens) < 2:
        raise UserError(
            f"validation text {name}: too few documents hold a token that the tokenizer knows; give more text"
        )
    in_both = int(np.any([np.isin(text.text_hashes, hashes) for hashes in prepared.text_hashes], axis=0).sum())
    prepared.validation = ValidationText(name, tokens, len(text.text_hashes), in_both)
    if not prepared.tokenizer_report:
        prepared.tokenizer_report = describe_tokenizer(
            prepared.tokenizer, SentenceSample(text, np.arange(min(len(text), DESCRIBED_SENTENCES)))
        )
    if in_both:
        logger.warning(
            f"validation text {name}: {in_both:,} of its {len(text.text_hashes):,} files and rows stand in the "
            f"training text, too: its metrics are better than those of an unseen text"
        )


def describe_tokenizer(tokenizer: BertTokenizer, sentences: SentenceSample) -> dict:
    """The statistics of `wordpiece.describe`, logged in one line."""
    report = wordpiece.describe(tokenizer, itertools.islice(sentences, DESCRIBED_SENTENCES))
    logger.info(
        f"tokenizer, on {report['words']:,} held-out words: {report['pieces_per_word']:.2f} pieces a word, "
        f"{report['unknown_share']:.2%} [UNK]"
    )
    return report


def open_sources(
    paths: Sequence[str],
    datasets: Sequence[tuple[str, str | None]],
    split: str,
    run: TextConfig,
    max_documents: int | None,
    options: tuple[str, str] = ("--corpus", "--dataset_split"),
) -> list[Source]:
    """
    One source for each path, then one source for each dataset.

    Args:
        paths: files, folders, or `python-docs`.
        datasets: for each dataset, the id or folder, and the name of a configuration or None.
        split: the split to read of each dataset.
        run: the options of the run: the column to read, where documents end, the number of processes, and whether to
            stream.
        max_documents: the most documents to read from each source; None for all.
        options: the flags that give `paths` and `split`, for error messages.

    Raises:
        UserError: a source does not exist or cannot be opened.
    """
    processes = run.preprocessing_num_workers or default_processes()
    files = [file_source(path, run.text_column, max_documents, processes, run.documents) for path in paths]
    reading = (split, run.text_column, run.streaming, max_documents, options, run.documents)
    sources = files + [dataset_source(name, config, *reading) for name, config in datasets]
    identities = [source.identity for source in sources]
    if twice := [source.name for source in sources if identities.count(source.identity) > 1]:
        raise UserError(f"{options[0]}: {twice[0]} is given twice; give it once")
    return sources


def default_processes() -> int:
    """The default number of processes to read `python-docs` and to tokenize: one for each core, at most 8."""
    return min(cores(), 8)


# What reading a text counts (`TextStore.reading`), as far as the user should know of it.
COUNTS_SHOWN = {
    "documents": "documents",
    **READ_AS,
    "files_without_text": "files without text",
    "rows_without_text": "rows without text",
    "files_of_other_kinds": "files of other kinds",
    "long_sentences": f"sentences of more than {LONGEST_SENTENCE:,} characters, cut between words",
    "blocks_as_documents": "blocks of sentences that count as documents, as there are few",
    "normalized": "normalised paragraphs",
    "too_short": "paragraphs too short",
    "duplicates": "duplicate paragraphs",
}


def read_sources(sources: Sequence[Source], language: str, cleaning: Cleaning) -> tuple[str, TextStore]:
    """
    The names of some sources, and their text, read or found in the cache.

    Logs which files and rows reading passed over, how many sentences it cut, and what cleaning did.
    """
    name = ", ".join(source.name for source in sources)
    store = TextStore(prepare_text(sources, language, cleaning, cache_folder()))
    if shown := [f"{store.reading[key]:,} {words}" for key, words in COUNTS_SHOWN.items() if store.reading.get(key)]:
        logger.info(f"{name}: {'; '.join(shown)}")
    return name, store


def train_or_load_tokenizer(run: TextConfig, sample: SentenceSample, cache: Path) -> BertTokenizer:
    """Train a tokenizer on the sample, or read the cached tokenizer of the same sample and options."""
    training_options = (run.vocab_size, run.lowercase, run.strip_accents, run.min_frequency, run.limit_alphabet)
    blocks = hashlib.sha256(np.ascontiguousarray(sample.blocks, dtype="<i8")).hexdigest()
    inputs = (
        [TOKENIZER_FORMAT, [importlib.metadata.version("tokenizers")]],
        sample.text.folder.name,
        blocks,
        training_options,
    )
    path = cache / f"tokenizer-{fingerprint(inputs)}"

    def write(partial):
        share = "" if sample.share == 1 else f", on {sample.share:.1%} of the text"
        logger.info(f"training a tokenizer of at most {run.vocab_size:,} pieces{share}")
        start = time.monotonic()
        tokenizer = wordpiece.train_wordpiece(sample, *training_options)
        logger.info(f"trained the tokenizer in {time.monotonic() - start:.0f} s")
        (partial / "pieces.json").write_text(json.dumps(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))))

    if not path.exists():
        write_once(path, "training a tokenizer", write)
    with reading_cache(path):
        pieces = json.loads((path / "pieces.json").read_text())
    return wordpiece.make_tokenizer(pieces, run.lowercase, run.strip_accents)


def extend_tokenizer(tokenizer: BertTokenizer, sample, run: TextConfig) -> BertTokenizer:
    """
    A copy of the tokenizer with at most `extend_vocab` words of the sample added: those that save the most tokens.

    Logs how many words are added.
    """
    extended = wordpiece.extend_wordpiece(tokenizer, sample, run.extend_vocab, run.min_frequency)
    added = len(extended) - len(tokenizer)
    line = f"added {added:,} words to the vocabulary"
    if added < run.extend_vocab:
        line += f", not {run.extend_vocab:,}: no other words are split and occur {run.min_frequency:,} times"
    logger.info(line)
    return extended
