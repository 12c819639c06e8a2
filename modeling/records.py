"""What is read of the records in a model's folder: run_config.json, metrics.json and release.json, as types."""

from typing import TypedDict


class Options(TypedDict, total=False):
    """The options of a run that others read, in `run` or `finetune` of run_config.json."""

    objective: str | None
    language: str | None
    license: str | None
    init_from: str | None
    from_scratch: bool
    task: str | None
    seed: int
    num_seeds: int


class Start(TypedDict, total=False):
    """The model that a fine-tuning began with."""

    name: str
    revision: str | None
    language: str | None


class Learnt(TypedDict, total=False):
    """What a fine-tuned model has learnt of its training rows, and `predict` needs again."""

    columns: dict[str, list[str | None]]
    classes: list[str]
    number_of: dict[str, int]
    mean: float
    deviation: float
    default: str
    scheme: str | None
    has_unanswerable: bool
    count: int
    begin: int


class Split(TypedDict, total=False):
    """The rows of a part of a fine-tuning's data."""

    name: str
    rows: int


class Tokenizer(TypedDict, total=False):
    """The tokenizer of a pretraining run."""

    word_unit: str


class Data(TypedDict, total=False):
    """The text or the rows of a run."""

    corpus_name: str | None
    corpus_fingerprint: str | None
    text_fingerprint: int | None
    held_out_fingerprint: str | None
    hub_datasets: list[str]
    splits: dict[str, Split]
    tokenizer: Tokenizer
    validation: dict | None


class Fingerprint(TypedDict):
    """A file or folder that a run has read."""

    name: str
    fingerprint: str


class RunRecord(TypedDict, total=False):
    """run_config.json. A run of `pretrain` has `run` and `architecture`, one of `finetune` has `finetune`."""

    run: Options
    finetune: Options
    identity: dict
    architecture: dict
    auto_class: str
    base_model: Start
    data: Data
    fingerprints: list[Fingerprint]
    learnt: Learnt
    max_seq_length: int


class Export(TypedDict, total=False):
    """What `export` has measured."""

    task: str
    files: dict[str, dict]


class Guess(TypedDict):
    """A token that a model predicts, and its probability."""

    label: str
    score: float


class Prediction(TypedDict):
    """What a model predicts for a text."""

    text: str
    output: list[Guess]


class Metrics(TypedDict, total=False):
    """metrics.json; its figures are numbers under other names."""

    train_words_seen: float
    train_seconds: float
    pictures: dict[str, str]
    export: Export
    predictions: list[Prediction]


class Release(TypedDict, total=False):
    """release.json."""

    weights_sha256: str
    recipe: dict
