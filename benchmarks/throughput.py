"""How fast a training step is: ours, d2l 1.0.3's own, and stock BERT's best, on the same pairs, in turns.

    python -m benchmarks.throughput [--size small base] [--corpus PATH...] [--d2l_python peers/bin/python]
    python -m benchmarks.throughput --end_to_end 100
    python -m benchmarks.throughput --quality 500 --d2l_python peers/bin/python
    python -m benchmarks.throughput --vocab_sizes 8192 30522 100000 --lengths 64 128 256 512 [--plot cost.png]

Without one of the options of the last three lines the step is compared. `small` is d2l's small BERT, 512 pairs of 64
a step, `base` BERT-base at 128. Pairs are real ones of the corpus. All contestants train on the same of them, with the
same masks and labels and as much dropout: ours as `d2l-bert pretrain` does, in micro-batches cut by length; d2l in
float32 with Adam, all rows as long, its head at the predicted positions too; stock BERT in bf16 with fused AdamW, in
whichever setting a trial finds fastest (compiled or not, either attention, all pairs of a step at once or fewer). The
peers do not clip gradients. Each contestant is a process of its own (benchmarks/peers.py).

MFU is the share of the machine's bf16 matrix-multiply peak, measured in the same turns, that the arithmetic comes to
which the losses need, the same for all contestants: that of real tokens and predicted positions, in the last block of
the latter and [CLS] only. Memory is what is held before a step, and what a step takes on top.

`--end_to_end` trains with the command line, so many steps, compiled if `--torch_compile true` says so; every few
seconds the system stops that run, and the bare step works in its place, on `--repetitions` times `--steps` different
steps again and again. `--quality` trains ours and d2l's model on the same pairs in the same order, and evaluates both
on the same held-out pairs and masks, in float32. `--vocab_sizes` and `--lengths` print what a token costs beside what
the arithmetic says: the vocabulary grows by entries that no text uses, and a step has as many tokens at each length.

The book's package wants an environment of its own, which may borrow torch, numpy and safetensors from this one:

    python -m venv peers
    peers/bin/pip install --no-deps d2l==1.0.3
    peers/bin/pip install matplotlib pandas scipy IPython requests
    python -c "import os, torch; print(os.path.dirname(torch.__path__[0]))" > borrowed.pth
    mv borrowed.pth peers/lib/python3*/site-packages
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.mlm_head import SIZES as ARCHITECTURES
from benchmarks.mlm_head import heading, positive
from benchmarks.peers import CONTESTANTS, Contestant, environment, write_step
from d2l_bert import RECIPES, D2lBertConfig, PretrainConfig
from d2l_bert.model_cards.card import METRICS_FILE
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching
from d2l_bert.training.arithmetic import matmul_peak, training_arithmetic
from d2l_bert.training.evaluate import held_out_figures
from d2l_bert.training.optim import learning_rate_share
from d2l_bert.training.recipes import architecture_options
from d2l_bert.training.step import counts_of
from d2l_bert.training.tracking import TrainingLog


@dataclass
class Task:
    """What every contestant has to do."""

    size: str
    architecture: D2lBertConfig
    run: PretrainConfig
    device: str

    def __post_init__(self):
        self.run.check()

    def __str__(self):
        model, run = self.architecture, self.run
        return (
            f"{self.size}, {run.pairing}: {model.num_hidden_layers} x {model.hidden_size}, vocabulary "
            f"{model.vocab_size:,}, dropout {model.hidden_dropout_prob:g}; {run.global_batch_size} pairs of up to "
            f"{run.max_seq_length} tokens a step"
        )

    def contestant(self, name, python=sys.executable, **more) -> Contestant:
        names = [*architecture_options(), "vocab_size", "pad_token_id"]
        numbers = {name: getattr(self.architecture, name) for name in names}
        told = {"architecture": numbers, "run": asdict(self.run), "device": self.device, **more}
        return Contestant(name, told, python)

    def steps(self, count):
        cutting = batching.how_to_cut(self.architecture, self.run)
        return batching.make_steps(self.run, prepare(self.run), count, **cutting)

    def files(self, folder, count) -> list["Step"]:
        steps, own = self.steps(count), Path(tempfile.mkdtemp(dir=folder))
        return [Step(steps[number], own / f"{number}.safetensors", self.architecture) for number in range(count)]


class Step:
    """A step's micro-batches in a file, and what they come to."""

    def __init__(self, micro_batches, path, architecture):
        self.file = str(write_step(micro_batches, path))
        counts = sum(map(counts_of, micro_batches)).tolist()
        names = ("masked_tokens", "examples", "tokens", "padded_tokens", "squared_lengths")
        self.counts = SimpleNamespace(**dict(zip(names, counts, strict=True)))
        self.pairs, self.tokens = self.counts.examples, self.counts.tokens
        self.arithmetic = training_arithmetic(architecture, self.counts, pair_task=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["small"], choices=("small", "base"))
    parser.add_argument("--pairing", nargs="+", choices=("sentences", "segments"), help="small: sentences; base: both")
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repetitions", type=positive, default=9, help="turns of each contestant")
    parser.add_argument("--steps", type=positive, help="steps in a turn; 1, on a GPU 10")
    parser.add_argument("--global_batch_size", type=positive, help="pairs a step; small: 512, base: 32, on a GPU 256")
    parser.add_argument("--max_seq_length", type=positive, help="small: 64, base: 128")
    parser.add_argument("--micro_batch_size", type=positive, help="ours; the default is the recipe's")
    parser.add_argument("--dropout", type=float, help="small: 0.2, as the book; base: 0.1, as BERT")
    parser.add_argument("--contestants", nargs="+", default=["ours", "d2l", "stock"], choices=tuple(CONTESTANTS))
    parser.add_argument("--d2l_python", metavar="PATH", help="Python of the environment that has d2l 1.0.3")
    parser.add_argument("--torch_compile", default="auto", choices=("auto", "true", "false"), help="ours; auto tries")
    parser.add_argument("--stock", nargs="+", metavar="compiled|eager/sdpa|eager/PAIRS", help="settings to try")
    parser.add_argument("--end_to_end", type=positive, metavar="STEPS")
    parser.add_argument("--quality", type=positive, metavar="STEPS")
    parser.add_argument("--vocab_sizes", type=positive, nargs="+", default=[])
    parser.add_argument("--lengths", type=positive, nargs="+", default=[])
    parser.add_argument("--plot", metavar="PATH", help="draw the tables of costs")
    arguments = parser.parse_args()
    end_in_order()
    arguments.steps = arguments.steps or (1 if arguments.device == "cpu" else 10)
    print(heading(arguments.device))
    if "d2l" in arguments.contestants and not arguments.d2l_python:
        arguments.contestants.remove("d2l")
        print("d2l is left out: name the Python of an environment that has it with --d2l_python")
    if not arguments.contestants:
        parser.error("no contestant is left")
    if arguments.plot and not (arguments.vocab_sizes or arguments.lengths):
        parser.error("--plot draws the tables of costs; give --vocab_sizes or --lengths too")
    of_base = ["segments"] if arguments.lengths or arguments.vocab_sizes else ["segments", "sentences"]
    pairings = {"small": ["sentences"], "base": of_base}
    tasks = [(size, pairing) for size in arguments.size for pairing in arguments.pairing or pairings[size]]
    if arguments.plot and len(tasks) > 1:
        parser.error("--plot draws one size and pairing, and would leave only the last of several; name one of each")
    for size, pairing in tasks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                measure(make_task(size, pairing, arguments), arguments, folder)
            except ValueError as error:
                parser.error(str(error))


