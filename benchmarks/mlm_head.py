"""The cost of the MLM head: at the predicted positions only, and at every position.

    python -m benchmarks.mlm_head [--repetitions 15] [--device cpu|cuda]
    python -m benchmarks.mlm_head --loss [--vocab_sizes 8192 ...] [--hidden_sizes 128 ...] [--rows 600 4900]

The head needs 2 (H^2 + H V) operations per position in the forward pass and twice that in the backward pass, so it
needs T / P times fewer at P of T positions. At its peak it holds three tensors of V numbers per position (the
log-probabilities, their gradient, the logits' gradient) and the decoder's gradient of V H numbers. Both variants take
turns. Printed are the median and the range, for the head alone and for a whole step (forward, loss, backward).

`--loss` compares three implementations of the loss from hidden states, forward and backward: ours; PyTorch's
`linear_cross_entropy` with its default chunks; the same with chunks as large as ours and sums in float32. In bf16 the
weights are float32 and cast, as under autocast. The errors are those of the loss and of the gradients by states and
weight, relative to their norm, compared with float64 on the same numbers. They are measured on the first 600 rows,
once with random labels and once with labels that have probabilities from 0.02 to 0.998.
"""

import argparse
import ctypes
import functools
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F

from benchmarks.peers import process_memory
from d2l_bert import D2lBertConfig, D2lBertForMaskedLM
from d2l_bert.modeling.modeling_d2l_bert import LOGITS_AT_ONCE, cross_entropy, linear_cross_entropy


SIZES = {
    "d2l's small BERT": ({}, 128, 64),
    "BERT-base": (
        {
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu",
            "embedding_layer_norm": True,
            "tie_word_embeddings": True,
        },
        8,
        128,
    ),
}
MASKED = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=positive, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--loss", action="store_true", help="compare the loss from hidden states with PyTorch's")
    parser.add_argument("--vocab_sizes", type=positive, nargs="+", default=[8192, 20256, 30522])
    parser.add_argument("--hidden_sizes", type=positive, nargs="+", default=[128, 256, 768])
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[600, 4900], help="numbers of labelled rows, with --loss"
    )
    arguments = parser.parse_args()
    if arguments.loss and not hasattr(F, "linear_cross_entropy"):
        parser.error(f"--loss: torch {torch.__version__} has no linear_cross_entropy; torch 2.13 does")
    if arguments.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        sys.exit("peak memory on a CPU is read from /proc, which Linux has")
    if arguments.loss:
        print(heading(arguments.device))
        for dtype in (torch.float32, torch.bfloat16):
            for hidden_size in arguments.hidden_sizes:
                for vocab_size in arguments.vocab_sizes:
                    compare_losses(dtype, hidden_size, vocab_size, arguments)
        return
    print(heading(arguments.device, "float32"))
    for name, (architecture, rows, length) in SIZES.items():
        compare(name, architecture, rows, length, arguments)


