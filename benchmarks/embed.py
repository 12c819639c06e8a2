"""The speed of `d2l-bert embed` and of sentence-transformers, with the same model on the same lines, in turns.

    python -m benchmarks.embed MODEL [FILE] [--lines N] [--repetitions N] [--batch_size N]

Without FILE the lines are made up of the words of the tokenizer: 1 to 300 words, most of them short. Both sides read
texts in memory and give vectors in memory, in float32, with mean pooling; loading the model does not count. Before the
turns, both must give the same vectors.
"""

import argparse
import time

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.mlm_head import heading, positive
from benchmarks.turns import summary
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.tokenization.sources import text_lines
from d2l_bert.training.load_models import load_encoder
from d2l_bert.training.vectors.embed import BATCH_TOKENS, BATCH_TOKENS_OF_A_GPU, Embedder, embedded


MOST_DIFFERENT = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a model folder, or an id on the Hub")
    parser.add_argument("file", metavar="FILE", nargs="?", help="a file with a text in each line")
    parser.add_argument(
        "--lines", type=positive, default=4000, help="lines that are made up, or the first of the file"
    )
    parser.add_argument("--repetitions", type=positive, default=5, help="turns of each side")
    parser.add_argument("--batch_size", type=positive, default=32, help="of sentence-transformers (its default: 32)")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    print(heading(device.type, "float32"))
    model, tokenizer = load_encoder(arguments.model)
    limit, batch_tokens = longest_input(model, tokenizer), BATCH_TOKENS.get(device.type, BATCH_TOKENS_OF_A_GPU)
    embedder = Embedder(model.to(device), tokenizer, "mean", limit, batch_tokens)
    texts = list(text_lines(arguments.file)) if arguments.file else made_up(tokenizer, arguments.lines)
    texts = texts[: arguments.lines]
    lengths = embedder.encode(texts).lengths
    print(
        f"{arguments.model}: {len(texts):,} lines of {lengths.min()} to {lengths.max()} tokens, on average "
        f"{lengths.mean():.0f}; sentence-transformers computes {arguments.batch_size} lines at once, ours "
        f"{batch_tokens:,} tokens"
    )
    peer = sentence_transformer(arguments.model, limit, device)
    works = {
        "ours": lambda: np.concatenate([vectors for _, _, vectors in embedded(embedder, texts)]),
        "theirs": lambda: peer.encode(texts, batch_size=arguments.batch_size),
    }
    difference = float(np.abs(works["ours"]() - works["theirs"]()).max())
    assert difference < MOST_DIFFERENT, f"the vectors differ by {difference:.1e}"
    speeds = {name: [] for name in works}
    for turn in range(arguments.repetitions):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            works[name]()
            speeds[name].append(len(texts) / (time.perf_counter() - start))
    ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds["theirs"], strict=True)]
    print(f"  vectors differ by {difference:.0e} at most")
    for name, said in (("ours", "d2l-bert embed"), ("theirs", "sentence-transformers")):
        print(f"  {said:24}{summary(speeds[name]):>26} lines/s")
    print(f"  {'ratio':24}{summary(ratios, 2):>26}")


def made_up(tokenizer, count):
    """Lines of 1 to 300 words of the tokenizer; the number of words is spread evenly in its logarithm."""
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 2)
    lengths = np.exp(rng.uniform(0, np.log(300), count)).astype(int)
    return [" ".join(rng.choice(words, length)) for length in lengths]


def sentence_transformer(name, limit, device):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(name, model_kwargs={"dtype": torch.float32})
    encoder.max_seq_length = limit
    pooling = Pooling(encoder.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[encoder, pooling], device=str(device))


if __name__ == "__main__":
    main()
