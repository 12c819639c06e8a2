"""`SourceConfig` and `TextConfig`: the options about text and tokenizer that several commands share."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from d2l_bert.options import TEXT, TOKENIZER, Options, cores, option
from d2l_bert.tokenization.rules import Rules


Separator = Literal["auto", ",", ";", "tab", "pipe"]  # as in `tables.table_rows`


@dataclass(kw_only=True)
class SourceConfig(Options):
    """
    Which text to read. Every field is an option of `d2l-bert prepare`, of `pretrain` and of `evaluate`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    corpus: list[str] | None = option(
        None,
        "text files and folders of text files (.txt, .md, .jsonl, .csv, .tsv, .parquet, also packed as .gz, .zst or "
        ".bz2), or python-docs, the documentation installed with Python; the default without a dataset is python-docs",
        TEXT,
        identity=False,
        metavar="PATH",
        common=True,
    )
    dataset: list[str] = option(
        [],
        "datasets: Hub ids, or folders (also of save_to_disk); a configuration follows a colon: "
        "Salesforce/wikitext:wikitext-2-raw-v1",
        TEXT,
        identity=False,
        metavar="ID[:CONFIG]",
        common=True,
    )
    dataset_split: str = option("train", "split to read from each dataset", TEXT, identity=False, metavar="NAME")
    streaming: bool = option(
        False, "read datasets row by row, without a full download", TEXT, identity=False, needs="dataset"
    )
    text_column: str = option(
        "text", "column that holds the text in datasets and tables", TEXT, identity=False, metavar="NAME"
    )
    separator: Separator = option(
        "auto",
        "what separates the cells of .csv files; auto takes the one that stands most often in the first line",
        TEXT,
        identity=False,
    )
    max_documents: int | None = option(
        None, "most documents to read from each path and dataset", TEXT, within="[1, 1000000000000]"
    )
    documents: Literal["auto", "file", "blank_line", "line"] = option(
        "auto",
        "where documents end in text files and in rows: at the end of the file, at blank lines, or at the end of each "
        "line; auto finds out from the lines, and takes rows whole; file makes a document of 64 rows",
        TEXT,
    )
    language: str | None = option(
        None,
        "language of the text (ISO 639 code, lower case), for finding the ends of sentences, and for the card; "
        "sentencex splits a language without rules of its own like a related one; the default splits like English",
        TEXT,
        metavar="CODE",
    )
    preprocessing_num_workers: int | None = option(
        None,
        "processes that read python-docs, and that tokenize; the default is one for each CPU core, at most 8",
        TEXT,
        identity=False,
        within="[1, 1024]",
    )

    def __post_init__(self):
        """
        Write data in memory that stand in place of the name of a dataset to the cache, so that they have a name.

        Raises:
            UserError: as in `hub_datasets.dataset_folder`.
        """
        for option_name, split_name in (("dataset", "dataset_split"), ("validation_dataset", "validation_split")):
            given = vars(self).get(option_name, [])
            given = given if isinstance(given, (list, str)) else [given]
            in_memory = [one for one in given if not isinstance(one, str)]
            if not in_memory:
                continue
            from d2l_bert.tokenization.hub_datasets import dataset_folder  # loads PyArrow, which help does without

            split = getattr(self, split_name)
            names = [one if isinstance(one, str) else dataset_folder(one, self.text_column, split) for one in given]
            setattr(self, option_name, names)
            if len(in_memory) == len(given):  # in the cache each is a dataset without splits
                setattr(self, split_name, type(self).__dataclass_fields__[split_name].default)

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        yield from super().contradictions(given)
        if self.language is not None and not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", self.language):
            yield f"language must be an ISO 639 code such as en, zh or pt-br, got {self.language!r}"

    def processes(self) -> int:
        """How many processes read `python-docs`, and tokenize."""
        return self.preprocessing_num_workers or min(cores(), 8)


