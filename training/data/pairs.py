"""Documents -> pairs: which sentences and tokens are the two segments, with a label; or single segments without one.

The second loss predicts the label. In next sentence prediction (NSP: BERT, section 3.1; d2l, section 15.9.1.1) it says
whether segment B follows segment A. In sentence order prediction (SOP: ALBERT; Lan et al., 2020) it says whether A and
B are in the order of the text.

A pair is two spans of token numbers and a label. Pairs follow from the ends of sentences; token ids are read only to
find Bs that are equal.

Where a pair begins depends on the pair before: a loop makes the first pairs of all documents at once, then the second
ones, and so on.
"""

import numpy as np

from d2l_bert.tokenization.token_store import TokenizedCorpus, ranges


# One pair: segment A has the tokens from a_start to a_end - 1, segment B those from b_start to b_end - 1. Tokens are
# numbered through the corpus. The label is Hugging Face's. A single segment has an empty B. The key is that of the
# pair's masks (`random_numbers.random_keys`): 0 until the pair has its place in an epoch.
# All fields have 8 bytes: NumPy reads unaligned ones more slowly.
PAIR = np.dtype(
    [(name, "i8") for name in ("a_start", "a_end", "b_start", "b_end", "next_sentence_label")] + [("key", "u8")]
)
IS_NEXT, IS_OF_ANOTHER_PAIR = 0, 1
IN_ORDER, SWAPPED = 0, 1
NO_LABEL = -100

# [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT = 3, 2

# Pairs with Bs of about the same length, two of which exchange them. Each B is cut to the shortest of its block:
# larger blocks would cut more of a small text.
BLOCK_PAIRS = 4

# Two Bs count as equal if this many of their tokens, evenly spaced, are equal.
COMPARED_TOKENS = 16
# The hash of these tokens is the sum of each id times a random factor.
HASH_FACTORS = np.random.default_rng(0).integers(-(2**62), 2**62, COMPARED_TOKENS)


def lay_out(
    corpus,
    firsts: np.ndarray,
    ends: np.ndarray,
    rng: np.random.Generator,
    *,
    max_seq_length: int,
    pairing: str = "segments",
    objective: str = "nsp",
    short_seq_prob: float = 0.1,
) -> np.ndarray:
    """
    Make pairs of the sentences of some documents. Each sentence is in one pair.

    - The pairing `segments` gathers consecutive sentences of a document until they reach the length of a pair, as the
      original BERT does, and splits them at the start of a random sentence into A and B.
    - The pairing `sentences` takes two consecutive sentences, as the book does (section 15.9.1.1).

    Both go on from one paragraph of a document to the next. A sentence that is left over at the beginning or the end
    of a document joins the nearest segment. The only sentence of a document becomes a segment without a B and a label.

    With `nsp`, half of the pairs then exchange their Bs with one another (`_exchange`). The original BERT takes such
    Bs from random places in other documents instead, the book from any paragraph. That tells the labels by one segment
    alone, such as an opening sentence that is never a true B, or by the lengths. Here the As of both labels come from
    the same places and have the same lengths, and so do the Bs.

    With `sop`, A and B are swapped in half of the pairs.

    With `none`, `segments` cuts a document into segments of as many tokens as fit, also inside sentences (RoBERTa,
    section 4.2; Liu et al., 2019). The first segment of a long document has a random length, so that the next segments
    begin at other tokens in every epoch. `sentences` makes each sentence a segment; a sentence that is too long is cut
    into several.

    Args:
        corpus: has the arrays `sentence_starts` and `ids` (`TokenizedCorpus`).
        firsts, ends: piece i has the sentences from `firsts[i]` to `ends[i]` - 1, at least one (pieces,). A piece is a
            document, or a part of a long document. Sentences are numbered through the corpus.
        rng: the generator of all random numbers.
        max_seq_length: the most tokens in a pair, special tokens included.
        short_seq_prob: for `segments`, the share of pairs with a random shorter length, so that the model learns from
            short inputs, too.

    Returns:
        An array of `PAIR`, not in random order.
    """
    # From here on the sentences of all pieces are numbered from 0: the first one of each piece, then their number.
    bounds = np.append(0, np.cumsum(ends - firsts))
    numbers = ranges(firsts, ends)
    starts, ends = corpus.sentence_starts[numbers], corpus.sentence_starts[numbers + 1]  # of the sentences, in tokens
    in_a_segment, in_a_pair = max_seq_length - SPECIALS_IN_A_SEGMENT, max_seq_length - SPECIALS_IN_A_PAIR
    if objective == "none":
        if pairing == "segments":
            pieces = starts[bounds[:-1]], ends[bounds[1:] - 1]
            return _segments_of_documents(*pieces, in_a_segment, short_seq_prob, rng)
        return _segments_of_sentences(starts, ends, in_a_segment)
    if pairing == "segments":
        a_firsts, b_firsts, b_ends = _gather(ends - starts, bounds, in_a_pair, short_seq_prob, rng)
    else:
        a_firsts, b_firsts, b_ends = _match(bounds, rng)
    # The first token of each segment, and the token after its last (2, pairs).
    a = np.stack([starts[a_firsts], ends[b_firsts - 1]])
    b = np.stack([starts[b_firsts], ends[b_ends - 1]])
    if objective == "nsp":
        a, b, labels = _exchange(a, b, in_a_pair, corpus.ids, rng)
    else:
        a, b, labels = _swap(a, b, in_a_pair, rng)
    alone = bounds[:-1][np.diff(bounds) == 1]
    singles = _segments_of_sentences(starts[alone], ends[alone], in_a_segment)
    return np.concatenate([_as_pairs(*a, *b, labels), singles])


