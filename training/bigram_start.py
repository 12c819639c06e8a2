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

Nothing is frozen: all weights are trained. To begin with word vectors of word2vec or GloVe as embeddings is older; it
is the first half of this, without the heads that read them.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert.modeling.modeling_d2l_bert import states_at
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import BatchMaker, batches
from d2l_bert.training.data.bigrams import WordVectors, count_bigrams, word_vectors
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.initialize import interleave, rotated


logger = logging.getLogger(__name__)

# The counts leave out every twentieth block of tokens, to measure on. Of a text with fewer than 20 blocks of this
# size, the blocks are smaller.
LEFT_OUT, BLOCK_TOKENS = 20, 2**14

# Masked tokens to measure on.
MOST_MEASURED, MEASURED_AT_ONCE = 4096, 512

# The standard deviation of the word vectors, and the norm of a position beside that of a frequent word.
WORD_DEVIATION, POSITION_NORM = 0.2, 2.0

# By how much the attention score of the neighbour exceeds the mean score.
SHARPNESS = 28.0

# The sinusoids turn by these angles from one position to the next, from the first to the last.
LARGEST_ANGLE, SMALLEST_ANGLE = 2.8, 0.028

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
    config, tokenizer = model.config, text.tokenizer
    head_size = config.hidden_size // config.num_attention_heads
    if config.num_attention_heads < 2 or head_size < 2:
        logger.warning(
            f"attention_init bigrams: left out, as each neighbour needs a head of at least 2 columns, and the model "
            f"has {config.num_attention_heads} of {head_size}"
        )
        return
    begun = time.monotonic()
    with _one_thread():
        pairs = EpochPairs(text.train, run, run.max_seq_length, text.corpus_name)
        generator = torch.Generator().manual_seed(run.seed)
        counted = (part[~_is_left_out(part, text.train)] for part in pairs.parts(0))
        special = tokenizer.cls_token_id, tokenizer.sep_token_id
        bigrams = count_bigrams(text.train, counted, *special, config.vocab_size)
        if not len(bigrams.keys):
            logger.warning("attention_init bigrams: left out, as the text is too short to measure on a part of it")
            return
        vectors = word_vectors(bigrams, min(config.hidden_size - head_size, config.vocab_size), generator)
        meaningless = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id]
        vectors.words[[number for number in meaningless if number is not None]] = 0
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        arrange(model, vectors, generator)
        left_out = (part[_is_left_out(part, text.train)] for part in pairs.parts(0))
        strength, loss, of_frequencies = calibrate(model, _measured(text, run, left_out))
        if strength == 0:
            model.load_state_dict(fresh)
            logger.warning("attention_init bigrams: left out, as in this text neighbours tell nothing of a token")
            return
    seconds = time.monotonic() - begun
    logger.info(
        f"attention_init bigrams: {bigrams.as_first.sum():,} bigrams in {seconds:.0f} s; on text that was left out, "
        f"an MLM loss of {loss:.3f} at strength {strength:g}, {of_frequencies:.3f} by frequencies"
    )