def end_in_order():
    """Have signals that end this program end the processes that it started, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def measure(task, arguments, folder):
    tables = {}
    if arguments.vocab_sizes:
        tables["vocabulary"] = vocabularies(task, arguments, folder)
    if arguments.lengths:
        tables["tokens in a pair"] = lengths(task, arguments, folder)
    if arguments.plot and tables:
        plot(tables, arguments.plot)
    if arguments.end_to_end:
        end_to_end(task, arguments, folder)
    if arguments.quality:
        quality(task, arguments, folder)
    if not (tables or arguments.end_to_end or arguments.quality):
        compare(task, arguments, folder)


def make_task(size, pairing, arguments) -> Task:
    if size == "small":
        architecture, run = RECIPES["d2l"]()
        pairs = 512
    else:
        _, run = RECIPES["base"]()
        architecture = D2lBertConfig(**ARCHITECTURES["BERT-base"][0])
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
# In turns


def take_turns(contestants, steps_of, arguments):
    """
    Let contestants work in turns, each as often, and measure the machine's peak in between.

    Args:
        contestants: by their labels.
        steps_of: the steps of each label; contestants with the same ones do the same work in the same turn.

    Returns:
        For each label a list of (steps, seconds), one for each turn; and the peaks in bf16, operations a second.
    """
    taken, peaks = {label: [] for label in contestants}, []
    for label, contestant in contestants.items():  # allocate, and compile every shape
        contestant.tell("steps", *orders(steps_of[label]))
    for turn in range(arguments.repetitions):
        peaks.append(matmul_peak(torch.device(arguments.device), torch.bfloat16))
        first = turn * arguments.steps
        for label in list(contestants)[:: -1 if turn % 2 else 1]:
            steps = list(itertools.islice(itertools.cycle(steps_of[label]), first, first + arguments.steps))
            taken[label].append((steps, contestants[label].tell("steps", *orders(steps))))
    return taken, peaks


def orders(steps, rate=1e-4):
    return [step.file for step in steps], [rate] * len(steps)


def rates(turns, what):
    """A figure of the steps, for each turn, a second."""
    return [sum(getattr(step, what) for step in steps) / seconds for steps, seconds in turns]


def spread(values, digits=0, unit=""):
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f}{unit} ({low:,.{digits}f} to {high:,.{digits}f})"


def say_peak(peaks):
    print(f"  peak of matrix products in bf16: {spread([peak / 1e9 for peak in peaks])} GFLOP/s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The step


def compare(task, arguments, folder):
    """Our step, d2l's and stock BERT's."""
    steps = task.files(folder, max(4, arguments.steps))
    describe(task, steps)
    with contextlib.ExitStack() as opened:
        contestants = {}
        for name in arguments.contestants:
            python = arguments.d2l_python if name == "d2l" else sys.executable
            settings = {"ours": our_settings, "stock": stock_settings}.get(name, lambda *_: {"": {}})(task, arguments)
            best = fastest(task, steps, name, settings)
            contestants[name] = opened.enter_context(task.contestant(name, python, **best))
        for name, contestant in contestants.items():
            print(f"  {name}: {contestant.who}")
        taken, peaks = take_turns(contestants, dict.fromkeys(contestants, steps), arguments)
        memory = {name: contestant.tell("memory", steps[0].file) for name, contestant in contestants.items()}
    say_peak(peaks)
    print(f"  {'':6}{'ms a step':>24}{'pairs/s':>28}{'tokens/s':>32}{'MFU':>8}{'memory, MiB':>20}")
    for name, turns in taken.items():
        ms = spread([1000 * seconds / len(done) for done, seconds in turns])
        share = statistics.median(rates(turns, "arithmetic")) / statistics.median(peaks)
        held, more = (number / 2**20 for number in memory[name])
        pairs, tokens = spread(rates(turns, "pairs"), 1), spread(rates(turns, "tokens"))
        print(f"  {name:6}{ms:>24}{pairs:>28}{tokens:>32}{share:>8.1%}{f'{held:,.0f} + {more:,.0f}':>20}")
    for name in taken:
        if name != "ours" and "ours" in taken:
            ratios = [theirs / ours for (_, theirs), (_, ours) in zip(taken[name], taken["ours"], strict=True)]
            print(f"  ours is {spread(ratios, 2)} times as fast as {name}, turn by turn")
    sys.stdout.flush()


def describe(task, steps):
    total = {name: sum(getattr(step.counts, name) for step in steps) for name in vars(steps[0].counts)}
    full = total["tokens"] / total["examples"] / task.run.max_seq_length
    predicted, cut = total["masked_tokens"] / total["examples"], 1 - total["tokens"] / total["padded_tokens"]
    print(f"\n{task}\n  {full:.1%} full, {predicted:.1f} tokens predicted in a pair, {cut:.1%} padding as we cut them")
    known = len(prepare(task.run).tokenizer)
    if known != task.architecture.vocab_size:
        print(f"  the tokenizer has {known:,} entries; the model's others occur in no pair")
    sys.stdout.flush()


def our_settings(task, arguments) -> dict[str, dict]:
    """Compiled or not, which a long run finds out for itself."""
    choices = {"auto": ("false", "true")}.get(arguments.torch_compile, (arguments.torch_compile,))
    return {f"torch_compile {choice}": {"run": asdict(replace(task.run, torch_compile=choice))} for choice in choices}


def stock_settings(task, arguments) -> dict[str, dict]:
    """Compiled or not, either attention, all pairs of a step at once or fewer."""
    pairs = sorted({task.run.global_batch_size, min(task.run.global_batch_size, 64 if task.size == "small" else 16)})
    variants = map("/".join, itertools.product(("eager", "compiled"), ("sdpa", "eager"), map(str, pairs)))
    return {variant: {"variant": variant} for variant in arguments.stock or variants}


def fastest(task, steps, name, settings: dict[str, dict]) -> dict:
    """The setting in which a contestant is fastest here, by a trial of each."""
    best, shortest = next(iter(settings.values())), math.inf
    for label, setting in settings.items() if len(settings) > 1 else ():
        try:
            with task.contestant(name, **setting) as contestant:
                contestant.tell("steps", *orders(steps[:3]))  # allocate, and compile every shape
                seconds = min(contestant.tell("steps", *orders([step])) for step in steps[1:3])
        except RuntimeError as error:
            print(f"  {name}, trial of {label}: {str(error).splitlines()[-1]}", flush=True)
            continue
        print(f"  {name}, trial of {label}: {1000 * seconds:,.0f} ms a step", flush=True)
        if seconds < shortest:
            best, shortest = setting, seconds
    return best


# ---------------------------------------------------------------------------------------------------------------------
# What a token costs


def vocabularies(task, arguments, folder):
    """The same text and tokenizer, and a larger and larger table of tokens."""
    run, tasks = replace(task.run, vocab_size=min(arguments.vocab_sizes)), {}
    for size in arguments.vocab_sizes:
        numbers = {**task.architecture.to_diff_dict(), "vocab_size": size}
        numbers.pop("transformers_version", None)
        tasks[size] = replace(task, run=run, architecture=D2lBertConfig(**numbers))
    return costs(tasks, "vocabulary", arguments, folder)


def lengths(task, arguments, folder):
    """Pairs of segments, as many tokens a step at each length."""
    tokens, tasks = task.run.global_batch_size * task.run.max_seq_length, {}
    for length in arguments.lengths:
        pairs = max(1, tokens // length)
        micro = max(1, batching.most_tokens(task.run) // length)
        changes = {"pairing": "segments", "global_batch_size": pairs, "micro_batch_size": micro}
        tasks[length] = replace(task, run=replace(task.run, max_seq_length=length, **changes))
    return costs(tasks, "tokens in a pair", arguments, folder)


def costs(tasks, what, arguments, folder):
    """Our tokens a second in each task, beside what the first one's would become by the arithmetic alone.

    Below them the line that the times of a token lie on, and the arithmetic that it grows by.

    Returns:
        For each task its label, operations a token, tokens a second as measured and on that line, if there is one.
    """
    steps_of = {label: task.files(folder, max(4, arguments.steps)) for label, task in tasks.items()}
    for label, task in tasks.items():
        describe(task, steps_of[label])
    with contextlib.ExitStack() as opened:
        contestants = {label: opened.enter_context(task.contestant("ours")) for label, task in tasks.items()}
        taken, peaks = take_turns(contestants, steps_of, arguments)
    print()
    say_peak(peaks)
    print(f"  {what:>18}{'MFLOP a token':>16}{'tokens/s':>32}{'by arithmetic':>16}{'MFU':>8}")
    rows = []
    for label, turns in taken.items():
        operations = sum(step.arithmetic for step in steps_of[label]) / sum(step.tokens for step in steps_of[label])
        speed = rates(turns, "tokens")
        rows.append((label, operations, statistics.median(speed)))
        _, first_operations, first_speed = rows[0]
        expected = first_speed * first_operations / operations
        share = statistics.median(rates(turns, "arithmetic")) / statistics.median(peaks)
        print(f"  {label:>18,}{operations / 1e6:>16.2f}{spread(speed):>32}{expected:>16,.0f}{share:>8.1%}", flush=True)
    if len(rows) < 3:  # a line goes through any two
        return [(*row, None) for row in rows]
    labels, operations, speeds = map(np.array, zip(*rows, strict=True))
    slope, own = np.polyfit(labels, 1 / speeds, 1)
    more = np.polyfit(labels, operations, 1)[0]
    fitted = 1 / (own + slope * labels)
    print(
        f"  a token takes {1e6 * own:.1f} us and, for every 1,000, {1e9 * slope:.2f} us more, for {more / 1e3:.2f} "
        f"MFLOP more ({more / slope / statistics.median(peaks):.0%} of the peak): within "
        f"{abs(fitted / speeds - 1).max():.1%} of every row",
        flush=True,
    )
    return [(*row, speed) for row, speed in zip(rows, fitted.tolist(), strict=True)]


def plot(tables, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(tables), 4), layout="constrained")
    for axes, (what, rows) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        labels, operations, speeds, fitted = zip(*rows, strict=True)
        axes.plot(labels, speeds, "o-", label="measured")
        axes.plot(labels, [speeds[0] * operations[0] / each for each in operations], "--", label="by arithmetic")
        if None not in fitted:
            axes.plot(labels, fitted, ":", label="on a line of times")
        axes.set(xlabel=what, ylabel="tokens/s", xscale="log", ylim=(0, None), xticks=labels)
        axes.set_xticks(labels, [f"{label:,}" for label in labels])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------------------------------------------------
# A whole run

RUNS, ROWS = 3, 10
TURN = 3.0  # seconds, at least a step


def end_to_end(task, arguments, folder):
    """`d2l-bert pretrain` in turns with the bare step, with the tokenizer's vocabulary as its own."""
    compiled = "true" if arguments.torch_compile == "true" else "false"  # both the same, however long the run
    run, architecture = replace(task.run, torch_compile=compiled), copy.deepcopy(task.architecture)
    architecture.vocab_size = len(prepare(run).tokenizer)
    task = replace(task, run=run, architecture=architecture)
    # The bare step takes these again and again, and knows their shapes; a run's are new.
    steps, count = task.files(folder, arguments.repetitions * arguments.steps), arguments.end_to_end
    describe(task, steps)
    found = []
    with task.contestant("ours") as ours:
        for number in range(RUNS):
            output = Path(folder) / f"model-{number}"
            bare = BareStep(ours, steps)
            stopped_seconds = train_in_turns(command_of(task, count, output), task.device, output, count, bare)
            found.append({"bare": bare.tokens / bare.seconds, **speeds(output, count, stopped_seconds)})
            share = found[-1]["later"] / found[-1]["bare"]
            print(
                f"  run {number + 1} of {RUNS}: {share:.1%} of the bare step's tokens/s, {bare.turns} turns",
                flush=True,
            )
    bare, later, whole, waited, mfu = ([each[name] for each in found] for name in found[0])
    print(f"  bare step, in turns with the runs: {spread(bare)} tokens/s")
    first = steps_in_a_row(count)
    print(f"  d2l-bert pretrain, {RUNS} runs of {count} steps, after the first {first}: {spread(later)} tokens/s")
    for what, runs in (("", later), (f", the first {first} too", whole)):
        shares = [100 * run / beside for run, beside in zip(runs, bare, strict=True)]
        print(f"  of the bare step's{what}: {spread(shares, 1, ' %')}")
    waiting = statistics.median(waited)
    print(f"  waiting for batches {waiting:.2%} of the time; MFU {statistics.median(mfu):.1%}", flush=True)


