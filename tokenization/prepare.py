"""From text to a `PreparedText` (tokenizer, tokens, held-out documents): calls the other files of this folder."""

import dataclasses
import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError, explained, shortened
from d2l_bert.records import read_record
from d2l_bert.tokenization import prepared_folder, wordpiece
from d2l_bert.tokenization.account import (
    REMARKED_UNKNOWN,
    AccountRecord,
    account_line,
    account_of,
    check_account,
    facts_of,
    remarks,
    unknown_part,
    unknown_share,
)
from d2l_bert.tokenization.cache import cache_folder, cached
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig, dataset_and_config
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.rules import Contents, Rules, RulesRecord, choose_rules, contents_of, count_words
from d2l_bert.tokenization.sentences import Source
from d2l_bert.tokenization.sources import dataset_source, file_source
from d2l_bert.tokenization.text_store import TextPart, TextStore, held_out_documents, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus


logger = logging.getLogger(__name__)

# The share of `[UNK]` in a text to evaluate on is taken from stretches of about this many characters in all.
SAMPLED_CHARACTERS = 2_000_000

# Raise TOKENIZER_FORMAT by 1 when the same text with the same options would give another vocabulary, or another
# account: cached tokenizers are then trained again. `tests/test_formats.py` fails until it is raised.
TOKENIZER_FORMAT = 5


def prepare(run: TextConfig, existing: PreTrainedTokenizerBase | None = None) -> prepared_folder.PreparedText:
    """
    Prepare the text, tokenizer and tokens of a run.

    Reads the text, splits it into training and held-out documents, trains the tokenizer, and tokenizes. Each
    result is cached: a later call with the same text and options reads it from the cache. A prepared folder is read
    instead, without the cache; several are joined there.

    Args:
        existing: the tokenizer that `run` names; None if one is trained.

    Raises:
        UserError: the text or the validation text cannot be read or is too short; the tokenizer cannot be trained or
            extended; a prepared folder is damaged or contradicts other options; the cache cannot be read or
            written; or a process was killed or could not be started.
    """
    prepared = None
    if prepared_folder.corpus_is_prepared(run):
        prepared = prepared_folder.read_prepared_folders([Path(path) for path in run.text_paths()])
        check_unknown_share(prepared.corpus_name, prepared.account, run)
        run = dataclasses.replace(run, documents=prepared.token_options["documents"])
    validation = open_sources(
        run.validation_corpus,
        run.validation_dataset,
        run.validation_split,
        run,
        None,
        ("--validation_corpus", "--validation_split"),
    )
    if prepared is None:
        prepared = _from_text(run, existing, bool(validation))
    if validation:
        _add_validation(prepared, validation, run)
    logger.info(prepared.summary())
    return prepared


def _from_text(run, existing, has_validation):
    """The `PreparedText` of files and datasets; with a validation text, nothing is held out."""
    assert existing is not None or run.existing_tokenizer() is None, "the tokenizer that the run names is not given"
    sources = open_sources(run.text_paths(), run.dataset, run.dataset_split, run, run.max_documents)
    corpus_name, text = read_sources(sources, run.language)
    with explained(corpus_name, "", UserError):
        is_held_out = np.zeros(len(text), dtype=bool)
        if not has_validation:
            is_held_out = held_out_documents(
                text.hashes, text.characters, run.validation_fraction, run.max_validation_characters
            )
        if copies := len(text) - len(np.unique(text.hashes)):
            text.reading["documents that are copies of others"] = copies
            logger.info(
                f"{corpus_name}: {copies:,} of {len(text):,} documents are copies of others; all copies of a document "
                f"are trained on, or all are held out"
            )
        train = text.part(~is_held_out)
        tokenizer, account, contents = fit_tokenizer(run, existing, train.sample())
        logger.info(account_line(account))
        for line in remarks(account, contents, tokenizer, existing is not None, run.language):
            logger.warning(line)
    check_unknown_share(corpus_name, account, run)
    facts = {**facts_of(tokenizer), "word_unit": contents["word_unit"]}
    options = run.token_options()
    if existing is None:
        options["strip_accents"] = facts["strip_accents"]
    prepared = prepared_folder.PreparedText(
        token_options=options,
        corpus_name=corpus_name,
        hub_datasets=list(dict.fromkeys(source.name for source in sources if source.is_on_hub)),
        source_fingerprints=[short_hash(source.identity) for source in sources],
        text_fingerprint=text.fingerprint,
        reading=text.reading,
        account=account,
        tokenizer=tokenizer,
        tokenizer_report=facts,
        train=_tokenize(train, tokenizer, facts, run, corpus_name),
    )
    if not has_validation:
        _hold_out(prepared, text.part(is_held_out), run, corpus_name)
    return prepared


