"""From text to a `PreparedText` (tokenizer, tokens, held-out documents): calls the other files of this folder."""

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import BertTokenizer

from d2l_bert.errors import UserError
from d2l_bert.options import cores
from d2l_bert.progress import counted
from d2l_bert.tokenization import encoding, prepared_folder, wordpiece
from d2l_bert.tokenization.cache import cache_folder, fingerprint, reading_cache, write_once
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.encoding import prepare_tokens
from d2l_bert.tokenization.existing import load_tokenizer
from d2l_bert.tokenization.sentences import LONGEST_SENTENCE, Cleaning
from d2l_bert.tokenization.sources import Source, dataset_source, file_source
from d2l_bert.tokenization.split import AllBut, Only, held_out_documents
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus


logger = logging.getLogger(__name__)


# The tokenizer's statistics (`describe_tokenizer`) are computed on at most this many held-out sentences.
DESCRIBED_SENTENCES = 20_000

# Raise TOKENIZER_FORMAT by 1 when the same text with the same options would give another vocabulary: cached tokenizers
# are then trained again. `tests/test_formats.py` fails until it is raised.
TOKENIZER_FORMAT = 1


@dataclass
class ValidationText:
    """
    A separate text to evaluate on, tokenized as the training text is.

    Args:
        name: the names of the text's sources.
        tokens: the token ids of all documents, memory-mapped.
        texts: the number of files and rows in the text.
        texts_in_training: how many of these files and rows are also in the training text, with equal paragraphs.
    """

    name: str
    tokens: TokenizedCorpus
    texts: int
    texts_in_training: int


@dataclass
class PreparedText:
    """
    A tokenized corpus, split into training and held-out documents.

    Args:
        token_options: the options that determined the tokens (`TextConfig.token_options`).
        corpus_name: the names of all sources.
        hub_datasets: the names of the sources that are datasets on the Hub.
        source_fingerprints: a hash of each source's identity.
        reading: counts of paragraphs, and of files, rows and sentences that were left out or cut (`TextStore`).
        tokenizer_report: the tokenizer's statistics on held-out text (`wordpiece.describe`).
        tokens: the token ids of all documents, memory-mapped.
        source_ends: documents up to the end of each source.
        held_out: the numbers of the documents not to train on, ascending; empty with a validation text.
        text_hashes: a hash of each file or row of the text; one memory-mapped array for each store.
        validation: the text to evaluate on instead of `held_out`.
    """

    token_options: dict
    corpus_name: str
    hub_datasets: list[str]
    source_fingerprints: list[str]
    reading: dict[str, int]
    tokenizer: BertTokenizer
    tokenizer_report: dict
    tokens: TokenizedCorpus
    source_ends: list[int]
    held_out: np.ndarray
    text_hashes: list[np.ndarray]
    validation: ValidationText | None = None

    def train_documents(self) -> AllBut:
        """The documents to train on: all but the held-out documents."""
        return AllBut(len(self.tokens), self.held_out)

    def evaluation(self) -> tuple[TokenizedCorpus, AllBut | Only]:
        """The corpus and the documents to evaluate on: all of the validation text, or else the held-out documents."""
        if self.validation is not None:
            return self.validation.tokens, AllBut(len(self.validation.tokens), np.zeros(0, dtype=np.int64))
        return self.tokens, Only(self.held_out)

    def summary(self) -> str:
        """One line with the numbers of documents and tokens, and the size of the vocabulary."""
        counts = self.counts()
        held_out = "held out" if self.validation is None else f"of {self.validation.name} to evaluate on"
        train, others = (counted(counts[f"{part}_documents"], "document") for part in ("train", "held_out"))
        return (
            f"{self.corpus_name}: {train}, {counts['train_tokens']:,} tokens to train on; "
            f"{others}, {counts['held_out_tokens']:,} tokens {held_out}; "
            f"vocabulary {len(self.tokenizer):,}"
        )

    def counts(self) -> dict:
        """The entry `data` of run_config.json: names, fingerprint, numbers of documents, tokens and words."""
        total = len(self.tokens), self.tokens.size, int(self.tokens.document_words.at(np.array(len(self.tokens) - 1)))
        held_out = _document_counts(self.tokens, self.held_out)
        train = [count - held_out_count for count, held_out_count in zip(total, held_out, strict=True)]
        if self.validation is not None:
            held_out = (len(self.validation.tokens), self.validation.tokens.size)
        counts = {
            "corpus_name": self.corpus_name,
            "corpus_fingerprint": self.tokens.fingerprint(),
            "hub_datasets": self.hub_datasets,
            "reading": self.reading,
            "train_documents": train[0],
            "train_tokens": train[1],
            "train_words": train[2],
            "held_out_documents": held_out[0],
            "held_out_tokens": held_out[1],
            "tokenizer": self.tokenizer_report,
        }
        if self.validation is not None:
            counts["validation"] = {
                "corpus_name": self.validation.name,
                "corpus_fingerprint": self.validation.tokens.fingerprint(),
                "texts": self.validation.texts,
                "texts_in_training": self.validation.texts_in_training,
            }
        return counts


