"""Documents -> pairs: which sentences and tokens are the two segments, with a label; or single segments without one.

The second loss predicts the label. In next sentence prediction (NSP: BERT, section 3.1; d2l, section 15.9.1.1) it says
whether segment B follows segment A. In sentence order prediction (SOP: ALBERT; Lan et al., 2020) it says whether A and
B are in the order of the text.

A pair is two spans of token numbers and a label. Pairs follow from the ends of sentences; token ids are read only to
find Bs that are equal.

Where a pair begins depends on the pair before: a loop makes the first pairs of all documents at once, then the second
ones, and so on.
"""

from typing import NamedTuple

import numpy as np

from d2l_bert.tokenization.token_store import TokenizedCorpus, ranges


# One pair: segment A has the tokens from a_start to a_end - 1, segment B those from b_start to b_end - 1. Tokens are
# numbered through the corpus. The label is Hugging Face's. A single segment has an empty B. The key is that of the
# pair's masks (`random_numbers.random_keys`): 0 until the pair has its place in an epoch.
# All fields have 8 bytes: NumPy reads unaligned ones more slowly.
PAIR = np.dtype(
    [
        ("a_start", "i8"),
        ("a_end", "i8"),
        ("b_start", "i8"),
        ("b_end", "i8"),
        ("next_sentence_label", "i8"),
        ("key", "u8"),
    ]
)
# The labels of NSP, those of SOP, and that of a pair which has none.
IS_NEXT = 0
IS_OF_ANOTHER_PAIR = 1
IN_ORDER = 0
SWAPPED = 1
NO_LABEL = -100

SPECIALS_IN_A_PAIR = 3  # [CLS] A [SEP] B [SEP]
SPECIALS_IN_A_SEGMENT = 2  # [CLS] A [SEP]

# Pairs with Bs of about the same length, two of which exchange them. Each B is cut to the shortest of its block:
# larger blocks would cut more of a small text.
BLOCK_PAIRS = 4

# Two Bs count as equal if this many of their tokens, evenly spaced, are equal.
COMPARED_TOKENS = 16
# The hash of these tokens is the sum of each id times a random factor.
HASH_FACTORS = np.random.default_rng(0).integers(-(2**62), 2**62, COMPARED_TOKENS)

# The sentences of a pair: A has those from a_first to b_first - 1, B those from b_first to b_end - 1. `piece` is the
# number of their piece of the text.
SENTENCES_OF_A_PAIR = np.dtype([("piece", "i8"), ("a_first", "i8"), ("b_first", "i8"), ("b_end", "i8")])


class Spans(NamedTuple):
    """Segments or sentences (n,): number i has the tokens from `starts[i]` to `ends[i]` - 1."""

    starts: np.ndarray
    ends: np.ndarray

    def lengths(self) -> np.ndarray:
        """The tokens in each (n,)."""
        return self.ends - self.starts

    def at(self, places: np.ndarray) -> "Spans":
        """Those at these places, in the order of the places."""
        return Spans(self.starts[places], self.ends[places])


