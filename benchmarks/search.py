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


# Of the text that all models are measured on.
MOST = ["--max_eval_pairs", "4000"]

# Of each run: the column of the table, the scale and the number of digits.
FIGURES = {
    "mlm": ("MLM loss", 1, 3),
    "accuracy": ("accuracy", 100, 1),
    "nsp": ("NSP accuracy", 100, 1),
    "pppl": ("word pseudo-perplexity", 1, 0),
    "blimp": ("BLiMP", 100, 1),
}


def read_list(path: Path) -> dict[str, list[str]]:
    """The options of each run by its name."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    named = [line.partition(":") for line in lines if line and not line.startswith("#")]
    return {name.strip(): shlex.split(options) for name, _, options in named}


def sentences_of(text: Path) -> list[str]:
    """Options of `d2l-bert evaluate` that measure every model on single sentences of a text."""
    return ["--corpus", str(text), "--pairing", "sentences", "--objective", "none", *MOST]


def run(name, options, seed, given) -> dict:
    """Train and measure one model; the content of its row."""
    folder = given.work_dir / f"{name}-{seed}"
    has_length = not {"--max_steps", "--max_minutes"}.isdisjoint(options)
    length = [] if has_length else ["--max_minutes", str(given.minutes)]
    words = ["pretrain", *options, *length, "--seed", str(seed), "--torch_compile", "true"]
    paths = ["--output_dir", str(folder), "--overwrite_output_dir"]
    if "--corpus" in options:
        text = ["--corpus", options[options.index("--corpus") + 1], "--held_out", "true", *MOST]
    else:
        paths += ["--corpus", str(given.books / "train"), "--validation_corpus", str(given.books / "valid")]
        text = sentences_of(given.books / "valid")
    measured = folder / "evaluated.json"
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    with (given.work_dir / f"{name}-{seed}.log").open("w") as log:
        for arguments in (
            [*words, *paths],
            ["evaluate", str(folder), *text, "--blimp", str(given.blimp), "--output", str(measured)],
        ):
            measured.unlink(missing_ok=True)
            command = [sys.executable, "-m", "d2l_bert", *arguments]
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
    return {
        "name": name,
        "seed": seed,
        "command": shlex.join(["d2l-bert", *words]),
        "threads": given.threads,
        "parallel": given.parallel,
        **figures(folder),
    }


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
    rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["name"], []).append(row)

    def mean(of_name, figure):
        return statistics.fmean(row[figure] for row in of_name)

    heads = ["run", "options", "seeds", *(label for label, _, _ in FIGURES.values()), "tokens", "minutes"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in sorted(rows, key=lambda name: -mean(rows[name], "blimp")):
        cells = []
        for figure, (_, scale, digits) in FIGURES.items():
            values = [scale * row[figure] for row in rows[name] if row.get(figure) is not None]
            shown = f"{statistics.fmean(values):.{digits}f}" if values else ""
            cells.append(f"{shown} ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else shown)
        cells += [f"{mean(rows[name], 'tokens') / 1e6:.1f}M", f"{mean(rows[name], 'seconds') / 60:.1f}"]
        words = shlex.split(rows[name][0]["command"])[2:]
        options = shlex.join(words[: words.index("--seed")])
        print(f"| {name} | `{options}` | {len(rows[name])} | {' | '.join(cells)} |")


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
    given = parser.parse_args()
    if given.table:
        print_table(given.table)
        return
    given.work_dir.mkdir(parents=True, exist_ok=True)
    given.results.touch()
    done = {(row["name"], row["seed"]) for row in map(json.loads, given.results.read_text().splitlines())}
    wanted = [(name, seed) for seed in given.seeds for name in read_list(given.runs)]
    lock = threading.Lock()

    def run_and_write(key):
        options = read_list(given.runs).get(key[0])
        if options is None:
            return
        try:
            row = run(key[0], options, key[1], given)
        except (subprocess.CalledProcessError, KeyError) as error:
            print(f"{key[0]}, seed {key[1]}: failed ({error}); see its log in {given.work_dir}", flush=True)
            return
        with lock, given.results.open("a") as results:
            results.write(json.dumps(row) + "\n")
        print(f"{key[0]}, seed {key[1]}: MLM {row['mlm']:.3f}, BLiMP {100 * row['blimp']:.1f}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(run_and_write, [key for key in wanted if key not in done]))


if __name__ == "__main__":
    main()
