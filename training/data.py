"""Pairs -> the micro-batches of each step, as tensors that are the model's arguments.

The content of a step is a pure function of (corpus, tokenizer, options of the run, seed, step). It does not depend on
the number of processes, the micro-batch size, the number of loader workers, or the step that a run was resumed from.

Shapes: B rows in a micro-batch, T tokens in a row, P masked positions in a row, S sequences in a packed row. T, P
and S are the largest of all rows in the micro-batch.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from d2l_bert.errors import UserError
from d2l_bert.tokenization.token_store import TokenizedCorpus, find
from d2l_bert.tokenization.wordpiece import CONTINUATION
from d2l_bert.training import masking, packing
from d2l_bert.training.epochs import EpochPairs, Place, Selection
from d2l_bert.training.one_segment import one_segment_accuracy
from d2l_bert.training.packing import ALONE, Sharding
from d2l_bert.training.pairs import NO_LABEL, SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT, Objective


# A fixed seed: all runs on a corpus have the same held-out pairs and masks.
HELD_OUT_SEED = 20_181_011


def words_in(corpus: TokenizedCorpus, pairs: np.ndarray) -> float:
    """The words in both segments of the pairs (n,), summed; each token counts as an equal share of its document's."""
    starts, ends = (np.concatenate([pairs[f"a_{side}"], pairs[f"b_{side}"]]) for side in ("start", "end"))
    is_there = ends > starts  # a single segment has no B
    documents = find(corpus.document_starts, find(corpus.sentence_starts, starts[is_there]))
    borders = np.stack([documents, documents + 1])
    words, tokens = (np.diff(of, axis=0)[0] for of in (corpus.words_before[borders], corpus.first_tokens(borders)))
    return float(((ends - starts)[is_there] * (words / tokens)).sum())


def ordinary_ids(tokenizer) -> tuple[int, int]:
    """
    The ids that random replacements are drawn from: the longest range of ids without a special or an added token.

    In BERT's vocabularies that is every id after the special tokens. RoBERTa's mask token has the last id, and tokens
    that mark places in a text, such as [E1], are added behind the vocabulary.

    Returns:
        The first id of the range, and the id after its last.
    """
    special = np.array([-1, *sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}), len(tokenizer)])
    longest = int(np.diff(special).argmax())
    return int(special[longest]) + 1, int(special[longest + 1])


