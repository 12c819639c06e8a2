"""
What a contrastive stage makes of an encoder's vectors: the two of docs/sentence-vectors.md, and TF-IDF beside them.

    python -m benchmarks.sentence_vectors MODEL --books DIR --mrpc DIR --trec DIR

DIR of books has train/ and valid/, the others train.csv and test.csv. Each stage begins with MODEL, has seed 1, and
reads its rows once: 6,400 sentences of train/, the same with the sentences that follow them, or the pairs of MRPC.
Prints in percent, for vectors as they are and evened out as by `embed --nearest`:

- copies: the eight copies of a sentence of valid/ that have a word dropped, two neighbours swapped and one word
  exchanged, among the eight nearest;
- books: sentences of the same book of valid/ among the ten nearest;
- trec: questions of the same label among the ten nearest of a test question;
- mrpc: the area under the curve, if the test pairs with the highest cosines are called paraphrases.
"""

import argparse
import csv
import itertools
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

import d2l_bert  # noqa: F401 (registers the model)
from benchmarks.nearest import COPIES, QUERIES, book_sentences, copies_of, share
from d2l_bert.inference import embed


DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def table(file: Path) -> dict[str, list[str]]:
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name: [row[name] for row in rows] for name in rows[0]}


def following(folder: Path) -> list[tuple[str, str]]:
    """Sentences of 7 to 39 words, and the next one of the same kind of its book."""
    pairs = []
    for file in sorted(folder.iterdir()):
        sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", file.read_text())]
        for first, second in itertools.pairwise(sentences):
            if has_usual_length(first) and has_usual_length(second):
                pairs.append((first, second))
    return random.Random(0).sample(pairs, 6400)


def has_usual_length(sentence: str) -> bool:
    return 6 < len(sentence.split()) < 40


def trained(model: str, rows: dict[str, list], loss: type, rate: float) -> SentenceTransformer:
    model = SentenceTransformer(model, config_kwargs=DROPOUT)
    with tempfile.TemporaryDirectory() as folder:
        options = SentenceTransformerTrainingArguments(
            folder,
            learning_rate=rate,
            per_device_train_batch_size=64,
            num_train_epochs=1,
            warmup_steps=0.1,
            seed=1,
            save_strategy="no",
            report_to="none",
        )
        SentenceTransformerTrainer(model, options, train_dataset=Dataset.from_dict(rows), loss=loss(model)).train()
    return model


def figures_of(given: argparse.Namespace) -> Callable[[Callable], dict[str, float]]:
    """A function that measures what a function makes of texts: their vectors."""
    sentences, books = book_sentences(given.books / "valid")

    def changed(sentence: str, rng: random.Random) -> str:
        words = sentence.split()
        del words[rng.randrange(len(words))]
        place = rng.randrange(len(words) - 1)
        words[place : place + 2] = reversed(words[place : place + 2])
        words[rng.randrange(len(words))] = rng.choice(rng.choice(sentences).split())
        return " ".join(words)

    copies, originals = copies_of(sentences, changed)
    first = [originals.index(number) for number in range(QUERIES)]
    some = random.Random(0).sample(range(len(sentences)), 500)
    questions = table(given.trec / "test.csv")
    more = table(given.trec / "train.csv")
    texts = questions["text"] + more["text"][:2500]
    labels = questions["label"] + more["label"][:2500]
    pairs = table(given.mrpc / "test.csv")

    def measured(vectors_of: Callable) -> dict[str, float]:
        of_pairs = torch.as_tensor(vectors_of(pairs["text"] + pairs["text_pair"]), dtype=torch.float64)
        return {
            "copies": share(vectors_of(copies), originals, first, COPIES),
            "books": share(vectors_of(sentences), books, some, 10),
            "trec": share(vectors_of(texts), labels, list(range(len(questions["text"]))), 10),
            "mrpc": 100 * roc_auc_score(pairs["label"], torch.cosine_similarity(*of_pairs.chunk(2))),
        }

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    for name in ("books", "mrpc", "trec"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    measured = figures_of(given)
    sentences, _ = book_sentences(given.books / "train")
    alone = random.Random(0).sample(sentences, 6400)
    neighbours = following(given.books / "train")
    pairs = table(given.mrpc / "train.csv")
    next_ones = {"a": [first for first, _ in neighbours], "b": [second for _, second in neighbours]}
    labelled = {"a": pairs["text"], "b": pairs["text_pair"], "label": list(map(float, pairs["label"]))}
    stages = {
        "text alone": ({"a": alone, "b": alone}, MultipleNegativesRankingLoss, 1e-4),
        "neighbours": (next_ones, MultipleNegativesRankingLoss, 3e-4),
        "labelled pairs": (labelled, CoSENTLoss, 1e-4),
    }

    def show(label: str, vectors_of: Callable) -> None:
        cells = [f"{figure:.1f}" for figure in measured(vectors_of).values()]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)

    print("| vectors | copies | books | trec | mrpc |\n|---|---|---|---|---|")
    show("TF-IDF", lambda lines: TfidfVectorizer(sublinear_tf=True).fit_transform(lines).toarray())
    for label, stage in {"the model": (), **stages}.items():
        model = trained(given.model, *stage) if stage else SentenceTransformer(given.model)

        def evened(lines: list[str], model: SentenceTransformer = model) -> torch.Tensor:
            vectors = model.encode(lines, convert_to_tensor=True)
            return embed.evened(vectors)(vectors)

        show(label, model.encode)
        show(f"{label}, evened out", evened)


if __name__ == "__main__":
    main()