def _document_counts(tokens, documents):
    """The numbers of documents, tokens and words in these documents."""
    words = tokens.document_words.at(documents) - tokens.document_words.before(documents)
    return len(documents), int(tokens.sizes(documents).sum()), int(words.sum())


def split_fingerprint(text: PreparedText) -> str:
    """A hash of the split: of the held-out documents, the ends of the sources, and the validation text, if any."""
    digest = hashlib.sha256(json.dumps([len(text.tokens), [int(end) for end in text.source_ends]]).encode())
    digest.update(np.ascontiguousarray(text.held_out, dtype="<i8"))
    if text.validation is not None:
        digest.update(text.validation.tokens.fingerprint().encode())
    return digest.hexdigest()[:16]


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
    validation_sources = [("corpus", path) for path in run.validation_paths()]
    validation_sources += [("dataset", name) for name, _ in run.validation_datasets()]
    for option, path in validation_sources:
        if prepared_folder.is_prepared_folder(path):
            raise UserError(f"validation_{option} {path}: a prepared folder; give its text")
    validation = open_sources(
        run.validation_paths(),
        run.validation_datasets(),
        run.validation_split_name(),
        run,
        None,
        ("--validation_corpus", "--validation_split"),
    )
    if prepared_folder.corpus_is_prepared(run):
        prepared = _from_prepared_folders(run.text_paths(), bool(validation))
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
    prepared_folder.refuse_beside_text(run)
    for path in (paths := run.text_paths()):
        if paths.count(path) > 1:
            raise UserError(
                f"corpus {path}: given {paths.count(path)} times; give it once, and its share with --source_weights"
            )
    sources = open_sources(run.text_paths(), run.named_datasets(), run.dataset_split, run, run.max_documents)
    corpus_name = ", ".join(source.name for source in sources)
    cache = cache_folder()
    text = TextStore(prepare_text(sources, run.language, cleaning_of(run.token_options()), cache))
    for line in reading_report(text.reading):
        logger.info(line)
    try:
        held_out = np.zeros(0, dtype=np.int64)
        if not has_validation:
            fraction, most = run.validation_fraction, run.max_validation_characters
            held_out = held_out_documents(text.document_characters, fraction, most)
        elif len(text) < 2:
            documents = counted(len(text), "document")
            raise UserError(f"too little text: {documents} with sentences, and two are needed; add text")
        sample = SentenceSample(text, held_out, leave_out=True)
        if tokenizer is None:
            tokenizer = train_or_load_tokenizer(run, sample, cache)
        elif run.extend_vocab:
            tokenizer = extend_tokenizer(tokenizer, sample, run)
    except UserError as error:
        raise UserError(f"{corpus_name}: {error}") from None
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


def _from_prepared_folders(paths, has_validation):
    """The `PreparedText` of one or more prepared folders, without the validation text."""
    parts = prepared_folder.read_parts([Path(path) for path in paths])
    tokens = TokenizedCorpus(*(part.tokens for part in parts))
    first = parts[0]
    if has_validation:
        held_out = np.zeros(0, dtype=np.int64)
    elif len(parts) == 1:
        held_out = first.held_out
    else:
        held_out = prepared_folder.held_out_of_parts(parts, tokens)
    reading = {}
    for part in parts:
        for name, count in part.reading.items():
            reading[name] = reading.get(name, 0) + count
    return PreparedText(
        token_options=prepared_folder.common_options(parts),
        corpus_name=prepared_folder.joined_names([part.corpus_name for part in parts]),
        hub_datasets=list(dict.fromkeys(itertools.chain(*(part.hub_datasets for part in parts)))),
        source_fingerprints=[part.fingerprint for part in parts],
        reading=reading,
        tokenizer=first.tokenizer,
        tokenizer_report=first.tokenizer_report,
        tokens=tokens,
        source_ends=first.source_ends if len(parts) == 1 else tokens.document_ends.starts[1:].tolist(),
        held_out=held_out,
        text_hashes=[part.text_hashes for part in parts],
    )


def _add_validation(prepared, sources, run):
    """Read and tokenize the validation text like the training text, and count the texts that are in both."""
    name = ", ".join(source.name for source in sources)
    options, cache = prepared.token_options, cache_folder()
    text = TextStore(prepare_text(sources, options["language"], cleaning_of(options), cache))
    for line in reading_report(text.reading):
        logger.info(f"validation text: {line}")
    if len(text) < 2:
        raise UserError(
            f"validation text {name}: {counted(len(text), 'document')} with sentences, and random second segments "
            f"need two; give more text"
        )
    processes = run.preprocessing_num_workers or default_processes()
    try:
        tokens = TokenizedCorpus(prepare_tokens(text, prepared.tokenizer, cache, processes))
    except UserError as error:
        raise UserError(f"validation text {name}: {error}") from None
    if len(tokens) < 2:
        raise UserError(
            f"validation text {name}: too few documents hold a token that the tokenizer knows; give more text"
        )
    in_both = count_in_both(text.text_hashes, prepared.text_hashes)
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


