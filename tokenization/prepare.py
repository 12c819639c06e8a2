"""From text to a `PreparedText` (tokenizer, tokens, held-out documents): calls the other files of this folder."""

import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2l_bert.errors import UserError, explained
from d2l_bert.options import cores
from d2l_bert.tokenization import prepared_folder, wordpiece
from d2l_bert.tokenization.account import (
    REMARKED_UNKNOWN,
    account_line,
    account_of,
    case_and_marks,
    describe,
    entries_with_digits,
    remarks,
)
from d2l_bert.tokenization.cache import cache_folder, cached_json, fingerprint
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig, dataset_and_config
from d2l_bert.tokenization.encoding import WordUnit, prepare_tokens, text_backend
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.prepared_folder import PreparedText, ValidationText
from d2l_bert.tokenization.rules import Contents, Rules, choose_rules, count_words
from d2l_bert.tokenization.sentences import LONGEST_SENTENCE, Cleaning
from d2l_bert.tokenization.sources import READ_AS, Source, dataset_source, file_source
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus, held_out_documents
from d2l_bert.tokenization.wordpiece import make_tokenizer, train_on_words


logger = logging.getLogger(__name__)


# The tokenizer's statistics (`describe_tokenizer`) are computed on at most this many held-out sentences.
DESCRIBED_SENTENCES = 20_000

# Raise TOKENIZER_FORMAT by 1 when the same text with the same options would give another vocabulary: cached tokenizers
# are then trained again. `tests/test_formats.py` fails until it is raised.
TOKENIZER_FORMAT = 2

# Raise ACCOUNT_FORMAT by 1 when the same text with the same tokenizer would give another account.
ACCOUNT_FORMAT = 2


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
    prepared = None
    if prepared_folder.corpus_is_prepared(run):
        prepared = prepared_folder.read_prepared_folders([Path(path) for path in run.text_paths()])
        logger.info(account_line(prepared.account))
        with explained(prepared.corpus_name, "", UserError):
            check_unknown_share(prepared.account, run)
        run = dataclasses.replace(run, documents=prepared.token_options["documents"])
    validation = open_sources(
        run.validation_corpus,
        [dataset_and_config(dataset) for dataset in run.validation_dataset],
        run.validation_split,
        run,
        None,
        ("--validation_corpus", "--validation_split"),
    )
    if prepared is None:
        prepared = _from_text(run, bool(validation))
    if validation:
        prepared.held_out = prepared.held_out[:0]
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
        words = functools.cache(lambda: count_words(sample))
        if tokenizer is None:
            tokenizer = train_or_load_tokenizer(run, sample, words, cache)
        elif run.extend_vocab:
            tokenizer = extend_tokenizer(tokenizer, sample, run)
        account, contents = take_account(tokenizer, sample, words, cache)
        logger.info(account_line(account))
        for line in remarks(account, contents, tokenizer, existing is not None, run.language):
            logger.warning(line)
        check_unknown_share(account, run)
    word_unit = "white space" if contents.has_white_space_words() else "tokenizer"
    folder = prepare_tokens(text, tokenizer, cache, run.preprocessing_num_workers or default_processes(), word_unit)
    tokens = TokenizedCorpus(folder)
    if len(empty := tokens.stores[0].empty_documents):
        logger.warning(f"{corpus_name}: {len(empty):,} documents without a token are left out")
    facts = {
        "class": type(tokenizer).__name__,
        **case_and_marks(tokenizer),
        "word_unit": word_unit,
        "entries_with_digits": entries_with_digits(tokenizer),
    }
    if not has_validation:
        facts |= describe_tokenizer(tokenizer, SentenceSample(text, held_out), word_unit)
    held_out = documents_with_tokens(held_out, tokens)
    source_ends = np.array(text.source_ends) - np.searchsorted(empty, text.source_ends)
    if len(tokens) - len(held_out) < 2 or (len(held_out) < 2 and not has_validation):
        raise UserError(f"{corpus_name}: too few documents hold a token that the tokenizer knows; give more text")
    options = run.token_options()
    if existing is None:
        options["strip_accents"] = facts["strip_accents"]
    return PreparedText(
        token_options=options,
        corpus_name=corpus_name,
        hub_datasets=list(dict.fromkeys(source.name for source in sources if source.is_on_hub)),
        source_fingerprints=[fingerprint(source.identity) for source in sources],
        reading=text.reading,
        account=account,
        tokenizer=tokenizer,
        tokenizer_report=facts,
        tokens=tokens,
        source_ends=source_ends.tolist(),
        held_out=held_out,
        text_hashes=[text.text_hashes],
    )


