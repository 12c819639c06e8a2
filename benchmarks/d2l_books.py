"""The book's own run on books, its code and ours side by side, and why the book's NSP loss ends above ln 2.

    python -m benchmarks.d2l_books BOOKS --d2l_python peers/bin/python [--max_steps 50] [--output FILE.json]
    python -m benchmarks.d2l_books BOOKS --d2l_python peers/bin/python --experiment [NAME...] [--output FILE.json]

BOOKS is a folder with the folders `train` and `valid`. Both programs train d2l's small BERT on the same pairs of
sentences with the same masks, 512 pairs of 64 tokens a step: d2l 1.0.3 by its own loss and step (Adam at a constant
rate of 0.01), ours as `d2l-bert pretrain --recipe d2l-50-steps` does. `benchmarks.throughput` says how to make the
environment with d2l.

Each step's training losses are recorded, those of held-out pairs every `--eval_steps` steps. d2l prints neither: it
prints the mean of the training losses over all steps, and its MLM loss counts padded slots. The picture, beside the
JSON file, shows the training losses thin and the held-out losses thick, with ln 2, the NSP loss at chance level.

`--experiment` trains d2l's model again and again, each time with one thing changed (`VARIANTS`).
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch

from benchmarks.peers import write_step
from benchmarks.throughput import exit_on_signals
from benchmarks.turns import Task, heading, positive
from d2l_bert import RECIPES
from d2l_bert.folders import write_json
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.held_out import HeldOutPairs, held_out_metrics
from d2l_bert.training.schedule import learning_rate


LN_2 = math.log(2)
RATE = 0.01  # of d2l
LAST = 10  # steps at the end whose training losses are averaged


@dataclass(frozen=True)
class Variant:
    """
    A change of the book's run.

    Args:
        what: the change in words.
        rate: the learning rate of a step, from the step and the number of steps.
        book: changes of the step, as in `benchmarks.peers.Book`.
    """

    what: str
    rate: object = lambda step, count: RATE
    book: dict = field(default_factory=dict)


def warmed_up(rate):
    """A rate that rises in the first tenth of the steps and then stays."""
    return lambda step, count: rate * min(1.0, (step + 1) / max(1, count // 10))


# Each changes one thing. The first is the book's own run.
VARIANTS = {
    "book": Variant("nothing changed"),
    "warmup": Variant("the rate rises to 0.01 in the first tenth of the steps", warmed_up(RATE)),
    "falling": Variant("the rate falls from 0.01 to 0", lambda step, count: RATE * (1 - step / count)),
    "rate_1e-3": Variant("rate 0.001", lambda step, count: 1e-3),
    "clipped": Variant("gradient norm at most 1", book={"max_grad_norm": 1.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("books", type=Path, metavar="BOOKS", help="a folder with the folders train and valid")
    parser.add_argument("--d2l_python", required=True, metavar="PATH", help="Python of the environment with d2l 1.0.3")
    parser.add_argument("--max_steps", type=positive, default=50, help="as many as in the book")
    parser.add_argument("--eval_steps", type=positive, default=5, help="steps between evaluations on held-out pairs")
    parser.add_argument("--global_batch_size", type=positive, default=512, help="pairs in a step")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--experiment", nargs="*", metavar="NAME", help=f"train variants of d2l's run: {', '.join(VARIANTS)}; or all"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write figures, and a picture beside them")
    arguments = parser.parse_args()
    for name in arguments.experiment or ():
        if name not in VARIANTS:
            parser.error(f"--experiment {name}: no such variant; give {', '.join(VARIANTS)}")
    for name in ("train", "valid"):
        if not (arguments.books / name).is_dir():
            parser.error(f"{arguments.books}: has no folder {name}; give the folder with the books")
    if arguments.output and arguments.output.suffix != ".json":
        parser.error(f"--output {arguments.output}: give a name that ends in .json")
    exit_on_signals()
    print(heading(arguments.device))
    task = make_task(arguments)
    print(f"{task}\n", flush=True)
    print_head()
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        trained = side_by_side if arguments.experiment is None else experiment
        for name, losses in trained(task, arguments, Path(folder)):
            print_row(name, losses)
            runs[name] = losses
            if arguments.output:  # after each run, so that a program that is stopped leaves those before
                write_json(arguments.output, content_of(task, runs))
                plot(runs, arguments.output.with_suffix(".png"))


def make_task(arguments) -> Task:
    architecture, run = RECIPES["d2l-50-steps"]()
    run = replace(
        run,
        corpus=[str(arguments.books / "train")],
        validation_corpus=[str(arguments.books / "valid")],
        global_batch_size=arguments.global_batch_size,
    )
    return Task("d2l's small BERT", architecture, run, arguments.device)


# ---------------------------------------------------------------------------------------------------------------------
# Training


@dataclass
class Losses:
    """
    The losses of one run.

    Args:
        what: the run in words.
        rates: the learning rate of each step.
        mlm, nsp: the training losses of each step.
        held_out: by the number of steps done, the figures on held-out pairs.
    """

    what: str
    rates: list[float] = field(default_factory=list)
    mlm: list[float] = field(default_factory=list)
    nsp: list[float] = field(default_factory=list)
    held_out: dict[int, dict[str, float]] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """What the book prints (`mean_...`), the mean of the last steps, and the last figures on held-out pairs."""
        last = self.held_out[max(self.held_out)]
        return {
            "mean_mlm_loss": statistics.fmean(self.mlm),
            "mean_nsp_loss": statistics.fmean(self.nsp),
            "highest_nsp_loss": max(self.nsp),
            "last_nsp_loss": statistics.fmean(self.nsp[-LAST:]),
            **{name: last[f"eval_{name}"] for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")},
        }

    def content(self) -> dict:
        """The entry of the run in the JSON file."""
        return {
            "what": self.what,
            "summary": self.summary(),
            "learning_rates": self.rates,
            "train_mlm_loss": self.mlm,
            "train_nsp_loss": self.nsp,
            "held_out": {str(step): figures for step, figures in self.held_out.items()},
        }


def train(task, contestant, what, rates, steps, held_out, folder, eval_steps) -> Losses:
    """
    Train a contestant, and evaluate it on held-out pairs.

    Args:
        rates: the learning rate of each step.
        steps: the micro-batches of each step.
        held_out: a file with held-out pairs.
    """
    losses = Losses(what)
    for number, (rate, micro_batches) in enumerate(zip(rates, steps, strict=True)):
        file = str(write_step(micro_batches, folder / "step"))
        mlm, nsp = contestant.call("losses", file, rate)
        losses.rates.append(rate)
        losses.mlm.append(mlm)
        losses.nsp.append(nsp)
        if (number + 1) % eval_steps == 0 or number + 1 == len(rates):
            sums = torch.tensor(contestant.call("evaluate", held_out))
            losses.held_out[number + 1] = held_out_metrics(sums, PAIR_TASKS[task.run.objective])
    return losses


def side_by_side(task, arguments, folder) -> Iterator[tuple[str, Losses]]:
    """d2l's run and ours on the same pairs."""
    count = arguments.max_steps
    held_out = write_held_out(task, folder)
    run = replace(task.run, max_steps=count, num_train_epochs=None, max_minutes=None)
    plans = {
        "d2l": ("d2l 1.0.3, the rate stays at 0.01", [RATE] * count, arguments.d2l_python),
        "ours": (
            "d2l-bert, recipe d2l-50-steps, the rate stays at 0.01",
            [learning_rate(run, step) for step in range(1, count + 1)],
            None,
        ),
    }
    for name, (what, rates, python) in plans.items():
        with task.contestant(name, python or sys.executable) as contestant:
            steps = task.steps(count)
            yield name, train(task, contestant, what, rates, steps, held_out, folder, arguments.eval_steps)


