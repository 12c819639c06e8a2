"""Documents to segment pairs for next sentence prediction (BERT, section 3.1; d2l, section 15.9.1.1).

A pair is two spans of tokens and a label. Nothing here touches a token: it works on where sentences end, and returns
rows of numbers that say what to cut out, so that a whole epoch can be laid out beforehand and kept on disk.
"""

from collections.abc import Callable, Sequence

import numpy as np


# One pair: tokens [a_start, a_end) of document a, tokens [b_start, b_end) of document b, and Hugging Face's label.
PAIR = np.dtype(
    [
        ("a_document", "i8"),
        ("a_start", "i8"),
        ("a_end", "i8"),
        ("b_document", "i8"),
        ("b_start", "i8"),
        ("b_end", "i8"),
        ("next_sentence_label", "i1"),
    ]
)
IS_NEXT, IS_RANDOM = 0, 1

# [CLS] A [SEP] B [SEP]
SPECIALS_IN_A_PAIR = 3

SentenceEnds = Callable[[int], np.ndarray]


def segment_pairs(
    documents: Sequence[int],
    sentence_ends: SentenceEnds,
    max_seq_length: int,
    rng: np.random.Generator,
    short_seq_prob: float = 0.1,
) -> np.ndarray:
    """
    The original BERT's pairs: each segment several sentences, filled up to the length.

    Consecutive sentences of a document are gathered until they fill the length, and cut at a random sentence into A
    and B. In half of the pairs B is then replaced by sentences from a random place in another document, and the
    sentences so freed go into the next pair. A document's last sentence can be left alone and only get a random B; as
    many later gatherings keep their true B, so that the labels stay balanced.

    Args:
        documents: document numbers to draw from; every one is visited, in random order.
        sentence_ends: document number -> the token offset at which each of its sentences ends, ascending.
        max_seq_length: most tokens in a pair, the three special tokens included.
        rng: the only source of randomness.
        short_seq_prob: share of pairs that aim at a random shorter length, so that short inputs are seen as well.

    Returns:
        An array of `PAIR`, in random order.
    """
    documents = np.asarray(documents)
    room = max_seq_length - SPECIALS_IN_A_PAIR
    random_pairs_owed = 0
    pairs = []
    for document in rng.permutation(documents).tolist():
        ends = sentence_ends(document).tolist()
        starts = [0, *ends[:-1]]
        first = 0
        while first < len(ends):
            target = int(rng.integers(2, room + 1)) if rng.random() < short_seq_prob else room
            last = first
            # A long sentence alone could only get a random B: it takes the next one along, and is truncated.
            while last + 1 < len(ends) and (last == first or ends[last] - starts[first] < target):
                last += 1
            split = first + 1 if last == first else int(rng.integers(first + 1, last + 1))  # B's first sentence
            a = (starts[first], ends[split - 1])
            is_random = rng.random() < 0.5
            if last == first and not is_random:
                is_random, random_pairs_owed = True, random_pairs_owed + 1
            elif last > first and is_random and random_pairs_owed:
                is_random, random_pairs_owed = False, random_pairs_owed - 1
            if is_random:
                wanted = max(1, target - (a[1] - a[0]))
                other, b = _random_span(documents, document, a[1], sentence_ends, wanted, rng)
                first = split
            else:
                other, b = document, (starts[split], ends[last])
                first = last + 1
            a, b = _truncate(a, b, room, rng)
            pairs.append((document, *a, other, *b, IS_RANDOM if is_random else IS_NEXT))
    return rng.permutation(np.array(pairs, dtype=PAIR))


def sentence_pairs(
    documents: Sequence[int],
    sentence_ends: SentenceEnds,
    paragraph_ends: SentenceEnds,
    max_seq_length: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """
    The book's pairs (section 15.9.1.1): two consecutive sentences of a paragraph; in half of them the second is
    replaced by a random sentence of another document.

    Args:
        paragraph_ends: document number -> the sentence number at which each of its paragraphs ends, ascending.
        (The others and the result are as in `segment_pairs`; over-long pairs are truncated, where the book drops
        them.)
    """
    documents = np.asarray(documents)
    room = max_seq_length - SPECIALS_IN_A_PAIR
    pairs = []
    for document in rng.permutation(documents).tolist():
        ends = sentence_ends(document).tolist()
        starts = [0, *ends[:-1]]
        last_of_paragraph = set((paragraph_ends(document) - 1).tolist())
        for first in range(len(ends) - 1):
            if first in last_of_paragraph:
                continue
            a = (starts[first], ends[first])
            other, b, is_random = document, (starts[first + 1], ends[first + 1]), rng.random() < 0.5
            if is_random:
                other, b = _random_span(documents, document, a[1], sentence_ends, 1, rng)
            a, b = _truncate(a, b, room, rng)
            pairs.append((document, *a, other, *b, IS_RANDOM if is_random else IS_NEXT))
    return rng.permutation(np.array(pairs, dtype=PAIR))


def _random_span(documents, document, true_continuation, sentence_ends, wanted, rng):
    """Whole sentences of at least `wanted` tokens, if there are as many, from a random place in another document.

    Where `document` is the only one they come from elsewhere in it, never from the true continuation.
    """
    other = document
    if len(documents) > 1:
        while other == document:
            other = int(documents[rng.integers(len(documents))])
    ends = sentence_ends(other)
    starts = np.concatenate(([0], ends[:-1]))
    if other == document:
        candidates = np.flatnonzero(starts != true_continuation)
    else:
        candidates = np.arange(len(ends))
    first = int(candidates[rng.integers(len(candidates))])
    last = min(int(np.searchsorted(ends, starts[first] + wanted)), len(ends) - 1)
    if other == document and starts[first] < true_continuation:  # nor may it run into the continuation
        last = min(last, int(np.searchsorted(ends, true_continuation)))
    return other, (int(starts[first]), int(ends[last]))


def _truncate(a, b, room, rng):
    """Shorten the longer span until both fit; each token goes from the front or the back, by the toss of a coin."""
    a_length, b_length = a[1] - a[0], b[1] - b[0]
    if a_length + b_length <= room:
        return a, b
    shorter = min(a_length, b_length, room // 2)
    kept = (room - shorter, shorter) if a_length > b_length else (shorter, room - shorter)
    return tuple(_cut_ends(span, length, rng) for span, length in zip((a, b), kept, strict=True))


def _cut_ends(span, length, rng):
    surplus = span[1] - span[0] - length
    from_front = int(rng.binomial(surplus, 0.5)) if surplus else 0
    return span[0] + from_front, span[0] + from_front + length
