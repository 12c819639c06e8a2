"""Tokens to batches: which documents train, an epoch's pairs laid out on disk, micro-batches.

What a global step holds is a pure function of (corpus, tokenizer, run configuration, seed, step): it depends neither
on the number of processes nor on the micro-batch size, the loader's workers or where a run was resumed.

Shapes: B rows in a micro-batch, T its width in tokens, P its predicted slots, S the most sequences in a row.
"""

import bisect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from d2l_bert.errors import UserError, why_unwritable
from d2l_bert.tokenization.arrow import TokenizedCorpus
from d2l_bert.tokenization.cache import ANOTHER_CACHE, code_of, fingerprint, undamaged, waited_for
from d2l_bert.tokenization.split import HELD_OUT_SEED
from d2l_bert.tokenization.wordpiece import CONTINUATION
from d2l_bert.training import masking, packing
from d2l_bert.training.pairs import (
    PAIR,
    SPECIALS_IN_A_PAIR,
    SPECIALS_IN_A_SEGMENT,
    Objective,
    segment_pairs,
    sentence_pairs,
)


# Goes into every checkpoint: one that was made with another order is refused. Raise it by hand whenever the same run
# would train on other pairs, on other masks or in another order.
DATA_ORDER = 2

# The second entry of every random key says what it is for: keys of different lengths could otherwise collide.
_PLAN, _MASKS, _VISITS = 1, 2, 3

SMALL_PLAN = 65_536  # bytes

PAIRS_AT_ONCE = 65_536  # written to the disk


