"""Documents -> pairs: which sentences and tokens are the two segments, with a label; or single segments without one.

The second loss predicts the label. In next sentence prediction (NSP: BERT, section 3.1; d2l, section 15.9.1.1) it says
whether segment B follows segment A. In sentence order prediction (SOP: ALBERT; Lan et al., 2020) it says whether A and
B are in the order of the text.

A pair is two spans of token numbers and a label. No token id is read here: pairs follow from the ends of sentences.
Where a pair depends on the pair before, the code is a plain loop; all other code works on arrays of many pairs.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np


Objective = Literal["nsp", "sop", "none"]
Pairing = Literal["segments", "sentences"]

# One pair: segment A has the tokens from a_start to a_end - 1, segment B those from b_start to b_end - 1. Tokens are
# numbered through the corpus. The label is Hugging Face's. A single segment has an empty B.
PAIR = np.dtype(
    [("a_start", "i8"), ("a_end", "i8"), ("b_start", "i8"), ("b_end", "i8"), ("next_sentence_label", "i1")]
)
IS_NEXT, IS_RANDOM = 0, 1
IN_ORDER, SWAPPED = 0, 1
NO_LABEL = -100

# [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT = 3, 2

# A document's last sentence may have no sentence after it, and then gets a random B even if chance has chosen a true
# B. A true B is then owed: a later pair keeps its true B instead of a random B. At most this many are owed, since
# documents of one sentence never have a true B.
MOST_OWED = 16


@dataclass
class Pieces:
    """Sentences to lay out: piece i has the sentences from `firsts[i]` to `ends[i]` - 1, of document `documents[i]`.

    All fields are arrays (pieces,). Sentences and documents are numbered through the corpus. A long document may have
    several pieces.
    """

    documents: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray


def lay_out(
    corpus,
    pieces: Pieces,
    draw_others: Callable[[np.random.Generator, int], np.ndarray] | None,
    rng: np.random.Generator,
    *,
    max_seq_length: int,
    pairing: Pairing = "segments",
    objective: Objective = "nsp",
    short_seq_prob: float = 0.1,
) -> np.ndarray:
    """
    Make pairs of the sentences of some documents.

    The pairing `segments` makes the pairs of the original BERT. Consecutive sentences of a document are gathered until
    they reach the length of a pair, and split at the start of a random sentence into A and B.

    - `nsp`: in half of the pairs, B is replaced by sentences from a random place in another document, and the next
      pair begins with the sentences that B had. A document's last sentence may have no sentence after it, and then
      gets a random B. To balance the labels, a later pair then keeps its true B. If `MOST_OWED` such pairs are still
      to come, the last sentence is cut in two at a random token instead, and the second half is a true B.
    - `sop`: A and B are swapped in half of the pairs. A last sentence with no sentence after it is cut in two; a
      single token is left out.
    - `none`: a document is cut into segments of as many tokens as fit, also inside sentences (RoBERTa, section 4.2;
      Liu et al., 2019). The first segment of a long document has a random length, so that the next segments begin at
      other tokens in every epoch.

    The pairing `sentences` makes the book's pairs (section 15.9.1.1): two consecutive sentences of a paragraph.

    - `nsp`: in half of the pairs, the second sentence is replaced by a random sentence of another document. The book
      drops the only sentence of a paragraph, and the last sentence of a paragraph if it was replaced. Here these
      sentences replace second sentences of other pairs. If too many are left, half of the rest are cut in two at a
      random token, and half get a random B.
    - `sop`: the two sentences are swapped in half of the pairs. The only sentence of a paragraph is cut in two.
    - `none`: each sentence is a segment; a sentence that is too long is cut into several.

    Args:
        corpus: has the tables `sentence_ends`, `document_ends` and, for `sentences`, `paragraph_ends` (`JoinedTable`).
        pieces: the sentences to lay out.
        draw_others: `draw_others(rng, count)` draws the documents that random second segments come from, with
            replacement, and gives their numbers (count,). None if there is only one document.
        rng: the generator of all random numbers.
        max_seq_length: the most tokens in a pair, special tokens included.
        short_seq_prob: for `segments`, the share of pairs with a random shorter length, so that the model learns from
            short inputs, too.

    Returns:
        An array of `PAIR`.
    """
    order = rng.permutation(len(pieces.documents))
    pieces = Pieces(pieces.documents[order], pieces.firsts[order], pieces.ends[order])
    sentences = _Sentences.of(corpus, pieces)
    draw = _uniform(rng).__next__
    if objective == "none":
        capacity = max_seq_length - SPECIALS_IN_A_SEGMENT
        if pairing == "segments":
            return _segments_of_documents(sentences, capacity, short_seq_prob, draw)
        return _segments_of_sentences(sentences, capacity)
    capacity = max_seq_length - SPECIALS_IN_A_PAIR
    if pairing == "segments":
        plan = _gather(sentences, capacity, objective, short_seq_prob, draw)
    else:
        plan = _match(sentences, corpus.paragraph_ends, objective, draw)
    return _make_pairs(plan, sentences, corpus, draw_others, capacity, objective, rng)


@dataclass
class _Sentences:
    """The sentences of some pieces, concatenated and numbered from 0; arrays (s,)."""

    starts: np.ndarray  # the first token of each sentence
    ends: np.ndarray  # the token after the last token of each sentence
    documents: np.ndarray  # the document of each sentence
    numbers: np.ndarray  # the number of each sentence in the corpus
    bounds: list[tuple[int, int]]  # the first sentence of each piece, and the sentence after the piece

    @classmethod
    def of(cls, corpus, pieces):
        counts = pieces.ends - pieces.firsts
        bounds = np.append(0, np.cumsum(counts))
        numbers = np.arange(bounds[-1]) + np.repeat(pieces.firsts - bounds[:-1], counts)
        ends = corpus.sentence_ends.at(numbers)
        starts = np.append(0, ends[:-1])[: len(ends)]  # a sentence starts where the previous sentence ends
        starts[bounds[:-1][counts > 0]] = corpus.sentence_ends.before(pieces.firsts[counts > 0])
        return cls(
            starts, ends, np.repeat(pieces.documents, counts), numbers, list(itertools.pairwise(bounds.tolist()))
        )


def _uniform(rng) -> Iterator[float]:
    """Yield uniform random numbers in [0, 1), ten times faster than a call of NumPy for each number."""
    while True:
        yield from rng.random(2048).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Which sentences make a pair

# A plan is a list with these entries of each pair, one pair after the other. Sentences have their numbers in
# `_Sentences`: A has those from `a_first` to `a_last`, B those from `b_first` to `b_last`. If `b_first` is -1, B is
# drawn later from a random place, and A and B should have `target` tokens together. `is_cut`: A and B are the halves
# of one sentence.
_PLAN = ("a_first", "a_last", "b_first", "b_last", "target", "is_cut", "is_random")


def _gather(sentences, capacity, objective, short_seq_prob, draw):
    """The plan for the pairing `segments`."""
    starts, ends, is_sop = sentences.starts.tolist(), sentences.ends.tolist(), objective == "sop"
    plan, owed = [], 0
    add = plan.extend
    for first, end in sentences.bounds:
        while first < end:
            target = 2 + int(draw() * (capacity - 1)) if draw() < short_seq_prob else capacity
            last = bisect_left(ends, starts[first] + target, first, end - 1)
            if last == first and first < end - 1:
                last += 1  # a long sentence alone has no B: add the next sentence; the pair is truncated later
            is_cut = False
            if last > first:
                split = first + 1 + int(draw() * (last - first))  # B's first sentence
            else:
                split = first + 1
                is_cut = ends[first] - starts[first] > 1 and (is_sop or owed >= MOST_OWED)
            is_alone = last == first and not is_cut
            b_first = first if is_cut else split
            if is_sop:
                if not is_alone:
                    add((first, split - 1, b_first, last, target, is_cut, False))
                first = last + 1
                continue
            is_random = draw() < 0.5
            if is_alone and not is_random:
                is_random, owed = True, owed + 1
            elif not is_alone and is_random and owed:
                is_random, owed = False, owed - 1
            if is_random:
                add((first, split - 1, -1, -1, target, False, True))
                first = split
            else:
                add((first, split - 1, b_first, last, target, is_cut, False))
                first = last + 1
    return _as_columns(plan)


def _match(sentences, paragraph_ends, objective, draw):
    """The plan for the pairing `sentences`."""
    lengths, documents = (sentences.ends - sentences.starts).tolist(), sentences.documents.tolist()
    ends = paragraph_ends.at(np.minimum(paragraph_ends.find(sentences.numbers), len(paragraph_ends) - 1))
    ends_paragraph = (ends == sentences.numbers + 1).tolist()
    plan = []
    slots = []  # the places in `plan` of the pairs that need a random B
    unpaired = []  # the sentences that are in no pair so far
    add = plan.extend
    for first, end in sentences.bounds:
        was_second = False  # whether this sentence is the true B of the previous sentence
        for sentence in range(first, end):
            if ends_paragraph[sentence] or sentence == end - 1:
                if not was_second:
                    unpaired.append(sentence)
                was_second = False
            elif objective == "nsp" and draw() < 0.5:
                slots.append(len(plan))
                add((sentence, sentence, -1, -1, 0, False, True))
                was_second = False
            else:
                add((sentence, sentence, sentence + 1, sentence + 1, 0, False, False))
                was_second = True
    for sentence in unpaired:
        slot = _take_slot(slots, plan, sentence, documents, draw)
        if slot is not None:
            plan[slot + 2] = plan[slot + 3] = sentence  # b_first and b_last
        elif lengths[sentence] > 1 and (objective == "sop" or draw() < 0.5):
            add((sentence, sentence, sentence, sentence, 0, True, False))
        elif objective == "nsp":
            add((sentence, sentence, -1, -1, 0, False, True))
    return _as_columns(plan)


def _take_slot(slots, plan, sentence, documents, draw):
    """Remove and return a random slot with an A from another document than `sentence`; None if three tries fail."""
    for _ in range(3):
        if not slots:
            break
        chosen = int(draw() * len(slots))
        if documents[plan[slots[chosen]]] != documents[sentence]:
            slots[chosen], slots[-1] = slots[-1], slots[chosen]
            return slots.pop()
    return None


def _as_columns(plan):
    """The plan as a dict of arrays (pairs,), by the names in `_PLAN`."""
    return dict(zip(_PLAN, np.array(plan, dtype=np.int64).reshape(-1, len(_PLAN)).T, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens make a segment


def _make_pairs(plan, sentences, corpus, draw_others, capacity, objective, rng):
    """The pairs of a plan: draws random second segments, truncates pairs to `capacity` tokens, and sets the labels."""
    is_cut, is_random, target = plan["is_cut"].astype(bool), plan["is_random"].astype(bool), plan["target"]
    a_first, a_last, b_first, b_last = (plan[name] for name in _PLAN[:4])
    # The first token of each segment, and the token after its last (2, pairs).
    a, b = (
        np.stack([sentences.starts[first], sentences.ends[last]])
        for first, last in ((a_first, a_last), (b_first, b_last))
    )
    if is_cut.any():
        middle = a[0] + 1 + (rng.random(len(is_cut)) * (a[1] - a[0] - 1)).astype(np.int64)
        a[1], b[0] = np.where(is_cut, middle, a[1]), np.where(is_cut, middle, b[0])
    drawn = np.flatnonzero(b_first < 0)
    if len(drawn):
        wanted = np.maximum(1, target[drawn] - (a[1] - a[0])[drawn])
        own = sentences.documents[a_first[drawn]]
        b[:, drawn] = random_spans(corpus, draw_others, own, *a[:, drawn], wanted, rng)
    _truncate(a, b, capacity, rng)
    labels = np.where(is_random, IS_RANDOM, IS_NEXT)
    if objective == "sop":
        is_swapped = rng.random(len(labels)) < 0.5
        a, b = np.where(is_swapped, b, a), np.where(is_swapped, a, b)
        labels = np.where(is_swapped, SWAPPED, IN_ORDER)
    return _as_pairs(*a, *b, labels)


def _truncate(a, b, capacity, rng):
    """
    Cut segments (2, pairs) in place, so that each pair has at most `capacity` tokens.

    The longer segment is cut first, each token at random from its front or its back, as in BERT's own preparation.
    """
    a_length, b_length = a[1] - a[0], b[1] - b[0]
    shorter = np.minimum(np.minimum(a_length, b_length), capacity // 2)
    a_kept = np.where(a_length > b_length, capacity - shorter, shorter)
    is_too_long = a_length + b_length > capacity
    for segment, length, kept in ((a, a_length, a_kept), (b, b_length, capacity - a_kept)):
        surplus = np.where(is_too_long, length - kept, 0)
        from_front = rng.binomial(surplus, 0.5)
        segment += np.stack([from_front, from_front - surplus])


def random_spans(
    corpus,
    draw_others,
    documents: np.ndarray,
    a_starts: np.ndarray,
    a_ends: np.ndarray,
    wanted: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Draw spans of whole sentences from random places in other documents.

    If there is no other document, the sentences come from the same document: not from A, and not the sentence that
    follows A; or from A if the document has no other sentence.

    Args:
        documents: the document of each first segment (n,).
        a_starts, a_ends: the tokens of each first segment (n,).
        wanted: the number of tokens that each span should have; a span is shorter if its document ends before (n,).

    Returns:
        The start and the end of each span (n,).
    """
    count = len(documents)
    if draw_others is not None:
        other = draw_others(rng, count)
        while len(same := np.flatnonzero(other == documents)):
            other[same] = draw_others(rng, len(same))
        first, end = corpus.document_ends.before(other), corpus.document_ends.at(other)
        sentence = first + (rng.random(count) * (end - first)).astype(np.int64)
        limit = np.full(count, np.iinfo(np.int64).max)
    else:
        first, end = corpus.document_ends.before(documents), corpus.document_ends.at(documents)
        sentence = _elsewhere(corpus, first, end, a_starts, a_ends, rng)
        start = corpus.sentence_ends.before(sentence)
        limit = np.where(start < a_starts, a_starts, np.where(start < a_ends, a_ends, np.iinfo(np.int64).max))
    starts, ends = corpus.sentence_ends.before(sentence), corpus.sentence_ends.at(sentence)
    while len(more := np.flatnonzero((ends - starts < wanted) & (ends < limit) & (sentence < end - 1))):
        sentence[more] += 1
        ends[more] = corpus.sentence_ends.at(sentence[more])
    return starts, ends