def positive(text: str) -> int:
    """The type of an argument that must be a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def compare(name, architecture, rows, length, arguments):
    torch.manual_seed(0)
    model = D2lBertForMaskedLM(D2lBertConfig(**architecture)).to(arguments.device).train()
    config = model.config
    predicted = round(MASKED * length)
    print(f"\n{name}: {rows} rows, T = {length}, P = {predicted}, H = {config.hidden_size}, V = {config.vocab_size:,}")
    input_ids = torch.randint(5, config.vocab_size, (rows, length), device=arguments.device)
    masked_positions = torch.rand(rows, length, device=arguments.device).topk(predicted).indices
    labels = torch.full_like(input_ids, -100).scatter(1, masked_positions, input_ids.gather(1, masked_positions))
    states = torch.randn(rows, length, config.hidden_size, device=arguments.device)

    def head(states, labels):
        model.mlm.zero_grad(set_to_none=False)
        cross_entropy(model.mlm(states.requires_grad_()), labels).backward()

    def step(**batch):
        model.zero_grad(set_to_none=False)
        model(input_ids, **batch).loss.backward()

    at_masked = labels.gather(1, masked_positions)
    masked_states = states.gather(1, masked_positions[..., None].expand(-1, -1, config.hidden_size))
    for what, full, masked in (
        ("head", lambda: head(states, labels), lambda: head(masked_states, at_masked)),
        ("step", lambda: step(labels=labels), lambda: step(labels=at_masked, masked_positions=masked_positions)),
    ):
        measured = {"every position": measure(full, arguments), "masked_positions": measure(masked, arguments)}
        take_turns({"every position": full, "masked_positions": masked}, measured, arguments)
        report(what, measured, {"every position": rows * length, "masked_positions": rows * predicted}, config)


def take_turns(functions, measured, arguments):
    for _ in range(arguments.repetitions):
        for label, function in functions.items():
            synchronize(arguments)
            start = time.perf_counter()
            function()
            synchronize(arguments)
            measured[label]["seconds"].append(time.perf_counter() - start)


def measure(function, arguments):
    """The bytes that the function takes at its peak, beyond those held before; measured in its second call."""
    function()
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory must not count as held
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
        before = process_memory("VmRSS")
        function()
        peak = process_memory("VmHWM") - before
    return {"peak": peak, "seconds": []}


def synchronize(arguments):
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def report(what, measured, positions, config):
    seconds = {label: statistics.median(result["seconds"]) for label, result in measured.items()}
    for label, result in measured.items():
        low, high = min(result["seconds"]), max(result["seconds"])
        print(
            f"  {what} at {label:17} {1000 * seconds[label]:7.0f} ms ({1000 * low:.0f} to {1000 * high:.0f})"
            f"   peak memory {result['peak'] / 2**20:6.0f} MiB"
        )
    every, masked = measured
    faster, smaller = seconds[every] / seconds[masked], measured[every]["peak"] / measured[masked]["peak"]
    print(f"  {what}: {faster:.2f} times faster, {smaller:.2f} times less memory")
    if what == "head":
        H, V = config.hidden_size, config.vocab_size
        work = {label: 6 * count * (H * H + H * V) / 1e9 for label, count in positions.items()}
        space = {label: 4 * (3 * count * V + V * H) / 2**20 for label, count in positions.items()}
        print(
            f"  arithmetic: {work[every]:.1f} and {work[masked]:.1f} GFLOP, {work[every] / work[masked]:.2f}; "
            f"{space[every]:.0f} and {space[masked]:.0f} MiB, {space[every] / space[masked]:.2f}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The loss from hidden states

ROWS_CHECKED = 600


def our_loss(states, weight, bias, labels):
    return linear_cross_entropy(states, weight, bias, labels)


def pytorch_loss(states, weight, bias, labels, **options):
    table, offset = weight.to(states.dtype), bias.to(states.dtype)
    options = torch.nn.LinearCrossEntropyOptions(**options)
    return F.linear_cross_entropy(states, table, labels, linear_bias=offset, reduction="sum", options=options)


def pytorch_loss_in_our_chunks(states, weight, bias, labels):
    rows = max(1, min(len(labels), LOGITS_AT_ONCE // len(weight)))
    in_float32 = {"acc_policy": "accurate", "acc_dtype": torch.float32}
    return pytorch_loss(states, weight, bias, labels, batch_chunk_size=rows, chunking_method=None, **in_float32)


LOSSES = {"ours": our_loss, "PyTorch's": pytorch_loss, "PyTorch's, our chunks": pytorch_loss_in_our_chunks}


def compare_losses(dtype, hidden_size, vocab_size, arguments):
    """Print the errors of each implementation, and its time and memory with gradients."""
    inputs = {likely: loss_inputs(dtype, hidden_size, vocab_size, likely, arguments) for likely in (False, True)}
    exact = {likely: exact_loss(*first_rows(tensors)) for likely, tensors in inputs.items()}
    print(f"\n{str(dtype).removeprefix('torch.')}, H = {hidden_size}, V = {vocab_size:,}", flush=True)
    for name, loss in LOSSES.items():
        found = {likely: loss_and_gradients(loss, *first_rows(tensors)) for likely, tensors in inputs.items()}
        errors = {
            likely: [float((one - other).norm() / other.norm()) for one, other in zip(got, exact[likely], strict=True)]
            for likely, got in found.items()
        }
        shown = "; likely labels ".join(" ".join(f"{error:.1e}" for error in each) for each in errors.values())
        print(f"  {name:22} errors of loss, states, weight: random labels {shown}", flush=True)
    for rows in arguments.rows:
        states, weight, bias, labels = inputs[False]
        tensors = (states[:rows], weight, bias, labels[:rows])
        work = {name: functools.partial(loss_and_gradients, loss, *tensors) for name, loss in LOSSES.items()}
        measured = {name: measure(function, arguments) for name, function in work.items()}
        take_turns(work, measured, arguments)
        for name, result in measured.items():
            ratios = [one / ours for one, ours in zip(result["seconds"], measured["ours"]["seconds"], strict=True)]
            print(
                f"  {rows:5,} rows, {name:22} {1000 * statistics.median(result['seconds']):8.1f} ms, "
                f"{statistics.median(ratios):5.2f} times ours ({min(ratios):.2f} to {max(ratios):.2f})   "
                f"peak memory {result['peak'] / 2**20:6.0f} MiB",
                flush=True,
            )


def loss_inputs(dtype, hidden_size, vocab_size, likely, arguments):
    """States, weight, bias and labels. With `likely`, the labels have probabilities from 0.02 to 0.998."""
    generator, rows = torch.Generator().manual_seed(0), max(*arguments.rows, ROWS_CHECKED)
    states = torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5
    bias = 0.1 * torch.randn(vocab_size, generator=generator)
    labels = torch.randint(vocab_size, (rows,), generator=generator)
    if likely:
        states, labels = states[:ROWS_CHECKED], labels[:ROWS_CHECKED]
        wanted = torch.tensor([0.02, 0.5, 0.9, 0.99, 0.998]).logit().repeat(ROWS_CHECKED)[:ROWS_CHECKED, None]
        of_labels = weight[labels]
        for _ in range(5):  # repeated, as moving a state towards its label's row also changes its other scores
            scores = states @ weight.T + bias
            distance = scores.gather(1, labels[:, None]).clone()
            distance -= scores.scatter(1, labels[:, None], -torch.inf).logsumexp(1, keepdim=True)
            states = states + (wanted - distance) / of_labels.square().sum(1, keepdim=True) * of_labels
    return [tensor.to(arguments.device) for tensor in (states.to(dtype), weight, bias, labels)]


def first_rows(tensors):
    states, weight, bias, labels = tensors
    return states[:ROWS_CHECKED], weight, bias, labels[:ROWS_CHECKED]


def loss_and_gradients(loss_of, states, weight, bias, labels):
    """The sum of the losses, and its gradients by states and weight."""
    leaves = [tensor.detach().requires_grad_() for tensor in (states, weight, bias)]
    loss = loss_of(*leaves, labels)
    loss.backward()
    return [loss.detach(), leaves[0].grad, leaves[1].grad]


def exact_loss(states, weight, bias, labels):
    """The same in float64, from weights rounded to the dtype of the states."""
    table, offset = weight.to(states.dtype), bias.to(states.dtype)

    def plain(states, weight, bias, labels):
        return F.cross_entropy(F.linear(states, weight, bias), labels, reduction="sum")

    return loss_and_gradients(plain, states.double(), table.double(), offset.double(), labels)


# ---------------------------------------------------------------------------------------------------------------------
# The first lines of every benchmark


def heading(device, *more) -> str:
    """
    The first lines of every benchmark: the command and the date; the machine, versions and further settings.

    Raises:
        SystemExit: `device` is "cuda" and PyTorch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no GPU here; leave it out to measure the CPU")
    versions = f"torch {torch.__version__}", f"transformers {transformers.__version__}"
    return f"python {' '.join(sys.orig_argv[1:])}    {date.today()}\n{', '.join([machine(device), *versions, *more])}"


def machine(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