def steps_in_a_row(count) -> int:
    """Steps in a row of the log of a run of so many."""
    return max(1, count // ROWS)


def command_of(task, count, output) -> list[str]:
    """The command that trains what the bare step trains."""
    flags = {"corpus": task.run.corpus, "output_dir": output}
    flags |= {"max_steps": count, "logging_steps": steps_in_a_row(count), "eval_steps": count, "save_steps": count}
    flags |= {"length_schedule": "none", "batch_size_schedule": "none", "torch_compile": task.run.torch_compile}
    for name in ("vocab_size", "pairing", "max_seq_length", "mlm_probability", "global_batch_size"):
        flags[name] = getattr(task.run, name)
    flags["micro_batch_size"] = batching.micro_batch_pairs(task.run)
    flags |= {name: getattr(task.architecture, name) for name in architecture_options()}
    command = [sys.executable, "-m", "d2l_bert", "pretrain", "--recipe", task.run.recipe]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)]
        command += [f"--{name}", *values] if value is not None else []
    return command


class BareStep:
    """A contestant that goes through some steps again and again, and what it did since it knows them."""

    def __init__(self, contestant, steps):
        self.contestant, self.steps = contestant, itertools.cycle(steps)
        self.turns, self.tokens, self.seconds = 0, 0, 0.0
        self.a_step = contestant.tell("steps", *orders(steps)) / len(steps)

    def work(self, seconds) -> float:
        """About so long, a step at least; how long it was."""
        steps = list(itertools.islice(self.steps, max(1, round(seconds / self.a_step))))
        spent = self.contestant.tell("steps", *orders(steps))
        self.turns, self.seconds, self.a_step = self.turns + 1, self.seconds + spent, spent / len(steps)
        self.tokens += sum(step.tokens for step in steps)
        return spent


