"""
What a model gains by going on with the text of a domain: beside the model as it is, and one from scratch.

    python -m benchmarks.going_on MODEL --text docs=DIR wiki=DIR --old DIR --work_dir out --output going_on.json

Each DIR of `--text` has the folders `train` and `valid`; `--python_docs DIR` writes them for the documentation
installed with Python, a twentieth of its documents to `valid`. `--old` is text of the kind that MODEL knows: what is
forgotten shows there. All runs of a text take as long (`--minutes`), on as many threads as OMP_NUM_THREADS says. The
figure is the pseudo-perplexity of a word of `valid`, since vocabularies differ, and a model that knows nothing but how
frequent each word is has it beside. A program that was stopped goes on with what is missing.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

from d2l_bert.modeling.conversion import read_model
from d2l_bert.tokenization.python_docs import python_docs


HELD_OUT = 20  # of the documents of `python-docs` every twentieth

# Fields of the model's architecture that a run from scratch takes over.
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")


def ways(model: str) -> dict[str, list[str]]:
    """Options of `d2l-bert pretrain` by the name of the way."""
    config = read_model(model)[0].config
    shape = []
    for name in SHAPE:
        shape += [f"--{name}", str(getattr(config, name))]
    go_on = ["--init_from", model]
    return {
        "from scratch": shape,
        "going on": go_on,
        "going on, 2,000 words added": [*go_on, "--extend_vocab", "2000"],
        "going on at the whole rate": [*go_on, "--learning_rate", "5e-3"],
    }


def write_python_docs(folder: Path) -> None:
    """A file for each document, its paragraphs divided by empty lines."""
    for number, document in enumerate(python_docs()):
        part = folder / ("valid" if number % HELD_OUT == HELD_OUT - 1 else "train")
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{number:05}.txt").write_text("\n\n".join(document.paragraphs) + "\n", encoding="utf-8")


def run(words: list[str], log: Path) -> None:
    print(shlex.join(["d2l-bert", *words]), flush=True)
    with log.open("w") as file:
        subprocess.run([sys.executable, "-m", "d2l_bert", *words], check=True, stdout=file, stderr=file)


def figures(model: str, text: Path, output: Path) -> dict:
    """Held-out figures of a model on single sentences of a text."""
    if not output.exists():
        options = ["--pairing", "sentences", "--objective", "none", "--mlm_probability", "0.15"]
        run(
            ["evaluate", model, "--corpus", str(text), *options, "--max_eval_pairs", "4000", "--output", str(output)],
            output.with_suffix(".log"),
        )
    found = json.loads(output.read_text())["models"][0]["text"]
    return {"word": found["pseudo_perplexity"], "mlm_loss": found["mlm_loss"]}


def word_frequencies(text: Path) -> tuple[int, float]:
    """The words of `train`, and the perplexity of those of `valid` by their frequencies there (unseen: 1)."""
    counted = words_in(text / "train")
    every = sum(counted.values())
    kinds = len(counted) + 1
    met = words_in(text / "valid")
    logs = [count * math.log((counted[word] + 1) / (every + kinds)) for word, count in met.items()]
    return every, math.exp(-sum(logs) / sum(met.values()))


def words_in(folder: Path) -> Counter:
    """How often each word stands in the text files of a folder."""
    counted = Counter()
    for file in sorted(folder.rglob("*.txt")):
        counted.update(file.read_text().lower().split())
    return counted


def measure(name: str, text: Path, given) -> list[dict]:
    """A row for each way and number of minutes."""
    words, frequencies = word_frequencies(text)
    row = {"text": name, "words": words, "frequencies": frequencies}
    rows = [{**row, "way": "as it is", "minutes": 0, "model": given.model}]
    for minutes in given.minutes:
        for way, options in ways(given.model).items():
            way_as_name = way.replace(", ", "-").replace(",", "").replace(" ", "-")
            folder = given.work_dir / f"{name}-{way_as_name}-{minutes:g}"
            if not (folder / "metrics.json").exists():
                length = ["--max_minutes", f"{minutes:g}", "--output_dir", str(folder), "--overwrite_output_dir"]
                corpus = ["--corpus", str(text / "train"), "--validation_corpus", str(text / "valid")]
                recipe = ["--recipe", "tiny-sentences", "--language", "en"]
                run(["pretrain", *recipe, *options, *corpus, *length], folder.with_suffix(".log"))
            rows.append({**row, "way": way, "minutes": minutes, "model": str(folder)})
    for row in rows:
        place = given.work_dir / f"{name}-{Path(row['model']).name}"
        row |= figures(row["model"], text / "valid", place.with_suffix(".valid.json"))
        if given.old:
            row["old_word"] = figures(row["model"], given.old, place.with_suffix(".old.json"))["word"]
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--text", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--old", type=Path, metavar="DIR")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 5])
    parser.add_argument("--python_docs", type=Path, metavar="DIR")
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    given.work_dir.mkdir(parents=True, exist_ok=True)
    if given.python_docs:
        write_python_docs(given.python_docs)
    rows = []
    for text in given.text:
        name, _, folder = text.partition("=")
        rows += measure(name, Path(folder), given)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=2) + "\n")
    print("\n| text | way | minutes | a word's pseudo-perplexity | MLM loss | the same on the old text |")
    print("|---" * 6 + "|")
    for row in rows:
        old = f"{row['old_word']:.0f}" if "old_word" in row else ""
        text = f"{row['text']}: {row['words']:,} words, frequencies alone {row['frequencies']:,.0f}"
        print(f"| {text} | {row['way']} | {row['minutes']:g} | {row['word']:.0f} | {row['mlm_loss']:.3f} | {old} |")


if __name__ == "__main__":
    main()
