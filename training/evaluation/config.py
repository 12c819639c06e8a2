"""`EvaluateConfig`: the options of `d2l-bert evaluate`, and their checks."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from d2l_bert.options import BATCHES, MACHINE, OUTPUT, SENTENCES, TEXT, PathOption, option
from d2l_bert.tokenization.config import SourceConfig


# How a sentence is scored, see `pseudo_likelihood`.
Score = Literal["pll", "within_word_l2r"]

# Options of the tables of a text, and of those of `line_scores`.
OPTIONS_OF_TABLES = ("text_column", "separator")


@dataclass(kw_only=True)
class EvaluateConfig(SourceConfig):
    """
    What to evaluate models on, and where to write the figures. Every field is an option of `d2l-bert evaluate`.

    The options of text and masks have the names and the meaning that they have in `pretrain`. By default, rows and
    masks are those of each model's own run.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    corpus: list[str] = option(
        [],
        "text to evaluate on: text files and folders of text files (.txt, .md, .jsonl, .csv, .tsv, .parquet, also "
        "packed as .gz, .zst or .bz2), or python-docs",
        TEXT,
        metavar="PATH",
        common=True,
    )
    dataset_split: str = option("test", "split to read from each dataset", TEXT, metavar="NAME", needs="dataset")
    held_out: bool = option(
        False,
        "evaluate only on the documents that the model's run held out of this text, read with the run's options; "
        "without it the text is read whole",
        TEXT,
    )

    max_seq_length: int | None = option(
        None,
        "most tokens in a row; the default is the model's run's, or 128, or fewer if a model has fewer positions",
        BATCHES,
        within="[8, 2147483647]",
    )
    objective: Literal["auto", "nsp", "sop", "none"] = option(
        "auto",
        "what rows hold: pairs of segments for NSP or SOP, or single segments (none); auto follows each model's head",
        BATCHES,
    )
    pairing: Literal["segments", "sentences"] | None = option(
        None,
        "a segment is several sentences, or one; the default is that of the model's run, or segments",
        BATCHES,
    )
    mlm_probability: float | None = option(
        None,
        "share of tokens to mask and predict; the default is that of the end of the model's run, or 0.15",
        BATCHES,
        within="(0, 1]",
    )
    masking: Literal["token", "whole_word", "span"] | None = option(
        None,
        "predict single tokens, whole words, or spans of words; the default is that of the model's run, or token",
        BATCHES,
    )
    max_eval_pairs: int | None = option(
        None,
        "most pairs (or single segments) to evaluate on; the default is all, or with held_out as many as in the run",
        BATCHES,
        within="[1, 2147483647]",
    )
    pppl_sentences: int = option(
        200,
        "sentences in the sample for pseudo-perplexity, which needs a row for each token; 0 for none",
        BATCHES,
        within="[0, 2147483647]",
    )

    blimp: PathOption | None = option(
        None,
        "BLiMP's minimal pairs: a folder with its JSONL files, or hub for nyu-mll/blimp",
        SENTENCES,
        metavar="DIR|hub",
        common=True,
    )
    score: Score = option(
        "pll",
        "score of a sentence, in BLiMP and in pseudo-perplexity: each token masked alone (Salazar et al., 2020), or "
        "with the rest of its word (Kauf and Ivanova, 2023)",
        SENTENCES,
    )

    line_scores: PathOption | None = option(
        None,
        "print how likely each line of this file is: mean of a token, sum, mean of a word (nats), share of [UNK], "
        "number of the line, line; by one model",
        SENTENCES,
        metavar="FILE",
        common=True,
    )
    line_masks: int = option(
        7,
        "times that a line is read, each time with other tokens masked, every seventh for 7; 0 masks each token "
        "alone, which is exact and slow",
        SENTENCES,
        within="[0, 2147483647]",
        needs="line_scores",
    )

    batch_tokens: int = option(4096, "about the most tokens in a batch", MACHINE, within="[1, 16777216]")

    output: PathOption | None = option(
        None,
        "new file: .json for all figures; .md or .csv for a table of runs, in which those that differ in their seed "
        "alone are one row",
        OUTPUT,
        metavar="FILE",
        common=True,
    )
    update_card: bool = option(
        False,
        "write the figures into metrics.json and the card (README.md) of the models' folders",
        OUTPUT,
        common=True,
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if not self.has_text() and self.blimp is None and self.line_scores is None:
            yield (
                "nothing to evaluate on: give a text with --corpus or --dataset, minimal pairs with --blimp, or lines "
                "with --line_scores; for a fine-tuned model d2l_bert.score or d2l-bert evaluate MODEL --test_file FILE"
            )
        is_more_asked = self.has_text() or self.blimp or self.output or self.update_card or self.score != "pll"
        if self.line_scores and is_more_asked:
            yield (
                "line_scores prints its lines by the score pll, and nothing else is measured beside them; give it "
                "alone"
            )
        if not self.has_text():
            for name in self._options_of_texts():
                if name in given:
                    yield f"{name} is for a text, and none is given; leave it out, or give --corpus"
        yield from super().contradictions(given)
        if self.score != "pll" and self.blimp is None and not self.pppl_sentences:
            yield "score is for blimp and for pseudo-perplexity, and neither is asked for; leave score out"
        if self.output is not None and Path(self.output).suffix.lower() not in (".json", ".md", ".csv"):
            yield f"output {self.output}: give a name that ends in .json, .md or .csv"
        if not self.has_text() and self.line_scores is None:
            for name in OPTIONS_OF_TABLES:
                if name in given:
                    yield f"{name} is for a text or for line_scores, and none is given; leave it out"

    def _options_of_texts(self):
        """The names of the options that say how a text is read, and not which, in the order of the fields."""
        fields = [field for field in dataclasses.fields(self) if field.metadata["group"] in (TEXT, BATCHES)]
        return [field.name for field in fields if field.name not in ("corpus", "dataset", *OPTIONS_OF_TABLES)]

    def has_text(self) -> bool:
        """Whether there is a text to evaluate on."""
        return bool(self.corpus or self.dataset)
