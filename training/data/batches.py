"""Pairs -> micro-batches, as tensors that are the model's arguments: special tokens, masks, packing, padding.

Shapes: B rows in a micro-batch, T tokens in a row, P masked positions in a row, S sequences in a packed row. T, P
and S are the largest of all rows in the micro-batch. `run` is the run's `PretrainConfig`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from d2l_bert.messages import UserError
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, ranges
from d2l_bert.tokenization.wordpiece import CONTINUATION
from d2l_bert.training.data import masking
from d2l_bert.training.data.pairs import SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT
from d2l_bert.training.data.rows import ALONE, Ranks, micro_batches, pack, padded


# Pairs that `first_with_target` masks in one call.
PAIRS_AT_ONCE = 64


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
        run: its options say what is masked, and whether pairs have labels (`objective`). Without another share, as
            many tokens are predicted as in the last step of the run.
        max_seq_length: the most tokens in a row.
    """

    def __init__(self, tokens: TokenizedCorpus, tokenizer, run, max_seq_length: int):
        self.tokens, self.run, self.max_seq_length = tokens, run, max_seq_length
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.pad, self.mask = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        self.first_ordinary_id, self.ordinary_end = ordinary_ids(tokenizer)
        self.mlm_probability = run.mlm_probabilities()[1]
        self.has_labels = run.objective != "none"
        self.vocab_size = len(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(range(self.vocab_size))
        self.is_continuation = np.array([piece.startswith(CONTINUATION) for piece in pieces])

    def __call__(
        self,
        pairs: np.ndarray,
        mlm_probability: float | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            pairs: an array of `pairs.PAIR`. A pair's masks follow from its key, and do not depend on other pairs.
            mlm_probability: the share of tokens to predict; None for that of the run's last step.
            rows: the indices of the pairs in each packed row, which need not take all pairs; None if each is a row.

        Returns:
            int64 tensors: `input_ids`, `token_type_ids`, `attention_mask` (B, T), `masked_positions`, `labels` (B, P),
            and with a second loss `next_sentence_label` (B,). Packed rows also have `position_ids`, `sequence_ids`
            (B, T) and `cls_positions` (B, S), and their `next_sentence_label` is (B, S).
        """
        if rows is not None:
            pairs = pairs[list(itertools.chain(*rows))]
        ids, token_arguments, chosen = self._unpacked(pairs, mlm_probability or self.mlm_probability)
        if rows is None:
            # The row of each pair, and the first column of the pair in the row.
            row, starts = np.arange(len(pairs)), np.zeros(len(pairs), dtype=np.int64)
            row_arguments = {"next_sentence_label": pairs["next_sentence_label"].copy()}
        else:
            row, starts, token_arguments, row_arguments = self._packed(pairs, token_arguments, list(map(len, rows)))
        predicted = np.bincount(row, chosen.sum(1)).astype(int)  # the number of masked positions in each row
        pair, column = chosen.nonzero()
        # At least one slot, which holds no label where every token is `[UNK]`: attention fails without a query.
        slots, slot = (len(predicted), max(1, predicted.max())), (row[pair], ranges(0, predicted))
        slot_arguments = {"masked_positions": np.zeros(slots, dtype=np.int64), "labels": np.full(slots, -100)}
        slot_arguments["masked_positions"][slot], slot_arguments["labels"][slot] = starts[pair] + column, ids[chosen]
        if not self.has_labels:
            row_arguments = {}
        return {
            name: torch.from_numpy(array) for name, array in (token_arguments | slot_arguments | row_arguments).items()
        }

    def empty(self) -> dict[str, torch.Tensor]:
        """A micro-batch without labels, with a loss of 0: for a process that has fewer rows than other processes."""
        label = {"next_sentence_label": torch.tensor([-100])} if self.has_labels else {}
        return {
            "input_ids": torch.tensor([[self.cls, self.sep, self.sep]]),
            "token_type_ids": torch.zeros((1, 3), dtype=torch.int64),
            "attention_mask": torch.ones((1, 3), dtype=torch.int64),
            "masked_positions": torch.zeros((1, 1), dtype=torch.int64),
            "labels": torch.tensor([[-100]]),
            **label,
        }

    def _unpacked(self, pairs, share):
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
        of_text = self.tokens.ids[(column + np.where(in_a, a_starts - 1, b_starts - b_columns))[ordinary]]
        self.tokens.check_ids(of_text, self.vocab_size)
        ids[ordinary] = of_text
        rules = (self.mask, self.first_ordinary_id, self.ordinary_end, share, self.run.masking, self.is_continuation)
        shares = (self.run.mask_replace_prob, self.run.random_replace_prob)
        masked, chosen = masking.mask_tokens(ids, ordinary & (ids != self.unknown), pairs["key"], *rules, *shares)
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
        row, sequence = np.repeat(np.arange(len(in_rows)), in_rows), ranges(0, np.array(in_rows))
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
        return min(padded(lengths.max()), self.max_seq_length)


def batches(
    make_batch: BatchMaker,
    pairs: np.ndarray,
    most_tokens: int,
    ranks: Ranks = ALONE,
    packed: bool = False,
    mlm_probability: float | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """
    Yield the micro-batches of some pairs that this process computes, of rows of similar lengths.

    All processes get the same number of micro-batches; a process with too few rows gets empty ones.

    Args:
        pairs, mlm_probability: as in `BatchMaker.__call__`.
        most_tokens: the most tokens in a micro-batch, padding included.
        packed: whether several pairs share a row.
    """
    in_a, in_b = pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]
    lengths = in_a + in_b + np.where(in_b > 0, SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT)
    if packed:
        rows = pack(lengths, make_batch.max_seq_length)
        lengths = [int(lengths[row].sum()) for row in rows]
    for micro_batch in micro_batches(lengths, most_tokens, ranks):
        if not micro_batch:
            yield make_batch.empty()
        elif packed:
            yield make_batch(pairs, mlm_probability, [rows[row] for row in micro_batch])
        else:
            yield make_batch(pairs[micro_batch], mlm_probability)


def counts_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    Counts of a micro-batch, float32 (5,): the tokens to predict, the examples (`count_examples`), the tokens without
    and with padding, and the sum of the squared lengths of the sequences.
    """
    real = batch["attention_mask"]
    place = batch.get("position_ids", torch.arange(real.shape[1]))  # of a token in its sequence
    squared_lengths = (real * (2 * place + 1)).sum()  # n^2 is the sum of the first n odd numbers
    masked_tokens, computed = (batch["labels"] != -100).sum(), torch.tensor(real.numel())
    counts = [masked_tokens, count_examples(batch), real.sum(), computed, squared_lengths]
    return torch.stack([count.float() for count in counts])


def count_examples(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    The number of pairs in a batch; of sequences if the batch has no `next_sentence_label`.

    Padding rows do not count, nor do rows of sequences without a token to predict.

    Args:
        batch: the model's arguments; its rows (B, T) may be packed.
    """
    if "next_sentence_label" in batch:
        return (batch["next_sentence_label"] != -100).sum()
    in_row = batch["sequence_ids"].amax(1) if "sequence_ids" in batch else 1  # (B,)
    return (in_row * (batch["labels"] != -100).any(1)).sum()


def first_with_target(make_batch: BatchMaker, parts: Iterable[np.ndarray], name: str) -> dict[str, torch.Tensor]:
    """
    A batch of the first pair that has a token to predict, alone.

    Args:
        parts: arrays of pairs (`EpochPairs.parts`).
        name: the name of the text.

    Raises:
        UserError: there is no pair, or every token of all pairs is `[UNK]`.
    """
    for pairs in parts:
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            some = pairs[first : first + PAIRS_AT_ONCE]
            found = np.flatnonzero((make_batch(some)["labels"] != -100).any(1))
            if len(found):
                return make_batch(some[found[:1]])
    raise UserError(
        f"{name}: no pair of segments with a token to predict, and [UNK] is never predicted; give more text, "
        f"--objective none, or a tokenizer that was trained on such text"
    )
