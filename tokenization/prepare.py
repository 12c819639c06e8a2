"""Text to tokenizer and tokens, once for many runs: what has to be there before the first step."""

import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import BertTokenizer

from d2l_bert.errors import UserError
from d2l_bert.options import cores
from d2l_bert.tokenization import arrow, wordpiece
from d2l_bert.tokenization.cache import cache_folder, code_of, fingerprint, undamaged, written_whole
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing import load_tokenizer
from d2l_bert.tokenization.sentences import LONGEST_SENTENCE, Cleaning
from d2l_bert.tokenization.sources import Source, content_hash, dataset_source, file_source
from d2l_bert.tokenization.split import split_documents


logger = logging.getLogger(__name__)


# Held-out sentences that a tokenizer is described on.
DESCRIBED_SENTENCES = 20_000

# A prepared folder: this record, the tokenizer, the tokens, which documents train and which are held out, and the
# source of each document.
PREPARED_FILE = "prepared.json"
TABLES = ("train_documents", "held_out_documents", "document_sources")


@dataclass
class PreparedText:
    """A tokenized corpus, split by document, and the options that it follows from."""

    settled: dict
    corpus_name: str
    hub_datasets: list[str]
    source_fingerprints: list[str]
    reading: dict[str, int]
    tokenizer: BertTokenizer
    tokenizer_report: dict
    tokens: arrow.TokenizedCorpus
    train_documents: np.ndarray
    held_out_documents: np.ndarray
    document_sources: np.ndarray

    def summary(self) -> str:
        """One line of its numbers."""
        counts = self.counts()
        return (
            f"{self.corpus_name}: {counts['train_documents']:,} documents, {counts['train_tokens']:,} tokens to train "
            f"on; {counts['held_out_documents']:,} documents, {counts['held_out_tokens']:,} tokens held out; "
            f"vocabulary {len(self.tokenizer):,}"
        )

    def counts(self) -> dict:
        """What the run's record says of it."""
        sizes = self.tokens.sizes()
        return {
            "corpus_name": self.corpus_name,
            "corpus_fingerprint": self.tokens.fingerprint(),
            "hub_datasets": self.hub_datasets,
            "reading": self.reading,
            "train_documents": len(self.train_documents),
            "train_tokens": int(sizes[self.train_documents].sum()),
            "held_out_documents": len(self.held_out_documents),
            "held_out_tokens": int(sizes[self.held_out_documents].sum()),
            "tokenizer": self.tokenizer_report,
        }


def split_fingerprint(text: PreparedText) -> str:
    """A short name for which documents train, which are held out, and which source each is from."""
    digest = hashlib.sha256()
    for name in TABLES:
        table = getattr(text, name)
        digest.update(f"{name} {len(table)} ".encode())
        digest.update(np.ascontiguousarray(table, dtype="<i8"))
    return digest.hexdigest()[:16]


def prepare(run: TextConfig) -> PreparedText:
    """
    Read the text, hold out a part, train or load the tokenizer, and tokenize; what was done before is found again.
    A corpus that is a prepared folder has all of it.

    Raises:
        UserError: text that cannot be read, too little of it, or a tokenizer that cannot serve.
    """
    if is_prepared(run):
        return read_prepared(Path(run.text_paths()[0]))
    existing = run.existing_tokenizer()
    tokenizer = None if existing is None else load_tokenizer(existing)
    sources = read_sources(run)
    name = ", ".join(source.name for source in sources)
    folder = cache_folder()
    cleaning = Cleaning(run.unicode_normalization, run.min_paragraph_characters, run.drop_duplicate_paragraphs)
    text = arrow.prepare_text(sources, run.language, cleaning, folder)
    counts = arrow.text_counts(text)
    for line in reading_report(counts):
        logger.info(line)
    try:
        sizes = arrow.read_table(text, "document_characters")
        train, held_out = split_documents(sizes, run.validation_fraction, run.max_validation_characters)
        sample = arrow.SentenceSample(text, train)
        if tokenizer is None:
            tokenizer = trained_tokenizer(run, sample, folder)
        elif run.extend_vocab:
            tokenizer = extend_tokenizer(tokenizer, sample, run)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    tokens = arrow.TokenizedCorpus(
        arrow.prepare_tokens(text, tokenizer, folder, run.preprocessing_num_workers or usable_cores())
    )
    has_tokens = tokens.sizes() > 0
    train, held_out = train[has_tokens[train]], held_out[has_tokens[held_out]]
    if min(len(train), len(held_out)) < 2:
        raise UserError(f"{name}: too few of its documents hold a token that the tokenizer knows; give more text")
    of_sources = arrow.read_table(text, "document_sources")
    report = wordpiece.describe(tokenizer, itertools.islice(arrow.SentenceSample(text, held_out), DESCRIBED_SENTENCES))
    logger.info(
        f"tokenizer, on {report['words']:,} held-out words: {report['pieces_per_word']:.2f} pieces a word, "
        f"{report['unknown_share']:.2%} [UNK]; longest pieces {' '.join(report['longest_pieces'])}"
    )
    text = PreparedText(
        run.settled(),
        name,
        list(dict.fromkeys(source.name for source in sources if source.is_on_hub)),
        [fingerprint(source.identity) for source in sources],
        counts,
        tokenizer,
        report,
        tokens,
        train,
        held_out,
        of_sources,
    )
    logger.info(text.summary())
    return text


