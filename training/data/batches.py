"""Pairs -> micro-batches, as tensors that are the model's arguments: special tokens, masks, packing, padding.

Shapes: B rows in a micro-batch, T tokens in a row, P masked positions in a row, S sequences in a packed row. T, P
and S are the largest of all rows in the micro-batch. `run` is the run's `PretrainConfig`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from d2l_bert.messages import UserError
from d2l_bert.tokenization.token_store import TokenizedCorpus, find, ranges
from d2l_bert.tokenization.wordpiece import CONTINUATION
from d2l_bert.training.data import masking
from d2l_bert.training.data.pairs import SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT, tokens_in
from d2l_bert.training.data.rows import ALONE, Ranks, pack, padded, rows_of_micro_batches, rows_without_padding


# Pairs that `first_with_target` masks in one call.
PAIRS_AT_ONCE = 64


def words_in(corpus: TokenizedCorpus, pairs: np.ndarray) -> float:
    """The words in both segments of the pairs (n,), summed; each token counts as an equal share of its document's."""
    starts = np.concatenate([pairs["a_start"], pairs["b_start"]])
    ends = np.concatenate([pairs["a_end"], pairs["b_end"]])
    is_there = ends > starts  # a single segment has no B
    tokens = (ends - starts)[is_there]
    document = find(corpus.document_starts, find(corpus.sentence_starts, starts[is_there]))
    words_of_document = corpus.words_before[document + 1] - corpus.words_before[document]
    tokens_of_document = corpus.first_tokens(document + 1) - corpus.first_tokens(document)
    return float((tokens * (words_of_document / tokens_of_document)).sum())