def train_in_turns(command, device, output, count, bare) -> float:
    """
    Train with the command line. From the first row of its log to the last the system stops the run every few seconds,
    with the processes that load for it, and the bare step works; each of them as long as the other.

    Returns:
        The seconds for which it was stopped.

    Raises:
        ValueError: if it failed, or ended before it was stopped.
    """
    log, turn, stopped_seconds = output / "training_log.jsonl", TURN, 0.0
    with tempfile.TemporaryFile("w+") as errors:
        outputs = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(command, env=environment(device), start_new_session=True, **outputs)
        try:
            while is_at_work(process, turn):
                since = time.monotonic()
                os.killpg(process.pid, signal.SIGSTOP)
                rows = speed_rows(log)
                if rows and rows[-1]["step"] < count:
                    turn = bare.work(TURN)
                    stopped_seconds += time.monotonic() - since
                os.killpg(process.pid, signal.SIGCONT)
        finally:
            if process.returncode is None:  # something went wrong here; nobody would wake it
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            errors.seek(0)
            reason = errors.read().strip().rpartition("\n")[2]
            raise ValueError(f"d2l-bert pretrain failed with exit code {process.returncode}: {reason}")
    if not stopped_seconds:
        raise ValueError(f"a run of {count} steps is over before the bare step has a turn; give --end_to_end more")
    return stopped_seconds


