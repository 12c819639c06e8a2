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
        folders = [Path(importlib.util.find_spec(name).origin).parent for name in ("sklearn", "scipy", "torch")]
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        return list(dict.fromkeys(doc for file in files for doc in docstrings_of(file)))
    if Path(text).is_dir():
        return [file.read_text() for file in sorted(Path(text).iterdir())]
    return [json.loads(line)["text"] for line in Path(text).read_text().splitlines()]


def docstrings_of(file: Path) -> list[str]:
    """The docstrings in a Python file that have two paragraphs or more."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    with contextlib.suppress(SyntaxError, ValueError):
        found = (ast.get_docstring(node) for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, kinds))
        return [doc for doc in found if doc and "\n\n" in doc]
    return []


def write_halves(documents: list[str], folder: Path) -> list[Path]:
    """Two JSONL files with the documents of each half."""
    halves = [folder / "0.jsonl", folder / "1.jsonl"]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(half.open("w")) for half in halves]
        for document in documents:
            files[hashlib.sha256(document.encode()).digest()[0] % 2].write(json.dumps({"text": document}) + "\n")
    return halves


def rows_of(half: Path, other: Path, tokenizer: Path | None, args, pairing: str) -> tuple[list, np.ndarray]:
    """The segments (A, B) of the rows that a run on `half` trains on, as lists of ids, and the labels (rows,)."""
    segments, labels, forward, batch_size = [], [], D2lBertForPreTraining.forward, 256

    @functools.wraps(forward)
    def watch(self, *arguments, **named):
        if self.training:
            ids = named["input_ids"].clone()
            row, slot = (named["labels"] != -100).nonzero(as_tuple=True)
            ids[row, named["masked_positions"][row, slot]] = named["labels"][row, slot]  # as before masking
            real = named.get("attention_mask", torch.ones_like(ids))  # left out where no row is padded
            lengths, in_b = real.sum(1).tolist(), named["token_type_ids"].sum(1).tolist()
            for of_row, length, b in zip(ids.tolist(), lengths, in_b, strict=True):
                segments.append((of_row[1 : length - b - 1], of_row[length - b : length - 1]))
            labels.extend(named["next_sentence_label"].tolist())
            # One row is enough: nothing is to be learnt.
            named = {
                name: value[:1] if torch.is_tensor(value) and value.dim() else value for name, value in named.items()
            }
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
    return segments, np.array(labels)


def features(segments: list, look: str, entries: int) -> scipy.sparse.csr_matrix:
    """
    What a look at the rows shows, as a matrix of zeros and ones (rows, features).

    Of a segment alone its tokens, its first and its last token, and its length; else both segments' first and last
    tokens and lengths.
    """
    rows, columns = [], []
    for number, (a, b) in enumerate(segments):
        if look == "ends, lengths":
            found = [(a[0], 0), (a[-1], 1), (b[0], 2), (b[-1], 3), (len(a), 4), (len(b), 5), (len(a) + len(b), 6)]
        else:
            segment = b if look == "B alone" else a
            found = [(segment[0], 0), (segment[-1], 1), (len(segment), 2), *((token, 3) for token in set(segment))]
        rows += [number] * len(found)
        columns += [kind * entries + value for value, kind in found]
    return scipy.sparse.csr_matrix(
        (np.ones(len(rows), dtype=np.float32), (rows, columns)), (len(segments), 7 * entries)
    )


def accuracy(fit: tuple[list, np.ndarray], test: tuple[list, np.ndarray], look: str, entries: int) -> float:
    """The share of the labels of `test` that a classifier tells that was fitted on `fit`."""
    if look == "lengths (trees)":
        model = HistGradientBoostingClassifier(random_state=0)
        inputs = [np.array([(len(a), len(b), len(a) + len(b)) for a, b in segments]) for segments, _ in (fit, test)]
    else:
        model = LogisticRegression(C=0.1, max_iter=300)
        inputs = [features(segments, look, entries) for segments, _ in (fit, test)]
    return float((model.fit(inputs[0], fit[1]).predict(inputs[1]) == test[1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--objective", default="nsp", choices=["nsp", "sop"])
    parser.add_argument("--max_seq_length", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=16384)
    args = parser.parse_args()
    print(heading("cpu"), end="\n\n")
    print("| text | pairing | documents | rows | with a label | " + " | ".join(LOOKS) + " |\n" + "|---" * 9 + "|")
    for text in args.texts:
        with tempfile.TemporaryDirectory() as folder:
            documents = documents_of(text)
            halves, tokenizer = write_halves(documents, Path(folder)), None
            for pairing in ("segments", "sentences"):
                found = []
                for half, other in (halves, halves[::-1]):
                    found.append(rows_of(half, other, tokenizer, args, pairing))
                    tokenizer = tokenizer or half.parent / f"{half.stem}-{pairing}"
                rows = sum(len(labels) for _, labels in found)
                labelled = [
                    (
                        [of_row for of_row, label in zip(segments, labels, strict=True) if label != -100],
                        labels[labels != -100],
                    )
                    for segments, labels in found
                ]
                count = sum(len(labels) for _, labels in labelled)
                entries = json.loads((tokenizer / "config.json").read_text())["vocab_size"] + args.max_seq_length
                cells = [
                    (accuracy(*labelled, look, entries) + accuracy(*labelled[::-1], look, entries)) / 2
                    for look in LOOKS
                ]
                columns = [Path(text).name, pairing, f"{len(documents):,}", f"{rows:,}", f"{count / rows:.1%}"]
                print("| " + " | ".join([*columns, *(f"{cell:.1%}" for cell in cells)]) + " |", flush=True)


if __name__ == "__main__":
    main()
