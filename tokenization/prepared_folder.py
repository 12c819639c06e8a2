"""Prepared folders, with tokenizer and token ids for many runs: writes, reads and checks them, joins several.

`d2l-bert prepare` writes a prepared folder: `prepared.json` (the record), the tokenizer's files, `tokens/` (a token
store, see `token_store.py`), `held_out_documents.npy` and `text_hashes.npy`. Runs write nothing into the folder, so
that the folder may be read-only. A prepared folder that makes one corpus with others is called a part.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import BertTokenizer

from d2l_bert.errors import UserError
from d2l_bert.random_numbers import random_keys, random_numbers
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.cache import content_hash
from d2l_bert.tokenization.config import TOKENIZER_TRAINING_OPTIONS, TextConfig
from d2l_bert.tokenization.existing import load_tokenizer
from d2l_bert.tokenization.sources import PREPARED_FILE
from d2l_bert.tokenization.split import HELD_OUT_SEED
from d2l_bert.tokenization.token_store import TokenizedCorpus


# Raise PREPARED_FORMAT by 1 when the content of the folder's files changes: folders of other formats are refused.
PREPARED_FORMAT = 2

TOKENS_FOLDER = "tokens"
HELD_OUT_FILE = "held_out_documents.npy"
HASHES_FILE = "text_hashes.npy"

# The most names of parts in the name of a corpus.
MOST_NAMES = 4


def is_prepared_folder(path: str | Path) -> bool:
    """Whether this is a prepared folder: whether the folder has a record."""
    return os.path.isfile(Path(path) / PREPARED_FILE)


def corpus_is_prepared(run: TextConfig) -> bool:
    """Whether the corpus of a run consists of prepared folders only."""
    paths = run.text_paths()
    return not run.dataset and bool(paths) and all(is_prepared_folder(path) for path in paths)


def refuse_beside_text(run: TextConfig) -> None:
    """Raise a `UserError` for a prepared folder among sources of text, or a prepared folder without its record."""
    for path in run.text_paths():
        if is_prepared_folder(path):
            raise UserError(
                f"corpus {path}: a prepared folder goes with other prepared folders only; give it alone, or give its "
                f"text"
            )
        if (Path(path) / TOKENS_FOLDER / "ids.npy").exists():
            raise UserError(f"corpus {path}: a prepared folder without its {PREPARED_FILE}; prepare the text again")
    for name, _ in run.named_datasets():
        if is_prepared_folder(name):
            raise UserError(f"dataset {name}: a prepared folder; give it with --corpus")


# ---------------------------------------------------------------------------------------------------------------------
# Write


def write_prepared_folder(text, folder: Path) -> None:
    """
    Write a prepared folder.

    Args:
        text: a `PreparedText` with one token store and without a validation text.
        folder: an empty folder.
    """
    wordpiece.save_tokenizer(text.tokenizer, folder)
    (store,) = text.tokens.folders
    shutil.copytree(store, folder / TOKENS_FOLDER)
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
        "source_ends": text.source_ends,
        "counts": text.counts(),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": content_hash(path)}
            for path in files
        },
    }
    (folder / PREPARED_FILE).write_text(json.dumps(record, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Read


@dataclass
class Part:
    """
    The content of a prepared folder. The fields are those of `PreparedText`; `tokens` is the token store's path, and
    `files` has the size and the SHA-256 of each file.
    """

    folder: Path
    token_options: dict
    corpus_name: str
    fingerprint: str
    hub_datasets: list
    reading: dict
    source_ends: list
    tokenizer_report: dict
    files: dict
    tokenizer: BertTokenizer
    tokens: Path
    held_out: np.ndarray
    text_hashes: np.ndarray


def read_parts(folders: Sequence[Path]) -> list[Part]:
    """
    Read the prepared folders that make one corpus. Of large files only the sizes are checked.

    Raises:
        UserError: a folder is damaged or has an earlier format, its tokenizer or options differ from those of the
            first folder, or two folders have the same tokens.
    """
    parts, part_of_fingerprint = [], {}
    for folder in folders:
        part = read_prepared_folder(folder)
        first = parts[0] if parts else part
        if wordpiece.fingerprint(part.tokenizer) != wordpiece.fingerprint(first.tokenizer):
            raise UserError(
                f"corpus {folder}: its tokenizer is not that of {first.folder}, and all parts need the same; prepare "
                f"it again with --tokenizer {first.folder}"
            )
        _refuse_other_options(part, first)
        same = part_of_fingerprint.setdefault(part.fingerprint, part)
        if same is not part:
            raise UserError(f"corpus {folder}: holds the same tokens as {same.folder}; give each part once")
        parts.append(part)
    return parts


# The options that may differ between parts: those of the tokenizer, since the tokenizers themselves are compared, and
# the language, since each part may have its own.
_FREE_OPTIONS = {*TOKENIZER_TRAINING_OPTIONS, "extend_vocab", "language"}


def _refuse_other_options(part, first):
    """Raise a `UserError` if an option, apart from `_FREE_OPTIONS`, differs between a part and the first part."""
    for name, value in first.token_options.items():
        if name not in _FREE_OPTIONS and part.token_options.get(name) != value:
            raise UserError(
                f"corpus {part.folder}: was prepared with {name} {part.token_options.get(name)!r}, and {first.folder} "
                f"with {value!r}; prepare both alike"
            )


def common_options(parts: Sequence[Part]) -> dict:
    """The options that the parts share. `language` lists the languages of all parts."""
    languages = list(dict.fromkeys(part.token_options["language"] for part in parts))
    return {**parts[0].token_options, "language": ", ".join(languages)}


def joined_names(names: Sequence[str]) -> str:
    """The names of a corpus's parts in one string: at most `MOST_NAMES`, else the first few and a count."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1:,} others"


