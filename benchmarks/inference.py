"""The inference speed of our model and of stock BERT with the same weights, on the same texts, in turns.

    python -m benchmarks.inference [--size small base] [--corpus PATH...] [--dtype float32|bfloat16] [--device cuda]

`small` has the size of d2l's small BERT, `base` that of BERT-base. Both have BERT's architecture (GELU, normalised
embeddings, tied decoder), so that stock BERT computes the same from the same random weights
(`d2l_bert.modeling.conversion`). The texts are held-out paragraphs of the corpus, in their order, truncated to 64
tokens (`small`) or 128 (`base`). The tasks:

    fill-mask    the most likely token for the one [MASK] of each text; our MLM head computes that position only
    embeddings   the last hidden states, averaged over the tokens of each text
    pipeline     `pipeline("fill-mask")`, which does not use `masked_positions`

For the first two, the models get batches of token ids and use the attention that a trial finds faster. The pipeline
gets texts, and models with their default attention. Before the turns, both models must give the same answers: logits
of the most likely tokens, embeddings, the pipeline's scores.
"""

import argparse
import functools
import itertools
import time

import numpy as np
import torch
from transformers import pipeline
from transformers.utils import logging

from benchmarks.turns import BASE, heading, positive, summary
from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, PretrainConfig
from d2l_bert.modeling.conversion import to_bert
from d2l_bert.tokenization.prepare import prepare


BERT = {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True}
SIZES = {"small": ("d2l's small BERT", BERT, 64), "base": ("BERT-base", BASE, 128)}  # name, architecture, length
TEXTS = {"small": 512, "base": 32}  # in a turn on a CPU; on a GPU 2,048 for both
SHORTEST = 8  # tokens; shorter paragraphs are headings
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}  # largest difference of the models' answers, relative to their norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["small", "base"], choices=tuple(SIZES))
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=tuple(LIMITS))
    parser.add_argument("--repetitions", type=positive, default=9, help="turns of each model")
    parser.add_argument("--texts", type=positive, help="texts in a turn (512 for small, 32 for base, 2,048 on a GPU)")
    parser.add_argument("--batch_size", type=positive, default=32, help="texts computed at once")
    parser.add_argument("--vocab_size", type=positive, help="vocabulary size (20,256 for small, 30,522 for base)")
    arguments = parser.parse_args()
    print(heading(arguments.device, arguments.dtype))
    logging.set_verbosity_error()
    for size in arguments.size:
        measure(size, arguments)


@torch.inference_mode()
def measure(size, arguments):
    """Print the texts/s of both models in each task."""
    name, numbers, length = SIZES[size]
    config = D2lBertConfig(**numbers)
    config.vocab_size = arguments.vocab_size or config.vocab_size
    count = arguments.texts or (TEXTS[size] if arguments.device == "cpu" else 2048)
    models = make_models(config, arguments)
    texts, tokenizer = masked_texts(arguments.corpus, config.vocab_size, length, count)
    batches = make_batches(texts, tokenizer, arguments)
    tokens = sum(int(batch["attention_mask"].sum()) for batch, _ in batches)
    print(
        f"\n{name}: {config.num_hidden_layers} x {config.hidden_size}, vocabulary {config.vocab_size:,}; "
        f"{len(texts)} texts of {tokens / len(texts):.0f} tokens on average, {arguments.batch_size} at once\n"
        f"  {'':12}{'ours, texts/s':>26}{'stock, texts/s':>26}{'ours / stock':>22}{'differ by':>11}"
    )
    works = {name: pipeline_work(model, tokenizer, texts, arguments) for name, model in models.items()}
    report("pipeline", works, len(texts), arguments)
    for what, answer in (("fill-mask", fill_masks), ("embeddings", embed)):
        works = {name: functools.partial(answer_all, answer, model, batches) for name, model in models.items()}
        settings = [faster_attention(models[name], works[name], arguments.device) for name in works]
        report(what, works, len(texts), arguments, settings)


