"""Lines of text -> one vector each: written to .npy or Parquet, and compared with the vector of another text."""

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, shortened, with_progress
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.modeling.loading import load_encoder
from d2l_bert.tokenization import sources, tables
from d2l_bert.tokenization.account import account_of
from d2l_bert.tokenization.rules import count_words
from d2l_bert.training.vectors.config import EmbedConfig


logger = logging.getLogger(__name__)


# Lines are sorted by length within a group of this many lines, or of this many characters if that is less: the
# longer the group, the less padding. A group's vectors are in memory: 50 MB with 768 numbers a vector.
GROUP_LINES = 2**14
GROUP_CHARACTERS = 2**22

# `EmbedConfig.batch_tokens` without a value.
BATCH_TOKENS = {"cpu": 4096}
BATCH_TOKENS_OF_A_GPU = 65_536


@dataclass
class Encoded:
    """
    The token ids of some lines.

    Args:
        ids: the ids of all lines, one line after the other, special tokens included (tokens,).
        lengths: the number of tokens of each line (n,).
        cut: how many of the lines had more tokens than the encoder takes.
        unknown: how many characters stand in `[UNK]`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    cut: int
    unknown: int


class Embedder:
    """
    Turns texts into vectors, as sentence-transformers does with the same pooling.

    Args:
        model: an encoder whose output has a `last_hidden_state`.
        pooling: `mean` over all tokens, [CLS] and [SEP] included (Reimers and Gurevych, 2019), or `cls`, the first.
        max_seq_length: most tokens of a text; None for no limit.
        batch_tokens: most tokens computed at once, padding included; a longer text is computed alone.

    Raises:
        UserError: the tokenizer gives the tokens of a single text segments other than 0, or there is none in Rust.
    """

    def __init__(self, model, tokenizer, pooling: str, max_seq_length: int | None, batch_tokens: int):
        self.model, self.tokenizer, self.pooling, self.batch_tokens = model, tokenizer, pooling, batch_tokens
        self.pad, self.size = tokenizer.pad_token_id, model.config.hidden_size
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        self.limit = max_seq_length
        if max_seq_length is not None:
            self.backend.enable_truncation(max_seq_length, direction=tokenizer.truncation_side)

    def encode(self, texts: list[str]) -> Encoded:
        """The token ids of some texts."""
        encodings = self.backend.encode_batch_fast(texts)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        full = np.flatnonzero(lengths == self.limit) if self.limit else ()
        unknown = 0
        if self.tokenizer.unk_token_id in flat:
            unknown = account_of(count_words(texts), self.tokenizer)["unknown_characters"]
        return Encoded(flat, lengths, sum(bool(encodings[line].overflowing) for line in full), unknown)

    @torch.inference_mode()
    def vectors(self, encoded: Encoded) -> np.ndarray:
        """The vectors (n, H) of the encoded texts, float32, in their order."""
        lengths, device = encoded.lengths, self.model.device
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")  # the longest first: out of memory shows at once
        vectors = torch.empty(len(order), self.size, device=device)
        first = 0
        while first < len(order):
            longest = int(lengths[order[first]])
            lines = order[first : first + max(1, self.batch_tokens // max(1, longest))]
            first += len(lines)
            column, sizes = np.arange(longest), lengths[lines, None]
            is_real = column < sizes  # (B, T)
            places = np.minimum(starts[lines, None] + column, len(encoded.ids) - 1)
            ids = torch.from_numpy(np.where(is_real, encoded.ids[places], self.pad)).to(device)
            mask = None if is_real.all() else torch.from_numpy(is_real.astype(np.int64)).to(device)
            vectors[torch.from_numpy(lines).to(device)] = self._pooled(ids, mask)
        return vectors.cpu().numpy()

    def _pooled(self, ids, mask):
        """The vectors (B, H) of a batch of ids (B, T); `mask` (B, T) is 0 at padding, and None without padding."""
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, H)
        if self.pooling == "cls":
            return hidden[:, 0]
        if mask is None:
            return hidden.mean(1)
        weights = mask / mask.sum(1, keepdim=True)
        return (weights[:, None].to(hidden.dtype) @ hidden)[:, 0]


def groups(lines: Iterable[str]) -> Iterator[list[str]]:
    """Groups of consecutive lines; a group ends after `GROUP_LINES` lines, or earlier after `GROUP_CHARACTERS`."""
    group, characters = [], 0
    for line in lines:
        group.append(line)
        characters += len(line)
        if len(group) >= GROUP_LINES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def embedded(embedder: Embedder, lines: Iterable[str]) -> Iterator[tuple[list[str], Encoded, np.ndarray]]:
    """
    Yield groups of lines with their token ids and vectors (n, H), in order.

    A thread reads and tokenizes a group while the model computes the group before.
    """
    ahead = groups(lines)

    def read_next():
        group = next(ahead, None)
        return group and (group, embedder.encode(group))

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read_next)
        while read := waiting.result():
            waiting = thread.submit(read_next)
            yield *read, embedder.vectors(read[1])


STDIN = "-"


def text_lines(file: str, text_column: str = "text", separator: str = "auto") -> Iterator[str]:
    """
    The lines of a file in order, each without the characters at its end; empty lines are empty strings.

    Whether the file is there is checked at once; it is read with the lines. A line ends as in editors
    (`tables.LINE_END`). In a table each row counts as a line; rows without text are empty strings.

    Args:
        file: a text file as in `sources.decoded`, or a table; `-` for text on the standard input. The file may be
            larger than the memory, a line may not.
        text_column: the column of text in a table.
        separator: between the cells of a CSV file, as in `tables.table_rows`.

    Raises:
        UserError: there is no such file, or it is a folder or a `.json` file; while it is read, the file cannot be
            read, is damaged or is not text, or has no such column.
    """
    if file == STDIN:
        return sources.decoded(Path("standard input"), sys.stdin.buffer)
    kind = tables.file_kind(Path(file)) if Path(file).is_file() else None
    if kind in (None, "json"):
        raise UserError(
            f"{file}: no file with a text in each line; give one, or {STDIN} for the standard input, and texts of "
            f"JSON as lines of JSON (.jsonl)"
        )
    if kind == "text":
        return sources.decoded(Path(file))
    return (text or "" for text in tables.text_rows(Path(file), text_column, separator))


# ---------------------------------------------------------------------------------------------------------------------
# What becomes of the vectors


class NumberFile:
    """
    A `.npy` file that grows by appending rows, so that an array need not fit into memory.

    Args:
        row: the shape of a row.
    """

    def __init__(self, path: Path, dtype: str, row: tuple[int, ...]):
        self.dtype, self.row, self.count = np.dtype(dtype), row, 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self):  # NumPy pads the header: a header with a larger count has the same size
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, rows: np.ndarray) -> None:
        """Append rows (n, ...)."""
        self.file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.count += len(rows)

    def close(self) -> None:
        """Write the count into the header."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


