"""Lines of text -> one vector each: written to .npy or Parquet, and compared with the vectors of other texts."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from d2l_bert import folders, messages
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.modeling import conversion, loading
from d2l_bert.tokenization import coverage, files, long_texts, rules, tables
from d2l_bert.tokenization.in_memory import NAME, is_in_memory
from d2l_bert.tokenization.text_layout import grouped


logger = logging.getLogger(__name__)

# Lines are sorted by length within a group of about this many characters: the longer the group, the less padding. A
# line counts as 256 characters at least, so that a group has no more than 16,384 lines. Its vectors are in memory:
# 50 MB with 768 numbers a vector.
GROUP_CHARACTERS = 2**22

VECTOR = "vector"  # the column of vectors in Parquet

# To see whether this model made the vectors of a file: how many of a group of lines, evenly spread, are computed anew.
COMPARED = 16

# From this many lines on, `evened` compares better than plain cosines do (docs/embed.md).
FEWEST_LINES = 100

# A direction in which vectors differ by less than this share of the largest variance counts as if by this share.
LEAST_VARIANCE = 1e-3


class Neighbour(NamedTuple):
    """
    A line that is near to a text.

    Args:
        cosine: of the two vectors (`evened`).
        line: the number of the line, from 1.
        text: the line.
    """

    cosine: float
    line: int
    text: str


@dataclass(frozen=True)
class EmbedResult:
    """
    The vectors of lines, and what is near to texts.

    Args:
        vectors: float32 (lines, H); None if they were written to `output`, or only compared with texts.
        nearest: for each text of the option `nearest` its nearest lines, nearest first.
        line_count: how many lines there are.
        output: the file with the vectors; None if none was asked for.
        report: what the command prints.
    """

    vectors: np.ndarray | None = field(repr=False)
    nearest: list[list[Neighbour]]
    line_count: int
    output: Path | None
    report: str


def embed(name: str, data: Any, config: EmbedConfig) -> EmbedResult:
    """
    Compute a vector for each line; write the vectors, or find the lines nearest to texts, or both. With neither the
    vectors are returned.

    Line i is row i of the output, also if the line is empty: an empty line has the vector of [CLS] [SEP]. Lines with
    more tokens than `max_seq_length` are cut. Cut and empty lines are counted and logged, and the share of the
    characters in `[UNK]`.

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers.
        data: as in `files.lines_and_cells`. Vectors that it has are taken as they are.

    Raises:
        UserError: an option, the model, the data or the output is refused; no line has a text. No file is left.
    """
    config.check()
    source = source_name(data)
    all_rows = files.lines_and_cells(data, config.text_column, config.separator)
    tables.check_separator(config.separator, [] if is_in_memory(data) else [Path(data)])
    encoder = load_line_encoder(name, config)
    nearest = Nearest(encoder, config.nearest, config.top_k)
    counts = Counts()
    columns = None
    kept = []
    is_kept = not config.output and not config.nearest
    size = encoder.model.config.hidden_size
    output = vector_file(Path(config.output), size) if config.output else contextlib.nullcontext()
    with output as append:
        groups = grouped(all_rows, lambda row: max(len(row[0]), 256), GROUP_CHARACTERS)
        for rows in messages.with_progress(groups, f"embedding {source}", documents_in=len, unit="line"):
            lines = [line for line, _ in rows]
            cells = [of_row for _, of_row in rows]
            if config.output and Path(config.output).suffix != ".npy":
                columns = columns_of(cells, config.output, columns.schema if columns else None)
            encodings = encoder.encode(lines)
            if VECTOR in cells[0]:
                vectors = known_vectors(cells, encodings, encoder, source, counts.lines + 1)
            else:
                vectors = encoder.vectors_of(encodings)
            if config.output:
                append(columns, vectors.numpy())
            if config.nearest:
                nearest.add(lines, vectors, counts.lines + 1)
            if is_kept:
                kept.append(vectors.numpy())
            counts.add(lines, encodings, encoder)
        if not counts.lines:
            raise messages.UserError(f"{source}: no line; give texts")
        if not counts.characters:
            raise messages.UserError(f"{source}: no text but {counts.lines:,} empty lines; give texts")
    if any(encoding.overflowing for encoding in nearest.text_encodings):
        logger.warning(f"nearest: a text is cut off after {encoder.limit:,} tokens")
    for line in counts.losses(encoder.limit):
        logger.warning(line)
    said = nearest.found_lines()
    if config.output:
        said.insert(0, f"{config.output}: {counts.lines:,} vectors of {size:,} numbers, one for each line")
    return EmbedResult(
        vectors=np.concatenate(kept) if is_kept else None,
        nearest=nearest.best,
        line_count=counts.lines,
        output=Path(config.output) if config.output else None,
        report="\n".join(said),
    )


def source_name(data: Any) -> str:
    """What data are called in messages."""
    if is_in_memory(data):
        return NAME
    return "standard input" if data == files.STDIN else str(data)


# ---------------------------------------------------------------------------------------------------------------------
# The steps for a group of lines


@dataclass(frozen=True)
class LineEncoder:
    """
    A model and its tokenizer, for lines.

    Args:
        limit: the most tokens of a line.
        plain: the tokenizer without a limit.
        config: how vectors are made.
    """

    model: object
    tokenizer: object
    limit: int
    plain: object
    config: EmbedConfig

    def encode(self, lines: list[str]) -> list:
        """A `tokenizers.Encoding` of each line, cut to the limit. Of a long line only the part that counts is read."""
        if self.tokenizer.truncation_side == "left":
            read = [long_texts.ending_of(line) for line in lines]
        else:
            read = [long_texts.beginning_of(line, self.limit, self.plain) for line in lines]
        return self.tokenizer.backend_tokenizer.encode_batch_fast(read)

    def vectors_of(self, encodings: list) -> torch.Tensor:
        """As the function of this name."""
        return vectors_of(encodings, self.model, self.tokenizer, self.config)


def load_line_encoder(name: str, config: EmbedConfig) -> LineEncoder:
    """
    Load a model on the accelerator, if there is one.

    Raises:
        UserError: the model is refused, or it reads fewer tokens than `max_seq_length`.
    """
    model, tokenizer = loading.load_encoder(name)
    most = conversion.longest_input(model, tokenizer)
    limit = config.max_seq_length or most
    if limit > most:
        raise messages.UserError(f"max_seq_length {limit}: the model reads {most} tokens at most; lower it")
    model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    plain = long_texts.without_limits(backend)
    backend.enable_truncation(limit, direction=tokenizer.truncation_side)
    return LineEncoder(model, tokenizer, limit, plain, config)


def known_vectors(cells: list[dict], encodings: list, encoder: LineEncoder, source: str, first: int) -> torch.Tensor:
    """
    The vectors (n, H) that the rows of a table have already. Some are compared with those that the model computes.

    Args:
        first: the number of the first row, for messages.

    Raises:
        UserError: a row has no vector of the model's size, or they are of another model or of other options, or are to
            be written again.
    """
    compared = np.unique(np.linspace(0, len(cells) - 1, COMPARED).astype(int)).tolist()
    ours = encoder.vectors_of([encodings[number] for number in compared])
    size = encoder.model.config.hidden_size
    found = [_vector_in(row, size, f"{source}: row {number:,}") for number, row in enumerate(cells, first)]
    vectors = torch.stack(found)
    if encoder.config.output:
        raise messages.UserError(f"{source}: has vectors already; leave output out")
    if not torch.allclose(vectors[compared], ours, 1e-2, 1e-3):
        raise messages.UserError(
            f"{source}: its vectors are of another model, or of other options than these; give those that made them"
        )
    return vectors


class Nearest:
    """
    The lines whose vectors are nearest to those of texts, over groups of lines.

    Args:
        texts: the texts to compare with; there may be none.
        top_k: how many lines to keep for each.
    """

    def __init__(self, encoder: LineEncoder, texts: list[str], top_k: int):
        self.texts = texts
        self.top_k = top_k
        self.text_encodings = encoder.tokenizer.backend_tokenizer.encode_batch(texts)
        self.text_vectors = encoder.vectors_of(self.text_encodings)
        self.even = None  # the function that `evened` makes of the first group's vectors
        self.best: list[list[Neighbour]] = [[] for _ in texts]  # of each text, nearest first

    def add(self, lines: list[str], vectors: torch.Tensor, first: int) -> None:
        """
        Compare a group of lines.

        Args:
            vectors: of the lines (n, H).
            first: the number of the first line.
        """
        has_text = [bool(line.strip()) for line in lines]
        if self.even is None:
            self.even = evened(vectors[has_text])
        vectors = self.even(vectors)
        for place, query in enumerate(self.even(self.text_vectors)):
            cosines = torch.cosine_similarity(vectors, query).tolist()
            numbers = range(first, first + len(lines))
            all_lines = list(map(Neighbour, cosines, numbers, lines))
            new = [each for each, is_text in zip(all_lines, has_text, strict=True) if is_text]
            by_nearness = sorted([*self.best[place], *new], key=lambda each: (-each.cosine, each.line))
            self.best[place] = by_nearness[: self.top_k]

    def found_lines(self) -> list[str]:
        """For people: the nearest lines, with cosine and number, below the text if there are several."""
        said = []
        for text, best in zip(self.texts, self.best, strict=True):
            if len(self.texts) > 1:
                said.append(f"nearest to {messages.shortened(text, 160)}:")
            for cosine, number, line in best:
                said.append(f"  {cosine:7.4f}  line {number:,}  {messages.shortened(line, 160)}")
        return said


@dataclass
class Counts:
    """Over groups of lines: how many there are, what is lost of them, and their characters without white space."""

    lines: int = 0
    empty: int = 0
    characters: int = 0
    unknown: int = 0
    cut: int = 0

    def add(self, lines: list[str], encodings: list, encoder: LineEncoder) -> None:
        """Count a group of lines."""
        self.lines += len(lines)
        for line, encoding in zip(lines, encodings, strict=True):
            is_full = len(encoding) == encoder.limit and bool(encoding.overflowing)
            self.cut += is_full or len(line) > long_texts.MOST_CHARACTERS
            self.empty += not line.strip()
            self.characters += len("".join(line.split()))
        unknown_id = encoder.tokenizer.unk_token_id
        if any(unknown_id in encoding.ids for encoding in encodings):
            of_lines = coverage.coverage_of(rules.count_words(lines), encoder.tokenizer)
            self.unknown += of_lines["unknown_characters"]

    def losses(self, limit: int) -> list[str]:
        """A sentence for each kind of loss."""
        said = []
        if self.cut:
            said.append(f"cut off: what is beyond {limit:,} tokens, in {self.cut:,} of {self.lines:,} lines")
        if self.unknown:
            share = self.unknown / self.characters
            said.append(f"{share:.1%} of the characters are unknown to the tokenizer: they are [UNK]")
        if self.empty:
            said.append(f"empty lines: {self.empty:,}; each has the vector of a text without words")
        return said


# ---------------------------------------------------------------------------------------------------------------------
# Vectors


def evened(vectors: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    A function that makes vectors comparable by cosine: it subtracts the mean, and evens out the directions.

    The vectors of a masked language model all point in similar directions, and differ in few. Each direction in which
    `vectors` (n, H) vary is divided by the square root of its standard deviation: half of whitening (Su et al., 2021),
    which needs fewer lines, and keeps more of what is common to a text. Of fewer than `FEWEST_LINES` nothing is
    learnt; the function then leaves vectors as they are.
    """
    if len(vectors) < FEWEST_LINES:
        return lambda given: given
    mean = vectors.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov((vectors - mean).T))
    scaled = directions / variances.clamp_min(max(1e-12, LEAST_VARIANCE * float(variances[-1]))) ** 0.25
    return lambda given: (given - mean) @ scaled


