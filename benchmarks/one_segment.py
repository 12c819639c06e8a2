"""
How well one segment of a pair alone tells the label of the second loss, on the rows that a run trains on.

    python -m benchmarks.one_segment TEXT [TEXT ...] [--objective nsp|sop] [--max_seq_length 64] [--pairs 16384]

TEXT is a folder of text files, a JSONL file with a document in the "text" of each line, or `docstrings`, those of the
packages that are installed. The documents are divided into two halves. A run of each half is watched through the
model's arguments; a logistic regression (scikit-learn) is fitted on the rows of one half and tried on the other, and
the other way round. Gradient-boosted trees get the two lengths. Rows without a label are left out, and their share is
shown. 50 % is chance: what is above tells the label without a look at how A and B go together.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from benchmarks.turns import heading
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, PretrainConfig, pretrain


LOOKS = ("B alone", "A alone", "ends, lengths", "lengths (trees)")


def documents_of(text: str) -> list[str]:
    """The documents of a TEXT."""
    if text == "docstrings":
        files = []
        for name in ("sklearn", "scipy", "torch"):
            files += Path(importlib.util.find_spec(name).origin).parent.rglob("*.py")
        documents = {}  # a dict keeps each once, in their order
        for file in sorted(files):
            documents |= dict.fromkeys(docstrings_of(file))
        return list(documents)
    if Path(text).is_dir():
        return [file.read_text() for file in sorted(Path(text).iterdir())]
    return [json.loads(line)["text"] for line in Path(text).read_text().splitlines()]


def docstrings_of(file: Path) -> list[str]:
    """The docstrings in a Python file that have two paragraphs or more."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    found = [ast.get_docstring(node) for node in nodes]
    return [docstring for docstring in found if docstring and "\n\n" in docstring]


def write_halves(documents: list[str], folder: Path) -> list[Path]:
    """Two JSONL files with the documents of each half."""
    halves = [folder / "0.jsonl", folder / "1.jsonl"]
    with halves[0].open("w") as first, halves[1].open("w") as second:
        for document in documents:
            is_second = hashlib.sha256(document.encode()).digest()[0] % 2
            file = second if is_second else first
            file.write(json.dumps({"text": document}) + "\n")
    return halves


@dataclass(frozen=True)
class Rows:
    """Rows of a run: the segments (A, B) as lists of ids, and the labels (rows,)."""

    segments: list[tuple[list[int], list[int]]]
    labels: np.ndarray

    def labelled(self) -> "Rows":
        """The rows with a label."""
        segments = [each for each, label in zip(self.segments, self.labels, strict=True) if label != -100]
        return Rows(segments, self.labels[self.labels != -100])


