"""Pseudo-log-likelihoods of sentences, and of the lines of a file: the sum of each token's log-probability, masked.

`[UNK]` is not scored: it stands for any word that the tokenizer does not know, and is easy to guess.

Salazar et al., 2020 (*Masked Language Model Scoring*), section 2; the score `within_word_l2r` is that of Kauf and
Ivanova, 2023 (*A Better Way to Do Masked Language Model Scoring*).

A masked sentence is a row. Rows of equal length are computed together, so that no row has padding; and the MLM head
runs at one position of each row.

Shapes: S sentences of equal length, T tokens in a sentence with special tokens, R rows in a batch, V vocabulary size.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from d2l_bert.messages import UserError, with_progress
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.tokenization import files, long_texts, tables
from d2l_bert.training.evaluation.config import EvaluateConfig, Score
from d2l_bert.training.evaluation.masked_models import MaskedModel


LINES_AT_ONCE = 2**14


@dataclass
class EncodedSentences:
    """
    Sentences as a model reads them, each different sequence of ids once.

    Args:
        sequence_of: for each sentence that was given, the index of its ids in the lists below (sentences,). Sentences
            that the tokenizer does not tell apart have the same index, and so the same score.
        ids: token ids with special tokens, one array (T,) for each sequence.
        words: for each token the number of its word, -1 if it is not scored, as special tokens and `[UNK]`; as `ids`.
        lengths, scored_tokens: how many tokens each given sentence has, special ones included; and how many of them
            are scored (sentences,).
        read_words, known_words: how many words, separated by white space, the tokens of each given sentence stand in;
            and how many of these words have no `[UNK]` (sentences,).
    """

    sequence_of: np.ndarray
    ids: list[np.ndarray]
    words: list[np.ndarray]
    lengths: np.ndarray
    scored_tokens: np.ndarray
    read_words: np.ndarray
    known_words: np.ndarray


def encode(
    model: MaskedModel, sentences: Sequence[str], score: Score = "pll", whole_words: bool = False
) -> EncodedSentences:
    """
    Encode sentences by the model's own tokenizer, with its special tokens around each.

    Args:
        whole_words: score no token of a word, separated by white space, that has an `[UNK]`.
    """
    sequences = {}  # the index of each different sequence, a pair of its ids and words
    sequence_of = []
    read = []
    for sentence, encoding in zip(sentences, model.backend.encode_batch(list(sentences)), strict=True):
        each = _read_sentence(sentence, encoding, model.tokenizer.unk_token_id, score, whole_words)
        read.append(each)
        sequence_of.append(sequences.setdefault((tuple(encoding.ids), each.words), len(sequences)))
    return EncodedSentences(
        sequence_of=np.array(sequence_of, dtype=np.int64),
        ids=[np.array(ids, dtype=np.int64) for ids, _ in sequences],
        words=[np.array(words, dtype=np.int64) for _, words in sequences],
        lengths=np.array([each.length for each in read]),
        scored_tokens=np.array([each.scored_tokens for each in read]),
        read_words=np.array([each.read_words for each in read]),
        known_words=np.array([each.known_words for each in read]),
    )


class _ReadSentence(NamedTuple):
    """What `EncodedSentences` has of a sentence."""

    words: tuple[int, ...]
    length: int
    scored_tokens: int
    read_words: int
    known_words: int


def _read_sentence(sentence: str, encoding, unknown_id: int | None, score: Score, whole_words: bool) -> _ReadSentence:
    """The words of a sentence's tokens, and what is scored of them."""
    length = len(encoding.ids)
    is_unknown = [number == unknown_id for number in encoding.ids]
    # For each character the number of its word between white space; for each token the words that it covers.
    word_at = np.cumsum([character.isspace() for character in sentence])
    covered = [set(word_at[start:end].tolist()) for start, end in encoding.offsets]
    read = set().union(*covered)
    with_unknown = set().union(*itertools.compress(covered, is_unknown))
    # For `pll` every token is a word of its own, and so is a token outside of all words: their numbers, from `length`
    # on, are those of no word of the tokenizer.
    of_words = encoding.word_ids if score == "within_word_l2r" else [None] * length
    words = []
    scored = 0
    tokens = zip(encoding.special_tokens_mask, is_unknown, covered, of_words, strict=True)
    for position, (is_special, is_unk, covers, word) in enumerate(tokens):
        if is_special or is_unk or (whole_words and covers & with_unknown):
            words.append(-1)
            continue
        scored += 1
        words.append(length + position if word is None else word)
    return _ReadSentence(tuple(words), length, scored, len(read), len(read - with_unknown))


