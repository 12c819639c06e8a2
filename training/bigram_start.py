"""Initial weights from the text's bigrams: a model that, untrained, predicts a token from its two neighbours.

A fresh BERT spends the first minutes of a run on learning how frequent each token is, and which ones stand side by
side. Both are counted here in seconds (`data.bigrams`). With x the token before a masked one, and y the token after,

    log p(w | x, y) = log p(w) + PMI(x, w) + PMI(w, y) + a constant,

if x and y are independent given w. The model begins as this formula, with a strength that is measured:

- The columns of the hidden state are shared out: one head's width is for positions, the others are for word vectors.
  Positions are sinusoids, in which a shift by one is a rotation (Vaswani et al., 2017; d2l, section 11.6).
- Half of the heads of the first block attend to the token before and write `words[x] @ form`; the others attend to the
  token after and write `words[y] @ form.T`. Their product with the decoder's row of w is the PMI.
- The decoder's rows are the word vectors, and its bias is log p(w). Meister et al. (2023) start from this bias alone.
- The MLM head's hidden layer is the identity: a bias carries all values through the activation, and LayerNorm takes it
  off. All feed-forward layers, and the attention of the blocks after the first, begin with an output of 0.
- Half of the heads of the second block attend to the tokens two places before and after, of the third to those three
  places away, and so on; the others begin at random.

Nothing is frozen: all weights are trained. To begin with word vectors of word2vec or GloVe as embeddings is older; it
is the first half of this, without the heads that read them.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.modeling.modeling_d2l_bert import states_at
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import BatchMaker, batches
from d2l_bert.training.data.bigrams import WordVectors, count_bigrams, word_vectors
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.data.pairs import tokens_in
from d2l_bert.training.initialize import interleave, rotated


logger = logging.getLogger(__name__)

# Every 20th block of tokens is not counted, but measured on. In a text of fewer than 20 such blocks they are smaller.
LEFT_OUT = 20
BLOCK_TOKENS = 2**14

MOST_MEASURED = 4096  # masked tokens to measure on
MEASURED_AT_ONCE = 512  # of these, whose logits are in memory

# The standard deviation of the word vectors. With twice as much the rates that suit the blocks move the vectors too
# little (benchmarks/LOG.md).
WORD_DEVIATION = 0.1
POSITION_NORM = 2.0  # the norm of a position beside that of a frequent word

# By how much the attention score of the neighbour exceeds the mean score.
SHARPNESS = 28.0

# The sinusoids turn by these angles from one position to the next, from the first to the last.
LARGEST_ANGLE = 2.8
SMALLEST_ANGLE = 0.028

# With this bias nearly all values, of a deviation of 1, pass ReLU and GELU as they are.
PASSING_BIAS = 3.0

# The strengths that are tried: 0 is a model that knows frequencies alone.
STRENGTHS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5)


@torch.no_grad()
def start_from_bigrams(model, run: PretrainConfig, text: PreparedText) -> None:
    """
    Change the weights of a fresh model in place, so that it predicts tokens from their neighbours; log how well.

    The weights follow from the text, the tokenizer, the options that make rows, the architecture and the seed. One
    thread computes them: sums are then in the same order with any number of threads.

    The model stays as it is, with a line that says so, if it has no two heads of at least two columns, or the
    neighbours tell nothing of a token.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM` on the CPU.
        run: the options of the run, with an `objective` that is decided.
        text: its `train` is counted.
    """
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    if config.num_attention_heads < 2 or head_size < 2:
        logger.warning(
            f"attention_init bigrams: left out, as it needs 2 heads of 2 columns, and the model has "
            f"{config.num_attention_heads} of {head_size}"
        )
        return
    begun = time.monotonic()
    with _one_thread():
        generator = torch.Generator().manual_seed(run.seed)
        epoch_pairs = EpochPairs(text.train, run, run.max_seq_length, text.corpus_name)
        bigrams = _counted(epoch_pairs, text.tokenizer, config.vocab_size)
        if not len(bigrams.keys) or not _leaves_some_out(epoch_pairs):
            logger.warning("attention_init bigrams: left out, as the text is too short to measure on a part of it")
            return
        columns = min(config.hidden_size - head_size, config.vocab_size)
        vectors = _meaningful(word_vectors(bigrams, columns, generator), text.tokenizer)
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        arrange(model, vectors, generator)
        found = calibrate(model, _batches_left_out(epoch_pairs, text.tokenizer))
        if found.strength == 0:
            model.load_state_dict(fresh)
            logger.warning("attention_init bigrams: left out, as in this text neighbours tell nothing of a token")
            return
    seconds = time.monotonic() - begun
    logger.info(
        f"attention_init bigrams: {bigrams.as_first.sum():,} in {seconds:.0f} s; MLM loss {found.loss:.3f} on text "
        f"that was left out, by frequencies {found.loss_of_frequencies:.3f}"
    )


def _counted(epoch_pairs, tokenizer, entries):
    """The bigrams of the pairs that are not left out; `entries` is the size of the vocabulary."""
    parts_to_count = (part[~_is_left_out(part, epoch_pairs.corpus)] for part in epoch_pairs.parts_of_one_reading())
    return count_bigrams(epoch_pairs.corpus, parts_to_count, tokenizer.cls_token_id, tokenizer.sep_token_id, entries)


def _meaningful(vectors, tokenizer):
    """The word vectors, with zeros for the tokens that stand for no word."""
    for number in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id):
        if number is not None:
            vectors.words[number] = 0
    return vectors


def _is_left_out(pairs, corpus):
    """Whether the first token of each pair is in a block that the counts leave out (n,)."""
    size = max(1, min(BLOCK_TOKENS, len(corpus.ids) // LEFT_OUT))
    return pairs["a_start"] // size % LEFT_OUT == LEFT_OUT - 1


def _leaves_some_out(epoch_pairs):
    """Whether any pair is in a block that the counts leave out."""
    return any(_is_left_out(part, epoch_pairs.corpus).any() for part in epoch_pairs.parts_of_one_reading())


def _batches_left_out(epoch_pairs, tokenizer) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the model's arguments from the pairs that are left out: about `MOST_MEASURED` tokens to predict."""
    make_batch = BatchMaker(epoch_pairs.corpus, tokenizer, epoch_pairs.run, epoch_pairs.length)
    tokens_wanted = MOST_MEASURED / make_batch.mlm_probability
    for part in epoch_pairs.parts_of_one_reading():
        left_out = part[_is_left_out(part, epoch_pairs.corpus)]
        if not len(left_out):
            continue
        tokens_up_to = np.cumsum(tokens_in(left_out))
        some = left_out[: np.searchsorted(tokens_up_to, tokens_wanted) + 1]
        yield from batches(make_batch, some, epoch_pairs.run.most_tokens())
        tokens_wanted -= tokens_up_to[len(some) - 1]
        if tokens_wanted <= 0:
            return


@contextlib.contextmanager
def _one_thread():
    """In this block PyTorch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------------------
# The weights


def arrange(model, vectors: WordVectors, generator: torch.Generator) -> None:
    """
    Write the word vectors, the positions, the heads and the MLM head into the weights of a fresh model.

    Args:
        model: as in `start_from_bigrams`, with H columns in heads of D.
        vectors: of K columns, at most H - D.
        generator: of the rotations that the vectors and queries get.
    """
    bert = model.bert
    head_size = bert.encoder.layer[0].attention.head_size
    columns = slice(head_size, head_size + vectors.words.shape[1])  # of the word vectors
    vectors = _turned_and_scaled(vectors, generator)
    word_norm = float((vectors.shares @ vectors.words.square().sum(1)).sqrt())
    _write_word_vectors(model, columns, vectors.words)
    _look_at_neighbours(bert, word_norm, generator)
    _write_what_they_tell(bert.encoder.layer[0].attention, columns, vectors)
    for block in bert.encoder.layer:
        block.ffn.dense2.weight.zero_()
    for block in bert.encoder.layer[1:]:
        block.attention.output.weight.zero_()
    _write_mlm_head(model.mlm, vectors.shares)


def _turned_and_scaled(vectors, generator):
    """Word vectors with the same products, of the deviation `WORD_DEVIATION`."""
    turn = random_rotation(vectors.words.shape[1], generator)  # all columns alike: none has the frequent directions
    words = vectors.words @ turn
    form = turn.T @ vectors.form @ turn
    scale = WORD_DEVIATION / words.std()
    return WordVectors(words * scale, form / scale**2, vectors.shares)


def _write_word_vectors(model, columns, words):
    """Write the embeddings, and the rows of the decoder: zeros in the columns of positions, and the word vectors."""
    embeddings = model.bert.embeddings
    tables = [embeddings.word_embeddings.weight]
    if model.mlm.decoder.weight is not tables[0]:  # it is, if the two are tied
        tables.append(model.mlm.decoder.weight)
    for table in tables:
        table[:, : columns.start] = 0
        table[:, columns] = words
        table[:, columns.stop :] *= 0.1  # columns that no vector fills
    embeddings.token_type_embeddings.weight.mul_(0.1)


def _write_mlm_head(mlm, shares):
    """Write the logarithms of the tokens' frequencies as biases, and a hidden layer that changes nothing."""
    log_shares = shares.log()
    mlm.decoder.bias.copy_(log_shares - log_shares.mean())
    mlm.dense.weight.copy_(torch.eye(len(mlm.dense.weight)))
    mlm.dense.bias.fill_(PASSING_BIAS)


def random_rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random orthogonal matrix (size, size)."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def _look_at_neighbours(bert, word_norm, generator):
    """
    Write the position embeddings, and the queries and keys of heads that look at a place beside their own.

    In the first block even heads look at the token before, odd heads at the one after. In the block n after it, a
    quarter of the heads look n places back, and another quarter n places ahead; what they write is left to training.

    Args:
        word_norm: the norm of a word vector, averaged over the text.
    """
    first = bert.encoder.layer[0].attention
    table = bert.embeddings.position_embeddings.weight
    width = first.head_size // 2 * 2  # sines and cosines come in pairs
    waves = torch.logspace(math.log10(LARGEST_ANGLE), math.log10(SMALLEST_ANGLE), width // 2)
    angles = torch.arange(len(table))[:, None] * waves
    norm = POSITION_NORM * word_norm
    table.zero_()
    table[:, :width] = interleave(angles.sin(), angles.cos()) * norm / (width / 2) ** 0.5
    # The norm of the columns of positions in the states of [MASK], which has no word vector, and of another token.
    of_mask = norm
    of_word = norm
    if bert.embeddings.LayerNorm is not None:
        of_mask = len(table[0]) ** 0.5
        of_word = of_mask * norm / math.hypot(norm, word_norm)
    scale = (SHARPNESS / first.scaling / (of_mask * of_word)) ** 0.5
    rows_of_heads = torch.arange(len(table[0])).split(first.head_size)
    far_heads = rows_of_heads[: len(rows_of_heads) // 4 * 2]
    for number, block in enumerate(bert.encoder.layer, 1):
        attention = block.attention
        for head, rows in enumerate(rows_of_heads if number == 1 else far_heads):
            random = torch.randn(first.head_size, width, generator=generator)
            query = torch.linalg.qr(random).Q * scale
            shift = number * waves if head % 2 else -number * waves
            attention.query.weight[rows] = 0
            attention.query.weight[rows, :width] = query
            attention.key.weight[rows] = 0
            attention.key.weight[rows, :width] = rotated(query, shift)


def _write_what_they_tell(attention, columns, vectors):
    """
    Write the values and the output of the first block: a head reads the word vector of a neighbour, and writes its
    product with the form, in the directions that tell most.

    The heads of one side share the directions out; each takes as many as it has columns. Of three heads of two
    columns, head 0 takes the directions 0 and 2, head 2 takes 1 and 3; head 1 is alone on its side and takes 0 and 1.

    Args:
        columns: of the word vectors in a state.
    """
    left, sizes, right = torch.linalg.svd(vectors.form)
    directions = F.normalize(vectors.words, dim=1) @ vectors.form
    typical = (vectors.shares @ directions.square().sum(1)).sqrt()
    factors = (sizes / typical).sqrt()  # half of a size for the value, half for the output
    attention.value.weight.zero_()
    attention.output.weight.zero_()
    rows_of_heads = torch.arange(len(attention.value.weight)).split(attention.head_size)
    even_heads = rows_of_heads[0::2]
    odd_heads = rows_of_heads[1::2]
    # The token before is the first of a bigram, and is multiplied with the form; the one after, with the transpose.
    for heads, read, write in ((even_heads, left, right.T), (odd_heads, right.T, left)):
        for number, rows in enumerate(heads):
            taken = torch.arange(len(factors))[number :: len(heads)][: len(rows)]
            rows = rows[: len(taken)]
            attention.value.weight[rows, columns] = (read[:, taken] * factors[taken]).T
            attention.output.weight[columns, rows] = write[:, taken] * factors[taken]


# ---------------------------------------------------------------------------------------------------------------------
# How much of it is believed


class Calibration(NamedTuple):
    """
    How strongly the neighbours change the frequencies.

    Args:
        strength: the best of `STRENGTHS`.
        loss: the MLM loss with it.
        loss_of_frequencies: that with a strength of 0.
    """

    strength: float
    loss: float
    loss_of_frequencies: float


def calibrate(model, batches: Iterable[dict[str, torch.Tensor]]) -> Calibration:
    """
    Choose by how much the neighbours change the frequencies: the factor of the scores with the lowest MLM loss, which
    becomes the scale of the MLM head's LayerNorm.

    Rare tokens make counts look surer than they are: the best factor is near 1 on a large text, and small on a small
    one. The blocks after the first, which begin with an output of 0, are left out.
    """
    encoder = model.bert.encoder
    blocks = encoder.layer
    kernel = model.config._attn_implementation
    encoder.layer = blocks[:1]
    model.config._attn_implementation = "sdpa"  # run's own may be one for GPUs alone
    model.eval()
    losses = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    count = 0
    for batch in batches:
        is_slot = batch["labels"] != -100
        labels = batch["labels"][is_slot]
        inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        last_states = model.bert(**inputs).last_hidden_state
        states = states_at(last_states, batch["masked_positions"])[is_slot]
        _add_losses(losses, model.mlm, states, labels)
        count += len(labels)
    encoder.layer = blocks
    model.config._attn_implementation = kernel
    model.train()
    best = int(losses.argmin())
    model.mlm.LayerNorm.weight.mul_(STRENGTHS[best])
    return Calibration(STRENGTHS[best], float(losses[best] / count), float(losses[0] / count))


def _add_losses(losses, mlm, states, labels):
    """
    Add the summed MLM loss with each of `STRENGTHS` to `losses` (strengths,).

    Args:
        states: the last ones of the tokens to predict (P, H).
        labels: these tokens (P,).
    """
    transformed = mlm.transform(states).split(MEASURED_AT_ONCE)
    for some, labels_of_some in zip(transformed, labels.split(MEASURED_AT_ONCE), strict=True):
        scores = some @ mlm.decoder.weight.T
        for number, strength in enumerate(STRENGTHS):
            logits = strength * scores + mlm.decoder.bias
            losses[number] += F.cross_entropy(logits, labels_of_some, reduction="sum")
