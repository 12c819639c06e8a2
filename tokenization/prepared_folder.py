"""`PreparedText`; prepared folders, which keep one for many runs: writes, reads and checks them, joins several.

`d2l-bert prepare` writes a prepared folder: `prepared.json` (the record), the tokenizer's files, what was said of the
text (`account.py`), and two token stores (`token_store.py`): `train/` and `held_out/`. Runs write nothing into the
folder, so that the folder may be read-only.
A prepared folder that makes one corpus with others is called a part.
"""

import dataclasses
import itertools
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2l_bert.folders import content_hash, short_hash
from d2l_bert.messages import READ_ERRORS, UserError, counted, explained, shortened
from d2l_bert.records import check_type, inside, read_record
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.account import write_account
from d2l_bert.tokenization.cache import cache_folder, cached
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.tokenization.coverage import Coverage, check_count, check_coverage
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.files import PREPARED_FILE
from d2l_bert.tokenization.rules import Rules, WordUnit
from d2l_bert.tokenization.token_store import (
    ARRAYS,
    STORE_FILE,
    STORE_FORMAT,
    TokenizedCorpus,
    join_stores,
)


logger = logging.getLogger(__name__)


# Raise PREPARED_FORMAT by 1 when the content of the folder's files changes: folders of other formats are refused.
PREPARED_FORMAT = 6

# Characters of the names of a text's sources, of which there may be thousands, in messages and records.
MOST_NAMES = 200

# The most words that a character can become: Unicode's normalization makes at most 18 characters of one (of U+FDFA),
# and each of them may be a word.
MOST_OF_A_CHARACTER = 18

STORES = ("train", "held_out")  # the folders of the token stores, and the names of the corpora in `PreparedText`
STORE_FILES = (*(f"{name}.bin" for name in ARRAYS), STORE_FILE)


class FileRecord(TypedDict):
    """What is recorded of a file."""

    bytes: int
    sha256: str


# What the tokenizer is, and what it makes of the text to evaluate on. (A `class` of a `TypedDict` cannot have an entry
# of the name `class`.)
TokenizerRecord = TypedDict(
    "TokenizerRecord",
    {
        "class": str,
        "lowercase": bool,
        "strip_accents": bool,
        "entries_with_digits": int,
        "word_unit": WordUnit,
        "unknown_share": float,
    },
)


class CountsRecord(TypedDict):
    """As `PreparedText.counts` gives them; the numbers that follow from the stores are counted anew."""

    corpus_name: str
    corpus_fingerprint: str
    hub_datasets: list[str]
    text_fingerprint: int
    reading: dict[str, int]
    account: Coverage
    tokenizer: TokenizerRecord


class PreparedRecord(TypedDict):
    """The content of `prepared.json`."""

    format: int
    token_options: dict[str, str | int | float | bool | None]
    counts: CountsRecord
    files: dict[str, FileRecord]
    fingerprint_of_record: str


def corpus_is_prepared(run: TextConfig) -> bool:
    """Whether the corpus of a run consists of prepared folders only, which have a record."""
    paths = run.text_paths()
    if run.dataset or not paths:
        return False
    return all(os.path.isfile(Path(path) / PREPARED_FILE) for path in paths)


def fixed_options(run: TextConfig) -> dict[str, str]:
    """The options whose values follow from the tokenizer or the prepared folder that a run names; what fixes each."""
    fixed = {}
    tokenizer = run.existing_tokenizer()
    if tokenizer is not None:
        # extend_vocab goes with an existing tokenizer, and uses min_frequency.
        free = {"min_frequency"} if run.extend_vocab else set()
        fixed |= dict.fromkeys({*TOKENIZER_TRAINING_OPTIONS} - free, f"the tokenizer of {tokenizer}")
    if corpus_is_prepared(run):
        free = {"corpus", "max_unknown_share"}
        if run.validation_corpus or run.validation_dataset:  # how a validation text is read
            free |= {"text_column", "separator", "streaming", "preprocessing_num_workers"}
        names = {field.name for field in dataclasses.fields(TextConfig)} - free
        fixed |= dict.fromkeys(names, f"the prepared folder {run.text_paths()[0]}")
    return fixed


