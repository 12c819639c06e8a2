"""A sentence encoder out of a pretrained model, without labels (SimCSE), and what it gains on held-out text.

    python -m benchmarks.simcse MODEL [--output_dir DIR] [--corpus PATH...] [--max_steps N]

Unsupervised SimCSE (Gao et al., 2021): each sentence stands beside itself in a batch. Dropout gives the two different
vectors, and the model learns to find the sentence's second vector among those of all sentences of the batch. The
training is sentence-transformers' own (`MultipleNegativesRankingLoss` on pairs of the same sentence). A model that was
pretrained without dropout gets `--dropout` while it trains: without dropout both vectors would be the same.

The judge is text that neither pretraining nor this training has seen, the corpus's held-out documents: given one
sentence of a paragraph, find the next sentence of that paragraph among those of `--candidates` paragraphs. Printed for
the model before and after, for both poolings, and for words alone (cosine of token counts, weighted by rareness):

    first      share of the queries whose sentence ranks first
    in ten     share of those whose sentence is among the first ten
    MRR        mean of 1 / rank
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.mlm_head import positive
from d2l_bert import PretrainConfig
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.load_models import load_encoder
from d2l_bert.training.vectors.embed import Embedder, Encoded, unit


FEWEST_TOKENS = 6  # in a sentence; shorter ones are headings and exclamations
SEED = 42
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a folder of d2l-bert pretrain, or another encoder")
    parser.add_argument(
        "--output_dir", type=Path, help="a new folder for the sentence encoder; by default none is kept"
    )
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--candidates", type=positive, default=1000, help="paragraphs to choose among")
    parser.add_argument("--max_steps", type=positive, default=600)
    parser.add_argument(
        "--batch_size", type=positive, default=64, help="sentences in a step; the others are wrong ones"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean", help="of the training")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--temperature", type=float, default=0.05, help="cosines are divided by this, as in the paper")
    parser.add_argument("--max_seq_length", type=positive, default=64, help="most tokens of a sentence in training")
    arguments = parser.parse_args()
    if arguments.output_dir and arguments.output_dir.exists():
        raise SystemExit(f"{arguments.output_dir}: exists already; name a new folder")
    logging.set_verbosity_error()
    model, tokenizer = load_encoder(arguments.model)
    text = prepare(PretrainConfig(corpus=arguments.corpus, tokenizer=arguments.model, max_steps=1))
    _, held_out = text.evaluation()
    queries, answers = neighbours(text.tokens, held_out.nth(np.arange(len(held_out))), arguments.candidates)
    print(f"{len(queries):,} held-out paragraphs: which is the sentence after the given one?\n")
    print(f"  {'':34}{'first':>8}{'in ten':>8}{'MRR':>8}")
    show("words alone", word_vectors(queries, answers, len(tokenizer)))
    vectors = functools.partial(sentence_vectors, tokenizer=tokenizer, texts=[queries, answers])
    for pooling in ("mean", "cls"):
        show(f"{Path(arguments.model).name}, {pooling}", vectors(model, pooling=pooling))
    before = {name: getattr(model.config, name) for name in DROPOUTS if hasattr(model.config, name)}
    trained, seconds, count = train(arguments, sentences(text, arguments), before)
    for pooling in ("mean", "cls"):
        show(f"after SimCSE, {pooling}", vectors(trained, pooling=pooling))
    print(
        f"\ntrained on {count:,} sentences in {seconds:.0f} s: {arguments.max_steps} steps of {arguments.batch_size}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The judge


def neighbours(corpus, documents, most):
    """For at most `most` paragraphs of the documents, the ids of a sentence, and the ids of the sentence after it."""
    rng, queries, answers = np.random.default_rng(SEED), [], []
    for document in rng.permutation(documents):
        numbers = corpus.sentences(int(document))
        first, last = corpus.paragraph_ends.find(numbers[[0, -1]])
        for paragraph in range(int(first), int(last) + 1):
            start, end = (
                int(f(np.array(paragraph))) for f in (corpus.paragraph_ends.before, corpus.paragraph_ends.at)
            )
            found = [
                sentence_ids(corpus, number) for number in range(max(start, numbers[0]), min(end, numbers[-1] + 1))
            ]
            pairs = [
                (query, answer)
                for query, answer in zip(found[:-1], found[1:], strict=True)
                if min(len(query), len(answer)) >= FEWEST_TOKENS and not np.array_equal(query, answer)
            ]
            if pairs:
                query, answer = pairs[int(rng.integers(len(pairs)))]
                if any(np.array_equal(answer, other) for other in answers):
                    continue  # the same sentence would be a right answer twice
                queries.append(query)
                answers.append(answer)
                if len(queries) == most:
                    return queries, answers
    return queries, answers


def sentence_ids(corpus, number):
    start, end = (int(find(np.array(number))) for find in (corpus.sentence_ends.before, corpus.sentence_ends.at))
    return corpus.ids.at(np.arange(start, end))


def word_vectors(queries, answers, size):
    """Token counts (n, V) of queries and answers, weighted by the logarithm of how rare a token is in the answers."""
    counts = [np.stack([np.bincount(ids, minlength=size) for ids in texts]) for texts in (queries, answers)]
    rareness = np.log((1 + len(answers)) / (1 + (counts[1] > 0).sum(0)))
    return [np.sqrt(count) * rareness for count in counts]


def sentence_vectors(model, tokenizer, texts, pooling):
    """The vectors (n, H) of each list of texts, given as token ids without special tokens."""
    limit = longest_input(model, tokenizer) or 512
    embedder = Embedder(model.cpu().eval(), tokenizer, pooling, limit, 4096)
    first, last = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    vectors = []
    for part in texts:
        whole = [np.concatenate([first, ids[: limit - 2], last]) for ids in part]
        lengths = np.array(list(map(len, whole)))
        vectors.append(embedder.vectors(Encoded(np.concatenate(whole).astype(np.int64), lengths, 0)))
    return vectors


def show(name, vectors):
    """Print how well the nearest answer is the right one; the right answer of query i is answer i."""
    cosines = unit(vectors[0]) @ unit(vectors[1]).T
    right = np.diag(cosines)[:, None]
    ranks = 1 + (cosines > right).sum(1) + ((cosines == right).sum(1) - 1) / 2
    figures = [f"{share:.1%}" for share in (np.mean(ranks <= 1), np.mean(ranks <= 10))]
    print(f"  {name:34}{figures[0]:>8}{figures[1]:>8}{np.mean(1 / ranks):>8.3f}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The training


def sentences(text, arguments):
    """Sentences of the documents that the model was trained on, as texts, drawn at random."""
    rng, corpus, wanted = np.random.default_rng(SEED), text.tokens, arguments.max_steps * arguments.batch_size
    documents, found = text.train_documents(), []
    sentences_of_all = np.concatenate([corpus.sentences(int(one)) for one in documents.nth(np.arange(len(documents)))])
    for number in rng.permutation(sentences_of_all):
        ids = sentence_ids(corpus, int(number))
        if len(ids) >= FEWEST_TOKENS:
            found.append(text.tokenizer.decode(ids[: arguments.max_seq_length]))
            if len(found) == wanted:
                break
    return found


def train(arguments, texts, dropouts):
    """
    Args:
        texts: the sentences.
        dropouts: the dropout rates of the pretrained model, which the finished encoder gets back.

    Returns:
        The encoder after SimCSE, the seconds that the training took, and the number of sentences.
    """
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(SEED)
    encoder = Transformer(arguments.model, config_kwargs=dict.fromkeys(dropouts, arguments.dropout))
    longest = encoder.max_seq_length
    encoder.max_seq_length = arguments.max_seq_length
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), arguments.pooling)])
    assert any(getattr(layer, "p", 0) == arguments.dropout for layer in model.modules()), "no dropout, no SimCSE"
    unused = tempfile.TemporaryDirectory()
    settings = SentenceTransformerTrainingArguments(
        output_dir=unused.name,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.max_steps // 10,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts}),
        loss=MultipleNegativesRankingLoss(model, scale=1 / arguments.temperature),
    )
    start = time.perf_counter()
    with unused:
        trainer.train()
    seconds = time.perf_counter() - start
    for name, rate in dropouts.items():
        setattr(encoder.model.config, name, rate)
    encoder.max_seq_length = longest
    if arguments.output_dir:
        model.save(str(arguments.output_dir))
        print(f"\nthe sentence encoder is in {arguments.output_dir}\n")
    return encoder.model, seconds, len(texts)


if __name__ == "__main__":
    main()
