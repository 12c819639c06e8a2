"""Documents to batches: token ids in memory-mapped Arrow, an epoch's pairs laid out on disk, micro-batches.

What a global step holds is a pure function of (corpus, tokenizer, run configuration, seed, step): it depends neither
on the number of processes nor on the micro-batch size, the loader's workers or where a run was resumed.

Shapes: B rows in a micro-batch, T its width in tokens, P its predicted slots.
"""

import bisect
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets.arrow_writer import ArrowWriter
from huggingface_hub import constants

from d2l_bert.tokenization.wordpiece import CONTINUATION
from d2l_bert.training import corpus, masking, pairs
from d2l_bert.training.tracking import watched


# The third entry of every random key says what it is for: keys of different lengths could otherwise collide.
_PLAN, _MASKS = 1, 2
_HELD_OUT_SEED = 20_181_011  # the same held-out pairs and masks for every run on a corpus

TOKENIZER_SAMPLE_CHARACTERS = 200_000_000
SMALL_PLAN = 65_536  # bytes
WIDTH_MULTIPLE = 8  # rows are padded to a multiple of this


def cache_folder() -> Path:
    """Where prepared text is kept between runs: `$HF_HOME/d2l_bert`."""
    return Path(constants.HF_HOME) / "d2l_bert"


