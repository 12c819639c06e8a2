"""The speed of a training step: ours, d2l 1.0.3's, and stock BERT's fastest, on the same pairs, in turns.

    python -m benchmarks.throughput [--size small base] [--corpus PATH...] [--d2l_python peers/bin/python]

`small` is d2l's small BERT with 512 pairs of 64 tokens a step, `base` is BERT-base with pairs of 128, both real pairs
of the corpus. All contestants train on the same pairs, with the same masks, labels and dropout probability:

    ours    as `d2l-bert pretrain` computes a step, in micro-batches cut by length
    d2l     float32 with Adam; all rows padded to one length; its head, too, computes the predicted positions only
    stock   bf16 with fused AdamW, in the fastest setting found by a trial: compiled or not, eager attention or SDPA,
            all pairs of a step at once or fewer

d2l and stock BERT do not clip gradients. Each contestant is a process of its own (benchmarks/peers.py).

MFU is the share of the machine's peak for bf16 matrix products, measured in the same turns. Its arithmetic is the same
for all contestants: the operations that the losses need, for real tokens and predicted positions; the last block
counts for predicted positions and [CLS] only. Memory is printed as the bytes held before a step + the extra bytes that
a step takes at its peak.

d2l needs an environment of its own, which may use torch, numpy and safetensors of this one:

    python -m venv peers
    peers/bin/pip install --no-deps d2l==1.0.3
    peers/bin/pip install matplotlib pandas scipy IPython requests
    python -c "import os, torch; print(os.path.dirname(torch.__path__[0]))" > borrowed.pth
    mv borrowed.pth peers/lib/python3*/site-packages
"""

import argparse
import contextlib
import itertools
import math
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, replace

from benchmarks.peers import CONTESTANTS
from benchmarks.turns import (
    BASE,
    Task,
    describe,
    heading,
    per_second,
    positive,
    step_arguments,
    summary,
    take_turns,
)
from d2l_bert import RECIPES, D2lBertConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["small"], choices=("small", "base"))
    parser.add_argument(
        "--pairing", nargs="+", choices=("sentences", "segments"), help="default: sentences; for base both"
    )
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=positive, default=9, help="turns of each contestant")
    parser.add_argument("--steps", type=positive, help="steps in a turn (1; on a GPU 10)")
    parser.add_argument(
        "--global_batch_size", type=positive, help="pairs in a step (512 for small; 32 for base, on a GPU 256)"
    )
    parser.add_argument("--max_seq_length", type=positive, help="tokens in a pair (64 for small, 128 for base)")
    parser.add_argument("--micro_batch_size", type=positive, help="our pairs at once (that of the recipe)")
    parser.add_argument(
        "--dropout", type=float, help="dropout probability (0.2 for small as in d2l, 0.1 for base as in BERT)"
    )
    parser.add_argument("--contestants", nargs="+", default=["ours", "d2l", "stock"], choices=tuple(CONTESTANTS))
    parser.add_argument("--d2l_python", metavar="PATH", help="Python of the environment with d2l 1.0.3")
    parser.add_argument(
        "--torch_compile", default="both", choices=("both", "true", "false"), help="for ours; both are tried"
    )
    parser.add_argument(
        "--stock", nargs="+", metavar="compiled|eager/sdpa|eager/PAIRS", help="stock BERT's settings to try"
    )
    parser.add_argument("--profile", action="store_true", help="where the time of our step goes")
    arguments = parser.parse_args()
    exit_on_signals()
    arguments.steps = arguments.steps or (1 if arguments.device == "cpu" else 10)
    print(heading(arguments.device))
    if "d2l" in arguments.contestants and not arguments.d2l_python:
        arguments.contestants.remove("d2l")
        print("d2l is left out: name the Python of an environment that has it with --d2l_python")
    if not arguments.contestants:
        parser.error("no contestant is left")
    if arguments.profile and "ours" not in arguments.contestants:
        parser.error("--profile is of ours; add ours to --contestants")
    pairings = {"small": ["sentences"], "base": ["segments", "sentences"]}
    for size in arguments.size:
        for pairing in arguments.pairing or pairings[size]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    compare(make_task(size, pairing, arguments), arguments, folder)
                except ValueError as error:
                    parser.error(str(error))


