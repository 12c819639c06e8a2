"""Pairs of segments: they fit, true pairs are consecutive text, labels are balanced, no sentence is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_corpora import (
    IS_NEXT,
    IS_RANDOM,
    STEADY_LENGTH,
    Corpus,
    any_pairs,
    assert_balanced,
    both_pairings,
    corpora,
    lengths_of,
    steady_corpus,
)

from d2l_bert.training import pairs as made_by
from d2l_bert.training.pairs import SPECIALS_IN_A_PAIR, SPECIALS_IN_A_SEGMENT


# ---------------------------------------------------------------------------------------------------------------------
# What holds for every pair


@given(any_pairs())
def test_the_longer_span_is_truncated(case):
    corpus, pairs, capacity = case
    for pair, a, b in zip(pairs, *lengths_of(pairs), strict=True):
        whole_a = corpus.are_whole_sentences(pair["a_document"], pair["a_start"], pair["a_end"])
        whole_b = corpus.are_whole_sentences(pair["b_document"], pair["b_start"], pair["b_end"])
        if corpus.are_parts_of_a_sentence(pair):
            continue
        # The shorter span is truncated only if the longer one has one token of each outer sentence left.
        if not whole_a and b > a + 1:
            assert pair["next_sentence_label"] == IS_NEXT, "a random B has nothing to lose"
            assert corpus.has_a_token_of_each_outer_sentence(pair["b_document"], pair["b_start"], pair["b_end"])
        if not whole_b and a > b + 1:
            assert corpus.has_a_token_of_each_outer_sentence(pair["a_document"], pair["a_start"], pair["a_end"])


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def uneven_documents():
    """300 documents of one sentence and 300 longer ones, with sentences of 3 to 29 tokens."""
    rng = np.random.default_rng(0)
    documents = [[int(rng.integers(3, 30))] for _ in range(300)]
    return documents + [rng.integers(3, 30, rng.integers(20, 60)).tolist() for _ in range(300)]


@pytest.mark.parametrize("max_seq_length", [32, 64, 256])
def test_labels_are_balanced_in_spite_of_many_documents_of_one_sentence(max_seq_length):
    assert_balanced(Corpus(uneven_documents()).segment_pairs(max_seq_length))


def is_true_continuation(pair):
    return pair["b_document"] == pair["a_document"] and pair["b_start"] == pair["a_end"]


@both_pairings
def test_a_random_b_from_the_only_document_is_never_the_true_continuation(pairing):
    corpus = Corpus([[3] * 10])  # small, so that chance would often hit the continuation
    made = np.concatenate([corpus.pairs(pairing, STEADY_LENGTH, seed) for seed in range(200)])
    random = made[made["next_sentence_label"] == IS_RANDOM]
    assert len(random) > 100
    assert not any(is_true_continuation(pair) for pair in random)


# ---------------------------------------------------------------------------------------------------------------------
# Segments


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    sentence=st.integers(1, 4),
    sentences_in_a_pair=st.integers(2, 9),
    seed=st.integers(0, 2**32),
)
def test_a_spans_and_true_b_spans_cover_every_document_exactly_once(sizes, sentence, sentences_in_a_pair, seed):
    """Nothing is truncated here. Sentences that a random B replaces are used again in a later pair."""
    corpus = Corpus([[sentence] * size for size in sizes])
    pairs = corpus.segment_pairs(sentences_in_a_pair * sentence + SPECIALS_IN_A_PAIR, seed, short_seq_prob=0)
    for document, size in enumerate(sizes):
        mine = pairs[pairs["a_document"] == document]
        true = mine[mine["next_sentence_label"] == IS_NEXT]
        spans = [*zip(mine["a_start"], mine["a_end"], strict=True), *zip(true["b_start"], true["b_end"], strict=True)]
        covered = [token for start, end in sorted(spans) for token in range(start, end)]
        assert covered == list(range(size * sentence))


def test_segments_fill_the_length_unless_their_document_ends():
    corpus = steady_corpus()
    pairs = corpus.segment_pairs(STEADY_LENGTH, short_seq_prob=0)
    a, b = lengths_of(pairs)
    b_ends_its_document = [pair["b_end"] == corpus.ends[pair["b_document"]][-1] for pair in pairs]
    full = a + b == STEADY_LENGTH - SPECIALS_IN_A_PAIR
    # The last sentence of a document, if left alone, may get a random B; that B fills the length as well.
    assert (full | b_ends_its_document).all()
    assert full.mean() > 0.8


def test_every_boundary_between_a_and_b_is_equally_likely():
    pairs = Corpus([[1] * 20_000]).segment_pairs(8 + SPECIALS_IN_A_PAIR, short_seq_prob=0)
    a, _ = lengths_of(pairs)
    counts = np.bincount(a, minlength=8)
    assert counts[0] == 0 and len(counts) == 8
    expected = len(pairs) / 7
    assert np.abs(counts[1:] - expected).max() < 4 * np.sqrt(expected * 6 / 7)


def test_short_seq_prob_is_the_share_of_short_pairs():
    corpus = Corpus([[1] * 500] * 40)
    capacity = 50

    def share_short(probability):
        pairs = corpus.segment_pairs(capacity + SPECIALS_IN_A_PAIR, short_seq_prob=probability)
        # One in 49 of the lengths drawn from 2 to 50 is the full one. Pairs at the end of a document are short anyway.
        a, b = lengths_of(pairs)
        last = [pair["b_end"] == 500 or pair["a_end"] == 500 for pair in pairs]
        return (a + b < capacity)[~np.array(last)].mean()

    assert share_short(0) == 0
    assert share_short(1) == pytest.approx(48 / 49, abs=0.02)
    assert share_short(0.1) == pytest.approx(0.1 * 48 / 49, abs=0.04)


# ---------------------------------------------------------------------------------------------------------------------
# Sentences

UNTRUNCATED = 24 + SPECIALS_IN_A_PAIR  # twice the longest sentence of `corpora`


@given(corpora(), st.integers(0, 2**32), st.sampled_from(["nsp", "sop", "none"]))
def test_each_sentence_but_the_last_of_its_paragraph_is_segment_a_once(corpus, seed, objective):
    expected = [
        (document, sentence)
        for document, paragraphs in enumerate(corpus.paragraphs)
        for sentence in range(len(corpus.ends[document]))
        if sentence + 1 not in paragraphs or objective == "none"
    ]
    firsts = []
    for pair in corpus.sentence_pairs(UNTRUNCATED, seed, objective=objective):
        spans = {side: (pair[f"{side}_document"], pair[f"{side}_start"], pair[f"{side}_end"]) for side in ("a", "b")}
        if objective == "sop" and spans["a"][1] > spans["b"][1]:
            spans["a"] = spans["b"]
        document, sentence = spans["a"][0], corpus.sentence_at(*spans["a"][:2])
        # A paragraph of one sentence also has that sentence, or half of it, as A.
        if sentence + 1 not in corpus.paragraphs[document] or objective == "none":
            assert corpus.are_whole_sentences(*spans["a"])
            firsts.append((document, sentence))
    assert sorted(firsts) == expected


@given(corpora(), st.integers(0, 2**32))
def test_a_true_pair_of_sentences_is_two_neighbours_of_a_paragraph_or_two_parts_of_a_sentence(corpus, seed):
    for pair in corpus.sentence_pairs(UNTRUNCATED, seed):
        if pair["next_sentence_label"] == IS_NEXT:
            assert is_true_continuation(pair)
            document, first = pair["a_document"], corpus.sentence_at(pair["a_document"], pair["a_start"])
            if corpus.ends[document][first] == pair["a_end"]:
                assert corpus.sentence_at(document, pair["b_start"]) == first + 1
                assert pair["b_end"] == corpus.ends[document][first + 1], "one whole sentence"
                assert first + 1 not in corpus.paragraphs[document], "a paragraph ends between them"
            else:
                assert pair["b_end"] == corpus.ends[document][first], "the rest of the sentence"
        else:
            sentence = corpus.sentence_at(pair["b_document"], pair["b_start"])
            assert pair["b_end"] == corpus.ends[pair["b_document"]][sentence], "one whole sentence"


def covered(corpus, pairs):
    """For each document, an array that says of each token whether some pair contains it."""
    found = [np.zeros(ends[-1], dtype=bool) for ends in corpus.ends]
    for pair in pairs:
        for side in ("a", "b"):
            found[pair[f"{side}_document"]][pair[f"{side}_start"] : pair[f"{side}_end"]] = True
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Sentence order, and no pair objective


@both_pairings
def test_ordered_and_swapped_segments_are_neighbours_and_balanced(pairing):
    pairs = steady_corpus().pairs(pairing, STEADY_LENGTH, objective="sop")
    in_order = pairs["next_sentence_label"] == made_by.IN_ORDER
    assert (pairs["a_document"] == pairs["b_document"]).all()
    assert (pairs["a_end"] == pairs["b_start"])[in_order].all()
    assert (pairs["b_end"] == pairs["a_start"])[~in_order].all()
    assert_balanced(pairs)


@given(corpora(), st.integers(5, 40), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 1.0]))
def test_single_segments_cover_every_document_exactly_once(corpus, capacity, seed, share):
    length = capacity + SPECIALS_IN_A_SEGMENT
    pairs = corpus.segment_pairs(length, seed, objective="none", short_seq_prob=share)
    assert (pairs["next_sentence_label"] == made_by.NO_LABEL).all() and (pairs["b_start"] == pairs["b_end"]).all()
    sizes = pairs["a_end"] - pairs["a_start"]
    assert sizes.min() >= 1 and sizes.max() <= capacity
    for document, ends in enumerate(corpus.ends):
        mine = pairs[pairs["a_document"] == document]
        assert mine["a_start"].tolist() == [0, *mine["a_end"][:-1].tolist()] and mine["a_end"][-1] == ends[-1]