def fingerprint(*parts) -> str:
    """A short name for whatever `parts` say, from their JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `path` when the block ends well, and nothing if it does not."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"cache {path.parent}: cannot be written ({error.strerror}); set HF_HOME to a folder"
        ) from None
    try:
        yield temporary
        try:
            temporary.rename(path)
        except OSError:  # another process was faster; it wrote the same
            if not path.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# Text and tokens on disk

_TEXT_SCHEMA = pa.schema(
    [("name", pa.string()), ("sentences", pa.list_(pa.string())), ("paragraph_ends", pa.list_(pa.int32()))]
)
_TOKEN_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("sentence_ends", pa.list_(pa.int32())),
        ("paragraph_ends", pa.list_(pa.int32())),
    ]
)


def write_arrow(rows: Iterable[dict], schema: pa.Schema, folder: Path) -> None:
    """Write rows to `folder/data.arrow`, never holding more than a batch of them."""
    features = datasets.Features.from_arrow_schema(schema)
    with ArrowWriter(features=features, path=str(folder / "data.arrow"), writer_batch_size=500) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def read_arrow(path: Path) -> datasets.Dataset:
    """The memory-mapped rows that `write_arrow` left."""
    return datasets.Dataset.from_file(str(path / "data.arrow"))


def prepare_text(source: corpus.Source, language: str, cleaning: corpus.Cleaning, folder: Path) -> Path:
    """The sentences of a source in Arrow, written once for every (source, language, cleaning)."""
    path = folder / f"text-{fingerprint(source.identity, language, vars(cleaning), _code(corpus))}"
    if not path.exists():
        counts = Counter()
        documents = corpus.clean(watched(source.documents, f"reading {source.name}"), cleaning, counts)
        split = corpus.enough_documents(corpus.split_sentences(documents, language))
        with written_whole(path) as partial:
            write_arrow((vars(document) for document in split), _TEXT_SCHEMA, partial)
            (partial / "paragraphs.json").write_text(json.dumps(counts))
    return path


def paragraph_counts(text: Path) -> dict[str, int]:
    """How many paragraphs there were, and how many were cleaned away and changed."""
    return json.loads((text / "paragraphs.json").read_text())


def document_characters(text: Path) -> np.ndarray:
    """Characters in each document that `prepare_text` left (documents,)."""
    sizes = [np.zeros(0, dtype=np.int64)]
    for batch in read_arrow(text).data.table.select(["sentences"]).to_batches():
        sentences = batch.column("sentences")
        ends = np.concatenate(([0], np.cumsum(pc.utf8_length(sentences.values).to_numpy(), dtype=np.int64)))
        sizes.append(np.diff(ends[sentences.offsets.to_numpy()]))
    return np.concatenate(sizes)


def sentence_sample(text: Path, documents: np.ndarray, sizes: np.ndarray) -> Iterator[str]:
    """Sentences to train a tokenizer on: of all `documents`, or of an even sample of them if they are a lot."""
    stride = max(1, -(-int(sizes[documents].sum()) // TOKENIZER_SAMPLE_CHARACTERS))
    rows = read_arrow(text)
    for document in documents[::stride].tolist():
        yield from rows[document]["sentences"]


def prepare_tokens(text: Path, tokenizer, folder: Path) -> Path:
    """Token ids of every sentence in Arrow, written once for every (text, tokenizer)."""
    backend = tokenizer.backend_tokenizer
    path = folder / f"tokens-{fingerprint(text.name, backend.to_str())}"
    if not path.exists():
        # A "[MASK]" that somebody wrote about is text, not a mask.
        as_text = type(backend).from_str(backend.to_str())
        as_text.encode_special_tokens = True
        as_text.no_truncation()
        as_text.no_padding()
        rows = read_arrow(text)
        rows = watched(rows, "tokenizing", total=len(rows))
        with written_whole(path) as partial:
            write_arrow((_tokenize(row, as_text) for row in rows), _TOKEN_SCHEMA, partial)
    return path


def _tokenize(row, backend):
    encodings = backend.encode_batch_fast(row["sentences"], add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
    ends = np.cumsum(lengths, dtype=np.int32)
    # A sentence of characters that the tokenizer drops leaves no token; the paragraphs are counted without it.
    kept = lengths > 0
    kept_before = np.concatenate(([0], np.cumsum(kept)))
    return {
        "name": row["name"],
        "input_ids": np.fromiter((token for sentence in ids for token in sentence), dtype=np.int32),
        "sentence_ends": ends[kept],
        "paragraph_ends": np.unique(kept_before[row["paragraph_ends"]]).astype(np.int32),
    }


def _code(module):
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


class TokenizedCorpus:
    """Documents as views into memory-mapped Arrow: nothing is copied, and nothing is held in memory."""

    def __init__(self, path: Path):
        self.path = path
        self._open()

    def _open(self):
        self.rows = read_arrow(self.path)
        columns = ("input_ids", "sentence_ends", "paragraph_ends")
        table = self.rows.data.table.select(columns)
        self._chunks = [
            {name: (batch.column(name).values.to_numpy(), batch.column(name).offsets.to_numpy()) for name in columns}
            for batch in table.to_batches()
            if batch.num_rows
        ]
        sizes = [len(chunk["input_ids"][1]) - 1 for chunk in self._chunks]
        self._first = np.concatenate(([0], np.cumsum(sizes))).tolist()

    def __getstate__(self):  # a loader's worker opens the file itself
        return {"path": self.path}

    def __setstate__(self, state):
        self.__init__(state["path"])

    def __len__(self):
        return self._first[-1]

    def sizes(self) -> np.ndarray:
        """Tokens in each document (documents,)."""
        return np.concatenate([np.diff(chunk["input_ids"][1]) for chunk in self._chunks])

    def _column(self, name, document):
        chunk = bisect.bisect_right(self._first, document) - 1
        values, offsets = self._chunks[chunk][name]
        row = document - self._first[chunk]
        return values[offsets[row] : offsets[row + 1]]

    def tokens(self, document: int) -> np.ndarray:
        """Token ids of a document (tokens,)."""
        return self._column("input_ids", document)

    def sentence_ends(self, document: int) -> np.ndarray:
        """The token offset at which each sentence ends (sentences,)."""
        return self._column("sentence_ends", document)

    def paragraph_ends(self, document: int) -> np.ndarray:
        """The sentence number at which each paragraph ends (paragraphs,)."""
        return self._column("paragraph_ends", document)


def split_documents(sizes: np.ndarray, fraction: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Which documents train and which are held out; the same for every run on a corpus.

    Args:
        sizes: size of each document, in characters or tokens (documents,).
        fraction: share of the text to hold out.
        most: most text to hold out, in the unit of `sizes`: more would cost time and tell no more.

    Returns:
        Document numbers to train on and to hold out, ascending; at least two of each.

    Raises:
        ValueError: fewer than four documents.
    """
    if len(sizes) < 4:
        raise ValueError(
            f"too little text: {len(sizes)} documents with sentences, and training and held-out part need two each; "
            f"add text, or break one long sentence into several"
        )
    order = np.random.default_rng(_HELD_OUT_SEED).permutation(len(sizes))
    wanted = min(fraction * sizes.sum(), most)
    count = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
    count = min(max(count, 2), len(sizes) - 2)
    return np.sort(order[count:]), np.sort(order[:count])


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class BatchMaker:
    """Pairs to the model's arguments: cut out, join with special tokens, mask, pad."""

    def __init__(
        self,
        tokens: TokenizedCorpus,
        tokenizer,
        mlm_probability: float,
        max_seq_length: int,
        how: masking.Masking = "token",
    ):
        self.tokens = tokens
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.pad, self.mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.first_ordinary_id = max(tokenizer.all_special_ids) + 1
        self.mlm_probability = mlm_probability
        self.max_seq_length = max_seq_length
        self.how = how
        pieces = tokenizer.convert_ids_to_tokens(range(self.vocab_size))
        self.is_continuation = np.array([piece.startswith(CONTINUATION) for piece in pieces])

    def __call__(
        self, rows: np.ndarray, keys: Iterable[tuple], mlm_probability: float | None = None
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            rows: array of `pairs.PAIR` (B,).
            keys: for each row the key of its own random generator, so that its masks do not depend on its neighbours.
            mlm_probability: share to predict, if it is another than usual.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` (B, T), `masked_positions`, `labels` (B, P) and
            `next_sentence_label` (B,), int64.
        """
        share = mlm_probability or self.mlm_probability
        examples = [self._example(row, np.random.default_rng(key), share) for row, key in zip(rows, keys, strict=True)]
        width = max(len(ids) for ids, *_ in examples)
        width = min(-(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self.max_seq_length)
        slots = max(len(positions) for _, _, positions, _ in examples)
        batch = {
            "input_ids": np.full((len(rows), width), self.pad),
            "token_type_ids": np.zeros((len(rows), width), dtype=np.int64),
            "attention_mask": np.zeros((len(rows), width), dtype=np.int64),
            "masked_positions": np.zeros((len(rows), slots), dtype=np.int64),
            "labels": np.full((len(rows), slots), -100),
            "next_sentence_label": rows["next_sentence_label"].astype(np.int64),
        }
        for row, (ids, b_start, positions, labels) in enumerate(examples):
            batch["input_ids"][row, : len(ids)] = ids
            batch["token_type_ids"][row, b_start : len(ids)] = 1
            batch["attention_mask"][row, : len(ids)] = 1
            batch["masked_positions"][row, : len(positions)] = positions
            batch["labels"][row, : len(positions)] = labels
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def empty(self) -> dict[str, torch.Tensor]:
        """A micro-batch that counts for nothing, for a process that has no row left in a step."""
        ids = torch.tensor([[self.cls, self.sep, self.sep]])
        nothing = torch.full((1, 1), -100)
        return {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
            "masked_positions": torch.zeros((1, 1), dtype=torch.int64),
            "labels": nothing,
            "next_sentence_label": nothing[0],
        }

    def _example(self, pair, rng, share):
        a = self.tokens.tokens(pair["a_document"])[pair["a_start"] : pair["a_end"]]
        b = self.tokens.tokens(pair["b_document"])[pair["b_start"] : pair["b_end"]]
        ids = np.concatenate(([self.cls], a, [self.sep], b, [self.sep]))
        b_start = len(a) + 2
        candidates = np.concatenate((np.arange(1, b_start - 1), np.arange(b_start, len(ids) - 1)))
        masked, positions, labels = masking.mask_tokens(
            ids,
            candidates,
            rng,
            self.mask,
            self.first_ordinary_id,
            self.vocab_size,
            share,
            self.how,
            self.is_continuation,
        )
        return masked, b_start, positions, labels


def pair_lengths(rows: np.ndarray) -> np.ndarray:
    """Tokens in each pair (B,), special tokens included."""
    spans = (rows["a_end"] - rows["a_start"]) + (rows["b_end"] - rows["b_start"])
    return spans + pairs.SPECIALS_IN_A_PAIR


class EpochPlans:
    """The pairs of each epoch, laid out beforehand and kept on disk, each epoch in another order with other pairs.

    Plans of a few kilobytes are laid out again when they are needed: a tiny text has thousands of epochs in a run.
    """

    def __init__(self, tokens: TokenizedCorpus, documents: np.ndarray, pairing: dict, seed: int, folder: Path):
        self.tokens, self.documents, self.pairing, self.seed = tokens, documents, pairing, seed
        key = fingerprint(tokens.path.name, documents.tolist(), pairing, seed, _code(pairs))
        self.folder = folder / f"pairs-{key}"
        self._ends = [0]  # pairs up to the end of each epoch laid out so far

    def epoch(self, number: int) -> np.ndarray:
        """The pairs of one epoch: a memory-mapped array of `pairs.PAIR`."""
        path = self.folder / f"epoch-{number:05d}.npy"
        if not path.exists():
            rng = np.random.default_rng((self.seed, _PLAN, number))
            rows = plan_pairs(self.tokens, self.documents, rng=rng, **self.pairing)
            if rows.nbytes < SMALL_PLAN:
                return rows
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
                np.save(file, rows)
            os.replace(file.name, path)
        return np.load(path, mmap_mode="r")

    def slice(self, start: int, stop: int) -> tuple[np.ndarray, list[tuple]]:
        """Pairs `start` to `stop` of all epochs one after the other, and for each the key of its masks."""
        while self._ends[-1] < stop:
            self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends) - 1)))
        rows, keys = [], []
        while start < stop:
            number = bisect.bisect_right(self._ends, start) - 1
            first, last = start - self._ends[number], min(stop, self._ends[number + 1]) - self._ends[number]
            rows.append(self.epoch(number)[first:last])
            keys.extend((self.seed, _MASKS, number, index) for index in range(first, last))
            start += last - first
        return np.concatenate(rows), keys


def plan_pairs(tokens: TokenizedCorpus, documents: np.ndarray, *, pairing: str, rng, **options) -> np.ndarray:
    """Lay out pairs of `documents` in the way that `pairing` (`segments` or `sentences`) names."""
    if pairing == "segments":
        return pairs.segment_pairs(documents, tokens.sentence_ends, rng=rng, **options)
    return pairs.sentence_pairs(documents, tokens.sentence_ends, tokens.paragraph_ends, rng=rng, **options)


@dataclass
class Phase:
    """Steps of one length of pairs, from `first_step` on."""

    first_step: int
    plans: EpochPlans
    make_batch: BatchMaker
    global_batch_size: int
    micro_batch_size: int


class PretrainingSteps(torch.utils.data.Dataset):
    """Item s is what this process computes in global step s: a list of micro-batches.

    The step's pairs are sorted by length and cut into micro-batches, which go to the processes in turn. Every process
    gets equally many; where they run out, one that counts for nothing.

    Args:
        share_at: the share to predict in a step, if it changes from step to step.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        share_at: Callable[[int], float] | None = None,
        world_size: int = 1,
        rank: int = 0,
    ):
        self.phases, self.share_at, self.world_size, self.rank = phases, share_at, world_size, rank

    def __getitem__(self, step: int) -> list[dict[str, torch.Tensor]]:
        phase = next(phase for phase in reversed(self.phases) if step >= phase.first_step)
        start = (step - phase.first_step) * phase.global_batch_size
        rows, keys = phase.plans.slice(start, start + phase.global_batch_size)
        micro_batches = by_length(rows, keys, phase.micro_batch_size)
        rounds = -(-len(micro_batches) // self.world_size)
        share = self.share_at and self.share_at(step)
        mine = [phase.make_batch(*micro_batch, share) for micro_batch in micro_batches[self.rank :: self.world_size]]
        return mine + [phase.make_batch.empty()] * (rounds - len(mine))


def by_length(rows: np.ndarray, keys: list[tuple], size: int) -> list[tuple[np.ndarray, list[tuple]]]:
    """Rows and their keys, longest first, in groups of `size`."""
    order = np.argsort(-pair_lengths(rows), kind="stable")
    return [(rows[part], [keys[i] for i in part]) for part in np.split(order, range(size, len(order), size))]


class HeldOutPairs:
    """Held-out micro-batches of this process: always the same pairs and masks, each once over all processes."""

    def __init__(self, tokens, documents, pairing, make_batch, micro_batch_size, most=None, world_size=1, rank=0):
        rng = np.random.default_rng((_HELD_OUT_SEED, _PLAN, 0))
        self.rows = plan_pairs(tokens, documents, rng=rng, **pairing)[:most]
        self.keys = [(_HELD_OUT_SEED, _MASKS, 0, index) for index in range(len(self.rows))]
        self.make_batch, self.micro_batch_size = make_batch, micro_batch_size
        self.world_size, self.rank = world_size, rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        micro_batches = by_length(self.rows, self.keys, self.micro_batch_size)
        for micro_batch in micro_batches[self.rank :: self.world_size]:
            yield self.make_batch(*micro_batch)

    def one(self, index: int) -> dict[str, torch.Tensor]:
        """One held-out pair as a batch."""
        return self.make_batch(self.rows[index : index + 1], self.keys[index : index + 1])