def held_out_of_parts(parts: Sequence[Part], tokens: TokenizedCorpus) -> np.ndarray:
    """
    Choose the documents to hold out of a corpus of several parts.

    They are chosen at random from the held-out documents of all parts, and have as many tokens as the held-out
    documents of a single text of the same size. The rest of these documents are trained on.

    Args:
        tokens: the parts as one corpus.

    Returns:
        Document numbers in `tokens`, ascending: at least two.
    """
    candidates, random = [], []
    for part, first in zip(parts, tokens.document_ends.starts.tolist(), strict=False):
        candidates.append(first + part.held_out)
        random.append(random_numbers(random_keys((HELD_OUT_SEED, int(part.fingerprint, 16)), part.held_out), 0))
    candidates = np.concatenate(candidates)[np.argsort(np.concatenate(random), kind="stable")]
    characters = sum(part.reading["characters"] for part in parts)
    options = parts[0].token_options
    share = min(options["validation_fraction"], options["max_validation_characters"] / max(characters, 1))
    count = int(np.searchsorted(np.cumsum(tokens.sizes(candidates)), share * tokens.size)) + 1
    return np.sort(candidates[: max(count, 2)])


def read_prepared_folder(folder: Path) -> Part:
    """
    Read a prepared folder. Of the files that grow with the text only the sizes are checked (`check_prepared_folder`
    reads them whole).

    Raises:
        UserError: the folder is damaged or has an earlier format.
    """
    try:
        record = json.loads((folder / PREPARED_FILE).read_text())
        if record["format"] != PREPARED_FORMAT:
            raise ValueError(f"its format is {record['format']}, and this version reads {PREPARED_FORMAT}")
        for name, file in record["files"].items():
            if (size := (folder / name).stat().st_size) != file["bytes"]:
                raise ValueError(f"{name} has {size:,} bytes, and {file['bytes']:,} were written")
            if not is_large(name) and content_hash(folder / name) != file["sha256"]:
                raise ValueError(f"{name} has changed since it was written")
        held_out, hashes = (np.load(folder / name, mmap_mode="r") for name in (HELD_OUT_FILE, HASHES_FILE))
        names = ("token_options", "corpus_name", "fingerprint", "hub_datasets", "reading", "source_ends")
        return Part(
            folder=folder,
            **{name: record[name] for name in names},
            tokenizer_report=record["counts"]["tokenizer"],
            files=record["files"],
            tokenizer=load_tokenizer(str(folder)),
            tokens=folder / TOKENS_FOLDER,
            held_out=np.array(held_out),
            text_hashes=hashes,
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"corpus {folder}: a damaged prepared folder ({reason}); prepare the text again") from None


def is_large(name: str) -> bool:
    """Whether a file of a prepared folder grows with the text: its tokens, and the hashes of its documents."""
    return name.endswith(".npy") and name != HELD_OUT_FILE


def check_prepared_folder(folder: Path) -> str:
    """
    Read every byte of a prepared folder, and compare each file's hash with the record.

    Returns:
        A line for the user with the numbers of files, bytes, documents and tokens.

    Raises:
        UserError: this is not a prepared folder, the folder is damaged (a file is missing or has changed since it was
            written), or it has an earlier format.
    """
    if not is_prepared_folder(folder):
        raise UserError(
            f"{folder}: no prepared folder (no {PREPARED_FILE}); give one that `d2l-bert prepare` has made"
        )
    part = read_prepared_folder(folder)
    for name, file in part.files.items():
        if content_hash(folder / name) != file["sha256"]:
            raise UserError(
                f"corpus {folder}: a damaged prepared folder ({name} has changed since it was written); prepare the "
                f"text again"
            )
    tokens = TokenizedCorpus(part.tokens)
    total = sum(file["bytes"] for file in part.files.values())
    counts = f"{len(part.files)} files, {total:,} bytes, {len(tokens):,} documents, {tokens.size:,} tokens"
    return f"{folder}: whole; {counts}"