class MaskedRows(NamedTuple):
    """
    A batch of masked sentences of equal length.

    Args:
        ids: the ids of the rows (R, T).
        positions: the positions to predict in each row (R, P).
        labels: the ids of the tokens at these positions, -100 in unused slots (R, P).
        sequences: the index of each row's sequence (R,).
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    sequences: np.ndarray


def masked_batches(
    model: MaskedModel, sentences: EncodedSentences, config: EvaluateConfig, rows_a_line: int = 0
) -> Iterator[MaskedRows]:
    """
    Yield batches of masked sentences of equal length, a row for each token to predict, the shortest sentences first.

    A row masks the token to predict; with `within_word_l2r` also the tokens to its right in the same word.

    Args:
        config: its `score`, and about the most tokens in a batch (`batch_tokens`).
        rows_a_line: the rows of a sentence, at most, if not 0; each then masks and predicts several tokens. For
            example, 2 rows of the sentence `[CLS] a b c d e [SEP]` predict a, c and e in the first, b and d in the
            second.
    """
    lengths = np.array([len(ids) for ids in sentences.ids])
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        ids = np.stack([sentences.ids[number] for number in same])  # (S, T)
        words = np.stack([sentences.words[number] for number in same])  # (S, T)
        is_scored = words >= 0
        most_rows = rows_a_line or length
        # For each token the number of the row of its sentence that predicts it, -1 for none (S, T). In the example:
        # -1 0 1 0 1 0 -1.
        row_of = np.where(is_scored, (is_scored.cumsum(1) - 1) % most_rows, -1)
        # The sentence and the number of each row (rows of all sentences, 2). In the example: (0, 0), (0, 1).
        wanted = np.argwhere(np.arange(length) <= row_of.max(1, keepdims=True))
        slots = -(-length // most_rows)  # the most tokens that a row predicts, rounded up
        # A slot has one logit for each entry of the vocabulary.
        rows_of_logits = LOGITS_AT_ONCE // len(model.tokenizer) // slots
        rows = max(1, min(config.batch_tokens // length, rows_of_logits))
        for first in range(0, len(wanted), rows):
            sentence, number = wanted[first : first + rows].T
            is_predicted = row_of[sentence] == number[:, None]  # (R, T)
            positions = np.argsort(~is_predicted, axis=1, kind="stable")[:, :slots]  # those to predict first (R, P)
            is_masked = is_predicted
            if config.score == "within_word_l2r":
                is_same_word = words[sentence] == np.take_along_axis(words[sentence], positions, 1)
                is_masked = is_predicted | (is_same_word & (np.arange(length) > positions))
            yield MaskedRows(
                ids=np.where(is_masked, model.tokenizer.mask_token_id, ids[sentence]),
                positions=positions,
                labels=np.take_along_axis(np.where(is_predicted, ids[sentence], -100), positions, 1),
                sequences=same[sentence],
            )


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: MaskedModel,
    sentences: EncodedSentences,
    config: EvaluateConfig,
    accelerator: Accelerator,
    label: str,
    rows_a_line: int = 0,
) -> torch.Tensor:
    """
    The pseudo-log-likelihood of each sentence, in nats, computed by all processes, which take the batches in turn.

    Args:
        config, rows_a_line: as in `masked_batches`.
        label: what is computed, for the progress bar and the log.

    Returns:
        float64 on the CPU, one number for each sentence that was given (sentences,). Every process gets all of them.
    """
    device = model.model.device
    scores = torch.zeros(len(sentences.ids), dtype=torch.float64)
    tokens = sum(int((words >= 0).sum()) for words in sentences.words)
    batches = masked_batches(model, sentences, config, rows_a_line)
    batches = with_progress(batches, label, tokens, lambda batch: int((batch.labels != -100).sum()), "token")
    for number, batch in enumerate(batches):
        if number % accelerator.num_processes == accelerator.process_index:
            ids = torch.from_numpy(batch.ids).to(device)
            positions = torch.from_numpy(batch.positions).to(device)
            labels = torch.from_numpy(batch.labels).to(device)
            logits = model(ids, positions).prediction_logits.float()
            likely = logits.gather(2, labels.clamp_min(0)[..., None])[..., 0] - logits.logsumexp(2)  # (R, P)
            of_rows = likely.where(labels != -100, 0).sum(1)
            scores.index_add_(0, torch.from_numpy(batch.sequences), of_rows.double().cpu())
    if accelerator.num_processes > 1:  # each process has a part of each score
        scores = accelerator.reduce(scores.to(accelerator.device), "sum").cpu()
    return scores[torch.from_numpy(sentences.sequence_of)]


class LineScore(NamedTuple):
    """
    How likely a model finds a line. The scores are log-likelihoods in nats; `-inf` of a line without a token to score.

    Args:
        of_token: the mean over the tokens.
        total: the sum.
        of_word: the mean over the words between white space.
        unknown_share: the share of the tokens that are `[UNK]`.
        line: the number of the line, from 1.
        text: the line.
    """

    of_token: float
    total: float
    of_word: float
    unknown_share: float
    line: int
    text: str

    def __str__(self) -> str:
        """The line that the command prints: the numbers and the text, with tabs between."""
        numbers = [f"{number:.4f}" for number in self[:4]]
        text = self.text.translate(dict.fromkeys(b"\t\r\n", " "))
        return "\t".join([*numbers, str(self.line), text])


def line_scores(model: MaskedModel, config: EvaluateConfig, accelerator: Accelerator) -> Iterator[LineScore]:
    """
    The scores of each line or row of the file `config.line_scores`, in the file's order.

    What is beyond the model's positions is cut off.

    Raises:
        UserError: as in `files.lines_and_cells`.
    """
    file = Path(config.line_scores)
    tables.check_separator(config.separator, [file])
    is_table = file.is_file() and tables.file_kind(file) in tables.TABLE_KINDS
    if config.text_column != EvaluateConfig().text_column and not is_table:
        raise UserError("text_column is for tables, and line_scores reads lines; leave it out")
    plain = long_texts.without_limits(model.backend)
    model.backend.enable_truncation(model.most_positions)
    label = f"{model.name} on {config.line_scores}"
    rows = enumerate(files.lines_and_cells(config.line_scores, config.text_column, config.separator), 1)
    # Each line with its number, and without the cells of its row.
    while group := [(number, line) for number, (line, _) in itertools.islice(rows, LINES_AT_ONCE)]:
        encoded = encode(model, [long_texts.beginning_of(line, model.most_positions, plain) for _, line in group])
        scores = pseudo_log_likelihoods(model, encoded, config, accelerator, label, config.line_masks).numpy()
        unknown_in = np.array([(ids == model.tokenizer.unk_token_id).sum() for ids in encoded.ids])
        for place, (number, line) in enumerate(group):
            scored = int(encoded.scored_tokens[place])
            unknown = int(unknown_in[encoded.sequence_of[place]])
            means = [-math.inf] * 3
            if scored:
                score = float(scores[place])
                means = [score / scored, score, score / int(encoded.read_words[place])]
            yield LineScore(*means, unknown / max(1, scored + unknown), number, line)
