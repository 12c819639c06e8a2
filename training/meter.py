"""Measures the steps, and writes nothing: losses, speed, memory, waiting for batches."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import torch

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PairTask, unit


class StepStats(NamedTuple):
    """
    The losses and counts of one optimizer step, over all processes.

    Args:
        mlm_loss: nats per masked token.
        pair_loss: nats per pair; 0 if there is no pair task.
        grad_norm: the norm of the gradient before clipping to `max_grad_norm`.
        masked_tokens: tokens to predict.
        examples: pairs, or sequences if there is no pair task.
        tokens: tokens without padding.
        padded_tokens: tokens including padding.
        squared_lengths: the sum of the squared lengths of the sequences; the cost of attention grows with this sum.
        skipped: 1 if the step was skipped because the loss or the gradient was not finite, else 0.
    """

    mlm_loss: float
    pair_loss: float
    grad_norm: float
    masked_tokens: float
    examples: float
    tokens: float
    padded_tokens: float
    squared_lengths: float
    skipped: float


class Meter:
    """
    Collects the statistics of steps, for the rows of the training log and for the whole run.

    Time counts only while the run trains, not during evaluations and saves.
    """

    def __init__(
        self,
        state: dict,
        task: PairTask | None,
        arithmetic: Callable[[StepStats], float],
        peak: float,
        device: torch.device,
    ):
        """
        Args:
            state: a checkpoint's `training_state.json`, whose totals are continued; without totals they start at 0.
            task: the pair task of the run, if there is one.
            arithmetic: returns the floating-point operations of a step (`training_arithmetic`).
            peak: operations a second of all processes together (the sum of their `matmul_peak`).
            device: the device of the model.
        """
        self.task, self.unit = task, unit(task)
        self.arithmetic, self.peak, self.device = arithmetic, peak, device
        names = ("train_seconds", "train_wait_seconds", "train_tokens", "train_padded_tokens", f"train_{self.unit}")
        # `train_possible_arithmetic` sums time x peak: a resumed run may continue on a machine with another peak.
        names += ("train_skipped_steps", "train_arithmetic", "train_possible_arithmetic")
        self.totals = {name: state.get(name, 0.0) for name in (*names, "train_memory_mb")}
        used_memory(device)  # resets the peak, so that the first row does not include the memory of the setup
        self.start_clock()
        self.steps, self.waited = [], 0.0  # since the last row: statistics of the steps, seconds of waiting

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures the block as time that the training waits for a batch."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    def add(self, stats: StepStats) -> None:
        """Add one step to the next row."""
        self.steps.append(stats)

    def row(self, learning_rate: float, steps_left: int) -> dict[str, float]:
        """
        A row of the training log over the steps since the last row; adds these steps to the totals of the run.

        Returns:
            Finite numbers. Means over the steps that were not skipped and had a token to predict, absent if there was
            no such step: `loss`, `mlm_loss`, with a pair task `nsp_loss` or `sop_loss`, and `grad_norm`. Over all
            steps: `tokens_per_second` without padding; `padding_share`, the padding as a share of the tokens including
            padding; `data_wait_share`, the share of the time that training waited for batches; `mfu`, the operations
            on real tokens as a share of the peak; `memory_mb`, from `used_memory` on this process; `seconds_left`;
            `skipped_steps`, only if above 0.
            And `learning_rate`.
        """
        seconds = time.monotonic() - self.clock_start
        tokens, padded_tokens = (
            sum(getattr(step, name) for step in self.steps) for name in ("tokens", "padded_tokens")
        )
        skipped = round(sum(step.skipped for step in self.steps))
        arithmetic, possible = sum(map(self.arithmetic, self.steps)), seconds * self.peak
        memory, examples = used_memory(self.device), sum(step.examples for step in self.steps)
        spent = (seconds, self.waited, tokens, padded_tokens, examples, skipped, arithmetic, possible)
        for name, value in zip(self.totals, spent, strict=False):
            self.totals[name] += value
        self.totals["train_memory_mb"] = max(self.totals["train_memory_mb"], memory)
        row = {
            **self._losses(),
            "learning_rate": learning_rate,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / padded_tokens,
            "data_wait_share": self.waited / seconds,
            "seconds_left": steps_left * seconds / len(self.steps),
            "mfu": arithmetic / possible,
            "memory_mb": memory,
            **({"skipped_steps": skipped} if skipped else {}),
        }
        self.steps, self.waited = [], 0.0
        self.start_clock()
        return row

    def _losses(self):
        counted = [step for step in self.steps if not step.skipped and step.masked_tokens]
        if not counted:
            return {}
        mlm_loss, pair_loss, norm = (
            statistics.fmean(getattr(step, name) for step in counted)
            for name in ("mlm_loss", "pair_loss", "grad_norm")
        )
        pair_entry = {f"{self.task.key}_loss": pair_loss} if self.task else {}
        return {"loss": mlm_loss + pair_loss, "mlm_loss": mlm_loss, **pair_entry, "grad_norm": norm}

    def speed(self) -> dict[str, float]:
        """
        The `train_...` entries of metrics.json, over all rows of the run.

        Seconds, examples and real tokens a second, the shares of padding and of waiting, MFU, the number of skipped
        steps, and the largest `memory_mb` of a row.
        """
        seconds = self.totals["train_seconds"]
        return {
            "train_seconds": seconds,
            f"train_{self.unit}_per_second": self.totals[f"train_{self.unit}"] / seconds,
            "train_tokens_per_second": self.totals["train_tokens"] / seconds,
            "train_padding_share": 1 - self.totals["train_tokens"] / self.totals["train_padded_tokens"],
            "train_data_wait_share": self.totals["train_wait_seconds"] / seconds,
            "train_mfu": self.totals["train_arithmetic"] / self.totals["train_possible_arithmetic"],
            "train_skipped_steps": round(self.totals["train_skipped_steps"]),
            "train_memory_mb": self.totals["train_memory_mb"],
        }

    def start_clock(self) -> None:
        """Start the clock of the next row."""
        self.clock_start = time.monotonic()

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """A block, such as an evaluation or a save, whose time does not count."""
        start = time.monotonic()
        yield
        self.clock_start += time.monotonic() - start


def used_memory(device: torch.device) -> float:
    """
    Memory of this process in megabytes (10^6 bytes).

    On an NVIDIA GPU, the most memory that was allocated on the GPU since the last call. On other devices, the resident
    memory of the process now; on Linux without shared pages and memory-mapped files, such as the tokens.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e6
    memory = psutil.Process().memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 1e6


# ---------------------------------------------------------------------------------------------------------------------
# Floating-point operations, and the device's peak: both are needed for MFU


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


def micro_batch_cost(config: D2lBertConfig, counts, pair_task: bool) -> int:
    """
    The fixed cost of a micro-batch, as the number of tokens that take the same time.

    A micro-batch of any size casts all weights to the compute dtype, and writes and accumulates all gradients. This is
    next to nothing for a deep encoder, and much for a small encoder with a large vocabulary. Only the large weights
    are counted: token embeddings, decoder, and the matrices of the blocks.

    Args:
        counts, pair_task: as in `training_arithmetic`, for typical examples of the run.
    """
    hidden = config.hidden_size
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden
    weights = tables + config.num_hidden_layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    return round(OPERATIONS_PER_WEIGHT * weights / (training_arithmetic(config, counts, pair_task) / counts.tokens))


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
