"""The options of the commands that look into a model: `d2l-bert embed` and `d2l-bert attention`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from d2l_bert.options import MACHINE, OUTPUT, TEXT, Options, PathOption, option, option_of
from d2l_bert.tokenization.config import Separator, SourceConfig


@dataclass(kw_only=True)
class EmbedConfig(Options):
    """
    How the lines of a file become vectors. Every field is an option of `d2l-bert embed`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    output: PathOption | None = option(
        None,
        "new file for the vectors: .npy (an array, a row for each line) or .parquet (your columns and vector)",
        OUTPUT,
        metavar="FILE",
        common=True,
    )
    nearest: list[str] = option(
        [],
        "show the lines whose vectors are nearest to that of this text, or of each of several",
        OUTPUT,
        metavar="TEXT",
        common=True,
    )
    top_k: int = option(
        10, "how many nearest lines to show", OUTPUT, within="[1, 1000000]", common=True, needs="nearest"
    )
    pooling: Literal["mean", "cls"] = option(
        "mean",
        "the vector of a line: the mean over its tokens, [CLS] and [SEP] included, or that of [CLS]",
        TEXT,
        common=True,
    )
    max_seq_length: int | None = option(
        None,
        "most tokens of a line, the rest is cut off; the default is what the model can read",
        TEXT,
        within="[3, 2147483647]",
        common=True,
    )
    text_column: str = option("text", "column of text in a .jsonl, .csv, .tsv or .parquet file", TEXT, common=True)
    separator: Separator = option_of(SourceConfig, "separator")
    batch_tokens: int | None = option(
        None,
        "most tokens computed at once, padding included; the default is 4,096 on a CPU, 65,536 on a GPU",
        MACHINE,
        within="[1, 16777216]",
        common=True,
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if self.output is not None and Path(self.output).suffix not in (".npy", ".parquet"):
            yield f"output {self.output}: give a name that ends in .npy or .parquet"


@dataclass(kw_only=True)
class AttentionConfig(Options):
    """
    What is shown of a model's attention. Every field is an option of `d2l-bert attention`.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    output: PathOption = option("attention.png", "new file for the picture", OUTPUT, metavar="FILE.png", common=True)
    layer: int | None = option(
        None, "show this layer only, counted from 1", OUTPUT, within="[1, 2147483647]", common=True
    )
    head: int | None = option(
        None, "show this head only, counted from 1", OUTPUT, within="[1, 2147483647]", common=True
    )
    word: str | None = option(
        None,
        "instead of a picture, print how far apart the vectors of this word are in TEXT and TEXT_B, layer by layer",
        OUTPUT,
        common=True,
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if self.word is not None:
            for name in ("output", "layer", "head"):
                if name in given:
                    yield f"{name} is for the picture, and word prints numbers; leave {name} or word out"
        if Path(self.output).suffix != ".png":
            yield f"output {self.output}: give a name that ends in .png"