def ordinary_ids(tokenizer) -> tuple[int, int]:
    """
    The ids that random replacements are drawn from: the longest range of ids without a special or an added token.

    In BERT's vocabularies that is every id after the special tokens. RoBERTa's mask token has the last id, and tokens
    that mark places in a text, such as [E1], are added behind the vocabulary.

    Returns:
        The first id of the range, and the id after its last.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    borders = [-1, *sorted(special), len(tokenizer)]  # the ranges lie between two of these
    longest = int(np.diff(borders).argmax())
    return borders[longest] + 1, borders[longest + 1]


class BatchMaker:
    """
    Turns pairs into the model's arguments: reads their tokens, adds special tokens, masks, and pads or packs rows.

    `[UNK]` stays in the input and is never predicted: it hides which word it was, so predicting it teaches nothing.

    Args:
        corpus: the text that the pairs are of.
        run: its options say what is masked, and whether pairs have labels (`objective`). Without another share, as
            many tokens are predicted as in the last step of the run.
        max_seq_length: the most tokens in a row.
    """

    def __init__(self, corpus: TokenizedCorpus, tokenizer, run, max_seq_length: int):
        self.corpus = corpus
        self.run = run
        self.max_seq_length = max_seq_length
        self.cls = tokenizer.cls_token_id
        self.sep = tokenizer.sep_token_id
        self.pad = tokenizer.pad_token_id
        self.mask = tokenizer.mask_token_id
        self.unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        self.first_ordinary_id, self.end_of_ordinary_ids = ordinary_ids(tokenizer)
        _, self.mlm_probability = run.mlm_probabilities()
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
        The micro-batch of some pairs.

        Each pair is first masked in a row of its own, as its masks must not depend on other pairs. With `rows` given,
        packed rows are then made of these rows.

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
        ids, arguments, is_predicted = self._one_pair_a_row(pairs, mlm_probability or self.mlm_probability)
        if rows is None:  # pair n is row n
            zeros = np.zeros(len(pairs), dtype=np.int64)
            places = Places(row=np.arange(len(pairs)), number=zeros, column=zeros)
            label_arguments = {"next_sentence_label": pairs["next_sentence_label"].copy()}
        else:
            lengths = arguments["attention_mask"].sum(1)
            places = _places_of(lengths, np.array([len(in_row) for in_row in rows]))
            arguments = self._packed(arguments, places, lengths)
            label_arguments = _packed_labels(pairs, places)
        arguments |= _masked_positions(ids, is_predicted, places)
        if self.has_labels:
            arguments |= label_arguments
        return {name: torch.from_numpy(array) for name, array in arguments.items()}

    def empty(self) -> dict[str, torch.Tensor]:
        """A micro-batch without labels, with a loss of 0: for a process that has fewer rows than other processes."""
        arguments = {
            "input_ids": torch.tensor([[self.cls, self.sep, self.sep]]),
            "token_type_ids": torch.zeros((1, 3), dtype=torch.int64),
            "attention_mask": torch.ones((1, 3), dtype=torch.int64),
            "masked_positions": torch.zeros((1, 1), dtype=torch.int64),
            "labels": torch.tensor([[-100]]),
        }
        if self.has_labels:
            arguments["next_sentence_label"] = torch.tensor([-100])
        return arguments

    def _one_pair_a_row(self, pairs, share):
        """
        One row for each pair: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] if B is empty.

        Returns:
            The ids before masking (n, T); a dict of `input_ids`, `token_type_ids`, `attention_mask` (n, T); whether
            each token is to be predicted (n, T).
        """
        ids, is_real, is_of_text, is_second = self._rows_of_ids(pairs)
        is_maskable = is_of_text & (ids != self.unknown)
        masked, is_predicted = masking.mask_tokens(
            ids,
            is_maskable,
            pairs["key"],
            mask_token_id=self.mask,
            first_ordinary_id=self.first_ordinary_id,
            end_of_ordinary_ids=self.end_of_ordinary_ids,
            mlm_probability=share,
            masking=self.run.masking,
            is_continuation=self.is_continuation,
            mask_replace_prob=self.run.mask_replace_prob,
            random_replace_prob=self.run.random_replace_prob,
        )
        arguments = {
            "input_ids": masked,
            "token_type_ids": is_second.astype(np.int64),
            "attention_mask": is_real.astype(np.int64),
        }
        return ids, arguments, is_predicted

    def _rows_of_ids(self, pairs):
        """
        A row for each pair. Where A has 3 tokens and B has 2, `b_column` is 5, and the length of the row is 8:

            columns    0      1 to 3    4      5 and 6    7      8 on
            ids        [CLS]  A         [SEP]  B          [SEP]  [PAD]

        Returns:
            The ids; whether each is no padding; whether it is of the text; and whether it is of B or the [SEP] after
            B: each (n, T).
        """
        pairs = pairs[:, None]
        a_start = pairs["a_start"]
        b_start = pairs["b_start"]
        b_column = 1 + (pairs["a_end"] - a_start) + 1
        b_length = pairs["b_end"] - b_start
        lengths = b_column + np.where(b_length > 0, b_length + 1, 0)
        column = np.arange(self._width(lengths))
        is_real = column < lengths
        is_before_b = column < b_column
        is_sep = (column == b_column - 1) | (column == lengths - 1)
        is_of_text = is_real & ~is_sep
        is_of_text[:, 0] = False
        ids = np.where(is_real, self.sep, self.pad)
        ids[:, 0] = self.cls
        # What is added to a column gives the number of its token in the corpus: A begins in column 1, B in `b_column`.
        offset_of_a = a_start - 1
        offset_of_b = b_start - b_column
        token = column + np.where(is_before_b, offset_of_a, offset_of_b)
        ids_of_text = self.corpus.ids[token[is_of_text]]
        self.corpus.check_ids(ids_of_text, self.vocab_size)
        ids[is_of_text] = ids_of_text
        return ids, is_real, is_of_text, is_real & ~is_before_b

    def _packed(self, arguments, places, lengths):
        """
        Pack rows of one pair each into rows of several pairs.

        Args:
            arguments: the model's arguments from `_one_pair_a_row` (n, T).
            lengths: the tokens in each pair (n,).

        Returns:
            The model's arguments for each token (B, T), with `position_ids` and `sequence_ids`.
        """
        is_real = arguments["attention_mask"] == 1
        pair, column = is_real.nonzero()  # of each token
        values = {name: array[is_real] for name, array in arguments.items()}
        values["position_ids"] = column
        values["sequence_ids"] = places.number[pair] + 1
        shape = (places.row[-1] + 1, self._width(places.column + lengths))
        packed = {}
        for name, of_tokens in values.items():
            padding = self.pad if name == "input_ids" else 0
            packed[name] = np.full(shape, padding)
            packed[name][places.row[pair], places.column[pair] + column] = of_tokens
        return packed

    def _width(self, lengths):
        """T, the width of a micro-batch with rows of these lengths."""
        return min(padded(lengths.max()), self.max_seq_length)


class Places(NamedTuple):
    """Where each pair of a micro-batch stands (n,): its row, its number in the row, and its first column there."""

    row: np.ndarray
    number: np.ndarray
    column: np.ndarray


def _places_of(lengths, pairs_in_row):
    """
    The `Places` of pairs of these lengths (n,), which fill the rows in their order, `pairs_in_row` (B,) each.

    Pairs of 9, 4 and 7 tokens, of which a first row takes two: their rows are 0 0 1, their numbers 0 1 0, and their
    columns 0 9 0.
    """
    row = np.repeat(np.arange(len(pairs_in_row)), pairs_in_row)
    tokens_before = np.cumsum(lengths) - lengths  # before each pair, in all rows: 0 9 13 above
    first_pair_of_row = np.cumsum(pairs_in_row) - pairs_in_row  # 0 2 above
    tokens_before_row = tokens_before[first_pair_of_row]  # 0 13 above
    return Places(row, number=ranges(0, pairs_in_row), column=tokens_before - tokens_before_row[row])


def _packed_labels(pairs, places):
    """The arguments `cls_positions` and `next_sentence_label` (B, S) of packed rows."""
    shape = (places.row[-1] + 1, places.number.max() + 1)
    cls_positions = np.zeros(shape, dtype=np.int64)
    cls_positions[places.row, places.number] = places.column
    labels = np.full(shape, -100)
    labels[places.row, places.number] = pairs["next_sentence_label"]
    return {"cls_positions": cls_positions, "next_sentence_label": labels}


def _masked_positions(ids, is_predicted, places):
    """
    The arguments `masked_positions` and `labels` (B, P).

    Args:
        ids: before masking, one pair a row (n, T).
        is_predicted: whether each is to be predicted (n, T).
        places: of the pairs in the rows of the micro-batch; the rows ascend.
    """
    predicted_in_pair = is_predicted.sum(1)
    predicted_in_row = np.bincount(places.row, weights=predicted_in_pair).astype(int)
    # At least one slot, which holds no label where every token is `[UNK]`: attention fails without a query.
    slots = max(1, predicted_in_row.max())
    shape = (len(predicted_in_row), slots)
    # Of each predicted token: its pair and its column there; its row and its slot there. Pairs, and so their predicted
    # tokens, stand in the order of rows.
    pair, column = is_predicted.nonzero()
    row = places.row[pair]
    slot = ranges(0, predicted_in_row)
    masked_positions = np.zeros(shape, dtype=np.int64)
    masked_positions[row, slot] = places.column[pair] + column
    labels = np.full(shape, -100)
    labels[row, slot] = ids[is_predicted]
    return {"masked_positions": masked_positions, "labels": labels}


def batches(
    make_batch: BatchMaker,
    pairs: np.ndarray,
    most_tokens: int,
    ranks: Ranks = ALONE,
    packed: bool = False,
    mlm_probability: float | None = None,
    drops_padding: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """
    Yield the micro-batches of some pairs that this process computes, of rows of similar lengths.

    All processes get the same number of micro-batches; a process with too few rows gets empty ones.

    Args:
        pairs, mlm_probability: as in `BatchMaker.__call__`.
        most_tokens: the most tokens in a micro-batch, padding included.
        packed: whether several pairs share a row.
        drops_padding: whether the caller takes the padding out of the micro-batches, so that it does not count.
    """
    has_b = pairs["b_end"] > pairs["b_start"]
    lengths = tokens_in(pairs) + np.where(has_b, SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT)
    if packed:
        rows = pack(lengths, make_batch.max_seq_length)
        lengths = [int(lengths[row].sum()) for row in rows]
    cut = rows_without_padding if drops_padding else rows_of_micro_batches
    for row_numbers in cut(lengths, most_tokens, ranks):
        if not row_numbers:
            yield make_batch.empty()
        elif packed:
            yield make_batch(pairs, mlm_probability, [rows[number] for number in row_numbers])
        else:
            yield make_batch(pairs[row_numbers], mlm_probability)


class Counts(NamedTuple):
    """
    What some micro-batches have, counted.

    Args:
        masked_tokens: the tokens to predict.
        examples: as `count_examples` has them.
        tokens: without padding.
        padded_tokens: with padding.
        squared_lengths: the sum of the squared lengths of the sequences.
    """

    masked_tokens: int
    examples: int
    tokens: int
    padded_tokens: int
    squared_lengths: int

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """The counts in the order above, float32 (5,), to be summed over all processes; `Counts(*sums)` names them."""
        return to_device(torch.tensor(self, dtype=torch.float32), device)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """
    A tensor of the CPU on a device, without waiting for what the device computes.

    An Apple GPU is waited for: it would read the CPU's tensor after Python may have given its memory to another one
    (https://github.com/pytorch/pytorch/issues/189690), and the loss would silently be that of other numbers.
    """
    return tensor.to(device, non_blocking=torch.device(device).type != "mps")


def counts_of(micro_batches: Iterable[dict[str, torch.Tensor]]) -> Counts:
    """Counts of these micro-batches, padded or packed, all of which have an `attention_mask`."""
    masked_tokens = examples = tokens = padded_tokens = squared_lengths = 0
    for batch in micro_batches:
        is_real = batch["attention_mask"]
        place = batch.get("position_ids", torch.arange(is_real.shape[1]))  # of each token in its sequence
        masked_tokens += int((batch["labels"] != -100).sum())
        examples += int(count_examples(batch))
        tokens += int(is_real.sum())
        padded_tokens += is_real.numel()
        squared_lengths += int((is_real * (2 * place + 1)).sum())  # n^2 is the sum of the first n odd numbers
    return Counts(masked_tokens, examples, tokens, padded_tokens, squared_lengths)


def count_examples(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """
    The number of pairs in a batch; of sequences if the batch has no `next_sentence_label`.

    Padding rows do not count, nor do rows of sequences without a token to predict.

    Args:
        batch: the model's arguments; its rows (B, T) may be packed.
    """
    if "next_sentence_label" in batch:
        return (batch["next_sentence_label"] != -100).sum()
    has_target = (batch["labels"] != -100).any(1)  # (B,)
    if "sequence_ids" not in batch:
        return has_target.sum()
    sequences_in_row = batch["sequence_ids"].amax(1)  # (B,)
    return (sequences_in_row * has_target).sum()


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
            has_target = (make_batch(some)["labels"] != -100).any(1).numpy()
            if has_target.any():
                return make_batch(some[has_target][:1])
    raise UserError(
        f"{name}: no pair of segments with a token to predict, and [UNK] is never predicted; give more text, "
        f"--objective none, or a tokenizer that was trained on such text"
    )
