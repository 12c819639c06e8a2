"""
Measures the models that runs saved with `--save_words`, and the finished ones, and draws them against the words seen.

    python -m benchmarks.words_seen RUN [RUN ...] --books DIR --blimp DIR --results benchmarks/results/words_seen

RUN is the output folder of a run on books. Each of its models is measured on the sentences of DIR/valid and on the
minimal pairs of `--blimp`. Writes `--results`.json, from which measured models are taken again, and .png. The words of
the finished model are those that the last checkpoint counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.search import sentences_of
from d2l_bert.folders import content_hash
from d2l_bert.training.words_seen import PREFIX


def models_of(run: Path) -> dict[float, Path]:
    """The folders of a run's models by the number of words seen."""
    models = {}
    for folder in run.glob(f"{PREFIX}*"):
        models[json.loads((folder / "words_seen.json").read_text())["words_seen"]] = folder
    states = [json.loads(path.read_text()) for path in run.glob("checkpoint-*/training_state.json")]
    models[max(states, key=lambda state: state["step"])["words_seen"]] = run
    return dict(sorted(models.items()))


def measure(model: Path, books: Path, blimp: Path) -> dict:
    """Held-out figures and BLiMP of a model."""
    text = sentences_of(books / "valid")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "evaluated.json")
        words = ["evaluate", str(model), *text, "--blimp", str(blimp), "--output", str(output)]
        subprocess.run([sys.executable, "-m", "d2l_bert", *words], check=True, stdout=subprocess.DEVNULL)
        (evaluated,) = json.loads(output.read_text())["models"]
    return {"mlm_loss": evaluated["text"]["mlm_loss"], "pppl": evaluated["text"]["pseudo_perplexity"]} | {
        key: evaluated["blimp"][key] for key in ("accuracy", "standard_error")
    }


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """Draw MLM loss and BLiMP of each run against the words seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, blimp = figure.subplots(1, 2)
    for name, rows in runs.items():
        words = [row["words"] for row in rows]
        loss.plot(words, [row["mlm_loss"] for row in rows], "o-", ms=4, label=name)
        accuracies, errors = ([100 * row[key] for row in rows] for key in ("accuracy", "standard_error"))
        blimp.errorbar(words, accuracies, yerr=errors, fmt="o-", ms=4, capsize=2, label=name)
    loss.set_title("MLM loss (nats) on sentences of other books", fontsize=10)
    blimp.set_title("BLiMP: accuracy (%), 13 paradigms, one standard error", fontsize=10)
    blimp.axhline(50, color="0.2", linestyle="--", linewidth=1)
    blimp.annotate("chance", (0, 50), xycoords=("axes fraction", "data"), xytext=(4, 4), textcoords="offset points")
    for panel in (loss, blimp):
        panel.set_xscale("log")
        panel.set_xlabel("words of text seen (10.1 million are a pass over the books)")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--books", type=Path)
    parser.add_argument("--blimp", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="the results' path without .json and .png")
    given = parser.parse_args()
    file = given.results.with_suffix(".json")
    measured = json.loads(file.read_text()) if file.exists() else {}
    for run in given.runs:
        models = {content_hash(model / "model.safetensors"): (words, model) for words, model in models_of(run).items()}
        rows = measured[run.name] = [row for row in measured.get(run.name, []) if row["weights"] in models]
        for weights, (words, model) in models.items():
            if any(row["weights"] == weights for row in rows):
                continue
            found = measure(model, given.books, given.blimp)
            rows.append({"words": round(words), "weights": weights, **found})
            rows.sort(key=lambda row: row["words"])
            file.write_text(json.dumps(measured, indent=1) + "\n")
            print(
                f"{run.name}, {words / 1e6:.1f}M words: MLM loss {found['mlm_loss']:.3f}, "
                f"BLiMP {100 * found['accuracy']:.1f}",
                flush=True,
            )
    plot(measured, given.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