def experiment(task, arguments, folder) -> Iterator[tuple[str, Losses]]:
    """d2l's run with one thing changed at a time."""
    count = arguments.max_steps
    held_out = write_held_out(task, folder)
    for name in dict.fromkeys(["book", *(arguments.experiment or VARIANTS)]):
        variant = VARIANTS[name]
        rates = [variant.rate(step, count) for step in range(count)]
        with task.contestant("d2l", arguments.d2l_python, book=variant.book) as contestant:
            steps = task.steps(count)
            yield name, train(task, contestant, variant.what, rates, steps, held_out, folder, arguments.eval_steps)


def write_held_out(task, folder) -> str:
    text = prepare(task.run)
    most = task.run.most_tokens()
    held_out = HeldOutPairs(text.held_out, text.tokenizer, task.run, most, text.held_out_name())
    return str(write_step(list(held_out), folder / "held-out"))


# ---------------------------------------------------------------------------------------------------------------------
# Output


def print_head():
    print(f"  {'':12}{'NSP loss in training':^36}{'held out':^24}")
    print(
        f"  {'':12}{'mean':>9}{'highest':>9}{f'last {LAST}':>9}{'<= ln 2':>9}{'NSP':>8}{'MLM':>8}{'<= ln 2':>9}",
        flush=True,
    )


