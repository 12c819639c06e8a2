"""`d2l-bert evaluate --blimp` against a plain loop and against minicons: scores, decisions, accuracies and time.

    python -m benchmarks.minimal_pairs MODEL [MODEL ...] --blimp DIR [--pairs 200] [--score within_word_l2r]

The plain loop masks one token of one sentence at a time and computes the whole model for it, as the definition says
(Salazar et al., 2020; Kauf and Ivanova, 2023). minicons is the field's library for such scores; without it, its lines
are missing. The first `--pairs` pairs of each paradigm are scored. `other decisions` are pairs where ours prefers
another sentence than the plain loop. The exit code is 1 if there are any, if a score differs by more than 1e-4 from
the plain loop's, or if an accuracy differs by more than 0.1 points from minicons'.
"""

import argparse
import importlib.util
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.mlm_head import heading, positive
from d2l_bert.training.evaluation.blimp import Paradigm, blimp_results, read_blimp, sentences_of
from d2l_bert.training.evaluation.masked_models import load_masked_model
from d2l_bert.training.evaluation.pseudo_likelihood import encode, pseudo_log_likelihoods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of masked language models")
    parser.add_argument("--blimp", required=True, metavar="DIR", help="folder with BLiMP's JSONL files")
    parser.add_argument("--pairs", type=positive, default=200, help="pairs of each paradigm (200)")
    parser.add_argument("--score", default="pll", choices=("pll", "within_word_l2r"))
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    print(heading("cpu"))
    paradigms = [
        Paradigm(each.name, each.phenomenon, each.good[: arguments.pairs], each.bad[: arguments.pairs])
        for each in read_blimp(arguments.blimp)
    ]
    agrees = [compare(model, paradigms, arguments.score) for model in arguments.models]
    sys.exit(not all(agrees))


def compare(name: str, paradigms: list[Paradigm], score: str) -> bool:
    """Print the comparison for one model; returns whether all agree."""
    sentences = sentences_of(paradigms)
    ours, seconds = timed(our_scores, name, sentences, score)
    loop, loop_seconds = timed(loop_scores, name, sentences, score)
    difference = np.abs(ours - loop).max()
    other = int((np.sign(ours[::2] - ours[1::2]) != np.sign(loop[::2] - loop[1::2])).sum())
    print(f"{name}, {score}: {len(sentences) // 2:,} pairs of {len(paradigms)} paradigms")
    print(f"  largest difference of a score from the plain loop's: {difference:.1e}; other decisions: {other}")
    print(f"  {seconds:.1f} s, the plain loop {loop_seconds:.1f} s: {loop_seconds / seconds:.1f} times as fast")
    agrees = difference <= 1e-4 and not other
    if importlib.util.find_spec("minicons") is not None:
        theirs = minicons_scores(name, sentences, score)
        ours, theirs = (blimp_results(paradigms, scores)["paradigms"] for scores in (ours, theirs))
        points = max(100 * abs(ours[each]["accuracy"] - theirs[each]["accuracy"]) for each in ours)
        print(f"  largest difference of a paradigm's accuracy from minicons': {points:.2f} points")
        agrees &= points <= 0.1
    return agrees


def timed(function, *arguments):
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def our_scores(name, sentences, score) -> np.ndarray:
    model = load_masked_model(name)
    return pseudo_log_likelihoods(model, encode(model, sentences, score), score).numpy()


@torch.no_grad()
def loop_scores(name, sentences, score) -> np.ndarray:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    scores = []
    for sentence in sentences:
        encoded, total = tokenizer(sentence), 0.0
        ids, words = encoded["input_ids"], encoded.word_ids()
        for position in range(1, len(ids) - 1):
            masked = list(ids)
            masked[position] = tokenizer.mask_token_id
            for other in range(position + 1, len(ids)):
                if score == "within_word_l2r" and words[other] == words[position]:
                    masked[other] = tokenizer.mask_token_id
            logits = model(input_ids=torch.tensor([masked])).logits[0, position]
            total += float(logits.log_softmax(-1)[ids[position]])
        scores.append(total)
    return np.array(scores)


def minicons_scores(name, sentences, score) -> np.ndarray:
    from minicons import scorer

    model = scorer.MaskedLMScorer(name, "cpu")
    model.tokenizer.batch_encode_plus = model.tokenizer.__call__  # the old name, which Transformers 5 has removed
    metric = "original" if score == "pll" else score
    batches = [sentences[first : first + 50] for first in range(0, len(sentences), 50)]
    scores = [
        model.sequence_score(batch, reduction=lambda values: values.sum(0).item(), PLL_metric=metric)
        for batch in batches
    ]
    return np.array([value for batch in scores for value in batch])


if __name__ == "__main__":
    main()