# ---------------------------------------------------------------------------------------------------------------------
# Which sentences make a pair: the first of A, the first of B, and the one after the last of B (pairs,)


def _gather(lengths, bounds, capacity, short_seq_prob, rng):
    """
    The sentences of each pair for the pairing `segments`; `lengths` are those of all sentences, in tokens.

    Half of the pieces are gathered from their end. The sentence that fills a pair is long more often than others: so
    it is as often in A as in B, and the lengths do not tell the order of the two.
    """
    start, stop = bounds[:-1], bounds[1:]
    numbers, counts, is_backward = np.arange(bounds[-1]), stop - start, rng.random(len(start)) < 0.5
    mirrored = np.where(np.repeat(is_backward, counts), np.repeat(start + stop - 1, counts) - numbers, numbers)
    lengths = lengths[mirrored]
    tokens_up_to, found = np.cumsum(lengths), [np.zeros((5, 0), dtype=np.int64)]
    of_piece = np.stack([start, stop, is_backward])[:, counts > 1]
    first = of_piece[0]
    while len(first):
        stop = of_piece[1]
        is_short, shorter, split = rng.random((3, len(first)))
        target = np.where(is_short < short_seq_prob, 2 + (shorter * (capacity - 1)).astype(np.int64), capacity)
        last = np.searchsorted(tokens_up_to, tokens_up_to[first] - lengths[first] + target)
        last = np.clip(last, first + 1, stop - 1)
        last[last == stop - 2] += 1  # one sentence would be left over
        split = first + 1 + (split * (last - first)).astype(np.int64)
        found.append(np.stack([first, split, last + 1, of_piece[0] + stop, of_piece[2]]))
        of_piece, first = of_piece[:, last + 1 < stop], last[last + 1 < stop] + 1
    *spans, mirror, is_backward = np.concatenate(found, axis=1)
    return np.where(is_backward, mirror - np.stack(spans[::-1]), spans)


def _match(bounds, rng):
    """The sentences of each pair for the pairing `sentences`."""
    counts = np.diff(bounds)
    # In half of the documents the second sentence joins the first, so that other sentences are pairs in every epoch.
    skipped = np.where(counts > 2, rng.integers(0, 2, len(counts)), 0)
    pairs = (counts - skipped) // 2
    number = ranges(0, pairs)  # of each pair in its document
    starts, ends = np.repeat(bounds[:-1], pairs), np.repeat(bounds[1:], pairs)
    firsts = starts + 2 * number + np.repeat(skipped, pairs)
    is_last = number == np.repeat(pairs, pairs) - 1
    return np.where(number == 0, starts, firsts), firsts + 1, np.where(is_last, ends, firsts + 2)


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens make a segment