def check_unknown_share(account: dict, run: TextConfig) -> None:
    """Raise `UserError` if more of the text stands in `[UNK]` than `max_unknown_share`."""
    share = account["unknown_characters"] / max(account["characters"], 1)
    if share > run.max_unknown_share:
        raise UserError(
            f"{share:.1%} of the characters stand in [UNK], which teach a model nothing; train a tokenizer on this "
            f"text, with a larger vocab_size or limit_alphabet if it was, or allow it with max_unknown_share"
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
        word_unit = prepared.tokenizer_report["word_unit"]
        tokens = TokenizedCorpus(prepare_tokens(text, prepared.tokenizer, cache, processes, word_unit))
    if len(tokens) < 2:
        raise UserError(
            f"validation text {name}: too few documents hold a token that the tokenizer knows; give more text"
        )
    in_both = int(np.any([np.isin(text.text_hashes, hashes) for hashes in prepared.text_hashes], axis=0).sum())
    prepared.validation = ValidationText(name, tokens, len(text.text_hashes), in_both)
    sample = SentenceSample(text, np.arange(min(len(text), DESCRIBED_SENTENCES)))
    prepared.tokenizer_report |= describe_tokenizer(prepared.tokenizer, sample, word_unit)
    if in_both:
        logger.warning(
            f"validation text {name}: {in_both:,} of its {len(text.text_hashes):,} files and rows stand in the "
            f"training text, too: its metrics are better than those of an unseen text"
        )


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, sentences: SentenceSample, word_unit: WordUnit) -> dict:
    """The statistics of `account.describe`, logged in one line."""
    report = describe(tokenizer, itertools.islice(sentences, DESCRIBED_SENTENCES), word_unit)
    unit = " (as the tokenizer splits them)" if word_unit == "tokenizer" else ""
    logger.info(
        f"tokenizer, on {report['words']:,} held-out words{unit}: {report['pieces_per_word']:.2f} pieces a word, "
        f"{report['unknown_share']:.2%} of the characters in [UNK]"
    )
    if report["unknown_share"] > REMARKED_UNKNOWN:
        logger.warning(
            "the held-out text has characters that the tokenizer lacks, and figures are measured on the others alone; "
            "give more text, so that the tokenizer is trained on them"
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
    "sentences": "sentences",
    "characters": "characters read",
    "characters_cleaned": "of them removed by cleaning",
    **READ_AS,
    "files_without_text": "files without text",
    "rows_without_text": "rows without text",
    "files_of_other_kinds": "files of other kinds",
    "long_sentences": f"sentences of more than {LONGEST_SENTENCE:,} characters, cut between words where there are any",
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
    store = TextStore(prepare_text(sources, language or "en", cleaning, cache_folder()))
    if shown := [f"{store.reading[key]:,} {words}" for key, words in COUNTS_SHOWN.items() if store.reading.get(key)]:
        logger.info(f"{name}: {'; '.join(shown)}")
    return name, store


def train_or_load_tokenizer(
    run: TextConfig, sample: SentenceSample, words: Callable[[], Counter], cache: Path
) -> PreTrainedTokenizerBase:
    """
    Train a tokenizer on the sample, or read the cached tokenizer of the same sample and options.

    Args:
        words: gives the words of the sample (`count_words`).
    """
    options = {name: getattr(run, name) for name in TOKENIZER_TRAINING_OPTIONS}
    inputs = [TOKENIZER_FORMAT, importlib.metadata.version("tokenizers"), sample.identity(), options]
    path = cache / f"tokenizer-{fingerprint(inputs)}"

    def train():
        share = "" if sample.share == 1 else f", on {sample.share:.1%} of the text"
        logger.info(f"training a tokenizer of at most {run.vocab_size:,} pieces{share}")
        start = time.monotonic()
        names = ("lowercase", "strip_accents", "pre_tokenizer", "individual_digits", "unicode_normalization")
        rules = choose_rules(Contents.of(words()), **{name: getattr(run, name) for name in names})
        tokenizer = train_on_words(words(), rules, run.vocab_size, run.min_frequency, run.limit_alphabet)
        logger.info(f"trained the tokenizer in {time.monotonic() - start:.0f} s")
        return {"rules": vars(rules), "pieces": tokenizer.convert_ids_to_tokens(range(len(tokenizer)))}

    content = cached_json(path, "training a tokenizer", train)
    rules = Rules(**content["rules"])
    tokenizer = make_tokenizer(content["pieces"], rules)
    logger.info(
        f"tokenizer: {rules}; {len(tokenizer):,} entries, {entries_with_digits(tokenizer):,} of them with digits"
    )
    return tokenizer


def take_account(
    tokenizer: PreTrainedTokenizerBase, sample: SentenceSample, words: Callable[[], Counter], cache: Path
) -> tuple[dict, Contents]:
    """The account of the sample (`account_of`), and what the sample is made of; from the cache if they are there."""
    backend = text_backend(tokenizer)
    versions = [importlib.metadata.version("tokenizers"), unicodedata.unidata_version]
    path = cache / f"account-{fingerprint(ACCOUNT_FORMAT, versions, sample.identity(), backend)}"

    def take():
        return {"account": account_of(words(), tokenizer), "contents": vars(Contents.of(words()))}

    content = cached_json(path, "taking account of the text", take)
    return content["account"], Contents(**content["contents"])


def extend_tokenizer(tokenizer: PreTrainedTokenizerBase, sample, run: TextConfig) -> PreTrainedTokenizerBase:
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
