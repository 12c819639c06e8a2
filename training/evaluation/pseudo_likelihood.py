"""Pseudo-log-likelihoods of sentences: the sum of each token's log-probability with the token masked.

`[UNK]` is not scored: it stands for any word that the tokenizer does not know, and is easy to guess.

Salazar et al., 2020 (*Masked Language Model Scoring*), section 2; the score `within_word_l2r` is that of Kauf and
Ivanova, 2023 (*A Better Way to Do Masked Language Model Scoring*).

A masked sentence is a row. Rows of equal length are computed together, so that no row has padding; equal rows are
computed once; and the MLM head runs at one position of each row.

Shapes: S sentences of equal length, T tokens in a sentence with special tokens, R rows, V vocabulary size.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from d2l_bert.messages import progress_bar
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE
from d2l_bert.tokenization.wordpiece import plain_backend, text_backend
from d2l_bert.training.evaluation.config import EvaluateConfig, Score
from d2l_bert.training.evaluation.masked_models import MaskedModel


# The rows of at most this many tokens are made at a time, to bound memory.
TOKENS_AT_ONCE = 2**23


@dataclass
class EncodedSentences:
    """
    Sentences as a model reads them, each different sequence of ids once.

    Args:
        numbers: for each sentence that was given, the index of its ids in the lists below (sentences,). Sentences
            that the tokenizer does not tell apart have the same index, and so the same score.
        ids: token ids with special tokens, one array (T,) for each sequence.
        words: for each token the number of its word, -1 if it is not scored, as special tokens and `[UNK]`; as `ids`.
        known_words: how many words, separated by white space, of each given sentence have no `[UNK]` (sentences,).
    """

    numbers: np.ndarray
    ids: list[np.ndarray]
    words: list[np.ndarray]
    known_words: np.ndarray

    def scored_tokens(self) -> np.ndarray:
        """How many tokens of each given sentence are scored (sentences,)."""
        counts = np.array([int((words >= 0).sum()) for words in self.words], dtype=np.int64)
        return counts[self.numbers]

    def lengths(self) -> np.ndarray:
        """Tokens of each given sentence, special tokens included (sentences,)."""
        return np.array(list(map(len, self.ids)), dtype=np.int64)[self.numbers]


def encode(
    model: MaskedModel, sentences: Sequence[str], score: Score = "pll", whole_words: bool = False
) -> EncodedSentences:
    """
    Encode sentences by the model's own tokenizer, with its special tokens around each.

    Args:
        whole_words: score no token of a word, separated by white space, that has an `[UNK]`.
    """
    known, numbers, ids, words, known_words = {}, [], [], [], []
    backend = plain_backend(text_backend(model.tokenizer))
    for sentence, encoding in zip(sentences, backend.encode_batch(list(sentences)), strict=True):
        length, unknown = len(encoding.ids), [number == model.tokenizer.unk_token_id for number in encoding.ids]
        white_space_word = np.cumsum([character.isspace() for character in sentence])  # its number, at each character
        covered = [set(white_space_word[start:end].tolist()) for start, end in encoding.offsets]  # by each token
        with_unknown = set().union(*itertools.compress(covered, unknown))
        known_words.append(len(set().union(*covered) - with_unknown))
        is_left_out = [
            bool(special or is_unknown or (whole_words and covers & with_unknown))
            for special, is_unknown, covers in zip(encoding.special_tokens_mask, unknown, covered, strict=True)
        ]
        # For `pll` every token is a word; so is a token outside of all words, numbered after the others.
        of_words = encoding.word_ids if score == "within_word_l2r" else [None] * length
        its_words = tuple(
            -1 if left_out else length + position if word is None else word
            for position, (left_out, word) in enumerate(zip(is_left_out, of_words, strict=True))
        )
        key = (tuple(encoding.ids), its_words)
        if key not in known:
            known[key] = len(ids)
            ids.append(np.array(encoding.ids, dtype=np.int64))
            words.append(np.array(its_words, dtype=np.int64))
        numbers.append(known[key])
    return EncodedSentences(np.array(numbers, dtype=np.int64), ids, words, np.array(known_words, dtype=np.int64))


@dataclass
class Rows:
    """
    Masked sentences of equal length.

    Args:
        ids: token ids with masks (R, T), each row once.
        positions: the position to predict in each row (R,).
        row, targets, sequences: for each log-probability that is wanted: its row, ascending, the id of its token, and
            the index of its sequence (n,). A row is shared by sentences that differ in the predicted token alone.
    """

    ids: np.ndarray
    positions: np.ndarray
    row: np.ndarray
    targets: np.ndarray
    sequences: np.ndarray


def masked_rows(sentences: EncodedSentences, mask_token_id: int, score: Score) -> Iterator[Rows]:
    """
    Yield the rows of all sentences, the shortest sentences first.

    A row masks the token to predict; with `within_word_l2r` also the tokens to its right in the same word.
    """
    lengths = np.array(list(map(len, sentences.ids)), dtype=np.int64)
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        at_once = max(1, TOKENS_AT_ONCE // length**2)
        for first in range(0, len(same), at_once):
            sequences = same[first : first + at_once]
            ids, words = (np.stack([of[i] for i in sequences]) for of in (sentences.ids, sentences.words))
            sentence, position = (words >= 0).nonzero()
            if not len(sentence):
                continue
            columns = np.arange(length)
            is_masked = columns == position[:, None]
            if score == "within_word_l2r":
                same_word = words[sentence] == words[sentence, position][:, None]
                is_masked |= same_word & (columns > position[:, None])
            rows = np.where(is_masked, mask_token_id, ids[sentence])
            # Row and position as one sequence of bytes each: NumPy finds equal ones by sorting.
            keys = np.ascontiguousarray(np.column_stack([position, rows]).astype(np.int32))
            keys = keys.view(f"V{keys.dtype.itemsize * keys.shape[1]}").ravel()
            _, firsts, row = np.unique(keys, return_index=True, return_inverse=True)
            order = np.argsort(row, kind="stable")
            yield Rows(
                rows[firsts],
                position[firsts],
                row[order],
                ids[sentence, position][order],
                sequences[sentence][order],
            )


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: MaskedModel,
    sentences: EncodedSentences,
    score: Score = "pll",
    batch_tokens: int = 4096,
    world_size: int = 1,
    rank: int = 0,
    done: Callable[[int], object] = lambda tokens: None,
) -> torch.Tensor:
    """
    The pseudo-log-likelihood of each sentence, in nats.

    Args:
        batch_tokens: about the most tokens in a batch.
        world_size, rank: the batches are dealt out to the processes in turn. The scores are to be added up over them.
        done: called after each batch, of any process, with the number of log-probabilities in it.

    Returns:
        float64, one number for each sentence that was given (sentences,): the parts of this process.
    """
    device = model.model.device
    scores = torch.zeros(len(sentences.ids), dtype=torch.float64)
    number, entries = itertools.count(), len(model.tokenizer)  # a row has one logit for each entry
    for rows in masked_rows(sentences, model.tokenizer.mask_token_id, score):
        at_once = max(1, min(batch_tokens // rows.ids.shape[1], LOGITS_AT_ONCE // entries))
        for first in range(0, len(rows.ids), at_once):
            start, end = np.searchsorted(rows.row, (first, first + at_once))
            if next(number) % world_size == rank:
                batch = slice(first, first + at_once)
                ids, positions = (torch.from_numpy(of[batch]).to(device) for of in (rows.ids, rows.positions))
                row, targets = (torch.from_numpy(of[start:end]).to(device) for of in (rows.row - first, rows.targets))
                logits = model(ids, positions[:, None]).prediction_logits[:, 0].float()  # (R, V)
                log_probabilities = logits[row, targets] - logits.logsumexp(1)[row]
                sequences = torch.from_numpy(rows.sequences[start:end])
                scores.index_add_(0, sequences, log_probabilities.double().cpu())
            done(int(end - start))
    return scores[torch.from_numpy(sentences.numbers)]


def scores_of_all(
    model: MaskedModel, sentences: EncodedSentences, config: EvaluateConfig, accelerator: Accelerator, title: str
) -> torch.Tensor:
    """
    The pseudo-log-likelihood of each sentence, computed by all processes, with a progress bar of this title.

    Returns:
        As `pseudo_log_likelihoods`, on the CPU; every process gets all scores.
    """
    with progress_bar(title, int(sentences.scored_tokens().sum()), "tokens") as bar:
        processes = accelerator.num_processes
        scores = pseudo_log_likelihoods(
            model, sentences, config.score, config.batch_tokens, processes, accelerator.process_index, bar.update
        )
    if processes == 1:
        return scores
    return accelerator.reduce(scores.to(accelerator.device), "sum").cpu()  # each score is computed by one process