def _kept(a, b, capacity):
    """How many tokens of A and of B stay, so that a pair has at most `capacity` (pairs,): the longer is cut first."""
    a_length, b_length = a[1] - a[0], b[1] - b[0]
    shorter = np.minimum(np.minimum(a_length, b_length), capacity // 2)
    is_too_long = a_length + b_length > capacity
    a_kept = np.where(is_too_long, np.where(a_length > b_length, capacity - shorter, shorter), a_length)
    return a_kept, np.where(is_too_long, capacity - a_kept, b_length)


def _exchange(a, b, capacity, ids, rng):
    """
    Let half of the pairs exchange their Bs: the segments (2, pairs) of the new pairs, and their labels (pairs,).

    Pairs with Bs of about the same length make blocks. In a block every B is cut at its back to the length of the
    shortest, and every A at its front to fit beside it: an exchange changes no length. Half of the pairs of a block
    are drawn at random, and each gets the B of another. So neither segment alone tells the label, nor do the two
    lengths. A true B begins where its A ends. Bs that do not fit beside their own A have blocks of their own: a whole
    B beside an A that is cut would be the B of another pair more often than not.

    A pair whose B stands twice in its block, such as the end of two letters that end alike, keeps it and has no label:
    exchanged for its like, it would be called wrong and be right.
    """
    count = a.shape[1]
    kept = _kept(a, b, capacity)[1]
    order = np.lexsort((kept + rng.random(count), kept < b[1] - b[0]))
    a, b = a[:, order], np.stack([b[0], b[0] + kept])[:, order]
    # The last block has what is left over, too.
    block = np.minimum(np.arange(count) // BLOCK_PAIRS, max(count // BLOCK_PAIRS - 1, 0))
    sizes = np.bincount(block)
    firsts = np.cumsum(sizes) - sizes
    b_length = np.minimum.reduceat(b[1] - b[0], firsts)[block]
    a[0], b[1] = np.maximum(a[0], a[1] - (capacity - b_length)), b[0] + b_length
    is_left_out = _stands_twice(b, block, ids)
    sizes = np.bincount(block[~is_left_out], minlength=len(sizes))
    # The pairs of each block in random order, those that are left out last: the first `exchanged` pairs of it exchange
    # their Bs in a circle.
    exchanged, shuffled = _half(sizes, rng), np.argsort(block + (is_left_out + rng.random(count)) / 2)
    place = np.arange(count) - firsts[block]
    following = np.roll(shuffled, -1)
    following[place == exchanged[block] - 1] = shuffled[firsts[exchanged > 0]]
    is_chosen = place < exchanged[block]
    chosen = shuffled[is_chosen]
    b[:, chosen] = b[:, following[is_chosen]]
    labels = np.full(count, IS_NEXT)
    labels[chosen] = IS_OF_ANOTHER_PAIR
    labels[is_left_out | (sizes[block] == 1)] = NO_LABEL  # a pair alone has none to exchange with
    return a, b, labels


def _stands_twice(b, block, ids):
    """Whether another B (2, pairs) of the same block has the same tokens (pairs,)."""
    places = b[0][:, None] + (b[1] - b[0])[:, None] * np.arange(COMPARED_TOKENS) // COMPARED_TOKENS
    keys = ids[places].astype(np.int64) @ HASH_FACTORS  # modulo 2**64
    order = np.lexsort((keys, block))
    is_same = (np.diff(keys[order]) == 0) & (np.diff(block[order]) == 0)
    found = np.zeros(len(order), dtype=bool)
    found[order[:-1][is_same]] = found[order[1:][is_same]] = True
    return found


def _half(sizes, rng):
    """
    How many pairs of each block exchange Bs: half of them on average, and never one, which has none to exchange with.

    Of 4 pairs 2; of 5 pairs 2 or 3; of 2 pairs none or both.
    """
    exchanged = (sizes + rng.integers(0, 2, len(sizes))) // 2
    return np.where(exchanged == 1, 2 * (sizes > 1) * rng.integers(0, 2, len(sizes)), exchanged)


def _swap(a, b, capacity, rng):
    """
    Swap A and B in half of the pairs: the segments (2, pairs) of the new pairs, and their labels (pairs,).

    Each token is cut at random from the front or the back of its segment, as in BERT's own preparation: what is cut
    does not tell which segment is the first in the text.
    """
    for segment, kept in zip((a, b), _kept(a, b, capacity), strict=True):
        surplus = segment[1] - segment[0] - kept
        from_front = rng.binomial(surplus, 0.5)
        segment += np.stack([from_front, from_front - surplus])
    is_swapped = rng.random(a.shape[1]) < 0.5
    return np.where(is_swapped, b, a), np.where(is_swapped, a, b), np.where(is_swapped, SWAPPED, IN_ORDER)


# ---------------------------------------------------------------------------------------------------------------------
# Single segments


def _segments_of_documents(start, end, capacity, short_seq_prob, rng):
    """Cut each piece into segments of `capacity` tokens; some segments have a random shorter length."""
    is_first, found = end - start > capacity, [np.zeros((2, 0), dtype=np.int64)]
    while len(start):
        is_short, shorter = rng.random((2, len(start)))
        size = np.where(is_first | (is_short < short_seq_prob), 1 + (shorter * capacity).astype(np.int64), capacity)
        segment_end = np.minimum(start + size, end)
        found.append(np.stack([start, segment_end]))
        start, end = segment_end[segment_end < end], end[segment_end < end]
        is_first = np.zeros(len(start), dtype=bool)
    starts, ends = np.concatenate(found, axis=1)
    return _as_pairs(starts, ends, ends, ends, NO_LABEL)


def _segments_of_sentences(starts, ends, capacity):
    """Make each sentence a segment; a sentence of more than `capacity` tokens is cut into several."""
    counts = -(-(ends - starts) // capacity)  # the number of segments of each sentence
    firsts = np.repeat(starts, counts) + ranges(0, counts) * capacity
    ends = np.minimum(firsts + capacity, np.repeat(ends, counts))
    return _as_pairs(firsts, ends, ends, ends, NO_LABEL)


def _as_pairs(a_starts, a_ends, b_starts, b_ends, labels):
    """An array of `PAIR`, from its columns; the keys are 0."""
    pairs = np.zeros(len(a_starts), dtype=PAIR)
    for name, column in zip(PAIR.names, (a_starts, a_ends, b_starts, b_ends, labels), strict=False):
        pairs[name] = column
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# How much of a label one segment alone tells


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
    labels, numbers, accuracies = pairs["next_sentence_label"], np.arange(len(pairs)), []
    for side in "ab":
        starts, ends = pairs[f"{side}_start"], pairs[f"{side}_end"]
        # Four kinds of features, and the pair of each feature. The features of kind k begin at k * `values`.
        kinds = (corpus.ids[ranges(starts, ends)], corpus.ids[starts], corpus.ids[ends - 1], ends - starts)
        pair = np.concatenate([np.repeat(numbers, ends - starts), numbers, numbers, numbers])
        values = max(entries, int((ends - starts).max()) + 1)
        features = np.concatenate([kind.astype(np.int64) + number * values for number, kind in enumerate(kinds)])
        is_second_half, scores = pair >= (len(pairs) + 1) // 2, np.zeros(len(pairs))
        for is_fitted in (is_second_half, ~is_second_half):
            counted = labels[pair[is_fitted]] * 4 * values + features[is_fitted]
            shares = np.bincount(counted, minlength=8 * values).reshape(2, 4, values) + 1.0
            shares = np.log(shares / shares.sum(2, keepdims=True))
            evidence = (shares[1] - shares[0]).ravel()[features[~is_fitted]]
            scores += np.bincount(pair[~is_fitted], evidence, minlength=len(pairs))
        accuracies.append(float(((scores > 0) == labels).mean()))
    return max(accuracies)
