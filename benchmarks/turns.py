"""What benchmarks share: two sizes of models, the task of all contestants, their turns, what is printed."""

import argparse
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch
import transformers

from benchmarks.peers import Contestant, write_step
from d2l_bert import D2lBertConfig, PretrainConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.devices import matmul_peak
from d2l_bert.training.log import training_arithmetic
from d2l_bert.training.recipes import architecture_options


# The architecture of BERT-base; that of d2l's small BERT is the default of `D2lBertConfig`.
BASE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "embedding_layer_norm": True,
    "tie_word_embeddings": True,
}


def positive(text: str) -> int:
    """The type of an argument that must be a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


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


@dataclass
class Task:
    """The training that all contestants do: architecture, options of the run, device."""

    size: str
    architecture: D2lBertConfig
    run: PretrainConfig
    device: str

    def __post_init__(self):
        if self.run.objective == "auto":  # what a run makes of it with these texts
            self.run = replace(self.run, objective="nsp")
        self.run.check()

    def __str__(self):
        model = self.architecture
        run = self.run
        return (
            f"{self.size}, {run.pairing}: {model.num_hidden_layers} x {model.hidden_size}, vocabulary "
            f"{model.vocab_size:,}, dropout {model.hidden_dropout_prob:g}; {run.global_batch_size} pairs of up to "
            f"{run.max_seq_length} tokens a step"
        )

    def contestant(self, name, python=sys.executable, **more) -> Contestant:
        names = [*architecture_options(), "vocab_size", "pad_token_id"]
        numbers = {name: getattr(self.architecture, name) for name in names}
        setup = {"architecture": numbers, "run": asdict(self.run), "device": self.device, **more}
        return Contestant(name, setup, python)

    def steps(self, count):
        """The micro-batches of each of the first steps."""
        return (step.micro_batches for step in TrainingSteps(self.run, prepare(self.run), count).walk())

    def write_steps(self, folder, count) -> list["Step"]:
        own = Path(tempfile.mkdtemp(dir=folder))
        steps = []
        for number, micro_batches in enumerate(self.steps(count)):
            steps.append(Step(micro_batches, own / f"{number}.safetensors", self.architecture))
        return steps


class Step:
    """A step's micro-batches in a file, its number of pairs and tokens, and its operations (`arithmetic`)."""

    def __init__(self, micro_batches, path, architecture):
        self.file = str(write_step(micro_batches, path))
        self.counts = counts_of(micro_batches)
        self.pairs = self.counts.examples
        self.tokens = self.counts.tokens
        self.arithmetic = training_arithmetic(architecture, self.counts, pair_task=True)


def take_turns(contestants, steps_of, arguments):
    """
    Let the contestants work in turns, `--repetitions` turns each, and measure the machine's peak between the turns.

    Args:
        contestants: a dict from label to contestant.
        steps_of: for each label, the steps of its contestant. Contestants with equal lists do the same steps in turn.

    Returns:
        For each label, a list of (steps, seconds), one for each turn; and the measured peaks in bf16 (operations/s).
    """
    taken = {label: [] for label in contestants}
    peaks = []
    for label, contestant in contestants.items():  # the first call allocates memory, and compiles for every shape
        contestant.call("steps", *step_arguments(steps_of[label]))
    for turn in range(arguments.repetitions):
        peaks.append(matmul_peak(torch.device(arguments.device), torch.bfloat16))
        first = turn * arguments.steps
        order = list(contestants)
        if turn % 2:
            order.reverse()
        for label in order:
            all_steps = steps_of[label]
            steps = [all_steps[number % len(all_steps)] for number in range(first, first + arguments.steps)]
            taken[label].append((steps, contestants[label].call("steps", *step_arguments(steps))))
    return taken, peaks


def step_arguments(steps, rate=1e-4):
    return [step.file for step in steps], [rate] * len(steps)


def per_second(turns, count):
    """For each turn, the sum of a count of its steps (such as "tokens"), divided by the turn's seconds."""
    found = []
    for steps, seconds in turns:
        total = sum(getattr(step, count) for step in steps)
        found.append(total / seconds)
    return found


def summary(values, digits=0, unit=""):
    """The median of values, the lowest and the highest."""
    median = f"{statistics.median(values):,.{digits}f}{unit}"
    return f"{median} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def describe(task, steps):
    """Print what the steps hold: how full the rows are, and how many tokens are predicted."""
    examples = sum(step.counts.examples for step in steps)
    tokens = sum(step.counts.tokens for step in steps)
    padded_tokens = sum(step.counts.padded_tokens for step in steps)
    full = tokens / examples / task.run.max_seq_length
    predicted = sum(step.counts.masked_tokens for step in steps) / examples
    cut = 1 - tokens / padded_tokens
    print(f"\n{task}\n  {full:.1%} full, {predicted:.1f} tokens predicted in a pair, {cut:.1%} padding as we cut them")
    known = len(prepare(task.run).tokenizer)
    if known != task.architecture.vocab_size:
        print(f"  the tokenizer has {known:,} entries; the model's others occur in no pair")
    sys.stdout.flush()