@dataclass(kw_only=True)
class TextConfig(SourceConfig):
    """
    Which text to read and which tokenizer to use. Every field is an option of `d2l-bert prepare` and of `pretrain`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    # Options of `pretrain` alone, which are fields of its `PretrainConfig`: a model to start from, and a separate text
    # to evaluate on. `prepare` has neither; for it, the code that both commands share reads these values.
    init_from: ClassVar[str | None] = None
    validation_corpus: ClassVar[list[str]] = []
    validation_dataset: ClassVar[list[str]] = []
    validation_split: ClassVar[str] = ""

    validation_fraction: float = option(
        0.05, "share of the text to hold out for evaluation, in whole documents", TEXT, within="(0, 1)"
    )
    max_validation_characters: int = option(
        1_000_000, "most characters to hold out", TEXT, within="[1, 1000000000000]"
    )

    tokenizer: str | None = option(
        None,
        "folder or Hub id of an existing tokenizer, or its vocab.txt or tokenizer.json, used instead of training one",
        TOKENIZER,
        identity=False,
        common=True,
    )
    vocab_size: int = option(
        8192, "most entries in the WordPiece vocabulary", TOKENIZER, within="[6, 16777216]", common=True
    )
    lowercase: bool = option(True, "convert text to lower case", TOKENIZER)
    strip_accents: bool | Literal["auto"] = option(
        "auto",
        "remove accents and all other nonspacing marks; auto keeps them in text that has more than a few, or Hangul, "
        "and where case is kept",
        TOKENIZER,
    )
    pre_tokenizer: str = option(
        "bert",
        "what a word is before WordPiece: bert, characters (each by itself), or kmers:6 (pieces of six characters "
        "that do not overlap)",
        TOKENIZER,
        metavar="bert|characters|kmers:N",
    )
    unicode_normalization: Literal["none", "NFC", "NFKC"] = option(
        "none", "Unicode normal form that the tokenizer converts text to, before all else", TOKENIZER
    )
    individual_digits: bool = option(
        False, "make every digit a word, so that numbers do not fill the vocabulary", TOKENIZER
    )
    min_frequency: int = option(
        2,
        "how often two pieces must occur side by side to be merged, or a word to be added",
        TOKENIZER,
        within="[1, 1000000000]",
    )
    limit_alphabet: int | None = option(
        None,
        "most characters in the vocabulary, rarer ones become [UNK]; the default follows the text",
        TOKENIZER,
        within="[2, 1114112]",
    )
    max_unknown_share: float = option(
        0.05,
        "end before training where a larger share of the characters stands in [UNK]",
        TOKENIZER,
        identity=False,
        within="[0, 1]",
    )
    full_account: bool = option(
        False,
        "print all that is said of the text, of which else the most important is printed, and all is in reading.txt",
        TEXT,
        identity=False,
    )
    extend_vocab: int = option(
        0,
        "most words of the text to add to the vocabulary of an existing tokenizer",
        TOKENIZER,
        within="[0, 16777216]",
    )

    def __post_init__(self):
        """As in `SourceConfig`; a tokenizer in memory that stands in place of a name is written to the cache, too."""
        super().__post_init__()
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            from d2l_bert.tokenization.existing_tokenizers import tokenizer_folder  # loads Transformers

            self.tokenizer = tokenizer_folder(self.tokenizer)

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`. Raises `UserError` itself for a `pre_tokenizer` that there is not."""
        Rules(pre_tokenizer=self.pre_tokenizer)
        yield from super().contradictions(given)
        if not self.text_paths() and not self.dataset:
            yield "corpus names no text; give files, folders or python-docs"
        if self.extend_vocab and self.existing_tokenizer() is None:
            yield (
                "extend_vocab adds words to an existing tokenizer; give one, or raise vocab_size to train a larger one"
            )

    def existing_tokenizer(self) -> str | None:
        """Folder, file or Hub id of an existing tokenizer; None if a tokenizer is to be trained."""
        return self.init_from if self.tokenizer is None else self.tokenizer

    def text_paths(self) -> list[str]:
        """The files and folders to read; `python-docs` if neither `corpus` nor `dataset` is given."""
        if self.corpus is None:
            return [] if self.dataset else ["python-docs"]
        return self.corpus

    def token_options(self) -> dict:
        """The options that determine the token ids of a given text, with their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(TextConfig) if f.metadata["identity"]}


def dataset_and_config(dataset: str) -> tuple[str, str | None]:
    """The Hub id or folder in ID or ID:CONFIG, and its configuration or None."""
    name, colon, config = dataset.rpartition(":")
    if not colon or not config or Path(dataset).exists():  # a folder's name may contain a colon
        return dataset, None
    return name, config


# Options for training a tokenizer: refused together with an existing tokenizer.
TOKENIZER_TRAINING_OPTIONS = (
    "vocab_size",
    "lowercase",
    "strip_accents",
    "pre_tokenizer",
    "unicode_normalization",
    "individual_digits",
    "min_frequency",
    "limit_alphabet",
)