def read_sources(run: TextConfig) -> list[Source]:
    """A source of text for each path and each dataset.

    Raises:
        UserError: one that cannot be read, or a prepared folder among others.
    """
    for path in (paths := run.text_paths()):
        if os.path.isfile(Path(path) / PREPARED_FILE):
            raise UserError(f"corpus {path}: a prepared folder is a whole corpus; give it alone, or its text")
        if any(Path(path).glob("tokens-*/data.arrow")):
            raise UserError(f"corpus {path}: a prepared folder without its {PREPARED_FILE}; prepare the text again")
        if paths.count(path) > 1:
            raise UserError(
                f"corpus {path}: given {paths.count(path)} times; source_weights says how much of it to take"
            )
    files = [file_source(path, run.text_column, run.max_documents) for path in run.text_paths()]
    reading = (run.dataset_split, run.text_column, run.streaming, run.max_documents)
    return files + [dataset_source(name, config, *reading) for name, config in run.named_datasets()]


def usable_cores() -> int:
    """Cores that this process may use, at most 8."""
    return min(cores(), 8)


def reading_report(counts: dict[str, int]) -> Iterator[str]:
    """What a person should know of how a text was read: what was passed over, cut or cleaned away."""
    passed_over = {
        "files_without_text": "files without text",
        "rows_without_text": "rows without text",
        "files_of_other_kinds": "files of other kinds",
        "broken_links": "broken links",
    }
    if found := [f"{counts[key]:,} {words}" for key, words in passed_over.items() if counts.get(key)]:
        yield f"passed over: {', '.join(found)}"
    if cut := counts.get("long_sentences"):
        yield f"cut between words: {cut:,} sentences of more than {LONGEST_SENTENCE:,} characters"
    cleaned = {"normalized": "normalised", "too_short": "too short", "duplicates": "duplicates"}
    if found := [f"{counts[rule]:,} {word}" for rule, word in cleaned.items() if rule in counts]:
        yield f"cleaning, of {counts['paragraphs']:,} paragraphs: {', '.join(found)}"


def trained_tokenizer(run: TextConfig, sample: arrow.SentenceSample, folder: Path) -> BertTokenizer:
    """A tokenizer trained on the sample, or the one that was before, on the same sample with the same options."""
    training_options = (run.vocab_size, run.lowercase, run.strip_accents, run.min_frequency, run.limit_alphabet)
    made_from = (sample.text.name, sample.blocks.tobytes().hex(), training_options, code_of(wordpiece))
    path = folder / f"tokenizer-{fingerprint(made_from)}"

    def write(partial):
        part = "" if sample.share == 1 else f", on {sample.share:.1%} of the text"
        logger.info(f"training a tokenizer of at most {run.vocab_size:,} pieces{part}")
        start = time.monotonic()
        tokenizer = wordpiece.train_wordpiece(sample, *training_options)
        logger.info(f"trained it in {time.monotonic() - start:.0f} s")
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        (partial / "pieces.json").write_text(json.dumps(pieces))

    if not path.exists():
        written_whole(path, "training a tokenizer", write)
    with undamaged(path):
        pieces = json.loads((path / "pieces.json").read_text())
    return wordpiece.make_tokenizer(pieces, run.lowercase, run.strip_accents)


