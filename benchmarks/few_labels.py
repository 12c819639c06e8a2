"""
What pretraining gains where few rows have labels: a model, the same architecture from scratch, and words alone.

    python -m benchmarks.few_labels MODEL --data DIR --work_dir out --output few_labels.json

DIR has a folder for each data set of `--sets`: `ewt-pos` and `icelandic` with train.jsonl, validation.jsonl and
test.jsonl (columns tokens and tags), `trec` with train.csv and test.csv (columns text and label), `molecules` with
JSONL of the same columns. For each number of labelled rows, each seed draws its own rows (`draw`). All three choose on
the same validation rows, the models between the rates and the baseline among strengths of its regularisation; where
there is no validation file, a tenth of the training rows is set aside first. The baseline is scikit-learn's logistic
regression: for tags on the word, its ends and its neighbours, for classes on TF-IDF of words and pairs of words, for
molecules on TF-IDF of up to five characters in a row.

A program that was stopped goes on with the runs that are missing. The picture stands beside the JSON file.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import figure
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from d2l_bert.tokenization.tables import table_rows


SIDES = {"pretrained": [], "from scratch": ["--from_scratch"]}
BASELINE = "logistic regression"

STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # the baseline's C

# What TF-IDF counts in a text.
WORDS = {"ngram_range": (1, 2)}
CHARACTERS = {"analyzer": "char", "ngram_range": (1, 5), "lowercase": False}


class DataSet(NamedTuple):
    """A data set: the task, the numbers of labelled rows, and of a task on texts what TF-IDF counts."""

    task: str
    counts: tuple[int, ...]
    counted: dict


DATA_SETS = {
    "ewt-pos": DataSet("token-classification", (50, 100, 200, 500, 1500), {}),
    "trec": DataSet("text-classification", (50, 100, 200, 500, 1500, 4900), WORDS),
    "icelandic": DataSet("token-classification", (50, 100, 200, 500, 1500), {}),
    "molecules": DataSet("text-classification", (50, 100, 200, 500), CHARACTERS),
}


def read(folder: Path) -> dict[str, list[dict]]:
    """The rows of `train`, `validation` and `test`."""
    rows = {}
    for file in sorted(folder.iterdir()):
        rows[file.stem] = [cells for _, cells in table_rows(file)]
    if "validation" not in rows:
        order = np.random.default_rng(0).permutation(len(rows["train"])).tolist()
        count = len(order) // 10
        rows["validation"] = [rows["train"][number] for number in order[:count]]
        rows["train"] = [rows["train"][number] for number in order[count:]]
    return rows


def write(rows: list[dict], file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


# ---------------------------------------------------------------------------------------------------------------------
# The baseline


def word_features(tokens: list[str], place: int) -> dict:
    """What a tagger without a model sees of a word: the word, its ends, its form, its neighbours."""
    word = tokens[place]
    found = {
        "word": word.lower(),
        "is capital": word[0].isupper(),
        "is first": place == 0,
        "has digit": any(letter.isdigit() for letter in word),
        "is sign": not any(letter.isalnum() for letter in word),
    }
    for length in (1, 2, 3, 4):
        found[f"end {length}"] = word[-length:].lower()
    for distance in (-2, -1, 1, 2):
        other = tokens[place + distance].lower() if 0 <= place + distance < len(tokens) else ""
        found[f"neighbour {distance}"] = other
        found[f"neighbour's end {distance}"] = other[-3:]
    return found


def inputs_and_labels(rows, task):
    """What the baseline sees of each text or word, and the labels."""
    inputs = []
    labels = []
    for row in rows:
        labels += labels_of(row, task)
        if task == "text-classification":
            inputs.append(row["text"])
        else:
            inputs += [word_features(row["tokens"], place) for place in range(len(row["tokens"]))]
    return inputs, labels


def draw(rows: dict[str, list[dict]], task: str, count: int, seed: int) -> list[dict]:
    """
    Some training rows, at random, with each label of the other rows: `finetune` refuses rows to measure on with a
    label that no training row has.
    """
    order = np.random.default_rng(seed).permutation(len(rows["train"])).tolist()
    missing = set()
    for row in (*rows["validation"], *rows["test"]):
        missing.update(labels_of(row, task))
    first = []
    others = []
    for number in order:
        row = rows["train"][number]
        labels = set(labels_of(row, task))
        if labels & missing:
            first.append(row)
            missing -= labels
        else:
            others.append(row)
    return [*first, *others][:count]


def labels_of(row: dict, task: str) -> list[str]:
    return [row["label"]] if task == "text-classification" else row["tags"]


def baseline(rows: dict, train: list[dict], task: str, counted: dict) -> float:
    """The accuracy on the test rows of the regression that is best on the validation rows."""
    validation = inputs_and_labels(rows["validation"], task)
    models = []
    for strength in STRENGTHS:
        is_text = task == "text-classification"
        features = TfidfVectorizer(**counted, sublinear_tf=True) if is_text else DictVectorizer()
        model = make_pipeline(features, LogisticRegression(C=strength, max_iter=1000))
        models.append(model.fit(*inputs_and_labels(train, task)))
    best = max(models, key=lambda model: model.score(*validation))  # the first of equal ones
    return best.score(*inputs_and_labels(rows["test"], task))


# ---------------------------------------------------------------------------------------------------------------------
# The models


def finetune(given, name, task, side, count, seed, files) -> dict:
    """The content of metrics.json of one run, which is made unless it is there."""
    folder = given.work_dir / f"{name}-{side.replace(' ', '-')}-{count}-seed-{seed}"
    words = ["finetune", given.model, "--task", task, "--output_dir", str(folder), "--seed", str(seed)]
    for split, file in files.items():
        words += [f"--{split}_file", file]
    words += ["--max_steps", str(given.max_steps), "--learning_rate", *given.learning_rates, *SIDES[side]]
    words += ["--eval_steps", str(max(1, given.max_steps // 4))]
    if not (folder / "metrics.json").exists():
        resume = ["--resume_from_checkpoint", "latest"] if (folder / "run_config.json").exists() else []
        print(shlex.join(["d2l-bert", *words]), flush=True)
        with folder.with_suffix(".log").open("w") as log:
            subprocess.run([sys.executable, "-m", "d2l_bert", *words, *resume], check=True, stdout=log, stderr=log)
    return json.loads((folder / "metrics.json").read_text())


def measure(given, name: str) -> dict[str, dict[int, list[float]]]:
    """The accuracies on test rows of each side, by the number of labelled rows, one for each seed."""
    task, counts, counted = DATA_SETS[name]
    rows = read(given.data / name)
    _, labels = inputs_and_labels(rows["test"], task)
    most = max(map(labels.count, set(labels))) / len(labels)
    print(f"{name}: the most frequent answer is right in {100 * most:.1f} % of {len(labels):,}")
    found = {side: {} for side in (*SIDES, BASELINE)}
    for count in counts:
        for seed in range(1, given.num_seeds + 1):
            train = draw(rows, task, count, seed)
            place = given.work_dir / "rows" / f"{name}-{count}-{seed}"
            files = {
                "train": write(train, place / "train.jsonl"),
                "validation": write(rows["validation"], place / "validation.jsonl"),
                "test": write(rows["test"], place / "test.jsonl"),
            }
            accuracies = {}
            for side in SIDES:
                accuracies[side] = finetune(given, name, task, side, count, seed, files)["test_accuracy"]
            accuracies[BASELINE] = baseline(rows, train, task, counted)
            for side, accuracy in accuracies.items():
                found[side].setdefault(len(train), []).append(accuracy)
            shown = ", ".join(f"{side} {100 * accuracy:.1f}" for side, accuracy in accuracies.items())
            print(f"{name}, {len(train)} labelled rows, seed {seed}: {shown}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------------------


def cell(accuracies: list[float]) -> str:
    deviation = f" ({100 * statistics.stdev(accuracies):.1f})" if len(accuracies) > 1 else ""
    return f"{100 * statistics.mean(accuracies):.1f}{deviation}"


def plot(found: dict, file: Path) -> None:
    drawing = figure.Figure(figsize=(5.2 * len(found), 4.2), layout="constrained")
    panels = np.atleast_1d(drawing.subplots(1, len(found)))
    for panel, (name, sides) in zip(panels, found.items(), strict=True):
        for number, (side, by_count) in enumerate(sides.items()):
            counts = list(by_count)
            values = np.array([by_count[count] for count in counts]) * 100
            color = f"C{number}" if side in SIDES else "0.5"
            panel.plot(counts, values.mean(1), marker="o", markersize=4, color=color, label=side)
            panel.fill_between(counts, values.min(1), values.max(1), color=color, alpha=0.2)
        panel.set(xscale="log", xlabel="labelled rows", ylabel="accuracy on test rows, %", title=name)
        panel.set_xticks(counts, [f"{count:,}" for count in counts])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    drawing.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sets", nargs="+", default=list(DATA_SETS), choices=DATA_SETS)
    parser.add_argument("--learning_rates", nargs="+", default=["3e-4", "1e-3"])
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    found = {}
    for name in given.sets:
        found[name] = measure(given, name)
        if given.output:
            given.output.write_text(json.dumps(found, indent=2) + "\n")
            plot(found, given.output.with_suffix(".png"))
    print(f"\nAccuracy on test rows in percent, mean and standard deviation over {given.num_seeds} draws of rows.")
    for name, sides in found.items():
        print(f"\n| {name}: labelled rows | {' | '.join(sides)} |\n|---|{'---|' * len(sides)}")
        for count in next(iter(sides.values())):
            print(f"| {count:,} | {' | '.join(cell(by_count[count]) for by_count in sides.values())} |")


if __name__ == "__main__":
    main()