def rows_of(half: Path, other: Path, tokenizer: Path | None, args, pairing: str) -> Rows:
    """The rows that a run on `half` trains on."""
    segments = []
    labels = []
    forward = D2lBertForPreTraining.forward
    batch_size = 256

    @functools.wraps(forward)
    def watch(self, *arguments, **named):
        if self.training:
            ids = named["input_ids"].clone()
            row, slot = (named["labels"] != -100).nonzero(as_tuple=True)
            ids[row, named["masked_positions"][row, slot]] = named["labels"][row, slot]  # as before masking
            real = named.get("attention_mask", torch.ones_like(ids))  # left out where no row is padded
            lengths = real.sum(1).tolist()
            in_b = named["token_type_ids"].sum(1).tolist()
            for of_row, length, b in zip(ids.tolist(), lengths, in_b, strict=True):
                segments.append((of_row[1 : length - b - 1], of_row[length - b : length - 1]))
            labels.extend(named["next_sentence_label"].tolist())
            for name, value in named.items():
                if torch.is_tensor(value) and value.dim():
                    named[name] = value[:1]  # one row is enough: nothing is to be learnt
        return forward(self, *arguments, **named)

    run = PretrainConfig(
        corpus=[str(half)],
        validation_corpus=[str(other)],
        tokenizer=tokenizer and str(tokenizer),
        objective=args.objective,
        pairing=pairing,
        max_seq_length=args.max_seq_length,
        max_eval_pairs=2,
        max_steps=-(-args.pairs // batch_size),
        global_batch_size=batch_size,
        micro_batch_size=batch_size,
        mixed_precision="no",
        output_dir=str(half.parent / f"{half.stem}-{pairing}"),
    )
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    D2lBertForPreTraining.forward = watch
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pretrain(D2lBertConfig(**sizes), run)
    finally:
        D2lBertForPreTraining.forward = forward
    return Rows(segments, np.array(labels))


def features(segments: list, look: str, entries: int) -> scipy.sparse.csr_matrix:
    """
    What a look at the rows shows, as a matrix of zeros and ones (rows, features).

    Of a segment alone its tokens, its first and its last token, and its length; else both segments' first and last
    tokens and lengths.
    """
    rows = []
    columns = []
    for number, (a, b) in enumerate(segments):
        if look == "ends, lengths":
            found = [a[0], a[-1], b[0], b[-1], len(a), len(b), len(a) + len(b)]
            of_row = [kind * entries + value for kind, value in enumerate(found)]
        else:
            segment = b if look == "B alone" else a
            found = [segment[0], segment[-1], len(segment)]
            of_row = [kind * entries + value for kind, value in enumerate(found)]
            of_row += [3 * entries + token for token in set(segment)]
        rows += [number] * len(of_row)
        columns += of_row
    ones = np.ones(len(rows), dtype=np.float32)
    return scipy.sparse.csr_matrix((ones, (rows, columns)), (len(segments), 7 * entries))


def lengths(segments: list) -> np.ndarray:
    """The lengths of A, of B and of both (rows, 3)."""
    return np.array([(len(a), len(b), len(a) + len(b)) for a, b in segments])


def accuracy(fit: Rows, test: Rows, look: str, entries: int) -> float:
    """The share of the labels of `test` that a classifier tells that was fitted on `fit`."""
    if look == "lengths (trees)":
        model = HistGradientBoostingClassifier(random_state=0)
        model.fit(lengths(fit.segments), fit.labels)
        predicted = model.predict(lengths(test.segments))
    else:
        model = LogisticRegression(C=0.1, max_iter=300)
        model.fit(features(fit.segments, look, entries), fit.labels)
        predicted = model.predict(features(test.segments, look, entries))
    return float((predicted == test.labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--objective", default="nsp", choices=["nsp", "sop"])
    parser.add_argument("--max_seq_length", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=16384)
    args = parser.parse_args()
    print(heading("cpu"), end="\n\n")
    print_row(["text", "pairing", "documents", "rows", "with a label", *LOOKS])
    print("|---" * 9 + "|")
    for text in args.texts:
        documents = documents_of(text)
        with tempfile.TemporaryDirectory() as folder:
            first, second = write_halves(documents, Path(folder))
            tokenizer = None  # that of the first run, for all
            for pairing in ("segments", "sentences"):
                of_first = rows_of(first, second, tokenizer, args, pairing)
                tokenizer = tokenizer or first.parent / f"{first.stem}-{pairing}"
                of_second = rows_of(second, first, tokenizer, args, pairing)
                rows = len(of_first.labels) + len(of_second.labels)
                halves = [of_first.labelled(), of_second.labelled()]
                labelled = len(halves[0].labels) + len(halves[1].labels)
                entries = json.loads((tokenizer / "config.json").read_text())["vocab_size"] + args.max_seq_length
                cells = [Path(text).name, pairing, f"{len(documents):,}", f"{rows:,}", f"{labelled / rows:.1%}"]
                for look in LOOKS:
                    both_ways = [accuracy(*halves, look, entries), accuracy(*reversed(halves), look, entries)]
                    cells.append(f"{sum(both_ways) / 2:.1%}")
                print_row(cells)


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