@contextlib.contextmanager
def vector_file(output: Path, size: int) -> Iterator[Callable[[list[str], np.ndarray], object]]:
    """Make a new file for vectors of `size` numbers; yields a function that appends texts (n,) and vectors (n, H).

    A `.npy` file has the vectors alone. A Parquet file has the columns `text` and `vector`, in float32.
    """
    with folders.new_file(output) as partial:
        if output.suffix == ".npy":
            with closing(NumberFile(partial, "<f4", (size,))) as file:
                yield lambda _, vectors: file.append(vectors)
            return
        schema = pa.schema([("text", pa.large_string()), ("vector", pa.list_(pa.float32(), size))])
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:

            def append(texts, vectors):
                lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), size)
                writer.write_table(pa.table([pa.array(texts, pa.large_string()), lists], schema=schema))

            yield append


def nearest_lines(
    vector: np.ndarray, texts: list[str], vectors: np.ndarray, first_line: int, top_k: int
) -> list[tuple[float, int, str]]:
    """
    The lines whose vectors have the largest cosine with a vector (H,); of equal cosines, the earlier lines.

    Args:
        texts, vectors: the lines (n,) and their vectors (n, H). Empty lines are passed over.
        first_line: the number of the first of these lines.

    Returns:
        At most `top_k` lines, nearest first: (cosine, number of the line, text).
    """
    cosines = unit(vectors) @ unit(vector)
    likely = [int(index) for index in np.argsort(-cosines, kind="stable") if texts[index].strip()][:top_k]
    return [(float(cosines[index]), first_line + index, texts[index]) for index in likely]


def unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors (..., H), scaled to length 1; a vector of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


@dataclass
class Embedded:
    """
    What `embed` did.

    Args:
        lines: the number of lines.
        size: the numbers in a vector.
        nearest: the nearest lines, nearest first: (cosine, number of the line from 1, text).
    """

    lines: int
    size: int
    nearest: list[tuple[float, int, str]]

    def shown(self, output: str | None) -> str:
        """What was written to a file, and the nearest lines, for people."""
        written = f"{output}: {self.lines:,} vectors of {self.size:,} numbers, one for each line"
        width = max((len(f"{number:,}") for _, number, _ in self.nearest), default=0)
        nearest = (
            f"  {cosine:7.4f}  line {number:>{width},}  {shortened(text, 160)}"
            for cosine, number, text in self.nearest
        )
        return "\n".join([*([written] if output else []), *nearest])


def embed(name: str, file: str, config: EmbedConfig) -> Embedded:
    """
    Compute a vector for each line of a file; write the vectors, or find the lines nearest to a text, or both.

    Line i of the file is row i of the output, also if the line is empty: an empty line has the vector of [CLS] [SEP].
    Lines with more tokens than `max_seq_length` are cut. Cut and empty lines are counted and logged, and the share of
    the characters in `[UNK]`.

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers.
        file: as in `text_lines`.

    Raises:
        UserError: an option, the model, the file or the output is refused; no line has a text. No file is left.
    """
    config.check()
    all_texts = text_lines(file, config.text_column, config.separator)
    output = config.output and Path(config.output).absolute()
    if output:
        folders.check_new_file(output)
    model, tokenizer = load_encoder(name)
    limit = longest_input(model, tokenizer)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if config.max_seq_length is not None and limit is not None and config.max_seq_length > limit:
        raise UserError(f"max_seq_length {config.max_seq_length}: the model reads {limit} tokens at most; lower it")
    batch_tokens = config.batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS_OF_A_GPU)
    embedder = Embedder(model.to(device), tokenizer, config.pooling, config.max_seq_length or limit, batch_tokens)
    nearest, vector = [], None
    if config.nearest is not None:
        query = embedder.encode([config.nearest])
        if query.cut:
            logger.warning(f"nearest: the text is cut off after {embedder.limit:,} tokens")
        vector = embedder.vectors(query)[0]
    lines = cut = empty = unknown = characters = 0
    with vector_file(output, embedder.size) if output else contextlib.nullcontext() as append:
        shown = "standard input" if file == STDIN else file
        parts = embedded(embedder, all_texts)
        for texts, encoded, vectors in with_progress(
            parts, f"embedding {shown}", documents_in=lambda part: len(part[0]), unit="line"
        ):
            if output:
                append(texts, vectors)
            if vector is not None:
                nearest += nearest_lines(vector, texts, vectors, lines + 1, config.top_k)
                nearest = sorted(nearest, key=lambda line: (-line[0], line[1]))[: config.top_k]
            lines += len(texts)
            cut += encoded.cut
            unknown += encoded.unknown
            characters += len("".join("".join(texts).split()))
            empty += sum(not text.strip() for text in texts)
        if lines == empty:
            what = f"{counted(empty, 'empty line')} and no text" if lines else "no line"
            raise UserError(f"{shown}: {what}; give texts")
    if cut:
        logger.warning(f"cut off: what is beyond {embedder.limit:,} tokens, in {cut:,} of {counted(lines, 'line')}")
    if unknown:
        logger.warning(f"{unknown / characters:.1%} of the characters are unknown to the tokenizer: they are [UNK]")
    if empty:
        left_out = ", and is none of the nearest lines" if config.nearest else ""
        logger.warning(f"empty lines: {empty:,}; each has the vector of a text without words{left_out}")
    return Embedded(lines, embedder.size, nearest)
