"""
Which of several ways to compare vectors finds what belongs together: `embed --nearest` beside others, and TF-IDF.

    python -m benchmarks.nearest MODEL [MODEL ...] --log FILE [FILE ...] --trec FILE.csv --books DIR

Prints the share, in percent, of the ten nearest lines that belong to the same group as the line that is looked for:

- templates: lines of the log files whose words without a digit are the same (at most 4,000 different lines);
- log copies: the eight copies of a log line that have other digits, among the eight nearest;
- trec: questions of the same label (columns text and label);
- books: sentences of the same book of DIR;
- copies: the eight copies of a sentence of DIR that have a sixth of their words exchanged, among the eight nearest.

The tokens of a line beyond 128 are left out.
"""

import argparse
import csv
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

from d2l_bert.inference import embed
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.modeling import loading


MOST_LINES = 4000  # of the logs
QUERIES = 200  # lines whose nearest are looked for
COPIES = 8  # of each query, where there are copies
FIT_ON = 150  # lines, for the rows that say so


def log_lines(files: list[Path]) -> tuple[list[str], list[str]]:
    """Different log lines, and the template of each: what is left without the words that have a digit."""
    different = set()
    for file in files:
        different.update(line.strip() for line in file.read_text(errors="replace").splitlines())
    different.discard("")
    lines = random.Random(0).sample(sorted(different), min(MOST_LINES, len(different)))
    return lines, [re.sub(r"\S*\d\S*", "#", line) for line in lines]


def book_sentences(folder: Path) -> tuple[list[str], list[str]]:
    """700 sentences of 7 to 39 words from each book, or all, and the book of each."""
    lines = []
    books = []
    for file in sorted(folder.iterdir()):
        words_of = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", file.read_text())]
        sentences = [" ".join(words) for words in words_of if 6 < len(words) < 40]
        chosen = random.Random(0).sample(sentences, min(700, len(sentences)))
        lines += chosen
        books += [file.name] * len(chosen)
    return lines, books


def copies_of(lines: list[str], changed: Callable[[str, random.Random], str]) -> tuple[list[str], list[int]]:
    """1,500 lines, the first of them with changed copies, and for each line the number of its original."""
    rng = random.Random(0)
    found = []
    originals = []
    for number, line in enumerate(rng.sample(lines, 1500)):
        some = [line]
        if number < QUERIES:
            some += [changed(line, rng) for _ in range(COPIES)]
        found += some
        originals += [number] * len(some)
    return found, originals


def other_digits(line: str, rng: random.Random) -> str:
    return re.sub(r"\d", lambda _: str(rng.randrange(10)), line)


def share(vectors, groups: list, queries: list[int], nearest: int) -> float:
    """The share, in percent, of the nearest lines by cosine that are of the query's group."""
    vectors = torch.nn.functional.normalize(torch.as_tensor(vectors, dtype=torch.float64), dim=1)
    cosines = vectors[queries] @ vectors.T
    cosines[range(len(queries)), queries] = -2
    same = []
    for query, lines in zip(queries, cosines.topk(nearest).indices.tolist(), strict=True):
        same += [groups[line] == groups[query] for line in lines]
    return 100 * float(np.mean(same))


def ways(vectors: torch.Tensor) -> dict[str, torch.Tensor]:
    """The vectors as each way compares them."""
    mean = vectors.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov((vectors - mean).T))
    whitened = directions / variances.clamp_min(embed.LEAST_VARIANCE * float(variances[-1])).sqrt()
    some = vectors[torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:FIT_ON]]
    top = directions[:, -3:]
    return {
        "as they are": vectors,
        "minus their mean": vectors - mean,
        "minus the first three directions": (vectors - mean) @ (torch.eye(len(mean)) - top @ top.T),
        "whitened": (vectors - mean) @ whitened,
        "half whitened (embed)": embed.evened(vectors)(vectors),
        f"half whitened, fitted on {FIT_ON}": embed.evened(some)(vectors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--log", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trec", type=Path, required=True, metavar="FILE.csv")
    parser.add_argument("--books", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    with given.trec.open(newline="") as file:
        rows = list(csv.DictReader(file))[:2500]
    sentences, books = book_sentences(given.books)
    logs, templates = log_lines(given.log)

    def other_words(sentence, rng):
        words = sentence.split()
        for _ in range(max(1, len(words) // 6)):
            words[rng.randrange(len(words))] = rng.choice(rng.choice(sentences).split())
        return " ".join(words)

    texts = {
        "templates": (logs, templates),
        "log copies": copies_of([line for line in logs if re.search(r"\d", line)], other_digits),
        "trec": ([row["text"] for row in rows], [row["label"] for row in rows]),
        "books": (sentences, books),
        "copies": copies_of(sentences, other_words),
    }
    table = {}
    for name, (lines, groups) in texts.items():
        nearest = COPIES if "copies" in name else 10
        counts = Counter(groups)
        able = [number for number, group in enumerate(groups) if counts[group] > nearest]
        queries = random.Random(0).sample(able, min(QUERIES, len(able)))
        print(f"{name}: {len(lines):,} lines, {len(set(groups)):,} groups, {len(queries)} queries", flush=True)
        counted = TfidfVectorizer(sublinear_tf=True).fit_transform(lines).toarray()
        table.setdefault("TF-IDF", {})[name] = share(counted, groups, queries, nearest)
        for folder in given.models:
            model, tokenizer = loading.load_encoder(folder)
            tokenizer.backend_tokenizer.no_padding()
            tokenizer.backend_tokenizer.enable_truncation(128)
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(lines)
            for way, vectors in ways(embed.vectors_of(encodings, model, tokenizer, EmbedConfig())).items():
                found = share(vectors, groups, queries, nearest)
                table.setdefault(f"{Path(folder).name}, {way}", {})[name] = found
    print(f"\n| vectors | {' | '.join(texts)} |\n|---|{'---|' * len(texts)}")
    for label, found in table.items():
        print(f"| {label} | {' | '.join(f'{found[name]:.1f}' for name in texts)} |")


if __name__ == "__main__":
    main()