def _tokenize(part, tokenizer, facts, run, name):
    """The tokens of a part of a text, at least two documents."""
    with explained(name, "", UserError):
        tokens = TokenizedCorpus(prepare_tokens(part, tokenizer, cache_folder(), run.processes(), facts["word_unit"]))
        if empty := part.document_count() - len(tokens):
            logger.warning(f"{name}: {empty:,} documents without a token are left out")
        if len(tokens) < 2:
            raise UserError("too few documents hold a token that the tokenizer knows; give more text")
    return tokens


def _hold_out(prepared, part, run, name):
    """Make a part of a text the one to evaluate on."""
    prepared.held_out = _tokenize(part, prepared.tokenizer, prepared.tokenizer_report, run, name)
    share = unknown_share(prepared.tokenizer, part.sample(SAMPLED_CHARACTERS))
    prepared.tokenizer_report = {**prepared.tokenizer_report, "unknown_share": share}
    if share > REMARKED_UNKNOWN:
        logger.warning(
            "the held-out text has characters that the tokenizer lacks, and figures are measured on the others alone; "
            "give more text, so that the tokenizer is trained on them"
        )


def check_unknown_share(name: str, account: dict, run: TextConfig) -> None:
    """Raise `UserError` if more of the text `name` stands in `[UNK]` than `max_unknown_share`."""
    if (share := unknown_part(account)) > run.max_unknown_share:
        raise UserError(
            f"{name}: {share:.1%} of the characters stand in [UNK], which teach a model nothing; train a tokenizer on "
            f"this text, with a larger vocab_size or limit_alphabet if it was, or allow it with max_unknown_share"
        )


def _add_validation(prepared, sources, run):
    """Read and tokenize the validation text like the training text, and count the documents that are in both."""
    name, text = read_sources(sources, (prepared.token_options["language"] or "").partition(",")[0] or None)
    documents, in_both = text.documents_in(prepared.train.hashes)
    _hold_out(prepared, text.part(), run, f"validation text {name}")
    prepared.validation = {
        "corpus_name": name,
        "corpus_fingerprint": prepared.held_out.fingerprint,
        "texts": documents,
        "texts_in_training": in_both,
    }
    if in_both:
        logger.warning(
            f"validation text {name}: {in_both:,} of its {documents:,} documents stand in the training text, "
            f"too: its metrics are better than those of an unseen text"
        )


def open_sources(
    paths: Sequence[str],
    datasets: Sequence[str],
    split: str,
    run: TextConfig,
    max_documents: int | None,
    options: tuple[str, str] = ("--corpus", "--dataset_split"),
) -> list[Source]:
    """
    One source for each path, then one source for each dataset.

    Args:
        paths: files, folders, or `python-docs`.
        datasets: ids and folders, as `config.dataset_and_config` reads them.
        split: the split to read of each dataset.
        run: the options of the run: the column to read, where documents end, the number of processes, and whether to
            stream.
        max_documents: the most documents to read from each source; None for all.
        options: the flags that give `paths` and `split`, for error messages.

    Raises:
        UserError: a source does not exist or cannot be opened.
    """
    both = {"text_column": run.text_column, "max_documents": max_documents, "documents": run.documents}
    sources = [file_source(path, processes=run.processes(), separator=run.separator, **both) for path in paths]
    sources += [
        dataset_source(*dataset_and_config(name), split, streaming=run.streaming, options=options, **both)
        for name in datasets
    ]
    seen = set()
    for source in sources:
        identity = short_hash(source.identity)
        if identity in seen:
            raise UserError(f"{shortened(source.name, 200)} is given twice; give it once")
        seen.add(identity)
    return sources