def make_models(config, arguments):
    """Our model and stock BERT, with the same random weights."""
    torch.manual_seed(0)
    ours = D2lBertForMaskedLM(config).eval()
    models = {"ours": ours, "stock": to_bert(ours)}
    dtype = getattr(torch, arguments.dtype)
    return {name: model.to(arguments.device, dtype).eval() for name, model in models.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def masked_texts(corpus, vocab_size, length, count):
    """`count` stretches of held-out text, repeated if there are too few, each with one word masked; the tokenizer."""
    prepared = prepare(PretrainConfig(corpus=corpus, vocab_size=vocab_size))
    rng = np.random.default_rng(0)
    texts = []
    for ids in itertools.islice(stretches(prepared, length - 2), count):  # 2: [CLS] and [SEP]
        words = prepared.tokenizer.decode(ids).split()
        words[rng.integers(len(words))] = prepared.tokenizer.mask_token
        texts.append(" ".join(words))
    return list(itertools.islice(itertools.cycle(texts), count)), prepared.tokenizer


def stretches(prepared, most):
    """Token ids of five sentences of a held-out document, at most `most`, again and again."""
    corpus = prepared.held_out
    for document in range(len(corpus)):
        first, behind = corpus.document_starts[document : document + 2]
        borders = corpus.sentence_starts[[*range(first, behind, 5), behind]]
        for start, end in itertools.pairwise(borders.tolist()):
            ids = corpus.ids[start : min(end, start + most)]
            if len(ids) >= SHORTEST and prepared.tokenizer.mask_token_id not in ids:
                yield ids


def make_batches(texts, tokenizer, arguments):
    """The texts as batches of token ids in their order, each with the positions of its masks (B, 1)."""
    batches = []
    for first in range(0, len(texts), arguments.batch_size):
        batch = tokenizer(texts[first : first + arguments.batch_size], padding=True, return_tensors="pt")
        masked_positions = (batch["input_ids"] == tokenizer.mask_token_id).nonzero()[:, 1:]
        batches.append((batch.to(arguments.device), masked_positions.to(arguments.device)))
    return batches


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


def fill_masks(model, batch, masked_positions):
    """Logits of the most likely token for the one [MASK] of each text (B,)."""
    if isinstance(model, D2lBertForMaskedLM):
        logits = model(**batch, masked_positions=masked_positions).logits[:, 0]
    else:
        logits = model(**batch).logits.take_along_dim(masked_positions[..., None], 1)[:, 0]
    return logits.max(-1).values


def embed(model, batch, _):
    """Means of the last hidden states over the real tokens of each text (B, H)."""
    real = batch["attention_mask"][..., None]
    return (model.bert(**batch).last_hidden_state * real).sum(1) / real.sum(1)


def answer_all(answer, model, batches):
    return torch.cat([answer(model, *batch) for batch in batches])


def pipeline_work(model, tokenizer, texts, arguments):
    """A function that runs the pipeline; returns the probabilities of the most likely tokens (texts,)."""
    pipe = pipeline("fill-mask", model=model, tokenizer=tokenizer, device=arguments.device)
    return lambda: torch.tensor([best["score"] for (best,) in pipe(texts, batch_size=arguments.batch_size, top_k=1)])


# ---------------------------------------------------------------------------------------------------------------------
# In turns


def report(what, works, count, arguments, settings=()):
    """Check that both models agree, let them take turns, and print a line; returns the texts/s of each turn."""
    difference = check(*(work() for work in works.values()), arguments.dtype)
    speeds = {name: [] for name in works}
    for turn in range(arguments.repetitions):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            speeds[name].append(count / seconds(works[name], arguments.device))
    ratios = [ours / stock for ours, stock in zip(speeds["ours"], speeds["stock"], strict=True)]
    shown = "".join(f"{summary(speed):>26}" for speed in speeds.values())
    note = f"   {' and '.join(settings)} attention" if settings else ""
    print(f"  {what:12}{shown}{summary(ratios, 2):>22}{difference:>11.0e}{note}", flush=True)
    return speeds


def check(ours, stock, dtype) -> float:
    """The distance of two answers, relative to the norm of the second.

    Raises:
        AssertionError: the distance is larger than rounding explains.
    """
    ours = ours.double()
    stock = stock.double()
    difference = float((ours - stock).norm() / stock.norm())
    assert difference < LIMITS[dtype], f"the models disagree by {difference:.1e} of the norm"
    return difference


def faster_attention(model, work, device) -> str:
    """Set the attention with which the model is faster; returns its name."""
    taken = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        work()
        taken[attention] = min(seconds(work, device) for _ in range(2))
    model.set_attn_implementation(min(taken, key=taken.get))
    return min(taken, key=taken.get)


def seconds(work, device) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