def print_row(name, losses):
    told = losses.summary()
    columns = [f"{told[key]:>9.3f}" for key in ("mean_nsp_loss", "highest_nsp_loss", "last_nsp_loss")]
    columns.append(f"{'yes' if told['last_nsp_loss'] <= LN_2 else 'no':>9}")
    columns += [f"{told[key]:>8.3f}" for key in ("nsp_loss", "mlm_loss")]
    columns.append(f"{'yes' if told['nsp_loss'] <= LN_2 else 'no':>9}")
    print(f"  {name:12}{''.join(columns)}  {losses.what}", flush=True)


def content_of(task, runs) -> dict:
    """The content of the JSON file."""
    words = [without_folder(word) for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", "-m", "benchmarks.d2l_books", *words]),
        "date": date.today().isoformat(),
        "machine": heading(task.device).splitlines()[-1],
        "task": str(task),
        "ln_2": LN_2,
        "runs": {name: losses.content() for name, losses in runs.items()},
    }


def without_folder(word):
    """A word of the command without the folders of this machine."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def plot(runs: dict[str, Losses], path: Path) -> None:
    """Draw the MLM and the NSP loss of all runs over the share of the steps done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for number, (name, losses) in enumerate(runs.items()):
        color = f"C{number % 10}"
        count = len(losses.rates)
        line = "-" if number < 10 else "--"
        done = [step / count for step in losses.held_out]
        for axes, trained, key in zip(panels, (losses.mlm, losses.nsp), ("mlm_loss", "nsp_loss"), strict=True):
            axes.plot([(step + 1) / count for step in range(count)], trained, line, color=color, lw=0.6, alpha=0.5)
            held_out = [figures[f"eval_{key}"] for figures in losses.held_out.values()]
            axes.plot(done, held_out, f"{line}o", color=color, lw=1.8, ms=3, label=f"{name}: {losses.what}")
    panels[0].set(title="MLM loss", xlabel="share of the steps", ylabel="nats")
    panels[1].set(title="NSP loss", xlabel="share of the steps", ylim=(0.5, 1.2))
    panels[1].axhline(LN_2, color="black", lw=1, ls=":")
    panels[1].annotate("ln 2, chance level", (1.0, LN_2), xytext=(0, -10), textcoords="offset points", ha="right")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small", ncols=2)
    told = "thin: training, with dropout (d2l counts padded slots in its MLM loss); thick: held-out pairs"
    figure.suptitle(told, fontsize="medium")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