# ---------------------------------------------------------------------------------------------------------------------
# The text


@dataclass(frozen=True)
class PreparedText:
    """
    A tokenized text to train on, and one to evaluate on.

    Args:
        token_options: the options that determined the tokens (`TextConfig.token_options`).
        corpus_name: the names of all sources.
        hub_datasets: the names of the sources that are datasets on the Hub.
        source_fingerprints: a hash of each source's identity.
        text_fingerprint: a hash of all sentences (`TextStore.fingerprint`).
        reading: how many documents, paragraphs and so on were read, left out or cut, by what they are (`TextStore`).
        coverage: what the tokenizer makes of the training text, or of a sample of it (`coverage.coverage_of`).
        tokenizer_report: facts about the tokenizer (`coverage.facts_of`), its `word_unit`, and its `unknown_share` of
            the text to evaluate on.
        train: the documents to train on.
        held_out: the documents to evaluate on: held out of the text, or all of a separate validation text.
        validation: of a validation text `corpus_name`, the names of its sources; `corpus_fingerprint`, a hash of its
            tokens; `texts`, the number of documents in it; `texts_in_training`, how many of these are also in the
            training text. None without a validation text.
        account: all lines that were said of the text (`Account`). They hold some of it, and enter no record.
    """

    token_options: dict
    corpus_name: str
    hub_datasets: list[str]
    source_fingerprints: list[str]
    text_fingerprint: int
    reading: dict[str, int]
    coverage: Coverage
    tokenizer: PreTrainedTokenizerBase
    tokenizer_report: dict
    train: TokenizedCorpus
    held_out: TokenizedCorpus
    validation: dict | None = None
    account: Sequence[str] = ()

    def held_out_name(self) -> str:
        """The name of the text to evaluate on."""
        return f"{self.corpus_name}, held out" if self.validation is None else self.validation["corpus_name"]

    def summary(self) -> str:
        """One short line with the numbers of documents and tokens, and of pieces a word."""
        report = self.counts()["tokenizer"]
        unit = " (as it splits words)" if report["word_unit"] == "tokenizer" else ""
        held_out = "held out" if self.validation is None else "to evaluate on"
        return (
            f"{counted(len(self.train), 'document')}, {len(self.train.ids):,} tokens to train on; "
            f"{counted(len(self.held_out), 'document')}, {len(self.held_out.ids):,} tokens {held_out}; "
            f"{report['pieces_per_word']:.2f} pieces a word{unit}"
        )

    def fingerprint(self) -> str:
        """A hash of the tokens to train on, and of those to evaluate on."""
        return short_hash(self.train.fingerprint, self.held_out.fingerprint)

    def counts(self) -> dict:
        """The entry `data` of run_config.json: names, fingerprints, numbers of documents, tokens and words."""
        held_out_words = self.held_out.word_count()
        tokenizer = {
            **self.tokenizer_report,
            "words": held_out_words,
            "pieces_per_word": len(self.held_out.ids) / max(held_out_words, 1),
        }
        return {
            "corpus_name": self.corpus_name,
            "corpus_fingerprint": self.fingerprint(),
            "text_fingerprint": self.text_fingerprint,
            "held_out_fingerprint": self.held_out.fingerprint,
            "hub_datasets": self.hub_datasets,
            "reading": self.reading,
            "account": self.coverage,
            "train_documents": len(self.train),
            "train_tokens": len(self.train.ids),
            "train_words": self.train.word_count(),
            "held_out_documents": len(self.held_out),
            "held_out_tokens": len(self.held_out.ids),
            "tokenizer": tokenizer,
            "validation": self.validation,
        }


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_prepared_folder(text: PreparedText, folder: Path) -> None:
    """
    Write a prepared folder.

    Args:
        text: from the cache, and without a validation text.
        folder: an empty folder.
    """
    wordpiece.save_tokenizer(text.tokenizer, folder)
    write_account(folder, text.account)
    for name in STORES:
        (folder / name).mkdir()
        for file in STORE_FILES:  # `shutil.copytree` would hide why a write fails
            shutil.copyfile(getattr(text, name).folder / file, folder / name / file)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": path.stat().st_size, "sha256": content_hash(path)}
    for name in STORES:  # the copies may not be what was written into the cache
        try:
            TokenizedCorpus(folder / name).check(len(text.tokenizer), _hashes_of(files, name), whole=False)
        except UserError:
            cached_folder = getattr(text, name).folder
            raise UserError(f"cache {cached_folder}: is damaged; delete it, and prepare the text again") from None
    record = {
        "format": PREPARED_FORMAT,
        "token_options": text.token_options,
        "counts": text.counts(),
        "files": files,
    }
    record["fingerprint_of_record"] = short_hash(record)
    (folder / PREPARED_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _hashes_of(files, store):
    """The recorded SHA-256 of each array of a store."""
    return [files[f"{store}/{name}.bin"]["sha256"] for name in ARRAYS]


# ---------------------------------------------------------------------------------------------------------------------
# Read


# The options that may differ between parts: those of the tokenizer, since the tokenizers themselves are compared, and
# the language, since each part may have its own.
_FREE_OPTIONS = {*TOKENIZER_TRAINING_OPTIONS, "extend_vocab", "language"}


def check_prepared_folders(folders: Sequence[Path]) -> str:
    """
    Read every byte of prepared folders that make one corpus, and say what each holds, a line each.

    Raises:
        UserError: as in `read_prepared_folders`.
    """
    texts = [read_prepared_folder(folder, check_whole=True) for folder in folders]
    read_prepared_folders(folders)  # whether they are parts of one corpus
    return "\n".join(
        f"{folder}: whole; {len(text.train) + len(text.held_out):,} documents, "
        f"{len(text.train.ids) + len(text.held_out.ids):,} tokens"
        for folder, text in zip(folders, texts, strict=True)
    )


def read_prepared_folders(folders: Sequence[Path]) -> PreparedText:
    """
    The text of the prepared folders that make one corpus, checked as in `read_prepared_folder`.

    The stores of several folders are joined in the cache, once every byte of theirs is checked. Of the held-out
    documents, those that another part trains on are left out.

    Raises:
        UserError: a folder is damaged or has an earlier format, its tokenizer or options differ from those of the
            first folder, two folders have the same tokens, or fewer than two held-out documents are left.
    """
    parts = []
    for folder in folders:
        part = read_prepared_folder(folder)
        _check_part(part, parts, folders)
        parts.append(part)
    return parts[0] if len(parts) == 1 else _join(folders, parts)


def _check_part(part, parts, folders):
    """Refuse a part that cannot make one corpus with the `parts` before it; `folders` are those of all parts."""
    if not parts:
        return
    first = parts[0]
    place = f"corpus {folders[len(parts)]}"
    if wordpiece.tokenizer_fingerprint(part.tokenizer) != wordpiece.tokenizer_fingerprint(first.tokenizer):
        raise UserError(
            f"{place}: its tokenizer is not that of {folders[0]}; prepare it again with --tokenizer {folders[0]}"
        )
    for name, value in first.token_options.items():
        other = part.token_options.get(name)
        if name not in _FREE_OPTIONS and other != value:
            raise UserError(
                f"{place}: was prepared with {name} {other!r}, and {folders[0]} with {value!r}; prepare both alike"
            )
    for number, earlier in enumerate(parts):
        if earlier.fingerprint() == part.fingerprint():
            raise UserError(f"{place}: holds the same tokens as {folders[number]}; give each part once")


def _join(folders, parts):
    """The `PreparedText` of several parts, whose stores are joined in the cache."""
    name = shortened(", ".join(part.corpus_name for part in parts), 100)
    held_out = _held_out_of_parts(parts, name)
    everything = [np.arange(len(part.train)) for part in parts]
    path = _joined_stores(folders, parts, {"train": everything, "held_out": held_out})
    first = parts[0]
    languages = dict.fromkeys(part.token_options["language"] for part in parts)
    language = ", ".join(language for language in languages if language) or None
    hub_datasets = itertools.chain.from_iterable(part.hub_datasets for part in parts)
    reading = Counter()
    for part in parts:
        reading += Counter(part.reading)
    coverage = dict(first.coverage)
    for part in parts[1:]:
        for entry, value in part.coverage.items():
            coverage[entry] = coverage[entry] + value  # numbers are added up; the examples are a list
    unknown_shares = [part.tokenizer_report["unknown_share"] for part in parts]
    unknown_share = float(np.average(unknown_shares, weights=[len(part.held_out.ids) for part in parts]))
    return PreparedText(
        token_options={**first.token_options, "language": language},
        corpus_name=name,
        hub_datasets=list(dict.fromkeys(hub_datasets)),
        source_fingerprints=[part.fingerprint() for part in parts],
        text_fingerprint=int(np.sum([part.text_fingerprint for part in parts])),  # in 64 bits, as in `TextStore`
        reading=dict(reading),
        coverage=coverage,
        tokenizer=first.tokenizer,
        tokenizer_report={**first.tokenizer_report, "unknown_share": unknown_share},
        train=TokenizedCorpus(path / "train"),
        held_out=TokenizedCorpus(path / "held_out"),
    )


def _held_out_of_parts(parts, name):
    """
    The numbers of the held-out documents of each part that no part trains on.

    Raises:
        UserError: fewer than two different ones are left.
    """
    trained_on = np.unique(np.concatenate([part.train.hashes for part in parts]))
    kept = []
    hashes = []
    for part in parts:
        is_apart = ~np.isin(part.held_out.hashes, trained_on)
        kept.append(np.flatnonzero(is_apart))
        hashes.append(part.held_out.hashes[is_apart])
    hashes = np.concatenate(hashes)
    count = sum(len(part.held_out) for part in parts)
    left_out = count - len(hashes)
    if left_out:
        logger.info(
            f"{name}: {left_out:,} of {count:,} held-out documents are left out, as other parts have copies of them "
            f"to train on"
        )
    if len(np.unique(hashes)) < 2:
        raise UserError(
            f"{name}: fewer than two held-out documents are in no part's training text; prepare the texts together"
        )
    return kept


def _joined_stores(folders, parts, kept):
    """
    The folder of the cache with the parts' stores, joined; every byte of the parts is checked.

    Args:
        kept: the numbers of the documents that are kept of each part, for each name of a store.
    """

    def write(partial):
        for folder in folders:
            read_prepared_folder(folder, check_whole=True)
        for name, documents in kept.items():
            (partial / name).mkdir()
            stores = [getattr(part, name) for part in parts]
            join_stores(partial / name, len(parts[0].tokenizer), stores, documents)

    identity = [STORE_FORMAT, [part.fingerprint() for part in parts]]
    return cached(cache_folder(), "joined", identity, write)


def read_prepared_folder(folder: Path, check_whole: bool = False) -> PreparedText:
    """
    The text of a prepared folder, which may be a stranger's: what is read is as this package writes it, or refused.

    Args:
        check_whole: check every byte; else, of the files that grow with the text, the sizes, where sentences and
            documents start, and the first `token_store.CHECKED_IDS` ids. (`BatchMaker` checks the ids that it uses.)

    Raises:
        UserError: the folder is damaged, has another format, or holds something that `prepare` does not write.
    """
    record = _read_record(folder)
    with explained(
        f"corpus {folder}: a damaged prepared folder", "prepare the text again", *READ_ERRORS, RecursionError
    ):
        written = {name: value for name, value in record.items() if name != "fingerprint_of_record"}
        if record["fingerprint_of_record"] != short_hash(written):
            raise ValueError(f"{PREPARED_FILE} has changed since it was written")
        _check_files(folder, record["files"], check_whole)
        _check_options(record["token_options"])
        _check_numbers(record["counts"])
        _check_name(record["counts"]["corpus_name"])
        text = _text_of(folder, record)
        _check_stores(text, record, check_whole)
    return text


def _read_record(folder):
    """The record of a prepared folder; the format is looked at first, as one of another format has other entries."""
    wrong = f"corpus {folder}: no prepared folder, or a damaged prepared folder"
    with explained(wrong, "prepare the text again", *READ_ERRORS):
        record = read_record(folder / PREPARED_FILE)
        if not record:
            raise ValueError(f"it holds no {PREPARED_FILE}")
        number = record.get("format")
        if isinstance(number, int) and number > PREPARED_FORMAT:
            raise UserError(
                f"corpus {folder}: was prepared by a newer version of d2l-bert, in format {number:.0f}, and this "
                f"version reads {PREPARED_FORMAT}; install the newer version, or prepare the text again"
            )
        if number != PREPARED_FORMAT:
            raise ValueError(f"its format is {number!r:.100}, and this version reads {PREPARED_FORMAT}")
        check_type(record, PreparedRecord)
    return record


def _check_files(folder, files, check_whole):
    """
    Check the recorded files, and that all files which will be read are recorded or no links out of the folder.

    The hashes of the large files are checked only if `check_whole`.
    """
    needed = [f"train/{name}" for name in STORE_FILES] + [f"held_out/{name}" for name in STORE_FILES]
    for name in (*needed, "tokenizer.json", "tokenizer_config.json"):
        if name not in files:
            raise ValueError(f"{PREPARED_FILE} does not list {name}")
    for name, recorded in files.items():
        path = inside(folder, name)
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes, and {recorded['bytes']:,} were written")
        is_large = name.endswith(".bin")
        if (check_whole or not is_large) and content_hash(path) != recorded["sha256"]:
            raise ValueError(f"{name} has changed since it was written")
    for path in folder.iterdir():  # Transformers also reads files that are not recorded, if they are there
        if not path.is_dir():
            inside(folder, path.name)


def _check_options(options):
    """Check the values of the options that this version has, as those of a command line are checked."""
    known = TextConfig().token_options()
    if options.keys() != known.keys():
        different = ", ".join(sorted(options.keys() ^ known.keys()))
        raise ValueError(f"token_options has other options than this version: {different:.200}")
    given = TextConfig(**options)
    given.check_values()
    Rules(pre_tokenizer=given.pre_tokenizer)  # which refuses one that there is not


def _check_numbers(counts):
    """Check that counts are counts, and that they can be added up and divided."""
    check_coverage(counts["account"])
    for name, value in counts["reading"].items():
        check_count(name, value)
    if not -(2**63) <= counts["text_fingerprint"] < 2**63:
        raise ValueError("text_fingerprint does not fit in 64 bits")
    share = counts["tokenizer"]["unknown_share"]
    if not math.isfinite(share) or not 0 <= share <= 1:
        raise ValueError(f"unknown_share is {share}, and a share is from 0 to 1")


def _check_name(name):
    """Check the name of a corpus, which stands in a run's lines and on cards."""
    if len(name) > MOST_NAMES or "\n" in name or "\r" in name:
        raise ValueError(f"corpus_name is no name, or not shortened to {MOST_NAMES} characters: {name!r:.100}")


def _text_of(folder, record):
    """The `PreparedText` of a prepared folder with this record."""
    counts = record["counts"]
    return PreparedText(
        token_options=record["token_options"],
        corpus_name=counts["corpus_name"],
        hub_datasets=counts["hub_datasets"],
        source_fingerprints=[counts["corpus_fingerprint"]],
        text_fingerprint=counts["text_fingerprint"],
        reading=counts["reading"],
        coverage=counts["account"],
        tokenizer=load_tokenizer(str(folder)),
        tokenizer_report=counts["tokenizer"],
        train=TokenizedCorpus(folder / "train"),
        held_out=TokenizedCorpus(folder / "held_out"),
    )


def _check_stores(text, record, check_whole):
    """Check the two stores, and that the recorded counts are theirs."""
    for name in STORES:
        corpus = getattr(text, name)
        corpus.check(len(text.tokenizer), _hashes_of(record["files"], name), whole=check_whole)
        if len(corpus) < 2:
            raise ValueError(f"{name} holds fewer than two documents")
    if np.isin(text.held_out.hashes, text.train.hashes).any():
        raise ValueError("a document of held_out stands in train, too")
    words = text.train.word_count() + text.held_out.word_count()
    if words > MOST_OF_A_CHARACTER * text.reading.get("characters", 0):
        raise ValueError(f"the text is said to have {words:,} words, which are too many for its characters")
    recorded = record["counts"]
    for name, value in text.counts().items():
        follows_from_stores = name.startswith((*STORES, "corpus_fingerprint"))
        if follows_from_stores and value != recorded.get(name):
            raise ValueError(f"{name} is {value}, and {recorded.get(name)!r:.100} is recorded")
