"""The options of text and tokenizer: what `d2l-bert prepare` takes, and `d2l-bert pretrain` too."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from d2l_bert.errors import UserError
from d2l_bert.options import TEXT, TOKENIZER, Options, check_texts, option


# Entries that a trained vocabulary has at least: the five special tokens and one character.
LEAST_VOCABULARY = 6

# A vocabulary's trainer reserves memory for each entry before it begins.
MOST_ENTRIES = 2**24


@dataclass(kw_only=True)
class TextConfig(Options):
    """
    What text, and what tokenizer. Every field is an option of `d2l-bert prepare` and of `d2l-bert pretrain`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    corpus: list[str] | None = option(
        None,
        "files and folders of text (.txt, .md, .jsonl, .csv, .tsv, .parquet, packed as .gz or .zst or not), or "
        "python-docs, the documentation installed with Python; without a dataset the default is python-docs",
        TEXT,
        identity=False,
        metavar="PATH",
    )
    dataset: list[str] = option(
        [],
        "datasets, Hub ids or folders (of save_to_disk too), each with its configuration behind a colon if it has "
        "several: Salesforce/wikitext:wikitext-2-raw-v1",
        TEXT,
        identity=False,
        metavar="ID[:CONFIG]",
    )
    dataset_config: str | None = option(
        None, "the configuration of a single one", TEXT, identity=False, metavar="NAME"
    )
    dataset_split: str = option("train", "the split of each", TEXT, identity=False, metavar="NAME")
    streaming: bool = option(False, "read datasets row by row, without downloading them whole", TEXT, identity=False)
    text_column: str = option("text", "column of text in datasets and tables", TEXT, identity=False, metavar="NAME")
    max_documents: int | None = option(None, "most text files and rows to read from each path and each dataset", TEXT)
    language: str = option(
        "en",
        "language of the text (ISO 639, lower case), for splitting sentences; languages that sentencex has no rules "
        "for are split as their nearest relative that it knows, or as English",
        TEXT,
        metavar="CODE",
    )
    unicode_normalization: Literal["none", "NFC", "NFKC"] = option(
        "none", "normal form to bring paragraphs into", TEXT
    )
    min_paragraph_characters: int = option(0, "drop shorter paragraphs", TEXT)
    drop_duplicate_paragraphs: bool = option(False, "keep the first of equal paragraphs only", TEXT)
    validation_fraction: float = option(0.05, "share of the text, by document, held out for evaluation", TEXT)
    max_validation_characters: int = option(1_000_000, "most text to hold out", TEXT)

    preprocessing_num_workers: int | None = option(
        None, "processes that tokenize; the default is one for each core, at most 8", TEXT, identity=False
    )

    tokenizer: str | None = option(
        None, "folder or Hub id of a tokenizer to use instead of training one", TOKENIZER, identity=False
    )
    vocab_size: int = option(8192, "most entries of the WordPiece vocabulary", TOKENIZER, largest=MOST_ENTRIES)
    lowercase: bool = option(True, "fold case", TOKENIZER)
    strip_accents: bool | None = option(None, "drop accents; the default is as lowercase", TOKENIZER)
    min_frequency: int = option(2, "how often what is merged, or added as a word, must occur", TOKENIZER)
    limit_alphabet: int = option(1000, "most characters to know; rarer ones become [UNK]", TOKENIZER)
    extend_vocab: int = option(
        0, "most whole words of the text to add to an existing tokenizer's vocabulary", TOKENIZER, largest=MOST_ENTRIES
    )

    def check(self) -> None:
        """Refuse what cannot be read, before anything is."""
        check_texts(self)
        self.check_types()
        if not self.text_paths() and not self.dataset:
            raise UserError("corpus names no text; give files, folders or python-docs")
        if self.streaming and not self.dataset:
            raise UserError(
                "streaming is for datasets, and none is given; leave it out, files are read in pieces anyway"
            )
        if self.dataset_config is not None and len(self.dataset) != 1:
            raise UserError("dataset_config is for a single dataset; of several, write each as ID:CONFIG")
        for name, config in self.named_datasets():
            if not name or config == "" or (config is not None and self.dataset_config not in (None, config)):
                raise UserError(f"dataset takes ID or ID:CONFIG, and one configuration for each, got {name}:{config}")
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", self.language):
            raise UserError(f"language must be an ISO 639 code such as en, zh or pt-br, got {self.language!r}")
        self._check_range("vocab_size", LEAST_VOCABULARY)
        self._check_range("limit_alphabet", 2)  # a text of one character holds nothing to learn
        for name in ("min_frequency", "max_validation_characters", "max_documents"):
            self._check_range(name, 1)
        self._check_processes("preprocessing_num_workers", 1)
        for name in ("min_paragraph_characters", "extend_vocab"):
            self._check_range(name, 0)
        self._check_range("validation_fraction", 0, above=True, below=1)
        if self.extend_vocab and self.existing_tokenizer() is None:
            raise UserError(
                "extend_vocab adds to a tokenizer that exists; give one, or raise vocab_size for one that is trained"
            )

    def existing_tokenizer(self) -> str | None:
        """Folder or Hub id of the tokenizer to use instead of training one."""
        return self.tokenizer

    def text_paths(self) -> list[str]:
        """The files and folders to read; `python-docs` if neither they nor datasets are named."""
        if self.corpus is None:
            return [] if self.dataset else ["python-docs"]
        return self.corpus

    def named_datasets(self) -> list[tuple[str, str | None]]:
        """Id and configuration of each dataset; a folder may have a colon in its name."""
        named = []
        for dataset in self.dataset:
            name, colon, config = dataset.rpartition(":")
            if not colon or Path(dataset).exists():
                name, config = dataset, self.dataset_config
            named.append((name, config))
        return named

    def settled(self) -> dict:
        """The options that the tokens on disk follow from."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(TextConfig) if f.metadata["identity"]}


# What an existing tokenizer settles.
TOKENIZER_TRAINING_OPTIONS = ("vocab_size", "lowercase", "strip_accents", "min_frequency", "limit_alphabet")