def exit_on_signals():
    """Turn SIGTERM and SIGHUP into an ordinary exit, which also ends the processes that this program has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def make_task(size, pairing, arguments) -> Task:
    if size == "small":
        architecture, run = RECIPES["d2l-50-steps"]()
        pairs = 512
    else:
        _, run = RECIPES["base"]()
        architecture = D2lBertConfig(**BASE)
        architecture.hidden_dropout_prob = architecture.attention_probs_dropout_prob = 0.1
        pairs = 32 if arguments.device == "cpu" else 256
    if arguments.dropout is not None:
        if not 0 <= arguments.dropout < 1:
            raise ValueError(f"--dropout {arguments.dropout:g}: a share from 0 to less than 1 is dropped")
        architecture.hidden_dropout_prob = architecture.attention_probs_dropout_prob = arguments.dropout
    run = replace(
        run,
        corpus=arguments.corpus,
        pairing=pairing,
        vocab_size=architecture.vocab_size,
        max_seq_length=arguments.max_seq_length or (64 if size == "small" else 128),
        global_batch_size=arguments.global_batch_size or pairs,
        micro_batch_size=arguments.micro_batch_size or run.micro_batch_size,
        mlm_probability=0.15,
        length_schedule=[],
        batch_size_schedule=[],
    )
    return Task(size, architecture, run, arguments.device)


# ---------------------------------------------------------------------------------------------------------------------
# The step


def compare(task, arguments, folder):
    """Print the speed, MFU and memory of a step of each contestant."""
    steps = task.write_steps(folder, max(4, arguments.steps))
    describe(task, steps)
    with contextlib.ExitStack() as opened:
        contestants = {}
        for name in arguments.contestants:
            python = arguments.d2l_python if name == "d2l" else sys.executable
            settings = {"": {}}  # d2l has none
            if name == "ours":
                settings = our_settings(task, arguments)
            elif name == "stock":
                settings = stock_settings(task, arguments)
            best = fastest(task, steps, name, settings)
            contestants[name] = opened.enter_context(task.contestant(name, python, **best))
        for name, contestant in contestants.items():
            print(f"  {name}: {contestant.description}")
        taken, peaks = take_turns(contestants, dict.fromkeys(contestants, steps), arguments)
        memory = {name: contestant.call("memory", steps[0].file) for name, contestant in contestants.items()}
        profiled = contestants["ours"].call("profile", steps[0].file) if arguments.profile else None
    print(f"  peak of matrix products in bf16: {summary([peak / 1e9 for peak in peaks])} GFLOP/s", flush=True)
    print(f"  {'':6}{'ms a step':>24}{'pairs/s':>28}{'tokens/s':>32}{'MFU':>8}{'memory, MiB':>20}")
    for name, turns in taken.items():
        ms = summary([1000 * seconds / len(done) for done, seconds in turns])
        share = statistics.median(per_second(turns, "arithmetic")) / statistics.median(peaks)
        held, more = memory[name]
        mebibytes = f"{held / 2**20:,.0f} + {more / 2**20:,.0f}"
        pairs = summary(per_second(turns, "pairs"), 1)
        tokens = summary(per_second(turns, "tokens"))
        print(f"  {name:6}{ms:>24}{pairs:>28}{tokens:>32}{share:>8.1%}{mebibytes:>20}")
    for name in taken:
        if name != "ours" and "ours" in taken:
            ratios = [theirs / ours for (_, theirs), (_, ours) in zip(taken[name], taken["ours"], strict=True)]
            print(f"  ours is {summary(ratios, 2)} times as fast as {name}, turn by turn")
    if profiled:
        milliseconds, operations = profiled
        print(f"  the operations of a step of ours, {milliseconds:.0f} ms under the profiler:")
        for name, share, count in operations:
            print(f"  {share:>8.1%}  {count:>6} x  {name}")
    sys.stdout.flush()


def our_settings(task, arguments) -> dict[str, dict]:
    """Our settings to try: not compiled and compiled, unless `--torch_compile` chooses one."""
    choices = (False, True) if arguments.torch_compile == "both" else (arguments.torch_compile == "true",)
    return {f"torch_compile {choice}": {"run": asdict(replace(task.run, torch_compile=choice))} for choice in choices}


def stock_settings(task, arguments) -> dict[str, dict]:
    """Stock BERT's settings to try: compiled or not, SDPA or eager attention, all pairs of a step at once or fewer."""
    most = task.run.global_batch_size
    fewer = 64 if task.size == "small" else 16
    pairs = sorted({most, min(most, fewer)})
    variants = map("/".join, itertools.product(("eager", "compiled"), ("sdpa", "eager"), map(str, pairs)))
    return {variant: {"variant": variant} for variant in arguments.stock or variants}


def fastest(task, steps, name, settings: dict[str, dict]) -> dict:
    """Try each setting of a contestant; returns the fastest."""
    best = next(iter(settings.values()))
    shortest = math.inf
    for label, setting in settings.items() if len(settings) > 1 else ():
        try:
            with task.contestant(name, **setting) as contestant:
                contestant.call("steps", *step_arguments(steps[:3]))  # allocates memory, and compiles for every shape
                seconds = min(contestant.call("steps", *step_arguments([step])) for step in steps[1:3])
        except RuntimeError as error:
            print(f"  {name}, trial of {label}: {str(error).splitlines()[-1]}", flush=True)
            continue
        print(f"  {name}, trial of {label}: {1000 * seconds:,.0f} ms a step", flush=True)
        if seconds < shortest:
            best = setting
            shortest = seconds
    return best


if __name__ == "__main__":
    main()