@torch.inference_mode()
def vectors_of(encodings: list, model, tokenizer, config: EmbedConfig) -> torch.Tensor:
    """
    The vectors of texts, as sentence-transformers computes them with the same pooling.

    Args:
        encodings: a `tokenizers.Encoding` of each text (n), with special tokens.
        model: an encoder whose output has a `last_hidden_state`.
        config: its `pooling`: `mean` over all tokens, special ones included (Reimers and Gurevych, 2019), or `cls`,
            the first; and its `batch_tokens`. A text that is longer than that is computed alone.

    Returns:
        float32 (n, H), on the CPU.

    Raises:
        UserError: a number of them is not finite.
    """
    batch_tokens = config.batch_tokens or (4096 if model.device.type == "cpu" else 65_536)
    lengths = np.array([len(encoding) for encoding in encodings])
    order = np.argsort(-lengths, kind="stable")  # the longest first: out of memory shows at once
    vectors = torch.empty(len(encodings), model.config.hidden_size, device=model.device)
    while len(order):
        count = max(1, batch_tokens // max(1, lengths[order[0]]))
        lines = order[:count]
        order = order[count:]
        rows = {"input_ids": [encodings[line].ids for line in lines]}
        batch = tokenizer.pad(rows, padding_side="right", return_attention_mask=True, return_tensors="pt")
        batch = batch.to(model.device)
        hidden = model(**batch).last_hidden_state  # (B, T, H)
        shares = batch["attention_mask"] / batch["attention_mask"].sum(1, keepdim=True)
        pooled = hidden[:, 0] if config.pooling == "cls" else torch.einsum("bt,bth->bh", shares, hidden)
        vectors[torch.from_numpy(lines).to(model.device)] = pooled
    conversion.check_outputs(vectors, f"{model.name_or_path}: ")
    return vectors.cpu()


def _vector_in(row: dict, size: int, place: str) -> torch.Tensor:
    """The vector (H,) that a row of a table has already; raises `UserError` if it is not `size` finite numbers."""
    with messages.explained(
        f"{place}: column {VECTOR!r} holds no vectors of {size} finite numbers, as those of this model are",
        "rename the column, or compute the vector anew",
        ValueError,
        TypeError,
        OverflowError,
    ):
        vector = torch.tensor(row.get(VECTOR), dtype=torch.float32)
        if vector.shape != (size,) or not vector.isfinite().all():
            raise ValueError(f"{vector.tolist()!s:.50}")
        return vector


def columns_of(cells: Sequence[dict], output: str, schema: pa.Schema | None) -> pa.Table:
    """
    The columns that a Parquet file keeps of rows (n), before their vectors are computed.

    Args:
        output: the file, for messages.
        schema: of the rows before these; None for the first ones.

    Raises:
        UserError: they have no form in Parquet, or are other columns than before.
    """
    with messages.explained(output, "give the rows the same names, or give --output FILE.npy", ValueError):
        tables.check_names(cells)
    names = dict.fromkeys(schema.names if schema else [])  # in the order in which they come
    for row in cells:
        names |= dict.fromkeys(row)
    columns = {}
    for name in names:
        if name != VECTOR:
            columns[name] = [row.get(name) for row in cells]
    with messages.explained(
        f"{output}: a column holds values of several kinds, or begins after the first rows, or has empty objects",
        "make rows alike, or give --output FILE.npy",
        pa.ArrowException,
        OverflowError,
        KeyError,
    ):
        table = pa.table(columns)
        if schema:  # unlike a schema for the conversion, a cast changes no number in silence
            return table.cast(pa.schema([schema.field(name) for name in columns]))
        pq.write_table(table.schema.empty_table(), pa.BufferOutputStream())  # not every kind has a form in Parquet
        return table


@contextlib.contextmanager
def vector_file(output: Path, size: int) -> Iterator[Callable[[pa.Table | None, np.ndarray], object]]:
    """
    Make a new file for vectors of `size` numbers; yields a function that appends the columns of rows, as of
    `columns_of`, and their vectors (n, H).

    A `.npy` file has the vectors alone. A Parquet file has the columns of the rows and `vector`, in float32. Neither
    needs to fit into memory.
    """
    with folders.new_file(output) as partial, contextlib.ExitStack() as stack:
        if output.suffix == ".npy":
            with partial.with_suffix(".numbers").open("wb") as file:  # in a folder that is deleted
                yield lambda _, vectors: file.write(vectors.astype("<f4").data)
            np.save(partial, np.memmap(file.name, "<f4", "r").reshape(-1, size))  # the shape is known now
        else:
            writer = None

            def append(columns, vectors):
                nonlocal writer
                table = columns.append_column(VECTOR, pa.FixedSizeListArray.from_arrays(vectors.ravel(), size))
                writer = writer or stack.enter_context(pq.ParquetWriter(partial, table.schema, compression="zstd"))
                writer.write_table(table)

            yield append
