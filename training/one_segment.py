"""How much of a pair's label one segment alone tells: the figure to read the accuracy of NSP or SOP beside."""

import numpy as np

from d2l_bert.tokenization.token_store import TokenizedCorpus, ranges
from d2l_bert.training.pairs import NO_LABEL


def one_segment_accuracy(corpus: TokenizedCorpus, pairs: np.ndarray, entries: int) -> float:
    """
    The accuracy of a classifier that sees A alone, or B alone: that of the better one. 0.5 is chance.

    A naive Bayes classifier of the tokens of the segment, its first and its last token, and its length. It is fitted
    on the pairs of one half of the text and tried on those of the other, in turn. A model that is not better has
    learnt how the pairs were made, not whether A and B go together.

    Args:
        pairs: an array of `pairs.PAIR`; those without a label are left out. Of fewer than two, it is 0.5.
        entries: the size of the vocabulary.
    """
    pairs = np.sort(pairs[pairs["next_sentence_label"] != NO_LABEL], order="a_start")
    if len(pairs) < 2:
        return 0.5
    halves, accuracies = np.array_split(pairs, 2), []
    for side in "ab":
        values = max(entries, int((pairs[f"{side}_end"] - pairs[f"{side}_start"]).max()) + 1)  # of a kind of feature
        right = 0
        for fitted, tried in (halves, halves[::-1]):
            pair, features = _features(corpus, fitted, side, values)
            labels = fitted["next_sentence_label"].astype(np.int64)[pair]
            counts = np.bincount(labels * 4 * values + features, minlength=8 * values) + 1.0
            shares = counts.reshape(2, 4, values)
            shares = np.log(shares / shares.sum(2, keepdims=True))
            pair, features = _features(corpus, tried, side, values)
            scores = np.bincount(pair, (shares[1] - shares[0]).ravel()[features])
            right += int(((scores > 0) == tried["next_sentence_label"]).sum())
        accuracies.append(right / len(pairs))
    return max(accuracies)


def _features(corpus, pairs, side, values):
    """The pair of each feature of the segments, and the feature's number: below `4 * values`, for four kinds."""
    starts, ends = pairs[f"{side}_start"], pairs[f"{side}_end"]
    pair = np.arange(len(pairs))
    kinds = (corpus.ids[ranges(starts, ends)], corpus.ids[starts], corpus.ids[ends - 1], ends - starts)
    numbers = [kind.astype(np.int64) + number * values for number, kind in enumerate(kinds)]
    return np.concatenate([np.repeat(pair, ends - starts), pair, pair, pair]), np.concatenate(numbers)
