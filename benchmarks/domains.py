"""
Text and labelled rows of domains: Icelandic of nine centuries, and molecules; and text of biomedical abstracts.

    git clone https://github.com/UniversalDependencies/UD_Icelandic-IcePaHC
    git clone https://github.com/GLambard/Molecules_Dataset_Collection
    git clone https://github.com/cambridgeltl/MTL-Bioinformatics-2016
    python -m benchmarks.domains --icelandic UD_Icelandic-IcePaHC --molecules Molecules_Dataset_Collection \\
        --biomedical MTL-Bioinformatics-2016 --output_dir DIR

DIR/text then has the folders `icelandic` (61 texts without the twelve that rows to validate and to test are of, a
sentence a line) and `molecules` (SMILES, a molecule a line), and DIR/rows the rows for `benchmarks.few_labels`: parts
of speech, and whether a molecule passes the blood-brain barrier (BBBP). No molecule with a label is in the text.
docs/domains.md has the commands that follow, and what they measured. DIR/text/biomedical has the folders `train` and
`valid` (sentences of abstracts that name chemicals and diseases) for `benchmarks.going_on`.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from d2l_bert.messages import counted


# Of the texts in the order of their years: every fifth is held out, in turns to validate and to test.
HELD_OUT = 5

MOST_ROWS = 1000  # to validate and to test, drawn from all that are held out

# Of the corpora of biomedical text, each in files of a word a line.
BIOMEDICAL_VALID = "BC5CDR-IOB/devel.tsv"

# Of MoleculeNet: the molecules with labels, and those whose text alone is used.
LABELLED = "BBBP.csv"
UNLABELLED = ("HIV.csv", "tox21.csv", "Lipophilicity.csv", "sider.csv", "clintox.csv")


def write_rows(folder: Path, splits: dict[str, list[dict]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(rows):,} rows")


def write_text(folder: Path, texts: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{folder}: {counted(len(texts), 'file')}, {sum(map(len, texts.values())):,} lines")


def sentences(file: Path) -> list[tuple[str, dict]]:
    """The sentences of a CoNLL-U file: the text of each, and its words and their parts of speech."""
    found = []
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        lines = block.splitlines()
        text = next(line.removeprefix("# text = ") for line in lines if line.startswith("# text = "))
        words = [line.split("\t") for line in lines if line.partition("\t")[0].isdecimal()]  # no ranges such as 1-2
        found.append((text, {"tokens": [word[1] for word in words], "tags": [word[3] for word in words]}))
    return found


def icelandic(clone: Path, place: Path) -> None:
    files = sorted(clone.rglob("not-to-release/CoNLLU/*.conllu"))
    texts = {file.name.rpartition(".")[0]: sentences(file) for file in files}
    splits = {"train": [], "validation": [], "test": []}
    train = {}
    for number, (name, found) in enumerate(texts.items()):
        if number % HELD_OUT == HELD_OUT - 1:
            split = ("validation", "test")[number // HELD_OUT % 2]
        else:
            split = "train"
            train[name] = [text for text, _ in found]
        splits[split] += [row for _, row in found]
    rng = np.random.default_rng(0)
    for split in ("validation", "test"):
        drawn = rng.permutation(len(splits[split]))[:MOST_ROWS].tolist()
        splits[split] = [splits[split][row] for row in drawn]
    write_rows(place / "rows" / "icelandic", splits)
    write_text(place / "text" / "icelandic", train)


def molecules(clone: Path, place: Path) -> None:
    def read(name):
        with (clone / "latest" / name).open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if row["smiles"].strip()]

    labels = {row["smiles"]: row["p_np"] for row in read(LABELLED)}
    rows = [{"text": smiles, "label": f"passes: {label}"} for smiles, label in labels.items()]
    rows = [rows[number] for number in np.random.default_rng(0).permutation(len(rows)).tolist()]
    splits = {"train": rows[1000:], "validation": rows[800:1000], "test": rows[:800]}
    write_rows(place / "rows" / "molecules", splits)
    found = {}  # a dict keeps each once, in their order
    for name in UNLABELLED:
        found |= dict.fromkeys(row["smiles"] for row in read(name))
    write_text(place / "text" / "molecules", {"smiles": [smiles for smiles in found if smiles not in labels]})


def biomedical(clone: Path, place: Path) -> None:
    def read(file):
        found = []
        for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
            words = [line.split("\t")[0] for line in block.splitlines()]
            found.append(" ".join(words))
        return found

    # The corpora share abstracts, and divide them into words in several ways.
    valid = {sentence.replace(" ", ""): sentence for sentence in read(clone / "data" / BIOMEDICAL_VALID)}
    train = {}
    for file in sorted((clone / "data").glob("*-IOB/*.tsv")):
        for sentence in read(file):
            key = sentence.replace(" ", "")
            if key not in valid:
                train[key] = sentence
    write_text(place / "text" / "biomedical" / "train", {"sentences": list(train.values())})
    write_text(place / "text" / "biomedical" / "valid", {"sentences": list(valid.values())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--icelandic", type=Path, metavar="CLONE")
    parser.add_argument("--molecules", type=Path, metavar="CLONE")
    parser.add_argument("--biomedical", type=Path, metavar="CLONE")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    if given.icelandic:
        icelandic(given.icelandic, given.output_dir)
    if given.molecules:
        molecules(given.molecules, given.output_dir)
    if given.biomedical:
        biomedical(given.biomedical, given.output_dir)


if __name__ == "__main__":
    main()
