"""
Do the scores of lines find odd ones in real logs? `evaluate --line_scores` beside TF-IDF, on lines that are made odd.

    python -m benchmarks.odd_lines DIR --log FILE [FILE ...] [--max_minutes 4]

Of each log the first 80 % of the lines are for training and the rest is held out, as logs come in this order.
Words that are dates or times are left out. A model is trained in DIR, by the recipe tiny-sentences. Among 2,000
held-out lines stand 60 that were made odd by a fixed seed: 20 each with a number of another size, with the second
half of a line of another log, and with shuffled words. Prints for each kind, and for all, the area under the ROC
curve (50 % by chance), and how many odd lines are among the first 20 and 100; for the model's score, and for one
minus the largest cosine to a training line by TF-IDF of words.
"""

import argparse
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score


HELD_OUT = 2000  # lines as they were
ODD = 20  # lines of each kind
TIME = re.compile(r"\[?\d{1,4}([-/.:,]\d{1,6}){1,6}\S*")


def run(*words) -> str:
    """Run a command of d2l-bert; what it printed."""
    command = [sys.executable, "-m", "d2l_bert", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def lines_of(file: Path) -> list[str]:
    """The lines of a log without its dates and times."""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.strip():
            lines.append(" ".join(word for word in line.split() if not TIME.fullmatch(word)))
    return lines


def another_number(line: str, others: list[str], rng: random.Random) -> str | None:
    """The line with one of its numbers a thousand times as large and negative; None without a number."""
    numbers = list(re.finditer(r"(?<![\w.])\d+(?![\w.])", line))
    if not numbers:
        return None
    found = rng.choice(numbers)
    return f"{line[: found.start()]}-{int(found[0]) * 1000 + 7}{line[found.end() :]}"


def another_end(line: str, others: list[str], rng: random.Random) -> str:
    """The first half of a line with the second half of a line of another log."""
    words = line.split()
    other = rng.choice(others).split()
    return " ".join([*words[: len(words) // 2], *other[len(other) // 2 :]])


def shuffled(line: str, others: list[str], rng: random.Random) -> str | None:
    """The line with its words in another order; None if it is short."""
    words = line.split()
    return " ".join(rng.sample(words, len(words))) if len(words) > 4 else None


KINDS = {"number": another_number, "end": another_end, "order": shuffled}


def with_odd_lines(logs: list[list[str]]) -> tuple[list[str], list[str]]:
    """Held-out lines with odd ones among them; and of each line its kind, "" for one as it was."""
    rng = random.Random(0)
    odd = []
    for name, change in KINDS.items():
        made = []
        while len(made) < ODD:
            own = rng.randrange(len(logs))
            others = joined(logs[:own] + logs[own + 1 :])
            line = rng.choice(logs[own])
            changed = change(line, others, rng)
            if changed and changed != line:
                made.append((changed, name))
        odd += made
    plain = [(line, "") for line in rng.sample(joined(logs), HELD_OUT)]
    mixed = rng.sample([*plain, *odd], len(plain) + len(odd))
    return [line for line, _ in mixed], [kind for _, kind in mixed]


def joined(logs: list[list[str]]) -> list[str]:
    """The lines of all logs."""
    lines = []
    for log in logs:
        lines += log
    return lines


def report(name: str, oddness: np.ndarray, kinds: list[str]) -> None:
    """Print a row of figures; `oddness` (n,) is larger for an odder line."""
    of = np.array(kinds)
    areas = {"all": roc_auc_score(of != "", oddness)}
    for kind in KINDS:
        compared = (of == kind) | (of == "")
        areas[kind] = roc_auc_score(of[compared] == kind, oddness[compared])
    first = of[np.argsort(-oddness, kind="stable")] != ""
    cells = "  ".join(f"{kind} {area:6.1%}" for kind, area in areas.items())
    print(f"{name:24}  {cells}  among the first 20: {first[:20].sum()}, 100: {first[:100].sum()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--log", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--max_minutes", default="4")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train = arguments.folder / "train.log"
    held_out = arguments.folder / "held-out.log"
    logs = [lines_of(file) for file in arguments.log]
    trained = joined([log[: len(log) * 4 // 5] for log in logs])
    lines, kinds = with_odd_lines([log[len(log) * 4 // 5 :] for log in logs])
    train.write_text("".join(f"{line}\n" for line in trained))
    held_out.write_text("".join(f"{line}\n" for line in lines))
    model = arguments.folder / "model"
    length = ["--max_minutes", arguments.max_minutes, "--resume_from_checkpoint", "latest"]
    run("pretrain", "--corpus", train, "--recipe", "tiny-sentences", "--output_dir", model, *length)
    scored = run("evaluate", model, "--line_scores", held_out)
    scores = {}
    for line in scored.splitlines():
        cells = line.split("\t")
        scores[int(cells[4])] = float(cells[0])
    print(f"{len(trained):,} lines to train on, {len(lines):,} held out, of them {len(KINDS) * ODD} made odd")
    in_order = np.array([scores[number] for number in range(1, len(lines) + 1)])
    report("score of the model", -in_order, kinds)
    words = TfidfVectorizer(sublinear_tf=True)
    known = words.fit_transform(trained)
    nearest = [float((known @ row.T).max()) for row in words.transform(lines)]
    report("TF-IDF, nearest line", 1 - np.array(nearest), kinds)


if __name__ == "__main__":
    main()
