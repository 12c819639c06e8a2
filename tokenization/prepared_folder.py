"""`PreparedText`; prepared folders, which keep one for many runs: writes, reads and checks them, joins several.

`d2l-bert prepare` writes a prepared folder: `prepared.json` (the record), the tokenizer's files, `tokens/` (a token
store, see `token_store.py`), `held_out_documents.npy` and `text_hashes.npy`. Runs write nothing into the folder, so
that the folder may be read-only. A prepared folder that makes one corpus with others is called a part.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2l_bert.errors import UserError, explained, refuse_first
from d2l_bert.progress import counted
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.cache import content_hash, fingerprint
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.sources import PREPARED_FILE
from d2l_bert.tokenization.token_store import AllBut, Only, TokenizedCorpus


# Raise PREPARED_FORMAT by 1 when the content of the folder's files changes: folders of other formats are refused.
PREPARED_FORMAT = 3

TOKENS_FOLDER = "tokens"
HELD_OUT_FILE = "held_out_documents.npy"
HASHES_FILE = "text_hashes.npy"


def is_prepared_folder(path: str | Path) -> bool:
    """Whether this is a prepared folder: whether the folder has a record."""
    return os.path.isfile(Path(path) / PREPARED_FILE)


def corpus_is_prepared(run: TextConfig) -> bool:
    """Whether the corpus of a run consists of prepared folders only."""
    paths = run.text_paths()
    return not run.dataset and bool(paths) and all(is_prepared_folder(path) for path in paths)


# ---------------------------------------------------------------------------------------------------------------------
# The text


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
        account: what the tokenizer makes of the training text, or of a sample of it (`account.account_of`).
        tokenizer_report: facts about the tokenizer, and its statistics on held-out text (`account.describe`).
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
    account: dict
    tokenizer: PreTrainedTokenizerBase
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
        ends, words = np.array([len(self.tokens) - 1]), self.tokens.document_words
        held_out_words = words.at(self.held_out) - words.before(self.held_out)
        held_out = len(self.held_out), int(self.tokens.sizes(self.held_out).sum())
        train = len(self.tokens) - held_out[0], len(self.tokens.ids) - held_out[1]
        if self.validation is not None:
            held_out = len(self.validation.tokens), len(self.validation.tokens.ids)
        counts = {
            "corpus_name": self.corpus_name,
            "corpus_fingerprint": self.tokens.fingerprint(),
            "hub_datasets": self.hub_datasets,
            "reading": self.reading,
            "account": self.account,
            "train_documents": train[0],
            "train_tokens": train[1],
            "train_words": int(words.at(ends).sum() - held_out_words.sum()),
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


def split_fingerprint(text: PreparedText) -> str:
    """A hash of the split: of the held-out documents, the ends of the sources, and the validation text, if any."""
    digest = hashlib.sha256(json.dumps([len(text.tokens), [int(end) for end in text.source_ends]]).encode())
    digest.update(np.ascontiguousarray(text.held_out, dtype="<i8"))
    if text.validation is not None:
        digest.update(text.validation.tokens.fingerprint().encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_prepared_folder(text: PreparedText, folder: Path) -> None:
    """
    Write a prepared folder.

    Args:
        text: has one token store and without a validation text.
        folder: an empty folder.
    """
    wordpiece.save_tokenizer(text.tokenizer, folder)
    (store,) = text.tokens.folders
    (folder / TOKENS_FOLDER).mkdir()
    for file in store.iterdir():  # `shutil.copytree` would hide why a write fails
        shutil.copyfile(file, folder / TOKENS_FOLDER / file.name)
    np.save(folder / HELD_OUT_FILE, text.held_out)
    np.save(folder / HASHES_FILE, text.text_hashes[0])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    record = {
        "format": PREPARED_FORMAT,
        "token_options": text.token_options,
        "corpus_name": text.corpus_name,
        "fingerprint": text.tokens.fingerprint(),
        "hub_datasets": text.hub_datasets,
        "reading": text.reading,
        "account": text.account,
        "source_ends": text.source_ends,
        "counts": text.counts(),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": content_hash(path)}
            for path in files
        },
    }
    record["fingerprint_of_record"] = fingerprint(record)
    (folder / PREPARED_FILE).write_text(json.dumps(record, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Read


# The options that may differ between parts: those of the tokenizer, since the tokenizers themselves are compared, and
# the language, since each part may have its own.
_FREE_OPTIONS = {*TOKENIZER_TRAINING_OPTIONS, "extend_vocab", "language"}


def read_prepared_folders(folders: Sequence[Path]) -> PreparedText:
    """
    The text of the prepared folders that make one corpus. Of large files only the sizes are checked.

    Raises:
        UserError: a folder is damaged or has an earlier format, its tokenizer or options differ from those of the
            first folder, or two folders have the same tokens.
    """
    parts, folder_of = [], {}
    for folder in folders:
        part = read_prepared_folder(folder)
        first = parts[0] if parts else part
        same = folder_of.setdefault(part.tokens.fingerprint(), folder)
        cases = {
            f"its tokenizer is not that of {folders[0]}; prepare it again with --tokenizer {folders[0]}": (
                wordpiece.fingerprint(part.tokenizer) != wordpiece.fingerprint(first.tokenizer)
            ),
            **{
                f"was prepared with {name} {part.token_options.get(name)!r}, and {folders[0]} with {value!r}; prepare "
                f"both alike": name not in _FREE_OPTIONS and part.token_options.get(name) != value
                for name, value in first.token_options.items()
            },
            f"holds the same tokens as {same}; give each part once": same is not folder,
        }
        refuse_first(cases, f"corpus {folder}: ")
        parts.append(part)
    if len(parts) == 1:
        return first
    tokens = TokenizedCorpus(*(folder / TOKENS_FOLDER for folder in folders))
    first_documents = tokens.document_ends.starts.tolist()
    held_out = [number + part.held_out for part, number in zip(parts, first_documents, strict=False)]
    reading = _added(part.reading for part in parts)
    languages = filter(None, dict.fromkeys(part.token_options["language"] for part in parts))
    names = ", ".join(part.corpus_name for part in parts)
    return dataclasses.replace(
        first,
        token_options={**first.token_options, "language": ", ".join(languages) or None},
        corpus_name=textwrap.shorten(names, 100, placeholder=" ..."),
        hub_datasets=list(dict.fromkeys(name for part in parts for name in part.hub_datasets)),
        source_fingerprints=[part.tokens.fingerprint() for part in parts],
        reading=reading,
        account=_added(part.account for part in parts),
        tokens=tokens,
        source_ends=tokens.document_ends.starts[1:].tolist(),
        held_out=np.concatenate(held_out),
        text_hashes=[hashes for part in parts for hashes in part.text_hashes],
    )


def _added(counts):
    """Dicts of numbers, added up; lists are joined."""
    total = {}
    for each in counts:
        for name, value in each.items():
            total[name] = total[name] + value if name in total else value
    return total


def read_prepared_folder(folder: Path, check_large: bool = False) -> PreparedText:
    """
    The text of a prepared folder.

    Args:
        check_large: read the files that grow with the text whole, to check them, too; else their sizes are checked.

    Raises:
        UserError: the folder is damaged or has an earlier format.
    """
    with explained(
        f"corpus {folder}: a damaged prepared folder",
        "prepare the text again",
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ):
        record = json.loads((folder / PREPARED_FILE).read_text())
        if record["format"] != PREPARED_FORMAT:
            raise ValueError(f"its format is {record['format']}, and this version reads {PREPARED_FORMAT}")
        if record.pop("fingerprint_of_record") != fingerprint(record):
            raise ValueError(f"{PREPARED_FILE} has changed since it was written")
        for name, file in record["files"].items():
            if (size := (folder / name).stat().st_size) != file["bytes"]:
                raise ValueError(f"{name} has {size:,} bytes, and {file['bytes']:,} were written")
            if (check_large or not is_large(name)) and content_hash(folder / name) != file["sha256"]:
                raise ValueError(f"{name} has changed since it was written")
        held_out, hashes = (np.load(folder / name, mmap_mode="r") for name in (HELD_OUT_FILE, HASHES_FILE))
        entries = {
            name: record[name] for name in ("token_options", "corpus_name", "hub_datasets", "reading", "account")
        }
        entries |= {"source_fingerprints": [record["fingerprint"]], "source_ends": record["source_ends"]}
        entries |= {"tokenizer": load_tokenizer(str(folder)), "tokenizer_report": record["counts"]["tokenizer"]}
    tokens = TokenizedCorpus(folder / TOKENS_FOLDER)
    return PreparedText(**entries, tokens=tokens, held_out=np.array(held_out), text_hashes=[hashes])


def is_large(name: str) -> bool:
    """Whether a file of a prepared folder grows with the text: its tokens, and the hashes of its documents."""
    return name.endswith(".npy") and name != HELD_OUT_FILE


def check_prepared_folder(folder: Path) -> str:
    """
    Read every byte of a prepared folder, and compare each file's hash with the record.

    Returns:
        A line for the user with the numbers of documents and tokens.

    Raises:
        UserError: this is not a prepared folder, the folder is damaged (a file is missing or has changed since it was
            written), or it has an earlier format.
    """
    if not is_prepared_folder(folder):
        raise UserError(
            f"{folder}: no prepared folder (no {PREPARED_FILE}); give one that `d2l-bert prepare` has made"
        )
    tokens = read_prepared_folder(folder, check_large=True).tokens
    return f"{folder}: whole; {len(tokens):,} documents, {len(tokens.ids):,} tokens"
