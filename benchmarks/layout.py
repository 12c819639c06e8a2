"""Time and memory until the first batch of a prepared folder of any size.

    python -m benchmarks.layout [--documents 100000 1000000 10000000] [--gigabytes 10]

A separate process opens a prepared folder and makes the first step, then the steps up to step 200. The folder has
`--documents` documents of 20 sentences each, or one document of `--gigabytes` gigabytes of text and 99 short ones; its
token ids are a hole in a sparse file. Printed are the seconds from the end of the imports to the first batch, the
process's anonymous memory (RssAnon) at the end, and the pairs a second of laying out a window.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks.turns import machine, positive
from d2l_bert import PretrainConfig
from d2l_bert.folders import content_hash, short_hash
from d2l_bert.tokenization import wordpiece
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.coverage import coverage_of
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import PREPARED_FORMAT
from d2l_bert.tokenization.token_store import ARRAYS
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.held_out import HeldOutPairs


SENTENCES = 20  # in a document
SENTENCE_TOKENS = 20  # in a sentence, on average: from 10 to 30
BYTES_A_TOKEN = 4  # of English text, on average

STEPS = 200  # that `measure_first_batch` makes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--documents", type=positive, nargs="+", default=[10**5, 10**6, 10**7], help="number of documents"
    )
    parser.add_argument("--gigabytes", type=positive, default=10, help="text of the long document (10)")
    parser.add_argument("--repetitions", type=positive, default=5)
    parser.add_argument("--open", metavar="FOLDER", help=argparse.SUPPRESS)  # the process that is measured
    arguments = parser.parse_args()
    if arguments.open:
        measure_first_batch(arguments.open)
        return
    print(f"python {' '.join(sys.orig_argv[1:])}    {date.today()}")
    print(f"{machine('cpu')}, {os.cpu_count()} cores, torch {torch.__version__}")
    first_batch(arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Synthetic prepared folders


def write_folder(folder: Path, sentences_of: np.ndarray) -> None:
    """Write a prepared folder with documents of these numbers of sentences (documents,), and a small tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = wordpiece.train_wordpiece(["the quick brown fox jumps over a lazy dog"] * 50, 100)
    wordpiece.save_tokenizer(tokenizer, folder)
    # The last documents, which are short: 5 % of the text, at most 250,000 tokens.
    held_out = min(max(2, len(sentences_of) // 20), 250_000 // (SENTENCES * SENTENCE_TOKENS))
    total = write_store(folder / "train", sentences_of[:-held_out])
    total += write_store(folder / "held_out", sentences_of[-held_out:])
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": "" if name.endswith(".bin") else content_hash(folder / name),  # of these a run checks the size
        }
        for name in names
    }
    counts = {
        "corpus_name": "synthetic",
        "corpus_fingerprint": "0" * 16,
        "text_fingerprint": 0,
        "hub_datasets": [],
        "reading": {"characters": BYTES_A_TOKEN * total},
        "account": coverage_of(Counter(), tokenizer),
        "tokenizer": {"word_unit": "white space", "unknown_share": 0.0},
    }
    prepared = {
        "format": PREPARED_FORMAT,
        "token_options": TextConfig().token_options(),
        "counts": counts,
        "files": files,
    }
    prepared["fingerprint_of_record"] = short_hash(prepared)
    (folder / "prepared.json").write_text(json.dumps(prepared))


def write_store(store: Path, sentences_of: np.ndarray) -> int:
    """Write a token store, whose ids are a hole in the file; returns the number of its tokens."""
    store.mkdir()
    document_starts = np.append(0, np.cumsum(sentences_of))
    rng = np.random.default_rng(0)
    total = 0
    with (store / "sentence_starts.bin").open("wb") as file:
        file.write(bytes(8))
        for first in range(0, int(document_starts[-1]), 10**7):
            starts = total + np.cumsum(rng.integers(10, 31, min(10**7, int(document_starts[-1]) - first)))
            file.write(starts.data)
            total = int(starts[-1])
    with (store / "ids.bin").open("wb") as file:
        file.truncate(2 * total)
    document_starts.tofile(store / "document_starts.bin")
    (document_starts * SENTENCE_TOKENS).tofile(store / "words_before.bin")
    np.arange(len(sentences_of)).tofile(store / "hashes.bin")
    types = dict.fromkeys(ARRAYS, "<i8") | {"ids": "<u2"}
    record = {"types": types, "source_ends": [len(sentences_of)], "fingerprint": "0" * 16}
    (store / "store.json").write_text(json.dumps(record))
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Time to the first batch


def first_batch(arguments):
    shapes = [(f"{count:,} documents of {SENTENCES} sentences", count, 0) for count in arguments.documents]
    shapes.append((f"1 document of {arguments.gigabytes} GB, 99 of {SENTENCES} sentences", 99, arguments.gigabytes))
    print(f"{'':>48} {'tokens':>15} {'first batch, s':>14} {'RssAnon, MB':>12} {'pairs/s':>9}")
    for name, count, gigabytes in shapes:
        sentences_of = np.full(count, SENTENCES)
        if gigabytes:
            long = gigabytes * 10**9 // BYTES_A_TOKEN // SENTENCE_TOKENS
            sentences_of = np.append(long, sentences_of)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / "tokens"
            write_folder(folder, sentences_of)
            rows = []
            for _ in range(arguments.repetitions):
                command = [sys.executable, "-m", "benchmarks.layout", "--open", str(folder)]
                rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        seconds = [row["seconds"] for row in rows]
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        shown = f"{middle['seconds']:.2f} (at most {max(seconds):.2f})"
        print(
            f"{name:>48} {rows[0]['tokens']:>15,} {shown:>20} {middle['anonymous'] / 1e6:>6.0f} "
            f"{middle['pairs_per_second']:>9,.0f}",
            flush=True,
        )


def measure_first_batch(folder):
    """Open a prepared folder, make `STEPS` steps, print the measurements as JSON. Runs in a separate process."""
    run = PretrainConfig(corpus=[folder], max_steps=10_000, objective="sop", global_batch_size=512)
    torch.set_num_threads(1)
    start = time.monotonic()
    text = prepare(run)
    held_out = HeldOutPairs(text.held_out, text.tokenizer, run, run.most_tokens(), text.held_out_name())
    steps = TrainingSteps(run, text, run.max_steps)
    made = steps.walk()
    next(made)
    seconds = time.monotonic() - start
    next(iter(held_out))
    for _ in range(1, STEPS):
        next(made)
    # The layout alone, in this process.
    start = time.monotonic()
    laid_out = len(steps.stages[-1].epoch_pairs.window(1, 0))
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens": len(text.train.ids),
                "anonymous": rss_anon(),
                "pairs_per_second": laid_out / (time.monotonic() - start),
            }
        )
    )


def rss_anon():
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
