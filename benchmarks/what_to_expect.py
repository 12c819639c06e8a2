"""
What a run reaches: held-out loss, accuracy and minutes, by the size of the model, of the text, and of the run.

    python -m benchmarks.what_to_expect --books DIR --work_dir out --output what_to_expect.json

DIR/train and DIR/valid are folders of text files. Each row of the table is one run at a constant rate (`ROWS`), which
saves its weights on the way. From each of these a branch takes a fifth of the words seen in all, while the rate falls
to 0 and the share of masked tokens to 15 %: so each number in the table is that of a finished run of its length. A
branch begins without the optimizer's moments; that is where it differs from a run of its own.

Each text has a tokenizer of its own, and all models are measured on DIR/valid. A program that was stopped goes on with
what is missing. The picture stands beside the JSON file.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib import figure

from d2l_bert import RECIPES


# The words seen in all, in millions; and the share of them that the constant rate has.
MARKS, TRUNK = (1, 3, 10, 30), 0.8

# By the row's name: the recipe, its changes, the millions of words of text, and the largest mark.
ROWS = {
    "tiny, 0.1M words": ("tiny-sentences", [], 0.1, 10),
    "tiny, 1M words": ("tiny-sentences", [], 1, 30),
    "tiny, 10M words": ("tiny-sentences", [], 10, 30),
    "mini, 10M words": ("mini-sentences", [], 10, 10),
}

MASKED = "0.40"  # the share of masked tokens at the constant rate

WORDS_A_SENTENCE = 22.3  # of these books, as far as a sentence fits into a row; of some of them 19.5


def take_words(source: Path, millions: float, folder: Path) -> Path:
    """A folder with files of `source`, drawn at random, of some million words; `source` itself if it has no more."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    counts = {path: len(path.read_text(encoding="utf-8").split()) for path in files}
    if sum(counts.values()) <= 1.1e6 * millions:
        return source
    folder.mkdir(parents=True, exist_ok=True)
    taken = 0
    for number in np.random.default_rng(0).permutation(len(files)).tolist():
        if taken + counts[files[number]] <= 1.1e6 * millions:
            taken += counts[files[number]]
            (folder / files[number].name).write_bytes(files[number].read_bytes())
    return folder


def train(words: list[str], folder: Path) -> dict:
    """The content of metrics.json of a run, which is made unless it is there."""
    if not (folder / "metrics.json").exists():
        words = ["pretrain", *words, "--output_dir", str(folder), "--resume_from_checkpoint", "latest"]
        print(shlex.join(["d2l-bert", *words]), flush=True)
        with folder.with_name(f"{folder.name}.log").open("w") as log:
            subprocess.run([sys.executable, "-m", "d2l_bert", *words], check=True, stdout=log, stderr=log)
    return json.loads((folder / "metrics.json").read_text())


def seconds_until(folder: Path, step: int) -> float:
    """The seconds of training of a run until a step."""
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return sum(row.get("seconds", 0.0) for row in rows if row["step"] <= step)


def measure(name: str, given) -> dict[str, dict]:
    """The figures of a row, by the millions of words seen."""
    recipe, changes, millions, last = ROWS[name]
    _, run = RECIPES[recipe]()
    text = take_words(given.books / "train", millions, given.work_dir / f"text-{millions}M")
    shared = ["--recipe", recipe, "--corpus", str(text), "--validation_corpus", str(given.books / "valid"), *changes]
    folder = given.work_dir / name.replace(", ", "-").replace(" ", "-")
    words_a_step = WORDS_A_SENTENCE * run.global_batch_size
    marks = [mark for mark in MARKS if mark <= last]
    saved = [round(TRUNK * 1000 * mark) for mark in marks]
    train(
        [
            *shared,
            *("--max_steps", str(math.ceil(1.15 * TRUNK * 1e6 * last / words_a_step))),
            *("--lr_scheduler_type", "constant_with_warmup", "--mlm_probability", MASKED),
            *("--save_words", *(f"{thousands}k" for thousands in saved)),
        ],
        folder,
    )
    found = {}
    for mark, thousands in zip(marks, saved, strict=True):
        label = f"{thousands // 1000}M" if thousands % 1000 == 0 else f"{thousands}k"
        start = folder / f"chck_{label}"
        branch = given.work_dir / f"{folder.name}-{mark}M"
        metrics = train(
            [
                *shared,
                *("--init_from", str(start), "--max_steps", str(round((1 - TRUNK) * 1e6 * mark / words_a_step))),
                *("--learning_rate", f"{run.learning_rate:g}", "--warmup_ratio", "0"),
                *("--lr_scheduler_type", "linear", "--mlm_probability", f"{MASKED}->0.15"),
            ],
            branch,
        )
        before = json.loads((start / "words_seen.json").read_text())
        seconds = metrics["train_seconds"] + seconds_until(folder, before["step"])
        found[str(mark)] = {
            "mlm_loss": metrics["eval_mlm_loss"],
            "mlm_accuracy": metrics["eval_mlm_accuracy"],
            "token_entropy": metrics["eval_token_entropy"],
            "words_seen": before["words_seen"] + metrics["train_words_seen"],
            "minutes": seconds / 60,
        }
        print(f"{name}, {mark}M seen: {found[str(mark)]}", flush=True)
    return found


def plot(found: dict, file: Path) -> None:
    drawing = figure.Figure(figsize=(6, 4.2), layout="constrained")
    panel = drawing.subplots()
    for name, by_words in found.items():
        rows = list(by_words.values())
        panel.plot([row["words_seen"] for row in rows], [row["mlm_loss"] for row in rows], "o-", ms=4, label=name)
        place = (rows[-1]["words_seen"], rows[-1]["mlm_loss"])
        panel.annotate(f"{rows[-1]['minutes']:.0f} min", place, (4, 4), textcoords="offset points", fontsize=9)
    entropy = next(iter(next(iter(found.values())).values()))["token_entropy"]
    panel.axhline(entropy, color="0.6", linestyle=":", label=f"frequencies alone: {entropy:.2f}")
    panel.set(xscale="log", xlim=(8e5, 6e7), xlabel="words seen", ylabel="held-out MLM loss, nats")
    panel.set_xticks([1e6 * mark for mark in MARKS], [f"{mark}M" for mark in MARKS])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    drawing.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    given.work_dir.mkdir(parents=True, exist_ok=True)
    found = json.loads(given.output.read_text()) if given.output and given.output.exists() else {}
    for name in given.rows:
        found[name] = measure(name, given)
        if given.output:
            given.output.write_text(json.dumps(found, indent=2) + "\n")
            plot(found, given.output.with_suffix(".png"))
    print("\n| held-out MLM loss, accuracy, minutes | " + " | ".join(f"{mark}M words seen" for mark in MARKS) + " |")
    print("|---|" + "---|" * len(MARKS))
    for name, by_words in found.items():
        cells = [by_words.get(str(mark)) for mark in MARKS]
        shown = [f"{c['mlm_loss']:.2f}, {c['mlm_accuracy']:.1%}, {c['minutes']:.0f}" if c else "" for c in cells]
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