_HASHES_AT_ONCE = 1 << 20  # hashes that are compared together, to bound memory


def count_in_both(hashes: np.ndarray, others: Sequence[np.ndarray]) -> int:
    """How many texts with these `hashes` (n,) are also among the texts of `others`, arrays of hashes (m,)."""
    count = 0
    for start in range(0, len(hashes), _HASHES_AT_ONCE):
        group = np.sort(hashes[start : start + _HASHES_AT_ONCE])
        in_both = np.zeros(len(group), dtype=bool)
        for table in others:
            for first in range(0, len(table), _HASHES_AT_ONCE):
                in_both |= np.isin(group, table[first : first + _HASHES_AT_ONCE])
        count += int(in_both.sum())
    return count


def cleaning_of(options: dict) -> Cleaning:
    """How to clean paragraphs, from `TextConfig.token_options`."""
    names = ("unicode_normalization", "min_paragraph_characters", "drop_duplicate_paragraphs")
    return Cleaning(*(options[name] for name in names))


def describe_tokenizer(tokenizer: BertTokenizer, sentences: SentenceSample) -> dict:
    """The statistics of `wordpiece.describe`, logged in one line."""
    report = wordpiece.describe(tokenizer, itertools.islice(sentences, DESCRIBED_SENTENCES))
    logger.info(
        f"tokenizer, on {report['words']:,} held-out words: {report['pieces_per_word']:.2f} pieces a word, "
        f"{report['unknown_share']:.2%} [UNK]; longest pieces {' '.join(report['longest_pieces'])}"
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
        run: the options of the run: the column to read, the number of processes, and whether to stream.
        max_documents: the most files and rows to read from each source; None for all.
        options: the flags that give `paths` and `split`, for error messages.

    Raises:
        UserError: a source does not exist or cannot be opened.
    """
    processes = run.preprocessing_num_workers or default_processes()
    files = [file_source(path, run.text_column, max_documents, processes) for path in paths]
    reading = (split, run.text_column, run.streaming, max_documents, options)
    return files + [dataset_source(name, config, *reading) for name, config in datasets]


def default_processes() -> int:
    """The default number of processes to read `python-docs` and to tokenize: one for each core, at most 8."""
    return min(cores(), 8)


def reading_report(counts: dict[str, int]) -> Iterator[str]:
    """Yield messages: which files and rows reading left out, how many sentences it cut, what cleaning did."""
    left_out = {
        "files_without_text": ("file without text", "files without text"),
        "rows_without_text": ("row without text", "rows without text"),
        "files_of_other_kinds": ("file of another kind", "files of other kinds"),
    }
    if numbers := [counted(counts[key], *words) for key, words in left_out.items() if counts.get(key)]:
        yield f"passed over: {', '.join(numbers)}"
    if cut := counts.get("long_sentences"):
        yield f"cut between words: {counted(cut, 'sentence')} of more than {LONGEST_SENTENCE:,} characters"
    if blocks := counts.get("blocks_as_documents"):
        yield f"few documents: {counted(blocks, 'block')} of sentences will each count as a document"
    cleaned = {"normalized": "normalised", "too_short": "too short", "duplicates": "duplicates"}
    if numbers := [f"{counts[rule]:,} {word}" for rule, word in cleaned.items() if rule in counts]:
        yield f"cleaning, of {counted(counts['paragraphs'], 'paragraph')}: {', '.join(numbers)}"


def train_or_load_tokenizer(run: TextConfig, sample: SentenceSample, cache: Path) -> BertTokenizer:
    """Train a tokenizer on the sample, or read the cached tokenizer of the same sample and options."""
    training_options = (run.vocab_size, run.lowercase, run.strip_accents, run.min_frequency, run.limit_alphabet)
    blocks = hashlib.sha256(np.ascontiguousarray(sample.blocks, dtype="<i8")).hexdigest()
    versions = [TOKENIZER_FORMAT, encoding.library_versions()]
    inputs = (versions, sample.text.folder.name, blocks, training_options)
    path = cache / f"tokenizer-{fingerprint(inputs)}"

    def write(partial):
        share = "" if sample.share == 1 else f", on {sample.share:.1%} of the text"
        logger.info(f"training a tokenizer of at most {run.vocab_size:,} pieces{share}")
        start = time.monotonic()
        tokenizer = wordpiece.train_wordpiece(sample, *training_options)
        logger.info(f"trained the tokenizer in {time.monotonic() - start:.0f} s")
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        (partial / "pieces.json").write_text(json.dumps(pieces))

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
