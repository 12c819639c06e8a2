"""
Fine-tunes a pretrained model and the same architecture with fresh weights on several data sets, and compares them.

    python -m benchmarks.finetune MODEL --data DIR --learning_rates 1e-4 3e-4 1e-3 --work_dir out

A data set is a folder of DIR with train.csv, test.csv and, if there is one, validation.csv; without validation.csv a
tenth of the training rows is held out. Both sides choose among the same rates, with one seed on validation rows. Then
five seeds are measured on the test rows. The table gives means, standard deviations, and the difference in standard
errors of the difference: sqrt(sd_1^2 / n + sd_2^2 / n).
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path


SIDES = {"pretrained": [], "from scratch": ["--from_scratch"]}

# The metric of each data set; accuracy for others.
METRICS = {"cola": "matthews_correlation", "stsb": "pearson_spearman_mean"}


def command(model, data, side, rates, seeds, folder, more):
    """The command that trains one side on one data set."""
    words = ["finetune", model, "--task", "classification", "--output_dir", str(folder)]
    for split in ("train", "validation", "test"):
        if (file := data / f"{split}.csv").exists():
            words += [f"--{split}_file", str(file)]
    if not (data / "validation.csv").exists():
        words += ["--validation_share", "0.1"]
    return [*words, "--learning_rate", *rates, "--num_seeds", str(seeds), *SIDES[side], *more]


def run(words, folder):
    """Train, unless the folder is finished; go on if it is begun. Returns metrics.json."""
    if not (folder / "model.safetensors").exists():
        resume = ["--resume_from_checkpoint", "latest"] if (folder / "run_config.json").exists() else []
        subprocess.run([sys.executable, "-m", "d2l_bert", *words, *resume], check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "metrics.json").read_text())


def difference(one, other, metric, seeds):
    """The difference of two sides' means on the test rows, and its standard error."""
    means = [side["mean"]["test"][metric] for side in (one, other)]
    deviations = [side["sd"]["test"][metric] for side in (one, other)]
    return means[0] - means[1], math.sqrt(sum(deviation**2 / seeds for deviation in deviations))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="a folder with a folder for each data set")
    parser.add_argument("--sets", nargs="+", default=["sst2", "trec", "mrpc"])
    parser.add_argument("--learning_rates", nargs="+", default=["1e-4", "3e-4", "1e-3"])
    parser.add_argument("--num_seeds", type=int, default=5)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], help="further options of d2l-bert finetune, up to the end"
    )
    given = parser.parse_args()
    rows = []
    commands = []
    for name in given.sets:
        metric = METRICS.get(name, "accuracy")
        found = {}
        for side in SIDES:
            folder = given.work_dir / f"{name}-{side.replace(' ', '-')}"
            words = command(
                given.model, given.data / name, side, given.learning_rates, given.num_seeds, folder, given.options
            )
            commands.append(shlex.join(["d2l-bert", *words]))
            found[side] = run(words, folder)
            result = found[side]
            rates = ", ".join(f"{r['learning_rate']:g}: {r['validation'][metric]:.4f}" for r in result["rates"])
            print(f"{name}, {side}: {metric} on validation rows by rate: {rates}", flush=True)
            seeds = ", ".join(f"{r['test'][metric]:.4f}" for r in result["seeds"])
            print(f"{name}, {side}: {metric} on test rows by seed: {seeds}", flush=True)
        ahead, error = difference(found["pretrained"], found["from scratch"], metric, given.num_seeds)
        in_errors = f"{ahead / error:+.1f}" if error else "no deviation"
        cells = [
            f"{100 * found[side]['mean']['test'][metric]:.1f} ({100 * found[side]['sd']['test'][metric]:.1f}), "
            f"rate {found[side]['learning_rate']:g}"
            for side in SIDES
        ]
        rows.append(f"| {name} | {metric} | {' | '.join(cells)} | {100 * ahead:+.1f} | {in_errors} |")
    print("\n" + "\n".join(f"    {line}" for line in commands) + "\n")
    print(f"Test rows, {given.num_seeds} seeds: mean and standard deviation in points.\n")
    print("| data set | metric | pretrained | from scratch | difference | in standard errors |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
