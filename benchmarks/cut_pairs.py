"""
What the cuts of a pair tell of its label: is A cut at its front, is B cut at its back?

    python -m benchmarks.cut_pairs TEXT [TEXT ...]

TEXT is a file or a folder, as `--corpus`. The rule says for each of the four cases the label that is more frequent in
it, by the pairs of epochs with other random numbers. Pairs without a label are left out. 50 % is chance.
"""

import argparse

import numpy as np

from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.data.pairs import NO_LABEL, lay_out


EPOCHS = 8  # half of them to find the rule, half to try it


def cases_of(corpus, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The case of each pair, 0 to 3, and its label (pairs,)."""
    pairs = pairs[pairs["next_sentence_label"] != NO_LABEL]
    is_cut = [~np.isin(pairs[side], corpus.sentence_starts) for side in ("a_start", "b_end")]
    return 2 * is_cut[0] + is_cut[1], pairs["next_sentence_label"]


def accuracy(corpus, pairing: str, length: int) -> float:
    """The share of the labels that the rule tells."""
    last = len(corpus.sentence_starts) - 1
    bounds = np.append(corpus.document_starts[corpus.document_starts < last], last)
    options = {"max_seq_length": length, "pairing": pairing, "objective": "nsp"}
    epochs = [lay_out(corpus, bounds[:-1], bounds[1:], np.random.default_rng(n), **options) for n in range(EPOCHS)]
    fit, test = (cases_of(corpus, np.concatenate(some)) for some in (epochs[::2], epochs[1::2]))
    balance = np.bincount(fit[0], 2.0 * fit[1] - 1, minlength=4)
    return float(((balance > 0)[test[0]] == test[1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    given = parser.parse_args()
    print("| text | pairing | 64 tokens | 128 tokens |\n|---|---|---|---|")
    for text in given.texts:
        corpus = prepare(TextConfig(corpus=[text])).train
        for pairing in ("sentences", "segments"):
            cells = [f"{accuracy(corpus, pairing, length):.1%}" for length in (64, 128)]
            print(f"| {text} | {pairing} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