def source_passes(tokens: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """
    How often an epoch visits the documents of each source, for an epoch of as many tokens as there are.

    Args:
        tokens: training tokens of each source (sources,).
        weights: the share of each source in an epoch's tokens, up to a factor (sources,).

    Raises:
        UserError: a weight for a source without text.
    """
    shares = np.asarray(weights) / np.sum(weights)
    if (shares[tokens == 0] > 0).any():
        raise UserError(f"source_weights: source {int(np.flatnonzero((tokens == 0) & (shares > 0))[0]) + 1} is empty")
    return shares * tokens.sum() / np.maximum(tokens, 1)


def epoch_documents(
    documents: np.ndarray, sources: np.ndarray, passes: np.ndarray, seed: int, epoch: int
) -> np.ndarray:
    """
    The documents of an epoch, each as often as it is visited.

    A source is gone through again and again, each time in another order, and an epoch takes the next part of that:
    with 0.5 passes a document comes in every second epoch, with 1.5 once or twice.

    Args:
        documents: document numbers (documents,).
        sources: the source of each of them (documents,).
        passes: for each source how often an epoch visits it (sources,).
    """
    chosen = []
    for source, often in enumerate(passes):
        mine = documents[sources == source]
        first, last = (round(number * often * len(mine)) for number in (epoch, epoch + 1))
        for turn in range(first // max(len(mine), 1), -(-last // max(len(mine), 1))):
            order = np.random.default_rng((seed, _VISITS, source, turn)).permutation(mine)
            chosen.append(order[max(first - turn * len(mine), 0) : last - turn * len(mine)])
    return np.concatenate(chosen)


# ---------------------------------------------------------------------------------------------------------------------
# Plans


def plan_pairs(tokens: TokenizedCorpus, documents: np.ndarray, *, pairing: str, rng, **options) -> Iterator[tuple]:
    """Lay out pairs of `documents` in the way that `pairing` (`segments` or `sentences`) names."""
    if pairing == "segments":
        return segment_pairs(documents, tokens.sentence_ends, rng=rng, **options)
    return sentence_pairs(documents, tokens.sentence_ends, tokens.paragraph_ends, rng=rng, **options)


def pair_lengths(rows: np.ndarray) -> np.ndarray:
    """Tokens in each pair (B,), special tokens included."""
    a, b = rows["a_end"] - rows["a_start"], rows["b_end"] - rows["b_start"]
    return a + b + np.where(b > 0, SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT)


class EpochPlans:
    """The pairs of each epoch, laid out beforehand and kept on disk, each epoch in another order with other pairs.

    Small plans are laid out again when they are needed: a tiny text has thousands of epochs in a run.

    Args:
        documents: document numbers of every epoch; or, with `passes`, those that `epoch_documents` chooses from.
        pairing: the arguments of `plan_pairs`.
        sources, passes: as in `epoch_documents`.
    """

    def __init__(
        self,
        tokens: TokenizedCorpus,
        documents: np.ndarray,
        pairing: dict,
        seed: int,
        folder: Path,
        sources: np.ndarray | None = None,
        passes: np.ndarray | None = None,
    ):
        self.tokens, self.documents, self.pairing, self.seed = tokens, documents, pairing, seed
        self.sources, self.passes = sources, passes
        chosen = [array if array is None else array.tobytes().hex() for array in (documents, sources, passes)]
        code = code_of(sys.modules[segment_pairs.__module__], sys.modules[__name__])
        self.folder = folder / f"pairs-{fingerprint(tokens.path.name, chosen, pairing, seed, code)}"
        self._ends = [0]  # pairs up to the end of each epoch laid out so far
        self._open = {}  # two plans at most, the last that were opened

    def __getstate__(self):  # a loader's worker opens the files itself
        return {**vars(self), "_open": {}}

    def rng(self, number: int) -> np.random.Generator:
        """The source of everything random in an epoch's plan."""
        return np.random.default_rng((self.seed, _PLAN, number))

    def epoch(self, number: int) -> np.ndarray:
        """The pairs of one epoch: an array of `pairs.PAIR`, memory-mapped unless it is small."""
        if number not in self._open:
            self._open = {**dict(list(self._open.items())[-1:]), number: self._plan(number)}
        return self._open[number]

    def _plan(self, number):
        path = self.folder / f"epoch-{number:05d}.pairs"
        try:
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                # Of a loader's workers one lays it out, the others wait.
                with waited_for(self.folder / ".lock", f"laying out epoch {number + 1}"):
                    if not path.exists() and (small := self._lay_out(number, path)) is not None:
                        return small
        except OSError as error:
            raise UserError(f"cache {self.folder}: {why_unwritable(error, ANOTHER_CACHE)}") from None
        with undamaged(self.folder):
            return np.asarray(np.memmap(path, PAIR, mode="r"))

    def _lay_out(self, number, path):
        """Write an epoch's pairs to `path`, whole or not at all; or return them, if they are few."""
        rng, documents = self.rng(number), self.documents
        if self.passes is not None:
            documents = epoch_documents(documents, self.sources, self.passes, self.seed, number)
        rows = plan_pairs(self.tokens, documents, rng=rng, **self.pairing)
        bar = tqdm(rows, f"laying out epoch {number + 1}", unit=" pairs", leave=False, delay=2, disable=None)
        rows = iter(bar)  # one for all parts: tqdm 4.70 ends a generator whose bar is iterated a second time
        partial = path.with_suffix(".part")  # what a killed process left there is written over: the lock is ours
        try:
            with partial.open("wb") as file:
                while len(part := np.fromiter(itertools.islice(rows, PAIRS_AT_ONCE), dtype=PAIR)):
                    file.write(part.tobytes())  # `tofile` does not say why it could not write
            if partial.stat().st_size < SMALL_PLAN:
                rows = np.fromfile(partial, PAIR)
                rng.shuffle(rows)
                return rows
            shuffled = np.memmap(partial, PAIR, mode="r+")
            rng.shuffle(np.asarray(shuffled))
            shuffled.flush()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def slice(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs `start` to `stop` of all epochs one after the other, and for each the key of its masks."""
        while self._ends[-1] < stop:
            self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends) - 1)))
        rows, keys = [], []
        while start < stop:
            number = bisect.bisect_right(self._ends, start) - 1
            first, last = start - self._ends[number], min(stop, self._ends[number + 1]) - self._ends[number]
            rows.append(self.epoch(number)[first:last])
            keys.append(masking.random_keys((self.seed, _MASKS, number), np.arange(first, last)))
            start += last - first
        return np.concatenate(rows), np.concatenate(keys)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class BatchMaker:
    """Pairs to the model's arguments: cut out, join with special tokens, mask, pad or pack."""

    def __init__(
        self,
        tokens: TokenizedCorpus,
        tokenizer,
        mlm_probability: float,
        max_seq_length: int,
        masking_kind: masking.Masking = "token",
        objective: Objective = "nsp",
    ):
        self.tokens = tokens
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.pad, self.mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.first_ordinary_id = max(tokenizer.all_special_ids) + 1
        self.mlm_probability = mlm_probability
        self.max_seq_length = max_seq_length
        self.masking_kind = masking_kind
        self.has_labels = objective != "none"
        pieces = tokenizer.convert_ids_to_tokens(range(self.vocab_size))
        self.is_continuation = np.array([piece.startswith(CONTINUATION) for piece in pieces])

    def __call__(
        self,
        pairs: np.ndarray,
        keys: np.ndarray,
        mlm_probability: float | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            pairs: array of `pairs.PAIR`.
            keys: for each pair the key of its own random numbers, so that its masks do not depend on its neighbours.
            mlm_probability: share to predict, if it is another than usual.
            rows: for packed rows the numbers of the pairs in each, one at least; by default each pair is a row.

        Returns:
            `input_ids`, `token_type_ids`, `attention_mask` (B, T), `masked_positions`, `labels` (B, P) and, unless
            there is no second loss, `next_sentence_label` (B,), int64. Packed rows also have `position_ids`,
            `sequence_ids` (B, T) and `cls_positions` (B, S), and (B, S) labels.
        """
        if rows is not None:
            order = list(itertools.chain(*rows))
            pairs, keys = pairs[order], keys[order]
        ids, of_tokens, chosen = self._laid_out(pairs, keys, mlm_probability or self.mlm_probability)
        if rows is None:
            row, starts = np.arange(len(pairs)), np.zeros(len(pairs), dtype=np.int64)  # of each pair
            of_rows = {"next_sentence_label": pairs["next_sentence_label"].astype(np.int64)}
        else:
            row, starts, of_tokens, of_rows = self._packed(pairs, of_tokens, list(map(len, rows)))
        predicted = np.bincount(row, chosen.sum(1)).astype(int)  # in each row
        pair, column = chosen.nonzero()
        slots, slot = (len(predicted), predicted.max()), (row[pair], _restarting(predicted))
        of_slots = {"masked_positions": np.zeros(slots, dtype=np.int64), "labels": np.full(slots, -100)}
        of_slots["masked_positions"][slot], of_slots["labels"][slot] = starts[pair] + column, ids[chosen]
        if not self.has_labels:
            of_rows = {}
        return {name: torch.from_numpy(array) for name, array in (of_tokens | of_slots | of_rows).items()}

    def empty(self) -> dict[str, torch.Tensor]:
        """A micro-batch that counts for nothing, for a process that has no row left in a step."""
        ids = torch.tensor([[self.cls, self.sep, self.sep]])
        nothing = torch.full((1, 1), -100)
        batch = {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
            "masked_positions": torch.zeros((1, 1), dtype=torch.int64),
            "labels": nothing,
        }
        return {**batch, "next_sentence_label": nothing[0]} if self.has_labels else batch

    def _laid_out(self, pairs, keys, share):
        """Each pair in a row: [CLS] A [SEP] B [SEP], or without B [CLS] A [SEP].

        Returns:
            Ids, not masked (n, T); `input_ids`, `token_type_ids`, `attention_mask` (n, T); what to predict (n, T).
        """
        parts = []
        for segment in "ab":
            first = self.tokens.first_tokens(pairs[f"{segment}_document"])[:, None]
            parts.append((first + pairs[f"{segment}_start"][:, None], first + pairs[f"{segment}_end"][:, None]))
        (a_starts, a_ends), (second, b_ends) = parts
        b_starts = a_ends - a_starts + 2
        lengths = b_starts + np.where(b_ends > second, b_ends - second + 1, 0)
        column = np.arange(self._width(lengths))
        in_a, real, ends_a, ends = column < b_starts, column < lengths, column == b_starts - 1, column == lengths - 1
        ordinary = real & ~ends_a & ~ends
        ordinary[:, 0] = False
        ids = np.where(real, self.sep, self.pad)
        ids[:, 0] = self.cls
        ids[ordinary] = self.tokens.at((column + np.where(in_a, a_starts - 1, second - b_starts))[ordinary])
        rules = (self.mask, self.first_ordinary_id, self.vocab_size, share, self.masking_kind, self.is_continuation)
        masked, chosen = masking.mask_tokens(ids, ordinary, keys, *rules)
        of_tokens = {"input_ids": masked, "token_type_ids": (real & ~in_a).astype(np.int64)}
        return ids, {**of_tokens, "attention_mask": real.astype(np.int64)}, chosen

    def _packed(self, pairs, of_tokens, in_rows):
        """So many pairs in each row: each pair's row and where it starts there (n,), the batch's tokens and rows."""
        row, place = np.repeat(np.arange(len(in_rows)), in_rows), _restarting(in_rows)
        real = of_tokens["attention_mask"] == 1
        ends = np.cumsum(lengths := real.sum(1))
        row_ends = ends[np.cumsum(in_rows) - 1]
        starts = ends - lengths - np.append(0, row_ends[:-1])[row]
        pair, column = real.nonzero()
        of_tokens = {name: array[real] for name, array in of_tokens.items()}
        of_tokens |= {"position_ids": column, "sequence_ids": place[pair] + 1}
        shape = (len(in_rows), self._width(np.diff(row_ends, prepend=0)))
        packed = {name: np.full(shape, self.pad if name == "input_ids" else 0) for name in of_tokens}
        for name, array in of_tokens.items():
            packed[name][row[pair], starts[pair] + column] = array
        of_rows = {"cls_positions": np.zeros((len(in_rows), max(in_rows)), dtype=np.int64)}
        of_rows["next_sentence_label"] = np.full(of_rows["cls_positions"].shape, -100)
        of_rows["cls_positions"][row, place] = starts
        of_rows["next_sentence_label"][row, place] = pairs["next_sentence_label"]
        return row, starts, packed, of_rows

    def _width(self, lengths):
        return min(packing.padded(lengths.max()), self.max_seq_length)


def _restarting(counts):
    """0, 1, 2 and so on for each count, one after the other."""
    counts = np.asarray(counts)
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass
class Phase:
    """Steps of as many pairs of one length, from `first_step` on.

    They take the pairs of `plans` from `first_pair` on, where the phase before of the same length left off.
    `most_tokens` bounds a micro-batch, padding included.
    """

    first_step: int
    first_pair: int
    plans: EpochPlans
    make_batch: BatchMaker
    global_batch_size: int
    most_tokens: int
    packing: bool = False

    def pairs_before(self, step: int) -> int:
        """The pairs of `plans` that the steps before this one, the phase's own or the next one's first, have taken."""
        return self.first_pair + (step - self.first_step) * self.global_batch_size


class PretrainingSteps(torch.utils.data.Dataset):
    """Item s is what this process computes in global step s: a list of micro-batches.

    The step's pairs become rows, one each or packed, and the rows micro-batches by length (`packing.micro_batches`).
    Every process gets equally many; where rows run out, one that counts for nothing.

    Args:
        share_at: the share to predict in a step, if it changes from step to step.
        cutting: `world_size`, `rank` and `cost` of `packing.micro_batches`.
    """

    def __init__(self, phases: Sequence[Phase], share_at: Callable[[int], float] | None = None, **cutting: int):
        self.phases, self.share_at, self.cutting = phases, share_at, cutting

    def __getitem__(self, step: int) -> list[dict[str, torch.Tensor]]:
        phase = next(phase for phase in reversed(self.phases) if step >= phase.first_step)
        start = phase.pairs_before(step)
        rows, keys = phase.plans.slice(start, start + phase.global_batch_size)
        share = self.share_at and self.share_at(step)
        return list(batches(phase.make_batch, rows, keys, phase.most_tokens, phase.packing, share, **self.cutting))


def batches(
    make_batch: BatchMaker,
    pairs: np.ndarray,
    keys: np.ndarray,
    most_tokens: int,
    packed: bool = False,
    mlm_probability: float | None = None,
    **cutting: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """The micro-batches that one process makes of pairs; arguments as in `Phase`, `BatchMaker`, `PretrainingSteps`."""
    lengths = pair_lengths(pairs)
    layout = packing.pack(lengths, make_batch.max_seq_length) if packed else [[pair] for pair in range(len(pairs))]
    row_lengths = [int(lengths[row].sum()) for row in layout] if packed else lengths.tolist()
    for micro_batch in packing.micro_batches(row_lengths, most_tokens, **cutting):
        if not micro_batch:
            yield make_batch.empty()
            continue
        rows = [layout[row] for row in micro_batch]
        chosen = list(itertools.chain(*rows))
        places = iter(range(len(chosen)))
        local = [[next(places) for _ in row] for row in rows] if packed else None
        yield make_batch(pairs[chosen], keys[chosen], mlm_probability, local)


class HeldOutPairs:
    """Held-out micro-batches of this process: always the same pairs and masks, each once over all processes."""

    def __init__(self, tokens, documents, pairing, make_batch, most_tokens, most=None, **cutting):
        rng = np.random.default_rng((HELD_OUT_SEED, _PLAN, 0))
        rows = np.fromiter(plan_pairs(tokens, documents, rng=rng, **pairing), dtype=PAIR)
        rng.shuffle(rows)
        self.rows = rows[:most]
        self.keys = masking.random_keys((HELD_OUT_SEED, _MASKS, 0), np.arange(len(self.rows)))
        self.make_batch, self.most_tokens, self.cutting = make_batch, most_tokens, cutting

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from batches(self.make_batch, self.rows, self.keys, self.most_tokens, **self.cutting)

    def one(self, index: int) -> dict[str, torch.Tensor]:
        """One held-out pair as a batch."""
        return self.make_batch(self.rows[index : index + 1], self.keys[index : index + 1])
