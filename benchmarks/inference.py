"""How fast a trained model answers: ours and stock BERT with the same weights, on the same texts, in turns.

    python -m benchmarks.inference [--size small base] [--corpus PATH...] [--dtype float32|bfloat16] [--device cuda]

`small` is d2l's small BERT in size, `base` BERT-base; both have BERT's architecture (GELU, normalised embeddings, tied
decoder), so that stock BERT computes the same from the same random weights (`d2l_bert.modeling.conversion`). Texts are
held-out paragraphs of the corpus, in its order, cut at 64 and 128 tokens. The tasks:

    fill-mask    the likeliest token for the one [MASK] of each text; our vocabulary head at `masked_positions` only
    embeddings   the last hidden states, averaged over the tokens of each text
    pipeline     `pipeline("fill-mask")` with either model, which knows nothing of `masked_positions`

The first two get batches of token ids, each model with the attention that a trial finds faster; the pipeline gets
texts, and models as they are loaded. Before the turns the models must agree: in the logits of the likeliest tokens, in
the embeddings, in the pipeline's scores.
"""

import argparse
import functools
import itertools
import time

import numpy as np
import torch
from transformers import pipeline
from transformers.utils import logging

from benchmarks.mlm_head import SIZES, heading, positive
from benchmarks.throughput import spread
from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, PretrainConfig
from d2l_bert.modeling.bert_checkpoints import to_bert
from d2l_bert.tokenization.prepare import prepare


BERT = {"hidden_act": "gelu", "embedding_layer_norm": True, "tie_word_embeddings": True}
NAMES = {"small": "d2l's small BERT", "base": "BERT-base"}
TEXTS = {"small": 512, "base": 32}  # of a turn on a CPU; on a GPU 2,048
SHORTEST = 8  # tokens; shorter paragraphs are headings
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}  # how far apart the two may be, as a share of the norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["small", "base"], choices=tuple(NAMES))
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=tuple(LIMITS))
    parser.add_argument("--repetitions", type=positive, default=9, help="turns of each model")
    parser.add_argument("--texts", type=positive, help="texts in a turn; small: 512, base: 32, on a GPU 2,048")
    parser.add_argument("--batch_size", type=positive, default=32, help="texts computed at once")
    parser.add_argument("--vocab_size", type=positive, help="small: 20,256, base: 30,522")
    arguments = parser.parse_args()
    print(heading(arguments.device, arguments.dtype))
    logging.set_verbosity_error()
    for size in arguments.size:
        measure(size, arguments)


@torch.inference_mode()
def measure(size, arguments):
    """Print texts a second of both models in each task."""
    numbers, _, length = SIZES[NAMES[size]]
    config = D2lBertConfig(**numbers | BERT)
    config.vocab_size = arguments.vocab_size or config.vocab_size
    count = arguments.texts or (TEXTS[size] if arguments.device == "cpu" else 2048)
    models = make_models(config, arguments)
    texts, tokenizer = masked_texts(arguments.corpus, config.vocab_size, length, count)
    batches = make_batches(texts, tokenizer, arguments)
    tokens = sum(int(batch["attention_mask"].sum()) for batch, _ in batches)
    print(
        f"\n{NAMES[size]}: {config.num_hidden_layers} x {config.hidden_size}, vocabulary {config.vocab_size:,}; "
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
    """Ours and stock BERT, of the same numbers."""
    torch.manual_seed(0)
    ours = D2lBertForMaskedLM(config)
    models = {"ours": ours, "stock": to_bert(ours)}
    dtype = getattr(torch, arguments.dtype)
    return {name: model.to(arguments.device, dtype).eval() for name, model in models.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def masked_texts(corpus, vocab_size, length, count):
    """So many held-out paragraphs, from the first again if they are too few, a word of each masked; the tokenizer."""
    prepared = prepare(PretrainConfig(corpus=corpus, vocab_size=vocab_size))
    rng, texts = np.random.default_rng(0), []
    for ids in itertools.islice(paragraphs(prepared, length - 2), count):  # [CLS] and [SEP]
        words = prepared.tokenizer.decode(ids).split()
        words[rng.integers(len(words))] = prepared.tokenizer.mask_token
        texts.append(" ".join(words))
    return list(itertools.islice(itertools.cycle(texts), count)), prepared.tokenizer


def paragraphs(prepared, most):
    """Token ids of the first `most` tokens of each held-out paragraph."""
    for document in prepared.held_out_documents:
        sentence_ends = prepared.tokens.sentence_ends(document)
        ends = sentence_ends[prepared.tokens.paragraph_ends(document) - 1]
        for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
            ids = prepared.tokens.tokens(document, start, min(end, start + most))
            if len(ids) >= SHORTEST and prepared.tokenizer.mask_token_id not in ids:
                yield ids


def make_batches(texts, tokenizer, arguments):
    """Token ids of the texts in their order, each batch with the positions of its masks (B, 1)."""
    batches = []
    for first in range(0, len(texts), arguments.batch_size):
        batch = tokenizer(texts[first : first + arguments.batch_size], padding=True, return_tensors="pt")
        masked_positions = (batch["input_ids"] == tokenizer.mask_token_id).nonzero()[:, 1:]
        batches.append((batch.to(arguments.device), masked_positions.to(arguments.device)))
    return batches


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


def fill_masks(model, batch, masked_positions):
    """Logits of the likeliest token for the one [MASK] of each text (B,)."""
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
    """What gives the probability of the likeliest token for each text (texts,), as the pipeline does."""
    pipe = pipeline("fill-mask", model=model, tokenizer=tokenizer, device=arguments.device)
    return lambda: torch.tensor([best["score"] for (best,) in pipe(texts, batch_size=arguments.batch_size, top_k=1)])


# ---------------------------------------------------------------------------------------------------------------------
# In turns


def report(what, works, count, arguments, settings=()):
    """Compare what both models say, let them take turns, and print a line; returns texts a second of each turn."""
    difference = check(*(work() for work in works.values()), arguments.dtype)
    speeds = {name: [] for name in works}
    for turn in range(arguments.repetitions):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            speeds[name].append(count / seconds(works[name], arguments.device))
    ratios = [ours / stock for ours, stock in zip(speeds["ours"], speeds["stock"], strict=True)]
    shown = "".join(f"{spread(speed):>26}" for speed in speeds.values())
    note = f"   {' and '.join(settings)} attention" if settings else ""
    print(f"  {what:12}{shown}{spread(ratios, 2):>22}{difference:>11.0e}{note}", flush=True)
    return speeds


def check(ours, stock, dtype) -> float:
    """How far the answers are apart, as a share of their norm.

    Raises:
        AssertionError: further than rounding explains.
    """
    ours, stock = ours.double(), stock.double()
    difference = float((ours - stock).norm() / stock.norm())
    assert difference < LIMITS[dtype], f"the models disagree by {difference:.1e} of the norm"
    return difference


def faster_attention(model, work, device) -> str:
    """Leave the model with the attention in which it works faster."""
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