def extend_tokenizer(tokenizer: BertTokenizer, sample, run: TextConfig) -> BertTokenizer:
    """The tokenizer with up to `extend_vocab` words of the sample; says how many it became."""
    extended = wordpiece.extend_wordpiece(tokenizer, sample, run.extend_vocab, run.min_frequency)
    added = len(extended) - len(tokenizer)
    line = f"added {added:,} words to the vocabulary"
    if added < run.extend_vocab:
        line += f", not {run.extend_vocab:,}: no others are split and occur {run.min_frequency:,} times"
    logger.info(line)
    return extended


def is_prepared(run: TextConfig) -> bool:
    """Whether the corpus is a folder that `write_prepared` left."""
    paths = run.text_paths()
    return not run.dataset and len(paths) == 1 and os.path.isfile(Path(paths[0]) / PREPARED_FILE)


def write_prepared(run: TextConfig, folder: Path) -> PreparedText:
    """
    Prepare a text in a folder of its own, for runs that give it as their corpus.

    Args:
        folder: an empty one.

    Raises:
        UserError: as `prepare`; or the corpus is prepared already.
    """
    run.check()
    if is_prepared(run):
        raise UserError(f"corpus {run.text_paths()[0]}: is prepared already; give its text")
    text = prepare(run)
    wordpiece.save_tokenizer(text.tokenizer, folder)
    shutil.copytree(text.tokens.path, folder / text.tokens.path.name)
    for name in TABLES:
        np.save(folder / f"{name}.npy", getattr(text, name))
    record = {
        "settled": text.settled,
        "corpus_name": text.corpus_name,
        "fingerprint": text.tokens.fingerprint(),
        "hub_datasets": text.hub_datasets,
        "reading": text.reading,
        "tokens": text.tokens.path.name,
        "counts": text.counts(),
        "files": {path.relative_to(folder).as_posix(): content_hash(path) for path in _files(folder)},
    }
    (folder / PREPARED_FILE).write_text(json.dumps(record, indent=2) + "\n")
    return text


def read_prepared(folder: Path) -> PreparedText:
    """
    What `write_prepared` left.

    Raises:
        UserError: it is damaged.
    """
    try:
        told, tokens = _read_record(folder)
        text = PreparedText(
            **told,
            tokenizer=load_tokenizer(str(folder)),
            tokens=arrow.TokenizedCorpus(folder / tokens),
            **{name: np.load(folder / f"{name}.npy") for name in TABLES},
        )
    except UserError as error:
        raise UserError(f"corpus {folder}: a damaged prepared folder ({error}); prepare the text again") from None
    logger.info(text.summary())
    return text


_RECORD_TYPES = {
    "settled": dict,
    "corpus_name": str,
    "hub_datasets": list,
    "reading": dict,
    "source_fingerprints": list,
    "tokenizer_report": dict,
}


def _read_record(folder):
    """
    What a prepared folder's record says, and the name of its tokens; every file is the one that was written.

    Raises:
        UserError: the record or a file is damaged.
    """
    try:
        record = json.loads((folder / PREPARED_FILE).read_text())
        told = {name: record[name] for name in ("settled", "corpus_name", "hub_datasets", "reading")}
        told |= {"source_fingerprints": [record["fingerprint"]], "tokenizer_report": record["counts"]["tokenizer"]}
        for name, kind in _RECORD_TYPES.items():
            if not isinstance(told[name], kind):
                raise UserError(f"{PREPARED_FILE}: {name} is {told[name]!r:.50}, not what was written")
        TextConfig(**told["settled"]).check_types()
        for name in {*record["files"], *(f"{table}.npy" for table in TABLES), f"{record['tokens']}/data.arrow"}:
            if content_hash(folder / name) != record["files"][name]:
                raise UserError(f"{name} is not what was written")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return told, record["tokens"]


def _files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())
