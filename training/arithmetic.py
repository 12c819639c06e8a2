"""Counts the floating-point operations of training, and measures the device's peak: both are needed for MFU."""

import time

import torch
from accelerate import Accelerator

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig


# The dtype of matrix products for each `mixed_precision`.
MATMUL_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# A micro-batch has a fixed cost for each weight of the model, equal to the time of this many operations of a matrix
# product. Measured on two CPU cores (benchmarks/LOG.md); on other devices a guess, where a step has few micro-batches.
OPERATIONS_PER_WEIGHT = 800

# Side lengths of the square matrices that measure the peak. Two cores are fastest at 512, where the matrices fit into
# the CPU's caches; many cores need larger matrices to keep every core busy. A GPU or another accelerator computes far
# more at once, and needs the largest.
CPU_SIDES, ACCELERATOR_SIDES = (512, 1024, 2048), (4096, 8192)


def training_arithmetic(config: D2lBertConfig, counts, pair_task: bool) -> float:
    """
    Floating-point operations that training needs; a multiplication and an addition count as two operations.

    Only matrix products for real tokens and for tokens to predict count. Work on padding or unused slots, recomputing
    to save memory, and the last block's work on tokens that no head reads do not count. So dividing by the device's
    peak gives the "model FLOPs utilization" (MFU) of PaLM (Chowdhery et al., 2022, appendix B). The backward pass has
    two matrix products for each product of the forward pass, one for the gradient of each factor.

    In the last block, the cost of attention is an estimate: every token of a sequence is assumed to be equally often
    one of those that a head reads.

    Args:
        counts: of the examples trained on, over any number of steps: `tokens`, `squared_lengths` (the sum of the
            squared lengths of the sequences), `masked_tokens` and `examples` (pairs, or sequences if there is no pair
            task).
        pair_task: whether the model has a pooler and a head for pairs.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    tokens_read = counts.masked_tokens + (counts.examples if pair_task else 0)  # by a head: masked tokens, and [CLS]
    keys_and_values = 2 * hidden**2  # multiplications for a token
    query_work = 2 * hidden**2 + 2 * hidden * config.intermediate_size  # for a query: query, output, feed-forward
    attention = 2 * hidden * counts.squared_lengths  # Q K^T and the probabilities times V, over all heads

    def block(queries):
        share = queries / max(1, counts.tokens)
        return keys_and_values * counts.tokens + query_work * queries + share * attention

    encoder = (config.num_hidden_layers - 1) * block(counts.tokens) + block(tokens_read)
    mlm = (hidden**2 + hidden * vocabulary) * counts.masked_tokens
    pairs = (hidden**2 + 2 * hidden) * counts.examples if pair_task else 0
    return 3.0 * 2 * (encoder + mlm + pairs)


def block_weights(config: D2lBertConfig) -> int:
    """The number of weights in the matrices of the encoder's blocks."""
    hidden = config.hidden_size
    return config.num_hidden_layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)


def encoder_weights(config: D2lBertConfig) -> int:
    """The number of weights in the encoder's matrices, position embeddings and segment embeddings."""
    tables = config.max_position_embeddings + config.type_vocab_size
    return block_weights(config) + tables * config.hidden_size


def micro_batch_cost(config: D2lBertConfig, counts, pair_task: bool) -> int:
    """
    The fixed cost of a micro-batch, as the number of tokens that take the same time.

    A micro-batch of any size casts all weights to the compute dtype, and writes and accumulates all gradients. This is
    next to nothing for a deep encoder, and much for a small encoder with a large vocabulary. Only the large weights
    are counted: token embeddings, decoder, and the matrices of the blocks.

    Args:
        counts, pair_task: as in `training_arithmetic`, for typical examples of the run.
    """
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    weights = tables + block_weights(config)
    return round(OPERATIONS_PER_WEIGHT * weights / (training_arithmetic(config, counts, pair_task) / counts.tokens))


def peak_of(accelerator: Accelerator) -> float:
    """The peak of this process's device in operations a second, in the precision of the training."""
    return matmul_peak(accelerator.device, MATMUL_DTYPES[accelerator.mixed_precision])


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """
    The peak of a device in operations a second: the fastest of many large matrix products.

    On a CPU, the products use the threads of this process. The global random generators are not used.

    Args:
        dtype: of the matrices; float32 uses the precision that `torch.set_float32_matmul_precision` has set.
        seconds: about how long to measure.
    """
    sides = CPU_SIDES if device.type == "cpu" else ACCELERATOR_SIDES
    peak = 0.0
    for side in sides:
        operations = 2 * side**3
        if peak and operations / peak > seconds:  # one such product takes seconds if the CPU only emulates the dtype
            break
        peak = max(peak, operations / _shortest_product(device, dtype, side, seconds / len(sides)))
    return peak


def _shortest_product(device, dtype, side, seconds):
    """The shortest time of a product of two (side, side) matrices, in seconds, measured for about `seconds`."""
    # Random numbers, not zeros: on zeros a GPU draws less power and runs faster.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    shortest, end = float("inf"), time.perf_counter() + seconds
    while shortest == float("inf") or time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        torch.matmul(left, right, out=product)
        _synchronize(device)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
