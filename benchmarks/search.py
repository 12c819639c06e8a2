"""
Trains a model for each line of a list of options and each seed, and measures each: a row of a table for every run.

    python -m benchmarks.search benchmarks/search/tiny.txt --books DIR --blimp DIR --work_dir out \
        --results benchmarks/results/search_tiny.jsonl --seeds 1 --minutes 5

A line of the list is `name: options of d2l-bert pretrain`; lines that begin with # are left out. DIR/train and
DIR/valid of `--books` are folders of text, for all lines without `--corpus`. A run trains for `--minutes`, unless its
line has `--max_steps` or `--max_minutes`, on `--threads` threads; `--parallel` runs share the machine. Runs that have
a row already are not run again. All models of a list are measured on the same text: the sentences of DIR/valid, or
what is held out of `--corpus`.

    python -m benchmarks.search --table benchmarks/results/search_tiny.jsonl

prints the rows as a table, by their names: means over the seeds, and standard deviations.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple


# Of the text that all models are measured on.
MOST = ["--max_eval_pairs", "4000"]


class Column(NamedTuple):
    """A column of the table: its title, the factor to its unit, and the number of digits behind the point."""

    title: str
    factor: int
    digits: int


# By the names of figures in the rows.
COLUMNS = {
    "mlm": Column("MLM loss", 1, 3),
    "accuracy": Column("accuracy", 100, 1),
    "nsp": Column("NSP accuracy", 100, 1),
    "pppl": Column("word pseudo-perplexity", 1, 0),
    "blimp": Column("BLiMP", 100, 1),
}


def read_list(path: Path) -> dict[str, list[str]]:
    """The options of each run by its name."""
    options_of = {}
    for line in path.read_text().splitlines():
        name, _, options = line.strip().partition(":")
        if name and not name.startswith("#"):
            options_of[name.strip()] = shlex.split(options)
    return options_of


def sentences_of(text: Path) -> list[str]:
    """Options of `d2l-bert evaluate` that measure every model on single sentences of a text."""
    return ["--corpus", str(text), "--pairing", "sentences", "--objective", "none", *MOST]


def run(name, options, seed, arguments) -> dict:
    """Train and measure one model; the content of its row."""
    folder = arguments.work_dir / f"{name}-{seed}"
    has_length = "--max_steps" in options or "--max_minutes" in options
    length = [] if has_length else ["--max_minutes", str(arguments.minutes)]
    words = ["pretrain", *options, *length, "--seed", str(seed), "--torch_compile", "true"]
    paths = ["--output_dir", str(folder), "--overwrite_output_dir"]
    if "--corpus" in options:
        measured_on = ["--corpus", options[options.index("--corpus") + 1], "--held_out", "true", *MOST]
    else:
        valid = arguments.books / "valid"
        paths += ["--corpus", str(arguments.books / "train"), "--validation_corpus", str(valid)]
        measured_on = sentences_of(valid)
    output = folder / "evaluated.json"
    pairs = ["--blimp", str(arguments.blimp)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    with (arguments.work_dir / f"{name}-{seed}.log").open("w") as log:
        run_command([*words, *paths], log, environment)
        output.unlink(missing_ok=True)
        run_command(["evaluate", str(folder), *measured_on, *pairs, "--output", str(output)], log, environment)
    return {
        "name": name,
        "seed": seed,
        "command": shlex.join(["d2l-bert", *words]),
        "threads": arguments.threads,
        "parallel": arguments.parallel,
        **figures(folder),
    }


def run_command(words: list[str], log, environment: dict[str, str]) -> None:
    """Run a command of `d2l-bert`, which writes into the file `log`."""
    command = [sys.executable, "-m", "d2l_bert", *words]
    subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def figures(folder: Path) -> dict:
    """The part of a row that a trained and evaluated model gives."""
    metrics = json.loads((folder / "metrics.json").read_text())
    (evaluated,) = json.loads((folder / "evaluated.json").read_text())["models"]
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return {
        "steps": max(row["step"] for row in rows if "tokens_per_second" in row),
        "seconds": round(metrics["train_seconds"], 1),
        "tokens": round(metrics["train_tokens_per_second"] * metrics["train_seconds"]),
        "mlm": evaluated["text"]["mlm_loss"],
        "accuracy": evaluated["text"]["mlm_accuracy"],
        "nsp": evaluated["text"].get("nsp_accuracy"),
        "pppl": evaluated["text"]["pseudo_perplexity"],
        "blimp": evaluated["blimp"]["accuracy"],
        "blimp_se": evaluated["blimp"]["standard_error"],
    }


def print_table(path: Path) -> None:
    """Means and standard deviations of the rows by name, the best BLiMP first."""
    runs_of: dict[str, list[dict]] = {}
    for row in read_rows(path):
        runs_of.setdefault(row["name"], []).append(row)
    titles = [column.title for column in COLUMNS.values()]
    print_row(["run", "options", "seeds", *titles, "tokens", "minutes"])
    print(f"|{'---|' * (5 + len(titles))}")
    for name in sorted(runs_of, key=lambda name: -mean(runs_of[name], "blimp")):
        runs = runs_of[name]
        words = shlex.split(runs[0]["command"])[2:]
        options = shlex.join(words[: words.index("--seed")])
        cells = [mean_and_deviation(runs, figure, column) for figure, column in COLUMNS.items()]
        tokens = f"{mean(runs, 'tokens') / 1e6:.1f}M"
        minutes = f"{mean(runs, 'seconds') / 60:.1f}"
        print_row([name, f"`{options}`", str(len(runs)), *cells, tokens, minutes])


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def mean(runs: list[dict], figure: str) -> float:
    return statistics.fmean(run[figure] for run in runs)


def mean_and_deviation(runs: list[dict], figure: str, column: Column) -> str:
    """The cell of a figure: the mean, with the standard deviation of several runs; "" without the figure."""
    values = [column.factor * run[figure] for run in runs if run.get(figure) is not None]
    if not values:
        return ""
    shown = f"{statistics.fmean(values):.{column.digits}f}"
    return shown if len(values) == 1 else f"{shown} ({statistics.stdev(values):.{column.digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--books", type=Path)
    parser.add_argument("--blimp", type=Path)
    parser.add_argument("--work_dir", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.table:
        print_table(arguments.table)
    else:
        search(arguments)


def search(arguments) -> None:
    """Train and measure all models of a list that have no row yet, the first seed of all first."""
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    arguments.results.touch()
    done = {(row["name"], row["seed"]) for row in read_rows(arguments.results)}
    lock = threading.Lock()

    def run_and_write(name, seed):
        options = read_list(arguments.runs).get(name)  # read again: a line that was deleted meanwhile is not run
        if options is None:
            return
        try:
            row = run(name, options, seed, arguments)
        except (subprocess.CalledProcessError, KeyError) as error:
            print(f"{name}, seed {seed}: failed ({error}); see its log in {arguments.work_dir}", flush=True)
            return
        with lock, arguments.results.open("a") as results:
            results.write(json.dumps(row) + "\n")
        print(f"{name}, seed {seed}: MLM {row['mlm']:.3f}, BLiMP {100 * row['blimp']:.1f}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.parallel) as pool:
        started = []
        for seed in arguments.seeds:
            for name in read_list(arguments.runs):
                if (name, seed) not in done:
                    started.append(pool.submit(run_and_write, name, seed))
        for future in started:
            future.result()  # raises what the run has raised


if __name__ == "__main__":
    main()