def is_at_work(process, seconds) -> bool:
    """Whether a process is still at it after so long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is None


def speeds(output, count, stopped_seconds) -> dict[str, float]:
    """Tokens a second after the first row of the log, and of all steps; the share of time waited, and MFU. The time in
    which the run was stopped, which its own clock counts, is taken off."""
    rows, metrics = speed_rows(output / "training_log.jsonl"), json.loads((output / METRICS_FILE).read_text())
    seconds = metrics["train_seconds"]
    tokens, working = seconds * metrics["train_tokens_per_second"], seconds - stopped_seconds
    # A row does not say how long its steps took, but how long those will take that are left.
    a_step = [row["seconds_left"] / (count - row["step"]) for row in rows[:-1]]
    first = rows[0]["step"] * a_step[0]
    # A run that is stopped while it waits seems to wait long; in the row in the middle it is not.
    waits = [row["data_wait_share"] * each for row, each in zip(rows, a_step, strict=False)]
    return {
        "later": (tokens - first * rows[0]["tokens_per_second"]) / (working - first),
        "whole": tokens / working,
        "waited": statistics.median(waits) * count / working,
        "mfu": metrics["train_mfu"] * seconds / working,
    }


def speed_rows(log: Path) -> list[dict]:
    return [row for row in TrainingLog(log).rows() if "tokens_per_second" in row]


def quality(task, arguments, folder):
    """Ours and d2l's model on the same pairs, then on the same held-out ones."""
    count, run = arguments.quality, task.run
    steps = task.steps(count)
    held_out = str(write_step(list(batching.make_held_out(run, prepare(run))), Path(folder) / "held-out"))
    warmup, decay = run.schedule_steps(count)
    shares = [learning_rate_share(run.lr_scheduler_type, step, warmup, count, decay) for step in range(count)]
    print(f"\n{task}\n  {count} steps at rates up to {run.learning_rate:g}, held-out pairs in between", flush=True)
    print(f"  {'':22}{'step':>6}{'MLM loss':>10}{'accuracy':>10}{'NSP loss':>10}{'accuracy':>10}{'training, s':>13}")
    with contextlib.ExitStack() as opened:
        rates_of = {"ours, rate falls": [run.learning_rate * share for share in shares]}
        contestants = {"ours, rate falls": opened.enter_context(task.contestant("ours"))}
        if "d2l" in arguments.contestants:
            rates_of["d2l, rate stays"] = [run.learning_rate] * count
            contestants["d2l, rate stays"] = opened.enter_context(task.contestant("d2l", arguments.d2l_python))
        spent = dict.fromkeys(contestants, 0.0)
        for number in range(count):
            step = Step(steps[number], Path(folder) / "step", task.architecture)
            evaluated = (number + 1) % math.ceil(count / 5) == 0 or number + 1 == count
            for label, contestant in contestants.items():
                spent[label] += contestant.tell("steps", [step.file], [rates_of[label][number]])
                if evaluated:
                    sums = torch.tensor(contestant.tell("evaluate", held_out))
                    found = held_out_figures(sums, PAIR_TASKS[run.objective])
                    columns = [f"eval_{loss}_{figure}" for loss in ("mlm", "nsp") for figure in ("loss", "accuracy")]
                    shown = "".join(f"{found[column]:>10.4f}" for column in columns)
                    print(f"  {label:22}{number + 1:>6}{shown}{spent[label]:>13.1f}", flush=True)


if __name__ == "__main__":
    main()
