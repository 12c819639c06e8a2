"""Documents to pairs of segments for the second loss, or to single segments where there is none.

Next sentence prediction (BERT, section 3.1; d2l, section 15.9.1.1) asks whether B follows A, sentence order prediction
(ALBERT; Lan et al., 2020) whether the two stand in the text's order.

Every sentence is in some pair of every epoch, with one token at least: where a pair is longer than the room, tokens
are cut off its segments' ends, and never all of a sentence. One exception: in sentence order prediction a sentence of
a single token that stands alone is left out, as it has no order.

A pair is two spans of tokens and a label. Nothing here touches a token: it works on where sentences end, and yields
rows of numbers that say what to cut out, so that a whole epoch can be laid out beforehand and kept on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np


Objective = Literal["nsp", "sop", "none"]

# One pair: tokens [a_start, a_end) of document a, tokens [b_start, b_end) of document b, and Hugging Face's label.
# A single segment has an empty B.
PAIR = np.dtype(
    [
        ("a_document", "i4"),
        ("a_start", "i4"),
        ("a_end", "i4"),
        ("b_document", "i4"),
        ("b_start", "i4"),
        ("b_end", "i4"),
        ("next_sentence_label", "i1"),
    ]
)
IS_NEXT, IS_RANDOM = 0, 1
IN_ORDER, SWAPPED = 0, 1
NO_LABEL = -100

# [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT = 3, 2

# Last sentences of documents that got a random second segment against the coin, and wait for as many true pairs to
# make up for it. Where documents have one sentence only, none come.
MOST_OWED = 16

# Sentences that wait to become a random second segment. Where most paragraphs have one sentence only, more of them
# come than go.
MOST_WAITING = 10_000

SentenceEnds = Callable[[int], np.ndarray]


def segment_pairs(
    documents: Sequence[int],
    sentence_ends: SentenceEnds,
    max_seq_length: int,
    rng: np.random.Generator,
    objective: Objective = "nsp",
    short_seq_prob: float = 0.1,
) -> Iterator[tuple]:
    """
    The original BERT's pairs: each segment several sentences, filled up to the length.

    Consecutive sentences of a document are gathered until they fill the length, and cut at a random sentence into A
    and B. For `nsp`, B is then replaced in half of the pairs by sentences from a random place in another document, and
    the sentences so freed go into the next pair. A document's last sentence can be left alone and only get a random B;
    as many later gatherings keep their true B, so that the labels stay balanced. Where these do not come, it is cut in
    two at a random token instead, the second part being what follows the first. For `sop`, A and B change places in
    half of the pairs, and a sentence left alone is cut in two at a random token; a single token has no order, and is
    left out. For `none` see `single_segments`.

    Args:
        documents: document numbers to draw from; every one is visited, in random order, as often as it stands there.
        sentence_ends: document number -> the token offset at which each of its sentences ends, ascending.
        max_seq_length: most tokens in a pair, the special tokens included.
        rng: the only source of randomness.
        short_seq_prob: share of pairs that aim at a random shorter length, so that short inputs are seen as well.

    Yields:
        The fields of `PAIR`, in the order of the visit.
    """
    if objective == "none":
        yield from single_segments(documents, sentence_ends, max_seq_length, rng, short_seq_prob)
        return
    documents = np.asarray(documents)
    several = len(documents) > 0 and documents.min() != documents.max()
    room = max_seq_length - SPECIALS_IN_A_PAIR
    random_pairs_owed = 0
    for document in rng.permutation(documents).tolist():
        ends = sentence_ends(document).tolist()
        starts = [0, *ends[:-1]]
        first = 0
        while first < len(ends):
            target = int(rng.integers(2, room + 1)) if rng.random() < short_seq_prob else room
            last = first
            # A long sentence alone has no B: it takes the next one along, and is truncated.
            while last + 1 < len(ends) and (last == first or ends[last] - starts[first] < target):
                last += 1
            if last > first:
                split = int(rng.integers(first + 1, last + 1))  # B's first sentence
                a, b = (starts[first], ends[split - 1]), (starts[split], ends[last])
                a_most, b_most = _most_to_cut(starts, ends, first, split), _most_to_cut(starts, ends, split, last + 1)
            else:
                split, a, b, a_most, b_most = first + 1, (starts[first], ends[first]), None, None, None
                if a[1] - a[0] > 1 and (objective == "sop" or random_pairs_owed >= MOST_OWED):
                    a, b = _cut_in_two(a, rng)
            if objective == "sop":
                if b is not None:
                    yield _in_either_order(document, a, b, room, rng, a_most, b_most)
                first = last + 1
                continue
            is_random = rng.random() < 0.5
            if b is None and not is_random:
                is_random, random_pairs_owed = True, random_pairs_owed + 1
            elif b is not None and is_random and random_pairs_owed:
                is_random, random_pairs_owed = False, random_pairs_owed - 1
            if is_random:
                wanted = max(1, target - (a[1] - a[0]))
                other, b = _random_span(documents, several, document, a, sentence_ends, wanted, rng)
                b_most = None  # its sentences are visited elsewhere
                first = split
            else:
                other, first = document, last + 1
            a, b = _truncate(a, b, room, rng, a_most, b_most)
            yield document, *a, other, *b, IS_RANDOM if is_random else IS_NEXT


def sentence_pairs(
    documents: Sequence[int],
    sentence_ends: SentenceEnds,
    paragraph_ends: SentenceEnds,
    max_seq_length: int,
    rng: np.random.Generator,
    objective: Objective = "nsp",
) -> Iterator[tuple]:
    """
    The book's pairs (section 15.9.1.1): two consecutive sentences of a paragraph. For `nsp`, in half of them the
    second is replaced by a random sentence of another document; for `sop`, in half of them the two change places.

    The book loses the sentence of a paragraph that has no other, and a paragraph's last one if a random one stood in
    its place. Here they become the random ones of other pairs. Where that is not enough, and for `sop`, they are cut
    in two at a random token, the second part being what follows the first. For `none` each sentence is a segment; one
    that is too long, several.

    Args:
        paragraph_ends: document number -> the sentence number at which each of its paragraphs ends, ascending.
        (The others and what is yielded are as in `segment_pairs`; over-long pairs are truncated, where the book drops
        them.)
    """
    documents = np.asarray(documents)
    several = len(documents) > 0 and documents.min() != documents.max()
    room = max_seq_length - (SPECIALS_IN_A_SEGMENT if objective == "none" else SPECIALS_IN_A_PAIR)
    waiting = []  # sentences without a pair: document, start and end
    for document in rng.permutation(documents).tolist():
        ends = sentence_ends(document).tolist()
        starts = [0, *ends[:-1]]
        last_of_paragraph = set((paragraph_ends(document) - 1).tolist())
        was_second = False  # whether this sentence was the true B of the one before
        for first in range(len(ends)):
            a = (starts[first], ends[first])
            if objective == "none":
                yield from _pieces(document, *a, room)
            elif first in last_of_paragraph or first == len(ends) - 1:
                if not was_second:
                    waiting.append((document, *a))
                was_second = False
            elif objective == "sop":
                yield _in_either_order(document, a, (starts[first + 1], ends[first + 1]), room, rng)
                was_second = True
            elif rng.random() < 0.5:
                other, b = _waiting_span(waiting, document, rng) or _random_span(
                    documents, several, document, a, sentence_ends, 1, rng
                )
                a, b = _truncate(a, b, room, rng)
                yield document, *a, other, *b, IS_RANDOM
                was_second = False
            else:
                a, b = _truncate(a, (starts[first + 1], ends[first + 1]), room, rng)
                yield document, *a, document, *b, IS_NEXT
                was_second = True
        while len(waiting) > (MOST_WAITING if objective == "nsp" else 0):
            yield from _alone(waiting.pop(), documents, several, sentence_ends, room, rng, objective)
    for alone in waiting:
        yield from _alone(alone, documents, several, sentence_ends, room, rng, objective)


def single_segments(
    documents: Sequence[int],
    sentence_ends: SentenceEnds,
    max_seq_length: int,
    rng: np.random.Generator,
    short_seq_prob: float = 0.1,
) -> Iterator[tuple]:
    """
    One full segment a row, for training without a second loss (RoBERTa, section 4.2; Liu et al., 2019).

    A document is cut into runs of as many tokens as fit, whether or not a sentence ends there, so that every token is
    in one of them. The first is cut shorter at random: the others begin elsewhere in every epoch.

    Args, yields:
        As in `segment_pairs`; B is empty, and the label is -100.
    """
    room = max_seq_length - SPECIALS_IN_A_SEGMENT
    for document in rng.permutation(np.asarray(documents)).tolist():
        ends = sentence_ends(document)
        length = int(ends[-1]) if len(ends) else 0
        start = 0
        while start < length:
            is_short = rng.random() < short_seq_prob or (start == 0 and length > room)
            end = min(start + (int(rng.integers(1, room + 1)) if is_short else room), length)
            yield document, start, end, document, end, end, NO_LABEL
            start = end


def _random_span(documents, several, document, a, sentence_ends, wanted, rng):
    """Whole sentences of at least `wanted` tokens, if there are as many, from a random place in another document.

    Where `document` is the only one they come from elsewhere in it: neither out of A nor from its true continuation,
    or, if there is nothing else, out of A.
    """
    other = document
    if several:
        while other == document:
            other = int(documents[rng.integers(len(documents))])
    ends = sentence_ends(other)
    starts = np.concatenate(([0], ends[:-1]))
    candidates, limit = np.arange(len(ends)), ends[-1]
    if other == document:
        candidates = np.flatnonzero((ends <= a[0]) | (starts > a[1]))
        if not len(candidates):
            candidates = np.flatnonzero(starts != a[1])
    first = int(candidates[rng.integers(len(candidates))])
    if other == document and starts[first] < a[1]:  # nor may it run into them
        limit = a[0] if starts[first] < a[0] else a[1]
    last = min(int(np.searchsorted(ends, starts[first] + wanted)), int(np.searchsorted(ends, limit)))
    return other, (int(starts[first]), int(ends[last]))


def _waiting_span(waiting, document, rng):
    """One of the waiting sentences, if a few tries find one of another document."""
    for _ in range(3):
        if not waiting:
            return None
        place = int(rng.integers(len(waiting)))
        if waiting[place][0] != document:
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            other, start, end = waiting.pop()
            return other, (start, end)
    return None


def _alone(sentence, documents, several, sentence_ends, room, rng, objective):
    """A pair from a sentence that has no other, if that can be."""
    document, *a = sentence
    two = _cut_in_two(a, rng) if a[1] - a[0] > 1 else None
    if objective == "sop":
        if two:
            yield _in_either_order(document, *two, room, rng)
        return
    if two and rng.random() < 0.5:
        other, label, (a, b) = document, IS_NEXT, two
    else:
        (other, b), label = _random_span(documents, several, document, a, sentence_ends, 1, rng), IS_RANDOM
    a, b = _truncate(a, b, room, rng)
    yield document, *a, other, *b, label


def _cut_in_two(span, rng):
    middle = int(rng.integers(span[0] + 1, span[1]))
    return (span[0], middle), (middle, span[1])


def _in_either_order(document, a, b, room, rng, a_most=None, b_most=None):
    a, b = _truncate(a, b, room, rng, a_most, b_most)
    label = SWAPPED if rng.random() < 0.5 else IN_ORDER
    if label == SWAPPED:
        a, b = b, a
    return document, *a, document, *b, label


def _pieces(document, start, end, room):
    for first in range(start, end, room):
        last = min(first + room, end)
        yield document, first, last, document, last, last, NO_LABEL


def _most_to_cut(starts, ends, first, end):
    """Most tokens to cut off the front and off the back of sentences `first` to `end`, so that each keeps one."""
    return ends[first] - starts[first] - 1, ends[end - 1] - starts[end - 1] - 1


def _truncate(a, b, room, rng, a_most=None, b_most=None):
    """
    Shorten the longer span until both fit; each token goes from the front or the back, by the toss of a coin.

    Args:
        a_most, b_most: most tokens to cut off the front and off the back of each; None for any but the last one. What
            one span cannot give, the other does.
    """
    a_length, b_length = a[1] - a[0], b[1] - b[0]
    surplus = a_length + b_length - room
    if surplus <= 0:
        return a, b
    shorter = min(a_length, b_length, room // 2)
    a_cut = a_length - (room - shorter if a_length > b_length else shorter)
    a_most, b_most = a_most or (a_length - 1, a_length - 1), b_most or (b_length - 1, b_length - 1)
    a_cut = min(max(a_cut, surplus - min(sum(b_most), b_length - 1)), min(sum(a_most), a_length - 1))
    return _cut_ends(a, a_cut, *a_most, rng), _cut_ends(b, surplus - a_cut, *b_most, rng)


def _cut_ends(span, surplus, front, back, rng):
    from_front = int(rng.binomial(surplus, 0.5)) if surplus else 0
    from_front = min(max(from_front, surplus - back), front)
    return span[0] + from_front, span[1] - (surplus - from_front)