def tokens_in(pairs: np.ndarray) -> np.ndarray:
    """The tokens in both segments of each pair (n,), without special tokens; `pairs` is an array of `PAIR`."""
    return pairs["a_end"] - pairs["a_start"] + pairs["b_end"] - pairs["b_start"]


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

    Raises:
        ValueError: the pairing or the objective is none of these.
    """
    if pairing not in ("segments", "sentences") or objective not in ("nsp", "sop", "none"):
        raise ValueError(f"no pairs are made by the pairing {pairing!r} and the objective {objective!r}")
    # From here on the sentences of all pieces are numbered from 0: piece i has bounds[i] to bounds[i + 1] - 1.
    bounds = np.append(0, np.cumsum(ends - firsts))
    number_in_corpus = ranges(firsts, ends)  # of each of these sentences
    sentences = Spans(corpus.sentence_starts[number_in_corpus], corpus.sentence_starts[number_in_corpus + 1])
    in_a_segment = max_seq_length - SPECIALS_IN_A_SEGMENT
    in_a_pair = max_seq_length - SPECIALS_IN_A_PAIR
    if objective == "none":
        if pairing == "sentences":
            return _segments_of_sentences(sentences, in_a_segment)
        last_sentences = bounds[1:] - 1
        pieces = Spans(sentences.starts[bounds[:-1]], sentences.ends[last_sentences])
        return _segments_of_pieces(pieces, in_a_segment, short_seq_prob, rng)
    if pairing == "segments":
        chosen = _gather(sentences.lengths(), bounds, in_a_pair, short_seq_prob, rng)
    else:
        chosen = _match(bounds, rng)
    a = Spans(sentences.starts[chosen["a_first"]], sentences.ends[chosen["b_first"] - 1])
    b = Spans(sentences.starts[chosen["b_first"]], sentences.ends[chosen["b_end"] - 1])
    if objective == "nsp":
        pairs = _exchange(a, b, in_a_pair, corpus.ids, rng)
    else:
        pairs = _swap(a, b, in_a_pair, rng)
    is_alone = np.diff(bounds) == 1
    single_sentences = sentences.at(bounds[:-1][is_alone])
    return np.concatenate([pairs, _segments_of_sentences(single_sentences, in_a_segment)])


# ---------------------------------------------------------------------------------------------------------------------
# Which sentences make a pair


def _gather(lengths, bounds, capacity, short_seq_prob, rng):
    """
    The sentences of each pair for the pairing `segments`, as `SENTENCES_OF_A_PAIR`.

    Half of the pieces are gathered from their end. The sentence that fills a pair is long more often than others: so
    it is as often in A as in B, and the lengths do not tell the order of the two.

    A piece is gathered from its end by gathering its mirror image from the start. With the sentences 4 to 8:

        the piece            4 5 6 7 8          its borders:  4 (before sentence 4), 5, 6, 7, 8, 9 (after sentence 8)
        its mirror image     8 7 6 5 4          sentence n has the place 4 + 8 - n, border n the place 4 + 9 - n
        pairs of places      A 4 5, B 6         places from a_first = 4 to b_first = 6, from there to b_end = 7
        in the text          A 6, B 7 8         sentences from 13 - 7 = 6 to 13 - 6 = 7, from there to 13 - 4 = 9

    Args:
        lengths: of all sentences, in tokens.
        bounds: the first sentence of each piece, and the end of the last (pieces + 1,).
    """
    starts = bounds[:-1]
    ends = bounds[1:]
    counts = ends - starts
    is_backward = rng.random(len(starts)) < 0.5
    places = np.arange(bounds[-1])
    mirrored = np.repeat(starts + ends - 1, counts) - places
    sentences = np.where(np.repeat(is_backward, counts), mirrored, places)  # the one at each place
    found = _gather_from_start(lengths[sentences], starts, ends, capacity, short_seq_prob, rng)
    is_mirrored = is_backward[found["piece"]]
    mirrored_pairs = found[is_mirrored]
    sum_of_borders = (starts + ends)[mirrored_pairs["piece"]]  # of a border and its mirror image: 13 above
    pairs = found.copy()
    pairs["a_first"][is_mirrored] = sum_of_borders - mirrored_pairs["b_end"]
    pairs["b_first"][is_mirrored] = sum_of_borders - mirrored_pairs["b_first"]
    pairs["b_end"][is_mirrored] = sum_of_borders - mirrored_pairs["a_first"]
    return pairs


def _gather_from_start(lengths, starts, ends, capacity, short_seq_prob, rng):
    """
    As `_gather`, of pieces that are all gathered from their start: the first pairs of all pieces, then the second
    ones, and so on.

    For example, a piece of five sentences:

        sentence                           0  1  2  3  4
        its tokens                         4  3  5  2  6
        tokens up to its end               4  7 12 14 20

    For a target of 12 tokens, sentence 2 is the last one of the first pair, and B begins with sentence 1 or 2. The
    second pair has the sentences 3 and 4. For a target of 13, sentence 3 would be the last one, and 4 be left over: so
    all five are one pair.
    """
    tokens_up_to = np.cumsum(lengths)
    found = [np.zeros(0, dtype=SENTENCES_OF_A_PAIR)]
    piece = np.flatnonzero(ends - starts > 1)  # the pieces that have sentences left
    first = starts[piece]  # the first sentence that is left of each
    while len(piece):
        end = ends[piece]
        drawn = rng.random((3, len(piece)))  # three numbers for each piece
        short_target = 2 + (drawn[1] * (capacity - 1)).astype(np.int64)
        target = np.where(drawn[0] < short_seq_prob, short_target, capacity)
        tokens_before = tokens_up_to[first] - lengths[first]
        # The sentence that reaches the target is the last one of the pair, ...
        last = np.searchsorted(tokens_up_to, tokens_before + target)
        # ... which has two sentences at least, and none of the next piece.
        last = np.clip(last, first + 1, end - 1)
        # A sentence that would be left over alone joins the pair.
        leaves_one = last == end - 2
        last[leaves_one] += 1
        pairs = np.zeros(len(piece), dtype=SENTENCES_OF_A_PAIR)
        pairs["piece"] = piece
        pairs["a_first"] = first
        pairs["b_first"] = first + 1 + (drawn[2] * (last - first)).astype(np.int64)  # from first + 1 to last
        pairs["b_end"] = last + 1
        found.append(pairs)
        goes_on = last + 1 < end
        piece = piece[goes_on]
        first = last[goes_on] + 1
    return np.concatenate(found)


def _match(bounds, rng):
    """
    The sentences of each pair for the pairing `sentences`, as `SENTENCES_OF_A_PAIR`.

    In half of the pieces the second sentence joins the first one (`skipped` is 1), so that other sentences are pairs
    in every epoch. A sentence that is left over at the end joins the last pair. A piece of five sentences gives

        skipped 0:   A 0, B 1        A 2, B 3 4
        skipped 1:   A 0 1, B 2      A 3, B 4
    """
    counts = np.diff(bounds)
    skipped = np.where(counts > 2, rng.integers(0, 2, len(counts)), 0)
    pairs_of_piece = (counts - skipped) // 2
    piece = np.repeat(np.arange(len(counts)), pairs_of_piece)
    number = ranges(0, pairs_of_piece)  # of each pair in its piece
    first = bounds[piece] + 2 * number + skipped[piece]
    is_last = number == pairs_of_piece[piece] - 1
    pairs = np.zeros(len(piece), dtype=SENTENCES_OF_A_PAIR)
    pairs["piece"] = piece
    pairs["a_first"] = np.where(number == 0, bounds[piece], first)
    pairs["b_first"] = first + 1
    pairs["b_end"] = np.where(is_last, bounds[piece + 1], first + 2)
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Next sentence prediction: half of the pairs exchange their Bs


def _exchange(a, b, capacity, ids, rng):
    """
    Let half of the pairs exchange their Bs, and label them all: an array of `PAIR`.

    Pairs with Bs of about the same length make blocks. In a block every B is cut at its back to the length of the
    shortest, and every A at its front to fit beside it: an exchange changes no length, and a true B still begins where
    its A ends. Half of the pairs of a block are drawn at random, and each gets the B of another. So neither segment
    alone tells the label, nor do the two lengths.

    A pair whose B stands twice in its block, such as the end of two letters that end alike, keeps it and has no label:
    exchanged for its like, it would be called wrong and be right. The other pairs of a block are its candidates for an
    exchange.

    Args:
        a, b: the segments of the pairs, B after A.
        capacity: the most tokens in both.
    """
    a, b, block = _blocks_of_equal_length(a, b, capacity, rng)
    is_candidate = ~_stands_twice(b, block, ids)
    candidates = np.bincount(block, weights=is_candidate).astype(np.int64)  # how many each block has (blocks,)
    gets_b_of = _circles(block, is_candidate, _half(candidates, rng), rng)
    is_exchanged = gets_b_of != np.arange(len(block))
    has_no_other = candidates[block] == 1  # the only candidate of a block has none to exchange with
    labels = np.where(is_exchanged, IS_OF_ANOTHER_PAIR, IS_NEXT)
    labels[~is_candidate | has_no_other] = NO_LABEL
    return _as_pairs(a, b.at(gets_b_of), labels)


def _blocks_of_equal_length(a, b, capacity, rng):
    """
    Put pairs into blocks, and cut the segments so that all Bs of a block have the same length.

    A block of four pairs, for a capacity of 10 tokens:

        the lengths of A and B      3 + 4    9 + 4    5 + 5    2 + 6
        cut                         3 + 4    6 + 4    5 + 4    2 + 4

    Bs that are cut to fit beside their own A have blocks of their own: in a block with whole Bs, the cuts would tell
    labels. If these two pairs shared a block,

        the lengths of A and B      8 + 7    4 + 5
        cut                         5 + 5    4 + 5

    the first A, which begins inside a sentence, would have its own B, which ends inside a sentence, or after an
    exchange the whole B of the second pair: this cut A beside a whole B can arise only by an exchange. (A cut A may
    also have a whole B of its own, as 9 + 4 above: all Bs of its block are whole, and an exchange does not show.)

    Returns:
        The segments A, and B, in the order of their blocks; and the number of each pair's block, ascending.
    """
    count = len(a.starts)
    _, b_length = _lengths_that_fit(a, b, capacity)
    is_cut = b_length < b.lengths()
    order = np.lexsort((b_length + rng.random(count), is_cut))  # by `is_cut`, then by the length, then at random
    a = a.at(order)
    b_starts = b.starts[order]
    b_length = b_length[order]
    last_block = max(count // BLOCK_PAIRS - 1, 0)  # the pairs that are left over join it
    block = np.minimum(np.arange(count) // BLOCK_PAIRS, last_block)
    shortest_b = np.minimum.reduceat(b_length, _first_of_each(block))[block]  # of the block of each pair (pairs,)
    a_starts = np.maximum(a.starts, a.ends - (capacity - shortest_b))
    return Spans(a_starts, a.ends), Spans(b_starts, b_starts + shortest_b), block


def _first_of_each(block):
    """The first pair of each block (blocks,), from the block of each pair, ascending (pairs,)."""
    sizes = np.bincount(block)
    return np.cumsum(sizes) - sizes


def _lengths_that_fit(a, b, capacity):
    """
    How many tokens of A and of B stay, so that a pair has at most `capacity` (pairs,): the longer is cut first.

    For a capacity of 11:

        A + B that fit stay whole                                       4 + 7  ->  4 + 7
        the longer is cut to what the shorter leaves                    9 + 4  ->  7 + 4
        of two that are longer than a half each, both are cut to it     9 + 8  ->  6 + 5,   8 + 9  ->  5 + 6
    """
    a_length = a.lengths()
    b_length = b.lengths()
    of_shorter = np.minimum(np.minimum(a_length, b_length), capacity // 2)
    of_longer = capacity - of_shorter
    fits = a_length + b_length <= capacity
    is_a_longer = a_length > b_length
    a_kept = np.where(fits, a_length, np.where(is_a_longer, of_longer, of_shorter))
    b_kept = np.where(fits, b_length, np.where(is_a_longer, of_shorter, of_longer))
    return a_kept, b_kept


def _stands_twice(b, block, ids):
    """Whether another B of the same block has the same tokens (pairs,)."""
    offsets = b.lengths()[:, None] * np.arange(COMPARED_TOKENS) // COMPARED_TOKENS  # in B, of the compared tokens
    hashes = ids[b.starts[:, None] + offsets].astype(np.int64) @ HASH_FACTORS  # modulo 2**64
    order = np.lexsort((hashes, block))  # by the block, then by the hash: equal Bs are neighbours
    is_same_as_next = (np.diff(hashes[order]) == 0) & (np.diff(block[order]) == 0)
    found = np.zeros(len(order), dtype=bool)
    found[order[:-1][is_same_as_next]] = True
    found[order[1:][is_same_as_next]] = True
    return found


def _half(candidates, rng):
    """
    How many of the candidates of each block exchange their Bs (blocks,): half of them on average, and never one, which
    would have no other to exchange with.

        candidates   1   2        3        4   5        6   7
        exchange     0   0 or 2   0 or 2   2   2 or 3   3   3 or 4
    """
    half = (candidates + rng.integers(0, 2, len(candidates))) // 2  # an odd number is rounded up or down at random
    none_or_two = 2 * rng.integers(0, 2, len(candidates))
    none_or_two[candidates == 1] = 0
    return np.where(half == 1, none_or_two, half)


def _circles(block, is_candidate, circle_size, rng):
    """
    The number of the pair whose B each pair gets (pairs,); its own where it keeps its B.

    The pairs of a block are shuffled, its candidates first. The first of them, as many as exchange their Bs, form a
    circle: each gets the B of the next one, and the last one that of the first. If three pairs of five exchange:

        pairs, shuffled    2 0 4 1 3
        get the B of       0 4 2 1 3

    Args:
        block: the number of each pair's block, ascending (pairs,).
        is_candidate: whether a pair may exchange its B (pairs,).
        circle_size: how many pairs of each block exchange their Bs (blocks,).
    """
    count = len(block)
    firsts = _first_of_each(block)
    # The whole part of a number is the block; the fraction is random, below 1/2 for candidates and above for others.
    sort_numbers = block + (~is_candidate + rng.random(count)) / 2
    shuffled = np.argsort(sort_numbers)
    place = np.arange(count) - firsts[block]  # in the shuffled block
    is_in_circle = place < circle_size[block]
    is_last_in_circle = place == circle_size[block] - 1
    following = np.roll(shuffled, -1)  # the next pair in the shuffled order; ...
    following[is_last_in_circle] = shuffled[firsts[circle_size > 0]]  # ... after the last of a circle, its first
    gets_b_of = np.arange(count)
    gets_b_of[shuffled[is_in_circle]] = following[is_in_circle]
    return gets_b_of


# ---------------------------------------------------------------------------------------------------------------------
# Sentence order prediction: half of the pairs are swapped


def _swap(a, b, capacity, rng):
    """
    Swap A and B in half of the pairs, and label them all: an array of `PAIR`.

    Each token is cut at random from the front or the back of its segment, as in BERT's own preparation: what is cut
    does not tell which segment is the first in the text.
    """
    a_length, b_length = _lengths_that_fit(a, b, capacity)
    a = _cut_at_random(a, a_length, rng)
    b = _cut_at_random(b, b_length, rng)
    is_swapped = rng.random(len(a.starts)) < 0.5
    first = Spans(np.where(is_swapped, b.starts, a.starts), np.where(is_swapped, b.ends, a.ends))
    second = Spans(np.where(is_swapped, a.starts, b.starts), np.where(is_swapped, a.ends, b.ends))
    return _as_pairs(first, second, np.where(is_swapped, SWAPPED, IN_ORDER))


def _cut_at_random(segments, lengths, rng):
    """Segments of these lengths: what is too much is cut from the front and the back, token by token at random."""
    surplus = segments.lengths() - lengths
    from_front = rng.binomial(surplus, 0.5)
    from_back = surplus - from_front
    return Spans(segments.starts + from_front, segments.ends - from_back)


# ---------------------------------------------------------------------------------------------------------------------
# Single segments


def _segments_of_pieces(pieces, capacity, short_seq_prob, rng):
    """Cut each piece into segments of `capacity` tokens; some segments have a random shorter length."""
    starts = [np.zeros(0, dtype=np.int64)]
    ends = [np.zeros(0, dtype=np.int64)]
    rest = pieces  # what is not cut yet, of the pieces of which something is left
    has_random_length = rest.lengths() > capacity  # the first segment of a long piece has, too
    while len(rest.starts):
        drawn = rng.random((2, len(rest.starts)))  # two numbers for each piece
        has_random_length |= drawn[0] < short_seq_prob
        random_length = 1 + (drawn[1] * capacity).astype(np.int64)
        length = np.where(has_random_length, random_length, capacity)
        segment_ends = np.minimum(rest.starts + length, rest.ends)
        starts.append(rest.starts)
        ends.append(segment_ends)
        goes_on = segment_ends < rest.ends
        rest = Spans(segment_ends[goes_on], rest.ends[goes_on])
        has_random_length = np.zeros(len(rest.starts), dtype=bool)
    return _without_b(Spans(np.concatenate(starts), np.concatenate(ends)))


def _segments_of_sentences(sentences, capacity):
    """Make each sentence a segment; a sentence of more than `capacity` tokens is cut into several."""
    segments_of_sentence = -(-sentences.lengths() // capacity)  # rounded up
    number = ranges(0, segments_of_sentence)  # of each segment in its sentence
    starts = np.repeat(sentences.starts, segments_of_sentence) + number * capacity
    ends = np.minimum(starts + capacity, np.repeat(sentences.ends, segments_of_sentence))
    return _without_b(Spans(starts, ends))


def _without_b(segments):
    """An array of `PAIR` with these As, and neither Bs nor labels."""
    return _as_pairs(segments, Spans(segments.ends, segments.ends), NO_LABEL)


def _as_pairs(a, b, labels):
    """An array of `PAIR`, from its columns; the keys are 0."""
    pairs = np.zeros(len(a.starts), dtype=PAIR)
    pairs["a_start"] = a.starts
    pairs["a_end"] = a.ends
    pairs["b_start"] = b.starts
    pairs["b_end"] = b.ends
    pairs["next_sentence_label"] = labels
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# How much of a label one segment alone tells

KINDS_OF_FEATURES = 4


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
    labelled = np.sort(pairs[pairs["next_sentence_label"] != NO_LABEL], order="a_start")
    if len(labelled) < 2:
        return 0.5
    labels = labelled["next_sentence_label"]
    accuracies = []
    for side in "ab":
        segments = Spans(labelled[f"{side}_start"], labelled[f"{side}_end"])
        features, pair, values = _features(corpus, segments, entries)
        scores = np.zeros(len(labelled))
        is_second_half = pair >= (len(labelled) + 1) // 2
        for is_fitted in (is_second_half, ~is_second_half):
            evidence = _evidence(features[is_fitted], labels[pair[is_fitted]], values)
            evidence_of_others = evidence[features[~is_fitted]]
            scores += np.bincount(pair[~is_fitted], evidence_of_others, minlength=len(labelled))
        accuracies.append(float(((scores > 0) == labels).mean()))
    return max(accuracies)


def _features(corpus, segments, entries):
    """
    What the classifier sees of each segment: its tokens, its first and its last token, and its length.

    Returns:
        The features, as numbers (n,): those of kind k begin at k * `values`. The number of each feature's segment
        (n,). And `values`, which is more than the largest token id and length.
    """
    lengths = segments.lengths()
    numbers = np.arange(len(lengths))
    values = max(entries, int(lengths.max()) + 1)
    tokens = corpus.ids[ranges(segments.starts, segments.ends)].astype(np.int64)
    first_tokens = corpus.ids[segments.starts].astype(np.int64)
    last_tokens = corpus.ids[segments.ends - 1].astype(np.int64)
    features = np.concatenate([tokens, first_tokens + values, last_tokens + 2 * values, lengths + 3 * values])
    of_segment = np.concatenate([np.repeat(numbers, lengths), numbers, numbers, numbers])
    return features, of_segment, values


def _evidence(features, labels, values):
    """By how much each feature speaks for label 1: the logarithm of its share there, minus that with label 0."""
    of_a_label = KINDS_OF_FEATURES * values
    counts = np.bincount(labels * of_a_label + features, minlength=2 * of_a_label)
    smoothed = counts.reshape(2, KINDS_OF_FEATURES, values) + 1.0
    log_shares = np.log(smoothed / smoothed.sum(2, keepdims=True))
    return (log_shares[1] - log_shares[0]).ravel()