class BatchMaker:
    """
    Turns pairs into the model's arguments: reads their tokens, adds special tokens, masks, and pads or packs rows.

    `[UNK]` stays in the input and is never predicted: it hides which word it was, so predicting it teaches nothing.

    Args:
        tokens: the corpus of the pairs.
        mlm_probability: the share of tokens to predict.
        max_seq_length: the most tokens in a row.
        masking_kind: whether to mask single tokens, whole words or spans (`masking.mask_tokens`).
        objective: with `none`, batches have no `next_sentence_label`.
        mask_replace_prob, random_replace_prob: what becomes of the tokens to predict (`masking.mask_tokens`).
    """

    def __init__(
        self,
        tokens: TokenizedCorpus,
        tokenizer,
        mlm_probability: float,
        max_seq_length: int,
        masking_kind: masking.Masking = "token",
        objective: Objective = "nsp",
        mask_replace_prob: float = masking.MASK_REPLACE_PROB,
        random_replace_prob: float = masking.RANDOM_REPLACE_PROB,
    ):
        self.tokens = tokens
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.pad, self.mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        self.first_ordinary_id, self.ordinary_end = ordinary_ids(tokenizer)
        self.mlm_probability = mlm_probability
        self.max_seq_length = max_seq_length
        self.masking_kind = masking_kind
        self.replace_probs = (mask_replace_prob, random_replace_prob)
        self.has_labels = objective != "none"
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
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
            pairs: an array of `pairs.PAIR`.
            keys: a key of random numbers for each pair (n,), so that a pair's masks do not depend on other pairs.
            mlm_probability: the share of tokens to predict, if not the one given to the constructor.
            rows: the indices of the pairs in each packed row; None if each pair is a row.

        Returns:
            int64 tensors: `input_ids`, `token_type_ids`, `attention_mask` (B, T), `masked_positions`, `labels` (B, P),
            and with a second loss `next_sentence_label` (B,). Packed rows also have `position_ids`, `sequence_ids`
            (B, T) and `cls_positions` (B, S), and their `next_sentence_label` is (B, S).
        """
        if rows is not None:
            order = list(itertools.chain(*rows))
            pairs, keys = pairs[order], keys[order]
        ids, token_arguments, chosen = self._unpacked(pairs, keys, mlm_probability or self.mlm_probability)
        if rows is None:
            # The row of each pair, and the first column of the pair in the row.
            row, starts = np.arange(len(pairs)), np.zeros(len(pairs), dtype=np.int64)
            row_arguments = {"next_sentence_label": pairs["next_sentence_label"].astype(np.int64)}
        else:
            row, starts, token_arguments, row_arguments = self._packed(pairs, token_arguments, list(map(len, rows)))
        predicted = np.bincount(row, chosen.sum(1)).astype(int)  # the number of masked positions in each row
        pair, column = chosen.nonzero()
        # At least one slot, which holds no label where every token is `[UNK]`: attention fails without a query.
        slots, slot = (len(predicted), max(1, predicted.max())), (row[pair], _concatenated_ranges(predicted))
        slot_arguments = {"masked_positions": np.zeros(slots, dtype=np.int64), "labels": np.full(slots, -100)}
        slot_arguments["masked_positions"][slot], slot_arguments["labels"][slot] = starts[pair] + column, ids[chosen]
        if not self.has_labels:
            row_arguments = {}
        return {
            name: torch.from_numpy(array) for name, array in (token_arguments | slot_arguments | row_arguments).items()
        }

    def empty(self) -> dict[str, torch.Tensor]:
        """A micro-batch without labels, with a loss of 0: for a process that has fewer rows than other processes."""
        ids = torch.tensor([[self.cls, self.sep, self.sep]])
        no_label = torch.full((1, 1), -100)
        batch = {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
            "masked_positions": torch.zeros((1, 1), dtype=torch.int64),
            "labels": no_label,
        }
        return {**batch, "next_sentence_label": no_label[0]} if self.has_labels else batch

    def _unpacked(self, pairs, keys, share):
        """
        One row for each pair: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] if B is empty.

        Returns:
            The ids before masking (n, T); a dict of `input_ids`, `token_type_ids`, `attention_mask` (n, T); whether
            each token is to be predicted (n, T).
        """
        a_starts, a_ends, b_starts, b_ends = (
            pairs[name][:, None] for name in ("a_start", "a_end", "b_start", "b_end")
        )
        b_columns = a_ends - a_starts + 2  # the column of B's first token
        lengths = b_columns + np.where(b_ends > b_starts, b_ends - b_starts + 1, 0)
        column = np.arange(self._width(lengths))
        in_a, real, ends_a, ends = column < b_columns, column < lengths, column == b_columns - 1, column == lengths - 1
        ordinary = real & ~ends_a & ~ends  # the tokens of the text
        ordinary[:, 0] = False
        ids = np.where(real, self.sep, self.pad)
        ids[:, 0] = self.cls
        ids[ordinary] = self.tokens.ids[(column + np.where(in_a, a_starts - 1, b_starts - b_columns))[ordinary]]
        rules = (self.mask, self.first_ordinary_id, self.ordinary_end, share, self.masking_kind, self.is_continuation)
        candidates = ordinary & (ids != self.unknown)
        masked, chosen = masking.mask_tokens(ids, candidates, keys, *rules, *self.replace_probs)
        token_arguments = {"input_ids": masked, "token_type_ids": (real & ~in_a).astype(np.int64)}
        return ids, {**token_arguments, "attention_mask": real.astype(np.int64)}, chosen

    def _packed(self, pairs, token_arguments, in_rows):
        """
        Pack rows of one pair each into rows of several pairs.

        Args:
            token_arguments: the model's arguments from `_unpacked` (n, T).
            in_rows: the number of pairs in each packed row (B,).

        Returns:
            The row of each pair (n,); the pair's first column in the row (n,); the model's arguments for each token
            (B, T); the model's arguments for each sequence (B, S).
        """
        row, sequence = np.repeat(np.arange(len(in_rows)), in_rows), _concatenated_ranges(in_rows)
        real = token_arguments["attention_mask"] == 1
        ends = np.cumsum(lengths := real.sum(1))
        row_ends = ends[np.cumsum(in_rows) - 1]
        starts = ends - lengths - np.append(0, row_ends[:-1])[row]
        pair, column = real.nonzero()
        token_arguments = {name: array[real] for name, array in token_arguments.items()}
        token_arguments |= {"position_ids": column, "sequence_ids": sequence[pair] + 1}
        shape = (len(in_rows), self._width(np.diff(row_ends, prepend=0)))
        packed = {name: np.full(shape, self.pad if name == "input_ids" else 0) for name in token_arguments}
        for name, array in token_arguments.items():
            packed[name][row[pair], starts[pair] + column] = array
        row_arguments = {"cls_positions": np.zeros((len(in_rows), max(in_rows)), dtype=np.int64)}
        row_arguments["next_sentence_label"] = np.full(row_arguments["cls_positions"].shape, -100)
        row_arguments["cls_positions"][row, sequence] = starts
        row_arguments["next_sentence_label"][row, sequence] = pairs["next_sentence_label"]
        return row, starts, packed, row_arguments

    def _width(self, lengths):
        """T, the width of a micro-batch with rows of these lengths."""
        return min(packing.padded(lengths.max()), self.max_seq_length)


def _concatenated_ranges(counts):
    """`np.arange(count)` for each count, concatenated."""
    counts = np.asarray(counts)
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass
class Phase:
    """
    Consecutive steps with the same sequence length and the same number of pairs.

    Args:
        first_step: the first of these steps, counted from 0.
        first_pair: the number of the first pair in `first_step`.
        pairs: the pairs of all epochs with this sequence length.
        global_batch_size: the number of pairs in a step.
        most_tokens: the most tokens in a micro-batch, padding included.
        packing: whether several pairs share a row.
    """

    first_step: int
    first_pair: int
    pairs: EpochPairs
    make_batch: BatchMaker
    global_batch_size: int
    most_tokens: int
    packing: bool = False

    def pairs_before(self, step: int) -> int:
        """The number of the first pair in a step of this phase; also for the first step after the phase."""
        return self.first_pair + (step - self.first_step) * self.global_batch_size


class Step(list):
    """
    The micro-batches that one process computes in a step: a list of dicts of the model's arguments.

    Args:
        place: where the pairs of the next step are (`EpochPairs.position`), as a dict for JSON. A run that resumes
            with the next step need not lay out earlier windows.
        words: the words of the text in the step, over all processes (`TokenizedCorpus.words`).
    """

    def __init__(
        self, micro_batches: Iterable[dict[str, torch.Tensor]] = (), place: dict | None = None, words: float = 0.0
    ):
        super().__init__(micro_batches)
        self.place, self.words = place, words


class PretrainingSteps(torch.utils.data.Dataset):
    """
    The steps of a run: item s is the `Step` that this process computes as step s, counted from 0.

    The pairs of a step become rows, and the rows become micro-batches of similar lengths (`packing.micro_batches`).
    All processes get the same number of micro-batches; a process with too few rows gets empty ones.

    Args:
        phases: the phases of the run, in order.
        share_at: returns the share of tokens to predict in a step; None if all steps have the same share.
        sharding: the process.
    """

    def __init__(
        self, phases: Sequence[Phase], share_at: Callable[[int], float] | None = None, sharding: Sharding = ALONE
    ):
        self.phases, self.share_at, self.sharding = phases, share_at, sharding

    def __getitem__(self, step: int) -> Step:
        phase = self._phase_of(step)
        start, end = (phase.pairs_before(number) for number in (step, step + 1))
        pairs, keys = phase.pairs.slice(start, end)
        share = self.share_at and self.share_at(step)
        micro_batches = batches(phase.make_batch, pairs, keys, phase.most_tokens, phase.packing, share, self.sharding)
        place = {"max_seq_length": phase.make_batch.max_seq_length, **phase.pairs.position(end)}
        return Step(micro_batches, place, words_in(phase.make_batch.tokens, pairs))

    def go_on_from(self, step: int, place: dict | None) -> None:
        """
        Prepare to read steps from `step` on, without counting the pairs of earlier windows.

        Args:
            place: the `Step.place` of the step before. None, or a place of another sequence length, has no effect: the
                pairs are then counted from the start.
        """
        phase = self._phase_of(step)
        if place and place["max_seq_length"] == phase.make_batch.max_seq_length:
            phase.pairs.go_on_from(Place(place["epoch"], place["window"], place["first_pair"]))

    def _phase_of(self, step):
        return next(phase for phase in reversed(self.phases) if step >= phase.first_step)


def batches(
    make_batch: BatchMaker,
    pairs: np.ndarray,
    keys: np.ndarray,
    most_tokens: int,
    packed: bool = False,
    mlm_probability: float | None = None,
    sharding: Sharding = ALONE,
) -> Iterator[dict[str, torch.Tensor]]:
    """
    Yield the micro-batches of some pairs that this process computes.

    The arguments are as in `Phase`, `BatchMaker` and `PretrainingSteps`.
    """
    in_a, in_b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    lengths = in_a + in_b + np.where(in_b > 0, SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT)
    layout = packing.pack(lengths, make_batch.max_seq_length) if packed else [[pair] for pair in range(len(pairs))]
    row_lengths = [int(lengths[row].sum()) for row in layout] if packed else lengths.tolist()
    for micro_batch in packing.micro_batches(row_lengths, most_tokens, sharding):
        if not micro_batch:
            yield make_batch.empty()
            continue
        rows = [layout[row] for row in micro_batch]
        chosen = list(itertools.chain(*rows))
        indices = iter(range(len(chosen)))  # of the pairs in `chosen`
        indices_in_rows = [[next(indices) for _ in row] for row in rows] if packed else None
        yield make_batch(pairs[chosen], keys[chosen], mlm_probability, indices_in_rows)


class HeldOutPairs:
    """
    The micro-batches that this process computes in an evaluation. Each pair is evaluated by one process only.

    The pairs and their masks are the same in every evaluation of every run on a corpus.

    Args:
        selection: the corpus to evaluate on.
        pairing: the arguments of `pairs.lay_out`.
        most_tokens: the most tokens in a micro-batch, padding included.
        most: the most pairs to evaluate on; None for all.
        sharding: as in `PretrainingSteps`.
        name: as in `EpochPairs`.
    """

    def __init__(
        self,
        selection: Selection,
        pairing: dict,
        make_batch: BatchMaker,
        most_tokens: int,
        most: int | None = None,
        sharding: Sharding = ALONE,
        name: str = "the corpus",
    ):
        self.pairs, self.make_batch = EpochPairs(selection, pairing, HELD_OUT_SEED, name), make_batch
        self.most_tokens, self.most, self.sharding = most_tokens, most, sharding

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pairs and the keys of their masks, one window at a time."""
        return self.pairs.parts(0, self.most)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for pairs, keys in self.parts():
            yield from batches(self.make_batch, pairs, keys, self.most_tokens, sharding=self.sharding)

    def labelled(self) -> np.ndarray:
        """The pairs with a label: an array of `pairs.PAIR`."""
        return np.concatenate([pairs[pairs["next_sentence_label"] != NO_LABEL] for pairs, _ in self.parts()])

    def beside(self) -> dict[str, float]:
        """`one_segment_accuracy` of all pairs, by its name in metrics.json, to read a model's accuracy beside it."""
        if not self.make_batch.has_labels:
            return {}
        corpus, entries = self.pairs.selection.corpus, len(self.make_batch.is_continuation)
        accuracy = one_segment_accuracy(corpus, self.pairs.window(0, 0), entries)
        return {f"eval_{self.pairs.pairing['objective']}_one_segment_accuracy": accuracy}

    def one(self) -> dict[str, torch.Tensor]:
        """As `first_with_target`, of the pairs to evaluate on; with a second loss, of those with a label."""
        parts = self.parts()
        if self.make_batch.has_labels:
            has_label = ((pairs["next_sentence_label"] != NO_LABEL, pairs, keys) for pairs, keys in parts)
            parts = ((pairs[labelled], keys[labelled]) for labelled, pairs, keys in has_label)
        return first_with_target(self.make_batch, parts, self.pairs.name)


# Pairs that `first_with_target` masks in one call.
PAIRS_AT_ONCE = 64


def first_with_target(
    make_batch: BatchMaker, parts: Iterable[tuple[np.ndarray, np.ndarray]], name: str
) -> dict[str, torch.Tensor]:
    """
    A batch of the first pair that has a token to predict, alone.

    Args:
        parts: arrays of pairs, and the keys of their masks (`EpochPairs.parts`).
        name: the name of the text.

    Raises:
        UserError: every token of all pairs is `[UNK]`.
    """
    for pairs, keys in parts:
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            some = slice(first, first + PAIRS_AT_ONCE)
            found = (make_batch(pairs[some], keys[some])["labels"] != -100).any(1).nonzero()
            if len(found):
                one = slice(first + int(found[0]), first + int(found[0]) + 1)
                return make_batch(pairs[one], keys[one])
    raise UserError(
        f"{name}: every token is [UNK] to the tokenizer, and [UNK] is never predicted; take a tokenizer that "
        f"was trained on such text"
    )