def read_sources(sources: Sequence[Source], language: str | None) -> tuple[str, TextStore]:
    """
    The names of some sources, and their text, read or found in the cache.

    Logs which files and rows reading passed over, and how many sentences it cut.

    Args:
        language: the option.
    """
    names = " ".join(", ".join(source.name for source in sources).split())  # a file's name may have a line end
    name = shortened(names, prepared_folder.MOST_NAMES)
    store = TextStore(prepare_text(sources, language or "en", cache_folder()))
    if linked := sum(source.linked for source in sources):
        store.reading["files behind links out of their folder"] = linked
    logger.info(f"{name}: {'; '.join(f'{what}: {count:,}' for what, count in store.reading.items())}")
    return name, store


CONTENT_FILE = "content.json"


class FoundInSample(TypedDict):
    """The content of content.json in the cache: what `fit_tokenizer` has found in a sample of a text."""

    account: AccountRecord
    contents: Contents


class TrainedTokenizer(FoundInSample):
    """And the tokenizer that it has trained on the sample."""

    rules: RulesRecord
    pieces: list[str]


def fit_tokenizer(
    run: TextConfig, existing: PreTrainedTokenizerBase | None, sample: TextPart
) -> tuple[PreTrainedTokenizerBase, dict, dict]:
    """
    The tokenizer of a run: trained on the sample, or an existing one, extended by words of the sample if asked.

    What was computed of the same sample with the same options is read from the cache.

    Returns:
        The tokenizer; the account of the sample (`account_of`); what the sample is made of (`contents_of`).
    """
    if existing and run.extend_vocab:
        existing = wordpiece.extend_wordpiece(existing, count_words(sample), run.extend_vocab, run.min_frequency)

    def fit():
        words = count_words(sample)
        contents, tokenizer, found = contents_of(words), existing, {}
        if not tokenizer:
            logger.info(f"training a tokenizer of at most {run.vocab_size:,} pieces")
            rules = choose_rules(
                contents,
                run.lowercase,
                run.strip_accents,
                run.pre_tokenizer,
                run.individual_digits,
                run.unicode_normalization,
            )
            tokenizer = wordpiece.train_on_words(words, rules, run.vocab_size, run.min_frequency, run.limit_alphabet)
            found = {"rules": vars(rules), "pieces": wordpiece.pieces(tokenizer)}
        return {**found, "account": account_of(words, tokenizer), "contents": contents}

    options = {name: getattr(run, name) for name in TOKENIZER_TRAINING_OPTIONS}
    made_of = wordpiece.text_backend(existing) if existing else options
    path = cached(
        cache_folder(),
        "tokenizer",
        [TOKENIZER_FORMAT, sample.identity(), made_of],
        lambda partial: (partial / CONTENT_FILE).write_text(json.dumps(fit())),
        functools.partial(_read_fitted, is_trained=existing is None),
    )
    found = _read_fitted(path, is_trained=existing is None)
    tokenizer = existing or wordpiece.make_tokenizer(found["pieces"], Rules(**found["rules"]))
    if not existing:
        settings = ", ".join(f"{name} {value}" for name, value in found["rules"].items())
        logger.info(
            f"tokenizer: {settings}; {len(tokenizer):,} entries, {facts_of(tokenizer)['entries_with_digits']:,} of "
            f"them with digits"
        )
    return tokenizer, found["account"], found["contents"]


def _read_fitted(folder, is_trained):
    """
    What `fit_tokenizer` has written into a folder of the cache; with `is_trained`, it holds a tokenizer's pieces.

    Raises:
        ValueError: it holds something else.
    """
    found = read_record(folder / CONTENT_FILE, TrainedTokenizer if is_trained else FoundInSample)
    check_account(found["account"])
    if is_trained:
        pieces = set(found["pieces"])
        if len(pieces) < len(found["pieces"]) or not pieces.issuperset(wordpiece.SPECIAL_TOKENS):
            raise ValueError("the pieces are no vocabulary")
        if found["rules"].keys() != RulesRecord.__annotations__.keys():
            raise ValueError("the rules are those of another version")
        Rules(**found["rules"])  # raises for those that there are not
    return found
