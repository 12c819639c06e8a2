"""
Draws the README's picture: the losses of a run of the demo, and the masks that its model fills in.

    python -m benchmarks.demo_picture d2l-bert-demo docs/demo.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


TOKENS_SHOWN = 3


def draw(folder: Path, target: Path) -> None:
    """Draw the picture of the run in a folder."""
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    metrics = json.loads((folder / "metrics.json").read_text())
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    losses, masks = figure.subplots(1, 2, width_ratios=(2, 3))
    for kind, label in (("mlm", "masked tokens (MLM)"), ("nsp", "next sentence (NSP)")):
        steps, values = zip(
            *[(row["step"], row[f"{kind}_loss"]) for row in rows if f"{kind}_loss" in row], strict=True
        )
        (line,) = losses.plot(steps, values, label=label)
        losses.plot(rows[-1]["step"], metrics[f"eval_{kind}_loss"], "o", color=line.get_color())
    for row in rows:
        if row.get("event") == "stage":
            losses.axvline(row["step"], color="0.5", linestyle="--", linewidth=0.8)
            losses.text(row["step"] + 15, 1.2, row["label"], fontsize=9)
    losses.set(xlabel="step", ylabel="loss, nats", ylim=(0, None))
    losses.set_title(f"{metrics['train_seconds'] / 60:.0f} minutes of training; dots: held-out text", fontsize=10)
    losses.legend(frameon=False)
    lines = [(example["text"], example["output"][:TOKENS_SHOWN]) for example in metrics["predictions"]]
    for number, (text, guesses) in enumerate(lines):
        top = -number * (TOKENS_SHOWN + 1.6)
        masks.text(0, top, text, fontsize=10, va="center")
        for place, guess in enumerate(guesses, 1):
            bar = masks.barh(top - place, guess["score"], height=0.8, color="C0")
            masks.bar_label(bar, [f" {guess['label']}  {guess['score']:.0%}"], fontsize=9)
    masks.set(xlim=(0, 1.15), yticks=[], xticks=[])
    masks.spines[:].set_visible(False)
    masks.set_title("what the model puts in place of [MASK]", fontsize=10)
    figure.savefig(target, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a run of the demo")
    parser.add_argument("target", type=Path, help="the PNG file to write")
    draw(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
