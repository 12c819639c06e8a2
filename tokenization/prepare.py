"""From text to a `PreparedText` (tokenizer, tokens, held-out documents): calls the other files of this folder."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError, explained, short_name, shortened
from d2l_bert.records import read_record
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.account import Account, counts_line, document_lines, odd_counts, packed
from d2l_bert.tokenization.cache import cache_folder, cached
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.tokenization.coverage import (
    REMARKED_UNKNOWN,
    Coverage,
    coverage_line,
    coverage_of,
    facts_of,
    measure_unknown_share,
    remarks,
    tokenizer_line,
    unknown_share,
)
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.prepared_folder import (
    MOST_NAMES,
    PreparedText,
    corpus_is_prepared,
    read_prepared_folders,
)
from d2l_bert.tokenization.rules import (
    Contents,
    Rules,
    RulesRecord,
    WordUnit,
    choose_rules,
    contents_of,
    count_words,
)
from d2l_bert.tokenization.sources import HowToRead, Source, WhatToRead, open_sources
from d2l_bert.tokenization.text_store import TextPart, TextStore, held_out_documents, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus


logger = logging.getLogger(__name__)

# The share of `[UNK]` in a text to evaluate on is taken from stretches of about this many characters in all.
SAMPLED_CHARACTERS = 2_000_000

# Raise TOKENIZER_FORMAT by 1 when the same text with the same options would give another vocabulary, or another
# coverage: cached tokenizers are then trained again. `tests/test_formats.py` fails until it is raised.
TOKENIZER_FORMAT = 6


def prepare(run: TextConfig, existing: PreTrainedTokenizerBase | None = None) -> PreparedText:
    """
    Prepare the text, tokenizer and tokens of a run.

    Reads the text, splits it into training and held-out documents, trains the tokenizer, and tokenizes. Each
    result is cached: a later call with the same text and options reads it from the cache. A prepared folder is read
    instead, without the cache; several are joined there. What was read is logged in a few lines (`Account`).

    Args:
        existing: the tokenizer that `run` names; None if one is trained.

    Raises:
        UserError: the text or the validation text cannot be read or is too short; the tokenizer cannot be trained or
            extended; a prepared folder is damaged or contradicts other options; the cache cannot be read or
            written; or a process was killed or could not be started.
    """
    account = Account(run.full_account)
    if corpus_is_prepared(run):
        prepared = _from_prepared_folders(run, account)
    else:
        prepared = _from_text(run, existing, account)
    account.log_remarks()
    account.say(prepared.summary())
    return dataclasses.replace(prepared, account=account.lines)


def _from_prepared_folders(run, account):
    """
    The `PreparedText` of prepared folders. A validation text takes the place of their held-out documents, and is
    divided into documents and sentences as their text was.
    """
    prepared = read_prepared_folders([Path(path) for path in run.text_paths()])
    check_unknown_share(prepared.corpus_name, prepared.coverage, run)
    options = prepared.token_options
    sources = _open_validation(dataclasses.replace(run, documents=options["documents"]))
    if not sources:
        return prepared
    word_unit = prepared.tokenizer_report["word_unit"]  # words are counted as in the prepared folders
    how = HowToTokenize(prepared.tokenizer, word_unit, run.processes())
    first_language = (options["language"] or "").partition(",")[0]  # several folders may be in several: "en, de"
    evaluation = _validation_text(sources, first_language or None, prepared.train, how, account)
    return dataclasses.replace(
        prepared,
        tokenizer_report=prepared.tokenizer_report | {"unknown_share": evaluation.unknown_share},
        held_out=evaluation.tokens,
        validation=evaluation.validation,
    )


def _from_text(run, existing, account):
    """The `PreparedText` of files and datasets; with a validation text, nothing is held out."""
    if existing is None:
        assert run.existing_tokenizer() is None, "the run names a tokenizer: it must be given"
    validation_sources = _open_validation(run)
    what = WhatToRead(paths=run.text_paths(), datasets=run.dataset, split=run.dataset_split)
    sources = open_sources(what, HowToRead.of(run))
    text = read_sources(sources, run.language, account)
    reading = dict(text.reading)
    with explained(text.name, "", UserError):  # puts the text's name before a message, which says the way out itself
        is_held_out = _choose_held_out(text.store, run, has_validation=bool(validation_sources))
        if copies := len(text.store) - len(np.unique(text.store.hashes)):
            reading["documents that are copies of others"] = copies
        _say_what_was_read(text, reading, account)
        train_part = text.store.part(~is_held_out)
        fitted = fit_tokenizer(run, existing, train_part.sample())
        _say_what_it_becomes(fitted, existing is not None, run.language, account)
    check_unknown_share(text.name, fitted.coverage, run)
    how = HowToTokenize(fitted.tokenizer, fitted.contents["word_unit"], run.processes())
    train = _tokenize(train_part, how, text.name, account)
    if validation_sources:
        evaluation = _validation_text(validation_sources, run.language, train, how, account)
    else:
        evaluation = _evaluation_text(text.store.part(is_held_out), how, text.name, account)
    facts = facts_of(fitted.tokenizer)
    token_options = run.token_options()
    if existing is None:
        # The tokenizer was trained. The option may be "auto": true or false, as the text decided, is recorded.
        token_options["strip_accents"] = facts["strip_accents"]
    hub_datasets = dict.fromkeys(source.name for source in sources if source.is_on_hub)
    return PreparedText(
        token_options=token_options,
        corpus_name=text.name,
        hub_datasets=list(hub_datasets),
        source_fingerprints=[short_hash(source.identity) for source in sources],
        text_fingerprint=text.store.fingerprint,
        reading=reading,
        coverage=fitted.coverage,
        tokenizer=fitted.tokenizer,
        tokenizer_report={**facts, "word_unit": how.word_unit, "unknown_share": evaluation.unknown_share},
        train=train,
        held_out=evaluation.tokens,
        validation=evaluation.validation,
    )


def _say_what_was_read(text, reading, account):
    """Say how much was read, how documents begin and end, what recurs in lines, and what was passed over."""
    account.say(counts_line(text.name, reading))
    for line in document_lines(text.store):
        account.say(line)
    _say_some("of the lines", text.store.lines, 2, account)
    _say_some("also", odd_counts(reading), 1, account)


def _say_some(label, items, most_lines, account):
    """Log as many items as fit into `most_lines` lines, each of which begins with the label; keep all items."""
    for line in packed(label, items, most_lines):
        account.say(line)
    account.keep(f"{label}, all: {'; '.join(items) or 'nothing'}")


def _say_what_it_becomes(fitted, is_given, language, account):
    """Say what the tokenizer is, what it loses of the text, and what can be done about it."""
    account.say(tokenizer_line(fitted.tokenizer, fitted.coverage))
    account.keep(coverage_line(fitted.coverage))
    differ_in_case = fitted.contents["types_of_case"]
    account.keep(f"{differ_in_case:.1%} of the word types differ from another in case alone")
    for line in remarks(fitted.coverage, fitted.contents, fitted.tokenizer, is_given, language):
        account.remark(line)


def _choose_held_out(store, run, has_validation):
    """Whether each document of a text is held out (documents,): none, if there is a validation text."""
    if has_validation:
        return np.zeros(len(store), dtype=bool)
    return held_out_documents(store.hashes, store.characters, run.validation_fraction, run.max_validation_characters)


@dataclass(frozen=True)
class HowToTokenize:
    """
    What the sentences of a run are tokenized with.

    Args:
        tokenizer: the run's tokenizer.
        word_unit: what counts as a word.
        processes: how many processes encode.
    """

    tokenizer: PreTrainedTokenizerBase
    word_unit: WordUnit
    processes: int


def _tokenize(part, how, name, account):
    """The tokens of a part of a text; refuses a part with fewer than two documents that have tokens."""
    with explained(name, "", UserError):
        tokens = TokenizedCorpus(prepare_tokens(part, how.tokenizer, cache_folder(), how.processes, how.word_unit))
        if empty := part.document_count() - len(tokens):
            account.remark(f"{short_name(name)}: {empty:,} documents without a token are left out")
        if len(tokens) < 2:
            raise UserError("too few documents hold a token that the tokenizer knows; give more text")
    return tokens


@dataclass(frozen=True)
class EvaluationText:
    """
    The text to evaluate on.

    Args:
        tokens: its documents.
        unknown_share: the share of its characters that stand in `[UNK]`.
        validation: `PreparedText.validation`.
    """

    tokens: TokenizedCorpus
    unknown_share: float
    validation: dict | None = None


def _evaluation_text(part, how, name, account):
    """The `EvaluationText` of a part of a text."""
    tokens = _tokenize(part, how, name, account)
    share = measure_unknown_share(how.tokenizer, part.sample(SAMPLED_CHARACTERS))
    if share > REMARKED_UNKNOWN:
        account.remark(
            f"{share:.1%} of the held-out characters are [UNK], which no figure counts; give more text to train on"
        )
    return EvaluationText(tokens, share)


def _validation_text(sources, language, train, how, account):
    """The `EvaluationText` of the sources of a validation text; warns if its documents are in the training text."""
    text = read_sources(sources, language, account)
    account.say(counts_line(f"to evaluate on: {text.name}", text.reading))
    documents, in_both = text.store.count_documents_also_in(train.hashes)
    evaluation = _evaluation_text(text.store.part(), how, f"validation text {text.name}", account)
    if in_both:
        account.remark(
            f"{short_name(text.name)}: {in_both:,} of {documents:,} documents are also trained on, so figures flatter"
        )
    validation = {
        "corpus_name": text.name,
        "corpus_fingerprint": evaluation.tokens.fingerprint,
        "texts": documents,
        "texts_in_training": in_both,
    }
    return dataclasses.replace(evaluation, validation=validation)


def check_unknown_share(name: str, coverage: Coverage, run: TextConfig) -> None:
    """Raise `UserError` if more of the text `name` stands in `[UNK]` than `max_unknown_share`."""
    if (share := unknown_share(coverage)) > run.max_unknown_share:
        raise UserError(
            f"{name}: {share:.1%} of the characters stand in [UNK], which teach a model nothing; train a tokenizer on "
            f"this text, with a larger vocab_size or limit_alphabet if it was, or allow it with max_unknown_share"
        )


def _open_validation(run):
    """The sources of the validation text; an empty list without one."""
    what = WhatToRead(
        paths=run.validation_corpus,
        datasets=run.validation_dataset,
        split=run.validation_split,
        paths_flag="--validation_corpus",
        split_flag="--validation_split",
    )
    return open_sources(what, dataclasses.replace(HowToRead.of(run), max_documents=None))


@dataclass(frozen=True)
class ReadText:
    """
    The text of some sources.

    Args:
        name: the names of the sources.
        store: the sentences.
        reading: what was read and how, as in `TextStore`, and how many files lie behind links.
    """

    name: str
    store: TextStore
    reading: dict[str, int]


def read_sources(sources: Sequence[Source], language: str | None, account: Account) -> ReadText:
    """
    The text of some sources, read or found in the cache.

    Args:
        language: the option.
        account: takes the remarks on folders (`Source.remarks`).
    """
    remarks_on_folders = [f"{short_name(source.name)}: {source.remarks}" for source in sources if source.remarks]
    if remarks_on_folders:
        account.say("; ".join(remarks_on_folders))
    names = " ".join(", ".join(source.name for source in sources).split())  # a file's name may have a line end
    name = shortened(names, MOST_NAMES)
    language_to_split = language or "en"  # the splitter needs one; None stays None where remarks ask what was given
    store = TextStore(prepare_text(sources, language_to_split, cache_folder()))
    reading = dict(store.reading)
    if linked := sum(source.linked for source in sources):
        reading["files behind links out of their folder"] = linked
    return ReadText(name, store, reading)


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


@dataclass(frozen=True)
class FittedTokenizer:
    """
    The tokenizer of a run.

    Args:
        tokenizer: trained, extended or as it was given.
        coverage: what it makes of a sample of the text (`coverage_of`).
        contents: what the sample is made of (`contents_of`).
    """

    tokenizer: PreTrainedTokenizerBase
    coverage: Coverage
    contents: Contents


# The file in a folder of the cache that holds a `SampleRecord` or a `TrainedRecord`.
RECORD_FILE = "content.json"


class SampleRecord(TypedDict):
    """What is recorded of a sample of a text and an existing tokenizer."""

    account: Coverage  # as this entry is called in prepared.json and run_config.json, too
    contents: Contents


class TrainedRecord(SampleRecord):
    """What is recorded of a sample, and the tokenizer that was trained on it: its rules and its vocabulary."""

    rules: RulesRecord
    pieces: list[str]


def fit_tokenizer(run: TextConfig, existing: PreTrainedTokenizerBase | None, sample: TextPart) -> FittedTokenizer:
    """
    The tokenizer of a run: trained on the sample, or an existing one, extended by words of the sample if asked.

    What was computed of the same sample with the same options is read from the cache.
    """
    if existing is None:
        return _trained_on(sample, run)
    if run.extend_vocab:
        existing = wordpiece.extend_wordpiece(existing, count_words(sample), run.extend_vocab, run.min_frequency)

    def make_record():
        words = count_words(sample)
        contents = contents_of(words)
        coverage = coverage_of(words, existing)
        return {"account": coverage, "contents": contents}

    tokenizer_as_json = wordpiece.literal_json(existing)  # with all that decides what it makes of a text
    record = _cached_record(sample, tokenizer_as_json, make_record, SampleRecord)
    return FittedTokenizer(existing, coverage=record["account"], contents=record["contents"])


def _trained_on(sample, run):
    """The `FittedTokenizer` that is trained on a sample."""

    def make_record():
        words = count_words(sample)
        contents = contents_of(words)
        rules = choose_rules(
            contents,
            run.lowercase,
            run.strip_accents,
            run.pre_tokenizer,
            run.individual_digits,
            run.unicode_normalization,
        )
        tokenizer = wordpiece.train_on_words(words, rules, run.vocab_size, run.min_frequency, run.limit_alphabet)
        coverage = coverage_of(words, tokenizer)
        return {
            "rules": vars(rules),
            "pieces": wordpiece.pieces(tokenizer),
            "account": coverage,
            "contents": contents,
        }

    options = {name: getattr(run, name) for name in TOKENIZER_TRAINING_OPTIONS}
    record = _cached_record(sample, options, make_record, TrainedRecord)
    tokenizer = wordpiece.make_tokenizer(record["pieces"], Rules(**record["rules"]))
    return FittedTokenizer(tokenizer, coverage=record["account"], contents=record["contents"])


def _cached_record(sample, made_with, make_record, kind):
    """
    The record of a sample of a text and a tokenizer, from the cache, where it is written first if it is not there.

    Args:
        made_with: JSON values that decide the record, beside the sample.
        make_record: returns the record to write.
        kind: the type of the record.
    """

    def write(folder):
        (folder / RECORD_FILE).write_text(json.dumps(make_record()))

    identity = [TOKENIZER_FORMAT, sample.identity(), made_with]
    folder = cached(cache_folder(), "tokenizer", identity, write)
    return read_record(folder / RECORD_FILE, kind)
