"""How much arithmetic training is, and how much this device could do: what is needed for a share of its peak (MFU)."""

import time

import torch
from accelerate import Accelerator

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig


# What matrices are multiplied in, by `mixed_precision`.
MATMUL_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Operations of matrix products that take as long as what a micro-batch does with each weight, whatever its tokens:
# measured on two CPU cores (benchmarks/LOG.md), and a guess elsewhere, where micro-batches are few.
OPERATIONS_A_WEIGHT = 800

# Sides of the square matrices that measure a peak. Two cores are fastest at 512, which their caches hold; many cores
# need larger ones to have enough to do each.
PROCESSOR_SIDES, ACCELERATOR_SIDES = (512, 1024, 2048), (4096, 8192)


def training_arithmetic(config: D2lBertConfig, counts, pair_task: bool) -> float:
    """
    Floating-point operations that training on some sequences needs, a multiplication and an addition being two.

    Only matrix products count, and only those of real tokens and of tokens to predict: what is computed on padding, in
    unused slots, or a second time to save memory is not needed, nor is what the last block makes of a token that no
    head reads. (Its attention is an estimate: as many queries of each sequence, by its length.) That makes the share
    of the peak the "model FLOPs utilization" of PaLM (Chowdhery et al., 2022, appendix B). The backward pass
    multiplies twice for each product of the forward pass, by the other factor's gradient and by this one's.

    Args:
        counts: what was trained on, in any number of steps: `tokens`, `squared_lengths` (the sum over the sequences of
            their length squared), `masked_tokens` and `examples` (pairs, or sequences without a task of pairs).
        pair_task: whether there is a head, and a pooler, for the pairs.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    heads_read = counts.masked_tokens + (counts.examples if pair_task else 0)  # tokens to predict, and [CLS]
    keys_and_values = 2 * hidden**2
    of_a_query = 2 * hidden**2 + 2 * hidden * config.intermediate_size  # query, output, feed-forward
    attention = 2 * hidden * counts.squared_lengths  # Q K^T and the probabilities times V, over all heads

    def block(queries):
        share = queries / max(1, counts.tokens)  # as many of each sequence's tokens, for attention
        return keys_and_values * counts.tokens + of_a_query * queries + share * attention

    encoder = (config.num_hidden_layers - 1) * block(counts.tokens) + block(heads_read)
    mlm = (hidden**2 + hidden * vocabulary) * counts.masked_tokens
    pairs = (hidden**2 + 2 * hidden) * counts.examples if pair_task else 0
    return 3.0 * 2 * (encoder + mlm + pairs)


def block_weights(config: D2lBertConfig) -> int:
    """The numbers in the matrices of the encoder's blocks."""
    hidden = config.hidden_size
    return config.num_hidden_layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)


def encoder_weights(config: D2lBertConfig) -> int:
    """The numbers in the encoder's matrices and tables, but for the table of tokens."""
    tables = config.max_position_embeddings + config.type_vocab_size
    return block_weights(config) + tables * config.hidden_size


def micro_batch_cost(config: D2lBertConfig, counts, pair_task: bool) -> int:
    """
    What a micro-batch costs beyond its tokens, as a number of tokens.

    In each micro-batch weights are rounded and their gradients written and added up, however few its tokens are: next
    to nothing in a deep encoder, and much where large tables of tokens meet small layers. Only the large weights
    count, those of tables and blocks.

    Args:
        counts, pair_task: typical ones, as in `training_arithmetic`.
    """
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    weights = tables + block_weights(config)
    return round(OPERATIONS_A_WEIGHT * weights / (training_arithmetic(config, counts, pair_task) / counts.tokens))


def peak_of(accelerator: Accelerator) -> float:
    """Operations a second of this process's device, in the precision that it trains in."""
    return matmul_peak(accelerator.device, MATMUL_DTYPES[accelerator.mixed_precision])


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """
    Operations a second of this device, with the threads that this process has: the best of many large matrix products.

    Nobody else's random numbers change.

    Args:
        dtype: of the matrices; float32 in the precision that `torch.set_float32_matmul_precision` asks for.
        seconds: about how long to measure.
    """
    sides = PROCESSOR_SIDES if device.type == "cpu" else ACCELERATOR_SIDES
    peak = 0.0
    for side in sides:
        operations = 2 * side**3
        if peak and operations / peak > seconds:  # a CPU without arithmetic of this type takes seconds
            break
        peak = max(peak, operations / _shortest_product(device, dtype, side, seconds / len(sides)))
    return peak


def _shortest_product(device, dtype, side, seconds):
    # Random numbers, as a GPU draws less power on zeros, and runs faster; its own generator, to leave others alone.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    shortest, end = float("inf"), time.perf_counter() + seconds
    while shortest == float("inf") or time.perf_counter() < end:
        _finish(device)
        start = time.perf_counter()
        torch.matmul(left, right, out=product)
        _finish(device)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _finish(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
