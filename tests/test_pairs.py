"""Pairs of segments: they fit, true pairs are consecutive text, and nothing but the text tells their labels."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier
from stores import write_store

from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training.data import pairs as made_by
from d2l_bert.training.data.pairs import (
    PAIR,
    SPECIALS_IN_A_PAIR,
    SPECIALS_IN_A_SEGMENT,
    one_segment_accuracy,
)


# ---------------------------------------------------------------------------------------------------------------------
# Corpora whose sentences have given lengths, and the pairs made from them


# As in Hugging Face's BERT; the book's labels are the opposite.
IS_NEXT = 0
NOT_NEXT = 1
NO_LABEL = -100


# A pair as the tests below look at it: documents, and tokens counted from the start of each document.
IN_DOCUMENTS = np.dtype([("a_document", "i8"), ("b_document", "i8"), *PAIR.descr])


class Corpus:
    """Documents of sentences with given lengths in tokens."""

    def __init__(self, documents):
        self.ends = [np.cumsum(lengths) for lengths in documents]
        self.starts = [ends - lengths for ends, lengths in zip(self.ends, documents, strict=True)]
        self.document_starts = np.cumsum([0, *map(len, documents)])
        self.sentence_starts = np.cumsum([0, *itertools.chain.from_iterable(documents)])
        self.first_tokens = self.sentence_starts[self.document_starts[:-1]]
        self.ids = np.arange(self.sentence_starts[-1])  # no two tokens are equal

    def pairs(self, pairing, max_seq_length, seed=0, **options):
        """The pairs that are made of all documents, as `IN_DOCUMENTS`."""
        pieces = (self.document_starts[:-1], self.document_starts[1:])
        rng = np.random.default_rng(seed)
        pairs = made_by.lay_out(self, *pieces, rng, max_seq_length=max_seq_length, pairing=pairing, **options)
        assert pairs.dtype == PAIR
        found = np.zeros(len(pairs), dtype=IN_DOCUMENTS)
        found[list(PAIR.names)] = pairs
        for side in ("a", "b"):
            # An empty B stands where A ends, which may be the end of the corpus.
            token = np.where(pairs["b_end"] > pairs["b_start"], pairs[f"{side}_start"], pairs["a_start"])
            document = np.searchsorted(self.first_tokens, token, side="right") - 1
            found[f"{side}_document"] = document
            found[f"{side}_start"] -= self.first_tokens[document]
            found[f"{side}_end"] -= self.first_tokens[document]
        return found


def lengths_of(pairs):
    return pairs["a_end"] - pairs["a_start"], pairs["b_end"] - pairs["b_start"]


def assert_balanced(labels, tosses=None):
    """Assert that half of the labels are 1, up to four standard errors."""
    standard_error = 0.5 / np.sqrt(tosses or len(labels))
    assert abs(labels.mean() - 0.5) < 4 * standard_error


def steady_corpus(seed=0, documents=60, sentence=3):
    """Thousands of sentences of one length. If the capacity is a multiple of that length, no pair is truncated."""
    rng = np.random.default_rng(seed)
    return Corpus([[sentence] * int(size) for size in rng.integers(2, 150, documents)])


STEADY_LENGTH = 8 * 3 + SPECIALS_IN_A_PAIR  # eight sentences of the steady corpus


def prose(rng, sentences):
    """The lengths of the sentences of a document, which differ as those of prose."""
    return np.maximum(2, rng.lognormal(3, 0.7, sentences)).astype(int)


def short_documents(seed=0, documents=1200):
    """Documents of two to four sentences."""
    rng = np.random.default_rng(seed)
    return Corpus([prose(rng, rng.integers(2, 5)) for _ in range(documents)])


def long_documents(seed=0, documents=120):
    """Documents of sixty sentences."""
    rng = np.random.default_rng(seed)
    return Corpus([prose(rng, 60) for _ in range(documents)])


both_pairings = pytest.mark.parametrize("pairing", ["segments", "sentences"])


@st.composite
def corpora(draw):
    lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)
    return Corpus(draw(st.lists(lengths, min_size=1, max_size=6)))


@st.composite
def any_pairs(draw):
    """A corpus of any shape, its pairs for any objective, and the tokens that a pair may have."""
    corpus = draw(corpora())
    seed = draw(st.integers(0, 2**32))
    capacity = draw(st.integers(5, 40))
    options = {"objective": draw(st.sampled_from(["nsp", "sop"]))}
    pairing = draw(st.sampled_from(["segments", "sentences"]))
    if pairing == "segments":
        options["short_seq_prob"] = draw(st.sampled_from([0.0, 0.1, 1.0]))
    return corpus, corpus.pairs(pairing, capacity + SPECIALS_IN_A_PAIR, seed, **options), capacity


# ---------------------------------------------------------------------------------------------------------------------
# What holds for every pair


def covered(corpus, pairs):
    """For each document, how many segments each token is in. An empty segment has none."""
    found = [np.zeros(ends[-1], dtype=int) for ends in corpus.ends]
    for pair in pairs:
        for side in ("a", "b"):
            found[pair[f"{side}_document"]][pair[f"{side}_start"] : pair[f"{side}_end"]] += 1
    return found


def labelled(pairs):
    return pairs[pairs["next_sentence_label"] != NO_LABEL]


@given(any_pairs())
def test_no_token_is_in_two_segments_and_every_pair_fits(case):
    corpus, pairs, capacity = case
    a, b = lengths_of(pairs)
    is_pair = pairs["next_sentence_label"] != NO_LABEL
    assert (a >= 1).all() and (b[is_pair] >= 1).all()
    alone = capacity + SPECIALS_IN_A_PAIR - SPECIALS_IN_A_SEGMENT
    assert (a + b <= np.where(b > 0, capacity, alone)).all()
    assert max(times.max() for times in covered(corpus, pairs)) <= 1
    for pair in pairs:
        for side in ("a", "b"):
            document = pair[f"{side}_document"]
            assert pair[f"{side}_end"] <= corpus.ends[document][-1]


@pytest.mark.slow
@given(any_pairs())
def test_a_row_without_a_label_is_the_only_sentence_of_a_document(case):
    """Or the only pair of the corpus, which has no other to exchange its B with."""
    corpus, pairs, _ = case
    alone = pairs[pairs["next_sentence_label"] == NO_LABEL]
    if (pairs["b_end"] > pairs["b_start"]).sum() == 1:
        alone = alone[alone["b_end"] == alone["b_start"]]
    times = covered(corpus, alone)
    for ends, of_document in zip(corpus.ends, times, strict=True):
        assert (of_document == (len(ends) == 1)).all()


@given(corpora(), st.integers(5, 40), st.integers(0, 2**32), st.sampled_from(["segments", "sentences"]))
def test_a_true_b_begins_where_a_ends_and_no_other_b_does(corpus, capacity, seed, pairing):
    for pair in labelled(corpus.pairs(pairing, capacity + SPECIALS_IN_A_PAIR, seed)):
        follows = pair["a_document"] == pair["b_document"] and pair["a_end"] == pair["b_start"]
        assert follows == (pair["next_sentence_label"] == IS_NEXT)
        assert pair["a_end"] in corpus.ends[pair["a_document"]], "A is cut at its front alone"
        assert pair["b_start"] in corpus.starts[pair["b_document"]], "B is cut at its back alone"


# ---------------------------------------------------------------------------------------------------------------------
# What does not tell the label


def epochs_of(corpus, pairing, epochs, max_seq_length=64, **options):
    return labelled(np.concatenate([corpus.pairs(pairing, max_seq_length, seed, **options) for seed in range(epochs)]))


def shapes_and_labels(corpus, pairs):
    """The lengths of A and B, whether A is cut at its front and B at its back; and the labels."""
    a, b = lengths_of(pairs)
    front = corpus.first_tokens[pairs["a_document"]] + pairs["a_start"]
    back = corpus.first_tokens[pairs["b_document"]] + pairs["b_end"]
    cuts = [~np.isin(token, corpus.sentence_starts) for token in (front, back)]
    return np.stack([a, b, a + b, *cuts], 1), pairs["next_sentence_label"]


@pytest.mark.slow
@both_pairings
@pytest.mark.parametrize("objective", ["nsp", "sop"])
@pytest.mark.parametrize("make", [short_documents, long_documents])
def test_lengths_and_cuts_do_not_tell_the_label(pairing, objective, make):
    """Boosted trees see the lengths of both segments and what is cut, fitted on one text and tried on another."""

    def drawn(seed):
        text = make(seed)
        return shapes_and_labels(text, epochs_of(text, pairing, 10, objective=objective))

    trees = HistGradientBoostingClassifier(random_state=0).fit(*drawn(seed=1))
    shapes, labels = drawn(seed=2)
    standard_error = 0.5 / np.sqrt(len(labels))
    assert abs(trees.score(shapes, labels) - 0.5) < 4 * standard_error


@both_pairings
@pytest.mark.parametrize("side", ["a", "b"])
def test_the_place_of_a_segment_in_its_document_does_not_tell_the_label(pairing, side):
    """Headings and last sentences are as often in segments of either label."""
    corpus = short_documents()
    pairs = epochs_of(corpus, pairing, 10)
    sizes = np.array([ends[-1] for ends in corpus.ends])[pairs[f"{side}_document"]]
    for found in (pairs[f"{side}_start"] == 0, pairs[f"{side}_end"] == sizes):
        if found.any():
            assert_balanced(pairs["next_sentence_label"][found])


@both_pairings
@pytest.mark.parametrize("documents", [2, 3, 4, 12, 17])
def test_the_labels_are_balanced_in_a_small_text_too(pairing, documents):
    corpus = Corpus([[5, 6]] * documents)
    labels = np.concatenate([corpus.pairs(pairing, 64, seed)["next_sentence_label"] for seed in range(200)])
    assert_balanced(labels, len(labels) / documents)  # blocks are drawn as a whole


@pytest.mark.parametrize("option", [{"pairing": "paragraphs"}, {"objective": "auto"}])
def test_an_unknown_kind_of_pairs_is_no_other_kind(option):
    with pytest.raises(ValueError, match="no pairs are made by the pairing"):
        Corpus([[5, 6]]).pairs(**{"pairing": "segments", "max_seq_length": 64, **option})


@both_pairings
def test_the_only_pair_of_a_text_has_no_label(pairing):
    assert Corpus([[5, 6]]).pairs(pairing, 64)["next_sentence_label"].tolist() == [NO_LABEL]


@both_pairings
def test_texts_that_end_alike_have_no_label(pairing):
    """Half of 400 letters end with the same words: each such end follows each beginning. The others have labels."""
    corpus = Corpus([[8, 6]] * 400)
    corpus.ids.reshape(400, 14)[::2, 8:] = np.arange(6)
    pairs = np.concatenate([corpus.pairs(pairing, 64, seed) for seed in range(20)])
    a_is_alike = pairs["a_document"] % 2 == 0
    b_is_alike = pairs["b_document"] % 2 == 0
    label = pairs["next_sentence_label"]
    has_label = label != NO_LABEL
    assert not (a_is_alike & b_is_alike & (label == NOT_NEXT)).any(), "this B is what follows A"
    assert has_label[b_is_alike].mean() < 0.5
    assert has_label[~b_is_alike].mean() > 0.5
    # What has a label is balanced, whatever the text of either side.
    for found in (a_is_alike, ~a_is_alike, b_is_alike, ~b_is_alike):
        assert_balanced(label[found & has_label])


@both_pairings
def test_a_b_of_another_pair_comes_from_anywhere_in_the_text(pairing):
    pairs = epochs_of(steady_corpus(), pairing, 1, STEADY_LENGTH)
    others = pairs[pairs["next_sentence_label"] == NOT_NEXT]
    sizes = np.bincount(pairs["b_document"]) / len(pairs)
    in_same = (others["a_document"] == others["b_document"]).mean()
    assert in_same < 3 * (sizes**2).sum()  # as often as chance has it: no document is left out


# ---------------------------------------------------------------------------------------------------------------------
# Segments


def test_segments_fill_the_length_unless_their_document_ends():
    corpus = steady_corpus()
    pairs = labelled(corpus.pairs("segments", STEADY_LENGTH, short_seq_prob=0, objective="sop"))
    sizes = np.array([ends[-1] for ends in corpus.ends])[pairs["a_document"]]
    is_first = np.minimum(pairs["a_start"], pairs["b_start"]) == 0  # of a document that is gathered from its end
    is_last = np.maximum(pairs["a_end"], pairs["b_end"]) == sizes
    is_full = sum(lengths_of(pairs)) == STEADY_LENGTH - SPECIALS_IN_A_PAIR
    assert (is_full | is_first | is_last).all() and is_full.mean() > 0.8


def test_every_boundary_between_a_and_b_is_equally_likely():
    corpus = Corpus([[1] * 20_000])
    pairs = corpus.pairs("segments", 8 + SPECIALS_IN_A_PAIR, short_seq_prob=0, objective="sop")
    first = np.where(pairs["next_sentence_label"] == made_by.IN_ORDER, *lengths_of(pairs))
    counts = np.bincount(first, minlength=8)
    expected = len(pairs) / 7
    deviation = np.sqrt(expected * 6 / 7)
    assert counts[0] == 0 and len(counts) == 8
    assert np.abs(counts[1:] - expected).max() < 4 * deviation


@pytest.mark.parametrize(("probability", "tolerance"), [(0, 0), (1, 0.02), (0.1, 0.04)])
def test_short_seq_prob_is_the_share_of_short_pairs(probability, tolerance):
    """One in 49 of the lengths drawn from 2 to 50 is the full one. Pairs at the end of a document are short anyway."""
    corpus = Corpus([[1] * 500] * 40)
    length = 50 + SPECIALS_IN_A_PAIR
    pairs = corpus.pairs("segments", length, short_seq_prob=probability, objective="sop")
    starts = np.minimum(pairs["a_start"], pairs["b_start"])
    ends = np.maximum(pairs["a_end"], pairs["b_end"])
    is_inside = (starts > 0) & (ends < 500)
    a, b = lengths_of(pairs)
    is_short = (a + b)[is_inside] < 50
    assert is_short.mean() == pytest.approx(probability * 48 / 49, abs=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Sentences

UNTRUNCATED = 48 + SPECIALS_IN_A_PAIR  # four times the longest sentence of `corpora`: a segment has at most two


@given(corpora(), st.integers(0, 2**32))
def test_sentences_pair_up_and_none_is_left_out(corpus, seed):
    pairs = labelled(corpus.pairs("sentences", UNTRUNCATED, seed, objective="sop"))
    for document, ends in enumerate(corpus.ends):
        mine = pairs[pairs["a_document"] == document]
        segments_a = zip(mine["a_start"], mine["a_end"], strict=True)
        segments_b = zip(mine["b_start"], mine["b_end"], strict=True)
        spans = sorted([*segments_a, *segments_b])
        if len(ends) == 1:
            assert not spans
            continue
        starts = [start for start, _ in spans]
        stops = [stop for _, stop in spans]
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == ends[-1]
        sentences_before = np.searchsorted(ends, stops) + 1
        counts = np.diff(sentences_before, prepend=0)  # the sentences of each segment
        assert (counts[1:-1] == 1).all(), "only the first and the last take one more"
        assert (counts <= 2).all()


# ---------------------------------------------------------------------------------------------------------------------
# Sentence order, and no pair objective


@both_pairings
def test_ordered_and_swapped_segments_are_neighbours_and_balanced(pairing):
    pairs = steady_corpus().pairs(pairing, STEADY_LENGTH, objective="sop")
    in_order = pairs["next_sentence_label"] == made_by.IN_ORDER
    assert (pairs["a_document"] == pairs["b_document"]).all()
    # A sentence that is left over joins the last pair of its document, which is then truncated by its three tokens.
    after_a = pairs["b_start"] - pairs["a_end"]
    after_b = pairs["a_start"] - pairs["b_end"]
    between = np.where(in_order, after_a, after_b)
    assert (between >= 0).all() and (between <= 3).all()
    assert_balanced(in_order)


@both_pairings
@given(corpora(), st.integers(5, 40), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 1.0]))
def test_single_segments_cover_every_document_exactly_once(pairing, corpus, capacity, seed, share):
    options = {"short_seq_prob": share} if pairing == "segments" else {}
    pairs = corpus.pairs(pairing, capacity + SPECIALS_IN_A_SEGMENT, seed, objective="none", **options)
    assert (pairs["next_sentence_label"] == NO_LABEL).all()
    sizes, of_b = lengths_of(pairs)
    assert sizes.min() >= 1 and sizes.max() <= capacity and not of_b.any()
    for document, ends in enumerate(corpus.ends):
        mine = pairs[pairs["a_document"] == document]
        starts = mine["a_start"].tolist()
        stops = mine["a_end"].tolist()
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == ends[-1]


# ---------------------------------------------------------------------------------------------------------------------
# What one segment alone tells of the label: all of it where it does, chance where it does not


def pairs_of(count, seed):
    """Pairs of two sentences of 9 random tokens each, with random labels; every fifth has no label."""
    rng = np.random.default_rng(seed)
    pairs = np.zeros(count, dtype=PAIR)
    numbers = np.arange(count)
    for name, place in (("a_start", 0), ("a_end", 9), ("b_start", 10), ("b_end", 19)):
        pairs[name] = numbers * 20 + place
    labels = rng.integers(0, 2, count)
    labels[::5] = NO_LABEL
    pairs["next_sentence_label"] = labels
    return pairs, rng.integers(10, 300, 20 * count)


@pytest.mark.parametrize("tells", ["a token of A", "A's first", "B's last", "B's length", "nothing"])
def test_one_segment_alone(tmp_path, tells):
    pairs, ids = pairs_of(2000, seed=1)
    with_label, others = (pairs[pairs["next_sentence_label"] == label] for label in (1, 0))
    if tells == "B's length":
        pairs["b_end"] -= 4 * (pairs["next_sentence_label"] == 1)
    places = {"a token of A": with_label["a_start"] + 4, "A's first": with_label["a_start"]}
    places |= {"B's last": with_label["b_end"] - 1}
    if tells in places:
        ids[places[tells]] = 5
    if tells in ("A's first", "B's last"):  # the others have the token, too, in another place
        ids[others[f"{tells[0].lower()}_start"] + 4] = 5
    corpus = TokenizedCorpus(write_store(tmp_path / "store", [[20] * 2000], ids=ids))
    np.random.default_rng(0).shuffle(pairs)
    found = one_segment_accuracy(corpus, pairs, entries=300)
    if tells == "nothing":
        assert found == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(1600))
    else:
        assert found > 0.8
