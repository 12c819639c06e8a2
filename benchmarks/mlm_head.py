"""What the MLM head costs at the predicted positions alone, and at every position.

    python -m benchmarks.mlm_head [--repetitions 15] [--device cpu|cuda]

The head's arithmetic is 2 (H^2 + H V) a position forward and twice that backward: T / P times less at P of T
positions. Its memory, at its peak, is three tensors of V numbers a position (the log-probabilities, their gradient,
the logits' gradient) and the decoder's gradient, V H. The two variants take turns; the median and the spread are
printed, for the head alone and for a whole training step (forward, loss, backward) of the model.
"""

import argparse
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
import transformers

from benchmarks.peers import memory
from d2l_bert import D2lBertConfig, D2lBertForMaskedLM
from d2l_bert.modeling.modeling_d2l_bert import cross_entropy


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
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        sys.exit("peak memory on a processor is read from /proc, which Linux has")
    print(heading(arguments.device, "float32"))
    for name, (architecture, rows, length) in SIZES.items():
        compare(name, architecture, rows, length, arguments)


def positive(text: str) -> int:
    """A number of times or of things, as an argument."""
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
        figures = {"every position": measure(full, arguments), "masked_positions": measure(masked, arguments)}
        alternate(full, masked, figures, arguments)
        report(what, figures, {"every position": rows * length, "masked_positions": rows * predicted}, config)


def alternate(full, masked, figures, arguments):
    for _ in range(arguments.repetitions):
        for function, label in ((full, "every position"), (masked, "masked_positions")):
            synchronize(arguments)
            start = time.perf_counter()
            function()
            synchronize(arguments)
            figures[label]["seconds"].append(time.perf_counter() - start)


def measure(function, arguments):
    """Memory above what was held before, at its peak, once the gradients have their place."""
    function()
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        function()
        peak = memory("VmHWM") - before
    return {"peak": peak, "seconds": []}


def synchronize(arguments):
    if arguments.device == "cuda":
        torch.cuda.synchronize()


def report(what, figures, positions, config):
    seconds = {label: statistics.median(figure["seconds"]) for label, figure in figures.items()}
    for label, figure in figures.items():
        low, high = min(figure["seconds"]), max(figure["seconds"])
        print(
            f"  {what} at {label:17} {1000 * seconds[label]:7.0f} ms ({1000 * low:.0f} to {1000 * high:.0f})"
            f"   peak memory {figure['peak'] / 2**20:6.0f} MiB"
        )
    every, masked = figures
    faster, smaller = seconds[every] / seconds[masked], figures[every]["peak"] / figures[masked]["peak"]
    print(f"  {what}: {faster:.2f} times faster, {smaller:.2f} times less memory")
    if what == "head":
        H, V = config.hidden_size, config.vocab_size
        work = {label: 6 * count * (H * H + H * V) / 1e9 for label, count in positions.items()}
        space = {label: 4 * (3 * count * V + V * H) / 2**20 for label, count in positions.items()}
        print(
            f"  arithmetic: {work[every]:.1f} and {work[masked]:.1f} GFLOP, {work[every] / work[masked]:.2f}; "
            f"{space[every]:.0f} and {space[masked]:.0f} MiB, {space[every] / space[masked]:.2f}"
        )


def heading(device, *more) -> str:
    """
    What every bench prints first: command and day; machine, versions and whatever else.

    Raises:
        SystemExit: a GPU is asked for, and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no GPU here; leave it out to measure the processor")
    versions = f"torch {torch.__version__}", f"transformers {transformers.__version__}"
    return f"python {' '.join(sys.orig_argv[1:])}    {date.today()}\n{', '.join([machine(device), *versions, *more])}"


def machine(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