def _elsewhere(corpus, first, end, a_starts, a_ends, rng):
    """Random sentences (n,) from `first` to `end` - 1, outside A and not the sentence that follows A."""
    before = corpus.sentence_ends.find(a_starts)  # the first sentence that ends after A's start
    following = corpus.sentence_ends.find(a_ends)
    after = np.minimum(following + 1, end)  # the first sentence that starts later than A ends
    count = (before - first) + (end - after)
    chosen = (rng.random(len(first)) * count).astype(np.int64)
    sentence = np.where(first + chosen < before, first + chosen, after + chosen - (before - first))
    # If no such sentence exists: any sentence but the one that starts where A ends.
    continues = (following < end) & (corpus.sentence_ends.before(np.minimum(following, end - 1)) == a_ends)
    rest = first + (rng.random(len(first)) * (end - first - continues)).astype(np.int64)
    rest += continues & (rest >= following)
    return np.where(count > 0, sentence, rest)


# ---------------------------------------------------------------------------------------------------------------------
# Single segments


def _segments_of_documents(sentences, capacity, short_seq_prob, draw):
    """Cut each piece into segments of `capacity` tokens; some segments have a random shorter length."""
    bounds = []
    add = bounds.extend
    for first, end in sentences.bounds:
        if first == end:
            continue
        start = piece_start = int(sentences.starts[first])
        piece_end = int(sentences.ends[end - 1])
        while start < piece_end:
            is_short = draw() < short_seq_prob or (start == piece_start and piece_end - piece_start > capacity)
            segment_end = min(start + (1 + int(draw() * capacity) if is_short else capacity), piece_end)
            add((start, segment_end))
            start = segment_end
    starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    return _as_pairs(starts, ends, ends, ends, NO_LABEL)


def _segments_of_sentences(sentences, capacity):
    """Make each sentence a segment; a sentence of more than `capacity` tokens is cut into several."""
    counts = -(-(sentences.ends - sentences.starts) // capacity)  # the number of segments of each sentence
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each segment in its sentence
    starts = np.repeat(sentences.starts, counts) + number * capacity
    ends = np.minimum(starts + capacity, np.repeat(sentences.ends, counts))
    return _as_pairs(starts, ends, ends, ends, NO_LABEL)


def _as_pairs(a_starts, a_ends, b_starts, b_ends, labels):
    """An array of `PAIR`, from its columns."""
    pairs = np.zeros(len(a_starts), dtype=PAIR)
    for name, column in zip(PAIR.names, (a_starts, a_ends, b_starts, b_ends, labels), strict=True):
        pairs[name] = column
    return pairs