def _is_left_out(pairs, corpus):
    """Whether the first token of each pair is in a block that the counts leave out (n,)."""
    size = max(1, min(BLOCK_TOKENS, len(corpus.ids) // LEFT_OUT))
    return pairs["a_start"] // size % LEFT_OUT == LEFT_OUT - 1


def _measured(text, run, parts) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the model's arguments, with about `MOST_MEASURED` tokens to predict."""
    make_batch = BatchMaker(text.train, text.tokenizer, run, run.max_seq_length)
    remaining = MOST_MEASURED / make_batch.mlm_probability  # tokens
    for part in parts:
        tokens_up_to = np.cumsum(part["a_end"] - part["a_start"] + part["b_end"] - part["b_start"])
        some = part[: np.searchsorted(tokens_up_to, remaining) + 1]
        yield from batches(make_batch, some, run.most_tokens())
        remaining -= tokens_up_to[len(some) - 1] if len(some) else 0
        if remaining <= 0:
            return


@contextlib.contextmanager
def _one_thread():
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
    bert, mlm, head_size = model.bert, model.mlm, model.bert.encoder.layer[0].attention.head_size
    columns = slice(head_size, head_size + vectors.words.shape[1])  # of the word vectors
    turn = random_rotation(vectors.words.shape[1], generator)  # all columns alike: none has the frequent directions
    words, form = vectors.words @ turn, turn.T @ vectors.form @ turn
    scale = WORD_DEVIATION / words.std()
    words, form = words * scale, form / scale**2
    tables = [bert.embeddings.word_embeddings.weight]
    if mlm.decoder.weight is not tables[0]:  # it is, if the two are tied
        tables.append(mlm.decoder.weight)
    for table in tables:
        table[:, : columns.start] = 0
        table[:, columns] = words
        table[:, columns.stop :] *= 0.1  # columns that no vector fills
    bert.embeddings.token_type_embeddings.weight.mul_(0.1)
    word_norm = float((vectors.shares @ words.square().sum(1)).sqrt())
    _look_at_neighbours(bert, word_norm, generator)
    _write_what_they_tell(bert.encoder.layer[0].attention, columns, words, form, vectors.shares)
    for block in bert.encoder.layer:
        block.ffn.dense2.weight.zero_()
    for block in bert.encoder.layer[1:]:
        block.attention.output.weight.zero_()
    log_shares = vectors.shares.log()
    mlm.decoder.bias.copy_(log_shares - log_shares.mean())
    mlm.dense.weight.copy_(torch.eye(len(mlm.dense.weight)))
    mlm.dense.bias.fill_(PASSING_BIAS)


def random_rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    """A random orthogonal matrix (size, size)."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def _look_at_neighbours(bert, word_norm, generator):
    """
    Write the position embeddings, and the queries and keys of the first block: even heads look at the token before,
    odd heads at the one after.

    Args:
        word_norm: the norm of a word vector, averaged over the text.
    """
    first, table = bert.encoder.layer[0].attention, bert.embeddings.position_embeddings.weight
    width = first.head_size // 2 * 2  # sines and cosines come in pairs
    waves = torch.logspace(math.log10(LARGEST_ANGLE), math.log10(SMALLEST_ANGLE), width // 2)
    angles = torch.arange(len(table))[:, None] * waves
    norm = POSITION_NORM * word_norm
    table.zero_()
    table[:, :width] = interleave(angles.sin(), angles.cos()) * norm / (width / 2) ** 0.5
    of_mask, of_word = norm, norm  # of the columns of positions in the states of [MASK] and of another token
    if bert.embeddings.LayerNorm is not None:
        of_mask = len(table[0]) ** 0.5
        of_word = of_mask * norm / math.hypot(norm, word_norm)
    scale = (SHARPNESS / first.scaling / (of_mask * of_word)) ** 0.5
    first.query.weight.zero_()
    first.key.weight.zero_()
    for head, rows in enumerate(torch.arange(len(table[0])).split(first.head_size)):
        query = torch.linalg.qr(torch.randn(first.head_size, width, generator=generator)).Q * scale
        first.query.weight[rows, :width] = query
        first.key.weight[rows, :width] = rotated(query, waves if head % 2 else -waves)


def _write_what_they_tell(attention, columns, words, form, shares):
    """
    Write the values and the output of the first block: a head reads the word vector of a neighbour, and writes its
    product with the form, in the directions that tell most.

    The heads of one side share the directions out; each takes as many as it has columns.

    Args:
        columns: of the word vectors in a state.
    """
    left, sizes, right = torch.linalg.svd(form)
    directions = F.normalize(words, dim=1) @ form
    typical = (shares @ directions.square().sum(1)).sqrt()
    sizes = (sizes / typical).sqrt()  # half of a size for the value, half for the output
    attention.value.weight.zero_()
    attention.output.weight.zero_()
    heads = torch.arange(len(attention.value.weight)).split(attention.head_size)
    for side, (read, write) in enumerate([(left, right.T), (right.T, left)]):
        for number, rows in enumerate(heads[side::2]):
            taken = torch.arange(len(sizes))[number :: len(heads[side::2])][: len(rows)]
            attention.value.weight[rows[: len(taken)], columns] = (read[:, taken] * sizes[taken]).T
            attention.output.weight[columns, rows[: len(taken)]] = write[:, taken] * sizes[taken]


# ---------------------------------------------------------------------------------------------------------------------
# How much of it is believed


def calibrate(model, batches: Iterable[dict[str, torch.Tensor]]) -> tuple[float, float, float]:
    """
    Choose by how much the neighbours change the frequencies: the factor of the scores with the lowest MLM loss, which
    becomes the scale of the MLM head's LayerNorm.

    Rare tokens make counts look surer than they are: the best factor is near 1 on a large text, and small on a small
    one. The blocks after the first, which begin with an output of 0, are left out.

    Returns:
        The factor, one of `STRENGTHS`; the MLM loss with it; and that with 0, of frequencies alone.
    """
    encoder, mlm = model.bert.encoder, model.mlm
    blocks, kernel = encoder.layer, model.config._attn_implementation
    encoder.layer, model.config._attn_implementation = blocks[:1], "sdpa"  # run's own may be one for GPUs alone
    model.eval()
    losses = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    count = 0
    for batch in batches:
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        states = states_at(model.bert(**inputs).last_hidden_state, batch["masked_positions"])[labels != -100]
        labels = labels[labels != -100]
        for some, of_some in zip(
            mlm.transform(states).split(MEASURED_AT_ONCE), labels.split(MEASURED_AT_ONCE), strict=True
        ):
            scores = some @ mlm.decoder.weight.T
            for number, strength in enumerate(STRENGTHS):
                losses[number] += F.cross_entropy(strength * scores + mlm.decoder.bias, of_some, reduction="sum")
        count += len(labels)
    encoder.layer, model.config._attn_implementation = blocks, kernel
    model.train()
    best = int(losses.argmin())
    mlm.LayerNorm.weight.mul_(STRENGTHS[best])
    return STRENGTHS[best], float(losses[best] / count), float(losses[0] / count)
